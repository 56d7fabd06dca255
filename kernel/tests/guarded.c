// SPDX-License-Identifier: GPL-2.0-only
/*
 * guarded FOLDER [DEVICE]
 *
 * Tests files that cannot be read or written, or only in part: fanotify decides about each access,
 * the file is used for swap, it is immutable, or a file size limit is reached. The errors of
 * requests must be those of pread() and pwrite(). DEVICE is a block device to be used for swap.
 */
#define _GNU_SOURCE
#include "test.h"

#include <linux/fs.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/fanotify.h>
#include <sys/resource.h>
#include <sys/swap.h>
#include <sys/wait.h>

#define GATHER	(64UL << 10)
#define SIZE	(16 * GATHER)
#define ALLOWED	5U

static const char *folder, *device;
static char path[4096];
static __u8 shadow[SIZE], seen[SIZE];

static int open_file(const char *name, int flags)
{
	int fd = open(name, O_CLOEXEC | flags, 0600);

	must(fd >= 0, "%s: %s", name, strerror(errno));
	return fd;
}

static void make(void)
{
	int fd = open_file(path, O_RDWR | O_CREAT | O_TRUNC);

	fill(shadow, 1, 0, SIZE);
	must(write(fd, shadow, SIZE) == (ssize_t)SIZE && !fsync(fd), "write: %s", strerror(errno));
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	close(fd);
}

/* Returns a buffer with other data than the file. */
static int filled_buffer(void)
{
	int fd = new_buffer(SIZE);
	__u8 *map = map_buffer(fd, PROT_READ | PROT_WRITE);

	fill(map, 2, 0, SIZE);
	unmap_buffer(fd, map);
	return fd;
}

static void check_buffer(int fd, __u64 len)
{
	__u8 *map = map_buffer(fd, PROT_READ);

	must(differ(map, shadow, len) == len, "the buffer differs at %zu",
	     differ(map, shadow, len));
	unmap_buffer(fd, map);
}

static void check_file(const char *name, __u64 len)
{
	int fd = open_file(name, O_RDONLY);

	must(pread(fd, seen, len, 0) == (ssize_t)len, "%s is short", name);
	must(differ(seen, shadow, len) == len, "%s differs at %zu", name,
	     differ(seen, shadow, len));
	close(fd);
}

/*
 * A fanotify listener that decides about each access to the file. It allows the first @allowed
 * accesses, and denies the next one or, with @hold, does not respond before @go is set.
 */
static struct guard {
	pthread_t thread;
	int group, end[2];
	unsigned int allowed;
	bool hold;
	/* The number of permission events so far, and whether one is being held */
	unsigned int opens, accesses;
	bool held, go;
} guard;

static void answer(const struct fanotify_event_metadata *event)
{
	struct fanotify_response response = { .fd = event->fd, .response = FAN_ALLOW };

	if (event->mask & FAN_OPEN_PERM) {
		guard.opens++;
	} else if (guard.accesses++ == guard.allowed) {
		if (guard.hold) {
			__atomic_store_n(&guard.held, true, __ATOMIC_RELEASE);
			while (!__atomic_load_n(&guard.go, __ATOMIC_ACQUIRE))
				usleep(1000);
		} else {
			response.response = FAN_DENY;
		}
	}
	must(write(guard.group, &response, sizeof(response)) == sizeof(response), "a response: %s",
	     strerror(errno));
	close(event->fd);
}

static void *watch(void *unused)
{
	struct fanotify_event_metadata events[8], *event;
	struct pollfd sources[] = {
		{ .fd = guard.group, .events = POLLIN }, { .fd = guard.end[0], .events = POLLIN },
	};

	(void)unused;
	while (poll(sources, ARRAY_SIZE(sources), -1) > 0 && !sources[1].revents) {
		ssize_t len = read(guard.group, events, sizeof(events));

		must(len > 0, "fanotify: %s", strerror(errno));
		for (event = events; FAN_EVENT_OK(event, len); event = FAN_EVENT_NEXT(event, len))
			answer(event);
	}
	return NULL;
}

static void guard_file(unsigned int allowed, bool hold)
{
	guard = (struct guard) { .allowed = allowed, .hold = hold };
	guard.group = fanotify_init(FAN_CLASS_CONTENT | FAN_CLOEXEC, O_RDONLY | O_CLOEXEC);
	must(guard.group >= 0, "fanotify_init: %s", strerror(errno));
	must(!fanotify_mark(guard.group, FAN_MARK_ADD, FAN_OPEN_PERM | FAN_ACCESS_PERM, AT_FDCWD,
			    path), "fanotify_mark of %s: %s", path, strerror(errno));
	must(!pipe2(guard.end, O_CLOEXEC), "pipe: %s", strerror(errno));
	must(!pthread_create(&guard.thread, NULL, watch, NULL), "pthread_create");
}

