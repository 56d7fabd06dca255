// SPDX-License-Identifier: GPL-2.0-only
/*
 * pin_makers              users that need only memory
 * pin_makers -d FILE DM   direct I/O in flight: FILE is on the device-mapper device DM
 * pin_makers -v DEVICE    VFIO: a PCI device (0000:00:05.0) that is bound to vfio-pci
 *
 * Tests all kinds of users of pinned memory: while memory is pinned, the kernel must show the
 * process, the call site and the number of bytes, and nothing afterwards.
 */
#define _GNU_SOURCE
#include "pins.h"

#include <dirent.h>
#include <linux/if_xdp.h>
#include <linux/io_uring.h>
#include <linux/udmabuf.h>
#include <linux/userfaultfd.h>
#include <linux/vfio.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#define PAGES	64U

static const char *file, *mapper, *device;

/* Checks that a process has pinned this, and nothing else, from this function. */
static void shown(pid_t pid, unsigned int pins, size_t bytes, const char *site)
{
	__u64 since;
	struct sums all = sums_of(pid), sums = sums_from(pid, site, &since);
	char path[64];

	snprintf(path, sizeof(path), "/proc/%d/pins", pid);
	must(sums.pins == pins && sums.bytes == (long long)bytes && all.pins == pins &&
	     all.bytes == (long long)bytes, "no %u pins, %zu bytes from %s: %s", pins, bytes, site,
	     text_of(path));
	must(since >= noted_at && since <= boot_time(), "made at %llu, not since %llu", since,
	     noted_at);
}

/* Checks that pins of a process that has ended are shown. */
static void shown_gone(pid_t pid, unsigned int pins, size_t bytes, const char *site)
{
	char want[64];

	snprintf(want, sizeof(want), "%d gone %u %zu ", pid, pins, bytes);
	must(LINE(BOOKS "owners", want, site), "no line with %s and %s: %s", want, site,
	     text_of(BOOKS "owners"));
}

/* Long-term pins are released when the user ends, perhaps with a short delay. */
static void none_shown(pid_t pid)
{
	unsigned int turn;

	for (turn = 0; turn < 600 && sums_of(pid).pins; turn++)
		usleep(100000);
	must(!sums_of(pid).pins, "%lld pins: %s", sums_of(pid).pins, text_of("/proc/self/pins"));
}

static int new_ring(void)
{
	struct io_uring_params params = {};
	int fd = syscall(__NR_io_uring_setup, 4, &params);

	must(fd >= 0, "io_uring_setup: %s", strerror(errno));
	return fd;
}

static void register_with(int ring, unsigned int opcode, void *argument, unsigned int nr)
{
	must(syscall(__NR_io_uring_register, ring, opcode, argument, nr) >= 0,
	     "io_uring_register %u: %s", opcode, strerror(errno));
}

static void register_buffer(int ring, __u8 *map, unsigned int pages)
{
	struct iovec vector = { map, pages * PAGE };

	register_with(ring, IORING_REGISTER_BUFFERS, &vector, 1);
}

static void ring_buffers(void)
{
	__u8 *map = small_pages(PAGES), *other = small_pages(PAGES);
	struct iovec vector = { other, 3 * PAGE };
	struct io_uring_rsrc_update2 update = { .data = (uintptr_t)&vector, .nr = 1 };
	int ring = new_ring();

	note_counts();
	register_buffer(ring, map, PAGES);
	shown(getpid(), PAGES, PAGES * PAGE, " io_pin_pages");
	register_with(ring, IORING_UNREGISTER_BUFFERS, NULL, 0);
	none_shown(getpid());

	/* Replace one of two buffers. */
	register_buffer(ring, map, PAGES);
	register_with(ring, IORING_REGISTER_BUFFERS_UPDATE, &update, sizeof(update));
	shown(getpid(), 3, 3 * PAGE, " io_pin_pages");
	close(ring);
	none_shown(getpid());
	munmap(map, PAGES * PAGE);
	munmap(other, PAGES * PAGE);
	as_before();
}

