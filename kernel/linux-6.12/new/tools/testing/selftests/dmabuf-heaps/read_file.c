// SPDX-License-Identifier: GPL-2.0-only
/*
 * read_file [FOLDER [HEAP]]
 *
 * DMA_HEAP_ALLOC_AND_READ_FILE of files in FOLDER, or here, into buffers of HEAP, or "system":
 * every byte is compared with what read() sees. As root once more with all read after all was
 * allocated.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/dma-buf.h>
#include <linux/dma-heap.h>
#include <setjmp.h>
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

#include "../kselftest.h"

#define IN_ORDER	"/sys/module/dma_heap_read/parameters/in_order"
#define MIB		(1024UL * 1024)

static const char *folder = ".";
static char path[PATH_MAX];
static size_t page;
static int heap;

static jmp_buf failed;

/* A test ends with the first thing that is wrong. */
static void checked(bool holds, const char *what, unsigned int line)
{
	if (holds)
		return;
	ksft_print_msg("line %u: %s (%s)\n", line, what, strerror(errno));
	longjmp(failed, 1);
}

#define check(condition)	checked(condition, #condition, __LINE__)

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

/* A file of that size, of no repeating bytes, with a hole in it; opened for reading. */
static int make(size_t size, int flags)
{
	uint64_t *words = malloc(size + 8), state = size + 1;
	size_t i;
	int fd;

	snprintf(path, sizeof(path), "%s/read_file.%d", folder, (int)getpid());
	fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (fd < 0 || !words)
		ksft_exit_fail_msg("%s: %s\n", path, strerror(errno));
	for (i = 0; i <= size / 8; i++) {
		state = state * 6364136223846793005 + 1442695040888963407;
		words[i] = state;
	}
	if (ftruncate(fd, size) || pwrite(fd, words, size / 3, 0) < 0 ||
	    pwrite(fd, (char *)words + size / 2, size - size / 2, size / 2) < 0 || fsync(fd))
		ksft_exit_fail_msg("%s: %s\n", path, strerror(errno));
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	close(fd);
	free(words);
	fd = open(path, O_RDONLY | O_CLOEXEC | flags);
	if (fd < 0 && !flags)
		ksft_exit_fail_msg("%s: %s\n", path, strerror(errno));
	return fd;
}

/* The buffer holds what the file does, and zeros behind it. */
static void compare(int buffer, size_t size)
{
	struct dma_buf_sync sync = { .flags = DMA_BUF_SYNC_START | DMA_BUF_SYNC_READ };
	size_t room = (size + page - 1) / page * page, i;
	char *map = mmap(NULL, room, PROT_READ, MAP_SHARED, buffer, 0), *seen = calloc(1, room);
	int reader = open(path, O_RDONLY | O_CLOEXEC);
	bool same;

	check(map != MAP_FAILED && seen && reader >= 0);
	check((size_t)lseek(buffer, 0, SEEK_END) == room);
	for (i = 0; i < size; ) {
		ssize_t got = read(reader, seen + i, size - i);

		check(got > 0);
		i += got;
	}
	check(!ioctl(buffer, DMA_BUF_IOCTL_SYNC, &sync));
	same = !memcmp(map, seen, room);
	sync.flags = DMA_BUF_SYNC_END | DMA_BUF_SYNC_READ;
	check(!ioctl(buffer, DMA_BUF_IOCTL_SYNC, &sync));
	munmap(map, room);
	free(seen);
	close(reader);
	check(same);
}

static void every_byte(void)
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
				/* A file system without it. */
				break;
			lseek(file, 3, SEEK_SET);
			buffer = load(file);
			check(buffer >= 0);
			check(lseek(file, 0, SEEK_CUR) == 3);
			compare(buffer, sizes[i]);
			close(buffer);
			close(file);
		}
	}
}

/* What is written to the file afterwards isn't seen, and the other way round. */
static void its_own_bytes(void)
{
	int file = make(3 * page, 0), buffer = load(file), writer;
	char *map, seen[4];

	check(buffer >= 0);
	map = mmap(NULL, 3 * page, PROT_READ | PROT_WRITE, MAP_SHARED, buffer, 0);
	check(map != MAP_FAILED);
	writer = open(path, O_WRONLY | O_CLOEXEC);
	memcpy(seen, map, 4);
	check(pwrite(writer, "new", 4, 0) == 4 && !memcmp(map, seen, 4));
	memcpy(map, "own", 4);
	check(pread(file, seen, 4, 0) == 4 && !memcmp(seen, "new", 4));
	munmap(map, 3 * page);
	close(writer);
	close(buffer);
	close(file);
}

