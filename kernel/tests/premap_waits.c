// SPDX-License-Identifier: GPL-2.0-only
/*
 * premap_waits DISK
 *
 * Tests that nobody but its own user waits for a slow exporter of dma-bufs that are pre-mapped for
 * an NVMe disk, and what its errors become. Needs exporter.ko of this folder. The disk is removed
 * and detected again. Each test asserts an order of events: what must not wait has happened while
 * the exporter's counter still says that it is waiting. Times are only limits that end a hang.
 */
#define _GNU_SOURCE
#include "test.h"

#include <linux/io_uring.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "vm/exporter/exporter.h"

#define EXTENDED	2U
#define PREMAP		0x80000000U
#define TARGET_FIXED	0x40000000U
#define SIZE		(64 * PAGE)
/* In seconds, for a step that must not wait */
#define LIMIT		60

enum { EMPTY, UADDR, DMABUF };

struct update {
	__u32 offset, flags;
	__u64 data, tags;
	__u32 nr, resv2;
};

struct desc {
	__u32 type, flags;
	__u64 size, uaddr;
	__s32 dmabuf_fd, target_fd;
	__u64 resv[6];
};

struct uring {
	int fd;
	unsigned int *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
	struct io_uring_sqe *sqes;
	struct io_uring_cqe *cqes;
	char *map;
	size_t size, sqes_size;
};

static const char *path;
static int disk;
static char *memory;

static int parameter(const char *name)
{
	char file[100], text[20] = "";
	int fd;

	snprintf(file, sizeof(file), "/sys/module/%s", name);
	fd = open(file, O_RDONLY | O_CLOEXEC);
	must(fd >= 0 && read(fd, text, sizeof(text) - 1) > 0, "%s: %s", file, strerror(errno));
	close(fd);
	return *text == 'Y' ? 1 : *text == 'N' ? 0 : atoi(text);
}

static void put_text(const char *file, const char *text)
{
	int fd = open(file, O_WRONLY | O_CLOEXEC);

	must(fd >= 0 && write(fd, text, strlen(text)) > 0, "%s: %s", file, strerror(errno));
	close(fd);
}

static void set_parameter(const char *name, int value)
{
	char file[100], text[20];

	snprintf(file, sizeof(file), "/sys/module/%s", name);
	snprintf(text, sizeof(text), "%d", value);
	put_text(file, text);
}

#define EXPORTER(name)	"exporter/parameters/" name

static int waiting(void)
{
	return parameter(EXPORTER("waiting"));
}

static void hold(const char *name, int value)
{
	set_parameter(name, value);
}

