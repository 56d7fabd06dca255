// SPDX-License-Identifier: GPL-2.0-only
/* Since Linux 6.8 io_uring commands have a separate header. */
#include <linux/io_uring/cmd.h>
