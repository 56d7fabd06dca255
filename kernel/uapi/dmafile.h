/* SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note */
/*
 * dmafile: transfers data between files and dma-bufs without a copy.
 *
 * Every request is a structure that begins with its own size, which must equal the size that is
 * encoded in the ioctl number (otherwise EINVAL). Later versions may append fields. A module
 * accepts a larger structure if all fields unknown to it are zero (otherwise E2BIG). It accepts a
 * smaller one, down to the size of the first version (otherwise EINVAL), and treats missing fields
 * as zero.
 *
 * Fields marked "out" are ignored on entry. The module writes only these fields: on success, and
 * for some requests also on error. If they are not writable, the request fails with EFAULT before
 * anything is done. Unknown flags and nonzero reserved fields fail with EINVAL. Sizes and offsets
 * are in bytes, times in nanoseconds.
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
 * @align: out: the minimum alignment for direct I/O. A file may need a larger one: see @align of
 *	the requests that read and write
 * @features: out: DMAFILE_FEATURE_*. The first version of the structure ends here
 * @max_buffer: out: the maximum size of a buffer: module parameter max_buffer_mb, or the size of
 *	memory
 * @gather: out: the maximum size of a gather if a request does not specify it. A gather is a
 *	chunk of memory that is allocated while the previous one is being read
 * @max_gather: out: the maximum size of a gather that a request may specify
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
 * struct dmafile_alloc - allocate a zeroed dma-buf
 * @size: sizeof(struct dmafile_alloc)
 * @fd_flags: optionally O_CLOEXEC, and O_RDONLY or O_RDWR for its mappings
 * @length: the size of the dma-buf, rounded up to pages
 * @flags: must be 0
 * @fd: out: the dma-buf
 * @alloc_ns: out: the time spent allocating
 *
 * Errors: ENOMEM if memory or the limit of the caller's cgroup is exhausted, EFBIG above
 * max_buffer, EMFILE.
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
 * @bytes: the number of bytes transferred, counted from the first one; written after each gather
 *	and at the end
 * @stop: if not 0, the request ends early with ECANCELED. Read before each gather, but not while
 *	the request waits for devices or for other requests
 * @reserved: must be 0
 *
 * In the caller's memory, aligned to 8 bytes.
 */
struct dmafile_progress {
	__aligned_u64 bytes;
	__u32 stop;
	__u32 reserved;
};

/* struct dmafile_alloc_read and struct dmafile_rw: flags */
/* If the file ends early, succeed with at least one byte. Without this flag: ENODATA. */
#define DMAFILE_SHORT_OK	0x1
/*
 * Any signal ends the request with EINTR, not only a fatal one. With or without this flag, an
 * io_uring command also ends when it is cancelled or its ring is closed.
 */
#define DMAFILE_INTERRUPTIBLE	0x2
/*
 * If direct I/O cannot transfer all bytes in place, fail with EINVAL before transferring anything,
 * instead of using buffered I/O or a copy. Also fail if the file system rejects direct I/O. Note
 * that some file systems (btrfs, tmpfs) accept O_DIRECT but may still use the page cache.
 */
#define DMAFILE_STRICT		0x4
/*
 * Allocate all memory before the first read, so that nothing is read if there is not enough memory.
 * This takes longer: allocation and reads do not overlap, and there is no read-ahead during the
 * allocation for buffered reads.
 */
#define DMAFILE_IN_ORDER	0x8
/* For DMAFILE_IOC_RW: exactly one of these two. */
#define DMAFILE_READ		0x10	/* file to buffer */
#define DMAFILE_WRITE		0x20	/* buffer to file */
/* With DMAFILE_WRITE: the data is on stable storage when the request returns, as with O_DSYNC. */
#define DMAFILE_DSYNC		0x40

/* mode: how data was transferred; several bits if parts of it differ */
#define DMAFILE_MODE_DIRECT	0x1	/* direct I/O on the buffer's pages */
#define DMAFILE_MODE_BOUNCED	0x2	/* direct I/O and a copy */
#define DMAFILE_MODE_BUFFERED	0x4	/* through the page cache */

