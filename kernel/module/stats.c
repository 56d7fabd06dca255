// SPDX-License-Identifier: GPL-2.0-only
/* Sums over all requests, in debugfs. */
#include <linux/atomic.h>
#include <linux/debugfs.h>
#include <linux/seq_file.h>

#include "stats.h"

static atomic64_t sums[DMAFILE_STATS];
static struct dentry *folder;

static const char * const names[DMAFILE_STATS] = {
	/* There now. */
	[DMAFILE_STAT_BUFFERS] = "buffers",
	[DMAFILE_STAT_BUFFER_BYTES] = "buffer_bytes",
	/* Since the module was loaded. */
	[DMAFILE_STAT_ALLOC] = "alloc",
	[DMAFILE_STAT_ALLOC_READ] = "alloc_read",
	[DMAFILE_STAT_READ] = "read",
	[DMAFILE_STAT_WRITE] = "write",
	[DMAFILE_STAT_FAILED] = "failed",
	[DMAFILE_STAT_BYTES_READ] = "bytes_read",
	[DMAFILE_STAT_BYTES_WRITTEN] = "bytes_written",
	[DMAFILE_STAT_ALLOC_NS] = "alloc_ns",
	[DMAFILE_STAT_SUBMIT_NS] = "submit_ns",
	[DMAFILE_STAT_WAIT_NS] = "wait_ns",
	[DMAFILE_STAT_COPY_NS] = "copy_ns",
};

/**
 * dmafile_stats_add - count
 * @stat: what
 * @value: how much
 */
void dmafile_stats_add(enum dmafile_stat stat, s64 value)
{
	atomic64_add(value, &sums[stat]);
}

static int stats_show(struct seq_file *file, void *unused)
{
	unsigned int i;

	for (i = 0; i < DMAFILE_STATS; i++)
		seq_printf(file, "%s %lld\n", names[i], atomic64_read(&sums[i]));
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(stats);

/**
 * dmafile_stats_show - make /sys/kernel/debug/dmafile/stats
 *
 * Nobody depends on it, so that it may fail.
 */
void dmafile_stats_show(void)
{
	folder = debugfs_create_dir("dmafile", NULL);
	debugfs_create_file("stats", 0444, folder, NULL, &stats_fops);
}

/**
 * dmafile_stats_hide - remove it
 */
void dmafile_stats_hide(void)
{
	debugfs_remove(folder);
}
