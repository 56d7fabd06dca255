// SPDX-License-Identifier: GPL-2.0-only
/*
 * pins ROUNDS SEED RAW FILE
 *
 * Runs in the machine, as root, and counts the instructions of operations that pin memory. RAW is a
 * disk without a file system, FILE a file to create; NULL_DISK is a null_blk. Every job runs once
 * in each round, in random order, after a warm-up round. Output:
 *
 *	machine TRACKED TOTAL MEMMAP	whether pins are tracked, KiB of memory, and pages that
 *					describe memory
 *	marked NAME OPERATIONS BATCHES	BATCHES pairs of marks (vm/mark.h), OPERATIONS in each
 *	timed NAME OPERATIONS NS	by the machine's clock; an instruction takes a nanosecond
 *
 * The kernel's gup_test is timed by the clock, because its times exclude the checks between pinning
 * and unpinning. On a kernel without gup_test only the other jobs run.
 */
#define _GNU_SOURCE
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/io_uring.h>
#include <linux/udmabuf.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "../../vm/mark.h"

#define NULL_DISK "/dev/nullb0"
#define DEPTH 64
#define PAGE 4096UL
#define HUGE (2UL << 20)
#define SIZE (64UL << 20)
#define PAGES (SIZE / PAGE)
#define MOST 48

enum { BEGIN, END };

/* As in mm/gup_test.h, which is not in the headers for user space */
struct gup_test {
	__u64 get_usec, put_usec, addr, size;
	__u32 pages_per_call, gup_flags, test_flags, which[8];
};

#define GUP_TEST "/sys/kernel/debug/gup_test"
#define GUP_FAST _IOWR('g', 1, struct gup_test)
#define PIN_FAST _IOWR('g', 2, struct gup_test)
#define PIN_LONGTERM _IOWR('g', 3, struct gup_test)
#define FOLL_WRITE 1

struct job {
	char name[40];
	void (*run)(const struct job *job);
	int fd;
	/* Reads per system call, or pages per call of gup_test */
	unsigned int each;
	unsigned long command;
	void *memory;
	unsigned long size;
	unsigned int operations, batches;
};

static struct job jobs[MOST];
static unsigned int count;

static void *map(size_t size, int flags, int fd)
{
	void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, fd, 0);

	if (at == MAP_FAILED)
		err(1, "mmap");
	return at;
}

static unsigned long field(const char *path, const char *name)
{
	unsigned long value;
	char word[64];
	FILE *file = fopen(path, "r");

	if (!file)
		err(1, "%s", path);
	/* Only a field's own line begins with its name. */
	while (fscanf(file, "%63s", word) == 1) {
		if (!strcmp(word, name) && fscanf(file, "%lu", &value) == 1) {
			fclose(file);
			return value;
		}
	}
	errx(1, "%s: no %s", path, name);
}

static void put(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);

	if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text))
		err(1, "%s", path);
	close(fd);
}

static struct job *add(const char *name, void (*run)(const struct job *job))
{
	struct job *job = &jobs[count++];

	if (count > MOST)
		errx(1, "more than %d jobs", MOST);
	snprintf(job->name, sizeof(job->name), "%s", name);
	job->run = run;
	return job;
}

static void say_marked(const struct job *job)
{
	printf("marked %s %u %u\n", job->name, job->operations, job->batches);
}

/* Memory: pages of 4 KiB, a single page, THP, and hugetlb pages */

static void *touched(int flags, int advice, size_t size)
{
	char *at = map(size + HUGE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1);

	at += -(uintptr_t)at % HUGE;
	if (advice && madvise(at, size, advice))
		err(1, "madvise");
	for (size_t i = 0; i < size; i += PAGE)
		at[i] = 1;
	return at;
}

static void *thp(void)
{
	unsigned long before = field("/proc/self/smaps_rollup", "AnonHugePages:");
	void *at = touched(0, MADV_HUGEPAGE, SIZE);

	if (field("/proc/self/smaps_rollup", "AnonHugePages:") - before != SIZE >> 10)
		errx(1, "the kernel did not allocate huge pages");
	return at;
}

static void *hugetlb(void)
{
	char text[20];

	snprintf(text, sizeof(text), "%lu", SIZE / HUGE + 1);
	put("/proc/sys/vm/nr_hugepages", text);
	return touched(MAP_HUGETLB, 0, SIZE);
}

/* Direct reads by libaio's system calls */

static aio_context_t aio;

