// SPDX-License-Identifier: GPL-2.0-only
/*
 * midway FILE
 *
 * Tests changes to a file or buffer while a request runs: others change the open flags of the file,
 * freeze its file system, or wait for the buffer. FILE has some MiB and is on a disk that takes a
 * tenth of a second for each read and each write.
 */
#define _GNU_SOURCE
#include "test.h"

#include <linux/fs.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

#define GATHER	(64UL << 10)
#define LENGTH	(2UL << 20)

static const char *path;
static __u64 size;

/* A request in a separate thread */
struct running {
	pthread_t thread;
	struct dmafile_progress progress;
	struct dmafile_rw rw;
	int result;
	/* The number of completed saves when it began, and when it ended */
	unsigned int before, after;
};

/* The number of completed saves */
static unsigned int saved;

static void *run(void *argument)
{
	struct running *one = argument;

	one->before = __atomic_load_n(&saved, __ATOMIC_RELAXED);
	one->result = call(node, DMAFILE_IOC_RW, &one->rw);
	one->after = __atomic_load_n(&saved, __ATOMIC_RELAXED);
	return NULL;
}

static int open_file(int flags)
{
	int fd = open(path, O_RDWR | O_CLOEXEC | flags);

	must(fd >= 0, "%s: %s", path, strerror(errno));
	return fd;
}

static void start(struct running *one, __u32 flags, int buffer, int file, __u64 length)
{
	one->progress = (struct dmafile_progress) { 0 };
	one->rw = transfer(flags, buffer, file, length, GATHER);
	one->rw.progress = (unsigned long)&one->progress;
	must(!pthread_create(&one->thread, NULL, run, one), "pthread_create");
}

/* Waits until part of the data has been transferred. */
static void until_it_moves(const struct running *one)
{
	double begun = now();

	while (!__atomic_load_n(&one->progress.bytes, __ATOMIC_RELAXED)) {
		must(now() - begun < 60, "nothing has been moved after 60 s");
		usleep(2000);
	}
	must(one->progress.bytes < one->rw.length, "it has already ended");
}

static void over(struct running *one, const char *what)
{
	pthread_join(one->thread, NULL);
	must(!one->result && one->rw.bytes == one->rw.length, "%s: %s, %llu bytes", what,
	     why(one->result), one->rw.bytes);
}

static int filled(__u64 seed)
{
	int buffer = new_buffer(LENGTH);
	__u8 *map = map_buffer(buffer, PROT_READ | PROT_WRITE);

	fill(map, seed, 0, LENGTH);
	unmap_buffer(buffer, map);
	return buffer;
}

static void check_file(__u64 seed, const char *what)
{
	static __u8 want[LENGTH], seen[LENGTH];
	int fd = open_file(0);

	fill(want, seed, 0, LENGTH);
	must(size_of(fd) == size, "%s: the file has %llu bytes now", what, size_of(fd));
	must(pread(fd, seen, LENGTH, 0) == (ssize_t)LENGTH, "pread: %s", strerror(errno));
	must(differ(seen, want, LENGTH) == LENGTH, "%s: the file differs at %zu", what,
	     differ(seen, want, LENGTH));
	close(fd);
}

/* All pieces are written to their offset, none to the end of the file. */
static void append_is_set(void)
{
	int file = open_file(O_DIRECT), buffer = filled(1), flags = fcntl(file, F_GETFL);
	struct running one;

	start(&one, DMAFILE_WRITE, buffer, file, LENGTH);
	until_it_moves(&one);
	must(!fcntl(file, F_SETFL, flags | O_APPEND), "F_SETFL: %s", strerror(errno));
	over(&one, "WRITE to a file that gets O_APPEND");
	check_file(1, "WRITE to a file that gets O_APPEND");
	close(file);
	close(buffer);
}

static unsigned long cached(int fd)
{
	unsigned char present[LENGTH / PAGE];
	unsigned long count = 0, i;
	void *map = mmap(NULL, LENGTH, PROT_READ, MAP_SHARED, fd, 0);

	must(map != MAP_FAILED && !mincore(map, LENGTH, present), "mincore: %s", strerror(errno));
	for (i = 0; i < LENGTH / PAGE; i++)
		count += present[i] & 1;
	munmap(map, LENGTH);
	return count;
}

