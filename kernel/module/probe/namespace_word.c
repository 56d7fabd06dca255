// SPDX-License-Identifier: GPL-2.0-only
/* Until Linux 6.12 the namespace of symbols is a bare word. */
#include <linux/module.h>

MODULE_IMPORT_NS(DMA_BUF);
