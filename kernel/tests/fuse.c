// SPDX-License-Identifier: GPL-2.0-only
/*
 * fuse FOLDER
 *
 * Tests requests on a file that another process serves with the FUSE protocol. So the server
 * controls asynchronous direct I/O: it replies out of order, late or never, with errors or with
 * fewer bytes than requested, rejects direct I/O in the middle, transfers nothing, and is killed.
 */
#define _GNU_SOURCE
#include "test.h"

#include <linux/fuse.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <sys/wait.h>

#define GATHER	(64UL << 10)
#define PARTS	32U
#define SIZE	(PARTS * GATHER)
/* The default number of parts that the module has in flight */
#define DEPTH	4U
#define ROOM	(1024UL * 1024)

static char path[4096];
static int connection;
static pid_t server;
static __u8 shadow[SIZE];
/* From the next mount on, the kernel waits for the reply to each direct request. */
static bool synchronous;

/* Instructions for the server, and its observations, in shared memory */
static struct shared {
	/* The file */
	__u8 file[SIZE];
	/* Reads and writes get replies in groups of this size, the last one first. */
	unsigned int together;
	/* Requests at or after this offset... */
	__u64 place;
	/* ...fail with this error, or return at most this many bytes, this many times... */
	int error;
	unsigned int most, times;
	/* ...or return 0 bytes without an error, or get no reply until @go is set. */
	bool nothing, hold, go;
	/* The FUSE open flags of the file */
	unsigned int open_flags;
	/* The number of requests without a reply, and of groups that stayed incomplete */
	unsigned int held, late;
	/* How often each part was read */
	unsigned int reads[PARTS];
} *shared;

struct request {
	struct fuse_in_header header;
	union {
		struct fuse_init_in init;
		struct fuse_read_in read;
		struct fuse_write_in write;
		struct fuse_setattr_in setattr;
		__u8 all[ROOM];
	} in;
};

/* A request that gets its reply later */
struct pending {
	__u64 unique, offset;
	__u32 opcode, size;
};

static struct pending pending[64];
static unsigned int nr_pending;

static void reply(__u64 unique, int error, const void *data, size_t len)
{
	struct fuse_out_header header = {
		.len = sizeof(header) + len, .error = error, .unique = unique,
	};
	struct iovec parts[] = { { &header, sizeof(header) }, { (void *)data, len } };

	/* ENOENT: the request was interrupted. */
	if (writev(connection, parts, 2) < 0 && errno != ENOENT)
		_exit(2);
}

static struct fuse_attr attributes(void)
{
	return (struct fuse_attr) {
		.ino = FUSE_ROOT_ID,
		.size = SIZE,
		.blocks = SIZE / 512,
		.mode = S_IFREG | 0600,
		.nlink = 1,
		.blksize = PAGE,
	};
}

static bool goes_wrong(const struct pending *one)
{
	return shared->times && (shared->error || shared->most || shared->nothing) &&
	       one->offset + one->size > shared->place;
}

static void answer(const struct pending *one)
{
	struct fuse_write_out wrote = { };
	__u32 size = one->size;

	if (shared->hold && one->offset >= shared->place) {
		__atomic_add_fetch(&shared->held, 1, __ATOMIC_SEQ_CST);
		while (!__atomic_load_n(&shared->go, __ATOMIC_SEQ_CST))
			usleep(1000);
	}
	if (goes_wrong(one)) {
		shared->times--;
		if (shared->error) {
			reply(one->unique, shared->error, NULL, 0);
			return;
		}
		size = shared->most;
	}
	wrote.size = size;
	if (one->opcode == FUSE_READ)
		reply(one->unique, 0, shared->file + one->offset, size);
	else
		reply(one->unique, 0, &wrote, sizeof(wrote));
}

static void answer_all(void)
{
	while (nr_pending)
		answer(&pending[--nr_pending]);
}

