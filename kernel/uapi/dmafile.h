/* SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note */
/*
 * dmafile: moves bytes between files and dma-bufs without a copy.
 *
 * Every request is a structure that begins with its own size, which must equal the size in the
 * request's number (else EINVAL). Later versions may append fields. A module accepts a larger
 * structure if the fields that it does not have are zero (else E2BIG), and a smaller one, down to
 * the size of the request's first version (else EINVAL): missing fields count as zero.
 *
 * Fields marked "out" are ignored on entry. They are the only ones that the module writes: on
 * success, or where a request says so. Memory that cannot be written to is refused (EFAULT) before
 * anything is done. Unknown flags and nonzero reserved fields are refused with EINVAL.
 * Sizes and offsets are in bytes, times in nanoseconds.
 */
#ifndef _UAPI_DMAFILE_H
#define _UAPI_DMAFILE_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* Unused in Documentation/userspace-api/ioctl/ioctl-number.rst. */
#define DMAFILE_IOC_MAGIC	0xDE

#define DMAFILE_IOC_INFO	_IOWR(DMAFILE_IOC_MAGIC, 0, struct dmafile_info)
#define DMAFILE_IOC_ALLOC	_IOWR(DMAFILE_IOC_MAGIC, 1, struct dmafile_alloc)
#define DMAFILE_IOC_ALLOC_READ	_IOWR(DMAFILE_IOC_MAGIC, 2, struct dmafile_alloc_read)
#define DMAFILE_IOC_RW		_IOWR(DMAFILE_IOC_MAGIC, 3, struct dmafile_rw)

/* struct dmafile_info: features */
#define DMAFILE_FEATURE_ALLOC_READ	0x1
#define DMAFILE_FEATURE_READ		0x2	/* RW, file to buffer */
#define DMAFILE_FEATURE_WRITE		0x4	/* RW, buffer to file */
#define DMAFILE_FEATURE_URING_CMD	0x8

/**
 * struct dmafile_info - features and limits of this module
 * @size: sizeof(struct dmafile_info); out: its size in this module
 * @align: out: the alignment of direct I/O, for files that do not need a larger one; see @align
 *	of the requests that read and write
 * @features: out: DMAFILE_FEATURE_*. The structure of the first version ends here
 * @max_buffer: out: the largest buffer: parameter max_buffer_mb, or all of memory
 * @gather: out: the largest gather if a request does not choose one. A gather is a chunk of
 *	memory; each is allocated while the previous one is being read
 * @max_gather: out: the largest gather that a request may choose
 * @depth: out: the maximum number of gathers in flight
 * @reserved: out: 0
 */
struct dmafile_info {
	__u32 size;
	__u32 align;
	__u64 features;
	__u64 max_buffer;
	__u64 gather;
	__u64 max_gather;
	__u32 depth;
	__u32 reserved;
};

/**
 * struct dmafile_alloc - allocate a dma-buf, all zero
 * @size: sizeof(struct dmafile_alloc)
 * @fd_flags: O_CLOEXEC, and O_RDONLY or O_RDWR for its mappings
 * @length: its size, rounded up to pages
 * @flags: 0
 * @fd: out: the dma-buf
 * @alloc_ns: out: the time that allocation took
 *
 * Errors: ENOMEM if memory or the caller's cgroup has no room, EFBIG above max_buffer, EMFILE.
 */
struct dmafile_alloc {
	__u32 size;
	__u32 fd_flags;
	__u64 length;
	__u32 flags;
	__s32 fd;
	__u64 alloc_ns;
};

/**
 * struct dmafile_progress - shared by a running request and its caller
 * @bytes: the number of bytes moved, counted from the first one; written after each gather and
 *	at the end
 * @stop: not zero: end early, with ECANCELED; read before each gather, but not while the request
 *	waits for devices or for other requests
 * @reserved: 0
 *
 * In the caller's memory, aligned to 8 bytes.
 */
struct dmafile_progress {
	__aligned_u64 bytes;
	__u32 stop;
	__u32 reserved;
};

