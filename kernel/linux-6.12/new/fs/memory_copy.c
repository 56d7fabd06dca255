// SPDX-License-Identifier: GPL-2.0-only
/*
 * copy_file_range(2) between a memory file and a file on a disk.
 *
 * A memory file has FOP_MEMORY_FILE set, and a ->copy_file_range() that transfers data between its
 * own pages and another file. It is called without locks on either file: a read from the disk may
 * have to wait for a write to the same memory, for example on a loop device backed by tmpfs.
 *
 * Therefore only the system call uses this code. Other callers of vfs_copy_file_range(), such as
 * overlayfs, may hold locks. They still get -EXDEV.
 */
#include <linux/compat.h>
#include <linux/fs.h>
#include <linux/fsnotify.h>
#include <linux/memory_copy.h>
#include <linux/sched/signal.h>
#include <linux/sched/xacct.h>
#include <linux/sizes.h>
#include <linux/splice.h>

/* The number of bytes copied between two checks for signals. */
#define MEMORY_COPY_PART	SZ_256M

static bool memory_copy_on_device(const struct inode *inode)
{
	return inode->i_sb->s_type->fs_flags & FS_REQUIRES_DEV;
}

/* Excludes the regular files of /proc and similar file systems, whose i_size is meaningless. */
static bool memory_copy_on_disk(const struct file *file)
{
	const struct inode *inode = file_inode(file);

	return S_ISREG(inode->i_mode) && !memory_file(file) &&
	       (memory_copy_on_device(inode) || file->f_mode & FMODE_CAN_ODIRECT);
}

/* Gets the size of a file, for a network file system from its server. */
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
 * memory_copy_wanted - check whether a copy is between a memory file and a file on a disk
 * @in: the source
 * @out: the destination
 *
 * Return: true if the caller should use memory_copy_range().
 */
bool memory_copy_wanted(const struct file *in, const struct file *out)
{
	const struct inode *inode = file_inode(in);

	/* Without a device, i_size may be 0 because the size is unknown, as with FUSE. */
	if (memory_file(out))
		return memory_copy_on_disk(in) &&
		       (memory_copy_on_device(inode) || i_size_read(inode));
	return memory_file(in) && memory_copy_on_disk(out);
}

/* Same checks as generic_copy_file_checks(). Limits @len to the end of @in. */
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
	/* File size limits do not apply to dma-bufs, which have a fixed size. */
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
 * memory_copy_range - copy between a memory file and a file on a disk
 * @in: the source; see memory_copy_wanted()
 * @pos_in: the offset in @in
 * @out: the destination
 * @pos_out: the offset in @out
 * @len: the number of bytes
 *
 * The open flags of the file on the disk select direct or buffered I/O. They are read once for each
 * part. If O_APPEND is set after the check, it has no effect.
 *
 * Return: the number of bytes copied, or an error. It is less than @len at the end of @in or of the
 * memory, after a signal, and before a byte that cannot be copied, and 0 at the end of @in. Errors
 * are those of copy_file_range(2), -EINVAL if the memory does not support copies, -ENOSPC beyond
 * the end of memory of fixed size, -EPERM if a seal prevents it, and errors of the file system on
 * the disk.
 */
ssize_t memory_copy_range(struct file *in, loff_t pos_in, struct file *out, loff_t pos_out,
			  size_t len)
{
	const struct file_operations *ops = memory_file(out) ? out->f_op : in->f_op;
	ssize_t done = 0, ret;

	ret = memory_copy_check(in, pos_in, out, pos_out, &len);
	if (ret)
		return ret;
	/* Call it even for 0 bytes, to get an error if copies are not supported. */
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
 * memory_copy_within - copy between two memory files of the same kind
 * @in: the source
 * @pos_in: the offset in @in
 * @out: the destination
 * @pos_out: the offset in @out
 * @len: the number of bytes
 *
 * For implementations of &file_operations.copy_file_range: copies as vfs_copy_file_range() does for
 * file systems without this operation.
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
