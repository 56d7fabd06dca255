/*
 * pinner MAKER...   pins known memory, each MAKER in a different way, and prints a line of JSON for each, then `ready`.
 * For each line of input, it releases the newest pins and prints `released`; at the end of its input, it ends.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/if_xdp.h>
#include <linux/io_uring.h>
#include <linux/udmabuf.h>
#include <linux/vfio.h>
#include <net/if.h>
#include <rdma/ib_user_verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define PAGE 4096UL
#define HUGE (2UL << 20)
#ifndef AF_XDP
#define AF_XDP 44
#endif
#ifndef SOL_XDP
#define SOL_XDP 283
#endif

/* Since Linux 6.12, with which its header came. */
#define REGISTER_CLONE_BUFFERS 30
struct clone_buffers { __u32 from, flags, from_first, to_first, many, pad[3]; };

/* The descriptors that hold the pins; they are closed from the last to the first. */
static int held[256][4];
static int count;

static void hold(int a, int b, int c)
{
	held[count][0] = a;
	held[count][1] = b;
	held[count][2] = c;
	held[count++][3] = -1;
}

static char *anon(size_t size, int flags)
{
	char *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);

	if (at == MAP_FAILED)
		err(1, "%zu bytes", size);
	return at;
}

/* Base pages. */
static char *small(size_t size)
{
	char *at = anon(size, 0);

	madvise(at, size, MADV_NOHUGEPAGE);
	memset(at, 1, size);
	return at;
}

/* One transparent huge page. */
static char *transparent(void)
{
	char *at = anon(2 * HUGE, 0);

	at = (char *)(((unsigned long)at + HUGE - 1) & ~(HUGE - 1));
	if (madvise(at, HUGE, MADV_HUGEPAGE))
		err(1, "MADV_HUGEPAGE");
	memset(at, 1, HUGE);
	return at;
}

static int empty_ring(void)
{
	struct io_uring_params params = {};
	int fd = syscall(SYS_io_uring_setup, 2, &params);

	if (fd < 0)
		err(1, "io_uring_setup");
	return fd;
}

static int ring(struct iovec *buffers, int many)
{
	int fd = empty_ring();

	if (syscall(SYS_io_uring_register, fd, IORING_REGISTER_BUFFERS, buffers, many))
		err(1, "IORING_REGISTER_BUFFERS");
	return fd;
}

static void buffer(const char *maker, char *at, size_t size)
{
	struct iovec one = { at, size };

	hold(ring(&one, 1), -1, -1);
	printf("{\"maker\": \"%s\", \"address\": %lu, \"bytes\": %zu}\n", maker, (unsigned long)at, size);
}

static int memfd(const char *name, size_t size, unsigned int flags)
{
	int fd = memfd_create(name, MFD_ALLOW_SEALING | flags);

	if (fd < 0 || ftruncate(fd, size) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK))
		err(1, "memfd");
	return fd;
}

/* Its memory, all of it present. */
static char *mapping(int fd, size_t size)
{
	char *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (at == MAP_FAILED)
		err(1, "mmap");
	return memset(at, 1, size);
}

static int create_udmabuf(const struct udmabuf_create *create)
{
	int node = open("/dev/udmabuf", O_RDWR), fd = ioctl(node, UDMABUF_CREATE, create), error = errno;

	close(node);
	errno = error;
	return fd;
}

static unsigned long inode(int fd)
{
	struct stat info;

	if (fstat(fd, &info))
		err(1, "fstat");
	return info.st_ino;
}

/* A udmabuf of a memfd that is mapped, or closed. */
static void udmabuf(const char *maker, size_t size, unsigned int flags, int gone)
{
	struct udmabuf_create create = { .memfd = memfd(maker, size, flags), .size = size };
	unsigned long below = inode(create.memfd);
	char *at = mapping(create.memfd, size);
	int fd = create_udmabuf(&create);

	if (fd < 0)
		err(1, "UDMABUF_CREATE");
	if (gone) {
		munmap(at, size);
		close(create.memfd);
		create.memfd = -1;
	}
	hold(create.memfd, fd, -1);
	printf("{\"maker\": \"%s\", \"address\": %lu, \"bytes\": %zu, \"inode\": %lu, \"memfd\": %lu, \"memfd_fd\": %d, \"fd\": %d}\n",
	       maker, (unsigned long)at, size, inode(fd), below, create.memfd, fd);
}

