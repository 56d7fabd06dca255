//! The pipeline: memory is allocated gather by gather while earlier gathers are read.
//!
//! Total time tends to `T(first gather) + max(T(remaining allocation), T(I/O))` (AR-22).

mod allocate;
mod born;
pub(crate) mod feed;
pub(crate) mod meter;

use crate::CancelToken;
use crate::buffer::Memory;
use crate::error::{Error, Result};
use crate::facts::Layout;
use crate::method::{self, Job, Stop};
use crate::options::{Allocation, Pages};
use crate::plan::{Plan, Reason, Rung};
use crate::source::Source;
use crate::sys::usage::Bell;
use crate::sys::{Errno, numa};
use crate::verify::{Check, Hasher, Verified};
use allocate::Steps;
pub(crate) use born::born;
use feed::{Cut, Feed, FileRange};
use meter::{Meter, Phase, ROW_VERIFY};

/// What one transfer works on.
pub(crate) struct Transfer<'a> {
    pub plan: &'a Plan,
    pub layout: &'a Layout,
    pub source: &'a Source,
    pub memory: &'a dyn Memory,
    pub meter: &'a Meter<'a>,
    pub cancel: &'a CancelToken,
    pub checks: &'a [Check],
}

/// What came of it.
pub(crate) struct Outcome {
    pub rung: Rung,
    pub reasons: Vec<Reason>,
    pub verified: Vec<Verified>,
}

