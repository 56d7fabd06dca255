// SPDX-License-Identifier: GPL-2.0-only
/*
 * pins [-s SEED] [-n STEPS]
 *
 * Compares what the pin tracker reports for every page of the machine with what /dev/pinner has
 * pinned. At the end of each test nothing is pinned, and the tracker's consistency check succeeds.
 */
#define _GNU_SOURCE
#include "pins.h"

#include <sched.h>
#include <sys/mount.h>
#include <sys/syscall.h>

#define KINDS		(ARRAY_SIZE(areas))
#define AT_ONCE		40U
#define MOST		600U

static unsigned int steps = 400;
static __u64 seed = 1;

static __u32 any(__u32 below)
{
	seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
	return (seed >> 33) % below;
}

/* Memory of each kind, to be pinned at random */
static struct area {
	const char *name;
	__u8 *map;
	__u32 pages;
	int fd;
} areas[] = {
	{ .name = "small pages", .pages = 1024 },
	{ .name = "large pages", .pages = 1024 },
	{ .name = "memfd", .pages = 1024 },
	{ .name = "memfd of hugetlb", .pages = 1024 },
	{ .name = "the zero page", .pages = 64 },
};

static void make_areas(void)
{
	areas[0].map = small_pages(areas[0].pages);
	areas[1].map = huge_pages(areas[1].pages * PAGE / HUGE);
	must(is_huge(areas[1].map), "no large page at %p", areas[1].map);
	areas[2].map = memfd_pages("model", 0, areas[2].pages * PAGE, &areas[2].fd);
	areas[3].map = memfd_pages("model", MFD_HUGETLB, areas[3].pages * PAGE, &areas[3].fd);
	areas[4].map = map_at(areas[4].pages * PAGE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	madvise(areas[4].map, areas[4].pages * PAGE, MADV_NOHUGEPAGE);
}

static void unmake_areas(void)
{
	unsigned int i;

	for (i = 0; i < KINDS; i++) {
		munmap(areas[i].map, areas[i].pages * PAGE);
		if (areas[i].fd)
			close(areas[i].fd);
	}
}

/* The handles, and their pages; each folio of a memfd counts as one. */
static struct hold {
	__u32 handle, nr, left;
	__u64 pfns[MOST];
} held[AT_ONCE];

/* The number of pins of each page of the machine: by this program, and as reported */
static __u32 *mine;
static __u64 *words, *flags;
static __u64 last_pfn;

static __u64 read_all(const char *path, __u64 **to)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	const size_t most = 64 << 20;
	size_t len = 0;
	ssize_t got;

	*to = *to ?: malloc(most);
	must(fd >= 0 && *to, "%s: %s", path, strerror(errno));
	do {
		got = read(fd, (__u8 *)*to + len, most - len);
		must(got >= 0, "read of %s: %s", path, strerror(errno));
		len += got;
	} while (got && len < most);
	must(len < most, "%s is larger than expected", path);
	close(fd);
	return len / sizeof(__u64);
}

/* The word of each page must have the number of pins of its folio. Other pages have none. */
static void compare_all(void)
{
	__u64 pfn, head, end, sum, at;

	read_all("/proc/kpageflags", &flags);
	last_pfn = read_all("/proc/kpagepins", &words);
	for (pfn = 0; pfn < last_pfn; pfn = end) {
		head = pfn;
		end = pfn + 1;
		sum = mine[pfn];
		if (flags[pfn] >> KPF_HEAD & 1)
			while (end < last_pfn && flags[end] >> KPF_TAIL & 1)
				sum += mine[end++];
		for (at = head; at < end; at++) {
			if (flags[at] >> KPF_ZERO & 1)
				sum = 0;
			must(COUNT_OF(words[at]) == sum,
			     "page %llx of %llx to %llx (flags %llx) has %u pins, not %llu", at,
			     head, end, flags[at], COUNT_OF(words[at]), sum);
			must(!sum || (IS_EXACT(words[at]) && !UNTRACKED(words[at])),
			     "page %llx: %llx", at, words[at]);
			must((flags[at] >> KPF_PINNED & 1) == !!sum,
			     "page %llx: flags %llx, pins %llu", at, flags[at], sum);
		}
	}
}

