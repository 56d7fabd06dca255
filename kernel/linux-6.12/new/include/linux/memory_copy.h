/* SPDX-License-Identifier: GPL-2.0-only */
/* copy_file_range(2) between a memory file and a file on a disk. */
#ifndef _LINUX_MEMORY_COPY_H
#define _LINUX_MEMORY_COPY_H

#include <linux/fs.h>

static inline bool memory_file(const struct file *file)
{
	return file->f_op->fop_flags & FOP_MEMORY_FILE;
}

#ifdef CONFIG_MEMORY_COPY
bool memory_copy_wanted(const struct file *in, const struct file *out);
ssize_t memory_copy_range(struct file *in, loff_t pos_in, struct file *out, loff_t pos_out,
			  size_t len);
ssize_t memory_copy_within(struct file *in, loff_t pos_in, struct file *out, loff_t pos_out,
			   size_t len);
#else
static inline bool memory_copy_wanted(const struct file *in, const struct file *out)
{
	return false;
}

static inline ssize_t memory_copy_range(struct file *in, loff_t pos_in, struct file *out,
					loff_t pos_out, size_t len)
{
	return -EXDEV;
}
#endif

#endif /* _LINUX_MEMORY_COPY_H */
