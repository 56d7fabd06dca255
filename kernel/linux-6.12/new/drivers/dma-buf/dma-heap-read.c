// SPDX-License-Identifier: GPL-2.0-only
/*
 * DMA_HEAP_ALLOC_AND_READ_FILE: a heap's memory, and a file's content in it.
 *
 * A heap with allocate_and_read reads what it has allocated while it allocates more. For the others
 * it is done one after the other here: allocate, map all of it, and read.
 */
#include <linux/dma-buf.h>
#include <linux/dma-heap.h>
#include <linux/dmafile/file.h>
#include <linux/dmafile/io.h>
#include <linux/file.h>
#include <linux/highmem.h>
#include <linux/iosys-map.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/sched/signal.h>
#include <linux/uio.h>
#include <uapi/linux/dma-heap.h>

#include "dma-heap-read.h"

static unsigned int gather_mb = 128;
module_param(gather_mb, uint, 0644);
MODULE_PARM_DESC(gather_mb, "MiB allocated before they are read at most; 1 to 1024. Default is 128.");

static unsigned int depth = 4;
module_param(depth, uint, 0644);
MODULE_PARM_DESC(depth, "Gathers in flight; 1 to 64. Default is 4.");

static bool in_order;
module_param(in_order, bool, 0644);
MODULE_PARM_DESC(in_order, "All heaps do as those without allocate_and_read, to compare. Default is N.");

/* Nobody else sees the buffer: it may be written to up to its end, and is zero behind the file. */
static int read_mapped(const struct dmafile_io *io, u8 *vaddr)
{
	bool direct = io->file->f_iocb_flags & IOCB_DIRECT;
	u64 done = 0;

	while (done < io->len) {
		struct kvec all = {
			.iov_base = vaddr + done,
			.iov_len = min_t(u64, io->size - done, MAX_RW_COUNT),
		};
		struct kiocb kiocb;
		struct iov_iter iter;
		ssize_t result;

		if (fatal_signal_pending(current))
			return -EINTR;
		/* The page cache has what a direct read has left of a block. */
		direct = direct && IS_ALIGNED(done, DMAFILE_ALIGN);
		iov_iter_kvec(&iter, ITER_DEST, &all, 1, all.iov_len);
		init_sync_kiocb(&kiocb, io->file);
		kiocb.ki_pos = done;
		if (!direct)
			kiocb.ki_flags &= ~IOCB_DIRECT;
		result = vfs_iocb_iter_read(io->file, &kiocb, &iter);
		/* EFAULT: of network file systems, which have none into a mapping of the kernel. */
		if (direct &&
		    (result == -EINVAL || result == -EOPNOTSUPP || result == -EFAULT)) {
			direct = false;
			continue;
		}
		if (result < 0)
			return result;
		if (!result)
			return -ENODATA;
		done += result;
	}
	memset(vaddr + io->len, 0, io->size - io->len);
	return 0;
}

static int read_into(const struct dmafile_io *io, struct dma_buf *dmabuf)
{
	struct iosys_map map;
	int err, end;

	err = dma_buf_begin_cpu_access(dmabuf, DMA_BIDIRECTIONAL);
	if (err)
		return err;
	err = dma_buf_vmap_unlocked(dmabuf, &map);
	if (err)
		goto end_access;
	if (map.is_iomem) {
		/* No file system reads into that. */
		err = -EOPNOTSUPP;
	} else {
		err = read_mapped(io, map.vaddr);
		/* Direct I/O has written to the pages behind the mapping. */
		invalidate_kernel_vmap_range(map.vaddr, io->size);
	}
	dma_buf_vunmap_unlocked(dmabuf, &map);
end_access:
	end = dma_buf_end_cpu_access(dmabuf, DMA_BIDIRECTIONAL);
	return err ?: end;
}

