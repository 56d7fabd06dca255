// SPDX-License-Identifier: GPL-2.0
/*
 * Tests /proc/PID/pins, /proc/kpagepins and the debugfs files of the pin tracker.
 * Needs root and a kernel booted with pin_owner=on.  Compares their contents with
 * what this program has pinned.  Each test ends with the kernel's consistency
 * check (pin_owner/check).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <linux/udmabuf.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../kselftest_harness.h"

#define PAGE		4096UL
#define HUGE_PAGE	(2UL << 20)
#define DEBUGFS		"/sys/kernel/debug/pin_owner/"

#define WORD_PINS(word)		((uint32_t)(word))
#define WORD_LONG		0x100000000ULL
#define WORD_EXACT		0x200000000ULL
#define WORD_SHARED		0x400000000ULL
#define KPF_DMA_PINNED		43

/* A line of /proc/PID/pins */
struct region {
	unsigned long start, end, pins, bytes;
	unsigned long long since;
	char access, site[64], rest[128];
	bool memfd;
};

/* Reads the totals and up to @max lines. Returns the number of lines, or a negative errno. */
static int regions(pid_t pid, unsigned long *pins, unsigned long *bytes,
		   struct region *found, int max)
{
	char path[64], line[512];
	int nr = 0, err;
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%d/pins", pid);
	file = fopen(path, "r");
	if (!file)
		return -errno;
	if (fscanf(file, "pins %lu\nbytes %lu\n", pins, bytes) != 2) {
		err = ferror(file) ? errno : EINVAL;
		fclose(file);
		return -err;
	}
	while (fgets(line, sizeof(line), file)) {
		struct region region = { .memfd = line[0] == '@' };

		if (sscanf(line + region.memfd, "%lx-%lx %c %lu %lu %llu %63s %127[^\n]",
			   &region.start, &region.end, &region.access, &region.pins,
			   &region.bytes, &region.since, region.site, region.rest) < 7)
			nr = -1000;
		if (nr >= 0 && nr < max)
			found[nr] = region;
		nr++;
	}
	fclose(file);
	return nr;
}

static bool books_agree(void)
{
	char text[4096] = "";
	FILE *file = fopen(DEBUGFS "check", "r");

	if (!file)
		return false;
	text[fread(text, 1, sizeof(text) - 1, file)] = 0;
	fclose(file);
	if (!strcmp(text, "consistent\n"))
		return true;
	ksft_print_msg("%s", text);
	return false;
}

static long stat_of(const char *name)
{
	FILE *file = fopen(DEBUGFS "stats", "r");
	char found[64];
	long value;

	while (file && fscanf(file, "%63s %ld\n", found, &value) == 2) {
		if (!strcmp(found, name)) {
			fclose(file);
			return value;
		}
	}
	if (file)
		fclose(file);
	return -1;
}

static uint64_t word_at(const char *path, uint64_t index)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	uint64_t word = UINT64_MAX;

	if (pread(fd, &word, sizeof(word), index * sizeof(word)) != sizeof(word))
		word = UINT64_MAX;
	close(fd);
	return word;
}

static uint64_t pfn_of(const void *addr)
{
	return word_at("/proc/self/pagemap", (uintptr_t)addr / PAGE) & ((1ULL << 55) - 1);
}

static uint64_t pins_word(const void *addr)
{
	return word_at("/proc/kpagepins", pfn_of(addr));
}

static int ring_make(void)
{
	struct io_uring_params params = {};

	return syscall(SYS_io_uring_setup, 4, &params);
}

static int ring_register_buffer(int ring, void *addr, size_t size)
{
	struct iovec buffer = { addr, size };

	return syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, &buffer, 1) ?
	       -errno : 0;
}

static int ring_unregister(int ring)
{
	return syscall(SYS_io_uring_register, ring, IORING_UNREGISTER_BUFFERS, NULL, 0) ?
	       -errno : 0;
}

