// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bytes between a file and a buffer's own pages.
 *
 * A transfer is cut into gathers. While one of them is being read, the next one is allocated; so
 * the total time tends to T(first gather) + max(T(remaining allocation), T(I/O)) (AR-22). Each
 * gather is one kiocb over a bvec of the buffer's pages: no mapping, no pins, no copy. The block
 * layer cuts it into what the disk takes, all of which are in flight at once.
 *
 * Only the process that asked for it issues, waits and frees. A completion, which may run in a hard
 * interrupt, records a number and wakes that process. Whoever is killed waits for what is in
 * flight: pages under DMA can't be freed.
 */
#include <linux/completion.h>
#include <linux/fadvise.h>
#include <linux/fsnotify.h>
#include <linux/ktime.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/uio.h>

#include "compat.h"
#include "io.h"

/* The first gather, and the last ones: small, so that reading starts early and ends early. */
#define FIRST_GATHER	SZ_2M
/* How much is allocated before anyone looks whether it is still wanted. */
#define STEP		SZ_32M
/* Less than what a kernel takes for a task that hangs. */
#define PATIENCE	(30 * HZ)
/* What goes beside its place goes through memory of this size. */
#define BOUNCE		SZ_1M
/* How far readahead looks at a time. */
#define READ_AHEAD	SZ_1M
/*
 * The gathers that a transfer has at least, where nobody says: what is not covered by I/O is the
 * first of them, and of the reads the last.
 */
#define GATHERS		16

/**
 * struct piece - one I/O in flight
 * @iocb: what the file system knows of it
 * @over: it is over
 * @result: how it ended, valid then
 * @bvec: the pages, which stay until then
 * @at: its first byte in the buffer
 * @len: bytes asked of the file
 * @direct: by O_DIRECT
 * @queued: it went on after it was begun
 */
struct piece {
	struct kiocb iocb;
	struct completion over;
	ssize_t result;
	struct bio_vec *bvec;
	u64 at;
	u64 len;
	bool direct;
	bool queued;
};

/* May run in a hard interrupt. */
static void piece_complete(struct kiocb *iocb, long result)
{
	struct piece *piece = container_of(iocb, struct piece, iocb);

	if (iocb->ki_flags & IOCB_WRITE)
		kiocb_end_write(iocb);
	piece->result = result;
	complete(&piece->over);
}

/*
 * Starts one I/O between the file, from @pos on, and @pages, from @at on; of less than @len bytes
 * where one I/O takes no more, see dmafile_pages_bvec().
 */
static int piece_start(struct dmafile_io *io, struct piece *piece,
		       const struct dmafile_pages *pages, u64 at, u64 pos, u64 len, bool direct)
{
	u64 begun = ktime_get_ns();
	struct iov_iter iter;
	unsigned int nr;
	ssize_t result;

	piece->bvec = dmafile_pages_bvec(pages, at, &len, &nr);
	if (!piece->bvec)
		return -ENOMEM;
	piece->at = at;
	piece->len = len;
	piece->direct = direct;
	init_completion(&piece->over);
	iov_iter_bvec(&iter, io->write ? ITER_SOURCE : ITER_DEST, piece->bvec, nr, len);
	init_sync_kiocb(&piece->iocb, io->file);
	piece->iocb.ki_pos = pos;
	/* Also for what is never queued: else overlayfs of Linux 6.1 does not heed ki_flags. */
	piece->iocb.ki_complete = piece_complete;
	if (!direct)
		piece->iocb.ki_flags &= ~IOCB_DIRECT;
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
	io->submit_ns += ktime_get_ns() - begun;
	return 0;
}

/* Waits for one I/O: bytes moved, or an error. */
static ssize_t piece_wait(struct dmafile_io *io, struct piece *piece)
{
	u64 begun = ktime_get_ns();

	/* Nobody may take it for a task that hangs, however slow a disk is. */
	while (!wait_for_completion_io_timeout(&piece->over, PATIENCE))
		;
	io->wait_ns += ktime_get_ns() - begun;
	kvfree(piece->bvec);
	piece->bvec = NULL;
	/* Those who watch the file know of what ended at once. */
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
		/* There's no easy way to restart it. */
		return -EINTR;
	default:
		return piece->result;
	}
}

