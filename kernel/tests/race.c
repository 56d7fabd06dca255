// SPDX-License-Identifier: GPL-2.0-only
/*
 * race SECONDS FOLDER
 *
 * Loads a file that another process truncates and rewrites all the time, and makes requests of
 * several threads on one buffer. The possible contents of the file are known. Any other byte in a
 * buffer would be old data from memory or from the disk.
 */
#define _GNU_SOURCE
#include "test.h"

#include <pthread.h>
#include <sys/prctl.h>
#include <signal.h>
#include <sys/wait.h>

#define SIZE	(400000UL)
#define GATHER	(64UL << 10)
#define THREADS	4

static unsigned long seconds;
static char path[4096];
static __u8 shadow[SIZE];

/* Its bytes are those of the pattern, or zero where it was truncated and not yet rewritten. */
static bool one_of_both(const __u8 *map, __u64 len)
{
	__u64 at;

	if (differ(map, shadow, len) == len)
		return true;
	for (at = 0; at < len; at++)
		if (map[at] != shadow[at] && map[at])
			return false;
	return true;
}

static void cut_and_write(void)
{
	int fd = open(path, O_RDWR | O_CLOEXEC);
	__u64 turn = 0, cut;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (;; turn++) {
		cut = turn * 40503 % SIZE;
		if (ftruncate(fd, cut) || pwrite(fd, shadow + cut, SIZE - cut, cut) < 0)
			_exit(1);
		if (turn % 4 == 0)
			fdatasync(fd);
	}
}

static void loads_of_a_file_that_shrinks(void)
{
	unsigned long whole = 0, cut = 0;
	double begun = now();
	unsigned int turn;
	pid_t child = fork();
	int status;

	if (!child)
		cut_and_write();
	for (turn = 0; now() - begun < seconds; turn++) {
		bool ok = turn & 2;
		struct dmafile_alloc_read load = {
			.size = sizeof(load),
			.fd_flags = O_RDWR,
			.flags = ok ? DMAFILE_SHORT_OK : 0,
			.file_fd = open(path, O_RDONLY | (turn & 1 ? O_DIRECT : 0)),
			.length = SIZE,
			.buffer_offset = turn & 4 ? 512 : 0,
			.gather = GATHER,
		};
		int result = call(node, DMAFILE_IOC_ALLOC_READ, &load);
		__u64 end = load.buffer_offset + load.bytes, all;
		__u8 *map;

		close(load.file_fd);
		must(!result || result == -ENODATA, "a load: %s", why(result));
		whole += !result && load.bytes == SIZE;
		cut += result || load.bytes < SIZE;
		if (result)
			continue;
		must(ok ? load.bytes <= SIZE : load.bytes == SIZE, "%llu bytes", load.bytes);
		map = map_buffer(load.fd, PROT_READ);
		all = size_of(load.fd);
		must(one_of_both(map + load.buffer_offset, load.bytes),
		     "bytes that were never in the file, in %llu", load.bytes);
		must(not_zero(map, 0, load.buffer_offset) == load.buffer_offset, "not zero before");
		must(not_zero(map, end, all) == all, "not zero at %zu, after %llu",
		     not_zero(map, end, all), end);
		unmap_buffer(load.fd, map);
		close(load.fd);
	}
	kill(child, SIGKILL);
	must(waitpid(child, &status, 0) == child && WIFSIGNALED(status), "the other one: %x",
	     status);
	printf("# %lu whole, %lu cut short\n", whole, cut);
	must(whole && cut, "never both");
	must(number_in(STATS, "buffers") == 0, "%lld buffers", number_in(STATS, "buffers"));
}

/* Each file has only one value: after each request the buffer has only one of these values. */
static int buffer, sources[2];
static bool ends;

static void *fill_it(void *argument)
{
	unsigned long turn;

	for (turn = (unsigned long)argument; !__atomic_load_n(&ends, __ATOMIC_RELAXED); turn++) {
		struct dmafile_rw rw = {
			.size = sizeof(rw),
			.flags = DMAFILE_READ,
			.fd = buffer,
			.file_fd = sources[turn & 1],
			.length = SIZE,
			.gather = GATHER,
		};
		int result = call(node, DMAFILE_IOC_RW, &rw);

		must(!result && rw.bytes == SIZE, "READ: %s", why(result));
	}
	return NULL;
}

static void *empty_it(void *argument)
{
	unsigned long which = (unsigned long)argument;
	static __u8 seen[THREADS][SIZE];
	char out[4200];
	int to;

	snprintf(out, sizeof(out), "%s-%lu", path, which);
	to = open(out, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	while (!__atomic_load_n(&ends, __ATOMIC_RELAXED)) {
		struct dmafile_rw rw = {
			.size = sizeof(rw),
			.flags = DMAFILE_WRITE,
			.fd = buffer,
			.file_fd = to,
			.length = SIZE,
			.gather = GATHER,
		};
		int result = call(node, DMAFILE_IOC_RW, &rw);

		must(!result && rw.bytes == SIZE, "WRITE: %s", why(result));
		must(pread(to, seen[which], SIZE, 0) == (ssize_t)SIZE, "pread");
		must(!memcmp(seen[which], seen[which] + 1, SIZE - 1),
		     "a buffer was written while it was filled");
	}
	close(to);
	return NULL;
}

static void threads_on_a_buffer(void)
{
	pthread_t threads[THREADS];
	unsigned long i;

	buffer = new_buffer(SIZE);
	for (i = 0; i < 2; i++) {
		static __u8 data[SIZE];
		char name[4200];

		memset(data, 'a' + i, SIZE);
		snprintf(name, sizeof(name), "%s-from-%lu", path, i);
		sources[i] = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
		must(write(sources[i], data, SIZE) == (ssize_t)SIZE, "write: %s", strerror(errno));
	}
	for (i = 0; i < THREADS; i++)
		pthread_create(&threads[i], NULL, i & 1 ? empty_it : fill_it, (void *)i);
	sleep(seconds);
	__atomic_store_n(&ends, true, __ATOMIC_RELAXED);
	for (i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	close(buffer);
	must(number_in(STATS, "buffers") == 0, "%lld buffers", number_in(STATS, "buffers"));
}

static void set_up(void)
{
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	__u64 at;

	for (at = 0; at < SIZE; at++)
		shadow[at] = pattern(9, at) | 1;
	must(fd >= 0 && write(fd, shadow, SIZE) == (ssize_t)SIZE, "%s: %s", path, strerror(errno));
	close(fd);
}

static const struct test tests[] = {
	{ "set_up", set_up },
	{ "loads_of_a_file_that_shrinks", loads_of_a_file_that_shrinks },
	{ "threads_on_a_buffer", threads_on_a_buffer },
};

int main(int argc, char **argv)
{
	if (argc != 3) {
		fprintf(stderr, "race SECONDS FOLDER\n");
		return 2;
	}
	seconds = strtoul(argv[1], NULL, 0);
	snprintf(path, sizeof(path), "%s/race", argv[2]);
	return run_tests(tests, ARRAY_SIZE(tests));
}
