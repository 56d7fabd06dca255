/* SPDX-License-Identifier: GPL-2.0-only */
/* What io.c needs of the kernel under another name where it is built as a module of its own. */
#ifndef _DMAFILE_COMPAT_H
#define _DMAFILE_COMPAT_H

#include <linux/fs.h>

static inline ssize_t dmafile_iter_write(struct file *file, struct kiocb *iocb,
					 struct iov_iter *iter)
{
	return vfs_iocb_iter_write(file, iocb, iter);
}

#endif /* _DMAFILE_COMPAT_H */
