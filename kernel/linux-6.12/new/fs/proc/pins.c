// SPDX-License-Identifier: GPL-2.0-only
/* /proc/PID/pins: long-term pins of a process; /proc/kpagepins: the pins of each page */

#include <linux/memory_hotplug.h>
#include <linux/mm.h>
#include <linux/pin_owner.h>
#include <linux/proc_fs.h>
#include <linux/ptrace.h>
#include <linux/seq_file.h>
#include <linux/uaccess.h>

#include "internal.h"

int proc_pid_pins(struct seq_file *m, struct pid_namespace *ns, struct pid *pid,
		  struct task_struct *task)
{
	if (!ptrace_may_access(task, PTRACE_MODE_READ_FSCREDS))
		return -EACCES;
	return pin_owner_show(m, task);
}

/* A u64 for each page, indexed by pfn, see pin_owner_word() */
static ssize_t kpagepins_read(struct file *file, char __user *buf, size_t count, loff_t *ppos)
{
	const unsigned long end = round_up(max_pfn, PAGES_PER_SECTION);
	u64 __user *out = (u64 __user *)buf;
	unsigned long pfn = *ppos / sizeof(u64), last;

	if ((*ppos | count) % sizeof(u64))
		return -EINVAL;
	if (pfn >= end)
		return 0;
	last = min(end, pfn + count / sizeof(u64));
	for (; pfn < last; pfn++, out++) {
		struct page *page = pfn_to_online_page(pfn);

		if (put_user(page ? pin_owner_word(page) : 0, out))
			break;
		cond_resched();
	}
	count = (char __user *)out - buf;
	*ppos += count;
	return count || pfn == last ? count : -EFAULT;
}

static const struct proc_ops kpagepins_ops = {
	.proc_flags	= PROC_ENTRY_PERMANENT,
	.proc_lseek	= mem_lseek,
	.proc_read	= kpagepins_read,
};

static int __init proc_pins_init(void)
{
	proc_create("kpagepins", 0400, NULL, &kpagepins_ops);
	return 0;
}
fs_initcall(proc_pins_init);
