// SPDX-License-Identifier: GPL-2.0-only
/* Files of which bytes can be asked for. */
#include <linux/err.h>
#include <linux/fcntl.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/pagemap.h>
#include <linux/stat.h>

#include "file.h"

/**
 * dmafile_file_get - the file of a descriptor
 * @fd: of the caller
 * @write: it is to be written to
 *
 * Return: a regular file or a block device that is open for it, to be given back by fput().
 * -EBADF where the descriptor isn't one, or isn't open for it. -EISDIR for a folder, -EINVAL for
 * whatever else has no offsets, and for O_APPEND where it is to be written to: it would go
 * elsewhere.
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
 * dmafile_file_size - a file's size as stat() would tell it, also where that asks a server
 * @file: of dmafile_file_get()
 * @size: becomes its bytes; of a block device, those of the disk
 *
 * Return: 0, or what the file system says.
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
