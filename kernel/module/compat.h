/* SPDX-License-Identifier: GPL-2.0-only */
/* What differs between kernels, as the probes in this folder have found it. */
#ifndef _DMAFILE_COMPAT_H
#define _DMAFILE_COMPAT_H

#include <linux/fs.h>
#include <linux/io_uring.h>
#ifdef DMAFILE_HAVE_URING_SQE
#include <linux/io_uring/cmd.h>
#endif
#include <linux/module.h>

#ifdef DMAFILE_HAVE_BARE_NAMESPACE
#define DMAFILE_IMPORT_NS(ns)	MODULE_IMPORT_NS(ns)
#else
#define DMAFILE_IMPORT_NS(ns)	MODULE_IMPORT_NS(#ns)
#endif

/* Writes, with what keeps the file system from being frozen meanwhile; see kiocb_end_write(). */
static inline ssize_t dmafile_iter_write(struct file *file, struct kiocb *iocb,
					 struct iov_iter *iter)
{
#ifdef DMAFILE_HAVE_STARTED_WRITE
	return vfs_iocb_iter_write(file, iocb, iter);
#else
	ssize_t result;

	kiocb_start_write(iocb);
	result = vfs_iocb_iter_write(file, iocb, iter);
	if (result != -EIOCBQUEUED)
		kiocb_end_write(iocb);
	return result;
#endif
}

/* What user space has put into the command of an SQE. */
static inline const void *dmafile_uring_payload(const struct io_uring_cmd *cmd)
{
#ifdef DMAFILE_HAVE_URING_SQE
	return io_uring_sqe_cmd(cmd->sqe);
#else
	return cmd->cmd;
#endif
}

#endif /* _DMAFILE_COMPAT_H */
