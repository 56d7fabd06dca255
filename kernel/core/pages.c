// SPDX-License-Identifier: GPL-2.0-only
/* The memory of a buffer: pages in the order of its bytes. */
#include <linux/highmem.h>
#include <linux/io.h>
#include <linux/log2.h>
#include <linux/math64.h>
#include <linux/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "pages.h"

/*
 * All memory is zeroed. That a file's bytes will overwrite it is no reason not to: a block device
 * that someone unprivileged serves may complete a read without having filled anything.
 *
 * It counts for the caller's cgroup. A limit of that, or the end of memory, shall be an error here,
 * not a call for the OOM killer: __GFP_RETRY_MAYFAIL.
 */
#define SMALL_GFP	(GFP_HIGHUSER | __GFP_ZERO | __GFP_ACCOUNT | __GFP_NOWARN | \
			 __GFP_RETRY_MAYFAIL)
/* Large pages are taken while they are easy to have; nothing is reclaimed for them. */
#define LARGE_GFP	(((GFP_HIGHUSER | __GFP_ZERO | __GFP_ACCOUNT | __GFP_NOWARN | \
			   __GFP_NORETRY) & ~__GFP_RECLAIM) | __GFP_COMP)

/* 1 MiB and 64 KiB are what IOMMUs and large TLB entries like; then single pages. */
static const unsigned int orders[] = { DMAFILE_MAX_ORDER, 4, 0 };

/* What the number of a bio's segments, 16 bits of it, can say. */
#define MAX_SEGMENTS	65535U

/* Allocates at most @left pages, in one piece; lowers @max_order where it had to take less. */
static struct page *allocate(unsigned long left, unsigned int *max_order, unsigned int *order)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(orders); i++) {
		struct page *page;

		*order = orders[i];
		if (*order > *max_order || left >> *order == 0)
			continue;
		page = alloc_pages(*order ? LARGE_GFP : SMALL_GFP, *order);
		if (page)
			return page;
		/* The next piece need not try it again. */
		*max_order = *order ? *order - 1 : 0;
	}
	return NULL;
}

static int make_room(struct dmafile_pages *pages)
{
	unsigned int room = max(pages->room * 2, 64U);
	struct dmafile_chunk *chunks;

	if (pages->nr < pages->room)
		return 0;
	chunks = kvmalloc_array(room, sizeof(*chunks), DMAFILE_GFP);
	if (!chunks)
		return -ENOMEM;
	if (pages->nr)
		memcpy(chunks, pages->chunks, pages->nr * sizeof(*chunks));
	kvfree(pages->chunks);
	pages->chunks = chunks;
	pages->room = room;
	return 0;
}

/**
 * dmafile_pages_grow - allocate until there are so many bytes
 * @pages: what grows
 * @bytes: how many shall be there in all, rounded up to pages
 * @max_order: the largest pages to try for, of order 8, 4 and 0
 *
 * Return: 0; -ENOMEM where memory or the caller's cgroup has no room; -EINTR when the caller is
 * being killed. What has been allocated stays until dmafile_pages_free().
 */
int dmafile_pages_grow(struct dmafile_pages *pages, u64 bytes, unsigned int max_order)
{
	unsigned long count = (bytes + PAGE_SIZE - 1) >> PAGE_SHIFT;

	while (pages->count < count) {
		unsigned int order;
		struct page *page;

		if (fatal_signal_pending(current))
			return -EINTR;
		if (make_room(pages))
			return -ENOMEM;
		page = allocate(count - pages->count, &max_order, &order);
		if (!page)
			return -ENOMEM;
		pages->chunks[pages->nr++] = (struct dmafile_chunk) {
			.page = page,
			.first = pages->count,
		};
		pages->count += 1UL << order;
		cond_resched();
	}
	return 0;
}

/**
 * dmafile_pages_borrow - have pages that belong to somebody else, behind all others
 * @pages: empty, or with nothing but borrowed ones
 * @page: the first of them
 * @count: how many are contiguous, physically and in the memory map, and stay until
 *	dmafile_pages_free()
 *
 * Return: 0, or -ENOMEM.
 */
int dmafile_pages_borrow(struct dmafile_pages *pages, struct page *page, unsigned long count)
{
	if (make_room(pages))
		return -ENOMEM;
	pages->chunks[pages->nr++] = (struct dmafile_chunk) {
		.page = page,
		.first = pages->count,
	};
	pages->taken = pages->nr;
	pages->count += count;
	return 0;
}

/**
 * dmafile_pages_free - give back all that were not taken
 * @pages: no I/O reaches them any more, and no device; empty afterwards
 */
void dmafile_pages_free(struct dmafile_pages *pages)
{
	unsigned int i;

	for (i = pages->taken; i < pages->nr; i++) {
		__free_pages(pages->chunks[i].page, ilog2(dmafile_chunk_pages(pages, i)));
		cond_resched();
	}
	kvfree(pages->chunks);
	*pages = (struct dmafile_pages) { };
}