/* struct dmafile_alloc_read and struct dmafile_rw: flags */
/* If the file ends early: success with fewer bytes, at least one; otherwise ENODATA. */
#define DMAFILE_SHORT_OK	0x1
/*
 * Any signal ends the request, with EINTR; otherwise only a fatal one does. A command of io_uring
 * also ends when it is cancelled or its ring is closed, with or without this flag.
 */
#define DMAFILE_INTERRUPTIBLE	0x2
/*
 * If direct I/O cannot move all bytes in place: EINVAL, before anything is moved, instead of
 * buffered I/O or a copy; and an error if the file system refuses direct I/O. Some file systems
 * (btrfs, tmpfs) accept O_DIRECT but use the page cache nevertheless.
 */
#define DMAFILE_STRICT		0x4
/*
 * Allocate all memory before the first read: if there is not enough, nothing is read in vain. This
 * takes longer, because allocation and reads do not overlap, and buffered reads are not started
 * ahead of time.
 */
#define DMAFILE_IN_ORDER	0x8
/* RW only, exactly one of them. */
#define DMAFILE_READ		0x10	/* file to buffer */
#define DMAFILE_WRITE		0x20	/* buffer to file */
/* With DMAFILE_WRITE: the bytes are on stable storage when the request returns (O_DSYNC). */
#define DMAFILE_DSYNC		0x40

/* mode: how bytes were moved; more than one bit if parts differ */
#define DMAFILE_MODE_DIRECT	0x1	/* direct I/O on the buffer's pages */
#define DMAFILE_MODE_BOUNCED	0x2	/* direct I/O and a copy */
#define DMAFILE_MODE_BUFFERED	0x4	/* through the page cache */

/**
 * struct dmafile_alloc_read - allocate a dma-buf and read a part of a file into it
 * @size: sizeof(struct dmafile_alloc_read)
 * @fd_flags: as in struct dmafile_alloc
 * @flags: DMAFILE_SHORT_OK, DMAFILE_INTERRUPTIBLE, DMAFILE_STRICT, DMAFILE_IN_ORDER
 * @file_fd: a regular file or block device, open for reading. O_DIRECT selects direct I/O;
 *	changing the flags during the request has no effect. Its position is neither used nor
 *	changed
 * @file_offset: the first byte in the file
 * @length: the number of bytes; 0: all up to the end of the file
 * @buffer_offset: where the first byte goes. Direct I/O avoids a copy if this equals @file_offset
 *	modulo @align
 * @buffer_size: the size of the buffer, rounded up to pages; 0: as much as is needed, with direct
 *	I/O rounded up to @align. Everything around the bytes of the file is zero. If there is no
 *	room for the last block of the file, direct I/O copies that block
 * @gather: the largest gather in bytes, rounded up to pages, at most max_gather; 0: a sixteenth of
 *	@length, but at least 1 MiB and at most the gather of struct dmafile_info. The first and
 *	the last gathers are smaller, so that reading starts and ends early
 * @progress: the address of a struct dmafile_progress, or 0
 * @fd: out: the dma-buf, with all bytes in it
 * @mode: out: DMAFILE_MODE_*
 * @bytes: out: the number of bytes of the file in the buffer
 * @alloc_ns: out: the time that allocation took
 * @submit_ns: out: the time spent passing reads to the file system, including copies from the page
 *	cache
 * @wait_ns: out: the time spent waiting for reads
 * @copy_ns: out: the time spent copying bytes that direct I/O could not read into place
 * @align: out: the alignment used for direct I/O on this file: a power of two, at least that of
 *	struct dmafile_info
 * @reserved: 0
 *
 * Errors: EFAULT for an invalid address, EBADF for a file that is not open for reading, EISDIR for
 * a directory, EINVAL for any other file without offsets, ENODATA for an empty file or one that
 * ends early, EOVERFLOW for a range beyond the largest offset, EFBIG above max_buffer, ENOMEM,
 * EINTR, ECANCELED, EMFILE, and errors of the file system and the disk. After an error nothing is
 * left behind.
 */
