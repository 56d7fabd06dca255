// SPDX-License-Identifier: GPL-2.0-only
/*
 * A driver that pins memory with each of the kernel's functions, unpins it in each context, and
 * makes errors in both on request. Remaining pins are released when the descriptor is closed.
 */
#include <linux/file.h>
#include <linux/irq_work.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/pin_owner.h>
#include <linux/sched/mm.h>
#include <linux/sched/task.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>

#include "pinner.h"

/* The pages of one call; NULL for pages that have been unpinned. */
struct held {
	struct list_head abandoned;
	enum pinner_how how;
	u32 nr;
	u32 left;
	struct page **pages;
};

struct pinner {
	/* Protects all members below, and the handles. */
	struct mutex lock;
	struct xarray handles;
	struct page *page;
};

/* Pages to be unpinned in another context */
struct job {
	struct irq_work irq;
	struct work_struct work;
	struct page **pages;
	u32 count;
	enum pinner_how how;
	enum pinner_by by;
};

static LIST_HEAD(abandoned);
static DEFINE_MUTEX(abandoned_lock);

static bool neighbours(struct page **pages, u32 count)
{
	u32 i;

	for (i = 1; i < count; i++)
		if (page_to_pfn(pages[i]) != page_to_pfn(pages[0]) + i)
			return false;
	return true;
}

static noinline void unpin_here(struct page **pages, u32 count)
{
	unpin_user_pages(pages, count);
	barrier();
}

static noinline void unpin_there(struct page **pages, u32 count)
{
	unpin_user_pages(pages, count);
	barrier();
}

static void unpin(struct page **pages, u32 count, enum pinner_how how, enum pinner_by by)
{
	u32 i;

	if (how == PINNER_GOT) {
		for (i = 0; i < count; i++)
			put_page(pages[i]);
	} else if (how == PINNER_MEMFD) {
		for (i = 0; i < count; i++)
			unpin_folio(page_folio(pages[i]));
	} else if (by == PINNER_EACH) {
		for (i = 0; i < count; i++)
			unpin_user_page(pages[i]);
	} else if (by == PINNER_HERE) {
		unpin_here(pages, count);
	} else if (by == PINNER_THERE) {
		unpin_there(pages, count);
	} else if (by == PINNER_DIRTY) {
		unpin_user_pages_dirty_lock(pages, count, true);
	} else if (by == PINNER_RANGE && neighbours(pages, count)) {
		unpin_user_page_range_dirty_lock(pages[0], count, false);
	} else {
		unpin_user_pages(pages, count);
	}
}

static void from_irq(struct irq_work *irq)
{
	struct job *job = container_of(irq, struct job, irq);

	WARN_ON_ONCE(!in_hardirq());
	unpin(job->pages, job->count, job->how, job->by);
}

static void from_worker(struct work_struct *work)
{
	struct job *job = container_of(work, struct job, work);

	unpin(job->pages, job->count, job->how, job->by);
}

static long unpin_at(const struct pinner_unpin *what, struct page **pages, enum pinner_how how)
{
	struct job job = {
		.pages = pages,
		.count = what->count,
		.how = how,
		.by = what->by,
	};

	if (what->where == PINNER_TASK) {
		unpin(pages, what->count, how, what->by);
		return 0;
	}
	if (what->where == PINNER_IRQ) {
		/* It locks folios, so it may sleep. */
		if (what->by == PINNER_DIRTY)
			return -EINVAL;
		job.irq = IRQ_WORK_INIT_HARD(from_irq);
		irq_work_queue(&job.irq);
		irq_work_sync(&job.irq);
	} else {
		INIT_WORK_ONSTACK(&job.work, from_worker);
		schedule_work(&job.work);
		flush_work(&job.work);
		destroy_work_on_stack(&job.work);
	}
	return 0;
}

static void forget(struct held *held)
{
	kvfree(held->pages);
	kfree(held);
}

static void release(struct held *held)
{
	u32 i;

	for (i = 0; i < held->nr; i++)
		if (held->pages[i])
			unpin(&held->pages[i], 1, held->how, PINNER_PAGES);
	forget(held);
}

/* Not inlined and no tail calls, because the tracker must report these call sites. */
static noinline long pin_remote(const struct pinner_pin *what, unsigned int flags,
				struct page **pages)
{
	struct pid *pid = find_get_pid(what->id);
	struct task_struct *task = get_pid_task(pid, PIDTYPE_PID);
	struct mm_struct *mm = task ? get_task_mm(task) : NULL;
	int locked = 1;
	long nr;

	put_pid(pid);
	if (task)
		put_task_struct(task);
	if (!mm)
		return -ESRCH;
	mmap_read_lock(mm);
	nr = pin_user_pages_remote(mm, what->address, what->pages, flags, pages, &locked);
	if (locked)
		mmap_read_unlock(mm);
	mmput(mm);
	return nr;
}

