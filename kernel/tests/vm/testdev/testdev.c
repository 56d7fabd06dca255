// SPDX-License-Identifier: GPL-2.0-only
/*
 * A driver without hardware, to test exporters of dma-bufs. It maps them for DMA and then accesses
 * the memory at the DMA addresses, as hardware would. With bounce buffers (swiotlb=force) this
 * memory is not that of the buffer: data is copied only where the exporter synchronises it.
 */
#include <linux/dma-buf.h>
#include <linux/dma-direct.h>
#include <linux/dma-fence.h>
#include <linux/dma-mapping.h>
#include <linux/dma-resv.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/platform_device.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/version.h>

#include "testdev.h"

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 2, 0)
/* Before Linux 6.2 these functions did not need the reservation lock. */
#define dma_buf_map_attachment_unlocked		dma_buf_map_attachment
#define dma_buf_unmap_attachment_unlocked	dma_buf_unmap_attachment
#define dma_buf_vmap_unlocked			dma_buf_vmap
#define dma_buf_vunmap_unlocked			dma_buf_vunmap
#endif

struct testdev {
	struct platform_device *device;
	struct dma_buf_attachment *attach;
	struct sg_table *table;
	enum dma_data_direction direction;
	struct dma_fence *fence;
};

static long import(struct testdev *dev, struct testdev_import __user *address)
{
	struct testdev_import request;
	struct dma_buf *dmabuf;
	struct scatterlist *sg;
	u64 before = 0;
	unsigned int i;

	if (copy_from_user(&request, address, sizeof(request)))
		return -EFAULT;
	if (dev->attach || request.direction > DMA_FROM_DEVICE)
		return -EINVAL;
	dma_set_max_seg_size(&dev->device->dev, request.max_segment);
	dmabuf = dma_buf_get(request.fd);
	if (IS_ERR(dmabuf))
		return PTR_ERR(dmabuf);
	dev->direction = request.direction;
	dev->attach = dma_buf_attach(dmabuf, &dev->device->dev);
	if (IS_ERR(dev->attach)) {
		long err = PTR_ERR(dev->attach);

		dev->attach = NULL;
		dma_buf_put(dmabuf);
		return err;
	}
	dev->table = dma_buf_map_attachment_unlocked(dev->attach, dev->direction);
	if (IS_ERR(dev->table)) {
		long err = PTR_ERR(dev->table);

		dma_buf_detach(dmabuf, dev->attach);
		dev->attach = NULL;
		dma_buf_put(dmabuf);
		return err;
	}
	request.segments = dev->table->nents;
	request.longest = 0;
	for_each_sgtable_dma_sg(dev->table, sg, i) {
		request.longest = max(request.longest, sg_dma_len(sg));
		if (request.offset >= before && request.offset - before < sg_dma_len(sg))
			request.address = sg_dma_address(sg) + request.offset - before;
		before += sg_dma_len(sg);
	}
	return copy_to_user(address, &request, sizeof(request)) ? -EFAULT : 0;
}

static long dma(struct testdev *dev, const struct testdev_copy *copy)
{
	void __user *address = u64_to_user_ptr(copy->address);
	struct scatterlist *sg;
	u64 done = 0;
	unsigned int i;

	if (!dev->attach)
		return -EINVAL;
	for_each_sgtable_dma_sg(dev->table, sg, i) {
		void *memory = phys_to_virt(dma_to_phys(&dev->device->dev, sg_dma_address(sg)));
		u64 len = min_t(u64, sg_dma_len(sg), copy->length - done);

		if (copy->to_buffer ? copy_from_user(memory, address + done, len) :
				      copy_to_user(address + done, memory, len))
			return -EFAULT;
		done += len;
	}
	return done == copy->length ? 0 : -ENODATA;
}

