// SPDX-License-Identifier: GPL-2.0-only
/*
 * Transfers between a file and the pages of a buffer.
 *
 * A transfer is divided into gathers. While one gather is being read, the next one is allocated. So
 * the total time is close to the allocation time of the first gather plus the longer of the
 * remaining allocation and the I/O. Each gather is one kiocb with a bvec of the buffer's pages:
 * nothing is mapped, pinned or copied. The block layer splits it into requests that the disk
 * accepts, all of which are in flight at the same time.
 *
 * Only the calling task submits I/O, waits for it, and frees memory. A completion, which may run in
 * hard interrupt context, only records the result and wakes that task. A task that is killed still
 * waits for the I/O in flight, because pages cannot be freed during DMA.
 */
#include <linux/completion.h>
#include <linux/fadvise.h>
#include <linux/freezer.h>
#include <linux/fsnotify.h>
#include <linux/ktime.h>
#include <linux/pagemap.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/uio.h>

#include "compat.h"
#include "file.h"
#include "io.h"

/* The size of the first and last gathers: small, so that reading starts and ends early. */
#define DMAFILE_FIRST_GATHER	SZ_2M
/* The number of bytes allocated between two checks for signals. */
#define DMAFILE_STEP		SZ_32M
/* Shorter than any hung-task timeout, which is at least one second. */
#define DMAFILE_PATIENCE	(HZ / 2)
/* The maximum size of the bounce buffer for data that cannot be transferred in place. */
#define DMAFILE_BOUNCE		SZ_1M
/* The number of bytes per call of vfs_fadvise() */
#define DMAFILE_READ_AHEAD	SZ_1M
/*
 * The minimum number of gathers in a transfer, unless the caller chooses another one. More gathers
 * are better, because nothing overlaps with the allocation of the first one or the last read.
 */
#define DMAFILE_GATHERS		16

/**
 * struct dmafile_piece - one I/O in flight
 * @iocb: the kiocb
 * @over: completed when the I/O is complete
 * @result: the result of the I/O, valid after @over
 * @bvec: the pages, freed after @over
 * @at: the offset of the first byte in the buffer
 * @len: the number of requested bytes
 * @direct: it is direct I/O
 * @queued: the submission returned -EIOCBQUEUED
 */
struct dmafile_piece {
	struct kiocb iocb;
	struct completion over;
	ssize_t result;
	struct bio_vec *bvec;
	u64 at;
	u64 len;
	bool direct;
	bool queued;
};

/**
 * struct dmafile_state - the state of a transfer
 * @io: the request
 * @result: what has been transferred so far
 * @no_direct: the file does not support direct I/O
 */
struct dmafile_state {
	const struct dmafile_io *io;
	struct dmafile_io_result *result;
	bool no_direct;
};

/* May run in hard interrupt context. */
static void dmafile_piece_complete(struct kiocb *iocb, long result)
{
	struct dmafile_piece *piece = container_of(iocb, struct dmafile_piece, iocb);

	if (iocb->ki_flags & IOCB_WRITE)
		kiocb_end_write(iocb);
	piece->result = result;
	complete(&piece->over);
}

/*
 * Submits one I/O between the file at @pos and @pages at @at. It is shorter than @len if that would
 * need too many segments, see dmafile_pages_bvec().
 */
