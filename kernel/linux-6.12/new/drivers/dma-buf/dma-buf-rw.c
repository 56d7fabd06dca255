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
#include <linux/mm.h>
#include <linux/uio.h>

/* Gathers in flight, and the largest of them, in MiB. */
#define DEPTH	4
#define GATHER	128

/* Waits for devices, or for a signal. */
static int wait_for_fences(struct dma_buf *dmabuf, bool fill)
{
	long left = dma_resv_wait_timeout(dmabuf->resv, dma_resv_usage_rw(fill), true,
					  MAX_SCHEDULE_TIMEOUT);

	return min(left, 0L);
}

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

/* Return: bytes copied. */
static ssize_t copy_in(const struct dma_buf_rw *rw, const struct dmafile_pages *pages)
{
	u64 at = rw->at, end = rw->at + rw->len;

	while (at < end) {
		size_t offset = offset_in_page(at);
		size_t step = min_t(u64, end - at, PAGE_SIZE - offset);
		size_t done = copy_page_from_iter(dmafile_pages_page(pages, at), offset, step,
						  rw->iter);

		at += done;
		if (done < step)
			break;
	}
	return at - rw->at;
}

/**
 * dma_buf_rw_pages - carry out what an exporter's rw_file() was asked for
 * @dmabuf: the exporter's buffer
 * @rw: what rw_file() has got
 * @pages: the buffer's own
 *
 * Has the buffer for itself: no other filling, nor, when this one fills it, any other use of this
 * sort runs beside it. Devices are waited for by their fences, and the caches of those that have
 * it mapped are synchronised before and afterwards. One that starts while this runs is its driver's
 * affair, as with any access of the CPU.
 *
 * Context: sleeps; holds no lock that a mapping or a page fault of the buffer wants.
 *
 * Return: bytes moved, or where there were none an error of the file, -EINTR, -ERESTARTSYS,
 * -ENOMEM, or that of the exporter's begin_cpu_access().
 */
ssize_t dma_buf_rw_pages(struct dma_buf *dmabuf, const struct dma_buf_rw *rw,
			 struct dmafile_pages *pages)
{
	/* One for both ways: an exporter may have mapped its memory for the first that it was asked for. */
	const enum dma_data_direction direction = DMA_BIDIRECTIONAL;
	bool fill = !rw->write;
	ssize_t ret;
	int err;

	ret = fill ? down_write_killable(&dmabuf->rw) : down_read_killable(&dmabuf->rw);
	if (ret)
		return ret;
	ret = wait_for_fences(dmabuf, fill);
	if (!ret)
		ret = dma_buf_begin_cpu_access(dmabuf, direction);
	if (ret)
		goto unlock;
	if (rw->file)
		ret = transfer(rw, pages);
	else
		ret = copy_in(rw, pages);
	err = dma_buf_end_cpu_access(dmabuf, direction);
	if (err)
		ret = err;
unlock:
	if (fill)
		up_write(&dmabuf->rw);
	else
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
 * dma_buf_write_iter - &file_operations.write_iter of a dma-buf, for splice(2) and sendfile(2)
 * @iocb: where to
 * @from: pages of a pipe
 *
 * A dma-buf can't be written to by write(2) and its like: these have memory of a user, or wait for
 * no answer.
 *
 * Return: bytes copied, or an error: -EINVAL for all that is no splice, or where the exporter
 * can't, -ENOSPC behind the buffer's end.
 */
ssize_t dma_buf_write_iter(struct kiocb *iocb, struct iov_iter *from)
{
	struct dma_buf *dmabuf = iocb->ki_filp->private_data;
	struct dma_buf_rw rw = { .iter = from, .at = iocb->ki_pos };
	ssize_t ret;

	if (!is_sync_kiocb(iocb) || !iov_iter_is_bvec(from) || !dmabuf->ops->rw_file)
		return -EINVAL;
	if (rw.at >= dmabuf->size)
		return -ENOSPC;
	rw.len = min_t(u64, iov_iter_count(from), dmabuf->size - rw.at);
	ret = dmabuf->ops->rw_file(dmabuf, &rw);
	if (ret > 0)
		iocb->ki_pos += ret;
	return ret;
}