static long by_cpu(const struct testdev_copy *copy)
{
	void __user *address = u64_to_user_ptr(copy->address);
	struct dma_buf *dmabuf = dma_buf_get(copy->fd);
	struct iosys_map map;
	long err;

	if (IS_ERR(dmabuf))
		return PTR_ERR(dmabuf);
	err = copy->length > dmabuf->size ? -EINVAL : dma_buf_vmap_unlocked(dmabuf, &map);
	if (err)
		goto put;
	if (copy->to_buffer ? copy_from_user(map.vaddr, address, copy->length) :
			      copy_to_user(address, map.vaddr, copy->length))
		err = -EFAULT;
	dma_buf_vunmap_unlocked(dmabuf, &map);
put:
	dma_buf_put(dmabuf);
	return err;
}

static const char *fence_name(struct dma_fence *fence)
{
	return "testdev";
}

static long fence_wait(struct dma_fence *fence, bool interruptible, long timeout)
{
	return -EIO;
}

static const struct dma_fence_ops fence_ops = {
	.get_driver_name = fence_name,
	.get_timeline_name = fence_name,
	.wait = fence_wait,
};

static DEFINE_SPINLOCK(fence_lock);

static long add_fence(struct testdev *dev)
{
	struct dma_resv *resv;
	int err;

	if (!dev->attach || dev->fence)
		return -EINVAL;
	dev->fence = kzalloc(sizeof(*dev->fence), GFP_KERNEL);
	if (!dev->fence)
		return -ENOMEM;
	dma_fence_init(dev->fence, &fence_ops, &fence_lock, dma_fence_context_alloc(1), 1);
	resv = dev->attach->dmabuf->resv;
	dma_resv_lock(resv, NULL);
	err = dma_resv_reserve_fences(resv, 1);
	if (!err)
		dma_resv_add_fence(resv, dev->fence, DMA_RESV_USAGE_WRITE);
	dma_resv_unlock(resv);
	return err;
}

static long testdev_ioctl(struct file *file, unsigned int cmd, unsigned long argument)
{
	struct testdev_copy copy;

	if (cmd == TESTDEV_IMPORT)
		return import(file->private_data, (void __user *)argument);
	if (cmd == TESTDEV_FENCE)
		return add_fence(file->private_data);
	if (copy_from_user(&copy, (void __user *)argument, sizeof(copy)))
		return -EFAULT;
	switch (cmd) {
	case TESTDEV_DMA:
		return dma(file->private_data, &copy);
	case TESTDEV_VMAP:
		return by_cpu(&copy);
	default:
		return -ENOTTY;
	}
}

static int testdev_open(struct inode *inode, struct file *file)
{
	struct testdev *dev = kzalloc(sizeof(*dev), GFP_KERNEL);

	if (!dev)
		return -ENOMEM;
	dev->device = platform_device_register_simple("testdev", PLATFORM_DEVID_AUTO, NULL, 0);
	if (IS_ERR(dev->device)) {
		int err = PTR_ERR(dev->device);

		kfree(dev);
		return err;
	}
	dma_coerce_mask_and_coherent(&dev->device->dev, DMA_BIT_MASK(64));
	file->private_data = dev;
	return 0;
}

static int testdev_release(struct inode *inode, struct file *file)
{
	struct testdev *dev = file->private_data;

	if (dev->fence) {
		dma_fence_signal(dev->fence);
		dma_fence_put(dev->fence);
	}
	if (dev->attach) {
		struct dma_buf *dmabuf = dev->attach->dmabuf;

		dma_buf_unmap_attachment_unlocked(dev->attach, dev->table, dev->direction);
		dma_buf_detach(dmabuf, dev->attach);
		dma_buf_put(dmabuf);
	}
	platform_device_unregister(dev->device);
	kfree(dev);
	return 0;
}

static const struct file_operations testdev_fops = {
	.owner = THIS_MODULE,
	.open = testdev_open,
	.release = testdev_release,
	.unlocked_ioctl = testdev_ioctl,
};

static struct miscdevice testdev = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "testdev",
	.fops = &testdev_fops,
};
module_misc_device(testdev);

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 13, 0)
MODULE_IMPORT_NS(DMA_BUF);
#else
MODULE_IMPORT_NS("DMA_BUF");
#endif
MODULE_DESCRIPTION("Test device that imports dma-bufs, without hardware");
MODULE_LICENSE("GPL");
