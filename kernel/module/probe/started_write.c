// SPDX-License-Identifier: GPL-2.0-only
/*
 * Since Linux 6.8 vfs_iocb_iter_write() itself calls kiocb_start_write(). This function came with
 * the same series; compat.h compares what it suggests with the kernel's version.
 */
#include <linux/fs.h>

bool probe(const struct file *file);

bool probe(const struct file *file)
{
	return file_write_not_started(file);
}
