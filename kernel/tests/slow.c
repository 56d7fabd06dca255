// SPDX-License-Identifier: GPL-2.0-only
/*
 * slow FILE
 *
 * Tests events during a request. FILE has some MiB and is on a disk that takes seconds to read it.
 * Progress is reported, setting @stop ends a request, signals end it or do not, a killed process
 * leaves nothing behind, and requests on one buffer wait for each other.
 */
#define _GNU_SOURCE
#include "test.h"

#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

#define GATHER	(64UL << 10)

static const char *path;
static __u64 size;
static __u8 *shadow;

/* A request in a separate thread, and its result */
struct running {
	pthread_t thread;
	struct dmafile_progress progress;
	__u32 flags;
	/* An existing buffer; 0: a new one */
	int target;
	bool buffered;
	int result;
	int fd;
	__u64 bytes;
	double took;
};

static int open_file(bool buffered)
{
	int fd = open(path, O_RDWR | O_CLOEXEC | (buffered ? 0 : O_DIRECT));

	must(fd >= 0, "%s: %s", path, strerror(errno));
	return fd;
}

static void *run(void *argument)
{
	struct running *one = argument;
	int file = open_file(one->buffered);
	struct dmafile_alloc_read load = {
		.size = sizeof(load),
		.fd_flags = O_RDWR,
		.flags = one->flags,
		.file_fd = file,
		.gather = GATHER,
		.progress = (unsigned long)&one->progress,
	};
	struct dmafile_rw rw = {
		.size = sizeof(rw),
		.flags = one->flags,
		.fd = one->target,
		.file_fd = file,
		.length = size,
		.gather = GATHER,
		.progress = (unsigned long)&one->progress,
	};
	double begun = now();

	if (one->target)
		one->result = call(node, DMAFILE_IOC_RW, &rw);
	else
		one->result = call(node, DMAFILE_IOC_ALLOC_READ, &load);
	one->took = now() - begun;
	one->bytes = one->target ? rw.bytes : load.bytes;
	one->fd = load.fd;
	close(file);
	return NULL;
}

static void start(struct running *one)
{
	must(!pthread_create(&one->thread, NULL, run, one), "pthread_create");
}

static __u64 bytes_of(const struct running *one)
{
	return __atomic_load_n(&one->progress.bytes, __ATOMIC_RELAXED);
}

static void until(const struct running *one, __u64 bytes)
{
	double begun = now();

	while (bytes_of(one) < bytes) {
		must(now() - begun < 300, "%llu bytes after 300 s", bytes_of(one));
		usleep(2000);
	}
}

static void over(struct running *one, int want, const char *what)
{
	pthread_join(one->thread, NULL);
	must(one->result == want, "%s: %s, not %s", what, why(one->result), why(want));
}

/* Drops the file from the page cache for the next test. */
static void drop_cache(void)
{
	int fd = open_file(true);

	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	close(fd);
}

static void no_buffers(void)
{
	must(number_in(STATS, "buffers") == 0, "%lld buffers", number_in(STATS, "buffers"));
}

static void check(int fd)
{
	__u8 *map = map_buffer(fd, PROT_READ);

	must(differ(map, shadow, size) == size, "the buffer differs at %zu",
	     differ(map, shadow, size));
	unmap_buffer(fd, map);
}

/* The number never decreases, never exceeds the length, and is the length at the end. */
static void progress_is_told(void)
{
	struct running one = { 0 };
	__u64 last = 0, steps = 0;

	start(&one);
	until(&one, 1);
	while (last < size) {
		__u64 bytes = bytes_of(&one);

		must(bytes >= last && bytes <= size, "%llu bytes, and then %llu", last, bytes);
		steps += bytes > last;
		last = bytes;
		usleep(1000);
	}
	over(&one, 0, "ALLOC_READ");
	must(one.took > 1, "the disk is not slow: %.2f s", one.took);
	must(steps > size / GATHER / 8, "progress was reported only %llu times", steps);
	check(one.fd);
	close(one.fd);
}

/* Reported bytes are in the buffer: an existing buffer can be read during the request. */
static void progress_is_true(void)
{
	struct running one = { .flags = DMAFILE_READ, .target = new_buffer(size) };
	const __u8 *map = mmap(NULL, size, PROT_READ, MAP_SHARED, one.target, 0);
	__u64 last = 0;

	start(&one);
	until(&one, 1);
	while (last < size) {
		__u64 bytes = bytes_of(&one);

		if (bytes > last) {
			must(differ(map + last, shadow + last, bytes - last) == bytes - last,
			     "bytes %llu to %llu were reported too early", last, bytes);
			last = bytes;
		}
		usleep(1000);
	}
	over(&one, 0, "READ");
	munmap((void *)map, size);
	close(one.target);
}

