// SPDX-License-Identifier: GPL-2.0-only
/*
 * premap DISK ROUNDS
 *
 * Runs in the machine, as root. It reads from a disk without a file system, DEPTH requests at a
 * time, into registered buffers that are mapped for each request, and into ones that are mapped
 * once, in turns, BATCHES times between marks (vm/mark.h). If the kernel cannot map buffers once,
 * only the first kind runs. Output:
 *
 *	ran RING MEMORY BYTES WAY COMMANDS	made marks for BATCHES batches, in this order, with
 *						COMMANDS to the disk
 *
 * With a polled ring, submission and reaping are counted, but not the waiting between them. With
 * interrupts, and for requests of 1 MiB, everything is counted.
 *
 * A heap's memory cannot be registered: requests read into other pages, which are then copied.
 */
#define _GNU_SOURCE
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/dma-buf.h>
#include <linux/dma-heap.h>
#include <linux/io_uring.h>
#include <linux/udmabuf.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "../../vm/mark.h"

#define BATCHES 10
#define DEPTH 8
#define BUFFER (DEPTH << 20)
#define PAGE 4096
#define NEVER_SPLIT (128 << 10)

enum { BEGIN, END };
enum { PER_REQUEST, ONCE };

/* As in the headers of a kernel with the series */
struct desc {
	__u32 type, flags;
	__u64 size, uaddr;
	__s32 dmabuf_fd, target_fd;
	__u64 resv[6];
};

enum { UADDR = 1, DMABUF };

#define MAPPED_FOR_FILE_0 0xc0000000U
#define EXTENDED 2

struct memory {
	const char *name;
	/* Target of requests that are mapped one by one, and the final place of the bytes */
	char *pages, *wanted;
	int dmabuf;
};

static const struct { const char *name; unsigned int flags; } rings[] = {
	{ "polled", IORING_SETUP_IOPOLL }, { "interrupts", 0 },
};

static const unsigned int sizes[] = { 512, 4096, 131072, 1 << 20 };
static const char *const ways[] = { "request", "once" };

static int ring, disk;
static unsigned int *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
static struct io_uring_sqe *sqes;
static struct io_uring_cqe *cqes;

static void *map(size_t size, int fd, off_t offset)
{
	void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);

	if (at == MAP_FAILED)
		err(1, "mmap");
	return at;
}

static int call(unsigned int opcode, void *what, unsigned int nr)
{
	return syscall(SYS_io_uring_register, ring, opcode, what, nr);
}

static void make_ring(unsigned int flags)
{
	struct io_uring_params p = { .flags = flags };
	struct io_uring_rsrc_register sparse = { .nr = 2, .flags = IORING_RSRC_REGISTER_SPARSE };
	char *sq, *cq;

	ring = syscall(SYS_io_uring_setup, DEPTH, &p);
	if (ring < 0)
		err(1, "io_uring_setup");
	sq = map(p.sq_off.array + p.sq_entries * sizeof(unsigned int), ring, IORING_OFF_SQ_RING);
	cq = map(p.cq_off.cqes + p.cq_entries * sizeof(*cqes), ring, IORING_OFF_CQ_RING);
	sqes = map(p.sq_entries * sizeof(*sqes), ring, IORING_OFF_SQES);
	sq_tail = (void *)(sq + p.sq_off.tail);
	sq_mask = (void *)(sq + p.sq_off.ring_mask);
	sq_array = (void *)(sq + p.sq_off.array);
	cq_head = (void *)(cq + p.cq_off.head);
	cq_tail = (void *)(cq + p.cq_off.tail);
	cq_mask = (void *)(cq + p.cq_off.ring_mask);
	cqes = (void *)(cq + p.cq_off.cqes);
	if (call(IORING_REGISTER_FILES, &disk, 1) ||
	    call(IORING_REGISTER_BUFFERS2, &sparse, sizeof(sparse)))
		err(1, "registering");
}

static int update(unsigned int slot, unsigned int flags, void *what)
{
	struct io_uring_rsrc_update2 up = {
		.offset = slot, .resv = flags, .data = (uintptr_t)what, .nr = 1,
	};

	return call(IORING_REGISTER_BUFFERS_UPDATE, &up, sizeof(up));
}

