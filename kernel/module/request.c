// SPDX-License-Identifier: GPL-2.0-only
/* Validates and executes the requests of user space. */
#include <linux/ctype.h>
#include <linux/file.h>
#include <linux/freezer.h>
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/moduleparam.h>
#include <linux/nospec.h>
#include <linux/overflow.h>
#include <linux/pagemap.h>
#include <linux/sched/xacct.h>
#include <linux/slab.h>
#include <linux/stddef.h>
#include <linux/uaccess.h>

#include "buffer.h"
#include "dmafile.h"
#include "file.h"
#include "io.h"
#include "request.h"
#include "signal.h"
#include "stats.h"

static_assert(DMAFILE_MODE_DIRECT == DMAFILE_DIRECT);
static_assert(DMAFILE_MODE_BOUNCED == DMAFILE_BOUNCED);
static_assert(DMAFILE_MODE_BUFFERED == DMAFILE_BUFFERED);

static unsigned int gather_mb = 128;
module_param(gather_mb, uint, 0644);
MODULE_PARM_DESC(gather_mb, "Default maximum MiB per gather, 1 to 1024. Default is 128.");

static unsigned int depth = 4;
module_param(depth, uint, 0644);
MODULE_PARM_DESC(depth, "Maximum number of gathers in flight, 1 to 64. Default is 4.");

static unsigned int max_buffer_mb;
module_param(max_buffer_mb, uint, 0644);
MODULE_PARM_DESC(max_buffer_mb, "Maximum size of a buffer in MiB, 0 for the size of memory. Default is 0.");

static unsigned int max_order = DMAFILE_MAX_ORDER;
module_param(max_order, uint, 0644);
MODULE_PARM_DESC(max_order, "Maximum order of pages to allocate: 8, 4 or 0. Default is 8.");

/* The number of bytes that ALLOC allocates between two points where the task can freeze. */
#define DMAFILE_ALLOC_STEP	SZ_256M

/* Flags of transfers in both directions */
#define DMAFILE_TRANSFER_FLAGS	(DMAFILE_SHORT_OK | DMAFILE_INTERRUPTIBLE | DMAFILE_STRICT | \
				 DMAFILE_IN_ORDER)

/**
 * struct dmafile_publication - a dma-buf to be returned to the caller
 * @dmabuf: the dma-buf, or NULL until it exists
 * @fd: a reserved file descriptor, installed after everything else has succeeded; -1: none
 */
struct dmafile_publication {
	struct dma_buf *dmabuf;
	int fd;
};

/**
 * struct dmafile_call - a transfer on behalf of a program
 * @io: what to transfer
 * @result: what was transferred
 * @progress: the structure through which the program monitors it, or NULL
 * @interruptible: any signal ends it, not only a fatal one
 */
struct dmafile_call {
	struct dmafile_io io;
	struct dmafile_io_result result;
	struct dmafile_progress __user *progress;
	bool interruptible;
};

static u64 dmafile_max_buffer(void)
{
	u64 all = (u64)totalram_pages() << PAGE_SHIFT;
	u64 limit = (u64)READ_ONCE(max_buffer_mb) << 20;

	/* The size of a dma-buf is a size_t, which on 32 bit may be less than all memory. */
	all = min_t(u64, all, SIZE_MAX & PAGE_MASK);
	return limit ? min(limit, all) : all;
}

static unsigned int dmafile_depth(void)
{
	return clamp(READ_ONCE(depth), 1U, DMAFILE_MAX_DEPTH);
}

static int dmafile_step(const struct dmafile_io *io, const struct dmafile_io_result *result)
{
	const struct dmafile_call *call = container_of(io, struct dmafile_call, io);
	u32 stop;

	if (dmafile_interrupted(call->interruptible))
		return -EINTR;
	if (!call->progress)
		return 0;
	if (put_user(result->done, &call->progress->bytes) ||
	    get_user(stop, &call->progress->stop))
		return -EFAULT;
	return stop ? -ECANCELED : 0;
}

static const struct dmafile_io_ops dmafile_call_ops = {
	.step = dmafile_step,
};