static int dmafile_piece_start(struct dmafile_state *state, struct dmafile_piece *piece,
			       const struct dmafile_pages *pages, u64 at, u64 pos, u64 len,
			       bool direct)
{
	const struct dmafile_io *io = state->io;
	u64 begun = ktime_get_ns(), wanted = len;
	struct iov_iter iter;
	unsigned int nr;
	ssize_t result;

	piece->bvec = dmafile_pages_bvec(pages, at, &len, &nr);
	if (!piece->bvec)
		return -ENOMEM;
	if (direct && len < wanted)
		len = round_down(len, io->align);
	piece->at = at;
	piece->len = len;
	piece->direct = direct;
	init_completion(&piece->over);
	iov_iter_bvec(&iter, io->write ? ITER_SOURCE : ITER_DEST, piece->bvec, nr, len);
	init_sync_kiocb(&piece->iocb, io->file);
	piece->iocb.ki_pos = pos;
	/* Set it even for synchronous I/O: overlayfs in Linux 6.1 needs it to use ki_flags. */
	piece->iocb.ki_complete = dmafile_piece_complete;
	/* The open flags may have changed. O_APPEND would write the piece at the end of file. */
	piece->iocb.ki_flags = io->iocb_flags & ~(IOCB_APPEND | IOCB_DIRECT);
	if (direct)
		piece->iocb.ki_flags |= IOCB_DIRECT;
	if (io->write) {
		piece->iocb.ki_flags |= IOCB_WRITE;
		if (io->dsync)
			piece->iocb.ki_flags |= IOCB_DSYNC;
		result = dmafile_iter_write(io->file, &piece->iocb, &iter);
	} else {
		result = vfs_iocb_iter_read(io->file, &piece->iocb, &iter);
	}
	piece->queued = result == -EIOCBQUEUED;
	if (!piece->queued) {
		piece->result = result;
		complete(&piece->over);
	}
	state->result->submit_ns += ktime_get_ns() - begun;
	return 0;
}

/* Waits for one I/O. Return: the number of bytes, or an error. */
static ssize_t dmafile_piece_wait(struct dmafile_state *state, struct dmafile_piece *piece)
{
	const struct dmafile_io *io = state->io;
	u64 begun = ktime_get_ns();

	/* Wait in short intervals, so that a slow disk does not trigger the hung-task detector. */
	while (!wait_for_completion_io_timeout(&piece->over, DMAFILE_PATIENCE))
		;
	state->result->wait_ns += ktime_get_ns() - begun;
	kvfree(piece->bvec);
	piece->bvec = NULL;
	/* The VFS has already called fsnotify for I/O that was not queued. */
	if (piece->queued && piece->result > 0) {
		if (io->write)
			fsnotify_modify(io->file);
		else
			fsnotify_access(io->file);
	}
	switch (piece->result) {
	case -ERESTARTSYS:
	case -ERESTARTNOINTR:
	case -ERESTARTNOHAND:
	case -ERESTART_RESTARTBLOCK:
		/* The transfer may have made progress, so it cannot be restarted. */
		return -EINTR;
	default:
		return piece->result;
	}
}

/* Whether the result means that the file does not support direct I/O. */
static bool dmafile_refused(struct dmafile_state *state, bool direct, ssize_t result)
{
	if (!direct || state->io->strict || (result != -EINVAL && result != -EOPNOTSUPP))
		return false;
	state->no_direct = true;
	return true;
}

/*
 * Transfers data between the file and @pages, one I/O at a time. If direct I/O cannot do all of it,
 * the rest goes through the page cache. @moved is set to the number of bytes, also on error. On
 * success it is less than @len only at the end of the file.
 */
static int dmafile_move_now(struct dmafile_state *state, const struct dmafile_pages *pages, u64 at,
			    u64 pos, u64 len, bool direct, u64 *moved)
{
	const struct dmafile_io *io = state->io;
	u64 done = 0;

	while (done < len) {
		struct dmafile_piece piece;
		ssize_t result;
		int err;

		direct = direct && !state->no_direct && IS_ALIGNED(done, io->align);
		err = dmafile_piece_start(state, &piece, pages, at + done, pos + done, len - done,
					  direct);
		if (err)
			return err;
		result = dmafile_piece_wait(state, &piece);
		if (dmafile_refused(state, direct, result))
			continue;
		if (result <= 0)
			return result;
		if (pages == io->pages)
			state->result->mode |= direct ? DMAFILE_DIRECT : DMAFILE_BUFFERED;
		else
			state->result->mode |= direct ? DMAFILE_BOUNCED : DMAFILE_BUFFERED;
		done += result;
		*moved = done;
		/*
		 * On most file systems a direct read that ends inside a block has reached the end
		 * of the file. Unless @strict forbids it, the next iteration checks this with a
		 * buffered read.
		 */
		if (io->strict && direct && !IS_ALIGNED(done, io->align))
			break;
	}
	return 0;
}

/* Return: an error if the transfer should end early. */
static int dmafile_may_go_on(const struct dmafile_state *state)
{
	const struct dmafile_io *io = state->io;

	if (fatal_signal_pending(current))
		return -EINTR;
	return io->ops && io->ops->step ? io->ops->step(io, state->result) : 0;
}