/* Whether this kernel can map buffers once */
static int registered(const struct memory *memory)
{
	struct iovec iov = { memory->pages, BUFFER };
	struct desc desc = { .type = UADDR, .flags = MAPPED_FOR_FILE_0 };

	if (update(PER_REQUEST, 0, &iov) != 1)
		err(1, "registering %s", memory->name);
	desc.uaddr = (uintptr_t)memory->pages;
	desc.size = BUFFER;
	if (memory->dmabuf >= 0)
		desc = (struct desc){
			.type = DMABUF, .dmabuf_fd = memory->dmabuf, .target_fd = disk,
		};
	if (update(ONCE, EXTENDED, &desc) == 1)
		return 1;
	if (errno != EINVAL)
		err(1, "mapping %s", memory->name);
	return 0;
}

static void enter(unsigned int submit, unsigned int wait)
{
	if (syscall(SYS_io_uring_enter, ring, submit, wait, IORING_ENTER_GETEVENTS, NULL, 0) < 0)
		err(1, "io_uring_enter");
}

/* A polled ring is polled only while no completion is ready. */
static void reap(unsigned int bytes)
{
	for (unsigned int reaped = 0; reaped < DEPTH; ) {
		unsigned int head = *cq_head;

		while (head != __atomic_load_n(cq_tail, __ATOMIC_ACQUIRE)) {
			const struct io_uring_cqe *cqe = &cqes[head++ & *cq_mask];

			if (cqe->res != (int)bytes)
				errx(1, "%d bytes of %u", cqe->res, bytes);
			reaped++;
		}
		__atomic_store_n(cq_head, head, __ATOMIC_RELEASE);
		if (reaped < DEPTH)
			enter(0, DEPTH - reaped);
	}
}

/* At a distance on the disk, so that the kernel does not merge reads into one command */
static void prepare(const struct memory *memory, int way, unsigned int bytes)
{
	unsigned int each = bytes < PAGE ? PAGE : bytes;

	for (unsigned int i = 0; i < DEPTH; i++) {
		unsigned int tail = *sq_tail;
		__u64 base = (uintptr_t)memory->pages;

		if (way == ONCE && memory->dmabuf >= 0)
			base = 0;
		sqes[tail & *sq_mask] = (struct io_uring_sqe){
			.opcode = IORING_OP_READ_FIXED, .flags = IOSQE_FIXED_FILE,
			.addr = base + i * each, .len = bytes, .off = 2 * i * each,
			.buf_index = way,
		};
		sq_array[tail & *sq_mask] = tail & *sq_mask;
		__atomic_store_n(sq_tail, tail + 1, __ATOMIC_RELEASE);
	}
}

static void copy(const struct memory *memory, unsigned int bytes)
{
	unsigned int each = bytes < PAGE ? PAGE : bytes;
	struct dma_buf_sync sync = { DMA_BUF_SYNC_START | DMA_BUF_SYNC_WRITE };

	if (ioctl(memory->dmabuf, DMA_BUF_IOCTL_SYNC, &sync))
		err(1, "DMA_BUF_IOCTL_SYNC");
	for (unsigned int i = 0; i < DEPTH; i++)
		memcpy(memory->wanted + i * each, memory->pages + i * each, bytes);
	sync.flags = DMA_BUF_SYNC_END | DMA_BUF_SYNC_WRITE;
	if (ioctl(memory->dmabuf, DMA_BUF_IOCTL_SYNC, &sync))
		err(1, "DMA_BUF_IOCTL_SYNC");
}

static void batch(const struct memory *memory, int polled, int way, unsigned int bytes)
{
	int copied = way == PER_REQUEST && memory->wanted != memory->pages;
	/* A worker completes split requests while this thread sleeps. */
	int apart = polled && bytes <= NEVER_SPLIT;

	prepare(memory, way, bytes);
	mark(BEGIN);
	enter(DEPTH, polled ? 0 : DEPTH);
	if (apart)
		mark(END);
	/* Usually long enough for all requests; the median ignores exceptions. */
	if (polled)
		usleep(2000 + bytes / 64);
	if (apart)
		mark(BEGIN);
	reap(bytes);
	if (copied)
		copy(memory, bytes);
	mark(END);
}

