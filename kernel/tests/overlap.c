// SPDX-License-Identifier: GPL-2.0-only
/*
 * overlap FILE ROUNDS SEED
 *
 * Measures how long it takes to read a whole FILE with O_DIRECT in one step, and how long the parts
 * of this take separately. Each round prints these lines in random order, "WHAT NANOSECONDS":
 *
 *	first		ALLOC of the amount that is allocated before the first read
 *	alloc		ALLOC of the whole size
 *	io		RW into an existing dma-buf
 *	together	ALLOC_READ
 *	in-order	ALLOC_READ that allocates everything before the first read
 *
 * A warm-up round is not printed. The time for closing is not included.
 */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "../uapi/dmafile.h"

/* The size of the module's first gather */
#define FIRST_GATHER (2UL << 20)

static int node, in;
static size_t size;

static int alloc(size_t length)
{
	struct dmafile_alloc alloc = {
		.size = sizeof(alloc), .fd_flags = O_RDWR | O_CLOEXEC, .length = length,
	};

	if (ioctl(node, DMAFILE_IOC_ALLOC, &alloc))
		err(1, "ALLOC of %zu", length);
	return alloc.fd;
}

static int alloc_read(__u32 flags)
{
	struct dmafile_alloc_read read = {
		.size = sizeof(read), .fd_flags = O_RDWR | O_CLOEXEC,
		.flags = flags | DMAFILE_STRICT, .file_fd = in,
	};

	if (ioctl(node, DMAFILE_IOC_ALLOC_READ, &read))
		err(1, "ALLOC_READ");
	return read.fd;
}

static void rw(int fd)
{
	struct dmafile_rw rw = {
		.size = sizeof(rw), .flags = DMAFILE_READ | DMAFILE_STRICT, .fd = fd, .file_fd = in,
		.length = size,
	};

	if (ioctl(node, DMAFILE_IOC_RW, &rw))
		err(1, "RW");
}

static __u64 now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000ULL + time.tv_nsec;
}

static const char *const parts[] = { "first", "alloc", "io", "together", "in-order" };

enum { FIRST, ALLOC, IO, TOGETHER, IN_ORDER, PARTS };

static __u64 run(int part)
{
	int fd = part == IO ? alloc(size) : -1;
	__u64 begun, took;

	/* A throttled disk accumulates credit when idle: make it the same for all parts. */
	usleep(300000);
	begun = now();
	switch (part) {
	case FIRST:
		fd = alloc(FIRST_GATHER);
		break;
	case ALLOC:
		fd = alloc(size);
		break;
	case IO:
		rw(fd);
		break;
	case TOGETHER:
		fd = alloc_read(0);
		break;
	case IN_ORDER:
		fd = alloc_read(DMAFILE_IN_ORDER);
		break;
	}
	took = now() - begun;
	close(fd);
	return took;
}

int main(int argc, char **argv)
{
	int order[PARTS], rounds, round, i;
	struct stat stat;

	if (argc != 4)
		errx(2, "overlap FILE ROUNDS SEED");
	rounds = atoi(argv[2]);
	srand48(atoi(argv[3]));
	in = open(argv[1], O_RDONLY | O_DIRECT | O_CLOEXEC);
	if (in < 0 || fstat(in, &stat))
		err(1, "%s", argv[1]);
	size = stat.st_size;
	node = open("/dev/dmafile", O_RDWR | O_CLOEXEC);
	if (node < 0)
		err(1, "/dev/dmafile");
	for (i = 0; i < PARTS; i++)
		order[i] = i;
	for (round = 0; round <= rounds; round++) {
		for (i = PARTS - 1; i > 0; i--) {
			int other = lrand48() % (i + 1), here = order[i];

			order[i] = order[other];
			order[other] = here;
		}
		for (i = 0; i < PARTS; i++) {
			__u64 took = run(order[i]);

			if (round)
				printf("%s %llu\n", parts[order[i]], (unsigned long long)took);
		}
	}
	return 0;
}
