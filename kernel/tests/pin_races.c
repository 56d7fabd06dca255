// SPDX-License-Identifier: GPL-2.0-only
/*
 * pin_races SECONDS [RAW]
 *
 * Threads make short and long-term pins on the same pages, with /dev/pinner, with io_uring and, if
 * a disk is given, with direct I/O that completes in interrupts. Others fork, unmap, swap out,
 * collapse, protect, merge and migrate that memory, with several nodes also between them, offline
 * movable memory, and read all files of the tracker. The kernel must not report an error, and in
 * the end nothing may be pinned.
 */
#define _GNU_SOURCE
#include "pins.h"

#include <linux/io_uring.h>
#include <linux/udmabuf.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE	25
#endif

#define KSM	"/sys/kernel/mm/ksm/"

/* 4 MiB: small pages, some of which may become huge pages */
#define PAGES		1024U

static unsigned int seconds;
static const char *raw;
static __u8 *map;
static int memfd;
static __u8 *of_memfd;
static bool stop;
static unsigned long done;

static __u32 any(__u64 *seed, __u32 below)
{
	*seed = *seed * 6364136223846793005ULL + 1442695040888963407ULL;
	return (*seed >> 33) % below;
}

static bool going(void)
{
	__atomic_add_fetch(&done, 1, __ATOMIC_RELAXED);
	return !__atomic_load_n(&stop, __ATOMIC_RELAXED);
}

/* Memory may be unmapped at any time, so calls may fail. */
static void *pinning(void *argument)
{
	__u64 seed = (uintptr_t)argument;
	int fd = open("/dev/pinner", O_RDWR | O_CLOEXEC);

	must(fd >= 0, "/dev/pinner: %s", strerror(errno));
	while (going()) {
		struct pinner_pin pin = {
			.pages = 1 + any(&seed, any(&seed, 4) ? 8 : 600),
			.times = 1,
			.how = any(&seed, PINNER_GOT),
			.flags = any(&seed, 4),
			.id = getpid(),
		};
		struct pinner_unpin unpin = {
			.where = any(&seed, PINNER_WHERES),
			.by = any(&seed, 2),
		};
		__u64 first = any(&seed, PAGES - pin.pages);

		pin.address = (uintptr_t)(any(&seed, 2) ? map : of_memfd) + first * PAGE;
		if (pin.how == PINNER_MEMFD) {
			pin.address = first * PAGE;
			pin.id = memfd;
		}
		if (call(fd, PINNER_PIN, &pin))
			continue;
		unpin.handle = pin.handle;
		unpin.count = pin.pinned;
		must(!call(fd, PINNER_UNPIN, &unpin), "unpin");
	}
	close(fd);
	return NULL;
}

static void *rings(void *argument)
{
	__u64 seed = (uintptr_t)argument;

	while (going()) {
		struct io_uring_params params = {};
		int ring = syscall(__NR_io_uring_setup, 4, &params);
		unsigned int turn;

		must(ring >= 0, "io_uring_setup: %s", strerror(errno));
		for (turn = 0; turn < 8; turn++) {
			struct iovec vector = { map + any(&seed, PAGES / 2) * PAGE,
						(1 + any(&seed, PAGES / 2)) * PAGE };

			if (syscall(__NR_io_uring_register, ring, IORING_REGISTER_BUFFERS, &vector,
				    1))
				continue;
			if (turn < 7)
				syscall(__NR_io_uring_register, ring, IORING_UNREGISTER_BUFFERS,
					NULL, 0);
		}
		close(ring);
	}
	return NULL;
}

static void *udmabufs(void *argument)
{
	int node = open("/dev/udmabuf", O_RDWR | O_CLOEXEC);
	__u64 seed = (uintptr_t)argument;

	must(node >= 0, "/dev/udmabuf: %s", strerror(errno));
	while (going()) {
		struct udmabuf_create create = {
			.memfd = memfd,
			.offset = any(&seed, PAGES / 2) * PAGE,
			.size = (1 + any(&seed, PAGES / 2)) * PAGE,
		};
		int fd = call(node, UDMABUF_CREATE, &create);

		if (fd >= 0)
			close(fd);
	}
	close(node);
	return NULL;
}

