// SPDX-License-Identifier: GPL-2.0-only
/* The memory of a buffer: its pages in order. */
#include <linux/highmem.h>
#include <linux/io.h>
#include <linux/log2.h>
#include <linux/math64.h>
#include <linux/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "pages.h"

/*
 * All memory is zeroed although the data of the file will overwrite it: a block device that is
 * served by an unprivileged process may complete a read without transferring any data.
 *
 * Because of __GFP_RETRY_MAYFAIL, reaching the limit of a cgroup or running out of memory is an
 * error that does not invoke the OOM killer.
 */
#define DMAFILE_SMALL_GFP	(GFP_HIGHUSER | __GFP_ZERO | __GFP_NOWARN | __GFP_RETRY_MAYFAIL)
/* Use large pages only if they are available without reclaim or compaction. */
#define DMAFILE_LARGE_GFP	(((GFP_HIGHUSER | __GFP_ZERO | __GFP_NOWARN | __GFP_NORETRY) & \
				  ~__GFP_RECLAIM) | __GFP_COMP)

/* 1 MiB and 64 KiB suit IOMMUs and large TLB entries; fall back to single pages. */
static const unsigned int dmafile_orders[] = { DMAFILE_MAX_ORDER, 4, 0 };

/* The segment count of a bio has 16 bits. */
#define DMAFILE_MAX_SEGMENTS	65535U

/* Allocates a chunk of at most @left pages. Lowers @max_order if an order is not available. */
static struct page *dmafile_allocate_chunk(unsigned long left, unsigned int *max_order,
					   unsigned int *order, gfp_t gfp)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(dmafile_orders); i++) {
		struct page *page;

		*order = dmafile_orders[i];
		if (*order > *max_order || left >> *order == 0)
			continue;
		page = alloc_pages((*order ? DMAFILE_LARGE_GFP : DMAFILE_SMALL_GFP) | gfp, *order);
		if (page)
			return page;
		/* Do not retry this order for the next chunk. */
		*max_order = *order ? *order - 1 : 0;
	}
	return NULL;
}

static int dmafile_pages_make_room(struct dmafile_pages *pages)
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
 * dmafile_pages_grow - allocate memory
 * @pages: the memory to extend
 * @bytes: the total size afterwards, rounded up to pages
 * @max_order: the maximum order to allocate; the orders are 8, 4 and 0
 * @gfp: __GFP_ACCOUNT to charge the memory to the caller's cgroup, or 0
 *
 * Return: 0, -ENOMEM if memory or the limit of the caller's cgroup is exhausted, or -EINTR if the
 * caller is being killed. On error, pages that were allocated stay until dmafile_pages_free().
 */
int dmafile_pages_grow(struct dmafile_pages *pages, u64 bytes, unsigned int max_order, gfp_t gfp)
{
	unsigned long count = (bytes + PAGE_SIZE - 1) >> PAGE_SHIFT;

	while (pages->count < count) {
		unsigned int order;
		struct page *page;

		if (fatal_signal_pending(current))
			return -EINTR;
		if (dmafile_pages_make_room(pages))
			return -ENOMEM;
		page = dmafile_allocate_chunk(count - pages->count, &max_order, &order, gfp);
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
 * dmafile_pages_borrow - add a chunk that belongs to another owner
 * @pages: the memory to extend; all of its chunks must be borrowed
 * @page: the first page
 * @count: the number of pages; they must be contiguous physically and in the memory map, and stay
 *	valid until dmafile_pages_free()
 *
 * Return: 0, or -ENOMEM.
 */
int dmafile_pages_borrow(struct dmafile_pages *pages, struct page *page, unsigned long count)
{
	if (dmafile_pages_make_room(pages))
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
 * dmafile_pages_free - free all chunks that are neither borrowed nor taken
 * @pages: the memory, no longer used by I/O or devices; empty afterwards
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
 * dmafile_pages_put - drop one reference for each borrowed chunk
 * @pages: the memory, no longer used by I/O; empty afterwards
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
 * dmafile_pages_chunk - find the chunk that contains a byte
 * @pages: the memory, not empty
 * @at: the offset of the byte
 *
 * Return: the index of the chunk.
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
 * dmafile_pages_page - find the page that contains a byte
 * @pages: the memory, not empty
 * @at: the offset of the byte
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
 * @pages: the memory; the range must be allocated
 * @from: the offset of the first byte
 * @to: the offset after the last byte
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
 * dmafile_pages_copy - copy from one buffer's memory to another's
 * @to: the destination
 * @to_at: the offset of the first byte in @to
 * @from: the source; must not be the memory of @to
 * @from_at: the offset of the first byte in @from
 * @len: the number of bytes; both ranges must be allocated
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

/*
 * Whether a page continues a segment, both physically and in the memory map: users of a bvec
 * compute the other pages from the first one.
 */
static bool dmafile_page_follows(const struct bio_vec *bvec, struct page *page)
{
	size_t end = bvec->bv_offset + bvec->bv_len;

	return page_to_phys(bvec->bv_page) + end == page_to_phys(page) &&
	       bvec->bv_page + (end >> PAGE_SHIFT) == page;
}

/**
 * dmafile_pages_bvec - describe a range of memory as a bvec
 * @pages: the memory; the range must be allocated
 * @at: the offset of the first byte
 * @len: the length, less than 4 GiB; reduced, to the end of a page, if it needs too many segments
 *	for one I/O
 * @nr: set to the number of segments
 *
 * Adjacent chunks are merged into one segment. No references are taken: the owner of @pages must
 * keep them until the I/O is complete.
 *
 * Return: the segments, to be freed with kvfree() after the I/O is complete, or NULL.
 */
struct bio_vec *dmafile_pages_bvec(const struct dmafile_pages *pages, u64 at, u64 *len,
				   unsigned int *nr)
{
	unsigned int chunk = dmafile_pages_chunk(pages, at);
	unsigned int last_chunk = dmafile_pages_chunk(pages, at + *len - 1);
	unsigned int room = min(last_chunk - chunk + 1, DMAFILE_MAX_SEGMENTS);
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

		if (last && dmafile_page_follows(last, page))
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
