// SPDX-License-Identifier: GPL-2.0-only
/*
 * Copies between a file on tmpfs, or a memfd, and a file on a disk.
 *
 * The I/O is done directly on the folios of the tmpfs file. Neither the folios nor the inode are
 * locked during the I/O: it may have to wait for a write to the same file, through a loop device or
 * reclaim, and two copies may run in opposite directions. The folios are only referenced, as during
 * direct I/O on a mapping of the file, so the same rules apply:
 *
 *  - A folio is uptodate before it is unlocked, and a new folio is zeroed. Readers of the file see
 *    zeros or the new data, never the previous contents of the memory.
 *  - A referenced folio is not reclaimed, swapped out, migrated or split. It may be truncated or
 *    punched out. Then the data from the disk is lost, as if it had been copied before that.
 *  - The size of the file is updated under the inode's lock after the data has been read, and only
 *    up to the last folio that is still in the file. Folios beyond it that were added for data that
 *    was not read are removed. Therefore only one copy at a time may extend a file.
 *  - F_SEAL_WRITE cannot be added during a copy, which counts as a writable mapping.
 */
#include <linux/dmafile/io.h>
#include <linux/fs.h>
#include <linux/highmem.h>
#include <linux/memfd.h>
#include <linux/memory_copy.h>
#include <linux/mm.h>
#include <linux/pagemap.h>
#include <linux/shmem_fs.h>
#include <linux/shmem_rw.h>
#include <linux/sizes.h>
#include <linux/wait_bit.h>

/* The maximum number of gathers in flight, and their maximum size in MiB. */
#define SHMEM_RW_DEPTH	4
#define SHMEM_RW_GATHER	8
/* The number of bytes referenced at a time; small, because they cannot be reclaimed. */
#define SHMEM_RW_STEP	SZ_32M

/**
 * struct shmem_rw - one copy
 * @io: the transfer
 * @inode: the inode of the tmpfs file
 * @first: the index in the file of the first page of the transfer
 * @end: the offset in the file after the last byte
 * @grows: this copy may extend the file
 */
struct shmem_rw {
	struct dmafile_io io;
	struct inode *inode;
	pgoff_t first;
	loff_t end;
	bool grows;
};

static bool shmem_rw_try_grow(struct shmem_inode_info *info)
{
	bool free;

	spin_lock_irq(&info->lock);
	free = !(info->flags & SHMEM_F_GROWING);
	info->flags |= SHMEM_F_GROWING;
	spin_unlock_irq(&info->lock);
	return free;
}

static void shmem_rw_grown(struct shmem_inode_info *info)
{
	spin_lock_irq(&info->lock);
	info->flags &= ~SHMEM_F_GROWING;
	spin_unlock_irq(&info->lock);
	/* wake_up_var() checks for waiters without a lock. */
	smp_mb();
	wake_up_var(&info->flags);
}

/* Initialises a new folio, so that it can be exposed to readers of the file. */
static void shmem_rw_init_folio(struct folio *folio)
{
	if (!folio_test_uptodate(folio)) {
		/*
		 * Most kernels zero all memory on allocation (init_on_alloc, which page poisoning
		 * disables). Zeroing it twice would double the cost of a copy into new memory.
		 */
		if (!want_init_on_alloc(0))
			folio_zero_range(folio, 0, folio_size(folio));
		flush_dcache_folio(folio);
		folio_mark_uptodate(folio);
	}
	/* Reclaim could drop a clean folio instead of swapping it out. */
	folio_mark_dirty(folio);
}

/* &struct dmafile_io.more: adds the next folio, or a zero page for a hole in the source. */
static int shmem_rw_add_folio(struct dmafile_io *io, unsigned long most)
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
			shmem_rw_init_folio(folio);
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

/* Called before the first byte is read. Return: 0 or an error. */
static int shmem_rw_begin_fill(struct shmem_rw *rw, struct file *memory)
{
	struct shmem_inode_info *info = SHMEM_I(rw->inode);
	int err = 0;

	rw->grows = rw->end > i_size_read(rw->inode);
	if (rw->grows)
		err = wait_var_event_killable(&info->flags, shmem_rw_try_grow(info));
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
		shmem_rw_grown(info);
	return err;
}

/*
 * Returns the end of the last folio of the copy that has not been truncated. Called with the inode
 * locked, so that this cannot change.
 */
static loff_t shmem_rw_folios_end(const struct shmem_rw *rw)
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

/*
 * Removes the folios of the copy that are beyond the end of the file. Those in a range reserved by
 * fallocate() are zeroed instead. Drops all references.
 */
