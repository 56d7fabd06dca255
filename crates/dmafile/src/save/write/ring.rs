//! `uring` and `premap`: one ring, one thread, writes in flight up to the queue depth, directly from
//! the origin's memory; and `bounce`, from registered blocks.

use super::{Blocks, WriteJob};
use crate::error::{Error, Verb};
use crate::flow::feed::{FeedResult, IoExtent, Lane};
use crate::flow::meter::Phase;
use crate::flow::trace::ROW_READS;
use crate::method::{Map, Stop, Windows, run_workers};
use crate::options::Method;
use crate::sys::map::Region;
use crate::sys::uring::{Completion, IoMemory, IoRing, MAP_UNIT};
use crate::sys::{Errno, dmabuf};
use std::time::Duration;

/// A shorter run is not worth a registration.
const SMALL_RUN: u64 = 1 << 20;
/// How often a write from mapped memory is retried after EAGAIN, which the kernel returns occasionally
/// while a device is being reset.
const MOST_TRIES: u32 = 100;

/// A write in flight.
#[derive(Clone, Copy)]
struct WriteInFlight<'a> {
    /// The extent as taken from the feed, and how much of it is written from here.
    whole: IoExtent,
    bytes: u64,
    /// What remains to be written after short writes: source, destination, and length.
    at: u64,
    offset: u64,
    left: u64,
    /// The memory to write from, which `at` counts from; None is the ring's region.
    part: Option<Region<'a>>,
    window: Option<usize>,
    tries: u32,
    start: Duration,
}

/// What is registered to be written from.
enum WriteSlots {
    Nothing,
    Windows(Windows),
    /// The saved part of a dma-buf, from this byte on.
    DmaBuf(u64),
}

/// Writes directly from the origin's memory.
pub(super) fn by_address(job: &WriteJob<'_>) -> Result<(), Stop> {
    let depth = job.plan.depth_of(job.attempt);
    if job.attempt.method != Method::Premap {
        let region = job.region().map_err(|why| Error::new(Verb::Write, why))?;
        return pump(job, region, None, depth, 0);
    }
    // A mapped dma-buf is not accessed by address, so any region will do.
    super::in_blocks(job, |blocks| pump(job, blocks.ring, None, depth, 0))
}

/// Writes from blocks, which several threads fill one after another, each its own.
pub(super) fn through(job: &WriteJob<'_>, blocks: &Blocks<'_>) -> Result<(), Stop> {
    // With fewer than two blocks the disk would be idle during a copy.
    let workers = job.fillers((blocks.count / 2).min(2)) as u64;
    run_workers(job.plan.tuning.node, workers as usize, |row| {
        let own = (blocks.count + workers - 1 - row) / workers;
        let first = row * blocks.count.div_ceil(workers);
        pump(job, blocks.ring, Some((blocks, first)), own as u32, first)
    })
}

fn pump<'a>(
    job: &'a WriteJob<'a>,
    region: Region<'a>,
    blocks: Option<(&'a Blocks<'a>, u64)>,
    depth: u32,
    row: u64,
) -> Result<(), Stop> {
    if depth == 0 {
        return Ok(());
    }
    let refused = |what: &'static str| move |errno| Stop::Refused(Error::os(what, errno));
    let not_registered = "buffers cannot be registered";
    let file = job.to.output(job.attempt.direct)?;
    let mut ring = IoRing::new(vec![file], region, depth).map_err(refused("no io_uring"))?;
    let slots = match (job.attempt.method, job.attempt.registered) {
        (Method::Premap, _) => map_dma_buf(job, &mut ring)?,
        (_, true) => {
            let largest = match blocks {
                Some(_) => region.len(),
                None => job.plan.window,
            };
            let windows = Windows::open(&mut ring, largest, Map::No);
            WriteSlots::Windows(windows.map_err(refused(not_registered))?)
        }
        (_, false) => WriteSlots::Nothing,
    };
    let depth = depth as usize;
    let mut pump = WritePump {
        job,
        region,
        blocks,
        row,
        ring,
        slots,
        flights: vec![None; depth],
        free: (0..depth).rev().collect(),
        stop: None,
    };
    pump.run();
    pump.stop.map_or(Ok(()), Err)
}

/// Maps the saved part of a dma-buf for the disk.
fn map_dma_buf(job: &WriteJob<'_>, ring: &mut IoRing<'_>) -> Result<WriteSlots, Stop> {
    let memory = job
        .origin
        .memory()
        .filter(|memory| memory.dma_buf.is_some());
    let none = || Error::new("no dma-buf", "this method writes from one");
    let memory = memory.ok_or_else(none)?;
    let first = job.origin.start - job.origin.start % MAP_UNIT;
    let end = job.origin.start + job.origin.bytes.unwrap_or(0);
    let mapped = dmabuf::size(memory.fd()).and_then(|size| {
        let end = end.next_multiple_of(MAP_UNIT).min(size);
        ring.open_slots(1)?;
        ring.map_slot(0, memory.fd(), (first, end - first), 0)
    });
    mapped.map_err(|errno| {
        let error = Error::os("the dma-buf cannot be mapped", errno);
        Stop::Refused(match errno {
            Errno::NOSPC => error.with_remedy("raise the parameter nvme.premap_max_mb"),
            _ => error,
        })
    })?;
    Ok(WriteSlots::DmaBuf(first))
}

