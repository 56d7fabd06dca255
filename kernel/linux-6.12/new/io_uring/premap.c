// SPDX-License-Identifier: GPL-2.0
/*
 * Registered buffers that are DMA-mapped once, and the extended update that
 * registers them.
 *
 * A mapping is made for one file, and only requests of one ring can use it.  It is
 * removed in the same way as buffers and files of a ring: after all requests that
 * were prepared earlier, in the order of the ring's nodes.  Therefore requests
 * need not take a reference.
 */
#include <linux/kernel.h>
#include <linux/errno.h>
#include <linux/dma-buf.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/io_uring.h>
#include <linux/mm.h>
#include <linux/nospec.h>
#include <linux/overflow.h>
#include <linux/seq_file.h>
#include <linux/slab.h>

#include <uapi/linux/io_uring.h>

#include "io_uring.h"
#include "rsrc.h"
#include "filetable.h"
#include "premap.h"

void io_premap_free(struct io_ring_ctx *ctx, struct io_premap *pm)
{
	struct file *file = pm->tag->file;

	list_del(&pm->list);
	/* The buffer may have been mapped again since it was unmapped. */
	if (pm->imu->premap == pm)
		pm->imu->premap = NULL;
	pm->tag->ops->unmap(pm->tag);
	if (pm->acct_pages)
		io_unaccount_mem(ctx, pm->acct_pages);
	fput(file);
	if (pm->drop)
		io_rsrc_node_destroy(ctx, pm->drop);
	kfree(pm);
}

/* Unmaps after all earlier requests have completed. The buffer stays registered. */
static void io_premap_drop(struct io_ring_ctx *ctx, struct io_premap *pm)
{
	struct io_rsrc_node *node = ctx->rsrc_node;

	list_del_init(&pm->list);
	pm->imu->premap = NULL;
	ctx->rsrc_node = pm->drop;
	pm->drop = NULL;

	node->item.premap = pm;
	node->item.tag = 0;
	node->type = IORING_RSRC_PREMAP;
	list_add_tail(&node->node, &ctx->rsrc_ref_list);
	io_put_rsrc_node(ctx, node);
}

/*
 * Called when the removal of a file or buffer has been queued.  The mappings made
 * for a registered file are removed with it.  The mapping of a buffer is removed
 * with the buffer: on its own it would be undone after the pages were unpinned.
 */
void io_premap_removal(struct io_rsrc_data *data, unsigned int idx, void *rsrc)
{
	struct io_ring_ctx *ctx = data->ctx;
	struct io_mapped_ubuf *imu = rsrc;
	struct io_premap *pm, *next;

	if (data->rsrc_type == IORING_RSRC_BUFFER) {
		if (imu->premap)
			list_del_init(&imu->premap->list);
		return;
	}
	list_for_each_entry_safe(pm, next, &ctx->premaps, list)
		if (pm->fixed == idx)
			io_premap_drop(ctx, pm);
}

void io_premap_drop_files(struct io_ring_ctx *ctx)
{
	struct io_premap *pm, *next;

	list_for_each_entry_safe(pm, next, &ctx->premaps, list)
		if (pm->fixed >= 0)
			io_premap_drop(ctx, pm);
}

bool io_premap_any(struct io_ring_ctx *ctx)
{
	unsigned int i;

	for (i = 0; i < ctx->nr_user_bufs; i++)
		if (ctx->user_bufs[i]->premap || ctx->user_bufs[i]->dmabuf)
			return true;
	return false;
}

void io_premap_show(struct seq_file *m, unsigned int i,
		    const struct io_premap *pm)
{
	seq_printf(m, "%5u: 0x%llx/%llu pre-mapped for %s%s\n", i, pm->start,
		   pm->len, file_dentry(pm->tag->file)->d_iname,
		   pm->imu->dmabuf ? ", a dma-buf" : "");
}

/* Like io_import_fixed(), for a pre-mapped buffer */
int io_premap_import(int ddir, struct iov_iter *iter, struct io_mapped_ubuf *imu,
		     u64 addr, size_t len)
{
	const struct io_premap *pm = imu->premap;
	u64 end;

	if (unlikely(check_add_overflow(addr, (u64)len, &end)))
		return -EFAULT;
	if (unlikely(addr < pm->start || end > pm->start + pm->len))
		return -EFAULT;
	iov_iter_dma_tag(iter, ddir, pm->tag, addr - pm->start, len);
	return 0;
}

static struct file *io_premap_target(struct io_ring_ctx *ctx,
				     const struct io_uring_regbuf_desc *desc)
{
	struct file *file = NULL;
	unsigned int i = desc->target_fd;

	if (!(desc->flags & IO_REGBUF_TARGET_FIXED))
		return fget(desc->target_fd);
	if (i < ctx->nr_user_files) {
		i = array_index_nospec(i, ctx->nr_user_files);
		file = io_file_from_index(&ctx->file_table, i);
	}
	return file ? get_file(file) : NULL;
}