#define WAIT_UNTIL(so)							\
	do {								\
		bool so_ = false;					\
									\
		for (int i_ = 0; !(so_ = (so)) && i_ < LIMIT * 50; i_++)	\
			usleep(20000);					\
		must(so_, "never: %s", #so);				\
	} while (0)

/* Ends what hangs, with a message: the exporter goes on. */
static void too_long(int signal)
{
	static const char text[] = "# this step waited for the exporter\n";

	(void)signal;
	if (write(1, text, sizeof(text) - 1) < 0)
		_exit(2);
	hold(EXPORTER("hold_map"), 0);
	hold(EXPORTER("hold_unmap"), 0);
	_exit(1);
}

static void uring_open(struct uring *r, unsigned int flags)
{
	struct io_uring_rsrc_register sparse = { .nr = 4, .flags = 1 };
	struct io_uring_params p = { .flags = flags };

	r->fd = syscall(__NR_io_uring_setup, 8, &p);
	must(r->fd >= 0, "io_uring_setup: %s", strerror(errno));
	r->size = p.cq_off.cqes + p.cq_entries * sizeof(*r->cqes) + p.sq_off.array + 64;
	r->sqes_size = p.sq_entries * sizeof(*r->sqes);
	r->map = mmap(NULL, r->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, r->fd,
		      IORING_OFF_SQ_RING);
	r->sqes = mmap(NULL, r->sqes_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
		       r->fd, IORING_OFF_SQES);
	must(r->map != MAP_FAILED && r->sqes != MAP_FAILED, "mmap of a ring");
	r->sq_tail = (void *)(r->map + p.sq_off.tail);
	r->sq_mask = (void *)(r->map + p.sq_off.ring_mask);
	r->sq_array = (void *)(r->map + p.sq_off.array);
	r->cq_head = (void *)(r->map + p.cq_off.head);
	r->cq_tail = (void *)(r->map + p.cq_off.tail);
	r->cq_mask = (void *)(r->map + p.cq_off.ring_mask);
	r->cqes = (void *)(r->map + p.cq_off.cqes);
	must(!syscall(__NR_io_uring_register, r->fd, IORING_REGISTER_FILES, &disk, 1) &&
	     !syscall(__NR_io_uring_register, r->fd, IORING_REGISTER_BUFFERS2, &sparse,
		      sizeof(sparse)), "io_uring_register: %s", strerror(errno));
}

/* A mapping keeps a ring open, like a descriptor. */
static void uring_close(struct uring *r)
{
	munmap(r->map, r->size);
	munmap(r->sqes, r->sqes_size);
	close(r->fd);
}

static int update(struct uring *r, unsigned int slot, struct desc desc, __u64 tag)
{
	struct update up = {
		.offset = slot, .flags = EXTENDED, .data = (uintptr_t)&desc,
		.tags = (uintptr_t)&tag, .nr = 1,
	};
	int ret = syscall(__NR_io_uring_register, r->fd, IORING_REGISTER_BUFFERS_UPDATE, &up,
			  sizeof(up));

	return ret < 0 ? -errno : ret;
}

static int read_fixed(struct uring *r, unsigned int slot, __u64 addr)
{
	unsigned int index = *r->sq_tail & *r->sq_mask;

	r->sqes[index] = (struct io_uring_sqe) {
		.opcode = IORING_OP_READ_FIXED, .flags = IOSQE_FIXED_FILE, .addr = addr,
		.len = PAGE, .buf_index = slot, .user_data = 1,
	};
	r->sq_array[index] = index;
	__atomic_store_n(r->sq_tail, *r->sq_tail + 1, __ATOMIC_RELEASE);
	return syscall(__NR_io_uring_enter, r->fd, 1, 0, 0, NULL, 0);
}

static bool completed(struct uring *r)
{
	syscall(__NR_io_uring_enter, r->fd, 0, 0, IORING_ENTER_GETEVENTS, NULL, 0);
	return __atomic_load_n(r->cq_tail, __ATOMIC_ACQUIRE) != *r->cq_head;
}

/* The next completion must have this user_data. Returns its result. */
static int reap(struct uring *r, __u64 want)
{
	struct io_uring_cqe *cqe;
	int res;

	WAIT_UNTIL(completed(r));
	cqe = &r->cqes[*r->cq_head & *r->cq_mask];
	must(cqe->user_data == want, "CQE %llu instead of %llu", cqe->user_data, want);
	res = cqe->res;
	__atomic_store_n(r->cq_head, *r->cq_head + 1, __ATOMIC_RELEASE);
	return res;
}

static struct desc pages(void)
{
	return (struct desc) {
		.type = UADDR, .flags = PREMAP | TARGET_FIXED, .uaddr = (uintptr_t)memory,
		.size = SIZE,
	};
}

static struct desc exported(__u32 flags)
{
	struct exporter_create create = { .pages = SIZE / PAGE, .flags = flags };
	int fd = open("/dev/exporter", O_RDWR | O_CLOEXEC);
	struct desc desc = { .type = DMABUF, .flags = TARGET_FIXED };

	desc.dmabuf_fd = ioctl(fd, EXPORTER_CREATE, &create);
	must(desc.dmabuf_fd >= 0, "exporter: %s", strerror(errno));
	close(fd);
	return desc;
}

static const struct desc unmap = { .flags = PREMAP, .target_fd = -1 };

/* Registers a dma-buf in slot 0 of its own ring, in a thread. */
struct mapper {
	pthread_t thread;
	struct uring ring;
	struct desc desc;
	pid_t tid;
	int result;
};

static void *run_mapper(void *argument)
{
	struct mapper *one = argument;

	one->tid = syscall(__NR_gettid);
	one->result = update(&one->ring, 0, one->desc, 0);
	return NULL;
}

static void start_mapper(struct mapper *one)
{
	int before = waiting();

	uring_open(&one->ring, 0);
	one->desc = exported(0);
	hold(EXPORTER("hold_map"), 1);
	must(!pthread_create(&one->thread, NULL, run_mapper, one), "pthread_create");
	WAIT_UNTIL(waiting() == before + 1);
}

static int end_mapper(struct mapper *one)
{
	hold(EXPORTER("hold_map"), 0);
	pthread_join(one->thread, NULL);
	close(one->desc.dmabuf_fd);
	return one->result;
}

static void at_most(unsigned int seconds)
{
	alarm(seconds);
}

/* Other rings map, use and drop buffers of the same controller. */
static void slow_map(void)
{
	struct mapper slow = {};
	struct uring other;
	struct desc desc;

	uring_open(&other, 0);
	must(update(&other, 0, pages(), 0) == 1, "map");
	start_mapper(&slow);
	at_most(LIMIT);
	must(update(&other, 0, unmap, 7) == 1, "unmap");
	must(reap(&other, 7) == 0, "the CQE of the removal");
	must(update(&other, 1, pages(), 0) == 1, "map again");
	must(read_fixed(&other, 1, (uintptr_t)memory) == 1 && reap(&other, 1) == PAGE, "read");
	desc = (struct desc) { .type = EMPTY };
	must(update(&other, 1, desc, 0) == 1, "drop");
	uring_close(&other);
	must(waiting() == 1, "the exporter no longer waits");
	at_most(0);
	must(end_mapper(&slow) == 1, "the slow mapping: %s", why(slow.result));
	must(read_fixed(&slow.ring, 0, 0) == 1 && reap(&slow.ring, 1) == PAGE, "read");
	uring_close(&slow.ring);
	WAIT_UNTIL(!parameter(EXPORTER("mapped")));
}

/* The ring's own requests, its task, and other rings do not wait. */
static void slow_unmap_with(unsigned int flags)
{
	struct desc desc = exported(0), none = { .type = EMPTY };
	struct uring r, other;
	int status;
	pid_t child;

	uring_open(&r, flags);
	uring_open(&other, 0);
	must(update(&r, 0, desc, 5) == 1 && update(&r, 1, pages(), 0) == 1, "map");
	must(update(&other, 0, pages(), 0) == 1, "map");
	hold(EXPORTER("hold_unmap"), 1);
	at_most(LIMIT);
	/* Not only in the update: also when the last request completes. */
	must(read_fixed(&r, 0, 0) == 1, "submit");
	must(update(&r, 0, none, 0) == 1, "drop");
	must(reap(&r, 1) == PAGE, "read");
	WAIT_UNTIL(waiting() == 1);
	must(read_fixed(&r, 1, (uintptr_t)memory) == 1 && reap(&r, 1) == PAGE, "read");
	must(update(&r, 1, unmap, 6) == 1 && reap(&r, 6) == 0, "unmap");
	must(update(&r, 2, pages(), 0) == 1, "map");
	must(update(&other, 0, none, 0) == 1, "drop");
	/* No CQE for the dma-buf while its exporter is at work. */
	must(!completed(&r), "a CQE too early");
	must(waiting() == 1 && parameter(EXPORTER("mapped")) == 1, "no longer waiting");

	/* A process that exits with such a ring */
	child = fork();
	must(child >= 0, "fork");
	if (!child) {
		struct uring own;
		struct desc another = exported(0);

		uring_open(&own, flags);
		if (update(&own, 0, another, 0) != 1 || update(&own, 0, none, 0) != 1)
			_exit(1);
		raise(SIGKILL);
	}
	must(waitpid(child, &status, 0) == child && WIFSIGNALED(status), "child: %x", status);
	at_most(0);
	WAIT_UNTIL(waiting() == 2);
	hold(EXPORTER("hold_unmap"), 0);
	must(reap(&r, 5) == 0, "the CQE of the dma-buf");
	must(parameter(EXPORTER("mapped")) <= 1, "a CQE too early");
	uring_close(&r);
	uring_close(&other);
	close(desc.dmabuf_fd);
	WAIT_UNTIL(!parameter(EXPORTER("mapped")));
}

static void slow_unmap(void)
{
	slow_unmap_with(0);
	slow_unmap_with(IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);
}

/* What is being mapped or unmapped counts for the limit. */
static void limited(void)
{
	struct desc desc = exported(0), none = { .type = EMPTY };
	struct mapper slow = {};
	struct uring r;

	uring_open(&r, 0);
	set_parameter("nvme/parameters/premap_max_mb", 1);
	desc.size = SIZE;
	/* Rings of earlier tests may still be ending. Then exactly four mappings fit. */
	for (int i = 0; i < 4; i++)
		WAIT_UNTIL(update(&r, i, i ? pages() : desc, 9) == 1);
	must(update(&r, 3, none, 0) == 1 && reap(&r, 9) == 0, "drop");
	start_mapper(&slow);
	at_most(LIMIT);
	must(update(&r, 3, pages(), 0) == -ENOSPC, "more than the limit while mapping");
	at_most(0);
	must(end_mapper(&slow) == 1, "map");
	uring_close(&slow.ring);
	WAIT_UNTIL(parameter(EXPORTER("mapped")) == 1);
	WAIT_UNTIL(update(&r, 3, pages(), 0) == 1);
	hold(EXPORTER("hold_unmap"), 1);
	at_most(LIMIT);
	must(update(&r, 0, none, 0) == 1, "drop");
	WAIT_UNTIL(waiting() == 1);
	must(update(&r, 0, pages(), 0) == -ENOSPC, "more than the limit while unmapping");
	at_most(0);
	hold(EXPORTER("hold_unmap"), 0);
	must(reap(&r, 9) == 0, "the CQE of the dma-buf");
	must(update(&r, 0, pages(), 0) == 1, "map after the CQE");
	set_parameter("nvme/parameters/premap_max_mb", 0);
	uring_close(&r);
	close(desc.dmabuf_fd);
}

static void nothing(int signal)
{
	(void)signal;
}

/* A signal ends the wait, and does not mean that the file cannot be mapped. */
static void signalled(void)
{
	struct sigaction action = { .sa_handler = nothing };
	struct mapper slow = {};

	sigaction(SIGUSR1, &action, NULL);
	start_mapper(&slow);
	must(!syscall(__NR_tgkill, getpid(), slow.tid, SIGUSR1), "tgkill");
	pthread_join(slow.thread, NULL);
	must(slow.result == -EINTR, "%s", why(slow.result));
	hold(EXPORTER("hold_map"), 0);
	must(update(&slow.ring, 0, slow.desc, 0) == 1, "map");
	uring_close(&slow.ring);
	close(slow.desc.dmabuf_fd);
}

static void errors(void)
{
	static const struct {
		int error, attach, map;
	} all[] = {
		{ EOPNOTSUPP, EOPNOTSUPP, EOPNOTSUPP },
		/* ENOTSUPP of the kernel */
		{ 524, EOPNOTSUPP, EOPNOTSUPP },
		{ EREMOTEIO, EOPNOTSUPP, EOPNOTSUPP },
		/* Attached where the device cannot access it */
		{ EBUSY, EOPNOTSUPP, EBUSY },
		{ ENOMEM, ENOMEM, ENOMEM },
		{ ENOSPC, ENOSPC, ENOSPC },
		{ EIO, EIO, EIO },
		{ EINTR, EINTR, EINTR },
		{ 512, EINTR, EINTR },
	};
	struct desc desc = exported(0);
	struct uring r;

	uring_open(&r, 0);
	for (unsigned int i = 0; i < ARRAY_SIZE(all); i++) {
		int got;

		set_parameter(EXPORTER("attach_error"), all[i].error);
		got = update(&r, 0, desc, 0);
		must(got == -all[i].attach, "attach, %d: %d", all[i].error, got);
		set_parameter(EXPORTER("attach_error"), 0);
		set_parameter(EXPORTER("map_error"), all[i].error);
		got = update(&r, 0, desc, 0);
		must(got == -all[i].map, "map, %d: %d", all[i].error, got);
		set_parameter(EXPORTER("map_error"), 0);
	}
	must(update(&r, 0, desc, 0) == 1, "map");
	uring_close(&r);
	close(desc.dmabuf_fd);
}

/* An exporter that can move the memory maps it for both directions. */
static void directions(void)
{
	static const int modes[] = { O_RDWR, O_RDONLY, O_WRONLY };
	struct desc desc = exported(EXPORTER_DYNAMIC), fixed = exported(0);
	struct uring r;

	uring_open(&r, 0);
	for (int i = 0; i < 3; i++) {
		desc.flags = 0;
		fixed.flags = 0;
		desc.target_fd = open(path, modes[i] | O_DIRECT | O_CLOEXEC);
		fixed.target_fd = desc.target_fd;
		must(update(&r, 0, desc, 0) == (i ? -EOPNOTSUPP : 1), "mode %d", modes[i]);
		must(update(&r, 1, fixed, 0) == 1, "mode %d, static", modes[i]);
		close(desc.target_fd);
	}
	uring_close(&r);
	close(desc.dmabuf_fd);
	close(fixed.dmabuf_fd);
	WAIT_UNTIL(!parameter(EXPORTER("mapped")));
}

static pthread_t remover;
static int removed;

static void *remove_disk(void *argument)
{
	(void)argument;
	char file[100];

	snprintf(file, sizeof(file), "/sys/block/%s/device/device/remove", strrchr(path, '/') + 1);
	put_text(file, "1");
	__atomic_store_n(&removed, 1, __ATOMIC_RELEASE);
	return NULL;
}

static void start_removal(void)
{
	__atomic_store_n(&removed, 0, __ATOMIC_RELAXED);
	must(!pthread_create(&remover, NULL, remove_disk, NULL), "pthread_create");
	/* The disk is gone, so the driver is at its mappings, or will be. */
	WAIT_UNTIL(access(path, F_OK));
	usleep(500000);
}

static void end_removal(struct uring *r)
{
	struct { __u32 offset, resv; __u64 fds; } up = { .fds = (uintptr_t)&(int){ -1 } };

	pthread_join(remover, NULL);
	must(!parameter(EXPORTER("mapped")), "mapped after the removal of the disk");
	syscall(__NR_io_uring_register, r->fd, IORING_REGISTER_FILES_UPDATE, &up, 1);
	uring_close(r);
	close(disk);
	for (int i = 0; (disk = open(path, O_RDWR | O_DIRECT | O_CLOEXEC)) < 0 && i < 600; i++) {
		if (i % 100 == 1)
			put_text("/sys/bus/pci/rescan", "1");
		usleep(100000);
	}
	must(disk >= 0, "%s was not detected again", path);
}

/* The driver waits for what is being mapped; the mapping then fails. */
static void removed_while_mapping(void)
{
	struct mapper slow = {};

	start_mapper(&slow);
	start_removal();
	must(!__atomic_load_n(&removed, __ATOMIC_ACQUIRE) && waiting() == 1, "removed too early");
	must(end_mapper(&slow) == -ENODEV, "%s", why(slow.result));
	end_removal(&slow.ring);
}

/* The driver waits for what is being unmapped by a ring. */
static void removed_while_unmapping(void)
{
	struct desc desc = exported(0), none = { .type = EMPTY };
	struct uring r;

	uring_open(&r, 0);
	must(update(&r, 0, desc, 3) == 1, "map");
	hold(EXPORTER("hold_unmap"), 1);
	must(update(&r, 0, none, 0) == 1, "drop");
	WAIT_UNTIL(waiting() == 1);
	start_removal();
	must(!__atomic_load_n(&removed, __ATOMIC_ACQUIRE) && waiting() == 1, "removed too early");
	hold(EXPORTER("hold_unmap"), 0);
	must(reap(&r, 3) == 0, "the CQE of the removal");
	end_removal(&r);
	close(desc.dmabuf_fd);
}

/* A ring drops a mapping that the driver is unmapping; other mappings do not wait for it. */
static void dropped_while_removed(void)
{
	struct desc desc = exported(0), none = { .type = EMPTY };
	struct uring r;

	uring_open(&r, 0);
	must(update(&r, 0, pages(), 2) == 1 && update(&r, 1, desc, 3) == 1, "map");
	hold(EXPORTER("hold_unmap"), 1);
	start_removal();
	WAIT_UNTIL(waiting() == 1);
	at_most(LIMIT);
	must(update(&r, 1, none, 0) == 1, "drop of the dma-buf");
	must(update(&r, 0, none, 0) == 1 && reap(&r, 2) == 0, "drop of the pages");
	must(!completed(&r) && waiting() == 1, "a CQE too early");
	at_most(0);
	hold(EXPORTER("hold_unmap"), 0);
	must(reap(&r, 3) == 0, "the CQE of the dma-buf");
	end_removal(&r);
	close(desc.dmabuf_fd);
}

static const struct test tests[] = {
	{ "nobody waits for a slow mapping", slow_map },
	{ "nobody waits for a slow removal of a mapping", slow_unmap },
	{ "what is in transit counts for the limit", limited },
	{ "a signal ends a slow mapping", signalled },
	{ "errors of exporters", errors },
	{ "directions of exporters that move memory", directions },
	{ "the disk is removed while a buffer is mapped", removed_while_mapping },
	{ "the disk is removed while a buffer is unmapped", removed_while_unmapping },
	{ "a buffer is dropped while the disk is removed", dropped_while_removed },
};

int main(int argc, char **argv)
{
	if (argc != 2) {
		fprintf(stderr, "usage: premap_waits DISK\n");
		return 2;
	}
	path = argv[1];
	signal(SIGALRM, too_long);
	disk = open(path, O_RDWR | O_DIRECT | O_CLOEXEC);
	must(disk >= 0, "%s: %s", path, strerror(errno));
	memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(memory != MAP_FAILED, "mmap");
	memset(memory, 1, SIZE);
	return run_all(tests, ARRAY_SIZE(tests));
}
