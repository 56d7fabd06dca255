/* SPDX-License-Identifier: GPL-2.0-only */
/* Wrappers for kernel interfaces that differ between kernel versions. */
#ifndef _DMAFILE_COMPAT_H
#define _DMAFILE_COMPAT_H

#include <linux/fs.h>
#include <linux/stat.h>

static inline ssize_t dmafile_iter_write(struct file *file, struct kiocb *iocb,
					 struct iov_iter *iter)
{
	return vfs_iocb_iter_write(file, iocb, iter);
}

static inline u32 dmafile_dio_offset_align(const struct kstat *stat, bool write)
{
	return stat->dio_offset_align;
}

#endif /* _DMAFILE_COMPAT_H */
