/* SPDX-License-Identifier: GPL-2.0-only */
/* Bytes between a file of hugetlbfs, or a memfd on huge pages, and a file of a disk. */
#ifndef _LINUX_HUGETLB_RW_H
#define _LINUX_HUGETLB_RW_H

#include <linux/types.h>

struct file;

ssize_t hugetlb_rw_file(struct file *memory, loff_t at, struct file *file, loff_t pos, size_t len,
			bool write);

#endif /* _LINUX_HUGETLB_RW_H */
