// SPDX-License-Identifier: GPL-2.0-only
/*
 * Transfers between a dma-buf and a file, done by the exporter of the dma-buf.
 *
 * Only the exporter knows the pages. Its rw_file() passes them to dma_buf_rw_pages(), which uses
 * them until it returns. No other code takes pages from a scatter-gather table.
 */
#include <linux/dma-buf.h>
#include <linux/dma-buf-rw.h>
#include <linux/dma-resv.h>
#include <linux/dmafile/io.h>
#include <linux/fs.h>
#include <linux/highmem.h>
#include <linux/memory_copy.h>
#include <linux/mm.h>
#include <linux/pipe_fs_i.h>
#include <linux/rwsem.h>
#include <linux/sched/signal.h>
#include <linux/splice.h>

/* The maximum number of gathers in flight, and their maximum size in MiB. */
#define DMA_BUF_RW_DEPTH	4
#define DMA_BUF_RW_GATHER	128

static ssize_t dma_buf_rw_transfer(const struct dma_buf_rw *rw, struct dmafile_pages *pages)
{
	struct dmafile_io io = {
		.file = rw->file,
		.pages = pages,
		.pos = rw->pos,
		.at = rw->at,
		.len = rw->len,
		.gather = dmafile_gather(rw->len, DMA_BUF_RW_GATHER),
		.depth = DMA_BUF_RW_DEPTH,
		.max_order = DMAFILE_MAX_ORDER,
		.write = rw->write,
	};
	int err = dmafile_transfer(&io);

	return io.done ?: err;
}

/* A buffer may be filled only in part: preserve what devices have written to the rest. */
static enum dma_data_direction dma_buf_rw_direction(bool fill)
{
	return fill ? DMA_BIDIRECTIONAL : DMA_FROM_DEVICE;
}

/* If the buffer is only read, it is enough to wait for devices that write to it. */
static int dma_buf_rw_begin(struct dma_buf *dmabuf, bool fill)
{
	/* Wait first: begin_cpu_access() makes only completed device writes visible. */
	long left = dma_resv_wait_timeout(dmabuf->resv, dma_resv_usage_rw(fill), true,
					  MAX_SCHEDULE_TIMEOUT);

	return left < 0 ? left : dma_buf_begin_cpu_access(dmabuf, dma_buf_rw_direction(fill));
}

/* If data was transferred, its size is returned even if this fails. */
static ssize_t dma_buf_rw_end(struct dma_buf *dmabuf, bool fill, ssize_t done)
{
	int err = dma_buf_end_cpu_access(dmabuf, dma_buf_rw_direction(fill));

	return done ?: err;
}

/**
 * struct dma_buf_rw_target - the destination of a splice from a pipe
 * @desc: the splice descriptor
 * @pages: the memory of the buffer
 * @at: the offset of the next byte in the buffer
 */
struct dma_buf_rw_target {
	struct splice_desc desc;
	const struct dmafile_pages *pages;
	u64 at;
};

static int dma_buf_rw_take(struct pipe_inode_info *pipe, struct pipe_buffer *buf,
			   struct splice_desc *desc)
{
	struct dma_buf_rw_target *target = container_of(desc, struct dma_buf_rw_target, desc);
	size_t offset = buf->offset, left = desc->len;

	while (left) {
		struct page *from = nth_page(buf->page, offset >> PAGE_SHIFT);
		struct page *to = dmafile_pages_page(target->pages, target->at);
		size_t step = min3(left, PAGE_SIZE - offset_in_page(offset),
				   PAGE_SIZE - offset_in_page(target->at));

		memcpy_page(to, offset_in_page(target->at), from, offset_in_page(offset), step);
		target->at += step;
		offset += step;
		left -= step;
	}
	return desc->len;
}

/* Return: 1 if the pipe has data, 0 if it is empty and has no writers, or an error. */
static int dma_buf_rw_pipe_wait(struct pipe_inode_info *pipe, unsigned int flags)
{
	int ret = 1;

	pipe_lock(pipe);
	while (ret > 0 && pipe_empty(pipe->head, pipe->tail)) {
		if (!pipe->writers)
			ret = 0;
		else if (flags & SPLICE_F_NONBLOCK)
			ret = -EAGAIN;
		else if (signal_pending(current))
			ret = -ERESTARTSYS;
		else
			pipe_wait_readable(pipe);
	}
	pipe_unlock(pipe);
	return ret;
}

/*
 * Waits for the pipe before begin_cpu_access(), not after: while the pipe is empty, a device may
 * write to the buffer, and end_cpu_access() could overwrite that data.
 */
