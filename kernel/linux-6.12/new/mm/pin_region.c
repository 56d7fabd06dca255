// SPDX-License-Identifier: GPL-2.0-only
/*
 * Regions: groups of long-term pins, each with the process, call site and time of
 * the pins.
 *
 * Pins are assigned to their region as they are made.  The folio's entry has one
 * 64-bit word with the ID of the region and the number of pins, which is updated
 * atomically.  If a folio is in several regions, PIN_SHARED is set: the word has
 * the ID of the region that was added last, and a hash table has a node for each of
 * the others.  Both then change only under a lock selected by the folio's pfn.
 */

#include <linux/file.h>
#include <linux/fs.h>
#include <linux/hash.h>
#include <linux/kallsyms.h>
#include <linux/moduleparam.h>
#include <linux/percpu.h>
#include <linux/pid.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/stacktrace.h>
#include <linux/timekeeping.h>

#include "internal.h"
#include "pin_owner.h"

#include <trace/events/pin_owner.h>

#undef MODULE_PARAM_PREFIX
#define MODULE_PARAM_PREFIX "pin_owner."

struct pin_node {
	struct hlist_node list;
	unsigned long pfn;
	u32 region;
	int nr;
};

#define LOCKS		256
#define BUCKETS_SHIFT	14
#define BUCKETS		BIT(BUCKETS_SHIFT)
#define SITES		64

static raw_spinlock_t locks[LOCKS];
static struct hlist_head *buckets __ro_after_init;
static unsigned long long_sites[SITES];

/* The maximum number of nodes, of 32 bytes each */
static unsigned int extra = 1 << 20;
module_param(extra, uint, 0600);
MODULE_PARM_DESC(extra, "Maximum nodes for folios in several regions. Default is 1048576.");

atomic_long_t pin_nodes;
DEFINE_XARRAY_FLAGS(pin_regions, XA_FLAGS_ALLOC | XA_FLAGS_LOCK_IRQ);
static u32 next_region;
static struct kmem_cache *region_cache __ro_after_init;

/* A cache of the last lookup on this CPU; stale if any region has ended since */
struct last_seen {
	unsigned int ended;
	struct pin_region *region;
};

static struct pin_region unknown;
static DEFINE_PER_CPU(struct last_seen, last_seen) = { .ended = -1, .region = &unknown };
static unsigned int ended;

/* Region 0: pins whose region could not be allocated. It never ends. */
static struct pin_region unknown = {
	.held = ATOMIC_LONG_INIT(1),
	.comm = "unknown",
};

void __init pin_region_init(void)
{
	unsigned long flags;

	region_cache = KMEM_CACHE(pin_region, SLAB_ACCOUNT | SLAB_PANIC);
	buckets = kvcalloc(BUCKETS, sizeof(*buckets), GFP_KERNEL | __GFP_NOFAIL);
	for (int i = 0; i < LOCKS; i++)
		raw_spin_lock_init(&locks[i]);
	/* During boot interrupts may still be disabled, and must stay so. */
	xa_lock_irqsave(&pin_regions, flags);
	WARN_ON(xa_err(__xa_store(&pin_regions, 0, &unknown, GFP_NOWAIT)));
	xa_unlock_irqrestore(&pin_regions, flags);
}

static struct hlist_head *bucket_of(unsigned long pfn)
{
	return &buckets[hash_long(pfn, BUCKETS_SHIFT)];
}

static raw_spinlock_t *lock_of(unsigned long pfn)
{
	return &locks[hash_long(pfn, BUCKETS_SHIFT) % LOCKS];
}

/* Returns the region if it is in this CPU's cache. Preemption must be disabled. */
static __always_inline struct pin_region *find_seen(u32 id)
{
	struct last_seen *seen = this_cpu_ptr(&last_seen);
	struct pin_region *region;
	unsigned int since;

	/* Read before the region: an interrupt may replace both. */
	since = READ_ONCE(seen->ended);
	barrier();
	region = READ_ONCE(seen->region);
	return likely(since == READ_ONCE(ended) && region->id == id) ? region : NULL;
}

/**
 * pin_region_find() - Find a region by its ID
 * @id: the ID of a region that has pins; otherwise another region may be returned
 *
 * Return: the region, valid for as long as it has pins, or until the caller enables
 * preemption or ends its RCU read-side critical section.
 */
