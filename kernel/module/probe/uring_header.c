// SPDX-License-Identifier: GPL-2.0-only
/* Since Linux 6.8 commands of io_uring have a header of their own. */
#include <linux/io_uring/cmd.h>
