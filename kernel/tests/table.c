// SPDX-License-Identifier: GPL-2.0-only
/*
 * table FOLDER
 *
 * Tests invalid requests: each structure with all sizes, all invalid bits of all fields, pointers
 * that fault at each byte, and descriptors of all unsuitable kinds. Each must fail with the error
 * that is documented in the header, and leave no descriptor and no buffer behind.
 */
#define _GNU_SOURCE
#include "test.h"
#include "../../tests/vm/inside/drm.h"

#include <limits.h>
#include <stddef.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

static char path[4096];
/* A file of one page, and a buffer of the module */
static int file, buffer;

union any {
	__u32 size;
	struct dmafile_info info;
	struct dmafile_alloc alloc;
	struct dmafile_alloc_read load;
	struct dmafile_rw rw;
};

/* A valid form of each request, the size of its first version, and its "out" fields */
struct kind {
	const char *name;
	unsigned long request;
	size_t size, min, out, out_end;
	union any good;
};

static struct kind kinds[] = {
	{ "INFO", DMAFILE_IOC_INFO, sizeof(struct dmafile_info), 16, 0,
	  sizeof(struct dmafile_info), { 0 } },
	{ "ALLOC", DMAFILE_IOC_ALLOC, sizeof(struct dmafile_alloc), 32,
	  offsetof(struct dmafile_alloc, fd), sizeof(struct dmafile_alloc), { 0 } },
	{ "ALLOC_READ", DMAFILE_IOC_ALLOC_READ, sizeof(struct dmafile_alloc_read), 120,
	  offsetof(struct dmafile_alloc_read, fd), offsetof(struct dmafile_alloc_read, reserved),
	  { 0 } },
	{ "RW", DMAFILE_IOC_RW, sizeof(struct dmafile_rw), 96, offsetof(struct dmafile_rw, mode),
	  sizeof(struct dmafile_rw), { 0 } },
};

/* The number of the same request with another structure size */
static unsigned long sized(const struct kind *kind, size_t size)
{
	return _IOC(_IOC_READ | _IOC_WRITE, DMAFILE_IOC_MAGIC, _IOC_NR(kind->request), size);
}

static void prepare(void)
{
	unsigned int i;

	kinds[1].good.alloc = (struct dmafile_alloc) { .fd_flags = O_RDWR, .length = 1 };
	kinds[2].good.load = (struct dmafile_alloc_read) { .fd_flags = O_RDWR, .file_fd = file };
	kinds[3].good.rw = (struct dmafile_rw) {
		.flags = DMAFILE_READ,
		.fd = buffer,
		.file_fd = file,
		.length = 1,
	};
	for (i = 0; i < ARRAY_SIZE(kinds); i++)
		kinds[i].good.size = kinds[i].size;
}

/* The next free descriptor, which a leaked one would change */
static int next_fd(void)
{
	int fd = dup(node);

	close(fd);
	return fd;
}

/* Makes a request, and closes its descriptor, which must exist exactly on success. */
static int ask_by(unsigned long number, const struct kind *kind, void *request)
{
	int before = next_fd(), result = call(node, number, request), fd = -1;

	if (!result && kind->request == DMAFILE_IOC_ALLOC)
		fd = ((struct dmafile_alloc *)request)->fd;
	if (!result && kind->request == DMAFILE_IOC_ALLOC_READ)
		fd = ((struct dmafile_alloc_read *)request)->fd;
	must(fd < 0 || fd == before, "%s: descriptor %d, not %d", kind->name, fd, before);
	if (fd >= 0)
		close(fd);
	must(next_fd() == before, "%s: %s, but a descriptor is left", kind->name, why(result));
	return result;
}

static int ask(const struct kind *kind, void *request)
{
	return ask_by(kind->request, kind, request);
}

#define REGION	(4 * PAGE)

