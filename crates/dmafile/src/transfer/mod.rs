//! The pipeline: memory is allocated chunk by chunk while earlier chunks are read.
//!
//! Total time tends to `T(first chunk) + max(T(remaining allocation), T(I/O))`.

mod allocate;
mod fused;
mod hash;
mod lanes;
mod through;

use crate::buffer::Filling;
use crate::control::CancelToken;
use crate::error::{Error, Result, Verb};
use crate::facts::Layout;
use crate::flow::feed::{Cut, Feed};
use crate::flow::meter::Meter;
use crate::method::{self, ReadJob};
use crate::options::{Allocation, Pages};
use crate::plan::{Attempt, Plan};
use crate::reasons::Reasons;
use crate::source::Source;
use crate::sync;
use crate::sys::Errno;
use crate::sys::notifier::Notifier;
use crate::verify::{DigestCheck, Verified};
use allocate::Steps;
pub(crate) use fused::fused;
use lanes::Lanes;
pub(crate) use through::Through;

/// What one load must move, and what monitors it.
#[derive(Clone, Copy)]
pub(crate) struct Work<'a> {
    pub plan: &'a Plan,
    pub layout: &'a Layout,
    pub source: &'a Source,
    pub checks: &'a [DigestCheck],
    pub meter: &'a Meter<'a>,
    pub cancel: &'a CancelToken,
    pub log: &'a Reasons,
}

/// The work, and the memory that it fills.
pub(crate) struct LoadTransfer<'a> {
    pub work: Work<'a>,
    pub memory: &'a dyn Filling,
}

/// The result.
pub(crate) struct Outcome {
    /// The last method of the main lane.
    pub attempt: Attempt,
    pub verified: Vec<Verified>,
}

impl Work<'_> {
    /// Where a byte of the file is in memory.
    fn at(&self, file: u64) -> u64 {
        file - self.plan.offset + self.plan.lead
    }

    fn cut(&self) -> Cut {
        let whole = self
            .plan
            .methods
            .iter()
            .any(|attempt| attempt.lands_whole());
        let tuning = self.plan.tuning;
        Cut {
            block: tuning.block,
            align: if whole { tuning.align } else { 1 },
            base: self.plan.base(),
            phase: self.plan.phase(),
            capacity: self.plan.capacity,
        }
    }
}