/* Written data is stored at once; only the reply is delayed. */
static void keep(const struct request *request)
{
	struct pending *one = &pending[nr_pending++];
	__u64 part;

	*one = (struct pending) {
		.unique = request->header.unique,
		.opcode = request->header.opcode,
	};
	if (one->opcode == FUSE_READ) {
		one->offset = request->in.read.offset;
		one->size = request->in.read.size;
		if (one->offset >= SIZE)
			one->size = 0;
		else if (one->size > SIZE - one->offset)
			one->size = SIZE - one->offset;
		for (part = one->offset / GATHER; part * GATHER < one->offset + one->size; part++)
			shared->reads[part]++;
	} else {
		one->offset = request->in.write.offset;
		one->size = request->in.write.size;
		if (!goes_wrong(one))
			memcpy(shared->file + one->offset,
			       request->in.all + sizeof(request->in.write), one->size);
	}
	if (nr_pending >= (shared->together ? shared->together : 1))
		answer_all();
}

static void serve(const struct request *request)
{
	const struct fuse_init_out init = {
		.major = FUSE_KERNEL_VERSION,
		.minor = 31,
		.max_readahead = request->in.init.max_readahead,
		.flags = FUSE_ASYNC_READ | FUSE_BIG_WRITES | FUSE_MAX_PAGES |
			 (synchronous ? 0 : FUSE_ASYNC_DIO),
		.max_background = 64,
		.congestion_threshold = 64,
		.max_write = ROOM / 2,
		.max_pages = ROOM / 2 / PAGE,
	};
	const struct fuse_attr_out attr = { .attr_valid = 3600, .attr = attributes() };
	const struct fuse_open_out opened = { .fh = 1, .open_flags = shared->open_flags };

	switch (request->header.opcode) {
	case FUSE_INIT:
		reply(request->header.unique, 0, &init, sizeof(init));
		break;
	case FUSE_GETATTR:
	case FUSE_SETATTR:
		reply(request->header.unique, 0, &attr, sizeof(attr));
		break;
	case FUSE_OPEN:
		reply(request->header.unique, 0, &opened, sizeof(opened));
		break;
	case FUSE_FLUSH:
	case FUSE_FSYNC:
	case FUSE_RELEASE:
		reply(request->header.unique, 0, NULL, 0);
		break;
	case FUSE_READ:
	case FUSE_WRITE:
		keep(request);
		break;
	case FUSE_FORGET:
	case FUSE_BATCH_FORGET:
	case FUSE_INTERRUPT:
		break;
	default:
		reply(request->header.unique, -EOPNOTSUPP, NULL, 0);
	}
}

static void run_server(void)
{
	static struct request request;
	struct pollfd source = { .fd = connection, .events = POLLIN };

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (;;) {
		/* The rest of the group will not arrive: the client is waiting for a reply. */
		if (nr_pending && !poll(&source, 1, 60000)) {
			shared->late++;
			answer_all();
		}
		if (read(connection, &request, sizeof(request)) >= 0)
			serve(&request);
		else if (errno == ENODEV || errno == ECONNABORTED)
			/* Unmounted while waiting for a request or reading one */
			_exit(0);
		else if (errno != EINTR && errno != ENOENT)
			_exit(1);
	}
}

static void mount_it(void)
{
	char options[128];
	int fd;

	fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	must(fd >= 0, "%s: %s", path, strerror(errno));
	close(fd);
	connection = open("/dev/fuse", O_RDWR | O_CLOEXEC);
	must(connection >= 0, "/dev/fuse: %s", strerror(errno));
	snprintf(options, sizeof(options), "fd=%d,rootmode=100000,user_id=0,group_id=0",
		 connection);
	must(!mount("dmafile", path, "fuse", MS_NOSUID | MS_NODEV, options), "mount: %s",
	     strerror(errno));
	fill(shared->file, 1, 0, SIZE);
	memcpy(shadow, shared->file, SIZE);
	memset(&shared->together, 0, sizeof(*shared) - offsetof(struct shared, together));
	server = fork();
	if (!server)
		run_server();
	/* The connection ends when the server exits. */
	close(connection);
}