struct pin_region *pin_region_find(u32 id)
{
	struct last_seen *seen;
	struct pin_region *region;
	unsigned int since;

	preempt_disable();
	region = find_seen(id);
	if (!region) {
		seen = this_cpu_ptr(&last_seen);
		WRITE_ONCE(seen->ended, -1);
		since = READ_ONCE(ended);
		region = xa_load(&pin_regions, id) ?: &unknown;
		barrier();
		WRITE_ONCE(seen->region, region);
		barrier();
		WRITE_ONCE(seen->ended, since);
	}
	preempt_enable();
	return region;
}

/* Whether the process that pinned has exited. Its memory may still exist. */
bool pin_region_gone(const struct pin_region *region)
{
	return region->tgid && !pid_task(region->tgid, PIDTYPE_TGID);
}

/* The number of pins of a folio. The lock excludes assign(), which counts pins twice briefly. */
int pin_region_count(unsigned long pfn, struct pin_ext *pins)
{
	raw_spinlock_t *lock = lock_of(pfn);
	unsigned long flags;
	int nr;

	raw_spin_lock_irqsave(lock, flags);
	nr = pin_ext_count(pins);
	raw_spin_unlock_irqrestore(lock, flags);
	return nr;
}

void pin_region_guessed(u32 id)
{
	atomic_long_inc(&pin_stats[PIN_GUESSED]);
	WRITE_ONCE(pin_region_find(id)->guessed, true);
}

/* Call sites that have released long-term pins of folios without short pins */
static unsigned long *site_slot(unsigned long site)
{
	return &long_sites[hash_long(site, ilog2(SITES))];
}

bool pin_region_ends(unsigned long site)
{
	return READ_ONCE(*site_slot(site)) == site;
}

/**
 * pin_region_adding() - Check whether the current task is adding pins to a region
 *
 * If it unpins at the same time, it unpins what it has just pinned: GUP does so for
 * pages that must be migrated before they can be pinned long-term.
 *
 * Return: true if it is.
 */
bool pin_region_adding(void)
{
	struct pin_region *region = pin_region_find(current->pin_region);

	return in_task() && region != &unknown && region->id == current->pin_region &&
	       atomic_read(&region->adding);
}

static void free_region(struct rcu_head *rcu)
{
	struct pin_region *region = container_of(rcu, struct pin_region, rcu);

	put_pid(region->tgid);
	kmem_cache_free(region_cache, region);
}

/* Called in any context, without locks held. */
static noinline void last_put(struct pin_region *region)
{
	unsigned long flags;

	if (region == &unknown)
		return;
	trace_pin_owner_release(region);
	xa_lock_irqsave(&pin_regions, flags);
	__xa_erase(&pin_regions, region->id);
	/* -1 marks an empty cache. */
	WRITE_ONCE(ended, ended + 1 == -1U ? 0 : ended + 1);
	xa_unlock_irqrestore(&pin_regions, flags);
	call_rcu(&region->rcu, free_region);
}

static __always_inline void put_region(struct pin_region *region, long nr)
{
	if (unlikely(atomic_long_sub_and_test(nr, &region->held)))
		last_put(region);
}

static u64 word(u32 id, u32 nr)
{
	return (u64)id << 32 | nr;
}

static u32 id_of(u64 longs)
{
	return (longs & ~PIN_SHARED) >> 32;
}

static u32 nr_of(u64 longs)
{
	return longs;
}

static noinline void pin_slowly(struct folio *folio, int nr)
{
	struct pin_region *region = pin_region_find(current->pin_region);
	struct pin_ext *pins = pin_ext_get(&folio->page);
	s64 old;

	if (!pins) {
		__pin_owner_pin(folio, nr);
		return;
	}
	/* Add first: any unpin of this folio may release these pins at once. */
	atomic_long_add(nr, &region->held);
	old = atomic64_read(&pins->longs);
	do {
		if ((old & PIN_SHARED) || (nr_of(old) && id_of(old) != region->id)) {
			pin_ext_put(pins);
			atomic_long_sub(nr, &region->held);
			WRITE_ONCE(region->left, true);
			__pin_owner_pin(folio, nr);
			return;
		}
	} while (!atomic64_try_cmpxchg(&pins->longs, &old, word(region->id, nr_of(old) + nr)));
	if (!nr_of(old))
		atomic_long_add(folio_size(folio), &region->bytes);
	pin_ext_put(pins);
}