static void take(struct hold *hold)
{
	struct area *area = &areas[any(KINDS)];
	struct pinner_pin pin = {
		.pages = 1 + any(any(2) ? MOST : 8),
		.how = any(PINNER_MEMFD),
		.id = getpid(),
	};
	__u64 first;
	int result;
	__u32 i;

	if (pin.pages > area->pages)
		pin.pages = area->pages;
	first = any(area->pages - pin.pages + 1);
	pin.flags = any(2) ? PINNER_LONGTERM : 0;
	/* A written page is no longer the zero page. */
	if (area != &areas[4] && any(2))
		pin.flags |= PINNER_WRITE;
	pin.address = (uintptr_t)area->map + first * PAGE;
	if (area->fd && any(2)) {
		pin.how = PINNER_MEMFD;
		pin.id = area->fd;
		pin.address = first * PAGE;
	}
	result = try_pin(&pin);
	must(!result, "pin of %u pages from %llu of %s by %u, flags %u: %s", pin.pages, first,
	     area->name, pin.how, pin.flags, why(result));
	must(pin.how == PINNER_MEMFD || pin.pinned == pin.pages, "%u of %u pages of %s",
	     pin.pinned, pin.pages, area->name);
	hold->handle = pin.handle;
	hold->nr = pin.pinned;
	hold->left = pin.pinned;
	pfns_of(hold->handle, hold->nr, hold->pfns);
	for (i = 0; i < hold->nr; i++)
		mine[hold->pfns[i]]++;
}

/* Unpins some of the remaining pages, not necessarily the first ones. */
static void give_back(struct hold *hold, bool all)
{
	enum pinner_where where = any(PINNER_WHERES);
	enum pinner_by by = any(PINNER_BYS);
	__u32 first = 0, count, i;

	while (!hold->pfns[first])
		first++;
	for (count = 1; first + count < hold->nr && hold->pfns[first + count]; count++)
		;
	if (!all && any(2)) {
		__u32 part = any(count);

		first += part;
		count = 1 + any(count - part);
	}
	if (where == PINNER_IRQ && by == PINNER_DIRTY)
		by = PINNER_PAGES;
	unpin_as(hold->handle, first, count, where, by);
	for (i = first; i < first + count; i++) {
		mine[hold->pfns[i]]--;
		hold->pfns[i] = 0;
	}
	hold->left -= count;
}

/* Pins and unpins at random, and compares with a table. */
static void model(void)
{
	unsigned int step, i;

	note_counts();
	make_areas();
	mine = calloc(64 << 17, sizeof(*mine));
	must(mine, "memory for the table");
	for (step = 0; step < steps; step++) {
		struct hold *hold = &held[any(AT_ONCE)];

		if (hold->left)
			give_back(hold, false);
		else
			take(hold);
		if (step % 50 == 49)
			compare_all();
	}
	consistent();
	for (i = 0; i < AT_ONCE; i++)
		while (held[i].left)
			give_back(&held[i], true);
	compare_all();
	unmake_areas();
	as_before();
}

/* The count of a page is exact: other references are not counted. */
static void exact(void)
{
	__u8 *map = small_pages(1);
	__u32 got, handle;
	struct pinner_ask said;
	struct pinner_pin many = { .pages = 1, .times = 2000, .how = PINNER_GOT };

	note_counts();
	many.address = (uintptr_t)map;
	must(!try_pin(&many) && many.pinned == 2000, "2000 references");
	got = many.handle;
	said = ask(map);
	must(said.refs > 2000 && !said.count && !said.maybe && !said.pinned,
	     "with %d references: %d pins, %u, %u", said.refs, said.count, said.maybe, said.pinned);
	handle = pin(PINNER_FAST, PINNER_WRITE, map, 1);
	said = ask(map);
	must(said.count == 1 && said.maybe && said.pinned, "once pinned: %d, %u, %u", said.count,
	     said.maybe, said.pinned);
	unpin(got, 2000);
	unpin(handle, 1);
	said = ask(map);
	must(!said.count && !said.maybe && !said.pinned, "after that: %d, %u, %u", said.count,
	     said.maybe, said.pinned);
	munmap(map, PAGE);
	as_before();
}