static void unmount_it(void)
{
	int status;

	must(!umount2(path, MNT_DETACH), "umount: %s", strerror(errno));
	kill(server, SIGKILL);
	must(waitpid(server, &status, 0) == server && (!status || WIFSIGNALED(status)),
	     "the server ended with %x", status);
	must(!shared->late, "%u times fewer than %u were in flight", shared->late, DEPTH);
	must(number_in(STATS, "buffers") == 0, "a buffer is left");
}

static int open_file(bool direct)
{
	int fd = open(path, O_RDWR | O_CLOEXEC | (direct ? O_DIRECT : 0));

	must(fd >= 0, "%s: %s", path, strerror(errno));
	return fd;
}

static struct dmafile_alloc_read load_of(int file)
{
	return (struct dmafile_alloc_read) {
		.size = sizeof(struct dmafile_alloc_read),
		.fd_flags = O_RDWR | O_CLOEXEC,
		.file_fd = file,
		.gather = GATHER,
	};
}

static void check(int fd, __u64 at, __u64 len, const char *what)
{
	__u8 *map = map_buffer(fd, PROT_READ);

	must(differ(map + at, shadow, len) == len, "%s: differs at %zu", what,
	     differ(map + at, shadow, len));
	unmap_buffer(fd, map);
}

/* Replies in groups of four, the last one first, so four must be in flight. */
static void in_another_order(void)
{
	int file, buffer = new_buffer(SIZE), result;
	struct dmafile_alloc_read load;
	struct dmafile_rw rw;
	__u8 *map;

	mount_it();
	shared->together = DEPTH;
	file = open_file(true);
	load = load_of(file);
	load.flags = DMAFILE_STRICT;
	result = call(node, DMAFILE_IOC_ALLOC_READ, &load);
	must(!result && load.bytes == SIZE, "ALLOC_READ: %s", why(result));
	must(load.mode == DMAFILE_MODE_DIRECT, "mode %x", load.mode);
	check(load.fd, 0, SIZE, "ALLOC_READ");
	close(load.fd);
	rw = transfer(DMAFILE_READ | DMAFILE_STRICT, buffer, file, SIZE, GATHER);
	result = call(node, DMAFILE_IOC_RW, &rw);
	must(!result && rw.bytes == SIZE, "READ: %s", why(result));
	check(buffer, 0, SIZE, "READ");
	map = map_buffer(buffer, PROT_READ | PROT_WRITE);
	fill(map, 2, 0, SIZE);
	unmap_buffer(buffer, map);
	rw = transfer(DMAFILE_WRITE | DMAFILE_STRICT, buffer, file, SIZE, GATHER);
	result = call(node, DMAFILE_IOC_RW, &rw);
	must(!result && rw.bytes == SIZE, "WRITE: %s", why(result));
	fill(shadow, 2, 0, SIZE);
	must(differ(shared->file, shadow, SIZE) == SIZE, "WRITE differs");
	close(file);
	close(buffer);
	unmount_it();
}

/* Through the page cache, and with a bounce buffer if the offsets differ */
static void other_ways(void)
{
	static const __u64 places[] = { 0, 512, 777 };
	unsigned int i, direct;
	int result;

	for (i = 0; i < ARRAY_SIZE(places); i++)
		for (direct = 0; direct < 2; direct++) {
			int buffer = new_buffer(2 * SIZE), file;
			struct dmafile_alloc_read load;
			struct dmafile_rw rw;
			__u8 *map;

			mount_it();
			file = open_file(direct);
			load = load_of(file);
			load.buffer_offset = places[i];
			result = call(node, DMAFILE_IOC_ALLOC_READ, &load);
			must(!result && load.bytes == SIZE, "ALLOC_READ: %s", why(result));
			check(load.fd, places[i], SIZE, "ALLOC_READ");
			close(load.fd);
			map = map_buffer(buffer, PROT_READ | PROT_WRITE);
			fill(map, 3, 0, 2 * SIZE);
			memcpy(shadow + places[i], map + 1000, SIZE / 2);
			unmap_buffer(buffer, map);
			rw = transfer(DMAFILE_WRITE | DMAFILE_DSYNC, buffer, file, SIZE, GATHER);
			rw.file_offset = places[i];
			rw.buffer_offset = 1000;
			rw.length = SIZE / 2;
			result = call(node, DMAFILE_IOC_RW, &rw);
			must(!result && rw.bytes == SIZE / 2, "WRITE: %s", why(result));
			must(differ(shared->file, shadow, SIZE) == SIZE, "WRITE differs at %zu",
			     differ(shared->file, shadow, SIZE));
			close(file);
			close(buffer);
			unmount_it();
		}
}