static int dmafile_grow(const struct dmafile_io *io, u64 bytes)
{
	if (!io->ops || !io->ops->grow)
		return dmafile_pages_grow(io->pages, bytes, io->max_order, io->gfp);
	while (dmafile_pages_bytes(io->pages) < bytes) {
		u64 left = bytes - dmafile_pages_bytes(io->pages);
		int err = io->ops->grow(io, DIV_ROUND_UP_ULL(left, PAGE_SIZE));

		if (!err && fatal_signal_pending(current))
			err = -EINTR;
		if (err)
			return err;
		cond_resched();
	}
	return 0;
}

/* Allocates the buffer's memory up to @end. @idle: no I/O is in flight. */
static int dmafile_allocate(struct dmafile_state *state, u64 end, bool idle)
{
	const struct dmafile_io *io = state->io;
	u64 begun = ktime_get_ns();
	int err = 0;

	while (!err && dmafile_pages_bytes(io->pages) < min(end, io->size)) {
		if (idle && io->freezable)
			try_to_freeze();
		err = dmafile_may_go_on(state);
		if (!err)
			err = dmafile_grow(io, min(end, dmafile_pages_bytes(io->pages) +
							DMAFILE_STEP));
	}
	state->result->alloc_ns += ktime_get_ns() - begun;
	return err;
}

/*
 * Allocates @len bytes from @at on. If @grow provides only part of that memory, @len is reduced to
 * that part, and @full is set to the error.
 */
static int dmafile_allocate_some(struct dmafile_state *state, u64 at, u64 *len, bool direct,
				 int *full)
{
	const struct dmafile_io *io = state->io;
	int err = dmafile_allocate(state, at + *len, false);
	u64 have = dmafile_pages_bytes(io->pages);

	if (direct)
		have = round_down(have, io->align);
	if (!err || !io->ops || !io->ops->grow || err == -EINTR || have <= at)
		return err;
	*len = have - at;
	*full = err;
	return 0;
}

/*
 * The size of the next gather. Sizes start small and double. Towards the end each gather is a
 * quarter of the rest. Then its allocation takes no longer than reading the previous one, even if
 * reading is a third faster than allocating, and only the last, small read does not overlap.
 */
static u64 dmafile_next_gather(const struct dmafile_io *io, u64 done, u64 left)
{
	u64 ramp = max_t(u64, done, DMAFILE_FIRST_GATHER);
	u64 fade = max_t(u64, left / 4, DMAFILE_FIRST_GATHER);

	return min(left, round_up(min3(io->gather, ramp, fade), max_t(u64, io->align, PAGE_SIZE)));
}

/*
 * Starts reading into the page cache up to @end, while memory is being allocated. Not if the page
 * cache supports large folios: fadvise() would read single pages, which cost more than the overlap
 * gains, whereas the readahead of a read allocates large folios.
 */
static void dmafile_read_ahead(const struct dmafile_io *io, u64 *ahead, u64 end)
{
	if (io->write || io->in_order || mapping_large_folio_support(io->file->f_mapping))
		return;
	while (*ahead < end) {
		/* Ignore errors: the read itself will return them. */
		vfs_fadvise(io->file, io->pos + (*ahead - io->at), DMAFILE_READ_AHEAD,
			    POSIX_FADV_WILLNEED);
		*ahead += DMAFILE_READ_AHEAD;
	}
}

/* Continues a piece that was short: at the end of the file, or for another reason. */
static int dmafile_move_rest(struct dmafile_state *state, struct dmafile_piece *piece, u64 done,
			     u64 need, u64 *moved)
{
	const struct dmafile_io *io = state->io;
	u64 at = piece->at + done, pos = io->pos + at - io->at;
	int err;

	if (!io->strict)
		/* Let buffered I/O find out whether this is the end of the file. */
		return dmafile_move_now(state, io->pages, at, pos, need - done, false, moved);
	/* A direct read that ends inside a block has reached the end of the file. */
	if (!IS_ALIGNED(done, io->align))
		return 0;
	err = dmafile_move_now(state, io->pages, at, pos, piece->len - done, true, moved);
	*moved = min(*moved, need - done);
	return err;
}