struct dmafile_alloc_read {
	__u32 size;
	__u32 fd_flags;
	__u32 flags;
	__s32 file_fd;
	__u64 file_offset;
	__u64 length;
	__u64 buffer_offset;
	__u64 buffer_size;
	__u64 gather;
	__u64 progress;
	__s32 fd;
	__u32 mode;
	__u64 bytes;
	__u64 alloc_ns;
	__u64 submit_ns;
	__u64 wait_ns;
	__u64 copy_ns;
	__u32 align;
	__u32 reserved;
};

/**
 * struct dmafile_rw - move bytes between a file and a dma-buf of this module
 * @size: sizeof(struct dmafile_rw)
 * @flags: DMAFILE_READ or DMAFILE_WRITE, and DMAFILE_SHORT_OK, DMAFILE_INTERRUPTIBLE,
 *	DMAFILE_STRICT, DMAFILE_IN_ORDER, DMAFILE_DSYNC
 * @fd: a dma-buf of this module; with DMAFILE_READ, open for writing
 * @file_fd: as in struct dmafile_alloc_read; with DMAFILE_WRITE, open for writing and without
 *	O_APPEND
 * @file_offset: the first byte in the file
 * @buffer_offset: the first byte in the buffer. Direct I/O avoids a copy if this equals
 *	@file_offset modulo @align
 * @length: the number of bytes, at least 1
 * @gather: the number of bytes passed to the file system at a time; 0: as in struct
 *	dmafile_alloc_read
 * @progress: the address of a struct dmafile_progress, or 0
 * @mode: out: DMAFILE_MODE_*
 * @align: out: as in struct dmafile_alloc_read
 * @bytes: out: the number of bytes moved, counted from the first one, without a gap
 * @submit_ns: out: as in struct dmafile_alloc_read
 * @wait_ns: out: the same, including the time spent waiting for the buffer's fences and for other
 *	requests
 * @copy_ns: out: as in struct dmafile_alloc_read
 *
 * Waits until devices are done with the buffer (its fences), and for conflicting requests on the
 * same buffer: requests that read the buffer share it, a request that fills it has exclusive
 * access, and they are served in the order of their arrival. If a device writes to the buffer while
 * it is being saved, the bytes change under the file system: btrfs, which has computed its
 * checksums by then, reports an error when the file is read.
 *
 * Errors: EXDEV for a dma-buf of another exporter, EBADF for a file or dma-buf that is not open for
 * the transfer, EINVAL for a descriptor that is not a dma-buf or a range outside the buffer,
 * otherwise as for struct dmafile_alloc_read. "out" fields are written after an error, too. After
 * an error, or if the file ends early, the rest of the range after @bytes is undefined; nothing
 * else is changed.
 */
struct dmafile_rw {
	__u32 size;
	__u32 flags;
	__s32 fd;
	__s32 file_fd;
	__u64 file_offset;
	__u64 buffer_offset;
	__u64 length;
	__u64 gather;
	__u64 progress;
	__u32 mode;
	__u32 align;
	__u64 bytes;
	__u64 submit_ns;
	__u64 wait_ns;
	__u64 copy_ns;
};

/**
 * struct dmafile_uring_cmd - sqe->cmd of an IORING_OP_URING_CMD on /dev/dmafile
 * @request: the address of the structure, which must stay there until completion
 * @reserved: 0
 *
 * sqe->cmd_op is one of DMAFILE_IOC_*; the result is that of the ioctl. The request runs in a
 * worker of the ring. Cancelling it (IORING_ASYNC_CANCEL) or closing the ring ends it with EINTR,
 * even without DMAFILE_INTERRUPTIBLE. A command that is linked to others, or drained, needs
 * IOSQE_ASYNC: without it Linux 6.5 to 6.15 may read its SQE after the slot has been reused.
 */
struct dmafile_uring_cmd {
	__u64 request;
	__u64 reserved;
};

#endif /* _UAPI_DMAFILE_H */