static void *memory(size_t size, int flags)
{
	char *mem = mmap(NULL, size, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);

	if (mem == MAP_FAILED)
		return NULL;
	madvise(mem, size, MADV_NOHUGEPAGE);
	memset(mem, 1, size);
	return mem;
}

/* The pins of a closed ring or a killed process are released asynchronously, by a worker. */
static bool gone_within_seconds(pid_t pid, unsigned long expected)
{
	unsigned long pins, bytes;

	for (int i = 0; i < 600; i++) {
		if (regions(pid, &pins, &bytes, NULL, 0) < 0 || pins == expected)
			return true;
		usleep(100000);
	}
	return false;
}

FIXTURE(pin_owner)
{
	unsigned long pins, bytes;
	int lines;
};

FIXTURE_SETUP(pin_owner)
{
	self->lines = regions(getpid(), &self->pins, &self->bytes, NULL, 0);
	if (self->lines == -EOPNOTSUPP || self->lines == -ENOENT)
		SKIP(return, "pin_owner=on is not set");
	ASSERT_EQ(0, self->lines);
	ASSERT_TRUE(books_agree());
}

FIXTURE_TEARDOWN(pin_owner)
{
	unsigned long pins, bytes;

	EXPECT_TRUE(gone_within_seconds(getpid(), 0));
	EXPECT_LE(0, regions(getpid(), &pins, &bytes, NULL, 0));
	EXPECT_EQ(0, pins);
	EXPECT_EQ(0, bytes);
	EXPECT_TRUE(books_agree());
	EXPECT_EQ(0, stat_of("lost"));
	EXPECT_EQ(0, stat_of("nodes"));
}

TEST_F(pin_owner, registered_buffer)
{
	char *mem = memory(64 * PAGE, 0);
	unsigned long pins, bytes;
	struct region region;
	int ring = ring_make();

	ASSERT_NE(NULL, mem);
	ASSERT_LE(0, ring);
	ASSERT_EQ(0, WORD_PINS(pins_word(mem)));
	ASSERT_EQ(0, ring_register_buffer(ring, mem + PAGE, 7 * PAGE));
	ASSERT_EQ(1, regions(getpid(), &pins, &bytes, &region, 1));
	EXPECT_EQ(7, pins);
	EXPECT_EQ(7 * PAGE, bytes);
	EXPECT_EQ((unsigned long)mem + PAGE, region.start);
	EXPECT_EQ((unsigned long)mem + 8 * PAGE, region.end);
	EXPECT_EQ('w', region.access);
	EXPECT_EQ(7, region.pins);
	EXPECT_STREQ("io_pin_pages", region.site);
	EXPECT_EQ(0, region.rest[0]);
	for (int i = 0; i < 9; i++) {
		uint64_t word = pins_word(mem + i * PAGE), flags;
		bool pinned = i >= 1 && i < 8;

		flags = word_at("/proc/kpageflags", pfn_of(mem + i * PAGE));
		EXPECT_EQ(pinned, WORD_PINS(word));
		EXPECT_EQ(pinned ? WORD_LONG : 0, word & WORD_LONG);
		EXPECT_EQ(WORD_EXACT, word & WORD_EXACT);
		EXPECT_EQ(0, word & WORD_SHARED);
		EXPECT_EQ(pinned, flags >> KPF_DMA_PINNED & 1);
	}
	EXPECT_EQ(0, ring_unregister(ring));
	EXPECT_EQ(0, WORD_PINS(pins_word(mem + PAGE)));
	close(ring);
}

