// SPDX-License-Identifier: GPL-2.0-only
/*
 * Reports of the pin tracker: its debugfs files, the consistency check, its part
 * of dump_page(), and a log of memory that could not be moved.
 */

#include <linux/debugfs.h>
#include <linux/delay.h>
#include <linux/kallsyms.h>
#include <linux/memory_hotplug.h>
#include <linux/migrate.h>
#include <linux/mutex.h>
#include <linux/pagemap.h>
#include <linux/pid.h>
#include <linux/pid_namespace.h>
#include <linux/sched/signal.h>
#include <linux/seq_file.h>
#include <linux/timekeeping.h>

#include "internal.h"
#include "pin_owner.h"

#include <trace/events/pin_owner.h>

/* A count is reported as wrong after this many checks, BETWEEN ms apart. */
#define LOOKS 16
#define BETWEEN 10

/* The pins of a process that has exited are released with a delay; in jiffies */
#define LEAKED_AFTER (10 * HZ)

/* The number of log entries for memory that could not be moved */
#define BLOCKED 256

struct blocked {
	u64 when;
	unsigned long pfn;
	const char *why;
	unsigned int order;
	unsigned int times;
	int pins;
	int longs;
	int unexplained;
	u32 region;
	u32 tgid;
	u32 age;
	unsigned long site;
	bool anon;
	bool file;
};

static struct blocked blocked[BLOCKED];
static unsigned int nr_blocked;
static DEFINE_SPINLOCK(blocked_lock);

static void symbol(struct seq_file *m, unsigned long site)
{
	char name[KSYM_NAME_LEN];

	if (site && !lookup_symbol_name(site, name))
		seq_puts(m, name);
	else
		seq_putc(m, '0');
}

/* Finds the next pinned folio, starting at @pfn. Return: its entry, or NULL */
static struct pin_ext *next_pinned(unsigned long *pfn)
{
	for (; *pfn < max_pfn; ++*pfn) {
		struct page *page = pfn_to_online_page(*pfn);
		struct pin_ext *pins;

		if (!page) {
			*pfn |= PAGES_PER_SECTION - 1;
			continue;
		}
		if (!(*pfn % 1024))
			cond_resched();
		pins = pin_ext_get(page);
		if (pins && pin_ext_count(pins))
			return pins;
		pin_ext_put(pins);
	}
	return NULL;
}

/* The result differs from NULL and SEQ_START_TOKEN. */
static void *from_pfn(unsigned long pfn)
{
	return (void *)(pfn + 2);
}

static unsigned long to_pfn(void *v)
{
	return (unsigned long)v - 2;
}

static void *pages_find(struct seq_file *m, loff_t *pos)
{
	unsigned long pfn = *pos ? *pos - 1 : 0;
	struct pin_ext *pins;

	if (!*pos)
		return SEQ_START_TOKEN;
	pins = next_pinned(&pfn);
	*pos = pfn + 1;
	if (!pins)
		return NULL;
	pin_ext_put(pins);
	return from_pfn(pfn);
}

static void *pages_start(struct seq_file *m, loff_t *pos)
{
	return pages_find(m, pos);
}

static void *pages_next(struct seq_file *m, void *v, loff_t *pos)
{
	++*pos;
	return pages_find(m, pos);
}

static void pages_stop(struct seq_file *m, void *v)
{
}

static int pages_show(struct seq_file *m, void *v)
{
	struct pin_ext *pins;
	struct page *page;

	if (v == SEQ_START_TOKEN) {
		seq_puts(m, "pfn order pins long region short-tgid short-ms short-site\n");
		return 0;
	}
	page = pfn_to_online_page(to_pfn(v));
	pins = page ? pin_ext_get(page) : NULL;
	if (!pins)
		return 0;
	seq_printf(m, "%#lx %u %d %d %u%s ", page_to_pfn(page), compound_order(page),
		   pin_ext_count(pins), pin_longs(pins), pin_longs(pins) ? pin_last(pins) : 0,
		   pin_shared(pins) ? "+" : "");
	if (atomic_read(&pins->short_pins)) {
		seq_printf(m, "%u %u ", READ_ONCE(pins->tgid),
			   jiffies_to_msecs(pin_ext_age(pins)));
		symbol(m, pin_ext_site(pins));
		seq_putc(m, '\n');
	} else {
		seq_puts(m, "- - -\n");
	}
	pin_ext_put(pins);
	return 0;
}

