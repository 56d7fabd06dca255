// SPDX-License-Identifier: GPL-2.0-only
/*
 * Regions: long-term pins, each with the process that made them, from where, and
 * when.
 *
 * A folio's entry names the region that was added last.  If it is in several, a
 * table has a node for each of the others; the last one's pins are what is left.
 * What belongs to a folio changes under a lock that is chosen by its pfn.
 */

#include <linux/file.h>
#include <linux/fs.h>
#include <linux/hash.h>
#include <linux/kallsyms.h>
#include <linux/moduleparam.h>
#include <linux/pid.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/stacktrace.h>
#include <linux/timekeeping.h>
#include <linux/workqueue.h>

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

/* Nodes for folios in several regions: 2^20 of 32 bytes */
static unsigned int extra = 1 << 20;
module_param(extra, uint, 0600);
MODULE_PARM_DESC(extra, "most folios that are remembered for more than one region [1048576]");

atomic_long_t pin_nodes;
DEFINE_XARRAY_FLAGS(pin_regions, XA_FLAGS_ALLOC1);
static u32 next_region;
static struct kmem_cache *region_cache __ro_after_init;
static LLIST_HEAD(dead);

/* Of all pins for which there was no memory */
struct pin_region pin_region_unknown = {
	.held = ATOMIC_LONG_INIT(1),
	.comm = "unknown",
};

void __init pin_region_init(void)
{
	region_cache = KMEM_CACHE(pin_region, SLAB_ACCOUNT | SLAB_PANIC);
	buckets = kvcalloc(BUCKETS, sizeof(*buckets), GFP_KERNEL | __GFP_NOFAIL);
	for (int i = 0; i < LOCKS; i++)
		raw_spin_lock_init(&locks[i]);
}

static struct hlist_head *bucket_of(unsigned long pfn)
{
	return &buckets[hash_long(pfn, BUCKETS_SHIFT)];
}

static raw_spinlock_t *lock_of(unsigned long pfn)
{
	return &locks[hash_long(pfn, BUCKETS_SHIFT) % LOCKS];
}

/* Under RCU; a region that holds pins stays. */
struct pin_region *pin_region_find(u32 id)
{
	return id ? xa_load(&pin_regions, id) ?: &pin_region_unknown : &pin_region_unknown;
}

/* Whether the process that made it has ended; memory of its may live on. */
bool pin_region_gone(const struct pin_region *region)
{
	return region->tgid && !pid_task(region->tgid, PIDTYPE_TGID);
}

/* Pins of a folio, but not while assign() has counted them twice */
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
	WRITE_ONCE(pin_region_find(id & ~PIN_EXT_SHARED)->guessed, true);
}

/* Call sites that have ended long-term pins where there were no others */
static unsigned long *site_slot(unsigned long site)
{
	return &long_sites[hash_long(site, ilog2(SITES))];
}

bool pin_region_ends(unsigned long site)
{
	return READ_ONCE(*site_slot(site)) == site;
}

static void free_rcu(struct rcu_head *rcu)
{
	struct pin_region *region = container_of(rcu, struct pin_region, rcu);

	put_pid(region->tgid);
	kmem_cache_free(region_cache, region);
}

static void bury(struct work_struct *work)
{
	struct pin_region *region, *next;

	llist_for_each_entry_safe(region, next, llist_del_all(&dead), dead) {
		xa_erase(&pin_regions, region->id);
		call_rcu(&region->rcu, free_rcu);
	}
}

static DECLARE_WORK(burial, bury);

/* Whether that was the last pin: end_region() comes next then. */
static bool take_off(struct pin_region *region, long nr)
{
	return !atomic_long_sub_return(nr, &region->held) && region != &pin_region_unknown;
}

/* In any context, without locks */
static void end_region(struct pin_region *region)
{
	trace_pin_owner_release(region);
	llist_add(&region->dead, &dead);
	schedule_work(&burial);
}

static void put_region(struct pin_region *region, long nr)
{
	if (take_off(region, nr))
		end_region(region);
}

/* Those of others than the region that was added last: with the lock */
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

/* Any other region of a folio */
static struct pin_node *other(unsigned long pfn)
{
	struct pin_node *node;

	hlist_for_each_entry(node, bucket_of(pfn), list)
		if (node->pfn == pfn)
			return node;
	return NULL;
}

/*
 * Makes @nr short pins of a folio long ones of a region.  The sum never dips: they
 * are added first.
 */