/* Several regions on the same pages, released in a different order */
TEST_F(pin_owner, registered_three_times)
{
	char *mem = memory(16 * PAGE, 0);
	unsigned long pins, bytes;
	int rings[3];

	ASSERT_NE(NULL, mem);
	for (int i = 0; i < 3; i++) {
		rings[i] = ring_make();
		/* Ranges that do not continue each other, so that each is a region. */
		ASSERT_EQ(0, ring_register_buffer(rings[i], mem + i * PAGE, 8 * PAGE));
	}
	ASSERT_EQ(3, regions(getpid(), &pins, &bytes, NULL, 0));
	EXPECT_EQ(24, pins);
	EXPECT_EQ(24 * PAGE, bytes);
	EXPECT_EQ(1, WORD_PINS(pins_word(mem)));
	EXPECT_EQ(3, WORD_PINS(pins_word(mem + 2 * PAGE)));
	EXPECT_EQ(WORD_SHARED, pins_word(mem + 2 * PAGE) & WORD_SHARED);
	EXPECT_EQ(14, stat_of("nodes"));
	EXPECT_TRUE(books_agree());
	EXPECT_EQ(0, ring_unregister(rings[1]));
	EXPECT_LE(2, regions(getpid(), &pins, &bytes, NULL, 0));
	EXPECT_EQ(16, pins);
	EXPECT_EQ(2, WORD_PINS(pins_word(mem + 2 * PAGE)));
	EXPECT_TRUE(books_agree());
	EXPECT_EQ(0, ring_unregister(rings[0]));
	EXPECT_EQ(0, ring_unregister(rings[2]));
	EXPECT_EQ(0, WORD_PINS(pins_word(mem + 2 * PAGE)));
	for (int i = 0; i < 3; i++)
		close(rings[i]);
}

