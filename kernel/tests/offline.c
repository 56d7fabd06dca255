// SPDX-License-Identifier: GPL-2.0-only
/*
 * offline SLOW
 *
 * Tests soft and hard offlining of pages of a buffer: by migrating their contents, and as after a
 * memory error. The kernel cannot do this with pages allocated by a driver. It must fail, and the
 * buffer must stay intact, also while a request fills it. SLOW is a file on a disk that takes
 * seconds to read. vm/testdev provides the address of a page. Pages stay marked as poisoned, so run
 * nothing else on this machine afterwards.
 */
#define _GNU_SOURCE
#include "test.h"
#include "vm/testdev/testdev.h"

#include <pthread.h>

#define MEMORY	"/sys/devices/system/memory/"

static const char *slow;
static __u64 size;
static __u8 *shadow;

/* Returns the physical address of a byte in a buffer. There is no IOMMU. */
static __u64 physical(int fd, __u64 offset)
{
	struct testdev_import import = {
		.fd = fd, .direction = TESTDEV_READS, .max_segment = PAGE, .offset = offset,
	};
	int device = open("/dev/testdev", O_RDWR | O_CLOEXEC), result;

	must(device >= 0, "/dev/testdev: %s", strerror(errno));
	result = call(device, TESTDEV_IMPORT, &import);
	must(!result && import.address, "testdev: %s", why(result));
	close(device);
	return import.address;
}

static int offline(const char *how, int fd, __u64 offset)
{
	char path[256], number[32];
	int file, result;

	snprintf(path, sizeof(path), MEMORY "%s_offline_page", how);
	snprintf(number, sizeof(number), "0x%llx", physical(fd, offset));
	file = open(path, O_WRONLY | O_CLOEXEC);
	must(file >= 0, "%s: %s", path, strerror(errno));
	result = write(file, number, strlen(number)) < 0 ? -errno : 0;
	close(file);
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

/* Pages are neither migrated nor removed. */
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
	before = physical(load.fd, PAGE);
	/* A program cannot poison a page through a mapping. */
	must(madvise(map, PAGE, MADV_HWPOISON) && errno == EFAULT, "MADV_HWPOISON: %s",
	     strerror(errno));
	must(number_in("/proc/meminfo", "HardwareCorrupted") == corrupted, "a page was marked");
	must(offline("soft", load.fd, PAGE) < 0, "a page was moved");
	must(physical(load.fd, PAGE) == before, "a page has moved");
	check(map, "after soft_offline_page");
	must(offline("hard", load.fd, PAGE) < 0, "a page was taken");
	must(physical(load.fd, PAGE) == before, "a page has moved");
	must(number_in("/proc/meminfo", "HardwareCorrupted") > corrupted, "nothing was marked");
	check(map, "after hard_offline_page");
	/* I/O still works in both directions. */
	rw.fd = load.fd;
	rw.file_fd = load.file_fd;
	result = call(node, DMAFILE_IOC_RW, &rw);
	must(!result, "WRITE: %s", why(result));
	memset(map, 0, size);
	rw.flags = DMAFILE_READ;
	result = call(node, DMAFILE_IOC_RW, &rw);
	must(!result, "READ: %s", why(result));
	check(map, "data written and read back");
	unmap_buffer(load.fd, map);
	close(load.fd);
	close(load.file_fd);
	must(number_in(STATS, "buffers") == 0, "a buffer is left");
}

static struct dmafile_progress progress;

static void *read_all(void *argument)
{
	struct dmafile_rw *rw = argument;
	int result = call(node, DMAFILE_IOC_RW, rw);

	must(!result, "READ: %s", why(result));
	return NULL;
}

/* A page that has been read, the next one, and the last one */
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
	must(offline("soft", rw.fd, 0) < 0 && offline("hard", rw.fd, 0) < 0, "a page was taken");
	must(offline("soft", rw.fd, at) < 0 && offline("hard", rw.fd, at) < 0, "a page was taken");
	must(offline("hard", rw.fd, size - PAGE) < 0, "a page was taken");
	pthread_join(thread, NULL);
	check(map, "data read");
	munmap(map, size);
	close(rw.fd);
	close(rw.file_fd);
	must(number_in(STATS, "buffers") == 0, "a buffer is left");
}

static void set_up(void)
{
	int fd = open_file();

	shadow = contents_of(fd, &size);
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
