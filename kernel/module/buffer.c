// SPDX-License-Identifier: GPL-2.0-only
/*
 * The dma-bufs of this module. Each allocated chunk is mapped for devices as one segment, or as
 * several if a device does not accept segments of that size. Scatterlists of other exporters are
 * never used.
 */
#include <linux/dma-mapping.h>
#include <linux/dma-resv.h>
#include <linux/freezer.h>
#include <linux/highmem.h>
#include <linux/iosys-map.h>
#include <linux/mm.h>
#include <linux/scatterlist.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>

#include "buffer.h"
#include "compat.h"
#include "signal.h"
#include "stats.h"
#include "turn.h"

/**
 * struct dmafile_buffer - the private data of a dma-buf
 * @pages: the memory
 * @turns: requests that read or fill it
 * @lock: protects @attachments and @vaddr
 * @attachments: list of struct dmafile_attachment
 * @vaddr: the vmap() address, or NULL
 * @node: entry in dmafile_buffers
 * @ino: inode number of the dma-buf, as in fdinfo
 * @size: size of the dma-buf
 * @origin: description of the request that created it
 */
struct dmafile_buffer {
	struct dmafile_pages pages;
	struct dmafile_turns turns;
	struct mutex lock; /* protects attachments and vaddr */
	struct list_head attachments;
	void *vaddr;
	struct list_head node;
	unsigned long ino;
	size_t size;
	const char *origin;
};

/* All buffers, for debugfs */
static LIST_HEAD(dmafile_buffers);
static DEFINE_MUTEX(dmafile_buffers_lock);

/**
 * struct dmafile_attachment - a device that is attached to a buffer
 * @dev: the device
 * @table: scatterlist of the memory for this device
 * @node: entry in the buffer's list
 * @direction: DMA direction of the mapping of @table; DMA_NONE while it is not mapped
 */
struct dmafile_attachment {
	struct device *dev;
	struct sg_table table;
	struct list_head node;
	enum dma_data_direction direction;
};

/* The maximum segment size in pages that the device accepts, also with bounce buffers. */
static unsigned long dmafile_longest_segment(struct device *dev)
{
	size_t most = min_t(size_t, dma_get_max_seg_size(dev), dma_max_mapping_size(dev));

	return max(most >> PAGE_SHIFT, 1UL);
}

