//! `uring`: one ring, one thread, reads in flight up to the queue depth; a registered file, and windows
//! of registered buffers if the limit on pinned memory allows. `bounce` and `premap` use it, too.

use super::bounce::{self, Bounce};
use super::fill::{Rest, failed, is_refusal, judge, read_buffered, read_direct, refused};
use super::premap::{self, MappedDmaBuf};
use super::windows::{Map, Windows};
use super::{ReadJob, Stop};
use crate::error::{Error, Verb};
use crate::flow::feed::{FeedResult, IoExtent, Lane, Panics};
use crate::flow::meter::Phase;
use crate::flow::trace::ROW_READS;
use crate::options::Method;
use crate::sys::Errno;
use crate::sys::notifier::Notifier;
use crate::sys::uring::{Completion, IoMemory, IoRing};
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// The token of the wake-up event; reads are numbered from 0.
const BELL: u64 = u64::MAX;

/// How often a read into mapped memory is retried after EAGAIN, which the kernel returns occasionally
/// while a device is being reset.
const MOST_TRIES: u32 = 100;

/// A read in flight.
#[derive(Clone, Copy)]
struct ReadInFlight {
    /// The extent as taken from the feed.
    whole: IoExtent,
    /// What remains to be read after short reads, and where it goes.
    left: IoExtent,
    slot: Option<usize>,
    /// How often the kernel has refused it.
    tries: u32,
    start: Duration,
}

/// What is registered to be read into.
enum ReadSlots<'a> {
    Nothing,
    Windows(Windows),
    DmaBuf(MappedDmaBuf<'a>),
}

pub(super) fn run(job: &ReadJob<'_>) -> Result<(), Stop> {
    let depth = job.plan.tuning.queue_depth;
    pump(
        job,
        None,
        None,
        depth,
        ROW_READS,
        job.feed.notifier.as_ref(),
    )
}

/// Reads into a mapped dma-buf, without using its addresses.
pub(super) fn mapped(job: &ReadJob<'_>, dma_buf: BorrowedFd<'_>) -> Result<(), Stop> {
    let depth = job.plan.tuning.queue_depth;
    let notifier = job.feed.notifier.as_ref();
    pump(job, None, Some(dma_buf), depth, ROW_READS, notifier)
}

/// Reads into the blocks of a ring, as many at once as it has, and copies what has been read. Several
/// threads may do so, each with a separate ring, whose rows of the trace begin at `row`.
pub(super) fn bounced(
    job: &ReadJob<'_>,
    bounce: &Bounce<'_>,
    slots: u64,
    row: u64,
) -> Result<(), Stop> {
    // Only one thread can wait for the event, because reading it resets it; the others notice new memory
    // when their next read has completed.
    let notifier = job.feed.notifier.as_ref().filter(|_| row == 0);
    pump(
        job,
        Some(bounce),
        None,
        slots as u32,
        ROW_READS + row,
        notifier,
    )
}

fn pump(
    job: &ReadJob<'_>,
    bounce: Option<&Bounce<'_>>,
    dma_buf: Option<BorrowedFd<'_>>,
    depth: u32,
    row: u64,
    notifier: Option<&Notifier>,
) -> Result<(), Stop> {
    let starts = job.source.files().map(|(_, start, _)| start);
    let files: Result<Vec<_>, Error> = starts.map(|at| Ok(job.input(at)?.0)).collect();
    let mut ring = IoRing::new(files?, job.region, depth)
        .map_err(|errno| Stop::Refused(Error::os("no io_uring", errno)))?;
    let slots = match dma_buf {
        Some(dma_buf) => ReadSlots::DmaBuf(MappedDmaBuf::open(&mut ring, job, dma_buf)?),
        None if job.attempt.registered => {
            let map = match job.attempt.method {
                Method::Premap => Map::Yes,
                // Everything goes through the same blocks repeatedly. Other windows are read into only
                // once, so mapping them in advance takes as long as mapping for each read.
                Method::Bounce if job.plan.tuning.premaps => Map::IfPossible,
                _ => Map::No,
            };
            let windows = Windows::open(&mut ring, job.plan.window, map)
                .map_err(|errno| Stop::Refused(Error::os("buffers cannot be registered", errno)))?;
            ReadSlots::Windows(windows)
        }
        None => ReadSlots::Nothing,
    };
    let depth = depth as usize;
    let mut pump = ReadPump {
        job,
        bounce,
        notifier,
        row,
        ring,
        slots,
        flights: vec![None; depth],
        free: (0..depth).rev().collect(),
        listening: false,
        stop: None,
    };
    // Dropped before the ring, which waits for the event.
    let _panics = Panics::of(job.feed);
    pump.run();
    if let (true, Some(notifier)) = (pump.listening, notifier) {
        // When dropped, the ring waits for everything it was given, including the event.
        notifier.notify();
    }
    pump.stop.map_or(Ok(()), Err)
}