static noinline long pin_memfd(const struct pinner_pin *what, struct page **pages)
{
	struct file *file = fget(what->id);
	pgoff_t offset;
	long nr, i;

	if (!file)
		return -EBADF;
	nr = memfd_pin_folios(file, what->address,
			      what->address + (u64)what->pages * PAGE_SIZE - 1,
			      (struct folio **)pages, what->pages, &offset);
	for (i = 0; i < nr; i++)
		pages[i] = folio_page((struct folio *)pages[i], 0);
	fput(file);
	return nr;
}

static noinline long pin_once(const struct pinner_pin *what, struct page **pages)
{
	unsigned int flags = 0;
	long nr = -EINVAL;

	if (what->flags & PINNER_WRITE)
		flags |= FOLL_WRITE;
	if (what->flags & PINNER_LONGTERM)
		flags |= FOLL_LONGTERM;
	switch (what->how) {
	case PINNER_FAST:
		nr = pin_user_pages_fast(what->address, what->pages, flags, pages);
		break;
	case PINNER_PLAIN:
		mmap_read_lock(current->mm);
		nr = pin_user_pages(what->address, what->pages, flags, pages);
		mmap_read_unlock(current->mm);
		break;
	case PINNER_REMOTE:
		nr = pin_remote(what, flags, pages);
		break;
	case PINNER_UNLOCKED:
		nr = pin_user_pages_unlocked(what->address, what->pages, pages, flags);
		break;
	case PINNER_MEMFD:
		nr = pin_memfd(what, pages);
		break;
	case PINNER_GOT:
		nr = get_user_pages_fast(what->address, what->pages, flags & FOLL_WRITE, pages);
		break;
	}
	barrier();
	return nr;
}

static long pin(struct pinner *pinner, struct pinner_pin *what, void __user *address)
{
	struct held *held;
	long err = 0;
	u32 turn;

	if (!what->pages || !what->times || what->pages > INT_MAX / 16 / what->times)
		return -EINVAL;
	held = kzalloc(sizeof(*held), GFP_KERNEL);
	if (!held)
		return -ENOMEM;
	held->how = what->how;
	held->pages = kvcalloc((size_t)what->pages * what->times, sizeof(*held->pages), GFP_KERNEL);
	if (!held->pages)
		err = -ENOMEM;
	for (turn = 0; turn < what->times && !err; turn++) {
		long nr = pin_once(what, held->pages + held->nr);

		if (nr > 0)
			held->nr += nr;
		else
			err = nr ?: -EFAULT;
		cond_resched();
	}
	held->left = held->nr;
	what->pinned = held->nr;
	if (!err)
		err = xa_alloc(&pinner->handles, &what->handle, held, xa_limit_31b, GFP_KERNEL);
	if (err) {
		release(held);
		return err;
	}
	return copy_to_user(address, what, sizeof(*what)) ? -EFAULT : 0;
}

static long unpin_some(struct pinner *pinner, const struct pinner_unpin *what, struct held *held)
{
	long err;
	u32 i;

	for (i = 0; i < what->count; i++)
		if (!held->pages[what->first + i])
			return -EINVAL;
	err = unpin_at(what, held->pages + what->first, held->how);
	if (err)
		return err;
	memset(held->pages + what->first, 0, what->count * sizeof(*held->pages));
	held->left -= what->count;
	if (!held->left) {
		xa_erase(&pinner->handles, what->handle);
		forget(held);
	}
	return 0;
}

static long again(const struct pinner_unpin *what, struct held *held)
{
	if (what->by == PINNER_RANGE) {
		unpin_user_page_range_dirty_lock(held->pages[what->first], what->count, false);
		return 0;
	}
	return unpin_at(what, held->pages + what->first, PINNER_FAST);
}

static long free_page_of(struct pinner *pinner, const struct pinner_unpin *what, struct held *held)
{
	if (!pinner->page || held->nr != 1 || held->pages[0] != pinner->page ||
	    page_ref_count(pinner->page) != 1025)
		return -EINVAL;
	folio_put_refs(page_folio(pinner->page), 1025);
	pinner->page = NULL;
	xa_erase(&pinner->handles, what->handle);
	forget(held);
	return 0;
}

static long wrong(struct pinner *pinner, unsigned int cmd, const struct pinner_unpin *what,
		  struct held *held)
{
	struct page *page = held->pages[what->first];
	u32 i;

	switch (cmd) {
	case PINNER_AGAIN:
		return again(what, held);
	case PINNER_PUT:
		for (i = 0; i < what->count; i++)
			put_page(page);
		return 0;
	case PINNER_GET:
		for (i = 0; i < what->count; i++)
			get_page(page);
		return 0;
	case PINNER_FORGET:
		xa_erase(&pinner->handles, what->handle);
		forget(held);
		return 0;
	case PINNER_ABANDON:
		xa_erase(&pinner->handles, what->handle);
		mutex_lock(&abandoned_lock);
		list_add(&held->abandoned, &abandoned);
		mutex_unlock(&abandoned_lock);
		return 0;
	case PINNER_FREE:
		return free_page_of(pinner, what, held);
	default:
		return -ENOTTY;
	}
}

