// SPDX-License-Identifier: GPL-2.0-only
/*
 * submit FOLDER SLOW
 *
 * Tests the ways to submit a command to io_uring: directly to a worker (IOSQE_ASYNC), linked,
 * drained, with a polling thread, to a registered file, with other credentials; and a ring that is
 * closed while a command runs. SLOW is a file of some MiB on a disk on which each read takes a
 * tenth of a second.
 */
#define _GNU_SOURCE
#include "uring.h"

#include <sys/wait.h>

#define LENGTH	300000UL
#define USER	1000

static const char *folder, *slow;

/* INFO has been executed if and only if the kernel has filled in the structure. */
static struct dmafile_info unanswered(void)
{
	return (struct dmafile_info) { .size = sizeof(struct dmafile_info) };
}

static bool answered(const struct dmafile_info *info)
{
	return __atomic_load_n(&info->max_gather, __ATOMIC_RELAXED);
}

/* The kernel has already read the submission, so this must have no effect. */
static void overwrite_slots(void)
{
	memset(ring.sqes, 0xff, ENTRIES * sizeof(*ring.sqes));
}

static int open_at(const char *name, int flags)
{
	char path[4096];
	int fd;

	snprintf(path, sizeof(path), "%s/%s", folder, name);
	fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | flags, 0600);
	must(fd >= 0, "%s: %s", path, strerror(errno));
	return fd;
}

static void check_file(const char *name, __u64 seed)
{
	static __u8 want[LENGTH], seen[LENGTH];
	int fd = open_at(name, 0);

	fill(want, seed, 0, LENGTH);
	must(pread(fd, seen, LENGTH, 0) == (ssize_t)LENGTH, "%s is short", name);
	must(differ(seen, want, LENGTH) == LENGTH, "%s differs at %zu", name,
	     differ(seen, want, LENGTH));
	close(fd);
}

static int new_file(const char *name, __u64 seed)
{
	static __u8 data[LENGTH];
	int fd = open_at(name, O_TRUNC);

	fill(data, seed, 0, LENGTH);
	must(pwrite(fd, data, LENGTH, 0) == (ssize_t)LENGTH && !fsync(fd), "%s: %s", name,
	     strerror(errno));
	close(fd);
	return open_at(name, O_DIRECT);
}

/* Fills the ring with commands, several times; @flags are those of the SQEs. */
static void many(unsigned int flags)
{
	struct dmafile_info infos[ENTRIES];
	unsigned int round, i;
	__u64 tag;

	for (round = 0; round < 50; round++) {
		for (i = 0; i < ENTRIES; i++) {
			infos[i] = unanswered();
			put_command(DMAFILE_IOC_INFO, &infos[i], 0, i)->flags = flags;
		}
		submit();
		overwrite_slots();
		for (i = 0; i < ENTRIES; i++) {
			int result = result_of(&tag);

			must(!result, "round %u, %llu: %s", round, tag, why(result));
		}
		for (i = 0; i < ENTRIES; i++)
			must(answered(&infos[i]), "round %u: no answer to %u", round, i);
	}
}

static void in_a_worker(void)
{
	ring_open(0);
	many(IOSQE_ASYNC);
	ring_close();
}

/* From a file to a buffer, and from the buffer to another file, as one chain */
static void chain(unsigned int flags)
{
	int from = new_file("links-from", 5), to = open_at("links-to", O_TRUNC | O_DIRECT);
	int buffer = new_buffer(LENGTH), result;
	struct dmafile_rw in = transfer(DMAFILE_READ, buffer, from, LENGTH, 0);
	struct dmafile_rw out = transfer(DMAFILE_WRITE, buffer, to, LENGTH, 0);
	struct io_uring_sqe *sync;

	put_command(DMAFILE_IOC_RW, &in, 0, 1)->flags = IOSQE_ASYNC | flags;
	put_command(DMAFILE_IOC_RW, &out, 0, 2)->flags = IOSQE_ASYNC | flags;
	sync = sqe_next();
	/*
	 * The last linked request has no flag. Each drained request needs the flag: before Linux
	 * 6.16, a request without it starts together with a drained one before it, if that had to
	 * wait (io_queue_deferred() in io_uring/io_uring.c).
	 */
	sync->flags = flags & IOSQE_IO_DRAIN;
	sync->opcode = IORING_OP_FSYNC;
	sync->fd = to;
	sync->user_data = 3;
	submit();
	overwrite_slots();
	result = result_next(1);
	must(!result && in.bytes == LENGTH, "READ: %s", why(result));
	result = result_next(2);
	must(!result && out.bytes == LENGTH, "WRITE: %s", why(result));
	result = result_next(3);
	must(!result, "fsync: %s", why(result));
	check_file("links-to", 5);
	close(buffer);
	close(from);
	close(to);
}

