/* SPDX-License-Identifier: GPL-2.0-only */
/* The interface of /dev/testdev, a device without hardware. See testdev.c. */
#ifndef TESTDEV_H
#define TESTDEV_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* Values of enum dma_data_direction: what the device does with the buffer */
#define TESTDEV_BOTH	0
#define TESTDEV_READS	1
#define TESTDEV_WRITES	2

/**
 * struct testdev_import - attach and map a dma-buf, once for each time the node is opened
 * @fd: the dma-buf
 * @direction: one of TESTDEV_BOTH, TESTDEV_READS, TESTDEV_WRITES
 * @max_segment: maximum segment size of the device in bytes
 * @segments: out: number of segments
 * @longest: out: size of the longest segment in bytes
 * @reserved: must be 0
 * @offset: an offset in the buffer
 * @address: out: the DMA address of @offset
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
 * struct testdev_copy - copy between the start of a dma-buf and the caller's memory
 * @fd: the dma-buf for TESTDEV_VMAP; otherwise the imported one is used
 * @to_buffer: not 0: copy to the buffer
 * @length: number of bytes
 * @address: address in the caller's memory
 */
struct testdev_copy {
	__s32 fd;
	__u32 to_buffer;
	__u64 length;
	__u64 address;
};

#define TESTDEV_IMPORT	_IOWR('T', 0, struct testdev_import)
/* Access by the device, through DMA addresses */
#define TESTDEV_DMA	_IOW('T', 1, struct testdev_copy)
/* Access by the CPU in the driver, through vmap() */
#define TESTDEV_VMAP	_IOW('T', 2, struct testdev_copy)
/* Adds a fence to the imported buffer on which waits fail with EIO, until the device is closed. */
#define TESTDEV_FENCE	_IO('T', 3)

#endif
