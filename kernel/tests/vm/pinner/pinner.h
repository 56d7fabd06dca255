/* SPDX-License-Identifier: GPL-2.0-only */
/* What can be asked of /dev/pinner, a driver that pins what it is told to. See pinner.c. */
#ifndef PINNER_H
#define PINNER_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* How pages are pinned: by which function. */
enum pinner_how {
	PINNER_FAST,		/* pin_user_pages_fast() */
	PINNER_PLAIN,		/* pin_user_pages() */
	PINNER_REMOTE,		/* pin_user_pages_remote() */
	PINNER_UNLOCKED,	/* pin_user_pages_unlocked() */
	PINNER_MEMFD,		/* memfd_pin_folios() */
	PINNER_GOT,		/* get_user_pages_fast(): not pinned at all */
	PINNER_HOWS
};

#define PINNER_WRITE	1U
#define PINNER_LONGTERM	2U

/**
 * struct pinner_pin - pin pages
 * @address: of the first, in the caller's memory or @id's; of a memfd its offset
 * @pages: how many; of a memfd as many of 4096 bytes
 * @times: how often, in a loop
 * @how: enum pinner_how
 * @flags: PINNER_*
 * @id: a process for PINNER_REMOTE, a descriptor for PINNER_MEMFD
 * @handle: filled in
 * @pinned: filled in: how many pages, or folios of a memfd, all times together
 */
struct pinner_pin {
	__u64 address;
	__u32 pages;
	__u32 times;
	__u32 how;
	__u32 flags;
	__s32 id;
	__u32 handle;
	__u32 pinned;
	__u32 reserved;
};

/* Where pages are unpinned. */
enum pinner_where { PINNER_TASK, PINNER_IRQ, PINNER_WORKER, PINNER_WHERES };

/* By which function; the two that mark pages dirty may sleep. */
enum pinner_by {
	PINNER_PAGES,		/* unpin_user_pages() */
	PINNER_EACH,		/* unpin_user_page(), or unpin_folio() */
	PINNER_DIRTY,		/* unpin_user_pages_dirty_lock() */
	PINNER_RANGE,		/* unpin_user_page_range_dirty_lock(), where pages are neighbours */
	PINNER_BYS,
	PINNER_HERE,		/* unpin_user_pages(), from places of their own */
	PINNER_THERE
};

/**
 * struct pinner_unpin - pages of a handle
 * @handle: which ends with its last page
 * @first: the first page
 * @count: how many
 * @where: enum pinner_where
 * @by: enum pinner_by
 */
struct pinner_unpin {
	__u32 handle;
	__u32 first;
	__u32 count;
	__u32 where;
	__u32 by;
};

/**
 * struct pinner_pages - which pages a handle has
 * @pfns: an array of @count u64: page frame numbers, 0 for one that is unpinned
 */
struct pinner_pages {
	__u32 handle;
	__u32 first;
	__u32 count;
	__u32 reserved;
	__u64 pfns;
};

/**
 * struct pinner_ask - what the kernel says of a page of the caller's
 * @address: which
 * @count: folio_pin_count()
 * @refs: references, without the one that asking takes
 * @maybe: folio_maybe_dma_pinned()
 * @pinned: PageDmaPinned()
 */
struct pinner_ask {
	__u64 address;
	__s32 count;
	__s32 refs;
	__u32 maybe;
	__u32 pinned;
};

#define PINNER_PIN	_IOWR('P', 0, struct pinner_pin)
#define PINNER_UNPIN	_IOW('P', 1, struct pinner_unpin)
#define PINNER_PFNS	_IOW('P', 2, struct pinner_pages)
#define PINNER_ASK	_IOWR('P', 3, struct pinner_ask)

/* What is wrong, each with a struct pinner_unpin. */

/* Unpins, but the handle keeps its pages; with PINNER_RANGE from the first page on. */
#define PINNER_AGAIN	_IOW('P', 16, struct pinner_unpin)
/* Calls put_page() @count times for the first page. */
#define PINNER_PUT	_IOW('P', 17, struct pinner_unpin)
/* Calls get_page() as often, which makes it good. */
#define PINNER_GET	_IOW('P', 18, struct pinner_unpin)
/* The handle ends, but its pages stay pinned. */
#define PINNER_FORGET	_IOW('P', 22, struct pinner_unpin)
/* The handle is left when its descriptor is closed, until PINNER_FORGIVE. */
#define PINNER_ABANDON	_IOW('P', 19, struct pinner_unpin)
#define PINNER_FORGIVE	_IO('P', 20)
/*
 * Frees the page that mmap() of this descriptor shows, which the handle has one pin of, and which
 * is mapped no more.
 */
#define PINNER_FREE	_IOW('P', 21, struct pinner_unpin)

#endif
