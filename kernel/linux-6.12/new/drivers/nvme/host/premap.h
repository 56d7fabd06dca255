/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Pre-mapped buffers: DMA-mapped once for an NVMe controller, with stored PRP lists
 */
#ifndef _NVME_PREMAP_H
#define _NVME_PREMAP_H

#include <linux/blk-mq.h>
#include <linux/dma-tag.h>
#include <linux/list.h>
#include <linux/mutex.h>

/* Address slots of a PRP list page; the last slot links to the next page. */
#define NVME_PREMAP_SLOTS	(DMA_TAG_SIZE / sizeof(__le64) - 1)

struct dma_buf_attachment;
struct device;
struct nvme_ctrl;
struct nvme_rw_command;
struct sg_table;

/**
 * struct nvme_premap_dev - the pre-mapped buffers of a controller
 * @dev: the device that they are mapped for
 * @ctrl: the controller
 * @lock: protects the members below
 * @maps: list of all live mappings
 * @bytes: their total length
 * @gone: the driver is being unbound
 */
struct nvme_premap_dev {
	struct device		*dev;
	struct nvme_ctrl	*ctrl;
	struct mutex		lock;	/* protects the members below */
	struct list_head	maps;
	u64			bytes;
	bool			gone;
};

struct nvme_premap_list {
	__le64		*prp;
	dma_addr_t	dma;
};

/**
 * struct nvme_premap - a buffer and its PRP list
 * @tag: the tag that the block layer uses
 * @pd: the controller that it is mapped for
 * @node: entry in @pd->maps
 * @sgt: the mapping: @own, or that of the attachment
 * @own: scatterlist of a registered buffer
 * @attach: attachment to a dma-buf
 * @lists: the pages of the PRP list, in order
 * @nr_lists: number of elements of @lists
 * @run_shift: aligned groups of 1 << @run_shift entries are contiguous
 */
struct nvme_premap {
	struct dma_tag			tag;
	struct nvme_premap_dev		*pd;
	struct list_head		node;
	struct sg_table			*sgt;
	struct sg_table			own;
	struct dma_buf_attachment	*attach;
	struct nvme_premap_list		*lists;
	unsigned int			nr_lists;
	u8				run_shift;
};

/**
 * struct nvme_premap_range - the part of a mapping that a request transfers
 * @map: the mapping
 * @first: index of the first PRP entry
 * @nr: number of PRP entries
 * @offset: offset of the first byte in the first entry
 */
struct nvme_premap_range {
	struct nvme_premap	*map;
	unsigned int		first;
	unsigned int		nr;
	unsigned int		offset;
};

static inline u64 nvme_premap_addr(const struct nvme_premap *map,
				   unsigned int k)
{
	return le64_to_cpu(map->lists[k / NVME_PREMAP_SLOTS]
			   .prp[k % NVME_PREMAP_SLOTS]);
}

static inline void nvme_premap_range(struct request *req,
				     struct nvme_premap_range *r)
{
	const struct bio *bio = req->bio;

	r->map = container_of(bio->bi_dma_tag, struct nvme_premap, tag);
	r->first = bio->bi_iter.bi_idx;
	r->offset = bio->bi_iter.bi_bvec_done;
	r->nr = (r->offset + blk_rq_bytes(req) - 1) / DMA_TAG_SIZE + 1;
}

/* Whether the DMA addresses of the range are contiguous */
static inline bool nvme_premap_contiguous(const struct nvme_premap_range *r)
{
	return (r->first ^ (r->first + r->nr - 1)) >> r->map->run_shift == 0;
}

bool nvme_premap_setup_prps(const struct nvme_premap_range *r,
			    struct nvme_rw_command *cmnd);
void nvme_premap_sync_for_device(struct request *req);
void nvme_premap_sync_for_cpu(struct request *req);

void nvme_premap_init(struct nvme_premap_dev *pd, struct device *dev,
		      struct nvme_ctrl *ctrl);
void nvme_premap_remove(struct nvme_premap_dev *pd);
struct dma_tag *nvme_premap_map(struct nvme_premap_dev *pd,
				struct request_queue *q,
				const struct dma_tag_src *src);

#endif /* _NVME_PREMAP_H */