static const struct seq_operations pages_sops = {
	.start = pages_start,
	.next = pages_next,
	.stop = pages_stop,
	.show = pages_show,
};
DEFINE_SEQ_ATTRIBUTE(pages);

static void owner(struct seq_file *m, const struct pin_region *region)
{
	pid_t pid = region->tgid ? pid_nr_ns(region->tgid, task_active_pid_ns(current)) : 0;

	if (!region->tgid)
		seq_puts(m, "- ");
	else if (pin_region_gone(region))
		seq_puts(m, "gone ");
	else
		seq_printf(m, "%d ", pid);
	seq_printf(m, "%u ", from_kuid_munged(current_user_ns(), region->uid));
	seq_escape(m, region->comm, " \t\n\\");
	seq_putc(m, ' ');
}

static int regions_show(struct seq_file *m, void *v)
{
	struct pin_region *region;
	unsigned long id;

	rcu_read_lock();
	xa_for_each(&pin_regions, id, region) {
		unsigned long *stack;
		unsigned int nr;

		/* Region 0 always exists and holds one reference to itself. */
		if (!id) {
			long nr = atomic_long_read(&region->held) - 1;

			if (nr > 0)
				seq_printf(m, "0 - 0 unknown %ld pins, for which there was no memory\n",
					   nr);
			continue;
		}
		seq_printf(m, "%lu ", id);
		owner(m, region);
		pin_region_show(m, region);
		if (!region->stack)
			continue;
		nr = stack_depot_fetch(region->stack, &stack);
		for (unsigned int i = 0; i < nr; i++)
			seq_printf(m, "    %pS\n", (void *)stack[i]);
	}
	rcu_read_unlock();
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(regions);

static const char * const stat_names[PIN_STATS] = {
	[PIN_UNTRACKED] = "untracked",
	[PIN_GUESSED] = "guessed",
	[PIN_LOST] = "lost",
	[PIN_NOT_PINNED] = "unpinned-not-pinned",
	[PIN_FREED] = "freed-while-pinned",
	[PIN_PUT] = "put-while-pinned",
	[PIN_LEAKED] = "leaked",
	[PIN_BOOKS] = "books-disagree",
};

static int stats_show(struct seq_file *m, void *v)
{
	long tracked = global_node_page_state(NR_FOLL_PIN_ACQUIRED) -
		       global_node_page_state(NR_FOLL_PIN_RELEASED) -
		       atomic_long_read(&pin_stats[PIN_UNTRACKED]);
	struct pin_region *region;
	unsigned long id, nr = 0;

	xa_for_each_start(&pin_regions, id, region, 1)
		nr++;
	seq_printf(m, "tracked %ld\n", tracked);
	for (int i = 0; i < PIN_STATS; i++)
		seq_printf(m, "%s %ld\n", stat_names[i], atomic_long_read(&pin_stats[i]));
	seq_printf(m, "regions %lu\nnodes %ld\n", nr, atomic_long_read(&pin_nodes));
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(stats);

static int blocked_show(struct seq_file *m, void *v)
{
	unsigned int nr, i;
	struct blocked one;

	spin_lock_irq(&blocked_lock);
	nr = nr_blocked;
	spin_unlock_irq(&blocked_lock);
	for (i = nr > BLOCKED ? nr - BLOCKED : 0; i < nr; i++) {
		spin_lock_irq(&blocked_lock);
		one = blocked[i % BLOCKED];
		spin_unlock_irq(&blocked_lock);
		seq_printf(m, "%llu %s pfn=%#lx order=%u of=%s times=%u pins=%d long=%d region=%u unexplained=%d",
			   one.when, one.why, one.pfn, one.order,
			   one.anon ? "anon" : one.file ? "file" : "other", one.times,
			   one.pins, one.longs, one.region, one.unexplained);
		if (one.tgid) {
			seq_printf(m, " short-tgid=%u short-ms=%u short-site=", one.tgid,
				   one.age);
			symbol(m, one.site);
		}
		seq_putc(m, '\n');
	}
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(blocked);

/* The number of references of mappings and caches; kernel memory has none. */
static int explained(const struct folio *folio)
{
	if (page_has_type(&folio->page) && !folio_test_hugetlb(folio))
		return 0;
	return folio_expected_ref_count(folio);
}

/**
 * pin_owner_blocked() - Log a folio that could not be moved, and what holds it
 * @page: any page of the folio; the caller need not hold a reference
 * @why: the operation that failed; a string with static storage duration
 * @held: number of references that the caller holds
 *
 * Consecutive calls for the same page and reason share one entry.
 */
void pin_owner_blocked(struct page *page, const char *why, int held)
{
	struct folio *folio = page_folio(page);
	struct blocked one = {}, *last;
	struct pin_ext *pins;
	unsigned long flags;

	if (!pin_owner_on() || !folio_try_get(folio))
		return;
	if (unlikely(page_folio(page) != folio))
		goto out;
	one.when = ktime_get_boottime_ns();
	one.pfn = folio_pfn(folio);
	one.why = why;
	one.order = folio_order(folio);
	one.times = 1;
	one.anon = folio_test_anon(folio);
	one.file = !one.anon && folio_mapping(folio);
	pins = pin_ext_get(&folio->page);
	if (pins) {
		one.longs = pin_longs(pins);
		one.pins = one.longs + atomic_read(&pins->short_pins);
		if (one.longs)
			one.region = pin_last(pins);
		if (one.pins > one.longs) {
			one.tgid = READ_ONCE(pins->tgid);
			one.age = jiffies_to_msecs(pin_ext_age(pins));
			one.site = pin_ext_site(pins);
		}
		pin_ext_put(pins);
	}
	/* Subtract mappings and caches, pins, the caller's references, and our own. */
	one.unexplained = folio_ref_count(folio) - explained(folio) - held - 1 -
			  one.pins * (folio_test_large(folio) ? 1 : GUP_PIN_COUNTING_BIAS);
	trace_pin_owner_blocked(one.pfn, why, one.pins, one.region);
	spin_lock_irqsave(&blocked_lock, flags);
	last = &blocked[(nr_blocked - 1) % BLOCKED];
	if (nr_blocked && last->pfn == one.pfn && last->why == why) {
		one.times = last->times + 1;
		*last = one;
	} else {
		blocked[nr_blocked++ % BLOCKED] = one;
	}
	spin_unlock_irqrestore(&blocked_lock, flags);
out:
	folio_put(folio);
}

/**
 * pin_owner_not_migrated() - Log the folios that migrate_pages() could not migrate
 * @folios: isolated folios
 * @reason: MR_*; ignored if the caller of migrate_pages() does not depend on success
 */
void pin_owner_not_migrated(struct list_head *folios, int reason)
{
	struct folio *folio;

	switch (reason) {
	case MR_MEMORY_FAILURE:
	case MR_MEMORY_HOTPLUG:
	case MR_SYSCALL:
	case MR_CONTIG_RANGE:
	case MR_LONGTERM_PIN:
		/* Isolation holds one reference. */
		list_for_each_entry(folio, folios, lru)
			pin_owner_blocked(&folio->page, migrate_reason_names[reason], 1);
	}
}

/**
 * pin_owner_dump() - Print the pins of a page to the kernel log
 * @page: the page; without a reference on it the output may be wrong
 */
void pin_owner_dump(const struct page *page)
{
	const struct page *head = compound_head(page);
	struct pin_region *region;
	struct pin_ext *pins;

	if (!pin_owner_on() || !pfn_valid(page_to_pfn(head)))
		return;
	pins = pin_ext_get(head);
	if (!pins)
		return;
	if (atomic_read(&pins->short_pins))
		pr_alert("pin_owner: %d short pins, the first by %u at %ps, %u ms ago\n",
			 atomic_read(&pins->short_pins), READ_ONCE(pins->tgid),
			 (void *)pin_ext_site(pins), jiffies_to_msecs(pin_ext_age(pins)));
	if (pin_longs(pins)) {
		rcu_read_lock();
		region = pin_region_find(pin_last(pins));
		pr_alert("pin_owner: %d long-term pins, the last by %d (%s%s) at %ps, %llu ms ago%s\n",
			 pin_longs(pins),
			 region->tgid ? pid_nr(region->tgid) : 0, region->comm,
			 pin_region_gone(region) ? ", gone" : "", (void *)region->site,
			 (ktime_get_boottime_ns() - region->since) / NSEC_PER_MSEC,
			 pin_shared(pins) ? ", and others" : "");
		rcu_read_unlock();
	}
	pin_ext_put(pins);
}
EXPORT_SYMBOL_GPL(pin_owner_dump);

enum wrong { RIGHT, PUT, COUNT };

/* Compares the counts of a folio. They differ briefly while a pin is added or removed. */
static enum wrong look(struct page *page, struct pin_ext *pins, bool *alone)
{
	struct folio *folio = page_folio(page);
	int nr = pin_region_count(page_to_pfn(page), pins), refs = folio_ref_count(folio);

	if (!nr)
		return RIGHT;
	if (PageTail(page))
		return COUNT;
	if (folio_test_large(folio)) {
		*alone = refs == nr;
		if (refs < nr)
			return PUT;
		return atomic_read(&folio->_pincount) == nr ? RIGHT : COUNT;
	}
	*alone = refs == nr * GUP_PIN_COUNTING_BIAS;
	if ((unsigned int)refs >= nr * GUP_PIN_COUNTING_BIAS)
		return RIGHT;
	return refs ? PUT : COUNT;
}

/* Repeats look() until the counts agree, or LOOKS times. Sleeps. */
static enum wrong look_again(struct page *page)
{
	enum wrong wrong = COUNT;
	bool alone;

	for (int i = 0; i < LOOKS && wrong != RIGHT; i++) {
		struct pin_ext *pins;

		msleep(BETWEEN);
		pins = pin_ext_get(page);
		wrong = pins ? look(page, pins, &alone) : RIGHT;
		pin_ext_put(pins);
	}
	return wrong;
}

static unsigned int check_pages(struct seq_file *m)
{
	struct pin_ext *pins;
	unsigned int wrong = 0;

	for (unsigned long pfn = 0; (pins = next_pinned(&pfn)); pfn++) {
		struct page *page = pfn_to_page(pfn);
		bool alone = false;
		enum wrong how = look(page, pins, &alone);
		int nr;

		if (pin_longs(pins))
			pin_region_see(pfn, pins, alone);
		pin_ext_put(pins);
		if (how != RIGHT)
			how = look_again(page);
		if (how == RIGHT)
			continue;
		pins = pin_ext_get(page);
		nr = pins ? pin_ext_count(pins) : 0;
		pin_ext_put(pins);
		if (how == PUT)
			pin_owner_bug(PIN_PUT,
				      "pfn %#lx pinned %d time%s but has %d references: a pin was released with put_page()\n",
				      pfn, nr, nr > 1 ? "s" : "", page_ref_count(page));
		else
			pin_owner_bug(PIN_BOOKS, "pfn %#lx: %d pins, but its page disagrees\n",
				      pfn, nr);
		seq_printf(m, "pfn %#lx: %d pins, %d references\n", pfn, nr,
			   page_ref_count(page));
		wrong++;
	}
	return wrong;
}

/* Prepares the regions for a pass over all pages. */
static void begin_regions(void)
{
	struct pin_region *region;
	unsigned long id;

	rcu_read_lock();
	xa_for_each_start(&pin_regions, id, region, 1) {
		region->seen = 0;
		region->alone = 0;
		region->was = atomic_read(&region->adding) ? -1 : atomic_long_read(&region->held);
	}
	rcu_read_unlock();
}

/*
 * Counts the regions whose number of pins differs from what the pass over all
 * pages has found.  Regions that changed during the pass are skipped.
 */
static unsigned int odd_regions(unsigned int *most)
{
	struct pin_region *region;
	unsigned int odd = 0;
	unsigned long id;

	*most = 0;
	rcu_read_lock();
	xa_for_each_start(&pin_regions, id, region, 1) {
		long held = atomic_long_read(&region->held);

		if (region->was != held || region->seen == held || atomic_read(&region->adding)) {
			region->odd = 0;
			continue;
		}
		odd++;
		*most = max(*most, ++region->odd);
	}
	rcu_read_unlock();
	return odd;
}

static bool is_leaked(struct pin_region *region)
{
	long held = atomic_long_read(&region->held);

	if (!held || region->was != held || region->alone != held || !pin_region_gone(region)) {
		region->lone = 0;
		return false;
	}
	if (!region->lone)
		region->lone = jiffies | 1;
	return time_after(jiffies, region->lone + LEAKED_AFTER);
}

static unsigned int say_regions(struct seq_file *m)
{
	struct pin_region *region;
	unsigned int wrong = 0;
	unsigned long id;

	rcu_read_lock();
	xa_for_each_start(&pin_regions, id, region, 1) {
		long held = atomic_long_read(&region->held);

		if (region->odd == LOOKS) {
			region->odd = 0;
			wrong++;
			seq_printf(m, "region %lu: %ld pins, but its pages have %ld\n", id, held,
				   region->seen);
			pin_owner_bug(PIN_BOOKS, "region %lu: %ld pins, but its pages have %ld\n",
				      id, held, region->seen);
		}
		if (is_leaked(region)) {
			wrong++;
			seq_printf(m, "region %lu: leaked: process has exited, pages have no other references\n",
				   id);
			pin_owner_bug(PIN_LEAKED,
				      "region %lu: %ld pins leaked by %d (%s, exited) at %ps: nothing else references their pages\n",
				      id, held, pid_nr(region->tgid), region->comm,
				      (void *)region->site);
		}
	}
	rcu_read_unlock();
	return wrong;
}

static int check_show(struct seq_file *m, void *v)
{
	static DEFINE_MUTEX(lock);
	unsigned int wrong, most, pass = 0;
	int err;

	err = mutex_lock_interruptible(&lock);
	if (err)
		return err;
	do {
		m->count = 0;
		begin_regions();
		wrong = check_pages(m);
		if (!odd_regions(&most) || most == LOOKS)
			break;
		msleep(BETWEEN);
	} while (++pass < 4 * LOOKS && !fatal_signal_pending(current));
	wrong += say_regions(m);
	if (!wrong)
		seq_puts(m, "consistent\n");
	mutex_unlock(&lock);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(check);

static int __init pin_report_init(void)
{
	struct dentry *dir;

	if (!pin_owner_on())
		return 0;
	dir = debugfs_create_dir("pin_owner", NULL);
	debugfs_create_file("regions", 0400, dir, NULL, &regions_fops);
	debugfs_create_file("pages", 0400, dir, NULL, &pages_fops);
	debugfs_create_file("blocked", 0400, dir, NULL, &blocked_fops);
	debugfs_create_file("stats", 0400, dir, NULL, &stats_fops);
	debugfs_create_file("check", 0400, dir, NULL, &check_fops);
	return 0;
}
late_initcall(pin_report_init);
