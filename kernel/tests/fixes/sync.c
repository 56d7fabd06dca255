// SPDX-License-Identifier: GPL-2.0-only
/*
 * Several threads make the first CPU access to a udmabuf at the same time. Prints how much memory
 * is lost. Usage: sync [BUFFERS]
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/dma-buf.h>
#include <linux/udmabuf.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fix.h"

#define SIZE	(16UL << 20)
#define MOST	4
#define TURNS	8

static int buffer;
static unsigned int go, ready;

static void *first(void *argument)
{
	struct dma_buf_sync sync = { .flags = DMA_BUF_SYNC_RW | DMA_BUF_SYNC_START };

	__atomic_add_fetch(&ready, 1, __ATOMIC_SEQ_CST);
	while (!__atomic_load_n(&go, __ATOMIC_ACQUIRE))
		sched_yield();
	ioctl(buffer, DMA_BUF_IOCTL_SYNC, &sync);
	return argument;
}

static long free_kib(void)
{
	/* What is cached meanwhile, or kept by a CPU, would count as lost. */
	set("/proc/sys/vm/drop_caches", "3");
	set("/proc/sys/vm/compact_memory", "1");
	return value("/proc/meminfo", "MemFree: %ld");
}

static long round_of(int device, int memfd, int buffers, unsigned int threads)
{
	long before = free_kib();
	pthread_t thread[MOST];
	unsigned int k;

	while (buffers--) {
		struct udmabuf_create create = { .memfd = memfd, .size = SIZE };

		buffer = ioctl(device, UDMABUF_CREATE, &create);
		if (buffer < 0) {
			perror("UDMABUF_CREATE");
			exit(2);
		}
		go = 0;
		ready = 0;
		for (k = 0; k < threads; k++)
			pthread_create(&thread[k], NULL, first, NULL);
		while (__atomic_load_n(&ready, __ATOMIC_SEQ_CST) < threads)
			sched_yield();
		__atomic_store_n(&go, 1, __ATOMIC_RELEASE);
		for (k = 0; k < threads; k++)
			pthread_join(thread[k], NULL);
		close(buffer);
	}
	sleep(1);
	return before - free_kib();
}

int main(int argc, char **argv)
{
	int buffers = argc > 1 ? atoi(argv[1]) : 300;
	int device = open("/dev/udmabuf", O_RDWR);
	int memfd = memfd_create("sync", MFD_ALLOW_SEALING);
	long one = 0, many = 0;
	char *map, *other;
	int turn;

	if (device < 0 || memfd < 0 || ftruncate(memfd, SIZE))
		return 2;
	map = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
	/* Another file gets every second page, so that no pages are contiguous. */
	other = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	for (size_t at = 0; at < SIZE; at += 4096) {
		map[at] = 1;
		other[at] = 1;
	}
	fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK);
	set("/proc/sys/vm/percpu_pagelist_high_fraction", "1000000");
	round_of(device, memfd, 50, MOST);
	for (turn = 0; turn < TURNS; turn++) {
		one += round_of(device, memfd, buffers / TURNS, 1);
		many += round_of(device, memfd, buffers / TURNS, MOST);
	}
	printf("%d udmabufs of 16 MiB, one thread each: %ld KiB less free memory\n", buffers, one);
	printf("%d udmabufs of 16 MiB, %d threads each: %ld KiB less free memory\n", buffers, MOST,
	       many);
	/* A table is 128 KiB. */
	return many > one + 10240;
}
