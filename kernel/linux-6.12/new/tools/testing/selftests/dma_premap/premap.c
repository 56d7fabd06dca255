// SPDX-License-Identifier: GPL-2.0
/*
 * Tests pre-mapped buffers of io_uring.  Usage: premap PATH [MODE]
 *
 * PATH is an NVMe disk, whose contents are overwritten, or a directory on ext4 or
 * XFS.  MODE is one of:
 *
 * refused	the disk must reject pre-mapping; ordinary requests must work
 * bounce	the same for dma-bufs only (nvme.premap_bounce=1)
 * life		only reset, format and remove the disk
 * suspend	only suspend the disk
 * failures	only inject failures of allocations and requests
 *
 * The result of READ_FIXED is compared with that of pread(), the data that
 * WRITE_FIXED has written to the disk with the buffer, and the bytes around both
 * with their previous values.
 */
#define _GNU_SOURCE
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/blkpg.h>
#include <linux/dma-heap.h>
#include <linux/fs.h>
#include <linux/io_uring.h>
#include <linux/nvme_ioctl.h>
#include <linux/udmabuf.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../kselftest_harness.h"

/* From linux/io_uring.h, which may be older than the kernel */
#define UPDATE_EXTENDED	0x2U
#define PREMAP		0x80000000U
#define TARGET_FIXED	0x40000000U
#define CLONE_BUFFERS	30

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

#define DEPTH	64
#define SLOTS	4
#define SECTOR	512
#define PAGE	4096
#define DISK	(16U << 20)		/* the part of the disk that the tests use */
#define BUFFER	(6U << 20)
/* Timeout of a test in seconds; long, for emulation on a busy machine */
#define LONG	3600

struct ring {
	int fd;
	struct io_uring_sqe *sqes;
	unsigned int *sq_head, *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
	struct io_uring_cqe *cqes;
};

static const char *disk_path;
static enum { ALL, REFUSED, BOUNCE, LIFE, SUSPEND, FAILURES } mode;
/* The path is a file, not a disk */
static bool file;
/* Flags for all requests */
static unsigned int sqe_flags;

static int ring_make(struct ring *r, unsigned int flags)
{
	struct io_uring_params p = { .flags = flags };
	char *sq, *cq;

	r->fd = syscall(SYS_io_uring_setup, DEPTH, &p);
	if (r->fd < 0)
		return -errno;
	sq = mmap(NULL, p.sq_off.array + p.sq_entries * sizeof(unsigned int),
		  PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, r->fd,
		  IORING_OFF_SQ_RING);
	cq = mmap(NULL, p.cq_off.cqes + p.cq_entries * sizeof(*r->cqes),
		  PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, r->fd,
		  IORING_OFF_CQ_RING);
	r->sqes = mmap(NULL, p.sq_entries * sizeof(*r->sqes),
		       PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, r->fd,
		       IORING_OFF_SQES);
	if (sq == MAP_FAILED || cq == MAP_FAILED || r->sqes == MAP_FAILED)
		return -ENOMEM;
	r->sq_head = (void *)(sq + p.sq_off.head);
	r->sq_tail = (void *)(sq + p.sq_off.tail);
	r->sq_mask = (void *)(sq + p.sq_off.ring_mask);
	r->sq_array = (void *)(sq + p.sq_off.array);
	r->cq_head = (void *)(cq + p.cq_off.head);
	r->cq_tail = (void *)(cq + p.cq_off.tail);
	r->cq_mask = (void *)(cq + p.cq_off.ring_mask);
	r->cqes = (void *)(cq + p.cq_off.cqes);
	return 0;
}

static int ring_register(struct ring *r, unsigned int opcode, void *arg,
			 unsigned int nr)
{
	int ret = syscall(SYS_io_uring_register, r->fd, opcode, arg, nr);

	return ret < 0 ? -errno : ret;
}

static int set(struct ring *r, unsigned int slot, const struct desc *descs,
	       unsigned int nr)
{
	struct update up = {
		.offset = slot, .flags = UPDATE_EXTENDED,
		.data = (uintptr_t)descs, .nr = nr,
	};

	return ring_register(r, IORING_REGISTER_BUFFERS_UPDATE, &up, sizeof(up));
}

static int set_one(struct ring *r, unsigned int slot, struct desc desc)
{
	return set(r, slot, &desc, 1);
}

static void queue(struct ring *r, struct io_uring_sqe sqe)
{
	unsigned int tail = *r->sq_tail;

	r->sqes[tail & *r->sq_mask] = sqe;
	r->sq_array[tail & *r->sq_mask] = tail & *r->sq_mask;
	__atomic_store_n(r->sq_tail, tail + 1, __ATOMIC_RELEASE);
}

static int enter(struct ring *r, unsigned int submit, unsigned int wait)
{
	/* The latter matters only for rings with a submission thread. */
	int ret = syscall(SYS_io_uring_enter, r->fd, submit, wait,
			  IORING_ENTER_GETEVENTS | IORING_ENTER_SQ_WAKEUP,
			  NULL, 0);

	if (ret < 0)
		return -errno;
	while (__atomic_load_n(r->sq_head, __ATOMIC_ACQUIRE) != *r->sq_tail)
		sched_yield();
	return ret;
}

/* Returns the result of the next completion, and its user_data in @data unless that is NULL */
static int reap(struct ring *r, __u64 *data)
{
	unsigned int head = *r->cq_head;
	struct io_uring_cqe *cqe;
	int res;

	while (head == __atomic_load_n(r->cq_tail, __ATOMIC_ACQUIRE))
		enter(r, 0, 1);
	cqe = &r->cqes[head & *r->cq_mask];
	res = cqe->res;
	if (data)
		*data = cqe->user_data;
	__atomic_store_n(r->cq_head, head + 1, __ATOMIC_RELEASE);
	return res;
}

static int transfer(struct ring *r, struct io_uring_sqe sqe)
{
	queue(r, sqe);
	enter(r, 1, 1);
	return reap(r, NULL);
}

static struct io_uring_sqe request(unsigned int op, unsigned int slot,
				   uint64_t addr, unsigned int len, uint64_t at)
{
	return (struct io_uring_sqe) {
		.opcode = op, .flags = IOSQE_FIXED_FILE | sqe_flags, .off = at,
		.addr = addr, .len = len, .buf_index = slot,
	};
}

/* Requests on slot 0 */
static int read_fixed(struct ring *r, uint64_t addr, unsigned int len, uint64_t at)
{
	return transfer(r, request(IORING_OP_READ_FIXED, 0, addr, len, at));
}

static int write_fixed(struct ring *r, uint64_t addr, unsigned int len, uint64_t at)
{
	return transfer(r, request(IORING_OP_WRITE_FIXED, 0, addr, len, at));
}

/* The initial 8 bytes of the disk at offset @at */
static uint64_t word(uint64_t at)
{
	uint64_t x = (at / 8 + 1) * 0x9e3779b97f4a7c15;

	return htole64(x ^ x >> 29);
}

/* Fills in the initial data of the disk at @at, in whole words */
static void fill(unsigned char *data, uint64_t at, size_t len)
{
	for (size_t i = 0; i < len; i += 8)
		memcpy(data + i, &(uint64_t){ word(at + i) }, 8);
}

static bool check_disk(const unsigned char *data, uint64_t at, size_t len)
{
	for (size_t i = 0; i < len; i += 8)
		if (memcmp(data + i, &(uint64_t){ word(at + i) }, 8))
			return false;
	return true;
}

static bool check_fill(const unsigned char *data, unsigned char fill, size_t len)
{
	for (size_t i = 0; i < len; i++)
		if (data[i] != fill)
			return false;
	return true;
}

/* Writes to a file in proc, sysfs or tracefs. Returns 0 or an error */
static int put(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_TRUNC | O_CLOEXEC), ret = 0;

	if (fd < 0)
		return -errno;
	if (write(fd, text, strlen(text)) < 0)
		ret = -errno;
	close(fd);
	return ret;
}

static int disk_open(int flags)
{
	return open(disk_path, flags | O_CLOEXEC);
}

/* The name of the disk in sysfs and debugfs */
static const char *disk_name(void)
{
	return strrchr(disk_path, '/') + 1;
}