/* A huge page is pinned once for each of its pages that is in use, and is kept as a whole. */
TEST_F(pin_owner, huge_page)
{
	char *mem = mmap(NULL, 2 * HUGE_PAGE, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *huge = (char *)(((uintptr_t)mem + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1));
	unsigned long pins, bytes;
	int ring = ring_make();

	ASSERT_NE(MAP_FAILED, mem);
	madvise(huge, HUGE_PAGE, MADV_HUGEPAGE);
	memset(huge, 1, HUGE_PAGE);
	if (!(word_at("/proc/kpageflags", pfn_of(huge)) >> 22 & 1))
		SKIP(return, "could not get a huge page");
	ASSERT_EQ(0, ring_register_buffer(ring, huge + 5 * PAGE, 3 * PAGE));
	ASSERT_EQ(1, regions(getpid(), &pins, &bytes, NULL, 0));
	EXPECT_LE(1, pins);
	EXPECT_GE(3, pins);
	EXPECT_EQ(HUGE_PAGE, bytes);
	EXPECT_EQ(pins, WORD_PINS(pins_word(huge)));
	EXPECT_EQ(pins, WORD_PINS(pins_word(huge + 100 * PAGE)));
	EXPECT_EQ(0, ring_unregister(ring));
	close(ring);
}

/* The descriptor holds the pins, so they outlive the process that made them. */
TEST_F(pin_owner, passed_on)
{
	unsigned long pins, bytes;
	char *mem, line[512], wanted[64];
	bool found = false;
	int status;
	int ring = ring_make();
	FILE *file;
	pid_t pid;

	pid = fork();
	if (!pid) {
		mem = memory(4 * PAGE, 0);
		_exit(!mem || ring_register_buffer(ring, mem, 4 * PAGE));
	}
	ASSERT_EQ(pid, waitpid(pid, &status, 0));
	ASSERT_EQ(0, status);
	/* The pins belong to the child, which made them. */
	EXPECT_EQ(0, regions(getpid(), &pins, &bytes, NULL, 0));
	snprintf(wanted, sizeof(wanted), " gone 0 %.15s ", program_invocation_short_name);
	file = fopen(DEBUGFS "regions", "r");
	ASSERT_NE(NULL, file);
	while (fgets(line, sizeof(line), file))
		found |= strstr(line, wanted) && strstr(line, " w 4 16384 ");
	fclose(file);
	EXPECT_TRUE(found);
	EXPECT_EQ(0, ring_unregister(ring));
	close(ring);
}

TEST_F(pin_owner, killed)
{
	unsigned long pins, bytes;
	int pipes[2];
	pid_t pid;
	char done;

	ASSERT_EQ(0, pipe(pipes));
	pid = fork();
	if (!pid) {
		char *mem = memory(4 * PAGE, 0);
		int ring = ring_make();

		done = mem && !ring_register_buffer(ring, mem, 4 * PAGE);
		if (write(pipes[1], &done, 1) != 1)
			_exit(1);
		pause();
		_exit(0);
	}
	ASSERT_EQ(1, read(pipes[0], &done, 1));
	ASSERT_EQ(1, done);
	ASSERT_EQ(1, regions(pid, &pins, &bytes, NULL, 0));
	EXPECT_EQ(4, pins);
	kill(pid, SIGKILL);
	ASSERT_EQ(pid, waitpid(pid, NULL, 0));
	for (int i = 0; i < 600 && stat_of("regions"); i++)
		usleep(100000);
	EXPECT_EQ(0, stat_of("regions"));
}

TEST_F(pin_owner, udmabuf)
{
	const size_t size = 32 * PAGE;
	int memfd = memfd_create("pin owner", MFD_ALLOW_SEALING | MFD_CLOEXEC);
	int dev = open("/dev/udmabuf", O_RDWR | O_CLOEXEC), fd;
	struct udmabuf_create create = {
		.memfd = memfd, .offset = 4 * PAGE, .size = size - 4 * PAGE,
	};
	unsigned long pins, bytes, inode;
	unsigned int major, minor;
	struct region region;
	char name[64];
	int nr;

	if (dev < 0)
		SKIP(return, "no /dev/udmabuf");
	ASSERT_EQ(0, ftruncate(memfd, size));
	ASSERT_EQ(0, fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK));
	fd = ioctl(dev, UDMABUF_CREATE, &create);
	ASSERT_LE(0, fd);
	ASSERT_EQ(1, regions(getpid(), &pins, &bytes, &region, 1));
	EXPECT_TRUE(region.memfd);
	EXPECT_EQ(4 * PAGE, region.start);
	EXPECT_EQ(size, region.end);
	EXPECT_EQ('w', region.access);
	EXPECT_EQ(0, strncmp(region.site, "udmabuf", 7));
	EXPECT_EQ(28, pins);
	EXPECT_EQ(28 * PAGE, bytes);
	nr = sscanf(region.rest, "%u:%u %lu %63s", &major, &minor, &inode, name);
	ASSERT_EQ(4, nr);
	EXPECT_STREQ("memfd:pin\\040owner", name);
	/* The udmabuf prevents the seal. */
	EXPECT_EQ(-1, fcntl(memfd, F_ADD_SEALS, F_SEAL_WRITE));
	EXPECT_EQ(EBUSY, errno);
	close(fd);
	EXPECT_EQ(0, fcntl(memfd, F_ADD_SEALS, F_SEAL_WRITE));
	close(dev);
	close(memfd);
}

TEST_F(pin_owner, refused_seal_is_explained)
{
	int memfd = memfd_create("sealed", MFD_ALLOW_SEALING | MFD_CLOEXEC);
	int dev = open("/dev/udmabuf", O_RDWR | O_CLOEXEC), fd;
	struct udmabuf_create create = { .memfd = memfd, .size = PAGE };
	char line[512], last[512] = "";
	FILE *file;

	if (dev < 0)
		SKIP(return, "no /dev/udmabuf");
	ASSERT_EQ(0, ftruncate(memfd, PAGE));
	ASSERT_EQ(0, fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK));
	fd = ioctl(dev, UDMABUF_CREATE, &create);
	ASSERT_LE(0, fd);
	EXPECT_EQ(-1, fcntl(memfd, F_ADD_SEALS, F_SEAL_WRITE));
	file = fopen(DEBUGFS "blocked", "r");
	ASSERT_NE(NULL, file);
	while (fgets(line, sizeof(line), file))
		memcpy(last, line, sizeof(last));
	fclose(file);
	EXPECT_NE(NULL, strstr(last, " seal_write pfn="));
	EXPECT_NE(NULL, strstr(last, " pins=1 long=1 region="));
	EXPECT_NE(NULL, strstr(last, " unexplained=0"));
	close(fd);
	close(dev);
	close(memfd);
}

