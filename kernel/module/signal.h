/* SPDX-License-Identifier: GPL-2.0-only */
/* Signals that end a request. */
#ifndef _DMAFILE_SIGNAL_H
#define _DMAFILE_SIGNAL_H

#include <linux/types.h>

bool dmafile_interrupted(bool interruptible);

#endif /* _DMAFILE_SIGNAL_H */