/* Reads complete in interrupts, which unpin. */
static void *direct(void *argument)
{
	__u64 seed = (uintptr_t)argument;
	int fd = raw ? open(raw, O_RDONLY | O_DIRECT | O_CLOEXEC) : -1;

	must(!raw || fd >= 0, "%s: %s", raw, strerror(errno));
	while (raw && going()) {
		__u32 first = any(&seed, PAGES - 64);
		ssize_t got = pread(fd, map + first * PAGE, (1 + any(&seed, 64)) * PAGE, 0);

		must(got > 0 || errno == EFAULT || errno == ENOMEM, "read: %s", strerror(errno));
	}
	close(fd);
	return NULL;
}

#define MOVED	16

/* To another node, if there is one */
static void move(__u64 *seed, __u8 *from)
{
	int nodes[MOVED], status[MOVED], node = any(seed, 2);
	void *pages[MOVED];
	unsigned int i;

	for (i = 0; i < MOVED; i++) {
		pages[i] = from + i * PAGE;
		nodes[i] = node;
	}
	syscall(SYS_move_pages, 0, MOVED, pages, nodes, status, 2);
}

static void *changing(void *argument)
{
	__u64 seed = (uintptr_t)argument;

	while (going()) {
		__u32 pages = 1 + any(&seed, any(&seed, 2) ? 16 : PAGES - 1);
		__u8 *from = map + any(&seed, PAGES - pages) * PAGE;
		size_t size = pages * PAGE;

		switch (any(&seed, 9)) {
		case 0:
			madvise(from, size, MADV_DONTNEED);
			break;
		case 1:
			madvise(from, size, MADV_PAGEOUT);
			break;
		case 2:
			madvise(map, PAGES * PAGE, MADV_COLLAPSE);
			break;
		case 3:
			mprotect(from, size, PROT_READ);
			mprotect(from, size, PROT_READ | PROT_WRITE);
			break;
		case 4:
			/* The page is moved elsewhere, and a new one takes its place. */
			munmap(mremap(from, size, size, MREMAP_MAYMOVE | MREMAP_DONTUNMAP), size);
			break;
		case 5:
			madvise(of_memfd, PAGES * PAGE, MADV_REMOVE);
			break;
		case 6:
			move(&seed, map + any(&seed, PAGES - MOVED) * PAGE);
			move(&seed, of_memfd + any(&seed, PAGES - MOVED) * PAGE);
			break;
		case 7:
			/* Most pages are equal. */
			madvise(from, size, any(&seed, 4) ? MADV_MERGEABLE : MADV_UNMERGEABLE);
			break;
		default:
			madvise(from, size, MADV_POPULATE_WRITE);
			madvise(of_memfd, PAGES * PAGE, MADV_POPULATE_WRITE);
		}
	}
	return NULL;
}

/* Children write to pinned pages, pin them as well, and exit without unpinning. */
static void *forking(void *argument)
{
	__u64 seed = (uintptr_t)argument;

	while (going()) {
		struct iovec vector = { map, 64 * PAGE };
		struct io_uring_params params = {};
		pid_t child = fork();

		must(child >= 0, "fork: %s", strerror(errno));
		if (!child) {
			/* After fork() only this thread exists: use only system calls. */
			struct pinner_pin pin = {
				.address = (uintptr_t)map,
				.pages = 64,
				.times = 1,
				.flags = any(&seed, 4),
			};
			int fd = open("/dev/pinner", O_RDWR | O_CLOEXEC), ring;

			ioctl(fd, PINNER_PIN, &pin);
			ring = syscall(__NR_io_uring_setup, 4, &params);
			syscall(__NR_io_uring_register, ring, IORING_REGISTER_BUFFERS, &vector, 1);
			ioctl(fd, PINNER_PIN, &pin);
			syscall(SYS_exit_group, 0);
		}
		waitpid(child, NULL, 0);
	}
	return NULL;
}