/* The device may access the buffer only as the file's open mode allows. */
static int io_premap_dir(const struct file *file, enum dma_data_direction *dir)
{
	switch (file->f_mode & (FMODE_READ | FMODE_WRITE)) {
	case FMODE_READ:
		*dir = DMA_FROM_DEVICE;
		return 0;
	case FMODE_WRITE:
		*dir = DMA_TO_DEVICE;
		return 0;
	case FMODE_READ | FMODE_WRITE:
		*dir = DMA_BIDIRECTIONAL;
		return 0;
	}
	return -EBADF;
}

static int io_premap_dmabuf_mode(const struct dma_buf *dmabuf,
				 enum dma_data_direction dir)
{
	if (dir != DMA_TO_DEVICE && !(dmabuf->file->f_mode & FMODE_WRITE))
		return -EACCES;
	if (dir != DMA_FROM_DEVICE && !(dmabuf->file->f_mode & FMODE_READ))
		return -EACCES;
	return 0;
}

static int io_premap_map(struct io_ring_ctx *ctx, struct io_mapped_ubuf *imu,
			 const struct io_uring_regbuf_desc *desc,
			 struct dma_tag_src *src)
{
	bool fixed = desc->flags & IO_REGBUF_TARGET_FIXED;
	struct io_premap *pm;
	struct file *file;
	int ret;

	file = io_premap_target(ctx, desc);
	if (!file)
		return -EBADF;
	ret = -EOPNOTSUPP;
	if (!file->f_op->dma_map)
		goto err_file;
	ret = -EINVAL;
	if (!(file->f_flags & O_DIRECT))
		goto err_file;
	ret = io_premap_dir(file, &src->dir);
	if (!ret && src->dmabuf)
		ret = io_premap_dmabuf_mode(src->dmabuf, src->dir);
	if (ret)
		goto err_file;

	ret = -ENOMEM;
	pm = kzalloc(sizeof(*pm), GFP_KERNEL_ACCOUNT);
	if (!pm)
		goto err_file;
	pm->drop = io_rsrc_node_alloc(ctx);
	if (!pm->drop)
		goto err_free;

	pm->tag = file->f_op->dma_map(file, src);
	if (IS_ERR(pm->tag)) {
		ret = PTR_ERR(pm->tag);
		goto err_node;
	}
	ret = io_account_mem(ctx, pm->tag->nr_pages);
	if (ret)
		goto err_unmap;
	pm->acct_pages = pm->tag->nr_pages;
	pm->tag->file = file;
	pm->imu = imu;
	pm->start = src->dmabuf ? 0 : imu->ubuf;
	pm->len = src->len;
	pm->fixed = fixed ? desc->target_fd : -1;
	list_add_tail(&pm->list, &ctx->premaps);
	imu->premap = pm;
	return 0;

err_unmap:
	pm->tag->ops->unmap(pm->tag);
err_node:
	io_rsrc_node_destroy(ctx, pm->drop);
err_free:
	kfree(pm);
err_file:
	fput(file);
	return ret;
}

static int io_premap_uaddr(struct io_ring_ctx *ctx, struct io_mapped_ubuf *imu,
			   const struct io_uring_regbuf_desc *desc)
{
	struct dma_tag_src src = {
		.bvec		= imu->bvec,
		.nr_bvecs	= imu->nr_bvecs,
		.len		= imu->len,
	};

	if (imu == &dummy_ubuf || imu->dmabuf)
		return -EINVAL;
	if (imu->premap || refcount_read(&imu->refs) != 1)
		return -EBUSY;
	return io_premap_map(ctx, imu, desc, &src);
}

static struct io_mapped_ubuf *
io_premap_dmabuf(struct io_ring_ctx *ctx,
		 const struct io_uring_regbuf_desc *desc)
{
	struct dma_tag_src src = { .offset = desc->uaddr, .len = desc->size };
	struct io_mapped_ubuf *imu;
	u64 end;
	int ret;

	if (!IS_ENABLED(CONFIG_DMA_SHARED_BUFFER))
		return ERR_PTR(-EOPNOTSUPP);
	src.dmabuf = dma_buf_get(desc->dmabuf_fd);
	if (IS_ERR(src.dmabuf))
		return ERR_CAST(src.dmabuf);

	ret = -EINVAL;
	if (!src.len && !src.offset)
		src.len = src.dmabuf->size;
	else if ((src.len | src.offset) & (DMA_TAG_SIZE - 1))
		goto out;
	if (!src.len || check_add_overflow(src.offset, src.len, &end) ||
	    end > src.dmabuf->size)
		goto out;

	ret = -ENOMEM;
	imu = kvzalloc(struct_size(imu, bvec, 0), GFP_KERNEL_ACCOUNT);
	if (!imu)
		goto out;
	/* Like dummy_ubuf: an invalid range, so that io_import_fixed() fails. */
	imu->ubuf = -1UL;
	imu->len = UINT_MAX;
	imu->dmabuf = true;
	refcount_set(&imu->refs, 1);
	ret = io_premap_map(ctx, imu, desc, &src);
	if (ret)
		kvfree(imu);
out:
	dma_buf_put(src.dmabuf);
	return ret ? ERR_PTR(ret) : imu;
}

