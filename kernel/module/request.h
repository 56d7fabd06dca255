/* SPDX-License-Identifier: GPL-2.0-only */
/* The requests of user space. */
#ifndef _DMAFILE_REQUEST_H
#define _DMAFILE_REQUEST_H

#include <linux/compiler.h>

int dmafile_request(unsigned int cmd, void __user *address);

#endif /* _DMAFILE_REQUEST_H */