/* If a command fails, the linked ones are cancelled, except with a hard link. */
static void chain_that_breaks(unsigned int flags, int want)
{
	struct dmafile_rw bad = transfer(DMAFILE_READ, -1, -1, LENGTH, 0);
	struct dmafile_info info = unanswered();
	int result;

	put_command(DMAFILE_IOC_RW, &bad, 0, 1)->flags = IOSQE_ASYNC | flags;
	put_command(DMAFILE_IOC_INFO, &info, 0, 2)->flags = IOSQE_ASYNC;
	submit();
	overwrite_slots();
	result = result_next(1);
	must(result == -EBADF, "RW of no buffer: %s", why(result));
	result = result_next(2);
	must(result == want, "linked to it: %s, not %s", why(result), why(want));
	must(answered(&info) == !want, "%s, but the structure shows the opposite", why(want));
}

/* An INFO that has to wait for a long load is not executed before the load has ended. */
static void behind_a_load(unsigned int first_flags, unsigned int flags)
{
	struct dmafile_progress progress = { 0 };
	struct dmafile_info info = unanswered();
	struct dmafile_alloc_read load;
	int fd = open_slow(slow), result;

	load = slow_load(fd, 64 << 10, 0, &progress);
	put_command(DMAFILE_IOC_ALLOC_READ, &load, 0, 1)->flags = IOSQE_ASYNC | first_flags;
	put_command(DMAFILE_IOC_INFO, &info, 0, 2)->flags = IOSQE_ASYNC | flags;
	submit();
	overwrite_slots();
	until_it_moves(&progress);
	while (!there_is_a_result()) {
		must(!answered(&info) || there_is_a_result(), "it has not waited");
		usleep(1000);
	}
	result = result_next(1);
	must(!result && load.bytes == size_of(fd), "ALLOC_READ: %s", why(result));
	result = result_next(2);
	must(!result && answered(&info), "INFO: %s", why(result));
	close(load.fd);
	close(fd);
}

static void linked(void)
{
	ring_open(0);
	chain(IOSQE_IO_LINK);
	chain(IOSQE_IO_HARDLINK);
	chain_that_breaks(IOSQE_IO_LINK, -ECANCELED);
	chain_that_breaks(IOSQE_IO_HARDLINK, 0);
	behind_a_load(IOSQE_IO_LINK, 0);
	ring_close();
}

static void drained(void)
{
	ring_open(0);
	behind_a_load(0, IOSQE_IO_DRAIN);
	chain(IOSQE_IO_DRAIN);
	ring_close();
}

/* A kernel thread submits. It goes to sleep when it has been idle for a while. */
static void polled(void)
{
	unsigned int round, asleep = 0;

	ring_open(IORING_SETUP_SQPOLL);
	many(0);
	many(IOSQE_ASYNC);
	chain(IOSQE_IO_LINK);
	chain_that_breaks(IOSQE_IO_LINK, -ECANCELED);
	behind_a_load(0, IOSQE_IO_DRAIN);
	for (round = 0; round < 5; round++) {
		struct dmafile_info info = unanswered();
		int result;

		while (!(__atomic_load_n(ring.sq_flags, __ATOMIC_SEQ_CST) & IORING_SQ_NEED_WAKEUP))
			usleep(10000);
		asleep++;
		result = command(DMAFILE_IOC_INFO, &info, 0);
		must(!result && answered(&info), "after its sleep: %s", why(result));
	}
	printf("# woken %u times\n", asleep);
	ring_close();
}

static int registered(unsigned int operation, const void *argument, unsigned int count)
{
	int result = syscall(__NR_io_uring_register, ring.fd, operation, argument, count);

	return result < 0 ? -errno : result;
}

/* The device is open only in the ring: its descriptor has been closed. */
static void to_a_registered_file(void)
{
	static const unsigned int flags[] = { 0, IOSQE_ASYNC };
	int files[] = { -1, open("/dev/dmafile", O_RDWR | O_CLOEXEC) }, result;
	struct io_uring_sqe *sqe;
	unsigned int i, index;

	ring_open(0);
	must(files[1] >= 0 && !registered(IORING_REGISTER_FILES, files, ARRAY_SIZE(files)),
	     "IORING_REGISTER_FILES");
	close(files[1]);
	for (i = 0; i < ARRAY_SIZE(flags); i++)
		for (index = 0; index < 3; index++) {
			struct dmafile_info info = unanswered();
			int want = index == 1 ? 0 : -EBADF;

			sqe = put_command(DMAFILE_IOC_INFO, &info, 0, index);
			sqe->flags = IOSQE_FIXED_FILE | flags[i];
			sqe->fd = index;
			submit();
			overwrite_slots();
			result = result_next(index);
			must(result == want, "file %u: %s", index, why(result));
			must(answered(&info) == !want, "file %u: the opposite", index);
		}
	must(!registered(IORING_UNREGISTER_FILES, NULL, 0), "IORING_UNREGISTER_FILES");
	ring_close();
}

