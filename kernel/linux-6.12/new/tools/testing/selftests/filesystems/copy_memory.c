// SPDX-License-Identifier: GPL-2.0-only
/*
 * Tests copy_file_range() between a file in the current directory and memory files: memfds and
 * udmabufs, both also with huge pages, and buffers of the system heap. Every byte of both files,
 * also around the copied range, is compared with the result of read() and with mappings.
 *
 * The variants with huge pages need reserved huge pages.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/dma-buf.h>
#include <linux/dma-heap.h>
#include <linux/fs.h>
#include <linux/memfd.h>
#include <linux/udmabuf.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../kselftest_harness.h"

#define PATH		"copy_memory.file"
#define OTHER		"copy_memory.other"
#define FULL		"copy_memory.full"
#define LOWER		"copy_memory.lower"
#define UPPER		"copy_memory.upper"
#define OVERLAY		"copy_memory.overlay"
#define SW_SYNC		"/sys/kernel/debug/sync/sw_sync"
#define MIB		(1024L * 1024)
#define HUGE_PAGE	(2 * MIB)
/* The kernel checks for signals after each multiple of this size. */
#define PART		(256 * MIB)
#define TOO_LONG	900

static size_t page;

enum kind { MEMFD, HUGE_MEMFD, UDMABUF, HUGE_UDMABUF, HEAP };

FIXTURE(copy_memory) {
	/* The memory file, and its size */
	int memory;
	off_t size;
	/* The memfd of a udmabuf, or the memory file itself */
	int memfd;
	/* A mapping of the memory */
	char *map;
	/* The expected contents */
	char *model;
};

FIXTURE_VARIANT(copy_memory) {
	enum kind kind;
	int direct;
};

FIXTURE_VARIANT_ADD(copy_memory, memfd_buffered) {
	.kind = MEMFD,
};

FIXTURE_VARIANT_ADD(copy_memory, memfd_direct) {
	.kind = MEMFD,
	.direct = O_DIRECT,
};

FIXTURE_VARIANT_ADD(copy_memory, huge_memfd_buffered) {
	.kind = HUGE_MEMFD,
};

FIXTURE_VARIANT_ADD(copy_memory, huge_memfd_direct) {
	.kind = HUGE_MEMFD,
	.direct = O_DIRECT,
};

FIXTURE_VARIANT_ADD(copy_memory, udmabuf_buffered) {
	.kind = UDMABUF,
};

FIXTURE_VARIANT_ADD(copy_memory, udmabuf_direct) {
	.kind = UDMABUF,
	.direct = O_DIRECT,
};

FIXTURE_VARIANT_ADD(copy_memory, huge_udmabuf_buffered) {
	.kind = HUGE_UDMABUF,
};

FIXTURE_VARIANT_ADD(copy_memory, huge_udmabuf_direct) {
	.kind = HUGE_UDMABUF,
	.direct = O_DIRECT,
};

FIXTURE_VARIANT_ADD(copy_memory, heap_buffered) {
	.kind = HEAP,
};

FIXTURE_VARIANT_ADD(copy_memory, heap_direct) {
	.kind = HEAP,
	.direct = O_DIRECT,
};

static bool is_dmabuf(enum kind kind)
{
	return kind == UDMABUF || kind == HUGE_UDMABUF || kind == HEAP;
}

static int make_memfd(enum kind kind, off_t size)
{
	bool huge = kind == HUGE_MEMFD || kind == HUGE_UDMABUF;
	int fd = memfd_create("copy_memory", MFD_CLOEXEC | MFD_ALLOW_SEALING |
			      (huge ? MFD_HUGETLB | MFD_HUGE_2MB : 0));

	if (fd >= 0 && ftruncate(fd, size)) {
		close(fd);
		return -1;
	}
	return fd;
}

static int make_udmabuf(int memfd, off_t size)
{
	struct udmabuf_create create = {
		.memfd = memfd, .flags = UDMABUF_FLAGS_CLOEXEC, .size = size,
	};
	int device = open("/dev/udmabuf", O_RDWR | O_CLOEXEC), fd;

	fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK);
	fd = ioctl(device, UDMABUF_CREATE, &create);
	close(device);
	return fd;
}

static int make_heap_buffer(off_t size, int flags)
{
	struct dma_heap_allocation_data data = { .len = size, .fd_flags = flags | O_CLOEXEC };
	int device = open("/dev/dma_heap/system", O_RDWR | O_CLOEXEC);
	int failed = ioctl(device, DMA_HEAP_IOCTL_ALLOC, &data);

	close(device);
	return failed ? -1 : (int)data.fd;
}

FIXTURE_SETUP(copy_memory)
{
	page = sysconf(_SC_PAGESIZE);
	self->size = 3 * HUGE_PAGE;
	self->memory = -1;
	self->memfd = -1;
	if (variant->kind != HEAP) {
		self->memfd = make_memfd(variant->kind, self->size);
		if (self->memfd < 0)
			SKIP(return, "memfd: %s", strerror(errno));
	}
	/* Skip if there are not enough huge pages; UDMABUF_CREATE would fail. */
	if (variant->kind == HUGE_UDMABUF && fallocate(self->memfd, 0, 0, self->size))
		SKIP(return, "huge pages: %s", strerror(errno));
	if (variant->kind == HEAP)
		self->memory = make_heap_buffer(self->size, O_RDWR);
	else if (is_dmabuf(variant->kind))
		self->memory = make_udmabuf(self->memfd, self->size);
	else
		self->memory = dup(self->memfd);
	if (self->memory < 0)
		SKIP(return, "memory: %s", strerror(errno));
	self->map = mmap(NULL, self->size, PROT_READ | PROT_WRITE, MAP_SHARED, self->memory, 0);
	if (self->map == MAP_FAILED)
		SKIP(return, "mmap: %s", strerror(errno));
	self->model = calloc(1, self->size);
	ASSERT_NE(NULL, self->model);
}

FIXTURE_TEARDOWN(copy_memory)
{
	if (self->map && self->map != MAP_FAILED)
		munmap(self->map, self->size);
	free(self->model);
	close(self->memory);
	if (self->memfd >= 0)
		close(self->memfd);
	unlink(PATH);
	unlink(OTHER);
}

#define COPY_MEMORY(name)	TEST_F_TIMEOUT(copy_memory, name, TOO_LONG)