static void stop_is_heeded(void)
{
	struct running one = { 0 }, other = { .flags = DMAFILE_READ, .target = new_buffer(size) };
	__u8 *map;

	start(&one);
	until(&one, GATHER);
	__atomic_store_n(&one.progress.stop, 1, __ATOMIC_RELAXED);
	over(&one, -ECANCELED, "a stopped ALLOC_READ");
	must(bytes_of(&one) < size, "everything was read");
	start(&other);
	until(&other, 4 * GATHER);
	__atomic_store_n(&other.progress.stop, 1, __ATOMIC_RELAXED);
	over(&other, -ECANCELED, "a stopped READ");
	must(other.bytes >= 4 * GATHER && other.bytes < size, "%llu bytes", other.bytes);
	map = map_buffer(other.target, PROT_READ);
	must(differ(map, shadow, other.bytes) == other.bytes, "data is missing");
	unmap_buffer(other.target, map);
	close(other.target);
	no_buffers();
}

static void on_signal(int unused)
{
	(void)unused;
}

static void signals(void)
{
	struct sigaction action = { .sa_handler = on_signal };
	struct running one = { .flags = DMAFILE_INTERRUPTIBLE }, other = { 0 };

	sigaction(SIGUSR1, &action, NULL);
	start(&one);
	until(&one, GATHER);
	pthread_kill(one.thread, SIGUSR1);
	over(&one, -EINTR, "an interruptible ALLOC_READ");
	must(bytes_of(&one) < size, "everything was read");
	no_buffers();
	start(&other);
	until(&other, GATHER);
	pthread_kill(other.thread, SIGUSR1);
	over(&other, 0, "an ALLOC_READ on a signal that does not kill");
	check(other.fd);
	close(other.fd);
}

/*
 * The process is killed in the middle, and its memory must be freed: with IN_ORDER all of the
 * buffer.
 */
static void killed(void)
{
	static const struct running kinds[] = {
		{ .flags = DMAFILE_IN_ORDER }, { .flags = DMAFILE_READ, .target = 1 },
		{ .flags = 0 }, { .flags = 0, .buffered = true },
	};
	struct running *one = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
				   -1, 0);
	long long before = number_in("/proc/meminfo", "MemAvailable"), after;
	double begun;
	int i, status;

	for (i = 0; i < 12; i++) {
		pid_t child;

		*one = kinds[i % ARRAY_SIZE(kinds)];
		if (one->target)
			one->target = new_buffer(size);
		child = fork();
		if (!child) {
			run(one);
			_exit(0);
		}
		until(one, (1 + i / 4) * GATHER);
		kill(child, SIGKILL);
		begun = now();
		must(waitpid(child, &status, 0) == child && WIFSIGNALED(status),
		     "it ended with %x", status);
		/* It waits only for the I/O in flight. */
		must(now() - begun < 60, "%.1f s until it exited", now() - begun);
		must(bytes_of(one) < size, "everything was read");
		if (one->target)
			close(one->target);
		drop_cache();
		no_buffers();
	}
	after = number_in("/proc/meminfo", "MemAvailable");
	must(before - after < (long long)size / 1024, "%lld KiB less", before - after);
}

/* A request that fills a buffer has exclusive access; requests that read it share it. */
static void two_at_once(void)
{
	struct sigaction action = { .sa_handler = on_signal };
	int target = new_buffer(size);
	struct running fill = { .flags = DMAFILE_READ, .target = target };
	struct running again = { .flags = DMAFILE_READ, .target = target };
	struct running out = { .flags = DMAFILE_WRITE, .target = target };
	struct running more = { .flags = DMAFILE_WRITE, .target = target };
	struct running signalled = {
		.flags = DMAFILE_WRITE | DMAFILE_INTERRUPTIBLE, .target = target,
	};

	start(&fill);
	until(&fill, GATHER);
	start(&again);
	start(&signalled);
	usleep(300000);
	must(!bytes_of(&again) && !bytes_of(&signalled), "two requests fill a buffer at once");
	sigaction(SIGUSR1, &action, NULL);
	pthread_kill(signalled.thread, SIGUSR1);
	over(&signalled, -EINTR, "a waiting request, on a signal");
	must(bytes_of(&fill) < size, "it waited until the other request ended");
	over(&fill, 0, "the first READ");
	over(&again, 0, "the second READ");
	must(again.took > fill.took, "the second has not waited: %.1f s, %.1f s", again.took,
	     fill.took);
	check(target);
	/* The same data is written back to its place. */
	start(&out);
	start(&more);
	over(&out, 0, "the first WRITE");
	over(&more, 0, "the second WRITE");
	check(target);
	close(target);
}

static void set_up(void)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	must(fd >= 0, "%s: %s", path, strerror(errno));
	size = size_of(fd);
	shadow = malloc(size);
	must(shadow && pread(fd, shadow, size, 0) == (ssize_t)size, "pread");
	close(fd);
	drop_cache();
}

static const struct test tests[] = {
	{ "set_up", set_up },
	{ "progress_is_told", progress_is_told },
	{ "progress_is_true", progress_is_true },
	{ "stop_is_heeded", stop_is_heeded },
	{ "signals", signals },
	{ "killed", killed },
	{ "two_at_once", two_at_once },
};

int main(int argc, char **argv)
{
	if (argc != 2) {
		fprintf(stderr, "slow FILE\n");
		return 2;
	}
	path = argv[1];
	return run_tests(tests, ARRAY_SIZE(tests));
}
