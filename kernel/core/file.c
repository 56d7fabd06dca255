// SPDX-License-Identifier: GPL-2.0-only
/* Files that requests read or write. */
#include <linux/blkdev.h>
#include <linux/err.h>
#include <linux/fcntl.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/log2.h>
#include <linux/pagemap.h>
#include <linux/stat.h>

#include "compat.h"
#include "file.h"

/**
 * dmafile_file_get - get the file of a descriptor
 * @fd: the caller's descriptor
 * @write: the file will be written
 *
 * Return: a regular file or block device that is open for reading, or with @write for writing. The
 * caller must drop it with fput(). Or an error: -EBADF if the descriptor is invalid or not open in
 * that mode, -EISDIR for a directory, -EINVAL for other files without offsets. Also -EINVAL with
 * @write if the file is open with O_APPEND, because the data would be written at its end.
 */
struct file *dmafile_file_get(unsigned int fd, bool write)
{
	struct file *file = fget(fd);
	umode_t mode;
	int err = 0;

	if (!file)
		return ERR_PTR(-EBADF);
	mode = file_inode(file)->i_mode;
	if (S_ISDIR(mode))
		err = -EISDIR;
	else if (!S_ISREG(mode) && !S_ISBLK(mode))
		err = -EINVAL;
	else if (!(file->f_mode & (write ? FMODE_WRITE : FMODE_READ)))
		err = -EBADF;
	else if (write && (file->f_flags & O_APPEND))
		err = -EINVAL;
	if (err) {
		fput(file);
		return ERR_PTR(err);
	}
	return file;
}

/**
 * dmafile_file_size - get the size of a file, as stat() reports it
 * @file: from dmafile_file_get()
 * @size: set to the size of the file or block device in bytes
 *
 * A network file system may ask its server.
 *
 * Return: 0, or an error of the file system.
 */
int dmafile_file_size(struct file *file, u64 *size)
{
	struct kstat stat;
	int err;

	if (S_ISBLK(file_inode(file)->i_mode)) {
		*size = i_size_read(file->f_mapping->host);
		return 0;
	}
	err = vfs_getattr(&file->f_path, &stat, STATX_SIZE, AT_STATX_SYNC_AS_STAT);
	*size = err ? 0 : stat.size;
	return err;
}

/**
 * dmafile_file_align - get the alignment for direct I/O on a file
 * @file: from dmafile_file_get()
 * @write: the file will be written
 *
 * Never less than DMAFILE_ALIGN, even if the disk has smaller blocks: file systems serialise writes
 * to parts of their blocks, and buffers consist of pages.
 *
 * Return: a power of two from DMAFILE_ALIGN to DMAFILE_MAX_ALIGN. DMAFILE_ALIGN if the file system
 * does not report an alignment, or requires one outside this range; then it will reject direct I/O.
 */
u32 dmafile_file_align(struct file *file, bool write)
{
	struct kstat stat;
	u32 align = 0;

	if (IS_ENABLED(CONFIG_BLOCK) && S_ISBLK(file_inode(file)->i_mode))
		align = bdev_logical_block_size(I_BDEV(file->f_mapping->host));
	else if (!vfs_getattr(&file->f_path, &stat, STATX_DIOALIGN, AT_STATX_DONT_SYNC) &&
		 (stat.result_mask & STATX_DIOALIGN))
		align = max(dmafile_dio_offset_align(&stat, write), stat.dio_mem_align);
	if (!is_power_of_2(align) || align > DMAFILE_MAX_ALIGN)
		return DMAFILE_ALIGN;
	return max_t(u32, align, DMAFILE_ALIGN);
}
