// SPDX-License-Identifier: GPL-2.0-only
/*
 * Tests a udmabuf on a memfd whose memory was allocated with fallocate() and has not been used yet:
 * it must read as zero, and data written through the udmabuf must be readable from the memfd.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/dma-buf.h>
#include <linux/memfd.h>
#include <linux/udmabuf.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../../kselftest_harness.h"

#define SIZE		(16UL << 20)
/* The amount of memory that is filled and freed first, so that the kernel reuses it. */
#define USED		(256UL << 20)
#define TOO_LONG	600

FIXTURE(udmabuf_fallocate) {
	int memfd;
	int buffer;
	unsigned char *map;
};

FIXTURE_SETUP(udmabuf_fallocate)
{
	struct udmabuf_create create = { .flags = UDMABUF_FLAGS_CLOEXEC, .size = SIZE };
	int device = open("/dev/udmabuf", O_RDWR | O_CLOEXEC);
	void *used;

	if (device < 0)
		SKIP(return, "/dev/udmabuf: %s", strerror(errno));
	used = mmap(NULL, USED, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ASSERT_NE(MAP_FAILED, used);
	memset(used, 0xa5, USED);
	munmap(used, USED);
	self->memfd = memfd_create("udmabuf_fallocate", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	ASSERT_LE(0, self->memfd);
	ASSERT_EQ(0, fallocate(self->memfd, 0, 0, SIZE));
	ASSERT_EQ(0, fcntl(self->memfd, F_ADD_SEALS, F_SEAL_SHRINK));
	create.memfd = self->memfd;
	self->buffer = ioctl(device, UDMABUF_CREATE, &create);
	ASSERT_LE(0, self->buffer);
	close(device);
	self->map = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, self->buffer, 0);
	ASSERT_NE(MAP_FAILED, (void *)self->map);
}

FIXTURE_TEARDOWN(udmabuf_fallocate)
{
	munmap(self->map, SIZE);
	close(self->buffer);
	close(self->memfd);
}

static void sync_for_cpu(int buffer, uint64_t flags)
{
	struct dma_buf_sync sync = { .flags = flags };

	ioctl(buffer, DMA_BUF_IOCTL_SYNC, &sync);
}

static bool all_zero(const unsigned char *bytes)
{
	return !bytes[0] && !memcmp(bytes, bytes + 1, SIZE - 1);
}

/* Without the fix this fails only with init_on_alloc=0. */
TEST_F_TIMEOUT(udmabuf_fallocate, is_zero, TOO_LONG)
{
	bool zero;

	sync_for_cpu(self->buffer, DMA_BUF_SYNC_START | DMA_BUF_SYNC_READ);
	zero = all_zero(self->map);
	sync_for_cpu(self->buffer, DMA_BUF_SYNC_END | DMA_BUF_SYNC_READ);
	ASSERT_TRUE(zero);
}

TEST_F_TIMEOUT(udmabuf_fallocate, keeps_what_is_written, TOO_LONG)
{
	unsigned char *bytes = malloc(SIZE), *seen = malloc(SIZE);
	size_t i;

	ASSERT_TRUE(bytes && seen);
	for (i = 0; i < SIZE; i++)
		bytes[i] = i / 251 + i;
	sync_for_cpu(self->buffer, DMA_BUF_SYNC_START | DMA_BUF_SYNC_WRITE);
	memcpy(self->map, bytes, SIZE);
	sync_for_cpu(self->buffer, DMA_BUF_SYNC_END | DMA_BUF_SYNC_WRITE);
	ASSERT_EQ((ssize_t)SIZE, pread(self->memfd, seen, SIZE, 0));
	ASSERT_EQ(0, memcmp(bytes, seen, SIZE));
	free(bytes);
	free(seen);
}

TEST_HARNESS_MAIN
