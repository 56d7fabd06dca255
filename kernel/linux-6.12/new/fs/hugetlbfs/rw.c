// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bytes between a file of hugetlbfs, or a memfd on huge pages, and a file of a disk.
 *
 * As with tmpfs (mm/shmem_rw.c) the disk works on the folios of the file itself, which are held;
 * neither they nor their inode are locked. Holes are filled by hugetlbfs's own fallocate(), which
 * keeps the reservations right and gives nothing that isn't zero. A file doesn't grow by this: its
 * size is a multiple of its pages', as ftruncate(2) sets it.
 */
#include <linux/dmafile/io.h>
#include <linux/falloc.h>
#include <linux/fs.h>
#include <linux/hugetlb.h>
#include <linux/hugetlb_rw.h>
#include <linux/memfd.h>
#include <linux/mm.h>
#include <linux/pagemap.h>

/* Gathers in flight, and the largest of them, in MiB. */
#define DEPTH	4
#define GATHER	32

/**
 * struct hugetlb_rw - one copy
 * @io: the transfer
 * @memory: the file
 * @first: the page, not the huge one, with which @io's begin
 */
struct hugetlb_rw {
	struct dmafile_io io;
	struct file *memory;
	pgoff_t first;
};

/* One more folio, or as much of a hole as is wanted. */
static int hold(struct dmafile_io *io, unsigned long most)
{
	struct hugetlb_rw *rw = container_of(io, struct hugetlb_rw, io);
	struct dmafile_pages *pages = io->pages;
	struct hstate *h = hstate_file(rw->memory);
	pgoff_t index = rw->first + pages->count;
	unsigned long skip = index & (pages_per_huge_page(h) - 1);
	unsigned long count = min(most, pages_per_huge_page(h) - skip);
	loff_t at = (loff_t)index << PAGE_SHIFT;
	struct folio *folio;
	int err = 0;

	if (at >= i_size_read(file_inode(rw->memory)))
		return -EINVAL;
	folio = filemap_get_folio(rw->memory->f_mapping, index - skip);
	if (!IS_ERR(folio)) {
		err = folio_test_hwpoison(folio) ? -EIO :
		      dmafile_pages_borrow(pages, folio_page(folio, skip), count);
		if (err)
			folio_put(folio);
		return err;
	}
	/* And look again. */
	if (!io->write)
		return vfs_fallocate(rw->memory, FALLOC_FL_KEEP_SIZE, at, count << PAGE_SHIFT);
	while (count-- && !err) {
		struct page *page = ZERO_PAGE(0);

		err = dmafile_pages_borrow(pages, page, 1);
		if (!err)
			get_page(page);
	}
	return err;
}

/* Before the first byte. Return: 0 or an error. */
static int begin_filling(struct file *memory)
{
	struct inode *inode = file_inode(memory);
	int err;

	inode_lock(inode);
	if (HUGETLBFS_I(inode)->seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE))
		err = -EPERM;
	else
		err = file_modified(memory);
	/* F_SEAL_WRITE can't be added from now on. */
	if (!err)
		err = mapping_map_writable(memory->f_mapping);
	inode_unlock(inode);
	return err;
}

/**
 * hugetlb_rw_file - &file_operations.rw_file of hugetlbfs and of memfds on huge pages
 * @memory: the file that is memory
 * @at: the first byte there
 * @file: any other file, open for it
 * @pos: the first byte there
 * @len: how many
 * @write: from @memory to @file
 *
 * Return: bytes moved; 0 behind the end of @memory, or -ENOSPC where it was to be filled; or an
 * error: -EPERM where a seal forbids it, those of fallocate(2), -EIO for poisoned memory, and those
 * of @file.
 */
ssize_t hugetlb_rw_file(struct file *memory, loff_t at, struct file *file, loff_t pos, size_t len,
			bool write)
{
	loff_t size = i_size_read(file_inode(memory));
	struct dmafile_pages pages = { };
	struct hugetlb_rw rw = {
		.io = {
			.file = file,
			.pages = &pages,
			.pos = pos,
			.at = offset_in_page(at),
			.more = hold,
			.depth = DEPTH,
			.max_order = DMAFILE_MAX_ORDER,
			.write = write,
		},
		.memory = memory,
		.first = at >> PAGE_SHIFT,
	};
	int err;

	if (!len)
		return 0;
again:
	if (at >= size)
		return write ? 0 : -ENOSPC;
	len = min_t(loff_t, len, size - at);
	rw.io.len = len;
	rw.io.size = PAGE_ALIGN(rw.io.at + len);
	rw.io.gather = dmafile_gather(len, GATHER);
	err = write ? 0 : begin_filling(memory);
	if (err)
		return err;
	err = dmafile_transfer(&rw.io);
	dmafile_pages_put(&pages);
	if (write)
		file_accessed(memory);
	else
		mapping_unmap_writable(memory->f_mapping);
	if (rw.io.done)
		return rw.io.done;
	/* It was cut short meanwhile: up to its new end. */
	if (err == -EINVAL && i_size_read(file_inode(memory)) < size) {
		size = i_size_read(file_inode(memory));
		goto again;
	}
	/* fallocate() ends at any signal. */
	return err == -EINTR && !fatal_signal_pending(current) ? -ERESTARTSYS : err;
}
