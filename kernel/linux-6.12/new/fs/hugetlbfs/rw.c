// SPDX-License-Identifier: GPL-2.0-only
/*
 * Copies between a file on hugetlbfs, or a memfd with huge pages, and a file on a disk.
 *
 * As for tmpfs (mm/shmem_rw.c), the I/O is done directly on the folios of the file. The folios are
 * referenced, but neither they nor the inode are locked during the I/O. Holes are filled with the
 * fallocate() of hugetlbfs, which maintains the reservations and clears the pages. A copy does not
 * extend the file: its size is a multiple of the huge page size, set with ftruncate(2).
 */
#include <linux/dmafile/io.h>
#include <linux/falloc.h>
#include <linux/fs.h>
#include <linux/hugetlb.h>
#include <linux/hugetlb_rw.h>
#include <linux/memfd.h>
#include <linux/memory_copy.h>
#include <linux/mm.h>
#include <linux/pagemap.h>

/* The maximum number of gathers in flight, and their maximum size in MiB. */
#define HUGETLB_RW_DEPTH	4
#define HUGETLB_RW_GATHER	32

/**
 * struct hugetlb_rw - one copy
 * @io: the transfer
 * @memory: the file on hugetlbfs
 * @first: the index in the file of the first page of the transfer, in base pages
 */
struct hugetlb_rw {
	struct dmafile_io io;
	struct file *memory;
	pgoff_t first;
};

/* &struct dmafile_io.more: adds the next folio, or zero pages for a hole in the source. */
static int hugetlb_rw_add_folio(struct dmafile_io *io, unsigned long most)
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
	/* The next call will find the folio. */
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

/* Called before the first byte is read. Return: 0 or an error. */
static int hugetlb_rw_begin_fill(struct file *memory)
{
	struct inode *inode = file_inode(memory);
	int err;

	inode_lock(inode);
	if (HUGETLBFS_I(inode)->seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE))
		err = -EPERM;
	else
		err = file_modified(memory);
	/* This prevents F_SEAL_WRITE from being added. */
	if (!err)
		err = mapping_map_writable(memory->f_mapping);
	inode_unlock(inode);
	return err;
}

static ssize_t hugetlb_rw(struct file *memory, loff_t at, struct file *file, loff_t pos,
			  size_t len, bool write)
{
	loff_t size = i_size_read(file_inode(memory));
	struct dmafile_pages pages = { };
	struct hugetlb_rw rw = {
		.io = {
			.file = file,
			.pages = &pages,
			.pos = pos,
			.at = offset_in_page(at),
			.more = hugetlb_rw_add_folio,
			.depth = HUGETLB_RW_DEPTH,
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
	rw.io.gather = dmafile_gather(len, HUGETLB_RW_GATHER);
	err = write ? 0 : hugetlb_rw_begin_fill(memory);
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
	/* The file was truncated during the copy: retry up to the new end. */
	if (err == -EINVAL && i_size_read(file_inode(memory)) < size) {
		size = i_size_read(file_inode(memory));
		goto again;
	}
	/* fallocate() returns -EINTR for any signal, but this call can be restarted. */
	return err == -EINTR && !fatal_signal_pending(current) ? -ERESTARTSYS : err;
}

/**
 * hugetlb_copy_file_range - &file_operations.copy_file_range of hugetlbfs
 * @in: the source
 * @pos_in: the offset in @in
 * @out: the destination; one of the two is a file on a disk, unless both are memory files
 * @pos_out: the offset in @out
 * @len: the number of bytes
 * @flags: unused
 *
 * Return: the number of bytes; 0 if the offset in a source on hugetlbfs is beyond its end; or an
 * error: -ENOSPC if the offset in a destination on hugetlbfs is beyond its end, -EPERM if a seal
 * prevents it, -EIO for poisoned memory, and errors of fallocate(2) and of the file system on the
 * disk.
 */
ssize_t hugetlb_copy_file_range(struct file *in, loff_t pos_in, struct file *out, loff_t pos_out,
				size_t len, unsigned int flags)
{
	if (memory_file(in) && memory_file(out))
		return memory_copy_within(in, pos_in, out, pos_out, len);
	if (memory_file(in))
		return hugetlb_rw(in, pos_in, out, pos_out, len, true);
	return hugetlb_rw(out, pos_out, in, pos_in, len, false);
}