/* 2^20 pins of a small and a huge page */
static void many(void)
{
	__u8 *maps[] = { small_pages(1), huge_pages(1) };
	unsigned int i;

	note_counts();
	for (i = 0; i < ARRAY_SIZE(maps); i++) {
		struct pinner_pin pin = {
			.address = (uintptr_t)maps[i],
			.pages = 1,
			.times = 1 << 20,
			.how = PINNER_FAST,
		};
		int result = try_pin(&pin);

		must(!result && pin.pinned == 1 << 20, "2^20 pins: %s", why(result));
		must(ask(maps[i]).count == 1 << 20, "%d pins", ask(maps[i]).count);
		must(COUNT_OF(pins_of(pfn_at(maps[i]))) == 1 << 20, "kpagepins: %llx",
		     pins_of(pfn_at(maps[i])));
		unpin_as(pin.handle, 0, 1 << 19, PINNER_IRQ, PINNER_PAGES);
		must(ask(maps[i]).count == 1 << 19, "half of them: %d", ask(maps[i]).count);
		unpin_as(pin.handle, 1 << 19, 1 << 19, PINNER_WORKER, PINNER_EACH);
		must(!ask(maps[i]).count, "none: %d", ask(maps[i]).count);
	}
	munmap(maps[0], PAGE);
	munmap(maps[1], HUGE);
	as_before();
}

/* Finds the line of this process for a range, which must contain these words. */
static char *own_line(const void *from, size_t size)
{
	char range[64];

	snprintf(range, sizeof(range), "%lx-%lx ", (uintptr_t)from, (uintptr_t)from + size);
	return LINE("/proc/self/pins", range);
}

/* Each kind of long-term pin creates a region with the right line, until its last pin ends. */
static void ways(void)
{
	static const char * const sites[] = { "pin_once", "pin_once", "pin_remote", "pin_once" };
	__u8 *map = small_pages(64);
	unsigned int how, where;
	char name[32];
	long held, bytes;
	char access;

	note_counts();
	for (how = PINNER_FAST; how < PINNER_MEMFD; how++) {
		for (where = 0; where < PINNER_WHERES; where++) {
			__u32 mode = PINNER_LONGTERM | (where ? PINNER_WRITE : 0);
			__u8 *from = map + (1 + where) * PAGE;
			__u32 handle = pin(how, mode, from, 30);
			char *line = own_line(from, 30 * PAGE);
			struct sums sums;

			must(line, "no line: %s", text_of("/proc/self/pins"));
			must(sscanf(line, "%*s %c %ld %ld %*u %31s", &access, &held, &bytes,
				    name) == 4, "%s", line);
			must(access == (where ? 'w' : 'r') && held == 30 && bytes == 30 * PAGE &&
			     !strcmp(name, sites[how]), "%s", line);
			must(IS_LONG(pins_of(pfn_at(from))) && REGION(pins_of(pfn_at(from))),
			     "%llx", pins_of(pfn_at(from)));
			unpin_as(handle, 0, 10, where, PINNER_PAGES);
			sums = sums_of(getpid());
			must(sums.pins == 20 && sums.bytes == 20 * PAGE, "20 pins left: %lld, %lld",
			     sums.pins, sums.bytes);
			unpin_as(handle, 10, 20, where, PINNER_EACH);
			sums = sums_of(getpid());
			must(!sums.pins && !sums.bytes, "no pins left: %lld, %lld", sums.pins,
			     sums.bytes);
			/* A short pin creates no region. */
			handle = pin(how, where ? PINNER_WRITE : 0, from, 30);
			must(!sums_of(getpid()).pins, "short pins are shown: %s",
			     text_of("/proc/self/pins"));
			must(!IS_LONG(pins_of(pfn_at(from))), "%llx", pins_of(pfn_at(from)));
			must(COUNT_OF(pins_of(pfn_at(from))) == 1, "%llx", pins_of(pfn_at(from)));
			unpin_as(handle, 0, 30, where, PINNER_PAGES);
		}
		as_before();
	}
	munmap(map, 64 * PAGE);
	as_before();
}

