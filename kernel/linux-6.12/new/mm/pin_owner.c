// SPDX-License-Identifier: GPL-2.0-only
/*
 * Count the pins of each folio exactly, record who made the first one, and report
 * pins and unpins that do not balance.
 */

#include <linux/export.h>
#include <linux/jiffies.h>
#include <linux/moduleparam.h>
#include <linux/sched/debug.h>
#include <linux/string.h>
#include <asm/sections.h>

#include "internal.h"
#include "pin_owner.h"

#define CREATE_TRACE_POINTS
#include <trace/events/pin_owner.h>

/* Retries before concluding that a folio has neither short nor long-term pins */
#define LOOKS 8

DEFINE_STATIC_KEY_FALSE(pin_owner_key);
atomic_long_t pin_stats[PIN_STATS];
bool pin_owner_stacks __ro_after_init;
static bool pin_owner_wanted __initdata = IS_ENABLED(CONFIG_PIN_OWNER_DEFAULT_ON);

static int __init pin_owner_setup(char *text)
{
	pin_owner_stacks = !strcmp(text, "on,stack");
	pin_owner_wanted = pin_owner_stacks || !strcmp(text, "on");
	return pin_owner_wanted || !strcmp(text, "off") ? 0 : -EINVAL;
}
early_param("pin_owner", pin_owner_setup);

static bool __init pin_owner_need(void)
{
	return pin_owner_wanted;
}

/* Runs before the first process starts, so no pin predates the tracking. */
static void __init pin_owner_init(void)
{
	if (!pin_owner_wanted)
		return;
	if (pin_owner_stacks)
		stack_depot_init();
	pin_region_init();
	static_branch_enable(&pin_owner_key);
}

struct page_ext_operations pin_owner_ops = {
	.size = sizeof(struct pin_ext),
	.need = pin_owner_need,
	.init = pin_owner_init,
};

unsigned long pin_ext_site(const struct pin_ext *pins)
{
	return (unsigned long)_stext + READ_ONCE(pins->site);
}

/* Return: the age of the first short pin, in jiffies */
unsigned int pin_ext_age(const struct pin_ext *pins)
{
	return (u32)jiffies - READ_ONCE(pins->since);
}

/*
 * The pin count is raised after the reference count and lowered before it, so it
 * never exceeds it.  If a task has cleared a page table entry and, after a memory
 * barrier, reads a pin count of 0, GUP-fast sees the cleared entry when it checks
 * the page table again (see folio_try_share_anon_rmap_*()).
 */
void __pin_owner_pin(struct folio *folio, int nr)
{
	struct pin_ext *pins = pin_ext_get(&folio->page);

	/* ZONE_DEVICE memory has no entry. */
	if (unlikely(!pins)) {
		atomic_long_add(nr, &pin_stats[PIN_UNTRACKED]);
		return;
	}
	if (atomic_add_return(nr, &pins->short_pins) == nr) {
		WRITE_ONCE(pins->since, (u32)jiffies);
		WRITE_ONCE(pins->tgid, current->tgid);
		WRITE_ONCE(pins->site, current->pin_site - (unsigned long)_stext);
	}
	pin_ext_put(pins);
}

/* Subtracts up to @nr from @count, but not below 0. Return: the amount subtracted. */
int pin_ext_take(atomic_t *count, int nr)
{
	int old = atomic_read(count), taken;

	do {
		taken = min(nr, old);
		if (taken <= 0)
			return 0;
	} while (!atomic_try_cmpxchg(count, &old, old - taken));
	return taken;
}

static void not_pinned(struct folio *folio, struct pin_ext *pins, int nr, unsigned long site)
{
	unsigned int age = jiffies_to_msecs(pin_ext_age(pins));

	if (READ_ONCE(pins->site))
		pin_owner_bug(PIN_NOT_PINNED,
			      "pfn %#lx unpinned %d time%s while not pinned: unpinned twice, or put_page() was intended\n"
			      "pin_owner: by %pS; last short pin by %u at %ps, %u.%03u s ago\n",
			      folio_pfn(folio), nr, nr > 1 ? "s" : "", (void *)site,
			      READ_ONCE(pins->tgid), (void *)pin_ext_site(pins), age / 1000,
			      age % 1000);
	else
		pin_owner_bug(PIN_NOT_PINNED,
			      "pfn %#lx unpinned %d time%s while not pinned: unpinned twice, or put_page() was intended\n"
			      "pin_owner: by %pS; no short pin recorded\n",
			      folio_pfn(folio), nr, nr > 1 ? "s" : "", (void *)site);
}

/**
 * pin_owner_unpin_slowly() - Uncount pins of a folio with mixed, or too few, pins
 * @folio: the folio being unpinned
 * @pins: its entry, from pin_ext_get(); released here
 * @nr: the number of unpins
 * @site: the call site of the unpin
 *
 * Return: the number of pins that existed, at most @nr.
 */