struct WritePump<'a> {
    job: &'a WriteJob<'a>,
    region: Region<'a>,
    /// The blocks that bytes pass through, and the index of the first one that belongs to it.
    blocks: Option<(&'a Blocks<'a>, u64)>,
    /// The first of its rows in the trace.
    row: u64,
    ring: IoRing<'a>,
    slots: WriteSlots,
    flights: Vec<Option<WriteInFlight<'a>>>,
    free: Vec<usize>,
    /// Why no more writes are started; writes in flight are still waited for.
    stop: Option<Stop>,
}

impl<'a> WritePump<'a> {
    fn run(&mut self) {
        let mut done = Vec::new();
        loop {
            self.fill();
            if self.free.len() == self.flights.len() {
                return;
            }
            let start = self.job.meter.now();
            let waited = self.ring.submit_and_wait();
            self.job.meter.add(Phase::Wait, start);
            if let Err(errno) = waited
                && !matches!(errno, Errno::INTR | Errno::AGAIN | Errno::BUSY)
            {
                return self.end(Stop::Failed(Error::os("io_uring failed", errno)));
            }
            self.ring.completed(&mut done);
            for done in &done {
                self.land(*done);
            }
        }
    }

    /// Starts writes up to the queue depth.
    fn fill(&mut self) {
        while let (Some(&index), None) = (self.free.last(), &self.stop) {
            if self.job.cancel.is_cancelled() {
                return self.end(self.job.cancelled().into());
            }
            let FeedResult::Extent(extent) = self.job.feed.take(Lane::Main) else {
                return;
            };
            if let Err(stop) = self.launch(index, extent) {
                if !matches!(stop, Stop::Failed(_)) {
                    self.job.feed.put_back(extent);
                }
                return self.end(stop);
            }
        }
    }

    fn launch(&mut self, index: usize, extent: IoExtent) -> Result<(), Stop> {
        let part = self.job.in_place(&extent);
        let window = match part {
            Some(_) => None,
            None => self.cover(index, &extent)?,
        };
        let (at, bytes) = match (self.blocks, part) {
            (_, Some(_)) => (0, extent.need),
            (None, None) => (extent.at, extent.need),
            (Some((blocks, first)), None) => {
                let block = blocks.block(first + index as u64);
                match self.job.fill(&block, &extent) {
                    Ok(bytes) => (block.at, bytes),
                    Err(stop) => {
                        self.uncover(window);
                        return Err(stop);
                    }
                }
            }
        };
        if bytes == 0 {
            self.uncover(window);
            return Ok(());
        }
        self.free.pop();
        self.job.meter.io_begins();
        let flight = WriteInFlight {
            whole: extent,
            bytes,
            at,
            offset: extent.file,
            left: bytes,
            part,
            window,
            tries: 0,
            start: self.job.meter.now(),
        };
        self.queue(index, flight);
        // Immediately, so that the disk works while the next block is filled.
        let start = self.job.meter.now();
        let _ = self.ring.submit();
        self.job.meter.add(Phase::Submit, start);
        Ok(())
    }

    /// The window for a write, registered now if necessary.
    fn cover(&mut self, index: usize, extent: &IoExtent) -> Result<Option<usize>, Stop> {
        let WriteSlots::Windows(windows) = &mut self.slots else {
            return Ok(None);
        };
        let extent = match self.blocks {
            Some((blocks, first)) => IoExtent {
                at: (first + index as u64) * blocks.block,
                len: blocks.block,
                run_end: (first + self.flights.len() as u64) * blocks.block,
                ..*extent
            },
            None if extent.run_end - extent.at < SMALL_RUN => return Ok(None),
            None => *extent,
        };
        let slot = windows.cover(&mut self.ring, u64::MAX, &extent, 0);
        slot.map_err(|errno| {
            // The limit is shared with the user's other processes, so it may be exhausted at any time.
            // The fallback writes without registered buffers.
            let error = Error::os("buffers cannot be registered", errno);
            Stop::Refused(match errno {
                Errno::NOMEM => error.with_remedy("raise the limit on locked memory: ulimit -l"),
                _ => error,
            })
        })
    }

    fn uncover(&mut self, window: Option<usize>) {
        if let (WriteSlots::Windows(windows), Some(window)) = (&mut self.slots, window) {
            windows.landed(window);
        }
    }

