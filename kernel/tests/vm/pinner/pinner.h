/* SPDX-License-Identifier: GPL-2.0-only */
/* The interface of /dev/pinner, a driver that pins memory on request. See pinner.c. */
#ifndef PINNER_H
#define PINNER_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* The function that pins */
enum pinner_how {
	PINNER_FAST,		/* pin_user_pages_fast() */
	PINNER_PLAIN,		/* pin_user_pages() */
	PINNER_REMOTE,		/* pin_user_pages_remote() */
	PINNER_UNLOCKED,	/* pin_user_pages_unlocked() */
	PINNER_MEMFD,		/* memfd_pin_folios() */
	PINNER_GOT,		/* get_user_pages_fast(): not a pin */
	PINNER_HOWS
};

#define PINNER_WRITE	1U
#define PINNER_LONGTERM	2U

/**
 * struct pinner_pin - pin pages
 * @address: address of the first page, in the memory of the caller or of @id; for a memfd an offset
 * @pages: number of pages; for a memfd in units of 4096 bytes
 * @times: number of repetitions
 * @how: enum pinner_how
 * @flags: PINNER_*
 * @id: a process for PINNER_REMOTE, a descriptor for PINNER_MEMFD
 * @handle: out: the handle
 * @pinned: out: total number of pages, or of folios of a memfd
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

/* The context in which pages are unpinned */
enum pinner_where { PINNER_TASK, PINNER_IRQ, PINNER_WORKER, PINNER_WHERES };

/* The function that unpins; the two that mark pages dirty may sleep. */
enum pinner_by {
	PINNER_PAGES,		/* unpin_user_pages() */
	PINNER_EACH,		/* unpin_user_page(), or unpin_folio() */
	PINNER_DIRTY,		/* unpin_user_pages_dirty_lock() */
	PINNER_RANGE,		/* unpin_user_page_range_dirty_lock(), for contiguous pages */
	PINNER_BYS,
	PINNER_HERE,		/* unpin_user_pages(), from a separate call site */
	PINNER_THERE
};

/**
 * struct pinner_unpin - unpin pages of a handle
 * @handle: the handle, which is freed with its last page
 * @first: the first page
 * @count: the number of pages
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
 * struct pinner_pages - get the pages of a handle
 * @pfns: an array of @count u64: page frame numbers, 0 for pages that have been unpinned
 */
struct pinner_pages {
	__u32 handle;
	__u32 first;
	__u32 count;
	__u32 reserved;
	__u64 pfns;
};

/**
 * struct pinner_ask - get the kernel's information on a page of the caller
 * @address: the address of the page
 * @refs: the number of references, without that of this call
 * @maybe: folio_maybe_dma_pinned()
 */
struct pinner_ask {
	__u64 address;
	__s32 refs;
	__u32 maybe;
};

#define PINNER_PIN	_IOWR('P', 0, struct pinner_pin)
#define PINNER_UNPIN	_IOW('P', 1, struct pinner_unpin)
#define PINNER_PFNS	_IOW('P', 2, struct pinner_pages)
#define PINNER_ASK	_IOWR('P', 3, struct pinner_ask)

/* Errors, each with a struct pinner_unpin */

/* Unpins, but keeps the pages in the handle; with PINNER_RANGE from the first page on. */
#define PINNER_AGAIN	_IOW('P', 16, struct pinner_unpin)
/* Calls put_page() @count times for the first page. */
#define PINNER_PUT	_IOW('P', 17, struct pinner_unpin)
/* Calls get_page() @count times, which undoes this. */
#define PINNER_GET	_IOW('P', 18, struct pinner_unpin)
/* Frees the handle, but leaves its pages pinned. */
#define PINNER_FORGET	_IOW('P', 22, struct pinner_unpin)
/* Keeps the handle when its descriptor is closed, until PINNER_FORGIVE. */
#define PINNER_ABANDON	_IOW('P', 19, struct pinner_unpin)
#define PINNER_FORGIVE	_IO('P', 20)
/*
 * Frees the page that mmap() of this descriptor maps. The handle has one pin on it, and it is no
 * longer mapped.
 */
#define PINNER_FREE	_IOW('P', 21, struct pinner_unpin)

#endif
