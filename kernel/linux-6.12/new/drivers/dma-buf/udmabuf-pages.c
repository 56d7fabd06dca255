// SPDX-License-Identifier: GPL-2.0-only
/* The memory of a udmabuf: pinned folios of memfds, with one entry per folio. */
#include <linux/dmafile/pages.h>
#include <linux/memfd.h>
#include <linux/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "udmabuf-pages.h"

/* The number of folios to pin at a time: an array of their pointers has the size of a page. */
#define UDMABUF_BATCH	(PAGE_SIZE / sizeof(struct folio *))

/* Adds @nr folios, the first from @offset on. Return: the number of bytes added, or an error. */
static loff_t udmabuf_pages_add(struct dmafile_pages *pages, struct folio **folios, long nr,
				pgoff_t offset, loff_t size)
{
	loff_t added = 0;
	long i;

	for (i = 0; i < nr; i++) {
		size_t len = min_t(loff_t, folio_size(folios[i]) - offset, size - added);

		if (dmafile_pages_borrow(pages, folio_page(folios[i], offset >> PAGE_SHIFT),
					 len >> PAGE_SHIFT)) {
			unpin_folios(folios + i, nr - i);
			return -ENOMEM;
		}
		added += len;
		/* Only the first folio may start before the range. */
		offset = 0;
	}
	return added;
}

/**
 * udmabuf_pages_pin - pin a range of a memfd and add it to a buffer
 * @pages: the memory of the buffer
 * @memfd: a file on tmpfs or hugetlbfs; holes are filled
 * @start: the offset, a multiple of the page size
 * @size: the number of bytes, a multiple of the page size
 *
 * Return: 0 or an error. In either case the caller must call udmabuf_pages_unpin() later.
 */
int udmabuf_pages_pin(struct dmafile_pages *pages, struct file *memfd, loff_t start, loff_t size)
{
	struct folio **folios = kmalloc_array(UDMABUF_BATCH, sizeof(*folios), GFP_KERNEL);
	loff_t done = 0;
	int err = folios ? 0 : -ENOMEM;

	if (!size)
		err = -EINVAL;
	while (!err && done < size) {
		pgoff_t offset;
		long nr = memfd_pin_folios(memfd, start + done, start + size - 1, folios,
					   UDMABUF_BATCH, &offset);
		loff_t added = nr > 0 ?
			       udmabuf_pages_add(pages, folios, nr, offset, size - done) : nr;

		if (added > 0)
			done += added;
		else
			err = added ?: -EINVAL;
		if (!err && fatal_signal_pending(current))
			err = -EINTR;
		cond_resched();
	}
	kfree(folios);
	return err;
}

/**
 * udmabuf_pages_unpin - unpin all folios of a buffer
 * @pages: the memory of the buffer, possibly empty; empty afterwards
 */
void udmabuf_pages_unpin(struct dmafile_pages *pages)
{
	unsigned int i;

	for (i = 0; i < pages->nr; i++) {
		unpin_folio(page_folio(pages->chunks[i].page));
		cond_resched();
	}
	dmafile_pages_free(pages);
}
