// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bytes between a file of tmpfs, or a memfd, and a file of a disk.
 *
 * The disk works on the folios of the file itself. While it does, they are neither locked nor is
 * their inode: whoever reads the disk may, by way of a loop device or of reclaim, have to wait for
 * a write to this very file, and two copies may go in opposite directions. They are only held, as
 * direct I/O on a mapping of the file holds them, which therefore can do no more harm than that:
 *
 *  - A folio is up to date before it is let go: new ones are zero. Others see zeros or the new
 *    bytes, never what memory held before.
 *  - What is held is not reclaimed, swapped, migrated, or split. It may be truncated or punched;
 *    then the disk's bytes are lost with it, as if they had come first.
 *  - The file's size is raised when the bytes are there, under the inode's lock, as far as there
 *    are folios. What was allocated behind it for bytes that did not come is given back then: so
 *    only one copy at a time makes a file grow.
 *  - F_SEAL_WRITE can't be added meanwhile: a copy counts as a writable mapping.
 */
#include <linux/dmafile/io.h>
#include <linux/fs.h>
#include <linux/highmem.h>
#include <linux/memfd.h>
#include <linux/mm.h>
#include <linux/pagemap.h>
#include <linux/shmem_fs.h>
#include <linux/shmem_rw.h>
#include <linux/sizes.h>

/* Gathers in flight, and the largest of them, in MiB. */
#define DEPTH	4
#define GATHER	8
/* What is held at a time can't be reclaimed, and so is little. */
#define STEP	SZ_32M

/**
 * struct shmem_rw - one copy
 * @io: the transfer
 * @inode: of the memory
 * @first: the page with which @io's begin
 * @end: the last byte, and one
 * @grows: the file may become longer
 */
struct shmem_rw {
	struct dmafile_io io;
	struct inode *inode;
	pgoff_t first;
	loff_t end;
	bool grows;
};

/* A folio is made what those who read the file may see. */
static void settle(struct folio *folio)
{
	if (!folio_test_uptodate(folio)) {
		/* Memory that is zeroed when it's allocated needs no second time. */
		if (!want_init_on_alloc(0))
			folio_zero_range(folio, 0, folio_size(folio));
		flush_dcache_folio(folio);
		folio_mark_uptodate(folio);
	}
	/* Else it might be dropped as one that nobody has written to. */
	folio_mark_dirty(folio);
}

/* One more folio, or a hole's page. */
static int hold(struct dmafile_io *io, unsigned long most)
{
	struct shmem_rw *rw = container_of(io, struct shmem_rw, io);
	struct dmafile_pages *pages = io->pages;
	pgoff_t index = rw->first + pages->count;
	unsigned long count = 1;
	struct folio *folio;
	struct page *page;
	int err;

	err = shmem_get_folio(rw->inode, index, rw->end, &folio,
			      io->write ? SGP_READ : SGP_WRITE);
	if (err)
		return err;
	if (folio) {
		bool poisoned = folio_contain_hwpoisoned_page(folio);

		if (!poisoned && !io->write)
			settle(folio);
		folio_unlock(folio);
		if (poisoned) {
			folio_put(folio);
			return -EIO;
		}
		page = folio_file_page(folio, index);
		count = min(most, folio_next_index(folio) - index);
	} else {
		page = ZERO_PAGE(0);
		get_page(page);
	}
	err = dmafile_pages_borrow(pages, page, count);
	if (err)
		put_page(page);
	return err;
}

/* Before the first byte. Return: 0 or an error. */
static int begin_filling(struct shmem_rw *rw, struct file *memory)
{
	struct shmem_inode_info *info = SHMEM_I(rw->inode);
	int err = 0;

	rw->grows = rw->end > i_size_read(rw->inode);
	if (rw->grows)
		err = mutex_lock_killable(&info->growing);
	if (err)
		return err;
	inode_lock(rw->inode);
	if (info->seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE) ||
	    (info->seals & F_SEAL_GROW && rw->end > i_size_read(rw->inode)))
		err = -EPERM;
	else
		err = file_modified(memory);
	if (!err)
		err = mapping_map_writable(rw->inode->i_mapping);
	inode_unlock(rw->inode);
	if (err && rw->grows)
		mutex_unlock(&info->growing);
	return err;
}

