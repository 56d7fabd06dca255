// SPDX-License-Identifier: GPL-2.0-only
/*
 * Controls which requests may use a buffer.
 *
 * Requests that read a buffer share it, a request that fills it has exclusive access. They are
 * served in order of arrival, so none of them starves. A rwsem cannot be used: a waiter must stop
 * waiting on any signal and must not block suspend, and a task may be frozen during its turn.
 */
#include <linux/sched.h>
#include <linux/sched/signal.h>

#include "signal.h"
#include "turn.h"

/* Interval of checks for signals by a waiter that a signal cannot wake */
#define DMAFILE_LOOK	(HZ / 10)

/**
 * struct dmafile_turn - a waiting request
 * @node: entry in the queue
 * @task: the waiting task
 * @fill: the request fills the buffer
 * @granted: the request may run, and is no longer in the queue
 */
struct dmafile_turn {
	struct list_head node;
	struct task_struct *task;
	bool fill;
	bool granted;
};

/**
 * dmafile_turns_init - initialise the queue of a new buffer
 * @turns: the queue
 */
void dmafile_turns_init(struct dmafile_turns *turns)
{
	spin_lock_init(&turns->lock);
	INIT_LIST_HEAD(&turns->queue);
}

static bool dmafile_turn_take(struct dmafile_turns *turns, bool fill)
{
	lockdep_assert_held(&turns->lock);
	if (turns->filler || (fill && turns->readers))
		return false;
	if (fill)
		turns->filler = true;
	else
		turns->readers++;
	return true;
}

/* Grants turns from the head of the queue to all requests that can use the buffer together. */
static void dmafile_turn_grant(struct dmafile_turns *turns)
{
	struct dmafile_turn *turn, *next;

	lockdep_assert_held(&turns->lock);
	list_for_each_entry_safe(turn, next, &turns->queue, node) {
		if (!dmafile_turn_take(turns, turn->fill))
			break;
		list_del(&turn->node);
		turn->granted = true;
		/* The task stays until it has read @granted under the lock. */
		wake_up_process(turn->task);
	}
}

/* Return: true if the turn has been granted. Otherwise, with @give_up, removes it. */
static bool dmafile_turn_granted(struct dmafile_turns *turns, struct dmafile_turn *turn,
				 bool give_up)
{
	bool granted;

	spin_lock(&turns->lock);
	granted = turn->granted;
	if (!granted && give_up) {
		list_del(&turn->node);
		/* The next requests may have been waiting only for this one. */
		dmafile_turn_grant(turns);
	}
	spin_unlock(&turns->lock);
	return granted;
}

/**
 * dmafile_turn_begin - wait until it is the caller's turn
 * @turns: the queue of the buffer
 * @fill: the buffer will be filled, not only read
 * @interruptible: any signal ends the wait, not only a fatal one
 *
 * Context: May sleep. The caller holds no locks.
 *
 * Return: 0, and the caller must call dmafile_turn_end(), or -EINTR.
 */
int dmafile_turn_begin(struct dmafile_turns *turns, bool fill, bool interruptible)
{
	struct dmafile_turn turn = { .task = current, .fill = fill };
	bool any = interruptible || current->flags & PF_IO_WORKER, now, ended = false;

	spin_lock(&turns->lock);
	/* Do not overtake requests that are already waiting. */
	now = list_empty(&turns->queue) && dmafile_turn_take(turns, fill);
	if (!now)
		list_add_tail(&turn.node, &turns->queue);
	spin_unlock(&turns->lock);
	while (!now && !ended) {
		/* With TASK_INTERRUPTIBLE, pending io_uring task work would wake it repeatedly. */
		bool deaf = signal_pending(current);

		set_current_state((any && !deaf ? TASK_INTERRUPTIBLE : TASK_KILLABLE) |
				  TASK_FREEZABLE);
		now = dmafile_turn_granted(turns, &turn, false);
		if (!now && !dmafile_interrupted(interruptible))
			schedule_timeout(any && deaf ? DMAFILE_LOOK : MAX_SCHEDULE_TIMEOUT);
		__set_current_state(TASK_RUNNING);
		ended = dmafile_interrupted(interruptible);
		if (!now)
			now = dmafile_turn_granted(turns, &turn, ended);
	}
	return now ? 0 : -EINTR;
}

/**
 * dmafile_turn_end - end a turn that was begun with dmafile_turn_begin()
 * @turns: as for dmafile_turn_begin()
 * @fill: as for dmafile_turn_begin()
 */
void dmafile_turn_end(struct dmafile_turns *turns, bool fill)
{
	spin_lock(&turns->lock);
	if (fill)
		turns->filler = false;
	else
		turns->readers--;
	dmafile_turn_grant(turns);
	spin_unlock(&turns->lock);
}
