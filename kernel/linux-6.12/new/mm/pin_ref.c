// SPDX-License-Identifier: GPL-2.0-only
/*
 * Detect put_page() calls that should have been unpins, as they happen: the
 * tracepoints of CONFIG_DEBUG_PAGE_REF report every change of a reference count.
 */

#include <linux/init.h>
#include <linux/page_ref.h>
#include <trace/events/page_ref.h>

#include "internal.h"
#include "pin_owner.h"

/*
 * A pin is counted after its references are taken, and uncounted before they are
 * dropped, so a folio never has fewer references than its pins require.  The two
 * counts cannot be read together.  So retry until the pin count is stable.
 */
#define LOOKS 8

static void look(struct page *page)
{
	struct folio *folio = page_folio(page);
	int each = folio_test_large(folio) ? 1 : GUP_PIN_COUNTING_BIAS;
	struct pin_ext *pins = pin_ext_get(&folio->page);
	int refs, nr, i;

	if (!pins)
		return;
	nr = pin_ext_count(pins);
	refs = folio_ref_count(folio);
	for (i = 0; i < LOOKS && nr && refs < nr * each; i++) {
		nr = pin_region_count(folio_pfn(folio), pins);
		refs = folio_ref_count(folio);
		if (pin_region_count(folio_pfn(folio), pins) != nr)
			break;
	}
	if (unlikely(i == LOOKS && nr && refs < nr * each))
		pin_owner_bug(PIN_PUT,
			      "pfn %#lx pinned %d time%s but has %d references: a pin was released with put_page()\n",
			      folio_pfn(folio), nr, nr > 1 ? "s" : "", refs);
	pin_ext_put(pins);
}

static void changed(void *data, struct page *page, int by)
{
	if (by < 0)
		look(page);
}

static void changed_and_tested(void *data, struct page *page, int by, int ret)
{
	/* @ret is true if the page is being freed: __pin_owner_free() checks it. */
	if (by < 0 && !ret)
		look(page);
}

static int __init pin_ref_init(void)
{
	if (!pin_owner_on())
		return 0;
	register_trace_page_ref_mod(changed, NULL);
	register_trace_page_ref_mod_and_test(changed_and_tested, NULL);
	return 0;
}
core_initcall(pin_ref_init);