static void unguard(void)
{
	must(write(guard.end[1], "", 1) == 1, "pipe: %s", strerror(errno));
	pthread_join(guard.thread, NULL);
	close(guard.end[0]);
	close(guard.end[1]);
	close(guard.group);
}

static void until_held(void)
{
	double begun = now();

	while (!__atomic_load_n(&guard.held, __ATOMIC_ACQUIRE)) {
		must(now() - begun < 300, "no permission event after 300 s");
		usleep(1000);
	}
}

/* Each part needs permission. All parts before the denied one have been read. */
static void refused_by_fanotify(void)
{
	int direct, result;

	for (direct = 0; direct < 2; direct++) {
		struct dmafile_alloc_read load = {
			.size = sizeof(load), .fd_flags = O_RDWR, .gather = GATHER,
		};
		struct dmafile_rw rw;
		int buffer = new_buffer(SIZE), file;

		make();
		guard_file(ALLOWED, false);
		file = open_file(path, O_RDONLY | (direct ? O_DIRECT : 0));
		rw = transfer(DMAFILE_READ, buffer, file, SIZE, GATHER);
		result = call(node, DMAFILE_IOC_RW, &rw);
		must(result == -EPERM, "a READ that is denied: %s", why(result));
		must(rw.bytes == ALLOWED * GATHER, "%llu bytes", rw.bytes);
		check_buffer(buffer, rw.bytes);
		close(buffer);
		unguard();
		must(guard.opens == 1, "it was opened %u times", guard.opens);

		guard_file(ALLOWED, false);
		load.file_fd = file;
		result = call(node, DMAFILE_IOC_ALLOC_READ, &load);
		must(result == -EPERM, "an ALLOC_READ that is denied: %s", why(result));
		must(number_in(STATS, "buffers") == 0, "a buffer is left");
		unguard();
		must(guard.accesses > ALLOWED, "only %u permission events", guard.accesses);
		close(file);
	}
}

static void *read_all(void *request)
{
	int result = call(node, DMAFILE_IOC_RW, request);

	must(!result, "a READ after a slow answer: %s", why(result));
	return NULL;
}

/* A request waits for the response, and then continues. */
static void fanotify_takes_its_time(void)
{
	int direct;

	for (direct = 0; direct < 2; direct++) {
		struct dmafile_progress progress = { 0 };
		struct dmafile_rw rw;
		int buffer = new_buffer(SIZE), file;
		pthread_t thread;

		make();
		guard_file(ALLOWED, true);
		file = open_file(path, O_RDONLY | (direct ? O_DIRECT : 0));
		rw = transfer(DMAFILE_READ, buffer, file, SIZE, GATHER);
		rw.progress = (unsigned long)&progress;
		must(!pthread_create(&thread, NULL, read_all, &rw), "pthread_create");
		until_held();
		must(__atomic_load_n(&progress.bytes, __ATOMIC_RELAXED) <= ALLOWED * GATHER,
		     "%llu bytes before the answer", progress.bytes);
		__atomic_store_n(&guard.go, true, __ATOMIC_RELEASE);
		pthread_join(thread, NULL);
		must(rw.bytes == SIZE && progress.bytes == SIZE, "%llu bytes", rw.bytes);
		check_buffer(buffer, SIZE);
		unguard();
		close(file);
		close(buffer);
	}
}

/* A process is killed while its request waits for a response. */
static void killed_before_an_answer(void)
{
	int direct, status;

	for (direct = 0; direct < 2; direct++) {
		pid_t child;

		make();
		guard_file(ALLOWED, true);
		child = fork();
		if (!child) {
			struct dmafile_alloc_read load = {
				.size = sizeof(load), .fd_flags = O_RDWR, .gather = GATHER,
			};

			load.file_fd = open_file(path, O_RDONLY | (direct ? O_DIRECT : 0));
			call(node, DMAFILE_IOC_ALLOC_READ, &load);
			_exit(1);
		}
		until_held();
		kill(child, SIGKILL);
		must(waitpid(child, &status, 0) == child && WIFSIGNALED(status), "status %x",
		     status);
		must(number_in(STATS, "buffers") == 0, "a buffer is left");
		__atomic_store_n(&guard.go, true, __ATOMIC_RELEASE);
		unguard();
	}
}

