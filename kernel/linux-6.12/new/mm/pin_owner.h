/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef __MM_PIN_OWNER_H
#define __MM_PIN_OWNER_H
/* Between the files of the pin tracker, and what mm/ calls */

#include <linux/atomic.h>
#include <linux/cred.h>
#include <linux/jump_label.h>
#include <linux/llist.h>
#include <linux/mm.h>
#include <linux/page_ext.h>
#include <linux/pin_owner.h>
#include <linux/rcupdate.h>
#include <linux/sched.h>
#include <linux/stackdepot.h>
#include <linux/xarray.h>

struct file;
struct seq_file;

/**
 * struct pin_ext - pins of a folio, in the page_ext of its first page
 * @short_pins: pins of no region: short ones, or not assigned to one yet
 * @long_pins: pins of regions
 * @region: number of the region that was added last; PIN_EXT_SHARED if others
 *	are in the side table
 * @since: jiffies when @short_pins left 0
 * @tgid: process that made it leave 0
 * @site: its call site, relative to _stext
 *
 * A pinned folio can be neither split nor freed, so its first page stays the
 * first.
 */
struct pin_ext {
	atomic_t short_pins;
	atomic_t long_pins;
	u32 region;
	u32 since;
	u32 tgid;
	s32 site;
};

#define PIN_EXT_SHARED	0x80000000U

enum pin_stat {
	PIN_UNTRACKED,		/* pins of folios without an entry, now */
	PIN_GUESSED,		/* unpins whose pin had to be guessed */
	PIN_LOST,		/* pins that another region has to stand for */
	PIN_NOT_PINNED,		/* unpins of what is not pinned */
	PIN_FREED,		/* folios freed while pinned */
	PIN_PUT,		/* put_page() where an unpin was due */
	PIN_LEAKED,		/* pins that nobody can undo */
	PIN_BOOKS,		/* counts that disagree */
	PIN_STATS
};

extern atomic_long_t pin_stats[PIN_STATS];
extern struct page_ext_operations pin_owner_ops;
extern bool pin_owner_stacks;
DECLARE_STATIC_KEY_FALSE(pin_owner_key);

static inline bool pin_owner_on(void)
{
#ifdef CONFIG_PIN_OWNER
	return static_branch_unlikely(&pin_owner_key);
#else
	return false;
#endif
}

static inline struct pin_ext *pin_ext(struct page_ext *page_ext)
{
	return page_ext_data(page_ext, &pin_owner_ops);
}

static inline int pin_ext_count(struct pin_ext *pins)
{
	return atomic_read(&pins->short_pins) + atomic_read(&pins->long_pins);
}

void __pin_owner_pin(struct folio *folio, int pins);
int pin_owner_unpin(struct folio *folio, int pins, unsigned long site);
int pin_ext_take(atomic_t *count, int pins);
void __pin_owner_free(struct page *page, unsigned int order);
void __printf(2, 3) pin_owner_bug(enum pin_stat kind, const char *format, ...);
unsigned long pin_ext_site(const struct pin_ext *pins);
unsigned int pin_ext_age(const struct pin_ext *pins);

/* Remembers the call site of what pins from now on. */
static inline void pin_owner_enter(unsigned long site)
{
#ifdef CONFIG_PIN_OWNER
	if (pin_owner_on())
		current->pin_site = site;
#endif
}

static inline void pin_owner_pin(struct folio *folio, int pins)
{
	if (pin_owner_on())
		__pin_owner_pin(folio, pins);
}

static inline void pin_owner_free(struct page *page, unsigned int order)
{
	if (pin_owner_on())
		__pin_owner_free(page, order);
}

#define PIN_REGION_WRITE	BIT(0)
#define PIN_REGION_MEMFD	BIT(1)
#define PIN_REGION_MAX		(BIT(28) - 1)