/**
 * struct dmafile_alloc_read - allocate a dma-buf and read a part of a file into it
 * @size: sizeof(struct dmafile_alloc_read)
 * @fd_flags: as in struct dmafile_alloc
 * @flags: DMAFILE_SHORT_OK, DMAFILE_INTERRUPTIBLE, DMAFILE_STRICT, DMAFILE_IN_ORDER
 * @file_fd: a regular file or block device, open for reading. O_DIRECT selects direct I/O; changing
 *	the open flags during the request has no effect. The file position is neither used nor
 *	changed
 * @file_offset: the offset of the first byte in the file
 * @length: the number of bytes; 0: up to the end of the file
 * @buffer_offset: the offset of the first byte in the buffer. Direct I/O avoids a copy if this is
 *	congruent to @file_offset modulo @align
 * @buffer_size: the size of the buffer, rounded up to pages; 0: as large as needed, with direct I/O
 *	rounded up to @align. Memory around the data of the file is zero. If there is no room for
 *	all of the last block, direct I/O reads this block through a bounce buffer
 * @gather: the maximum size of a gather in bytes, rounded up to pages, at most max_gather; 0: a
 *	sixteenth of @length, but at least 1 MiB and at most the gather of struct dmafile_info. The
 *	first and the last gathers are smaller, so that reading starts and ends early
 * @progress: the address of a struct dmafile_progress, or 0
 * @fd: out: the dma-buf, which has all of the data
 * @mode: out: DMAFILE_MODE_*
 * @bytes: out: the number of bytes read from the file
 * @alloc_ns: out: the time spent allocating
 * @submit_ns: out: the time spent submitting reads, including copies from the page cache
 * @wait_ns: out: the time spent waiting for reads
 * @copy_ns: out: the time spent copying data that direct I/O could not read in place
 * @align: out: the alignment used for direct I/O on this file: a power of two, at least that of
 *	struct dmafile_info
 * @reserved: must be 0
 *
 * Errors: EFAULT for an invalid address, EBADF for a file that is not open for reading, EISDIR for
 * a directory, EINVAL for any other file without offsets, ENODATA for a file that is empty or ends
 * early, EOVERFLOW for a range beyond the maximum offset, EFBIG above max_buffer, ENOMEM, EINTR,
 * ECANCELED, EMFILE, and errors of the file system and the disk. On error, no buffer or file
 * descriptor is left behind.
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
 * struct dmafile_rw - transfer data between a file and a dma-buf of this module
 * @size: sizeof(struct dmafile_rw)
 * @flags: DMAFILE_READ or DMAFILE_WRITE, and DMAFILE_SHORT_OK, DMAFILE_INTERRUPTIBLE,
 *	DMAFILE_STRICT, DMAFILE_IN_ORDER, DMAFILE_DSYNC
 * @fd: a dma-buf of this module; with DMAFILE_READ, open for writing
 * @file_fd: as in struct dmafile_alloc_read; with DMAFILE_WRITE, open for writing and without
 *	O_APPEND
 * @file_offset: the offset of the first byte in the file
 * @buffer_offset: the offset of the first byte in the buffer. Direct I/O avoids a copy if this is
 *	congruent to @file_offset modulo @align
 * @length: the number of bytes, at least 1
 * @gather: the maximum number of bytes to submit at a time; 0: as in struct dmafile_alloc_read
 * @progress: the address of a struct dmafile_progress, or 0
 * @mode: out: DMAFILE_MODE_*
 * @align: out: as in struct dmafile_alloc_read
 * @bytes: out: the number of bytes transferred, counted from the first one, without gaps
 * @submit_ns: out: as in struct dmafile_alloc_read
 * @wait_ns: out: as in struct dmafile_alloc_read, plus the time spent waiting for the buffer's
 *	fences and for other requests
 * @copy_ns: out: as in struct dmafile_alloc_read
 *
 * Waits for the buffer's fences, which show that devices use it, and for conflicting requests:
 * requests that read the buffer share it, a request that fills it has exclusive access, and all are
 * served in order of arrival. If a device writes to the buffer while it is being saved, the data
 * changes during the I/O. On btrfs the checksum may then be wrong, and reading the file fails.
 *
 * Errors: EXDEV for a dma-buf of another exporter, EBADF for a file or dma-buf that is not open for
 * the transfer, EINVAL for a descriptor that is not a dma-buf or a range outside the buffer,
 * otherwise as for struct dmafile_alloc_read. The "out" fields are written on error as well. After
 * an error, or if the file ends early, the part of the range after @bytes is undefined. Nothing
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
 * @request: the address of the structure, which must stay valid until completion
 * @reserved: must be 0
 *
 * sqe->cmd_op is one of DMAFILE_IOC_*; the result is that of the ioctl. The request runs in an
 * io_uring worker. Cancelling it (IORING_OP_ASYNC_CANCEL) or closing the ring ends it with EINTR,
 * even without DMAFILE_INTERRUPTIBLE. Linked or drained commands need IOSQE_ASYNC: without it,
 * Linux 6.5 to 6.15 may read the SQE after its slot has been reused.
 */
struct dmafile_uring_cmd {
	__u64 request;
	__u64 reserved;
};

#endif /* _UAPI_DMAFILE_H */
