// SPDX-License-Identifier: GPL-2.0-only
/*
 * random SECONDS SEED FOLDER
 *
 * Two processes make requests with random fields, most of them almost valid, on files and buffers
 * that are opened and closed. The requests need not succeed, but the kernel must not report an
 * error, and no buffer may be left at the end.
 */
#define _GNU_SOURCE
#include "test.h"

#include <sys/resource.h>
#include <sys/wait.h>

static unsigned long seconds, seed;
static const char *folder;

static __u64 state;

static __u64 random_bits(void)
{
	/* xorshift64*, Vigna 2016. */
	state ^= state >> 12;
	state ^= state << 25;
	state ^= state >> 27;
	return state * 0x2545f4914f6cdd1dULL;
}

static __u64 below(__u64 limit)
{
	return (random_bits() >> 11) % limit;
}

/* Descriptors of all kinds, which are opened and closed. */
#define FDS	24
static int fds[FDS];

static int some_fd(void)
{
	return below(50) ? fds[below(FDS)] : (int)random_bits();
}

static __u64 some_length(void)
{
	switch (below(8)) {
	case 0:
		return random_bits() >> below(64);
	case 1:
		return 0;
	case 2:
		return below(64) * PAGE;
	default:
		return below(300000);
	}
}

static __u32 some_flags(__u32 right)
{
	__u32 flags = random_bits() & random_bits() & right;

	return below(30) ? flags : flags ^ 1U << below(32);
}

static void renew(int nr)
{
	char path[4096];

	snprintf(path, sizeof(path), "%s/random%llu", folder, below(6));
	close(fds[nr]);
	switch (below(8)) {
	case 0:
		fds[nr] = open("/dev/null", O_RDWR);
		break;
	case 1:
		fds[nr] = open(folder, O_RDONLY);
		break;
	case 2: {
		struct dmafile_alloc alloc = {
			.size = sizeof(alloc),
			.fd_flags = below(4) ? O_RDWR : O_RDONLY,
			.length = 1 + below(400000),
		};

		fds[nr] = call(node, DMAFILE_IOC_ALLOC, &alloc) ? -1 : alloc.fd;
		break;
	}
	default:
		fds[nr] = open(path, (below(4) ? O_RDWR : O_RDONLY) | O_CREAT |
			       (below(2) ? O_DIRECT : 0), 0600);
		/* The file may be open only for reading. */
		if (!below(3) && ftruncate(fds[nr], below(300000)))
			break;
	}
}

static __u64 some_progress(struct dmafile_progress *progress)
{
	progress->stop = !below(4);
	return below(6) ? (below(3) ? 0 : (unsigned long)progress) : random_bits();
}

static void some_request(void)
{
	struct dmafile_progress progress = { 0 };
	union {
		__u8 bytes[256];
		__u32 size;
		struct dmafile_alloc alloc;
		struct dmafile_alloc_read load;
		struct dmafile_rw rw;
	} any;
	int nr = below(FDS), result;

	memset(&any, 0, sizeof(any));
	switch (below(5)) {
	case 0:
		any.alloc = (struct dmafile_alloc) {
			.size = sizeof(any.alloc),
			.fd_flags = some_flags(O_RDWR | O_CLOEXEC),
			.flags = some_flags(0),
			.length = some_length(),
		};
		result = call(node, DMAFILE_IOC_ALLOC, &any);
		if (!result) {
			close(fds[nr]);
			fds[nr] = any.alloc.fd;
		}
		break;
	case 1:
	case 2:
		any.load = (struct dmafile_alloc_read) {
			.size = sizeof(any.load),
			.fd_flags = some_flags(O_RDWR | O_CLOEXEC),
			.flags = some_flags(0xf),
			.file_fd = some_fd(),
			.file_offset = some_length(),
			.length = some_length(),
			.buffer_offset = below(3) ? 0 : some_length(),
			.buffer_size = below(3) ? 0 : some_length(),
			.gather = below(2) ? 0 : some_length(),
			.progress = some_progress(&progress),
		};
		result = call(node, DMAFILE_IOC_ALLOC_READ, &any);
		if (!result) {
			close(fds[nr]);
			fds[nr] = any.load.fd;
		}
		break;
	default:
		any.rw = (struct dmafile_rw) {
			.size = sizeof(any.rw),
			.flags = some_flags(0x4f) | (below(2) ? DMAFILE_READ : DMAFILE_WRITE),
			.fd = some_fd(),
			.file_fd = some_fd(),
			.file_offset = some_length() & 0x3fffff,
			.buffer_offset = below(3) ? 0 : some_length(),
			.length = some_length(),
			.gather = below(2) ? 0 : some_length(),
			.progress = some_progress(&progress),
		};
		call(node, DMAFILE_IOC_RW, &any);
	}
}