/* Creates one segment per chunk, or several if a chunk is too long. */
static int dmafile_fill_table(struct sg_table *table, const struct dmafile_pages *pages,
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
		cond_resched();
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
	err = dmafile_fill_table(&attachment->table, &buffer->pages,
				 dmafile_longest_segment(attach->dev));
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
 * Caches are synchronised explicitly, not by mapping: a buffer may be mapped for several devices at
 * the same time, which CONFIG_DMA_API_DEBUG would report as an error.
 */
#define DMAFILE_MAP_ATTRS	DMA_ATTR_SKIP_CPU_SYNC

static struct sg_table *dmafile_map(struct dma_buf_attachment *attach,
				    enum dma_data_direction direction)
{
	struct dmafile_buffer *buffer = attach->dmabuf->priv;
	struct dmafile_attachment *attachment = attach->priv;
	int err;

	/* The lock excludes CPU access, which synchronises all mapped attachments. */
	mutex_lock(&buffer->lock);
	err = dma_map_sgtable(attachment->dev, &attachment->table, direction,
			      DMAFILE_MAP_ATTRS);
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
	dma_unmap_sgtable(attachment->dev, table, direction, DMAFILE_MAP_ATTRS);
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
		/* Devices that only read cannot have changed the buffer. */
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

/* The dma-buf core has already checked the range. */
static int dmafile_mmap(struct dma_buf *dmabuf, struct vm_area_struct *vma)
{
	struct dmafile_buffer *buffer = dmabuf->priv;
	unsigned long at = vma->vm_pgoff, addr = vma->vm_start;
	unsigned int chunk = dmafile_pages_chunk(&buffer->pages, (u64)at << PAGE_SHIFT);

	/* No private mappings: writes to them would copy pages. */
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
		cond_resched();
	}
	return 0;
}

static void *dmafile_map_all(const struct dmafile_pages *pages)
{
	struct page **all = kvmalloc_array(pages->count, sizeof(*all), DMAFILE_GFP);
	unsigned long i, n = 0;
	unsigned int chunk;
	void *vaddr;

	if (!all)
		return NULL;
	for (chunk = 0; chunk < pages->nr; chunk++) {
		for (i = 0; i < dmafile_chunk_pages(pages, chunk); i++)
			all[n++] = pages->chunks[chunk].page + i;
		cond_resched();
	}
	vaddr = vmap(all, n, VM_MAP, PAGE_KERNEL);
	kvfree(all);
	return vaddr;
}

/* The dma-buf core calls this for the first user only. */
static int dmafile_vmap(struct dma_buf *dmabuf, struct iosys_map *map)
{
	struct dmafile_buffer *buffer = dmabuf->priv;
	void *vaddr = dmafile_map_all(&buffer->pages);

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

static void dmafile_buffer_free(struct dmafile_buffer *buffer)
{
	dmafile_pages_free(&buffer->pages);
	mutex_destroy(&buffer->lock);
	kfree(buffer->origin);
	kfree(buffer);
}

static void dmafile_release(struct dma_buf *dmabuf)
{
	struct dmafile_buffer *buffer = dmabuf->priv;

	mutex_lock(&dmafile_buffers_lock);
	list_del(&buffer->node);
	mutex_unlock(&dmafile_buffers_lock);
	dmafile_stats_add(DMAFILE_STAT_BUFFERS, -1);
	dmafile_stats_add(DMAFILE_STAT_BUFFER_BYTES, -(s64)dmabuf->size);
	dmafile_buffer_free(buffer);
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
 * dmafile_buffer_export - create a dma-buf
 * @pages: the memory; owned by the dma-buf afterwards, but unchanged on error
 * @fd_flags: O_RDONLY or O_RDWR
 * @origin: description for debugfs, one line, from kmalloc(); always consumed, even on error
 *
 * Return: the dma-buf, without a file descriptor yet, or an error.
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
	dmafile_turns_init(&buffer->turns);
	mutex_init(&buffer->lock);
	INIT_LIST_HEAD(&buffer->attachments);
	buffer->origin = origin;

	info.exp_name = "dmafile";
	info.ops = &dmafile_buffer_ops;
	info.size = dmafile_pages_bytes(pages);
	info.flags = fd_flags & O_ACCMODE;
	info.priv = buffer;
	dmabuf = dma_buf_export(&info);
	if (IS_ERR(dmabuf)) {
		dmafile_buffer_free(buffer);
		return dmabuf;
	}
	buffer->pages = *pages;
	*pages = (struct dmafile_pages) { };
	buffer->ino = file_inode(dmabuf->file)->i_ino;
	buffer->size = dmabuf->size;
	mutex_lock(&dmafile_buffers_lock);
	list_add_tail(&buffer->node, &dmafile_buffers);
	mutex_unlock(&dmafile_buffers_lock);
	dmafile_stats_add(DMAFILE_STAT_BUFFERS, 1);
	dmafile_stats_add(DMAFILE_STAT_BUFFER_BYTES, dmabuf->size);
	return dmabuf;
}

/**
 * dmafile_buffer_list - print all buffers, one per line
 * @file: the file to print to
 */
void dmafile_buffer_list(struct seq_file *file)
{
	const struct dmafile_buffer *buffer;

	mutex_lock(&dmafile_buffers_lock);
	list_for_each_entry(buffer, &dmafile_buffers, node)
		seq_printf(file, "ino=%lu size=%zu %s\n", buffer->ino, buffer->size,
			   buffer->origin);
	mutex_unlock(&dmafile_buffers_lock);
}

/* Interval of checks for signals: a fence wait can be interrupted by all signals or by none. */
#define DMAFILE_FENCE_LOOK	(HZ / 10)

/* Waits for the fences of devices. Return: 0, -EINTR, or an error of a fence. */
static int dmafile_wait_for_fences(struct dma_buf *dmabuf, bool fill, bool interruptible)
{
	long left;

	do {
		try_to_freeze();
		if (dmafile_interrupted(interruptible))
			return -EINTR;
		left = dma_resv_wait_timeout(dmabuf->resv, dma_resv_usage_rw(fill), false,
					     DMAFILE_FENCE_LOOK);
	} while (!left);
	return min(left, 0L);
}

/**
 * dmafile_buffer_is - check whether this module exported a dma-buf
 * @dmabuf: any dma-buf
 *
 * Return: true if it did.
 */
bool dmafile_buffer_is(const struct dma_buf *dmabuf)
{
	return dmabuf->ops == &dmafile_buffer_ops;
}

/**
 * dmafile_buffer_begin - begin I/O on the memory of a buffer
 * @dmabuf: a dma-buf of this module
 * @fill: the memory will be written, not only read
 * @interruptible: any signal ends the wait, not only a fatal one
 *
 * Waits for conflicting requests, and for the buffer's fences, which show that devices use it. Only
 * requests are serialised: as with any dma-buf, drivers must not start a device on it later.
 *
 * Return: the memory, -EINTR on a signal, or an error of a fence.
 */
struct dmafile_pages *dmafile_buffer_begin(struct dma_buf *dmabuf, bool fill, bool interruptible)
{
	struct dmafile_buffer *buffer = dmabuf->priv;
	int err = dmafile_turn_begin(&buffer->turns, fill, interruptible);

	if (err)
		return ERR_PTR(err);
	err = dmafile_wait_for_fences(dmabuf, fill, interruptible);
	if (err) {
		dmafile_turn_end(&buffer->turns, fill);
		return ERR_PTR(err);
	}
	dmafile_begin_cpu_access(dmabuf, fill ? DMA_BIDIRECTIONAL : DMA_FROM_DEVICE);
	return &buffer->pages;
}

/**
 * dmafile_buffer_end - end I/O that was begun with dmafile_buffer_begin()
 * @dmabuf: as for dmafile_buffer_begin()
 * @fill: as for dmafile_buffer_begin()
 */
void dmafile_buffer_end(struct dma_buf *dmabuf, bool fill)
{
	struct dmafile_buffer *buffer = dmabuf->priv;

	dmafile_end_cpu_access(dmabuf, fill ? DMA_BIDIRECTIONAL : DMA_FROM_DEVICE);
	dmafile_turn_end(&buffer->turns, fill);
}

DMAFILE_IMPORT_NS(DMA_BUF);