/* All parts before the one that fails have been transferred. */
static void errors(void)
{
	int result, direct;

	for (direct = 0; direct < 2; direct++) {
		int buffer = new_buffer(SIZE), file;
		struct dmafile_alloc_read load;
		struct dmafile_rw rw;
		__u8 *map;

		mount_it();
		shared->place = 9 * GATHER + 5000;
		shared->error = -EIO;
		shared->times = -1U;
		file = open_file(direct);
		load = load_of(file);
		result = call(node, DMAFILE_IOC_ALLOC_READ, &load);
		must(result == -EIO, "ALLOC_READ: %s", why(result));
		rw = transfer(DMAFILE_READ, buffer, file, SIZE, GATHER);
		result = call(node, DMAFILE_IOC_RW, &rw);
		must(result == -EIO, "READ: %s", why(result));
		/* The size of buffered reads depends on the page cache. */
		must(direct ? rw.bytes == 9 * GATHER : rw.bytes <= shared->place,
		     "READ of %llu bytes", rw.bytes);
		check(buffer, 0, rw.bytes, "READ");
		map = map_buffer(buffer, PROT_READ | PROT_WRITE);
		fill(map, 4, 0, SIZE);
		unmap_buffer(buffer, map);
		rw = transfer(DMAFILE_WRITE, buffer, file, SIZE, GATHER);
		result = call(node, DMAFILE_IOC_RW, &rw);
		must(result == -EIO, "WRITE: %s", why(result));
		must(direct ? rw.bytes == 9 * GATHER : rw.bytes <= shared->place,
		     "WRITE of %llu bytes", rw.bytes);
		fill(shadow, 4, 0, rw.bytes);
		must(differ(shared->file, shadow, rw.bytes) == rw.bytes, "WRITE differs");
		close(file);
		close(buffer);
		unmount_it();
	}
}

/*
 * Direct I/O is rejected in the middle of a request: the rest is read through the page cache, and
 * no part is read twice.
 */
static void refused_in_the_middle(void)
{
	static const int errors[] = { -EINVAL, -EOPNOTSUPP };
	unsigned int i, part;
	int result;

	for (i = 0; i < ARRAY_SIZE(errors); i++) {
		int buffer = new_buffer(SIZE), file;
		struct dmafile_rw rw;

		mount_it();
		shared->place = 20 * GATHER + 4096;
		shared->error = errors[i];
		shared->times = 1;
		file = open_file(true);
		rw = transfer(DMAFILE_READ, buffer, file, SIZE, GATHER);
		result = call(node, DMAFILE_IOC_RW, &rw);
		must(!result && rw.bytes == SIZE, "READ: %s", why(result));
		must(rw.mode == (DMAFILE_MODE_DIRECT | DMAFILE_MODE_BUFFERED), "mode %x", rw.mode);
		check(buffer, 0, SIZE, "READ");
		for (part = 0; part < 20; part++)
			must(shared->reads[part] == 1, "part %u was read %u times", part,
			     shared->reads[part]);
		must(shared->reads[20] > 1, "no request was rejected");
		/* A strict request fails. */
		shared->times = 1;
		rw = transfer(DMAFILE_READ | DMAFILE_STRICT, buffer, file, SIZE, GATHER);
		result = call(node, DMAFILE_IOC_RW, &rw);
		must(result == errors[i] && rw.bytes == 20 * GATHER, "READ, strict: %s, %llu bytes",
		     why(result), rw.bytes);
		must(rw.mode == DMAFILE_MODE_DIRECT, "mode %x", rw.mode);
		close(file);
		close(buffer);
		unmount_it();
	}
}

