/* SPDX-License-Identifier: GPL-2.0-only */
/* Transfers between a file and the pages of a buffer. */
#ifndef _DMAFILE_IO_H
#define _DMAFILE_IO_H

#include <linux/bits.h>
#include <linux/fs.h>
#include <linux/sizes.h>

#include "pages.h"

/* The alignment of direct I/O, in the file and in memory, unless the file needs a larger one. */
#define DMAFILE_ALIGN		SZ_4K
/* The largest alignment that is supported; the bounce buffer is a multiple of it. */
#define DMAFILE_MAX_ALIGN	SZ_1M
/* One I/O must be shorter than 2 GiB. */
#define DMAFILE_MAX_GATHER	SZ_1G
#define DMAFILE_MAX_DEPTH	64U

/**
 * enum dmafile_mode - how bytes were moved; more than one bit if parts differ
 * @DMAFILE_DIRECT: direct I/O on the buffer's pages
 * @DMAFILE_BOUNCED: direct I/O and a copy
 * @DMAFILE_BUFFERED: through the page cache
 */
enum dmafile_mode {
	DMAFILE_DIRECT = BIT(0),
	DMAFILE_BOUNCED = BIT(1),
	DMAFILE_BUFFERED = BIT(2),
};

/**
 * struct dmafile_io - one transfer
 * @file: open for it
 * @pages: the memory of the buffer
 * @pos: the first byte in the file
 * @at: the first byte in the buffer
 * @len: the number of bytes
 * @size: of the buffer, up to which @pages are allocated during the transfer; 0 if all of them
 *	exist already
 * @more: adds a chunk of at most that many pages to @pages, or returns an error; it may add
 *	nothing, and is then called again. NULL: allocate with dmafile_pages_grow()
 * @gather: the number of bytes that are allocated before they are read
 * @depth: the number of gathers in flight, 1 to DMAFILE_MAX_DEPTH
 * @max_order: the largest order of pages to allocate
 * @write: from the buffer to the file
 * @born: the buffer is new and private: memory around the file's bytes may be overwritten, and is
 *	zero at the end
 * @in_order: allocate everything before the first read
 * @strict: fail if direct I/O on the buffer's pages cannot do all of it
 * @interruptible: any signal ends the transfer, not only a fatal one
 * @freezable: the caller holds no lock, so that the task may be frozen during the transfer
 * @dsync: what is written is on stable storage at the end
 * @tell: called after each gather, in the caller's context, when @done has been updated. If it
 *	returns an error the transfer ends with it, except for the last call
 * @iocb_flags: the open flags of @file, taken once by dmafile_io_prepare()
 * @align: the alignment of direct I/O on @file, taken at the same time
 * @done: the number of bytes that have been moved, counted from the first one, without a gap
 * @mode: how they were moved, enum dmafile_mode
 * @alloc_ns: the time spent allocating
 * @submit_ns: the time spent handing I/O to the file system
 * @wait_ns: the time spent waiting for it
 * @copy_ns: the time spent copying to or from bounce buffers
 * @no_direct: the file has refused direct I/O
 */
struct dmafile_io {
	struct file *file;
	struct dmafile_pages *pages;
	u64 pos;
	u64 at;
	u64 len;
	u64 size;
	int (*more)(struct dmafile_io *io, unsigned long most);
	u64 gather;
	unsigned int depth;
	unsigned int max_order;
	bool write;
	bool born;
	bool in_order;
	bool strict;
	bool interruptible;
	bool freezable;
	bool dsync;
	int (*tell)(struct dmafile_io *io);

	int iocb_flags;
	u32 align;

	u64 done;
	unsigned int mode;
	u64 alloc_ns;
	u64 submit_ns;
	u64 wait_ns;
	u64 copy_ns;

	bool no_direct;
};

bool dmafile_interrupted(bool interruptible);
void dmafile_freeze(void);
u64 dmafile_largest_gather(unsigned int mb);
u64 dmafile_gather(u64 len, unsigned int most);
void dmafile_io_prepare(struct dmafile_io *io);
int dmafile_transfer(struct dmafile_io *io);

#endif /* _DMAFILE_IO_H */