/* Fills memory with non-repeating data. */
static void scramble(void *bytes, size_t size, uint64_t state)
{
	size_t i;

	for (i = 0; i + 8 <= size; i += 8) {
		state = state * 6364136223846793005 + 1442695040888963407;
		memcpy((char *)bytes + i, &state, 8);
	}
	memset((char *)bytes + i, 'e', size - i);
}

/* Creates a file that is not cached. Return: -1 if it cannot be opened with the flags. */
static int made(struct __test_metadata *_metadata, const char *path, const void *bytes,
		size_t size, int flags)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

	ASSERT_TRUE(fd >= 0 && pwrite(fd, bytes, size, 0) == (ssize_t)size && !fsync(fd));
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	close(fd);
	return open(path, O_CLOEXEC | flags);
}

#define make(bytes, size, flags)	made(_metadata, PATH, bytes, size, flags)

static void sync_memory(int memory, enum kind kind, __u64 flags)
{
	struct dma_buf_sync sync = { .flags = flags | DMA_BUF_SYNC_RW };

	if (is_dmabuf(kind))
		ioctl(memory, DMA_BUF_IOCTL_SYNC, &sync);
}

#define sync_for_cpu(flags)	sync_memory(self->memory, variant->kind, flags)

/* Compares the memory with the model. */
#define compare()								\
	do {									\
		int differs;							\
										\
		sync_for_cpu(DMA_BUF_SYNC_START);				\
		differs = memcmp(self->map, self->model, self->size);		\
		sync_for_cpu(DMA_BUF_SYNC_END);					\
		ASSERT_TRUE(!differs);						\
	} while (0)

static ssize_t copy(int in, off_t pos_in, int out, off_t pos_out, size_t len)
{
	return copy_file_range(in, &pos_in, out, &pos_out, len, 0);
}

#define refused(error, call)	ASSERT_TRUE((call) == -1 && errno == (error))

/* Ranges with all kinds of misalignment */
static const struct range {
	off_t pos, at;
	size_t len;
} ranges[] = {
	{ 0, 0, 1 }, { 0, 0, 512 }, { 0, 0, 4096 }, { 0, 0, MIB }, { 0, 0, 2 * MIB + 513 },
	{ 4096, 8192, 3 * 4096 }, { 512, 512, 4096 }, { 512, 1024, 8192 }, { 1, 1, 4094 },
	{ 1, 1, 4095 }, { 1, 1, 4096 }, { 1, 4097, 70000 }, { 3, 5, 70000 },
	{ 4095, 4095, 2 }, { 4095, 0, 4097 }, { 0, 4095, 4097 }, { 65536, 65536, MIB + 1 },
	{ MIB + 7, 7, MIB }, { MIB, HUGE_PAGE - 4096, 8192 }, { 4096, HUGE_PAGE - 1, 3 },
	{ 777, HUGE_PAGE + 777, HUGE_PAGE + 1 }, { 0, 2 * HUGE_PAGE, HUGE_PAGE },
};

#define RANGES	(sizeof(ranges) / sizeof(*ranges))
#define FILE_SIZE	(5 * MIB + 777)

COPY_MEMORY(from_disk)
{
	char *bytes = malloc(FILE_SIZE);
	unsigned int i;
	int file;

	ASSERT_NE(NULL, bytes);
	scramble(bytes, FILE_SIZE, 1);
	file = make(bytes, FILE_SIZE, O_RDONLY | variant->direct);
	if (file < 0)
		SKIP(return, "O_DIRECT is not supported");
	for (i = 0; i < RANGES; i++) {
		struct range range = ranges[i];

		ASSERT_TRUE(copy(file, range.pos, self->memory, range.at, range.len) ==
			    (ssize_t)range.len);
		memcpy(self->model + range.at, bytes + range.pos, range.len);
		compare();
	}
	/* Again with other data: now the pages exist. */
	for (i = 0; i < RANGES; i++) {
		struct range range = ranges[i];

		range.pos += 2 * MIB;
		if (range.pos + range.len > FILE_SIZE)
			continue;
		ASSERT_TRUE(copy(file, range.pos, self->memory, range.at, range.len) ==
			    (ssize_t)range.len);
		memcpy(self->model + range.at, bytes + range.pos, range.len);
		compare();
	}
	close(file);
	free(bytes);
}

COPY_MEMORY(to_disk)
{
	char *bytes = malloc(FILE_SIZE + MIB), *seen = malloc(FILE_SIZE + MIB);
	unsigned int i;

	ASSERT_TRUE(bytes && seen);
	sync_for_cpu(DMA_BUF_SYNC_START);
	scramble(self->map, self->size, 2);
	sync_for_cpu(DMA_BUF_SYNC_END);
	memcpy(self->model, self->map, self->size);
	for (i = 0; i < RANGES; i++) {
		struct range range = ranges[i];
		/* Inside the file, across its end, and beyond its end. */
		size_t size = i % 3 == 0 ? FILE_SIZE :
			      i % 3 == 1 ? range.pos + range.len / 2 : (size_t)range.pos / 2;
		size_t end = range.pos + range.len, whole = end > size ? end : size;
		struct stat stat;
		int file, reader;

		memset(bytes, 0, FILE_SIZE + MIB);
		scramble(bytes, size, 3);
		file = make(bytes, size, O_RDWR | variant->direct);
		if (file < 0)
			SKIP(return, "O_DIRECT is not supported");
		ASSERT_TRUE(copy(self->memory, range.at, file, range.pos, range.len) ==
			    (ssize_t)range.len);
		memcpy(bytes + range.pos, self->model + range.at, range.len);
		ASSERT_TRUE(!fstat(file, &stat) && stat.st_size == (off_t)whole);
		reader = open(PATH, O_RDONLY | O_CLOEXEC);
		ASSERT_TRUE(pread(reader, seen, whole, 0) == (ssize_t)whole);
		ASSERT_TRUE(!memcmp(seen, bytes, whole));
		/* Compare again, from the disk. */
		ASSERT_TRUE(!fsync(reader));
		posix_fadvise(reader, 0, 0, POSIX_FADV_DONTNEED);
		ASSERT_TRUE(pread(reader, seen, whole, 0) == (ssize_t)whole);
		ASSERT_TRUE(!memcmp(seen, bytes, whole));
		close(reader);
		close(file);
	}
	compare();
	free(bytes);
	free(seen);
}

