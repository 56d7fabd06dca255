// SPDX-License-Identifier: GPL-2.0-only
/*
 * The exact count of a folio's pins, by whom the first one is held, and what is
 * said of pins and unpins that are no pairs.
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

/* How often both sorts of pins must be found to be none */
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

/* Before the first process: no pin is older than its count. */
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

/* In jiffies */
unsigned int pin_ext_age(const struct pin_ext *pins)
{
	return (u32)jiffies - READ_ONCE(pins->since);
}

/*
 * The count goes up behind the reference count and down before it.  So it never
 * says more than that, and whoever has seen no pin after a barrier is seen by
 * GUP-fast, which looks at the page table again (folio_try_share_anon_rmap_*()).
 */
void __pin_owner_pin(struct folio *folio, int nr)
{
	struct pin_ext *pins = pin_ext_get(&folio->page);

	/* ZONE_DEVICE */
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

/* Takes up to @nr off @count, which stays at 0 or above; returns how many. */
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
			      "pfn %#lx is unpinned %d time%s, but not pinned: put_page() was due, or it was unpinned before\n"
			      "pin_owner: by %pS; last short pin by %u at %ps, %u.%03u s ago\n",
			      folio_pfn(folio), nr, nr > 1 ? "s" : "", (void *)site,
			      READ_ONCE(pins->tgid), (void *)pin_ext_site(pins), age / 1000,
			      age % 1000);
	else
		pin_owner_bug(PIN_NOT_PINNED,
			      "pfn %#lx is unpinned %d time%s, but not pinned: put_page() was due, or it was unpinned before\n"
			      "pin_owner: by %pS; never pinned for a short time\n",
			      folio_pfn(folio), nr, nr > 1 ? "s" : "", (void *)site);
}

/**
 * pin_owner_unpin_slowly() - Take pins off the books that are of several kinds, or too few
 * @folio: what is unpinned
 * @pins: its entry, from pin_ext_get(), which is put
 * @nr: how many times
 * @site: who unpins
 *
 * Return: how many pins there were, at most @nr.
 */
int pin_owner_unpin_slowly(struct folio *folio, struct pin_ext *pins, int nr,
			   unsigned long site)
{
	int left = nr;

	if (pin_longs(pins) && atomic_read(&pins->short_pins)) {
		bool own = pin_region_adding(), is_long;

		/* Pins of a folio that is in another region count as short ones as yet. */
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
	 * A long-term pin may have been ended in the place of a short one that
	 * came when there was none: each is looked for again.
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
 * pin_owner_unpin() - Take pins off the books
 * @folio: what is unpinned
 * @nr: how many times
 * @site: who unpins
 *
 * An unpin does not say which pin it ends.  It is a short one, unless there is
 * none, or this is a place that ends long ones.
 *
 * Return: how many pins there were, at most @nr: what may be taken off the
 * reference count.  One pin too few is a leak, one too many frees a page that
 * is in use.
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

/* Says it once for each kind, and counts all.  Nothing panics of it. */
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
			      "pfn %#lx is freed while it is pinned %d time%s: a pin was undone with put_page()\n",
			      page_to_pfn(page), nr, nr > 1 ? "s" : "");
		/* The next user of the page begins with none. */
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
 * Exported like folio_maybe_dma_pinned(), which is in line and asks it.
 */
bool pin_owner_pinned(const struct folio *folio)
{
	return !pin_owner_on() || folio_pin_count(folio) != 0;
}
EXPORT_SYMBOL(pin_owner_pinned);

/**
 * folio_pin_count() - How many times a folio is pinned
 * @folio: to which the caller has a reference
 *
 * Return: pins of pin_user_pages() and its like; -ENODATA if that is not known:
 * of a small folio without pin_owner=on, and of memory of devices.
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
 * folio_dma_pinned() - Whether a folio is pinned
 * @folio: to which the caller has a reference
 *
 * Return: the truth where folio_pin_count() knows it, else what
 * folio_maybe_dma_pinned() says.
 */
bool folio_dma_pinned(const struct folio *folio)
{
	int nr = folio_pin_count(folio);

	return nr == -ENODATA ? folio_maybe_dma_pinned((struct folio *)folio) : nr > 0;
}
EXPORT_SYMBOL_GPL(folio_dma_pinned);

/**
 * PageDmaPinned() - Whether the folio of a page is pinned
 * @page: any of it
 *
 * Return: as folio_dma_pinned().
 */
bool PageDmaPinned(const struct page *page)
{
	return folio_dma_pinned(page_folio(page));
}
EXPORT_SYMBOL_GPL(PageDmaPinned);