/**
 * dmafile_pages_put - let go of borrowed pages, of each chunk of which a reference was taken
 * @pages: no I/O reaches them any more; empty afterwards
 */
void dmafile_pages_put(struct dmafile_pages *pages)
{
	unsigned int i;

	for (i = 0; i < pages->nr; i++) {
		put_page(pages->chunks[i].page);
		cond_resched();
	}
	dmafile_pages_free(pages);
}

/**
 * dmafile_pages_chunk - the chunk in which a byte lies
 * @pages: not empty
 * @at: the byte
 *
 * Return: its number.
 */
unsigned int dmafile_pages_chunk(const struct dmafile_pages *pages, u64 at)
{
	unsigned long wanted = at >> PAGE_SHIFT;
	unsigned int low = 0, high = pages->nr;

	while (high - low > 1) {
		unsigned int middle = low + (high - low) / 2;

		if (pages->chunks[middle].first <= wanted)
			low = middle;
		else
			high = middle;
	}
	return low;
}

/**
 * dmafile_pages_page - the page in which a byte lies
 * @pages: not empty
 * @at: the byte
 *
 * Return: the page.
 */
struct page *dmafile_pages_page(const struct dmafile_pages *pages, u64 at)
{
	const struct dmafile_chunk *chunk = &pages->chunks[dmafile_pages_chunk(pages, at)];

	return chunk->page + ((at >> PAGE_SHIFT) - chunk->first);
}

/**
 * dmafile_pages_zero - zero a range
 * @pages: all of the range has been allocated
 * @from: its first byte
 * @to: behind its last
 */
void dmafile_pages_zero(const struct dmafile_pages *pages, u64 from, u64 to)
{
	while (from < to) {
		size_t offset = offset_in_page(from);
		size_t len = min_t(u64, to - from, PAGE_SIZE - offset);

		memzero_page(dmafile_pages_page(pages, from), offset, len);
		from += len;
		cond_resched();
	}
}

/**
 * dmafile_pages_copy - copy from one memory to another
 * @to: where to
 * @to_at: the first byte there
 * @from: another memory
 * @from_at: the first byte there
 * @len: how many; all of both ranges has been allocated
 */
void dmafile_pages_copy(const struct dmafile_pages *to, u64 to_at,
			const struct dmafile_pages *from, u64 from_at, u64 len)
{
	while (len) {
		size_t to_offset = offset_in_page(to_at), from_offset = offset_in_page(from_at);
		size_t step = min_t(u64, len, PAGE_SIZE - max(to_offset, from_offset));

		memcpy_page(dmafile_pages_page(to, to_at), to_offset,
			    dmafile_pages_page(from, from_at), from_offset, step);
		to_at += step;
		from_at += step;
		len -= step;
		cond_resched();
	}
}

/* Whether a page comes right behind a segment, for all who count from its first page on. */
static bool follows(const struct bio_vec *bvec, struct page *page)
{
	size_t end = bvec->bv_offset + bvec->bv_len;

	return page_to_phys(bvec->bv_page) + end == page_to_phys(page) &&
	       bvec->bv_page + (end >> PAGE_SHIFT) == page;
}

/**
 * dmafile_pages_bvec - a range of memory as an iterator wants it
 * @pages: all of the range has been allocated
 * @at: its first byte
 * @len: its length, less than 4 GiB; cut down, to pages, where an I/O can't have so many
 *	segments
 * @nr: how many segments there are
 *
 * Neighbours in memory become one segment. Nothing is pinned: whoever owns @pages keeps them until
 * the I/O is over.
 *
 * Return: the segments, to be given back by kvfree() when the I/O is over, or NULL.
 */
struct bio_vec *dmafile_pages_bvec(const struct dmafile_pages *pages, u64 at, u64 *len,
				   unsigned int *nr)
{
	unsigned int chunk = dmafile_pages_chunk(pages, at);
	unsigned int last_chunk = dmafile_pages_chunk(pages, at + *len - 1);
	unsigned int room = min(last_chunk - chunk + 1, MAX_SEGMENTS);
	u64 left = *len;
	struct bio_vec *bvec;

	bvec = kvmalloc_array(room, sizeof(*bvec), DMAFILE_GFP);
	if (!bvec)
		return NULL;
	for (*nr = 0; left && *nr < room; chunk++) {
		u64 start = (u64)pages->chunks[chunk].first << PAGE_SHIFT;
		u64 size = (u64)dmafile_chunk_pages(pages, chunk) << PAGE_SHIFT;
		u64 skip = at - start;
		u32 step = min(left, size - skip);
		struct page *page = pages->chunks[chunk].page + (skip >> PAGE_SHIFT);
		struct bio_vec *last = *nr ? &bvec[*nr - 1] : NULL;

		if (last && follows(last, page))
			last->bv_len += step;
		else
			bvec[(*nr)++] = (struct bio_vec) {
				.bv_page = page,
				.bv_len = step,
				.bv_offset = offset_in_page(skip),
			};
		at += step;
		left -= step;
	}
	*len -= left;
	return bvec;
}
