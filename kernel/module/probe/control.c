// SPDX-License-Identifier: GPL-2.0-only
/* Compiles on every kernel; if not, no probe says anything. */
#include <linux/fs.h>
#include <linux/io_uring.h>
#include <linux/module.h>