/**
 * pin_region_pin() - Count pins in the region that the current task has begun
 * @folio: the folio being pinned
 * @nr: the number of pins
 *
 * If the folio is in another region already, its pins are counted as short ones
 * until pin_region_end() assigns them.
 */
void pin_region_pin(struct folio *folio, int nr)
{
	struct pin_ext *pins = pin_ext_get(&folio->page);
	struct pin_region *region;
	s64 old;

	if (unlikely(!pins))
		return pin_slowly(folio, nr);
	/* Runs for every page, so it makes no function calls except in tail position. */
	region = find_seen(current->pin_region);
	old = atomic64_read(&pins->longs);
	if (likely(region && !nr_of(old))) {
		atomic_long_add(nr, &region->held);
		if (likely(atomic64_try_cmpxchg(&pins->longs, &old, word(region->id, nr)))) {
			atomic_long_add(folio_size(folio), &region->bytes);
			pin_ext_put(pins);
			return;
		}
		/* This cannot drop to 0: the caller holds one from begin(). */
		atomic_long_sub(nr, &region->held);
	}
	pin_ext_put(pins);
	pin_slowly(folio, nr);
}

/* The number of pins in all regions but the one added last. Called with the lock held. */
static int others(unsigned long pfn)
{
	struct pin_node *node;
	int nr = 0;

	hlist_for_each_entry(node, bucket_of(pfn), list)
		if (node->pfn == pfn)
			nr += node->nr;
	return nr;
}

static struct pin_node *find_node(unsigned long pfn, u32 region)
{
	struct pin_node *node;

	hlist_for_each_entry(node, bucket_of(pfn), list)
		if (node->pfn == pfn && node->region == region)
			return node;
	return NULL;
}

/* The node of any region but the one added last. Called with the lock held. */
static struct pin_node *other(unsigned long pfn)
{
	struct pin_node *node;

	hlist_for_each_entry(node, bucket_of(pfn), list)
		if (node->pfn == pfn)
			return node;
	return NULL;
}

static struct pin_node *new_node(void)
{
	if (atomic_long_read(&pin_nodes) >= extra)
		return NULL;
	return kmalloc(sizeof(struct pin_node), GFP_KERNEL_ACCOUNT | __GFP_NOWARN);
}

/*
 * Counts pins of @region in another region because no node could be allocated.
 * Called with the lock held.  On failure *@late may be set to a region from which
 * the caller must subtract @nr pins.
 */
static bool lose(struct pin_region *region, struct pin_ext *pins, int nr,
		 struct pin_region **late)
{
	s64 old = atomic64_read(&pins->longs);
	struct pin_region *last = pin_region_find(id_of(old));

	if (!nr_of(old) || !atomic_long_add_unless(&last->held, nr, 0))
		return false;
	if (!atomic64_try_cmpxchg(&pins->longs, &old, old + nr)) {
		*late = last;
		return false;
	}
	atomic_long_sub(nr, &region->held);
	atomic_long_add(nr, &pin_stats[PIN_LOST]);
	WRITE_ONCE(last->guessed, true);
	WRITE_ONCE(region->guessed, true);
	return true;
}

/*
 * Adds pins to a folio that is in another region as well.  Called with the lock
 * held.  Other tasks may change the word without the lock until PIN_SHARED is set.
 *
 * Return: true on success; *@spare is set to NULL if the node was used.
 */
static bool add_shared(struct pin_region *region, struct folio *folio, struct pin_ext *pins,
		       int nr, struct pin_node **spare)
{
	unsigned long pfn = folio_pfn(folio);
	s64 old = atomic64_read(&pins->longs);
	struct pin_node *node;

	while (!nr_of(old) || id_of(old) == region->id) {
		u64 new = (old & PIN_SHARED) | word(region->id, nr_of(old) + nr);

		if (!atomic64_try_cmpxchg(&pins->longs, &old, new))
			continue;
		if (!nr_of(old))
			atomic_long_add(folio_size(folio), &region->bytes);
		return true;
	}
	node = old & PIN_SHARED ? find_node(pfn, region->id) : NULL;
	if (node) {
		node->nr += nr;
		atomic64_add(nr, &pins->longs);
		return true;
	}
	node = *spare;
	if (!node ||
	    !atomic64_try_cmpxchg(&pins->longs, &old,
				  PIN_SHARED | word(region->id, nr_of(old) + nr)))
		return false;
	node->pfn = pfn;
	node->region = id_of(old);
	node->nr = nr_of(old) - (old & PIN_SHARED ? others(pfn) : 0);
	hlist_add_head(&node->list, bucket_of(pfn));
	*spare = NULL;
	atomic_long_inc(&pin_nodes);
	atomic_long_add(folio_size(folio), &region->bytes);
	return true;
}

