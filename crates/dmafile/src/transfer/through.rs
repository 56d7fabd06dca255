//! A load that does not stay in memory: reads fill the slots of a ring, and the sink empties them.
//!
//! To the readers, the ring looks like memory as long as the file. More of it becomes available whenever
//! the sink has finished with a slot.

use super::{LoadTask, LoadTransfer, Outcome, TransferGuard};
use crate::buffer::{self, CopyOut, Filling};
use crate::error::{Error, Result};
use crate::flow::feed::Feed;
use crate::flow::prefix::{Prefix, PrefixGuard};
use crate::flow::run::Run;
use crate::options::Pages;
use crate::sink::{Memory, Piece, Ring, Sink, Slot};
use crate::sync;
use crate::sys::{Errno, numa, sandbox};
use std::collections::VecDeque;

/// The task, and the ring that its bytes go through.
pub(crate) struct Through<'a> {
    task: &'a LoadTask,
    run: &'a Run<'a>,
    ring: buffer::RingBuffer,
    /// Size of a slot in bytes, and number of slots in the ring, of which the last one may be smaller.
    slot: u64,
    slots: u64,
    /// Slot `n` begins at offset `n * slot - phase` of the memory that the readers see.
    phase: u64,
}

/// A slot that has been handed to the sink and not been returned to the readers.
struct SlotInSink {
    number: u64,
    /// The sink is still using it. Never true of a slot without wanted bytes.
    full: bool,
    /// Offset of the end of its data: the slot has been hashed when everything below that has.
    data_end: u64,
}

impl<'a> Through<'a> {
    /// `asked` is the requested page size.
    pub(crate) fn new(
        task: &'a LoadTask,
        run: &'a Run<'a>,
        ring: Ring,
        asked: Pages,
    ) -> Result<Self> {
        let plan = &task.plan;
        let shape = ring.shape(plan.tuning.block, plan.span(), plan.end())?;
        Ok(Self {
            task,
            run,
            ring: buffer::make_ring(shape.bytes, plan, asked, run.log)?,
            slot: shape.slot,
            slots: shape.slots,
            phase: plan.phase(),
        })
    }

    /// The page size that the ring got, with a remark if necessary.
    pub(crate) fn pages(&self) -> (String, Option<String>) {
        self.ring.pages()
    }

    /// Moves every byte into the sink, or fails. Either way nothing is in flight when it returns.
    pub(crate) fn run(&self, sink: &mut dyn Sink) -> Result<Outcome> {
        let (task, run) = (self.task, self.run);
        let transfer = LoadTransfer {
            task,
            run,
            memory: &self.ring,
        };
        let (feed, work) = transfer.feed(true);
        let hashed = (!task.checks.is_empty()).then(Prefix::default);
        let (attempt, digests) = std::thread::scope(|scope| {
            let spawn = |name: &str| std::thread::Builder::new().name(name.to_string());
            let reader = spawn("dmafile-read").spawn_scoped(scope, || {
                let _over = TransferGuard(run, &feed);
                numa::prefer(task.plan.node);
                transfer.read(&feed, work)
            });
            let hasher = hashed.as_ref().map(|hashed| {
                spawn("dmafile-verify").spawn_scoped(scope, || {
                    let _over = PrefixGuard(hashed);
                    task.hash(run, &WatchedRing(&self.ring, hashed), &feed)
                })
            });
            let refused = [
                reader.as_ref().err(),
                hasher.as_ref().and_then(|one| one.as_ref().err()),
            ];
            match refused.into_iter().flatten().next() {
                Some(error) => feed.stop(Some(no_thread(error))),
                None => {
                    if let Err(error) = self.drive(&feed, hashed.as_ref(), sink) {
                        feed.stop(Some(error));
                    }
                }
            }
            let attempt = match reader {
                Ok(thread) => sync::join(thread),
                Err(_) => {
                    drop(TransferGuard(run, &feed));
                    task.plan.first()
                }
            };
            let digests = match hasher {
                Some(Ok(thread)) => sync::join(thread),
                _ => Ok(Vec::new()),
            };
            (attempt, digests)
        });
        transfer.check(&feed)?;
        let verified = task.check_digests(digests?)?;
        run.meter.tell_progress(true);
        Ok(Outcome { attempt, verified })
    }

    /// Hands filled slots to the sink, and returns them to the readers when the sink has finished with them.
    fn drive(&self, feed: &Feed, hashed: Option<&Prefix>, sink: &mut dyn Sink) -> Result<()> {
        // However this ends, the readers must not keep waiting for a slot.
        let _end = SinkGuard(feed);
        self.populate(feed)?;
        let mut sink = Begun {
            sink,
            finished: false,
        };
        sink.sink.begin(Memory::of(self.ring.memory()))?;
        let mut taken = VecDeque::<SlotInSink>::new();
        let end = self.task.plan.span().div_ceil(self.slot);
        for number in 0..end {
            // Half of the ring is for the readers, unless the rest of the file has its slots.
            while taken.len() as u64 > self.slots / 2 && taken[0].number + self.slots < end {
                self.give_back(feed, hashed, &mut taken, sink.sink, true)?;
            }
            while self.give_back(feed, hashed, &mut taken, sink.sink, false)? {}
            let Some(one) = self.deliver(number, sink.sink)? else {
                // Reading has ended early; the feed has the reason.
                return Ok(());
            };
            taken.push_back(one);
        }
        while self.give_back(feed, hashed, &mut taken, sink.sink, true)? {}
        sink.finished = true;
        sink.sink.finish()
    }

