// SPDX-License-Identifier: GPL-2.0-only
/*
 * pin_moves TEST...
 *
 * Tests what pins prevent: sealing, migration, CMA allocation and memory offlining fail, equal
 * pages are not merged, and huge pages are not split. The kernel must report the owner of the pins,
 * and all of this must succeed once the pins have been released. Pages that only have many
 * references are reclaimed.
 *
 * `nodes` needs two NUMA nodes, `cma` a CMA area (cma=512M), `offline` a movable zone
 * (kernelcore=1G), `soft_offline` CONFIG_MEMORY_FAILURE, `reclaimed` swap, `unmounted` a disk
 * ($RAW); `off` is for a kernel that does not track pins.
 */
#define _GNU_SOURCE
#include "pins.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE	25
#endif
#ifndef MADV_SOFT_OFFLINE
#define MADV_SOFT_OFFLINE	101
#endif

static char **names;

/* Returns the last line in `blocked` for this page, or NULL. */
static char *blocked(const char *why, __u64 pfn)
{
	char *text = text_of(BOOKS "blocked"), *found = NULL, *line;
	static char last[1024];
	char want[64];

	snprintf(want, sizeof(want), " %s %#llx ", why, pfn);
	for (line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
		if (!strstr(line, want))
			continue;
		snprintf(last, sizeof(last), "%s", line);
		found = last;
	}
	return found;
}

static void must_say(const char *why, __u64 pfn, const char *what)
{
	char *line = blocked(why, pfn);

	must(line && strstr(line, what), "no line with %s, %llx and %s, but %s; all: %s", why, pfn,
	     what, line, text_of(BOOKS "blocked"));
}

/* The four ways to hold a page */
enum by { BY_LONG, BY_SHORT, BY_REFERENCE, BY_NOBODY, BYS };

static __u32 hold_by(enum by by, const void *address)
{
	static const enum pinner_how how[] = { PINNER_FAST, PINNER_FAST, PINNER_GOT };

	return by == BY_NOBODY ? 0 :
	       pin(how[by], by == BY_LONG ? PINNER_LONGTERM | PINNER_WRITE : PINNER_WRITE,
		   address, 1);
}

/* The expected text in the line of `blocked` */
static const char *said_of(enum by by)
{
	static char text[128];

	if (by == BY_LONG)
		snprintf(text, sizeof(text), " 1 0 %d %d ", getpid(), getpid());
	else
		snprintf(text, sizeof(text), " %s - - - ?", by == BY_SHORT ? "1 0" : "0 1");
	return text;
}

/* A memfd cannot be sealed while something may write to its pages without the file system. */
static void seal(void)
{
	enum by by;

	for (by = 0; by < BYS; by++) {
		__u32 handle;
		__u64 pfn;
		__u8 *map;
		int fd;

		note_counts();
		map = memfd_pages("sealed", 0, 4 * PAGE, &fd);
		handle = hold_by(by, map + PAGE);
		pfn = pfn_at(map + PAGE);
		munmap(map, 4 * PAGE);
		if (by != BY_NOBODY) {
			must(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE) == -1 && errno == EBUSY,
			     "sealed: %s", strerror(errno));
			must_say("seal_write", pfn, said_of(by));
			must_say("seal_write", pfn, " 0 file ");
			unpin(handle, 1);
		}
		must(!fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), "not sealed: %s", strerror(errno));
		close(fd);
		as_before();
	}
}

static int node_of(void *page)
{
	int status = -1000;

	must(!syscall(SYS_move_pages, 0, 1, &page, NULL, &status, 0), "move_pages: %s",
	     strerror(errno));
	return status;
}

static int move_to(void *page, int node)
{
	int status = -1000;

	syscall(SYS_move_pages, 0, 1, &page, &node, &status, 2);
	return status;
}

