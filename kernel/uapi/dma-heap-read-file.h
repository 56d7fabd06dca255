/* SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note */
/*
 * Reading a file while a heap allocates the buffer for it, for programs whose <linux/dma-heap.h>
 * doesn't have that: the kernel may be newer. linux-6.12 here has the patches for the kernel.
 *
 * DMA_HEAP_IOCTL_ALLOC with DMA_HEAP_ALLOC_AND_READ_FILE gives a dma-buf of a file's size, rounded
 * up to pages, with the file's content, and zeros behind it. A kernel without refuses the flag with
 * EINVAL, before it looks at anything else.
 */
#ifndef _UAPI_DMA_HEAP_READ_FILE_H
#define _UAPI_DMA_HEAP_READ_FILE_H

#include <linux/dma-heap.h>
#include <linux/types.h>

#ifndef DMA_HEAP_ALLOC_AND_READ_FILE
#define DMA_HEAP_ALLOC_AND_READ_FILE	1ULL
#endif

/**
 * struct dma_heap_read_file - struct dma_heap_allocation_data, as that flag has it
 * @file_fd: a regular file or a block device, open for reading; its flags choose direct (O_DIRECT)
 *	or buffered I/O, and its position is neither used nor moved
 * @file_reserved: 0
 * @fd: 0; out: the dma-buf
 * @fd_flags: O_CLOEXEC, and O_RDONLY or O_RDWR
 * @heap_flags: DMA_HEAP_ALLOC_AND_READ_FILE
 *
 * Errors: EINVAL for what must be 0, and files without a size; EBADF, EISDIR; ENODATA for an empty
 * file, and for one that was cut short meanwhile; ENOMEM, also at the limit of the caller's cgroup;
 * EMFILE; EINTR for a caller that is being killed; and what reading the file says.
 */
struct dma_heap_read_file {
	__u32 file_fd;
	__u32 file_reserved;
	__u32 fd;
	__u32 fd_flags;
	__u64 heap_flags;
};

#endif /* _UAPI_DMA_HEAP_READ_FILE_H */