struct ReadPump<'a, 'j> {
    job: &'a ReadJob<'j>,
    /// Where the bytes go after the read, if it does not put them into place.
    bounce: Option<&'a Bounce<'a>>,
    notifier: Option<&'a Notifier>,
    /// The first of its rows in the trace.
    row: u64,
    ring: IoRing<'a>,
    slots: ReadSlots<'a>,
    flights: Vec<Option<ReadInFlight>>,
    free: Vec<usize>,
    listening: bool,
    /// Why no more reads are started; reads in flight are still waited for.
    stop: Option<Stop>,
}

impl ReadPump<'_, '_> {
    fn run(&mut self) {
        let mut done = Vec::new();
        loop {
            let starved = self.stop.is_none() && self.fill();
            if self.in_flight() == 0 {
                if self.stop.is_some() || !starved {
                    return;
                }
                // Nothing to wait for in the ring: wait for memory.
                match self.job.feed.wait(Lane::Main) {
                    Some(extent) => self.launch(extent),
                    None => return,
                }
                continue;
            }
            if starved {
                self.listen();
            }
            let start = self.job.meter.now();
            let waited = self.ring.submit_and_wait();
            self.job.meter.add(Phase::Wait, start);
            if let Err(errno) = waited
                && !matches!(errno, Errno::INTR | Errno::AGAIN | Errno::BUSY)
            {
                self.end(Stop::Failed(Error::os("io_uring failed", errno)));
                return;
            }
            if self.job.cancel.is_cancelled() {
                self.end(Stop::Failed(Error::cancelled(
                    Verb::Load,
                    self.job.source.whole(),
                )));
            }
            self.ring.completed(&mut done);
            for done in &done {
                self.land(*done);
            }
        }
    }

    /// Starts reads up to the queue depth. Returns true if there are more, but their memory is not
    /// allocated yet.
    fn fill(&mut self) -> bool {
        let start = self.job.meter.now();
        let mut queued = false;
        let starved = loop {
            if self.free.is_empty() || self.stop.is_some() {
                break false;
            }
            match self.job.feed.take(Lane::Main) {
                FeedResult::Extent(extent) => self.launch(extent),
                FeedResult::NotYet => break true,
                FeedResult::Drained => break false,
            }
            queued = true;
        };
        if queued {
            // Submitting here and not in the wait keeps the two times separate; an error will occur again
            // there.
            let _ = self.ring.submit();
            self.job.meter.add(Phase::Submit, start);
        }
        starved
    }

    fn launch(&mut self, extent: IoExtent) {
        let index = *self.free.last().expect("the caller has seen a free entry");
        let (left, present) = match self.bounce {
            Some(bounce) => (bounce.place(index as u64, &extent), u64::MAX),
            None => (extent, self.job.feed.frontier()),
        };
        let file = self.job.source.locate(left.file).0;
        let covered = match &mut self.slots {
            ReadSlots::Nothing => Ok(None),
            ReadSlots::Windows(windows) => windows.cover(&mut self.ring, present, &left, file),
            ReadSlots::DmaBuf(mapped) => mapped.cover(&mut self.ring, file).map(Some),
        };
        let slot = match covered {
            Ok(slot) => slot,
            Err(errno) => {
                // The limit is shared with the user's other processes, so it may be exhausted at any
                // time. The fallback reads without registered buffers.
                self.job.feed.put_back(extent);
                let error = Error::os("buffers cannot be registered", errno);
                let error = match errno {
                    Errno::NOMEM => {
                        error.with_remedy("raise the limit on locked memory: ulimit -l")
                    }
                    Errno::NOSPC => error.with_remedy("raise the parameter nvme.premap_max_mb"),
                    _ => error,
                };
                return self.end(Stop::Refused(error));
            }
        };
        self.free.pop();
        let start = self.job.meter.now();
        self.job.meter.io_begins();
        let flight = ReadInFlight {
            whole: extent,
            left,
            slot,
            tries: 0,
            start,
        };
        self.queue(index, flight);
    }

    fn queue(&mut self, index: usize, flight: ReadInFlight) {
        let left = flight.left;
        let landing = match (&self.slots, flight.slot) {
            (ReadSlots::DmaBuf(mapped), Some(slot)) => {
                IoMemory::Window(mapped.offset(slot, left.at), slot as u32)
            }
            (_, Some(slot)) => IoMemory::Registered(left.at, slot as u32),
            (_, None) => IoMemory::Region(left.at),
        };
        let place = self.job.source.locate(left.file);
        self.ring.read(index as u64, landing, left.len, place);
        self.flights[index] = Some(flight);
    }

    /// Makes the ring wake us when memory is added.
    fn listen(&mut self) {
        if let (Some(notifier), false) = (self.notifier, self.listening) {
            self.ring.listen(BELL, notifier);
            self.listening = true;
        }
    }

