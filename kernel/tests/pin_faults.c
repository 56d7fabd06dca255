// SPDX-License-Identifier: GPL-2.0-only
/*
 * pin_faults
 *
 * Each allocation of a long-term pin fails once (fail-nth), for a page that is not pinned yet, and
 * for one that is: pins must be counted correctly nevertheless, the process must be known if its
 * call stack is not, and nothing may leak. Needs a kernel with fault injection.
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

/* Repetitions: an allocation that happens only once may hide the one after it. */
#define TURNS	5U

/* Returns the number of cases in which the pins were made, but their call stack was lost. */
static unsigned int each(__u8 *map, enum pinner_how how, unsigned int before)
{
	unsigned int place, unknown = 0, made = 0, i;
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
		int result;

		fail_at(place);
		result = try_pin(&pin);
		failed = has_failed();
		must(!result || result == -ENOMEM, "place %u: %s", place, why(result));
		for (i = 0; i < PAGES; i++)
			must(COUNT_OF(pins_of(pfn_at(map + i * PAGE))) == before + !result,
			     "place %u, page %u: %llx", place, i, pins_of(pfn_at(map + i * PAGE)));
		must(sums_of(getpid()).pins == PAGES * (before + !result), "place %u: %lld", place,
		     sums_of(getpid()).pins);
		consistent();
		if (result)
			continue;
		made++;
		unknown += !LINE("/proc/self/pins", " pinner_ioctl");
		unpin(pin.handle, PAGES);
		must(sums_of(getpid()).pins == PAGES * before, "unpinned: %lld",
		     sums_of(getpid()).pins);
	}
	printf("# %u places, %u of them without harm, %u without a stack\n", place - 2, made - 1,
	       unknown);
	return unknown;
}

static void alone(void)
{
	enum pinner_how how;
	unsigned int turn;

	note_counts();
	for (how = PINNER_FAST; how < PINNER_MEMFD; how++) {
		__u8 *map = small_pages(PAGES);

		for (turn = 0; turn < TURNS; turn++)
			each(map, how, 0);
		munmap(map, PAGES * PAGE);
	}
	as_before();
}

static void shared(void)
{
	__u8 *map = small_pages(PAGES);
	__u32 handle;

	note_counts();
	handle = pin(PINNER_FAST, PINNER_LONGTERM, map, PAGES);
	each(map, PINNER_FAST, 1);
	unpin(handle, PAGES);
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
