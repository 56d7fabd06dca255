// SPDX-License-Identifier: GPL-2.0-only
/* Signals that end a request. */
#include <linux/compiler.h>
#include <linux/sched.h>
#include <linux/sched/jobctl.h>
#include <linux/sched/signal.h>
#include <linux/signal.h>

#include "signal.h"

/* Without the lock, like fatal_signal_pending(): the next check finds a signal that comes now. */
static bool dmafile_signal_queued(void)
{
	sigset_t own, shared;

	sigandnsets(&own, &current->pending.signal, &current->blocked);
	sigandnsets(&shared, &current->signal->shared_pending.signal, &current->blocked);
	return !sigisemptyset(&own) || !sigisemptyset(&shared) ||
	       current->jobctl & (JOBCTL_PENDING_MASK | JOBCTL_TRAP_FREEZE);
}

/**
 * dmafile_interrupted - check whether the calling task should give up
 * @interruptible: give up on any signal, not only on a fatal one
 *
 * signal_pending() cannot be used: in a task that uses io_uring it is also true if there is task
 * work. In an io_uring worker, TIF_NOTIFY_SIGNAL is set on cancellation and when the ring is
 * closed. Closing a ring waits for its workers, so they must always give up then.
 *
 * TIF_SIGPENDING does not suffice either: the freezer sets it, and it stays set after the task has
 * been thawed, until the task returns to user space. That does not count as a signal.
 *
 * Return: true if it should.
 */
bool dmafile_interrupted(bool interruptible)
{
	bool worker = current->flags & PF_IO_WORKER;

	if (fatal_signal_pending(current))
		return true;
	if (!interruptible && !worker)
		return false;
	if (worker && test_thread_flag(TIF_NOTIFY_SIGNAL))
		return true;
	/* The sets may change while they are read. */
	return task_sigpending(current) && data_race(dmafile_signal_queued());
}
