// SPDX-License-Identifier: GPL-2.0
/*
 * Pre-mapped buffers: DMA-mapped once for an NVMe controller, with stored PRP lists
 *
 * The PRP list has an entry for each 4 KiB of the buffer.  Each page of the list has
 * 511 entries and a link to the next page.  A command points to a slot in this list,
 * so that no list has to be built for it.
 */
#include <linux/bvec.h>
#include <linux/capability.h>
#include <linux/dma-buf.h>
#include <linux/dma-mapping.h>
#include <linux/module.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>

#include "nvme.h"
#include "premap.h"

static unsigned int premap = 2;
module_param(premap, uint, 0644);
MODULE_PARM_DESC(premap,
		 "Allow pre-mapped buffers: 0 never, 1 with CAP_SYS_RAWIO, 2 always (default)");

static bool premap_bounce;
module_param(premap_bounce, bool, 0644);
MODULE_PARM_DESC(premap_bounce,
		 "Allow pre-mapped buffers for devices that may use bounce buffers (for testing)");

static unsigned int premap_max_mb;
module_param(premap_max_mb, uint, 0644);
MODULE_PARM_DESC(premap_max_mb,
		 "Maximum MiB of pre-mapped buffers per controller, 0 for no limit (default)");

/**
 * nvme_premap_setup_prps - point a command to its range of the stored PRP list
 * @r: the range
 * @cmnd: the command, whose data pointer is set
 *
 * A list page has 512 - s slots from slot s on.  The controller treats the last slot
 * as a link only if there are more entries than slots.  If the entries fit exactly,
 * it would use the stored link as a data address.
 *
 * Return: false if the stored list cannot be used and a copy is needed.
 */
bool nvme_premap_setup_prps(const struct nvme_premap_range *r,
			    struct nvme_rw_command *cmnd)
{
	const struct nvme_premap *map = r->map;
	unsigned int slot = (r->first + 1) % NVME_PREMAP_SLOTS;
	unsigned int end = slot + r->nr - 1;

	cmnd->dptr.prp1 = cpu_to_le64(nvme_premap_addr(map, r->first) +
				      r->offset);
	cmnd->dptr.prp2 = 0;
	if (r->nr == 1)
		return true;
	if (r->nr == 2) {
		cmnd->dptr.prp2 = cpu_to_le64(nvme_premap_addr(map,
							       r->first + 1));
		return true;
	}
	if (end > NVME_PREMAP_SLOTS && end % NVME_PREMAP_SLOTS == 1)
		return false;
	if (map->pd->ctrl->quirks & NVME_QUIRK_DMAPOOL_ALIGN_512)
		return false;
	cmnd->dptr.prp2 =
		cpu_to_le64(map->lists[(r->first + 1) / NVME_PREMAP_SLOTS].dma +
			    slot * sizeof(__le64));
	return true;
}

/*
 * Syncs exactly the bytes of the request: the rest of a page may be in use by other
 * requests or by the CPU, and a bounce buffer would overwrite it with old data.
 */
typedef void nvme_premap_sync_fn(struct device *dev, dma_addr_t addr,
				 size_t size, enum dma_data_direction dir);

static void nvme_premap_sync(struct request *req, nvme_premap_sync_fn *sync)
{
	struct nvme_premap_range r;
	unsigned int left = blk_rq_bytes(req), k;

	nvme_premap_range(req, &r);
	for (k = r.first; left; k++) {
		unsigned int part = min(left, DMA_TAG_SIZE - r.offset);

		sync(r.map->pd->dev, nvme_premap_addr(r.map, k) + r.offset,
		     part, r.map->tag.dir);
		left -= part;
		r.offset = 0;
	}
}

void nvme_premap_sync_for_device(struct request *req)
{
	nvme_premap_sync(req, dma_sync_single_for_device);
}

void nvme_premap_sync_for_cpu(struct request *req)
{
	nvme_premap_sync(req, dma_sync_single_for_cpu);
}

static void nvme_premap_free_lists(struct nvme_premap *map)
{
	const unsigned int per_page = PAGE_SIZE / DMA_TAG_SIZE;
	unsigned int i;

	for (i = 0; i < map->nr_lists; i += per_page)
		if (map->lists[i].prp)
			dma_free_noncoherent(map->pd->dev, PAGE_SIZE,
					     map->lists[i].prp,
					     map->lists[i].dma, DMA_TO_DEVICE);
	kvfree(map->lists);
	map->lists = NULL;
}

