// SPDX-License-Identifier: GPL-2.0-only
/*
 * load FILE [WORD...] [-- COMMAND...]
 *
 * Makes one request, for tests that break its environment. Prints RESULT BYTES MODE, where RESULT
 * is an errno or 0, and with the word print the contents of the buffer, which are not checked here.
 * With COMMAND it executes that, with the buffer's descriptor in DMAFILE_FD. WORD is one of
 *	buffered	without O_DIRECT
 *	write=SIZE	RW WRITE of a patterned buffer of that size, instead of ALLOC_READ
 *	read=SIZE	RW READ into a buffer of that size
 *	alloc=SIZE	ALLOC
 *	times=N		repeat it N times; all results must be the same
 *	length=SIZE, offset=SIZE, gather=SIZE, flags=BITS
 *	print		print the contents of the buffer
 */
#define _GNU_SOURCE
#include "test.h"

static __u64 words[8];
enum { WRITE, READ, ALLOC, TIMES, LENGTH, OFFSET, GATHER, FLAGS };

static const char * const names[] = {
	"write=", "read=", "alloc=", "times=", "length=", "offset=", "gather=", "flags=",
};

static bool buffered, print;
static char **command;

static void print_all(const __u8 *data, size_t left)
{
	fflush(stdout);
	while (left) {
		ssize_t wrote = write(STDOUT_FILENO, data, left);

		must(wrote > 0, "write: %s", strerror(errno));
		data += wrote;
		left -= wrote;
	}
}

static int read_new(int file, struct dmafile_alloc_read *load)
{
	*load = (struct dmafile_alloc_read) {
		.size = sizeof(*load),
		.fd_flags = O_RDWR,
		.flags = words[FLAGS],
		.file_fd = file,
		.file_offset = words[OFFSET],
		.length = words[LENGTH],
		.gather = words[GATHER],
		.fd = -1,
	};
	return call(node, DMAFILE_IOC_ALLOC_READ, load);
}

/* Transfers to or from an existing buffer */
static int move(int file, struct dmafile_rw *rw, __u64 size)
{
	__u64 length = words[LENGTH] ? words[LENGTH] : size;
	__u8 *map;

	*rw = (struct dmafile_rw) {
		.size = sizeof(*rw),
		.flags = words[FLAGS] | (words[WRITE] ? DMAFILE_WRITE : DMAFILE_READ),
		.fd = new_buffer(size),
		.file_fd = file,
		.file_offset = words[OFFSET],
		.length = length,
		.gather = words[GATHER],
	};
	if (words[WRITE]) {
		map = map_buffer(rw->fd, PROT_READ | PROT_WRITE);
		fill(map, 1, 0, size);
		unmap_buffer(rw->fd, map);
	}
	return call(node, DMAFILE_IOC_RW, rw);
}

static void read_words(int argc, char **argv)
{
	unsigned int word;
	int i;

	for (i = 2; i < argc && !command; i++) {
		if (!strcmp(argv[i], "--"))
			command = argv + i + 1;
		buffered |= !strcmp(argv[i], "buffered");
		print |= !strcmp(argv[i], "print");
		for (word = 0; word < ARRAY_SIZE(names); word++)
			if (!strncmp(argv[i], names[word], strlen(names[word])))
				words[word] = strtoull(argv[i] + strlen(names[word]), NULL, 0);
	}
}

int main(int argc, char **argv)
{
	int file, fd = -1, result = 0, first = 0, before, after;
	struct dmafile_alloc_read load = { 0 };
	struct dmafile_rw rw = { 0 };
	bool moves;
	__u64 n;

	read_words(argc, argv);
	moves = words[WRITE] || words[READ];
	node = open("/dev/dmafile", O_RDWR | O_CLOEXEC);
	must(node >= 0, "/dev/dmafile: %s", strerror(errno));
	file = open(argv[1], O_CLOEXEC | (words[WRITE] ? O_RDWR : O_RDONLY) |
		    (buffered ? 0 : O_DIRECT));
	must(file >= 0, "%s: %s", argv[1], strerror(errno));
	before = dup(0);
	close(before);
	for (n = 0; n < (words[TIMES] ? words[TIMES] : 1); n++) {
		if (fd >= 0)
			close(fd);
		if (moves)
			result = move(file, &rw, words[WRITE] ? words[WRITE] : words[READ]);
		else if (words[ALLOC])
			result = allocate(words[ALLOC], &load.fd);
		else
			result = read_new(file, &load);
		must(!n || result == first, "%s, and then %s", why(first), why(result));
		first = result;
		fd = moves ? rw.fd : result ? -1 : load.fd;
	}
	/* A load that fails returns no descriptor. */
	after = dup(0);
	must(after == before + (fd >= 0), "descriptors: %d, then %d", before, after);
	close(after);
	if (command) {
		char number[16];

		must(!result, "%s: %s", argv[1], why(result));
		snprintf(number, sizeof(number), "%d", fd);
		setenv("DMAFILE_FD", number, true);
		execv(command[0], command);
		must(false, "%s: %s", command[0], strerror(errno));
	}
	printf("%d %llu %u\n", -result, moves ? rw.bytes : load.bytes, moves ? rw.mode : load.mode);
	if (print && fd >= 0)
		print_all(map_buffer(fd, PROT_READ), size_of(fd));
	return 0;
}
