//! `module`: dmafile.ko moves the bytes between the file and the pages behind its own dma-bufs: a
//! whole run in one call, many chunks in flight, nothing pinned, mapped or copied.

use super::fill::{cut_short, failed, is_refusal, refused};
use super::{ReadJob, Stop, input};
use crate::error::{Error, Verb};
use crate::exporter::module::{self, ModuleFacts};
use crate::flow::feed::{Feed, FeedResult, IoExtent, Queue};
use crate::flow::meter::{Meter, Phase};
use crate::flow::run::Run;
use crate::flow::trace::ROW_READS;
use crate::options::Allocation;
use crate::plan::Plan;
use crate::source::Source;
use crate::sync;
use crate::sys::dmabuf_sync::SyncedDmaBuf;
use crate::sys::module::{BUFFERED, ModuleProgress, ModuleRange, MoveOptions, Moved};
use crate::sys::{self, Errno, map};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// Interval at which a running call is checked: for progress, and to cancel it.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// A smaller call ends before it would be checked.
const SHORT: u64 = 4 << 20;
/// Size of the module's first chunk (DMAFILE_FIRST_GATHER in kernel/core/io.c).
const FIRST_CHUNK: u64 = 2 << 20;

/// Moves what is in the feed into an existing buffer.
pub(super) fn run(job: &ReadJob<'_>) -> Result<(), Stop> {
    let dma_buf = job
        .dma_buf
        .map(SyncedDmaBuf::fd)
        .ok_or_else(|| Error::new("no dma-buf", "this method writes into one"))?;
    let (node, module) = module::open().map_err(Stop::Refused)?;
    let mut next = job.pass.feed.wait(Queue::Method);
    while let Some(first) = next.take() {
        let mut run = vec![first];
        // Adjacent extents are moved by the same call.
        while let FeedResult::Extent(extent) = job.pass.feed.take(Queue::Method) {
            let last = run[run.len() - 1];
            if (extent.file, extent.at) == (last.file + last.need, last.at + last.need) {
                run.push(extent);
            } else {
                next = Some(extent);
                break;
            }
        }
        let whole = ModuleRange {
            file: first.file,
            at: first.at,
            len: run.iter().map(|extent| extent.need).sum(),
        };
        let mut done = 0;
        let align = module.align.max(job.plan.tuning.align);
        for (range, strict) in parts(whole, must_be_direct(job.plan), align) {
            let moved = part(job, (&node, &module), dma_buf, range, strict);
            done += moved.as_ref().copied().unwrap_or_else(|(bytes, _)| *bytes);
            if let Err((_, stop)) = moved {
                match &stop {
                    Stop::Failed(error) => job.pass.feed.stop(Some(error.clone())),
                    Stop::Refused(_) | Stop::NotDirect(_) => {
                        run.extend(next);
                        put_back(job.pass.feed, &run, done);
                    }
                }
                return Err(stop);
            }
        }
        if next.is_none() {
            next = job.pass.feed.wait(Queue::Method);
        }
    }
    Ok(())
}

/// Moves one range of a run by one call; returns how many bytes were moved, and what ended it early.
fn part(
    job: &ReadJob<'_>,
    (node, module): (&OwnedFd, &ModuleFacts),
    dma_buf: BorrowedFd<'_>,
    range: ModuleRange,
    strict: bool,
) -> Result<u64, (u64, Stop)> {
    let input = job.input(range.file);
    let (file, offset) = input.map_err(|error| (0, Stop::Failed(error)))?;
    let how = how(job.plan, module, strict);
    let start = job.pass.run.meter.now();
    job.pass.run.meter.io_begins();
    let watch = CallMonitor {
        source: job.source,
        run: job.pass.run,
        feed: Some(job.pass.feed),
        module,
        range,
    };
    let inside = ModuleRange {
        file: offset,
        ..range
    };
    let read = |progress: &_| sys::module::read(node.as_fd(), dma_buf, file, inside, how, progress);
    let (moved, end) = watch.over(read);
    job.pass.run.meter.io_ends();
    account(&job.pass.run.meter, &moved, range, start);
    if moved.bytes > 0 {
        let extent = IoExtent {
            file: range.file,
            at: range.at,
            len: moved.bytes,
            need: moved.bytes,
            head: 0,
            run_end: range.at + range.len,
        };
        job.pass
            .run
            .meter
            .moved(&extent, moved.bytes, moved.mode != BUFFERED);
    }
    match end {
        Ok(()) if must_be_direct(job.plan) && moved.mode == BUFFERED => {
            Err((0, refused(job.source, Errno::OPNOTSUPP)))
        }
        Ok(()) => Ok(moved.bytes),
        Err(errno) => Err((
            moved.bytes,
            watch.stop(errno, moved.bytes, job.pass.attempt.direct),
        )),
    }
}

