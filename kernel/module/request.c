// SPDX-License-Identifier: GPL-2.0-only
/* What user space can ask for: each request is decoded, carried out and answered here. */
#include <linux/ctype.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/moduleparam.h>
#include <linux/nospec.h>
#include <linux/overflow.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "buffer.h"
#include "dmafile.h"
#include "file.h"
#include "io.h"
#include "request.h"
#include "stats.h"

static_assert(DMAFILE_MODE_DIRECT == DMAFILE_DIRECT);
static_assert(DMAFILE_MODE_BOUNCED == DMAFILE_BOUNCED);
static_assert(DMAFILE_MODE_BUFFERED == DMAFILE_BUFFERED);

static unsigned int gather_mb = 128;
module_param(gather_mb, uint, 0644);
MODULE_PARM_DESC(gather_mb, "MiB allocated before they are read at most, where a call does not say; 1 to 1024. Default is 128.");

static unsigned int depth = 4;
module_param(depth, uint, 0644);
MODULE_PARM_DESC(depth, "Gathers in flight; 1 to 64. Default is 4.");

static unsigned int max_buffer_mb;
module_param(max_buffer_mb, uint, 0644);
MODULE_PARM_DESC(max_buffer_mb, "MiB of the largest buffer; 0: all of memory. Default is 0.");

static unsigned int max_order = DMAFILE_MAX_ORDER;
module_param(max_order, uint, 0644);
MODULE_PARM_DESC(max_order, "Largest pages to try for, of order 8, 4 and 0. Default is 8.");

static bool in_order;
module_param(in_order, bool, 0644);
MODULE_PARM_DESC(in_order, "Allocate all before the first read, to compare. Default is N.");

/* Flags of a transfer in either direction. */
#define TRANSFER_FLAGS	(DMAFILE_SHORT_OK | DMAFILE_INTERRUPTIBLE | DMAFILE_STRICT | \
			 DMAFILE_IN_ORDER)

/* A descriptor that the caller gets when all else has worked. */
struct publication {
	struct dma_buf *dmabuf;
	int fd;
};

/* A transfer, and where its caller looks meanwhile. */
struct call {
	struct dmafile_io io;
	struct dmafile_progress __user *progress;
};

static u64 max_buffer(void)
{
	u64 all = (u64)totalram_pages() << PAGE_SHIFT;
	u64 limit = (u64)READ_ONCE(max_buffer_mb) << 20;

	return limit ? min(limit, all) : all;
}

static unsigned int current_depth(void)
{
	return clamp(READ_ONCE(depth), 1U, DMAFILE_MAX_DEPTH);
}

static int tell(struct dmafile_io *io)
{
	struct dmafile_progress __user *progress = container_of(io, struct call, io)->progress;
	u32 stop;

	if (!progress)
		return 0;
	if (put_user(io->done, &progress->bytes) || get_user(stop, &progress->stop))
		return -EFAULT;
	return stop ? -ECANCELED : 0;
}

static int set_up(struct call *call, u32 flags, u64 gather, u64 progress)
{
	u32 reserved = 0;

	if (gather > DMAFILE_MAX_GATHER || !IS_ALIGNED(progress, sizeof(u64)))
		return -EINVAL;
	call->progress = u64_to_user_ptr(progress);
	if (progress && get_user(reserved, &call->progress->reserved))
		return -EFAULT;
	if (reserved)
		return -EINVAL;
	call->io.gather = gather;
	call->io.depth = current_depth();
	call->io.max_order = READ_ONCE(max_order);
	call->io.in_order = (flags & DMAFILE_IN_ORDER) || READ_ONCE(in_order);
	call->io.strict = flags & DMAFILE_STRICT;
	call->io.interruptible = flags & DMAFILE_INTERRUPTIBLE;
	call->io.dsync = flags & DMAFILE_DSYNC;
	call->io.tell = tell;
	return 0;
}

