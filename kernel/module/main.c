// SPDX-License-Identifier: GPL-2.0-only
/* dmafile.ko: /dev/dmafile, for ioctl() and for io_uring. */
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/rcupdate.h>

#include "compat.h"
#include "dmafile.h"
#include "request.h"
#include "stats.h"

static long dmafile_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	return dmafile_request(cmd, (void __user *)arg);
}

static int dmafile_uring_cmd(struct io_uring_cmd *cmd, unsigned int issue_flags)
{
	struct dmafile_uring_cmd payload = dmafile_uring_payload(cmd);

	/* Requests sleep, so punt to a worker, which has the submitter's files and memory. */
	if (issue_flags & IO_URING_F_NONBLOCK) {
		dmafile_uring_keep(cmd, payload);
		return -EAGAIN;
	}
	if (payload.reserved)
		return -EINVAL;
	return dmafile_request(cmd->cmd_op, u64_to_user_ptr(payload.request));
}

static const struct file_operations dmafile_fops = {
	.owner = THIS_MODULE,
	.unlocked_ioctl = dmafile_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.uring_cmd = dmafile_uring_cmd,
	.llseek = noop_llseek,
};

static struct miscdevice dmafile_device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "dmafile",
	.fops = &dmafile_fops,
	.mode = 0660,
};

static int __init dmafile_init(void)
{
	int err = misc_register(&dmafile_device);

	if (!err)
		dmafile_debugfs_add();
	return err;
}
module_init(dmafile_init);

static void __exit dmafile_exit(void)
{
	dmafile_debugfs_remove();
	misc_deregister(&dmafile_device);
	/*
	 * The task that completed the last I/O may have been preempted before it returned from
	 * dmafile_piece_complete(), while the task that waited for this I/O has exited.
	 */
	synchronize_rcu_tasks();
}
module_exit(dmafile_exit);

MODULE_DESCRIPTION("Transfers data between files and dma-bufs without a copy");
MODULE_AUTHOR("The dmafile developers");
MODULE_VERSION("0.1.0");
MODULE_LICENSE("GPL");