/* The first page of a swap area is a header that contains the size. */
static void make_swap(const char *name, __u64 size)
{
	int fd = open_file(name, O_RDWR);
	__u32 info[] = { 1, size / PAGE - 1, 0 };

	fill(shadow, 1, 0, SIZE);
	memset(shadow, 0, PAGE);
	memcpy(shadow + 1024, info, sizeof(info));
	memcpy(shadow + PAGE - 10, "SWAPSPACE2", 10);
	must(write(fd, shadow, SIZE) == (ssize_t)SIZE && !fsync(fd), "%s: %s", name,
	     strerror(errno));
	close(fd);
}

/* A file or disk that is used for swap can be read, but not written. */
static void swap_on(const char *name)
{
	int direct, result;

	for (direct = 0; direct < 2; direct++) {
		int file, buffer = filled_buffer();
		struct dmafile_rw rw;

		make_swap(name, SIZE);
		/* Open it before it is used for swap. */
		file = open_file(name, O_RDWR | (direct ? O_DIRECT : 0));
		must(!swapon(name, 0), "swapon %s: %s", name, strerror(errno));
		rw = transfer(DMAFILE_WRITE, buffer, file, SIZE, GATHER);
		result = call(node, DMAFILE_IOC_RW, &rw);
		must(result == -ETXTBSY && !rw.bytes, "%s: WRITE to swap: %s", name, why(result));
		rw = transfer(DMAFILE_READ, buffer, file, SIZE, GATHER);
		result = call(node, DMAFILE_IOC_RW, &rw);
		must(!result && rw.bytes == SIZE, "%s: READ from swap: %s", name, why(result));
		check_buffer(buffer, SIZE);
		must(!swapoff(name), "swapoff %s: %s", name, strerror(errno));
		check_file(name, SIZE);
		/* After swapoff it can be written again. */
		fill(shadow, 1, 0, SIZE);
		rw = transfer(DMAFILE_WRITE, buffer, file, SIZE, GATHER);
		result = call(node, DMAFILE_IOC_RW, &rw);
		must(!result, "%s: WRITE after swapoff: %s", name, why(result));
		close(buffer);
		close(file);
	}
}

static void swap(void)
{
	make();
	swap_on(path);
	if (device)
		swap_on(device);
}

static void set_attributes(int fd, unsigned int attributes)
{
	int now;

	must(!ioctl(fd, FS_IOC_GETFLAGS, &now), "FS_IOC_GETFLAGS: %s", strerror(errno));
	now &= ~(FS_IMMUTABLE_FL | FS_APPEND_FL);
	now |= attributes;
	must(!ioctl(fd, FS_IOC_SETFLAGS, &now), "FS_IOC_SETFLAGS %x: %s", now, strerror(errno));
}

/*
 * The attribute is set after the file was opened. File systems handle this differently. A request
 * must fail exactly if pwrite() does, which on ext4 is the case for an immutable file.
 */
static void immutable(void)
{
	static const unsigned int attributes[] = { FS_IMMUTABLE_FL, FS_APPEND_FL, 0 };
	int direct, result, want;
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(attributes); i++)
		for (direct = 0; direct < 2; direct++) {
			int buffer = filled_buffer(), file, other;
			struct dmafile_rw rw;

			make();
			file = open_file(path, O_RDWR | (direct ? O_DIRECT : 0));
			other = open_file(path, O_RDWR);
			set_attributes(other, attributes[i]);
			want = pwrite(other, shadow, 1, 0) < 0 ? -errno : 0;
			must(attributes[i] != FS_IMMUTABLE_FL || want == -EPERM, "pwrite: %s",
			     why(want));
			rw = transfer(DMAFILE_WRITE, buffer, file, SIZE, GATHER);
			result = call(node, DMAFILE_IOC_RW, &rw);
			must(result == want, "attributes %x: WRITE: %s, pwrite: %s", attributes[i],
			     why(result), why(want));
			if (want)
				check_file(path, SIZE);
			rw = transfer(DMAFILE_READ, buffer, file, SIZE, GATHER);
			result = call(node, DMAFILE_IOC_RW, &rw);
			must(!result, "READ: %s", why(result));
			set_attributes(other, 0);
			close(buffer);
			close(file);
			close(other);
		}
}

static void limit(rlim_t size)
{
	struct rlimit limits = { size, RLIM_INFINITY };

	must(!setrlimit(RLIMIT_FSIZE, &limits), "setrlimit: %s", strerror(errno));
}

static unsigned int signals;

static void on_signal(int unused)
{
	(void)unused;
	__atomic_add_fetch(&signals, 1, __ATOMIC_RELAXED);
}

