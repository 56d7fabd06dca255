/* SPDX-License-Identifier: GPL-2.0 */
#ifndef IOU_PREMAP_H
#define IOU_PREMAP_H

#include <linux/dma-tag.h>
#include <linux/uio.h>

/**
 * struct io_premap - a registered buffer that is mapped for a file
 * @tag: the driver's tag; this structure owns the reference to @tag->file
 * @imu: the buffer
 * @drop: spare resource node to remove the mapping before the buffer, allocated in
 *	advance so that the removal cannot fail
 * @list: entry in io_ring_ctx->premaps, unless the removal is queued
 * @start: address of the first byte as used in requests: 0 for a dma-buf
 * @len: length in bytes
 * @fixed: index of the registered file that it was mapped for, or -1
 * @acct_pages: number of pages accounted for the mapping itself
 */
struct io_premap {
	struct dma_tag		*tag;
	struct io_mapped_ubuf	*imu;
	struct io_rsrc_node	*drop;
	struct list_head	list;
	u64			start;
	u64			len;
	int			fixed;
	unsigned long		acct_pages;
};

int io_sqe_buffers_update_extended(struct io_ring_ctx *ctx,
				   struct io_uring_rsrc_update2 *up,
				   unsigned int nr_args);
void io_premap_free(struct io_ring_ctx *ctx, struct io_premap *pm);
void io_premap_removal(struct io_rsrc_data *data, unsigned int idx, void *rsrc);
void io_premap_drop_files(struct io_ring_ctx *ctx);
bool io_premap_any(struct io_ring_ctx *ctx);
void io_premap_show(struct seq_file *m, unsigned int i,
		    const struct io_premap *pm);
int io_premap_import(int ddir, struct iov_iter *iter, struct io_mapped_ubuf *imu,
		     u64 addr, size_t len);

#endif
