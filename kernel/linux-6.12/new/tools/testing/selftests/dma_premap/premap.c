// SPDX-License-Identifier: GPL-2.0
/*
 * io_uring's buffers that are mapped for a device once, on an NVMe disk without
 * a file system: premap DISK [refused].  What is on the disk is lost.  With
 * `refused` DISK is one that has to refuse, and go the ordinary way.
 *
 * The kernel is always compared with itself: what READ_FIXED has put into a
 * buffer with what pread() says, what WRITE_FIXED has left on the disk with the
 * buffer, and the bytes around both with what they were.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/dma-heap.h>
#include <linux/io_uring.h>
#include <linux/udmabuf.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../kselftest_harness.h"

/* As in linux/io_uring.h, which the C library's may be older than */
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
#define DISK	(16U << 20)		/* of which the tests make use */
#define BUFFER	(6U << 20)

struct ring {
	int fd;
	struct io_uring_sqe *sqes;
	unsigned int *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
	struct io_uring_cqe *cqes;
};

static const char *disk_path;
static bool refused;

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
	int ret = syscall(SYS_io_uring_enter, r->fd, submit, wait,
			  IORING_ENTER_GETEVENTS, NULL, 0);

	return ret < 0 ? -errno : ret;
}

/* The next completion's result; its user_data in @data, if that is wanted */
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
		.opcode = op, .flags = IOSQE_FIXED_FILE, .fd = 0, .off = at,
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

/* Byte @at of what the disk holds at first */
static unsigned char byte(uint64_t at)
{
	uint64_t x = (at / 8 + 1) * 0x9e3779b97f4a7c15;

	x ^= x >> 29;
	return x >> (8 * (at % 8));
}