/* A strict request that began with direct I/O keeps using it. */
static void direct_is_cleared(void)
{
	int file = open_file(O_DIRECT), buffer = new_buffer(LENGTH), flags = fcntl(file, F_GETFL);
	struct running one;

	must(!fsync(file), "fsync: %s", strerror(errno));
	posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
	start(&one, DMAFILE_READ | DMAFILE_STRICT, buffer, file, LENGTH);
	until_it_moves(&one);
	must(!fcntl(file, F_SETFL, flags & ~O_DIRECT), "F_SETFL: %s", strerror(errno));
	over(&one, "READ of a file that loses O_DIRECT");
	must(one.rw.mode == DMAFILE_MODE_DIRECT, "mode %x", one.rw.mode);
	must(!cached(file), "%lu pages are in the page cache", cached(file));
	close(file);
	close(buffer);
}

/* FIFREEZE and FITHAW in a separate process, which would hang if a writer count leaked. */
static bool freezes_and_thaws(unsigned int seconds)
{
	double begun = now();
	int status = 0, file;
	pid_t child = fork();

	if (!child) {
		file = open(path, O_RDONLY | O_CLOEXEC);
		if (file < 0 || ioctl(file, FIFREEZE, 0))
			_exit(1);
		/* Writes wait while the file system is frozen. */
		sleep(1);
		_exit(ioctl(file, FITHAW, 0) ? 2 : 0);
	}
	while (now() - begun < seconds) {
		if (waitpid(child, &status, WNOHANG) == child) {
			must(WIFEXITED(status) && !WEXITSTATUS(status), "FIFREEZE, FITHAW: %x",
			     status);
			return true;
		}
		usleep(50000);
	}
	return false;
}

/* Each queued write takes and releases freeze protection exactly once. */
static void file_system_is_frozen(void)
{
	int file = open_file(O_DIRECT), buffer = filled(2);
	struct running one;

	start(&one, DMAFILE_WRITE, buffer, file, LENGTH);
	until_it_moves(&one);
	must(freezes_and_thaws(120), "not frozen within two minutes, during a write");
	over(&one, "WRITE to a file system that was frozen");
	check_file(2, "WRITE to a file system that was frozen");
	must(freezes_and_thaws(120), "not frozen within two minutes, after a write");
	close(file);
	close(buffer);
}

#define SAVERS	3

static bool ends;

static void *save(void *argument)
{
	int file = open_file(O_DIRECT), buffer = *(int *)argument;

	while (!__atomic_load_n(&ends, __ATOMIC_RELAXED)) {
		struct running one = { 0 };

		start(&one, DMAFILE_WRITE, buffer, file, 16 * GATHER);
		over(&one, "WRITE beside others");
		__atomic_add_fetch(&saved, 1, __ATOMIC_RELAXED);
	}
	close(file);
	return NULL;
}

/*
 * There is always a save in progress. The request that fills the buffer waits only for the saves
 * that were queued before it.
 */
static void filler_has_its_turn(void)
{
	int file = open_file(O_DIRECT), buffer = filled(2), flags;
	struct running one = { 0 };
	pthread_t savers[SAVERS];
	int i;

	for (i = 0; i < SAVERS; i++) {
		pthread_create(&savers[i], NULL, save, &buffer);
		/* Start them at different times, so that they also end at different times. */
		usleep(150000);
	}
	for (i = 0; i < 6; i++) {
		flags = i & 1 ? DMAFILE_INTERRUPTIBLE : 0;
		start(&one, DMAFILE_READ | flags, buffer, file, PAGE);
		over(&one, "READ beside saves");
		/* Each saver may complete several saves if this request started slowly. */
		must(one.after - one.before <= 4 * SAVERS, "flags %x: it waited for %u saves",
		     flags, one.after - one.before);
	}
	__atomic_store_n(&ends, true, __ATOMIC_RELAXED);
	for (i = 0; i < SAVERS; i++)
		pthread_join(savers[i], NULL);
	close(file);
	close(buffer);
}

static void set_up(void)
{
	int fd = open_file(0);

	size = size_of(fd);
	must(size >= 2 * LENGTH, "%s is too small", path);
	close(fd);
}

static const struct test tests[] = {
	{ "set_up", set_up },
	{ "append_is_set", append_is_set },
	{ "direct_is_cleared", direct_is_cleared },
	{ "file_system_is_frozen", file_system_is_frozen },
	{ "filler_has_its_turn", filler_has_its_turn },
};

int main(int argc, char **argv)
{
	if (argc != 2) {
		fprintf(stderr, "midway FILE\n");
		return 2;
	}
	path = argv[1];
	return run_tests(tests, ARRAY_SIZE(tests));
}
