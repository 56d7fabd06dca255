/* SPDX-License-Identifier: GPL-2.0-only */
/* What can be asked of /dev/testdev, a device without hardware. See testdev.c. */
#ifndef TESTDEV_H
#define TESTDEV_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* Of enum dma_data_direction, what the device will do with the buffer. */
#define TESTDEV_BOTH	0
#define TESTDEV_READS	1
#define TESTDEV_WRITES	2

/**
 * struct testdev_import - attach and map a dma-buf, once for each time the node is opened
 * @fd: the dma-buf
 * @direction: one of TESTDEV_BOTH, TESTDEV_READS, TESTDEV_WRITES
 * @max_segment: what the device says it takes, in bytes
 * @segments: filled in: how many segments it was given
 * @longest: filled in: bytes of the longest
 * @reserved: 0
 * @offset: a byte of the buffer
 * @address: filled in: where the device finds that
 */
struct testdev_import {
	__s32 fd;
	__u32 direction;
	__u32 max_segment;
	__u32 segments;
	__u32 longest;
	__u32 reserved;
	__u64 offset;
	__u64 address;
};

/**
 * struct testdev_copy - bytes of a dma-buf to the caller, or the other way round
 * @fd: the dma-buf, for TESTDEV_VMAP; else it is the one that was imported
 * @to_buffer: not 0: from the caller's memory
 * @length: bytes, from the first one on
 * @address: the caller's memory
 */
struct testdev_copy {
	__s32 fd;
	__u32 to_buffer;
	__u64 length;
	__u64 address;
};

#define TESTDEV_IMPORT	_IOWR('T', 0, struct testdev_import)
/* As the device does it: at the addresses that it was given for DMA. */
#define TESTDEV_DMA	_IOW('T', 1, struct testdev_copy)
/* As a driver's own code does it. */
#define TESTDEV_VMAP	_IOW('T', 2, struct testdev_copy)
/* Adds a fence to the imported buffer on which every wait fails with EIO, until it is closed. */
#define TESTDEV_FENCE	_IO('T', 3)

#endif
