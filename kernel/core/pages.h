/* SPDX-License-Identifier: GPL-2.0-only */
/* The memory of a buffer: its pages in order. */
#ifndef _DMAFILE_PAGES_H
#define _DMAFILE_PAGES_H

#include <linux/bvec.h>
#include <linux/gfp.h>
#include <linux/types.h>

/*
 * For all memory except the pages themselves. It is charged to the caller's cgroup as well.
 * Reaching the limit is an error that does not invoke the OOM killer.
 */
#define DMAFILE_GFP	(GFP_KERNEL_ACCOUNT | __GFP_RETRY_MAYFAIL | __GFP_NOWARN)

/* The maximum order of a chunk: 1 MiB with 4 KiB pages, which devices map as one segment. */
#define DMAFILE_MAX_ORDER	8

/**
 * struct dmafile_chunk - pages that are contiguous physically and in the memory map
 * @page: the first page
 * @first: its index in the buffer
 */
struct dmafile_chunk {
	struct page *page;
	unsigned long first;
};

/**
 * struct dmafile_pages - memory that grows at its end; empty if all members are zero
 * @chunks: the chunks, in order
 * @nr: the number of chunks
 * @taken: the number of leading chunks that belong to another owner
 * @room: the number of chunks for which @chunks has room
 * @count: the total number of pages
 */
struct dmafile_pages {
	struct dmafile_chunk *chunks;
	unsigned int nr;
	unsigned int taken;
	unsigned int room;
	unsigned long count;
};

static inline u64 dmafile_pages_bytes(const struct dmafile_pages *pages)
{
	return (u64)pages->count << PAGE_SHIFT;
}

/* The number of pages in a chunk: a power of two unless the chunk is borrowed. */
static inline unsigned long dmafile_chunk_pages(const struct dmafile_pages *pages, unsigned int nr)
{
	unsigned long end = nr + 1 < pages->nr ? pages->chunks[nr + 1].first : pages->count;

	return end - pages->chunks[nr].first;
}

/* Returns the next chunk, to be freed by the caller; NULL if there are no more. */
static inline struct page *dmafile_pages_take(struct dmafile_pages *pages)
{
	return pages->taken < pages->nr ? pages->chunks[pages->taken++].page : NULL;
}

int dmafile_pages_grow(struct dmafile_pages *pages, u64 bytes, unsigned int max_order, gfp_t gfp);
int dmafile_pages_borrow(struct dmafile_pages *pages, struct page *page, unsigned long count);
unsigned int dmafile_pages_chunk(const struct dmafile_pages *pages, u64 at);
struct page *dmafile_pages_page(const struct dmafile_pages *pages, u64 at);
void dmafile_pages_free(struct dmafile_pages *pages);
void dmafile_pages_put(struct dmafile_pages *pages);
void dmafile_pages_zero(const struct dmafile_pages *pages, u64 from, u64 to);
void dmafile_pages_copy(const struct dmafile_pages *to, u64 to_at,
			const struct dmafile_pages *from, u64 from_at, u64 len);
struct bio_vec *dmafile_pages_bvec(const struct dmafile_pages *pages, u64 at, u64 *len,
				   unsigned int *nr);

#endif /* _DMAFILE_PAGES_H */
