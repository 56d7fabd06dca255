// SPDX-License-Identifier: GPL-2.0-only
/* Since Linux 6.5 a command has a pointer to its SQE, and this function returns the payload. */
#include <linux/io_uring.h>
#ifdef DMAFILE_HAVE_URING_HEADER
#include <linux/io_uring/cmd.h>
#endif

const void *probe(const struct io_uring_cmd *cmd);

const void *probe(const struct io_uring_cmd *cmd)
{
	return io_uring_sqe_cmd(cmd->sqe);
}
