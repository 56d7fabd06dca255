// SPDX-License-Identifier: GPL-2.0-only
/*
 * pin_faults
 *
 * Each allocation of a long-term pin fails once (fail-nth), for a page that is in no region yet,
 * and for one that is in another region: pins must be counted correctly nevertheless, nothing may
 * leak, and the kernel must show which pins have no region. Needs a kernel with fault injection.
 */
#define _GNU_SOURCE
#include "pins.h"

#define PAGES	16U

static int nth_fd;

static void fail_at(unsigned int place)
{
	char text[16];
	int len = snprintf(text, sizeof(text), "%u", place);

	must(pwrite(nth_fd, text, len, 0) == len, "fail-nth: %s", strerror(errno));
}

/* Whether the failure was injected */
static bool has_failed(void)
{
	char text[16] = "";
	bool failed;

	must(pread(nth_fd, text, sizeof(text) - 1, 0) > 0, "fail-nth: %s", strerror(errno));
	failed = !atoi(text);
	fail_at(0);
	return failed;
}

/* The number of pins whose region could not be allocated */
static long long of_nobody(void)
{
	char *line = LINE(BOOKS "regions", "0 - 0 unknown ");
	long long pins = 0;

	must(!line || sscanf(line, "0 - 0 unknown %lld pins", &pins) == 1, "%s", line);
	return pins;
}

/* Repetitions: an allocation that happens only once may hide the one after it. */
#define TURNS	5U

/* Returns the number of cases in which pins were counted in another region, or in none. */
static unsigned int each(__u8 *map, enum pinner_how how, unsigned int before)
{
	unsigned int place, odd = 0, made = 0, i;
	bool failed = true;

	for (place = 1; failed; place++) {
		struct pinner_pin pin = {
			.address = (uintptr_t)map,
			.pages = PAGES,
			.times = 1,
			.how = how,
			.flags = PINNER_LONGTERM,
			.id = getpid(),
		};
		long long lost = number_in(BOOKS "stats", "lost");
		long long unknown = of_nobody();
		int result;

		fail_at(place);
		result = try_pin(&pin);
		failed = has_failed();
		must(!result || result == -ENOMEM, "place %u: %s", place, why(result));
		for (i = 0; i < PAGES; i++)
			must(COUNT_OF(pins_of(pfn_at(map + i * PAGE))) == before + !result,
			     "place %u, page %u: %llx", place, i, pins_of(pfn_at(map + i * PAGE)));
		must(sums_of(getpid()).pins + of_nobody() == PAGES * (before + !result),
		     "place %u: %lld and %lld", place, sums_of(getpid()).pins, of_nobody());
		consistent();
		if (result)
			continue;
		made++;
		odd += of_nobody() > unknown || number_in(BOOKS "stats", "lost") > lost;
		unpin(pin.handle, PAGES);
		/* The kernel guesses which of the two pins this was, but the total is exact. */
		must(sums_of(getpid()).pins + of_nobody() == PAGES * before,
		     "unpinned: %lld and %lld", sums_of(getpid()).pins, of_nobody());
	}
	printf("# %u places, %u of them without harm, %u forgotten\n", place - 2, made - 1, odd);
	return odd;
}

static void alone(void)
{
	enum pinner_how how;

	note_counts();
	for (how = PINNER_FAST; how < PINNER_MEMFD; how++) {
		__u8 *map = small_pages(PAGES);
		unsigned int turn;

		for (turn = 0; turn < TURNS && !each(map, how, 0); turn++)
			;
		must(turn < TURNS, "no region has failed");
		munmap(map, PAGES * PAGE);
	}
	as_before();
}

static void shared(void)
{
	__u8 *map = small_pages(PAGES);
	unsigned int turn;
	__u32 handle;

	note_counts();
	handle = pin(PINNER_FAST, PINNER_LONGTERM, map, PAGES);
	/* One region, and a node for each page */
	for (turn = 0; turn < TURNS && each(map, PINNER_FAST, 1) <= PAGES; turn++)
		;
	must(turn < TURNS, "not every node has failed");
	unpin(handle, PAGES);
	must(!of_nobody(), "%lld are still unknown", of_nobody());
	munmap(map, PAGES * PAGE);
	as_before();
}

static const struct test tests[] = {
	{ "alone", alone },
	{ "shared", shared },
};

int main(void)
{
	static const char * const settings[] = {
		"failslab/verbose", "fail_page_alloc/verbose", "fail_page_alloc/min-order",
	};
	char path[64];
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(settings); i++) {
		snprintf(path, sizeof(path), "/sys/kernel/debug/%s", settings[i]);
		must(write_to(path, "0"), "%s: %s", path, strerror(errno));
	}
	must(write_to("/sys/kernel/debug/failslab/ignore-gfp-wait", "N") &&
	     write_to("/sys/kernel/debug/fail_page_alloc/ignore-gfp-wait", "N"), "failslab");
	nth_fd = open("/proc/self/fail-nth", O_RDWR | O_CLOEXEC);
	must(nth_fd >= 0, "fail-nth: %s", strerror(errno));
	open_pinner();
	return run_all(tests, ARRAY_SIZE(tests));
}