#define refused(error, ...)							\
	check(allocate((struct dma_heap_allocation_data) { __VA_ARGS__ }) == -1 &&	\
	      errno == (error))

static void refusals(void)
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
	other = open(path, O_WRONLY | O_CLOEXEC);
	refused(EBADF, .file_fd = other, .fd_flags = O_RDWR, .heap_flags = read);
	close(other);
	other = open(path, O_PATH | O_CLOEXEC);
	refused(EBADF, .file_fd = other, .fd_flags = O_RDWR, .heap_flags = read);
	close(other);
	other = open(folder, O_RDONLY | O_CLOEXEC);
	refused(EISDIR, .file_fd = other, .fd_flags = O_RDWR, .heap_flags = read);
	close(other);
	check(!pipe2(fds, O_CLOEXEC));
	refused(EINVAL, .file_fd = fds[0], .fd_flags = O_RDWR, .heap_flags = read);
	close(fds[0]);
	close(fds[1]);
	check(!truncate(path, 0));
	refused(ENODATA, .file_fd = file, .fd_flags = O_RDWR, .heap_flags = read);
	close(file);
}

/* Where the descriptor has no place, nothing stays. */
static void no_descriptor(void)
{
	int file = make(page, 0), next = dup(file);
	struct rlimit before, none;

	close(next);
	check(!getrlimit(RLIMIT_NOFILE, &before));
	none = before;
	none.rlim_cur = next;
	check(!setrlimit(RLIMIT_NOFILE, &none));
	next = load(file);
	check(!setrlimit(RLIMIT_NOFILE, &before));
	check(next == -1 && errno == EMFILE);
	close(file);
}

/* Without the flag a length is a length, as it was. */
static void without_a_file(void)
{
	int buffer = allocate((struct dma_heap_allocation_data) {
		.len = 5 * page + 1, .fd_flags = O_RDWR | O_CLOEXEC,
	});
	char *map;
	size_t i;

	check(buffer >= 0 && (size_t)lseek(buffer, 0, SEEK_END) == 6 * page);
	map = mmap(NULL, 6 * page, PROT_READ, MAP_SHARED, buffer, 0);
	check(map != MAP_FAILED);
	for (i = 0; i < 6 * page; i++)
		check(!map[i]);
	munmap(map, 6 * page);
	close(buffer);
	refused(EINVAL, .len = 0, .fd_flags = O_RDWR);
}

static const struct {
	const char *name;
	void (*run)(void);
} tests[] = {
	{ "every_byte", every_byte },
	{ "its_own_bytes", its_own_bytes },
	{ "refusals", refusals },
	{ "no_descriptor", no_descriptor },
	{ "without_a_file", without_a_file },
};

static bool set_in_order(const char *value)
{
	int fd = open(IN_ORDER, O_WRONLY | O_CLOEXEC);
	bool done = fd >= 0 && write(fd, value, 1) == 1;

	if (fd >= 0)
		close(fd);
	return done;
}

static void run(void (*test)(void), const char *name, const char *how)
{
	if (setjmp(failed)) {
		ksft_test_result_fail("%s%s\n", name, how);
		return;
	}
	test();
	ksft_test_result_pass("%s%s\n", name, how);
}

int main(int argc, char **argv)
{
	const unsigned int count = sizeof(tests) / sizeof(*tests);
	unsigned int i;

	if (argc > 1)
		folder = argv[1];
	page = sysconf(_SC_PAGESIZE);
	ksft_print_header();
	snprintf(path, sizeof(path), "/dev/dma_heap/%s", argc > 2 ? argv[2] : "system");
	heap = open(path, O_RDWR | O_CLOEXEC);
	if (heap < 0)
		ksft_exit_skip("%s: %s\n", path, strerror(errno));
	ksft_set_plan(2 * count);
	for (i = 0; i < count; i++)
		run(tests[i].run, tests[i].name, "");
	if (set_in_order("Y")) {
		for (i = 0; i < count; i++)
			run(tests[i].run, tests[i].name, " in order");
		set_in_order("N");
	} else {
		for (i = 0; i < count; i++)
			ksft_test_result_skip("%s in order: no root, or no knob\n", tests[i].name);
	}
	unlink(path);
	ksft_finished();
}