static void count(const struct dmafile_io *io, int err)
{
	dmafile_stats_add(io->write ? DMAFILE_STAT_BYTES_WRITTEN : DMAFILE_STAT_BYTES_READ,
			  io->done);
	dmafile_stats_add(DMAFILE_STAT_ALLOC_NS, io->alloc_ns);
	dmafile_stats_add(DMAFILE_STAT_SUBMIT_NS, io->submit_ns);
	dmafile_stats_add(DMAFILE_STAT_WAIT_NS, io->wait_ns);
	dmafile_stats_add(DMAFILE_STAT_COPY_NS, io->copy_ns);
	if (err)
		dmafile_stats_add(DMAFILE_STAT_FAILED, 1);
}

/* What fdinfo shows as exp_name: one line of words, and the file's name last. */
static const char *origin_of(const struct dmafile_io *io)
{
	/* Not as long as it is now: a file may be renamed meanwhile. */
	const size_t size = NAME_MAX + 128;
	char *text, *at;

	if (!io)
		return kstrdup("dmafile", DMAFILE_GFP);
	text = kmalloc(size, DMAFILE_GFP);
	if (!text)
		return NULL;
	at = text + scnprintf(text, size, "dmafile bytes=%llu mode", io->done);
	at += scnprintf(at, text + size - at, "%s%s%s",
			io->mode & DMAFILE_DIRECT ? "+direct" : "",
			io->mode & DMAFILE_BOUNCED ? "+bounced" : "",
			io->mode & DMAFILE_BUFFERED ? "+buffered" : "");
	text[strcspn(text, "+")] = '=';
	scnprintf(at, text + size - at, " file=%pD", io->file);
	for (at = text; *at; at++)
		if (iscntrl(*at))
			*at = '?';
	return text;
}

/* The memory becomes a dma-buf for which a descriptor is kept free. */
static int publish_later(struct publication *out, struct dmafile_pages *pages, u32 fd_flags,
			 const struct dmafile_io *io)
{
	const char *origin = origin_of(io);

	if (!origin)
		return -ENOMEM;
	out->dmabuf = dmafile_buffer_export(pages, fd_flags, origin);
	return PTR_ERR_OR_ZERO(out->dmabuf);
}

static int reserve(struct publication *out, u32 fd_flags)
{
	if (fd_flags & ~(O_CLOEXEC | O_ACCMODE) || (fd_flags & O_ACCMODE) == O_WRONLY ||
	    (fd_flags & O_ACCMODE) == O_ACCMODE)
		return -EINVAL;
	out->fd = get_unused_fd_flags(fd_flags & O_CLOEXEC);
	return min(out->fd, 0);
}

static int do_info(void *request, struct publication *out)
{
	struct dmafile_info *info = request;

	*info = (struct dmafile_info) {
		.size = sizeof(*info),
		.version = DMAFILE_VERSION,
		.features = DMAFILE_FEATURE_ALLOC_READ | DMAFILE_FEATURE_READ |
			    DMAFILE_FEATURE_WRITE | DMAFILE_FEATURE_URING_CMD,
		.max_buffer = max_buffer(),
		.gather = dmafile_largest_gather(READ_ONCE(gather_mb)),
		.max_gather = DMAFILE_MAX_GATHER,
		.align = DMAFILE_ALIGN,
		.depth = current_depth(),
	};
	return 0;
}

static int do_alloc(void *request, struct publication *out)
{
	struct dmafile_alloc *alloc = request;
	struct dmafile_pages pages = { };
	u64 begun = ktime_get_ns();
	int err;

	if (alloc->flags || !alloc->length)
		return -EINVAL;
	if (alloc->length > max_buffer())
		return -E2BIG;
	err = reserve(out, alloc->fd_flags);
	if (err)
		return err;
	err = dmafile_pages_grow(&pages, alloc->length, READ_ONCE(max_order));
	if (!err)
		err = publish_later(out, &pages, alloc->fd_flags, NULL);
	dmafile_pages_free(&pages);
	alloc->fd = out->fd;
	alloc->alloc_ns = ktime_get_ns() - begun;
	dmafile_stats_add(DMAFILE_STAT_ALLOC, 1);
	dmafile_stats_add(DMAFILE_STAT_ALLOC_NS, alloc->alloc_ns);
	if (err)
		dmafile_stats_add(DMAFILE_STAT_FAILED, 1);
	return err;
}

