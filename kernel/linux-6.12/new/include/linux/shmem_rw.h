/* SPDX-License-Identifier: GPL-2.0-only */
/* Bytes between a file of tmpfs, or a memfd, and a file of a disk. */
#ifndef _LINUX_SHMEM_RW_H
#define _LINUX_SHMEM_RW_H

#include <linux/types.h>

struct file;

ssize_t shmem_rw_file(struct file *memory, loff_t at, struct file *file, loff_t pos, size_t len,
		      bool write);

#endif /* _LINUX_SHMEM_RW_H */
