/* SPDX-License-Identifier: GPL-2.0-only */
/* copy_file_range(2) between files that are memory and files of disks. */
#ifndef _LINUX_MEMORY_COPY_H
#define _LINUX_MEMORY_COPY_H

#include <linux/types.h>

struct file;

bool copies_memory(const struct file *in, const struct file *out, unsigned int flags);
ssize_t copy_memory_range(struct file *in, loff_t pos_in, struct file *out, loff_t pos_out,
			  size_t len);

#endif /* _LINUX_MEMORY_COPY_H */
