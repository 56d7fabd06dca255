// SPDX-License-Identifier: GPL-2.0-only
/*
 * Tests DMA_HEAP_ALLOC_AND_READ_FILE with files in the current directory and buffers of the system
 * heap. Every byte is compared with the result of read(). All tests run with the heap's own
 * operation, and with the fallback for other heaps, which reads after the allocation.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/dma-buf.h>
#include <linux/dma-heap.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../kselftest_harness.h"

#define HEAP		"/dev/dma_heap/system"
#define IN_ORDER	"/sys/module/dma_heap_read/parameters/in_order"
#define PATH		"read_file.file"
#define MIB		(1024UL * 1024)
#define TOO_LONG	600

static size_t page;
static int heap;

FIXTURE(read_file) {
};

FIXTURE_VARIANT(read_file) {
	const char *in_order;
};

FIXTURE_VARIANT_ADD(read_file, meanwhile) {
	.in_order = "N",
};

FIXTURE_VARIANT_ADD(read_file, afterwards) {
	.in_order = "Y",
};

FIXTURE_SETUP(read_file)
{
	int knob = open(IN_ORDER, O_WRONLY | O_CLOEXEC);

	page = sysconf(_SC_PAGESIZE);
	heap = open(HEAP, O_RDWR | O_CLOEXEC);
	if (heap < 0)
		SKIP(return, "%s: %s", HEAP, strerror(errno));
	if (knob < 0 || write(knob, variant->in_order, 1) != 1)
		SKIP(return, "%s: %s", IN_ORDER, strerror(errno));
	close(knob);
}

FIXTURE_TEARDOWN(read_file)
{
	int knob = open(IN_ORDER, O_WRONLY | O_CLOEXEC);

	ASSERT_TRUE(knob >= 0 && write(knob, "N", 1) == 1);
	unlink(PATH);
}

#define READ_FILE(name)	TEST_F_TIMEOUT(read_file, name, TOO_LONG)

static int allocate(struct dma_heap_allocation_data data)
{
	return ioctl(heap, DMA_HEAP_IOCTL_ALLOC, &data) ? -1 : (int)data.fd;
}

static int load(int file)
{
	return allocate((struct dma_heap_allocation_data) {
		.file_fd = file,
		.fd_flags = O_RDWR | O_CLOEXEC,
		.heap_flags = DMA_HEAP_ALLOC_AND_READ_FILE,
	});
}

/* Creates a file with a hole and non-repeating data. Return: -1 if it cannot be opened. */
static int made(struct __test_metadata *_metadata, size_t size, int flags)
{
	uint64_t *words = malloc(size + 8), state = size + 1;
	int fd = open(PATH, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	size_t i;

	ASSERT_TRUE(fd >= 0 && words);
	for (i = 0; i <= size / 8; i++) {
		state = state * 6364136223846793005 + 1442695040888963407;
		words[i] = state;
	}
	ASSERT_TRUE(!ftruncate(fd, size) && pwrite(fd, words, size / 3, 0) >= 0);
	ASSERT_TRUE(pwrite(fd, (char *)words + size / 2, size - size / 2, size / 2) > 0);
	ASSERT_TRUE(!fsync(fd));
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	close(fd);
	free(words);
	return open(PATH, O_RDONLY | O_CLOEXEC | flags);
}

#define make(size, flags)	made(_metadata, size, flags)

/* Checks that the buffer has the contents of the file, followed by zeros. */
static void compared(struct __test_metadata *_metadata, int buffer, size_t size)
{
	struct dma_buf_sync sync = { .flags = DMA_BUF_SYNC_START | DMA_BUF_SYNC_READ };
	size_t room = (size + page - 1) / page * page, i;
	char *map = mmap(NULL, room, PROT_READ, MAP_SHARED, buffer, 0), *seen = calloc(1, room);
	int reader = open(PATH, O_RDONLY | O_CLOEXEC);
	bool same;

	ASSERT_TRUE(map != MAP_FAILED && seen && reader >= 0);
	ASSERT_TRUE((size_t)lseek(buffer, 0, SEEK_END) == room);
	for (i = 0; i < size; ) {
		ssize_t got = read(reader, seen + i, size - i);

		ASSERT_TRUE(got > 0);
		i += got;
	}
	ASSERT_TRUE(!ioctl(buffer, DMA_BUF_IOCTL_SYNC, &sync));
	same = !memcmp(map, seen, room);
	sync.flags = DMA_BUF_SYNC_END | DMA_BUF_SYNC_READ;
	ASSERT_TRUE(!ioctl(buffer, DMA_BUF_IOCTL_SYNC, &sync));
	munmap(map, room);
	free(seen);
	close(reader);
	ASSERT_TRUE(same);
}

#define compare(buffer, size)	compared(_metadata, buffer, size)

READ_FILE(every_byte)
{
	const size_t sizes[] = {
		1, 511, 512, 513, page - 1, page, page + 1, 16 * page, 64 * page + 777,
		MIB - 1, MIB, 2 * MIB + 1, 5 * MIB + 4097, 33 * MIB + 513,
	};
	unsigned int i, direct;

	for (direct = 0; direct < 2; direct++) {
		for (i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
			int file = make(sizes[i], direct ? O_DIRECT : 0), buffer;

			if (file < 0 && direct)
				/* The file system does not support O_DIRECT. */
				break;
			lseek(file, 3, SEEK_SET);
			buffer = load(file);
			ASSERT_TRUE(buffer >= 0);
			ASSERT_TRUE(lseek(file, 0, SEEK_CUR) == 3);
			compare(buffer, sizes[i]);
			close(buffer);
			close(file);
		}
	}
}

/* Later writes to the file do not change the buffer, and vice versa. */
READ_FILE(its_own_bytes)
{
	int file = make(3 * page, 0), buffer = load(file), writer;
	char *map, seen[4];

	ASSERT_TRUE(buffer >= 0);
	map = mmap(NULL, 3 * page, PROT_READ | PROT_WRITE, MAP_SHARED, buffer, 0);
	ASSERT_TRUE(map != MAP_FAILED);
	writer = open(PATH, O_WRONLY | O_CLOEXEC);
	memcpy(seen, map, 4);
	ASSERT_TRUE(pwrite(writer, "new", 4, 0) == 4 && !memcmp(map, seen, 4));
	memcpy(map, "own", 4);
	ASSERT_TRUE(pread(file, seen, 4, 0) == 4 && !memcmp(seen, "new", 4));
	munmap(map, 3 * page);
	close(writer);
	close(buffer);
	close(file);
}

#define refused(error, ...)							\
	ASSERT_TRUE(allocate((struct dma_heap_allocation_data) { __VA_ARGS__ }) == -1 &&	\
	      errno == (error))

READ_FILE(refusals)
{
	const uint64_t read = DMA_HEAP_ALLOC_AND_READ_FILE;
	int file = make(page, 0), fds[2], other;

	refused(EBADF, .file_fd = 9999, .fd_flags = O_RDWR, .heap_flags = read);
	refused(EINVAL, .file_fd = file, .file_reserved = 1, .fd_flags = O_RDWR,
		.heap_flags = read);
	refused(EINVAL, .file_fd = file, .fd = 1, .fd_flags = O_RDWR, .heap_flags = read);
	refused(EINVAL, .file_fd = file, .fd_flags = O_APPEND, .heap_flags = read);
	refused(EINVAL, .file_fd = file, .fd_flags = O_RDWR, .heap_flags = read << 1);
	refused(EINVAL, .file_fd = file, .fd_flags = O_RDWR, .heap_flags = read | 1ULL << 63);
	other = open(PATH, O_WRONLY | O_CLOEXEC);
	refused(EBADF, .file_fd = other, .fd_flags = O_RDWR, .heap_flags = read);
	close(other);
	other = open(PATH, O_PATH | O_CLOEXEC);
	refused(EBADF, .file_fd = other, .fd_flags = O_RDWR, .heap_flags = read);
	close(other);
	other = open(".", O_RDONLY | O_CLOEXEC);
	refused(EISDIR, .file_fd = other, .fd_flags = O_RDWR, .heap_flags = read);
	close(other);
	ASSERT_TRUE(!pipe2(fds, O_CLOEXEC));
	refused(EINVAL, .file_fd = fds[0], .fd_flags = O_RDWR, .heap_flags = read);
	close(fds[0]);
	close(fds[1]);
	ASSERT_TRUE(!truncate(PATH, 0));
	refused(ENODATA, .file_fd = file, .fd_flags = O_RDWR, .heap_flags = read);
	close(file);
}

/* A file larger than the memory of the system is rejected before any allocation. */
READ_FILE(too_large)
{
	int file = make(page, 0);

	/* Some file systems do not support files of this size. */
	if (truncate(PATH, 1L << 41))
		SKIP(return, "truncate: %s", strerror(errno));
	refused(ENOMEM, .file_fd = file, .fd_flags = O_RDWR,
		.heap_flags = DMA_HEAP_ALLOC_AND_READ_FILE);
	close(file);
}

/* If no file descriptor is available, no buffer is left behind. */
READ_FILE(no_descriptor)
{
	int file = make(page, 0), next = dup(file);
	struct rlimit before, none;

	close(next);
	ASSERT_TRUE(!getrlimit(RLIMIT_NOFILE, &before));
	none = before;
	none.rlim_cur = next;
	ASSERT_TRUE(!setrlimit(RLIMIT_NOFILE, &none));
	next = load(file);
	ASSERT_TRUE(!setrlimit(RLIMIT_NOFILE, &before));
	ASSERT_TRUE(next == -1 && errno == EMFILE);
	close(file);
}

/* Allocations without the flag work as before. */
READ_FILE(without_a_file)
{
	int buffer = allocate((struct dma_heap_allocation_data) {
		.len = 5 * page + 1, .fd_flags = O_RDWR | O_CLOEXEC,
	});
	char *map;
	size_t i;

	ASSERT_TRUE(buffer >= 0 && (size_t)lseek(buffer, 0, SEEK_END) == 6 * page);
	map = mmap(NULL, 6 * page, PROT_READ, MAP_SHARED, buffer, 0);
	ASSERT_TRUE(map != MAP_FAILED);
	for (i = 0; i < 6 * page; i++)
		ASSERT_TRUE(!map[i]);
	munmap(map, 6 * page);
	close(buffer);
	refused(EINVAL, .len = 0, .fd_flags = O_RDWR);
}

TEST_HARNESS_MAIN