static void noise(void)
{
	union {
		__u8 bytes[1 << _IOC_SIZEBITS];
		__u64 words[512];
	} any;
	unsigned int i, size;

	for (i = 0; i < 32; i++)
		any.words[i] = random_bits() >> below(64);
	memset(any.bytes + 256, 0, sizeof(any) - 256);
	/* Mostly a size that passes the first check. */
	size = below(4) ? 8 * below(30) : below(1 << _IOC_SIZEBITS);
	*(__u32 *)any.bytes = below(8) ? size : any.words[0];
	call(node, _IOC(below(8) ? _IOC_READ | _IOC_WRITE : below(4), DMAFILE_IOC_MAGIC, below(5),
			size), any.bytes);
}

static void one_process(unsigned long which)
{
	struct timespec begun, now;
	int i;

	state = seed * 2654435761ULL + which + 1;
	for (i = 0; i < FDS; i++)
		fds[i] = -1;
	for (i = 0; i < FDS; i++)
		renew(i);
	clock_gettime(CLOCK_MONOTONIC, &begun);
	do {
		for (i = 0; i < 50; i++) {
			if (!below(10))
				renew(below(FDS));
			if (!below(10))
				noise();
			some_request();
		}
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while ((unsigned long)(now.tv_sec - begun.tv_sec) < seconds);
	printf("# process %lu: %lu requests\n", which, requests);
	fflush(stdout);
	_exit(0);
}

static void requests_at_random(void)
{
	struct rlimit limit = { 256, 256 };
	unsigned long which;
	int status, parameter;

	/* Otherwise most of the time would be spent zeroing memory. */
	parameter = open("/sys/module/dmafile/parameters/max_buffer_mb", O_WRONLY | O_CLOEXEC);
	must(write(parameter, "4\n", 2) == 2, "max_buffer_mb: %s", strerror(errno));
	printf("# seed %lu\n", seed);
	setrlimit(RLIMIT_NOFILE, &limit);
	for (which = 0; which < 2; which++)
		if (!fork())
			one_process(which);
	while (wait(&status) > 0)
		must(!status, "a process ended with %x", status);
	must(write(parameter, "0\n", 2) == 2, "max_buffer_mb: %s", strerror(errno));
	close(parameter);
	must(number_in(STATS, "buffers") == 0, "%lld buffers are left",
	     number_in(STATS, "buffers"));
	must(number_in(STATS, "buffer_bytes") == 0, "%lld bytes are left",
	     number_in(STATS, "buffer_bytes"));
	must(number_in(STATS, "alloc_read") > 0 && number_in(STATS, "read") > 0 &&
	     number_in(STATS, "write") > 0, "no request has succeeded");
}

static const struct test tests[] = {
	{ "requests_at_random", requests_at_random },
};

int main(int argc, char **argv)
{
	if (argc != 4) {
		fprintf(stderr, "random SECONDS SEED FOLDER\n");
		return 2;
	}
	seconds = strtoul(argv[1], NULL, 0);
	seed = strtoul(argv[2], NULL, 0);
	folder = argv[3];
	return run_tests(tests, ARRAY_SIZE(tests));
}