/* Structures of all sizes, followed by an inaccessible page */
static __u8 *region(void)
{
	__u8 *pages = mmap(NULL, REGION + PAGE, PROT_READ | PROT_WRITE,
			   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	must(pages != MAP_FAILED && !mprotect(pages + REGION, PAGE, PROT_NONE), "mmap");
	return pages;
}

static size_t least(size_t one, size_t other)
{
	return one < other ? one : other;
}

static void sizes(void)
{
	static __u8 before[REGION];
	__u8 *pages = region();
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(kinds); i++) {
		const struct kind *kind = &kinds[i];
		__u32 size;

		for (size = 0; size < REGION; size = size < 512 ? size + 1 : size + 61) {
			int result, want = size < kind->min ? -EINVAL : 0;
			/* Ends at the last accessible byte. */
			__u8 *at = pages + REGION - (size < sizeof(size) ? sizeof(size) : size);
			size_t out_end = least(kind->out_end, size), j;

			memset(pages, 0x5a, REGION);
			memset(at, 0, size);
			memcpy(at, &kind->good, least(size, kind->size));
			*(__u32 *)at = size;
			memcpy(before, pages, REGION);
			result = ask_by(sized(kind, size), kind, at);
			must(result == want, "%s of size %u: %s", kind->name, size, why(result));
			/* Only "out" fields may change. */
			for (j = 0; j < REGION; j++)
				must(pages[j] == before[j] ||
				     (pages + j >= at + kind->out && pages + j < at + out_end),
				     "%s of size %u: byte %zd of it changes", kind->name, size,
				     pages + j - at);
		}
		/* A nonzero byte in the unknown part, at each position. */
		for (size = kind->size + 1; size <= PAGE; size = size < 256 ? size + 1 : size * 2) {
			__u32 at;

			for (at = kind->size; at < size; at = at < 256 ? at + 1 : at * 2) {
				int result;

				memset(pages, 0, PAGE);
				memcpy(pages, &kind->good, kind->size);
				*(__u32 *)pages = size;
				pages[at] = 1;
				result = ask_by(sized(kind, size), kind, pages);
				must(result == -E2BIG, "%s of size %u with something at %u: %s",
				     kind->name, size, at, why(result));
			}
		}
	}
	munmap(pages, REGION + PAGE);
}

/* A program that only needs the features, and one that is newer than the module */
static void smaller_and_larger(void)
{
	struct { __u32 size, align; __u64 features; } small = { .size = sizeof(small) };
	struct { struct dmafile_info info; __u64 more[2]; } large = { .info.size = sizeof(large) };
	int result = call(node, _IOWR(DMAFILE_IOC_MAGIC, 0, small), &small);

	must(!result && small.align == PAGE && small.features, "a small INFO: %s, align %u",
	     why(result), small.align);
	must(small.size == sizeof(struct dmafile_info), "the module's own size: %u", small.size);
	result = call(node, _IOWR(DMAFILE_IOC_MAGIC, 0, large), &large);
	must(!result && large.info.features == small.features && large.info.max_buffer,
	     "a large INFO: %s", why(result));
	must(large.info.size == sizeof(struct dmafile_info) && !large.more[0],
	     "the module's own size: %u", large.info.size);
	large.info.size = sizeof(large);
	large.more[1] = 1;
	result = call(node, _IOWR(DMAFILE_IOC_MAGIC, 0, large), &large);
	must(result == -E2BIG, "a large INFO with more in it: %s", why(result));
}

/* Input fields may be in read-only memory. */
static void inputs_are_not_written(void)
{
	__u8 *pages = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
			   -1, 0);
	unsigned int i;

	for (i = 1; i < ARRAY_SIZE(kinds); i++) {
		const struct kind *kind = &kinds[i];
		__u8 *at = pages + PAGE - kind->out;
		int result;

		memcpy(at, &kind->good, kind->size);
		must(!mprotect(pages, PAGE, PROT_READ), "mprotect");
		result = ask(kind, at);
		must(!result, "%s with read-only input fields: %s", kind->name, why(result));
		must(!mprotect(pages, PAGE, PROT_READ | PROT_WRITE), "mprotect");
	}
	munmap(pages, 2 * PAGE);
}