static bool check_disk(const unsigned char *data, uint64_t at, size_t len)
{
	for (size_t i = 0; i < len; i++)
		if (data[i] != byte(at + i))
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

static int disk_open(int flags)
{
	return open(disk_path, flags | O_CLOEXEC);
}

static int disk_fill(void)
{
	unsigned char *data = mmap(NULL, DISK, PROT_READ | PROT_WRITE,
				   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int fd = disk_open(O_WRONLY | O_DIRECT), ret = -1;

	if (fd < 0 || data == MAP_FAILED)
		return -1;
	for (size_t i = 0; i < DISK; i++)
		data[i] = byte(i);
	if (pwrite(fd, data, DISK, 0) == DISK)
		ret = 0;
	munmap(data, DISK);
	close(fd);
	return ret;
}

static int heap_buffer(void)
{
	struct dma_heap_allocation_data data = {
		.len = BUFFER, .fd_flags = O_RDWR | O_CLOEXEC,
	};
	int heap = open("/dev/dma_heap/system", O_RDWR | O_CLOEXEC), ret = -1;

	if (heap >= 0 && !ioctl(heap, DMA_HEAP_IOCTL_ALLOC, &data))
		ret = data.fd;
	close(heap);
	return ret;
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
	unsigned char *mem;
};

FIXTURE_VARIANT(premap)
{
	/* Flags of the ring */
	unsigned int setup;
	bool huge;
	/* Makes the buffer, if it is not this process's memory */
	int (*dmabuf)(void);
};

FIXTURE_VARIANT_ADD(premap, pages) {};
FIXTURE_VARIANT_ADD(premap, polled) { .setup = IORING_SETUP_IOPOLL };
FIXTURE_VARIANT_ADD(premap, huge) { .huge = true };
FIXTURE_VARIANT_ADD(premap, heap) { .dmabuf = heap_buffer };
FIXTURE_VARIANT_ADD(premap, udmabuf) { .dmabuf = udmabuf_buffer };

FIXTURE_SETUP(premap)
{
	struct io_uring_rsrc_register sparse = { .nr = SLOTS, .flags = 1 };
	size_t huge = 2 << 20;

	ASSERT_EQ(0, ring_make(&self->ring, variant->setup));
	self->disk = disk_open(O_RDWR | O_DIRECT);
	ASSERT_GE(self->disk, 0);
	ASSERT_EQ(0, ring_register(&self->ring, IORING_REGISTER_FILES,
				   &self->disk, 1));
	ASSERT_EQ(0, ring_register(&self->ring, IORING_REGISTER_BUFFERS2,
				   &sparse, sizeof(sparse)));
	self->mem = mmap(NULL, BUFFER + huge, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ASSERT_NE(MAP_FAILED, self->mem);
	self->mem += -(uintptr_t)self->mem & (huge - 1);
	madvise(self->mem, BUFFER, variant->huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
	memset(self->mem, 0, BUFFER);
	ASSERT_EQ(0, disk_fill());
}

FIXTURE_TEARDOWN(premap)
{
	close(self->ring.fd);
	close(self->disk);
}

/*
 * Maps a dma-buf, or memory at @own, into slot 0.  @mem is where it can be looked
 * at, @addr its first address in requests.
 */
static int map_buffer(struct ring *r, int (*dmabuf)(void), unsigned char *own,
		      unsigned char **mem, uint64_t *addr)
{
	const size_t size = BUFFER - (uintptr_t)own % PAGE;
	struct desc desc = { .type = UADDR, .flags = PREMAP | TARGET_FIXED };
	int ret;

	if (!dmabuf) {
		*mem = own;
		*addr = (uintptr_t)own;
		desc.uaddr = *addr;
		desc.size = size;
		return set_one(r, 0, desc);
	}
	desc.type = DMABUF;
	desc.flags = TARGET_FIXED;
	desc.dmabuf_fd = dmabuf();
	*mem = mmap(NULL, BUFFER, PROT_READ | PROT_WRITE, MAP_SHARED,
		    desc.dmabuf_fd, 0);
	*addr = 0;
	if (*mem == MAP_FAILED)
		return -errno;
	ret = set_one(r, 0, desc);
	close(desc.dmabuf_fd);
	return ret;
}

/* One request each way; false if any byte in or around is wrong. */
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
	for (size_t i = 0; i < len; i++)
		back[i] = byte(at + i);
	return pwrite(disk, back, len, at) == (ssize_t)len;
}

/*
 * Where the entries of a request end with a page of the list, or @by pages beside
 * that: whole pages, and a part of the last.
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

TEST_F_TIMEOUT(premap, lengths, 3600)
{
	struct ring *r = &self->ring;
	static const size_t offsets[] = { 0, 4, 512, 4092 };
	static const size_t froms[] = { 0, 512, 3584, 4096 };
	static const size_t lengths[] = {
		512, 1024, 4096, 4608, 8192, 8704, 65536, 131072, 131584,
		524288, 1048576,
	};
	/* Of which each also crosses 32, the most that fit a small list */
	static const size_t pages[] = { 3, 4, 5, 11, 23, 32, 33, 34, 47, 95, 127, 128 };
	unsigned char *mem;
	uint64_t addr;

	for (int i = 0; i < (variant->dmabuf ? 1 : 4); i++) {
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

TEST_F(premap, outside)
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

/* The mapping goes with the registered file, behind the requests so far. */
TEST_F(premap, file_replaced)
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

TEST_F(premap, another_file)
{
	struct ring *r = &self->ring;
	struct io_uring_sqe sqe;
	unsigned char *mem;
	uint64_t addr;

	ASSERT_EQ(1, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
	sqe = request(IORING_OP_READ_FIXED, 0, addr, PAGE, PAGE);
	sqe.flags = 0;
	/* The same open file by its plain descriptor is the same file. */
	sqe.fd = self->disk;
	ASSERT_EQ(PAGE, transfer(r, sqe));
	ASSERT_TRUE(check_disk(mem, PAGE, PAGE));
	memset(mem, 0, PAGE);
	sqe.fd = disk_open(O_RDONLY | O_DIRECT);
	ASSERT_EQ(variant->dmabuf ? -EBADF : PAGE, transfer(r, sqe));
	if (!variant->dmabuf)
		ASSERT_TRUE(check_disk(mem, PAGE, PAGE));
	close(sqe.fd);
}

TEST_F(premap, direct_io_taken_away)
{
	struct ring *r = &self->ring;
	unsigned char *mem;
	uint64_t addr;

	if (variant->setup & IORING_SETUP_IOPOLL)
		SKIP(return, "such a ring has direct I/O only");
	ASSERT_EQ(1, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
	ASSERT_EQ(0, fcntl(self->disk, F_SETFL, 0));
	ASSERT_EQ(variant->dmabuf ? -EINVAL : PAGE, read_fixed(r, addr, PAGE, 0));
	if (!variant->dmabuf)
		ASSERT_TRUE(check_disk(mem, 0, PAGE));
	ASSERT_EQ(0, fcntl(self->disk, F_SETFL, O_DIRECT));
	ASSERT_EQ(PAGE, read_fixed(r, addr + PAGE, PAGE, PAGE));
	ASSERT_TRUE(check_disk(mem + PAGE, PAGE, PAGE));
}

TEST_F(premap, emptied_with_requests_in_flight)
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

/* Mapped and unmapped while it stays registered */
TEST_F(premap, mapped_afterwards)
{
	struct ring *r = &self->ring;
	const struct desc map = { .flags = PREMAP | TARGET_FIXED };
	const struct desc unmap = { .flags = PREMAP, .target_fd = -1 };
	struct desc desc = {
		.type = UADDR, .uaddr = (uintptr_t)self->mem, .size = BUFFER,
	};

	if (variant->dmabuf)
		SKIP(return, "of registered buffers");
	ASSERT_EQ(1, set_one(r, 0, desc));
	for (int i = 0; i < 10; i++) {
		ASSERT_EQ(PAGE, read_fixed(r, desc.uaddr, PAGE, i * PAGE));
		ASSERT_TRUE(check_disk(self->mem, i * PAGE, PAGE));
		ASSERT_EQ(1, set_one(r, 0, map));
		ASSERT_EQ(-EBUSY, set_one(r, 0, map));
		ASSERT_EQ(PAGE, read_fixed(r, desc.uaddr + PAGE, PAGE, i * PAGE));
		ASSERT_TRUE(check_disk(self->mem + PAGE, i * PAGE, PAGE));
		ASSERT_EQ(1, set_one(r, 0, unmap));
		ASSERT_EQ(1, set_one(r, 0, unmap));
	}
}

TEST_F(premap, refused)
{
	struct ring *r = &self->ring;
	struct desc uaddr = {
		.type = UADDR, .flags = PREMAP | TARGET_FIXED,
		.uaddr = (uintptr_t)self->mem, .size = BUFFER,
	};
	const __u32 clone[8] = { self->ring.fd };
	struct desc desc;
	struct ring other;
	int fd;

	if (variant->dmabuf)
		SKIP(return, "of registered buffers");
	/* What a program asks to know whether there is an extended update */
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
	EXPECT_EQ(1, set_one(r, 0, desc));
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

	/* The first error, and how many were done before it */
	EXPECT_EQ(1, set(r, 2, (struct desc[]) { uaddr, desc }, 2));

	EXPECT_EQ(0, ring_make(&other, 0));
	EXPECT_EQ(-EBUSY, ring_register(&other, CLONE_BUFFERS, (void *)clone, 1));
	close(other.fd);
}

/* Dies with requests in flight. */
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

TEST_F(premap, killed)
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

TEST_F(premap, refused_by_the_device)
{
	struct desc desc = {
		.type = UADDR, .uaddr = (uintptr_t)self->mem, .size = BUFFER,
	};
	struct ring *r = &self->ring;
	unsigned char *mem;
	uint64_t addr;

	if (!refused)
		SKIP(return, "it is not");
	ASSERT_EQ(-EOPNOTSUPP, map_buffer(r, variant->dmabuf, self->mem, &mem, &addr));
	ASSERT_EQ(-EFAULT, read_fixed(r, (uintptr_t)self->mem, PAGE, 0));
	ASSERT_EQ(1, set_one(r, 0, desc));
	ASSERT_EQ(PAGE, read_fixed(r, (uintptr_t)self->mem, PAGE, 0));
	ASSERT_TRUE(check_disk(self->mem, 0, PAGE));
}

int main(int argc, char **argv)
{
	if (argc < 2)
		ksft_exit_skip("premap DISK: what is on DISK is lost\n");
	disk_path = argv[1];
	refused = argc == 3 && !strcmp(argv[2], "refused");
	if (refused) {
		argv[1] = "-t";
		argv[2] = "refused_by_the_device";
		return test_harness_run(argc, argv);
	}
	argv[1] = argv[0];
	return test_harness_run(argc - 1, argv + 1);
}
