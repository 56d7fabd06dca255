// SPDX-License-Identifier: GPL-2.0-only
/* debugfs files: totals of all requests, and a list of buffers */
#include <linux/atomic.h>
#include <linux/debugfs.h>
#include <linux/seq_file.h>

#include "buffer.h"
#include "stats.h"

static atomic64_t dmafile_sums[DMAFILE_STATS];
static struct dentry *dmafile_folder;

static const char * const dmafile_stat_names[DMAFILE_STATS] = {
	/* Current values */
	[DMAFILE_STAT_BUFFERS] = "buffers",
	[DMAFILE_STAT_BUFFER_BYTES] = "buffer_bytes",
	/* Totals since the module was loaded */
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
 * dmafile_stats_add - add to a counter
 * @stat: the counter
 * @value: the value to add
 */
void dmafile_stats_add(enum dmafile_stat stat, s64 value)
{
	atomic64_add(value, &dmafile_sums[stat]);
}

static int dmafile_stats_show(struct seq_file *file, void *unused)
{
	unsigned int i;

	for (i = 0; i < DMAFILE_STATS; i++)
		seq_printf(file, "%s %lld\n", dmafile_stat_names[i],
			   atomic64_read(&dmafile_sums[i]));
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(dmafile_stats);

static int dmafile_buffers_show(struct seq_file *file, void *unused)
{
	dmafile_buffer_list(file);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(dmafile_buffers);

/**
 * dmafile_debugfs_add - create /sys/kernel/debug/dmafile
 *
 * Errors are ignored, because debugfs is optional. Only root may see the names of files.
 */
void dmafile_debugfs_add(void)
{
	dmafile_folder = debugfs_create_dir("dmafile", NULL);
	debugfs_create_file("stats", 0444, dmafile_folder, NULL, &dmafile_stats_fops);
	debugfs_create_file("buffers", 0400, dmafile_folder, NULL, &dmafile_buffers_fops);
}

/**
 * dmafile_debugfs_remove - remove /sys/kernel/debug/dmafile
 */
void dmafile_debugfs_remove(void)
{
	debugfs_remove(dmafile_folder);
}