/* At a distance on the disk, so that the kernel does not merge reads into one command */
static void reads(const struct job *job)
{
	struct iocb iocbs[DEPTH] = {}, *list[DEPTH];
	struct io_event events[DEPTH];

	for (unsigned int i = 0; i < DEPTH; i++) {
		iocbs[i].aio_lio_opcode = IOCB_CMD_PREAD;
		iocbs[i].aio_fildes = job->fd;
		iocbs[i].aio_buf = (uintptr_t)job->memory + i * PAGE;
		iocbs[i].aio_nbytes = PAGE;
		iocbs[i].aio_offset = 2 * i * PAGE;
		list[i] = &iocbs[i];
	}
	for (unsigned int batch = 0; batch < job->batches; batch++) {
		mark(BEGIN);
		for (unsigned int i = 0; i < DEPTH; i += job->each)
			if (syscall(SYS_io_submit, aio, job->each, list + i) != job->each)
				err(1, "io_submit");
		if (syscall(SYS_io_getevents, aio, DEPTH, DEPTH, events, NULL) != DEPTH)
			err(1, "io_getevents");
		mark(END);
		for (unsigned int i = 0; i < DEPTH; i++)
			if (events[i].res != PAGE)
				errx(1, "%s: %lld bytes", job->name, events[i].res);
	}
	say_marked(job);
}

static void add_reads(const char *disk, const char *path, void *memory)
{
	static const struct { const char *name; unsigned int each; } ways[] = {
		{ "one", 1 }, { "batch", DEPTH },
	};
	int fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
	struct job *job;
	char name[40];

	if (fd < 0)
		err(1, "%s", path);
	for (int i = 0; i < 2; i++) {
		snprintf(name, sizeof(name), "read %s %s", disk, ways[i].name);
		job = add(name, reads);
		job->fd = fd;
		job->each = ways[i].each;
		job->memory = memory;
		job->operations = DEPTH;
		job->batches = 20;
	}
}

static void make(const char *path)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	static char bytes[2 * DEPTH * PAGE];

	if (fd < 0 || write(fd, bytes, sizeof(bytes)) != sizeof(bytes) || fsync(fd))
		err(1, "%s", path);
	close(fd);
}

/* The kernel's own benchmarks */

static void gup_test(const struct job *job)
{
	unsigned long long ns = 0;

	for (unsigned int i = 0; i < job->batches; i++) {
		struct gup_test test = {
			.addr = (uintptr_t)job->memory, .size = SIZE,
			.pages_per_call = job->each, .gup_flags = FOLL_WRITE,
		};

		if (ioctl(job->fd, job->command, &test))
			err(1, "%s", job->name);
		if (test.size != SIZE)
			errx(1, "%s: %lu bytes of %lu", job->name, (unsigned long)test.size, SIZE);
		/* Both times are truncated to microseconds, so each lacks half of one. */
		ns += 1000 * (test.get_usec + test.put_usec + 1);
	}
	printf("timed %s %lu %llu\n", job->name, PAGES * job->batches, ns);
}

static void add_gup_test(const char *memory, void *at, bool at_once)
{
	static const struct { const char *name; unsigned long command; } commands[] = {
		{ "GUP_FAST", GUP_FAST },
		{ "PIN_FAST", PIN_FAST },
		{ "PIN_LONGTERM", PIN_LONGTERM },
	};
	static const unsigned int sizes[] = { 1, 16, 512 };
	int fd = open(GUP_TEST, O_RDWR | O_CLOEXEC);
	struct job *job;
	char name[40];

	if (fd < 0 && errno == ENOENT)
		return;
	if (fd < 0)
		err(1, GUP_TEST);
	for (int c = 0; c < 3; c++) {
		for (int s = 0; s < 3; s++) {
			snprintf(name, sizeof(name), "gup %s %s %u", commands[c].name, memory,
				 sizes[s]);
			job = add(name, gup_test);
			job->fd = fd;
			job->command = commands[c].command;
			job->each = sizes[s];
			job->memory = at;
			/* Short jobs are repeated for precision. */
			job->batches = sizes[s] == 512 && at_once ? 16 : 2;
		}
	}
}

/* Buffers of io_uring */

static long buffers(int ring, unsigned int opcode, const struct iovec *iov, unsigned int nr)
{
	return syscall(SYS_io_uring_register, ring, opcode, iov, nr);
}

static void registration(const struct job *job)
{
	struct iovec iov = { job->memory, job->size };

	for (unsigned int batch = 0; batch < job->batches; batch++) {
		mark(BEGIN);
		for (unsigned int i = 0; i < job->operations; i++) {
			if (buffers(job->fd, IORING_REGISTER_BUFFERS, &iov, 1))
				err(1, "%s", job->name);
			if (buffers(job->fd, IORING_UNREGISTER_BUFFERS, NULL, 0))
				err(1, "%s", job->name);
		}
		mark(END);
	}
	say_marked(job);
}

