// SPDX-License-Identifier: GPL-2.0-only
/*
 * ring FOLDER [SLOW]
 *
 * The requests as commands of io_uring: results are those of the ioctl, a request can be
 * cancelled, and a ring that goes away in the middle leaves nothing behind. SLOW is a file of some
 * MiB on a disk that takes seconds to read it.
 */
#define _GNU_SOURCE
#include "test.h"

#include <linux/io_uring.h>
#include <linux/time_types.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define ENTRIES	8U
/* struct dmafile_uring_cmd fills half of what an SQE of the ordinary size has. */
#define SQE_CMD	48

static const char *folder, *slow;

static struct {
	int fd;
	unsigned int *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
	struct io_uring_sqe *sqes;
	struct io_uring_cqe *cqes;
} ring;

static void ring_open(void)
{
	struct io_uring_params params = { 0 };
	__u8 *map;

	ring.fd = syscall(__NR_io_uring_setup, ENTRIES, &params);
	must(ring.fd >= 0, "io_uring_setup: %s", strerror(errno));
	must(params.features & IORING_FEAT_SINGLE_MMAP, "an io_uring of two mappings");
	map = mmap(NULL, params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe) +
		   params.sq_off.array + ENTRIES * sizeof(__u32), PROT_READ | PROT_WRITE,
		   MAP_SHARED | MAP_POPULATE, ring.fd, IORING_OFF_SQ_RING);
	ring.sqes = mmap(NULL, ENTRIES * sizeof(struct io_uring_sqe), PROT_READ | PROT_WRITE,
			 MAP_SHARED | MAP_POPULATE, ring.fd, IORING_OFF_SQES);
	must(map != MAP_FAILED && ring.sqes != MAP_FAILED, "mmap of a ring");
	ring.sq_tail = (unsigned int *)(map + params.sq_off.tail);
	ring.sq_mask = (unsigned int *)(map + params.sq_off.ring_mask);
	ring.sq_array = (unsigned int *)(map + params.sq_off.array);
	ring.cq_head = (unsigned int *)(map + params.cq_off.head);
	ring.cq_tail = (unsigned int *)(map + params.cq_off.tail);
	ring.cq_mask = (unsigned int *)(map + params.cq_off.ring_mask);
	ring.cqes = (struct io_uring_cqe *)(map + params.cq_off.cqes);
}

/* Mappings stay until the process ends; that is what a careless program does. */
static void ring_close(void)
{
	close(ring.fd);
}

static struct io_uring_sqe *sqe_next(void)
{
	unsigned int tail = *ring.sq_tail, index = tail & *ring.sq_mask;

	memset(&ring.sqes[index], 0, sizeof(ring.sqes[index]));
	ring.sq_array[index] = index;
	return &ring.sqes[index];
}

static void submit(unsigned int wait_for)
{
	int result;

	__atomic_store_n(ring.sq_tail, *ring.sq_tail + 1, __ATOMIC_RELEASE);
	result = syscall(__NR_io_uring_enter, ring.fd, 1, wait_for,
			 wait_for ? IORING_ENTER_GETEVENTS : 0, NULL, 0);
	must(result == 1, "io_uring_enter: %s", strerror(errno));
	requests++;
}

static void put_command(unsigned int request, const void *structure, __u64 reserved, __u64 tag)
{
	struct dmafile_uring_cmd cmd = {
		.request = (unsigned long)structure,
		.reserved = reserved,
	};
	struct io_uring_sqe *sqe = sqe_next();

	sqe->opcode = IORING_OP_URING_CMD;
	sqe->fd = node;
	sqe->cmd_op = request;
	sqe->user_data = tag;
	memcpy((__u8 *)sqe + SQE_CMD, &cmd, sizeof(cmd));
}

/* The next result, of any command. */
static int result_of(__u64 *tag)
{
	unsigned int head = *ring.cq_head;
	int result;

	while (__atomic_load_n(ring.cq_tail, __ATOMIC_ACQUIRE) == head) {
		result = syscall(__NR_io_uring_enter, ring.fd, 0, 1, IORING_ENTER_GETEVENTS,
				 NULL, 0);
		must(result >= 0 || errno == EINTR, "io_uring_enter: %s", strerror(errno));
	}
	result = ring.cqes[head & *ring.cq_mask].res;
	*tag = ring.cqes[head & *ring.cq_mask].user_data;
	__atomic_store_n(ring.cq_head, head + 1, __ATOMIC_RELEASE);
	return result;
}

