/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef __MM_PIN_OWNER_H
#define __MM_PIN_OWNER_H
/* Between the files of the pin tracker, and what mm/ calls */

#include <linux/atomic.h>
#include <linux/cred.h>
#include <linux/jump_label.h>
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
 * @since: jiffies when @short_pins left 0
 * @longs: pins of regions: their number in the lower half, in the upper one the
 *	number of the region that was added last, and PIN_SHARED if others are
 *	in the side table
 * @tgid: process that made @short_pins leave 0
 * @site: its call site, relative to _stext
 *
 * A pinned folio can be neither split nor freed, so its first page stays the
 * first.
 */
struct pin_ext {
	atomic_t short_pins;
	u32 since;
	atomic64_t longs;
	u32 tgid;
	s32 site;
};

#define PIN_SHARED	BIT_ULL(63)

static inline int pin_longs(struct pin_ext *pins)
{
	return (u32)atomic64_read(&pins->longs);
}

static inline bool pin_shared(struct pin_ext *pins)
{
	return atomic64_read(&pins->longs) & PIN_SHARED;
}

/* The region that was added last */
static inline u32 pin_last(struct pin_ext *pins)
{
	return (atomic64_read(&pins->longs) & ~PIN_SHARED) >> 32;
}

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

#ifdef CONFIG_PIN_OWNER
/**
 * pin_ext_get() - Find the entry of a folio
 * @page: its first page
 *
 * What page_ext_get() does, in line and without a test whether there is such a
 * section: preemption that is off holds up synchronize_rcu(), too.
 *
 * Return: NULL of memory of devices, early in boot, and of sections that come or
 * go; else what is valid until pin_ext_put().
 */
static __always_inline struct pin_ext *pin_ext_get(const struct page *page)
{
	unsigned long pfn = page_to_pfn(page), nr = pfn_to_section_nr(pfn);
	struct mem_section *section = &mem_section[SECTION_NR_TO_ROOT(nr)][nr & SECTION_ROOT_MASK];
	unsigned long base;

	preempt_disable();
	base = (unsigned long)READ_ONCE(section->page_ext);
	/* Bit 0 is set while it is being taken away. */
	if (likely(base && !(base & 1)))
		return (void *)(base + page_ext_size * pfn + pin_owner_ops.offset);
	preempt_enable();
	return NULL;
}

static inline void pin_ext_put(struct pin_ext *pins)
{
	if (pins)
		preempt_enable();
}
#endif

static inline int pin_ext_count(struct pin_ext *pins)
{
	return atomic_read(&pins->short_pins) + pin_longs(pins);
}

void __pin_owner_pin(struct folio *folio, int nr);
int pin_owner_unpin(struct folio *folio, int nr, unsigned long site);
int pin_owner_unpin_slowly(struct folio *folio, struct pin_ext *pins, int nr,
			   unsigned long site);
int pin_ext_take(atomic_t *count, int pins);
void __pin_owner_free(struct page *page, unsigned int order);
void __printf(2, 3) pin_owner_bug(enum pin_stat kind, const char *format, ...);
unsigned long pin_ext_site(const struct pin_ext *pins);
unsigned int pin_ext_age(const struct pin_ext *pins);

static inline void pin_owner_free(struct page *page, unsigned int order)
{
	if (pin_owner_on())
		__pin_owner_free(page, order);
}

#define PIN_REGION_WRITE	BIT(0)
#define PIN_REGION_MEMFD	BIT(1)
#define PIN_REGION_MAX		((1U << 28) - 1)

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
 * @left: whether pins could not be assigned as they were made
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
	bool left;
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
	struct rcu_head rcu;
};

#ifdef CONFIG_PIN_REGION
extern struct xarray pin_regions;
extern atomic_long_t pin_nodes;

void __init pin_region_init(void);
void pin_region_begin(struct mm_struct *mm, unsigned long start, unsigned int flags);
void pin_region_begin_memfd(struct file *memfd, loff_t start);
void pin_region_end(struct page **pages, long nr);
void pin_region_end_memfd(loff_t start, loff_t end, struct folio **folios, long nr);
void pin_region_pin(struct folio *folio, int nr);
int pin_region_unpin(struct folio *folio, struct pin_ext *pins, int nr, unsigned long site);
int pin_region_put(struct folio *folio, struct pin_ext *pins, int nr, unsigned long site);
int pin_region_count(unsigned long pfn, struct pin_ext *pins);
bool pin_region_ends(unsigned long site);
bool pin_region_adding(void);
void pin_region_guessed(u32 id);
struct pin_region *pin_region_find(u32 id);
bool pin_region_gone(const struct pin_region *region);
void pin_region_show(struct seq_file *m, const struct pin_region *region);
void pin_region_see(unsigned long pfn, struct pin_ext *pins, bool alone);
#else
static inline void pin_region_init(void) {}
static inline void pin_region_begin(struct mm_struct *mm, unsigned long start,
				    unsigned int flags) {}
static inline void pin_region_begin_memfd(struct file *memfd, loff_t start) {}
static inline void pin_region_end(struct page **pages, long nr) {}
static inline void pin_region_end_memfd(loff_t start, loff_t end, struct folio **folios,
					long nr) {}
static inline void pin_region_pin(struct folio *folio, int nr)
{
	__pin_owner_pin(folio, nr);
}

static inline int pin_region_unpin(struct folio *folio, struct pin_ext *pins, int nr,
				   unsigned long site)
{
	return pin_owner_unpin_slowly(folio, pins, nr, site);
}

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

static inline bool pin_region_adding(void)
{
	return false;
}
#endif

/* With FOLL_LONGTERM between pin_owner_begin() and pin_owner_end() */
static inline void pin_owner_pin(struct folio *folio, int nr, unsigned int flags)
{
	if (!pin_owner_on())
		return;
	if (flags & FOLL_LONGTERM)
		pin_region_pin(folio, nr);
	else
		__pin_owner_pin(folio, nr);
}

/*
 * Around what makes pins, where pin_owner_on(): from which place, and for a long
 * time if @flags say so; @nr is what it returns.
 */
static inline void pin_owner_begin(struct mm_struct *mm, unsigned long start,
				   unsigned int flags, unsigned long site)
{
#ifdef CONFIG_PIN_OWNER
	current->pin_site = site;
#endif
	if (flags & FOLL_LONGTERM)
		pin_region_begin(mm, start, flags);
}

static inline long pin_owner_end(struct page **pages, unsigned int flags, long nr)
{
	if (flags & FOLL_LONGTERM)
		pin_region_end(pages, nr);
	return nr;
}

static inline void pin_owner_begin_memfd(struct file *memfd, loff_t start, unsigned long site)
{
#ifdef CONFIG_PIN_OWNER
	if (!pin_owner_on())
		return;
	current->pin_site = site;
	pin_region_begin_memfd(memfd, start);
#endif
}

static inline long pin_owner_end_memfd(loff_t start, loff_t end, struct folio **folios, long nr)
{
	if (pin_owner_on())
		pin_region_end_memfd(start, end, folios, nr);
	return nr;
}

#endif /* __MM_PIN_OWNER_H */