/* A request whose result cannot be written is not executed. */
static void nothing_without_an_answer(void)
{
	struct dmafile_rw *rw = mmap(NULL, PAGE, PROT_READ | PROT_WRITE,
				     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	__u8 before[16], after[16];
	int result;

	*rw = kinds[3].good.rw;
	rw->flags = DMAFILE_WRITE;
	must(pwrite(file, "not overwritten", 16, 0) == 16, "pwrite: %s", strerror(errno));
	must(pread(file, before, 16, 0) == 16, "pread: %s", strerror(errno));
	must(!mprotect(rw, PAGE, PROT_READ), "mprotect");
	result = call(node, DMAFILE_IOC_RW, rw);
	must(result == -EFAULT, "RW in read-only memory: %s", why(result));
	must(pread(file, after, 16, 0) == 16 && !memcmp(before, after, 16),
	     "it was executed nevertheless");
	munmap(rw, PAGE);
}

/* A structure of which only the first bytes are accessible, or that is read-only */
static void faults(void)
{
	__u8 *pages = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
			   -1, 0);
	static void * const wild[] = { NULL, (void *)-1, (void *)-4096, (void *)~(~0UL >> 1) };
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(kinds); i++) {
		const struct kind *kind = &kinds[i];
		unsigned int reachable, j;
		int result;

		for (j = 0; j < ARRAY_SIZE(wild); j++) {
			result = ask(kind, wild[j]);
			must(result == -EFAULT, "%s at %p: %s", kind->name, wild[j], why(result));
		}
		for (reachable = 1; reachable < kind->size; reachable++) {
			must(!mprotect(pages + PAGE, PAGE, PROT_READ | PROT_WRITE), "mprotect");
			memcpy(pages + PAGE - reachable, &kind->good, kind->size);
			must(!mprotect(pages + PAGE, PAGE, PROT_NONE), "mprotect");
			result = ask(kind, pages + PAGE - reachable);
			must(result == -EFAULT, "%s with %u readable bytes: %s",
			     kind->name, reachable, why(result));
		}
		/* The result cannot be written, so there is no descriptor. */
		must(!mprotect(pages + PAGE, PAGE, PROT_READ | PROT_WRITE), "mprotect");
		memcpy(pages, &kind->good, kind->size);
		must(!mprotect(pages, PAGE, PROT_READ), "mprotect");
		result = ask(kind, pages);
		must(result == -EFAULT, "%s in read-only memory: %s", kind->name, why(result));
		must(!mprotect(pages, PAGE, PROT_READ | PROT_WRITE), "mprotect");
	}
	munmap(pages, 2 * PAGE);
}

static void commands(void)
{
	union any any = { .size = sizeof(struct dmafile_info) };
	unsigned int nr, bit, dir;

	for (nr = 0; nr < 256; nr++)
		for (dir = 0; dir < 4; dir++) {
			unsigned int size = dir ? sizeof(any.info) : 0;
			int result = call(node, _IOC(dir, DMAFILE_IOC_MAGIC, nr, size), &any);

			/* The numbers of early versions, without a size, are not supported. */
			must((nr < 4 && dir == 3) || result == -ENOTTY,
			     "command %u, direction %u: %s", nr, dir, why(result));
			any.size = sizeof(any.info);
		}
	/* A number that differs from INFO in one bit is not INFO, or has another size. */
	for (bit = 0; bit < 32; bit++) {
		unsigned int request = DMAFILE_IOC_INFO ^ (1U << bit);
		bool other_size = bit >= _IOC_SIZESHIFT && bit < _IOC_DIRSHIFT;
		int result;

		if (request == sized(&kinds[1], sizeof(any.info)) ||
		    request == sized(&kinds[2], sizeof(any.info)))
			continue;
		result = call(node, request, &any);
		must(result == (other_size ? -EINVAL : -ENOTTY), "command %x: %s", request,
		     why(result));
		any.size = sizeof(any.info);
	}
}