static void assign(struct pin_region *region, struct folio *folio, int nr)
{
	unsigned long flags, pfn = folio_pfn(folio);
	raw_spinlock_t *lock = lock_of(pfn);
	struct pin_node *spare = NULL, *node;
	struct pin_region *to = region;
	struct page_ext *page_ext;
	struct pin_ext *pins;
	bool tried = false, first = true;
	int had, got;
	u32 last;

again:
	page_ext = page_ext_get(&folio->page);
	if (!page_ext)
		goto out;
	pins = pin_ext(page_ext);
	raw_spin_lock_irqsave(lock, flags);
	had = atomic_read(&pins->long_pins);
	last = pins->region & ~PIN_EXT_SHARED;
	node = had && last != region->id ? find_node(pfn, region->id) : NULL;
	if (had && last != region->id && !node && !tried) {
		raw_spin_unlock_irqrestore(lock, flags);
		page_ext_put(page_ext);
		tried = true;
		if (atomic_long_read(&pin_nodes) < extra)
			spare = kmalloc(sizeof(*spare), GFP_KERNEL_ACCOUNT | __GFP_NOWARN);
		goto again;
	}
	if (!had)
		WRITE_ONCE(pins->region, region->id);
	atomic_add(nr, &pins->long_pins);
	got = pin_ext_take(&pins->short_pins, nr);
	if (unlikely(got < nr)) {
		/* Others have been ended in their place, and are left for them. */
		atomic_sub(nr - got, &pins->long_pins);
		if (!got)
			goto unlock;
	}
	if (had && last == region->id) {
		first = false;
	} else if (node) {
		node->nr += got;
		first = false;
	} else if (had && spare) {
		spare->pfn = pfn;
		spare->region = last;
		spare->nr = had - others(pfn);
		hlist_add_head(&spare->list, bucket_of(pfn));
		atomic_long_inc(&pin_nodes);
		spare = NULL;
		WRITE_ONCE(pins->region, region->id | PIN_EXT_SHARED);
	} else if (had) {
		/* The other one stands for it. */
		to = pin_region_find(last);
		first = false;
		atomic_long_add(got, &pin_stats[PIN_LOST]);
		WRITE_ONCE(to->guessed, true);
		WRITE_ONCE(region->guessed, true);
	}
	atomic_long_add(got, &to->held);
	if (first)
		atomic_long_add(folio_size(folio), &to->bytes);
unlock:
	raw_spin_unlock_irqrestore(lock, flags);
	page_ext_put(page_ext);
out:
	kfree(spare);
}

/* Whose pin ends: the caller's own before others', then where it was so before */
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

/* Ends pins of one of a folio's regions; returns how many. */
static int put_some(struct folio *folio, struct pin_ext *pins, int nr, unsigned long site)
{
	unsigned long flags, pfn = folio_pfn(folio);
	raw_spinlock_t *lock = lock_of(pfn);
	struct pin_node *node = NULL, *gone = NULL;
	struct pin_region *region;
	bool shared, ends;
	int had;
	u32 last;

	raw_spin_lock_irqsave(lock, flags);
	had = atomic_read(&pins->long_pins);
	if (!had) {
		/*
		 * The caller's pin was a long one when there was no short one,
		 * and another's has been ended in its place.  With the lock
		 * none goes to and fro.
		 */
		nr = pin_ext_take(&pins->short_pins, nr);
		raw_spin_unlock_irqrestore(lock, flags);
		return nr;
	}
	shared = pins->region & PIN_EXT_SHARED;
	last = pins->region & ~PIN_EXT_SHARED;
	if (shared) {
		node = choose(pfn, last, site);
		had = node ? node->nr : had - others(pfn);
	}
	region = pin_region_find(node ? node->region : last);
	nr = min(nr, had);
	if (nr <= 0) {
		raw_spin_unlock_irqrestore(lock, flags);
		return 0;
	}
	/* If that was guessed, this may be the end of a short one. */
	if (!atomic_read(&pins->short_pins) && !shared && !READ_ONCE(region->guessed))
		WRITE_ONCE(*site_slot(site), site);
	atomic_sub(nr, &pins->long_pins);
	if (node)
		node->nr -= nr;
	if (nr == had) {
		atomic_long_sub(folio_size(folio), &region->bytes);
		/* The place of the last one is taken by another. */
		gone = node ?: other(pfn);
		if (gone) {
			hlist_del(&gone->list);
			last = node ? last : gone->region;
			WRITE_ONCE(pins->region, last | (other(pfn) ? PIN_EXT_SHARED : 0));
		}
	}
	if (shared) {
		WRITE_ONCE(region->guessed, true);
		atomic_long_inc(&pin_stats[PIN_GUESSED]);
	}
	WRITE_ONCE(region->unpinner, site);
	/* What is seen with the lock adds up. */
	ends = take_off(region, nr);
	raw_spin_unlock_irqrestore(lock, flags);
	if (gone) {
		atomic_long_dec(&pin_nodes);
		kfree(gone);
	}
	if (ends)
		end_region(region);
	return nr;
}

