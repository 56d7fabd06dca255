// SPDX-License-Identifier: GPL-2.0-only
/*
 * Since Linux 6.8 vfs_iocb_iter_write() calls kiocb_start_write() itself. The same series added
 * this function. compat.h checks the result of this probe against the version.
 */
#include <linux/fs.h>

bool probe(const struct file *file);

bool probe(const struct file *file)
{
	return file_write_not_started(file);
}