/* Changes each bit of a field. @want 0: this bit is valid. */
static void bits(unsigned int kind, const char *field, size_t at, unsigned int width, __u64 right,
		 int want)
{
	unsigned int bit;

	for (bit = 0; bit < width; bit++) {
		union any any = kinds[kind].good;
		int result;

		((__u8 *)&any)[at + bit / 8] ^= 1 << bit % 8;
		result = ask(&kinds[kind], &any);
		must(result == (right >> bit & 1 ? 0 : want), "%s, bit %u of %s: %s",
		     kinds[kind].name, bit, field, why(result));
	}
}

static void one(unsigned int kind, const union any *any, int want, const char *what)
{
	union any copy = *any;
	int result = ask(&kinds[kind], &copy);

	must(result == want, "%s, %s: %s, not %s", kinds[kind].name, what, why(result), why(want));
}

static void each_bit(void)
{
	const __u64 common = DMAFILE_SHORT_OK | DMAFILE_INTERRUPTIBLE | DMAFILE_IN_ORDER;
	int plain = fcntl(file, F_GETFL);
	unsigned int bit;

	for (bit = 0; bit < ARRAY_SIZE(kinds); bit++)
		bits(bit, "size", 0, 32, 0, -EINVAL);
	/* O_RDWR with one bit changed: O_RDONLY and O_CLOEXEC are valid. */
	bits(1, "fd_flags", offsetof(struct dmafile_alloc, fd_flags), 32, O_RDWR | O_CLOEXEC,
	     -EINVAL);
	bits(1, "flags", offsetof(struct dmafile_alloc, flags), 32, 0, -EINVAL);
	bits(2, "fd_flags", offsetof(struct dmafile_alloc_read, fd_flags), 32, O_RDWR | O_CLOEXEC,
	     -EINVAL);
	/* STRICT is valid with O_DIRECT, if the file supports it. */
	bits(2, "flags", offsetof(struct dmafile_alloc_read, flags), 32, common, -EINVAL);
	bits(2, "reserved", offsetof(struct dmafile_alloc_read, reserved), 32, 0, -EINVAL);
	bits(3, "flags", offsetof(struct dmafile_rw, flags), 32, common, -EINVAL);
	if (!fcntl(file, F_SETFL, plain | O_DIRECT)) {
		kinds[2].good.load.flags = DMAFILE_STRICT;
		bits(2, "the flags beside STRICT", offsetof(struct dmafile_alloc_read, flags), 32,
		     common | DMAFILE_STRICT, -EINVAL);
		kinds[2].good.load.flags = 0;
		must(!fcntl(file, F_SETFL, plain), "F_SETFL");
	}
	kinds[3].good.rw.flags = DMAFILE_WRITE;
	bits(3, "the flags beside WRITE", offsetof(struct dmafile_rw, flags), 32,
	     common | DMAFILE_DSYNC, -EINVAL);
	kinds[3].good.rw.flags = 0;
	bits(3, "the flags without a direction", offsetof(struct dmafile_rw, flags), 32,
	     DMAFILE_READ | DMAFILE_WRITE, -EINVAL);
	kinds[3].good.rw.flags = DMAFILE_READ;
	for (bit = 0; bit < 32; bit++) {
		struct dmafile_progress progress = { .reserved = 1U << bit };

		kinds[2].good.load.progress = (unsigned long)&progress;
		kinds[3].good.rw.progress = (unsigned long)&progress;
		one(2, &kinds[2].good, -EINVAL, "a bit of the progress");
		one(3, &kinds[3].good, -EINVAL, "a bit of the progress");
	}
	kinds[2].good.load.progress = 0;
	kinds[3].good.rw.progress = 0;
	/* "out" fields may have any value. */
	bits(1, "fd", offsetof(struct dmafile_alloc, fd), 32, ~0ULL, 0);
	bits(1, "alloc_ns", offsetof(struct dmafile_alloc, alloc_ns), 64, ~0ULL, 0);
	bits(2, "fd and mode", offsetof(struct dmafile_alloc_read, fd), 64, ~0ULL, 0);
	bits(2, "align", offsetof(struct dmafile_alloc_read, align), 32, ~0ULL, 0);
	bits(3, "mode and align", offsetof(struct dmafile_rw, mode), 64, ~0ULL, 0);
	bits(3, "bytes", offsetof(struct dmafile_rw, bytes), 64, ~0ULL, 0);
}