impl LoadTransfer<'_> {
    /// Moves every byte, or fails. Either way nothing is in flight when it returns.
    pub(crate) fn run(&self) -> Result<Outcome> {
        let (main, copy) = self.lanes();
        let lanes = Lanes {
            main: !main.is_empty(),
            copy: !copy.is_empty(),
        };
        let ahead = self.work.plan.allocation != Allocation::InRead;
        // Without this event, a ring that waits for a read notices new memory a little later.
        let notifier = if ahead { Notifier::new().ok() } else { None };
        let feed = Feed::new(main, copy, self.work.cut(), notifier);
        let (attempt, digests) = if ahead || !self.work.checks.is_empty() {
            self.with_helpers(&feed, lanes, ahead)
        } else {
            (self.read(&feed, lanes), Ok(Vec::new()))
        };
        self.check(&feed)?;
        self.zero_around()
            .map_err(|errno| Error::os("cannot zero the bytes around the file's", errno))?;
        let verified = self.work.judge(digests?)?;
        self.work.meter.tell_progress(true);
        Ok(Outcome { attempt, verified })
    }

    /// Reads, while threads allocate ahead and another one hashes what has been read. If no thread
    /// can be created (RLIMIT_NPROC), reads fault their pages in and hashing comes last.
    fn with_helpers(
        &self,
        feed: &Feed,
        lanes: Lanes,
        ahead: bool,
    ) -> (Attempt, Result<Vec<String>>) {
        let steps = Steps::new(self);
        if ahead {
            feed.hold();
        }
        std::thread::scope(|scope| {
            let spawn = |name: &str| std::thread::Builder::new().name(name.to_string());
            let allocator =
                ahead.then(|| spawn("dmafile-alloc").spawn_scoped(scope, || steps.run(feed)));
            let verifier = (!self.work.checks.is_empty()).then(|| {
                spawn("dmafile-verify").spawn_scoped(scope, || self.work.hash(self.memory, feed))
            });
            if let Some(Err(error)) = &allocator {
                let why = format!("cannot start a thread ({error})");
                self.work.log.add("allocation", Allocation::InRead, why);
                feed.publish(u64::MAX);
            }
            let over = TransferGuard(self, feed);
            let attempt = self.read(feed, lanes);
            drop(over);
            if let Some(Ok(thread)) = allocator {
                sync::join(thread);
            }
            let digests = match verifier {
                None => Ok(Vec::new()),
                Some(Ok(thread)) => sync::join(thread),
                Some(Err(_)) => self.work.hash(self.memory, feed),
            };
            (attempt, digests)
        })
    }

    fn job<'j>(&'j self, feed: &'j Feed, attempt: Attempt) -> ReadJob<'j> {
        ReadJob {
            plan: self.work.plan,
            attempt,
            source: self.work.source,
            region: self.memory.region(),
            // A cgroup may refuse huge pages that are not present yet, by a signal.
            never_faults: self.memory.never_faults()
                && (self.work.plan.pages != Pages::Huge
                    || self.work.plan.allocation != Allocation::InRead),
            descriptor: self.memory.descriptor(),
            dma_buf: self.memory.dma_buf(),
            feed,
            meter: self.work.meter,
            cancel: self.work.cancel,
        }
    }

    /// After all lanes have ended: checks that everything is in place.
    fn check(&self, feed: &Feed) -> Result<()> {
        if let Some(error) = feed.error() {
            return Err(error);
        }
        if self.work.cancel.is_cancelled() {
            return Err(Error::cancelled(Verb::Load, self.work.source.whole()));
        }
        let (direct, buffered) = self.work.meter.moved();
        let data: u64 = self
            .work
            .layout
            .runs
            .iter()
            .map(|run| run.end - run.start)
            .sum();
        if direct + buffered < data {
            // A lane that ends without an error must have drained its feed; anything else is a bug,
            // and must not produce a buffer with a gap.
            return Err(Error::new(
                "load",
                format!("only {} of {data} bytes arrived", direct + buffered),
            ));
        }
        // A hole at the end hides that the file was truncated: no read has reached its end.
        match self.work.source.missing(&self.work.layout.wanted)? {
            Some(now) => Err(method::cut_short(self.work.source, now)),
            None => Ok(()),
        }
    }

    /// Zeros bytes outside the requested range: rounded-up reads have brought some in, and memory
    /// that is not fresh has old contents, also in holes.
    fn zero_around(&self) -> Result<(), Errno> {
        let (floor, lead) = (self.work.plan.floor, self.work.plan.lead);
        let end = lead + self.work.plan.bytes;
        let capacity = self.work.plan.capacity;
        if !self.memory.is_fresh() {
            let mut done = lead;
            for run in &self.work.layout.runs {
                self.memory.zero(done, self.work.at(run.start) - done)?;
                done = self.work.at(run.end);
            }
            self.memory.zero(done, end - done)?;
            return self.memory.zero(end, capacity - end);
        }
        self.memory.zero(floor, lead - floor)?;
        // After each file that was read to its end, and may have grown during the load.
        let first = self.work.plan.offset;
        for (_, start, size) in self.work.source.files() {
            let end = (start + size).min(first + self.work.plan.bytes);
            let runs = &self.work.layout.runs;
            let last = runs.partition_point(|run| run.start < end).checked_sub(1);
            if last.is_some_and(|last| runs[last].end == end) {
                // Up to where the read reached in the file: in memory its end need not be aligned,
                // and the next file may follow immediately.
                let touched = self
                    .work
                    .at(end.next_multiple_of(self.work.plan.tuning.align))
                    .min(capacity);
                let end = self.work.at(end);
                self.memory.zero(end, touched - end)?;
            }
        }
        Ok(())
    }
}

/// When reading has ended, even by a panic in the caller's progress function, nothing must keep
/// waiting.
struct TransferGuard<'a>(&'a LoadTransfer<'a>, &'a Feed);

impl Drop for TransferGuard<'_> {
    fn drop(&mut self) {
        self.1.stop(None);
        self.0.work.meter.over();
    }
}

#[cfg(test)]
mod tests;