static void xdp(void)
{
	size_t size = 8 * PAGE;
	char *at = small(size);
	struct xdp_umem_reg area = { .addr = (unsigned long)at, .len = size, .chunk_size = 2048 };
	struct sockaddr_xdp lo = { .sxdp_family = AF_XDP, .sxdp_ifindex = if_nametoindex("lo") };
	int entries = 64, tries = 3000, fd = socket(AF_XDP, SOCK_RAW, 0);

	lo.sxdp_flags = XDP_COPY;
	if (fd < 0 || setsockopt(fd, SOL_XDP, XDP_UMEM_REG, &area, sizeof(area)) ||
	    setsockopt(fd, SOL_XDP, XDP_UMEM_FILL_RING, &entries, sizeof(entries)) ||
	    setsockopt(fd, SOL_XDP, XDP_UMEM_COMPLETION_RING, &entries, sizeof(entries)) ||
	    setsockopt(fd, SOL_XDP, XDP_TX_RING, &entries, sizeof(entries)))
		err(1, "AF_XDP");
	/* The kernel releases the previous socket some time after its end. */
	while (bind(fd, (struct sockaddr *)&lo, sizeof(lo)))
		if (errno != EBUSY || !tries-- || usleep(100000))
			err(1, "AF_XDP");
	hold(fd, -1, -1);
	printf("{\"maker\": \"xdp\", \"address\": %lu, \"bytes\": %zu, \"inode\": %lu}\n", (unsigned long)at, size, inode(fd));
}

/* Writes a command to uverbs, like libibverbs. */
static void verb(int fd, int command, void *message, size_t size, size_t answer)
{
	struct ib_uverbs_cmd_hdr *head = message;

	head->command = command;
	head->in_words = size / 4;
	head->out_words = answer / 4;
	if (write(fd, message, size) != (ssize_t)size)
		err(1, "uverbs command %d", command);
}

static void rdma(void)
{
	struct { struct ib_uverbs_cmd_hdr head; struct ib_uverbs_get_context body; } context = {};
	struct { struct ib_uverbs_cmd_hdr head; struct ib_uverbs_alloc_pd body; } domain = {};
	struct { struct ib_uverbs_cmd_hdr head; struct ib_uverbs_reg_mr body; } region = {};
	struct ib_uverbs_get_context_resp opened;
	struct ib_uverbs_alloc_pd_resp made;
	struct ib_uverbs_reg_mr_resp registered;
	int fd = open("/dev/infiniband/uverbs0", O_RDWR);
	size_t size = 5 * PAGE;
	char *at = small(size);

	if (fd < 0)
		err(1, "/dev/infiniband/uverbs0");
	context.body.response = (unsigned long)&opened;
	verb(fd, IB_USER_VERBS_CMD_GET_CONTEXT, &context, sizeof(context), sizeof(opened));
	domain.body.response = (unsigned long)&made;
	verb(fd, IB_USER_VERBS_CMD_ALLOC_PD, &domain, sizeof(domain), sizeof(made));
	region.body = (struct ib_uverbs_reg_mr){ .response = (unsigned long)&registered, .start = (unsigned long)at,
						 .length = size, .hca_va = (unsigned long)at, .pd_handle = made.pd_handle,
						 .access_flags = 1 };
	verb(fd, IB_USER_VERBS_CMD_REG_MR, &region, sizeof(region), sizeof(registered));
	hold(fd, opened.async_fd, -1);
	printf("{\"maker\": \"rdma\", \"address\": %lu, \"bytes\": %zu}\n", (unsigned long)at, size);
}