/* A request that is valid except for one field */
#define TRY(kind, field, value, want)				\
	do {							\
		const int nr = (kind);				\
		union any any = kinds[nr].good;			\
								\
		any.field = (value);				\
		one(nr, &any, want, #field " = " #value);	\
	} while (0)

static void numbers(void)
{
	TRY(1, alloc.length, 0, -EINVAL);
	TRY(1, alloc.length, 1ULL << 40, -EFBIG);
	TRY(1, alloc.length, ~0ULL, -EFBIG);
	TRY(1, alloc.length, ~0ULL - 4094, -EFBIG);
	TRY(2, load.file_offset, PAGE, -ENODATA);
	TRY(2, load.file_offset, PAGE - 1, 0);
	TRY(2, load.file_offset, ~0ULL, -ENODATA);
	TRY(2, load.length, 1ULL << 40, -EFBIG);
	TRY(2, load.length, PAGE + 1, -ENODATA);
	TRY(2, load.length, ~0ULL, -EOVERFLOW);
	TRY(2, load.length, LLONG_MAX, -EOVERFLOW);
	TRY(2, load.buffer_offset, ~0ULL, -EOVERFLOW);
	TRY(2, load.buffer_offset, LLONG_MAX, -EOVERFLOW);
	TRY(2, load.buffer_offset, 1ULL << 40, -EFBIG);
	TRY(2, load.buffer_size, 1, -EINVAL);
	TRY(2, load.buffer_size, PAGE - 1, -EINVAL);
	TRY(2, load.buffer_size, PAGE, 0);
	TRY(2, load.buffer_size, PAGE + 1, 0);
	TRY(2, load.buffer_size, ~0ULL, -EFBIG);
	TRY(2, load.gather, 1, 0);
	TRY(2, load.gather, 1ULL << 30, 0);
	TRY(2, load.gather, (1ULL << 30) + 1, -EINVAL);
	TRY(2, load.gather, ~0ULL, -EINVAL);
	TRY(2, load.progress, 4, -EINVAL);
	TRY(2, load.progress, 8, -EFAULT);
	TRY(2, load.progress, 1ULL << 63, -EFAULT);
	TRY(2, load.progress, ~7ULL, -EFAULT);
	TRY(3, rw.length, 0, -EINVAL);
	TRY(3, rw.length, PAGE, 0);
	TRY(3, rw.length, PAGE + 1, -EINVAL);
	TRY(3, rw.length, ~0ULL, -EINVAL);
	TRY(3, rw.buffer_offset, PAGE - 1, 0);
	TRY(3, rw.buffer_offset, PAGE, -EINVAL);
	TRY(3, rw.buffer_offset, ~0ULL, -EINVAL);
	TRY(3, rw.file_offset, PAGE, -ENODATA);
	TRY(3, rw.file_offset, LLONG_MAX, -EOVERFLOW);
	TRY(3, rw.file_offset, ~0ULL, -EOVERFLOW);
	TRY(3, rw.gather, 1ULL << 30, 0);
	TRY(3, rw.gather, (1ULL << 30) + 1, -EINVAL);
	TRY(3, rw.progress, 12, -EINVAL);
	TRY(3, rw.progress, 8, -EFAULT);
}

static void info(void)
{
	struct dmafile_info info = { .size = sizeof(info) };
	int result = call(node, DMAFILE_IOC_INFO, &info);

	must(!result && info.size == sizeof(info), "INFO: %s, size %u", why(result), info.size);
	must(!info.reserved, "reserved %u", info.reserved);
	must(info.features == (DMAFILE_FEATURE_ALLOC_READ | DMAFILE_FEATURE_READ |
			       DMAFILE_FEATURE_WRITE | DMAFILE_FEATURE_URING_CMD),
	     "features %llx", info.features);
	must(info.max_buffer > 100ULL << 20 && info.max_buffer < 1ULL << 40, "max_buffer %llu",
	     info.max_buffer);
	must(info.gather && info.gather <= info.max_gather && info.max_gather == 1ULL << 30,
	     "gather %llu of %llu", info.gather, info.max_gather);
	must(info.align == PAGE && info.depth, "align %u, depth %u", info.align, info.depth);
	/* One byte more than the documented maximum is too much. */
	TRY(1, alloc.length, info.max_buffer + 1, -EFBIG);
	TRY(2, load.buffer_size, info.max_buffer + 1, -EFBIG);
	TRY(2, load.gather, info.max_gather + 1, -EINVAL);
}

static void try_file(int fd, int read, int write, const char *what)
{
	union any any = kinds[2].good;

	must(fd >= 0, "%s: %s", what, strerror(errno));
	any.load.file_fd = fd;
	one(2, &any, read, what);
	any = kinds[3].good;
	any.rw.file_fd = fd;
	one(3, &any, read, what);
	any.rw.flags = DMAFILE_WRITE;
	one(3, &any, write, what);
	close(fd);
}

static void wrong_files(void)
{
	int pipes[2], sockets[2], fd;

	must(!pipe(pipes) && !socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), "pipe, socketpair");
	try_file(open("/", O_RDONLY | O_DIRECTORY), -EISDIR, -EISDIR, "a folder");
	try_file(pipes[0], -EINVAL, -EINVAL, "a pipe to read");
	try_file(pipes[1], -EINVAL, -EINVAL, "a pipe to write");
	try_file(sockets[0], -EINVAL, -EINVAL, "a socket");
	close(sockets[1]);
	try_file(eventfd(0, 0), -EINVAL, -EINVAL, "an eventfd");
	try_file(memfd_create("table", 0), -ENODATA, 0, "a memfd, which is empty");
	try_file(open("/dev/null", O_RDWR), -EINVAL, -EINVAL, "/dev/null");
	try_file(open("/dev/zero", O_RDWR), -EINVAL, -EINVAL, "/dev/zero");
	try_file(open("/dev/ptmx", O_RDWR | O_NOCTTY), -EINVAL, -EINVAL, "a terminal");
	try_file(open("/dev/dmafile", O_RDWR), -EINVAL, -EINVAL, "/dev/dmafile");
	try_file(dup(buffer), -EINVAL, -EINVAL, "a dma-buf");
	try_file(open(path, O_PATH), -EBADF, -EBADF, "O_PATH");
	try_file(open(path, O_WRONLY), -EBADF, 0, "a file open for writing");
	try_file(open(path, O_RDONLY), 0, -EBADF, "a file open for reading");
	try_file(open(path, O_RDWR | O_APPEND), 0, -EINVAL, "a file with O_APPEND");
	fd = open(path, O_RDWR);
	try_file(dup2(fd, 200), 0, 0, "a file");
	close(fd);
	/* Descriptors that have been closed, or never existed */
	for (fd = 200; fd <= 201; fd++) {
		TRY(2, load.file_fd, fd, -EBADF);
		TRY(3, rw.file_fd, fd, -EBADF);
	}
	TRY(2, load.file_fd, -1, -EBADF);
	TRY(2, load.file_fd, INT_MAX, -EBADF);
	TRY(2, load.file_fd, INT_MIN, -EBADF);
	TRY(3, rw.file_fd, -1, -EBADF);
}

