// SPDX-License-Identifier: GPL-2.0-only
/* Linux 6.6, and 6.1.119, added helpers for the freeze protection of asynchronous writes. */
#include <linux/fs.h>

void probe(struct kiocb *iocb);

void probe(struct kiocb *iocb)
{
	kiocb_start_write(iocb);
	kiocb_end_write(iocb);
}