/**
 * pin_region_put() - End long-term pins of a folio
 * @folio: what is unpinned
 * @pins: its entry, under RCU
 * @nr: how many
 * @site: who unpins
 *
 * Return: how many there were, at most @nr.
 */
int pin_region_put(struct folio *folio, struct pin_ext *pins, int nr, unsigned long site)
{
	int done = 0, part;

	do {
		part = put_some(folio, pins, nr - done, site);
		done += part;
	} while (part && done < nr);
	return done;
}

static struct pin_region *make(const struct pin_region *like)
{
	struct pin_region *region;
	unsigned long stack[16];

	region = kmem_cache_alloc(region_cache, GFP_KERNEL | __GFP_NOWARN);
	if (!region)
		return &pin_region_unknown;
	*region = *like;
	region->since = ktime_get_boottime_ns();
	region->tgid = get_pid(task_tgid(current));
	region->uid = current_uid();
	get_task_comm(region->comm, current);
	if (pin_owner_stacks)
		region->stack = stack_depot_save(stack, stack_trace_save(stack, 16, 2),
						 GFP_KERNEL | __GFP_NOWARN);
	if (xa_alloc_cyclic(&pin_regions, &region->id, region,
			    XA_LIMIT(1, PIN_REGION_MAX), &next_region,
			    GFP_KERNEL | __GFP_NOWARN) < 0) {
		put_pid(region->tgid);
		kmem_cache_free(region_cache, region);
		return &pin_region_unknown;
	}
	current->pin_region = region->id;
	return region;
}

/*
 * The region of this task's call before, if this one goes on where that ended.
 * The caller owns one of its pins.
 */
static struct pin_region *go_on(const struct pin_region *like)
{
	struct pin_region *region;

	rcu_read_lock();
	region = pin_region_find(current->pin_region);
	if (region != &pin_region_unknown && atomic_long_inc_not_zero(&region->held)) {
		if (region->tgid == task_tgid(current) && region->mm == like->mm &&
		    region->flags == like->flags && region->site == like->site &&
		    region->dev == like->dev && region->ino == like->ino &&
		    region->start + region->pages * PAGE_SIZE == like->start) {
			rcu_read_unlock();
			WRITE_ONCE(region->pages, region->pages + like->pages);
			return region;
		}
		put_region(region, 1);
	}
	rcu_read_unlock();
	return NULL;
}

/* Gets a region to which the caller may assign pins */
static struct pin_region *begin(struct pin_region *like)
{
	struct pin_region *region = go_on(like);

	if (region) {
		atomic_inc(&region->adding);
		return region;
	}
	atomic_long_set(&like->held, 1);
	atomic_set(&like->adding, 1);
	region = make(like);
	if (region == &pin_region_unknown) {
		atomic_inc(&region->adding);
		atomic_long_inc(&region->held);
	}
	return region;
}

static void end(struct pin_region *region)
{
	trace_pin_owner_region(region);
	atomic_dec(&region->adding);
	put_region(region, 1);
}

/**
 * pin_region_add() - Note long-term pins of a process's memory
 * @mm: whose
 * @start: from this address on
 * @pages: what has been pinned
 * @nr: how many
 * @gup_flags: FOLL_WRITE, or not
 */
void pin_region_add(struct mm_struct *mm, unsigned long start, struct page **pages,
		    long nr, unsigned int gup_flags)
{
	struct pin_region like = {
		.flags = gup_flags & FOLL_WRITE ? PIN_REGION_WRITE : 0,
		.start = start & PAGE_MASK,
		.pages = nr,
		.site = current->pin_site,
		.mm = mm,
	};
	struct pin_region *region = begin(&like);
	long i, next;

	for (i = 0; i < nr; i = next) {
		struct folio *folio = page_folio(pages[i]);

		for (next = i + 1; next < nr && page_folio(pages[next]) == folio; next++)
			;
		if (!is_zero_folio(folio))
			assign(region, folio, next - i);
		cond_resched();
	}
	end(region);
}