/* @end: the end of the buffer, relative to the start of its first 4 KiB unit */
static int nvme_premap_alloc_lists(struct nvme_premap *map, u64 end)
{
	const u64 entries = DIV_ROUND_UP_ULL(end, DMA_TAG_SIZE);
	const unsigned int per_page = PAGE_SIZE / DMA_TAG_SIZE;
	unsigned int i, j;

	if (entries > INT_MAX)
		return -EINVAL;
	map->nr_lists = DIV_ROUND_UP_ULL(entries, NVME_PREMAP_SLOTS);
	map->lists = kvcalloc(map->nr_lists, sizeof(*map->lists),
			      GFP_KERNEL_ACCOUNT);
	if (!map->lists)
		return -ENOMEM;

	for (i = 0; i < map->nr_lists; i += per_page) {
		dma_addr_t dma;
		void *page;

		page = dma_alloc_noncoherent(map->pd->dev, PAGE_SIZE, &dma,
					     DMA_TO_DEVICE,
					     GFP_KERNEL_ACCOUNT | __GFP_NOWARN);
		if (!page) {
			nvme_premap_free_lists(map);
			return -ENOMEM;
		}
		for (j = i; j < min(i + per_page, map->nr_lists); j++) {
			map->lists[j].prp = page + (j - i) * DMA_TAG_SIZE;
			map->lists[j].dma = dma + (j - i) * DMA_TAG_SIZE;
		}
	}
	map->tag.nr_pages = DIV_ROUND_UP(map->nr_lists, per_page) +
		DIV_ROUND_UP(map->nr_lists * sizeof(*map->lists), PAGE_SIZE);
	return 0;
}

static void nvme_premap_finish_lists(struct nvme_premap *map)
{
	const unsigned int per_page = PAGE_SIZE / DMA_TAG_SIZE;
	unsigned int i;

	for (i = 0; i + 1 < map->nr_lists; i++)
		map->lists[i].prp[NVME_PREMAP_SLOTS] =
			cpu_to_le64(map->lists[i + 1].dma);
	for (i = 0; i < map->nr_lists; i += per_page)
		dma_sync_single_for_device(map->pd->dev, map->lists[i].dma,
					   PAGE_SIZE, DMA_TO_DEVICE);
}

/*
 * Writes the PRP entries for [@offset, @offset + @len) of the mapping.  Segments must
 * begin and end on multiples of 4 KiB, except at the start and end of the range.
 */
static int nvme_premap_fill(struct nvme_premap *map, u64 offset, u64 len)
{
	u64 left = len, addr, end, prev = 0;
	struct scatterlist *sg;
	unsigned int i, k = 0;
	int ret;

	for_each_sgtable_dma_sg(map->sgt, sg, i) {
		u64 part = sg_dma_len(sg);

		if (offset >= part) {
			offset -= part;
			continue;
		}
		addr = sg_dma_address(sg) + offset;
		part = min(part - offset, left);
		offset = 0;

		if (left == len) {
			map->tag.first = addr & (DMA_TAG_SIZE - 1);
			end = map->tag.first + len;
			ret = nvme_premap_alloc_lists(map, end);
			if (ret)
				return ret;
		} else if (addr & (DMA_TAG_SIZE - 1)) {
			return -EINVAL;
		}
		left -= part;
		end = addr + part;
		if (left && end & (DMA_TAG_SIZE - 1))
			return -EINVAL;

		addr = round_down(addr, (u64)DMA_TAG_SIZE);
		for (; addr < end; addr += DMA_TAG_SIZE, k++) {
			if (k && addr != prev + DMA_TAG_SIZE)
				map->run_shift = min_t(u8, map->run_shift,
						       __ffs(k));
			map->lists[k / NVME_PREMAP_SLOTS]
				.prp[k % NVME_PREMAP_SLOTS] = cpu_to_le64(addr);
			prev = addr;
		}
		if (!left) {
			nvme_premap_finish_lists(map);
			return 0;
		}
		cond_resched();
	}
	return -EINVAL;
}

/* The segment being built, see nvme_premap_segment() */
struct nvme_premap_seg {
	phys_addr_t	start;
	phys_addr_t	end;
	unsigned int	nents;
};

/*
 * Adds physical memory to a list of segments: extends the last one, or begins a new
 * one.  With @sg NULL it only counts the segments.
 */
static void nvme_premap_segment(struct nvme_premap *map,
				struct nvme_premap_seg *seg,
				struct scatterlist **sg, phys_addr_t phys,
				u64 len, u64 max)
{
	u64 boundary = dma_get_seg_boundary(map->pd->dev);

	while (len) {
		u64 room = boundary - (phys & boundary);
		u64 part;

		/* The limit applies from the segment's start rounded down to 4 KiB. */
		if (!seg->nents || phys != seg->end || !(phys & boundary) ||
		    phys - round_down(seg->start, (u64)DMA_TAG_SIZE) >= max) {
			seg->start = phys;
			seg->end = phys;
			if (sg && seg->nents)
				*sg = sg_next(*sg);
			seg->nents++;
		}
		part = max - (phys - round_down(seg->start, (u64)DMA_TAG_SIZE));
		part = min(min(len, part), room == U64_MAX ? room : room + 1);
		seg->end += part;
		if (sg)
			sg_set_page(*sg, pfn_to_page(PHYS_PFN(seg->start)),
				    seg->end - seg->start,
				    offset_in_page(seg->start));
		phys += part;
		len -= part;
	}
}