int pin_owner_unpin_slowly(struct folio *folio, struct pin_ext *pins, int nr,
			   unsigned long site)
{
	int left = nr;

	if (pin_longs(pins) && atomic_read(&pins->short_pins)) {
		bool own = pin_region_adding(), is_long;

		/* Until pin_region_end(), pins of a folio in another region count as short. */
		if (own)
			is_long = !pin_shared(pins) && pin_last(pins) == current->pin_region;
		else
			is_long = pin_region_ends(site);
		if (!own)
			pin_region_guessed(pin_last(pins));
		if (is_long)
			left -= pin_region_put(folio, pins, left, site);
	}
	/*
	 * Another unpin may have taken a long-term pin just before a short pin was
	 * added.  So check both counts again.
	 */
	for (int i = 0; left && i < LOOKS; i++) {
		left -= pin_ext_take(&pins->short_pins, left);
		if (left)
			left -= pin_region_put(folio, pins, left, site);
	}
	if (unlikely(left))
		not_pinned(folio, pins, left, site);
	pin_ext_put(pins);
	return nr - left;
}

/**
 * pin_owner_unpin() - Uncount pins of a folio
 * @folio: the folio being unpinned
 * @nr: the number of unpins
 * @site: the call site of the unpin
 *
 * An unpin does not identify the pin that it releases.  A short pin is assumed,
 * unless there is none, or @site is known to release long-term pins.
 *
 * Return: the number of pins that existed, at most @nr.  The caller must drop only
 * the references of that many pins: dropping too few leaks the page, dropping too
 * many frees a page that is in use.
 */
int pin_owner_unpin(struct folio *folio, int nr, unsigned long site)
{
	struct pin_ext *pins = pin_ext_get(&folio->page);
	int shorts;

	if (unlikely(!pins)) {
		atomic_long_sub(nr, &pin_stats[PIN_UNTRACKED]);
		return nr;
	}
	shorts = atomic_read(&pins->short_pins);
	if (pin_longs(pins)) {
		if (!shorts)
			return pin_region_unpin(folio, pins, nr, site);
	} else if (shorts >= nr && atomic_try_cmpxchg(&pins->short_pins, &shorts, shorts - nr)) {
		pin_ext_put(pins);
		return nr;
	}
	return pin_owner_unpin_slowly(folio, pins, nr, site);
}

/* Logs only the first mismatch of each kind, counts all of them, and never panics. */
void pin_owner_bug(enum pin_stat kind, const char *format, ...)
{
	struct va_format text = { .fmt = format };
	va_list args;

	trace_pin_owner_mismatch(kind, _RET_IP_);
	if (atomic_long_inc_return(&pin_stats[kind]) != 1)
		return;
	va_start(args, format);
	text.va = &args;
	pr_err("BUG: pin_owner: %pV", &text);
	va_end(args);
	dump_stack();
}

static void look_at_freed(struct page *page)
{
	struct pin_ext *pins = pin_ext_get(page);
	int nr, longs;

	if (!pins)
		return;
	nr = pin_ext_count(pins);
	if (unlikely(nr)) {
		longs = pin_longs(pins);
		pin_owner_bug(PIN_FREED,
			      "pfn %#lx freed while pinned %d time%s: a pin was released with put_page()\n",
			      page_to_pfn(page), nr, nr > 1 ? "s" : "");
		/* The next user of the page starts without pins. */
		atomic_set(&pins->short_pins, 0);
		pin_region_put(page_folio(page), pins, longs, _RET_IP_);
	}
	pin_ext_put(pins);
}

void __pin_owner_free(struct page *page, unsigned int order)
{
	unsigned long nr = PageCompound(page) ? 1 : 1UL << order;

	for (unsigned long i = 0; i < nr; i++)
		look_at_freed(page + i);
}

/*
 * Whether a small folio with at least GUP_PIN_COUNTING_BIAS references is pinned.
 * Exported because modules use folio_maybe_dma_pinned(), an inline function that
 * calls it.
 */
bool pin_owner_pinned(const struct folio *folio)
{
	return !pin_owner_on() || folio_pin_count(folio) != 0;
}
EXPORT_SYMBOL(pin_owner_pinned);

/**
 * folio_pin_count() - Get the number of pins of a folio
 * @folio: the folio, on which the caller holds a reference
 *
 * Return: the number of pins taken by the pin_user_pages() family, or -ENODATA if
 * it is unknown: for small folios without pin_owner=on, and for device memory.
 */
int folio_pin_count(const struct folio *folio)
{
	struct pin_ext *pins;
	int nr;

	if (folio_test_large(folio))
		return atomic_read(&folio->_pincount);
	if (!pin_owner_on())
		return -ENODATA;
	pins = pin_ext_get(&folio->page);
	if (!pins)
		return -ENODATA;
	nr = pin_ext_count(pins);
	pin_ext_put(pins);
	return nr;
}
EXPORT_SYMBOL_GPL(folio_pin_count);

/**
 * folio_dma_pinned() - Check whether a folio is pinned
 * @folio: the folio, on which the caller holds a reference
 *
 * Return: the exact answer if folio_pin_count() knows it, otherwise that of
 * folio_maybe_dma_pinned().
 */
bool folio_dma_pinned(const struct folio *folio)
{
	int nr = folio_pin_count(folio);

	return nr == -ENODATA ? folio_maybe_dma_pinned((struct folio *)folio) : nr > 0;
}
EXPORT_SYMBOL_GPL(folio_dma_pinned);

/**
 * PageDmaPinned() - Check whether the folio of a page is pinned
 * @page: any page of the folio
 *
 * Return: see folio_dma_pinned().
 */
bool PageDmaPinned(const struct page *page)
{
	return folio_dma_pinned(page_folio(page));
}
EXPORT_SYMBOL_GPL(PageDmaPinned);