/* How far there are folios: nothing is truncated, or comes back, while the inode is locked. */
static loff_t end_of_folios(const struct shmem_rw *rw)
{
	const struct dmafile_pages *pages = rw->io.pages;
	unsigned int i = pages->nr;

	while (i--) {
		if (page_folio(pages->chunks[i].page)->mapping == rw->inode->i_mapping)
			return (loff_t)(rw->first + pages->chunks[i].first +
					dmafile_chunk_pages(pages, i)) << PAGE_SHIFT;
	}
	return 0;
}

/* Behind the last byte of @done, or behind an error. Return: how many of them the file has. */
static ssize_t end_filling(struct shmem_rw *rw, loff_t at, ssize_t done)
{
	struct shmem_inode_info *info = SHMEM_I(rw->inode);
	loff_t size, end;

	inode_lock(rw->inode);
	size = i_size_read(rw->inode);
	end = done > 0 ? min(at + done, end_of_folios(rw)) : 0;
	if (end > size && info->seals & F_SEAL_GROW) {
		/* Sealed meanwhile. */
		done = size > at ? size - at : -EPERM;
	} else if (end > size) {
		i_size_write(rw->inode, end);
		size = end;
	}
	dmafile_pages_put(rw->io.pages);
	if (rw->grows && rw->end > size)
		shmem_truncate_range(rw->inode, size, round_up(rw->end, PAGE_SIZE) - 1);
	mapping_unmap_writable(rw->inode->i_mapping);
	inode_unlock(rw->inode);
	if (rw->grows)
		mutex_unlock(&info->growing);
	return done;
}

/* A step of one copy. Return: bytes moved, or an error. */
static ssize_t move(struct file *memory, loff_t at, struct file *file, loff_t pos, size_t len,
		    bool write)
{
	struct dmafile_pages pages = { };
	struct shmem_rw rw = {
		.io = {
			.file = file,
			.pages = &pages,
			.pos = pos,
			.at = offset_in_page(at),
			.len = len,
			.size = PAGE_ALIGN(offset_in_page(at) + len),
			.more = hold,
			.gather = dmafile_gather(len, GATHER),
			.depth = DEPTH,
			.max_order = DMAFILE_MAX_ORDER,
			.write = write,
		},
		.inode = file_inode(memory),
		.first = at >> PAGE_SHIFT,
		.end = at + len,
	};
	ssize_t ret = write ? 0 : begin_filling(&rw, memory);

	if (ret)
		return ret;
	ret = dmafile_transfer(&rw.io);
	ret = rw.io.done ?: ret;
	if (!write)
		return end_filling(&rw, at, ret);
	dmafile_pages_put(&pages);
	return ret;
}

/**
 * shmem_rw_file - &file_operations.rw_file of tmpfs and of memfds
 * @memory: the file that is memory
 * @at: the first byte there
 * @file: any other file, open for it
 * @pos: the first byte there
 * @len: how many
 * @write: from @memory to @file
 *
 * Return: bytes moved, or an error: -EPERM where a seal forbids it, those of writing to tmpfs, and
 * those of @file.
 */
ssize_t shmem_rw_file(struct file *memory, loff_t at, struct file *file, loff_t pos, size_t len,
		      bool write)
{
	size_t done = 0;
	ssize_t ret = 0;

	while (done < len) {
		size_t step = min_t(size_t, len - done, STEP);
		loff_t size = i_size_read(file_inode(memory));

		if (write && at + done >= size)
			break;
		if (write)
			step = min_t(loff_t, step, size - at - done);
		ret = move(memory, at + done, file, pos + done, step, write);
		if (ret > 0)
			done += ret;
		else if (write && ret == -EINVAL && i_size_read(file_inode(memory)) < size)
			/* Cut short meanwhile: up to its new end. */
			continue;
		if (ret < (ssize_t)step)
			break;
	}
	if (write)
		file_accessed(memory);
	return done ?: ret;
}