/* What of a file shall come to lie where, in a buffer of which size. */
static int alloc_read_range(struct dmafile_alloc_read *read, struct dmafile_io *io)
{
	u64 size, end;
	int err;

	io->pos = read->file_offset;
	io->at = read->buffer_offset;
	io->len = read->length;
	if (!io->len) {
		err = dmafile_file_size(io->file, &size);
		if (err)
			return err;
		if (io->pos >= size)
			return -ENODATA;
		io->len = size - io->pos;
	}
	/* Room for a last block that is read whole. */
	if (check_add_overflow(io->pos, io->len, &end) || end > LLONG_MAX - DMAFILE_ALIGN ||
	    check_add_overflow(io->at, io->len, &end) || end > LLONG_MAX - PAGE_SIZE)
		return -EOVERFLOW;
	if (read->buffer_size && read->buffer_size < end)
		return -EINVAL;
	io->size = max(read->buffer_size, end);
	if (io->size > max_buffer())
		return -E2BIG;
	io->size = PAGE_ALIGN(io->size);
	return 0;
}

static int do_alloc_read(void *request, struct publication *out)
{
	struct dmafile_alloc_read *read = request;
	struct dmafile_pages pages = { };
	struct call call = { .io = { .pages = &pages, .born = true } };
	struct dmafile_io *io = &call.io;
	int err;

	if (read->flags & ~TRANSFER_FLAGS)
		return -EINVAL;
	err = set_up(&call, read->flags, read->gather, read->progress);
	if (err)
		return err;
	io->file = dmafile_file_get(read->file_fd, false);
	if (IS_ERR(io->file))
		return PTR_ERR(io->file);
	err = alloc_read_range(read, io);
	if (!err && !io->gather)
		io->gather = dmafile_gather(io->len, READ_ONCE(gather_mb));
	if (!err)
		err = reserve(out, read->fd_flags);
	if (err)
		goto put_file;
	err = dmafile_transfer(io);
	if (!err && io->done < io->len && (!(read->flags & DMAFILE_SHORT_OK) || !io->done))
		err = -ENODATA;
	if (!err)
		err = publish_later(out, &pages, read->fd_flags, io);
	dmafile_pages_free(&pages);
	read->fd = out->fd;
	read->mode = io->mode;
	read->bytes = io->done;
	read->alloc_ns = io->alloc_ns;
	read->submit_ns = io->submit_ns;
	read->wait_ns = io->wait_ns;
	read->copy_ns = io->copy_ns;
	dmafile_stats_add(DMAFILE_STAT_ALLOC_READ, 1);
	count(io, err);
put_file:
	fput(io->file);
	return err;
}

/* Between the file and a buffer whose memory is there; the caller has both. */
static int rw(struct dmafile_rw *rw, struct dma_buf *dmabuf, struct call *call)
{
	struct dmafile_io *io = &call->io;
	u64 begun = ktime_get_ns();
	u64 end;
	int err;

	io->write = rw->flags & DMAFILE_WRITE;
	io->pos = rw->file_offset;
	io->at = rw->buffer_offset;
	io->len = rw->length;
	if (!io->gather)
		io->gather = dmafile_gather(io->len, READ_ONCE(gather_mb));
	if (check_add_overflow(io->at, io->len, &end) || end > dmabuf->size)
		return -EINVAL;
	if (check_add_overflow(io->pos, io->len, &end) || end > LLONG_MAX - DMAFILE_ALIGN)
		return -EOVERFLOW;
	io->pages = dmafile_buffer_begin(dmabuf, !io->write, io->interruptible);
	if (IS_ERR(io->pages))
		return PTR_ERR(io->pages);
	io->wait_ns = ktime_get_ns() - begun;
	err = dmafile_transfer(io);
	dmafile_buffer_end(dmabuf, !io->write);
	if (!err && io->done < io->len && (!(rw->flags & DMAFILE_SHORT_OK) || !io->done))
		err = -ENODATA;
	rw->mode = io->mode;
	rw->submit_ns = io->submit_ns;
	rw->wait_ns = io->wait_ns;
	rw->copy_ns = io->copy_ns;
	dmafile_stats_add(io->write ? DMAFILE_STAT_WRITE : DMAFILE_STAT_READ, 1);
	count(io, err);
	return err;
}

