// SPDX-License-Identifier: GPL-2.0-only
/*
 * leak [-n TIMES] FOLDER
 *
 * Runs TIMES loads, and as many that fail in different ways. Then memory, slabs, pins and
 * descriptors must be the same as before, and the counters in debugfs must match the requests.
 */
#define _GNU_SOURCE
#include "test.h"

#include <sys/resource.h>

#define SIZE	(600000UL)

static unsigned int times = 1000;
static char path[4096];
static __u64 noted[8];

static const char * const memory[] = { "MemFree", "Slab", "SUnreclaim", "KernelStack" };

static long long pinned(void)
{
	int fd = open("/proc/sys/vm/stat_refresh", O_RDONLY);
	char byte;

	/* vmstat counters are per CPU; this flushes them. */
	must(fd >= 0 && read(fd, &byte, 1) >= 0, "stat_refresh");
	close(fd);
	return number_in("/proc/vmstat", "nr_foll_pin_acquired") -
	       number_in("/proc/vmstat", "nr_foll_pin_released");
}

/* Whether this many pages are pinned. Other pins in the machine are temporary; a leak is not. */
static bool pinned_again(long long count)
{
	unsigned int turn;

	for (turn = 0; turn < 60 && pinned() != count; turn++)
		sleep(1);
	return turn < 60;
}

static void settle(void)
{
	int fd = open("/proc/sys/vm/drop_caches", O_WRONLY);

	sync();
	must(fd >= 0 && write(fd, "3", 1) == 1, "drop_caches");
	close(fd);
	/* Wait for memory that is freed after a grace period, or by a worker. */
	sleep(1);
}

static void note(void)
{
	unsigned int i;

	settle();
	for (i = 0; i < ARRAY_SIZE(memory); i++)
		noted[i] = number_in("/proc/meminfo", memory[i]);
	/* Do not count temporary pins. */
	do {
		noted[i] = pinned();
		sleep(1);
	} while (pinned() != (long long)noted[i]);
}

/* A leak of one page per request would be 4 MB, more than other activity of the machine. */
static bool as_noted(void)
{
	/* A kernel with leak detectors delays freeing, and allocates metadata. */
	const bool compared = access("/sys/kernel/debug/kmemleak", F_OK);
	const long long room = times * 4 / 2;
	bool same = true;
	unsigned int i;

	settle();
	for (i = 0; i < ARRAY_SIZE(memory); i++) {
		long long change = number_in("/proc/meminfo", memory[i]) - noted[i];

		printf("# %s: %lld KiB, %+lld\n", memory[i], (long long)noted[i], change);
		same &= !compared || (i ? change : -change) < room;
	}
	must(pinned_again(noted[i]), "%lld pages are pinned", pinned() - noted[i]);
	must(number_in(STATS, "buffers") == 0, "%lld buffers", number_in(STATS, "buffers"));
	must(number_in(STATS, "buffer_bytes") == 0, "%lld bytes", number_in(STATS, "buffer_bytes"));
	must(dup(node) == node + 1, "a descriptor is left");
	close(node + 1);
	return same;
}

/* A leak grows each time; memory that is allocated once does not. Return: the number of loads. */
static unsigned int many(void (*one)(int turn))
{
	unsigned int pass, i;

	for (i = 0; i < 20; i++)
		one(i);
	for (pass = 1; pass <= 3; pass++) {
		note();
		for (i = 0; i < times; i++)
			one(i);
		if (as_noted())
			return 20 + pass * times;
	}
	must(false, "free memory decreases each time");
	return 0;
}

static struct dmafile_alloc_read load_of(int file)
{
	return (struct dmafile_alloc_read) {
		.size = sizeof(struct dmafile_alloc_read),
		.fd_flags = O_RDWR | O_CLOEXEC,
		.file_fd = file,
		.gather = 64 << 10,
	};
}

static int open_file(int flags)
{
	int fd = open(path, O_RDWR | O_CLOEXEC | flags);

	must(fd >= 0, "%s: %s", path, strerror(errno));
	return fd;
}

static void one_load(int turn)
{
	int file = open_file(turn & 1 ? O_DIRECT : 0), result;
	struct dmafile_alloc_read load = load_of(file);
	struct dmafile_rw rw = { .size = sizeof(rw), .file_fd = file, .length = SIZE };

	load.buffer_offset = turn & 2 ? 777 : 0;
	result = call(node, DMAFILE_IOC_ALLOC_READ, &load);
	must(!result, "ALLOC_READ: %s", why(result));
	if (!(turn % 4)) {
		rw.fd = load.fd;
		rw.flags = turn % 8 ? DMAFILE_READ : DMAFILE_WRITE;
		result = call(node, DMAFILE_IOC_RW, &rw);
		must(!result, "RW: %s", why(result));
	}
	if (!(turn % 5))
		munmap(map_buffer(load.fd, PROT_READ), size_of(load.fd));
	close(load.fd);
	close(file);
}