/* Assigns pins that pin_region_pin() could not.  Adds first: the sum must never be too low. */
static void assign(struct pin_region *region, struct folio *folio, int nr)
{
	raw_spinlock_t *lock = lock_of(folio_pfn(folio));
	struct pin_node *spare = NULL;
	bool done = false, lost = false;
	struct pin_ext *pins;
	unsigned long flags;
	int left;

	atomic_long_add(nr, &region->held);
	while (!done) {
		struct pin_region *late = NULL;

		pins = pin_ext_get(&folio->page);
		/* pin_region_pin() may have assigned these. */
		if (!pins || (pin_longs(pins) && !pin_shared(pins) &&
			      pin_last(pins) == region->id)) {
			pin_ext_put(pins);
			put_region(region, nr);
			break;
		}
		raw_spin_lock_irqsave(lock, flags);
		done = add_shared(region, folio, pins, nr, &spare);
		if (!done && lost)
			done = lose(region, pins, nr, &late);
		left = done ? nr - pin_ext_take(&pins->short_pins, nr) : 0;
		raw_spin_unlock_irqrestore(lock, flags);
		/* An unpin without a matching pin has taken some of them already. */
		if (unlikely(left))
			pin_region_put(folio, pins, left, _RET_IP_);
		if (late)
			put_region(late, nr);
		pin_ext_put(pins);
		if (!done && !spare) {
			spare = new_node();
			lost = !spare;
		}
	}
	kfree(spare);
}

/*
 * Chooses the region that an unpin is counted in: preferably one of this process, then one that was
 * last unpinned from the same call site. Return: its node, or NULL for the region added last.
 */
static struct pin_node *choose(unsigned long pfn, u32 last, unsigned long site)
{
	struct pin_region *region = pin_region_find(last);
	struct pid *self = in_task() ? task_tgid(current) : NULL;
	struct pin_node *node, *before = NULL;

	if (self && region->tgid == self)
		return NULL;
	hlist_for_each_entry(node, bucket_of(pfn), list) {
		if (node->pfn != pfn)
			continue;
		region = pin_region_find(node->region);
		if (self && region->tgid == self)
			return node;
		if (READ_ONCE(region->unpinner) == site)
			before = node;
	}
	return READ_ONCE(pin_region_find(last)->unpinner) == site ? NULL : before;
}

/* Removes up to @nr pins from one of a folio's regions. Return: their number. */
static int put_shared(struct folio *folio, struct pin_ext *pins, int nr, unsigned long site)
{
	unsigned long flags, pfn = folio_pfn(folio);
	raw_spinlock_t *lock = lock_of(pfn);
	struct pin_node *node, *gone = NULL;
	struct pin_region *region;
	u64 longs;
	u32 id;
	int had;

	raw_spin_lock_irqsave(lock, flags);
	longs = atomic64_read(&pins->longs);
	if (!(longs & PIN_SHARED)) {
		raw_spin_unlock_irqrestore(lock, flags);
		return 0;
	}
	id = id_of(longs);
	node = choose(pfn, id, site);
	had = node ? node->nr : nr_of(longs) - others(pfn);
	region = pin_region_find(node ? node->region : id);
	nr = min(nr, had);
	if (node)
		node->nr -= nr;
	if (nr == had) {
		/* If the region added last has no pins left, another takes its place. */
		gone = node ?: other(pfn);
		hlist_del(&gone->list);
		id = node ? id : gone->region;
	}
	longs = word(id, nr_of(longs) - nr) | (other(pfn) ? PIN_SHARED : 0);
	/* A plain write: while PIN_SHARED is set, only the lock holder changes it. */
	atomic64_set(&pins->longs, longs);
	WRITE_ONCE(region->guessed, true);
	WRITE_ONCE(region->unpinner, site);
	atomic_long_inc(&pin_stats[PIN_GUESSED]);
	raw_spin_unlock_irqrestore(lock, flags);
	if (gone) {
		atomic_long_dec(&pin_nodes);
		kfree(gone);
	}
	if (nr == had)
		atomic_long_sub(folio_size(folio), &region->bytes);
	put_region(region, nr);
	return nr;
}

