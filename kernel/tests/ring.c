// SPDX-License-Identifier: GPL-2.0-only
/*
 * ring FOLDER [SLOW]
 *
 * Tests the requests as io_uring commands: the results are those of the ioctl, a request can be
 * cancelled, and a ring that is closed in the middle leaves nothing behind. SLOW is a file of some
 * MiB on a disk that takes seconds to read it.
 */
#define _GNU_SOURCE
#include "uring.h"

#include <linux/time_types.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

static const char *folder, *slow;

#define LENGTH	300000UL

static int open_at(const char *name, int flags)
{
	char path[4096];
	int fd;

	snprintf(path, sizeof(path), "%s/%s", folder, name);
	fd = open(path, O_RDWR | O_CREAT | flags, 0600);
	must(fd >= 0, "%s: %s", path, strerror(errno));
	return fd;
}

/* INFO, ALLOC, ALLOC_READ and RW in both directions transfer the data. */
static void every_request(void)
{
	static __u8 shadow[LENGTH], back[LENGTH];
	struct dmafile_info info = { .size = sizeof(info) };
	struct dmafile_alloc alloc = {
		.size = sizeof(alloc), .fd_flags = O_RDWR | O_CLOEXEC, .length = LENGTH,
	};
	struct dmafile_alloc_read load = { .size = sizeof(load), .fd_flags = O_RDWR };
	struct dmafile_rw rw = { .size = sizeof(rw), .length = LENGTH };
	int from, to, result;
	__u8 *map;

	fill(shadow, 1, 0, LENGTH);
	to = open_at("ring", O_TRUNC);
	must(pwrite(to, shadow, LENGTH, 0) == (ssize_t)LENGTH && !fsync(to), "pwrite");
	from = open_at("ring", O_DIRECT);
	ring_open(0);
	result = command(DMAFILE_IOC_INFO, &info, 0);
	must(!result && info.features, "INFO: %s", why(result));
	result = command(DMAFILE_IOC_ALLOC, &alloc, 0);
	must(!result && size_of(alloc.fd) == round_up(LENGTH, PAGE), "ALLOC: %s", why(result));
	load.file_fd = from;
	result = command(DMAFILE_IOC_ALLOC_READ, &load, 0);
	must(!result && load.bytes == LENGTH, "ALLOC_READ: %s", why(result));
	map = map_buffer(load.fd, PROT_READ);
	must(differ(map, shadow, LENGTH) == LENGTH, "ALLOC_READ differs");
	unmap_buffer(load.fd, map);

	rw.flags = DMAFILE_READ;
	rw.fd = alloc.fd;
	rw.file_fd = from;
	result = command(DMAFILE_IOC_RW, &rw, 0);
	must(!result && rw.bytes == LENGTH, "READ: %s", why(result));
	close(from);
	close(to);
	from = open_at("ring-back", O_TRUNC | O_DIRECT);
	rw.flags = DMAFILE_WRITE;
	rw.file_fd = from;
	result = command(DMAFILE_IOC_RW, &rw, 0);
	must(!result && rw.bytes == LENGTH, "WRITE: %s", why(result));
	to = open_at("ring-back", 0);
	must(pread(to, back, LENGTH, 0) == (ssize_t)LENGTH, "pread");
	must(differ(back, shadow, LENGTH) == LENGTH, "WRITE differs");
	close(from);
	close(to);
	close(alloc.fd);
	close(load.fd);
	ring_close();
}

static void refusals(void)
{
	struct dmafile_info info = { .size = sizeof(info) };
	struct dmafile_rw rw = {
		.size = sizeof(rw), .flags = DMAFILE_READ, .fd = -1, .file_fd = -1, .length = 1,
	};
	int result, bit;

	ring_open(0);
	for (bit = 0; bit < 64; bit++) {
		result = command(DMAFILE_IOC_INFO, &info, 1ULL << bit);
		must(result == -EINVAL, "reserved bit %d: %s", bit, why(result));
	}
	result = command(DMAFILE_IOC_INFO, NULL, 0);
	must(result == -EFAULT, "no structure: %s", why(result));
	result = command(_IOWR(DMAFILE_IOC_MAGIC, 77, info), &info, 0);
	must(result == -ENOTTY, "no such command: %s", why(result));
	result = command(_IO(DMAFILE_IOC_MAGIC, 0), &info, 0);
	must(result == -ENOTTY, "a command without a size: %s", why(result));
	result = command(DMAFILE_IOC_RW, &rw, 0);
	must(result == -EBADF, "invalid files: %s", why(result));
	info.size = 0;
	result = command(DMAFILE_IOC_INFO, &info, 0);
	must(result == -EINVAL, "no size: %s", why(result));
	ring_close();
}