/**
 * pin_region_add_memfd() - Note the pins of memfd_pin_folios()
 * @memfd: whose
 * @from: first offset
 * @to: last offset
 * @folios: what has been pinned, which may be less
 * @nr: how many
 */
void pin_region_add_memfd(struct file *memfd, loff_t from, loff_t to, struct folio **folios,
			  long nr)
{
	struct inode *inode = file_inode(memfd);
	struct pin_region like = {
		.flags = PIN_REGION_WRITE | PIN_REGION_MEMFD,
		.start = from & PAGE_MASK,
		.site = current->pin_site,
		.dev = inode->i_sb->s_dev,
		.ino = inode->i_ino,
	};
	loff_t size = -(loff_t)(from & (folio_size(folios[0]) - 1));
	struct pin_region *region;

	for (long i = 0; i < nr; i++)
		size += folio_size(folios[i]);
	like.pages = PAGE_ALIGN(min(from + size, to + 1) - like.start) >> PAGE_SHIFT;
	strscpy(like.name, memfd->f_path.dentry->d_name.name, sizeof(like.name));
	region = begin(&like);
	for (long i = 0; i < nr; i++) {
		assign(region, folios[i], 1);
		cond_resched();
	}
	end(region);
}

/**
 * pin_region_show() - Write a region's line
 * @m: where to
 * @region: under RCU
 *
 * Range, access, pins, bytes, since when, who; of a memfd its device, inode and
 * name; and "~" if a pin that ended may have been another's.
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

/*
 * Adds a folio's pins to @seen of each of its regions, and to @alone if nothing
 * else holds it.  Under RCU.
 */
void pin_region_see(unsigned long pfn, struct pin_ext *pins, bool alone)
{
	raw_spinlock_t *lock = lock_of(pfn);
	struct pin_region *region;
	struct pin_node *node;
	unsigned long flags;

	raw_spin_lock_irqsave(lock, flags);
	region = pin_region_find(pins->region & ~PIN_EXT_SHARED);
	region->seen += atomic_read(&pins->long_pins);
	region->alone += alone ? atomic_read(&pins->long_pins) : 0;
	hlist_for_each_entry(node, bucket_of(pfn), list) {
		if (node->pfn != pfn)
			continue;
		region->seen -= node->nr;
		pin_region_find(node->region)->seen += node->nr;
		if (alone) {
			region->alone -= node->nr;
			pin_region_find(node->region)->alone += node->nr;
		}
	}
	raw_spin_unlock_irqrestore(lock, flags);
}

/**
 * pin_owner_show() - What /proc/PID/pins says
 * @m: where to
 * @task: whose long-term pins
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
 * pin_owner_word() - What /proc/kpagepins says of a page
 * @page: any, which nobody need hold
 *
 * Return: pins of its folio in bits 0 to 31; whether there are long-term ones
 * (32), the number is exact (33; else it is 1 for a maybe), there are several
 * regions (34), nothing is tracked (35); and the region that was added last in
 * bits 36 to 63.
 */
u64 pin_owner_word(const struct page *page)
{
	const struct folio *folio = page_folio(page);
	struct page_ext *page_ext = pin_owner_on() ? page_ext_get(&folio->page) : NULL;
	struct pin_ext *pins;
	u64 word;

	if (!page_ext) {
		if (folio_test_large(folio))
			return (u32)atomic_read(&folio->_pincount) | BIT_ULL(33) | BIT_ULL(35);
		return folio_maybe_dma_pinned((struct folio *)folio) | BIT_ULL(35);
	}
	pins = pin_ext(page_ext);
	word = (u32)pin_ext_count(pins) | BIT_ULL(33);
	if (atomic_read(&pins->long_pins)) {
		word |= BIT_ULL(32);
		if (READ_ONCE(pins->region) & PIN_EXT_SHARED)
			word |= BIT_ULL(34);
		word |= (u64)(READ_ONCE(pins->region) & ~PIN_EXT_SHARED) << 36;
	}
	page_ext_put(page_ext);
	return word;
}