static int command(unsigned int request, const void *structure, __u64 reserved)
{
	__u64 tag;
	int result;

	put_command(request, structure, reserved, 7);
	submit(1);
	result = result_of(&tag);
	must(tag == 7, "a result of %llu", tag);
	return result;
}

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

/* INFO, ALLOC, ALLOC_READ and RW to and fro: the bytes arrive. */
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
	ring_open();
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

	ring_open();
	for (bit = 0; bit < 64; bit++) {
		result = command(DMAFILE_IOC_INFO, &info, 1ULL << bit);
		must(result == -EINVAL, "bit %d of what is reserved: %s", bit, why(result));
	}
	result = command(DMAFILE_IOC_INFO, NULL, 0);
	must(result == -EFAULT, "no structure: %s", why(result));
	result = command(_IOWR(DMAFILE_IOC_MAGIC, 77, info), &info, 0);
	must(result == -ENOTTY, "no such command: %s", why(result));
	result = command(_IO(DMAFILE_IOC_MAGIC, 0), &info, 0);
	must(result == -ENOTTY, "a command without a size: %s", why(result));
	result = command(DMAFILE_IOC_RW, &rw, 0);
	must(result == -EBADF, "no such files: %s", why(result));
	info.size = 0;
	result = command(DMAFILE_IOC_INFO, &info, 0);
	must(result == -EINVAL, "no size: %s", why(result));
	ring_close();
}

static struct dmafile_alloc_read slow_load(int fd, __u32 flags, struct dmafile_progress *progress)
{
	return (struct dmafile_alloc_read) {
		.size = sizeof(struct dmafile_alloc_read),
		.fd_flags = O_RDWR,
		.flags = flags,
		.file_fd = fd,
		.gather = 64 << 10,
		.progress = (unsigned long)progress,
	};
}

static int open_slow(void)
{
	int fd = open(slow, O_RDONLY | O_DIRECT | O_CLOEXEC);

	must(fd >= 0, "%s: %s", slow, strerror(errno));
	return fd;
}

static void until_it_moves(const struct dmafile_progress *progress)
{
	int i;

	for (i = 0; i < 600 && !__atomic_load_n(&progress->bytes, __ATOMIC_RELAXED); i++)
		usleep(50000);
	must(progress->bytes, "nothing has been read after 30 s");
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
	fd = open_slow();
	load = slow_load(fd, DMAFILE_INTERRUPTIBLE, &progress);
	ring_open();
	put_command(DMAFILE_IOC_ALLOC_READ, &load, 0, 1);
	submit(0);
	until_it_moves(&progress);
	sqe = sqe_next();
	sqe->opcode = IORING_OP_ASYNC_CANCEL;
	sqe->addr = 1;
	sqe->user_data = 2;
	submit(0);
	for (i = 0; i < 2; i++) {
		result = result_of(&tag);
		if (tag == 1)
			must(result == -EINTR, "a cancelled load: %s", why(result));
		else
			must(result == -EALREADY || !result, "cancelling: %s", why(result));
	}
	must(progress.bytes < size_of(fd), "all has been read");
	ring_close();
	close(fd);
}

/* The process ends, and with it its ring, while a worker is busy. */
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

			load = slow_load(open_slow(), 0, progress);
			ring_open();
			put_command(DMAFILE_IOC_ALLOC_READ, &load, 0, 1);
			submit(0);
			until_it_moves(progress);
			/* Of its own, or by force. */
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
	/* A ring is taken apart in the background. */
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

/* A timeout of the caller's own ring makes work for it while it waits for another request. */
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
	rw.file_fd = open_slow();
	rw.length = size_of(rw.file_fd);
	rw.fd = new_buffer(rw.length);
	other = rw;
	pthread_create(&thread, NULL, fill_buffer, &rw);
	until_it_moves(&progress);
	ring_open();
	sqe = sqe_next();
	sqe->opcode = IORING_OP_TIMEOUT;
	sqe->addr = (unsigned long)&soon;
	sqe->len = 1;
	submit(0);
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
 * What was submitted counts, not what stands in the ring when a worker gets to it: Linux 6.12 has
 * commands look there.
 */
static void slots_are_used_again(void)
{
	struct dmafile_info infos[ENTRIES];
	unsigned int round, i;
	__u64 tag;

	ring_open();
	for (round = 0; round < 100; round++) {
		memset(infos, 0, sizeof(infos));
		for (i = 0; i < ENTRIES; i++) {
			infos[i].size = sizeof(infos[i]);
			put_command(DMAFILE_IOC_INFO, &infos[i], 0, i);
			submit(0);
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