static int nvme_premap_map_pages(struct nvme_premap *map,
				 const struct dma_tag_src *src)
{
	struct device *dev = map->pd->dev;
	u64 max = round_down(min_t(u64, dma_max_mapping_size(dev),
				   dma_get_max_seg_size(dev)), DMA_TAG_SIZE);
	struct nvme_premap_seg seg = {};
	struct scatterlist *sg;
	unsigned int i;
	int ret;

	for (i = 0; i < src->nr_bvecs; i++)
		nvme_premap_segment(map, &seg, NULL, bvec_phys(&src->bvec[i]),
				    src->bvec[i].bv_len, max);
	ret = sg_alloc_table(&map->own, seg.nents, GFP_KERNEL_ACCOUNT);
	if (ret)
		return ret;
	sg = map->own.sgl;
	seg.nents = 0;
	for (i = 0; i < src->nr_bvecs; i++)
		nvme_premap_segment(map, &seg, &sg, bvec_phys(&src->bvec[i]),
				    src->bvec[i].bv_len, max);

	ret = dma_map_sgtable(dev, &map->own, map->tag.dir,
			      DMA_ATTR_SKIP_CPU_SYNC | DMA_ATTR_NO_WARN);
	if (ret) {
		sg_free_table(&map->own);
		return ret == -EIO ? -ENOMEM : ret;
	}
	map->sgt = &map->own;
	for_each_sgtable_dma_sg(map->sgt, sg, i)
		map->tag.needs_sync |= dma_need_sync(dev, sg_dma_address(sg));
	return 0;
}

/*
 * A static attachment: the exporter must not move the memory while it is mapped.
 * User space synchronises CPU caches with DMA_BUF_IOCTL_SYNC.
 */
static int nvme_premap_map_dmabuf(struct nvme_premap *map,
				  const struct dma_tag_src *src)
{
	struct sg_table *sgt;
	int ret;

	get_dma_buf(src->dmabuf);
	map->attach = dma_buf_attach(src->dmabuf, map->pd->dev);
	if (IS_ERR(map->attach)) {
		ret = PTR_ERR(map->attach);
		goto err_put;
	}
	sgt = dma_buf_map_attachment_unlocked(map->attach, map->tag.dir);
	if (IS_ERR(sgt)) {
		ret = PTR_ERR(sgt);
		goto err_detach;
	}
	map->sgt = sgt;
	return 0;

err_detach:
	dma_buf_detach(src->dmabuf, map->attach);
err_put:
	dma_buf_put(src->dmabuf);
	/* Other errors mean that the exporter does not support this device. */
	return ret == -ENOMEM || ret == -EINTR ? ret : -EOPNOTSUPP;
}

static void nvme_premap_unmap_memory(struct nvme_premap *map)
{
	struct dma_buf *dmabuf;

	/*
	 * No sync: the CPU may have written since the last request, and a bounce
	 * buffer would overwrite that with old data.
	 */
	if (map->sgt == &map->own) {
		dma_unmap_sgtable(map->pd->dev, &map->own, map->tag.dir,
				  DMA_ATTR_SKIP_CPU_SYNC);
		sg_free_table(&map->own);
	} else if (IS_ENABLED(CONFIG_DMA_SHARED_BUFFER)) {
		dmabuf = map->attach->dmabuf;
		dma_buf_unmap_attachment_unlocked(map->attach, map->sgt,
						  map->tag.dir);
		dma_buf_detach(dmabuf, map->attach);
		dma_buf_put(dmabuf);
	}
}

static void nvme_premap_revoke(struct nvme_premap *map)
{
	lockdep_assert_held(&map->pd->lock);

	WRITE_ONCE(map->tag.live, false);
	nvme_premap_unmap_memory(map);
	nvme_premap_free_lists(map);
	map->pd->bytes -= map->tag.len;
	list_del(&map->node);
}

static void nvme_premap_unmap(struct dma_tag *tag)
{
	struct nvme_premap *map = container_of(tag, struct nvme_premap, tag);
	struct nvme_premap_dev *pd = map->pd;

	mutex_lock(&pd->lock);
	if (map->tag.live)
		nvme_premap_revoke(map);
	mutex_unlock(&pd->lock);
	nvme_put_ctrl(pd->ctrl);
	kfree(map);
}