/* Short reads before the end of the file */
static void less_than_asked_for(void)
{
	static const unsigned int most[] = { 4096, 12288, 5000, 1 };
	unsigned int i;
	int result;

	for (i = 0; i < ARRAY_SIZE(most); i++) {
		int buffer = new_buffer(SIZE), file;
		struct dmafile_alloc_read load;
		struct dmafile_rw rw;

		mount_it();
		shared->place = 20 * GATHER;
		shared->most = most[i];
		shared->times = 1;
		file = open_file(true);
		rw = transfer(DMAFILE_READ, buffer, file, SIZE, GATHER);
		result = call(node, DMAFILE_IOC_RW, &rw);
		must(!result && rw.bytes == SIZE, "%u: READ: %s, %llu bytes", most[i], why(result),
		     rw.bytes);
		check(buffer, 0, SIZE, "READ");
		shared->times = 1;
		load = load_of(file);
		result = call(node, DMAFILE_IOC_ALLOC_READ, &load);
		must(!result && load.bytes == SIZE, "%u: ALLOC_READ: %s, %llu bytes", most[i],
		     why(result), load.bytes);
		check(load.fd, 0, SIZE, "ALLOC_READ");
		close(load.fd);
		close(file);
		close(buffer);
		unmount_it();
	}
}

/*
 * A write of 0 bytes without an error must not be repeated forever or treated as a success. If the
 * kernel's FUSE client does not return an error for it, the module does.
 */
static void nothing_is_written(void)
{
	static const struct way {
		bool direct, synchronous;
		unsigned int open_flags;
		__u32 flags;
		/* The offset in the buffer; unless it matches that in the file, data is copied. */
		__u64 at;
	} ways[] = {
		{ .direct = false },
		{ .direct = false, .open_flags = FOPEN_DIRECT_IO },
		{ .direct = true },
		{ .direct = true, .synchronous = true, .open_flags = FOPEN_DIRECT_IO },
		{ .direct = true, .synchronous = true, .open_flags = FOPEN_DIRECT_IO,
		  .flags = DMAFILE_STRICT },
		{ .direct = true, .synchronous = true, .open_flags = FOPEN_DIRECT_IO, .at = 1000 },
	};
	unsigned int i;
	int result;

	for (i = 0; i < ARRAY_SIZE(ways); i++) {
		const struct way *way = &ways[i];
		int buffer = new_buffer(2 * SIZE), file;
		struct dmafile_rw rw;
		__u8 *map;

		synchronous = way->synchronous;
		mount_it();
		shared->open_flags = way->open_flags;
		shared->place = 9 * GATHER;
		shared->nothing = true;
		shared->times = -1U;
		file = open_file(way->direct);
		map = map_buffer(buffer, PROT_READ | PROT_WRITE);
		fill(map, 5, 0, 2 * SIZE);
		rw = transfer(DMAFILE_WRITE | way->flags, buffer, file, SIZE, GATHER);
		rw.buffer_offset = way->at;
		result = call(node, DMAFILE_IOC_RW, &rw);
		must(result == -EIO, "way %u: %s, %llu bytes", i, why(result), rw.bytes);
		/* Buffered writes and bounce buffers write more than one gather at a time. */
		if ((way->direct || way->open_flags) && !way->at)
			must(rw.bytes == shared->place, "way %u: %llu bytes", i, rw.bytes);
		must(rw.bytes <= shared->place, "way %u: %llu bytes", i, rw.bytes);
		must(differ(shared->file, map + way->at, rw.bytes) == rw.bytes,
		     "way %u: differs at %zu", i,
		     differ(shared->file, map + way->at, rw.bytes));
		unmap_buffer(buffer, map);
		close(file);
		close(buffer);
		unmount_it();
	}
	synchronous = false;
}