static int dmafile_set_up(struct dmafile_call *call, u32 flags, u64 gather, u64 progress)
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
	call->io.depth = dmafile_depth();
	call->io.max_order = READ_ONCE(max_order);
	call->io.gfp = __GFP_ACCOUNT;
	call->io.in_order = flags & DMAFILE_IN_ORDER;
	call->io.strict = flags & DMAFILE_STRICT;
	call->io.dsync = flags & DMAFILE_DSYNC;
	/* A running request holds no locks: a turn on a buffer is not a lock. */
	call->io.freezable = true;
	call->io.ops = &dmafile_call_ops;
	call->interruptible = flags & DMAFILE_INTERRUPTIBLE;
	return 0;
}

/* Updates the counters in debugfs, and those in /proc/PID/io like read() and write(). */
static void dmafile_count(const struct dmafile_call *call, int err)
{
	const struct dmafile_io_result *result = &call->result;

	if (call->io.write) {
		dmafile_stats_add(DMAFILE_STAT_BYTES_WRITTEN, result->done);
		add_wchar(current, result->done);
		inc_syscw(current);
	} else {
		dmafile_stats_add(DMAFILE_STAT_BYTES_READ, result->done);
		add_rchar(current, result->done);
		inc_syscr(current);
	}
	dmafile_stats_add(DMAFILE_STAT_ALLOC_NS, result->alloc_ns);
	dmafile_stats_add(DMAFILE_STAT_SUBMIT_NS, result->submit_ns);
	dmafile_stats_add(DMAFILE_STAT_WAIT_NS, result->wait_ns);
	dmafile_stats_add(DMAFILE_STAT_COPY_NS, result->copy_ns);
	if (err)
		dmafile_stats_add(DMAFILE_STAT_FAILED, 1);
}

/* Describes for debugfs how a buffer was created: one line, with the file name at the end. */
static const char *dmafile_origin(const struct dmafile_call *call)
{
	static const char * const modes[] = {
		"none", "direct", "bounced", "direct+bounced", "buffered", "direct+buffered",
		"bounced+buffered", "direct+bounced+buffered",
	};
	/* Room for any name, because the file may be renamed. */
	const size_t size = NAME_MAX + 128;
	char *text, *at;

	if (!call)
		return kstrdup("alloc", DMAFILE_GFP);
	text = kmalloc(size, DMAFILE_GFP);
	if (!text)
		return NULL;
	scnprintf(text, size, "alloc_read bytes=%llu mode=%s file=%pD", call->result.done,
		  modes[call->result.mode & (ARRAY_SIZE(modes) - 1)], call->io.file);
	for (at = text; *at; at++)
		if (iscntrl(*at))
			*at = '?';
	return text;
}

static int dmafile_reserve(struct dmafile_publication *out, u32 fd_flags)
{
	if (fd_flags & ~(O_CLOEXEC | O_ACCMODE) || (fd_flags & O_ACCMODE) == O_WRONLY ||
	    (fd_flags & O_ACCMODE) == O_ACCMODE)
		return -EINVAL;
	out->fd = get_unused_fd_flags(fd_flags & O_CLOEXEC);
	return min(out->fd, 0);
}

/* Creates the dma-buf. dmafile_publish() installs its file descriptor. */
static int dmafile_publish_later(struct dmafile_publication *out, struct dmafile_pages *pages,
				 u32 fd_flags, const struct dmafile_call *call)
{
	const char *origin = dmafile_origin(call);

	if (!origin)
		return -ENOMEM;
	out->dmabuf = dmafile_buffer_export(pages, fd_flags, origin);
	return PTR_ERR_OR_ZERO(out->dmabuf);
}

/* Installs the file descriptor, after which other threads can use it; on error frees it. */
static void dmafile_publish(struct dmafile_publication *out, int err)
{
	if (!err && out->fd >= 0)
		fd_install(out->fd, out->dmabuf->file);
	else if (out->fd >= 0)
		put_unused_fd(out->fd);
	if (err && !IS_ERR_OR_NULL(out->dmabuf))
		dma_buf_put(out->dmabuf);
}