/* Records the call site that releases pins of a region. */
static void ends_at(struct pin_region *region, struct pin_ext *pins, unsigned long site)
{
	WRITE_ONCE(region->unpinner, site);
	/* If the region was guessed, this call site may release short pins. */
	if (!atomic_read(&pins->short_pins) && !READ_ONCE(region->guessed))
		WRITE_ONCE(*site_slot(site), site);
}

/**
 * pin_region_put() - Uncount long-term pins of a folio
 * @folio: the folio being unpinned
 * @pins: its entry, from pin_ext_get()
 * @nr: the number of unpins
 * @site: the call site of the unpin
 *
 * Return: the number of long-term pins that existed, at most @nr.
 */
int pin_region_put(struct folio *folio, struct pin_ext *pins, int nr, unsigned long site)
{
	s64 old = atomic64_read(&pins->longs);
	struct pin_region *region;
	int done = 0, part;

	while (done < nr && nr_of(old)) {
		if (old & PIN_SHARED) {
			done += put_shared(folio, pins, nr - done, site);
			old = atomic64_read(&pins->longs);
			continue;
		}
		part = min_t(int, nr - done, nr_of(old));
		if (!atomic64_try_cmpxchg(&pins->longs, &old, old - part))
			continue;
		region = pin_region_find(id_of(old));
		if (READ_ONCE(region->unpinner) != site)
			ends_at(region, pins, site);
		if (part == nr_of(old))
			atomic_long_sub(folio_size(folio), &region->bytes);
		put_region(region, part);
		done += part;
		old -= part;
	}
	return done;
}

static noinline int last_unpin(struct pin_region *region, struct pin_ext *pins, int nr)
{
	last_put(region);
	pin_ext_put(pins);
	return nr;
}

/**
 * pin_region_unpin() - Uncount pins of a folio that has only long-term ones
 * @folio: the folio being unpinned
 * @pins: its entry, from pin_ext_get(); released here
 * @nr: the number of unpins
 * @site: the call site of the unpin
 *
 * Return: the number of pins that existed, at most @nr.
 */
int pin_region_unpin(struct folio *folio, struct pin_ext *pins, int nr, unsigned long site)
{
	s64 old = atomic64_read(&pins->longs);
	struct pin_region *region = find_seen(id_of(old));

	/*
	 * Runs for every page, so it makes no function calls except in tail position. PIN_SHARED
	 * makes @old negative.
	 */
	if (unlikely(!region || READ_ONCE(region->unpinner) != site || old < 0 ||
		     nr_of(old) < nr || !atomic64_try_cmpxchg(&pins->longs, &old, old - nr)))
		return pin_owner_unpin_slowly(folio, pins, nr, site);
	if (nr_of(old) == nr)
		atomic_long_sub(folio_size(folio), &region->bytes);
	if (unlikely(atomic_long_sub_and_test(nr, &region->held)))
		return last_unpin(region, pins, nr);
	pin_ext_put(pins);
	return nr;
}

static struct pin_region *make(const struct pin_region *like)
{
	struct pin_region *region;
	unsigned long stack[16];

	region = kmem_cache_alloc(region_cache, GFP_KERNEL | __GFP_NOWARN);
	if (!region)
		return &unknown;
	*region = *like;
	region->since = ktime_get_boottime_ns();
	region->tgid = get_pid(task_tgid(current));
	region->uid = current_uid();
	get_task_comm(region->comm, current);
	if (pin_owner_stacks)
		region->stack = stack_depot_save(stack, stack_trace_save(stack, 16, 2),
						 GFP_KERNEL | __GFP_NOWARN);
	if (xa_alloc_cyclic_irq(&pin_regions, &region->id, region,
				XA_LIMIT(1, PIN_REGION_MAX), &next_region,
				GFP_KERNEL | __GFP_NOWARN) < 0) {
		put_pid(region->tgid);
		kmem_cache_free(region_cache, region);
		return &unknown;
	}
	return region;
}

/*
 * Returns the region of the task's previous call, with one pin added, if this call continues its
 * range. Otherwise NULL.
 */
static struct pin_region *goes_on(const struct pin_region *like)
{
	struct pin_region *region;
	bool same;