static unsigned int plugged;

/* Memory blocks are removed with the tracker's data for their pages, and added again. */
static void *plugging(void *argument)
{
	unsigned int number;
	char command[256];
	int status;

	(void)argument;
	while (going()) {
		for (number = 0; number < 64 && going(); number++) {
			/* Offlining waits for pinned pages, and fails for unmovable ones. */
			snprintf(command, sizeof(command),
				 "cd /sys/devices/system/memory/memory%u 2>/dev/null || exit 0\n"
				 "grep -q Movable valid_zones || exit 0\n"
				 "timeout 40 sh -c 'echo offline >state' 2>/dev/null\n"
				 "! grep -q online state || exit 0\n"
				 "echo online >state && exit 9", number);
			status = system(command);
			must(!status || (WIFEXITED(status) && WEXITSTATUS(status) == 9),
			     "block %u: cannot be onlined again", number);
			plugged += !!status;
		}
		usleep(100000);
	}
	return NULL;
}

/* Reads the files of the tracker at the same time, into a per-thread buffer. */
static void *reading(void *argument)
{
	static const char * const paths[] = {
		"/proc/self/pins", "/proc/kpagepins", "/proc/kpageflags", BOOKS "owners",
		BOOKS "pages", BOOKS "blocked", BOOKS "stats", BOOKS "check",
	};
	static char text[1 << 20];
	unsigned int i;

	(void)argument;
	while (going()) {
		for (i = 0; i < ARRAY_SIZE(paths); i++) {
			int fd = open(paths[i], O_RDONLY | O_CLOEXEC);
			ssize_t got;

			must(fd >= 0, "%s: %s", paths[i], strerror(errno));
			do {
				got = read(fd, text, sizeof(text));
				must(got >= 0, "%s: %s", paths[i], strerror(errno));
				/* Only a complete output is a result. */
				must(i < 7 || !got || (got == sizeof(FINE) - 1 &&
						       !memcmp(text, FINE, got)),
				     "check: %.*s", (int)got, text);
			} while (got);
			close(fd);
		}
	}
	return NULL;
}

static void races(void)
{
	void *(*const all[])(void *) = {
		pinning, pinning, rings, rings, udmabufs, direct, changing, forking, plugging,
		reading,
	};
	pthread_t threads[ARRAY_SIZE(all)];
	unsigned long i;

	must(write_to(KSM "sleep_millisecs", "10") && write_to(KSM "run", "1"), KSM ": %s",
	     strerror(errno));
	note_counts();
	map = huge_pages(PAGES * PAGE / HUGE);
	of_memfd = memfd_pages("races", 0, PAGES * PAGE, &memfd);
	must(!fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK), "seal");
	for (i = 0; i < ARRAY_SIZE(all); i++)
		must(!pthread_create(&threads[i], NULL, all[i], (void *)(i + 1)), "pthread_create");
	sleep(seconds);
	__atomic_store_n(&stop, true, __ATOMIC_RELAXED);
	for (i = 0; i < ARRAY_SIZE(all); i++)
		pthread_join(threads[i], NULL);
	printf("# %lu turns, %u blocks of memory were offline\n", done, plugged);
	munmap(map, PAGES * PAGE);
	munmap(of_memfd, PAGES * PAGE);
	close(memfd);
	must(write_to(KSM "run", "0"), KSM ": %s", strerror(errno));
	as_before();
}

int main(int argc, char **argv)
{
	const struct test test = { "races", races };

	if (argc < 2)
		return 2;
	seconds = strtoul(argv[1], NULL, 0);
	raw = argv[2];
	open_pinner();
	return run_all(&test, 1);
}