static int dmafile_do_info(void *request, struct dmafile_publication *out)
{
	struct dmafile_info *info = request;

	*info = (struct dmafile_info) {
		.size = sizeof(*info),
		.align = DMAFILE_ALIGN,
		.features = DMAFILE_FEATURE_ALLOC_READ | DMAFILE_FEATURE_READ |
			    DMAFILE_FEATURE_WRITE | DMAFILE_FEATURE_URING_CMD,
		.max_buffer = dmafile_max_buffer(),
		.gather = dmafile_largest_gather(READ_ONCE(gather_mb)),
		.max_gather = DMAFILE_MAX_GATHER,
		.depth = dmafile_depth(),
	};
	return 0;
}

static int dmafile_allocate_all(struct dmafile_pages *pages, u64 length)
{
	unsigned int order = READ_ONCE(max_order);
	int err = 0;

	while (!err && dmafile_pages_bytes(pages) < length) {
		try_to_freeze();
		err = dmafile_pages_grow(pages, min(length, dmafile_pages_bytes(pages) +
						    DMAFILE_ALLOC_STEP), order, __GFP_ACCOUNT);
	}
	return err;
}

static int dmafile_do_alloc(void *request, struct dmafile_publication *out)
{
	struct dmafile_alloc *alloc = request;
	struct dmafile_pages pages = { };
	u64 begun = ktime_get_ns();
	int err;

	if (alloc->flags || !alloc->length)
		return -EINVAL;
	if (alloc->length > dmafile_max_buffer())
		return -EFBIG;
	err = dmafile_reserve(out, alloc->fd_flags);
	if (err)
		return err;
	err = dmafile_allocate_all(&pages, alloc->length);
	if (!err)
		err = dmafile_publish_later(out, &pages, alloc->fd_flags, NULL);
	dmafile_pages_free(&pages);
	alloc->fd = out->fd;
	alloc->alloc_ns = ktime_get_ns() - begun;
	dmafile_stats_add(DMAFILE_STAT_ALLOC, 1);
	dmafile_stats_add(DMAFILE_STAT_ALLOC_NS, alloc->alloc_ns);
	if (err)
		dmafile_stats_add(DMAFILE_STAT_FAILED, 1);
	return err;
}

/* Validates the range of the file and computes the layout of the buffer. */
static int dmafile_layout(const struct dmafile_alloc_read *read, struct dmafile_io *io)
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
	/* The last block may be read as a whole, so its end must be a valid offset as well. */
	if (check_add_overflow(io->pos, io->len, &end) || end > LLONG_MAX - DMAFILE_MAX_ALIGN ||
	    check_add_overflow(io->at, io->len, &end) || end > LLONG_MAX - DMAFILE_MAX_ALIGN)
		return -EOVERFLOW;
	if (read->buffer_size && read->buffer_size < end)
		return -EINVAL;
	/* Make room for all of that block if direct I/O can read it in place. */
	if (!read->buffer_size && io->iocb_flags & IOCB_DIRECT &&
	    IS_ALIGNED(io->at ^ io->pos, io->align))
		end = round_up(end, io->align);
	io->size = max(read->buffer_size, end);
	if (io->size > dmafile_max_buffer())
		return -EFBIG;
	io->size = PAGE_ALIGN(io->size);
	return 0;
}