static int disk_fill(void)
{
	unsigned char *data = mmap(NULL, DISK, PROT_READ | PROT_WRITE,
				   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int fd = disk_open(O_WRONLY | O_DIRECT), ret = -1;

	if (fd < 0 || data == MAP_FAILED)
		return -1;
	fill(data, 0, DISK);
	if (pwrite(fd, data, DISK, 0) == DISK)
		ret = 0;
	munmap(data, DISK);
	close(fd);
	return ret;
}

static int heap_buffer_for(int flags)
{
	struct dma_heap_allocation_data data = {
		.len = BUFFER, .fd_flags = flags | O_CLOEXEC,
	};
	int heap = open("/dev/dma_heap/system", O_RDWR | O_CLOEXEC), ret = -1;

	if (heap >= 0 && !ioctl(heap, DMA_HEAP_IOCTL_ALLOC, &data))
		ret = data.fd;
	close(heap);
	return ret;
}

static int heap_buffer(void)
{
	return heap_buffer_for(O_RDWR);
}

static int udmabuf_buffer(void)
{
	int memfd = memfd_create("premap", MFD_ALLOW_SEALING | MFD_CLOEXEC);
	int dev = open("/dev/udmabuf", O_RDWR | O_CLOEXEC), ret = -1;
	struct udmabuf_create create = { .memfd = memfd, .size = BUFFER };

	if (memfd >= 0 && dev >= 0 && !ftruncate(memfd, BUFFER) &&
	    !fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK))
		ret = ioctl(dev, UDMABUF_CREATE, &create);
	close(memfd);
	close(dev);
	return ret;
}

FIXTURE(premap)
{
	struct ring ring;
	int disk;
	/* Memory to be mapped, and as much that is not */
	unsigned char *mem, *aside;
};

FIXTURE_VARIANT(premap)
{
	/* Flags of the ring and of its requests */
	unsigned int setup, sqe;
	bool huge;
	/* Creates a dma-buf; NULL for memory of this process */
	int (*dmabuf)(void);
};

#define DEFERRED (IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN)

FIXTURE_VARIANT_ADD(premap, pages) {};
FIXTURE_VARIANT_ADD(premap, polled) { .setup = IORING_SETUP_IOPOLL };
FIXTURE_VARIANT_ADD(premap, deferred) { .setup = DEFERRED };
FIXTURE_VARIANT_ADD(premap, thread) { .setup = IORING_SETUP_SQPOLL };
FIXTURE_VARIANT_ADD(premap, workers) { .sqe = IOSQE_ASYNC };
FIXTURE_VARIANT_ADD(premap, huge) { .huge = true };
FIXTURE_VARIANT_ADD(premap, heap) { .dmabuf = heap_buffer };
FIXTURE_VARIANT_ADD(premap, udmabuf) { .dmabuf = udmabuf_buffer };

