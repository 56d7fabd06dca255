/* SPDX-License-Identifier: GPL-2.0-only */
/* Bytes between a dma-buf and a file, by the exporter whose memory it is. */
#ifndef _LINUX_DMA_BUF_RW_H
#define _LINUX_DMA_BUF_RW_H

#include <linux/types.h>

struct dma_buf;
struct dmafile_pages;
struct file;
struct iov_iter;
struct kiocb;

/**
 * struct dma_buf_rw - what &dma_buf_ops.rw_file shall do
 * @file: the other side
 * @pos: the first byte in @file
 * @iter: the other side where there is no @file: memory to copy from
 * @at: the first byte in the buffer
 * @len: how many; the range lies in the buffer
 * @write: from the buffer to the file
 */
struct dma_buf_rw {
	struct file *file;
	loff_t pos;
	struct iov_iter *iter;
	u64 at;
	size_t len;
	bool write;
};

ssize_t dma_buf_rw_pages(struct dma_buf *dmabuf, const struct dma_buf_rw *rw,
			 struct dmafile_pages *pages);
ssize_t dma_buf_rw_file(struct file *buffer, loff_t at, struct file *file, loff_t pos, size_t len,
			bool write);
ssize_t dma_buf_write_iter(struct kiocb *iocb, struct iov_iter *from);

#endif /* _LINUX_DMA_BUF_RW_H */
