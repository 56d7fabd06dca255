/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Common parts of the programs in this folder. Each has one subject, prints KTAP like kselftest,
 * and exits on the first failure.
 */
#ifndef _DMAFILE_TEST_H
#define _DMAFILE_TEST_H

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <linux/dma-buf.h>

#include "dmafile.h"

#define PAGE		4096UL
#define ARRAY_SIZE(a)	(sizeof(a) / sizeof((a)[0]))

/* One test */
struct test {
	const char *name;
	void (*run)(void);
};

/* /dev/dmafile, and the running test */
static int node;
static const struct test *current;
static unsigned int number;
static const char *skipped;
/* The number of requests, for the summary */
static unsigned long requests;

static inline void end_failed(void)
{
	printf("\nnot ok %u %s\n", number, current ? current->name : "setup");
	fflush(stdout);
	exit(1);
}

/* Fails with a message if the condition is false. */
#define must(so, ...)			\
	do {				\
		if (so)			\
			break;		\
		printf("# ");		\
		printf(__VA_ARGS__);	\
		end_failed();		\
	} while (0)

/* The time in seconds, monotonic */
static inline double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

/* For tests without /dev/dmafile. */
static inline int run_all(const struct test *tests, unsigned int count)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	printf("TAP version 13\n1..%u\n", count);
	for (number = 1; number <= count; number++) {
		double begun = now();

		current = &tests[number - 1];
		skipped = NULL;
		current->run();
		if (skipped)
			printf("ok %u %s # SKIP %s\n", number, current->name, skipped);
		else
			printf("ok %u %s # %ld s\n", number, current->name,
			       (long)(now() - begun));
	}
	printf("# %lu requests\n", requests);
	return 0;
}

static inline int run_tests(const struct test *tests, unsigned int count)
{
	node = open("/dev/dmafile", O_RDWR | O_CLOEXEC);
	must(node >= 0, "/dev/dmafile: %s", strerror(errno));
	return run_all(tests, count);
}

/* Makes an ioctl. Returns its result or a negative errno. */
static inline int call(int fd, unsigned long request, void *argument)
{
	int result = ioctl(fd, request, argument);

	requests++;
	return result < 0 ? -errno : result;
}

static inline char *why(int result)
{
	return strerror(-result);
}

static inline __u64 round_up(__u64 value, __u64 unit)
{
	return (value + unit - 1) / unit * unit;
}

/* A byte of a pattern that does not repeat */
static inline __u8 pattern(__u64 seed, __u64 at)
{
	__u64 x = (at >> 3) + seed * 0x9e3779b97f4a7c15ULL;

	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
	x ^= x >> 31;
	return x >> (at & 7) * 8;
}

static inline void fill(__u8 *to, __u64 seed, __u64 at, size_t len)
{
	while (len--)
		*to++ = pattern(seed, at++);
}

/* ALLOC: returns 0 and a descriptor, or a negative errno and -1. */
static inline int allocate(__u64 length, int *fd)
{
	struct dmafile_alloc alloc = {
		.size = sizeof(alloc),
		.fd_flags = O_RDWR | O_CLOEXEC,
		.fd = -1,
		.length = length,
	};
	int result = call(node, DMAFILE_IOC_ALLOC, &alloc);

	*fd = alloc.fd;
	return result;
}

static inline int new_buffer(__u64 length)
{
	int fd, result = allocate(length, &fd);

	must(!result, "ALLOC of %llu bytes: %s", length, why(result));
	return fd;
}

static inline __u64 size_of(int fd)
{
	off_t size = lseek(fd, 0, SEEK_END);

	must(size >= 0, "the size of descriptor %d: %s", fd, strerror(errno));
	return size;
}

/* Reads a whole file into memory that is aligned for O_DIRECT. */
static inline __u8 *contents_of(int fd, __u64 *size)
{
	__u8 *bytes;

	*size = size_of(fd);
	bytes = aligned_alloc(PAGE, *size);
	must(bytes && pread(fd, bytes, *size, 0) == (ssize_t)*size, "pread");
	return bytes;
}

/* RW between the start of a buffer and the start of a file */
static inline struct dmafile_rw transfer(__u32 flags, int buffer, int file, __u64 length,
					 __u64 gather)
{
	return (struct dmafile_rw) {
		.size = sizeof(struct dmafile_rw),
		.flags = flags,
		.fd = buffer,
		.file_fd = file,
		.length = length,
		.gather = gather,
	};
}

static inline void sync_cpu(int fd, __u64 flags)
{
	struct dma_buf_sync sync = { .flags = flags };
	int result = call(fd, DMA_BUF_IOCTL_SYNC, &sync);

	must(!result, "DMA_BUF_IOCTL_SYNC %llx: %s", flags, why(result));
}

/* Maps a whole buffer. */
static inline __u8 *map_buffer(int fd, int protection)
{
	void *map = mmap(NULL, size_of(fd), protection, MAP_SHARED, fd, 0);

	must(map != MAP_FAILED, "mmap of a buffer: %s", strerror(errno));
	sync_cpu(fd, DMA_BUF_SYNC_RW | DMA_BUF_SYNC_START);
	return map;
}

static inline void unmap_buffer(int fd, __u8 *map)
{
	sync_cpu(fd, DMA_BUF_SYNC_RW | DMA_BUF_SYNC_END);
	munmap(map, size_of(fd));
}

/* The offset of the first difference, or @len if there is none */
static inline size_t differ(const __u8 *one, const __u8 *other, size_t len)
{
	size_t at = 0;

	if (!memcmp(one, other, len))
		return len;
	while (one[at] == other[at])
		at++;
	return at;
}

static inline size_t not_zero(const __u8 *memory, size_t from, size_t to)
{
	while (from < to && !memory[from])
		from++;
	return from;
}

/* The number after a word in a file in /proc or /sys, or -1 */
static inline long long number_in(const char *path, const char *word)
{
	FILE *file = fopen(path, "re");
	char line[256];
	long long value = -1;
	size_t len = strlen(word);

	must(file, "%s: %s", path, strerror(errno));
	while (value < 0 && fgets(line, sizeof(line), file))
		if (!strncmp(line, word, len) && strchr(" :\t", line[len]))
			value = strtoll(line + len + 1, NULL, 10);
	fclose(file);
	return value;
}

/*
 * DMA_API_DEBUG reports an error if a page is mapped for two devices. This happens with direct I/O
 * on a dma-buf that an importer has mapped. It is not an error if caches are coherent. Only the
 * first error of a boot is reported, which should be a real one.
 */
static inline void watch_dma(bool watch)
{
	FILE *filter = fopen("/sys/kernel/debug/dma-api/driver_filter", "we");
	FILE *left = fopen("/sys/kernel/debug/dma-api/num_errors", "we");

	/* Few kernels have this check. */
	if (!filter || !left)
		return;
	/* Check only the driver of this name, or all drivers again. */
	fprintf(filter, watch ? "-" : "none");
	fprintf(left, "1");
	must(!fclose(filter) && !fclose(left), "dma-api: %s", strerror(errno));
}

#define STATS	"/sys/kernel/debug/dmafile/stats"

#endif /* _DMAFILE_TEST_H */
