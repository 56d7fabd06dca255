// SPDX-License-Identifier: GPL-2.0-only
/*
 * pin_most
 *
 * Pins a small page as often as its reference count allows, with 1024 references for each pin. The
 * count must be exact up to the last one. One more pin fails with a warning, as on other kernels.
 * All pins can be released.
 */
#define _GNU_SOURCE
#include "pins.h"

/* 2^21 pins make the reference count negative. */
#define MOST	2097152U

static void most(void)
{
	__u8 *map = small_pages(1);
	const int refs = ask(map).refs;
	struct pinner_pin many = {
		.address = (uintptr_t)map,
		.pages = 1,
		.times = MOST - 1,
		.how = PINNER_FAST,
	};
	struct pinner_pin last = many, beyond = many;
	__u64 pfn = pfn_at(map);
	struct asked said;
	int result;

	note_counts();
	result = try_pin(&many);
	must(!result && many.pinned == MOST - 1, "%u pins: %s", many.pinned, why(result));
	said = ask(map);
	must(said.count == MOST - 1 && said.maybe, "%d pins", said.count);
	must(said.refs == refs + (int)((MOST - 1) * 1024), "%d references", said.refs);
	consistent();
	last.times = 1;
	result = try_pin(&last);
	must(!result && last.pinned == 1, "the last one: %s", why(result));
	must(COUNT_OF(pins_of(pfn)) == MOST && IS_EXACT(pins_of(pfn)), "%llx", pins_of(pfn));
	must(flags_of(pfn) >> KPF_PINNED & 1, "%llx", flags_of(pfn));
	consistent();
	beyond.times = 1;
	result = try_pin(&beyond);
	must(result == -ENOMEM, "one too many: %s", why(result));
	must(COUNT_OF(pins_of(pfn)) == MOST, "%llx", pins_of(pfn));
	consistent();
	unpin(last.handle, 1);
	must(ask(map).count == MOST - 1, "%d", ask(map).count);
	unpin_as(many.handle, 0, MOST / 2, PINNER_TASK, PINNER_PAGES);
	must(ask(map).count == MOST / 2 - 1, "%d", ask(map).count);
	unpin_as(many.handle, MOST / 2, MOST / 2 - 1, PINNER_TASK, PINNER_PAGES);
	said = ask(map);
	must(!said.count && said.refs == refs && !said.maybe,
	     "%d pins, %d references", said.count, said.refs);
	munmap(map, PAGE);
	as_before();
}

int main(void)
{
	const struct test test = { "most", most };

	open_pinner();
	return run_all(&test, 1);
}