/* io_uring takes one pin for all of a huge page, whether it uses a few bytes or 512 pages. */
static void ring_huge(void)
{
	__u8 *map = huge_pages(2);
	struct sums sums;
	int ring = new_ring();

	note_counts();
	must(is_huge(map) && is_huge(map + HUGE), "no huge pages");
	register_buffer(ring, map, 1024);
	sums = sums_of(getpid());
	must(sums.pins == 2 && sums.bytes == 2 * HUGE, "%lld pins, %lld bytes", sums.pins,
	     sums.bytes);
	must(ask(map).count == 1, "%d", ask(map).count);
	close(ring);
	none_shown(getpid());
	munmap(map, 2 * HUGE);
	as_before();
}

#ifndef IORING_REGISTER_CLONE_BUFFERS
#define IORING_REGISTER_CLONE_BUFFERS	30
#endif

/* Cloned buffers stay pinned when the original ring is closed. */
static void ring_clone(void)
{
	__u8 *map = small_pages(PAGES);
	int ring = new_ring(), other = new_ring();
	struct { __u32 fd, flags, pad[6]; } clone = { .fd = ring };
	unsigned int turn;

	note_counts();
	register_buffer(ring, map, PAGES);
	register_with(other, IORING_REGISTER_CLONE_BUFFERS, &clone, 1);
	close(ring);
	for (turn = 0; turn < 10; turn++) {
		shown(getpid(), PAGES, PAGES * PAGE, " io_pin_pages");
		usleep(10000);
	}
	close(other);
	none_shown(getpid());
	munmap(map, PAGES * PAGE);
	as_before();
}

/* Starts a child that does its work and then waits to be killed. */
static pid_t child_with(void (*act)(void))
{
	pid_t child;
	int ends[2];
	char byte;

	must(!pipe(ends), "pipe");
	child = fork();
	must(child >= 0, "fork: %s", strerror(errno));
	if (!child) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		act();
		must(write(ends[1], "", 1) == 1, "pipe");
		while (true)
			pause();
	}
	close(ends[1]);
	must(read(ends[0], &byte, 1) == 1, "the child");
	close(ends[0]);
	return child;
}

static void killed(pid_t child)
{
	int status;

	kill(child, SIGKILL);
	must(waitpid(child, &status, 0) == child && WIFSIGNALED(status), "it ended with %x",
	     status);
}

/* Shared by a child and its parent */
static __u8 *mine;
static int my_ring;

static void with_ring(void)
{
	register_buffer(my_ring, mine, PAGES);
}

/* Pins of a killed process last as long as its ring, which another process still has open. */
static void ring_killed(void)
{
	pid_t child;

	note_counts();
	mine = small_pages(PAGES);
	my_ring = new_ring();
	child = child_with(with_ring);
	shown(child, PAGES, PAGES * PAGE, " io_pin_pages");
	killed(child);
	shown_gone(child, PAGES, PAGES * PAGE, " io_pin_pages");
	close(my_ring);
	munmap(mine, PAGES * PAGE);
	as_before();
}

#define SHMEM_HUGE	"/sys/kernel/mm/transparent_hugepage/shmem_enabled"

static void udmabufs(void)
{
	static const struct {
		const char *name;
		unsigned int flags;
		size_t folio;
		const char *huge;
	} kinds[] = {
		{ "small", 0, PAGE, "never" },
		{ "hugetlb", MFD_HUGETLB, HUGE, "never" },
		{ "shmem_huge", 0, HUGE, "always" },
	};
	int node = open("/dev/udmabuf", O_RDWR | O_CLOEXEC);
	unsigned int i;

	must(node >= 0, "/dev/udmabuf: %s", strerror(errno));
	note_counts();
	for (i = 0; i < ARRAY_SIZE(kinds); i++) {
		struct udmabuf_create create = { .size = 2 * HUGE };
		struct sums sums;
		int memfd, fd;
		__u8 *map;

		must(write_to(SHMEM_HUGE, kinds[i].huge), SHMEM_HUGE ": %s", strerror(errno));
		map = memfd_pages(kinds[i].name, kinds[i].flags, 2 * HUGE, &memfd);
		must(kinds[i].flags || is_huge(map) == (kinds[i].folio == HUGE),
		     "pages of %s have the flags %llx", kinds[i].name, flags_of(pfn_at(map)));
		must(!fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK), "seal: %s", strerror(errno));
		create.memfd = memfd;
		fd = call(node, UDMABUF_CREATE, &create);
		must(fd >= 0, "UDMABUF_CREATE: %s", why(fd));
		shown(getpid(), 2 * HUGE / kinds[i].folio, 2 * HUGE, " udmabuf_");
		munmap(map, 2 * HUGE);
		close(memfd);
		sums = sums_of(getpid());
		must(sums.bytes == 2 * HUGE, "%lld bytes", sums.bytes);
		close(fd);
		none_shown(getpid());
	}
	must(write_to(SHMEM_HUGE, "never"), SHMEM_HUGE ": %s", strerror(errno));
	close(node);
	as_before();
}