/// Allocates and reads in one call: each chunk is read while the next one is allocated.
pub(super) fn fused(plan: &Plan, source: &Source, run: &Run<'_>) -> Result<OwnedFd, Stop> {
    let meter = &run.meter;
    let in_order = plan.allocation == Allocation::Before;
    let (node, module) = module::open().map_err(Stop::Refused)?;
    let range = ModuleRange {
        file: plan.offset,
        at: plan.place.start,
        len: plan.bytes,
    };
    let direct = plan.first().direct;
    let (file, offset) = input(plan, source, range.file)?;
    let how = MoveOptions {
        in_order,
        ..how(plan, &module, must_be_direct(plan))
    };
    let watch = CallMonitor {
        source,
        run,
        feed: None,
        module: &module,
        range,
    };
    let inside = ModuleRange {
        file: offset,
        ..range
    };
    let start = meter.now();
    let mut done = 0;
    let made = watch.over(|progress| {
        let made = sys::module::allocate_and_read(
            node.as_fd(),
            file,
            inside,
            plan.place.writable_to,
            how,
            progress,
        );
        done = progress.bytes();
        made
    });
    let (fd, moved) = made.map_err(|errno| watch.stop(errno, done, direct))?;
    account(meter, &moved, range, start);
    let first = if in_order {
        moved.alloc
    } else {
        moved
            .alloc
            .mul_f64(FIRST_CHUNK as f64 / plan.place.writable_to.max(FIRST_CHUNK) as f64)
    };
    meter.allocated_in_reads(start, moved.alloc, first, plan.place.writable_to);
    let extent = IoExtent {
        file: range.file,
        at: range.at,
        len: range.len,
        need: range.len,
        head: 0,
        run_end: range.at + range.len,
    };
    meter.moved(&extent, range.len, moved.mode != BUFFERED);
    Ok(fd)
}

/// Splits a range into parts that one call can move, each with a flag that says whether to refuse it
/// if `O_DIRECT` cannot move it without a copy. If direct I/O was requested, it is refused, except for
/// blocks of which only a part is requested, and if file and buffer differ modulo the block size.
fn parts(range: ModuleRange, must_be_direct: bool, align: u64) -> Vec<(ModuleRange, bool)> {
    let congruent = range.file % align == range.at % align;
    if !must_be_direct || !congruent {
        return vec![(range, false)];
    }
    let end = range.file + range.len;
    let from = range.file.next_multiple_of(align).min(end);
    let to = (end - end % align).max(from);
    let part = |start: u64, end: u64| ModuleRange {
        file: start,
        at: range.at + (start - range.file),
        len: end - start,
    };
    [
        (part(range.file, from), false),
        (part(from, to), true),
        (part(to, end), false),
    ]
    .into_iter()
    .filter(|(part, _)| part.len > 0)
    .collect()
}

/// True if the I/O mode leaves only direct I/O.
fn must_be_direct(plan: &Plan) -> bool {
    plan.methods.iter().all(|attempt| attempt.direct)
}

fn how(plan: &Plan, module: &ModuleFacts, strict: bool) -> MoveOptions {
    MoveOptions {
        chunk: if plan.tuning.chunk == module.chunk {
            // The default chunk size: no more than this, and less for small ranges.
            0
        } else {
            plan.tuning.chunk.next_multiple_of(map::page_size())
        },
        strict,
        in_order: false,
    }
}

/// Returns what was not moved to the feed: `done` bytes of these adjacent extents were.
fn put_back(feed: &Feed, run: &[IoExtent], done: u64) {
    // The feed hands out the last returned extent first.
    for extent in rest(run, done).into_iter().rev() {
        feed.put_back(extent);
    }
}

/// The rest of extents of which the first `done` bytes were moved.
fn rest(run: &[IoExtent], mut done: u64) -> Vec<IoExtent> {
    let mut left = Vec::new();
    for extent in run {
        let skip = done.min(extent.need);
        done -= skip;
        if skip < extent.need {
            left.push(IoExtent {
                file: extent.file + skip,
                at: extent.at + skip,
                len: extent.len - skip,
                need: extent.need - skip,
                ..*extent
            });
        }
    }
    left
}

/// Records the times of a call by phase, and how the bytes were moved.
fn account(meter: &Meter<'_>, moved: &Moved, range: ModuleRange, start: Duration) {
    meter.add_time(Phase::Submit, moved.submit);
    meter.add_time(Phase::Wait, moved.wait);
    meter.add_time(Phase::Copy, moved.copy);
    meter.add_mode(moved.mode);
    meter.span("dmafile.ko", ROW_READS, start, range.file, moved.bytes);
}

/// Monitors a call while it runs.
struct CallMonitor<'a> {
    source: &'a Source,
    run: &'a Run<'a>,
    /// Set if the buffer already exists: others may use what is in place, or cancel the call.
    feed: Option<&'a Feed>,
    module: &'a ModuleFacts,
    range: ModuleRange,
}

