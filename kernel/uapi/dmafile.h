/* SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note */
/*
 * dmafile: moves bytes between files and dma-bufs without a copy.
 *
 * Every request is a structure that begins with its own size. It may grow at the end: an older
 * kernel takes a larger structure when what it does not know is zero (else E2BIG), a newer one
 * takes the size that an older program knows. Fields marked "out" are written by the kernel and
 * ignored on entry; everything that is neither described here nor zero is refused with EINVAL.
 * Sizes and offsets are bytes, times are nanoseconds.
 */
#ifndef _UAPI_DMAFILE_H
#define _UAPI_DMAFILE_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define DMAFILE_VERSION		1

/* Unused in Documentation/userspace-api/ioctl/ioctl-number.rst. */
#define DMAFILE_IOC_MAGIC	0xDE

#define DMAFILE_IOC_INFO	_IO(DMAFILE_IOC_MAGIC, 0)	/* struct dmafile_info */
#define DMAFILE_IOC_ALLOC	_IO(DMAFILE_IOC_MAGIC, 1)	/* struct dmafile_alloc */
#define DMAFILE_IOC_ALLOC_READ	_IO(DMAFILE_IOC_MAGIC, 2)	/* struct dmafile_alloc_read */
#define DMAFILE_IOC_RW		_IO(DMAFILE_IOC_MAGIC, 3)	/* struct dmafile_rw */

/* struct dmafile_info: features */
#define DMAFILE_FEATURE_ALLOC_READ	0x1
#define DMAFILE_FEATURE_READ		0x2	/* RW, file to buffer */
#define DMAFILE_FEATURE_WRITE		0x4	/* RW, buffer to file */
#define DMAFILE_FEATURE_URING_CMD	0x8

/**
 * struct dmafile_info - what this module does, and its limits
 * @size: sizeof(struct dmafile_info); out: that of the module's
 * @version: out: DMAFILE_VERSION
 * @features: out: DMAFILE_FEATURE_*
 * @max_buffer: out: the largest buffer; parameter max_buffer_mb, or all of memory
 * @gather: out: how much is allocated before it is read at most, where a call does not say
 * @max_gather: out: the most that a call may ask for
 * @align: out: what the difference of an offset in the file and one in the buffer is a multiple
 *	of, for direct I/O without a copy
 * @depth: out: gathers in flight, at most
 */
struct dmafile_info {
	__u32 size;
	__u32 version;
	__u64 features;
	__u64 max_buffer;
	__u64 gather;
	__u64 max_gather;
	__u32 align;
	__u32 depth;
};

/**
 * struct dmafile_alloc - a new dma-buf, all zero
 * @size: sizeof(struct dmafile_alloc)
 * @fd_flags: O_CLOEXEC, and O_RDONLY or O_RDWR for its mappings
 * @flags: 0
 * @fd: out: the dma-buf
 * @length: bytes, rounded up to pages
 * @alloc_ns: out: how long allocation took
 *
 * Errors: ENOMEM where memory or the caller's cgroup has no room, E2BIG above max_buffer, EMFILE.
 */
struct dmafile_alloc {
	__u32 size;
	__u32 fd_flags;
	__u32 flags;
	__s32 fd;
	__u64 length;
	__u64 alloc_ns;
};

/**
 * struct dmafile_progress - what a running request and its caller tell each other
 * @bytes: bytes that are there, from the first one on; written after every gather, and in the end
 * @stop: not zero: end early, with ECANCELED; read before every gather, not while waiting for
 *	devices or other requests
 * @reserved: 0
 *
 * Lies in the caller's memory, aligned to 8 bytes.
 */
struct dmafile_progress {
	__aligned_u64 bytes;
	__u32 stop;
	__u32 reserved;
};

/* struct dmafile_alloc_read and dmafile_rw: flags */
/* The file may end early: success, with fewer bytes, though not without any; else ENODATA. */
#define DMAFILE_SHORT_OK	0x1
/* Any signal ends it, with EINTR; else only those that kill. */
#define DMAFILE_INTERRUPTIBLE	0x2
/*
 * EINVAL, before anything moves, instead of buffered I/O or a copy where O_DIRECT can't be had for
 * all of it, and an error where the file system refuses it. Some (btrfs, tmpfs) take it and use the
 * page cache all the same.
 */
#define DMAFILE_STRICT		0x4
/*
 * All is allocated before the first read: the order to compare with (AR-21). Of buffered reads none
 * is begun ahead.
 */
#define DMAFILE_IN_ORDER	0x8
/* RW only, exactly one of them. */
#define DMAFILE_READ		0x10	/* file to buffer */
#define DMAFILE_WRITE		0x20	/* buffer to file */
/* With DMAFILE_WRITE: the bytes are on the disk when it returns (O_DSYNC). */
#define DMAFILE_DSYNC		0x40