static void memfds(void)
{
	static const struct { const char *name; unsigned int flags; size_t folio; } kinds[] = {
		{ "a b", 0, PAGE }, { "large", MFD_HUGETLB, HUGE },
	};
	unsigned int i;

	note_counts();
	for (i = 0; i < ARRAY_SIZE(kinds); i++) {
		struct pinner_pin pin = { .how = PINNER_MEMFD, .pages = 16, .address = 3 * PAGE };
		size_t folios = kinds[i].folio == PAGE ? 16 : 1;
		char want[128], inode[64], *line;
		struct sums sums;
		struct stat stat;
		__u8 *map;
		int fd;

		map = memfd_pages(kinds[i].name, kinds[i].flags, HUGE, &fd);
		fstat(fd, &stat);
		pin.id = fd;
		must(!try_pin(&pin) && pin.pinned == folios, "%u folios", pin.pinned);
		/* Pages 3 to 18, also of a huge page */
		snprintf(want, sizeof(want), "@%lx-%lx w %zu %zu ", 3 * PAGE, 19 * PAGE, folios,
			 folios * kinds[i].folio);
		snprintf(inode, sizeof(inode), " %lu %s", stat.st_ino,
			 i ? "memfd:large" : "memfd:a\\040b");
		line = LINE("/proc/self/pins", want, inode, " pin_memfd ");
		must(line, "no line with %s and %s: %s", want, inode, text_of("/proc/self/pins"));
		/* Closing or unmapping it does not release the pins. */
		munmap(map, HUGE);
		close(fd);
		sums = sums_of(getpid());
		must(sums.pins == (long long)folios, "%lld", sums.pins);
		must(sums.bytes == (long long)(folios * kinds[i].folio), "%lld", sums.bytes);
		unpin(pin.handle, pin.pinned);
		must(!sums_of(getpid()).pins, "%s", text_of("/proc/self/pins"));
		as_before();
	}
}

/* Any pin of a huge page keeps all of it, also the last of 512 pins. */
static void one_of_512(void)
{
	__u8 *map = huge_pages(1);
	struct sums sums;
	__u32 handle;

	note_counts();
	must(is_huge(map), "no large page");
	handle = pin(PINNER_FAST, PINNER_LONGTERM | PINNER_WRITE, map, 512);
	sums = sums_of(getpid());
	must(sums.pins == 512 && sums.bytes == HUGE, "%lld, %lld", sums.pins, sums.bytes);
	unpin_as(handle, 0, 511, PINNER_TASK, PINNER_RANGE);
	sums = sums_of(getpid());
	must(sums.pins == 1 && sums.bytes == HUGE, "%lld, %lld", sums.pins, sums.bytes);
	must(ask(map).count == 1 && ask(map + 100 * PAGE).count == 1, "%d", ask(map).count);
	unpin_as(handle, 511, 1, PINNER_TASK, PINNER_RANGE);
	sums = sums_of(getpid());
	must(!sums.pins && !sums.bytes, "%lld, %lld", sums.pins, sums.bytes);
	munmap(map, HUGE);
	as_before();
}