	rcu_read_lock();
	region = xa_load(&pin_regions, current->pin_region);
	if (!region || region == &unknown || !atomic_long_inc_not_zero(&region->held)) {
		rcu_read_unlock();
		return NULL;
	}
	rcu_read_unlock();
	same = region->tgid == task_tgid(current) && region->mm == like->mm &&
	       region->flags == like->flags && region->site == like->site &&
	       region->dev == like->dev && region->ino == like->ino &&
	       region->start + READ_ONCE(region->pages) * PAGE_SIZE == like->start;
	if (same)
		return region;
	put_region(region, 1);
	return NULL;
}

/* Until end() the region has an additional pin, which keeps it allocated. */
static void begin(struct pin_region *like)
{
	struct pin_region *region = goes_on(like);

	if (!region) {
		atomic_long_set(&like->held, 1);
		region = make(like);
		if (region == &unknown)
			atomic_long_inc(&region->held);
	}
	atomic_inc(&region->adding);
	current->pin_region = region->id;
}

static void end(struct pin_region *region, unsigned long pages)
{
	WRITE_ONCE(region->pages, region->pages + pages);
	if (pages)
		trace_pin_owner_region(region);
	atomic_dec(&region->adding);
	put_region(region, 1);
}

/**
 * pin_region_begin() - Prepare to pin memory of a process long-term
 * @mm: its address space
 * @start: the first address
 * @gup_flags: only FOLL_WRITE is used
 */
void pin_region_begin(struct mm_struct *mm, unsigned long start, unsigned int gup_flags)
{
	struct pin_region like = {
		.flags = gup_flags & FOLL_WRITE ? PIN_REGION_WRITE : 0,
		.start = start & PAGE_MASK,
		.site = current->pin_site,
		.mm = mm,
	};

	begin(&like);
}

/**
 * pin_region_end() - Finish what pin_region_begin() began
 * @pages: the pinned pages
 * @nr: their number, or an error
 */
void pin_region_end(struct page **pages, long nr)
{
	struct pin_region *region = pin_region_find(current->pin_region);
	long i, next;

	if (READ_ONCE(region->left)) {
		for (i = 0; i < nr; i = next) {
			struct folio *folio = page_folio(pages[i]);

			for (next = i + 1; next < nr && page_folio(pages[next]) == folio; next++)
				;
			if (!is_zero_folio(folio))
				assign(region, folio, next - i);
			cond_resched();
		}
	}
	end(region, max(nr, 0L));
}

/**
 * pin_region_begin_memfd() - Prepare to pin memory of a memfd
 * @memfd: the memfd
 * @start: the first offset
 */
void pin_region_begin_memfd(struct file *memfd, loff_t start)
{
	struct inode *inode = file_inode(memfd);
	struct pin_region like = {
		.flags = PIN_REGION_WRITE | PIN_REGION_MEMFD,
		.start = start & PAGE_MASK,
		.site = current->pin_site,
		.dev = inode->i_sb->s_dev,
		.ino = inode->i_ino,
	};

	strscpy(like.name, memfd->f_path.dentry->d_name.name, sizeof(like.name));
	begin(&like);
}

/**
 * pin_region_end_memfd() - Finish what pin_region_begin_memfd() began
 * @from: first offset
 * @to: last offset
 * @folios: the pinned folios, which may cover only the start of the range
 * @nr: their number, or an error
 */
void pin_region_end_memfd(loff_t from, loff_t to, struct folio **folios, long nr)
{
	struct pin_region *region = pin_region_find(current->pin_region);
	unsigned long pages = 0;
	loff_t size;

	if (nr > 0) {
		size = -(loff_t)(from & (folio_size(folios[0]) - 1));
		for (long i = 0; i < nr; i++)
			size += folio_size(folios[i]);
		pages = PAGE_ALIGN(min(from + size, to + 1) - (from & PAGE_MASK)) >> PAGE_SHIFT;
	}
	if (READ_ONCE(region->left)) {
		for (long i = 0; i < nr; i++) {
			assign(region, folios[i], 1);
			cond_resched();
		}
	}
	end(region, pages);
}

/**
 * pin_region_show() - Print the line of a region
 * @m: the file to print to
 * @region: the region; the caller holds rcu_read_lock()
 *
 * Prints the range, access, number of pins, bytes, time and call site; for a memfd
 * also its device, inode and name; and "~" if @region->guessed is set.
 */