/* Between a child and its parent */
static int ends_of_socket[2];

union one_fd {
	struct cmsghdr header;
	char room[CMSG_SPACE(sizeof(int))];
};

static struct msghdr message_with(struct iovec *byte, union one_fd *fd)
{
	return (struct msghdr) {
		.msg_iov = byte,
		.msg_iovlen = 1,
		.msg_control = fd->room,
		.msg_controllen = sizeof(fd->room),
	};
}

static void send_udmabuf(void)
{
	struct udmabuf_create create = { .size = 4 * PAGE };
	int node = open("/dev/udmabuf", O_RDWR | O_CLOEXEC), memfd, fd;
	struct iovec byte = { "", 1 };
	union one_fd passed = { .header = { CMSG_LEN(sizeof(fd)), SOL_SOCKET, SCM_RIGHTS } };
	struct msghdr message = message_with(&byte, &passed);

	must(node >= 0, "/dev/udmabuf: %s", strerror(errno));
	memfd_pages("passed", 0, 4 * PAGE, &memfd);
	must(!fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK), "seal: %s", strerror(errno));
	create.memfd = memfd;
	fd = call(node, UDMABUF_CREATE, &create);
	must(fd >= 0, "UDMABUF_CREATE: %s", why(fd));
	memcpy(CMSG_DATA(&passed.header), &fd, sizeof(fd));
	must(sendmsg(ends_of_socket[0], &message, 0) == 1, "sendmsg: %s", strerror(errno));
}

/* A descriptor keeps the pins while it is in a socket, and after it has been received. */
static void udmabuf_passed(void)
{
	char byte;
	struct iovec room = { &byte, 1 };
	union one_fd passed;
	struct msghdr message = message_with(&room, &passed);
	unsigned int turn;
	pid_t child;
	int fd;

	note_counts();
	must(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends_of_socket), "socketpair: %s",
	     strerror(errno));
	child = child_with(send_udmabuf);
	shown(child, 4, 4 * PAGE, " udmabuf_");
	killed(child);
	for (turn = 0; turn < 2; turn++) {
		shown_gone(child, 4, 4 * PAGE, " udmabuf_");
		if (!turn)
			must(recvmsg(ends_of_socket[1], &message, MSG_CMSG_CLOEXEC) == 1,
			     "recvmsg: %s", strerror(errno));
	}
	memcpy(&fd, CMSG_DATA(&passed.header), sizeof(fd));
	close(fd);
	close(ends_of_socket[0]);
	close(ends_of_socket[1]);
	as_before();
	must(!LINE(BOOKS "owners", " udmabuf_"), "%s", text_of(BOOKS "owners"));
}

/* From mm/gup_test.h; the file is in debugfs */
#define LONGTERM_START	_IOW('g', 7, struct longterm)
#define LONGTERM_STOP	_IO('g', 8)

struct longterm {
	__u64 addr, size;
	__u32 flags;
};

static void by_gup_test(void)
{
	__u8 *map = small_pages(PAGES);
	int fd = open("/sys/kernel/debug/gup_test", O_RDWR | O_CLOEXEC);
	unsigned int flags;

	must(fd >= 0, "gup_test: %s", strerror(errno));
	note_counts();
	/* For writing, and then also with pin_user_pages_fast() */
	for (flags = 1; flags <= 3; flags += 2) {
		struct longterm test = { (uintptr_t)map, PAGES * PAGE, flags };

		must(!call(fd, LONGTERM_START, &test), "LONGTERM_START");
		/* The calling function, or the one that it is inlined into */
		shown(getpid(), PAGES, PAGES * PAGE, "_test_");
		must(!call(fd, LONGTERM_STOP, NULL), "LONGTERM_STOP");
		none_shown(getpid());
	}
	close(fd);
	munmap(map, PAGES * PAGE);
	as_before();
}

