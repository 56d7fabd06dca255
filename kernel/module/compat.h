/* SPDX-License-Identifier: GPL-2.0-only */
/* What differs between kernels, as the probes in this folder have found it. */
#ifndef _DMAFILE_COMPAT_H
#define _DMAFILE_COMPAT_H

#include <linux/bits.h>
#include <linux/fs.h>
#include <linux/io_uring.h>
#ifdef DMAFILE_HAVE_URING_HEADER
#include <linux/io_uring/cmd.h>
#endif
#include <linux/module.h>

#include "dmafile.h"

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

/* In a command's flags, none of io_uring's own; they are cleared when the command comes in. */
#define DMAFILE_URING_KEPT	BIT(24)

/* What user space has put into the command of an SQE. */
static inline struct dmafile_uring_cmd dmafile_uring_payload(const struct io_uring_cmd *cmd)
{
#ifdef DMAFILE_HAVE_URING_SQE
	const struct dmafile_uring_cmd *payload = io_uring_sqe_cmd(cmd->sqe);

	if (cmd->flags & DMAFILE_URING_KEPT)
		return *(const struct dmafile_uring_cmd *)cmd->pdu;
#else
	const struct dmafile_uring_cmd *payload = cmd->cmd;
#endif
	return (struct dmafile_uring_cmd) {
		.request = READ_ONCE(payload->request),
		.reserved = READ_ONCE(payload->reserved),
	};
}

/*
 * Keeps it for when the command comes again, in a worker. Linux 6.12, unlike 6.1, has it look at
 * the SQE in the ring even then, where there may be another by that time.
 */
static inline void dmafile_uring_keep(struct io_uring_cmd *cmd, struct dmafile_uring_cmd payload)
{
#ifdef DMAFILE_HAVE_URING_SQE
	*(struct dmafile_uring_cmd *)cmd->pdu = payload;
	cmd->flags |= DMAFILE_URING_KEPT;
#endif
}

#endif /* _DMAFILE_COMPAT_H */
