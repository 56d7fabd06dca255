// SPDX-License-Identifier: GPL-2.0-only
/*
 * Our dma-bufs: pages of our own, mapped for devices in the pieces in which they were allocated, as
 * far as a device takes pieces of that size.
 * Nobody else's scatterlist is ever looked at.
 */
#include <linux/dma-mapping.h>
#include <linux/dma-resv.h>
#include <linux/highmem.h>
#include <linux/iosys-map.h>
#include <linux/mm.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>
#include <linux/wait.h>

#include "buffer.h"
#include "compat.h"
#include "io.h"
#include "stats.h"

/**
 * struct dmafile_buffer - what a dma-buf of ours has behind it
 * @pages: the memory, all of it from the beginning to the end
 * @io: held for writing by what fills it from a file, for reading by what goes to one
 * @over: woken when @io is given back
 * @lock: protects @attachments and @vaddr
 * @attachments: struct dmafile_attachment
 * @vaddr: the kernel's mapping, while somebody wants it
 * @origin: for fdinfo, which shows it as the exporter's name
 */
struct dmafile_buffer {
	struct dmafile_pages pages;
	struct rw_semaphore io;
	wait_queue_head_t over;
	struct mutex lock; /* attachments, vaddr */
	struct list_head attachments;
	void *vaddr;
	const char *origin;
};

/**
 * struct dmafile_attachment - a device that may reach a buffer
 * @dev: the device
 * @table: the memory as this device sees it
 * @node: in the buffer's list
 * @direction: of the DMA for which addresses are in @table; DMA_NONE while there are none
 */
struct dmafile_attachment {
	struct device *dev;
	struct sg_table table;
	struct list_head node;
	enum dma_data_direction direction;
};

/* Pages in the longest segment that a device takes, through a bounce buffer where it needs one. */
static unsigned long longest_segment(struct device *dev)
{
	size_t most = min_t(size_t, dma_get_max_seg_size(dev), dma_max_mapping_size(dev));

	return max(most >> PAGE_SHIFT, 1UL);
}

/* The memory in segments: the chunks in which it was allocated, and parts of those too long. */
static int fill_table(struct sg_table *table, const struct dmafile_pages *pages,
		      unsigned long longest)
{
	struct scatterlist *sg;
	unsigned int chunk, nr = 0;

	for (chunk = 0; chunk < pages->nr; chunk++)
		nr += DIV_ROUND_UP(dmafile_chunk_pages(pages, chunk), longest);
	if (sg_alloc_table(table, nr, DMAFILE_GFP))
		return -ENOMEM;
	sg = table->sgl;
	for (chunk = 0; chunk < pages->nr; chunk++) {
		unsigned long count = dmafile_chunk_pages(pages, chunk), at;

		for (at = 0; at < count; at += longest, sg = sg_next(sg))
			sg_set_page(sg, pages->chunks[chunk].page + at,
				    min(count - at, longest) << PAGE_SHIFT, 0);
	}
	return 0;
}

static int dmafile_attach(struct dma_buf *dmabuf, struct dma_buf_attachment *attach)
{
	struct dmafile_buffer *buffer = dmabuf->priv;
	struct dmafile_attachment *attachment;
	int err;

	attachment = kzalloc(sizeof(*attachment), DMAFILE_GFP);
	if (!attachment)
		return -ENOMEM;
	err = fill_table(&attachment->table, &buffer->pages, longest_segment(attach->dev));
	if (err) {
		kfree(attachment);
		return err;
	}
	attachment->dev = attach->dev;
	attachment->direction = DMA_NONE;
	attach->priv = attachment;

	mutex_lock(&buffer->lock);
	list_add(&attachment->node, &buffer->attachments);
	mutex_unlock(&buffer->lock);
	return 0;
}

static void dmafile_detach(struct dma_buf *dmabuf, struct dma_buf_attachment *attach)
{
	struct dmafile_buffer *buffer = dmabuf->priv;
	struct dmafile_attachment *attachment = attach->priv;

	mutex_lock(&buffer->lock);
	list_del(&attachment->node);
	mutex_unlock(&buffer->lock);
	sg_free_table(&attachment->table);
	kfree(attachment);
}

