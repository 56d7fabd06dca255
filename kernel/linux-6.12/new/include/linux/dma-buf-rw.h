/* SPDX-License-Identifier: GPL-2.0-only */
/* Transfers between a dma-buf and a file, done by the exporter of the dma-buf. */
#ifndef _LINUX_DMA_BUF_RW_H
#define _LINUX_DMA_BUF_RW_H

#include <linux/types.h>

struct dma_buf;
struct dmafile_pages;
struct file;
struct pipe_inode_info;
struct rw_semaphore;

/**
 * struct dma_buf_rw - a request for &dma_buf_ops.rw_file
 * @file: the file to read or write
 * @pos: the offset in @file
 * @pipe: the pipe to read instead of @file, or NULL
 * @flags: flags of splice(2), for @pipe
 * @at: the offset in the buffer
 * @len: the number of bytes; the range lies within the buffer
 * @write: true to write the buffer to the file, false to fill the buffer
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
			 struct dmafile_pages *pages, struct rw_semaphore *lock);
ssize_t dma_buf_copy_file_range(struct file *in, loff_t pos_in, struct file *out, loff_t pos_out,
				size_t len, unsigned int flags);
ssize_t dma_buf_splice_write(struct pipe_inode_info *pipe, struct file *buffer, loff_t *pos,
			     size_t len, unsigned int flags);

#endif /* _LINUX_DMA_BUF_RW_H */
