// SPDX-License-Identifier: GPL-2.0-only
/* Up to Linux 6.12 the argument is an unquoted word. */
#include <linux/module.h>

MODULE_IMPORT_NS(DMA_BUF);
