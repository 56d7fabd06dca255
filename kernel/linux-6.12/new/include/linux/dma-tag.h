/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Buffers that are DMA-mapped once and then identified by a tag.
 *
 * See Documentation/block/dma-premap.rst.
 */
#ifndef _LINUX_DMA_TAG_H
#define _LINUX_DMA_TAG_H

#include <linux/dma-direction.h>
#include <linux/types.h>

struct bio_vec;
struct dma_buf;
struct dma_tag;
struct file;
struct request_queue;

/* The unit of positions in a tag, independent of PAGE_SIZE */
#define DMA_TAG_SHIFT	12
#define DMA_TAG_SIZE	4096U

/**
 * struct dma_tag_ops - operations of the driver that created a tag
 * @unmap: undo the mapping and free the tag.  Called once, when no request can
 *	use the tag any more and before the pages are unpinned.  May sleep.
 */
struct dma_tag_ops {
	void (*unmap)(struct dma_tag *tag);
};

/**
 * struct dma_tag - a buffer that is mapped for one device
 * @ops: the driver's operations
 * @queue: the only queue that the tag may be used with
 * @file: the only file that it may be used with; set by the caller of ->dma_map()
 * @bvec: the pages of the buffer, NULL for a dma-buf
 * @nr_bvecs: number of elements of @bvec
 * @len: length in bytes
 * @nr_pages: number of pages that the driver allocated for the mapping itself
 * @first: offset of the first byte in the first unit of DMA_TAG_SIZE bytes
 * @dir: direction of the mapping
 * @live: the device can access the buffer; cleared only when @queue is dead
 * @needs_sync: the data has to be synced for each request
 *
 * The driver embeds this structure in its own.  There is no reference count: the
 * owner of a tag unmaps it when no request can use it any more.
 */
struct dma_tag {
	const struct dma_tag_ops	*ops;
	struct request_queue		*queue;
	struct file			*file;
	const struct bio_vec		*bvec;
	unsigned int			nr_bvecs;
	size_t				len;
	unsigned long			nr_pages;
	u32				first;
	enum dma_data_direction		dir;
	bool				live;
	bool				needs_sync;
};

/**
 * struct dma_tag_src - the memory to be mapped by ->dma_map()
 * @bvec: pinned pages; only the first segment may start, and only the last may
 *	end, inside a page
 * @nr_bvecs: number of elements of @bvec
 * @dmabuf: the dma-buf to map instead of @bvec, or NULL
 * @offset: start in @dmabuf in bytes, a multiple of DMA_TAG_SIZE
 * @len: length in bytes
 * @dir: direction of the DMA that the device may do
 */
struct dma_tag_src {
	const struct bio_vec	*bvec;
	unsigned int		nr_bvecs;
	struct dma_buf		*dmabuf;
	u64			offset;
	u64			len;
	enum dma_data_direction	dir;
};

#endif /* _LINUX_DMA_TAG_H */
