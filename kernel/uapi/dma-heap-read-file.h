/* SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note */
/*
 * DMA_HEAP_ALLOC_AND_READ_FILE for programs whose <linux/dma-heap.h> is older than the kernel. The
 * kernel patches are in linux-6.12.
 *
 * DMA_HEAP_IOCTL_ALLOC with this flag allocates a buffer from a heap and reads a file into it. It
 * returns a dma-buf that has the contents of the file. Its size is that of the file, rounded up to
 * pages. The rest of the last page is zero. A kernel without the patches rejects the flag with
 * EINVAL before any other check.
 */
#ifndef _UAPI_DMA_HEAP_READ_FILE_H
#define _UAPI_DMA_HEAP_READ_FILE_H

#include <linux/dma-heap.h>
#include <linux/types.h>

#ifndef DMA_HEAP_ALLOC_AND_READ_FILE
#define DMA_HEAP_ALLOC_AND_READ_FILE	1ULL
#endif

/**
 * struct dma_heap_read_file - struct dma_heap_allocation_data with this flag
 * @file_fd: a regular file or a block device, open for reading. O_DIRECT selects direct I/O. The
 *	file position is neither used nor changed
 * @file_reserved: must be 0
 * @fd: must be 0; out: the dma-buf
 * @fd_flags: O_CLOEXEC, and O_RDONLY or O_RDWR
 * @heap_flags: DMA_HEAP_ALLOC_AND_READ_FILE
 *
 * Errors: EINVAL if a field that must be 0 is not, and for a file without a size; EBADF, EISDIR;
 * ENODATA for an empty file, and for one that is truncated during the call; ENOMEM, also at the
 * limit of the caller's cgroup; EMFILE; EINTR if the caller is being killed; and errors of reading
 * the file.
 */
struct dma_heap_read_file {
	__u32 file_fd;
	__u32 file_reserved;
	__u32 fd;
	__u32 fd_flags;
	__u64 heap_flags;
};

#endif /* _UAPI_DMA_HEAP_READ_FILE_H */