/* Consecutive ranges pinned by one task are one region, unless there is a gap. */
static void in_a_row(void)
{
	__u8 *map = small_pages(64);
	__u32 handles[4];
	unsigned int i;

	note_counts();
	for (i = 0; i < 4; i++)
		handles[i] = pin(PINNER_FAST, PINNER_LONGTERM, map + (i * 10 + i / 3) * PAGE, 10);
	must(own_line(map, 30 * PAGE), "three calls in a row: %s", text_of("/proc/self/pins"));
	must(own_line(map + 31 * PAGE, 10 * PAGE), "the fourth: %s", text_of("/proc/self/pins"));
	must(counts_now().regions == counts_before.regions + 2, "%lld regions",
	     counts_now().regions - counts_before.regions);
	for (i = 0; i < 4; i++)
		unpin(handles[i], 10);
	munmap(map, 64 * PAGE);
	as_before();
}

/* A page in several regions, which are released in a different order */
static void shared(void)
{
	__u8 *map = huge_pages(1);
	__u8 *small = small_pages(8);
	__u32 of_small[3], of_huge[3];
	unsigned int i;

	note_counts();
	for (i = 0; i < 3; i++) {
		of_small[i] = pin(PINNER_FAST, PINNER_LONGTERM, small, 8);
		of_huge[i] = pin(PINNER_FAST, PINNER_LONGTERM, map, 100 + i);
	}
	must(counts_now().nodes == counts_before.nodes + 2 * 8 + 2, "%lld nodes",
	     counts_now().nodes - counts_before.nodes);
	must(IS_SHARED(pins_of(pfn_at(small))), "%llx", pins_of(pfn_at(small)));
	must(COUNT_OF(pins_of(pfn_at(map))) == 303, "%llx", pins_of(pfn_at(map)));
	consistent();
	must(sums_of(getpid()).pins == 3 * 8 + 303, "%lld", sums_of(getpid()).pins);
	unpin(of_small[1], 8);
	unpin_as(of_huge[0], 0, 100, PINNER_IRQ, PINNER_PAGES);
	consistent();
	must(sums_of(getpid()).pins == 2 * 8 + 203, "%lld", sums_of(getpid()).pins);
	unpin_as(of_small[2], 0, 8, PINNER_WORKER, PINNER_PAGES);
	unpin(of_huge[2], 102);
	consistent();
	/* The kernel guesses whose pins have ended, but the total is exact. */
	must(sums_of(getpid()).pins == 8 + 101, "%lld", sums_of(getpid()).pins);
	must(strchr(text_of("/proc/self/pins"), '~'), "%s", text_of("/proc/self/pins"));
	unpin(of_small[0], 8);
	unpin(of_huge[1], 101);
	must(!sums_of(getpid()).pins, "%s", text_of("/proc/self/pins"));
	munmap(map, HUGE);
	munmap(small, 8 * PAGE);
	as_before();
}

#define LIMIT	"/sys/module/pin_owner/parameters/extra"

/* Above the limit of nodes, pins are counted in the first region of a page. */
static void limited(void)
{
	long long lost = number_in(BOOKS "stats", "lost");
	__u8 *map = small_pages(8);
	__u32 first, second;
	char before[32];

	note_counts();
	snprintf(before, sizeof(before), "%s", text_of(LIMIT));
	must(write_to(LIMIT, "0"), LIMIT);
	first = pin(PINNER_FAST, PINNER_LONGTERM, map, 8);
	second = pin(PINNER_FAST, PINNER_LONGTERM, map, 8);
	must(write_to(LIMIT, before), LIMIT);
	must(counts_now().nodes == counts_before.nodes, "%lld nodes", counts_now().nodes);
	must(number_in(BOOKS "stats", "lost") == lost + 8, "%lld lost",
	     number_in(BOOKS "stats", "lost") - lost);
	must(own_line(map, 8 * PAGE) && sums_of(getpid()).pins == 16 &&
	     sums_of(getpid()).bytes == 8 * PAGE, "%s", text_of("/proc/self/pins"));
	must(LINE("/proc/self/pins", " ~"), "%s", text_of("/proc/self/pins"));
	must(COUNT_OF(pins_of(pfn_at(map))) == 2, "%llx", pins_of(pfn_at(map)));
	consistent();
	unpin(first, 8);
	must(sums_of(getpid()).pins == 8, "%s", text_of("/proc/self/pins"));
	unpin(second, 8);
	munmap(map, 8 * PAGE);
	as_before();
}

