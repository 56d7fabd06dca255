/*
 * dropping ROUNDS FILE...   runs in a machine that counts instructions. It reads each FILE, cold, through the page
 * cache, with each method below, between two marks (../vm/mark.h), in an order that changes from round to round. It
 * prints a line for each pair of marks, in their order:
 *
 *	ran FILE WAY THREADS BLOCK LEFT CAME	BLOCK: bytes of a block; LEFT: pages left in the page cache;
 *						CAME: bytes read from the disk
 */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "../vm/mark.h"

#define CACHESTAT 451
#define DONTCACHE 0x80
#define MIB (1UL << 20)
#define MOST_THREADS 2
#define NUMBER_OF(a) (sizeof(a) / sizeof((a)[0]))

enum { BEGUN, DONE };

static const struct way {
	const char *name;
	int flags;
	/* posix_fadvise(2) for the whole file, before and after the reads. */
	int before, after;
} ways[] = {
	{ "kept", 0, POSIX_FADV_NORMAL, POSIX_FADV_NORMAL },
	{ "kept,dropped-at-the-end", 0, POSIX_FADV_NORMAL, POSIX_FADV_DONTNEED },
	{ "dropped", DONTCACHE, POSIX_FADV_NORMAL, POSIX_FADV_NORMAL },
	{ "dropped,no-read-ahead", DONTCACHE, POSIX_FADV_RANDOM, POSIX_FADV_NORMAL },
};

static const struct shape {
	int threads;
	size_t block;
} shapes[] = { { 1, MIB }, { 1, 4 * MIB }, { 2, MIB }, { 2, 4 * MIB } };

/* The present load. */
static const struct way *way;
static size_t size, block, next;
static char *memory;
static int file;

static void *load(void *unused)
{
	size_t at;

	(void)unused;
	while ((at = __atomic_fetch_add(&next, block, __ATOMIC_SEQ_CST)) < size) {
		size_t end = at + block < size ? at + block : size;

		while (at < end) {
			struct iovec part = { memory + at, end - at };
			ssize_t got = preadv2(file, &part, 1, at, way->flags);

			if (got <= 0)
				err(1, "%s", way->name);
			at += got;
		}
	}
	return NULL;
}

static unsigned long long cached(void)
{
	struct { unsigned long long cached, others[4]; } counts;
	unsigned long long range[] = { 0, 0 };

	if (syscall(CACHESTAT, file, range, &counts, 0))
		err(1, "cachestat");
	return counts.cached;
}

/* Bytes that this process has read from the disk. */
static unsigned long long came(void)
{
	unsigned long long bytes = 0;
	FILE *io = fopen("/proc/self/io", "r");
	char line[128];

	while (io && fgets(line, sizeof(line), io))
		if (sscanf(line, "read_bytes: %llu", &bytes) == 1)
			break;
	fclose(io);
	return bytes;
}

static void run(const char *path, const struct shape *shape)
{
	pthread_t others[MOST_THREADS];
	unsigned long long before;
	int i;

	posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
	if (cached())
		errx(1, "%s: stays in the page cache", path);
	posix_fadvise(file, 0, 0, way->before);
	block = shape->block;
	next = 0;
	before = came();
	mark(BEGUN);
	for (i = 1; i < shape->threads; i++)
		pthread_create(&others[i], NULL, load, NULL);
	load(NULL);
	for (i = 1; i < shape->threads; i++)
		pthread_join(others[i], NULL);
	posix_fadvise(file, 0, 0, way->after);
	mark(DONE);
	printf("ran %s %s %d %zu %llu %llu\n", path, way->name, shape->threads, block, cached(),
	       came() - before);
	posix_fadvise(file, 0, 0, POSIX_FADV_NORMAL);
}

int main(int argc, char **argv)
{
	int rounds = argc > 2 ? atoi(argv[1]) : 0;
	size_t number = NUMBER_OF(ways) * NUMBER_OF(shapes);

	for (int round = 0; round < rounds; round++)
		for (int i = 2; i < argc; i++) {
			struct stat stat;

			file = open(argv[i], O_RDONLY | O_CLOEXEC);
			if (file < 0 || fstat(file, &stat) || fsync(file))
				err(1, "%s", argv[i]);
			size = stat.st_size;
			memory = mmap(NULL, size, PROT_READ | PROT_WRITE,
				      MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
			if (memory == MAP_FAILED)
				err(1, "memory");
			for (size_t turn = 0; turn < number; turn++) {
				/* 7 and 16 have no common divisor, so every combination runs once. */
				size_t one = (turn * 7 + round * 5) % number;

				way = &ways[one / NUMBER_OF(shapes)];
				run(argv[i], &shapes[one % NUMBER_OF(shapes)]);
			}
			munmap(memory, size);
			close(file);
		}
	return 0;
}
