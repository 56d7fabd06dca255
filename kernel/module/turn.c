// SPDX-License-Identifier: GPL-2.0-only
/*
 * Controls which requests may use a buffer.
 *
 * Readers share a buffer, a filler has exclusive access, and all are served in the order of their
 * arrival, so that none of them starves. This is not a rwsem because a waiter must be able to leave
 * on any signal, must not keep the system from being suspended, and may be suspended itself during
 * its turn.
 */
#include <linux/sched.h>
#include <linux/sched/signal.h>

#include "io.h"
#include "turn.h"

/* Interval at which a waiter checks for signals if a signal cannot wake it. */
#define DMAFILE_LOOK	(HZ / 10)

/**
 * struct dmafile_turn - a request that waits
 * @node: in the queue
 * @task: waits for it
 * @fill: it will fill the buffer
 * @granted: it is its turn, and it is no longer in the queue
 */
struct dmafile_turn {
	struct list_head node;
	struct task_struct *task;
	bool fill;
	bool granted;
};

/**
 * dmafile_turns_init - initialise the turns of a new buffer
 * @turns: of the buffer
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

/* Grants a turn to the first ones of the queue, as many as can use the buffer at the same time. */
static void dmafile_turn_grant(struct dmafile_turns *turns)
{
	struct dmafile_turn *turn, *next;

	lockdep_assert_held(&turns->lock);
	list_for_each_entry_safe(turn, next, &turns->queue, node) {
		if (!dmafile_turn_take(turns, turn->fill))
			break;
		list_del(&turn->node);
		turn->granted = true;
		/* It cannot go away before it has seen @granted under the lock. */
		wake_up_process(turn->task);
	}
}

/* Return: whether the turn has been granted; then, or if @give_up, it is no longer in the queue. */
static bool dmafile_turn_granted(struct dmafile_turns *turns, struct dmafile_turn *turn,
				 bool give_up)
{
	bool granted;

	spin_lock(&turns->lock);
	granted = turn->granted;
	if (!granted && give_up) {
		list_del(&turn->node);
		/* The next ones may have waited only for this one. */
		dmafile_turn_grant(turns);
	}
	spin_unlock(&turns->lock);
	return granted;
}

/**
 * dmafile_turn_begin - wait until it is the caller's turn
 * @turns: of the buffer
 * @fill: the buffer will be filled, not only read
 * @interruptible: any signal ends the wait, not only a fatal one
 *
 * Context: sleeps; the caller holds no lock.
 *
 * Return: 0, and the caller will call dmafile_turn_end(), or -EINTR.
 */
int dmafile_turn_begin(struct dmafile_turns *turns, bool fill, bool interruptible)
{
	struct dmafile_turn turn = { .task = current, .fill = fill };
	bool any = interruptible || current->flags & PF_IO_WORKER, now, ended = false;

	spin_lock(&turns->lock);
	/* Not before those that are already waiting. */
	now = list_empty(&turns->queue) && dmafile_turn_take(turns, fill);
	if (!now)
		list_add_tail(&turn.node, &turns->queue);
	spin_unlock(&turns->lock);
	while (!now && !ended) {
		/* Work for the task's io_uring would wake it repeatedly. */
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
 * dmafile_turn_end - end what dmafile_turn_begin() began
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