static void forgive(void)
{
	struct held *held, *next;

	mutex_lock(&abandoned_lock);
	list_for_each_entry_safe(held, next, &abandoned, abandoned)
		release(held);
	INIT_LIST_HEAD(&abandoned);
	mutex_unlock(&abandoned_lock);
}

static long pfns(struct pinner *pinner, const struct pinner_pages *what)
{
	struct held *held = xa_load(&pinner->handles, what->handle);
	u64 __user *to = u64_to_user_ptr(what->pfns);
	u32 i;

	if (!held || what->first > held->nr || what->count > held->nr - what->first)
		return -EINVAL;
	for (i = 0; i < what->count; i++) {
		struct page *page = held->pages[what->first + i];

		if (put_user(page ? (u64)page_to_pfn(page) : 0, to + i))
			return -EFAULT;
	}
	return 0;
}

static long ask(void __user *address)
{
	struct pinner_ask what;
	struct folio *folio;
	struct page *page;
	int nr;

	if (copy_from_user(&what, address, sizeof(what)))
		return -EFAULT;
	nr = get_user_pages_fast(what.address, 1, 0, &page);
	if (nr != 1)
		return nr ?: -EFAULT;
	folio = page_folio(page);
	what.refs = folio_ref_count(folio) - 1;
	what.maybe = folio_maybe_dma_pinned(folio);
	put_page(page);
	return copy_to_user(address, &what, sizeof(what)) ? -EFAULT : 0;
}

static long locked_ioctl(struct pinner *pinner, unsigned int cmd, void __user *address)
{
	union {
		struct pinner_pin pin;
		struct pinner_unpin unpin;
		struct pinner_pages pages;
	} what;
	struct held *held;

	if (_IOC_SIZE(cmd) > sizeof(what) || copy_from_user(&what, address, _IOC_SIZE(cmd)))
		return -EFAULT;
	if (cmd == PINNER_PIN)
		return pin(pinner, &what.pin, address);
	if (cmd == PINNER_PFNS)
		return pfns(pinner, &what.pages);
	held = xa_load(&pinner->handles, what.unpin.handle);
	if (!held || what.unpin.first >= held->nr || !what.unpin.count)
		return -EINVAL;
	if (cmd != PINNER_UNPIN)
		return wrong(pinner, cmd, &what.unpin, held);
	if (what.unpin.count > held->nr - what.unpin.first)
		return -EINVAL;
	return unpin_some(pinner, &what.unpin, held);
}

static long pinner_ioctl(struct file *file, unsigned int cmd, unsigned long argument)
{
	struct pinner *pinner = file->private_data;
	long result;

	if (cmd == PINNER_ASK)
		return ask((void __user *)argument);
	if (cmd == PINNER_FORGIVE) {
		forgive();
		return 0;
	}
	mutex_lock(&pinner->lock);
	result = locked_ioctl(pinner, cmd, (void __user *)argument);
	mutex_unlock(&pinner->lock);
	return result;
}

/* A page of the driver, which can be pinned like any other */
static int pinner_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct pinner *pinner = file->private_data;

	/* It was freed by mistake. */
	if (!pinner->page)
		return -ENXIO;
	return vm_insert_page(vma, vma->vm_start, pinner->page);
}

static int pinner_open(struct inode *inode, struct file *file)
{
	struct pinner *pinner = kzalloc(sizeof(*pinner), GFP_KERNEL);

	if (!pinner)
		return -ENOMEM;
	/* Not in mmap(), which holds mmap_lock: ioctl() takes it inside of our lock. */
	pinner->page = alloc_page(GFP_KERNEL | __GFP_ZERO);
	if (!pinner->page) {
		kfree(pinner);
		return -ENOMEM;
	}
	mutex_init(&pinner->lock);
	xa_init_flags(&pinner->handles, XA_FLAGS_ALLOC);
	file->private_data = pinner;
	return 0;
}

static int pinner_release(struct inode *inode, struct file *file)
{
	struct pinner *pinner = file->private_data;
	unsigned long handle;
	struct held *held;

	xa_for_each(&pinner->handles, handle, held)
		release(held);
	xa_destroy(&pinner->handles);
	if (pinner->page)
		put_page(pinner->page);
	kfree(pinner);
	return 0;
}

static const struct file_operations pinner_fops = {
	.owner = THIS_MODULE,
	.open = pinner_open,
	.release = pinner_release,
	.mmap = pinner_mmap,
	.unlocked_ioctl = pinner_ioctl,
};

static struct miscdevice pinner = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "pinner",
	.mode = 0666,
	.fops = &pinner_fops,
};

static int __init pinner_init(void)
{
	return misc_register(&pinner);
}
module_init(pinner_init);

static void __exit pinner_exit(void)
{
	misc_deregister(&pinner);
	forgive();
}
module_exit(pinner_exit);

MODULE_DESCRIPTION("Pins memory on request, correctly or with errors");
MODULE_LICENSE("GPL");
