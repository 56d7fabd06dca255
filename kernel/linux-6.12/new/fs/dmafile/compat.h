/* SPDX-License-Identifier: GPL-2.0-only */
/* What the out-of-tree module, which is built for several kernels, has other definitions of. */
#ifndef _DMAFILE_COMPAT_H
#define _DMAFILE_COMPAT_H

#include <linux/fs.h>
#include <linux/stat.h>

/* Writes with freeze protection, which a queued write keeps until kiocb_end_write(). */
static inline ssize_t dmafile_iter_write(struct file *file, struct kiocb *iocb,
					 struct iov_iter *iter)
{
	return vfs_iocb_iter_write(file, iocb, iter);
}

/* Some file systems of later kernels have another alignment for reads. */
static inline u32 dmafile_dio_offset_align(const struct kstat *stat, bool write)
{
	return stat->dio_offset_align;
}

#endif /* _DMAFILE_COMPAT_H */
