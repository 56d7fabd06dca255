// SPDX-License-Identifier: GPL-2.0-only
/* dmafile.ko: /dev/dmafile, for ioctl() and for io_uring. */
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/module.h>

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

	/* It sleeps: a worker of the ring does it, with the submitter's files and memory. */
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
		dmafile_stats_show();
	return err;
}
module_init(dmafile_init);

static void __exit dmafile_exit(void)
{
	dmafile_stats_hide();
	misc_deregister(&dmafile_device);
}
module_exit(dmafile_exit);

MODULE_DESCRIPTION("Moves bytes between files and dma-bufs without a copy");
MODULE_LICENSE("GPL");
