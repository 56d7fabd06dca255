/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Buffers that are DMA-mapped once and named by a tag afterwards.
 *
 * Documentation/block/dma-premap.rst describes how they are used.
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

/* The unit in which positions in a tag are counted, whatever PAGE_SIZE is */
#define DMA_TAG_SHIFT	12
#define DMA_TAG_SIZE	4096U

/**
 * struct dma_tag_ops - what the driver that made a tag can do with it
 * @unmap: undo the mapping and free the tag.  Called once, when no request can
 *	name the tag any more and before the pages are unpinned.  May sleep.
 */
struct dma_tag_ops {
	void (*unmap)(struct dma_tag *tag);
};

/**
 * struct dma_tag - a buffer that is mapped for one device
 * @ops: the driver's operations
 * @queue: the only queue that may see the tag
 * @file: the only file it may be used with; set by the caller of ->dma_map()
 * @bvec: the pages it was made from, NULL for a dma-buf
 * @nr_bvecs: number of elements of @bvec
 * @len: length in bytes
 * @nr_pages: pages of memory that the driver holds for the mapping itself
 * @first: offset of the first byte in its first DMA_TAG_SIZE bytes
 * @dir: direction of the mapping
 * @live: the device can reach the buffer; cleared only when @queue is dead
 * @needs_sync: bytes have to be synced for each request
 *
 * The driver embeds this in its own object.  There is no reference count: the
 * owner of a tag unmaps it when no request can name it any more.
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
 * struct dma_tag_src - what ->dma_map() shall map
 * @bvec: pinned pages; only the first may start, and only the last may end,
 *	inside a page
 * @nr_bvecs: number of elements of @bvec
 * @dmabuf: a dma-buf instead of @bvec
 * @offset: start in @dmabuf in bytes, a multiple of DMA_TAG_SIZE
 * @len: length in bytes
 * @dir: what the device may do with the memory
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