/* The credentials of a command decide whether a write clears the set-user-ID bit of a file. */
static void with_credentials(void)
{
	int file = new_file("owned", 1), buffer = new_buffer(LENGTH), other, i, result;
	struct stat stat_of;

	ring_open(0);
	must(!seteuid(USER), "seteuid: %s", strerror(errno));
	other = registered(IORING_REGISTER_PERSONALITY, NULL, 0);
	must(!seteuid(0) && other > 0, "IORING_REGISTER_PERSONALITY: %s", why(other));
	for (i = 0; i < 4; i++) {
		struct dmafile_rw rw = transfer(DMAFILE_WRITE, buffer, file, LENGTH, 0);
		struct io_uring_sqe *sqe;

		must(!fchmod(file, S_ISUID | 0755), "fchmod: %s", strerror(errno));
		sqe = put_command(DMAFILE_IOC_RW, &rw, 0, i);
		sqe->personality = i & 1 ? other : 0;
		sqe->flags = i & 2 ? IOSQE_ASYNC : 0;
		submit();
		result = result_next(i);
		must(!result && rw.bytes == LENGTH, "WRITE %d: %s", i, why(result));
		must(!fstat(file, &stat_of), "fstat");
		must(stat_of.st_mode & S_ISUID ? !(i & 1) : i & 1, "WRITE %d: mode %o", i,
		     stat_of.st_mode);
	}
	result = registered(IORING_UNREGISTER_PERSONALITY, NULL, other);
	must(!result, "IORING_UNREGISTER_PERSONALITY: %s", why(result));
	ring_close();
	close(buffer);
	close(file);
}

/*
 * A ring is closed while a command runs, and its process continues. The command ends early, even if
 * otherwise only a fatal signal would end it, and a command linked to it does not start.
 */
static void closed_under(unsigned int setup, __u32 flags)
{
	long long failed = number_in(STATS, "failed"), buffers = number_in(STATS, "buffers");
	static struct dmafile_progress progress;
	static struct dmafile_info info;
	static struct dmafile_alloc_read load;
	int fd = open_slow(slow);
	double begun;

	progress = (struct dmafile_progress) { 0 };
	info = unanswered();
	/* Reading the whole file would take most of a minute. */
	load = slow_load(fd, PAGE, flags, &progress);
	ring_open(setup);
	put_command(DMAFILE_IOC_ALLOC_READ, &load, 0, 1)->flags = IOSQE_ASYNC | IOSQE_IO_LINK;
	put_command(DMAFILE_IOC_INFO, &info, 0, 2)->flags = IOSQE_ASYNC;
	submit();
	until_it_moves(&progress);
	begun = now();
	ring_close();
	while (number_in(STATS, "failed") == failed) {
		__u64 bytes = __atomic_load_n(&progress.bytes, __ATOMIC_RELAXED);

		must(bytes < size_of(fd), "it continues until everything is read");
		must(now() - begun < 300, "it still runs after 300 s");
		usleep(10000);
	}
	must(number_in(STATS, "buffers") == buffers, "a buffer is left");
	must(!answered(&info), "the command linked to it has run");
	printf("# ended %.1f s later, with %llu bytes\n", now() - begun, progress.bytes);
	close(fd);
}

static void closed(void)
{
	closed_under(0, DMAFILE_INTERRUPTIBLE);
	closed_under(0, 0);
	closed_under(0, DMAFILE_IN_ORDER);
	closed_under(IORING_SETUP_SQPOLL, 0);
}

static const struct test tests[] = {
	{ "in_a_worker", in_a_worker },
	{ "linked", linked },
	{ "drained", drained },
	{ "polled", polled },
	{ "to_a_registered_file", to_a_registered_file },
	{ "with_credentials", with_credentials },
	{ "closed", closed },
};

int main(int argc, char **argv)
{
	if (argc != 3) {
		fprintf(stderr, "submit FOLDER SLOW\n");
		return 2;
	}
	folder = argv[1];
	slow = argv[2];
	return run_tests(tests, ARRAY_SIZE(tests));
}