/* Does not count the part of the first block before the requested bytes. */
static void dmafile_set_done(struct dmafile_state *state, u64 end)
{
	if (end > state->io->at)
		state->result->done = end - state->io->at;
}

/*
 * Waits for a piece, and transfers the rest of it if it was short. Return: 0, an error, or 1 at the
 * end of the file.
 */
static int dmafile_piece_finish(struct dmafile_state *state, struct dmafile_piece *piece)
{
	const struct dmafile_io *io = state->io;
	u64 wanted_end = io->at + io->len;
	u64 need = min(piece->len, wanted_end - piece->at);
	ssize_t result = dmafile_piece_wait(state, piece);
	u64 done, more = 0;
	int err = 0;

	if (dmafile_refused(state, piece->direct, result))
		result = 0;
	if (result < 0)
		return result;
	if (result)
		state->result->mode |= piece->direct ? DMAFILE_DIRECT : DMAFILE_BUFFERED;
	done = min_t(u64, result, need);
	if (done < need)
		err = dmafile_move_rest(state, piece, done, need, &more);
	done += more;
	dmafile_set_done(state, piece->at + done);
	if (err || done == need)
		return err;
	return io->write ? -EIO : 1;
}

/**
 * struct dmafile_ring - the I/O in flight
 * @pieces: array of &struct dmafile_io.depth elements
 * @first: index of the oldest piece in flight
 * @nr: the number of pieces in flight
 * @err: the error at the lowest offset, or 1 at the end of the file
 */
struct dmafile_ring {
	struct dmafile_piece *pieces;
	unsigned int first;
	unsigned int nr;
	int err;
};

static void dmafile_ring_finish(struct dmafile_state *state, struct dmafile_ring *ring)
{
	const struct dmafile_io *io = state->io;
	struct dmafile_piece *piece = &ring->pieces[ring->first];

	if (ring->err)
		/* Data after an error, or after the end of the file, is discarded. */
		dmafile_piece_wait(state, piece);
	else
		ring->err = dmafile_piece_finish(state, piece);
	/* If everything has been transferred, a signal is no longer an error. */
	if (!ring->err && state->result->done < io->len)
		ring->err = dmafile_may_go_on(state);
	ring->first = (ring->first + 1) % io->depth;
	ring->nr--;
}

static void dmafile_ring_drain(struct dmafile_state *state, struct dmafile_ring *ring)
{
	while (ring->nr)
		dmafile_ring_finish(state, ring);
}

/*
 * Transfers a range of the buffer, one gather after another. For direct I/O @from and @to are
 * aligned, and may be outside the requested range. Return: 0, an error, or 1 at the end of the
 * file.
 */
static int dmafile_move_range(struct dmafile_state *state, u64 from, u64 to, bool direct)
{
	const struct dmafile_io *io = state->io;
	struct dmafile_ring ring = { };
	u64 at = from, ahead = from;
	int err, full = 0;

	if (from >= to)
		return 0;
	ring.pieces = kcalloc(io->depth, sizeof(*ring.pieces), DMAFILE_GFP);
	if (!ring.pieces)
		return -ENOMEM;
	err = dmafile_may_go_on(state);
	while (at < to && !err && !ring.err) {
		u64 len = dmafile_next_gather(io, at - from, to - at);
		bool directly = direct && !state->no_direct;
		struct dmafile_piece *piece;

		if (io->freezable && freezing(current)) {
			dmafile_ring_drain(state, &ring);
			try_to_freeze();
			continue;
		}
		if (!directly) {
			/* Skip what was transferred before the file refused direct I/O. */
			ahead = max(ahead, at);
			dmafile_read_ahead(io, &ahead, at + len);
		}
		/* Allocate before waiting for a free slot: this overlaps with the I/O. */
		err = dmafile_allocate_some(state, at, &len, directly, &full);
		if (err)
			break;
		if (full)
			to = at + len;
		if (!directly && at + len < to)
			dmafile_read_ahead(io, &ahead, at + len +
					   dmafile_next_gather(io, at + len - from,
							       to - at - len));
		if (ring.nr == io->depth) {
			dmafile_ring_finish(state, &ring);
			if (ring.err)
				break;
		}
		piece = &ring.pieces[(ring.first + ring.nr) % io->depth];
		err = dmafile_piece_start(state, piece, io->pages, at, io->pos + at - io->at, len,
					  directly);
		if (err)
			break;
		ring.nr++;
		at += piece->len;
		/* Buffered I/O is complete when the call returns. */
		if (!directly)
			dmafile_ring_finish(state, &ring);
		cond_resched();
	}
	dmafile_ring_drain(state, &ring);
	kfree(ring.pieces);
	/* I/O errors are at lower offsets than the error that ended the loop. */
	return ring.err ?: err ?: full;
}

