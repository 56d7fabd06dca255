// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bytes between a dma-buf and a file, by the exporter whose memory it is.
 *
 * The exporter alone knows its pages, and hands them to dma_buf_rw_pages() for the time of its
 * rw_file(). Nobody looks into a scatter table.
 */
#include <linux/dma-buf.h>
#include <linux/dma-buf-rw.h>
#include <linux/dma-resv.h>
#include <linux/dmafile/io.h>
#include <linux/fs.h>
#include <linux/highmem.h>
#include <linux/mm.h>
#include <linux/pipe_fs_i.h>
#include <linux/splice.h>

/* Gathers in flight, and the largest of them, in MiB. */
#define DEPTH	4
#define GATHER	128

static ssize_t transfer(const struct dma_buf_rw *rw, struct dmafile_pages *pages)
{
	struct dmafile_io io = {
		.file = rw->file,
		.pages = pages,
		.pos = rw->pos,
		.at = rw->at,
		.len = rw->len,
		.gather = dmafile_gather(rw->len, GATHER),
		.depth = DEPTH,
		.max_order = DMAFILE_MAX_ORDER,
		.write = rw->write,
	};
	int err = dmafile_transfer(&io);

	return io.done ?: err;
}

/* Where the bytes of a pipe go. */
struct target {
	struct splice_desc desc;
	const struct dmafile_pages *pages;
	u64 at;
};

static int take(struct pipe_inode_info *pipe, struct pipe_buffer *buf, struct splice_desc *desc)
{
	struct target *target = container_of(desc, struct target, desc);
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

/* Waits for the pipe where it is empty, so no lock of the buffer may be held. */
static ssize_t take_all(const struct dma_buf_rw *rw, const struct dmafile_pages *pages)
{
	struct target target = {
		.desc = { .total_len = rw->len, .flags = rw->flags },
		.pages = pages,
		.at = rw->at,
	};
	ssize_t ret;

	pipe_lock(rw->pipe);
	ret = __splice_from_pipe(rw->pipe, &target.desc, take);
	pipe_unlock(rw->pipe);
	return ret;
}

/**
 * dma_buf_rw_pages - carry out what an exporter's rw_file() was asked for
 * @dmabuf: the exporter's buffer
 * @rw: what rw_file() has got
 * @pages: the buffer's own
 *
 * Of files has the buffer for itself: no other filling, nor, when this one fills it, any other use
 * of this sort runs beside it. Bytes of a pipe come as those of a user's mapping would. Devices are
 * waited for by their fences, and the caches of those that have it mapped are synchronised before
 * and afterwards. One that starts while this runs is its driver's affair, as with any access of the
 * CPU.
 *
 * Context: sleeps; holds no lock that a mapping or a page fault of the buffer wants.
 *
 * Return: bytes moved, or where there were none an error of the file, -EINTR, -ERESTARTSYS,
 * -ENOMEM, or that of the exporter's begin_cpu_access().
 */
ssize_t dma_buf_rw_pages(struct dma_buf *dmabuf, const struct dma_buf_rw *rw,
			 struct dmafile_pages *pages)
{
	/* One for both ways: an exporter may have mapped its memory for the first of them. */
	const enum dma_data_direction direction = DMA_BIDIRECTIONAL;
	bool fill = !rw->write;
	long left;
	ssize_t ret = 0;
	int err;

	if (rw->file)
		ret = fill ? down_write_killable(&dmabuf->rw) : down_read_killable(&dmabuf->rw);
	if (ret)
		return ret;
	/* Before caches are synchronised with what devices have written. */
	left = dma_resv_wait_timeout(dmabuf->resv, dma_resv_usage_rw(true), true,
				     MAX_SCHEDULE_TIMEOUT);
	ret = left < 0 ? left : dma_buf_begin_cpu_access(dmabuf, direction);
	if (ret)
		goto unlock;
	ret = rw->file ? transfer(rw, pages) : take_all(rw, pages);
	err = dma_buf_end_cpu_access(dmabuf, direction);
	if (err)
		ret = err;
unlock:
	if (rw->file && fill)
		up_write(&dmabuf->rw);
	else if (rw->file)
		up_read(&dmabuf->rw);
	return ret;
}

/**
 * dma_buf_rw_file - &file_operations.rw_file of a dma-buf
 * @buffer: the dma-buf
 * @at: the first byte there
 * @file: any other file
 * @pos: the first byte there
 * @len: how many; 0 asks whether it can
 * @write: from the buffer to the file
 *
 * Return: bytes moved; 0 behind the buffer's end, or -ENOSPC where it was to be filled; or an
 * error, -EINVAL where the exporter can't.
 */
ssize_t dma_buf_rw_file(struct file *buffer, loff_t at, struct file *file, loff_t pos, size_t len,
			bool write)
{
	struct dma_buf *dmabuf = buffer->private_data;
	struct dma_buf_rw rw = { .at = at, .file = file, .pos = pos, .write = write };

	if (!dmabuf->ops->rw_file)
		return -EINVAL;
	if (!len)
		return 0;
	if (at >= dmabuf->size)
		return write ? 0 : -ENOSPC;
	rw.len = min_t(u64, len, dmabuf->size - at);
	return dmabuf->ops->rw_file(dmabuf, &rw);
}

/**
 * dma_buf_splice_write - &file_operations.splice_write of a dma-buf
 * @pipe: from where
 * @buffer: the dma-buf
 * @pos: the first byte there; behind the last one afterwards
 * @len: how many
 * @flags: of splice(2)
 *
 * Return: bytes copied, or an error: -EINVAL where the exporter can't, -ENOSPC behind the buffer's
 * end.
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