impl Transfer<'_> {
    /// Moves every byte, or fails. Either way nothing is in flight when it returns.
    pub(crate) fn run(&self) -> Result<Outcome> {
        let (main, copy) = self.lanes();
        let lanes = Lanes {
            main: !main.is_empty(),
            copy: !copy.is_empty(),
        };
        let ahead = self.plan.allocation != Allocation::InRead;
        // Without a bell a ring that waits for a read notices new memory a little later.
        let bell = if ahead { Bell::new().ok() } else { None };
        let feed = Feed::new(main, copy, self.cut(), bell);
        let mut outcome = Outcome {
            rung: self.plan.first(),
            reasons: Vec::new(),
            verified: Vec::new(),
        };
        let digests = if ahead || !self.checks.is_empty() {
            self.with_helpers(&feed, lanes, ahead, &mut outcome)
        } else {
            self.read(&feed, lanes, &mut outcome);
            Ok(Vec::new())
        };
        self.finish(&feed)?;
        outcome.verified = self.judge(digests?)?;
        Ok(outcome)
    }

    /// Compares digests with what is expected.
    fn judge(&self, digests: Vec<String>) -> Result<Vec<Verified>> {
        let pairs = self.checks.iter().zip(digests);
        pairs.map(|(check, digest)| check.judge(digest)).collect()
    }

    /// Reads, while threads allocate ahead and another hashes what has landed. Where no
    /// thread is to be had (RLIMIT_NPROC), reads fault their pages in and hashing comes last.
    fn with_helpers(
        &self,
        feed: &Feed,
        lanes: Lanes,
        ahead: bool,
        outcome: &mut Outcome,
    ) -> Result<Vec<String>> {
        let steps = Steps::new(self);
        if ahead {
            feed.hold();
        }
        std::thread::scope(|scope| {
            let spawn = |name: &str| std::thread::Builder::new().name(name.to_string());
            let allocator =
                ahead.then(|| spawn("dmafile-alloc").spawn_scoped(scope, || steps.run(feed)));
            let verifier = (!self.checks.is_empty())
                .then(|| spawn("dmafile-verify").spawn_scoped(scope, || self.hash(feed)));
            if let Some(Err(error)) = &allocator {
                outcome
                    .reasons
                    .push(in_read(format!("no thread is to be had ({error})")));
                feed.publish(u64::MAX);
            }
            let over = Over(self, feed);
            self.read(feed, lanes, outcome);
            drop(over);
            let join = "a thread of ours does not panic";
            if let Some(Ok(thread)) = allocator {
                outcome.reasons.extend(thread.join().expect(join));
            }
            match verifier {
                None => Ok(Vec::new()),
                Some(Ok(thread)) => thread.join().expect(join),
                Some(Err(_)) => self.hash(feed),
            }
        })
    }

    /// The ranges of the file for the method and for the copy lane.
    fn lanes(&self) -> (Vec<FileRange>, Vec<FileRange>) {
        let (mut main, mut copy) = (Vec::new(), Vec::new());
        self.meter.in_place(0, self.plan.lead);
        let mut done = self.plan.offset;
        for run in &self.layout.runs {
            self.meter.in_place(self.at(done), self.at(run.start));
            done = run.end;
            if run.cached {
                copy.push((run.start, run.end));
                continue;
            }
            // Memory that is not ours to write beyond: a part of a block at either end cannot be
            // read directly.
            let align = self.plan.align;
            let mut middle = (run.start, run.end);
            if self.plan.first().lands_whole() {
                if self.at(run.start) < self.plan.floor + run.start % align {
                    middle.0 = run.start.next_multiple_of(align).min(run.end);
                }
                if self.at(run.end.next_multiple_of(align)) > self.plan.capacity {
                    middle.1 = (run.end - run.end % align).max(middle.0);
                }
            }
            copy.extend(
                [(run.start, middle.0), (middle.1, run.end)]
                    .iter()
                    .filter(|r| r.0 < r.1),
            );
            main.extend([middle].iter().filter(|r| r.0 < r.1));
        }
        self.meter
            .in_place(self.at(done), self.at(self.plan.offset + self.plan.bytes));
        (main, copy)
    }

    /// Where a byte of the file lies in memory.
    fn at(&self, file: u64) -> u64 {
        file - self.plan.offset + self.plan.lead
    }

    /// The place in the file of the memory's first byte, wrapping.
    fn base(&self) -> u64 {
        self.plan.offset.wrapping_sub(self.plan.lead)
    }

    fn cut(&self) -> Cut {
        let whole = self.plan.ladder.iter().any(|rung| rung.lands_whole());
        Cut {
            block: self.plan.block,
            align: if whole { self.plan.align } else { 1 },
            base: self.base(),
            phase: self.base() % self.plan.align,
            capacity: self.plan.capacity,
        }
    }

    /// Runs the lanes that have something to do until all extents are moved; errors are left in
    /// the feed.
    fn read(&self, feed: &Feed, lanes: Lanes, outcome: &mut Outcome) {
        match (lanes.main, lanes.copy) {
            (true, true) => std::thread::scope(|scope| {
                let copier = || {
                    numa::prefer(self.plan.node);
                    self.lane_copy(feed);
                };
                let name = "dmafile-copy".to_string();
                let thread = std::thread::Builder::new()
                    .name(name)
                    .spawn_scoped(scope, copier);
                self.lane_main(feed, outcome);
                match thread {
                    Ok(thread) => thread.join().expect("a thread of ours does not panic"),
                    // No thread is to be had: one lane after the other.
                    Err(_) => self.lane_copy(feed),
                }
            }),
            (true, false) => self.lane_main(feed, outcome),
            (false, true) => self.lane_copy(feed),
            (false, false) => {}
        }
    }

    fn job<'j>(&'j self, feed: &'j Feed, rung: Rung) -> Job<'j> {
        Job {
            plan: self.plan,
            rung,
            source: self.source,
            region: self.memory.region(),
            // Huge pages that are not there yet may be refused by a cgroup: with a signal.
            steady: self.memory.steady().is_some()
                && (self.plan.pages != Pages::Huge || self.plan.allocation != Allocation::InRead),
            descriptor: self.memory.descriptor(),
            dma_buf: match &self.memory.dma_bufs()[..] {
                [one] => Some(one.fd),
                _ => None,
            },
            feed,
            meter: self.meter,
            cancel: self.cancel,
        }
    }

    fn lane_copy(&self, feed: &Feed) {
        let job = self.job(feed, self.plan.first());
        if let Err(stop) = method::copy_cached(&job, self.plan.workers_for_copies()) {
            let (Stop::Failed(error) | Stop::Refused(error) | Stop::NotDirect(error)) = stop;
            feed.stop(Some(error));
        }
    }

    /// Walks the ladder.
    fn lane_main(&self, feed: &Feed, outcome: &mut Outcome) {
        let mut rungs = self.plan.ladder.iter().copied().peekable();
        while let Some(rung) = rungs.next() {
            outcome.rung = rung;
            let error = match method::run(&self.job(feed, rung)) {
                Ok(()) => return,
                Err(Stop::Failed(error)) => return feed.stop(Some(error)),
                Err(Stop::Refused(error)) => error,
                Err(Stop::NotDirect(error)) => {
                    while rungs.next_if(|next| next.direct).is_some() {}
                    error
                }
            };
            let Some(next) = rungs.peek() else {
                return feed.stop(Some(error));
            };
            outcome.reasons.push(Reason {
                about: "method",
                choice: next.to_string(),
                why: format!("{rung} ended: {error}"),
            });
        }
    }

    /// Hashes the wanted bytes of each file in file order as they land.
    fn hash(&self, feed: &Feed) -> Result<Vec<String>> {
        // Small enough to stay in the CPU's cache between the copy and the hash.
        let mut scratch = vec![0; 64 << 10];
        let mut digests = Vec::new();
        for check in self.checks {
            let mut hasher = Hasher::new(check.algorithm);
            let (mut at, end) = (self.at(check.range.0), self.at(check.range.1));
            while at < end {
                let Some(upto) = self.meter.wait_landed(at) else {
                    return Err(unfinished());
                };
                let (start, first) = (self.meter.now(), at);
                at = upto.min(end);
                self.hash_range(first, at, &mut hasher, &mut scratch, feed)?;
                self.meter.add(Phase::Verify, start);
                let offset = first - self.plan.lead;
                self.meter
                    .span("verify", ROW_VERIFY, start, offset, at - first);
            }
            digests.push(hasher.hex());
        }
        Ok(digests)
    }

    /// Hashes what lies between two places in memory.
    fn hash_range(
        &self,
        mut at: u64,
        end: u64,
        hasher: &mut Hasher,
        scratch: &mut [u8],
        feed: &Feed,
    ) -> Result<()> {
        static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
        let runs = &self.layout.runs;
        let mut next = runs.partition_point(|run| self.at(run.end) <= at);
        while at < end {
            // What has failed or been cancelled needs no digest, and nobody waits for one.
            if self.cancel.is_set() || feed.failed() {
                return Err(unfinished());
            }
            let run = runs.get(next).filter(|run| self.at(run.start) < end);
            // Holes are zeros; looking at them would allocate memory for them.
            let hole_end = run.map_or(end, |run| self.at(run.start));
            if at < hole_end {
                let len = (hole_end - at).min(ZEROS.len() as u64);
                hasher.update(&ZEROS[..len as usize]);
                at += len;
                continue;
            }
            let run_end = run.map_or(end, |run| self.at(run.end)).min(end);
            let len = (run_end - at).min(scratch.len() as u64);
            let chunk = &mut scratch[..len as usize];
            self.memory
                .copy_out(at, chunk)
                .map_err(|errno| Error::os("cannot verify the buffer", errno))?;
            hasher.update(chunk);
            at += len;
            next += usize::from(at == run_end);
        }
        Ok(())
    }

    /// All lanes have ended: is everything there, and is everything around it zero?
    fn finish(&self, feed: &Feed) -> Result<()> {
        if let Some(error) = feed.error() {
            return Err(error);
        }
        if self.cancel.is_set() {
            return Err(Error::cancelled(self.source.whole()));
        }
        let (direct, buffered) = self.meter.moved();
        let data: u64 = self.layout.runs.iter().map(|run| run.end - run.start).sum();
        if direct + buffered < data {
            // A lane that ends without an error has drained; anything else is our own mistake,
            // and must not become a buffer with a gap.
            return Err(Error::new(
                "load",
                format!("only {} of {data} bytes came", direct + buffered),
            ));
        }
        // A hole at the end hides that the file was cut short: no read has met its end.
        if let Some(now) = self.source.missing(&self.layout.wanted)? {
            return Err(method::cut_short(self.source, now));
        }
        self.zero_around()
            .map_err(|errno| Error::os("cannot zero the bytes around the file's", errno))
    }

    /// Bytes outside the wanted range are zero: rounded-out reads have brought some in, and
    /// memory that is not fresh holds whatever it held, in holes too.
    fn zero_around(&self) -> Result<(), Errno> {
        let (floor, lead) = (self.plan.floor, self.plan.lead);
        let end = lead + self.plan.bytes;
        let capacity = self.plan.capacity;
        if !self.memory.is_fresh() {
            let mut done = lead;
            for run in &self.layout.runs {
                self.memory.zero(done, self.at(run.start) - done)?;
                done = self.at(run.end);
            }
            self.memory.zero(done, end - done)?;
            return self.memory.zero(end, capacity - end);
        }
        self.memory.zero(floor, lead - floor)?;
        // Behind each file that was read to its end, and may have grown meanwhile.
        let first = self.plan.offset;
        for (_, start, size) in self.source.files() {
            let end = (start + size).min(first + self.plan.bytes);
            let runs = &self.layout.runs;
            let last = runs.partition_point(|run| run.start < end).checked_sub(1);
            if last.is_some_and(|last| runs[last].end == end) {
                // As far as the read reached in the file: in memory its end need not be aligned, and
                // the next file may begin right behind it.
                let touched = self.at(end.next_multiple_of(self.plan.align)).min(capacity);
                let end = self.at(end);
                self.memory.zero(end, touched - end)?;
            }
        }
        Ok(())
    }
}

/// When reading has ended, in a panic of a caller's progress function too, nobody is left waiting
/// for what will not come.
struct Over<'a>(&'a Transfer<'a>, &'a Feed);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.1.stop(None);
        self.0.meter.over();
    }
}

/// Which lanes have something to do.
#[derive(Clone, Copy)]
struct Lanes {
    main: bool,
    copy: bool,
}

fn unfinished() -> Error {
    Error::new("verify", "not all bytes came")
}

/// Allocation that was to run ahead is left to the reads.
fn in_read(why: String) -> Reason {
    Reason {
        about: "allocation",
        choice: Allocation::InRead.to_string(),
        why,
    }
}

#[cfg(test)]
mod tests;
