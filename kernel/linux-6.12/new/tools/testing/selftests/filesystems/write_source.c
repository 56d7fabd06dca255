// SPDX-License-Identifier: GPL-2.0-only
/*
 * Tests sources of buffered writes: memory that is unreadable, partly readable, or not mapped until
 * it is faulted in, and the pages that are being written. The files are created in the current
 * directory and removed.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../kselftest_harness.h"

#define PAGES		8
/* After this number of seconds the tasks are considered deadlocked. */
#define TOO_LONG	120

static size_t page;

FIXTURE(write_source) {
};

FIXTURE_SETUP(write_source)
{
	page = sysconf(_SC_PAGESIZE);
}

FIXTURE_TEARDOWN(write_source)
{
}

#define WRITE_SOURCE(name)	TEST_F_TIMEOUT(write_source, name, TOO_LONG)

/* Creates a file and unlinks it. */
static int made(struct __test_metadata *_metadata, size_t size, char fill)
{
	char *bytes = malloc(size + 1);
	int fd = open("write_source.file", O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

	ASSERT_TRUE(fd >= 0 && bytes);
	unlink("write_source.file");
	memset(bytes, fill, size);
	ASSERT_TRUE(pwrite(fd, bytes, size, 0) == (ssize_t)size);
	free(bytes);
	return fd;
}

#define make(size, fill)	made(_metadata, size, fill)

static size_t size_of(int fd)
{
	struct stat stat;

	fstat(fd, &stat);
	return stat.st_size;
}

static bool holds(int fd, size_t from, size_t to, char fill)
{
	char byte;

	for (; from < to; from++)
		if (pread(fd, &byte, 1, from) != 1 || byte != fill)
			return false;
	return true;
}

/* Maps pages filled with 's', followed by unreadable pages. */
static char *mapped(struct __test_metadata *_metadata, unsigned int readable,
		    unsigned int unreadable)
{
	size_t size = (readable + unreadable) * page;
	char *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	ASSERT_TRUE(map != MAP_FAILED);
	memset(map, 's', readable * page);
	mprotect(map + readable * page, unreadable * page, PROT_NONE);
	return map;
}

#define source(readable, unreadable)	mapped(_metadata, readable, unreadable)

WRITE_SOURCE(unreadable)
{
	int fd = make(PAGES * page, 'f');
	char *map = source(0, 2);
	size_t at;

	for (at = 0; at < 3 * page; at += 511) {
		ASSERT_TRUE(pwrite(fd, map, 700, at) == -1 && errno == EFAULT);
		ASSERT_TRUE(pwrite(fd, map, 2 * page, at) == -1 && errno == EFAULT);
	}
	ASSERT_TRUE(size_of(fd) == PAGES * page && holds(fd, 0, PAGES * page, 'f'));
	close(fd);
	munmap(map, 2 * page);
}

WRITE_SOURCE(unreadable_at_the_end)
{
	int fd = make(700, 'f');
	char *map = source(0, 2);

	ASSERT_TRUE(pwrite(fd, map, page, 700) == -1 && errno == EFAULT);
	ASSERT_TRUE(pwrite(fd, map, page, 699) == -1 && errno == EFAULT);
	ASSERT_TRUE(pwrite(fd, map, 1, 701) == -1 && errno == EFAULT);
	ASSERT_TRUE(pwrite(fd, map, page, 5 * page + 17) == -1 && errno == EFAULT);
	ASSERT_TRUE(size_of(fd) == 700 && holds(fd, 0, 700, 'f'));
	ASSERT_TRUE(ftruncate(fd, 6 * page) == 0 && holds(fd, 700, 6 * page, 0));
	close(fd);
	munmap(map, 2 * page);
}

WRITE_SOURCE(partly_readable)
{
	static const size_t offsets[] = { 0, 1, 100, 4095, 4096, 5000 };
	unsigned int i;

	for (i = 0; i < sizeof(offsets) / sizeof(*offsets); i++) {
		int fd = make(PAGES * page, 'f');
		size_t at = offsets[i], end = at + 2 * page;
		char *map = source(2, 2);

		ASSERT_TRUE(pwrite(fd, map, 4 * page, at) == (ssize_t)(2 * page));
		ASSERT_TRUE(holds(fd, 0, at, 'f') && holds(fd, at, end, 's'));
		ASSERT_TRUE(holds(fd, end, PAGES * page, 'f') && size_of(fd) == PAGES * page);
		/* A source that starts inside a page, to an empty file. */
		ASSERT_TRUE(ftruncate(fd, 0) == 0);
		ASSERT_TRUE(pwrite(fd, map + 33, 4 * page - 33, 0) == (ssize_t)(2 * page - 33));
		ASSERT_TRUE(size_of(fd) == 2 * page - 33 && holds(fd, 0, 2 * page - 33, 's'));
		close(fd);
		munmap(map, 4 * page);
	}
}

WRITE_SOURCE(partly_readable_vectors)
{
	int fd = make(PAGES * page, 'f');
	char *map = source(1, 1);
	struct iovec vectors[] = {
		{ map, 100 }, { map + 200, page - 200 }, { map + page, 50 }, { map, 10 },
	};

	ASSERT_TRUE(pwritev(fd, vectors, 4, 10) == (ssize_t)(page - 100));
	ASSERT_TRUE(holds(fd, 0, 10, 'f') && holds(fd, 10, page - 90, 's'));
	ASSERT_TRUE(holds(fd, page - 90, PAGES * page, 'f'));
	close(fd);
	munmap(map, 2 * page);
}

/* Readable, but not present: a file that is not cached, and anonymous memory before first use. */
WRITE_SOURCE(not_there_yet)
{
	int fd = make(PAGES * page, 'f'), other = make(PAGES * page, 's');
	char *map = mmap(NULL, PAGES * page, PROT_READ, MAP_SHARED, other, 0), *zeros;

	ASSERT_TRUE(map != MAP_FAILED && !fsync(other));
	posix_fadvise(other, 0, 0, POSIX_FADV_DONTNEED);
	ASSERT_TRUE(pwrite(fd, map, PAGES * page, 0) == (ssize_t)(PAGES * page));
	ASSERT_TRUE(holds(fd, 0, PAGES * page, 's'));
	zeros = mmap(NULL, PAGES * page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ASSERT_TRUE(zeros != MAP_FAILED);
	ASSERT_TRUE(pwrite(fd, zeros + 5, PAGES * page - 5, 5) == (ssize_t)(PAGES * page - 5));
	ASSERT_TRUE(holds(fd, 0, 5, 's') && holds(fd, 5, PAGES * page, 0));
	munmap(map, PAGES * page);
	munmap(zeros, PAGES * page);
	close(other);
	close(fd);
}

WRITE_SOURCE(own_mapping)
{
	int fd = make(2 * page, 'f');
	char *map = mmap(NULL, 2 * page, PROT_READ, MAP_SHARED, fd, 0);
	unsigned int round;

	ASSERT_TRUE(map != MAP_FAILED);
	for (round = 0; round < 20; round++) {
		ASSERT_TRUE(pwrite(fd, "0123456789", 10, 0) == 10 && !fsync(fd));
		/* The source is the page being written, and is neither cached nor mapped. */
		madvise(map, 2 * page, MADV_DONTNEED);
		posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
		ASSERT_TRUE(pwrite(fd, map, 10, 2000) == 10);
		ASSERT_TRUE(!memcmp(map + 2000, "0123456789", 10) && holds(fd, 10, 2000, 'f'));
		fsync(fd);
		madvise(map, 2 * page, MADV_DONTNEED);
		posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
		/* Copy a whole page to itself, and to another page of the same file. */
		ASSERT_TRUE(pwrite(fd, map, page, 0) == (ssize_t)page);
		ASSERT_TRUE(!memcmp(map, "0123456789", 10));
		ASSERT_TRUE(pwrite(fd, map, page, page) == (ssize_t)page);
		ASSERT_TRUE(!memcmp(map, map + page, page));
		ASSERT_TRUE(pwrite(fd, "ffffffffff", 10, 2000) == 10);
	}
	munmap(map, 2 * page);
	close(fd);
}

struct pair {
	int fd;
	const char *map;
	bool ok;
};

static void *one_into_the_other(void *argument)
{
	struct pair *pair = argument;
	unsigned int round;

	pair->ok = true;
	for (round = 0; round < 500; round++) {
		madvise((void *)pair->map, PAGES * page, MADV_DONTNEED);
		posix_fadvise(pair->fd, 0, 0, POSIX_FADV_DONTNEED);
		pair->ok &= pwrite(pair->fd, pair->map, PAGES * page, 0) == (ssize_t)(PAGES * page);
	}
	return NULL;
}

/* Two files, each written from a mapping of the other. */
WRITE_SOURCE(each_other)
{
	struct pair pairs[2];
	pthread_t threads[2];
	unsigned int i;

	for (i = 0; i < 2; i++)
		pairs[i].fd = make(PAGES * page, 'f');
	for (i = 0; i < 2; i++) {
		pairs[i].map = mmap(NULL, PAGES * page, PROT_READ, MAP_SHARED, pairs[!i].fd, 0);
		ASSERT_TRUE(pairs[i].map != MAP_FAILED);
	}
	for (i = 0; i < 2; i++)
		pthread_create(&threads[i], NULL, one_into_the_other, &pairs[i]);
	for (i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
	for (i = 0; i < 2; i++) {
		ASSERT_TRUE(pairs[i].ok && holds(pairs[i].fd, 0, PAGES * page, 'f'));
		munmap((void *)pairs[i].map, PAGES * page);
		close(pairs[i].fd);
	}
}

/*
 * A task can be killed while it waits for a page of its source that userfaultfd never provides. By
 * then it has written the data before this page, or nothing if the file system uses large folios.
 */
WRITE_SOURCE(killed)
{
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register range = { .mode = UFFDIO_REGISTER_MODE_MISSING };
	int fd = make(0, 0), faults, status, begun[2], patience;
	char *map = source(2, 0), byte;
	pid_t child;

	ASSERT_TRUE(!pipe(begun));
	child = fork();
	if (!child) {
		faults = syscall(SYS_userfaultfd, O_CLOEXEC);
		madvise(map + page, page, MADV_DONTNEED);
		range.range.start = (unsigned long)map + page;
		range.range.len = page;
		if (faults < 0 || ioctl(faults, UFFDIO_API, &api) ||
		    ioctl(faults, UFFDIO_REGISTER, &range))
			_exit(KSFT_SKIP);
		write(begun[1], "b", 1);
		pwrite(fd, map, 2 * page, 0);
		_exit(1);
	}
	close(begun[1]);
	if (read(begun[0], &byte, 1) == 1)
		for (patience = 2000; patience && size_of(fd) < page; patience--)
			usleep(1000);
	usleep(100000);
	kill(child, SIGKILL);
	waitpid(child, &status, 0);
	munmap(map, 2 * page);
	if (WIFEXITED(status) && WEXITSTATUS(status) == KSFT_SKIP)
		SKIP(return, "userfaultfd is not available");
	ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
	ASSERT_TRUE(!size_of(fd) || size_of(fd) == page);
	ASSERT_TRUE(holds(fd, 0, size_of(fd), 's'));
	close(fd);
}

TEST_HARNESS_MAIN