static void ended_by_a_cancel(void)
{
	struct dmafile_progress progress = { 0 };
	struct dmafile_alloc_read load;
	struct io_uring_sqe *sqe;
	int fd, i, result;
	__u64 tag;

	if (!slow) {
		skipped = "no slow disk";
		return;
	}
	fd = open_slow(slow);
	load = slow_load(fd, 64 << 10, DMAFILE_INTERRUPTIBLE, &progress);
	ring_open(0);
	put_command(DMAFILE_IOC_ALLOC_READ, &load, 0, 1);
	submit();
	until_it_moves(&progress);
	sqe = sqe_next();
	sqe->opcode = IORING_OP_ASYNC_CANCEL;
	sqe->addr = 1;
	sqe->user_data = 2;
	submit();
	for (i = 0; i < 2; i++) {
		result = result_of(&tag);
		if (tag == 1)
			must(result == -EINTR, "a cancelled load: %s", why(result));
		else
			must(result == -EALREADY || !result, "cancelling: %s", why(result));
	}
	must(progress.bytes < size_of(fd), "everything was read");
	ring_close();
	close(fd);
}

/* The process exits, which closes its ring, while a worker is busy. */
static void torn_down(void)
{
	static struct dmafile_progress *progress;
	long long buffers = number_in(STATS, "buffers");
	int status, i;
	pid_t child;

	if (!slow) {
		skipped = "no slow disk";
		return;
	}
	progress = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	for (i = 0; i < 2; i++) {
		memset(progress, 0, sizeof(*progress));
		child = fork();
		if (!child) {
			static struct dmafile_alloc_read load;

			load = slow_load(open_slow(slow), 64 << 10, 0, progress);
			ring_open(0);
			put_command(DMAFILE_IOC_ALLOC_READ, &load, 0, 1);
			submit();
			until_it_moves(progress);
			/* It exits, or is killed. */
			if (i)
				pause();
			ring_close();
			_exit(0);
		}
		until_it_moves(progress);
		if (i)
			kill(child, SIGKILL);
		must(waitpid(child, &status, 0) == child, "waitpid");
		must(i ? WIFSIGNALED(status) : !status, "the process ended with %x", status);
	}
	/* A ring is freed in the background. */
	for (i = 0; i < 100 && number_in(STATS, "buffers") != buffers; i++)
		usleep(100000);
	must(number_in(STATS, "buffers") == buffers, "%lld buffers", number_in(STATS, "buffers"));
}

static void *fill_buffer(void *request)
{
	int result = call(node, DMAFILE_IOC_RW, request);

	must(!result, "RW from a slow disk: %s", why(result));
	return NULL;
}

/* A timeout in the caller's ring queues task work while it waits for another request. */
static void work_is_no_signal(void)
{
	struct __kernel_timespec soon = { .tv_nsec = 200000000 };
	struct dmafile_progress progress = { 0 };
	struct dmafile_rw rw = {
		.size = sizeof(rw), .flags = DMAFILE_READ, .gather = 64 << 10,
		.progress = (unsigned long)&progress,
	}, other;
	struct io_uring_sqe *sqe;
	pthread_t thread;
	int result;
	__u64 tag;

	if (!slow) {
		skipped = "no slow disk";
		return;
	}
	rw.file_fd = open_slow(slow);
	rw.length = size_of(rw.file_fd);
	rw.fd = new_buffer(rw.length);
	other = rw;
	pthread_create(&thread, NULL, fill_buffer, &rw);
	until_it_moves(&progress);
	ring_open(0);
	sqe = sqe_next();
	sqe->opcode = IORING_OP_TIMEOUT;
	sqe->addr = (unsigned long)&soon;
	sqe->len = 1;
	submit();
	other.flags |= DMAFILE_INTERRUPTIBLE;
	other.length = PAGE;
	other.progress = 0;
	result = call(node, DMAFILE_IOC_RW, &other);
	must(!result, "RW that waits, without a signal: %s", why(result));
	result = result_of(&tag);
	must(result == -ETIME, "the timeout: %s", why(result));
	pthread_join(thread, NULL);
	ring_close();
	close(rw.file_fd);
	close(rw.fd);
}

/*
 * The SQE as submitted must be used, not its contents when the worker runs: Linux 6.12 passes the
 * entry in the ring to commands.
 */
static void slots_are_used_again(void)
{
	struct dmafile_info infos[ENTRIES];
	unsigned int round, i;
	__u64 tag;

	ring_open(0);
	for (round = 0; round < 100; round++) {
		memset(infos, 0, sizeof(infos));
		for (i = 0; i < ENTRIES; i++) {
			infos[i].size = sizeof(infos[i]);
			put_command(DMAFILE_IOC_INFO, &infos[i], 0, i);
			submit();
			memset(&ring.sqes[(*ring.sq_tail - 1) & *ring.sq_mask], 0xff,
			       sizeof(*ring.sqes));
		}
		for (i = 0; i < ENTRIES; i++) {
			int result = result_of(&tag);

			must(!result, "round %u: %s", round, why(result));
		}
		for (i = 0; i < ENTRIES; i++)
			must(infos[i].features, "round %u: none to %u", round, i);
	}
	ring_close();
}

static const struct test tests[] = {
	{ "every_request", every_request },
	{ "slots_are_used_again", slots_are_used_again },
	{ "refusals", refusals },
	{ "ended_by_a_cancel", ended_by_a_cancel },
	{ "work_is_no_signal", work_is_no_signal },
	{ "torn_down", torn_down },
};

int main(int argc, char **argv)
{
	folder = argc > 1 ? argv[1] : ".";
	slow = argc > 2 ? argv[2] : NULL;
	return run_tests(tests, ARRAY_SIZE(tests));
}