/*
 * A limit inside a block, at the end of one, and before the first byte: everything below the limit
 * is written. An interruptible request may end earlier, on the signal that a later part has caused.
 */
static void limit_on_sizes(void)
{
	static const __u64 limits[] = { 600000, 10 * GATHER, 9 * GATHER + 512, 1, 0 };
	struct sigaction action = { .sa_handler = on_signal };
	unsigned int turn;

	sigaction(SIGXFSZ, &action, NULL);
	for (turn = 0; turn < 4 * ARRAY_SIZE(limits); turn++) {
		__u64 most = limits[turn / 4];
		__u32 flags = turn & 1 ? DMAFILE_INTERRUPTIBLE : 0;
		int file = open_file(path, O_RDWR | O_TRUNC | (turn & 2 ? O_DIRECT : 0));
		int buffer = filled_buffer(), result;
		struct dmafile_rw rw = transfer(DMAFILE_WRITE | flags, buffer, file, SIZE, GATHER);

		__atomic_store_n(&signals, 0, __ATOMIC_RELAXED);
		limit(most);
		result = call(node, DMAFILE_IOC_RW, &rw);
		limit(RLIM_INFINITY);
		must(__atomic_load_n(&signals, __ATOMIC_RELAXED), "limit %llu: no signal", most);
		if (flags && result == -EINTR)
			must(rw.bytes <= most, "limit %llu: %llu bytes", most, rw.bytes);
		else
			must(result == -EFBIG && rw.bytes == most, "limit %llu: %s, %llu bytes",
			     most, why(result), rw.bytes);
		must(size_of(file) <= most, "limit %llu: size %llu", most, size_of(file));
		fill(shadow, 2, 0, SIZE);
		check_file(path, rw.bytes);
		close(buffer);
		close(file);
	}
}

/* SIGXFSZ is not handled and kills the process. */
static void killed_by_a_limit(void)
{
	int direct, status;

	for (direct = 0; direct < 2; direct++) {
		int file = open_file(path, O_RDWR | O_TRUNC | (direct ? O_DIRECT : 0));
		int buffer = filled_buffer();
		pid_t child = fork();

		if (!child) {
			struct dmafile_rw rw = transfer(DMAFILE_WRITE, buffer, file, SIZE, GATHER);

			signal(SIGXFSZ, SIG_DFL);
			limit(10 * GATHER);
			call(node, DMAFILE_IOC_RW, &rw);
			_exit(1);
		}
		close(buffer);
		must(waitpid(child, &status, 0) == child && WIFSIGNALED(status) &&
		     WTERMSIG(status) == SIGXFSZ, "status %x", status);
		must(size_of(file) == 10 * GATHER, "%llu bytes", size_of(file));
		must(number_in(STATS, "buffers") == 0, "a buffer is left");
		close(file);
	}
}

/* Offsets beyond the maximum file size of the file system */
static void too_far(void)
{
	static const __u64 places[] = {
		1ULL << 44, 1ULL << 60, (1ULL << 63) - 2 * SIZE, (1ULL << 44) - GATHER,
	};
	int file, buffer = filled_buffer(), want, result;
	unsigned int i;

	make();
	file = open_file(path, O_RDWR);
	for (i = 0; i < ARRAY_SIZE(places); i++) {
		struct dmafile_rw rw = transfer(DMAFILE_WRITE, buffer, file, SIZE, GATHER);

		want = pwrite(file, shadow, 1, places[i]) < 0 ? -errno : 0;
		must(!ftruncate(file, SIZE), "ftruncate: %s", strerror(errno));
		rw.file_offset = places[i];
		rw.length = 1;
		result = call(node, DMAFILE_IOC_RW, &rw);
		must(result == want, "at %llu: WRITE: %s, pwrite: %s", places[i], why(result),
		     why(want));
		must(!ftruncate(file, SIZE), "ftruncate: %s", strerror(errno));
	}
	close(buffer);
	close(file);
}

static const struct test tests[] = {
	{ "refused_by_fanotify", refused_by_fanotify },
	{ "fanotify_takes_its_time", fanotify_takes_its_time },
	{ "killed_before_an_answer", killed_before_an_answer },
	{ "swap", swap },
	{ "immutable", immutable },
	{ "limit_on_sizes", limit_on_sizes },
	{ "killed_by_a_limit", killed_by_a_limit },
	{ "too_far", too_far },
};

int main(int argc, char **argv)
{
	folder = argc > 1 ? argv[1] : ".";
	device = argc > 2 ? argv[2] : NULL;
	snprintf(path, sizeof(path), "%s/guarded", folder);
	return run_tests(tests, ARRAY_SIZE(tests));
}