/* modes: how bytes came or went, more than one bit where parts differ */
#define DMAFILE_MODE_DIRECT	0x1	/* O_DIRECT, the pages of the buffer themselves */
#define DMAFILE_MODE_BOUNCED	0x2	/* O_DIRECT, and a copy */
#define DMAFILE_MODE_BUFFERED	0x4	/* through the page cache */

/**
 * struct dmafile_alloc_read - a new dma-buf with bytes of a file in it
 * @size: sizeof(struct dmafile_alloc_read)
 * @fd_flags: as in struct dmafile_alloc
 * @flags: DMAFILE_SHORT_OK, DMAFILE_INTERRUPTIBLE, DMAFILE_STRICT, DMAFILE_IN_ORDER
 * @file_fd: a regular file or block device, open for reading. O_DIRECT chooses direct I/O. Its
 *	position is neither used nor moved
 * @file_offset: the first byte
 * @length: how many; 0: all up to the end of the file
 * @buffer_offset: where the first byte comes to lie. Congruent to @file_offset modulo the info's
 *	align, direct I/O needs no copy
 * @buffer_size: of the buffer; 0: what is needed, rounded up to pages. All around the file's bytes
 *	is zero
 * @gather: bytes allocated before they are read, rounded up to pages, at most max_gather; 0: a
 *	sixteenth of @length, within 1 MiB and the info's gather. Smaller at the beginning and at
 *	the end, so that reading starts early and ends early
 * @progress: the address of a struct dmafile_progress, or 0
 * @fd: out: the dma-buf; there only when all bytes are
 * @mode: out: DMAFILE_MODE_*
 * @bytes: out: bytes of the file that are there
 * @alloc_ns: out: allocation took so long,
 * @submit_ns: out: handing reads to the file system, copies included where it copies,
 * @wait_ns: out: waiting for reads,
 * @copy_ns: out: copying what had come beside its place
 *
 * Errors: EFAULT for an address, EBADF for a file that is not open for reading, EISDIR and EINVAL
 * for what has no such bytes, ENODATA for an empty file or one that ends early, EOVERFLOW beyond
 * what offsets can say, E2BIG above max_buffer, ENOMEM, EINTR, ECANCELED, EMFILE, and those of the
 * file system and disk. After an error nothing is left.
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
};

/**
 * struct dmafile_rw - bytes between a file and one of our dma-bufs
 * @size: sizeof(struct dmafile_rw)
 * @flags: DMAFILE_READ or DMAFILE_WRITE, and DMAFILE_SHORT_OK, DMAFILE_INTERRUPTIBLE,
 *	DMAFILE_STRICT, DMAFILE_IN_ORDER, DMAFILE_DSYNC
 * @fd: a dma-buf of this module; with DMAFILE_READ, open for writing
 * @file_fd: a regular file or block device, open for it, without O_APPEND
 * @file_offset: the first byte in the file
 * @buffer_offset: the first byte in the buffer
 * @length: how many, at least 1
 * @gather: bytes handed to the file system at a time; 0: as in struct dmafile_alloc_read
 * @progress: the address of a struct dmafile_progress, or 0
 * @mode: out: DMAFILE_MODE_*
 * @reserved: 0
 * @bytes: out: bytes moved, from the first on, without a gap; after an error too
 * @submit_ns: out: as in struct dmafile_alloc_read
 * @wait_ns: out: as there, and for the buffer's fences and its other users
 * @copy_ns: out: as there
 *
 * Waits until devices are done with the buffer (its fences), and for requests on the same buffer
 * that may not run beside this one. Errors: EXDEV for a dma-buf of somebody else, EBADF for a file
 * or dma-buf that is not open for it, EINVAL for what is no dma-buf and outside the buffer,
 * otherwise as struct dmafile_alloc_read. After an error, and where the file ends early, the range
 * of the buffer (or file) behind @bytes is undefined, and nothing else touched.
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
	__u32 reserved;
	__u64 bytes;
	__u64 submit_ns;
	__u64 wait_ns;
	__u64 copy_ns;
};

/**
 * struct dmafile_uring_cmd - IORING_OP_URING_CMD on /dev/dmafile: what lies in sqe->cmd
 * @request: the address of the structure, which stays there until completion
 * @reserved: 0
 *
 * sqe->cmd_op is one of DMAFILE_IOC_*; the result is that of the ioctl. The request runs in a
 * worker of the ring; cancelling it (IORING_ASYNC_CANCEL) is a signal, see DMAFILE_INTERRUPTIBLE.
 * A command that is linked to others, or drained, needs IOSQE_ASYNC: without it Linux 6.12 may look
 * at its SQE when there is another in its place.
 */
struct dmafile_uring_cmd {
	__u64 request;
	__u64 reserved;
};

#endif /* _UAPI_DMAFILE_H */