static void add_registration(const char *memory, void *at, unsigned long size)
{
	struct io_uring_params params = {};
	struct job *job;
	char name[40];

	snprintf(name, sizeof(name), "register %s", memory);
	job = add(name, registration);
	job->fd = syscall(SYS_io_uring_setup, 1, &params);
	if (job->fd < 0)
		err(1, "io_uring_setup");
	job->memory = at;
	job->size = size;
	job->operations = size == SIZE ? 1 : 64;
	job->batches = size == SIZE ? 4 : 20;
}

/* Udmabufs */

static int memfd;

static void udmabuf(const struct job *job)
{
	struct udmabuf_create create = {
		.memfd = memfd,
		.flags = UDMABUF_FLAGS_CLOEXEC,
		.size = SIZE,
	};

	for (unsigned int batch = 0; batch < job->batches; batch++) {
		int made;

		mark(BEGIN);
		made = ioctl(job->fd, UDMABUF_CREATE, &create);
		if (made < 0)
			err(1, "UDMABUF_CREATE");
		close(made);
		mark(END);
	}
	say_marked(job);
}

static void add_udmabuf(void)
{
	struct job *job = add("udmabuf 4k", udmabuf);
	char *at;

	memfd = memfd_create("pins", MFD_ALLOW_SEALING | MFD_CLOEXEC);
	if (memfd < 0 || ftruncate(memfd, SIZE) || fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK))
		err(1, "memfd");
	at = map(SIZE, MAP_SHARED, memfd);
	for (size_t i = 0; i < SIZE; i += PAGE)
		at[i] = 1;
	munmap(at, SIZE);
	job->fd = open("/dev/udmabuf", O_RDWR | O_CLOEXEC);
	if (job->fd < 0)
		err(1, "/dev/udmabuf");
	job->operations = 1;
	job->batches = 4;
}

/* Allocation and freeing of pages that nobody pins */

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static void page_use(const struct job *job)
{
	for (unsigned int batch = 0; batch < job->batches; batch++) {
		mark(BEGIN);
		if (madvise(job->memory, SIZE, MADV_POPULATE_WRITE) ||
		    madvise(job->memory, SIZE, MADV_DONTNEED))
			err(1, "%s", job->name);
		mark(END);
	}
	say_marked(job);
}

static void add_page_use(const char *name, int advice)
{
	struct job *job = add(name, page_use);

	job->memory = touched(0, advice, SIZE);
	if (madvise(job->memory, SIZE, MADV_DONTNEED))
		err(1, "%s", name);
	job->operations = advice == MADV_HUGEPAGE ? SIZE / HUGE : PAGES;
	job->batches = 4;
}

static void shuffle(struct job **order)
{
	for (unsigned int i = count - 1; i > 0; i--) {
		unsigned int other = random() % (i + 1);
		struct job *one = order[i];

		order[i] = order[other];
		order[other] = one;
	}
}

int main(int argc, char **argv)
{
	void *pages, *huge_pages;
	struct job *order[MOST];
	int rounds;

	if (argc != 5)
		errx(2, "pins ROUNDS SEED RAW FILE");
	setvbuf(stdout, NULL, _IOLBF, 0);
	rounds = atoi(argv[1]);
	srandom(atoi(argv[2]));
	printf("machine %s %lu %lu\n", access("/sys/kernel/debug/pin_owner", F_OK) ? "off" : "on",
	       field("/proc/meminfo", "MemTotal:"),
	       field("/proc/vmstat", "nr_memmap_pages") +
	       field("/proc/vmstat", "nr_memmap_boot_pages"));
	pages = touched(0, MADV_NOHUGEPAGE, SIZE);
	huge_pages = thp();
	make(argv[4]);
	if (syscall(SYS_io_setup, DEPTH, &aio))
		err(1, "io_setup");
	add_reads("null_blk", NULL_DISK, pages);
	add_reads("NVMe", argv[3], pages);
	add_reads("ext4", argv[4], pages);
	add_gup_test("4k", pages, false);
	add_gup_test("thp", huge_pages, true);
	add_registration("4k", pages, SIZE);
	add_registration("thp", huge_pages, SIZE);
	add_registration("huge", hugetlb(), SIZE);
	add_registration("page", pages, PAGE);
	add_udmabuf();
	add_page_use("free 4k", MADV_NOHUGEPAGE);
	add_page_use("free thp", MADV_HUGEPAGE);
	for (unsigned int i = 0; i < count; i++)
		order[i] = &jobs[i];
	for (int round = 0; round <= rounds; round++) {
		shuffle(order);
		for (unsigned int i = 0; i < count; i++)
			order[i]->run(order[i]);
	}
	return 0;
}
