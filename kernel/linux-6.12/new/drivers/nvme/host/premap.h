/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Buffers that are mapped for an NVMe controller once, with their PRP lists.
 */
#ifndef _NVME_PREMAP_H
#define _NVME_PREMAP_H

#include <linux/blk-mq.h>
#include <linux/dma-tag.h>
#include <linux/list.h>
#include <linux/mutex.h>

/* A PRP list page: addresses, and in its last slot the next page */
#define NVME_PREMAP_SLOTS	(DMA_TAG_SIZE / sizeof(__le64) - 1)

struct dma_buf_attachment;
struct device;
struct nvme_ctrl;
struct nvme_rw_command;
struct sg_table;

/**
 * struct nvme_premap_dev - the maps of a controller
 * @dev: the device they are made for
 * @ctrl: the controller
 * @lock: protects the rest
 * @maps: all that are live
 * @bytes: their length
 * @gone: the driver is being unbound
 */
struct nvme_premap_dev {
	struct device		*dev;
	struct nvme_ctrl	*ctrl;
	struct mutex		lock;	/* protects the rest */
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
 * @tag: what the block layer knows of it
 * @pd: the controller it is mapped for
 * @node: in @pd->maps
 * @sgt: the mapping: @own or the attachment's
 * @own: of a registered buffer
 * @attach: of a dma-buf
 * @lists: the pages of the list, one behind the other
 * @nr_lists: their number
 * @run_shift: aligned blocks of 1 << run_shift entries are contiguous
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
 * struct nvme_premap_range - the part of a map that a request transfers
 * @map: the map
 * @first: index of its first entry
 * @nr: number of entries
 * @offset: of the first byte in the first entry
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

/* Whether the device can reach all of the range from its first address on */
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
