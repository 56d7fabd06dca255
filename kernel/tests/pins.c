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
			must(!sum || (IS_EXACT(words[at])),
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
	struct asked said;
	struct pinner_pin many = { .pages = 1, .times = 2000, .how = PINNER_GOT };

	note_counts();
	many.address = (uintptr_t)map;
	must(!try_pin(&many) && many.pinned == 2000, "2000 references");
	got = many.handle;
	said = ask(map);
	must(said.refs > 2000 && !said.count && !said.maybe, "with %d references: %d pins, %u",
	     said.refs, said.count, said.maybe);
	handle = pin(PINNER_FAST, PINNER_WRITE, map, 1);
	said = ask(map);
	must(said.count == 1 && said.maybe, "once pinned: %d, %u", said.count, said.maybe);
	unpin(got, 2000);
	unpin(handle, 1);
	said = ask(map);
	must(!said.count && !said.maybe, "after that: %d, %u", said.count, said.maybe);
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

/* Each kind of long-term pin has its process and call stack, until its last pin ends. */
static void ways(void)
{
	static const char * const sites[] = { "pin_once", "pin_once", "pin_remote", "pin_once" };
	__u8 *map = small_pages(64);
	unsigned int how, where;

	note_counts();
	for (how = PINNER_FAST; how < PINNER_MEMFD; how++) {
		for (where = 0; where < PINNER_WHERES; where++) {
			__u32 mode = PINNER_LONGTERM | (where ? PINNER_WRITE : 0);
			__u8 *from = map + (1 + where) * PAGE;
			__u64 since, before = boot_time();
			__u32 handle = pin(how, mode, from, 30);
			struct sums sums = sums_from(getpid(), sites[how], &since);

			must(sums.pins == 30 && sums.bytes == 30 * PAGE, "%s",
			     text_of("/proc/self/pins"));
			must(since >= before && since <= boot_time(), "since %llu", since);
			must(IS_LONG(pins_of(pfn_at(from))), "%llx", pins_of(pfn_at(from)));
			unpin_as(handle, 0, 10, where, PINNER_PAGES);
			sums = sums_of(getpid());
			must(sums.pins == 20 && sums.bytes == 20 * PAGE, "20 pins left: %lld, %lld",
			     sums.pins, sums.bytes);
			unpin_as(handle, 10, 20, where, PINNER_EACH);
			sums = sums_of(getpid());
			must(!sums.pins && !sums.bytes, "no pins left: %lld, %lld", sums.pins,
			     sums.bytes);
			must(!IS_LONG(pins_of(pfn_at(from))), "%llx", pins_of(pfn_at(from)));
			/* A short pin has no owner. */
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
		struct sums sums;
		__u64 since;
		__u8 *map;
		int fd;

		map = memfd_pages(kinds[i].name, kinds[i].flags, HUGE, &fd);
		pin.id = fd;
		must(!try_pin(&pin) && pin.pinned == folios, "%u folios", pin.pinned);
		/* Pages 3 to 18, also of a huge page */
		sums = sums_from(getpid(), "pin_memfd", &since);
		must(sums.pins == (long long)folios &&
		     sums.bytes == (long long)(folios * kinds[i].folio), "%s",
		     text_of("/proc/self/pins"));
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

static unsigned int lines_of(const char *path)
{
	const char *text = text_of(path);
	unsigned int lines = 0;

	while ((text = strchr(text, '\n'))) {
		lines++;
		text++;
	}
	return lines;
}

/* Pins by the same calls are one line, with the oldest time. */
static void in_a_row(void)
{
	__u64 since, first = boot_time(), second = 0;
	__u8 *map = small_pages(64);
	__u32 handles[4], i;
	struct sums sums;

	note_counts();
	for (i = 0; i < 4; i++) {
		handles[i] = pin(PINNER_FAST, PINNER_LONGTERM, map + (i * 10 + i / 3) * PAGE, 10);
		second = i ? second : boot_time();
	}
	sums = sums_from(getpid(), "pin_once", &since);
	must(lines_of("/proc/self/pins") == 3 && sums.pins == 40 && sums.bytes == 40 * PAGE &&
	     since >= first && since <= second, "%s", text_of("/proc/self/pins"));
	unpin(handles[0], 10);
	sums = sums_from(getpid(), "pin_once", &since);
	must(sums.pins == 30 && since >= second, "%s", text_of("/proc/self/pins"));
	for (i = 1; i < 4; i++)
		unpin(handles[i], 10);
	must(lines_of("/proc/self/pins") == 2, "%s", text_of("/proc/self/pins"));
	munmap(map, 64 * PAGE);
	as_before();
}

/* A page that is pinned several times, which ends in a different order */
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
	must(sums_of(getpid()).pins == 8 + 101, "%lld", sums_of(getpid()).pins);
	unpin(of_small[0], 8);
	unpin(of_huge[1], 101);
	must(!sums_of(getpid()).pins, "%s", text_of("/proc/self/pins"));
	munmap(map, HUGE);
	munmap(small, 8 * PAGE);
	as_before();
}

static bool in_owners(const char *want)
{
	return LINE(BOOKS "owners", want, "pin_once");
}

/* Of several processes the last one to pin is shown, until the last pin of the page ends. */
static void last(void)
{
	__u8 *map = map_at(PAGE, MAP_SHARED | MAP_ANONYMOUS, -1);
	__u32 mine, theirs;
	int pipe_of[2];
	char want[64];
	pid_t child;

	note_counts();
	map[0] = 1;
	must(!pipe(pipe_of), "pipe");
	mine = pin(PINNER_FAST, PINNER_LONGTERM | PINNER_WRITE, map, 1);
	must(sums_of(getpid()).pins == 1, "%s", text_of("/proc/self/pins"));
	child = fork();
	must(child >= 0, "fork: %s", strerror(errno));
	if (!child) {
		theirs = pin(PINNER_PLAIN, PINNER_LONGTERM | PINNER_WRITE, map, 1);
		must(sums_of(getpid()).pins == 2, "%s", text_of("/proc/self/pins"));
		must(write(pipe_of[1], &theirs, 4) == 4, "pipe");
		_exit(0);
	}
	must(read(pipe_of[0], &theirs, 4) == 4, "pipe");
	wait_for(child);
	must(!sums_of(getpid()).pins, "%s", text_of("/proc/self/pins"));
	snprintf(want, sizeof(want), "%d gone 2 4096 ", child);
	must(in_owners(want), "no %s: %s", want, text_of(BOOKS "owners"));
	unpin(theirs, 1);
	snprintf(want, sizeof(want), "%d gone 1 4096 ", child);
	must(in_owners(want), "no %s: %s", want, text_of(BOOKS "owners"));
	unpin(mine, 1);
	must(!in_owners(want) && !IS_LONG(pins_of(pfn_at(map))), "%s", text_of(BOOKS "owners"));
	mine = pin(PINNER_FAST, 0, map, 1);
	must(!in_owners(" gone ") && LINE(BOOKS "owners", "- - 1 4096 - ?"), "%s",
	     text_of(BOOKS "owners"));
	unpin(mine, 1);
	munmap(map, PAGE);
	close(pipe_of[0]);
	close(pipe_of[1]);
	as_before();
}

/* A process that gets the number of an earlier one does not get its pins. */
static void recycled(void)
{
	__u8 *map = map_at(PAGE, MAP_SHARED | MAP_ANONYMOUS, -1);
	char number[16], want[64];
	pid_t first, second = 0;
	unsigned int turn;
	int pipe_of[2];
	__u32 handle;

	note_counts();
	map[0] = 1;
	must(!pipe(pipe_of), "pipe");
	first = fork();
	must(first >= 0, "fork: %s", strerror(errno));
	if (!first) {
		handle = pin(PINNER_FAST, PINNER_LONGTERM | PINNER_WRITE, map, 1);
		must(sums_of(getpid()).pins == 1, "%s", text_of("/proc/self/pins"));
		must(write(pipe_of[1], &handle, 4) == 4, "pipe");
		_exit(0);
	}
	must(read(pipe_of[0], &handle, 4) == 4, "pipe");
	wait_for(first);
	snprintf(number, sizeof(number), "%d", first - 1);
	snprintf(want, sizeof(want), "%d gone 1 4096 ", first);
	for (turn = 0; turn < 100 && second != first; turn++) {
		must(write_to("/proc/sys/kernel/ns_last_pid", number), "ns_last_pid");
		second = fork();
		must(second >= 0, "fork: %s", strerror(errno));
		if (!second) {
			must(!sums_of(getpid()).pins, "%s", text_of("/proc/self/pins"));
			must(getpid() != first || in_owners(want), "%s", text_of(BOOKS "owners"));
			_exit(0);
		}
		wait_for(second);
	}
	must(second == first, "no process got the number %d", first);
	unpin(handle, 1);
	munmap(map, PAGE);
	close(pipe_of[0]);
	close(pipe_of[1]);
	as_before();
}

#define CROWD	300

/* There is a limit of lines, but the sums include everything. */
static void crowd(void)
{
	__u8 *map = map_at(CROWD * PAGE, MAP_SHARED | MAP_ANONYMOUS, -1);
	__u32 handles[CROWD], i;
	int pipe_of[2];
	long long pins;

	note_counts();
	memset(map, 1, CROWD * PAGE);
	must(!pipe(pipe_of), "pipe");
	for (i = 0; i < CROWD; i++) {
		pid_t child = fork();

		must(child >= 0, "fork: %s", strerror(errno));
		if (!child) {
			__u32 handle = pin(PINNER_FAST, PINNER_LONGTERM | PINNER_WRITE,
					   map + i * PAGE, 1);

			_exit(write(pipe_of[1], &handle, 4) != 4);
		}
		must(read(pipe_of[0], &handles[i], 4) == 4, "pipe");
		wait_for(child);
	}
	must(sscanf(text_of(BOOKS "owners"), "pins %lld", &pins) == 1 && pins >= CROWD, "%s",
	     text_of(BOOKS "owners"));
	must(lines_of(BOOKS "owners") == 2 + 256, "%u lines", lines_of(BOOKS "owners"));
	for (i = 0; i < CROWD; i++)
		unpin(handles[i], 1);
	munmap(map, CROWD * PAGE);
	close(pipe_of[0]);
	close(pipe_of[1]);
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
static void passed_on(void)
{
	char want[64];
	pid_t child;
	int pipe_of[2];
	__u32 handle;

	note_counts();
	must(!pipe(pipe_of), "pipe");
	child = fork();
	must(child >= 0, "fork: %s", strerror(errno));
	if (!child) {
		__u8 *map = small_pages(4);

		handle = pin(PINNER_FAST, PINNER_LONGTERM, map, 4);
		snprintf(want, sizeof(want), "%d exists 4 16384 ", getpid());
		must(in_owners(want), "no %s: %s", want, text_of(BOOKS "owners"));
		must(write(pipe_of[1], &handle, 4) == 4, "pipe");
		_exit(0);
	}
	must(read(pipe_of[0], &handle, 4) == 4, "pipe");
	wait_for(child);
	close(pipe_of[0]);
	close(pipe_of[1]);
	snprintf(want, sizeof(want), "%d gone 4 16384 ", child);
	must(in_owners(want), "no %s: %s", want, text_of(BOOKS "owners"));
	unpin_as(handle, 0, 4, PINNER_IRQ, PINNER_PAGES);
	as_before();
	must(!in_owners(want), "%s", text_of(BOOKS "owners"));
}

/* debugfs has a line for each pinned folio, from the page on that was sought. */
static void table(void)
{
	__u8 *map = huge_pages(1), *small = small_pages(1);
	char of_map[64], of_page[64], owner[64], text[4096] = "";
	__u32 of_huge, of_small;
	int fd;

	note_counts();
	of_huge = pin(PINNER_FAST, PINNER_LONGTERM, map + 3 * PAGE, 2);
	of_small = pin(PINNER_PLAIN, 0, small, 1);
	snprintf(of_map, sizeof(of_map), "%#llx 9 2 ", pfn_at(map));
	snprintf(owner, sizeof(owner), " 0 %d %d ", getpid(), getpid());
	must(LINE(BOOKS "pages", of_map, owner, " pin_once"), "no line with %s and %s: %s", of_map,
	     owner, text_of(BOOKS "pages"));
	snprintf(of_page, sizeof(of_page), "%#llx 0 1 ", pfn_at(small));
	must(LINE(BOOKS "pages", of_page, " - - - ?"), "no line with %s: %s", of_page,
	     text_of(BOOKS "pages"));
	fd = open(BOOKS "pages", O_RDONLY | O_CLOEXEC);
	must(lseek(fd, pfn_at(map), SEEK_SET) == (off_t)pfn_at(map), "lseek: %s", strerror(errno));
	must(read(fd, text, sizeof(text) - 1) > 0, "pages: %s", strerror(errno));
	must(!strncmp(text, FINE, sizeof(FINE) - 1) &&
	     !strncmp(text + sizeof(FINE) - 1, of_map, strlen(of_map)), "%s", text);
	must(lseek(fd, pfn_at(map) + 1, SEEK_SET) > 0, "lseek: %s", strerror(errno));
	memset(text, 0, sizeof(text));
	must(read(fd, text, sizeof(text) - 1) > 0 && !strstr(text, of_map), "%s", text);
	close(fd);
	unpin(of_huge, 2);
	unpin(of_small, 1);
	must(!LINE(BOOKS "pages", of_page), "%s", text_of(BOOKS "pages"));
	munmap(map, HUGE);
	munmap(small, PAGE);
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
		must(error_of_reading(BOOKS "owners") == EACCES, "owners: %s",
		     strerror(error_of_reading(BOOKS "owners")));
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

/* A process is found by its number outside of its PID namespace. */
static void namespaces(void)
{
	__u8 *map = small_pages(2);
	int to_child[2], from_child[2];
	__u32 outside;
	pid_t child;
	char byte;

	note_counts();
	must(!pipe(to_child) && !pipe(from_child), "pipe");
	outside = pin(PINNER_FAST, PINNER_LONGTERM, map, 1);
	child = syscall(SYS_clone, CLONE_NEWPID | SIGCHLD, 0, 0, 0, 0);
	must(child >= 0, "clone: %s", strerror(errno));
	if (!child) {
		__u32 handle = pin(PINNER_FAST, PINNER_LONGTERM, map + PAGE, 1);

		must(write(from_child[1], "", 1) == 1 && read(to_child[0], &byte, 1) == 1, "pipe");
		unpin(handle, 1);
		_exit(0);
	}
	must(read(from_child[0], &byte, 1) == 1, "pipe");
	must(sums_of(child).pins == 1 && sums_of(getpid()).pins == 1, "%s",
	     text_of(BOOKS "owners"));
	must(write(to_child[1], "", 1) == 1, "pipe");
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
	{ "last", last },
	{ "recycled", recycled },
	{ "crowd", crowd },
	{ "both_sorts", both_sorts },
	{ "forked", forked },
	{ "gone", passed_on },
	{ "table", table },
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