/* A dma-buf of another exporter: vgem, which all tested kernels have */
static int foreign(void)
{
	struct drm_mode_create_dumb dumb = { .width = 32, .height = 32, .bpp = 32 };
	struct drm_prime_handle prime = { .flags = O_RDWR | O_CLOEXEC };
	int device = drm_open("vgem");

	must(device >= 0, "no vgem");
	must(!ioctl(device, DRM_IOCTL_MODE_CREATE_DUMB, &dumb), "MODE_CREATE_DUMB: %s",
	     strerror(errno));
	prime.handle = dumb.handle;
	must(!ioctl(device, DRM_IOCTL_PRIME_HANDLE_TO_FD, &prime), "PRIME_HANDLE_TO_FD: %s",
	     strerror(errno));
	close(device);
	return prime.fd;
}

/* The result of RW is also written on error. */
static void answers(void)
{
	union any any = kinds[3].good;
	int result;

	any.rw.fd = -1;
	any.rw.mode = 7;
	any.rw.align = 7;
	any.rw.bytes = 7;
	any.rw.submit_ns = 7;
	any.rw.wait_ns = 7;
	any.rw.copy_ns = 7;
	result = ask(&kinds[3], &any);
	must(result == -EBADF && !any.rw.mode && !any.rw.align && !any.rw.bytes &&
	     !any.rw.submit_ns && !any.rw.wait_ns && !any.rw.copy_ns,
	     "RW: %s, and something else", why(result));
}

