// SPDX-License-Identifier: GPL-2.0-only
/*
 * copy_file_range(2) between a file that is memory and a file of a disk.
 *
 * A file that is memory has FOP_MEMORY_FILE set, and a ->copy_file_range() that moves bytes between
 * its own pages and another file. No lock of either file is held here while it is called: to read
 * the disk may mean to wait for a write to the very memory, as on a loop device over tmpfs.
 *
 * Therefore only the system call comes here. Other callers of vfs_copy_file_range() may hold locks,
 * as overlayfs does, and get what they got without this: -EXDEV.
 */
#include <linux/compat.h>
#include <linux/fs.h>
#include <linux/fsnotify.h>
#include <linux/memory_copy.h>
#include <linux/sched/signal.h>
#include <linux/sched/xacct.h>
#include <linux/sizes.h>
#include <linux/splice.h>

/* How much is copied between two checks for signals. */
#define MEMORY_COPY_PART	SZ_256M

static bool memory_copy_on_device(const struct inode *inode)
{
	return inode->i_sb->s_type->fs_flags & FS_REQUIRES_DEV;
}

/* Regular files of /proc and the like don't count: their size is not that of their content. */
static bool memory_copy_on_disk(const struct file *file)
{
	const struct inode *inode = file_inode(file);

	return S_ISREG(inode->i_mode) && !memory_file(file) &&
	       (memory_copy_on_device(inode) || file->f_mode & FMODE_CAN_ODIRECT);
}

/* Asks the server of a network file system for the size. */
static int memory_copy_size(struct file *file, loff_t *size)
{
	const struct inode *inode = file_inode(file);
	struct kstat stat;
	int err;

	*size = i_size_read(inode);
	if (memory_file(file) || memory_copy_on_device(inode))
		return 0;
	err = vfs_getattr(&file->f_path, &stat, STATX_SIZE, AT_STATX_SYNC_AS_STAT);
	if (!err)
		*size = stat.size;
	return err;
}

/**
 * memory_copy_wanted - check whether a copy is between a file that is memory and one of a disk
 * @in: the source
 * @out: the destination
 *
 * Return: true if memory_copy_range() should do it.
 */
bool memory_copy_wanted(const struct file *in, const struct file *out)
{
	const struct inode *inode = file_inode(in);

	/* The size of an empty file may be unknown to a file system that has a server. */
	if (memory_file(out))
		return memory_copy_on_disk(in) &&
		       (memory_copy_on_device(inode) || i_size_read(inode));
	return memory_file(in) && memory_copy_on_disk(out);
}

/* The checks of generic_copy_file_checks(). Shortens @len to the end of @in. */
static int memory_copy_check(struct file *in, loff_t pos_in, struct file *out, loff_t pos_out,
			     size_t *len)
{
	struct inode *inode_in = file_inode(in), *inode_out = file_inode(out);
	loff_t size, count;
	int err;

	if (!(in->f_mode & FMODE_READ) || !(out->f_mode & FMODE_WRITE) || out->f_flags & O_APPEND)
		return -EBADF;
	if (IS_IMMUTABLE(inode_out))
		return -EPERM;
	if (IS_SWAPFILE(inode_in) || IS_SWAPFILE(inode_out))
		return -ETXTBSY;
	if ((u64)pos_in + *len < *len || (u64)pos_out + *len < *len)
		return -EOVERFLOW;
	err = memory_copy_size(in, &size);
	if (err)
		return err;
	count = pos_in < size ? min_t(u64, *len, size - pos_in) : 0;
	/* A dma-buf doesn't grow, so limits on the size of files don't apply to it. */
	if (count && S_ISREG(inode_out->i_mode)) {
		err = generic_write_check_limits(out, pos_out, &count);
		if (err)
			return err;
	}
	if (in_compat_syscall())
		count = min_t(u64, count, MAX_RW_COUNT);
	*len = count;
	err = rw_verify_area(READ, in, &pos_in, *len);
	return err ?: rw_verify_area(WRITE, out, &pos_out, *len);
}

/**
 * memory_copy_range - copy between a file that is memory and one of a disk
 * @in: the source; see memory_copy_wanted()
 * @pos_in: the offset in @in
 * @out: the destination
 * @pos_out: the offset in @out
 * @len: the number of bytes
 *
 * The open flags of the disk's file choose direct or buffered I/O. They are taken once for each
 * part; if O_APPEND is set after the check it has no effect.
 *
 * Return: the number of bytes copied, which is less than @len at the end of @in or of the memory,
 * after a signal, and before a byte that can't be copied; 0 at the end of @in. Or an error: those
 * of copy_file_range(2), -EINVAL for memory that doesn't support it, -ENOSPC behind the end of
 * memory that doesn't grow, -EPERM if a seal forbids it, and errors of the disk's file system.
 */
ssize_t memory_copy_range(struct file *in, loff_t pos_in, struct file *out, loff_t pos_out,
			  size_t len)
{
	const struct file_operations *ops = memory_file(out) ? out->f_op : in->f_op;
	ssize_t done = 0, ret;

	ret = memory_copy_check(in, pos_in, out, pos_out, &len);
	if (ret)
		return ret;
	/* Called even for 0 bytes: it may not be supported. */
	do {
		size_t part = min_t(size_t, len - done, MEMORY_COPY_PART);

		ret = ops->copy_file_range(in, pos_in + done, out, pos_out + done, part, 0);
		if (ret > 0)
			done += ret;
		if (ret < (ssize_t)part || signal_pending(current))
			break;
		cond_resched();
	} while (done < len);
	if (done) {
		fsnotify_access(in);
		add_rchar(current, done);
		fsnotify_modify(out);
		add_wchar(current, done);
	}
	inc_syscr(current);
	inc_syscw(current);
	return done ?: ret;
}

/**
 * memory_copy_within - copy between two files that are memory of the same kind
 * @in: the source
 * @pos_in: the offset in @in
 * @out: the destination
 * @pos_out: the offset in @out
 * @len: the number of bytes
 *
 * For &file_operations.copy_file_range, to do what vfs_copy_file_range() does for a file system
 * that does not implement it.
 *
 * Return: the number of bytes copied, or an error: -EXDEV between two file systems.
 */
ssize_t memory_copy_within(struct file *in, loff_t pos_in, struct file *out, loff_t pos_out,
			   size_t len)
{
	if (file_inode(in)->i_sb != file_inode(out)->i_sb)
		return -EXDEV;
	return splice_copy_file_range(in, pos_in, out, pos_out, len);
}