/* Puts @imu into a slot. The previous buffer is removed after its requests. */
static int io_regbuf_install(struct io_ring_ctx *ctx, unsigned int i,
			     struct io_mapped_ubuf *imu, u64 tag)
{
	int ret;

	if (ctx->user_bufs[i] != &dummy_ubuf) {
		ret = io_queue_rsrc_removal(ctx->buf_data, i, ctx->user_bufs[i]);
		if (ret) {
			io_buffer_unmap(ctx, &imu);
			return ret;
		}
	}
	ctx->user_bufs[i] = imu;
	*io_get_tag_slot(ctx->buf_data, i) = tag;
	return 0;
}

static int io_regbuf_empty(struct io_ring_ctx *ctx, unsigned int i,
			   const struct io_uring_regbuf_desc *desc, u64 tag)
{
	struct io_mapped_ubuf *imu = ctx->user_bufs[i];

	if (desc->uaddr || desc->size || tag)
		return -EINVAL;

	switch (desc->flags) {
	case 0:
		imu = (struct io_mapped_ubuf *)&dummy_ubuf;
		return io_regbuf_install(ctx, i, imu, 0);
	case IO_REGBUF_PREMAP | IO_REGBUF_TARGET_FIXED:
		return io_premap_uaddr(ctx, imu, desc);
	case IO_REGBUF_PREMAP:
		if (desc->target_fd != -1 || imu == &dummy_ubuf)
			return -EINVAL;
		if (imu->premap)
			io_premap_drop(ctx, imu->premap);
		return 0;
	}
	return -EINVAL;
}

static int io_regbuf_uaddr(struct io_ring_ctx *ctx, unsigned int i,
			   const struct io_uring_regbuf_desc *desc, u64 tag,
			   struct page **last_hpage)
{
	struct iovec iov = {
		.iov_base	= u64_to_user_ptr(desc->uaddr),
		.iov_len	= desc->size,
	};
	struct io_mapped_ubuf *imu;
	int ret;

	if (desc->flags &&
	    desc->flags != (IO_REGBUF_PREMAP | IO_REGBUF_TARGET_FIXED))
		return -EINVAL;
	if ((u64)iov.iov_len != desc->size)
		return -EFAULT;
	ret = io_buffer_validate(&iov);
	if (ret)
		return ret;
	if (!iov.iov_base && (tag || desc->flags))
		return -EINVAL;
	ret = io_sqe_buffer_register(ctx, &iov, &imu, last_hpage);
	if (ret)
		return ret;
	if (desc->flags) {
		ret = io_premap_uaddr(ctx, imu, desc);
		if (ret) {
			io_buffer_unmap(ctx, &imu);
			return ret;
		}
	}
	return io_regbuf_install(ctx, i, imu, tag);
}

static int io_regbuf_dmabuf(struct io_ring_ctx *ctx, unsigned int i,
			    const struct io_uring_regbuf_desc *desc, u64 tag)
{
	struct io_mapped_ubuf *imu;

	if (desc->flags & ~IO_REGBUF_TARGET_FIXED)
		return -EINVAL;
	imu = io_premap_dmabuf(ctx, desc);
	if (IS_ERR(imu))
		return PTR_ERR(imu);
	return io_regbuf_install(ctx, i, imu, tag);
}

/* The caller has checked that the slots exist. */
int io_sqe_buffers_update_extended(struct io_ring_ctx *ctx,
				   struct io_uring_rsrc_update2 *up,
				   unsigned int nr_args)
{
	struct io_uring_regbuf_desc __user *descs = u64_to_user_ptr(up->data);
	u64 __user *tags = u64_to_user_ptr(up->tags);
	struct io_uring_regbuf_desc desc;
	struct page *last_hpage = NULL;
	unsigned int done, i;
	int ret = 0;

	for (done = 0; done < nr_args; done++) {
		u64 tag = 0;

		if (copy_from_user(&desc, &descs[done], sizeof(desc)) ||
		    (tags && copy_from_user(&tag, &tags[done], sizeof(tag)))) {
			ret = -EFAULT;
			break;
		}
		i = array_index_nospec(up->offset + done, ctx->nr_user_bufs);
		ret = -EINVAL;
		if (!mem_is_zero(desc.__resv, sizeof(desc.__resv)))
			break;
		switch (desc.type) {
		case IO_REGBUF_TYPE_EMPTY:
			ret = io_regbuf_empty(ctx, i, &desc, tag);
			break;
		case IO_REGBUF_TYPE_UADDR:
			ret = io_regbuf_uaddr(ctx, i, &desc, tag, &last_hpage);
			break;
		case IO_REGBUF_TYPE_DMABUF:
			ret = io_regbuf_dmabuf(ctx, i, &desc, tag);
			break;
		}
		if (ret)
			break;
	}
	return done ? done : ret;
}
