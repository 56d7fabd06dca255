/* SPDX-License-Identifier: GPL-2.0-only */
/* Files that requests read or write. */
#ifndef _DMAFILE_FILE_H
#define _DMAFILE_FILE_H

#include <linux/sizes.h>
#include <linux/types.h>

/* The alignment of direct I/O, in the file and in memory, unless the file needs a larger one. */
#define DMAFILE_ALIGN		SZ_4K
/* The largest alignment that is supported; the bounce buffer is a multiple of it. */
#define DMAFILE_MAX_ALIGN	SZ_1M

struct file;

struct file *dmafile_file_get(unsigned int fd, bool write);
int dmafile_file_size(struct file *file, u64 *size);
u32 dmafile_file_align(struct file *file, bool write);

#endif /* _DMAFILE_FILE_H */
