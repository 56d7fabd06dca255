// SPDX-License-Identifier: GPL-2.0-only
/* Syncs a udmabuf for reading, then for writing. CONFIG_DMA_API_DEBUG warns without the fix. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/dma-buf.h>
#include <linux/udmabuf.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

int main(void)
{
	static const __u64 flags[] = {
		DMA_BUF_SYNC_READ, DMA_BUF_SYNC_READ | DMA_BUF_SYNC_END,
		DMA_BUF_SYNC_WRITE, DMA_BUF_SYNC_WRITE | DMA_BUF_SYNC_END,
	};
	struct udmabuf_create create = { .size = 4096 };
	int device = open("/dev/udmabuf", O_RDWR), buffer;
	unsigned int i;

	create.memfd = memfd_create("direction", MFD_ALLOW_SEALING);
	if (ftruncate(create.memfd, 4096) || fcntl(create.memfd, F_ADD_SEALS, F_SEAL_SHRINK))
		return 2;
	buffer = ioctl(device, UDMABUF_CREATE, &create);
	for (i = 0; i < 4; i++) {
		struct dma_buf_sync sync = { .flags = flags[i] };

		if (ioctl(buffer, DMA_BUF_IOCTL_SYNC, &sync))
			return 2;
	}
	printf("done\n");
	return 0;
}
