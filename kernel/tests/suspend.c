// SPDX-License-Identifier: GPL-2.0-only
/*
 * suspend SLOW
 *
 * Suspends the system during requests, up to the freezer: all tasks are frozen for a second.
 * Requests must not prevent that, must not treat it as a signal, and must continue. SLOW is a file
 * of some MiB on a disk on which each read takes a tenth of a second.
 */
#define _GNU_SOURCE
#include "uring.h"

#include <pthread.h>

static const char *slow;
static __u64 size;
static __u8 *shadow;

/* A request in a separate thread, which would take most of a minute */
struct running {
	pthread_t thread;
	struct dmafile_progress progress;
	struct dmafile_rw rw;
	int result;
};

static __u64 bytes_of(const struct running *one)
{
	return __atomic_load_n(&one->progress.bytes, __ATOMIC_RELAXED);
}

/* READ into a buffer, or ALLOC_READ without one */
static void *run(void *argument)
{
	struct running *one = argument;
	struct dmafile_alloc_read load = slow_load(one->rw.file_fd, PAGE, one->rw.flags,
						   &one->progress);

	if (one->rw.fd >= 0)
		one->result = call(node, DMAFILE_IOC_RW, &one->rw);
	else
		one->result = call(node, DMAFILE_IOC_ALLOC_READ, &load);
	return NULL;
}

static void start(struct running *one, __u32 flags, int buffer)
{
	*one = (struct running) {
		.rw = transfer(flags | (buffer < 0 ? 0 : DMAFILE_READ), buffer, open_slow(slow),
			       size, PAGE),
	};
	one->rw.progress = (unsigned long)&one->progress;
	must(!pthread_create(&one->thread, NULL, run, one), "pthread_create");
}

static void put(const char *path, const char *word)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	bool done = fd >= 0 && write(fd, word, strlen(word)) == (ssize_t)strlen(word);
	int error = errno;

	/* The kernel logs which tasks it could not freeze, with their stacks. */
	if (!done && system("dmesg | tail -n 100 | sed 's/^/# /'"))
		printf("# no kernel log\n");
	must(done, "%s to %s: %s", word, path, strerror(error));
	close(fd);
}

static void freeze(void)
{
	double begun = now();

	/* Only freeze the tasks and thaw them. */
	put("/sys/power/pm_test", "freezer");
	put("/sys/module/suspend/parameters/pm_test_delay", "1");
	/* The timeout in ms: longer than a request that ignores the freezer. */
	put("/sys/power/pm_freeze_timeout", "300000");
	put("/sys/power/state", "freeze");
	printf("# frozen and thawed after %.1f s\n", now() - begun);
}

/* Checks that a request transfers more than this, and stops it. */
static void goes_on(struct running *one, __u64 had)
{
	double begun = now();

	must(had < size, "it was over before all tasks were frozen");
	while (bytes_of(one) <= had) {
		must(now() - begun < 300, "nothing has been read since it was thawed");
		usleep(10000);
	}
	must(bytes_of(one) < size, "it was over too early");
	__atomic_store_n(&one->progress.stop, 1, __ATOMIC_RELAXED);
}

static void over(struct running *one, int want)
{
	pthread_join(one->thread, NULL);
	must(one->result == want, "%s, not %s", why(one->result), why(want));
	close(one->rw.file_fd);
}

static void check(int fd, __u64 len)
{
	__u8 *map = map_buffer(fd, PROT_READ);

	must(differ(map, shadow, len) == len, "differs at %zu of %llu", differ(map, shadow, len),
	     len);
	unmap_buffer(fd, map);
}

static void in_the_middle(void)
{
	static const __u32 flags[] = { 0, DMAFILE_INTERRUPTIBLE, DMAFILE_IN_ORDER };
	struct running all[2 * ARRAY_SIZE(flags)];
	__u64 had[ARRAY_SIZE(all)];
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(all); i++)
		start(&all[i], flags[i / 2], i & 1 ? new_buffer(size) : -1);
	for (i = 0; i < ARRAY_SIZE(all); i++)
		until_it_moves(&all[i].progress);
	freeze();
	for (i = 0; i < ARRAY_SIZE(all); i++)
		had[i] = bytes_of(&all[i]);
	for (i = 0; i < ARRAY_SIZE(all); i++)
		goes_on(&all[i], had[i]);
	for (i = 0; i < ARRAY_SIZE(all); i++) {
		over(&all[i], -ECANCELED);
		if (i & 1) {
			check(all[i].rw.fd, all[i].rw.bytes);
			close(all[i].rw.fd);
		}
	}
	must(number_in(STATS, "buffers") == 0, "a buffer is left");
}

/* An io_uring command, in a worker */
static void in_a_worker(void)
{
	struct running one = { .rw.file_fd = open_slow(slow) };
	struct dmafile_alloc_read load = slow_load(one.rw.file_fd, PAGE, 0, &one.progress);
	int result;

	ring_open(0);
	put_command(DMAFILE_IOC_ALLOC_READ, &load, 0, 1);
	submit();
	until_it_moves(&one.progress);
	freeze();
	goes_on(&one, bytes_of(&one));
	result = result_next(1);
	must(result == -ECANCELED, "%s", why(result));
	ring_close();
	close(one.rw.file_fd);
}

/* A request that waits for another one to fill the buffer continues to wait. */
static void before_its_turn(void)
{
	static const __u32 flags[] = { 0, DMAFILE_INTERRUPTIBLE };
	int buffer = new_buffer(size);
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(flags); i++) {
		struct running one, other;

		start(&one, 0, buffer);
		until_it_moves(&one.progress);
		start(&other, flags[i], buffer);
		freeze();
		must(!bytes_of(&other), "two requests fill a buffer at once");
		goes_on(&one, bytes_of(&one));
		over(&one, -ECANCELED);
		until_it_moves(&other.progress);
		goes_on(&other, bytes_of(&other));
		over(&other, -ECANCELED);
		check(buffer, other.rw.bytes);
	}
	close(buffer);
}

static void set_up(void)
{
	int fd = open_slow(slow);

	shadow = contents_of(fd, &size);
	close(fd);
}

static const struct test tests[] = {
	{ "set_up", set_up },
	{ "in_the_middle", in_the_middle },
	{ "in_a_worker", in_a_worker },
	{ "before_its_turn", before_its_turn },
};

int main(int argc, char **argv)
{
	if (argc != 2) {
		fprintf(stderr, "suspend SLOW\n");
		return 2;
	}
	slow = argv[1];
	return run_tests(tests, ARRAY_SIZE(tests));
}
