//! Memory is allocated chunk by chunk, ahead of the reads. If reads must wait for it, because one
//! thread zeroes base pages more slowly than disks read, other threads join, each with a part of a
//! chunk. Otherwise a second thread would only cost CPU time.

use super::{LoadTransfer, Work};
use crate::error::{Error, Verb, errno_name};
use crate::flow::feed::Feed;
use crate::message::{Opt, message};
use crate::options::{Allocation, Pages};
use crate::sync;
use crate::sys::{Errno, numa, sandbox};
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

/// Allocation checks for a cancellation at least this often, in bytes.
const STEP: u64 = 32 << 20;
/// The first chunk: small, so that reading starts immediately.
const FIRST_CHUNK: u64 = 8 << 20;

/// What remains to be allocated, handed out in the order of the reads.
pub(super) struct Steps<'a> {
    transfer: &'a LoadTransfer<'a>,
    state: Mutex<AllocationState>,
}

struct AllocationState {
    /// Number of working threads.
    threads: u64,
    /// The run of the layout that is being handed out.
    run: usize,
    /// Memory below this has been handed out, and the end of its chunk.
    at: u64,
    stop_at: u64,
    /// Chunks that are not completely present, in order.
    open: VecDeque<Chunk>,
    /// When the last one completed.
    last: Duration,
}

struct Chunk {
    at: u64,
    end: u64,
    /// Bytes that are not present yet.
    left: u64,
    start: Duration,
}

/// A part of a chunk, for one thread, in bytes of the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AllocationStep {
    pub(super) at: u64,
    pub(super) len: u64,
}

impl<'a> Steps<'a> {
    pub(super) fn new(transfer: &'a LoadTransfer<'a>) -> Self {
        let state = AllocationState {
            threads: 1,
            run: 0,
            at: 0,
            stop_at: 0,
            open: VecDeque::new(),
            last: Duration::ZERO,
        };
        Self {
            transfer,
            state: Mutex::new(state),
        }
    }

    /// Makes all memory present, and then creates what is exported; logs the reason if the kernel
    /// refuses.
    pub(super) fn run(&self, feed: &Feed) {
        let end = AllocationGuard(feed);
        let Work { plan, log, .. } = self.transfer.work;
        let (most, allocation) = (plan.tuning.allocators, plan.allocation);
        let refused = std::thread::scope(|scope| {
            let mut others = Vec::new();
            let mut one_more = || {
                if others.len() + 1 == most {
                    return;
                }
                let builder = std::thread::Builder::new().name("dmafile-alloc".to_string());
                // Fewer threads than requested (EAGAIN under RLIMIT_NPROC) do the same work.
                others.extend(builder.spawn_scoped(scope, || self.work(feed, |_| {})).ok());
                self.shared_by(1 + others.len() as u64);
            };
            if allocation == Allocation::Before {
                // The disk is idle during this.
                (1..most).for_each(|_| one_more());
            }
            let mut refused = self.work(feed, |idle| {
                if idle {
                    one_more();
                }
            });
            for other in others {
                refused = refused.or(sync::join(other));
            }
            refused
        });
        drop(end);
        if let Some(errno) = refused {
            let name = errno_name(errno.raw_os_error());
            let why = format!("MADV_POPULATE_WRITE is refused ({name})");
            log.add("allocation", Allocation::InRead, why);
        } else if !feed.stopped() {
            self.export(feed);
        }
    }

    /// From now on chunks are divided into this many parts.
    pub(super) fn shared_by(&self, threads: u64) {
        self.lock().threads = threads;
    }

    /// Number of threads that are or were working.
    #[cfg(test)]
    pub(super) fn threads(&self) -> u64 {
        self.lock().threads
    }

    /// Takes steps until none is left, and reports after each whether reads were waiting for it.
    /// Returns the errno if the kernel refuses to populate memory.
    fn work(&self, feed: &Feed, mut after: impl FnMut(bool)) -> Option<Errno> {
        let LoadTransfer { work, memory } = self.transfer;
        numa::prefer(work.plan.node);
        while let Some(step) = self.next() {
            if work.cancel.is_cancelled() {
                feed.stop(Some(Error::cancelled(Verb::Load, work.source.whole())));
            }
            if feed.stopped() {
                return None;
            }
            match memory.populate(step.at, step.len) {
                Ok(()) => {
                    let idle = work.meter.idle();
                    self.done(step, feed);
                    after(idle);
                }
                // A kernel before 5.14, or a sandbox: the reads fault their pages in.
                Err(errno) if errno == Errno::INVAL || sandbox::may_return(errno) => {
                    feed.publish(u64::MAX);
                    return Some(errno);
                }
                Err(errno) => {
                    feed.stop(Some(cannot_allocate(self.transfer, errno, step.at)));
                    return None;
                }
            }
        }
        None
    }

