// SPDX-License-Identifier: GPL-2.0-only
/* Since Linux 6.6, and in 6.1 since 6.1.119, asynchronous writes have freeze protection helpers. */
#include <linux/fs.h>

void probe(struct kiocb *iocb);

void probe(struct kiocb *iocb)
{
	kiocb_start_write(iocb);
	kiocb_end_write(iocb);
}