impl CallMonitor<'_> {
    /// Runs a call, and reports its progress.
    fn over<T>(&self, call: impl FnOnce(&ModuleProgress) -> T) -> T {
        let progress = ModuleProgress::default();
        if self.range.len <= SHORT {
            if self.run.cancel.is_cancelled() {
                progress.stop();
            }
            return call(&progress);
        }
        let over = (Mutex::new(false), Condvar::new());
        std::thread::scope(|scope| {
            let (progress, over) = (&progress, &over);
            let spawn = std::thread::Builder::new().name("dmafile-watch".to_string());
            // If no thread can be created (RLIMIT_NPROC), there is no progress.
            let _watcher = spawn.spawn_scoped(scope, move || self.look(progress, over));
            // Also on a panic: the scope waits for the other thread.
            let _ends = CallGuard(over);
            call(progress)
        })
    }

    fn look(&self, progress: &ModuleProgress, over: &(Mutex<bool>, Condvar)) {
        let mut seen = 0;
        let mut since = self.run.meter.now();
        let mut ended = sync::lock(&over.0);
        while !*ended {
            if self.run.cancel.is_cancelled() || self.feed.is_some_and(Feed::stopped) {
                progress.stop();
            }
            let bytes = progress.bytes().min(self.range.len);
            if bytes > seen {
                let offset = self.range.file + seen;
                self.run
                    .meter
                    .span("read", ROW_READS + 1, since, offset, bytes - seen);
                since = self.run.meter.now();
                if self.feed.is_some() {
                    let at = self.range.at;
                    self.run.meter.in_place(at + seen, at + bytes);
                }
                self.run.meter.under_way(bytes);
                seen = bytes;
            }
            ended = sync::wait_for(&over.1, ended, POLL_INTERVAL);
        }
        drop(ended);
        // From here on the bytes are counted as moved.
        self.run.meter.under_way(0);
    }

    /// Why a call ended, `bytes` after the start of the range.
    fn stop(&self, errno: Errno, bytes: u64, direct: bool) -> Stop {
        let at = self.range.file + bytes;
        let place = self.source.place(at);
        Stop::Failed(match errno {
            Errno::CANCELED => Error::cancelled(Verb::Load, place),
            Errno::NODATA => cut_short(self.source, at),
            errno if direct && is_refusal(errno) => return refused(self.source, errno),
            Errno::NOMEM | Errno::FBIG | Errno::MFILE => {
                module::cannot_allocate(errno, self.module).at(place)
            }
            // Another exporter's dma-buf after all, or a security policy.
            Errno::NOTTY | Errno::XDEV | Errno::PERM | Errno::ACCESS => {
                let error = Error::os("dmafile.ko refuses", errno).at(place);
                return Stop::Refused(error);
            }
            errno => failed(self.source, at, errno),
        })
    }
}

/// Signals that a call has ended.
struct CallGuard<'a>(&'a (Mutex<bool>, Condvar));

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        *sync::lock(&self.0.0) = true;
        self.0.1.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(file: u64, at: u64, len: u64) -> ModuleRange {
        ModuleRange { file, at, len }
    }

    #[test]
    fn whole_blocks_must_be_direct_and_partial_blocks_need_not() {
        let whole = range(777, 4096 + 777, 20_000);
        assert_eq!(parts(whole, false, 4096), [(whole, false)]);
        let want = [
            (range(777, 4873, 3319), false),
            (range(4096, 8192, 16_384), true),
            (range(20_480, 24_576, 297), false),
        ];
        let all = parts(whole, true, 4096);
        assert_eq!(all.iter().map(|(part, _)| part.len).sum::<u64>(), 20_000);
        assert_eq!(all, want);
        // File and buffer differ modulo the block size: every block is copied.
        let askew = range(0, 1, 8192);
        assert_eq!(parts(askew, true, 4096), [(askew, false)]);
        // Less than a block.
        let little = range(4097, 1, 100);
        assert_eq!(parts(little, true, 4096), [(little, false)]);
        let block = range(4096, 0, 4096);
        assert_eq!(parts(block, true, 4096), [(block, true)]);
    }

    #[test]
    fn only_extents_that_were_not_read_are_returned() {
        let extent = |at: u64| IoExtent {
            file: at + 1000,
            at,
            len: 100,
            need: 100,
            head: 0,
            run_end: 300,
        };
        let run = [extent(0), extent(100), extent(200)];
        assert_eq!(rest(&run, 0), run);
        let left = rest(&run, 130);
        let places: Vec<_> = left
            .iter()
            .map(|one| (one.file, one.at, one.need))
            .collect();
        assert_eq!(places, [(1130, 130, 70), (1200, 200, 100)]);
        assert!(rest(&run, 300).is_empty());
    }
}