/* The number of commands that the disk has received */
static unsigned long commands(const char *name)
{
	unsigned long count;
	char path[100];
	FILE *file;

	snprintf(path, sizeof(path), "/sys/block/%s/stat", strrchr(name, '/') + 1);
	file = fopen(path, "r");
	if (!file || fscanf(file, "%lu", &count) != 1)
		err(1, "%s", path);
	fclose(file);
	return count;
}

/* Pages that are not contiguous, because they are touched in another order. */
static char *pages(int advice)
{
	const unsigned int count = BUFFER / PAGE;
	char *at = mmap(NULL, 2 * BUFFER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
			0);

	if (at == MAP_FAILED)
		err(1, "mmap");
	at += -(uintptr_t)at % BUFFER;
	madvise(at, BUFFER, advice);
	for (unsigned int i = 0; i < count; i++)
		at[(size_t)(i * 1031 % count) * PAGE] = 1;
	return at;
}

static struct memory make_udmabuf(void)
{
	int memfd = memfd_create("premap", MFD_ALLOW_SEALING | MFD_CLOEXEC);
	int device = open("/dev/udmabuf", O_RDWR | O_CLOEXEC);
	struct udmabuf_create create = { .memfd = memfd, .size = BUFFER };
	struct memory made = { "udmabuf", NULL, NULL, -1 };

	if (memfd < 0 || device < 0 || ftruncate(memfd, BUFFER) ||
	    fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK))
		err(1, "udmabuf");
	made.pages = map(BUFFER, memfd, 0);
	made.wanted = made.pages;
	made.dmabuf = ioctl(device, UDMABUF_CREATE, &create);
	if (made.dmabuf < 0)
		err(1, "udmabuf");
	return made;
}

static struct memory heap(void)
{
	struct dma_heap_allocation_data data = { .len = BUFFER, .fd_flags = O_RDWR | O_CLOEXEC };
	int device = open("/dev/dma_heap/system", O_RDWR | O_CLOEXEC);

	if (device < 0 || ioctl(device, DMA_HEAP_IOCTL_ALLOC, &data))
		err(1, "heap");
	return (struct memory){ "heap", pages(MADV_NOHUGEPAGE), map(BUFFER, data.fd, 0), data.fd };
}

int main(int argc, char **argv)
{
	struct memory memories[4] = { { "pages", NULL, NULL, -1 }, { "huge", NULL, NULL, -1 } };
	int rounds;

	if (argc != 3)
		errx(2, "premap DISK ROUNDS");
	setvbuf(stdout, NULL, _IOLBF, 0);
	disk = open(argv[1], O_RDONLY | O_DIRECT | O_CLOEXEC);
	if (disk < 0)
		err(1, "%s", argv[1]);
	rounds = atoi(argv[2]);
	memories[0].pages = pages(MADV_NOHUGEPAGE);
	memories[0].wanted = memories[0].pages;
	memories[1].pages = pages(MADV_HUGEPAGE);
	memories[1].wanted = memories[1].pages;
	memories[2] = make_udmabuf();
	memories[3] = heap();
	for (int polled = 1; polled >= 0; polled--) {
		make_ring(rings[!polled].flags);
		for (int m = 0; m < 4; m++) {
			int both = registered(&memories[m]);

			for (int s = 0; s < 4; s++) {
				for (int round = 0; round <= 2 * rounds + 1; round++) {
					/* The first two rounds warm up. The order alternates. */
					int way = (round + round / 2) % 2;
					unsigned long before = commands(argv[1]);

					if (way == ONCE && !both)
						continue;
					for (int i = 0; i < BATCHES; i++)
						batch(&memories[m], polled, way, sizes[s]);
					printf("ran %s %s %u %s %lu\n", rings[!polled].name,
					       memories[m].name, sizes[s], ways[way],
					       commands(argv[1]) - before);
				}
			}
		}
		close(ring);
	}
	return 0;
}