static int dmafile_do_alloc_read(void *request, struct dmafile_publication *out)
{
	struct dmafile_alloc_read *read = request;
	struct dmafile_pages pages = { };
	struct dmafile_call call = { .io = { .pages = &pages, .born = true } };
	struct dmafile_io_result *result = &call.result;
	struct dmafile_io *io = &call.io;
	int err;

	if (read->flags & ~DMAFILE_TRANSFER_FLAGS || read->reserved)
		return -EINVAL;
	err = dmafile_set_up(&call, read->flags, read->gather, read->progress);
	if (err)
		return err;
	io->file = dmafile_file_get(read->file_fd, false);
	if (IS_ERR(io->file))
		return PTR_ERR(io->file);
	dmafile_io_prepare(io);
	err = dmafile_layout(read, io);
	if (!err && !io->gather)
		io->gather = dmafile_gather(io->len, READ_ONCE(gather_mb));
	if (!err)
		err = dmafile_reserve(out, read->fd_flags);
	if (err)
		goto put_file;
	err = dmafile_transfer(io, result);
	if (!err && result->done < io->len && (!(read->flags & DMAFILE_SHORT_OK) || !result->done))
		err = -ENODATA;
	if (!err)
		err = dmafile_publish_later(out, &pages, read->fd_flags, &call);
	dmafile_pages_free(&pages);
	read->fd = out->fd;
	read->mode = result->mode;
	read->bytes = result->done;
	read->alloc_ns = result->alloc_ns;
	read->submit_ns = result->submit_ns;
	read->wait_ns = result->wait_ns;
	read->copy_ns = result->copy_ns;
	read->align = io->align;
	dmafile_stats_add(DMAFILE_STAT_ALLOC_READ, 1);
	dmafile_count(&call, err);
put_file:
	fput(io->file);
	return err;
}

/* Transfers data between a file and a buffer. The caller holds references to both. */
static int dmafile_rw(struct dmafile_rw *rw, struct dma_buf *dmabuf, struct dmafile_call *call)
{
	struct dmafile_io_result *result = &call->result;
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
	if (check_add_overflow(io->pos, io->len, &end) || end > LLONG_MAX - DMAFILE_MAX_ALIGN)
		return -EOVERFLOW;
	dmafile_io_prepare(io);
	io->pages = dmafile_buffer_begin(dmabuf, !io->write, call->interruptible);
	if (IS_ERR(io->pages))
		return PTR_ERR(io->pages);
	result->wait_ns = ktime_get_ns() - begun;
	err = dmafile_transfer(io, result);
	dmafile_buffer_end(dmabuf, !io->write);
	if (!err && result->done < io->len && (!(rw->flags & DMAFILE_SHORT_OK) || !result->done))
		err = -ENODATA;
	rw->mode = result->mode;
	rw->align = io->align;
	rw->submit_ns = result->submit_ns;
	rw->wait_ns = result->wait_ns;
	rw->copy_ns = result->copy_ns;
	dmafile_stats_add(io->write ? DMAFILE_STAT_WRITE : DMAFILE_STAT_READ, 1);
	dmafile_count(call, err);
	return err;
}

static int dmafile_do_rw(void *request, struct dmafile_publication *out)
{
	struct dmafile_rw *rw = request;
	u32 direction = rw->flags & (DMAFILE_READ | DMAFILE_WRITE);
	bool write = direction == DMAFILE_WRITE;
	struct dmafile_call call = { };
	struct dma_buf *dmabuf;
	int err;

	if (rw->flags & ~(DMAFILE_TRANSFER_FLAGS | DMAFILE_READ | DMAFILE_WRITE | DMAFILE_DSYNC) ||
	    (direction != DMAFILE_READ && direction != DMAFILE_WRITE) ||
	    (rw->flags & DMAFILE_DSYNC && !write) || !rw->length)
		return -EINVAL;
	err = dmafile_set_up(&call, rw->flags, rw->gather, rw->progress);
	if (err)
		return err;
	dmabuf = dma_buf_get(rw->fd);
	if (IS_ERR(dmabuf))
		return PTR_ERR(dmabuf);
	call.io.file = dmafile_file_get(rw->file_fd, write);
	if (IS_ERR(call.io.file)) {
		err = PTR_ERR(call.io.file);
		goto put_buffer;
	}
	if (!dmafile_buffer_is(dmabuf))
		err = -EXDEV;
	/* A read-only descriptor of a dma-buf must not be used to fill it. */
	else if (!write && !(dmabuf->file->f_mode & FMODE_WRITE))
		err = -EBADF;
	if (!err)
		err = dmafile_rw(rw, dmabuf, &call);
	rw->bytes = call.result.done;
	fput(call.io.file);
put_buffer:
	dma_buf_put(dmabuf);
	return err;
}