/* Reads through a bounce buffer. @moved: see dmafile_move_now() */
static int dmafile_bounce_read(struct dmafile_state *state, const struct dmafile_pages *bounce,
			       u64 at, u64 pos, u64 len, u64 *moved)
{
	const struct dmafile_io *io = state->io;
	u64 skip = pos & (io->align - 1), begun, got = 0;
	int err = dmafile_move_now(state, bounce, 0, pos - skip, round_up(skip + len, io->align),
				   true, &got);

	if (got <= skip)
		return err;
	*moved = min(got - skip, len);
	begun = ktime_get_ns();
	dmafile_pages_copy(io->pages, at, bounce, skip, *moved);
	state->result->copy_ns += ktime_get_ns() - begun;
	/* Ignore an error beyond the requested bytes. */
	return *moved < len ? err : 0;
}

/*
 * The same for writes. Partial blocks go through the page cache, which merges them with the rest of
 * the block.
 */
static int dmafile_bounce_write(struct dmafile_state *state, const struct dmafile_pages *bounce,
				u64 at, u64 pos, u64 *len, u64 *moved)
{
	const struct dmafile_io *io = state->io;
	u64 skip = pos & (io->align - 1), begun;

	if (skip || *len < io->align) {
		*len = min_t(u64, *len, io->align - skip);
		return dmafile_move_now(state, io->pages, at, pos, *len, false, moved);
	}
	*len = round_down(*len, io->align);
	begun = ktime_get_ns();
	dmafile_pages_copy(bounce, 0, io->pages, at, *len);
	state->result->copy_ns += ktime_get_ns() - begun;
	return dmafile_move_now(state, bounce, 0, pos, *len, true, moved);
}

/*
 * Transfers a range through a bounce buffer. Return: 0, an error, or 1 at the end of the file.
 */
static int dmafile_move_bounced(struct dmafile_state *state, u64 from, u64 to)
{
	const struct dmafile_io *io = state->io;
	struct dmafile_pages bounce = { };
	u64 at = from;
	int err, full = 0;

	if (from >= to)
		return 0;
	err = dmafile_pages_grow(&bounce, min_t(u64, DMAFILE_BOUNCE,
						round_up(to - from, io->align) + io->align),
				 io->max_order, __GFP_ACCOUNT);
	while (at < to && !err) {
		u64 pos = io->pos + at - io->at;
		u64 room = dmafile_pages_bytes(&bounce) - (pos & (io->align - 1));
		u64 len = min(to - at, room), moved = 0;

		if (io->freezable)
			try_to_freeze();
		err = dmafile_may_go_on(state);
		if (!err)
			err = dmafile_allocate_some(state, at, &len, false, &full);
		if (err)
			break;
		if (full)
			to = at + len;
		if (io->write)
			err = dmafile_bounce_write(state, &bounce, at, pos, &len, &moved);
		else
			err = dmafile_bounce_read(state, &bounce, at, pos, len, &moved);
		at += moved;
		if (moved)
			dmafile_set_done(state, at);
		if (!err && moved < len)
			err = io->write ? -EIO : 1;
	}
	dmafile_pages_free(&bounce);
	return err ?: full;
}

/* The range that direct I/O can transfer in place. */
static void dmafile_direct_range(const struct dmafile_io *io, u64 *from, u64 *to)
{
	u64 end = io->at + io->len;

	*from = round_up(io->at, io->align);
	*to = round_down(end, io->align);
	/* A new buffer may have whole blocks, if there is room for them. */
	if (io->born)
		*from = round_down(io->at, io->align);
	if (io->born && round_up(end, io->align) <= io->size)
		*to = round_up(end, io->align);
}

