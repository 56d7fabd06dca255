// SPDX-License-Identifier: GPL-2.0-only
/* Since Linux 6.13 the argument is a string. */
#include <linux/module.h>

MODULE_IMPORT_NS("DMA_BUF");
