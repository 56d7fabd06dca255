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
 * All memory is zeroed although the file's bytes will overwrite it: a block device that is served
 * by an unprivileged process may complete a read without having transferred anything.
 *
 * The memory is charged to the caller's cgroup. Reaching the cgroup's limit, or running out of
 * memory, should be an error here and not invoke the OOM killer: __GFP_RETRY_MAYFAIL.
 */
#define DMAFILE_SMALL_GFP	(GFP_HIGHUSER | __GFP_ZERO | __GFP_ACCOUNT | __GFP_NOWARN | \
				 __GFP_RETRY_MAYFAIL)
/* Large pages are allocated while they are readily available, without reclaim or compaction. */
#define DMAFILE_LARGE_GFP	(((GFP_HIGHUSER | __GFP_ZERO | __GFP_ACCOUNT | __GFP_NOWARN | \
				   __GFP_NORETRY) & ~__GFP_RECLAIM) | __GFP_COMP)

/* 1 MiB and 64 KiB suit IOMMUs and large TLB entries; then single pages. */
static const unsigned int dmafile_orders[] = { DMAFILE_MAX_ORDER, 4, 0 };

/* A bio counts its segments in 16 bits. */
#define DMAFILE_MAX_SEGMENTS	65535U

/* Allocates at most @left pages as one chunk. Lowers @max_order if no larger one is available. */
static struct page *dmafile_allocate_chunk(unsigned long left, unsigned int *max_order,
					   unsigned int *order)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(dmafile_orders); i++) {
		struct page *page;

		*order = dmafile_orders[i];
		if (*order > *max_order || left >> *order == 0)
			continue;
		page = alloc_pages(*order ? DMAFILE_LARGE_GFP : DMAFILE_SMALL_GFP, *order);
		if (page)
			return page;
		/* Do not try again for the next chunk. */
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
 * @pages: to which it is added
 * @bytes: the total size afterwards, rounded up to pages
 * @max_order: the largest order to allocate; orders are 8, 4 and 0
 *
 * Return: 0, -ENOMEM if memory or the caller's cgroup has no room, or -EINTR if the caller is being
 * killed. What has been allocated by then stays until dmafile_pages_free().
 */
int dmafile_pages_grow(struct dmafile_pages *pages, u64 bytes, unsigned int max_order)
{
	unsigned long count = (bytes + PAGE_SIZE - 1) >> PAGE_SHIFT;

	while (pages->count < count) {
		unsigned int order;
		struct page *page;

		if (fatal_signal_pending(current))
			return -EINTR;
		if (dmafile_pages_make_room(pages))
			return -ENOMEM;
		page = dmafile_allocate_chunk(count - pages->count, &max_order, &order);
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
 * @pages: to which it is added; has no chunks but borrowed ones
 * @page: the first page
 * @count: the number of pages: contiguous, physically and in the memory map, and valid until
 *	dmafile_pages_free()
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
 * @pages: no I/O and no device uses them any more; empty afterwards
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
 * @pages: no I/O uses them any more; empty afterwards
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
 * @pages: not empty
 * @at: the byte
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
 * @pages: the range has been allocated
 * @from: the first byte
 * @to: the byte after the last one
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
 * @to_at: the first byte there
 * @from: the source, other memory than @to
 * @from_at: the first byte there
 * @len: the number of bytes; both ranges have been allocated
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
 * Whether a page continues a segment, both physically and in the memory map, as bvec users compute
 * pages from the first one.
 */
static bool dmafile_page_follows(const struct bio_vec *bvec, struct page *page)
{
	size_t end = bvec->bv_offset + bvec->bv_len;

	return page_to_phys(bvec->bv_page) + end == page_to_phys(page) &&
	       bvec->bv_page + (end >> PAGE_SHIFT) == page;
}

/**
 * dmafile_pages_bvec - describe a range of memory as a bvec
 * @pages: the range has been allocated
 * @at: the first byte
 * @len: the length, less than 4 GiB; shortened, to a multiple of pages, if one I/O cannot have that
 *	many segments
 * @nr: set to the number of segments
 *
 * Adjacent chunks become one segment. Nothing is pinned: the owner of @pages keeps them until the
 * I/O is complete.
 *
 * Return: the segments, to be freed with kvfree() when the I/O is complete, or NULL.
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