    fn land(&mut self, done: Completion) {
        if done.token == BELL {
            self.listening = false;
            if let Some(notifier) = self.notifier {
                notifier.clear();
            }
            return;
        }
        let (job, index) = (self.job, done.token as usize);
        let mut flight = self.flights[index].expect("a completion belongs to a read in flight");
        let direct = job.attempt.direct;
        let rest = match done.result {
            Ok(got) => judge(job, &flight.left, got, direct),
            Err(errno) if matches!(self.slots, ReadSlots::DmaBuf(_)) => {
                self.turned_away(&mut flight, errno)
            }
            // A read in a kernel worker thread may be interrupted by a signal.
            Err(Errno::INTR) => Ok(Rest::Again(flight.left)),
            // The ring does not wait for this read, or signals have kept the kernel from starting the thread that
            // would (ECANCELED: nothing here cancels reads). So do it here.
            Err(Errno::AGAIN | Errno::CANCELED) => match direct {
                true => read_direct(job, flight.left).map(|()| Rest::Nothing),
                false => read_buffered(job, flight.left).map(|()| Rest::Nothing),
            },
            Err(errno) if direct && is_refusal(errno) => Err(refused(job.source, errno)),
            Err(errno) => Err(Stop::Failed(failed(job.source, flight.left.file, errno))),
        };
        match rest {
            Ok(Rest::Again(left)) if self.stop.is_none() => {
                return self.queue(index, ReadInFlight { left, ..flight });
            }
            // Nothing is started after a stop: the whole extent is moved again.
            Ok(Rest::Again(_)) => {
                self.retire(index, &flight);
                job.feed.put_back(flight.whole);
                return;
            }
            _ => {}
        }
        self.retire(index, &flight);
        let landed = match rest {
            Ok(Rest::Buffered(left)) => read_buffered(job, left),
            other => other.map(drop),
        };
        let landed = landed.and_then(|()| self.copy_on(index, &flight.whole));
        match landed {
            Ok(()) => {
                let IoExtent { file, need, .. } = flight.whole;
                let row = self.row + index as u64;
                job.meter.span("read", row, flight.start, file, need);
                job.meter.landed(&flight.whole, direct);
            }
            Err(stop) => {
                job.feed.put_back(flight.whole);
                self.end(stop);
            }
        }
    }

    /// Handles a read into a mapped dma-buf that the kernel refused.
    fn turned_away(&self, flight: &mut ReadInFlight, errno: Errno) -> Result<Rest, Stop> {
        let job = self.job;
        let (start, end) = (
            flight.left.file + flight.left.head,
            flight.left.file + flight.left.need,
        );
        match errno {
            Errno::INTR => Ok(Rest::Again(flight.left)),
            Errno::AGAIN | Errno::CANCELED if flight.tries < MOST_TRIES => {
                flight.tries += 1;
                Ok(Rest::Again(flight.left))
            }
            // There are no pages that the CPU could zero.
            Errno::FAULT if premap::has_hole(job.source, start, end) => {
                bounce::once(job, &flight.left).map(|()| Rest::Nothing)
            }
            // The device or the mapping is gone; or the file cannot be read directly any more.
            Errno::AGAIN
            | Errno::CANCELED
            | Errno::FAULT
            | Errno::BADF
            | Errno::NODEV
            | Errno::INVAL
            | Errno::OPNOTSUPP => {
                let error = Error::os("reads into mapped memory are refused", errno);
                Err(Stop::Refused(error.at(job.source.place(flight.left.file))))
            }
            errno => Err(Stop::Failed(failed(job.source, flight.left.file, errno))),
        }
    }

    /// Copies what has been read to its final place.
    fn copy_on(&self, index: usize, extent: &IoExtent) -> Result<(), Stop> {
        if let Some(bounce) = self.bounce {
            let start = self.job.meter.now();
            bounce.copy(index as u64, extent)?;
            self.job.meter.add(Phase::Copy, start);
        }
        Ok(())
    }

    fn retire(&mut self, index: usize, flight: &ReadInFlight) {
        self.flights[index] = None;
        self.free.push(index);
        self.job.meter.io_ends();
        match (&mut self.slots, flight.slot) {
            (ReadSlots::Windows(windows), Some(slot)) => windows.landed(slot),
            (ReadSlots::DmaBuf(mapped), Some(slot)) => mapped.landed(slot),
            _ => {}
        }
    }

    fn in_flight(&self) -> usize {
        self.flights.len() - self.free.len()
    }

    /// A failure takes precedence over a refusal, and only the first of each is kept.
    fn end(&mut self, stop: Stop) {
        if let Stop::Failed(error) = &stop {
            // The other lane and the other rings must stop, too.
            self.job.feed.stop(Some(error.clone()));
        }
        match (&self.stop, &stop) {
            (None, _) | (Some(Stop::Refused(_) | Stop::NotDirect(_)), Stop::Failed(_)) => {
                self.stop = Some(stop);
            }
            _ => {}
        }
    }
}