    fn queue(&mut self, index: usize, flight: WriteInFlight<'a>) {
        let from = match (flight.part, &self.slots, flight.window) {
            (Some(part), ..) => IoMemory::Memory(part.part(flight.at, flight.left)),
            (_, WriteSlots::DmaBuf(first), _) => IoMemory::Window(flight.at - first, 0),
            (_, _, Some(window)) => IoMemory::Registered(flight.at, window as u32),
            (_, _, None) => IoMemory::Region(flight.at),
        };
        self.ring
            .write(index as u64, from, flight.left, (0, flight.offset));
        self.flights[index] = Some(flight);
    }

    fn land(&mut self, done: Completion) {
        let (job, index) = (self.job, done.token as usize);
        let mut flight = self.flights[index].expect("a completion belongs to a write in flight");
        let direct = job.attempt.direct;
        let memory = flight.part.unwrap_or(self.region);
        let passes = self.blocks.is_some() && flight.part.is_none();
        let is_mapped = matches!(self.slots, WriteSlots::DmaBuf(_));
        let again = match done.result {
            Ok(0) => Err(job.to.failed(flight.offset, Errno::IO).into()),
            Ok(wrote) => {
                // A direct write continues at the next block.
                let whole = match direct && wrote < flight.left {
                    true => wrote - wrote % job.to.grain,
                    false => wrote.min(flight.left),
                };
                flight.at += whole;
                flight.offset += whole;
                flight.left -= whole;
                match (flight.left, whole) {
                    (0, _) => Ok(false),
                    (_, 0) => Err(job.stop(Errno::INVAL, flight.offset, direct)),
                    _ => Ok(true),
                }
            }
            Err(Errno::INTR) => Ok(true),
            Err(Errno::AGAIN | Errno::CANCELED) if is_mapped && flight.tries < MOST_TRIES => {
                flight.tries += 1;
                Ok(true)
            }
            Err(errno) if is_mapped => Err(turned_away(job, &flight, errno)),
            // The ring does not wait for this write, or signals have kept the kernel from starting the thread that
            // would (ECANCELED: nothing here cancels writes). So do it here.
            Err(Errno::AGAIN | Errno::CANCELED) => job
                .write_all(&memory, direct, flight.at, flight.left, flight.offset)
                .map(|()| false),
            Err(errno) => Err(job.stop(errno, flight.offset, direct)),
        };
        let again = match flight.part {
            Some(_) => again.map_err(WriteJob::stop_of_part),
            None => again,
        };
        let again = match again {
            Ok(true) if self.stop.is_none() => return self.queue(index, flight),
            again => again,
        };
        self.flights[index] = None;
        self.free.push(index);
        self.uncover(flight.window);
        job.meter.io_ends();
        let (written, stop) = match (again, passes) {
            (Ok(false), _) => (Some(direct), None),
            // Bytes of a stream cannot be read again: write the rest from here.
            (Ok(true), true) => self.rescue(&flight, None),
            (Err(stop @ (Stop::NotDirect(_) | Stop::Refused(_))), true) => {
                self.rescue(&flight, Some(stop))
            }
            (Ok(true), false) => (None, None),
            (Err(stop), _) => (None, Some(stop)),
        };
        match written {
            Some(direct) => {
                let IoExtent { file, .. } = flight.whole;
                let row = ROW_READS + self.row + index as u64;
                job.meter
                    .span("write", row, flight.start, file, flight.bytes);
                job.written(&flight.whole, flight.bytes, direct);
            }
            None if !matches!(stop, Some(Stop::Failed(_))) => job.feed.put_back(flight.whole),
            None => {}
        }
        if let Some(stop) = stop {
            self.end(stop);
        }
    }

    /// Writes the rest of a block through the page cache. Returns whether that succeeded, and why the
    /// method ends.
    fn rescue(
        &self,
        flight: &WriteInFlight<'_>,
        stop: Option<Stop>,
    ) -> (Option<bool>, Option<Stop>) {
        let job = self.job;
        match job.write_all(&self.region, false, flight.at, flight.left, flight.offset) {
            Ok(()) => (Some(false), stop),
            Err(Stop::Failed(error) | Stop::Refused(error) | Stop::NotDirect(error)) => {
                (None, Some(Stop::Failed(error)))
            }
        }
    }

    /// A failure takes precedence over a refusal, and only the first of each is kept.
    fn end(&mut self, stop: Stop) {
        if let Stop::Failed(error) = &stop {
            // The other rings must stop, too.
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

/// A write from a mapped dma-buf that the kernel refused.
fn turned_away(job: &WriteJob<'_>, flight: &WriteInFlight<'_>, errno: Errno) -> Stop {
    match errno {
        // The device or the mapping is gone; or the file cannot be written directly any more.
        Errno::AGAIN
        | Errno::CANCELED
        | Errno::FAULT
        | Errno::BADF
        | Errno::NODEV
        | Errno::INVAL
        | Errno::OPNOTSUPP => {
            let error = Error::os("writes from mapped memory are refused", errno);
            Stop::Refused(error.at(job.to.place(flight.offset)))
        }
        errno => job.to.failed(flight.offset, errno).into(),
    }
}