/* A direct read that lasts as long as the device is suspended. */
static void direct(const char *path)
{
	size_t size = 3 * PAGE;
	char *at = small(size);
	struct iocb read = { .aio_lio_opcode = IOCB_CMD_PREAD, .aio_buf = (unsigned long)at, .aio_nbytes = size };
	struct iocb *list = &read;
	aio_context_t context = 0;
	int fd = open(path, O_RDONLY | O_DIRECT);

	read.aio_fildes = fd;
	if (fd < 0 || syscall(SYS_io_setup, 1, &context) || syscall(SYS_io_submit, context, 1, &list) != 1)
		err(1, "%s", path);
	hold(-1, -1, -1);
	printf("{\"maker\": \"direct\", \"address\": %lu, \"bytes\": %zu}\n", (unsigned long)at, size);
}

/* A page with so many mappings that its references alone look like a pin. */
static void mapped(void)
{
	int fd = memfd("mapped", PAGE, 0);

	for (int i = 0; i < 1100; i++)
		mapping(fd, PAGE);
	hold(fd, -1, -1);
	printf("{\"maker\": \"mapped\", \"bytes\": 0, \"memfd\": %lu, \"memfd_fd\": %d}\n", inode(fd), fd);
}

/* One page in two buffers. */
static void twice(void)
{
	char *at = small(PAGE);
	struct iovec two[2] = { { at, PAGE }, { at, PAGE } };

	hold(ring(two, 2), -1, -1);
	printf("{\"maker\": \"twice\", \"address\": %lu, \"bytes\": %lu}\n", (unsigned long)at, PAGE);
}

/* A buffer in memory of a memfd. */
static void shared(void)
{
	size_t size = 6 * PAGE;
	int fd = memfd("shared", size, 0);
	char *at = mapping(fd, size);
	struct iovec one = { at + PAGE, 4 * PAGE };

	hold(ring(&one, 1), fd, -1);
	printf("{\"maker\": \"shared\", \"address\": %lu, \"bytes\": %zu, \"memfd\": %lu, \"memfd_fd\": %d}\n",
	       (unsigned long)at + PAGE, 4 * PAGE, inode(fd), fd);
}

/* A buffer into which direct I/O reads by itself, too: short pins of what is pinned for a long term. */
static void reused(const char *path)
{
	size_t size = 8 * PAGE;
	char *at = small(size);
	int fd = open(path, O_RDONLY | O_DIRECT);

	buffer("reused", at, size);
	for (int i = 0; i < 3; i++)
		if (fd < 0 || pread(fd, at, size, 0) != (ssize_t)size)
			err(1, "%s", path);
	close(fd);
}

/* A buffer that replaces another one. */
static void updated(void)
{
	struct iovec two[2] = { { small(3 * PAGE), 3 * PAGE }, { small(5 * PAGE), 5 * PAGE } };
	struct iovec other = { small(7 * PAGE), 7 * PAGE };
	struct io_uring_rsrc_update2 update = { .data = (unsigned long)&other, .nr = 1 };
	int fd = ring(two, 2);

	if (syscall(SYS_io_uring_register, fd, IORING_REGISTER_BUFFERS_UPDATE, &update, sizeof(update)) != 1)
		err(1, "IORING_REGISTER_BUFFERS_UPDATE");
	hold(fd, -1, -1);
	printf("{\"maker\": \"updated\", \"bytes\": %lu}\n", 12 * PAGE);
}

/* Buffers of a ring that is closed, in another one. */
static void cloned(void)
{
	struct iovec two[2] = { { small(4 * PAGE), 4 * PAGE }, { small(6 * PAGE), 6 * PAGE } };
	struct clone_buffers clone = { .from = ring(two, 2) };
	int fd = empty_ring();

	if (syscall(SYS_io_uring_register, fd, REGISTER_CLONE_BUFFERS, &clone, 1))
		err(1, "IORING_REGISTER_CLONE_BUFFERS");
	close(clone.from);
	hold(fd, -1, -1);
	printf("{\"maker\": \"cloned\", \"bytes\": %lu}\n", 10 * PAGE);
}

