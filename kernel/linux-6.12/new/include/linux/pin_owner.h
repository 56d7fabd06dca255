/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef _LINUX_PIN_OWNER_H
#define _LINUX_PIN_OWNER_H
/*
 * The pin tracker counts the pins of each folio exactly and records who made them.
 * See Documentation/mm/pin_owner.rst.
 */

#include <linux/types.h>

struct folio;
struct list_head;
struct page;
struct seq_file;
struct task_struct;

#ifdef CONFIG_PIN_OWNER
bool pin_owner_pinned(const struct folio *folio);
int folio_pin_count(const struct folio *folio);
bool folio_dma_pinned(const struct folio *folio);
bool PageDmaPinned(const struct page *page);
#else
/* folio_maybe_dma_pinned() calls this for a small folio with many references. */
static inline bool pin_owner_pinned(const struct folio *folio)
{
	return true;
}
#endif

#ifdef CONFIG_PIN_REGION
int pin_owner_show(struct seq_file *m, struct task_struct *task);
u64 pin_owner_word(const struct page *page);
#endif

#ifdef CONFIG_PIN_REPORT
void pin_owner_dump(const struct page *page);
void pin_owner_blocked(struct page *page, const char *why, int held);
void pin_owner_not_migrated(struct list_head *folios, int reason);
#else
static inline void pin_owner_dump(const struct page *page) {}
static inline void pin_owner_blocked(struct page *page, const char *why, int held) {}
static inline void pin_owner_not_migrated(struct list_head *folios, int reason) {}
#endif

#endif /* _LINUX_PIN_OWNER_H */