/* Whether direct I/O ended in a way that says that there is none. */
static bool refused(struct dmafile_io *io, bool direct, ssize_t result)
{
	if (!direct || io->strict || (result != -EINVAL && result != -EOPNOTSUPP))
		return false;
	io->no_direct = true;
	return true;
}

/*
 * Moves bytes between the file and @pages here and now: all of them, or as many as there are, or an
 * error. What direct I/O leaves undone is done through the page cache.
 */
static ssize_t move_now(struct dmafile_io *io, const struct dmafile_pages *pages, u64 at, u64 pos,
			u64 len, bool direct)
{
	u64 done = 0;

	while (done < len) {
		struct piece piece;
		ssize_t result;
		int err;

		direct = direct && !io->no_direct && IS_ALIGNED(done, DMAFILE_ALIGN);
		err = piece_start(io, &piece, pages, at + done, pos + done, len - done, direct);
		if (err)
			return err;
		result = piece_wait(io, &piece);
		if (refused(io, direct, result))
			continue;
		if (result < 0)
			return result;
		if (!result)
			break;
		if (pages == io->pages)
			io->mode |= direct ? DMAFILE_DIRECT : DMAFILE_BUFFERED;
		else
			io->mode |= direct ? DMAFILE_BOUNCED : DMAFILE_BUFFERED;
		done += result;
		/*
		 * A direct read that ends within a block has seen the end of the file, of most
		 * file systems; what is not strict asks the page cache, too.
		 */
		if (io->strict && direct && !IS_ALIGNED(done, DMAFILE_ALIGN))
			break;
	}
	return done;
}

/**
 * dmafile_interrupted - whether the caller shall stop waiting
 * @interruptible: any signal is a reason, not only one that kills
 *
 * Not signal_pending(): work of a task's own io_uring looks like a signal there. In a worker of
 * one, that is how its end looks.
 *
 * Return: whether.
 */
bool dmafile_interrupted(bool interruptible)
{
	if (fatal_signal_pending(current))
		return true;
	if (!interruptible)
		return false;
	return current->flags & PF_IO_WORKER ? signal_pending(current) : task_sigpending(current);
}

/* Tells how much is done; an error when it is to end early. */
static int may_go_on(struct dmafile_io *io)
{
	if (dmafile_interrupted(io->interruptible))
		return -EINTR;
	return io->tell ? io->tell(io) : 0;
}

static int grow(struct dmafile_io *io, u64 bytes)
{
	if (!io->more)
		return dmafile_pages_grow(io->pages, bytes, io->max_order);
	while (dmafile_pages_bytes(io->pages) < bytes) {
		u64 left = bytes - dmafile_pages_bytes(io->pages);
		int err = io->more(io, DIV_ROUND_UP_ULL(left, PAGE_SIZE));

		if (!err && fatal_signal_pending(current))
			err = -EINTR;
		if (err)
			return err;
		cond_resched();
	}
	return 0;
}

/* Makes the buffer's memory reach so far. */
static int allocate(struct dmafile_io *io, u64 end)
{
	u64 begun = ktime_get_ns();
	int err = 0;

	while (!err && dmafile_pages_bytes(io->pages) < min(end, io->size)) {
		err = may_go_on(io);
		if (!err)
			err = grow(io, min(end, dmafile_pages_bytes(io->pages) + STEP));
	}
	io->alloc_ns += ktime_get_ns() - begun;
	return err;
}

/*
 * The same for so many bytes from @at on. Of memory that somebody else gives, what can be had is
 * used: @len is less then, and @full says why.
 */