/* A udmabuf, after which another one of the same pages fails because the pool has no more. */
static void undone(void)
{
	size_t size = 2 * HUGE, most = 32 * HUGE;
	int below = memfd("undone", most, MFD_HUGETLB), fd;
	struct udmabuf_create create = { .memfd = below, .size = size };

	mapping(below, size);
	fd = create_udmabuf(&create);
	if (fd < 0)
		err(1, "UDMABUF_CREATE");
	create.size = most;
	if (create_udmabuf(&create) >= 0 || errno != ENOMEM)
		err(1, "a udmabuf of more than the pool");
	/* What it has allocated before it failed */
	if (fallocate(below, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, size, most - size))
		err(1, "fallocate");
	hold(below, fd, -1);
	printf("{\"maker\": \"udmabuf-undone\", \"bytes\": %zu}\n", size);
}

/* Memory that the device of this IOMMU group may access. */
static void vfio(const char *number)
{
	struct vfio_iommu_type1_dma_map map = { .argsz = sizeof(map), .iova = 1 << 20, .size = 9 * PAGE };
	int container = open("/dev/vfio/vfio", O_RDWR), group;
	char path[64];

	map.flags = VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE;
	map.vaddr = (unsigned long)small(map.size);
	snprintf(path, sizeof(path), "/dev/vfio/%s", number);
	group = open(path, O_RDWR);
	if (container < 0)
		err(1, "/dev/vfio/vfio");
	if (group < 0 || ioctl(group, VFIO_GROUP_SET_CONTAINER, &container) ||
	    ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU) || ioctl(container, VFIO_IOMMU_MAP_DMA, &map))
		err(1, "%s", path);
	hold(container, group, -1);
	printf("{\"maker\": \"vfio\", \"bytes\": %llu}\n", map.size);
}

int main(int argc, char **argv)
{
	char line[16];

	setlinebuf(stdout);
	for (int i = 1; i < argc; i++) {
		const char *maker = argv[i];

		if (!strcmp(maker, "small"))
			buffer(maker, small(37 * PAGE), 37 * PAGE);
		else if (!strcmp(maker, "large"))
			buffer(maker, small(64UL << 20), 64UL << 20);
		else if (!strcmp(maker, "hugetlb"))
			buffer(maker, memset(anon(2 * HUGE, MAP_HUGETLB), 1, 2 * HUGE), 2 * HUGE);
		else if (!strcmp(maker, "thp"))
			buffer(maker, transparent(), HUGE);
		else if (!strcmp(maker, "twice"))
			twice();
		else if (!strcmp(maker, "shared"))
			shared();
		else if (!strcmp(maker, "udmabuf"))
			udmabuf(maker, 16 * PAGE, 0, 0);
		else if (!strcmp(maker, "udmabuf-hugetlb"))
			udmabuf(maker, 2 * HUGE, MFD_HUGETLB, 0);
		else if (!strcmp(maker, "udmabuf-gone"))
			udmabuf(maker, 4 * PAGE, 0, 1);
		else if (!strcmp(maker, "xdp"))
			xdp();
		else if (!strcmp(maker, "rdma"))
			rdma();
		else if (!strcmp(maker, "mapped"))
			mapped();
		else if (!strcmp(maker, "updated"))
			updated();
		else if (!strcmp(maker, "cloned"))
			cloned();
		else if (!strcmp(maker, "udmabuf-undone"))
			undone();
		else if (!strncmp(maker, "vfio:", 5))
			vfio(maker + 5);
		else if (!strncmp(maker, "reused:", 7))
			reused(maker + 7);
		else if (!strncmp(maker, "direct:", 7))
			direct(maker + 7);
		else if (!strcmp(maker, "wait") && fgets(line, sizeof(line), stdin))
			printf("going on\n");
		else
			errx(1, "no such maker: %s", maker);
	}
	printf("ready\n");
	while (fgets(line, sizeof(line), stdin)) {
		if (!count)
			errx(1, "nothing is held");
		count--;
		for (int *fd = held[count]; fd < held[count] + 4; fd++)
			if (*fd >= 0)
				close(*fd);
		printf("released\n");
	}
	return 0;
}
