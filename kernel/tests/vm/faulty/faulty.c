// SPDX-License-Identifier: GPL-2.0-only
/* Makes errors that the kernel base-debug must detect, one each time it is loaded. */
#include <linux/kthread.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/slab.h>
#include <linux/spinlock.h>

static char *fault = "";
module_param(fault, charp, 0);
MODULE_PARM_DESC(fault, "Kind of error: locks, sleep, freed, leak or race");

static DEFINE_MUTEX(one);
static DEFINE_MUTEX(other);
static DEFINE_SPINLOCK(spin);

/* Takes two locks in both orders, without an actual deadlock. */
static void locks(void)
{
	mutex_lock(&one);
	mutex_lock(&other);
	mutex_unlock(&other);
	mutex_unlock(&one);

	mutex_lock(&other);
	mutex_lock(&one);
	mutex_unlock(&one);
	mutex_unlock(&other);
}

static void sleep(void)
{
	spin_lock(&spin);
	/* Reported because it may sleep, even if it does not. */
	mutex_lock(&one);
	mutex_unlock(&one);
	spin_unlock(&spin);
}

static void freed(void)
{
	char *memory = kzalloc(64, GFP_KERNEL);

	if (!memory)
		return;
	kfree(memory);
	/* Hidden from the compiler, to avoid a warning. */
	OPTIMIZER_HIDE_VAR(memory);
	READ_ONCE(memory[8]);
}

/* So many that stale pointers in registers or on stacks cannot refer to all of them. */
static void leak(void)
{
	int i;

	for (i = 0; i < 16; i++) {
		char *memory = kzalloc(3000, GFP_KERNEL);

		OPTIMIZER_HIDE_VAR(memory);
	}
}

static int shared;

static int count_up(void *unused)
{
	while (!kthread_should_stop()) {
		shared++;
		cond_resched();
	}
	return 0;
}

/* Two threads, for one second */
static int race(void)
{
	struct task_struct *thread = kthread_run(count_up, NULL, "faulty");
	unsigned long end = jiffies + HZ;

	if (IS_ERR(thread))
		return PTR_ERR(thread);
	while (time_before(jiffies, end)) {
		shared++;
		cond_resched();
	}
	return kthread_stop(thread);
}

static int __init faulty_init(void)
{
	if (!strcmp(fault, "locks"))
		locks();
	else if (!strcmp(fault, "sleep"))
		sleep();
	else if (!strcmp(fault, "freed"))
		freed();
	else if (!strcmp(fault, "leak"))
		leak();
	else if (!strcmp(fault, "race"))
		return race();
	else
		return -EINVAL;
	return 0;
}
module_init(faulty_init);

static void __exit faulty_exit(void)
{
}
module_exit(faulty_exit);

MODULE_DESCRIPTION("Errors that a debug kernel must detect");
MODULE_LICENSE("GPL");