FIXTURE_SETUP(premap)
{
	struct io_uring_rsrc_register sparse = { .nr = SLOTS, .flags = 1 };
	size_t huge = 2 << 20;

	struct io_uring_sqe sqe = request(IORING_OP_READ, 0, 0, PAGE, 0);

	ASSERT_EQ(0, ring_make(&self->ring, variant->setup));
	sqe_flags = variant->sqe;
	self->disk = disk_open(O_RDWR | O_DIRECT);
	ASSERT_GE(self->disk, 0);
	ASSERT_EQ(0, ring_register(&self->ring, IORING_REGISTER_FILES,
				   &self->disk, 1));
	ASSERT_EQ(0, ring_register(&self->ring, IORING_REGISTER_BUFFERS2,
				   &sparse, sizeof(sparse)));
	self->mem = mmap(NULL, BUFFER + huge, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ASSERT_TRUE(self->mem != MAP_FAILED);
	self->mem += -(uintptr_t)self->mem & (huge - 1);
	madvise(self->mem, BUFFER, variant->huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
	memset(self->mem, 0, BUFFER);
	self->aside = mmap(NULL, BUFFER, PROT_READ | PROT_WRITE,
			   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ASSERT_TRUE(self->aside != MAP_FAILED);
	sqe.addr = (uintptr_t)self->mem;
	if (variant->setup & IORING_SETUP_IOPOLL &&
	    transfer(&self->ring, sqe) == -EOPNOTSUPP)
		SKIP(return, "no poll queues configured");
}

FIXTURE_TEARDOWN(premap)
{
	close(self->ring.fd);
	close(self->disk);
}

/* Describes a new dma-buf, or the memory at @own, mapped for the registered file */
static struct desc describe(int (*dmabuf)(void), unsigned char *own)
{
	if (dmabuf)
		return (struct desc) {
			.type = DMABUF, .flags = TARGET_FIXED, .dmabuf_fd = dmabuf(),
		};
	return (struct desc) {
		.type = UADDR, .flags = PREMAP | TARGET_FIXED,
		.uaddr = (uintptr_t)own, .size = BUFFER - (uintptr_t)own % PAGE,
	};
}

/*
 * Maps the buffer from describe() in slot 0.  Sets @mem to where the CPU can
 * access it, and @addr to its first address in requests.
 */
static int map_buffer(struct ring *r, int (*dmabuf)(void), unsigned char *own,
		      unsigned char **mem, uint64_t *addr)
{
	struct desc desc = describe(dmabuf, own);
	int ret;

	*addr = desc.uaddr;
	*mem = own;
	if (!dmabuf)
		return set_one(r, 0, desc);
	*mem = mmap(NULL, BUFFER, PROT_READ | PROT_WRITE, MAP_SHARED,
		    desc.dmabuf_fd, 0);
	if (*mem == MAP_FAILED)
		return -errno;
	ret = set_one(r, 0, desc);
	close(desc.dmabuf_fd);
	return ret;
}

/* One read and one write; false if any byte in or around the range is wrong. */
static bool both_ways(struct ring *r, int disk, unsigned char *mem,
		      uint64_t addr, size_t from, size_t len, uint64_t at)
{
	static unsigned char *back;
	const size_t guard = from < PAGE ? from : PAGE;
	const ssize_t around = len + 2 * SECTOR;
	int ret;

	if (!back)
		back = mmap(NULL, DISK, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	memset(mem + from - guard, 0xa5, guard + len + PAGE);
	ret = read_fixed(r, addr + from, len, at);
	if (ret != (int)len || !check_disk(mem + from, at, len) ||
	    !check_fill(mem + from - guard, 0xa5, guard) ||
	    !check_fill(mem + from + len, 0xa5, PAGE)) {
		ksft_print_msg("read of %zu at %zu: %d\n", len, from, ret);
		return false;
	}

	memset(mem + from, 0x3c, len);
	ret = write_fixed(r, addr + from, len, at);
	if (ret != (int)len ||
	    pread(disk, back, around, at - SECTOR) != around ||
	    !check_disk(back, at - SECTOR, SECTOR) ||
	    !check_fill(back + SECTOR, 0x3c, len) ||
	    !check_disk(back + SECTOR + len, at + len, SECTOR)) {
		ksft_print_msg("write of %zu at %zu: %d\n", len, from, ret);
		return false;
	}
	fill(back, at, len);
	return pwrite(disk, back, len, at) == (ssize_t)len;
}

/*
 * Requests whose entries end at the end of a list page, or @by entries from it:
 * with whole pages, and with a partial last page.
 */
static bool at_the_ends(FIXTURE_DATA(premap) * self, unsigned char *mem,
			uint64_t addr, size_t pages, int by)
{
	struct ring *r = &self->ring;

	for (size_t lists = 1; lists <= 2; lists++) {
		size_t from = (511 * lists - pages + 1 + by) * PAGE;

		if (!both_ways(r, self->disk, mem, addr, from, pages * PAGE, PAGE))
			return false;
		from -= (uintptr_t)mem % PAGE & -SECTOR;
		if (!both_ways(r, self->disk, mem, addr, from, pages * PAGE - SECTOR, PAGE))
			return false;
	}
	return true;
}

TEST_F_TIMEOUT(premap, lengths, LONG)
{
	struct ring *r = &self->ring;
	static const size_t offsets[] = { 0, 4, 512, 4092 };
	static const size_t froms[] = { 0, 512, 3584, 4096 };
	static const size_t lengths[] = {
		512, 1024, 4096, 4608, 8192, 8704, 65536, 131072, 131584,
		524288, 1048576,
	};
	/* All of these also exceed 32 entries, the maximum of a small list */
	static const size_t pages[] = { 3, 4, 5, 11, 23, 32, 33, 34, 47, 95, 127, 128 };
	unsigned char *mem;
	uint64_t addr;

	for (int i = 0; i < (variant->dmabuf || variant->setup || variant->sqe ? 1 : 4); i++) {
		unsigned char *own = self->mem + offsets[i];

		ASSERT_EQ(1, map_buffer(r, variant->dmabuf, own, &mem, &addr));
		for (int f = 0; f < 4; f++)
			for (int l = 0; l < 11; l++)
				ASSERT_TRUE(both_ways(r, self->disk, mem, addr,
						      froms[f], lengths[l], PAGE));
		for (unsigned int p = 0; p < ARRAY_SIZE(pages); p++)
			for (int by = -1; by <= 1; by++)
				ASSERT_TRUE(at_the_ends(self, mem, addr, pages[p], by));
	}
}

TEST_F_TIMEOUT(premap, outside, LONG)
{
	struct ring *r = &self->ring;
	unsigned char *mem;
	uint64_t addr;

	ASSERT_EQ(1, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
	EXPECT_EQ(-EFAULT, read_fixed(r, addr + BUFFER, SECTOR, 0));
	EXPECT_EQ(-EFAULT, read_fixed(r, addr + BUFFER - SECTOR, 1024, 0));
	EXPECT_EQ(-EFAULT, read_fixed(r, addr - SECTOR, SECTOR, 0));
	EXPECT_EQ(-EFAULT, read_fixed(r, -SECTOR, 1024, 0));
	EXPECT_EQ(-EINVAL, read_fixed(r, addr + 1, SECTOR, 0));
	EXPECT_EQ(-EINVAL, read_fixed(r, addr, SECTOR + 1, 0));
}

/* The mapping is removed with the registered file, after all earlier requests. */
TEST_F_TIMEOUT(premap, file_replaced, LONG)
{
	struct ring *r = &self->ring;
	struct io_uring_rsrc_update2 up = { .data = (uintptr_t)&self->disk, .nr = 1 };
	unsigned char *mem;
	uint64_t addr;
	int ret;

	ASSERT_EQ(1, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
	for (int i = 0; i < 32; i++)
		queue(r, request(IORING_OP_READ_FIXED, 0, addr + i * PAGE, PAGE,
				 i * PAGE));
	ASSERT_EQ(32, enter(r, 32, 0));
	ASSERT_EQ(1, ring_register(r, IORING_REGISTER_FILES_UPDATE2, &up, sizeof(up)));
	for (int i = 0; i < 32; i++)
		ASSERT_EQ(PAGE, reap(r, NULL));
	ASSERT_TRUE(check_disk(mem, 0, 32 * PAGE));
	memset(mem, 0, PAGE);
	ret = read_fixed(r, addr, PAGE, 0);
	if (variant->dmabuf) {
		ASSERT_EQ(-EBADF, ret);
	} else {
		ASSERT_EQ(PAGE, ret);
		ASSERT_TRUE(check_disk(mem, 0, PAGE));
	}
}

/*
 * Ordinary requests on a pre-mapped buffer map its pages a second time, which
 * CONFIG_DMA_API_DEBUG would report as an error.
 */
static void may_overlap(bool may)
{
	put("/sys/kernel/debug/dma-api/driver_filter", may ? "none" : "\n");
}

TEST_F_TIMEOUT(premap, another_file, LONG)
{
	struct ring *r = &self->ring;
	struct io_uring_sqe sqe;
	unsigned char *mem;
	uint64_t addr;

	ASSERT_EQ(1, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
	sqe = request(IORING_OP_READ_FIXED, 0, addr, PAGE, PAGE);
	sqe.flags = 0;
	/* The plain descriptor refers to the same open file. */
	sqe.fd = self->disk;
	ASSERT_EQ(PAGE, transfer(r, sqe));
	ASSERT_TRUE(check_disk(mem, PAGE, PAGE));
	memset(mem, 0, PAGE);
	sqe.fd = disk_open(O_RDONLY | O_DIRECT);
	may_overlap(true);
	ASSERT_EQ(variant->dmabuf ? -EBADF : PAGE, transfer(r, sqe));
	may_overlap(false);
	if (!variant->dmabuf)
		ASSERT_TRUE(check_disk(mem, PAGE, PAGE));
	close(sqe.fd);
}

TEST_F_TIMEOUT(premap, direct_io_taken_away, LONG)
{
	struct ring *r = &self->ring;
	unsigned char *mem;
	uint64_t addr;

	if (variant->setup & IORING_SETUP_IOPOLL)
		SKIP(return, "polled rings support only direct I/O");
	ASSERT_EQ(1, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
	ASSERT_EQ(0, fcntl(self->disk, F_SETFL, 0));
	ASSERT_EQ(variant->dmabuf ? -EINVAL : PAGE, read_fixed(r, addr, PAGE, 0));
	if (!variant->dmabuf)
		ASSERT_TRUE(check_disk(mem, 0, PAGE));
	ASSERT_EQ(0, fcntl(self->disk, F_SETFL, O_DIRECT));
	ASSERT_EQ(PAGE, read_fixed(r, addr + PAGE, PAGE, PAGE));
	ASSERT_TRUE(check_disk(mem + PAGE, PAGE, PAGE));
}

TEST_F_TIMEOUT(premap, emptied_with_requests_in_flight, LONG)
{
	struct ring *r = &self->ring;
	unsigned char *mem;
	uint64_t addr;

	for (int round = 0; round < 20; round++) {
		ASSERT_EQ(1, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
		for (int i = 0; i < DEPTH; i++)
			queue(r, request(IORING_OP_READ_FIXED, 0, addr + i * 65536ULL,
					 65536, i * 65536ULL));
		ASSERT_EQ(DEPTH, enter(r, DEPTH, 0));
		ASSERT_EQ(1, set_one(r, 0, (struct desc) { .type = EMPTY }));
		for (int i = 0; i < DEPTH; i++)
			ASSERT_EQ(65536, reap(r, NULL));
		ASSERT_TRUE(check_disk(mem, 0, DEPTH * 65536));
		memset(mem, 0, DEPTH * 65536);
		ASSERT_EQ(-EFAULT, read_fixed(r, addr, PAGE, 0));
	}
}

/* A buffer that is mapped later */
static struct desc registered(void *mem)
{
	return (struct desc) { .type = UADDR, .uaddr = (uintptr_t)mem, .size = BUFFER };
}

static const struct desc map = { .flags = PREMAP | TARGET_FIXED };
static const struct desc unmap = { .flags = PREMAP, .target_fd = -1 };

/* The old mapping must not take the new one with it when its last request ends. */
TEST_F_TIMEOUT(premap, mapped_again_with_requests_in_flight, LONG)
{
	struct ring *r = &self->ring;
	const uint64_t addr = (uintptr_t)self->mem;

	if (variant->dmabuf)
		SKIP(return, "only for registered buffers");
	ASSERT_EQ(1, set_one(r, 0, registered(self->mem)));
	for (int round = 0; round < 20; round++) {
		ASSERT_EQ(1, set_one(r, 0, map));
		for (int i = 0; i < DEPTH; i++)
			queue(r, request(IORING_OP_READ_FIXED, 0, addr + i * 65536ULL,
					 65536, i * 65536ULL));
		ASSERT_EQ(DEPTH, enter(r, DEPTH, 0));
		ASSERT_EQ(1, set_one(r, 0, unmap));
		ASSERT_EQ(1, set_one(r, 0, map));
		for (int i = 0; i < DEPTH; i++)
			ASSERT_EQ(65536, reap(r, NULL));
		ASSERT_TRUE(check_disk(self->mem, 0, DEPTH * 65536));
		memset(self->mem, 0, DEPTH * 65536);
		/* With this request, the old mapping is gone. */
		ASSERT_EQ(PAGE, read_fixed(r, addr, PAGE, PAGE));
		ASSERT_TRUE(check_disk(self->mem, PAGE, PAGE));
		ASSERT_EQ(-EBUSY, set_one(r, 0, map));
		ASSERT_EQ(1, set_one(r, 0, unmap));
	}
}

/* A registered buffer is mapped and unmapped */
TEST_F_TIMEOUT(premap, mapped_afterwards, LONG)
{
	struct ring *r = &self->ring;
	const uint64_t addr = (uintptr_t)self->mem;

	if (variant->dmabuf)
		SKIP(return, "only for registered buffers");
	ASSERT_EQ(1, set_one(r, 0, registered(self->mem)));
	for (int i = 0; i < 10; i++) {
		ASSERT_EQ(PAGE, read_fixed(r, addr, PAGE, i * PAGE));
		ASSERT_TRUE(check_disk(self->mem, i * PAGE, PAGE));
		ASSERT_EQ(1, set_one(r, 0, map));
		ASSERT_EQ(-EBUSY, set_one(r, 0, map));
		ASSERT_EQ(PAGE, read_fixed(r, addr + PAGE, PAGE, i * PAGE));
		ASSERT_TRUE(check_disk(self->mem + PAGE, i * PAGE, PAGE));
		ASSERT_EQ(1, set_one(r, 0, unmap));
		ASSERT_EQ(1, set_one(r, 0, unmap));
	}
}

TEST_F_TIMEOUT(premap, refused, LONG)
{
	struct ring *r = &self->ring;
	const struct desc uaddr = describe(NULL, self->mem);
	const __u32 clone[8] = { self->ring.fd };
	struct desc desc;
	struct ring other;
	int fd;

	if (variant->dmabuf)
		SKIP(return, "only for registered buffers");
	/* How a program detects whether the extended update is supported */
	EXPECT_EQ(1, set_one(r, 0, (struct desc) {}));

	for (int i = 0; i < 6; i++) {
		desc = uaddr;
		desc.resv[i] = 1ULL << (i * 8);
		EXPECT_EQ(-EINVAL, set_one(r, 0, desc));
	}
	for (int bit = 0; bit < 30; bit++) {
		desc = uaddr;
		desc.flags |= 1U << bit;
		EXPECT_EQ(-EINVAL, set_one(r, 0, desc));
	}
	desc = uaddr;
	desc.type = 3;
	EXPECT_EQ(-EINVAL, set_one(r, 0, desc));
	desc = uaddr;
	desc.flags = PREMAP;
	EXPECT_EQ(-EINVAL, set_one(r, 0, desc));
	desc = uaddr;
	desc.target_fd = 1;
	EXPECT_EQ(-EBADF, set_one(r, 0, desc));
	desc = (struct desc) { .flags = PREMAP | TARGET_FIXED };
	EXPECT_EQ(-EINVAL, set_one(r, 0, desc));
	desc = (struct desc) { .type = DMABUF, .flags = TARGET_FIXED, .dmabuf_fd = -1 };
	EXPECT_EQ(-EBADF, set_one(r, 0, desc));
	desc.dmabuf_fd = self->disk;
	EXPECT_EQ(-EINVAL, set_one(r, 0, desc));
	desc.dmabuf_fd = heap_buffer();
	ASSERT_GE(desc.dmabuf_fd, 0);
	desc.size = 512;
	EXPECT_EQ(-EINVAL, set_one(r, 0, desc));
	desc.size = PAGE;
	desc.uaddr = BUFFER;
	EXPECT_EQ(-EINVAL, set_one(r, 0, desc));
	desc.uaddr = -(__u64)PAGE;
	EXPECT_EQ(-EINVAL, set_one(r, 0, desc));
	desc.uaddr = PAGE;
	EXPECT_EQ(mode == BOUNCE ? -EOPNOTSUPP : 1, set_one(r, 0, desc));
	fd = disk_open(O_RDWR);
	desc.flags = 0;
	desc.target_fd = fd;
	EXPECT_EQ(-EINVAL, set_one(r, 0, desc));
	close(fd);
	fd = open("/dev/null", O_RDWR);
	desc.target_fd = fd;
	EXPECT_EQ(-EOPNOTSUPP, set_one(r, 0, desc));
	close(fd);
	close(desc.dmabuf_fd);

	/* Returns the number processed before the first error */
	EXPECT_EQ(1, set(r, 2, (struct desc[]) { uaddr, desc }, 2));

	EXPECT_EQ(0, ring_make(&other, 0));
	EXPECT_EQ(-EBUSY, ring_register(&other, CLONE_BUFFERS, (void *)clone, 1));
	close(other.fd);
}

/* Exits with requests in flight. */
static void die(int disk, int (*dmabuf)(void), unsigned char *own)
{
	struct io_uring_rsrc_register sparse = { .nr = SLOTS, .flags = 1 };
	unsigned char *mem;
	struct ring r;
	uint64_t addr;

	if (ring_make(&r, 0) ||
	    ring_register(&r, IORING_REGISTER_FILES, &disk, 1) ||
	    ring_register(&r, IORING_REGISTER_BUFFERS2, &sparse, sizeof(sparse)) ||
	    map_buffer(&r, dmabuf, own, &mem, &addr) != 1)
		_exit(1);
	for (int i = 0; i < DEPTH; i++)
		queue(&r, request(IORING_OP_READ_FIXED, 0, addr + i * 65536ULL, 65536, 0));
	enter(&r, DEPTH, 0);
	raise(SIGKILL);
}

TEST_F_TIMEOUT(premap, killed, LONG)
{
	for (int round = 0; round < 10; round++) {
		pid_t child = fork();
		int status;

		if (!child)
			die(self->disk, variant->dmabuf, self->mem);
		ASSERT_EQ(child, waitpid(child, &status, 0));
		ASSERT_TRUE(WIFSIGNALED(status));
	}
}

/* Two requests fill two sectors of a page while the CPU writes to the others. */
TEST_F_TIMEOUT(premap, neighbours, LONG)
{
	struct ring *r = &self->ring;
	unsigned char *mem;
	uint64_t addr;

	ASSERT_EQ(1, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
	for (int round = 0; round < 500; round++) {
		uint64_t at = round * 1024;

		memset(mem, 0xa5, PAGE);
		queue(r, request(IORING_OP_READ_FIXED, 0, addr + 512, 512, at));
		queue(r, request(IORING_OP_READ_FIXED, 0, addr + 1536, 512, at + 512));
		ASSERT_EQ(2, enter(r, 2, 0));
		memset(mem, round, 512);
		memset(mem + 1024, round, 512);
		ASSERT_EQ(512, reap(r, NULL));
		memset(mem + 2048, round, 2048);
		ASSERT_EQ(512, reap(r, NULL));
		ASSERT_TRUE(check_fill(mem, round, 512));
		ASSERT_TRUE(check_disk(mem + 512, at, 512));
		ASSERT_TRUE(check_fill(mem + 1024, round, 512));
		ASSERT_TRUE(check_disk(mem + 1536, at + 512, 512));
		ASSERT_TRUE(check_fill(mem + 2048, round, 2048));
	}
	/* Removing the mapping must preserve data that the CPU has written since. */
	memset(mem, 0x3c, PAGE);
	ASSERT_EQ(1, set_one(r, 0, (struct desc) { .type = EMPTY }));
	ASSERT_TRUE(check_fill(mem, 0x3c, PAGE));
}

/* The tags of buffers are still posted on their removal. */
TEST_F_TIMEOUT(premap, tags_of_buffers, LONG)
{
	struct desc desc = describe(variant->dmabuf, self->mem);
	__u64 tag = 0x1234, data = 0;
	struct update up = {
		.flags = UPDATE_EXTENDED, .data = (uintptr_t)&desc,
		.tags = (uintptr_t)&tag, .nr = 1,
	};

	ASSERT_EQ(1, ring_register(&self->ring, IORING_REGISTER_BUFFERS_UPDATE,
				   &up, sizeof(up)));
	ASSERT_EQ(PAGE, read_fixed(&self->ring, desc.uaddr, PAGE, 0));
	ASSERT_EQ(1, set_one(&self->ring, 0, (struct desc) { .type = EMPTY }));
	ASSERT_EQ(0, reap(&self->ring, &data));
	ASSERT_EQ(tag, data);
	if (variant->dmabuf)
		close(desc.dmabuf_fd);
}

TEST_F_TIMEOUT(premap, files_unregistered, LONG)
{
	struct ring *r = &self->ring;
	unsigned char *mem;
	uint64_t addr;

	ASSERT_EQ(1, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
	ASSERT_EQ(PAGE, read_fixed(r, addr, PAGE, 0));
	ASSERT_EQ(0, ring_register(r, IORING_UNREGISTER_FILES, NULL, 0));
	ASSERT_EQ(0, ring_register(r, IORING_REGISTER_FILES, &self->disk, 1));
	memset(mem, 0, PAGE);
	ASSERT_EQ(variant->dmabuf ? -EBADF : PAGE, read_fixed(r, addr, PAGE, PAGE));
	if (!variant->dmabuf)
		ASSERT_TRUE(check_disk(mem, PAGE, PAGE));
}

/* The open mode of the file determines what the device may do. */
TEST_F_TIMEOUT(premap, modes_of_files, LONG)
{
	static const int modes[] = { O_RDONLY, O_WRONLY };
	struct ring *r = &self->ring;
	unsigned char *mem;
	uint64_t addr;

	for (int i = 0; i < 2; i++) {
		int fd = disk_open(modes[i] | O_DIRECT);
		struct io_uring_rsrc_update2 up = { .data = (uintptr_t)&fd, .nr = 1 };

		ASSERT_GE(fd, 0);
		ASSERT_EQ(1, ring_register(r, IORING_REGISTER_FILES_UPDATE2, &up, sizeof(up)));
		ASSERT_EQ(1, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
		fill(mem, 0, PAGE);
		ASSERT_EQ(i == 0 ? PAGE : -EBADF, read_fixed(r, addr, PAGE, 0));
		ASSERT_EQ(i == 1 ? PAGE : -EBADF, write_fixed(r, addr, PAGE, 0));
		ASSERT_TRUE(check_disk(mem, 0, PAGE));
		ASSERT_EQ(1, set_one(r, 0, (struct desc) { .type = EMPTY }));
		close(fd);
	}
}

/* A read-only dma-buf must not be mapped for a device that writes to it. */
TEST_F_TIMEOUT(premap, modes_of_dmabufs, LONG)
{
	struct desc desc = { .type = DMABUF };

	if (variant->dmabuf != heap_buffer)
		SKIP(return, "only for dma-bufs of the heap");
	desc.dmabuf_fd = heap_buffer_for(O_RDONLY);
	ASSERT_GE(desc.dmabuf_fd, 0);
	desc.target_fd = self->disk;
	EXPECT_EQ(-EACCES, set_one(&self->ring, 0, desc));
	desc.target_fd = disk_open(O_RDONLY | O_DIRECT);
	EXPECT_EQ(-EACCES, set_one(&self->ring, 0, desc));
	close(desc.target_fd);
	desc.target_fd = disk_open(O_WRONLY | O_DIRECT);
	EXPECT_EQ(1, set_one(&self->ring, 0, desc));
	close(desc.target_fd);
	close(desc.dmabuf_fd);
}

static void *toggle(void *arg)
{
	int *disk = arg;

	while (__atomic_load_n(disk, __ATOMIC_RELAXED) >= 0) {
		fcntl(*disk, F_SETFL, 0);
		sched_yield();
		fcntl(*disk, F_SETFL, O_DIRECT);
		sched_yield();
	}
	return NULL;
}

/* O_DIRECT is set and cleared at any time: requests must succeed or fail, but not hang. */
TEST_F_TIMEOUT(premap, direct_io_toggled, LONG)
{
	struct ring *r = &self->ring;
	int disk = self->disk, done = 0;
	unsigned char *mem;
	pthread_t thread;
	uint64_t addr;

	ASSERT_EQ(1, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
	may_overlap(true);
	ASSERT_EQ(0, pthread_create(&thread, NULL, toggle, &disk));
	for (int i = 0; done < 100; i++) {
		uint64_t at = i % 256 * PAGE;
		int ret;

		memset(mem, 0, PAGE);
		ret = read_fixed(r, addr, PAGE, at);
		if (ret == PAGE) {
			done++;
			ASSERT_TRUE(check_disk(mem, at, PAGE));
		} else {
			ASSERT_TRUE(ret == -EFAULT || ret == -EINVAL || ret == -EOPNOTSUPP ||
				    ret == -EAGAIN);
		}
	}
	__atomic_store_n(&disk, -1, __ATOMIC_RELAXED);
	pthread_join(thread, NULL);
	may_overlap(false);
	fcntl(self->disk, F_SETFL, O_DIRECT);
}

/* The child gets copies of the pages; those of the parent stay mapped. */
TEST_F_TIMEOUT(premap, forked, LONG)
{
	struct ring *r = &self->ring;
	unsigned char *mem;
	uint64_t addr;

	ASSERT_EQ(1, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
	for (int i = 0; i < 10; i++) {
		pid_t child = fork();
		int status;

		if (!child) {
			memset(mem, 0xa5, PAGE);
			_exit(0);
		}
		ASSERT_EQ(PAGE, read_fixed(r, addr + PAGE, PAGE, i * PAGE));
		ASSERT_EQ(child, waitpid(child, &status, 0));
		ASSERT_TRUE(check_disk(mem + PAGE, i * PAGE, PAGE));
		memset(mem + PAGE, i, PAGE);
		ASSERT_EQ(PAGE, write_fixed(r, addr + PAGE, PAGE, DISK));
		ASSERT_EQ(PAGE, pread(self->disk, self->aside, PAGE, DISK));
		ASSERT_TRUE(check_fill(self->aside, i, PAGE));
	}
}

/* The device can access memory after munmap(), until the buffer is unmapped. */
TEST_F_TIMEOUT(premap, unmapped_by_the_process, LONG)
{
	struct ring *r = &self->ring;
	unsigned char *mem;
	uint64_t addr;

	ASSERT_EQ(1, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
	ASSERT_EQ(0, munmap(mem, BUFFER));
	for (int i = 0; i < 10; i++)
		ASSERT_EQ(65536, read_fixed(r, addr, 65536, i * PAGE));
}

#define TRACING "/sys/kernel/tracing/"

/* Adds function probes, and keeps other enabled events */
static int trace_begin(const char *probes)
{
	int ret = put(TRACING "kprobe_events", probes);

	if (ret)
		return ret;
	put(TRACING "trace", "");
	return put(TRACING "events/kprobes/enable", "1");
}

static FILE *trace_end(void)
{
	put(TRACING "events/kprobes/enable", "0");
	return fopen(TRACING "trace", "r");
}

/* Removes the probes and their output. */
static void trace_close(FILE *trace)
{
	fclose(trace);
	put(TRACING "kprobe_events", "");
}

/* No page may be reused while a device can access it. */
TEST_F_TIMEOUT(premap, unmapped_before_it_is_unpinned, LONG)
{
	int unmapped = 0, unpinned = 0;
	char line[300], own[16];
	unsigned char *mem;
	uint64_t addr;
	FILE *trace;

	if (variant->dmabuf)
		SKIP(return, "only for registered buffers");
	/* Workers may still be removing rings of earlier tests. */
	snprintf(own, sizeof(own), "-%d ", getpid());
	ASSERT_EQ(1, map_buffer(&self->ring, NULL, self->mem, &mem, &addr));
	if (trace_begin("p:premap_unmap dma_unmap_sg_attrs\np:premap_unpin unpin_user_folio\n"))
		SKIP(return, "kprobes are not available");
	EXPECT_EQ(1, set_one(&self->ring, 0, (struct desc) { .type = EMPTY }));
	trace = trace_end();
	ASSERT_TRUE(!!trace);
	while (fgets(line, sizeof(line), trace)) {
		if (!strstr(line, own))
			continue;
		if (strstr(line, "premap_unmap:")) {
			EXPECT_EQ(0, unpinned);
			unmapped++;
		}
		if (strstr(line, "premap_unpin:"))
			unpinned++;
	}
	trace_close(trace);
	EXPECT_EQ(1, unmapped);
	EXPECT_GT(unpinned, 0);
}

static void count_failures(unsigned int nth)
{
	char text[20];

	snprintf(text, sizeof(text), "%u", nth);
	put("/proc/thread-self/fail-nth", text);
}

static unsigned int failures_left(void)
{
	unsigned int left = 0;
	FILE *f = fopen("/proc/thread-self/fail-nth", "r");

	if (f) {
		if (fscanf(f, "%u", &left) != 1)
			left = 0;
		fclose(f);
	}
	return left;
}

static int adjust(const char *what, const char *name, unsigned int value)
{
	char path[200], text[20];

	snprintf(path, sizeof(path), "/sys/kernel/debug/%s/%s", what, name);
	snprintf(text, sizeof(text), "%u", value);
	return put(path, text);
}

static void may_fail(const char *what)
{
	adjust(what, "verbose", 0);
	adjust(what, "ignore-gfp-wait", 0);
	adjust(what, "min-order", 0);
}

/* Fail each allocation once: during the mapping, and while the list is copied. */
TEST_F_TIMEOUT(premap, no_memory, LONG)
{
	struct ring *r = &self->ring;
	unsigned int nth;
	unsigned char *mem;
	uint64_t addr;
	int ret;

	if (mode != FAILURES)
		SKIP(return, "only in another mode");
	if (variant->setup || variant->sqe)
		SKIP(return, "same as for a plain ring");
	may_fail("failslab");
	may_fail("fail_page_alloc");
	mem = NULL;
	for (nth = 1; nth < 2000; nth++) {
		struct desc desc = describe(variant->dmabuf, self->mem);

		count_failures(nth);
		ret = set_one(r, 0, desc);
		if (variant->dmabuf)
			close(desc.dmabuf_fd);
		if (failures_left()) {
			count_failures(0);
			break;
		}
		if (ret != 1)
			ASSERT_EQ(-ENOMEM, ret);
		ASSERT_EQ(1, set_one(r, 0, (struct desc) { .type = EMPTY }));
	}
	ASSERT_EQ(1, ret);
	ASSERT_GT(nth, 5);

	ASSERT_EQ(1, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
	for (nth = 1; nth < 100; nth++) {
		bool over;

		memset(mem, 0, 4 * PAGE);
		queue(r, request(IORING_OP_READ_FIXED, 0, addr + 508 * PAGE, 4 * PAGE, 0));
		count_failures(nth);
		enter(r, 1, 0);
		over = failures_left();
		count_failures(0);
		ret = reap(r, NULL);
		if (ret != 4 * PAGE) {
			ASSERT_TRUE(ret == -ENOMEM || ret == -EAGAIN || ret == -EIO);
			continue;
		}
		ASSERT_TRUE(check_disk(mem + 508 * PAGE, 0, 4 * PAGE));
		if (over)
			break;
	}
	ASSERT_GT(nth, 1);
	ASSERT_LT(nth, 100);
	ASSERT_EQ(4 * PAGE, read_fixed(r, addr + 508 * PAGE, 4 * PAGE, PAGE));
	ASSERT_TRUE(check_disk(mem + 508 * PAGE, PAGE, 4 * PAGE));
}

/* Where requests fail: before they reach the driver, or on completion */
#define EARLY	"fail_make_request"
#define LATE	"%s/fault_inject"

/*
 * Submits eight requests and lets the one after @nth others fail once, at @where.
 * Returns the number that fail with @error, or -1 if another one is wrong.
 */
static int one_fails(FIXTURE_DATA(premap) * self, unsigned char *mem, uint64_t addr,
		     unsigned int op, const char *where, unsigned int nth, int error)
{
	/* The entries of the first request end with a list page, so they are copied. */
	const size_t len = 16 * PAGE, first = 496 * PAGE;
	const bool early = !strcmp(where, EARLY), reads = op == IORING_OP_READ_FIXED;
	struct ring *r = &self->ring;
	int results[8], failed = 0;
	char what[60];
	__u64 which;

	snprintf(what, sizeof(what), where, disk_name());
	memset(mem + first, 0x3c, 8 * len);
	/* The fault injection counts bytes or requests; add one more. */
	if (adjust(what, "verbose", 0) || adjust(what, "probability", 100) ||
	    adjust(what, "space", nth * (early ? len : 1) + 1) || adjust(what, "times", 1))
		return -1;
	for (which = 0; which < 8; which++) {
		struct io_uring_sqe sqe = request(op, 0, addr + first + which * len, len,
						  which * len);

		sqe.user_data = which;
		queue(r, sqe);
	}
	enter(r, 8, 0);
	for (int i = 0; i < 8; i++) {
		int ret = reap(r, &which);

		results[which] = ret;
	}
	/* Check last: the requests of the checks could fail as well. */
	for (which = 0; which < 8; which++) {
		const bool done = results[which] == (int)len;
		unsigned char *now = reads ? mem + first + which * len : self->aside;
		bool right = done || results[which] == error;

		if (!reads)
			right &= pread(self->disk, now, len, which * len) == (ssize_t)len;
		/* An early failure transfers nothing, a late one any part. */
		if (done || early)
			right &= done == reads ? check_disk(now, which * len, len) :
						 check_fill(now, 0x3c, len);
		if (!right) {
			ksft_print_msg("%s: request %d: %d\n", what, (int)which, results[which]);
			return -1;
		}
		if (!reads) {
			fill(now, which * len, len);
			if (pwrite(self->disk, now, len, which * len) != (ssize_t)len)
				return -1;
		}
		failed += !done;
	}
	return failed;
}

/* Exactly one of several requests fails, or the driver retries it. */
TEST_F_TIMEOUT(premap, requests_that_fail, LONG)
{
	static const struct {
		const char *where;
		unsigned int status, final;
		int error;
	} ways[] = {
		{ EARLY, 0, 0, -EIO },
		/* Unrecovered read error */
		{ LATE, 0x281, 1, -ENODATA },
		/* Internal error, which is retried */
		{ LATE, 0x6, 0, 0 },
	};
	static const unsigned int ops[] = { IORING_OP_READ_FIXED, IORING_OP_WRITE_FIXED };
	struct ring *r = &self->ring;
	unsigned char *mem;
	char path[100];
	uint64_t addr;

	if (mode != FAILURES)
		SKIP(return, "only in another mode");
	if (file)
		SKIP(return, "requests of the file system itself would fail");
	snprintf(path, sizeof(path), "/sys/block/%s/make-it-fail", disk_name());
	ASSERT_EQ(0, put(path, "1"));
	ASSERT_EQ(1, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
	for (unsigned int w = 0; w < ARRAY_SIZE(ways); w++) {
		snprintf(path, sizeof(path), LATE, disk_name());
		ASSERT_EQ(0, adjust(path, "status", ways[w].status));
		ASSERT_EQ(0, adjust(path, "dont_retry", ways[w].final));
		for (unsigned int i = 0; i < 8; i++) {
			/* Concurrent workers make the count inexact. */
			int failed = one_fails(self, mem, addr, ops[i % 2], ways[w].where,
					       variant->sqe ? 0 : i, ways[w].error);

			ASSERT_EQ(ways[w].error ? 1 : 0, failed);
			ASSERT_TRUE(both_ways(r, self->disk, mem, addr, 496 * PAGE,
					      16 * PAGE, PAGE));
		}
	}
}

/* A partition is the same disk at another offset. */
TEST_F_TIMEOUT(premap, partition, LONG)
{
	struct blkpg_partition part = { .start = 1 << 20, .length = 4 << 20, .pno = 1 };
	struct blkpg_ioctl_arg arg = { .op = BLKPG_ADD_PARTITION, .data = &part,
				       .datalen = sizeof(part) };
	struct ring *r = &self->ring;
	struct io_uring_rsrc_update2 up = { .nr = 1 };
	unsigned char *mem;
	char path[100];
	uint64_t addr;
	int fd;

	if (file)
		SKIP(return, "only for disks");
	ASSERT_EQ(0, ioctl(self->disk, BLKPG, &arg));
	snprintf(path, sizeof(path), "%sp1", disk_path);
	fd = open(path, O_RDWR | O_DIRECT | O_CLOEXEC);
	up.data = (uintptr_t)&fd;
	EXPECT_EQ(1, ring_register(r, IORING_REGISTER_FILES_UPDATE2, &up, sizeof(up)));
	EXPECT_EQ(1, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
	EXPECT_EQ(131072, read_fixed(r, addr, 131072, PAGE));
	EXPECT_TRUE(check_disk(mem, part.start + PAGE, 131072));
	EXPECT_EQ(1, set_one(r, 0, (struct desc) { .type = EMPTY }));
	close(fd);
	up.data = (uintptr_t)&self->disk;
	EXPECT_EQ(1, ring_register(r, IORING_REGISTER_FILES_UPDATE2, &up, sizeof(up)));
	/* The ring releases the file asynchronously. */
	for (int i = 0; i < 100; i++) {
		arg.op = BLKPG_DEL_PARTITION;
		if (!ioctl(self->disk, BLKPG, &arg))
			return;
		usleep(100000);
	}
	EXPECT_EQ(0, errno);
}

static int file_beside(const char *name)
{
	char path[200];

	snprintf(path, sizeof(path), "%s-%s", disk_path, name);
	return open(path, O_RDWR | O_CREAT | O_TRUNC | O_DIRECT | O_CLOEXEC, 0600);
}

static int target(struct ring *r, int *fd)
{
	struct io_uring_rsrc_update2 up = { .data = (uintptr_t)fd, .nr = 1 };

	return ring_register(r, IORING_REGISTER_FILES_UPDATE2, &up, sizeof(up));
}

/* Data, a hole, allocated blocks, data, half a block */
TEST_F_TIMEOUT(premap, holes, LONG)
{
	const size_t part = 65536, end = 5 * part - 2048;
	struct ring *r = &self->ring;
	unsigned char *mem, *own = self->mem + 4;
	uint64_t addr;
	int fd, ret;

	if (!file)
		SKIP(return, "only for files");
	fd = file_beside("holes");
	ASSERT_GE(fd, 0);
	fill(self->mem, 0, part);
	ASSERT_EQ(part, pwrite(fd, self->mem, part, 0));
	ASSERT_EQ(part, pwrite(fd, self->mem, part, 3 * part));
	ASSERT_EQ(part, pwrite(fd, self->mem, part, 4 * part));
	ASSERT_EQ(0, fallocate(fd, 0, 2 * part, part));
	ASSERT_EQ(0, ftruncate(fd, end));
	ASSERT_EQ(1, target(r, &fd));
	ASSERT_EQ(1, map_buffer(r, variant->dmabuf, own, &mem, &addr));
	memset(mem, 0xa5, 5 * part + 2 * PAGE);
	ret = read_fixed(r, addr + PAGE, 5 * part, 0);
	if (variant->dmabuf) {
		/* There are no pages to zero, so the request fails. */
		ASSERT_EQ(-EFAULT, ret);
		ASSERT_EQ(part, read_fixed(r, addr + PAGE, part, 0));
		ret = read_fixed(r, addr + PAGE + 3 * part, 2 * part, 3 * part);
		ASSERT_EQ(2 * part - 2048, ret);
		memset(mem + PAGE + part, 0, 2 * part);
	} else {
		ASSERT_EQ(end, ret);
	}
	ASSERT_TRUE(check_fill(mem, 0xa5, PAGE));
	ASSERT_TRUE(check_disk(mem + PAGE, 0, part));
	ASSERT_TRUE(check_fill(mem + PAGE + part, 0, 2 * part));
	ASSERT_TRUE(check_disk(mem + PAGE + 3 * part, 0, part));
	ASSERT_TRUE(check_disk(mem + PAGE + 4 * part, 0, part - 2048));
	ASSERT_TRUE(check_fill(mem + PAGE + 5 * part, 0xa5, PAGE));

	/* Write to the hole and the allocated blocks, unaligned, and at the end */
	memset(mem, 0x3c, PAGE);
	ASSERT_EQ(1024, write_fixed(r, addr, 1024, part + 512));
	ASSERT_EQ(1024, write_fixed(r, addr, 1024, 2 * part + 512));
	ASSERT_EQ(1024, write_fixed(r, addr, 1024, end));
	ASSERT_EQ(end + 1024, lseek(fd, 0, SEEK_END));
	ASSERT_EQ(PAGE, pread(fd, self->aside, PAGE, part));
	ASSERT_TRUE(check_fill(self->aside, 0, 512));
	ASSERT_TRUE(check_fill(self->aside + 512, 0x3c, 1024));
	ASSERT_TRUE(check_fill(self->aside + 1536, 0, PAGE - 1536));
	ASSERT_EQ(PAGE, pread(fd, self->aside, PAGE, 2 * part));
	ASSERT_TRUE(check_fill(self->aside, 0, 512));
	ASSERT_TRUE(check_fill(self->aside + 512, 0x3c, 1024));
	ASSERT_TRUE(check_fill(self->aside + 1536, 0, PAGE - 1536));
	close(fd);
}

/* A read beyond the end of a file is short, also into a buffer that cannot be zeroed. */
TEST_F_TIMEOUT(premap, beyond_the_end, LONG)
{
	static const size_t ends[] = { 65536, 65536 + 512, 65536 + 2048, 65536 + 4000 };
	const size_t size = 1 << 20, hole = 2 * 65536 - 2048;
	struct ring *r = &self->ring;
	unsigned char *mem;
	uint64_t addr;
	int fd;

	if (!file)
		SKIP(return, "only for files");
	fd = file_beside("end");
	ASSERT_GE(fd, 0);
	ASSERT_EQ(1, target(r, &fd));
	ASSERT_EQ(1, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
	fill(self->aside, 0, size);
	/* Nothing beyond the end, or allocated blocks */
	for (int i = 0; i < 8; i++) {
		size_t end = ends[i / 2];

		ASSERT_EQ(0, ftruncate(fd, 0));
		ASSERT_EQ(2 * 65536, pwrite(fd, self->aside, 2 * 65536, 0));
		ASSERT_EQ(0, ftruncate(fd, end));
		if (i % 2)
			ASSERT_EQ(0, fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, size));
		memset(mem, 0xa5, size + 2 * PAGE);
		ASSERT_EQ(end - PAGE, read_fixed(r, addr + PAGE, size, PAGE));
		ASSERT_TRUE(check_fill(mem, 0xa5, PAGE));
		ASSERT_TRUE(check_disk(mem + PAGE, PAGE, (end - PAGE) & -8));
		ASSERT_TRUE(check_fill(mem + PAGE + size, 0xa5, PAGE));
		ASSERT_EQ(end - 15 * PAGE, read_fixed(r, addr, size, 15 * PAGE));
		ASSERT_TRUE(check_disk(mem, 15 * PAGE, (end - 15 * PAGE) & -8));
		ASSERT_EQ(0, read_fixed(r, addr, PAGE, 65536 + PAGE));
	}
	/* A hole at the end belongs to the file. */
	ASSERT_EQ(0, ftruncate(fd, hole));
	ASSERT_EQ(variant->dmabuf ? -EFAULT : hole, read_fixed(r, addr, size, 0));
	close(fd);
}

/* A file is truncated and extended while it is read: data, zeros or a short read. */
TEST_F_TIMEOUT(premap, truncated, LONG)
{
	const size_t size = 1 << 20, small = 65536;
	struct ring *r = &self->ring;
	unsigned char *mem;
	uint64_t addr;
	int fd;

	if (!file)
		SKIP(return, "only for files");
	if (variant->setup & IORING_SETUP_IOPOLL)
		SKIP(return, "truncate would wait for requests that this task has to poll");
	fd = file_beside("truncated");
	ASSERT_GE(fd, 0);
	ASSERT_EQ(1, target(r, &fd));
	ASSERT_EQ(1, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
	for (int round = 0; round < 10; round++) {
		fill(mem, 0, size);
		ASSERT_EQ(size, write_fixed(r, addr, size, 0));
		for (int i = 0; i < 8; i++)
			queue(r, request(IORING_OP_READ_FIXED, 0, addr + i * small,
					 small, i * small));
		ASSERT_EQ(8, enter(r, 8, 0));
		ASSERT_EQ(0, ftruncate(fd, 2 * small));
		for (int i = 0; i < 8; i++) {
			int ret = reap(r, NULL);

			ASSERT_TRUE(ret == small || ret == 0);
		}
		ASSERT_TRUE(check_disk(mem, 0, size));
		ASSERT_EQ(0, read_fixed(r, addr, small, 4 * small));
	}
	close(fd);
}

/* Writes to one of two files that share blocks. */
TEST_F_TIMEOUT(premap, reflinked, LONG)
{
	const size_t size = 1 << 20;
	struct ring *r = &self->ring;
	unsigned char *mem;
	int fd, other;
	uint64_t addr;

	if (!file)
		SKIP(return, "only for files");
	fd = file_beside("a");
	other = file_beside("b");
	fill(self->mem, 0, size);
	ASSERT_EQ(size, pwrite(other, self->mem, size, 0));
	if (ioctl(fd, FICLONE, other))
		SKIP(return, "reflinks are not supported");
	ASSERT_EQ(1, target(r, &fd));
	ASSERT_EQ(1, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
	memset(mem, 0, size);
	ASSERT_EQ(size, read_fixed(r, addr, size, 0));
	ASSERT_TRUE(check_disk(mem, 0, size));
	memset(mem, 0x3c, 8 * PAGE);
	ASSERT_EQ(8 * PAGE, write_fixed(r, addr, 8 * PAGE, 8 * PAGE));
	ASSERT_EQ(size, pread(other, self->aside, size, 0));
	ASSERT_TRUE(check_disk(self->aside, 0, size));
	ASSERT_EQ(size, pread(fd, self->aside, size, 0));
	ASSERT_TRUE(check_disk(self->aside, 0, 8 * PAGE));
	ASSERT_TRUE(check_fill(self->aside + 8 * PAGE, 0x3c, 8 * PAGE));
	ASSERT_TRUE(check_disk(self->aside + 16 * PAGE, 16 * PAGE, size - 16 * PAGE));
	close(fd);
	close(other);
}

/* Writes to a sysfs file of the disk */
static int control(const char *where, const char *what)
{
	char path[200];

	snprintf(path, sizeof(path), "/sys/block/%s/%s", disk_name(), where);
	return put(path, what);
}

/* After a reset the requests are retried with the same lists. */
TEST_F_TIMEOUT(premap, controller_reset, LONG)
{
	struct ring *r = &self->ring;
	unsigned char *mem;
	uint64_t addr;

	if (mode != LIFE)
		SKIP(return, "only in another mode");
	ASSERT_EQ(1, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
	for (int round = 0; round < 10; round++) {
		memset(mem, 0, 32 * 65536);
		for (int i = 0; i < 32; i++)
			queue(r, request(IORING_OP_READ_FIXED, 0, addr + i * 65536ULL,
					 65536, i * 65536ULL));
		ASSERT_EQ(32, enter(r, 32, 0));
		ASSERT_EQ(0, control("device/reset_controller", "1"));
		for (int i = 0; i < 32; i++)
			ASSERT_EQ(65536, reap(r, NULL));
		ASSERT_TRUE(check_disk(mem, 0, 32 * 65536));
	}
}

/* Formats namespace 1, and waits until the kernel has revalidated it */
static int format_disk(unsigned int lbaf, unsigned int pi, const char *expected)
{
	struct nvme_admin_cmd cmd = {
		.opcode = 0x80, .nsid = 1, .cdw10 = lbaf | pi << 5, .timeout_ms = 60000,
	};
	char path[200], found[40];
	int fd, ret;

	snprintf(path, sizeof(path), "%.*s", (int)strlen(disk_path) - 2, disk_path);
	fd = open(path, O_RDWR | O_CLOEXEC);
	ret = ioctl(fd, NVME_IOCTL_ADMIN_CMD, &cmd);
	close(fd);
	if (ret)
		return ret < 0 ? -errno : ret;
	snprintf(path, sizeof(path), "/sys/block/%s/integrity/format", disk_name());
	for (int i = 0; i < 300; i++) {
		memset(found, 0, sizeof(found));
		fd = open(path, O_RDONLY | O_CLOEXEC);
		if (read(fd, found, sizeof(found) - 1) > 0 &&
		    !strncmp(found, expected, strlen(expected)))
			ret = 1;
		close(fd);
		if (ret)
			return 0;
		usleep(100000);
	}
	return -ETIMEDOUT;
}

/* Protection information needs a separate list, which pre-mapped buffers do not have. */
TEST_F_TIMEOUT(premap, formatted, LONG)
{
	struct ring *r = &self->ring;
	const struct desc desc = describe(NULL, self->mem);
	unsigned char *mem;
	uint64_t addr;

	if (mode != LIFE)
		SKIP(return, "only in another mode");
	ASSERT_EQ(1, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
	ASSERT_EQ(PAGE, read_fixed(r, addr, PAGE, 0));
	ASSERT_EQ(0, format_disk(1, 1, "T10-DIF-TYPE1"));
	EXPECT_EQ(-EINVAL, read_fixed(r, addr, PAGE, 0));
	EXPECT_EQ(-EINVAL, write_fixed(r, addr, PAGE, 0));
	EXPECT_EQ(-EOPNOTSUPP, set_one(r, 1, desc));
	ASSERT_EQ(0, format_disk(0, 0, "none"));
	ASSERT_EQ(PAGE, read_fixed(r, addr, PAGE, 0));
	ASSERT_TRUE(check_fill(mem, 0, PAGE));
	ASSERT_EQ(0, disk_fill());
	ASSERT_EQ(PAGE, read_fixed(r, addr, PAGE, 0));
	ASSERT_TRUE(check_disk(mem, 0, PAGE));
}

/* Waits until the disk has been detected again, and opens it. */
static int disk_again(void)
{
	int fd;

	for (int i = 0; (fd = disk_open(O_RDWR | O_DIRECT)) < 0 && i < 300; i++) {
		if (i % 100 == 1)
			put("/sys/bus/pci/rescan", "1");
		usleep(100000);
	}
	return fd;
}

/* The disk is removed while a buffer is mapped: later requests fail. */
TEST_F_TIMEOUT(premap, controller_removed, LONG)
{
	struct ring *r = &self->ring;
	unsigned char *mem;
	uint64_t addr;
	int fd;

	if (mode != LIFE)
		SKIP(return, "only in another mode");
	for (int round = 0; round < 3; round++) {
		ASSERT_EQ(1, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
		for (int i = 0; i < 32; i++)
			queue(r, request(IORING_OP_READ_FIXED, 0, addr + i * 65536ULL,
					 65536, i * 65536ULL));
		ASSERT_EQ(32, enter(r, 32, 0));
		ASSERT_EQ(0, control("device/device/remove", "1"));
		for (int i = 0; i < 32; i++) {
			__u64 which;
			int ret = reap(r, &which);

			/* The disk has size 0 now, so a read returns 0 bytes. */
			ASSERT_TRUE(ret == 65536 || ret <= 0);
		}
		/* Or the disk has size 0. */
		ASSERT_LE(read_fixed(r, addr, PAGE, 0), 0);
		ASSERT_LT(map_buffer(r, variant->dmabuf, self->mem, &mem, &addr), 0);
		/* The name of the disk is released with the last reference. */
		fd = open("/dev/null", O_RDWR | O_CLOEXEC);
		ASSERT_EQ(1, target(r, &fd));
		close(fd);
		close(self->disk);
		set_one(r, 0, (struct desc) { .type = EMPTY });
		self->disk = disk_again();
		ASSERT_GE(self->disk, 0);
		ASSERT_EQ(1, target(r, &self->disk));
		ASSERT_EQ(1, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
		ASSERT_EQ(PAGE, read_fixed(r, addr, PAGE, PAGE));
		ASSERT_TRUE(check_disk(mem, PAGE, PAGE));
		ASSERT_EQ(1, set_one(r, 0, (struct desc) { .type = EMPTY }));
	}
}

/*
 * The disk is suspended and resumed with requests in flight, with pm_test.  It
 * suspends all devices, or all up to one that refuses with EBUSY.
 */
TEST_F_TIMEOUT(premap, suspended, LONG)
{
	const bool polled = variant->setup & IORING_SETUP_IOPOLL;
	struct ring *r = &self->ring;
	unsigned char *mem;
	uint64_t addr;

	if (mode != SUSPEND)
		SKIP(return, "only in another mode");
	ASSERT_EQ(0, put("/sys/power/pm_test", "devices"));
	ASSERT_EQ(0, put(TRACING "events/block/block_rq_complete/enable", "1"));
	ASSERT_EQ(1, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
	/* The driver waits 30 seconds for requests that are not polled. */
	for (int round = 0; round < (polled ? 1 : 5); round++) {
		int ret, done, in_flight = -1;
		char line[300];
		FILE *trace;

		memset(mem, 0, DEPTH * 65536);
		for (int i = 0; i < DEPTH; i++)
			queue(r, request(IORING_OP_READ_FIXED, 0, addr + i * 65536ULL,
					 65536, i * 65536ULL));
		ASSERT_EQ(DEPTH, enter(r, DEPTH, 0));
		done = *r->cq_tail - *r->cq_head;
		ASSERT_EQ(0, trace_begin("p:premap_suspend nvme_suspend\n"));
		ret = put("/sys/power/state", "freeze");
		trace = trace_end();
		ASSERT_TRUE(!!trace);
		while (fgets(line, sizeof(line), trace)) {
			if (strstr(line, "premap_suspend:"))
				in_flight = 0;
			/* Identified by sector: the driver has internal requests, too. */
			if (in_flight >= 0 && strstr(line, "block_rq_complete:") &&
			    strstr(line, " + 128 "))
				in_flight++;
		}
		trace_close(trace);
		ASSERT_TRUE(ret == 0 || ret == -EBUSY);
		ASSERT_GE(in_flight, 0);
		ksft_print_msg("%d requests were in flight\n", in_flight);
		/*
		 * Other requests may have completed by then if this takes long.
		 * Of polled ones only those completed when the last was submitted.
		 */
		if (polled)
			ASSERT_EQ(DEPTH - done, in_flight);
		for (int i = 0; i < DEPTH; i++)
			ASSERT_EQ(65536, reap(r, NULL));
		ASSERT_TRUE(check_disk(mem, 0, DEPTH * 65536));
	}
	ASSERT_TRUE(both_ways(r, self->disk, mem, addr, 496 * PAGE, 16 * PAGE, PAGE));
}

/* Makes the disk the first device to be suspended, by detecting it last. */
static bool suspended_first(void)
{
	int fd;

	if (control("device/device/remove", "1") || put("/sys/power/pm_async", "0"))
		return false;
	fd = disk_again();
	close(fd);
	return fd >= 0;
}

TEST_F_TIMEOUT(premap, refused_by_the_device, LONG)
{
	struct desc desc = {
		.type = UADDR, .uaddr = (uintptr_t)self->mem, .size = BUFFER,
	};
	struct ring *r = &self->ring;
	unsigned char *mem;
	uint64_t addr;

	if (mode != REFUSED)
		SKIP(return, "only for mode \"refused\"");
	ASSERT_EQ(-EOPNOTSUPP, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
	ASSERT_EQ(-EFAULT, read_fixed(r, (uintptr_t)self->mem, PAGE, 0));
	ASSERT_EQ(1, set_one(r, 0, desc));
	ASSERT_EQ(PAGE, read_fixed(r, (uintptr_t)self->mem, PAGE, 0));
	ASSERT_TRUE(check_disk(self->mem, 0, PAGE));
}

int main(int argc, char **argv)
{
	static const char * const names[] = {
		"all", "refused", "bounce", "life", "suspend", "failures",
	};
	char *args[8] = { argv[0] };
	static char path[100];
	struct stat st;
	int nr = 1;

	if (argc < 2 || stat(argv[1], &st))
		ksft_exit_skip("usage: premap PATH [MODE]; overwrites a disk\n");
	for (unsigned int i = 0; argc > 2 && i < ARRAY_SIZE(names); i++)
		if (!strcmp(argv[2], names[i]))
			mode = i;
	disk_path = argv[1];
	file = S_ISDIR(st.st_mode);
	if (file) {
		snprintf(path, sizeof(path), "%s/premap", argv[1]);
		disk_path = path;
		close(open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600));
	}
	if (disk_fill())
		ksft_exit_fail_msg("%s: cannot write: %s\n", disk_path, strerror(errno));
	if (mode == REFUSED) {
		args[nr++] = "-t";
		args[nr++] = "refused_by_the_device";
	}
	if (mode == LIFE) {
		args[nr++] = "-t";
		args[nr++] = "controller_reset";
		args[nr++] = "-t";
		args[nr++] = "formatted";
		args[nr++] = "-t";
		args[nr++] = "controller_removed";
	}
	if (mode == SUSPEND) {
		if (!suspended_first())
			ksft_exit_fail_msg("%s: not detected after removal\n", disk_path);
		args[nr++] = "-t";
		args[nr++] = "suspended";
	}
	if (mode == FAILURES) {
		if (access("/proc/thread-self/fail-nth", W_OK))
			ksft_exit_skip("the kernel has no fault injection\n");
		args[nr++] = "-t";
		args[nr++] = "no_memory";
		args[nr++] = "-t";
		args[nr++] = "requests_that_fail";
	}
	if (mode == BOUNCE) {
		args[nr++] = "-V";
		args[nr++] = "heap";
		args[nr++] = "-V";
		args[nr++] = "udmabuf";
	}
	return test_harness_run(nr, args);
}