static void shmem_rw_give_back(struct shmem_rw *rw, loff_t size)
{
	struct dmafile_pages *pages = rw->io.pages;
	loff_t begin = (loff_t)rw->first << PAGE_SHIFT, end = round_up(rw->end, PAGE_SIZE);
	loff_t kept = (loff_t)shmem_fallocend(rw->inode, 0) << PAGE_SHIFT;

	kept = clamp(kept, size, end);
	if (kept > max(size, begin))
		dmafile_pages_zero(pages, max(size, begin) - begin,
				   min_t(u64, kept - begin, dmafile_pages_bytes(pages)));
	dmafile_pages_put(pages);
	if (kept < end)
		shmem_truncate_range(rw->inode, kept, end - 1);
}

/*
 * Finishes a copy into the file. @done is the number of bytes read to offset @at, or an error.
 * Return: the number of bytes that are in the file, or an error.
 */
static ssize_t shmem_rw_end_fill(struct shmem_rw *rw, loff_t at, ssize_t done)
{
	struct shmem_inode_info *info = SHMEM_I(rw->inode);
	loff_t size, end;

	inode_lock(rw->inode);
	size = i_size_read(rw->inode);
	end = done > 0 && rw->grows ? min(at + done, shmem_rw_folios_end(rw)) : 0;
	if (end > size && info->seals & F_SEAL_GROW) {
		/* The seal was added during the copy. */
		done = size > at ? size - at : -EPERM;
	} else if (end > size) {
		i_size_write(rw->inode, end);
		size = end;
	}
	/* After a truncation another copy may be extending the file: keep its folios. */
	if (rw->end > size && !rw->grows)
		rw->grows = shmem_rw_try_grow(info);
	if (rw->end > size && rw->grows)
		shmem_rw_give_back(rw, size);
	else
		dmafile_pages_put(rw->io.pages);
	mapping_unmap_writable(rw->inode->i_mapping);
	inode_unlock(rw->inode);
	if (rw->grows)
		shmem_rw_grown(info);
	return done;
}

/* Copies at most SHMEM_RW_STEP. Return: the number of bytes, or an error. */
static ssize_t shmem_rw_step(struct file *memory, loff_t at, struct file *file, loff_t pos,
			     size_t len, bool write)
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
			.more = shmem_rw_add_folio,
			.gather = dmafile_gather(len, SHMEM_RW_GATHER),
			.depth = SHMEM_RW_DEPTH,
			.max_order = DMAFILE_MAX_ORDER,
			.write = write,
		},
		.inode = file_inode(memory),
		.first = at >> PAGE_SHIFT,
		.end = at + len,
	};
	ssize_t ret = write ? 0 : shmem_rw_begin_fill(&rw, memory);

	if (ret)
		return ret;
	ret = dmafile_transfer(&rw.io);
	ret = rw.io.done ?: ret;
	if (!write)
		return shmem_rw_end_fill(&rw, at, ret);
	dmafile_pages_put(&pages);
	return ret;
}

static ssize_t shmem_rw(struct file *memory, loff_t at, struct file *file, loff_t pos, size_t len,
			bool write)
{
	size_t done = 0;
	ssize_t ret = 0;

	while (done < len) {
		size_t step = min_t(size_t, len - done, SHMEM_RW_STEP);
		loff_t size = i_size_read(file_inode(memory));

		if (write && at + done >= size)
			break;
		if (write)
			step = min_t(loff_t, step, size - at - done);
		ret = shmem_rw_step(memory, at + done, file, pos + done, step, write);
		if (ret > 0)
			done += ret;
		else if (write && ret == -EINVAL && i_size_read(file_inode(memory)) < size)
			/* The file was truncated during the copy: retry up to the new end. */
			continue;
		if (ret < (ssize_t)step)
			break;
	}
	if (write && len)
		file_accessed(memory);
	return done ?: ret;
}

/**
 * shmem_copy_file_range - &file_operations.copy_file_range of tmpfs and memfds
 * @in: the source
 * @pos_in: the offset in @in
 * @out: the destination; one of the two is a file on a disk, unless both are memory files
 * @pos_out: the offset in @out
 * @len: the number of bytes
 * @flags: unused
 *
 * Return: the number of bytes, or an error: -EPERM if a seal prevents it, errors of writing to
 * tmpfs, and errors of the file system on the disk.
 */
ssize_t shmem_copy_file_range(struct file *in, loff_t pos_in, struct file *out, loff_t pos_out,
			      size_t len, unsigned int flags)
{
	if (memory_file(in) && memory_file(out))
		return memory_copy_within(in, pos_in, out, pos_out, len);
	if (memory_file(in))
		return shmem_rw(in, pos_in, out, pos_out, len, true);
	return shmem_rw(out, pos_out, in, pos_in, len, false);
}
