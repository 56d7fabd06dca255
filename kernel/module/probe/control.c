// SPDX-License-Identifier: GPL-2.0-only
/* Must compile on every kernel. If it does not, the other probes are meaningless. */
#include <linux/fs.h>
#include <linux/io_uring.h>
#include <linux/module.h>
