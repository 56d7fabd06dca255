// SPDX-License-Identifier: GPL-2.0-only
/*
 * pin_wrong KIND
 *
 * Makes pins and unpins that do not balance, one kind per boot. The kernel must continue. It must
 * log an unpin without a pin once, and count it: the caller of this program checks the log. What
 * no unpin shows must be in `check`, or in `pages`.
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
	char want[64];

	must(times > 0 && times < 10, "%d references", ask(map).refs);
	consistent();
	wrongly(PINNER_PUT, handle, times, 0);
	snprintf(want, sizeof(want), "%#llx 0 1 1023 ", pfn_at(map));
	must(LINE(BOOKS "check", want), "no %s: %s", want, text_of(BOOKS "check"));
	wrongly(PINNER_GET, handle, times, 0);
	consistent();
	unpin(handle, 1);
	munmap(map, PAGE);
}

/* Only possible with as many wrong puts as a pin has references. It stays in `check`. */
static void freed(void)
{
	__u8 *map = map_at(PAGE, MAP_SHARED, pinner);
	__u32 handle;
	char want[64];

	handle = pin(PINNER_FAST, PINNER_WRITE | PINNER_LONGTERM, map, 1);
	must(ask(map).count == 1 && sums_of(getpid()).pins == 1, "%d", ask(map).count);
	snprintf(want, sizeof(want), "%#llx 0 1 ", pfn_at(map));
	munmap(map, PAGE);
	wrongly(PINNER_FREE, handle, 1, 0);
	must(LINE(BOOKS "check", want), "no %s: %s", want, text_of(BOOKS "check"));
	puts("ok 1 one");
	exit(0);
}

/* Nothing can unpin it any more: the process has exited, and its memory is freed. */
static void leaked(void)
{
	pid_t child = fork();
	unsigned int turn;
	char want[64];

	must(child >= 0, "fork");
	if (!child) {
		__u8 *map = small_pages(5);

		wrongly(PINNER_ABANDON, pin(PINNER_FAST, PINNER_LONGTERM | PINNER_WRITE, map, 5), 1,
			0);
		consistent();
		_exit(0);
	}
	wait_for(child);
	snprintf(want, sizeof(want), "%d gone 5 20480 ", child);
	must(LINE(BOOKS "owners", want), "no %s: %s", want, text_of(BOOKS "owners"));
	/* Pages in LRU batches have an additional reference. */
	snprintf(want, sizeof(want), " 0 1 1024 0 %d ", child);
	for (turn = 0; turn < 600 && !LINE(BOOKS "pages", want); turn++)
		usleep(100000);
	must(turn < 600, "no %s: %s", want, text_of(BOOKS "pages"));
	must(!call(pinner, PINNER_FORGIVE, NULL), "PINNER_FORGIVE");
}

static const struct test kinds[] = {
	{ "got", got },
	{ "twice", twice },
	{ "too_many", too_many },
	{ "put", put },
	{ "freed", freed },
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
