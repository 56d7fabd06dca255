/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Differences between kernels, as detected by the probes in probe/. If no probe of a group
 * compiles, this kernel is not supported yet, and the build fails.
 */
#ifndef _DMAFILE_COMPAT_H
#define _DMAFILE_COMPAT_H

#include <linux/bits.h>
#include <linux/build_bug.h>
#include <linux/fs.h>
#include <linux/io_uring.h>
#ifdef DMAFILE_HAVE_URING_HEADER
#include <linux/io_uring/cmd.h>
#endif
#include <linux/module.h>
#include <linux/stat.h>

#include "dmafile.h"

#if defined(DMAFILE_HAVE_NAMESPACE_WORD)
#define DMAFILE_IMPORT_NS(ns)	MODULE_IMPORT_NS(ns)
#elif defined(DMAFILE_HAVE_NAMESPACE_STRING)
#define DMAFILE_IMPORT_NS(ns)	MODULE_IMPORT_NS(#ns)
#else
#error "dmafile: MODULE_IMPORT_NS() of this kernel is not supported yet"
#endif

/*
 * With a wrong result each queued write would leak a reference to the freeze protection, and the
 * file system could never be frozen again. So the probe and the version must agree.
 */
#if defined(DMAFILE_HAVE_STARTED_WRITE) != defined(DMAFILE_SINCE_6_8)
#error "dmafile: does vfs_iocb_iter_write() of this kernel call kiocb_start_write()?"
#endif

#if !defined(DMAFILE_HAVE_KIOCB_WRITE)
#if !defined(DMAFILE_HAVE_SB_WRITERS) || defined(DMAFILE_HAVE_STARTED_WRITE)
#error "dmafile: freeze protection of asynchronous writes in this kernel is not supported yet"
#endif
/* As in later kernels. Tells lockdep that nothing is held while the write is queued. */
static inline void kiocb_start_write(struct kiocb *iocb)
{
	struct super_block *sb = file_inode(iocb->ki_filp)->i_sb;

	sb_start_write(sb);
	__sb_writers_release(sb, SB_FREEZE_WRITE);
}

static inline void kiocb_end_write(struct kiocb *iocb)
{
	struct super_block *sb = file_inode(iocb->ki_filp)->i_sb;

	__sb_writers_acquired(sb, SB_FREEZE_WRITE);
	sb_end_write(sb);
}
#endif

/* Writes with freeze protection. A queued write holds it until kiocb_end_write(). */
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

/* The offset alignment for direct I/O. Not all file systems report one for reads. */
static inline u32 dmafile_dio_offset_align(const struct kstat *stat, bool write)
{
#ifdef DMAFILE_HAVE_DIO_READ_ALIGN
	if (!write && stat->dio_read_offset_align)
		return stat->dio_read_offset_align;
#endif
	return stat->dio_offset_align;
}

/* The payload of a command, in the SQE. */
static inline const struct dmafile_uring_cmd *dmafile_uring_sqe(const struct io_uring_cmd *cmd)
{
#if defined(DMAFILE_HAVE_URING_SQE_TYPED)
	return io_uring_sqe_cmd(cmd->sqe, struct dmafile_uring_cmd);
#elif defined(DMAFILE_HAVE_URING_SQE)
	return io_uring_sqe_cmd(cmd->sqe);
#elif defined(DMAFILE_HAVE_URING_CMD)
	return cmd->cmd;
#else
#error "dmafile: struct io_uring_cmd of this kernel is not supported yet"
#endif
}

/*
 * For kernels without IORING_URING_CMD_REISSUE (before 6.16): a flag that io_uring does not use in
 * those kernels. A program cannot set it: io_uring_cmd_prep() copies the flags of the SQE, and
 * rejects the command if they have any bit other than IORING_URING_CMD_FIXED. So the bit is clear
 * when a command is first issued. The kernel's own flags begin at bit 30.
 */
#ifdef IORING_URING_CMD_REISSUE
#define DMAFILE_URING_KEPT	IORING_URING_CMD_REISSUE
#else
#define DMAFILE_URING_KEPT	BIT(24)
#endif

static inline struct dmafile_uring_cmd *dmafile_uring_kept(struct io_uring_cmd *cmd)
{
	BUILD_BUG_ON(sizeof(struct dmafile_uring_cmd) > sizeof(cmd->pdu));
	return (struct dmafile_uring_cmd *)cmd->pdu;
}

/* The payload that user space has passed with a command. */
static inline struct dmafile_uring_cmd dmafile_uring_payload(struct io_uring_cmd *cmd)
{
	const struct dmafile_uring_cmd *payload;

	if (cmd->flags & DMAFILE_URING_KEPT)
		return *dmafile_uring_kept(cmd);
	payload = dmafile_uring_sqe(cmd);
	return (struct dmafile_uring_cmd) {
		.request = READ_ONCE(payload->request),
		.reserved = READ_ONCE(payload->reserved),
	};
}

/*
 * Saves the payload for when a worker issues the command again: Linux 6.5 to 6.15 pass the SQE in
 * the ring even then, which may have been reused.
 */
static inline void dmafile_uring_keep(struct io_uring_cmd *cmd, struct dmafile_uring_cmd payload)
{
	*dmafile_uring_kept(cmd) = payload;
	cmd->flags |= DMAFILE_URING_KEPT;
}

#endif /* _DMAFILE_COMPAT_H */