static void loads(void)
{
	long long count = number_in(STATS, "alloc_read"), failed = number_in(STATS, "failed");
	unsigned int made = many(one_load);

	must(number_in(STATS, "alloc_read") == count + made, "%lld loads were counted, not %u",
	     number_in(STATS, "alloc_read") - count, made);
	must(number_in(STATS, "failed") == failed, "failures were counted");
}

/* Each fails in another place: the later, the more has to be freed. */
static void one_failure(int turn)
{
	static const struct rlimit none = { 0, 4096 }, many = { 4096, 4096 };
	int file = open_file(turn & 1 ? O_DIRECT : 0), result, want;
	struct dmafile_alloc_read load = load_of(file);
	static struct dmafile_progress stop = { .stop = 1 };
	void *only_read = NULL;

	switch (turn % 6) {
	case 0:
		load.length = SIZE + 1;
		want = -ENODATA;
		break;
	case 1:
		load.progress = (unsigned long)&stop;
		want = -ECANCELED;
		break;
	case 2:
		load.progress = 8;
		want = -EFAULT;
		break;
	case 3:
		/* No file descriptor is available. */
		must(!setrlimit(RLIMIT_NOFILE, &none), "setrlimit");
		want = -EMFILE;
		break;
	case 4:
		/* The result cannot be written. */
		only_read = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
				 -1, 0);
		memcpy(only_read, &load, sizeof(load));
		mprotect(only_read, PAGE, PROT_READ);
		want = -EFAULT;
		break;
	default:
		load.buffer_size = 1ULL << 50;
		want = -EFBIG;
	}
	result = call(node, DMAFILE_IOC_ALLOC_READ, only_read ? only_read : &load);
	setrlimit(RLIMIT_NOFILE, &many);
	must(result == want, "failure %d: %s, not %s", turn % 6, why(result), why(want));
	if (only_read)
		munmap(only_read, PAGE);
	close(file);
}

static void failures(void)
{
	many(one_failure);
}

/* The times in a result are also added up in debugfs. */
static void sums(void)
{
	static const char * const names[] = {
		"alloc_read", "bytes_read", "alloc_ns", "submit_ns", "wait_ns", "copy_ns",
	};
	int file = open_file(O_DIRECT), result;
	struct dmafile_alloc_read load = load_of(file);
	__u64 before[ARRAY_SIZE(names)];
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(names); i++)
		before[i] = number_in(STATS, names[i]);
	load.buffer_offset = 1;
	result = call(node, DMAFILE_IOC_ALLOC_READ, &load);
	must(!result, "ALLOC_READ: %s", why(result));
	must(number_in(STATS, "buffers") == 1 &&
	     number_in(STATS, "buffer_bytes") == (long long)size_of(load.fd), "the buffers");
	for (i = 0; i < ARRAY_SIZE(names); i++) {
		const __u64 own[ARRAY_SIZE(names)] = {
			1, SIZE, load.alloc_ns, load.submit_ns, load.wait_ns, load.copy_ns,
		};
		__u64 more = number_in(STATS, names[i]) - before[i];

		must(own[i] && more == own[i], "%s: %llu, and by itself %llu", names[i], more,
		     own[i]);
	}
	close(load.fd);
	close(file);
}

/* The bytes are counted in /proc/PID/io, as with read() and write(). */
static void accounting(void)
{
	static const struct { const char *bytes, *calls; __u32 flags; } ways[] = {
		{ "rchar", "syscr", DMAFILE_READ }, { "wchar", "syscw", DMAFILE_WRITE },
	};
	const char *io = "/proc/self/io";
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(ways); i++) {
		long long bytes = number_in(io, ways[i].bytes), calls;
		struct dmafile_rw rw = {
			.size = sizeof(rw),
			.flags = ways[i].flags,
			.fd = new_buffer(SIZE),
			.file_fd = open_file(O_DIRECT),
			.length = SIZE,
		};
		int result;

		calls = number_in(io, ways[i].calls);
		result = call(node, DMAFILE_IOC_RW, &rw);
		must(!result, "RW: %s", why(result));
		/* Reading the file is counted, too. */
		bytes = number_in(io, ways[i].bytes) - bytes;
		must(bytes >= (long long)SIZE && bytes < (long long)SIZE + 65536, "%s: %lld",
		     ways[i].bytes, bytes);
		must(number_in(io, ways[i].calls) > calls, "%s does not count", ways[i].calls);
		close(rw.fd);
		close(rw.file_fd);
	}
}

static void set_up(void)
{
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	static __u8 data[SIZE];

	fill(data, 3, 0, SIZE);
	must(fd >= 0 && write(fd, data, SIZE) == (ssize_t)SIZE && !fsync(fd), "%s: %s", path,
	     strerror(errno));
	close(fd);
}

static const struct test tests[] = {
	{ "set_up", set_up },
	{ "sums", sums },
	{ "accounting", accounting },
	{ "loads", loads },
	{ "failures", failures },
};

int main(int argc, char **argv)
{
	int option;

	while ((option = getopt(argc, argv, "n:")) == 'n')
		times = strtoul(optarg, NULL, 0);
	snprintf(path, sizeof(path), "%s/leak", argv[optind] ? argv[optind] : ".");
	return run_tests(tests, ARRAY_SIZE(tests));
}