static int do_rw(void *request, struct publication *out)
{
	struct dmafile_rw *request_rw = request;
	u32 direction = request_rw->flags & (DMAFILE_READ | DMAFILE_WRITE);
	bool write = direction == DMAFILE_WRITE;
	struct call call = { };
	struct dma_buf *dmabuf;
	int err;

	request_rw->mode = 0;
	request_rw->bytes = 0;
	request_rw->submit_ns = 0;
	request_rw->wait_ns = 0;
	request_rw->copy_ns = 0;
	if (request_rw->flags & ~(TRANSFER_FLAGS | DMAFILE_READ | DMAFILE_WRITE | DMAFILE_DSYNC) ||
	    (direction != DMAFILE_READ && direction != DMAFILE_WRITE) ||
	    (request_rw->flags & DMAFILE_DSYNC && !write) || request_rw->reserved ||
	    !request_rw->length)
		return -EINVAL;
	err = set_up(&call, request_rw->flags, request_rw->gather, request_rw->progress);
	if (err)
		return err;
	dmabuf = dma_buf_get(request_rw->fd);
	if (IS_ERR(dmabuf))
		return PTR_ERR(dmabuf);
	call.io.file = dmafile_file_get(request_rw->file_fd, write);
	if (IS_ERR(call.io.file)) {
		err = PTR_ERR(call.io.file);
		goto put_buffer;
	}
	if (!dmafile_buffer_is(dmabuf))
		err = -EXDEV;
	/* Who was given a buffer to look at shall not fill it. */
	else if (!write && !(dmabuf->file->f_mode & FMODE_WRITE))
		err = -EBADF;
	if (!err)
		err = rw(request_rw, dmabuf, &call);
	request_rw->bytes = call.io.done;
	fput(call.io.file);
put_buffer:
	dma_buf_put(dmabuf);
	return err;
}

static const struct {
	size_t size;
	int (*run)(void *request, struct publication *out);
	/* There is something to say after an error, too. */
	bool answers_errors;
} requests[] = {
	[_IOC_NR(DMAFILE_IOC_INFO)] = { sizeof(struct dmafile_info), do_info },
	[_IOC_NR(DMAFILE_IOC_ALLOC)] = { sizeof(struct dmafile_alloc), do_alloc },
	[_IOC_NR(DMAFILE_IOC_ALLOC_READ)] = { sizeof(struct dmafile_alloc_read), do_alloc_read },
	[_IOC_NR(DMAFILE_IOC_RW)] = { sizeof(struct dmafile_rw), do_rw, true },
};

/**
 * dmafile_request - carry out one of DMAFILE_IOC_*
 * @cmd: which
 * @address: its structure, in the caller's memory
 *
 * Return: 0 or an error, as uapi/dmafile.h says for each.
 */
int dmafile_request(unsigned int cmd, void __user *address)
{
	struct publication out = { .fd = -1 };
	unsigned int nr = _IOC_NR(cmd);
	union {
		struct dmafile_info info;
		struct dmafile_alloc alloc;
		struct dmafile_alloc_read alloc_read;
		struct dmafile_rw rw;
	} request;
	u32 size;
	int err;

	if (cmd != _IO(DMAFILE_IOC_MAGIC, nr) || nr >= ARRAY_SIZE(requests))
		return -ENOTTY;
	nr = array_index_nospec(nr, ARRAY_SIZE(requests));
	if (get_user(size, (u32 __user *)address))
		return -EFAULT;
	if (size < requests[nr].size)
		return -EINVAL;
	if (size > PAGE_SIZE)
		return -E2BIG;
	err = copy_struct_from_user(&request, requests[nr].size, address, size);
	if (err)
		return err;
	err = requests[nr].run(&request, &out);
	if (!err || requests[nr].answers_errors) {
		if (copy_to_user(address, &request, requests[nr].size) && !err)
			err = -EFAULT;
	}
	/* Last of all: from here on others of this process can see it. */
	if (!err && out.fd >= 0)
		fd_install(out.fd, out.dmabuf->file);
	else if (out.fd >= 0)
		put_unused_fd(out.fd);
	if (err && !IS_ERR_OR_NULL(out.dmabuf))
		dma_buf_put(out.dmabuf);
	return err;
}
