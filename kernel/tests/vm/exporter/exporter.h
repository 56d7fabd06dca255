/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef _EXPORTER_H
#define _EXPORTER_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* The exporter can move the memory */
#define EXPORTER_DYNAMIC	1

/* Returns a descriptor of a new dma-buf. */
struct exporter_create {
	__u32 pages;
	__u32 flags;
};

#define EXPORTER_CREATE	_IOW('E', 1, struct exporter_create)

#endif
