// SPDX-License-Identifier: GPL-2.0-only
/* Since Linux 7.0 io_uring_sqe_cmd() is a macro that also takes the type of the payload. */
#include <linux/io_uring/cmd.h>

const u64 *probe(const struct io_uring_cmd *cmd);

const u64 *probe(const struct io_uring_cmd *cmd)
{
	return io_uring_sqe_cmd(cmd->sqe, u64);
}