static void nodes(void)
{
	enum by by;

	for (by = 0; by < BYS; by++) {
		__u8 *map = small_pages(1);
		int node = node_of(map);
		__u32 handle;
		__u64 pfn;

		note_counts();
		must(node == 0 || node == 1, "node %d", node);
		handle = hold_by(by, map);
		pfn = pfn_at(map);
		if (by != BY_NOBODY) {
			move_to(map, 1 - node);
			must(node_of(map) == node && pfn_at(map) == pfn, "it has moved");
			must_say("syscall_or_cpuset", pfn, said_of(by));
			must_say("syscall_or_cpuset", pfn, " 0 anon ");
			unpin(handle, 1);
		}
		move_to(map, 1 - node);
		must(node_of(map) == 1 - node && pfn_at(map) != pfn, "it has not moved");
		munmap(map, PAGE);
		as_before();
	}
}

/* Allocates pages until one has this property. */
static __u8 *page_that(bool (*is_right)(__u64 pfn))
{
	/* Some memory is used only when other memory is low. */
	const unsigned int pages = number_in("/proc/meminfo", "MemFree") / 4 / 10 * 9;
	__u8 *map = map_at(pages * PAGE, MAP_PRIVATE | MAP_ANONYMOUS, -1), *there;
	unsigned int i;

	madvise(map, pages * PAGE, MADV_NOHUGEPAGE);
	for (i = 0; i < pages; i++) {
		map[i * PAGE] = 1;
		if (is_right(pfn_at(map + i * PAGE)))
			break;
	}
	must(i < pages, "none of %u pages is where it should be", pages);
	there = map + i * PAGE;
	if (i)
		munmap(map, i * PAGE);
	munmap(there + PAGE, (pages - i - 1) * PAGE);
	return there;
}

#define AREA	"/sys/kernel/debug/cma/reserved/"

static struct {
	__u64 first, count;
} area;

static bool in_area(__u64 pfn)
{
	return pfn >= area.first && pfn - area.first < area.count;
}

static void cma(void)
{
	char all[32];
	__u32 handle;
	__u8 *there;
	enum by by;
	__u64 pfn;

	area.first = strtoull(text_of(AREA "base_pfn"), NULL, 0);
	area.count = strtoull(text_of(AREA "count"), NULL, 0);
	there = page_that(in_area);
	pfn = pfn_at(there);
	snprintf(all, sizeof(all), "%llu", area.count);
	for (by = BY_SHORT; by < BYS; by++) {
		struct pinner_pin lasting = {
			.address = (uintptr_t)there,
			.pages = 1,
			.flags = PINNER_LONGTERM | PINNER_WRITE,
		};
		int result;

		note_counts();
		handle = hold_by(by, there);
		if (by != BY_NOBODY) {
			must(pfn_at(there) == pfn, "it has moved");
			must(!write_to(AREA "alloc", all), "the area is allocated");
			must(pfn_at(there) == pfn, "it has moved");
			/* For held anonymous memory, the kernel does not even try migration. */
			must_say("not_freed", pfn, said_of(by));
			/* It cannot be pinned long-term there, and cannot be migrated. */
			result = try_pin(&lasting);
			must(result == -ENOMEM && pfn_at(there) == pfn, "pinned: %s", why(result));
			must_say("longterm_pin", pfn, said_of(by));
			unpin(handle, 1);
		}
	}
	/* A long-term pin migrates the page first. */
	handle = hold_by(BY_LONG, there);
	must(!in_area(pfn_at(there)), "it is still in the area");
	must(write_to(AREA "alloc", all), "the area is not allocated: %s", strerror(errno));
	must(write_to(AREA "free", all), "the area is not freed: %s", strerror(errno));
	unpin(handle, 1);
	munmap(there, PAGE);
	as_before();
}

#define BLOCKS	"/sys/devices/system/memory/"

static struct {
	__u64 pages;	/* per block */
	bool movable[1024];
} blocks;

