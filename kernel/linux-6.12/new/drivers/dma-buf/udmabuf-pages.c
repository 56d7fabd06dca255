// SPDX-License-Identifier: GPL-2.0-only
/* The memory of an udmabuf: pinned folios of memfds, an entry for each. */
#include <linux/dma-mapping.h>
#include <linux/dmafile/pages.h>
#include <linux/highmem.h>
#include <linux/mm.h>
#include <linux/pagemap.h>
#include <linux/scatterlist.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "udmabuf-pages.h"

/* Folios that are pinned at a time: a page of pointers. */
#define BATCH	(PAGE_SIZE / sizeof(struct folio *))
/* Pages that a fault maps, as many as a table of them holds. */
#define AROUND	PTRS_PER_PTE

/* What fallocate(2) has given a file holds anything, until somebody wants to see it. */
static void settle(struct folio *folio)
{
	if (folio_test_uptodate(folio))
		return;
	folio_lock(folio);
	if (!folio_test_uptodate(folio)) {
		folio_zero_range(folio, 0, folio_size(folio));
		flush_dcache_folio(folio);
		folio_mark_uptodate(folio);
	}
	folio_unlock(folio);
}

/* Takes the range's part in each of @nr folios. Return: bytes, or an error. */
static loff_t take(struct dmafile_pages *pages, struct folio **folios, long nr, pgoff_t offset,
		   loff_t size)
{
	loff_t taken = 0;
	long i;

	for (i = 0; i < nr; i++) {
		size_t len = min_t(loff_t, folio_size(folios[i]) - offset, size - taken);

		settle(folios[i]);
		if (dmafile_pages_borrow(pages, folio_page(folios[i], offset >> PAGE_SHIFT),
					 len >> PAGE_SHIFT)) {
			unpin_folios(folios + i, nr - i);
			return -ENOMEM;
		}
		taken += len;
		/* Only the first one may begin before the range. */
		offset = 0;
	}
	return taken;
}

/**
 * udmabuf_pages_pin - add a range of a memfd
 * @pages: what it is added to
 * @memfd: on tmpfs or hugetlbfs; its holes are filled
 * @start: the first byte, that of a page
 * @size: whole pages
 *
 * Return: 0 or an error; what has been pinned stays until udmabuf_pages_unpin().
 */
int udmabuf_pages_pin(struct dmafile_pages *pages, struct file *memfd, loff_t start, loff_t size)
{
	struct folio **folios = kmalloc_array(BATCH, sizeof(*folios), GFP_KERNEL);
	loff_t done = 0;
	int err = folios ? 0 : -ENOMEM;

	if (!size)
		err = -EINVAL;
	while (!err && done < size) {
		pgoff_t offset;
		long nr = memfd_pin_folios(memfd, start + done, start + size - 1, folios, BATCH,
					   &offset);
		loff_t taken = nr > 0 ? take(pages, folios, nr, offset, size - done) : nr;

		if (taken > 0)
			done += taken;
		else
			err = taken ?: -EINVAL;
		if (!err && fatal_signal_pending(current))
			err = -EINTR;
		cond_resched();
	}
	kfree(folios);
	return err;
}

/**
 * udmabuf_pages_unpin - give all back
 * @pages: of udmabuf_pages_pin(), or empty; empty afterwards
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

/* Where the next segment ends that begins at @from: neighbours in memory, at most @most bytes. */
static u64 segment(const struct dmafile_pages *pages, u64 from, u64 most)
{
	unsigned int nr = dmafile_pages_chunk(pages, from);
	unsigned long first = page_to_pfn(dmafile_pages_page(pages, from));
	u64 end;

	do {
		end = ((u64)pages->chunks[nr].first + dmafile_chunk_pages(pages, nr)) << PAGE_SHIFT;
		nr++;
	} while (end - from < most && nr < pages->nr &&
		 page_to_pfn(pages->chunks[nr].page) == first + ((end - from) >> PAGE_SHIFT));
	return min(end, from + most);
}

/**
 * udmabuf_pages_sg - a table of the memory for a device
 * @pages: of udmabuf_pages_pin(), not empty
 * @dev: with segments no larger than it takes
 * @sg: filled in, to be given back by sg_free_table()
 *
 * Return: 0 or -ENOMEM.
 */
int udmabuf_pages_sg(const struct dmafile_pages *pages, struct device *dev, struct sg_table *sg)
{
	u64 at, size = dmafile_pages_bytes(pages);
	u64 most = max(round_down(min_t(u64, dma_get_max_seg_size(dev),
					dma_max_mapping_size(dev)), PAGE_SIZE), PAGE_SIZE);
	struct scatterlist *sgl;
	unsigned int nr = 0;

	for (at = 0; at < size; at = segment(pages, at, most))
		nr++;
	if (sg_alloc_table(sg, nr, GFP_KERNEL))
		return -ENOMEM;
	sgl = sg->sgl;
	for (at = 0; at < size; sgl = sg_next(sgl)) {
		u64 end = segment(pages, at, most);

		sg_set_page(sgl, dmafile_pages_page(pages, at), end - at, 0);
		at = end;
	}
	return 0;
}

/**
 * udmabuf_pages_fault - map a page, and those around it
 * @pages: the memory of the whole mapping
 * @vmf: the fault
 *
 * None of it ever goes away while the mapping is there, so nobody gains from another fault.
 *
 * Return: VM_FAULT_NOPAGE, or why the page was not mapped.
 */
vm_fault_t udmabuf_pages_fault(const struct dmafile_pages *pages, struct vm_fault *vmf)
{
	struct vm_area_struct *vma = vmf->vma;
	pgoff_t from = max(round_down(vmf->pgoff, AROUND), vma->vm_pgoff);
	pgoff_t end = min(round_down(vmf->pgoff, AROUND) + AROUND, vma->vm_pgoff + vma_pages(vma));
	vm_fault_t ret;
	pgoff_t at;

	if (vmf->pgoff >= pages->count)
		return VM_FAULT_SIGBUS;
	ret = vmf_insert_pfn(vma, vmf->address,
			     page_to_pfn(dmafile_pages_page(pages, (u64)vmf->pgoff << PAGE_SHIFT)));
	if (ret != VM_FAULT_NOPAGE)
		return ret;
	for (at = from; at < min(end, pages->count); at++) {
		unsigned long address = vma->vm_start + ((at - vma->vm_pgoff) << PAGE_SHIFT);
		struct page *page = dmafile_pages_page(pages, (u64)at << PAGE_SHIFT);

		/* They have faults of their own where this fails. */
		if (at != vmf->pgoff &&
		    vmf_insert_pfn(vma, address, page_to_pfn(page)) != VM_FAULT_NOPAGE)
			break;
	}
	return ret;
}