/*
 * Caches are seen to apart from mapping: a buffer may be mapped for several devices at a time,
 * which CONFIG_DMA_API_DEBUG takes for a mistake of whoever leaves it to the mapping.
 */
#define MAP_ATTRS	DMA_ATTR_SKIP_CPU_SYNC

static struct sg_table *dmafile_map(struct dma_buf_attachment *attach,
				    enum dma_data_direction direction)
{
	struct dmafile_buffer *buffer = attach->dmabuf->priv;
	struct dmafile_attachment *attachment = attach->priv;
	int err;

	/* Not while someone walks the list to synchronise what is mapped. */
	mutex_lock(&buffer->lock);
	err = dma_map_sgtable(attachment->dev, &attachment->table, direction, MAP_ATTRS);
	if (!err) {
		dma_sync_sgtable_for_device(attachment->dev, &attachment->table, direction);
		attachment->direction = direction;
	}
	mutex_unlock(&buffer->lock);
	return err ? ERR_PTR(err) : &attachment->table;
}

static void dmafile_unmap(struct dma_buf_attachment *attach, struct sg_table *table,
			  enum dma_data_direction direction)
{
	struct dmafile_buffer *buffer = attach->dmabuf->priv;
	struct dmafile_attachment *attachment = attach->priv;

	mutex_lock(&buffer->lock);
	attachment->direction = DMA_NONE;
	dma_sync_sgtable_for_cpu(attachment->dev, table, direction);
	dma_unmap_sgtable(attachment->dev, table, direction, MAP_ATTRS);
	mutex_unlock(&buffer->lock);
}

static int dmafile_begin_cpu_access(struct dma_buf *dmabuf, enum dma_data_direction direction)
{
	struct dmafile_buffer *buffer = dmabuf->priv;
	struct dmafile_attachment *attachment;

	mutex_lock(&buffer->lock);
	if (buffer->vaddr)
		invalidate_kernel_vmap_range(buffer->vaddr, dmabuf->size);
	list_for_each_entry(attachment, &buffer->attachments, node)
		/* A device that only reads has nothing for us but what it was given. */
		if (attachment->direction != DMA_NONE && attachment->direction != DMA_TO_DEVICE)
			dma_sync_sgtable_for_cpu(attachment->dev, &attachment->table,
						 attachment->direction);
	mutex_unlock(&buffer->lock);
	return 0;
}

static int dmafile_end_cpu_access(struct dma_buf *dmabuf, enum dma_data_direction direction)
{
	struct dmafile_buffer *buffer = dmabuf->priv;
	struct dmafile_attachment *attachment;

	mutex_lock(&buffer->lock);
	if (buffer->vaddr)
		flush_kernel_vmap_range(buffer->vaddr, dmabuf->size);
	list_for_each_entry(attachment, &buffer->attachments, node)
		if (attachment->direction != DMA_NONE)
			dma_sync_sgtable_for_device(attachment->dev, &attachment->table,
						    attachment->direction);
	mutex_unlock(&buffer->lock);
	return 0;
}

/* The core has checked the range. */
static int dmafile_mmap(struct dma_buf *dmabuf, struct vm_area_struct *vma)
{
	struct dmafile_buffer *buffer = dmabuf->priv;
	unsigned long at = vma->vm_pgoff, addr = vma->vm_start;
	unsigned int chunk = dmafile_pages_chunk(&buffer->pages, (u64)at << PAGE_SHIFT);

	/* A private one would copy pages, and not be the buffer. */
	if (!(vma->vm_flags & (VM_SHARED | VM_MAYSHARE)))
		return -EINVAL;
	for (; addr < vma->vm_end; chunk++) {
		unsigned long skip = at - buffer->pages.chunks[chunk].first;
		unsigned long pages = min(dmafile_chunk_pages(&buffer->pages, chunk) - skip,
					  (vma->vm_end - addr) >> PAGE_SHIFT);
		int err = remap_pfn_range(vma, addr,
					  page_to_pfn(buffer->pages.chunks[chunk].page) + skip,
					  pages << PAGE_SHIFT, vma->vm_page_prot);

		if (err)
			return err;
		at += pages;
		addr += pages << PAGE_SHIFT;
	}
	return 0;
}