/**
 * struct pin_region - long-term pins that one call made, or several in a row
 * @id: 1 to PIN_REGION_MAX; 0 stands for all whose region could not be allocated
 * @flags: PIN_REGION_*
 * @held: pins that are left, and one while it is being added to
 * @bytes: of the folios that it keeps in their place
 * @start: address in the memory of @tgid, or offset in the memfd
 * @pages: how much of it
 * @site: who pinned
 * @unpinner: who unpinned last
 * @since: CLOCK_BOOTTIME, in ns
 * @tgid: the process that pinned; NULL of region 0
 * @mm: whose addresses they are; to be compared only
 * @guessed: whether a pin that ended may have been another's
 * @uid: of the process
 * @stack: with pin_owner=on,stack
 * @adding: how many tasks add to it
 * @seen: pins that the check that runs has found
 * @was: @held when it began, or -1 if somebody was adding
 * @odd: how many times in a row they were not the same
 * @lone: when a check saw it as a leak first; 0 if none has
 * @alone: those of them on folios that nothing else holds
 * @dev: of the memfd
 * @ino: of the memfd
 * @comm: name of the process
 * @name: of the memfd
 */
struct pin_region {
	u32 id;
	u32 flags;
	atomic_long_t held;
	atomic_long_t bytes;
	unsigned long start;
	unsigned long pages;
	unsigned long site;
	unsigned long unpinner;
	u64 since;
	struct pid *tgid;
	const void *mm;
	atomic_t adding;
	bool guessed;
	kuid_t uid;
	depot_stack_handle_t stack;
	long seen;
	long was;
	unsigned int odd;
	long alone;
	unsigned long lone;
	dev_t dev;
	u64 ino;
	char comm[TASK_COMM_LEN];
	char name[32];
	union {
		struct llist_node dead;
		struct rcu_head rcu;
	};
};

#ifdef CONFIG_PIN_REGION
extern struct xarray pin_regions;
extern struct pin_region pin_region_unknown;
extern atomic_long_t pin_nodes;

void __init pin_region_init(void);
void pin_region_add(struct mm_struct *mm, unsigned long start, struct page **pages,
		    long nr, unsigned int flags);
void pin_region_add_memfd(struct file *memfd, loff_t start, loff_t end,
			  struct folio **folios, long nr);
int pin_region_put(struct folio *folio, struct pin_ext *pins, int nr, unsigned long site);
int pin_region_count(unsigned long pfn, struct pin_ext *pins);
bool pin_region_ends(unsigned long site);
void pin_region_guessed(u32 id);
struct pin_region *pin_region_find(u32 id);
bool pin_region_gone(const struct pin_region *region);
void pin_region_show(struct seq_file *m, const struct pin_region *region);
void pin_region_see(unsigned long pfn, struct pin_ext *pins, bool alone);
#else
static inline void pin_region_init(void) {}
static inline void pin_region_add(struct mm_struct *mm, unsigned long start,
				  struct page **pages, long nr, unsigned int flags) {}
static inline void pin_region_add_memfd(struct file *memfd, loff_t start, loff_t end,
					struct folio **folios, long nr) {}
static inline int pin_region_put(struct folio *folio, struct pin_ext *pins, int nr,
				 unsigned long site)
{
	return 0;
}

static inline void pin_region_guessed(u32 id) {}

static inline bool pin_region_ends(unsigned long site)
{
	return false;
}
#endif

/*
 * What the functions of pin_user_pages() end with: @nr pages are pinned, for
 * a long time if @flags says so.
 */
static inline long pin_owner_keep(struct mm_struct *mm, unsigned long start,
				  struct page **pages, unsigned int flags, long nr)
{
	if (pin_owner_on() && (flags & FOLL_LONGTERM) && nr > 0)
		pin_region_add(mm, start, pages, nr, flags);
	return nr;
}

static inline long pin_owner_keep_memfd(struct file *memfd, loff_t start, loff_t end,
					struct folio **folios, long nr)
{
	if (pin_owner_on() && nr > 0)
		pin_region_add_memfd(memfd, start, end, folios, nr);
	return nr;
}

#endif /* __MM_PIN_OWNER_H */
