/* SPDX-License-Identifier: GPL-2.0-only */
/* Bytes between a file and a buffer's own pages. */
#ifndef _DMAFILE_IO_H
#define _DMAFILE_IO_H

#include <linux/bits.h>
#include <linux/fs.h>
#include <linux/sizes.h>

#include "pages.h"

/*
 * What direct I/O keeps to in the file and in memory: the block of all file systems that know
 * direct I/O, and no less than that of any disk.
 */
#define DMAFILE_ALIGN		SZ_4K
/* One I/O has less than 2 GiB. */
#define DMAFILE_MAX_GATHER	SZ_1G
#define DMAFILE_MAX_DEPTH	64U

/**
 * enum dmafile_mode - how bytes came or went; more than one bit where parts differ
 * @DMAFILE_DIRECT: O_DIRECT, the pages of the buffer themselves
 * @DMAFILE_BOUNCED: O_DIRECT, and a copy
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
 * @pages: the buffer's
 * @pos: the first byte in the file
 * @at: the first byte in the buffer
 * @len: how many
 * @size: of the buffer, to which @pages grow meanwhile; 0 where they are all there
 * @more: adds a chunk of at most so many pages to @pages, which somebody else gives, or answers an
 *	error; it may add nothing, and is called again. NULL: allocate, dmafile_pages_grow()
 * @gather: how much is allocated before it is read
 * @depth: gathers in flight, 1 to DMAFILE_MAX_DEPTH
 * @max_order: the largest pages to try for
 * @write: from the buffer to the file
 * @born: the buffer is a new one, which nobody else sees: all around the file's bytes may be
 *	written to, and is zero in the end
 * @in_order: allocate all, then read
 * @strict: fail rather than do without direct I/O into the buffer's pages
 * @interruptible: any signal ends it
 * @dsync: what is written is on the disk in the end
 * @tell: called now and then with how much is done, from the caller's process; not 0 ends the
 *	transfer with that error, but for the last time, when it is over
 * @done: bytes moved, from the first on, without a gap
 * @mode: how, enum dmafile_mode
 * @alloc_ns: time of allocation
 * @submit_ns: time for handing I/O to the file system
 * @wait_ns: time for waiting for it
 * @copy_ns: time for copies of what went beside its place
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
	bool dsync;
	int (*tell)(struct dmafile_io *io);

	u64 done;
	unsigned int mode;
	u64 alloc_ns;
	u64 submit_ns;
	u64 wait_ns;
	u64 copy_ns;

	bool no_direct;
};

bool dmafile_interrupted(bool interruptible);
u64 dmafile_largest_gather(unsigned int mb);
u64 dmafile_gather(u64 len, unsigned int most);
int dmafile_transfer(struct dmafile_io *io);

#endif /* _DMAFILE_IO_H */