static void until_held(unsigned int count)
{
	double begun = now();

	while (__atomic_load_n(&shared->held, __ATOMIC_SEQ_CST) < count) {
		must(now() - begun < 300, "the server got no request");
		usleep(1000);
	}
}

struct reader {
	pthread_t thread;
	struct dmafile_rw rw;
	int result;
};

static void *read_all(void *argument)
{
	struct reader *reader = argument;

	reader->result = call(node, DMAFILE_IOC_RW, &reader->rw);
	return NULL;
}

#define HUNG_TASK	"/proc/sys/kernel/hung_task_timeout_secs"

/* Sets the timeout of the hung-task detector, if the kernel has one. */
static void complain_after(const char *seconds)
{
	FILE *file = fopen(HUNG_TASK, "we");

	if (!file && errno == ENOENT)
		return;
	must(file && fputs(seconds, file) >= 0 && !fclose(file), HUNG_TASK);
}

/* The server does not reply for a while, or is killed before it does. */
static void no_answer(void)
{
	unsigned int turn;

	for (turn = 0; turn < 4; turn++) {
		bool direct = turn & 1, dies = turn & 2;
		int buffer = new_buffer(SIZE), file, result;
		struct reader reader;

		mount_it();
		shared->place = 9 * GATHER;
		shared->hold = true;
		file = open_file(direct);
		reader.rw = transfer(DMAFILE_READ, buffer, file, SIZE, GATHER);
		pthread_create(&reader.thread, NULL, read_all, &reader);
		until_held(1);
		if (direct && !dies) {
			complain_after("10");
			sleep(25);
			complain_after("120");
		}
		if (dies)
			kill(server, SIGKILL);
		else
			__atomic_store_n(&shared->go, true, __ATOMIC_SEQ_CST);
		pthread_join(reader.thread, NULL);
		result = reader.result;
		if (dies) {
			must(result == -ECONNABORTED || result == -ENOTCONN || result == -EIO,
			     "READ without a server: %s", why(result));
			must(reader.rw.bytes < SIZE && (!direct || reader.rw.bytes <= 9 * GATHER),
			     "%llu bytes", reader.rw.bytes);
			check(buffer, 0, reader.rw.bytes, "READ");
			/* All later requests fail, too. */
			result = call(node, DMAFILE_IOC_RW, &reader.rw);
			must(result < 0, "READ afterwards: %s", why(result));
		} else {
			must(!result && reader.rw.bytes == SIZE, "READ: %s", why(result));
			check(buffer, 0, SIZE, "READ");
		}
		close(file);
		close(buffer);
		unmount_it();
	}
}

/*
 * The caller is killed while the server does not reply. It waits for the direct I/O in flight,
 * which ends when the server is killed at the latest.
 */
static void killed_without_an_answer(void)
{
	int direct, status;

	for (direct = 0; direct < 2; direct++) {
		pid_t child;

		mount_it();
		shared->place = 9 * GATHER;
		shared->hold = true;
		child = fork();
		if (!child) {
			struct dmafile_alloc_read load = load_of(open_file(direct));

			call(node, DMAFILE_IOC_ALLOC_READ, &load);
			_exit(0);
		}
		until_held(1);
		kill(child, SIGKILL);
		kill(server, SIGKILL);
		must(waitpid(child, &status, 0) == child && WIFSIGNALED(status), "status %x",
		     status);
		unmount_it();
	}
}

static const struct test tests[] = {
	{ "in_another_order", in_another_order },
	{ "other_ways", other_ways },
	{ "errors", errors },
	{ "refused_in_the_middle", refused_in_the_middle },
	{ "less_than_asked_for", less_than_asked_for },
	{ "nothing_is_written", nothing_is_written },
	{ "no_answer", no_answer },
	{ "killed_without_an_answer", killed_without_an_answer },
};

int main(int argc, char **argv)
{
	snprintf(path, sizeof(path), "%s/fuse", argc > 1 ? argv[1] : ".");
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
		      -1, 0);
	must(shared != MAP_FAILED, "mmap: %s", strerror(errno));
	return run_tests(tests, ARRAY_SIZE(tests));
}