/**
 * struct dmafile_kind - a type of request
 * @min_size: the size of the first version of its structure
 * @size: the size of the current version
 * @out: the offset of the first "out" field
 * @out_end: the offset after the last "out" field
 * @run: executes the request; gets the structure with zeroed "out" fields
 * @answers_errors: copy the "out" fields to user space even on error
 */
struct dmafile_kind {
	size_t min_size;
	size_t size;
	size_t out;
	size_t out_end;
	int (*run)(void *request, struct dmafile_publication *out);
	bool answers_errors;
};

static const struct dmafile_kind dmafile_kinds[] = {
	[_IOC_NR(DMAFILE_IOC_INFO)] = {
		.min_size = offsetofend(struct dmafile_info, features),
		.size = sizeof(struct dmafile_info),
		.out_end = sizeof(struct dmafile_info),
		.run = dmafile_do_info,
	},
	[_IOC_NR(DMAFILE_IOC_ALLOC)] = {
		.min_size = offsetofend(struct dmafile_alloc, alloc_ns),
		.size = sizeof(struct dmafile_alloc),
		.out = offsetof(struct dmafile_alloc, fd),
		.out_end = offsetofend(struct dmafile_alloc, alloc_ns),
		.run = dmafile_do_alloc,
	},
	[_IOC_NR(DMAFILE_IOC_ALLOC_READ)] = {
		.min_size = offsetofend(struct dmafile_alloc_read, reserved),
		.size = sizeof(struct dmafile_alloc_read),
		.out = offsetof(struct dmafile_alloc_read, fd),
		.out_end = offsetofend(struct dmafile_alloc_read, align),
		.run = dmafile_do_alloc_read,
	},
	[_IOC_NR(DMAFILE_IOC_RW)] = {
		.min_size = offsetofend(struct dmafile_rw, copy_ns),
		.size = sizeof(struct dmafile_rw),
		.out = offsetof(struct dmafile_rw, mode),
		.out_end = offsetofend(struct dmafile_rw, copy_ns),
		.run = dmafile_do_rw,
		.answers_errors = true,
	},
};

/**
 * dmafile_request - execute a request
 * @cmd: DMAFILE_IOC_* with any structure size
 * @address: the address of the structure in user space
 *
 * Return: 0 or an error, see uapi/dmafile.h for each request.
 */
int dmafile_request(unsigned int cmd, void __user *address)
{
	struct dmafile_publication out = { .fd = -1 };
	unsigned int nr = _IOC_NR(cmd);
	const struct dmafile_kind *kind;
	union {
		u8 bytes[sizeof(struct dmafile_alloc_read)];
		struct dmafile_info info;
		struct dmafile_alloc alloc;
		struct dmafile_alloc_read alloc_read;
		struct dmafile_rw rw;
	} request;
	size_t out_len;
	u32 size;
	int err;

	if (_IOC_TYPE(cmd) != DMAFILE_IOC_MAGIC || _IOC_DIR(cmd) != (_IOC_READ | _IOC_WRITE) ||
	    nr >= ARRAY_SIZE(dmafile_kinds))
		return -ENOTTY;
	kind = &dmafile_kinds[array_index_nospec(nr, ARRAY_SIZE(dmafile_kinds))];
	if (_IOC_SIZE(cmd) < kind->min_size)
		return -EINVAL;
	if (get_user(size, (u32 __user *)address))
		return -EFAULT;
	if (size != _IOC_SIZE(cmd))
		return -EINVAL;
	err = copy_struct_from_user(&request, kind->size, address, size);
	if (err)
		return err;
	/* Before doing anything, check that the result can be written. */
	out_len = min_t(size_t, size, kind->out_end) - kind->out;
	if (fault_in_safe_writeable(address + kind->out, out_len))
		return -EFAULT;
	memset(request.bytes + kind->out, 0, kind->out_end - kind->out);
	err = kind->run(&request, &out);
	if ((!err || kind->answers_errors) &&
	    copy_to_user(address + kind->out, request.bytes + kind->out, out_len) && !err)
		err = -EFAULT;
	dmafile_publish(&out, err);
	return err;
}