/* Short and long-term pins of one page, in all orders */
static void both_sorts(void)
{
	__u8 *map = small_pages(1);
	unsigned int turn;

	note_counts();
	for (turn = 0; turn < 200; turn++) {
		__u32 handles[6], left = 6, which, i;

		for (i = 0; i < left; i++)
			handles[i] = pin(any(PINNER_MEMFD), any(2) ? PINNER_LONGTERM : 0, map, 1);
		for (; left; left--) {
			must(ask(map).count == (int)left, "%d pins, not %u", ask(map).count, left);
			which = any(left);
			unpin_as(handles[which], 0, 1, any(PINNER_WHERES), PINNER_PAGES);
			handles[which] = handles[left - 1];
		}
		must(!ask(map).count && !sums_of(getpid()).pins, "turn %u: %d pins, %s", turn,
		     ask(map).count, text_of("/proc/self/pins"));
	}
	munmap(map, PAGE);
	as_before();
}

/*
 * Two call sites unpin, one of them short and the other long-term pins. While neither is known, the
 * kernel may assume the wrong kind of pin, but not later.
 */
static void places(void)
{
	__u8 *map = small_pages(2);
	__u32 of_long, of_short;
	unsigned int turn;

	note_counts();
	of_long = pin(PINNER_FAST, PINNER_LONGTERM, map, 1);
	of_short = pin(PINNER_FAST, 0, map, 1);
	unpin_as(of_long, 0, 1, PINNER_TASK, PINNER_HERE);
	unpin_as(of_short, 0, 1, PINNER_TASK, PINNER_THERE);
	must(!ask(map).count && !sums_of(getpid()).pins, "%s", text_of("/proc/self/pins"));
	of_long = pin(PINNER_FAST, PINNER_LONGTERM, map + PAGE, 1);
	for (turn = 0; turn < 10; turn++) {
		of_short = pin(PINNER_FAST, 0, map + PAGE, 1);
		unpin_as(of_short, 0, 1, PINNER_TASK, PINNER_THERE);
		must(own_line(map + PAGE, PAGE) && sums_of(getpid()).pins == 1,
		     "a short unpin released a long-term pin: %s", text_of("/proc/self/pins"));
	}
	unpin_as(of_long, 0, 1, PINNER_TASK, PINNER_HERE);
	/* An unambiguous unpin teaches the kernel which kind this call site releases. */
	of_long = pin(PINNER_FAST, PINNER_LONGTERM, map, 1);
	unpin_as(of_long, 0, 1, PINNER_TASK, PINNER_HERE);
	of_long = pin(PINNER_FAST, PINNER_LONGTERM, map, 1);
	of_short = pin(PINNER_FAST, 0, map, 1);
	unpin_as(of_long, 0, 1, PINNER_TASK, PINNER_HERE);
	must(!sums_of(getpid()).pins && ask(map).count == 1, "%s", text_of("/proc/self/pins"));
	unpin_as(of_short, 0, 1, PINNER_TASK, PINNER_THERE);
	munmap(map, 2 * PAGE);
	as_before();
}

/* A child gets copies of pinned pages, but no pins. */
static void forked(void)
{
	__u8 *map = small_pages(4);
	__u32 handle, i;
	__u64 pfns[4];
	pid_t child;

	note_counts();
	handle = pin(PINNER_FAST, PINNER_LONGTERM | PINNER_WRITE, map, 4);
	pfns_of(handle, 4, pfns);
	child = fork();
	must(child >= 0, "fork: %s", strerror(errno));
	if (!child) {
		must(!sums_of(getpid()).pins, "%s", text_of("/proc/self/pins"));
		for (i = 0; i < 4; i++)
			must(pfn_at(map + i * PAGE) != pfns[i] && map[i * PAGE] == 1,
			     "a child has a pinned page of its parent's");
		_exit(0);
	}
	wait_for(child);
	memset(map, 2, 4 * PAGE);
	for (i = 0; i < 4; i++)
		must(pfn_at(map + i * PAGE) == pfns[i], "a page has moved");
	must(sums_of(getpid()).pins == 4, "%s", text_of("/proc/self/pins"));
	unpin(handle, 4);
	munmap(map, 4 * PAGE);
	as_before();
}