static void by_xdp(void)
{
	__u8 *map = small_pages(PAGES);
	struct xdp_umem_reg umem = { .addr = (uintptr_t)map, .len = PAGES * PAGE,
				     .chunk_size = PAGE };
	int fd = socket(AF_XDP, SOCK_RAW, 0);

	must(fd >= 0, "AF_XDP: %s", strerror(errno));
	note_counts();
	must(!setsockopt(fd, SOL_XDP, XDP_UMEM_REG, &umem, sizeof(umem)), "XDP_UMEM_REG: %s",
	     strerror(errno));
	shown(getpid(), PAGES, PAGES * PAGE, " xdp_umem_");
	close(fd);
	none_shown(getpid());
	munmap(map, PAGES * PAGE);
	as_before();
}

/* References of get_user_pages() are not pins, although they keep memory in place as well. */
static void vmsplice_gets(void)
{
	__u8 *map = small_pages(1);
	struct iovec vector = { map, PAGE };
	struct asked said;
	int ends[2], before;

	must(!pipe(ends), "pipe");
	note_counts();
	before = ask(map).refs;
	must(vmsplice(ends[1], &vector, 1, 0) == PAGE, "vmsplice: %s", strerror(errno));
	said = ask(map);
	must(said.refs == before + 1 && !said.count && !said.maybe, "%d references, %d pins",
	     said.refs, said.count);
	must(!sums_of(getpid()).pins && !COUNT_OF(pins_of(pfn_at(map))), "vmsplice is a pin");
	close(ends[0]);
	close(ends[1]);
	munmap(map, PAGE);
	as_before();
}

/* Checks that a page has short pins only: those have no owner. */
static bool is_held(__u64 pfn)
{
	char page[64];

	snprintf(page, sizeof(page), "%#llx 0 1 ", pfn);
	return LINE(BOOKS "pages", page, " - - - ?");
}

static void wait_held(__u64 pfn)
{
	unsigned int turn;

	for (turn = 0; turn < 600 && !is_held(pfn); turn++)
		usleep(100000);
	must(turn < 600, "page %llx is not pinned: %s", pfn, text_of(BOOKS "pages"));
}

static __u8 *parents;

/* Copies from the parent into memory that userfaultfd never provides. */
static void *copy(void *argument)
{
	struct iovec local = { argument, PAGE }, remote = { parents, PAGE };

	process_vm_readv(getppid(), &local, 1, &remote, 1, 0);
	return NULL;
}

