/* SPDX-License-Identifier: GPL-2.0-only */
/* Bytes between a dma-buf and a file, by the exporter whose memory it is. */
#ifndef _LINUX_DMA_BUF_RW_H
#define _LINUX_DMA_BUF_RW_H

#include <linux/types.h>

struct dma_buf;
struct dmafile_pages;
struct file;
struct pipe_inode_info;

/**
 * struct dma_buf_rw - what &dma_buf_ops.rw_file shall do
 * @file: the other side
 * @pos: the first byte in @file
 * @pipe: the other side where there is no @file: what to take bytes from
 * @flags: of splice(2), for @pipe
 * @at: the first byte in the buffer
 * @len: how many; the range lies in the buffer
 * @write: from the buffer to the file
 */
struct dma_buf_rw {
	struct file *file;
	loff_t pos;
	struct pipe_inode_info *pipe;
	unsigned int flags;
	u64 at;
	size_t len;
	bool write;
};

ssize_t dma_buf_rw_pages(struct dma_buf *dmabuf, const struct dma_buf_rw *rw,
			 struct dmafile_pages *pages);
ssize_t dma_buf_rw_file(struct file *buffer, loff_t at, struct file *file, loff_t pos, size_t len,
			bool write);
ssize_t dma_buf_splice_write(struct pipe_inode_info *pipe, struct file *buffer, loff_t *pos,
			     size_t len, unsigned int flags);

#endif /* _LINUX_DMA_BUF_RW_H */