/* Transfers as much as possible in place, the rest through a bounce buffer. */
static int dmafile_move_directly(struct dmafile_state *state)
{
	const struct dmafile_io *io = state->io;
	u64 end = io->at + io->len, from, to;
	int err;

	dmafile_direct_range(io, &from, &to);
	if ((io->at ^ io->pos) & (io->align - 1) || from >= to)
		return dmafile_move_bounced(state, io->at, end);
	err = dmafile_move_bounced(state, io->at, from);
	if (!err)
		err = dmafile_move_range(state, from, to, true);
	if (!err)
		err = dmafile_move_bounced(state, to, end);
	return err;
}

/* Whether direct I/O can transfer everything in place, as @strict requires. */
static bool dmafile_all_direct(const struct dmafile_io *io)
{
	u64 from, to;

	if (!(io->iocb_flags & IOCB_DIRECT) || (io->at ^ io->pos) & (io->align - 1))
		return false;
	dmafile_direct_range(io, &from, &to);
	return from <= io->at && to >= io->at + io->len;
}

/**
 * dmafile_largest_gather - convert the administrator's limit on gathers
 * @mb: in MiB; clamped to the valid range
 *
 * Return: the limit in bytes, 1 MiB to DMAFILE_MAX_GATHER.
 */
u64 dmafile_largest_gather(unsigned int mb)
{
	return clamp((u64)mb << 20, (u64)SZ_1M, (u64)DMAFILE_MAX_GATHER);
}

/**
 * dmafile_gather - choose a size for gathers
 * @len: the number of bytes to transfer
 * @most: the maximum size in MiB, as for dmafile_largest_gather()
 *
 * Return: a value for @gather of &struct dmafile_io.
 */
u64 dmafile_gather(u64 len, unsigned int most)
{
	return clamp(len / DMAFILE_GATHERS, (u64)SZ_1M, dmafile_largest_gather(most));
}

/**
 * dmafile_io_prepare - read the open flags and the alignment of the file
 * @io: the request, with @file and @write set
 *
 * Call it once before dmafile_transfer(): fcntl() may change the flags during the transfer.
 */
void dmafile_io_prepare(struct dmafile_io *io)
{
	io->iocb_flags = io->file->f_iocb_flags;
	io->align = DMAFILE_ALIGN;
	if (io->iocb_flags & IOCB_DIRECT)
		io->align = dmafile_file_align(io->file, io->write);
}

/**
 * dmafile_transfer - transfer data between a file and a buffer
 * @io: the request. Its range must be inside the buffer, must not overflow, and must not be in use
 *	by other transfers
 * @result: set to what was transferred, also on error; times are added to it
 *
 * Uses direct I/O if the file was opened with O_DIRECT. The file position is neither used nor
 * changed. No I/O is in flight on return.
 *
 * Return: 0, also if the file ended early; then @result->done is less than @io->len. Or an error:
 * -EINTR, -ENOMEM, -EINVAL if @io->strict cannot be satisfied, an error of a callback, or the I/O
 * error at the lowest offset. @result->done bytes have been transferred even then.
 */
int dmafile_transfer(const struct dmafile_io *io, struct dmafile_io_result *result)
{
	struct dmafile_state state = { .io = io, .result = result };
	u64 end = io->at + io->len;
	int err = 0;

	if (io->strict && !dmafile_all_direct(io))
		return -EINVAL;
	if (io->in_order)
		err = dmafile_allocate(&state, io->size, true);
	if (!err) {
		if (io->iocb_flags & IOCB_DIRECT)
			err = dmafile_move_directly(&state);
		else
			err = dmafile_move_range(&state, io->at, end, false);
	}
	/* A new buffer gets its full size even if the file ended early. */
	if (err >= 0)
		err = io->born ? dmafile_allocate(&state, io->size, true) : 0;
	/* The result of the last report is ignored. */
	if (io->ops && io->ops->step)
		io->ops->step(io, result);
	if (!err && io->born) {
		u64 size = dmafile_pages_bytes(io->pages);

		/* Clear the rest of the first and last block around the requested bytes. */
		dmafile_pages_zero(io->pages, round_down(io->at, io->align), io->at);
		dmafile_pages_zero(io->pages, io->at + result->done,
				   min(size, round_up(end, io->align)));
	}
	return err;
}
