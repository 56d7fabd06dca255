//! The pipeline: memory is allocated chunk by chunk while earlier chunks are read.
//!
//! Total time tends to `T(first chunk) + max(T(remaining allocation), T(I/O))`.

mod allocate;
mod fused;
mod hash;
mod queues;
mod through;

use crate::buffer::Filling;
use crate::error::{Error, Result, Verb};
use crate::facts::Layout;
use crate::flow::feed::{Cut, Feed};
use crate::flow::run::Run;
use crate::method::{self, ReadJob};
use crate::options::{Allocation, Kind, Pages};
use crate::plan::{Attempt, Plan};
use crate::pump::Pass;
use crate::reasons::About;
use crate::source::{MayFault, Sampled, Shard};
use crate::sync;
use crate::sys::Errno;
use crate::sys::notifier::Notifier;
use crate::verify::{DigestCheck, Verified};
use allocate::Steps;
pub(crate) use fused::fused;
use queues::Work;
pub(crate) use through::Through;

/// What a load has to do.
pub(crate) struct LoadTask {
    pub source: Sampled,
    /// The memory to create.
    pub kind: Kind,
    pub plan: Plan,
    pub layout: Layout,
    pub checks: Vec<DigestCheck>,
    /// The files of a model that is loaded as a whole.
    pub shards: Vec<Shard>,
}

/// A load into this memory.
#[derive(Clone, Copy)]
pub(crate) struct LoadTransfer<'a> {
    pub task: &'a LoadTask,
    pub run: &'a Run<'a>,
    pub memory: &'a dyn Filling,
}

/// The result.
pub(crate) struct Outcome {
    /// The last method that was tried.
    pub attempt: Attempt,
    pub verified: Vec<Verified>,
}

impl LoadTask {
    /// Where a byte of the file is in memory.
    fn at(&self, file: u64) -> u64 {
        file - self.plan.offset + self.plan.place.start
    }

    /// Which byte of the file goes to an offset in memory.
    fn file(&self, at: u64) -> u64 {
        at - self.plan.place.start + self.plan.offset
    }

    fn cut(&self) -> Cut {
        let whole = self
            .plan
            .methods
            .iter()
            .any(|attempt| attempt.in_whole_blocks());
        let tuning = self.plan.tuning;
        Cut {
            block: tuning.block,
            align: if whole { tuning.align } else { 1 },
            base: self.plan.base(),
            phase: self.plan.phase(),
            capacity: self.plan.place.writable_to,
        }
    }
}

