/* SPDX-License-Identifier: GPL-2.0-only */
/* Files that requests read or write. */
#ifndef _DMAFILE_FILE_H
#define _DMAFILE_FILE_H

#include <linux/types.h>

struct file;

struct file *dmafile_file_get(unsigned int fd, bool write);
int dmafile_file_size(struct file *file, u64 *size);
u32 dmafile_file_align(struct file *file, bool write);

#endif /* _DMAFILE_FILE_H */