    /// Creates a dma-buf over the present pages, while the last reads are in flight.
    fn export(&self, feed: &Feed) {
        let LoadTransfer { work, memory } = self.transfer;
        let Work { plan, meter, .. } = *work;
        let start = meter.now();
        match memory.populated() {
            Ok(true) => meter.exported(start, plan.capacity),
            Ok(false) => {}
            Err(error) => feed.stop(Some(error)),
        }
    }

    pub(super) fn next(&self) -> Option<AllocationStep> {
        let LoadTransfer { work, memory } = self.transfer;
        let Work {
            plan,
            layout,
            meter,
            ..
        } = *work;
        let (grain, end) = (memory.grain(), plan.capacity);
        let mut state = self.lock();
        while state.at >= state.stop_at {
            let run = layout.runs.get(state.run)?;
            let run_end = work.at(run.end).next_multiple_of(grain).min(end);
            let at = work.at(run.start);
            // What two runs share is handed out once.
            let at = (at - at % grain).max(state.at);
            if at >= run_end {
                state.run += 1;
                continue;
            }
            let stop_at = (at + chunk(state.at, end, plan.tuning.chunk, grain)).min(run_end);
            let start = meter.now();
            state.open.push_back(Chunk {
                at,
                end: stop_at,
                left: stop_at - at,
                start,
            });
            (state.at, state.stop_at) = (at, stop_at);
        }
        let chunk = state.open.back().expect("what is handed out is open");
        // Never less than a huge page: a part of one would become base pages.
        let part = (chunk.end - chunk.at).div_ceil(state.threads);
        let stride = part.next_multiple_of(grain).min(STEP.max(grain));
        let at = state.at;
        let len = stride.min(state.stop_at - at);
        state.at += len;
        Some(AllocationStep { at, len })
    }

    /// The pages of a step are present. Memory that is present without a gap may be read into.
    pub(super) fn done(&self, step: AllocationStep, feed: &Feed) {
        let Work { plan, meter, .. } = self.transfer.work;
        let mut state = self.lock();
        let chunk = state.open.iter_mut().find(|one| step.at < one.end);
        chunk.expect("its chunk is open").left -= step.len;
        while let Some(first) = state.open.front().filter(|first| first.left == 0) {
            // Several are in progress at once, and complete one after another.
            let start = first.start.max(state.last);
            let end = first.end;
            meter.allocated(start, first.at, end - first.at);
            state.last = meter.now();
            state.open.pop_front();
            if plan.allocation == Allocation::Ahead {
                feed.publish(end);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, AllocationState> {
        sync::lock(&self.state)
    }
}

/// However allocation ends, even by a panic, nothing must wait for memory any longer.
struct AllocationGuard<'a>(&'a Feed);

impl Drop for AllocationGuard<'_> {
    fn drop(&mut self) {
        self.0.publish(u64::MAX);
    }
}

/// The size of the next chunk. Sizes double from a small first one, so that reading starts
/// immediately, up to the size of the plan, and halve towards the end, so that little remains to be
/// read after the last one.
fn chunk(made: u64, end: u64, most: u64, grain: u64) -> u64 {
    let ramp = made.max(FIRST_CHUNK).min((end - made) / 2).max(FIRST_CHUNK);
    ramp.min(most).next_multiple_of(grain)
}

fn cannot_allocate(transfer: &LoadTransfer<'_>, errno: Errno, at: u64) -> Error {
    let error = Error::os("cannot allocate the buffer", errno)
        .at(format!("byte {at} of {}", transfer.work.plan.capacity));
    match (errno, transfer.work.plan.pages) {
        (Errno::FAULT, _) if !transfer.memory.never_faults() => error
            .with_why("its owner has since truncated it")
            .with_remedy("seal it against that (F_SEAL_SHRINK)"),
        (Errno::FAULT, Pages::Huge) => error
            .with_why("a cgroup limits hugetlb pages to less")
            .with_remedy(message![
                "raise its hugetlb limit, or use ",
                Opt::Pages.set(Pages::Thp)
            ]),
        _ => error.with_remedy(message![
            "free memory, or load a range (",
            Opt::Offset,
            ", ",
            Opt::Length,
            ")"
        ]),
    }
}