static int allocate_some(struct dmafile_io *io, u64 at, u64 *len, int *full)
{
	int err = allocate(io, at + *len);
	u64 have = dmafile_pages_bytes(io->pages);

	if (!err || !io->more || err == -EINTR || have <= at)
		return err;
	*len = have - at;
	*full = err;
	return 0;
}

/*
 * The next gather. They double from a small first one. Towards the end each takes a quarter of what
 * is left: its allocation then takes as long as the reading of the one before even where the disk
 * is only a third faster, so that nothing but the last, small one is waited for.
 */
static u64 next_gather(const struct dmafile_io *io, u64 done, u64 left)
{
	u64 ramp = max_t(u64, done, FIRST_GATHER);
	u64 fade = max_t(u64, left / 4, FIRST_GATHER);

	return min(left, round_up(min3(io->gather, ramp, fade), PAGE_SIZE));
}

/* Has the page cache read up to there: meanwhile there is memory to be allocated. */
static void read_ahead(struct dmafile_io *io, u64 *ahead, u64 end)
{
	if (io->write || io->in_order)
		return;
	while (*ahead < end) {
		/* It is advice; a file that can't be read will say so itself. */
		vfs_fadvise(io->file, io->pos + (*ahead - io->at), READ_AHEAD, POSIX_FADV_WILLNEED);
		*ahead += READ_AHEAD;
	}
}

/* A piece has come to an end before its own: that of the file, or of a legal short count. */
static ssize_t move_rest(struct dmafile_io *io, struct piece *piece, u64 done, u64 need)
{
	u64 at = piece->at + done, pos = io->pos + at - io->at;
	ssize_t result;

	if (!io->strict)
		/* The page cache knows. */
		return move_now(io, io->pages, at, pos, need - done, false);
	/* Within a block, a direct one has seen the end of the file. */
	if (!IS_ALIGNED(done, DMAFILE_ALIGN))
		return 0;
	result = move_now(io, io->pages, at, pos, piece->len - done, true);
	return min_t(s64, result, need - done);
}

/* What lies before the wanted bytes, of a whole first block, does not count. */
static void set_done(struct dmafile_io *io, u64 end)
{
	if (end > io->at)
		io->done = end - io->at;
}

/*
 * Waits for a piece that was issued in order, and for what direct I/O has left of it. Return: 0,
 * an error, or 1 at the end of the file.
 */
static int piece_finish(struct dmafile_io *io, struct piece *piece)
{
	u64 wanted_end = io->at + io->len;
	u64 need = min(piece->len, wanted_end - piece->at);
	ssize_t result = piece_wait(io, piece);
	u64 done;

	if (refused(io, piece->direct, result))
		result = 0;
	if (result < 0)
		return result;
	if (result)
		io->mode |= piece->direct ? DMAFILE_DIRECT : DMAFILE_BUFFERED;
	done = min_t(u64, result, need);
	set_done(io, piece->at + done);
	if (done < need) {
		result = move_rest(io, piece, done, need);
		if (result < 0)
			return result;
		done += result;
		set_done(io, piece->at + done);
	}
	if (done == need)
		return 0;
	return io->write ? -ENOSPC : 1;
}

/* The I/O in flight, the oldest first. */
struct ring {
	struct piece *pieces;
	unsigned int first;
	unsigned int nr;
	/* How it ended: the first in the order of the bytes, that is. */
	int err;
};

static void ring_finish(struct dmafile_io *io, struct ring *ring)
{
	struct piece *piece = &ring->pieces[ring->first];

	if (ring->err)
		/* What lies behind an error, or the end of the file, is worth nothing. */
		piece_wait(io, piece);
	else
		ring->err = piece_finish(io, piece);
	/* It is too late to end a transfer early that is done. */
	if (!ring->err && io->done < io->len)
		ring->err = may_go_on(io);
	ring->first = (ring->first + 1) % io->depth;
	ring->nr--;
}