/* Children get copies of pinned pages, but no pins. */
TEST_F(pin_owner, forked)
{
	char *mem = memory(4 * PAGE, 0);
	unsigned long pins, bytes;
	int ring = ring_make(), status;
	pid_t pid;

	ASSERT_NE(NULL, mem);
	ASSERT_EQ(0, ring_register_buffer(ring, mem, 4 * PAGE));
	pid = fork();
	if (!pid) {
		if (regions(getpid(), &pins, &bytes, NULL, 0) || pins)
			_exit(1);
		_exit(WORD_PINS(pins_word(mem)) ? 2 : mem[0] != 1);
	}
	ASSERT_EQ(pid, waitpid(pid, &status, 0));
	EXPECT_EQ(0, status);
	EXPECT_EQ(1, WORD_PINS(pins_word(mem)));
	EXPECT_EQ(0, ring_unregister(ring));
	close(ring);
}

/* vmsplice() only takes references, which are not pins. */
TEST_F(pin_owner, vmsplice)
{
	char *mem = memory(PAGE, 0);
	struct iovec iov = { mem, PAGE };
	int pipes[2];

	ASSERT_NE(NULL, mem);
	ASSERT_EQ(0, pipe(pipes));
	ASSERT_EQ(PAGE, vmsplice(pipes[1], &iov, 1, 0));
	EXPECT_EQ(0, WORD_PINS(pins_word(mem)));
	close(pipes[0]);
	close(pipes[1]);
}

/* A page shared by more than 1024 processes must not look pinned. */
TEST_F_TIMEOUT(pin_owner, shared_by_many, 600)
{
	enum { MANY = 1100 };
	char *mem = memory(PAGE, 0), c = 0;
	int ready[2], end[2], nr = 0;

	ASSERT_NE(NULL, mem);
	ASSERT_EQ(0, pipe(ready));
	ASSERT_EQ(0, pipe(end));
	for (; nr < MANY; nr++) {
		pid_t pid = fork();

		if (pid < 0)
			break;
		if (!pid) {
			close(end[1]);
			c = mem[0];
			if (write(ready[1], &c, 1) != 1)
				_exit(1);
			_exit(read(end[0], &c, 1));
		}
	}
	for (int i = 0; i < nr; i++)
		ASSERT_EQ(1, read(ready[0], &c, 1));
	EXPECT_EQ(0, WORD_PINS(pins_word(mem)));
	EXPECT_EQ(0, word_at("/proc/kpageflags", pfn_of(mem)) >> KPF_DMA_PINNED & 1);
	if (nr == MANY)
		EXPECT_LT(1024, word_at("/proc/kpagecount", pfn_of(mem)));
	close(end[1]);
	while (wait(NULL) > 0)
		;
	ASSERT_EQ(MANY, nr);
}

TEST_F(pin_owner, others_may_not_look)
{
	int status;
	pid_t pid = fork();

	if (!pid) {
		unsigned long pins, bytes;

		if (setgid(12345) || setuid(12345))
			_exit(1);
		if (regions(getppid(), &pins, &bytes, NULL, 0) != -EACCES)
			_exit(2);
		if (open("/proc/kpagepins", O_RDONLY) >= 0 || errno != EACCES)
			_exit(3);
		_exit(open(DEBUGFS "regions", O_RDONLY) >= 0 ? 4 : 0);
	}
	ASSERT_EQ(pid, waitpid(pid, &status, 0));
	EXPECT_EQ(0, status);
}

TEST_HARNESS_MAIN
