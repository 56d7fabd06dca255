// SPDX-License-Identifier: GPL-2.0-only
/* Up to Linux 6.4 a command has a pointer to its payload. */
#include <linux/io_uring.h>

const void *probe(const struct io_uring_cmd *cmd);

const void *probe(const struct io_uring_cmd *cmd)
{
	return cmd->cmd;
}