/*
 * Part of a movable zone is used by the firmware, by early allocations of the kernel, or by the
 * kernel itself, at a random address (KASLR).
 */
static bool has_reserved(__u64 block)
{
	static __u64 flags[1 << 15];
	int fd = open("/proc/kpageflags", O_RDONLY | O_CLOEXEC);
	bool found = false;
	__u64 done, i;

	must(fd >= 0, "/proc/kpageflags: %s", strerror(errno));
	for (done = 0; done < blocks.pages && !found; done += ARRAY_SIZE(flags)) {
		const off_t at = (block * blocks.pages + done) * sizeof(*flags);

		must(pread(fd, flags, sizeof(flags), at) == sizeof(flags), "/proc/kpageflags: %s",
		     strerror(errno));
		for (i = 0; i < ARRAY_SIZE(flags) && !found; i++)
			found = flags[i] >> KPF_RESERVED & 1;
	}
	close(fd);
	return found;
}

static bool is_movable(__u64 block)
{
	char path[96];

	snprintf(path, sizeof(path), BLOCKS "memory%llu/valid_zones", block);
	return !access(path, F_OK) && !strcmp(text_of(path), "Movable\n") && !has_reserved(block);
}

static bool in_movable_block(__u64 pfn)
{
	return pfn / blocks.pages < ARRAY_SIZE(blocks.movable) &&
	       blocks.movable[pfn / blocks.pages];
}

/*
 * A temporary user of the block, such as a page that is being freed, makes offlining fail
 * with EBUSY at once.  Otherwise it is retried until a signal arrives.
 */
static bool offline(const char *path)
{
	for (unsigned int turn = 0; turn < 300; turn++) {
		if (write_to(path, "offline"))
			return true;
		if (errno != EBUSY)
			return false;
		usleep(100000);
	}
	return false;
}

static void take_offline(void)
{
	unsigned int number, count = 0;
	enum by by;

	blocks.pages = strtoull(text_of(BLOCKS "block_size_bytes"), NULL, 16) / PAGE;
	for (number = 0; number < ARRAY_SIZE(blocks.movable); number++) {
		blocks.movable[number] = is_movable(number);
		count += blocks.movable[number];
	}
	must(count, "no block of memory is movable");
	for (by = BY_SHORT; by < BY_NOBODY; by++) {
		__u8 *map = page_that(in_movable_block);
		const __u64 pfn = pfn_at(map);
		unsigned int turn;
		char path[96];
		__u32 handle;
		pid_t child;
		int status;

		note_counts();
		handle = hold_by(by, map);
		snprintf(path, sizeof(path), BLOCKS "memory%llu/state", pfn / blocks.pages);
		must(!strcmp(text_of(path), "online\n"), "%s: %s", path, text_of(path));
		child = fork();
		if (!child)
			_exit(offline(path) ? 0 : errno);
		for (turn = 0; turn < 600 && !blocked("memory_hotplug", pfn); turn++)
			usleep(100000);
		must_say("memory_hotplug", pfn, said_of(by));
		kill(child, SIGINT);
		must(waitpid(child, &status, 0) == child && status, "it is offline");
		must(pfn_at(map) == pfn, "it has moved");
		unpin(handle, 1);
		must(offline(path), "%s: %s", path, strerror(errno));
		must(pfn_at(map) != pfn, "it has not moved");
		consistent();
		must(write_to(path, "online"), "%s: %s", path, strerror(errno));
		munmap(map, PAGE);
		as_before();
	}
}

