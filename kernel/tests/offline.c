// SPDX-License-Identifier: GPL-2.0-only
/*
 * offline SLOW
 *
 * Pages of a buffer are taken out of use, by order of an administrator: softly, which moves what is
 * in them, and as after an error of the memory. The kernel can do neither with pages that a driver
 * has allocated: it says so, and whoever has the buffer keeps it, whole, also while it is being
 * read from a file. SLOW is a file on a disk that takes seconds for it. Nothing should run
 * afterwards that depends on this machine's memory.
 */
#define _GNU_SOURCE
#include "test.h"

#include <pthread.h>

#define MEMORY	"/sys/devices/system/memory/"

static const char *slow;
static __u64 size;
static __u8 *shadow;

/* Where a mapped byte is in memory. */
static __u64 physical(const __u8 *byte)
{
	int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	__u64 entry;

	must(fd >= 0 && pread(fd, &entry, sizeof(entry), (unsigned long)byte / PAGE *
			      sizeof(entry)) == sizeof(entry), "pagemap: %s", strerror(errno));
	close(fd);
	/* Its lower 55 bits, while the page is there. */
	must(entry >> 63, "a page of the buffer is not mapped");
	return (entry & ((1ULL << 55) - 1)) * PAGE + (unsigned long)byte % PAGE;
}

static int offline(const char *how, const __u8 *byte)
{
	char path[256], number[32];
	int fd, result;

	snprintf(path, sizeof(path), MEMORY "%s_offline_page", how);
	snprintf(number, sizeof(number), "0x%llx", physical(byte));
	fd = open(path, O_WRONLY | O_CLOEXEC);
	must(fd >= 0, "%s: %s", path, strerror(errno));
	result = write(fd, number, strlen(number)) < 0 ? -errno : 0;
	close(fd);
	printf("# %s: %s\n", how, why(result));
	return result;
}

static int open_file(void)
{
	int fd = open(slow, O_RDWR | O_DIRECT | O_CLOEXEC);

	must(fd >= 0, "%s: %s", slow, strerror(errno));
	return fd;
}

static void check(const __u8 *map, const char *what)
{
	must(differ(map, shadow, size) == size, "%s: differs at %zu", what,
	     differ(map, shadow, size));
}

/* Neither moves a page, nor takes it away. */
static void refused(void)
{
	struct dmafile_alloc_read load = {
		.size = sizeof(load), .fd_flags = O_RDWR, .file_fd = open_file(),
	};
	int result = call(node, DMAFILE_IOC_ALLOC_READ, &load);
	struct dmafile_rw rw = { .size = sizeof(rw), .flags = DMAFILE_WRITE, .length = size };
	long long corrupted = number_in("/proc/meminfo", "HardwareCorrupted");
	__u64 before;
	__u8 *map;

	must(!result, "ALLOC_READ: %s", why(result));
	map = map_buffer(load.fd, PROT_READ | PROT_WRITE);
	before = physical(map + PAGE);
	/* A program has no pages here that it could harm. */
	must(madvise(map, PAGE, MADV_HWPOISON) && errno == EFAULT, "MADV_HWPOISON: %s",
	     strerror(errno));
	must(number_in("/proc/meminfo", "HardwareCorrupted") == corrupted, "and harmed one");
	must(offline("soft", map + PAGE) < 0, "a page was moved");
	must(physical(map + PAGE) == before, "a page is elsewhere");
	check(map, "after soft_offline_page");
	must(offline("hard", map + PAGE) < 0, "a page was taken");
	must(physical(map + PAGE) == before, "a page is elsewhere");
	must(number_in("/proc/meminfo", "HardwareCorrupted") > corrupted, "nothing was marked");
	check(map, "after hard_offline_page");
	/* I/O goes on as if nothing were, both ways. */
	rw.fd = load.fd;
	rw.file_fd = load.file_fd;
	result = call(node, DMAFILE_IOC_RW, &rw);
	must(!result, "WRITE: %s", why(result));
	memset(map, 0, size);
	rw.flags = DMAFILE_READ;
	result = call(node, DMAFILE_IOC_RW, &rw);
	must(!result, "READ: %s", why(result));
	check(map, "what was written and read again");
	unmap_buffer(load.fd, map);
	close(load.fd);
	close(load.file_fd);
	must(number_in(STATS, "buffers") == 0, "a buffer stays");
}

static struct dmafile_progress progress;

static void *read_all(void *argument)
{
	struct dmafile_rw *rw = argument;
	int result = call(node, DMAFILE_IOC_RW, rw);

	must(!result, "READ: %s", why(result));
	return NULL;
}

/* The page that the disk is writing to, one before, and one long afterwards. */
static void refused_in_the_middle(void)
{
	struct dmafile_rw rw = {
		.size = sizeof(rw),
		.flags = DMAFILE_READ,
		.fd = new_buffer(size),
		.file_fd = open_file(),
		.length = size,
		.gather = 16 * PAGE,
		.progress = (unsigned long)&progress,
	};
	__u8 *map = mmap(NULL, size, PROT_READ, MAP_SHARED, rw.fd, 0);
	pthread_t thread;
	__u64 at;

	must(!pthread_create(&thread, NULL, read_all, &rw), "pthread_create");
	while (!(at = __atomic_load_n(&progress.bytes, __ATOMIC_RELAXED)))
		usleep(1000);
	must(at < size / 2, "%llu bytes already", at);
	must(offline("soft", map) < 0 && offline("hard", map) < 0, "a page was taken");
	must(offline("soft", map + at) < 0 && offline("hard", map + at) < 0, "a page was taken");
	must(offline("hard", map + size - PAGE) < 0, "a page was taken");
	pthread_join(thread, NULL);
	check(map, "what was read meanwhile");
	munmap(map, size);
	close(rw.fd);
	close(rw.file_fd);
	must(number_in(STATS, "buffers") == 0, "a buffer stays");
}

static void set_up(void)
{
	int fd = open_file();

	size = size_of(fd);
	shadow = aligned_alloc(PAGE, size);
	must(shadow && pread(fd, shadow, size, 0) == (ssize_t)size, "pread");
	close(fd);
}

static const struct test tests[] = {
	{ "set_up", set_up },
	{ "refused", refused },
	{ "refused_in_the_middle", refused_in_the_middle },
};

int main(int argc, char **argv)
{
	if (argc != 2) {
		fprintf(stderr, "offline SLOW\n");
		return 2;
	}
	slow = argv[1];
	return run_tests(tests, ARRAY_SIZE(tests));
}
