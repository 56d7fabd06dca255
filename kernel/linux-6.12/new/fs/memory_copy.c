// SPDX-License-Identifier: GPL-2.0-only
/*
 * copy_file_range(2) between files that are memory and files of disks.
 *
 * A file that is memory, and can move bytes between its own pages and another file, has rw_file()
 * in its operations. It is asked for a part at a time, and no lock of the one file is held here
 * while the other one is worked on.
 */
#include <linux/compat.h>
#include <linux/fs.h>
#include <linux/fsnotify.h>
#include <linux/memory_copy.h>
#include <linux/sched/signal.h>
#include <linux/sched/xacct.h>
#include <linux/sizes.h>

/* How much is moved before anybody looks for a signal, or for memory to be let go. */
#define PART	SZ_256M

static bool on_device(const struct inode *inode)
{
	return inode->i_sb->s_type->fs_flags & FS_REQUIRES_DEV;
}

/* Not what only looks like a file, as all of /proc does, whose size says nothing. */
static bool on_disk(const struct file *file)
{
	const struct inode *inode = file_inode(file);

	return S_ISREG(inode->i_mode) && !file->f_op->rw_file &&
	       (on_device(inode) || file->f_mode & FMODE_CAN_ODIRECT);
}

/* Where a file ends. A server knows better than its inode. */
static int end_of(struct file *file, loff_t *end)
{
	const struct inode *inode = file_inode(file);
	struct kstat stat;
	int err;

	*end = i_size_read(inode);
	if (file->f_op->rw_file || on_device(inode))
		return 0;
	err = vfs_getattr(&file->f_path, &stat, STATX_SIZE, AT_STATX_SYNC_AS_STAT);
	if (!err)
		*end = stat.size;
	return err;
}

/**
 * copies_memory - whether a copy is between a file that is memory and one of a disk
 * @in: from where
 * @out: to where
 * @flags: of vfs_copy_file_range()
 *
 * Return: whether it's for copy_memory_range().
 */
bool copies_memory(const struct file *in, const struct file *out, unsigned int flags)
{
	if (flags)
		return false;
	/* An empty one of a server may be one of which nobody knows the size. */
	if (out->f_op->rw_file)
		return on_disk(in) && (on_device(file_inode(in)) || i_size_read(file_inode(in)));
	return in->f_op->rw_file && on_disk(out);
}

/* What may be asked of these files, as of any others; @len ends where @in does. */
static int check(struct file *in, loff_t pos_in, struct file *out, loff_t pos_out, size_t *len)
{
	struct inode *inode_in = file_inode(in), *inode_out = file_inode(out);
	loff_t end, count;
	int err;

	if (!(in->f_mode & FMODE_READ) || !(out->f_mode & FMODE_WRITE) || out->f_flags & O_APPEND)
		return -EBADF;
	if (IS_IMMUTABLE(inode_out))
		return -EPERM;
	if (IS_SWAPFILE(inode_in) || IS_SWAPFILE(inode_out))
		return -ETXTBSY;
	if ((u64)pos_in + *len < *len || (u64)pos_out + *len < *len)
		return -EOVERFLOW;
	err = end_of(in, &end);
	if (err)
		return err;
	count = pos_in < end ? min_t(u64, *len, end - pos_in) : 0;
	/* A dma-buf is no file that grows: no limit of those is about it. */
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
 * copy_memory_range - copy between a file that is memory and one of a disk
 * @in: from where; of both one is memory, see copies_memory()
 * @pos_in: the first byte there
 * @out: to where
 * @pos_out: the first byte there
 * @len: how many
 *
 * The open flags of the disk's file choose direct or buffered I/O.
 *
 * Return: how many were copied: less than @len where @in or the memory ends, at a signal, or where
 * the next one failed; 0 at the end of @in. Or an error: those of copy_file_range(2), -EINVAL for
 * memory that can't, -ENOSPC behind the end of memory that doesn't grow, -EPERM where a seal
 * forbids it, what the disk's file said.
 */
ssize_t copy_memory_range(struct file *in, loff_t pos_in, struct file *out, loff_t pos_out,
			  size_t len)
{
	bool fill = out->f_op->rw_file;
	struct file *memory = fill ? out : in, *disk = fill ? in : out;
	loff_t at = fill ? pos_out : pos_in, pos = fill ? pos_in : pos_out;
	ssize_t done = 0, ret;

	ret = memory->f_op->rw_file(memory, 0, disk, 0, 0, !fill);
	if (!ret)
		ret = check(in, pos_in, out, pos_out, &len);
	if (ret)
		return ret;
	while (done < len) {
		size_t part = min_t(size_t, len - done, PART);

		ret = memory->f_op->rw_file(memory, at + done, disk, pos + done, part, !fill);
		if (ret > 0)
			done += ret;
		if (ret < (ssize_t)part || signal_pending(current))
			break;
		cond_resched();
	}
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