/* Memory of the kernel, here page tables, cannot be offlined. Trying this does no harm. */
static void unmovable(void)
{
	const size_t size = 64UL << 30;
	const __u8 *map = mmap(NULL, size, PROT_READ,
			       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	unsigned int number, refused = 0;
	char path[96];
	size_t at;

	note_counts();
	must(map != MAP_FAILED, "mmap: %s", strerror(errno));
	madvise((void *)map, size, MADV_NOHUGEPAGE);
	for (at = 0; at < size; at += HUGE)
		must(!map[at], "the zero page");
	for (number = 0; number < 64; number++) {
		snprintf(path, sizeof(path), BLOCKS "memory%u/state", number);
		if (access(path, F_OK) || strcmp(text_of(path), "online\n"))
			continue;
		if (!write_to(path, "offline"))
			refused++;
		else
			must(write_to(path, "online"), "%s: %s", path, strerror(errno));
	}
	must(refused, "all memory went offline");
	must(LINE(BOOKS "blocked", " unmovable 0x"), "%s", text_of(BOOKS "blocked"));
	munmap((void *)map, size);
	as_before();
}

#define SPLIT	"/sys/kernel/debug/split_huge_pages"
#define KSM	"/sys/kernel/mm/ksm/"

static void wait_for_scans(const char *path, unsigned int count)
{
	const __u64 before = strtoull(text_of(path), NULL, 10);
	unsigned int turn;

	for (turn = 0; turn < 6000; turn++) {
		if (strtoull(text_of(path), NULL, 10) > before + count)
			return;
		usleep(100000);
	}
	must(false, "%s: did not increase by %u", path, count);
}

/* KSM must not merge two equal pages while one is held. */
static void ksm(void)
{
	enum by by;

	must(write_to(KSM "smart_scan", "0") && write_to(KSM "sleep_millisecs", "10") &&
	     write_to(KSM "pages_to_scan", "1000") && write_to(KSM "run", "1"), "%s",
	     strerror(errno));
	for (by = 0; by < BYS; by++) {
		__u8 *map = small_pages(2);
		unsigned int turn;
		__u32 handle;
		__u64 pfn;

		note_counts();
		memset(map, 0x80 + by, 2 * PAGE);
		handle = hold_by(by, map);
		pfn = pfn_at(map);
		must(!madvise(map, 2 * PAGE, MADV_MERGEABLE), "madvise: %s", strerror(errno));
		if (by != BY_NOBODY) {
			/* KSM scans a page twice before it tries to merge it. */
			wait_for_scans(KSM "full_scans", 4);
			must(pfn_at(map) == pfn && pfn_at(map + PAGE) != pfn, "they were merged");
			unpin(handle, 1);
		}
		for (turn = 0; turn < 1200 && pfn_at(map) != pfn_at(map + PAGE); turn++)
			usleep(100000);
		must(pfn_at(map) == pfn_at(map + PAGE), "they were not merged");
		munmap(map, 2 * PAGE);
		as_before();
	}
	must(write_to(KSM "run", "0"), "%s", strerror(errno));
}

/* A huge page is not split while a part of it is held. */
static void huge(void)
{
	enum by by;

	for (by = 0; by < BYS; by++) {
		__u8 *map = huge_pages(1);
		char range[96];
		__u32 handle;
		__u64 pfn;

		note_counts();
		madvise(map, HUGE, MADV_COLLAPSE);
		must(is_huge(map), "the page is small");
		snprintf(range, sizeof(range), "%d,0x%lx,0x%lx,0", getpid(), (long)map,
			 (long)map + HUGE);
		handle = hold_by(by, map + 7 * PAGE);
		pfn = pfn_at(map);
		if (by != BY_NOBODY) {
			must(write_to(SPLIT, range), "%s", strerror(errno));
			must(is_huge(map) && pfn_at(map) == pfn, "it is split");
			unpin(handle, 1);
		}
		must(write_to(SPLIT, range), "%s", strerror(errno));
		must(!is_huge(map) && !is_huge(map + HUGE - PAGE), "it is not split");
		munmap(map, HUGE);
		as_before();
	}
}

#define KHUGEPAGED	"/sys/kernel/mm/transparent_hugepage/khugepaged/"

/*
 * Small pages of the size of a huge page, anonymous or in a memfd. One of them is held.
 */
static __u8 *to_collapse(bool shared, enum by by, __u32 *handle, __u64 *pfn)
{
	__u8 *map = map_at(2 * HUGE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	__u8 *from = (__u8 *)round_up((uintptr_t)map, HUGE);
	int fd;

	munmap(map, from - map);
	munmap(from + HUGE, map + HUGE - from);
	if (shared) {
		fd = memfd_create("collapsed", 0);
		must(fd >= 0 && !ftruncate(fd, HUGE), "memfd: %s", strerror(errno));
		must(mmap(from, HUGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) ==
		     from, "mmap: %s", strerror(errno));
		close(fd);
	}
	madvise(from, HUGE, MADV_NOHUGEPAGE);
	memset(from, 1, HUGE);
	*handle = hold_by(by, from + 7 * PAGE);
	*pfn = pfn_at(from + 7 * PAGE);
	must(!madvise(from, HUGE, MADV_HUGEPAGE), "madvise: %s", strerror(errno));
	return from;
}

/* Retries, because others may hold a page temporarily. */
static int collapse_now(void *map)
{
	unsigned int turn;
	int result = -1;

	for (turn = 0; turn < 300 && result; turn++) {
		result = madvise(map, HUGE, MADV_COLLAPSE) ? -errno : 0;
		if (result != -EAGAIN)
			break;
		usleep(10000);
	}
	return result;
}

/* Small pages are not collapsed to a huge page while one of them is held. */
static void collapse(void)
{
	unsigned int shared;
	enum by by;

	for (shared = 0; shared < 2; shared++) {
		for (by = 0; by < BYS; by++) {
			__u8 *map;
			__u32 handle;
			int result;
			__u64 pfn;

			note_counts();
			map = to_collapse(shared, by, &handle, &pfn);
			if (by != BY_NOBODY) {
				result = madvise(map, HUGE, MADV_COLLAPSE) ? -errno : 0;
				must(result == -EAGAIN, "collapsed: %s", why(result));
				must(!is_huge(map) && pfn_at(map + 7 * PAGE) == pfn, "it is huge");
				unpin(handle, 1);
			}
			result = collapse_now(map);
			must(!result, "not collapsed: %s", why(result));
			must(map[7 * PAGE] == 1 && is_huge(map), "it is not huge");
			munmap(map, HUGE);
			as_before();
		}
	}
}

/* The same for khugepaged. */
static void khugepaged(void)
{
	enum by by;

	must(write_to(KHUGEPAGED "scan_sleep_millisecs", "10") &&
	     write_to(KHUGEPAGED "alloc_sleep_millisecs", "10") &&
	     write_to(KHUGEPAGED "pages_to_scan", "65536"), "%s", strerror(errno));
	for (by = 0; by < BYS; by++) {
		unsigned int turn;
		__u32 handle;
		__u8 *map;
		__u64 pfn;

		note_counts();
		map = to_collapse(false, by, &handle, &pfn);
		if (by != BY_NOBODY) {
			wait_for_scans(KHUGEPAGED "full_scans", 4);
			must(!is_huge(map) && pfn_at(map + 7 * PAGE) == pfn, "it is huge");
			unpin(handle, 1);
		}
		/* It collapses only pages that are in use. */
		for (turn = 0; turn < 6000 && !is_huge(map); turn++) {
			memset(map, 1, HUGE);
			usleep(10000);
		}
		must(is_huge(map), "it is still made of small pages");
		munmap(map, HUGE);
		as_before();
	}
}

#define MOUNTED	"/tmp/mounted"

/* Pins do not prevent unmounting: the page is removed from the cache and stays pinned. */
static void unmounted(void)
{
	static const __u32 flags[] = { 0, PINNER_LONGTERM };
	unsigned int i;

	must(!system("mkfs.ext4 -q -F $RAW && mkdir -p " MOUNTED), "mkfs.ext4");
	for (i = 0; i < ARRAY_SIZE(flags); i++) {
		__u32 handle;
		__u64 pfn;
		__u8 *map;
		int fd;

		note_counts();
		must(!system("mount -t ext4 $RAW " MOUNTED), "mount");
		fd = open(MOUNTED "/file", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
		must(fd >= 0 && !ftruncate(fd, PAGE), "file: %s", strerror(errno));
		map = map_at(PAGE, MAP_SHARED, fd);
		map[0] = 1;
		must(!fsync(fd), "fsync: %s", strerror(errno));
		close(fd);
		handle = pin(PINNER_FAST, flags[i], map, 1);
		pfn = pfn_at(map);
		must(system("umount " MOUNTED " 2>/dev/null"), "unmounted while mapped");
		munmap(map, PAGE);
		must(!system("umount " MOUNTED), "not unmounted");
		must(COUNT_OF(pins_of(pfn)) == 1 && IS_LONG(pins_of(pfn)) == !!flags[i], "%llx",
		     pins_of(pfn));
		must(sums_of(getpid()).pins == !!flags[i], "%s", text_of("/proc/self/pins"));
		unpin(handle, 1);
		as_before();
	}
}

/* A page whose memory may fail is soft-offlined only after it has been released. */
static void soft_offline(void)
{
	enum by by;

	for (by = 0; by < BYS; by++) {
		__u8 *map = small_pages(1);
		__u32 handle;
		__u64 pfn;

		note_counts();
		handle = hold_by(by, map);
		pfn = pfn_at(map);
		if (by != BY_NOBODY) {
			must(madvise(map, PAGE, MADV_SOFT_OFFLINE) == -1 && errno == EBUSY,
			     "it is offline: %s", strerror(errno));
			must(pfn_at(map) == pfn, "it has moved");
			must_say("memory_failure", pfn, said_of(by));
			unpin(handle, 1);
		}
		must(!madvise(map, PAGE, MADV_SOFT_OFFLINE), "%s", strerror(errno));
		must(pfn_at(map) != pfn && flags_of(pfn) >> KPF_HWPOISON & 1, "it is not offline");
		must(map[0] == 1 && map[PAGE - 1] == 1, "%x", map[0]);
		munmap(map, PAGE);
		as_before();
	}
}

/* The call stack of a long-term pin begins in the kernel's function and has all callers. */
static void stacks(void)
{
	__u8 *map = small_pages(1);
	__u32 handle;

	note_counts();
	handle = pin(PINNER_REMOTE, PINNER_LONGTERM, map, 1);
	must(LINE("/proc/self/pins", " pin_user_pages_remote pin_remote ", " pinner_ioctl ") &&
	     LINE(BOOKS "owners", " pin_user_pages_remote pin_remote ", " pinner_ioctl "), "%s",
	     text_of("/proc/self/pins"));
	unpin(handle, 1);
	munmap(map, PAGE);
	as_before();
}

#define CHILDREN	1100

static bool swapped(const void *address)
{
	return of_page("/proc/self/pagemap", (uintptr_t)address / PAGE) >> 62 & 1;
}

/* Tries to swap a page out. Returns whether it was. */
static bool reclaims(const void *address)
{
	unsigned int turn;

	for (turn = 0; turn < 200 && !swapped(address); turn++)
		write_to("/sys/fs/cgroup/shared/memory.reclaim", "8M");
	return swapped(address);
}

static void share_with_children(void)
{
	static pid_t children[CHILDREN];
	__u8 *map = small_pages(1);
	bool tracked = !access(BOOKS "check", F_OK);
	struct asked said;
	__u32 handle;
	int i, ends[2];

	must(write_to("/sys/fs/cgroup/cgroup.subtree_control", "+memory"), "%s", strerror(errno));
	must(!mkdir("/sys/fs/cgroup/shared", 0755), "%s", strerror(errno));
	must(write_to("/sys/fs/cgroup/shared/cgroup.procs", "0"), "%s", strerror(errno));
	munmap(map, PAGE);
	/* Reclaims from this cgroup. */
	map = small_pages(1);
	must(!pipe(ends), "pipe");
	for (i = 0; i < CHILDREN; i++) {
		char byte;

		children[i] = fork();
		must(children[i] >= 0, "fork: %s", strerror(errno));
		if (!children[i]) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			close(ends[1]);
			_exit(read(ends[0], &byte, 1));
		}
	}
	said = ask(map);
	must(said.refs > CHILDREN, "%d references", said.refs);
	if (tracked) {
		must(!said.count && !said.maybe, "%d pins, maybe %u", said.count, said.maybe);
		/* A page that is really pinned stays. */
		handle = pin(PINNER_FAST, 0, map, 1);
		must(!reclaims(map), "it is swapped out although it is pinned");
		unpin(handle, 1);
		must(reclaims(map), "it is not swapped out, of %d references and no pin",
		     said.refs);
	} else {
		must(said.count == -ENODATA && said.maybe, "%d pins, maybe %u", said.count,
		     said.maybe);
		must(!reclaims(map), "it is swapped out, although it may be pinned");
	}
	close(ends[1]);
	for (i = 0; i < CHILDREN; i++)
		waitpid(children[i], NULL, 0);
	close(ends[0]);
	munmap(map, PAGE);
}

static void reclaimed(void)
{
	note_counts();
	share_with_children();
	as_before();
}

/* Without tracking there are no reports, and only counts that were always exact are exact. */
static void off(void)
{
	__u8 *map = small_pages(1), *large = huge_pages(1);
	__u32 of_small, of_large;
	struct asked said;

	must(open("/proc/self/pins", O_RDONLY) == -1 && errno == EOPNOTSUPP, "/proc/self/pins: %s",
	     strerror(errno));
	must(access(BOOKS, F_OK), BOOKS);
	of_small = pin(PINNER_FAST, PINNER_LONGTERM, map, 1);
	of_large = pin(PINNER_FAST, PINNER_LONGTERM, large, 7);
	said = ask(map);
	must(said.count == -ENODATA && said.maybe, "%d", said.count);
	must(pins_of(pfn_at(map)) == 1, "%llx", pins_of(pfn_at(map)));
	said = ask(large);
	must(said.count == 7 && said.maybe, "%d", said.count);
	must(pins_of(pfn_at(large)) == (7 | 1ULL << 33), "%llx", pins_of(pfn_at(large)));
	unpin(of_small, 1);
	unpin(of_large, 7);
	said = ask(map);
	must(said.count == -ENODATA && !said.maybe, "%d", said.count);
	must(!ask(large).count, "%d", ask(large).count);
	munmap(map, PAGE);
	munmap(large, HUGE);
	share_with_children();
}

static const struct test all[] = {
	{ "seal", seal },
	{ "nodes", nodes },
	{ "cma", cma },
	{ "offline", take_offline },
	{ "unmovable", unmovable },
	{ "ksm", ksm },
	{ "huge", huge },
	{ "collapse", collapse },
	{ "khugepaged", khugepaged },
	{ "unmounted", unmounted },
	{ "soft_offline", soft_offline },
	{ "stacks", stacks },
	{ "reclaimed", reclaimed },
	{ "off", off },
};

int main(int argc, char **argv)
{
	struct test tests[ARRAY_SIZE(all)];
	unsigned int count = 0, i;

	open_pinner();
	for (names = argv + 1; *names && count < ARRAY_SIZE(all); names++)
		for (i = 0; i < ARRAY_SIZE(all); i++)
			if (!strcmp(all[i].name, *names))
				tests[count++] = all[i];
	return count && (int)count == argc - 1 ? run_all(tests, count) : 2;
}