    /// Allocates the ring's pages slot by slot, while the first slots are already being filled.
    fn populate(&self, feed: &Feed) -> Result<()> {
        numa::prefer(self.task.plan.node);
        for number in 0..self.slots {
            self.check()?;
            let start = self.run.meter.now();
            let at = number * self.slot;
            let len = self.slot.min(self.ring.memory().len() - at);
            match self.ring.populate(at, len) {
                // A kernel before 5.14, or a sandbox: the first reads fault them in.
                Ok(()) | Err(Errno::INVAL) => {}
                Err(errno) if sandbox::may_return(errno) => {}
                Err(errno) => {
                    return Err(Error::os("cannot allocate memory", errno)
                        .at(format!("a ring of {} bytes", self.ring.memory().len())));
                }
            }
            self.run.meter.allocated(start, at, len);
            feed.publish(self.start(number + 1));
        }
        Ok(())
    }

    /// Offset of slot `number` in the memory that the readers see.
    fn start(&self, number: u64) -> u64 {
        (number * self.slot).saturating_sub(self.phase)
    }

    fn check(&self) -> Result<()> {
        self.run.check(|| self.task.source.whole())
    }

    /// Waits until a slot is filled, and hands it to the sink. None if reading has ended before that.
    fn deliver(&self, number: u64, sink: &mut dyn Sink) -> Result<Option<SlotInSink>> {
        let (plan, layout) = (&self.task.plan, &self.task.layout);
        let at = |file: u64| self.task.at(file);
        let end = plan.place.start + plan.bytes;
        let (start, stop) = (self.start(number).min(end), self.start(number + 1).min(end));
        let mut filled = 0;
        while filled < stop {
            match self.run.meter.wait_in_place(filled) {
                Some(more) => filled = more,
                None => return Ok(None),
            }
        }
        self.check()?;
        let clip = |range: (u64, u64)| {
            let (from, to) = (at(range.0).max(start), at(range.1).min(stop));
            (from < to).then_some((from, to))
        };
        let runs = &layout.runs[layout.runs.partition_point(|run| at(run.end) <= start)..];
        let mut runs = runs.iter().map_while(|run| clip((run.start, run.end)));
        let wanted = &layout.wanted;
        let wanted = &wanted[wanted.partition_point(|range| at(range.1) <= start)..];
        let (mut pieces, mut data_end, mut run) = (Vec::new(), 0, runs.next());
        for (from, to) in wanted.iter().copied().map_while(clip) {
            // Wanted bytes that are not data are holes. Zero them: the slot still has old bytes there.
            let mut done = from;
            while let Some((data, upto)) = run.filter(|run| run.0 < to) {
                if data > done {
                    self.ring.region().zero(done, data - done);
                }
                (done, data_end) = (done.max(upto), upto);
                if upto >= to {
                    break;
                }
                run = runs.next();
            }
            if done < to {
                self.ring.region().zero(done, to - done);
            }
            pieces.push(Piece {
                at: self.task.file(from),
                memory: Memory::of(self.ring.region().part(from, to - from)),
            });
        }
        if !pieces.is_empty() {
            let wanted_end = layout.wanted.last().map_or(0, |range| at(range.1));
            sink.take(&Slot {
                pieces: &pieces,
                last: wanted_end <= stop,
            })?;
        }
        Ok(Some(SlotInSink {
            number,
            full: !pieces.is_empty(),
            data_end,
        }))
    }

    /// Returns the oldest slot to the readers if the sink has finished with it, after waiting for that if
    /// `wait` is set. Returns whether it did.
    fn give_back(
        &self,
        feed: &Feed,
        hashed: Option<&Prefix>,
        taken: &mut VecDeque<SlotInSink>,
        sink: &mut dyn Sink,
        wait: bool,
    ) -> Result<bool> {
        let Some(oldest) = taken.front_mut() else {
            return Ok(false);
        };
        self.check()?;
        if oldest.full {
            if !sink.done(wait)? {
                return Ok(false);
            }
            oldest.full = false;
        }
        if let Some(hashed) = hashed {
            let mut upto = 0;
            while upto < oldest.data_end {
                match hashed.wait(upto) {
                    Some(more) => upto = more,
                    // Reading has ended early. The feed's error takes precedence over this one.
                    None => return Err(Error::new("cannot verify", "not all bytes arrived")),
                }
            }
        }
        feed.publish(self.start(oldest.number + 1 + self.slots));
        taken.pop_front();
        Ok(true)
    }
}

fn no_thread(error: &std::io::Error) -> Error {
    Error::os("cannot start a thread", crate::sys::errno(error))
        .with_remedy("raise the limit on processes: ulimit -u")
}

/// The ring, recording how far the hasher has read.
struct WatchedRing<'a>(&'a buffer::RingBuffer, &'a Prefix);

impl CopyOut for WatchedRing<'_> {
    fn copy_out(&self, at: u64, into: &mut [u8]) -> Result<(), Errno> {
        self.0.copy_out(at, into)?;
        // The hasher reads in ascending order, so it has finished with everything below.
        self.1.add(0, at + into.len() as u64);
        Ok(())
    }
}

/// A sink that `begin` has been called for. Dropping this calls `finish` if that has not been done.
struct Begun<'s> {
    sink: &'s mut dyn Sink,
    finished: bool,
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        if !self.finished {
            // The load has failed already.
            let _ = self.sink.finish();
        }
    }
}

/// Stops the readers when dropped, so also if the sink panics.
struct SinkGuard<'a>(&'a Feed);

impl Drop for SinkGuard<'_> {
    fn drop(&mut self) {
        self.0.stop(None);
    }
}