/*
 * Moves a range of the buffer, gather by gather: with O_DIRECT, @from and @to are where it can. It
 * may reach beyond the wanted bytes to both sides. Return: 0, an error, or 1 at the end of the
 * file.
 */
static int move_range(struct dmafile_io *io, u64 from, u64 to, bool direct)
{
	struct ring ring = { };
	u64 at = from, ahead = from;
	int err, full = 0;

	if (from >= to)
		return 0;
	ring.pieces = kcalloc(io->depth, sizeof(*ring.pieces), DMAFILE_GFP);
	if (!ring.pieces)
		return -ENOMEM;
	err = may_go_on(io);
	while (at < to && !err && !ring.err) {
		u64 len = next_gather(io, at - from, to - at);
		bool directly = direct && !io->no_direct;
		struct piece *piece;

		if (!directly)
			read_ahead(io, &ahead, at + len);
		/* Before it waits for a place in the ring: this is what overlaps. */
		err = allocate_some(io, at, &len, &full);
		if (err)
			break;
		if (full)
			to = at + len;
		if (!directly && at + len < to)
			read_ahead(io, &ahead,
				   at + len + next_gather(io, at + len - from, to - at - len));
		if (ring.nr == io->depth) {
			ring_finish(io, &ring);
			if (ring.err)
				break;
		}
		piece = &ring.pieces[(ring.first + ring.nr) % io->depth];
		err = piece_start(io, piece, io->pages, at, io->pos + at - io->at, len, directly);
		if (err)
			break;
		ring.nr++;
		at += piece->len;
		/* What the page cache has done is over. */
		if (!directly)
			ring_finish(io, &ring);
	}
	while (ring.nr)
		ring_finish(io, &ring);
	kfree(ring.pieces);
	/* What failed in the file comes before whatever kept the next gather from being issued. */
	return ring.err ?: err ?: full;
}

/*
 * Moves a range beside the pages that it belongs to, and copies. Return: 0, an error, or 1 at the
 * end of the file.
 */
static int move_bounced(struct dmafile_io *io, u64 from, u64 to)
{
	struct dmafile_pages bounce = { };
	u64 at = from;
	int err, full = 0;

	if (from >= to)
		return 0;
	err = dmafile_pages_grow(&bounce, min_t(u64, BOUNCE, round_up(to - from, DMAFILE_ALIGN) +
						DMAFILE_ALIGN), io->max_order);
	while (at < to && !err) {
		u64 pos = io->pos + at - io->at;
		u64 skip = pos & (DMAFILE_ALIGN - 1);
		u64 len = min(to - at, dmafile_pages_bytes(&bounce) - skip);
		ssize_t result;
		u64 begun;

		err = may_go_on(io);
		if (!err)
			err = allocate_some(io, at, &len, &full);
		if (err)
			break;
		if (full)
			to = at + len;
		if (!io->write) {
			result = move_now(io, &bounce, 0, pos - skip,
					  round_up(skip + len, DMAFILE_ALIGN), true);
		} else if (skip || len < DMAFILE_ALIGN) {
			/* A part of a block: the rest of it is known to the page cache. */
			len = min_t(u64, len, DMAFILE_ALIGN - skip);
			result = move_now(io, io->pages, at, pos, len, false);
		} else {
			len = round_down(len, DMAFILE_ALIGN);
			begun = ktime_get_ns();
			dmafile_pages_copy(&bounce, 0, io->pages, at, len);
			io->copy_ns += ktime_get_ns() - begun;
			result = move_now(io, &bounce, 0, pos, len, true);
		}
		if (result < 0) {
			err = result;
			break;
		}
		if (!io->write) {
			result = min_t(s64, result - (s64)skip, len);
			if (result <= 0) {
				err = 1;
				break;
			}
			begun = ktime_get_ns();
			dmafile_pages_copy(io->pages, at, &bounce, skip, result);
			io->copy_ns += ktime_get_ns() - begun;
		}
		at += result;
		io->done = at - io->at;
		if (result < len)
			err = io->write ? -ENOSPC : 1;
	}
	dmafile_pages_free(&bounce);
	return err ?: full;
}

