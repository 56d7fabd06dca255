/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef __MM_PIN_OWNER_H
#define __MM_PIN_OWNER_H
/* Internal interface of the pin tracker, and the hooks that mm/ calls */

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
 * struct pin_ext - the pins of a folio, stored in the page_ext of its head page
 * @short_pins: number of pins outside regions: short pins, and long-term pins that
 *	have not been assigned to a region yet
 * @since: jiffies when @short_pins last became nonzero
 * @longs: pins in regions.  Lower 32 bits: their number.  Upper 32 bits: the ID of
 *	the region that was added last, and PIN_SHARED if the side table has more
 * @tgid: process whose pin made @short_pins nonzero
 * @site: call site of that pin, relative to _stext
 *
 * A pinned folio cannot be split or freed, so its head page does not change.
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

/* The ID of the region that was added last */
static inline u32 pin_last(struct pin_ext *pins)
{
	return (atomic64_read(&pins->longs) & ~PIN_SHARED) >> 32;
}

enum pin_stat {
	PIN_UNTRACKED,		/* current pins of folios without an entry */
	PIN_GUESSED,		/* unpins that were matched to a pin by guessing */
	PIN_LOST,		/* pins counted in another region, for lack of memory */
	PIN_NOT_PINNED,		/* unpins of folios that were not pinned */
	PIN_FREED,		/* folios that were freed while pinned */
	PIN_PUT,		/* pins released with put_page() */
	PIN_LEAKED,		/* regions that can no longer be unpinned */
	PIN_BOOKS,		/* inconsistent counts */
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
 * pin_ext_get() - Get the entry of a folio
 * @page: the head page of the folio
 *
 * An inline version of page_ext_get() that does not check whether the section
 * exists.  Disabling preemption blocks synchronize_rcu() as rcu_read_lock() does.
 *
 * Return: the entry, valid until pin_ext_put(); or NULL for device memory, early
 * during boot, and for a section that is being added or removed.
 */
static __always_inline struct pin_ext *pin_ext_get(const struct page *page)
{
	unsigned long pfn = page_to_pfn(page), nr = pfn_to_section_nr(pfn);
	struct mem_section *section = &mem_section[SECTION_NR_TO_ROOT(nr)][nr & SECTION_ROOT_MASK];
	unsigned long base;

	preempt_disable();
	base = (unsigned long)READ_ONCE(section->page_ext);
	/* Bit 0 is set while the page_ext is being removed. */
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
 * struct pin_region - long-term pins made by one call, or by several consecutive ones
 * @id: 1 to PIN_REGION_MAX; 0 for all pins whose region could not be allocated
 * @flags: PIN_REGION_*
 * @held: number of remaining pins, plus one for each task that is adding pins
 * @bytes: total size of the pinned folios
 * @start: first address in the memory of @tgid, or first offset in the memfd
 * @pages: size of the range in pages
 * @site: call site that pinned
 * @unpinner: call site of the latest unpin
 * @since: time of creation, CLOCK_BOOTTIME in ns
 * @tgid: the process that pinned; NULL for region 0
 * @mm: address space of @start; for comparison only, never dereferenced
 * @guessed: an unpin that was counted here may have belonged to another region
 * @left: some pins have to be assigned by pin_region_end()
 * @uid: user ID of the process
 * @stack: stack trace of the pin, with pin_owner=on,stack
 * @adding: number of tasks that are adding pins
 * @seen: number of pins that the running check has found
 * @was: @held at the start of that check, or -1 if pins were being added
 * @odd: number of consecutive passes in which @seen and @held differed
 * @lone: jiffies when a check first saw the region as leaked, or 0
 * @alone: part of @seen that is on folios without other references
 * @dev: device of the memfd
 * @ino: inode number of the memfd
 * @comm: name of the process
 * @name: name of the memfd
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

/* With FOLL_LONGTERM, only between pin_owner_begin() and pin_owner_end(). */
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
 * Bracket a function that pins pages, if pin_owner_on().  @site is the call site.
 * With FOLL_LONGTERM in @flags the pins become a region.  @nr is the result of the
 * function.
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