/* If a descriptor is passed on, pins outlive their process, which is then shown as `gone`. */
static void gone(void)
{
	char range[64];
	pid_t child;
	int pipe_of[2];
	__u32 handle;
	char *line;

	note_counts();
	must(!pipe(pipe_of), "pipe");
	child = fork();
	must(child >= 0, "fork: %s", strerror(errno));
	if (!child) {
		__u8 *map = small_pages(4);

		handle = pin(PINNER_FAST, PINNER_LONGTERM, map, 4);
		snprintf(range, sizeof(range), " %lx-%lx r 4 16384 ", (uintptr_t)map,
			 (uintptr_t)map + 4 * PAGE);
		must(write(pipe_of[1], &handle, 4) == 4, "pipe");
		must(write(pipe_of[1], range, 64) == 64, "pipe");
		_exit(0);
	}
	must(read(pipe_of[0], &handle, 4) == 4 && read(pipe_of[0], range, 64) == 64, "pipe");
	wait_for(child);
	close(pipe_of[0]);
	close(pipe_of[1]);
	line = LINE(BOOKS "regions", " gone 0 pins ", range, "pin_once");
	must(line, "no line with%s: %s", range, text_of(BOOKS "regions"));
	unpin_as(handle, 0, 4, PINNER_IRQ, PINNER_PAGES);
	as_before();
	must(!LINE(BOOKS "regions", range), "%s", text_of(BOOKS "regions"));
}

/* debugfs has a line for each pinned folio, with the process of its first short pin. */
static void table(void)
{
	__u8 *map = huge_pages(1), *small = small_pages(1);
	__u32 of_huge, of_small;
	char want[128], tgid[32];

	note_counts();
	of_huge = pin(PINNER_FAST, PINNER_LONGTERM, map + 3 * PAGE, 2);
	of_small = pin(PINNER_PLAIN, 0, small, 1);
	snprintf(want, sizeof(want), "%#llx 9 2 2 %llu - - -", pfn_at(map),
		 REGION(pins_of(pfn_at(map))));
	must(LINE(BOOKS "pages", want), "no line with %s: %s", want, text_of(BOOKS "pages"));
	snprintf(want, sizeof(want), "%#llx 0 1 0 0 ", pfn_at(small));
	snprintf(tgid, sizeof(tgid), " %d ", getpid());
	must(LINE(BOOKS "pages", want, tgid, " pin_once"), "no line with %s and %s: %s", want, tgid,
	     text_of(BOOKS "pages"));
	unpin(of_huge, 2);
	unpin(of_small, 1);
	must(!LINE(BOOKS "pages", want), "%s", text_of(BOOKS "pages"));
	munmap(map, HUGE);
	munmap(small, PAGE);
	as_before();
}

#define TRACE	"/sys/kernel/tracing/"

/* The start and end of a region are trace events. */
static void traced(void)
{
	__u8 *map = small_pages(3);
	char begin[128], end[64];
	__u32 handle;
	__u64 region;

	note_counts();
	must(write_to(TRACE "trace", "\n") && write_to(TRACE "events/pin_owner/enable", "1"),
	     TRACE);
	handle = pin(PINNER_FAST, PINNER_LONGTERM, map, 3);
	region = REGION(pins_of(pfn_at(map)));
	unpin(handle, 3);
	must(write_to(TRACE "events/pin_owner/enable", "0"), TRACE);
	snprintf(begin, sizeof(begin), "pin_owner_region: region=%llu tgid=%d start=%lx pages=3 ",
		 region, getpid(), (uintptr_t)map);
	must(LINE(TRACE "trace", begin, "site=pin_once"), "no %s: %s", begin,
	     text_of(TRACE "trace"));
	snprintf(end, sizeof(end), "pin_owner_release: region=%llu tgid=%d age=", region,
		 getpid());
	must(LINE(TRACE "trace", end, " ns by="), "no %s: %s", end, text_of(TRACE "trace"));
	munmap(map, 3 * PAGE);
	as_before();
}