void pin_region_show(struct seq_file *m, const struct pin_region *region)
{
	unsigned long pages = READ_ONCE(region->pages);
	char symbol[KSYM_NAME_LEN];

	if (region->flags & PIN_REGION_MEMFD)
		seq_putc(m, '@');
	seq_printf(m, "%lx-%lx %c %ld %ld %llu ", region->start,
		   region->start + pages * PAGE_SIZE,
		   region->flags & PIN_REGION_WRITE ? 'w' : 'r',
		   max(atomic_long_read(&region->held), 0L),
		   max(atomic_long_read(&region->bytes), 0L), region->since);
	if (region->site && !lookup_symbol_name(region->site, symbol))
		seq_puts(m, symbol);
	else
		seq_putc(m, '0');
	if (region->flags & PIN_REGION_MEMFD) {
		seq_printf(m, " %u:%u %llu ", MAJOR(region->dev), MINOR(region->dev),
			   region->ino);
		seq_escape(m, region->name, " \t\n\\");
	}
	if (READ_ONCE(region->guessed))
		seq_puts(m, " ~");
	seq_putc(m, '\n');
}

/**
 * pin_region_see() - Add the pins of a folio to the running check's region counts
 * @pfn: the pfn of the folio
 * @pins: its entry
 * @alone: the folio has no references other than its pins
 */
void pin_region_see(unsigned long pfn, struct pin_ext *pins, bool alone)
{
	raw_spinlock_t *lock = lock_of(pfn);
	struct pin_region *region;
	struct pin_node *node;
	unsigned long flags;
	u64 longs;
	int nr;

	raw_spin_lock_irqsave(lock, flags);
	longs = atomic64_read(&pins->longs);
	nr = nr_of(longs);
	if (longs & PIN_SHARED) {
		hlist_for_each_entry(node, bucket_of(pfn), list) {
			if (node->pfn != pfn)
				continue;
			region = pin_region_find(node->region);
			region->seen += node->nr;
			region->alone += alone ? node->nr : 0;
			nr -= node->nr;
		}
	}
	region = pin_region_find(id_of(longs));
	region->seen += nr;
	region->alone += alone ? nr : 0;
	raw_spin_unlock_irqrestore(lock, flags);
}

/**
 * pin_owner_show() - Print /proc/PID/pins
 * @m: the file to print to
 * @task: the process
 *
 * Return: 0, or -EOPNOTSUPP without pin_owner=on.
 */
int pin_owner_show(struct seq_file *m, struct task_struct *task)
{
	long held = 0, bytes = 0;
	struct pin_region *region;
	const struct pid *tgid;
	unsigned long id;

	if (!pin_owner_on())
		return -EOPNOTSUPP;
	rcu_read_lock();
	tgid = task_tgid(task);
	xa_for_each(&pin_regions, id, region) {
		if (region->tgid != tgid)
			continue;
		held += atomic_long_read(&region->held);
		bytes += atomic_long_read(&region->bytes);
	}
	seq_printf(m, "pins %ld\nbytes %ld\n", held, bytes);
	xa_for_each(&pin_regions, id, region)
		if (region->tgid == tgid)
			pin_region_show(m, region);
	rcu_read_unlock();
	return 0;
}

/**
 * pin_owner_word() - Get the entry of a page in /proc/kpagepins
 * @page: any page; the caller need not hold a reference
 *
 * Return: bits 0 to 31: the number of pins of its folio.  Bit 32: some of them are
 * long-term.  Bit 33: the number is exact; if clear, 1 means "may be pinned".
 * Bit 34: the folio is in several regions.  Bit 35: it is not tracked.  Bits 36
 * to 63: the ID of the region that was added last.
 */
u64 pin_owner_word(const struct page *page)
{
	const struct folio *folio = page_folio(page);
	struct pin_ext *pins = pin_owner_on() ? pin_ext_get(&folio->page) : NULL;
	u64 word;

	if (!pins) {
		if (folio_test_large(folio))
			return (u32)atomic_read(&folio->_pincount) | BIT_ULL(33) | BIT_ULL(35);
		return folio_maybe_dma_pinned((struct folio *)folio) | BIT_ULL(35);
	}
	word = (u32)pin_ext_count(pins) | BIT_ULL(33);
	if (pin_longs(pins)) {
		word |= BIT_ULL(32);
		if (pin_shared(pins))
			word |= BIT_ULL(34);
		word |= (u64)pin_last(pins) << 36;
	}
	pin_ext_put(pins);
	return word;
}
