// SPDX-License-Identifier: GPL-2.0-only
/*
 * Transfers between a dma-buf and a file, by the exporter of the dma-buf.
 *
 * Only the exporter knows its pages. It passes them to dma_buf_rw_pages() for the time of its
 * rw_file(); nobody else looks into a scatter table.
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

/* The number of gathers in flight, and the size of the largest one in MiB. */
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

/* A filled buffer may be filled in part, and what devices have written to the rest stays. */
static enum dma_data_direction dma_buf_rw_direction(bool fill)
{
	return fill ? DMA_BIDIRECTIONAL : DMA_FROM_DEVICE;
}

/* To save a buffer, it's enough to wait for devices that write to it. */
static int dma_buf_rw_begin(struct dma_buf *dmabuf, bool fill)
{
	/* Before caches are synchronised with what devices have written. */
	long left = dma_resv_wait_timeout(dmabuf->resv, dma_resv_usage_rw(fill), true,
					  MAX_SCHEDULE_TIMEOUT);

	return left < 0 ? left : dma_buf_begin_cpu_access(dmabuf, dma_buf_rw_direction(fill));
}

/* Bytes that have been moved are reported even if this fails. */
static ssize_t dma_buf_rw_end(struct dma_buf *dmabuf, bool fill, ssize_t done)
{
	int err = dma_buf_end_cpu_access(dmabuf, dma_buf_rw_direction(fill));

	return done ?: err;
}

/**
 * struct dma_buf_rw_target - where the bytes of a pipe go
 * @desc: of the splice
 * @pages: the memory of the buffer
 * @at: the next byte in it
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

/* Return: 1 if the pipe has something, 0 at its end, or an error. */
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
 * Waits for the pipe before, not during the access of the CPU: a device may write to the buffer as
 * long as the pipe is empty, and the end of the access could overwrite that.
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
		/* -EAGAIN: another reader has emptied the pipe. */
	} while (ret == -EAGAIN && !(rw->flags & SPLICE_F_NONBLOCK));
	return ret;
}

/**
 * dma_buf_rw_pages - carry out a request that an exporter's rw_file() was called for
 * @dmabuf: the buffer
 * @rw: the request
 * @pages: the memory of the buffer
 * @lock: initialised by the exporter, one for each buffer
 *
 * Transfers with files exclude each other: any number may read the buffer, one at a time may fill
 * it. Data from a pipe is copied as from a mapping of user space, without that exclusion. Fences
 * are waited for: those of devices that write to the buffer, and if it is filled, those of devices
 * that read it. The caches of devices that have the buffer mapped are synchronised before and after
 * the transfer. To keep devices from starting meanwhile is up to their drivers, as for any access
 * of the CPU.
 *
 * Context: sleeps. The caller holds no lock that a mapping of the buffer or a page fault on it
 * takes.
 *
 * Return: the number of bytes, or, if nothing was moved, an error: -EINTR, -ERESTARTSYS, -ENOMEM,
 * an error of the file system, or one of the exporter's begin_cpu_access() or end_cpu_access().
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
 * @out: the destination; either this one or @in is the dma-buf
 * @pos_out: the offset in @out
 * @len: the number of bytes; 0 asks whether the exporter supports it
 * @flags: none
 *
 * Return: the number of bytes; 0 behind the end of the buffer, or -ENOSPC if it is the destination;
 * or an error, -EINVAL if the exporter doesn't support it.
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
 * @pos: the offset in the buffer; behind the last byte afterwards
 * @len: the number of bytes
 * @flags: of splice(2)
 *
 * Return: the number of bytes, or an error: -EINVAL if the exporter doesn't support it, -ENOSPC
 * behind the end of the buffer.
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
