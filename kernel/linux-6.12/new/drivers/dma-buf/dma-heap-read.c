// SPDX-License-Identifier: GPL-2.0-only
/*
 * DMA_HEAP_ALLOC_AND_READ_FILE: allocate a buffer from a heap and read a file into it.
 *
 * A heap that implements allocate_and_read() reads into memory that it has already allocated while
 * it allocates more. For other heaps the buffer is allocated, mapped into the kernel, and then
 * read.
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
MODULE_PARM_DESC(gather_mb, "Maximum MiB per gather, 1 to 1024. Default is 128.");

static unsigned int depth = 4;
module_param(depth, uint, 0644);
MODULE_PARM_DESC(depth, "Maximum number of gathers in flight, 1 to 64. Default is 4.");

static bool in_order;
module_param(in_order, bool, 0644);
MODULE_PARM_DESC(in_order, "Allocate everything before reading, for comparison. Default is N.");

/*
 * The buffer is still private, so reads may extend to its end. The part beyond the end of the file
 * is zeroed.
 */
static int dma_heap_read_mapped(const struct dmafile_io *io, u8 *vaddr)
{
	/* Read once: another thread may change the open flags. */
	const int flags = io->file->f_iocb_flags;
	bool direct = flags & IOCB_DIRECT;
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
		/* Direct I/O cannot continue inside a block; buffered I/O can. */
		direct = direct && IS_ALIGNED(done, DMAFILE_ALIGN);
		iov_iter_kvec(&iter, ITER_DEST, &all, 1, all.iov_len);
		init_sync_kiocb(&kiocb, io->file);
		kiocb.ki_pos = done;
		kiocb.ki_flags = direct ? flags : flags & ~IOCB_DIRECT;
		result = vfs_iocb_iter_read(io->file, &kiocb, &iter);
		/* EFAULT: network file systems cannot do direct I/O on vmap memory. */
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

static int dma_heap_read_into(const struct dmafile_io *io, struct dma_buf *dmabuf)
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
		/* File systems cannot read into I/O memory. */
		err = -EOPNOTSUPP;
	} else {
		err = dma_heap_read_mapped(io, map.vaddr);
		/* Direct I/O writes to the pages, not through the mapping. */
		invalidate_kernel_vmap_range(map.vaddr, io->size);
	}
	dma_buf_vunmap_unlocked(dmabuf, &map);
end_access:
	end = dma_buf_end_cpu_access(dmabuf, DMA_BIDIRECTIONAL);
	return err ?: end;
}

/* For heaps without allocate_and_read(). */
static struct dma_buf *dma_heap_allocate_then_read(struct dma_heap *heap,
						   const struct dma_heap_ops *ops,
						   const struct dmafile_io *io, u32 fd_flags,
						   u64 heap_flags)
{
	struct dma_buf *dmabuf = ops->allocate(heap, io->size, fd_flags, heap_flags);
	int err;

	if (IS_ERR(dmabuf))
		return dmabuf;
	err = dma_heap_read_into(io, dmabuf);
	if (err) {
		dma_buf_put(dmabuf);
		return ERR_PTR(err);
	}
	return dmabuf;
}

/**
 * dma_heap_read_file - allocate a buffer and read a whole file into it
 * @heap: the heap to allocate from
 * @ops: the operations of @heap
 * @data: the request, whose flags have been checked
 *
 * The open flags of the file select direct or buffered I/O. Its position is neither used nor
 * changed. The size of the buffer is that of the file, rounded up to pages. The part beyond the end
 * of the file is zero.
 *
 * Return: the buffer, complete but without a file descriptor yet. Or an error: -EBADF, -EISDIR or
 * -EINVAL for a descriptor that cannot be read at an offset, -ENODATA if the file is empty or was
 * truncated during the read, -EFBIG or -ENOMEM if it is too large, -EINTR if the caller is being
 * killed, or an error from the heap or from reading the file.
 */
struct dma_buf *dma_heap_read_file(struct dma_heap *heap, const struct dma_heap_ops *ops,
				   const struct dma_heap_allocation_data *data)
{
	u64 heap_flags = data->heap_flags & ~DMA_HEAP_ALLOC_AND_READ_FILE;
	struct dmafile_io io = {
		.born = true,
		.freezable = true,
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
	/* Do not invoke the OOM killer for a request that cannot succeed. */
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
		dmabuf = dma_heap_allocate_then_read(heap, ops, &io, data->fd_flags, heap_flags);
	/* Do not restart the ioctl: it would start over with another buffer. */
	if (PTR_ERR_OR_ZERO(dmabuf) == -ERESTARTSYS)
		dmabuf = ERR_PTR(-EINTR);
put_file:
	fput(io.file);
	return dmabuf;
}

/**
 * dma_heap_fill - read a file into pages while allocating them
 * @io: the transfer that was passed to allocate_and_read()
 * @pages: must be empty; has the whole file afterwards. Free it with dmafile_pages_free()
 *
 * For heaps whose memory can consist of pages from dmafile_pages_grow(): zeroed, of orders 8, 4 and
 * 0, and charged to the cgroup of the caller.
 *
 * Return: 0, or an error like dma_heap_read_file(). @pages must be freed in either case.
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
