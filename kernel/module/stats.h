/* SPDX-License-Identifier: GPL-2.0-only */
/* debugfs files: totals of all requests, and a list of buffers */
#ifndef _DMAFILE_STATS_H
#define _DMAFILE_STATS_H

#include <linux/types.h>

enum dmafile_stat {
	DMAFILE_STAT_BUFFERS,
	DMAFILE_STAT_BUFFER_BYTES,
	DMAFILE_STAT_ALLOC,
	DMAFILE_STAT_ALLOC_READ,
	DMAFILE_STAT_READ,
	DMAFILE_STAT_WRITE,
	DMAFILE_STAT_FAILED,
	DMAFILE_STAT_BYTES_READ,
	DMAFILE_STAT_BYTES_WRITTEN,
	DMAFILE_STAT_ALLOC_NS,
	DMAFILE_STAT_SUBMIT_NS,
	DMAFILE_STAT_WAIT_NS,
	DMAFILE_STAT_COPY_NS,
	DMAFILE_STATS,
};

void dmafile_stats_add(enum dmafile_stat stat, s64 value);
void dmafile_debugfs_add(void);
void dmafile_debugfs_remove(void);

#endif /* _DMAFILE_STATS_H */