static void with_copy(void)
{
	__u8 *map = map_at(PAGE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register range = {
		.range = { (uintptr_t)map, PAGE },
		.mode = UFFDIO_REGISTER_MODE_MISSING,
	};
	int fd = syscall(__NR_userfaultfd, O_CLOEXEC);
	pthread_t thread;

	must(fd >= 0 && !ioctl(fd, UFFDIO_API, &api) && !ioctl(fd, UFFDIO_REGISTER, &range),
	     "userfaultfd: %s", strerror(errno));
	must(!pthread_create(&thread, NULL, copy, map), "pthread_create");
}

static void by_process_vm(void)
{
	pid_t child;

	note_counts();
	/* Shared, because a private page of two processes would be copied when it is pinned. */
	parents = map_at(PAGE, MAP_SHARED | MAP_ANONYMOUS, -1);
	memset(parents, 1, PAGE);
	child = child_with(with_copy);
	wait_held(pfn_at(parents));
	must(!sums_of(getpid()).pins, "%s", text_of("/proc/self/pins"));
	killed(child);
	munmap(parents, PAGE);
	as_before();
}

static const struct test plain[] = {
	{ "ring_buffers", ring_buffers },
	{ "ring_huge", ring_huge },
	{ "ring_clone", ring_clone },
	{ "ring_killed", ring_killed },
	{ "udmabufs", udmabufs },
	{ "udmabuf_passed", udmabuf_passed },
	{ "by_gup_test", by_gup_test },
	{ "by_xdp", by_xdp },
	{ "vmsplice_gets", vmsplice_gets },
	{ "by_process_vm", by_process_vm },
};

static void dm(const char *what)
{
	char command[256];

	/* Discard its warning that it works without semaphores. */
	snprintf(command, sizeof(command), "dmsetup %s %s 2>/dev/null", what, mapper);
	must(!system(command), "%s", command);
}

/* Direct I/O on a suspended disk: its memory is pinned until the disk is resumed. */
static void direct(void)
{
	int fd = open(file, O_RDWR | O_CREAT | O_TRUNC | O_DIRECT | O_CLOEXEC, 0600);
	__u8 *map = small_pages(PAGES);
	unsigned int writes, i;
	pid_t child;

	must(fd >= 0 && write(fd, map, PAGES * PAGE) == PAGES * PAGE && !fsync(fd), "%s: %s", file,
	     strerror(errno));
	must(pread(fd, map, PAGES * PAGE, 0) == PAGES * PAGE, "%s: %s", file, strerror(errno));
	/* Shared, so that a child has the same pages. */
	munmap(map, PAGES * PAGE);
	map = map_at(PAGES * PAGE, MAP_SHARED | MAP_ANONYMOUS, -1);
	memset(map, 1, PAGES * PAGE);
	for (writes = 0; writes < 2; writes++) {
		sync();
		note_counts();
		dm("suspend --noflush --nolockfs");
		child = fork();
		must(child >= 0, "fork: %s", strerror(errno));
		if (!child) {
			ssize_t done;

			/*
			 * Linux 7.3 reads from Btrfs through the page cache where a page of the
			 * memory is not in the page table yet.
			 */
			memset(map, 1, PAGES * PAGE);
			done = writes ? pwrite(fd, map, PAGES * PAGE, 0) :
						pread(fd, map, PAGES * PAGE, 0);

			_exit(done == PAGES * PAGE ? 0 : 1);
		}
		for (i = 0; i < PAGES; i += PAGES - 1)
			wait_held(pfn_at(map + i * PAGE));
		must(!sums_of(child).pins, "short pins are shown");
		dm("resume");
		wait_for(child);
		as_before();
	}
	munmap(map, PAGES * PAGE);
	close(fd);
}

static int open_group(void)
{
	char path[128], group[256], node[64];
	ssize_t len;
	int fd;

	snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/iommu_group", device);
	len = readlink(path, group, sizeof(group) - 1);
	must(len > 0, "%s: %s", path, strerror(errno));
	group[len] = 0;
	snprintf(node, sizeof(node), "/dev/vfio/%s", strrchr(group, '/') + 1);
	fd = open(node, O_RDWR | O_CLOEXEC);
	must(fd >= 0, "%s: %s", node, strerror(errno));
	return fd;
}

/* Memory for a device, which the kernel pins in several steps */
static void by_vfio(void)
{
	const unsigned int pages = 4096;
	int container = open("/dev/vfio/vfio", O_RDWR | O_CLOEXEC), group = open_group();
	__u8 *map = small_pages(pages);
	struct vfio_iommu_type1_dma_map all = {
		.argsz = sizeof(all),
		.flags = VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE,
		.vaddr = (uintptr_t)map,
		.iova = 1 << 30,
		.size = pages * PAGE,
	};
	struct vfio_iommu_type1_dma_unmap none = {
		.argsz = sizeof(none),
		.iova = 1 << 30,
		.size = pages * PAGE,
	};
	unsigned int turn;
	int result;

	must(container >= 0, "/dev/vfio/vfio: %s", strerror(errno));
	must(!ioctl(group, VFIO_GROUP_SET_CONTAINER, &container), "container: %s", strerror(errno));
	must(!ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU), "type 1: %s", strerror(errno));
	note_counts();
	for (turn = 0; turn < 2; turn++) {
		result = call(container, VFIO_IOMMU_MAP_DMA, &all);
		must(!result, "MAP_DMA: %s", why(result));
		shown(getpid(), pages, pages * PAGE, " vaddr_get_pfns");
		/* Once explicitly, once by closing, as when a program exits. */
		if (!turn)
			must(!call(container, VFIO_IOMMU_UNMAP_DMA, &none), "UNMAP_DMA");
		else
			must(!close(group) && !close(container), "close");
		none_shown(getpid());
		as_before();
	}
	munmap(map, pages * PAGE);
}

int main(int argc, char **argv)
{
	const struct test on_disk = { "direct", direct }, of_device = { "by_vfio", by_vfio };

	open_pinner();
	if (argc == 4 && !strcmp(argv[1], "-d")) {
		file = argv[2];
		mapper = argv[3];
		return run_all(&on_disk, 1);
	}
	if (argc == 3 && !strcmp(argv[1], "-v")) {
		device = argv[2];
		return run_all(&of_device, 1);
	}
	return argc == 1 ? run_all(plain, ARRAY_SIZE(plain)) : 2;
}