impl LoadTransfer<'_> {
    /// Moves every byte, or fails. Either way nothing is in flight when it returns.
    pub(crate) fn run(&self) -> Result<Outcome> {
        let (task, run) = (self.task, self.run);
        let ahead = task.plan.allocation != Allocation::InRead;
        let (feed, work) = self.feed(ahead);
        let (attempt, digests) = if ahead || !task.checks.is_empty() {
            self.with_helpers(&feed, work, ahead)
        } else {
            (self.read(&feed, work), Ok(Vec::new()))
        };
        self.check(&feed)?;
        self.zero_around()
            .map_err(|errno| Error::os("cannot zero the bytes around the file's", errno))?;
        let verified = task.check_digests(digests?)?;
        run.meter.tell_progress(true);
        Ok(Outcome { attempt, verified })
    }

    /// What is to be read and copied. If memory is allocated meanwhile, nothing of it is handed out yet.
    fn feed(&self, ahead: bool) -> (Feed, Work) {
        let (method, cached) = self.queues();
        let work = Work {
            reads: !method.is_empty(),
            copies: !cached.is_empty(),
        };
        // Without this event, a ring that waits for a read notices new memory a little later.
        let notifier = if ahead { Notifier::new().ok() } else { None };
        let mut feed = Feed::new(method, cached, self.task.cut(), notifier);
        if let Some(limit) = self.task.plan.tuning.limit {
            feed.limit(limit, self.run.cancel);
        }
        if ahead {
            feed.hold();
        }
        (feed, work)
    }

    /// Reads, while threads allocate ahead and another one hashes what has been read. If no thread
    /// can be created (RLIMIT_NPROC), reads fault their pages in and hashing comes last.
    fn with_helpers(&self, feed: &Feed, work: Work, ahead: bool) -> (Attempt, Result<Vec<String>>) {
        let (task, run) = (self.task, self.run);
        let steps = Steps::new(*self);
        std::thread::scope(|scope| {
            let spawn = |name: &str| std::thread::Builder::new().name(name.to_string());
            let hash = || task.hash(run, self.memory, feed);
            let allocator =
                ahead.then(|| spawn("dmafile-alloc").spawn_scoped(scope, || steps.run(feed)));
            let verifier = (!task.checks.is_empty())
                .then(|| spawn("dmafile-verify").spawn_scoped(scope, hash));
            if let Some(Err(error)) = &allocator {
                let why = format!("cannot start a thread ({error})");
                run.log.add(About::Allocation, Allocation::InRead, why);
                feed.publish(u64::MAX);
            }
            let over = TransferGuard(run, feed);
            let attempt = self.read(feed, work);
            drop(over);
            if let Some(Ok(thread)) = allocator {
                sync::join(thread);
            }
            let digests = match verifier {
                None => Ok(Vec::new()),
                Some(Ok(thread)) => sync::join(thread),
                Some(Err(_)) => hash(),
            };
            (attempt, digests)
        })
    }

    /// Calls `read` with an attempt to read what is in the feed.
    fn attempt<T>(&self, feed: &Feed, attempt: Attempt, read: impl FnOnce(&ReadJob<'_>) -> T) -> T {
        let (plan, source) = (&self.task.plan, &*self.task.source);
        let ahead = plan.allocation != Allocation::InRead;
        read(&ReadJob {
            pass: Pass {
                attempt,
                feed,
                run: self.run,
                place: &|at| source.place(at),
                node: plan.node,
            },
            plan,
            source,
            region: self.memory.region(),
            may_fault: match self.memory.never_faults() {
                false => MayFault::Anytime,
                _ if plan.pages == Pages::Huge && !ahead => MayFault::Absent,
                true => MayFault::Never,
            },
            descriptor: self.memory.descriptor(),
            dma_buf: self.memory.dma_buf(),
        })
    }

    /// After everything has ended: checks that all bytes are in place.
    fn check(&self, feed: &Feed) -> Result<()> {
        let (task, run) = (self.task, self.run);
        if let Some(error) = feed.error() {
            return Err(error);
        }
        run.check(|| task.source.whole())?;
        let (direct, buffered) = run.meter.totals();
        let data: u64 = task.layout.runs.iter().map(|run| run.end - run.start).sum();
        if direct + buffered < data {
            // Whatever ends without an error must have drained the feed; anything else is a bug, and must not
            // produce a buffer with a gap.
            return Err(Error::new(
                Verb::Load,
                format!("only {} of {data} bytes arrived", direct + buffered),
            ));
        }
        // A hole at the end hides that the file was truncated: no read has reached its end.
        match task.source.missing(&task.layout.wanted)? {
            Some(now) => Err(method::cut_short(&task.source, now)),
            None => Ok(()),
        }
    }

    /// Zeros bytes outside the requested range: rounded-up reads have brought some in, and memory
    /// that is not fresh has old contents, also in holes.
    fn zero_around(&self) -> Result<(), Errno> {
        let (task, memory) = (self.task, self.memory);
        let (plan, runs) = (&task.plan, &task.layout.runs);
        let place = plan.place;
        let end = place.start + plan.bytes;
        if !memory.is_fresh() {
            let mut done = place.start;
            for run in runs {
                memory.zero(done, task.at(run.start) - done)?;
                done = task.at(run.end);
            }
            memory.zero(done, end - done)?;
            return memory.zero(end, place.writable_to - end);
        }
        memory.zero(place.writable_from, place.start - place.writable_from)?;
        // After each file that was read to its end, and may have grown during the load.
        for (_, start, size) in task.source.files() {
            let end = (start + size).min(plan.offset + plan.bytes);
            let last = runs.partition_point(|run| run.start < end).checked_sub(1);
            if last.is_some_and(|last| runs[last].end == end) {
                // Up to where the read reached in the file: in memory its end need not be aligned,
                // and the next file may follow immediately.
                let touched = task.at(end.next_multiple_of(plan.tuning.align));
                let end = task.at(end);
                memory.zero(end, touched.min(place.writable_to) - end)?;
            }
        }
        Ok(())
    }
}

/// When reading has ended, even by a panic in the caller's progress function, nothing must keep
/// waiting.
struct TransferGuard<'a>(&'a Run<'a>, &'a Feed);

impl Drop for TransferGuard<'_> {
    fn drop(&mut self) {
        self.1.stop(None);
        self.0.meter.over();
    }
}

#[cfg(test)]
mod tests;