static ssize_t dma_buf_rw_splice(struct dma_buf *dmabuf, const struct dma_buf_rw *rw,
				 const struct dmafile_pages *pages)
{
	struct dma_buf_rw_target target = {
		.desc = { .total_len = rw->len, .flags = rw->flags | SPLICE_F_NONBLOCK },
		.pages = pages,
		.at = rw->at,
	};
	ssize_t ret;

	do {
		ret = dma_buf_rw_pipe_wait(rw->pipe, rw->flags);
		if (ret <= 0)
			return ret;
		ret = dma_buf_rw_begin(dmabuf, true);
		if (ret)
			return ret;
		pipe_lock(rw->pipe);
		ret = __splice_from_pipe(rw->pipe, &target.desc, dma_buf_rw_take);
		pipe_unlock(rw->pipe);
		ret = dma_buf_rw_end(dmabuf, true, ret);
		/* On -EAGAIN another reader has emptied the pipe. */
	} while (ret == -EAGAIN && !(rw->flags & SPLICE_F_NONBLOCK));
	return ret;
}

/**
 * dma_buf_rw_pages - transfer data for an exporter's rw_file()
 * @dmabuf: the buffer
 * @rw: the request
 * @pages: the memory of the buffer
 * @lock: a lock for this buffer, initialised by the exporter
 *
 * Transfers to files share the buffer, a transfer from a file uses it exclusively. Data from a pipe
 * is copied without this exclusion, as through a user space mapping. Waits for the fences of
 * devices that write to the buffer, and if it is filled, also of devices that read it. Caches are
 * synchronised before and after the transfer for the devices that have the buffer mapped. As for
 * any CPU access, drivers must not start new accesses during the transfer.
 *
 * Context: May sleep. The caller must not hold a lock that is taken when the buffer is mapped or on
 * a page fault on it.
 *
 * Return: the number of bytes, or if no data was transferred, an error: -EINTR, -ERESTARTSYS,
 * -ENOMEM, an error of the file system, or one of the exporter's begin_cpu_access() or
 * end_cpu_access().
 */
ssize_t dma_buf_rw_pages(struct dma_buf *dmabuf, const struct dma_buf_rw *rw,
			 struct dmafile_pages *pages, struct rw_semaphore *lock)
{
	bool fill = !rw->write;
	ssize_t ret;

	if (rw->pipe)
		return dma_buf_rw_splice(dmabuf, rw, pages);
	ret = fill ? down_write_killable(lock) : down_read_killable(lock);
	if (ret)
		return ret;
	ret = dma_buf_rw_begin(dmabuf, fill);
	if (!ret)
		ret = dma_buf_rw_end(dmabuf, fill, dma_buf_rw_transfer(rw, pages));
	if (fill)
		up_write(lock);
	else
		up_read(lock);
	return ret;
}

/**
 * dma_buf_copy_file_range - &file_operations.copy_file_range of a dma-buf
 * @in: the source
 * @pos_in: the offset in @in
 * @out: the destination; either @in or @out is the dma-buf
 * @pos_out: the offset in @out
 * @len: the number of bytes; 0 to check whether the exporter supports copies
 * @flags: unused
 *
 * Return: the number of bytes; 0 if the offset in a source buffer is beyond its end; or an error:
 * -ENOSPC if the offset in a destination buffer is beyond its end, -EINVAL if the exporter does not
 * support copies.
 */
ssize_t dma_buf_copy_file_range(struct file *in, loff_t pos_in, struct file *out, loff_t pos_out,
				size_t len, unsigned int flags)
{
	bool write = memory_file(in);
	struct dma_buf *dmabuf = (write ? in : out)->private_data;
	struct dma_buf_rw rw = {
		.at = write ? pos_in : pos_out,
		.file = write ? out : in,
		.pos = write ? pos_out : pos_in,
		.write = write,
	};

	if (!dmabuf->ops->rw_file)
		return -EINVAL;
	if (!len)
		return 0;
	if (rw.at >= dmabuf->size)
		return write ? 0 : -ENOSPC;
	rw.len = min_t(u64, len, dmabuf->size - rw.at);
	return dmabuf->ops->rw_file(dmabuf, &rw);
}

/**
 * dma_buf_splice_write - &file_operations.splice_write of a dma-buf
 * @pipe: the source
 * @buffer: the dma-buf
 * @pos: the offset in the buffer; advanced by the number of bytes
 * @len: the number of bytes
 * @flags: flags of splice(2)
 *
 * Return: the number of bytes, or an error: -EINVAL if the exporter does not support it, -ENOSPC if
 * the offset is beyond the end of the buffer.
 */
ssize_t dma_buf_splice_write(struct pipe_inode_info *pipe, struct file *buffer, loff_t *pos,
			     size_t len, unsigned int flags)
{
	struct dma_buf *dmabuf = buffer->private_data;
	struct dma_buf_rw rw = { .pipe = pipe, .flags = flags, .at = *pos };
	ssize_t ret;

	if (!dmabuf->ops->rw_file)
		return -EINVAL;
	if (!len)
		return 0;
	if (*pos >= dmabuf->size)
		return -ENOSPC;
	rw.len = min_t(u64, len, dmabuf->size - *pos);
	ret = dmabuf->ops->rw_file(dmabuf, &rw);
	if (ret > 0)
		*pos += ret;
	return ret;
}
