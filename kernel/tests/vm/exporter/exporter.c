// SPDX-License-Identifier: GPL-2.0-only
/*
 * An exporter of dma-bufs that waits or fails on request, to test importers. Its parameters:
 *
 * hold_map, hold_unmap		wait in map_dma_buf() until a signal arrives, or in unmap_dma_buf()
 * attach_error, map_error	fail with this positive errno
 * waiting			how many tasks wait
 * mapped			how many mappings exist
 */
#include <linux/dma-buf.h>
#include <linux/dma-mapping.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/version.h>

#include "exporter.h"

static bool hold_map, hold_unmap;
module_param(hold_map, bool, 0644);
module_param(hold_unmap, bool, 0644);
static int attach_error, map_error;
module_param(attach_error, int, 0644);
module_param(map_error, int, 0644);
static atomic_t waiting, mapped;

static int count_get(char *buffer, const struct kernel_param *kp)
{
	return sysfs_emit(buffer, "%d\n", atomic_read(kp->arg));
}

static const struct kernel_param_ops count_ops = {
	.get = count_get,
};

module_param_cb(waiting, &count_ops, &waiting, 0444);
module_param_cb(mapped, &count_ops, &mapped, 0444);

struct exporter {
	unsigned int count;
	struct page *pages[];
};

/* Waits while a parameter is set. Returns true if a signal ended that. */
static bool hold(const bool *parameter, bool interruptible)
{
	bool signalled = false;

	if (!READ_ONCE(*parameter))
		return false;
	atomic_inc(&waiting);
	while (READ_ONCE(*parameter) && !signalled) {
		if (interruptible)
			schedule_timeout_interruptible(HZ / 50);
		else
			schedule_timeout_uninterruptible(HZ / 50);
		signalled = interruptible && signal_pending(current);
	}
	atomic_dec(&waiting);
	return signalled;
}

static int exporter_attach(struct dma_buf *dmabuf, struct dma_buf_attachment *attach)
{
	return -attach_error;
}

static int exporter_pin(struct dma_buf_attachment *attach)
{
	return 0;
}

static void exporter_unpin(struct dma_buf_attachment *attach)
{
}

static struct sg_table *exporter_map(struct dma_buf_attachment *attach,
				     enum dma_data_direction direction)
{
	struct exporter *one = attach->dmabuf->priv;
	struct sg_table *table;
	int err = -map_error;

	if (hold(&hold_map, true))
		err = -ERESTARTSYS;
	if (err)
		return ERR_PTR(err);
	table = kzalloc(sizeof(*table), GFP_KERNEL);
	if (!table)
		return ERR_PTR(-ENOMEM);
	err = sg_alloc_table_from_pages(table, one->pages, one->count, 0, one->count * PAGE_SIZE,
					GFP_KERNEL);
	if (!err) {
		err = dma_map_sgtable(attach->dev, table, direction, 0);
		if (err)
			sg_free_table(table);
	}
	if (err) {
		kfree(table);
		return ERR_PTR(err);
	}
	atomic_inc(&mapped);
	return table;
}

static void exporter_unmap(struct dma_buf_attachment *attach, struct sg_table *table,
			   enum dma_data_direction direction)
{
	hold(&hold_unmap, false);
	dma_unmap_sgtable(attach->dev, table, direction, 0);
	sg_free_table(table);
	kfree(table);
	atomic_dec(&mapped);
}

static void exporter_release(struct dma_buf *dmabuf)
{
	struct exporter *one = dmabuf->priv;

	while (one->count--)
		__free_page(one->pages[one->count]);
	kfree(one);
}

static const struct dma_buf_ops exporter_ops = {
	.attach = exporter_attach,
	.map_dma_buf = exporter_map,
	.unmap_dma_buf = exporter_unmap,
	.release = exporter_release,
};

static const struct dma_buf_ops exporter_dynamic_ops = {
	.attach = exporter_attach,
	.pin = exporter_pin,
	.unpin = exporter_unpin,
	.map_dma_buf = exporter_map,
	.unmap_dma_buf = exporter_unmap,
	.release = exporter_release,
};

static long exporter_ioctl(struct file *file, unsigned int cmd, unsigned long argument)
{
	DEFINE_DMA_BUF_EXPORT_INFO(info);
	struct exporter_create create;
	struct dma_buf *dmabuf;
	struct exporter *one;
	int fd;

	if (cmd != EXPORTER_CREATE)
		return -ENOTTY;
	if (copy_from_user(&create, (void __user *)argument, sizeof(create)))
		return -EFAULT;
	if (!create.pages || create.pages > 1024)
		return -EINVAL;
	one = kzalloc(struct_size(one, pages, create.pages), GFP_KERNEL);
	if (!one)
		return -ENOMEM;
	info.ops = create.flags & EXPORTER_DYNAMIC ? &exporter_dynamic_ops : &exporter_ops;
	info.size = create.pages * PAGE_SIZE;
	info.flags = O_RDWR | O_CLOEXEC;
	info.priv = one;
	dmabuf = ERR_PTR(-ENOMEM);
	while (one->count < create.pages) {
		one->pages[one->count] = alloc_page(GFP_KERNEL | __GFP_ZERO);
		if (!one->pages[one->count])
			goto free;
		one->count++;
	}
	dmabuf = dma_buf_export(&info);
	if (IS_ERR(dmabuf))
		goto free;
	fd = dma_buf_fd(dmabuf, O_CLOEXEC);
	if (fd < 0)
		dma_buf_put(dmabuf);
	return fd;

free:
	while (one->count--)
		__free_page(one->pages[one->count]);
	kfree(one);
	return PTR_ERR(dmabuf);
}

static const struct file_operations exporter_fops = {
	.owner = THIS_MODULE,
	.unlocked_ioctl = exporter_ioctl,
};

static struct miscdevice exporter = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "exporter",
	.fops = &exporter_fops,
};
module_misc_device(exporter);

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 13, 0)
MODULE_IMPORT_NS(DMA_BUF);
#else
MODULE_IMPORT_NS("DMA_BUF");
#endif
MODULE_DESCRIPTION("An exporter of dma-bufs that waits or fails on request");
MODULE_LICENSE("GPL");