static void *map_all(const struct dmafile_pages *pages)
{
	struct page **all = kvmalloc_array(pages->count, sizeof(*all), DMAFILE_GFP);
	unsigned long i, n = 0;
	unsigned int chunk;
	void *vaddr;

	if (!all)
		return NULL;
	for (chunk = 0; chunk < pages->nr; chunk++)
		for (i = 0; i < dmafile_chunk_pages(pages, chunk); i++)
			all[n++] = pages->chunks[chunk].page + i;
	vaddr = vmap(all, n, VM_MAP, PAGE_KERNEL);
	kvfree(all);
	return vaddr;
}

/* The core asks once, however many there are who want it. */
static int dmafile_vmap(struct dma_buf *dmabuf, struct iosys_map *map)
{
	struct dmafile_buffer *buffer = dmabuf->priv;
	void *vaddr = map_all(&buffer->pages);

	if (!vaddr)
		return -ENOMEM;
	mutex_lock(&buffer->lock);
	buffer->vaddr = vaddr;
	mutex_unlock(&buffer->lock);
	iosys_map_set_vaddr(map, vaddr);
	return 0;
}

static void dmafile_vunmap(struct dma_buf *dmabuf, struct iosys_map *map)
{
	struct dmafile_buffer *buffer = dmabuf->priv;

	mutex_lock(&buffer->lock);
	vunmap(buffer->vaddr);
	buffer->vaddr = NULL;
	mutex_unlock(&buffer->lock);
	iosys_map_clear(map);
}

static void buffer_free(struct dmafile_buffer *buffer)
{
	dmafile_pages_free(&buffer->pages);
	mutex_destroy(&buffer->lock);
	kfree(buffer->origin);
	kfree(buffer);
}

static void dmafile_release(struct dma_buf *dmabuf)
{
	dmafile_stats_add(DMAFILE_STAT_BUFFERS, -1);
	dmafile_stats_add(DMAFILE_STAT_BUFFER_BYTES, -(s64)dmabuf->size);
	buffer_free(dmabuf->priv);
}

static const struct dma_buf_ops dmafile_buffer_ops = {
	.attach = dmafile_attach,
	.detach = dmafile_detach,
	.map_dma_buf = dmafile_map,
	.unmap_dma_buf = dmafile_unmap,
	.begin_cpu_access = dmafile_begin_cpu_access,
	.end_cpu_access = dmafile_end_cpu_access,
	.mmap = dmafile_mmap,
	.vmap = dmafile_vmap,
	.vunmap = dmafile_vunmap,
	.release = dmafile_release,
};

/**
 * dmafile_buffer_export - make a dma-buf of memory
 * @pages: the memory, which becomes the dma-buf's, or stays as it is after an error
 * @fd_flags: O_RDONLY or O_RDWR, what its descriptor will be open for
 * @origin: where its bytes are from, on one line; freed with it by kfree(), and after an error
 *
 * Return: the dma-buf, not yet in anyone's table of files, or an error.
 */
struct dma_buf *dmafile_buffer_export(struct dmafile_pages *pages, unsigned int fd_flags,
				      const char *origin)
{
	DEFINE_DMA_BUF_EXPORT_INFO(info);
	struct dmafile_buffer *buffer;
	struct dma_buf *dmabuf;

	buffer = kzalloc(sizeof(*buffer), DMAFILE_GFP);
	if (!buffer) {
		kfree(origin);
		return ERR_PTR(-ENOMEM);
	}
	init_rwsem(&buffer->io);
	init_waitqueue_head(&buffer->over);
	mutex_init(&buffer->lock);
	INIT_LIST_HEAD(&buffer->attachments);
	buffer->origin = origin;

	info.exp_name = origin;
	info.ops = &dmafile_buffer_ops;
	info.size = dmafile_pages_bytes(pages);
	info.flags = fd_flags & O_ACCMODE;
	info.priv = buffer;
	dmabuf = dma_buf_export(&info);
	if (IS_ERR(dmabuf)) {
		buffer_free(buffer);
		return dmabuf;
	}
	buffer->pages = *pages;
	*pages = (struct dmafile_pages) { };
	dmafile_stats_add(DMAFILE_STAT_BUFFERS, 1);
	dmafile_stats_add(DMAFILE_STAT_BUFFER_BYTES, dmabuf->size);
	return dmabuf;
}

