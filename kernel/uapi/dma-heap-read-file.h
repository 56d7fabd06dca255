/* SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note */
/*
 * Allocating a buffer from a heap and reading a file into it, for programs whose <linux/dma-heap.h>
 * is older than the kernel. The patches for the kernel are in linux-6.12.
 *
 * DMA_HEAP_IOCTL_ALLOC with DMA_HEAP_ALLOC_AND_READ_FILE returns a dma-buf of the size of a file,
 * rounded up to pages, with the content of the file, and zeros after it. A kernel without the
 * patches refuses the flag with EINVAL, before it checks anything else.
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
 * @file_fd: a regular file or a block device, open for reading; O_DIRECT selects direct I/O, and
 *	its position is neither used nor changed
 * @file_reserved: 0
 * @fd: 0; out: the dma-buf
 * @fd_flags: O_CLOEXEC, and O_RDONLY or O_RDWR
 * @heap_flags: DMA_HEAP_ALLOC_AND_READ_FILE
 *
 * Errors: EINVAL for a nonzero field that must be 0, and for a file without a size; EBADF,
 * EISDIR; ENODATA for an empty file, and for one that is truncated during the call; ENOMEM, also
 * at the limit of the caller's cgroup; EMFILE; EINTR if the caller is being killed; and errors of
 * reading the file.
 */
struct dma_heap_read_file {
	__u32 file_fd;
	__u32 file_reserved;
	__u32 fd;
	__u32 fd_flags;
	__u64 heap_flags;
};

#endif /* _UAPI_DMA_HEAP_READ_FILE_H */
