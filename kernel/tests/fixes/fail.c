// SPDX-License-Identifier: GPL-2.0-only
/*
 * Lets each allocation of UDMABUF_CREATE fail, one after the other, and checks that no pin is left.
 * Needs CONFIG_FAULT_INJECTION, CONFIG_FAILSLAB and CONFIG_FAIL_PAGE_ALLOC, and root.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/dma-buf.h>
#include <linux/udmabuf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fix.h"

#define SIZE	0x100000UL

static long pins(void)
{
	/* Writing to it adds up what the CPUs have counted. */
	set("/proc/sys/vm/stat_refresh", "1");
	return value("/proc/vmstat", "nr_foll_pin_acquired %ld") -
	       value("/proc/vmstat", "nr_foll_pin_released %ld");
}

static int made(int hole)
{
	struct udmabuf_create create = { .size = SIZE };

	create.memfd = memfd_create("fail", MFD_ALLOW_SEALING);
	if (ftruncate(create.memfd, SIZE) || (!hole && fallocate(create.memfd, 0, 0, SIZE)) ||
	    fcntl(create.memfd, F_ADD_SEALS, F_SEAL_SHRINK)) {
		perror("memfd");
		exit(2);
	}
	return create.memfd;
}

int main(void)
{
	struct dma_buf_sync sync = { .flags = DMA_BUF_SYNC_RW | DMA_BUF_SYNC_START };
	int device = open("/dev/udmabuf", O_RDWR), nth, fails = 0, bad = 0, hole;
	int control = open("/proc/self/fail-nth", O_RDWR);
	static const char * const knobs[] = { "failslab", "fail_page_alloc" };
	long before, leaked;
	unsigned int k;

	if (device < 0 || control < 0) {
		perror("udmabuf or fail-nth");
		return 2;
	}
	for (k = 0; k < 2; k++) {
		char path[100];

		snprintf(path, sizeof(path), "/sys/kernel/debug/%s/verbose", knobs[k]);
		set(path, "0");
		snprintf(path, sizeof(path), "/sys/kernel/debug/%s/ignore-gfp-wait", knobs[k]);
		set(path, "N");
	}
	set("/sys/kernel/debug/fail_page_alloc/min-order", "0");
	before = pins();
	for (hole = 0; hole < 2; hole++) {
		for (nth = 1; nth < 5000; nth++) {
			struct udmabuf_create create = { .memfd = made(hole), .size = SIZE };
			char text[16] = "";
			int buffer, left;

			snprintf(text, sizeof(text), "%d", nth);
			pwrite(control, text, strlen(text), 0);
			buffer = ioctl(device, UDMABUF_CREATE, &create);
			if (buffer >= 0)
				ioctl(buffer, DMA_BUF_IOCTL_SYNC, &sync);
			memset(text, 0, sizeof(text));
			pread(control, text, sizeof(text) - 1, 0);
			left = atoi(text);
			pwrite(control, "0", 1, 0);
			if (buffer >= 0)
				close(buffer);
			else
				fails++;
			close(create.memfd);
			leaked = pins() - before;
			if (leaked && bad++ < 5)
				printf("allocation %d fails: %ld pins are left\n", nth, leaked);
			before += leaked;
			/* All allocations have been made, and none was left to fail. */
			if (left)
				break;
		}
		printf("%s: %d allocations, %d failed creations, leaks: %d\n",
		       hole ? "hole" : "fallocated", nth - 1, fails, bad);
	}
	return bad != 0;
}