static int error_of_reading(const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC), error = 0;
	char byte;

	if (fd < 0)
		return errno;
	if (read(fd, &byte, 1) < 0)
		error = errno;
	close(fd);
	return error;
}

/* Other users can see neither the owners of pins nor the pinned pages. */
static void permissions(void)
{
	char path[64];
	pid_t child;

	snprintf(path, sizeof(path), "/proc/%d/pins", getpid());
	child = fork();
	if (!child) {
		must(!setresgid(1000, 1000, 1000) && !setresuid(1000, 1000, 1000), "setresuid");
		must(error_of_reading(path) == EACCES, "%s: %s", path,
		     strerror(error_of_reading(path)));
		must(error_of_reading("/proc/kpagepins") == EACCES, "kpagepins: %s",
		     strerror(error_of_reading("/proc/kpagepins")));
		must(error_of_reading(BOOKS "regions") == EACCES, "regions: %s",
		     strerror(error_of_reading(BOOKS "regions")));
		must(error_of_reading(BOOKS "check") == EACCES, "check: %s",
		     strerror(error_of_reading(BOOKS "check")));
		_exit(0);
	}
	wait_for(child);
	child = fork();
	if (!child) {
		/* The user can read the files of his own processes, as with smaps. */
		execl("/usr/bin/setpriv", "setpriv", "--reuid=1000", "--regid=1000",
		      "--clear-groups", "grep", "-q", "^pins 0$", "/proc/self/pins", NULL);
		_exit(1);
	}
	wait_for(child);
}

/* In a PID namespace processes have the numbers there; those outside have none. */
static void namespaces(void)
{
	__u8 *map = small_pages(2);
	__u32 outside;
	pid_t child;

	note_counts();
	outside = pin(PINNER_FAST, PINNER_LONGTERM, map, 1);
	child = syscall(SYS_clone, CLONE_NEWPID | SIGCHLD, 0, 0, 0, 0);
	must(child >= 0, "clone: %s", strerror(errno));
	if (!child) {
		__u32 handle = pin(PINNER_FAST, PINNER_LONGTERM, map + PAGE, 1);
		char range[64];

		snprintf(range, sizeof(range), " 1 0 pins %lx-", (uintptr_t)map + PAGE);
		must(LINE(BOOKS "regions", range), "no line with%s: %s", range,
		     text_of(BOOKS "regions"));
		snprintf(range, sizeof(range), " 0 0 pins %lx-", (uintptr_t)map);
		must(LINE(BOOKS "regions", range), "no line with%s: %s", range,
		     text_of(BOOKS "regions"));
		unpin(handle, 1);
		_exit(0);
	}
	wait_for(child);
	unpin(outside, 1);
	munmap(map, 2 * PAGE);
	as_before();
}

static const struct test tests[] = {
	{ "exact", exact },
	{ "ways", ways },
	{ "memfds", memfds },
	{ "one_of_512", one_of_512 },
	{ "in_a_row", in_a_row },
	{ "shared", shared },
	{ "limited", limited },
	{ "both_sorts", both_sorts },
	{ "places", places },
	{ "forked", forked },
	{ "gone", gone },
	{ "table", table },
	{ "traced", traced },
	{ "permissions", permissions },
	{ "namespaces", namespaces },
	{ "model", model },
	{ "many", many },
};

int main(int argc, char **argv)
{
	int option;

	while ((option = getopt(argc, argv, "s:n:")) > 0) {
		if (option == 's')
			seed = strtoull(optarg, NULL, 0);
		else if (option == 'n')
			steps = strtoul(optarg, NULL, 0);
		else
			return 2;
	}
	open_pinner();
	return run_all(tests, ARRAY_SIZE(tests));
}