COPY_MEMORY(holes)
{
	char *bytes = calloc(1, FILE_SIZE), *seen = malloc(FILE_SIZE);
	int file, sparse;

	/* A hole in the file is copied as zeros. */
	sync_for_cpu(DMA_BUF_SYNC_START);
	scramble(self->map, self->size, 4);
	sync_for_cpu(DMA_BUF_SYNC_END);
	memcpy(self->model, self->map, self->size);
	sparse = open(OTHER, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	scramble(bytes + 3 * page, page + 5, 5);
	ASSERT_TRUE(pwrite(sparse, bytes + 3 * page, page + 5, 3 * page) == (ssize_t)page + 5);
	ASSERT_TRUE(!ftruncate(sparse, FILE_SIZE) && !fsync(sparse));
	close(sparse);
	sparse = open(OTHER, O_RDONLY | O_CLOEXEC | variant->direct);
	if (sparse < 0)
		SKIP(return, "O_DIRECT is not supported");
	ASSERT_TRUE(copy(sparse, 0, self->memory, page, FILE_SIZE) == FILE_SIZE);
	memcpy(self->model + page, bytes, FILE_SIZE);
	compare();
	close(sparse);

	/* A hole in the memory is copied as zeros, too. */
	if (variant->kind == HUGE_MEMFD || variant->kind == MEMFD) {
		ASSERT_TRUE(!fallocate(self->memory, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
				       0, HUGE_PAGE));
		memset(self->model, 0, HUGE_PAGE);
	}
	scramble(bytes, FILE_SIZE, 6);
	file = make(bytes, FILE_SIZE, O_RDWR | variant->direct);
	ASSERT_TRUE(file >= 0);
	ASSERT_TRUE(copy(self->memory, 5, file, 9, FILE_SIZE - 9) == FILE_SIZE - 9);
	close(file);
	file = open(PATH, O_RDONLY | O_CLOEXEC);
	ASSERT_TRUE(pread(file, seen, FILE_SIZE, 0) == FILE_SIZE);
	ASSERT_TRUE(!memcmp(seen, bytes, 9) && !memcmp(seen + 9, self->model + 5, FILE_SIZE - 9));
	close(file);
	free(bytes);
	free(seen);
}

COPY_MEMORY(ends_and_positions)
{
	char *bytes = malloc(FILE_SIZE);
	off_t pos = FILE_SIZE - 100;
	struct stat stat;
	int file;

	scramble(bytes, FILE_SIZE, 7);
	file = make(bytes, FILE_SIZE, O_RDWR | variant->direct);
	if (file < 0)
		SKIP(return, "O_DIRECT is not supported");
	/* Copies end at the end of the file. */
	ASSERT_TRUE(copy(file, FILE_SIZE - 100, self->memory, 4, 5000) == 100);
	memcpy(self->model + 4, bytes + FILE_SIZE - 100, 100);
	ASSERT_TRUE(copy(file, FILE_SIZE, self->memory, 4, 5000) == 0);
	ASSERT_TRUE(copy(file, FILE_SIZE + 1, self->memory, 4, 5000) == 0);
	ASSERT_TRUE(copy(file, 0, self->memory, 4, 0) == 0);
	compare();
	/* Copies end at the end of the memory, but a file on tmpfs is extended. */
	if (variant->kind == MEMFD) {
		ASSERT_TRUE(copy(file, 0, self->memory, self->size - 100, 5000) == 5000);
		ASSERT_TRUE(!fstat(self->memory, &stat) && stat.st_size == self->size + 4900);
		ASSERT_TRUE(pread(self->memory, bytes + 5000, 5000, self->size - 100) == 5000);
		ASSERT_TRUE(!memcmp(bytes, bytes + 5000, 5000));
		/* Nothing is written beyond the new end. */
		ASSERT_TRUE(!ftruncate(self->memory, self->size + 9000));
		ASSERT_TRUE(pread(self->memory, bytes + 5000, 9000, self->size) == 9000);
		ASSERT_TRUE(!memcmp(bytes + 100, bytes + 5000, 4900) && !bytes[9900] &&
			    !memcmp(bytes + 9900, bytes + 9901, 4099));
		ASSERT_TRUE(!ftruncate(self->memory, self->size));
	} else {
		ASSERT_TRUE(copy(file, 0, self->memory, self->size - 100, 5000) == 100);
		refused(ENOSPC, copy(file, 0, self->memory, self->size, 1));
		refused(ENOSPC, copy(file, 0, self->memory, self->size + MIB, 1));
	}
	memcpy(self->model + self->size - 100, bytes, 100);
	compare();
	ASSERT_TRUE(copy(self->memory, self->size - 100, file, 0, 5000) == 100);
	ASSERT_TRUE(copy(self->memory, self->size, file, 0, 5000) == 0);
	/* Without an offset the file position is used and updated. */
	ASSERT_TRUE(lseek(file, pos, SEEK_SET) == pos && !lseek(self->memory, 0, SEEK_SET));
	ASSERT_TRUE(copy_file_range(file, NULL, self->memory, NULL, 60, 0) == 60);
	ASSERT_TRUE(copy_file_range(file, NULL, self->memory, NULL, 60, 0) == 40);
	ASSERT_TRUE(lseek(file, 0, SEEK_CUR) == FILE_SIZE);
	memcpy(self->model, bytes + FILE_SIZE - 100, 100);
	compare();
	close(file);
	free(bytes);
}

/* Submits an asynchronous write. */
static int submit(int fd)
{
	struct iocb iocb = {
		.aio_fildes = fd, .aio_lio_opcode = IOCB_CMD_PWRITE,
		.aio_buf = (uintptr_t)"x", .aio_nbytes = 1,
	};
	struct iocb *all[] = { &iocb };
	aio_context_t context = 0;
	int ret, error;

	if (syscall(SYS_io_setup, 1, &context))
		return 0;
	ret = syscall(SYS_io_submit, context, 1, all);
	error = errno;
	syscall(SYS_io_destroy, context);
	errno = error;
	return ret;
}

/* Other invalid copies fail with the same errors as before. */
COPY_MEMORY(refusals)
{
	int file = make("0123456789", 10, O_RDWR), wrong, fds[2];

	refused(EINVAL, copy_file_range(file, NULL, self->memory, NULL, 1, 1));
	refused(EOVERFLOW, copy(file, 10, self->memory, 0, SIZE_MAX));
	refused(EOVERFLOW, copy(self->memory, 0, file, 10, SIZE_MAX));
	refused(EINVAL, copy(file, -1, self->memory, 0, 0));
	refused(EINVAL, copy(self->memory, -1, file, 0, 0));
	wrong = open(PATH, O_WRONLY | O_CLOEXEC);
	refused(EBADF, copy(wrong, 0, self->memory, 0, 1));
	close(wrong);
	wrong = open(PATH, O_RDONLY | O_CLOEXEC);
	refused(EBADF, copy(self->memory, 0, wrong, 0, 1));
	close(wrong);
	wrong = open(PATH, O_WRONLY | O_APPEND | O_CLOEXEC);
	refused(EBADF, copy(self->memory, 0, wrong, 0, 1));
	close(wrong);
	wrong = open(PATH, O_PATH | O_CLOEXEC);
	refused(EBADF, copy(wrong, 0, self->memory, 0, 1));
	close(wrong);
	wrong = open(".", O_RDONLY | O_CLOEXEC);
	refused(EISDIR, copy(wrong, 0, self->memory, 0, 1));
	close(wrong);
	ASSERT_TRUE(!pipe2(fds, O_CLOEXEC));
	refused(EINVAL, copy(fds[0], 0, self->memory, 0, 1));
	refused(EINVAL, copy(self->memory, 0, fds[1], 0, 1));
	close(fds[0]);
	close(fds[1]);
	/* A regular file without a meaningful size. */
	wrong = open("/proc/self/status", O_RDONLY | O_CLOEXEC);
	refused(is_dmabuf(variant->kind) ? EINVAL : EXDEV, copy(wrong, 0, self->memory, 0, 1));
	close(wrong);
	/* Between two memory files. */
	wrong = make_heap_buffer(page, O_RDWR);
	refused(EINVAL, copy(wrong, 0, self->memory, 0, 1));
	refused(EINVAL, copy(self->memory, 0, wrong, 0, 1));
	close(wrong);
	if (variant->kind == HUGE_MEMFD) {
		wrong = make_memfd(MEMFD, page);
		refused(EXDEV, copy(wrong, 0, self->memory, 0, 1));
		refused(EXDEV, copy(self->memory, 0, wrong, 0, 1));
		close(wrong);
	}
	if (variant->kind == HEAP) {
		wrong = make_heap_buffer(page, O_RDONLY);
		ASSERT_TRUE(wrong >= 0);
		refused(EBADF, copy(file, 0, wrong, 0, 1));
		ASSERT_TRUE(copy(wrong, 0, file, 0, 1) == 1);
		close(wrong);
	}
	if (variant->kind == MEMFD) {
		char self_path[64];

		snprintf(self_path, sizeof(self_path), "/proc/self/fd/%d", self->memory);
		wrong = open(self_path, O_RDONLY | O_CLOEXEC);
		refused(EBADF, copy(file, 0, wrong, 0, 1));
		close(wrong);
		/* Copies between memfds, which share a file system, work as before. */
		wrong = make_memfd(MEMFD, page);
		ASSERT_TRUE(pwrite(wrong, "uvwxyz", 6, 0) == 6);
		ASSERT_TRUE(copy(wrong, 1, self->memory, 5000, 4) == 4);
		memcpy(self->model + 5000, "vwxy", 4);
		close(wrong);
		/* So do copies within one file. */
		ASSERT_TRUE(pwrite(self->memory, "abcdef", 6, 0) == 6);
		ASSERT_TRUE(copy(self->memory, 0, self->memory, 3, 3) == 3);
		refused(EINVAL, copy(self->memory, 0, self->memory, 1, 3));
		memcpy(self->model, "abcabc", 6);
	}
	if (is_dmabuf(variant->kind)) {
		refused(EINVAL, write(self->memory, "x", 1));
		refused(ESPIPE, pwrite(self->memory, "x", 1, 0));
		refused(EINVAL, write(self->memory, NULL, 0));
		refused(EINVAL, submit(self->memory));
		refused(EINVAL, copy(self->memory, 0, self->memory, page, 1));
	}
	close(file);
	/* The rest of the memory is unchanged. */
	compare();
}

COPY_MEMORY(immutable)
{
	int file = make("0123456789", 10, O_RDWR), flags, marked, failed, error;

	if (geteuid() || ioctl(file, FS_IOC_GETFLAGS, &flags))
		SKIP(return, "inode flags are not supported, or not root");
	marked = flags | FS_IMMUTABLE_FL;
	if (ioctl(file, FS_IOC_SETFLAGS, &marked))
		SKIP(return, "FS_IMMUTABLE_FL: %s", strerror(errno));
	failed = copy(self->memory, 0, file, 0, 1);
	error = errno;
	ASSERT_TRUE(copy(file, 0, self->memory, 0, 10) == 10);
	ASSERT_TRUE(!ioctl(file, FS_IOC_SETFLAGS, &flags));
	ASSERT_TRUE(failed == -1 && error == EPERM);
	close(file);
}

COPY_MEMORY(seals)
{
	char *bytes = malloc(2 * page);
	int file, memory;

	if (variant->kind != MEMFD && variant->kind != HUGE_MEMFD)
		return;
	munmap(self->map, self->size);
	self->map = NULL;
	scramble(bytes, 2 * page, 8);
	file = make(bytes, 2 * page, O_RDWR | variant->direct);
	if (file < 0)
		SKIP(return, "O_DIRECT is not supported");
	memory = self->memory;
	ASSERT_TRUE(!fcntl(memory, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK));
	refused(variant->kind == MEMFD ? EPERM : ENOSPC, copy(file, 0, memory, self->size, 1));
	if (variant->kind == MEMFD)
		refused(EPERM, copy(file, 0, memory, self->size - 1, 2));
	ASSERT_TRUE(copy(file, 0, memory, self->size - page, page) == (ssize_t)page);
	/* After the copy, the memory can be sealed. */
	ASSERT_TRUE(!fcntl(memory, F_ADD_SEALS, F_SEAL_FUTURE_WRITE));
	refused(EPERM, copy(file, 0, memory, 0, 1));
	ASSERT_TRUE(!fcntl(memory, F_ADD_SEALS, F_SEAL_WRITE));
	refused(EPERM, copy(file, 0, memory, 0, 1));
	/* It can still be read. */
	ASSERT_TRUE(copy(memory, self->size - page, file, page, page) == (ssize_t)page);
	ASSERT_TRUE(pread(memory, bytes + page, page, self->size - page) == (ssize_t)page);
	ASSERT_TRUE(!memcmp(bytes, bytes + page, page));
	close(file);
	free(bytes);
}

/* A copy that fails does not update the access time. */
COPY_MEMORY(times)
{
	int file = make("0123456789", 10, O_RDONLY);
	struct stat before, after;

	if (variant->kind != MEMFD && variant->kind != HUGE_MEMFD)
		return;
	ASSERT_TRUE(!fstat(self->memory, &before));
	/* Timestamps are coarse. */
	usleep(50000);
	refused(EBADF, copy(self->memory, 0, file, 0, 1));
	ASSERT_TRUE(copy(self->memory, self->size, file, 0, 0) == -1 && errno == EBADF);
	ASSERT_TRUE(!fstat(self->memory, &after));
	ASSERT_TRUE(!memcmp(&before.st_atim, &after.st_atim, sizeof(before.st_atim)));
	close(file);
	/* A successful copy does. */
	file = make("0123456789", 10, O_RDWR);
	ASSERT_TRUE(copy(self->memory, 0, file, 0, 1) == 1);
	ASSERT_TRUE(!fstat(self->memory, &after));
	ASSERT_TRUE(memcmp(&before.st_atim, &after.st_atim, sizeof(before.st_atim)));
	close(file);
}

/* The data survives closing the udmabuf, and reclaim. */
COPY_MEMORY(stays)
{
	char *bytes = malloc(FILE_SIZE), *map;
	int file;

	if (self->memfd < 0)
		return;
	scramble(bytes, FILE_SIZE, 13);
	file = make(bytes, FILE_SIZE, O_RDONLY | variant->direct);
	if (file < 0)
		SKIP(return, "O_DIRECT is not supported");
	ASSERT_TRUE(copy(file, 0, self->memory, 0, FILE_SIZE) == FILE_SIZE);
	munmap(self->map, self->size);
	self->map = NULL;
	close(self->memory);
	self->memory = -1;
	map = mmap(NULL, self->size, PROT_READ, MAP_SHARED, self->memfd, 0);
	ASSERT_TRUE(map != MAP_FAILED);
	/* MADV_PAGEOUT reclaims only mapped pages. */
	ASSERT_TRUE(!memcmp(map, bytes, FILE_SIZE));
	madvise(map, self->size, MADV_PAGEOUT);
	ASSERT_TRUE(!memcmp(map, bytes, FILE_SIZE));
	munmap(map, self->size);
	close(file);
	free(bytes);
}

/* Memory that was allocated with fallocate() is zero, except where data is copied to it. */
COPY_MEMORY(fallocated)
{
	char *bytes = malloc(FILE_SIZE), *seen = malloc(self->size);
	int memfd, memory, file;

	if (variant->kind == HEAP)
		return;
	scramble(bytes, FILE_SIZE, 14);
	file = make(bytes, FILE_SIZE, O_RDWR | variant->direct);
	if (file < 0)
		SKIP(return, "O_DIRECT is not supported");
	memfd = make_memfd(variant->kind, self->size);
	ASSERT_TRUE(memfd >= 0 && !fallocate(memfd, 0, 0, self->size));
	memory = is_dmabuf(variant->kind) ? make_udmabuf(memfd, self->size) : dup(memfd);
	ASSERT_TRUE(memory >= 0);
	ASSERT_TRUE(copy(file, 5000, memory, 5000, 100000) == 100000);
	ASSERT_TRUE(pread(memfd, seen, self->size, 0) == self->size);
	memcpy(self->model + 5000, bytes + 5000, 100000);
	ASSERT_TRUE(!memcmp(seen, self->model, self->size));
	ASSERT_TRUE(copy(memory, 0, file, 0, FILE_SIZE) == FILE_SIZE);
	ASSERT_TRUE(pread(open(PATH, O_RDONLY | O_CLOEXEC), seen, FILE_SIZE, 0) == FILE_SIZE);
	ASSERT_TRUE(!memcmp(seen, self->model, FILE_SIZE));
	close(memory);
	close(memfd);
	close(file);
	free(bytes);
	free(seen);
}

/* If tmpfs is full, the file ends after the last byte copied. */
COPY_MEMORY(full)
{
	char *bytes = malloc(FILE_SIZE), *seen = malloc(2 * MIB);
	int file, full;
	struct stat stat;
	ssize_t got;

	if (variant->kind != MEMFD)
		return;
	scramble(bytes, FILE_SIZE, 15);
	file = make(bytes, FILE_SIZE, O_RDONLY | variant->direct);
	if (file < 0)
		SKIP(return, "O_DIRECT is not supported");
	mkdir(FULL, 0700);
	if (mount("tmpfs", FULL, "tmpfs", 0, "size=1M"))
		SKIP(return, "mount: %s", strerror(errno));
	full = open(FULL "/file", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	umount2(FULL, MNT_DETACH);
	rmdir(FULL);
	ASSERT_TRUE(full >= 0);
	/* Two different file systems, although both are tmpfs. */
	refused(EXDEV, copy(self->memory, 0, full, 0, 1));
	got = copy(file, 0, full, 5, FILE_SIZE);
	ASSERT_TRUE(got > 0 && got <= MIB);
	ASSERT_TRUE(!fstat(full, &stat) && stat.st_size == got + 5);
	ASSERT_TRUE(pread(full, seen, 2 * MIB, 0) == got + 5 && !memcmp(seen + 5, bytes, got));
	refused(EXDEV, copy(full, 0, self->memory, 0, 1));
	/* Unused space has been freed. */
	ASSERT_TRUE(!ftruncate(full, 0) && !fallocate(full, 0, 0, MIB));
	refused(ENOSPC, copy(file, 0, full, 3 * MIB, MIB));
	ASSERT_TRUE(!fstat(full, &stat) && stat.st_size == MIB);
	close(full);
	close(file);
	free(bytes);
	free(seen);
}

static void on_signal(int signal)
{
}

COPY_MEMORY(limits)
{
	struct rlimit before, limit;
	char *bytes = malloc(FILE_SIZE);
	struct stat stat;
	int file;

	scramble(bytes, FILE_SIZE, 9);
	file = make(bytes, FILE_SIZE, O_RDWR | variant->direct);
	if (file < 0)
		SKIP(return, "O_DIRECT is not supported");
	signal(SIGXFSZ, on_signal);
	ASSERT_TRUE(!getrlimit(RLIMIT_FSIZE, &before));
	limit = before;
	limit.rlim_cur = FILE_SIZE + 5;
	ASSERT_TRUE(!setrlimit(RLIMIT_FSIZE, &limit));
	ASSERT_TRUE(copy(self->memory, 0, file, FILE_SIZE, 100) == 5);
	refused(EFBIG, copy(self->memory, 0, file, FILE_SIZE + 5, 100));
	ASSERT_TRUE(!fstat(file, &stat) && stat.st_size == FILE_SIZE + 5);
	limit.rlim_cur = page;
	ASSERT_TRUE(!setrlimit(RLIMIT_FSIZE, &limit));
	if (is_dmabuf(variant->kind)) {
		/* A dma-buf has a fixed size, so the limit does not apply. */
		ASSERT_TRUE(copy(file, 0, self->memory, page, page) == (ssize_t)page);
	} else {
		refused(EFBIG, copy(file, 0, self->memory, page, page));
		ASSERT_TRUE(copy(file, 0, self->memory, page - 1, page) == 1);
	}
	ASSERT_TRUE(!setrlimit(RLIMIT_FSIZE, &before));
	close(file);
	free(bytes);
}

/* A signal ends a long copy early. */
COPY_MEMORY(signals)
{
	struct itimerval soon = { .it_value.tv_usec = 1000, .it_interval.tv_usec = 1000 };
	struct itimerval never = { };
	int file = open(PATH, O_RDWR | O_CREAT | O_CLOEXEC | variant->direct, 0600);
	ssize_t done;

	if (variant->kind != MEMFD)
		/* Only a memfd is large enough. */
		return;
	if (file < 0)
		SKIP(return, "O_DIRECT is not supported");
	ASSERT_TRUE(!ftruncate(file, PART + MIB));
	signal(SIGALRM, on_signal);
	ASSERT_TRUE(!setitimer(ITIMER_REAL, &soon, NULL));
	done = copy(file, 0, self->memory, 0, PART + MIB);
	ASSERT_TRUE(!setitimer(ITIMER_REAL, &never, NULL));
	ASSERT_TRUE(done == PART);
	close(file);
}

/* The interface of drivers/dma-buf/sw_sync.c: fences signalled by user space */
struct sw_sync_create_fence_data {
	__u32 value;
	char name[32];
	__s32 fence;
};

#define SW_SYNC_IOC_CREATE_FENCE	_IOWR('W', 0, struct sw_sync_create_fence_data)
#define SW_SYNC_IOC_INC			_IOW('W', 1, __u32)

/* Adds a fence like that of a device which accesses the buffer until @timeline reaches @value. */
static int busy(int timeline, __u32 value, int buffer, __u32 access)
{
	struct sw_sync_create_fence_data data = { .value = value };
	struct dma_buf_import_sync_file import = { .flags = access };
	int failed = ioctl(timeline, SW_SYNC_IOC_CREATE_FENCE, &data);

	import.fd = data.fence;
	failed = failed || ioctl(buffer, DMA_BUF_IOCTL_IMPORT_SYNC_FILE, &import);
	close(data.fence);
	return failed;
}

static void on_alarm(int signal)
{
}

/* Starts or stops periodic signals, which interrupt a waiting system call. */
static void alarms(bool begin)
{
	struct itimerval often = { .it_value.tv_usec = 10000, .it_interval.tv_usec = 10000 };
	struct sigaction action = { .sa_handler = on_alarm };

	if (!begin)
		often = (struct itimerval) { };
	sigaction(SIGALRM, &action, NULL);
	setitimer(ITIMER_REAL, &often, NULL);
}

#define waits(call)								\
	do {									\
		int failed;							\
										\
		alarms(true);							\
		failed = (call) == -1 && errno == EINTR;			\
		alarms(false);							\
		ASSERT_TRUE(failed);						\
	} while (0)

/* A copy from a buffer waits for devices that write to it, but not for those that read it. */
COPY_MEMORY(fences)
{
	char *bytes = calloc(1, FILE_SIZE);
	int file, timeline;
	__u32 one = 1;

	if (!is_dmabuf(variant->kind))
		return;
	file = make(bytes, FILE_SIZE, O_RDWR | variant->direct);
	if (file < 0)
		SKIP(return, "O_DIRECT is not supported");
	timeline = open(SW_SYNC, O_RDWR | O_CLOEXEC);
	if (timeline < 0)
		SKIP(return, "%s: %s", SW_SYNC, strerror(errno));
	ASSERT_TRUE(!busy(timeline, 1, self->memory, DMA_BUF_SYNC_READ));
	ASSERT_TRUE(copy(self->memory, 0, file, 0, FILE_SIZE) == FILE_SIZE);
	waits(copy(file, 0, self->memory, 0, FILE_SIZE));
	ASSERT_TRUE(!busy(timeline, 2, self->memory, DMA_BUF_SYNC_WRITE));
	waits(copy(self->memory, 0, file, 0, FILE_SIZE));
	ASSERT_TRUE(!ioctl(timeline, SW_SYNC_IOC_INC, &one));
	waits(copy(self->memory, 0, file, 0, FILE_SIZE));
	ASSERT_TRUE(!ioctl(timeline, SW_SYNC_IOC_INC, &one));
	ASSERT_TRUE(copy(self->memory, 0, file, 0, FILE_SIZE) == FILE_SIZE);
	ASSERT_TRUE(copy(file, 0, self->memory, 0, FILE_SIZE) == FILE_SIZE);
	compare();
	close(timeline);
	close(file);
	free(bytes);
}

struct splicer {
	int pipe, buffer, error;
	ssize_t got;
	pid_t tid;
	bool over;
};

static void *splices(void *argument)
{
	struct splicer *splicer = argument;

	__atomic_store_n(&splicer->tid, gettid(), __ATOMIC_RELEASE);
	splicer->got = splice(splicer->pipe, NULL, splicer->buffer, NULL, page, 0);
	splicer->error = errno;
	__atomic_store_n(&splicer->over, true, __ATOMIC_RELEASE);
	return NULL;
}

static bool sleeps(pid_t tid)
{
	char path[64], text[256] = "";
	int fd;

	snprintf(path, sizeof(path), "/proc/self/task/%d/stat", tid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || read(fd, text, sizeof(text) - 1) < 0)
		text[0] = 0;
	close(fd);
	return strstr(text, ") S ");
}

/*
 * splice() starts the access to the buffer only when the pipe has data. So it waits for a fence
 * that was added while the pipe was empty.
 */
COPY_MEMORY(empty_pipe)
{
	struct sigaction action = { .sa_handler = on_alarm };
	struct splicer splicer = { .buffer = self->memory };
	char *bytes = malloc(page);
	int timeline, fds[2], i, left;
	pthread_t thread;
	__u32 one = 1;

	if (!is_dmabuf(variant->kind))
		return;
	timeline = open(SW_SYNC, O_RDWR | O_CLOEXEC);
	if (timeline < 0)
		SKIP(return, "%s: %s", SW_SYNC, strerror(errno));
	scramble(bytes, page, 16);
	ASSERT_TRUE(!sigaction(SIGALRM, &action, NULL) && !pipe2(fds, O_CLOEXEC));
	splicer.pipe = fds[0];
	ASSERT_TRUE(!pthread_create(&thread, NULL, splices, &splicer));
	while (!__atomic_load_n(&splicer.tid, __ATOMIC_ACQUIRE) || !sleeps(splicer.tid))
		usleep(1000);
	ASSERT_TRUE(!busy(timeline, 1, self->memory, DMA_BUF_SYNC_WRITE));
	ASSERT_TRUE(write(fds[1], bytes, page) == (ssize_t)page);
	/* Allow enough time for an incorrect splice() to finish. */
	for (i = 0; i < 1000 && !__atomic_load_n(&splicer.over, __ATOMIC_ACQUIRE); i++)
		usleep(1000);
	while (!__atomic_load_n(&splicer.over, __ATOMIC_ACQUIRE)) {
		pthread_kill(thread, SIGALRM);
		usleep(1000);
	}
	pthread_join(thread, NULL);
	ASSERT_TRUE(splicer.got == -1 && splicer.error == EINTR);
	ASSERT_TRUE(!ioctl(fds[0], FIONREAD, &left) && left == (int)page);
	/* DMA_BUF_IOCTL_SYNC would wait for the fence. */
	ASSERT_TRUE(!memcmp(self->map, self->model, self->size));
	ASSERT_TRUE(!ioctl(timeline, SW_SYNC_IOC_INC, &one));
	ASSERT_TRUE(splice(fds[0], NULL, self->memory, NULL, page, 0) == (ssize_t)page);
	memcpy(self->model, bytes, page);
	compare();
	/* An empty pipe, with and without a writer */
	refused(EAGAIN, splice(fds[0], NULL, self->memory, NULL, page, SPLICE_F_NONBLOCK));
	close(fds[1]);
	ASSERT_TRUE(!splice(fds[0], NULL, self->memory, NULL, page, 0));
	close(fds[0]);
	close(timeline);
	free(bytes);
}

struct toggler {
	int fd, flags;
	bool stop;
};

static void *toggles(void *argument)
{
	struct toggler *toggler = argument;

	while (!__atomic_load_n(&toggler->stop, __ATOMIC_RELAXED)) {
		fcntl(toggler->fd, F_SETFL, toggler->flags | O_APPEND);
		fcntl(toggler->fd, F_SETFL, toggler->flags);
	}
	return NULL;
}

/* Setting O_APPEND during a copy does not redirect it. */
COPY_MEMORY(flags)
{
	char *bytes = malloc(FILE_SIZE);
	struct toggler toggler = { };
	pthread_t thread;
	struct stat stat;
	int i;

	scramble(bytes, FILE_SIZE, 17);
	toggler.fd = make(bytes, FILE_SIZE, O_RDWR | variant->direct);
	if (toggler.fd < 0)
		SKIP(return, "O_DIRECT is not supported");
	toggler.flags = fcntl(toggler.fd, F_GETFL);
	ASSERT_TRUE(!pthread_create(&thread, NULL, toggles, &toggler));
	for (i = 0; i < 20; i++) {
		ssize_t got = copy(self->memory, 0, toggler.fd, 0, FILE_SIZE);

		ASSERT_TRUE(got == FILE_SIZE || (got == -1 && errno == EBADF));
		ASSERT_TRUE(!fstat(toggler.fd, &stat) && stat.st_size == FILE_SIZE);
	}
	__atomic_store_n(&toggler.stop, true, __ATOMIC_RELAXED);
	pthread_join(thread, NULL);
	close(toggler.fd);
	free(bytes);
}

/*
 * Copies between two files of one overlay, with the lower layer on the disk and the upper layer on
 * tmpfs, fail, because overlayfs holds a lock.
 */
COPY_MEMORY(one_overlay)
{
	char *bytes = malloc(FILE_SIZE), *seen = malloc(FILE_SIZE);
	int source, target;
	struct stat stat;

	if (variant->kind != MEMFD)
		return;
	scramble(bytes, FILE_SIZE, 18);
	mkdir(LOWER, 0700);
	mkdir(UPPER, 0700);
	mkdir(OVERLAY, 0700);
	source = made(_metadata, LOWER "/source", bytes, FILE_SIZE, O_RDONLY);
	close(source);
	if (mount("tmpfs", UPPER, "tmpfs", 0, NULL))
		SKIP(return, "mount: %s", strerror(errno));
	mkdir(UPPER "/upper", 0700);
	mkdir(UPPER "/work", 0700);
	if (mount("overlay", OVERLAY, "overlay", 0,
		  "lowerdir=" LOWER ",upperdir=" UPPER "/upper,workdir=" UPPER "/work"))
		SKIP(return, "mount: %s", strerror(errno));
	source = open(OVERLAY "/source", O_RDONLY | O_CLOEXEC | variant->direct);
	target = open(OVERLAY "/target", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	umount2(OVERLAY, MNT_DETACH);
	umount2(UPPER, MNT_DETACH);
	unlink(LOWER "/source");
	rmdir(LOWER);
	rmdir(UPPER);
	rmdir(OVERLAY);
	if (source < 0)
		SKIP(return, "O_DIRECT is not supported");
	ASSERT_TRUE(target >= 0);
	refused(EXDEV, copy(source, 0, target, 0, FILE_SIZE));
	ASSERT_TRUE(!fstat(target, &stat) && !stat.st_size);
	/* Copies between these files and other memory files work. */
	ASSERT_TRUE(copy(source, 0, self->memory, 0, FILE_SIZE) == FILE_SIZE);
	memcpy(self->model, bytes, FILE_SIZE);
	compare();
	ASSERT_TRUE(copy(self->memory, 5, target, 0, FILE_SIZE - 5) == FILE_SIZE - 5);
	ASSERT_TRUE(pread(target, seen, FILE_SIZE, 0) == FILE_SIZE - 5);
	ASSERT_TRUE(!memcmp(seen, bytes + 5, FILE_SIZE - 5));
	close(source);
	close(target);
	free(bytes);
	free(seen);
}

/* sendfile() and splice() into a buffer use and update its file position. */
COPY_MEMORY(sendfile)
{
	char *bytes = malloc(FILE_SIZE);
	off_t pos = 3;
	int file, fds[2];
	size_t done;

	if (!is_dmabuf(variant->kind))
		return;
	scramble(bytes, FILE_SIZE, 10);
	file = make(bytes, FILE_SIZE, O_RDONLY | variant->direct);
	if (file < 0)
		SKIP(return, "O_DIRECT is not supported");
	if (variant->direct)
		pos = 4096;
	for (done = 0; pos < FILE_SIZE; ) {
		ssize_t got = sendfile(self->memory, file, &pos, FILE_SIZE);

		ASSERT_TRUE(got > 0);
		memcpy(self->model + done, bytes + pos - got, got);
		done += got;
	}
	compare();
	/* From a pipe */
	ASSERT_TRUE(!pipe2(fds, O_CLOEXEC) && write(fds[1], bytes, 5000) == 5000);
	ASSERT_TRUE(splice(fds[0], NULL, self->memory, NULL, 5000, 0) == 5000);
	memcpy(self->model + done, bytes, 5000);
	done += 5000;
	compare();
	/* Up to the end of the buffer */
	while (done < (size_t)self->size) {
		ssize_t got;

		pos = 0;
		got = sendfile(self->memory, file, &pos, FILE_SIZE);
		ASSERT_TRUE(got > 0);
		memcpy(self->model + done, bytes, got);
		done += got;
	}
	ASSERT_TRUE(done == (size_t)self->size);
	compare();
	pos = 0;
	refused(ENOSPC, sendfile(self->memory, file, &pos, FILE_SIZE));
	close(fds[0]);
	close(fds[1]);
	close(file);
	free(bytes);
}

/* Copies in opposite directions while another thread truncates and punches holes */
struct worker {
	int in, out;
	bool failed;
};

#define ROUNDS	40

static void *copies(void *argument)
{
	struct worker *worker = argument;
	int i;

	for (i = 0; i < ROUNDS; i++) {
		ssize_t got = copy(worker->in, 0, worker->out, 0, FILE_SIZE);

		if (got < 0 && errno != ENOSPC)
			worker->failed = true;
	}
	return NULL;
}

static void *disturbs(void *argument)
{
	struct worker *worker = argument;
	struct stat stat;
	int i;

	if (fstat(worker->out, &stat))
		worker->failed = true;
	for (i = 0; i < ROUNDS; i++) {
		/* Not all kinds of memory support this. */
		fallocate(worker->out, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, HUGE_PAGE);
		if (!ftruncate(worker->out, i % 3 * 3 * page) &&
		    ftruncate(worker->out, stat.st_size))
			worker->failed = true;
	}
	return NULL;
}

COPY_MEMORY(crossing)
{
	char *bytes = malloc(FILE_SIZE);
	struct worker workers[4];
	pthread_t threads[4];
	int a, b, i;

	scramble(bytes, FILE_SIZE, 11);
	a = made(_metadata, PATH, bytes, FILE_SIZE, O_RDWR | variant->direct);
	b = made(_metadata, OTHER, bytes, FILE_SIZE, O_RDWR | variant->direct);
	if (a < 0 || b < 0)
		SKIP(return, "O_DIRECT is not supported");
	workers[0] = (struct worker) { a, self->memory };
	workers[1] = (struct worker) { self->memory, b };
	workers[2] = (struct worker) { a, variant->kind == HEAP ? b : self->memfd };
	workers[3] = (struct worker) { self->memory, a };
	for (i = 0; i < 4; i++)
		ASSERT_TRUE(!pthread_create(&threads[i], NULL, i == 2 ? disturbs : copies,
					    &workers[i]));
	for (i = 0; i < 4; i++)
		ASSERT_TRUE(!pthread_join(threads[i], NULL) && !workers[i].failed);
	close(a);
	/* Then everything works as before. */
	a = make(bytes, FILE_SIZE, O_RDONLY | variant->direct);
	ASSERT_TRUE(copy(a, 0, self->memory, 0, FILE_SIZE) == FILE_SIZE);
	ASSERT_TRUE(copy(self->memory, 0, b, 0, FILE_SIZE) == FILE_SIZE);
	memset(bytes, 0, FILE_SIZE);
	close(b);
	b = open(OTHER, O_RDONLY | O_CLOEXEC);
	ASSERT_TRUE(pread(b, bytes, FILE_SIZE, 0) == FILE_SIZE);
	scramble(self->model, FILE_SIZE, 11);
	ASSERT_TRUE(!memcmp(bytes, self->model, FILE_SIZE));
	close(a);
	close(b);
	free(bytes);
}

/* A task that is killed during a copy leaves no lock behind. */
COPY_MEMORY(killed)
{
	char *bytes = malloc(FILE_SIZE);
	int file, i, status;

	scramble(bytes, FILE_SIZE, 12);
	file = make(bytes, FILE_SIZE, O_RDWR | variant->direct);
	if (file < 0)
		SKIP(return, "O_DIRECT is not supported");
	for (i = 0; i < 20; i++) {
		pid_t child = fork();

		ASSERT_TRUE(child >= 0);
		if (!child) {
			for (;;) {
				copy(file, 0, self->memory, i, FILE_SIZE);
				copy(self->memory, i, file, 0, FILE_SIZE);
			}
		}
		usleep(1000 * i);
		ASSERT_TRUE(!kill(child, SIGKILL));
		ASSERT_TRUE(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
	}
	close(file);
	file = make(bytes, FILE_SIZE, O_RDONLY | variant->direct);
	ASSERT_TRUE(copy(file, 0, self->memory, 0, FILE_SIZE) == FILE_SIZE);
	sync_for_cpu(DMA_BUF_SYNC_START);
	status = memcmp(self->map, bytes, FILE_SIZE);
	sync_for_cpu(DMA_BUF_SYNC_END);
	ASSERT_TRUE(!status);
	close(file);
	free(bytes);
}

TEST_HARNESS_MAIN
