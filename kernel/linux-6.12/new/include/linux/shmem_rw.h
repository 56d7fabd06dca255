/* SPDX-License-Identifier: GPL-2.0-only */
/* Copies between a file on tmpfs, or a memfd, and a file on a disk. */
#ifndef _LINUX_SHMEM_RW_H
#define _LINUX_SHMEM_RW_H

#include <linux/types.h>

struct file;

ssize_t shmem_copy_file_range(struct file *in, loff_t pos_in, struct file *out, loff_t pos_out,
			      size_t len, unsigned int flags);

#endif /* _LINUX_SHMEM_RW_H */