/* O_DIRECT: as much as possible with the buffer's own pages. */
static int move_directly(struct dmafile_io *io)
{
	u64 end = io->at + io->len;
	u64 from = round_up(io->at, DMAFILE_ALIGN), to = round_down(end, DMAFILE_ALIGN);
	int err;

	if ((io->at ^ io->pos) & (DMAFILE_ALIGN - 1))
		return move_bounced(io, io->at, end);
	if (io->born)
		/* Whole blocks, since the memory around is nobody's. */
		return move_range(io, round_down(io->at, DMAFILE_ALIGN),
				  round_up(end, DMAFILE_ALIGN), true);
	if (from >= to)
		return move_bounced(io, io->at, end);
	err = move_bounced(io, io->at, from);
	if (!err)
		err = move_range(io, from, to, true);
	if (!err)
		err = move_bounced(io, to, end);
	return err;
}

/* Whether O_DIRECT moves all of it, with the buffer's own pages: what @strict insists on. */
static bool all_direct(const struct dmafile_io *io)
{
	u64 end = io->at + io->len;

	if (!(io->file->f_iocb_flags & IOCB_DIRECT) || (io->at ^ io->pos) & (DMAFILE_ALIGN - 1))
		return false;
	return io->born || (IS_ALIGNED(io->at, DMAFILE_ALIGN) && IS_ALIGNED(end, DMAFILE_ALIGN));
}

/**
 * dmafile_largest_gather - a limit of gathers, as an administrator sets it
 * @mb: in MiB; too small or too large a one is as near as it may be
 *
 * Return: in bytes, 1 MiB to DMAFILE_MAX_GATHER.
 */
u64 dmafile_largest_gather(unsigned int mb)
{
	return clamp((u64)mb << 20, (u64)SZ_1M, (u64)DMAFILE_MAX_GATHER);
}

/**
 * dmafile_gather - a size for gathers
 * @len: bytes that are to be moved
 * @most: the largest, in MiB, as for dmafile_largest_gather()
 *
 * Return: for &struct dmafile_io's @gather.
 */
u64 dmafile_gather(u64 len, unsigned int most)
{
	return clamp(len / GATHERS, (u64)SZ_1M, dmafile_largest_gather(most));
}

/**
 * dmafile_transfer - move bytes between a file and a buffer
 * @io: which, see there. Ranges fit the buffer and don't wrap; nobody else touches that range
 *
 * Direct I/O where the file was opened with O_DIRECT. The file's position is neither used nor
 * moved. Nothing is in flight when it returns.
 *
 * Return: 0, also where the file ended early: then @io->done is less than @io->len. -EINTR,
 * -ENOMEM, -EINVAL where @io->strict can't be, what @io->tell returned, or the first error of the
 * file in the order of its bytes; then @io->done bytes have been moved all the same.
 */
int dmafile_transfer(struct dmafile_io *io)
{
	u64 end = io->at + io->len;
	int err = 0;

	if (io->strict && !all_direct(io))
		return -EINVAL;
	if (io->in_order)
		err = allocate(io, io->size);
	if (!err) {
		if (io->file->f_iocb_flags & IOCB_DIRECT)
			err = move_directly(io);
		else
			err = move_range(io, io->at, end, false);
	}
	/* A new buffer is as large as was asked for, whatever has come. */
	if (err >= 0)
		err = io->born ? allocate(io, io->size) : 0;
	/* The last word; what it answers comes too late. */
	if (io->tell)
		io->tell(io);
	if (!err && io->born) {
		/* Of the blocks at both ends, and of a file that was cut short meanwhile. */
		dmafile_pages_zero(io->pages, round_down(io->at, DMAFILE_ALIGN), io->at);
		dmafile_pages_zero(io->pages, io->at + io->done, round_up(end, DMAFILE_ALIGN));
	}
	return err;
}