/* How long one waits before it looks whether it still should: see dmafile_interrupted(). */
#define LOOK	(HZ / 10)

/* Waits for requests that may not run beside this one. */
static int lock(struct dmafile_buffer *buffer, bool fill, bool interruptible)
{
	long left;

	if (!interruptible)
		return fill ? down_write_killable(&buffer->io) : down_read_killable(&buffer->io);
	/*
	 * There is no down_write_interruptible(). Whoever is killed while queued for the semaphore
	 * wakes nobody here, and may have kept others from it until then: so it is tried again.
	 */
	do {
		left = wait_event_killable_timeout(buffer->over,
						   fill ? down_write_trylock(&buffer->io) :
							  down_read_trylock(&buffer->io), LOOK);
		if (left > 0)
			return 0;
	} while (!left && !dmafile_interrupted(true));
	return -EINTR;
}

static void unlock(struct dmafile_buffer *buffer, bool fill)
{
	if (fill)
		up_write(&buffer->io);
	else
		up_read(&buffer->io);
	wake_up_all(&buffer->over);
}

/* Waits for devices. A fence knows signals of every sort, or none. */
static int wait_for_fences(struct dma_buf *dmabuf, bool fill, bool interruptible)
{
	long left;

	do {
		if (dmafile_interrupted(interruptible))
			return -EINTR;
		left = dma_resv_wait_timeout(dmabuf->resv, dma_resv_usage_rw(fill), false, LOOK);
	} while (!left);
	return min(left, 0L);
}

/**
 * dmafile_buffer_is - whether a dma-buf is one of ours
 * @dmabuf: any dma-buf
 *
 * Return: whether it is.
 */
bool dmafile_buffer_is(const struct dma_buf *dmabuf)
{
	return dmabuf->ops == &dmafile_buffer_ops;
}

/**
 * dmafile_buffer_begin - have a buffer to oneself for I/O
 * @dmabuf: one of ours
 * @fill: it will be written to, not only read
 * @interruptible: any signal ends the waiting, not only one that kills
 *
 * Waits for devices that use it (its fences), and for requests that may not run beside this one.
 * That is what keeps two requests from each other; a device that starts later on is its driver's
 * affair, as with any dma-buf.
 *
 * Return: its memory, or -EINTR at a signal.
 */
struct dmafile_pages *dmafile_buffer_begin(struct dma_buf *dmabuf, bool fill, bool interruptible)
{
	struct dmafile_buffer *buffer = dmabuf->priv;

	if (lock(buffer, fill, interruptible))
		return ERR_PTR(-EINTR);
	if (wait_for_fences(dmabuf, fill, interruptible)) {
		unlock(buffer, fill);
		return ERR_PTR(-EINTR);
	}
	dmafile_begin_cpu_access(dmabuf, fill ? DMA_BIDIRECTIONAL : DMA_FROM_DEVICE);
	return &buffer->pages;
}

/**
 * dmafile_buffer_end - what dmafile_buffer_begin() began
 * @dmabuf: as there
 * @fill: as there
 */
void dmafile_buffer_end(struct dma_buf *dmabuf, bool fill)
{
	dmafile_end_cpu_access(dmabuf, fill ? DMA_BIDIRECTIONAL : DMA_FROM_DEVICE);
	unlock(dmabuf->priv, fill);
}

DMAFILE_IMPORT_NS(DMA_BUF);
