/* SPDX-License-Identifier: GPL-2.0-only */
/* Controls which requests may use a buffer. */
#ifndef _DMAFILE_TURN_H
#define _DMAFILE_TURN_H

#include <linux/list.h>
#include <linux/spinlock.h>
#include <linux/types.h>

/**
 * struct dmafile_turns - the requests on one buffer
 * @lock: protects the other members
 * @queue: list of struct dmafile_turn, the waiting requests in order of arrival
 * @readers: the number of requests that are reading the buffer
 * @filler: a request is filling it
 */
struct dmafile_turns {
	spinlock_t lock; /* protects the other members */
	struct list_head queue;
	unsigned int readers;
	bool filler;
};

void dmafile_turns_init(struct dmafile_turns *turns);
int dmafile_turn_begin(struct dmafile_turns *turns, bool fill, bool interruptible);
void dmafile_turn_end(struct dmafile_turns *turns, bool fill);

#endif /* _DMAFILE_TURN_H */