static void wrong_buffers(void)
{
	struct dmafile_alloc alloc = { .size = sizeof(alloc), .fd_flags = O_RDONLY, .length = 1 };
	int fd = foreign(), result;
	union any any = kinds[3].good;

	TRY(3, rw.fd, fd, -EXDEV);
	close(fd);
	TRY(3, rw.fd, fd, -EBADF);
	TRY(3, rw.fd, file, -EINVAL);
	TRY(3, rw.fd, node, -EINVAL);
	TRY(3, rw.fd, -1, -EBADF);
	/* A read-only descriptor cannot be used to fill a buffer. */
	result = call(node, DMAFILE_IOC_ALLOC, &alloc);
	must(!result, "ALLOC with O_RDONLY: %s", why(result));
	any.rw.fd = alloc.fd;
	one(3, &any, -EBADF, "READ into a buffer open for reading");
	any.rw.flags = DMAFILE_WRITE;
	one(3, &any, 0, "WRITE from a buffer open for reading");
	must(mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, alloc.fd, 0) == MAP_FAILED,
	     "a buffer open for reading can be mapped for writing");
	close(alloc.fd);
	/* fd_flags apply to the descriptor. */
	alloc.fd_flags = O_RDWR | O_CLOEXEC;
	must(!call(node, DMAFILE_IOC_ALLOC, &alloc) && fcntl(alloc.fd, F_GETFD) == FD_CLOEXEC &&
	     (fcntl(alloc.fd, F_GETFL) & O_ACCMODE) == O_RDWR, "O_CLOEXEC and O_RDWR");
	close(alloc.fd);
	alloc.fd_flags = O_RDONLY;
	must(!call(node, DMAFILE_IOC_ALLOC, &alloc) && fcntl(alloc.fd, F_GETFD) == 0 &&
	     (fcntl(alloc.fd, F_GETFL) & O_ACCMODE) == O_RDONLY, "neither");
	close(alloc.fd);
}

static void nothing_is_left(void)
{
	long long buffers = number_in(STATS, "buffers"), bytes = number_in(STATS, "buffer_bytes");

	must(buffers == 1 && bytes == PAGE, "%lld buffers of %lld bytes", buffers, bytes);
}

static void set_up(void)
{
	static __u8 page[PAGE];

	file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	must(file >= 0 && write(file, page, PAGE) == PAGE, "%s: %s", path, strerror(errno));
	buffer = new_buffer(PAGE);
	prepare();
}

static const struct test tests[] = {
	{ "set_up", set_up },
	{ "info", info },
	{ "commands", commands },
	{ "sizes", sizes },
	{ "smaller_and_larger", smaller_and_larger },
	{ "inputs_are_not_written", inputs_are_not_written },
	{ "nothing_without_an_answer", nothing_without_an_answer },
	{ "faults", faults },
	{ "each_bit", each_bit },
	{ "numbers", numbers },
	{ "wrong_files", wrong_files },
	{ "answers", answers },
	{ "wrong_buffers", wrong_buffers },
	{ "nothing_is_left", nothing_is_left },
};

int main(int argc, char **argv)
{
	snprintf(path, sizeof(path), "%s/table", argc > 1 ? argv[1] : ".");
	return run_tests(tests, ARRAY_SIZE(tests));
}