/* For heaps that can't do both at once. */
static struct dma_buf *allocate_then_read(struct dma_heap *heap, const struct dma_heap_ops *ops,
					  const struct dmafile_io *io, u32 fd_flags,
					  u64 heap_flags)
{
	struct dma_buf *dmabuf = ops->allocate(heap, io->size, fd_flags, heap_flags);
	int err;

	if (IS_ERR(dmabuf))
		return dmabuf;
	err = read_into(io, dmabuf);
	if (err) {
		dma_buf_put(dmabuf);
		return ERR_PTR(err);
	}
	return dmabuf;
}

/**
 * dma_heap_read_file - a new buffer with a whole file in it
 * @heap: where the memory comes from
 * @ops: the heap's
 * @data: what was asked for; its flags are known to be valid
 *
 * The file's open flags choose between direct and buffered I/O; its position is neither used nor
 * moved. The buffer has the file's size, rounded up to pages, and zeros behind the file's end.
 *
 * Return: the buffer, whole, of which nobody else knows yet. Or an error: -EBADF, -EISDIR or
 * -EINVAL for a descriptor of which no file can be read, -ENODATA for an empty file, or for one
 * that was cut short meanwhile, -EINTR for a caller that is being killed, what the heap's allocate
 * says, and what reading the file says.
 */
struct dma_buf *dma_heap_read_file(struct dma_heap *heap, const struct dma_heap_ops *ops,
				   const struct dma_heap_allocation_data *data)
{
	u64 heap_flags = data->heap_flags & ~DMA_HEAP_ALLOC_AND_READ_FILE;
	struct dmafile_io io = {
		.born = true,
		.depth = clamp(READ_ONCE(depth), 1U, DMAFILE_MAX_DEPTH),
		.max_order = DMAFILE_MAX_ORDER,
	};
	struct dma_buf *dmabuf;
	int err;

	if (data->file_reserved)
		return ERR_PTR(-EINVAL);
	io.file = dmafile_file_get(data->file_fd, false);
	if (IS_ERR(io.file))
		return ERR_CAST(io.file);
	err = dmafile_file_size(io.file, &io.len);
	if (!err && !io.len)
		err = -ENODATA;
	else if (!err && io.len > LONG_MAX - PAGE_SIZE)
		err = -EFBIG;
	/* Before others are killed for memory that will not do. */
	else if (!err && io.len >> PAGE_SHIFT > totalram_pages())
		err = -ENOMEM;
	if (err) {
		dmabuf = ERR_PTR(err);
		goto put_file;
	}
	io.size = PAGE_ALIGN(io.len);
	io.gather = dmafile_gather(io.len, READ_ONCE(gather_mb));
	if (ops->allocate_and_read && !READ_ONCE(in_order))
		dmabuf = ops->allocate_and_read(heap, &io, data->fd_flags, heap_flags);
	else
		dmabuf = allocate_then_read(heap, ops, &io, data->fd_flags, heap_flags);
	/* There's no easy way to restart a read. */
	if (PTR_ERR_OR_ZERO(dmabuf) == -ERESTARTSYS)
		dmabuf = ERR_PTR(-EINTR);
put_file:
	fput(io.file);
	return dmabuf;
}

/**
 * dma_heap_fill - allocate pages, and read meanwhile what is already there
 * @io: as the heap's allocate_and_read has got it
 * @pages: empty; has the whole file in it then, to be given back by dmafile_pages_free()
 *
 * For a heap whose memory is pages as dmafile_pages_grow() allocates them: zeroed, of order 8, 4
 * and 0, and charged to the caller's cgroup.
 *
 * Return: 0 or an error, as for dma_heap_read_file(); @pages are to be given back all the same.
 */
int dma_heap_fill(struct dmafile_io *io, struct dmafile_pages *pages)
{
	int err;

	io->pages = pages;
	err = dmafile_transfer(io);
	if (err)
		return err;
	return io->done < io->len ? -ENODATA : 0;
}
