/* SPDX-License-Identifier: GPL-2.0-only */
/* An io_uring without liburing, and commands to /dev/dmafile through it */
#ifndef _DMAFILE_URING_H
#define _DMAFILE_URING_H

#include <linux/io_uring.h>
#include <sched.h>
#include <sys/syscall.h>

#include "test.h"

#define ENTRIES	8U
/* struct dmafile_uring_cmd uses half of the command space in an SQE of normal size. */
#define SQE_CMD	48

static struct {
	int fd;
	unsigned int flags, pending;
	unsigned int *sq_head, *sq_tail, *sq_mask, *sq_flags, *sq_array;
	unsigned int *cq_head, *cq_tail, *cq_mask;
	struct io_uring_sqe *sqes;
	struct io_uring_cqe *cqes;
	__u8 *map;
	size_t map_size;
} ring;

static inline void ring_open(unsigned int flags)
{
	/* A polling thread sleeps after this number of idle milliseconds. */
	struct io_uring_params params = { .flags = flags, .sq_thread_idle = 20 };

	ring.fd = syscall(__NR_io_uring_setup, ENTRIES, &params);
	must(ring.fd >= 0, "io_uring_setup: %s", strerror(errno));
	must(params.features & IORING_FEAT_SINGLE_MMAP, "an io_uring with two mappings");
	ring.flags = flags;
	ring.pending = 0;
	ring.map_size = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe) +
			params.sq_off.array + ENTRIES * sizeof(__u32);
	ring.map = mmap(NULL, ring.map_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
			ring.fd, IORING_OFF_SQ_RING);
	ring.sqes = mmap(NULL, ENTRIES * sizeof(struct io_uring_sqe), PROT_READ | PROT_WRITE,
			 MAP_SHARED | MAP_POPULATE, ring.fd, IORING_OFF_SQES);
	must(ring.map != MAP_FAILED && ring.sqes != MAP_FAILED, "mmap of a ring");
	ring.sq_head = (unsigned int *)(ring.map + params.sq_off.head);
	ring.sq_tail = (unsigned int *)(ring.map + params.sq_off.tail);
	ring.sq_mask = (unsigned int *)(ring.map + params.sq_off.ring_mask);
	ring.sq_flags = (unsigned int *)(ring.map + params.sq_off.flags);
	ring.sq_array = (unsigned int *)(ring.map + params.sq_off.array);
	ring.cq_head = (unsigned int *)(ring.map + params.cq_off.head);
	ring.cq_tail = (unsigned int *)(ring.map + params.cq_off.tail);
	ring.cq_mask = (unsigned int *)(ring.map + params.cq_off.ring_mask);
	ring.cqes = (struct io_uring_cqe *)(ring.map + params.cq_off.cqes);
}

/* Like a descriptor, a mapping keeps a ring open. */
static inline void ring_close(void)
{
	munmap(ring.map, ring.map_size);
	munmap(ring.sqes, ENTRIES * sizeof(struct io_uring_sqe));
	close(ring.fd);
}

static inline struct io_uring_sqe *sqe_next(void)
{
	unsigned int index = (*ring.sq_tail + ring.pending++) & *ring.sq_mask;

	memset(&ring.sqes[index], 0, sizeof(ring.sqes[index]));
	ring.sq_array[index] = index;
	return &ring.sqes[index];
}

static inline int ring_enter(unsigned int submitted, unsigned int wait_for, unsigned int flags)
{
	return syscall(__NR_io_uring_enter, ring.fd, submitted, wait_for, flags, NULL, 0);
}

/* Submits all SQEs that sqe_next() has returned. They may be overwritten afterwards. */
static inline void submit(void)
{
	unsigned int count = ring.pending;

	__atomic_store_n(ring.sq_tail, *ring.sq_tail + count, __ATOMIC_SEQ_CST);
	ring.pending = 0;
	requests += count;
	if (!(ring.flags & IORING_SETUP_SQPOLL)) {
		must(ring_enter(count, 0, 0) == (int)count, "io_uring_enter: %s", strerror(errno));
		return;
	}
	while (__atomic_load_n(ring.sq_head, __ATOMIC_SEQ_CST) != *ring.sq_tail) {
		if (__atomic_load_n(ring.sq_flags, __ATOMIC_SEQ_CST) & IORING_SQ_NEED_WAKEUP)
			must(ring_enter(count, 0, IORING_ENTER_SQ_WAKEUP) >= 0,
			     "IORING_ENTER_SQ_WAKEUP: %s", strerror(errno));
		sched_yield();
	}
}

static inline struct io_uring_sqe *put_command(unsigned int request, const void *structure,
					       __u64 reserved, __u64 tag)
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
	return sqe;
}

static inline bool there_is_a_result(void)
{
	return __atomic_load_n(ring.cq_tail, __ATOMIC_ACQUIRE) != *ring.cq_head;
}

/* Waits for the next completion of any request. */
static inline int result_of(__u64 *tag)
{
	unsigned int head = *ring.cq_head;
	int result;

	while (!there_is_a_result()) {
		result = ring_enter(0, 1, IORING_ENTER_GETEVENTS);
		must(result >= 0 || errno == EINTR, "io_uring_enter: %s", strerror(errno));
	}
	result = ring.cqes[head & *ring.cq_mask].res;
	*tag = ring.cqes[head & *ring.cq_mask].user_data;
	__atomic_store_n(ring.cq_head, head + 1, __ATOMIC_RELEASE);
	return result;
}

/* Waits for the next completion, which must be that of @want. */
static inline int result_next(__u64 want)
{
	__u64 tag;
	int result = result_of(&tag);

	must(tag == want, "the result of %llu, not %llu: %s", tag, want, why(result));
	return result;
}

static inline int command(unsigned int request, const void *structure, __u64 reserved)
{
	put_command(request, structure, reserved, 7);
	submit();
	return result_next(7);
}

/* An ALLOC_READ of a slow file: the smaller @gather is, the longer it takes. */
static inline struct dmafile_alloc_read slow_load(int fd, __u64 gather, __u32 flags,
						  struct dmafile_progress *progress)
{
	return (struct dmafile_alloc_read) {
		.size = sizeof(struct dmafile_alloc_read),
		.fd_flags = O_RDWR,
		.flags = flags,
		.file_fd = fd,
		.gather = gather,
		.progress = (unsigned long)progress,
	};
}

static inline int open_slow(const char *path)
{
	int fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);

	must(fd >= 0, "%s: %s", path, strerror(errno));
	return fd;
}

static inline void until_it_moves(const struct dmafile_progress *progress)
{
	int i;

	for (i = 0; i < 6000 && !__atomic_load_n(&progress->bytes, __ATOMIC_RELAXED); i++)
		usleep(50000);
	must(progress->bytes, "nothing has been read after 300 s");
}

#endif /* _DMAFILE_URING_H */
