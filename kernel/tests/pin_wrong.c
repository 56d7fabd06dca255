// SPDX-License-Identifier: GPL-2.0-only
/*
 * pin_wrong KIND
 *
 * Makes pins and unpins that do not balance, one kind per boot. The kernel must log this once,
 * report it in debugfs, and continue. The caller of this program checks the kernel log.
 */
#define _GNU_SOURCE
#include "pins.h"

static const char *kind;

static int again(unsigned long request, __u32 handle, __u32 count, enum pinner_by by)
{
	struct pinner_unpin unpin = { .handle = handle, .count = count, .by = by };

	return call(pinner, request, &unpin);
}

static void wrongly(unsigned long request, __u32 handle, __u32 count, enum pinner_by by)
{
	int result = again(request, handle, count, by);

	must(!result, "%lx: %s", request, why(result));
}

#define PUT "put-while-pinned"

static long long said(const char *what)
{
	return number_in(BOOKS "stats", what);
}

/* Unpins a page that was only referenced with get_user_pages(). */
static void got(void)
{
	__u8 *map = small_pages(1);
	__u32 handle = pin(PINNER_GOT, PINNER_WRITE, map, 1);
	int refs = ask(map).refs;

	wrongly(PINNER_AGAIN, handle, 1, PINNER_EACH);
	must(ask(map).refs == refs && !ask(map).count, "%d references, before %d", ask(map).refs,
	     refs);
	must(said("unpinned-not-pinned") == 1, "%lld", said("unpinned-not-pinned"));
	unpin(handle, 1);
	munmap(map, PAGE);
}

static void twice(void)
{
	__u8 *map = small_pages(1);
	__u32 handle = pin(PINNER_FAST, PINNER_WRITE, map, 1);
	int refs = ask(map).refs, turn;

	for (turn = 0; turn < 3; turn++)
		wrongly(PINNER_AGAIN, handle, 1, PINNER_PAGES);
	must(ask(map).refs == refs - 1024 && !ask(map).count, "%d references, before %d",
	     ask(map).refs, refs);
	must(said("unpinned-not-pinned") == 2, "%lld", said("unpinned-not-pinned"));
	wrongly(PINNER_FORGET, handle, 1, 0);
	munmap(map, PAGE);
}

/* Unpins a huge page once too often, in one call. */
static void too_many(void)
{
	__u8 *map = huge_pages(1);
	__u32 handle;
	int refs;

	must(is_huge(map), "no huge page");
	handle = pin(PINNER_FAST, PINNER_WRITE | PINNER_LONGTERM, map, 3);
	refs = ask(map).refs;
	wrongly(PINNER_AGAIN, handle, 4, PINNER_RANGE);
	must(ask(map).refs == refs - 3 && !ask(map).count, "%d references, before %d",
	     ask(map).refs, refs);
	must(said("unpinned-not-pinned") == 1, "%lld", said("unpinned-not-pinned"));
	wrongly(PINNER_FORGET, handle, 1, 0);
	munmap(map, HUGE);
}

/* Several times, since a mapped page also has other references. */
static void put(void)
{
	__u8 *map = small_pages(1);
	__u32 handle = pin(PINNER_FAST, PINNER_WRITE, map, 1);
	const int times = ask(map).refs - 1024 + 1;
	bool at_once;

	must(times > 0 && times < 10, "%d references", ask(map).refs);
	wrongly(PINNER_PUT, handle, times, 0);
	at_once = said(PUT);
	must(!strncmp(text_of(BOOKS "check"), "pfn 0x", 6), "%s", text_of(BOOKS "check"));
	must(said(PUT) >= 1, "%lld", said(PUT));
	wrongly(PINNER_GET, handle, times, 0);
	printf("# %s\n", at_once ? "found at once" : "found by the check");
	unpin(handle, 1);
	munmap(map, PAGE);
}

static void freed_with(__u32 flags)
{
	__u8 *map = map_at(PAGE, MAP_SHARED, pinner);
	__u32 handle;

	handle = pin(PINNER_FAST, PINNER_WRITE | flags, map, 1);
	must(ask(map).count == 1, "%d", ask(map).count);
	must(sums_of(getpid()).pins == !!flags, "%s", text_of("/proc/self/pins"));
	munmap(map, PAGE);
	wrongly(PINNER_FREE, handle, 1, 0);
	must(said("freed-while-pinned") == 1, "%lld", said("freed-while-pinned"));
	must(!sums_of(getpid()).pins, "%s", text_of("/proc/self/pins"));
	/* The difference in /proc/vmstat is permanent. */
	counts_before.pins++;
}

static void freed(void)
{
	freed_with(0);
}

static void freed_long(void)
{
	freed_with(PINNER_LONGTERM);
}

/* Nothing can unpin it any more: the process has exited, and its memory is freed. */
static void leaked(void)
{
	pid_t child = fork();
	unsigned int turn;

	must(child >= 0, "fork");
	if (!child) {
		__u8 *map = small_pages(5);

		wrongly(PINNER_ABANDON, pin(PINNER_FAST, PINNER_LONGTERM | PINNER_WRITE, map, 5), 1,
			0);
		consistent();
		_exit(0);
	}
	wait_for(child);
	/* Pages in LRU batches have an additional reference. */
	for (turn = 0; turn < 600 && !said("leaked"); turn++) {
		text_of(BOOKS "check");
		usleep(100000);
	}
	must(said("leaked"), "a leak is not found: %s", text_of(BOOKS "regions"));
	must(strstr(text_of(BOOKS "check"), "process has exited"), "%s", text_of(BOOKS "check"));
	must(LINE(BOOKS "regions", " gone 0 pin_wrong ", " 5 20480 "), "%s",
	     text_of(BOOKS "regions"));
	must(!call(pinner, PINNER_FORGIVE, NULL), "PINNER_FORGIVE");
}

static const struct test kinds[] = {
	{ "got", got },
	{ "twice", twice },
	{ "too_many", too_many },
	{ "put", put },
	{ "freed", freed },
	{ "freed_long", freed_long },
	{ "leaked", leaked },
};

static void one(void)
{
	__u8 *map = small_pages(100);
	unsigned int i;
	__u32 handle;

	note_counts();
	for (i = 0; i < ARRAY_SIZE(kinds) && strcmp(kinds[i].name, kind); i++)
		;
	must(i < ARRAY_SIZE(kinds), "no kind %s", kind);
	kinds[i].run();
	/* Correct use still works, and the error has been counted. */
	handle = pin(PINNER_PLAIN, PINNER_LONGTERM, map, 100);
	must(sums_of(getpid()).pins == 100, "%s", text_of("/proc/self/pins"));
	unpin(handle, 100);
	munmap(map, 100 * PAGE);
	must(counts_now().bad > counts_before.bad, "nothing was counted");
	counts_before.bad = counts_now().bad;
	as_before();
}

int main(int argc, char **argv)
{
	const struct test test = { "one", one };

	if (argc != 2)
		return 2;
	kind = argv[1];
	open_pinner();
	return run_all(&test, 1);
}
