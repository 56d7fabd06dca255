/* SPDX-License-Identifier: GPL-2.0-only */
/* Transfers between a file and the pages of a buffer. */
#ifndef _DMAFILE_IO_H
#define _DMAFILE_IO_H

#include <linux/bits.h>
#include <linux/fs.h>
#include <linux/sizes.h>

#include "pages.h"

/* A single I/O must be smaller than 2 GiB. */
#define DMAFILE_MAX_GATHER	SZ_1G
#define DMAFILE_MAX_DEPTH	64U

/**
 * enum dmafile_mode - how data was transferred; several bits if parts of it differ
 * @DMAFILE_DIRECT: direct I/O on the buffer's pages
 * @DMAFILE_BOUNCED: direct I/O and a copy
 * @DMAFILE_BUFFERED: through the page cache
 */
enum dmafile_mode {
	DMAFILE_DIRECT = BIT(0),
	DMAFILE_BOUNCED = BIT(1),
	DMAFILE_BUFFERED = BIT(2),
};

struct dmafile_io;
struct dmafile_io_result;

/**
 * struct dmafile_io_ops - what a caller does during its transfer, in its own context
 * @grow: adds a chunk of at most the given number of pages to @pages of the request, or returns an
 *	error. It may add nothing, and is then called again. NULL: allocate with
 *	dmafile_pages_grow()
 * @step: called before each allocation and after each gather, when @done has been updated. If it
 *	returns an error, the transfer ends with that error, except for the last call. NULL: only a
 *	fatal signal ends the transfer early
 */
struct dmafile_io_ops {
	int (*grow)(const struct dmafile_io *io, unsigned long most);
	int (*step)(const struct dmafile_io *io, const struct dmafile_io_result *result);
};

/**
 * struct dmafile_io - a request to transfer data between a file and a buffer
 * @file: the file, open for the transfer
 * @pages: the memory of the buffer
 * @pos: the offset of the first byte in the file
 * @at: the offset of the first byte in the buffer
 * @len: the number of bytes
 * @size: the size of the buffer; @pages are allocated up to it during the transfer. 0 if all of
 *	them exist already
 * @gather: the maximum size of a gather in bytes. Each gather is allocated while the previous one
 *	is being read
 * @depth: the maximum number of gathers in flight, 1 to DMAFILE_MAX_DEPTH
 * @max_order: the maximum order of pages to allocate
 * @gfp: __GFP_ACCOUNT to charge allocated @pages to the caller's cgroup, or 0
 * @ops: callbacks, or NULL
 * @write: true to write the buffer to the file, false to read the file
 * @born: the buffer is new and private: memory around the requested bytes may be overwritten
 *	during the transfer, and is zero at the end
 * @in_order: allocate everything before the first read
 * @strict: fail if not all bytes can be transferred by direct I/O on the buffer's pages
 * @freezable: the caller holds no lock, so the task may be frozen during the transfer
 * @dsync: written data must be on stable storage at the end
 * @iocb_flags: the open flags of @file, set by dmafile_io_prepare()
 * @align: the alignment for direct I/O on @file, set by dmafile_io_prepare()
 *
 * The transfer changes nothing here. Its state is private, its result is separate.
 */
struct dmafile_io {
	struct file *file;
	struct dmafile_pages *pages;
	u64 pos;
	u64 at;
	u64 len;
	u64 size;
	u64 gather;
	unsigned int depth;
	unsigned int max_order;
	gfp_t gfp;
	const struct dmafile_io_ops *ops;
	bool write;
	bool born;
	bool in_order;
	bool strict;
	bool freezable;
	bool dsync;
	int iocb_flags;
	u32 align;
};

/**
 * struct dmafile_io_result - what a transfer has done
 * @done: the number of bytes transferred, counted from the first one, without gaps
 * @mode: how they were transferred, enum dmafile_mode
 * @alloc_ns: the time spent allocating
 * @submit_ns: the time spent submitting I/O
 * @wait_ns: the time spent waiting for I/O
 * @copy_ns: the time spent copying to or from bounce buffers
 */
struct dmafile_io_result {
	u64 done;
	unsigned int mode;
	u64 alloc_ns;
	u64 submit_ns;
	u64 wait_ns;
	u64 copy_ns;
};

u64 dmafile_largest_gather(unsigned int mb);
u64 dmafile_gather(u64 len, unsigned int most);
void dmafile_io_prepare(struct dmafile_io *io);
int dmafile_transfer(const struct dmafile_io *io, struct dmafile_io_result *result);

#endif /* _DMAFILE_IO_H */