static const struct dma_tag_ops nvme_premap_ops = {
	.unmap	= nvme_premap_unmap,
};

/* Return: the reason why a buffer cannot be pre-mapped, or NULL */
static const char *nvme_premap_refusal(struct nvme_premap_dev *pd,
				       struct request_queue *q,
				       const struct dma_tag_src *src)
{
	struct nvme_ns *ns = q->queuedata;

	if (!premap)
		return "disabled by nvme.premap=0";
	if (ns->head->ms)
		return "the namespace has metadata";
	if (src->dmabuf && !IS_ENABLED(CONFIG_DMA_SHARED_BUFFER))
		return "the kernel has no dma-buf support";
	if (dma_max_mapping_size(pd->dev) != SIZE_MAX &&
	    (src->dmabuf || !premap_bounce))
		return "the device may use bounce buffers";
	return NULL;
}

static int nvme_premap_make(struct nvme_premap *map, struct request_queue *q,
			    const struct dma_tag_src *src)
{
	struct nvme_premap_dev *pd = map->pd;
	int ret;

	if (pd->gone)
		return -ENODEV;
	if (premap_max_mb && pd->bytes + src->len > (u64)premap_max_mb * SZ_1M)
		return -ENOSPC;
	if (src->dmabuf)
		ret = nvme_premap_map_dmabuf(map, src);
	else
		ret = nvme_premap_map_pages(map, src);
	if (ret)
		return ret;
	ret = nvme_premap_fill(map, src->offset, src->len);
	if (ret) {
		if (map->lists)
			nvme_premap_free_lists(map);
		nvme_premap_unmap_memory(map);
		return ret;
	}
	if (map->sgt == &map->own)
		map->tag.nr_pages += DIV_ROUND_UP(map->own.orig_nents *
					sizeof(struct scatterlist), PAGE_SIZE);
	pd->bytes += src->len;
	map->tag.live = true;
	list_add_tail(&map->node, &pd->maps);
	return 0;
}

/**
 * nvme_premap_map - map a buffer for a controller
 * @pd: the controller
 * @q: the queue of the namespace whose requests may use it
 * @src: the buffer
 *
 * Return: the tag, or an ERR_PTR(): -EOPNOTSUPP if pre-mapping is not supported here
 * (a debug message gives the reason), -EPERM without CAP_SYS_RAWIO if nvme.premap=1,
 * -ENODEV if the device is being removed, -ENOSPC above nvme.premap_max_mb, -ENOMEM,
 * or -EINVAL if the DMA segments are not aligned to 4 KiB.
 */
struct dma_tag *nvme_premap_map(struct nvme_premap_dev *pd,
				struct request_queue *q,
				const struct dma_tag_src *src)
{
	const char *reason = nvme_premap_refusal(pd, q, src);
	struct nvme_premap *map;
	int ret;

	if (reason) {
		dev_dbg(pd->ctrl->device, "cannot pre-map: %s\n", reason);
		return ERR_PTR(-EOPNOTSUPP);
	}
	if (premap == 1 && !capable(CAP_SYS_RAWIO))
		return ERR_PTR(-EPERM);

	map = kzalloc(sizeof(*map), GFP_KERNEL_ACCOUNT);
	if (!map)
		return ERR_PTR(-ENOMEM);
	map->pd = pd;
	map->run_shift = 31;
	map->tag.ops = &nvme_premap_ops;
	map->tag.queue = q;
	map->tag.len = src->len;
	map->tag.dir = src->dir;
	map->tag.bvec = src->bvec;
	map->tag.nr_bvecs = src->nr_bvecs;

	mutex_lock(&pd->lock);
	ret = nvme_premap_make(map, q, src);
	mutex_unlock(&pd->lock);
	if (ret) {
		kfree(map);
		return ERR_PTR(ret);
	}
	nvme_get_ctrl(pd->ctrl);
	return &map->tag;
}

void nvme_premap_init(struct nvme_premap_dev *pd, struct device *dev,
		      struct nvme_ctrl *ctrl)
{
	pd->dev = dev;
	pd->ctrl = ctrl;
	mutex_init(&pd->lock);
	INIT_LIST_HEAD(&pd->maps);
}

/* Unmaps all buffers.  The namespaces have been removed, so no requests are left. */
void nvme_premap_remove(struct nvme_premap_dev *pd)
{
	struct nvme_premap *map, *next;

	mutex_lock(&pd->lock);
	pd->gone = true;
	list_for_each_entry_safe(map, next, &pd->maps, node)
		nvme_premap_revoke(map);
	mutex_unlock(&pd->lock);
}

MODULE_IMPORT_NS(DMA_BUF);
