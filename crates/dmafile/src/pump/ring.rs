//! One io_uring and one thread: operations in flight up to the queue depth, with registered files, and with memory
//! that is registered in windows, or DMA-mapped for the disk once, if possible.

use super::{Map, MappedDmaBuf, Pass, Rest, Stop, Windows};
use crate::error::Error;
use crate::flow::feed::{FeedResult, IoExtent, Panics, Queue};
use crate::flow::meter::Phase;
use crate::flow::trace::ROW_READS;
use crate::sys::Errno;
use crate::sys::map::Region;
use crate::sys::notifier::Notifier;
use crate::sys::uring::{Completion, IoMemory, IoRing};
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// The token of the wake-up event; operations are numbered from 0.
const WAKE_UP: u64 = u64::MAX;

/// How often an operation on mapped memory is retried after EAGAIN, which the kernel returns occasionally while a
/// device is being reset.
const MOST_TRIES: u32 = 100;

/// An operation in flight.
#[derive(Clone, Copy)]
pub(crate) struct Flight<'a> {
    /// The extent as taken from the feed; of a stream, as much of it as has come.
    pub extent: IoExtent,
    /// What remains to be moved after short operations; `at` counts from the start of the memory below.
    pub left: IoExtent,
    /// The memory that the operation accesses, if that is not the ring's.
    pub part: Option<Region<'a>>,
    slot: Option<usize>,
    /// How often the kernel has refused it.
    tries: u32,
    start: Duration,
}

/// The memory that the operations of a ring access.
pub(crate) enum RingMemory<'a> {
    /// By address.
    Plain,
    /// Registered in windows of at most this many bytes.
    Registered(u64, Map),
    /// A dma-buf that is mapped for the disk: for each file, this range of it.
    Mapped(BorrowedFd<'a>, Vec<(u64, u64)>),
}

/// What is registered with a ring.
enum Slots<'a> {
    Nothing,
    Windows(Windows),
    DmaBuf(MappedDmaBuf<'a>),
}

impl Slots<'_> {
    /// No operation uses them.
    fn are_idle(&self) -> bool {
        match self {
            Self::Nothing => true,
            Self::Windows(windows) => windows.are_idle(),
            Self::DmaBuf(mapped) => mapped.are_idle(),
        }
    }
}

/// How reads and writes differ.
pub(crate) trait Direction<'a> {
    /// Bytes go to the file; blocks are filled before. Otherwise they come from it, and blocks are emptied afterwards.
    const WRITES: bool;
    /// What the kernel refuses if it refuses mapped memory.
    const MAPPED: &'static str;
    /// Alignment of direct I/O in the file.
    fn grain(&self) -> u64;
    /// The file that a byte is in, by its number in the ring, and the byte's offset in that file.
    fn locate(&self, at: u64) -> (usize, u64);
    /// What an operation moves for an extent, and other memory that it accesses for that.
    fn place(&self, index: usize, extent: &IoExtent) -> (IoExtent, Option<Region<'a>>);
    /// What to register for it, and up to where memory is present; None if that does not pay.
    fn window(&self, place: &IoExtent) -> Option<(IoExtent, u64)>;
    /// Before a write from a block: fills it. Returns how many bytes of the extent have come.
    fn fill(&self, index: usize, extent: &IoExtent) -> Result<u64, Stop>;
    /// After a read into a block: copies its bytes to their final place.
    fn empty(&self, index: usize, extent: &IoExtent) -> Result<(), Stop>;
    /// Bytes pass through blocks.
    fn has_blocks(&self) -> bool;
    /// Moves what is left without the ring.
    fn move_now(&self, flight: &Flight<'a>, direct: bool) -> Result<(), Stop>;
    /// Why an operation ended that moved nothing.
    fn nothing_moved(&self, flight: &Flight<'a>) -> Stop;
    /// Why an operation failed.
    fn failed(&self, flight: &Flight<'a>, errno: Errno) -> Stop;
    /// Moves what is left if it cannot be moved by a device that has no pages to access; None if it can.
    fn without_pages(&self, flight: &Flight<'a>) -> Option<Result<(), Stop>>;
}

/// Moves what is in the feed through a ring, whose rows in the trace begin at `row`.
pub(crate) fn move_all<'a, D: Direction<'a>>(
    pass: &Pass<'a>,
    direction: &D,
    (files, region): (Vec<BorrowedFd<'a>>, Region<'a>),
    memory: RingMemory<'a>,
    (depth, row): (u32, u64),
) -> Result<(), Stop> {
    let mut ring = IoRing::new(files, region, depth).map_err(Stop::refused("no io_uring"))?;
    let slots = match memory {
        RingMemory::Plain => Slots::Nothing,
        RingMemory::Registered(largest, map) => {
            let windows = Windows::open(&mut ring, largest, map);
            Slots::Windows(windows.map_err(Stop::refused(NOT_REGISTERED))?)
        }
        RingMemory::Mapped(dma_buf, ranges) => {
            Slots::DmaBuf(MappedDmaBuf::open(&mut ring, dma_buf, ranges)?)
        }
    };
    // Only one thread can wait for the event, because reading it resets it; the others notice new memory when their
    // next operation has completed.
    let notifier = pass.feed.notifier.as_ref().filter(|_| row == 0);
    let depth = depth as usize;
    let mut pump = Pump {
        pass,
        direction,
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
    let _panics = Panics::of(pass.feed);
    pump.run();
    if let (true, Some(notifier)) = (pump.listening, notifier) {
        // When dropped, the ring waits for everything it was given, including the event.
        notifier.notify();
    }
    // Otherwise later operations would go without registered memory, which nobody would notice.
    debug_assert!(pump.free.len() < depth || pump.slots.are_idle());
    pump.stop.map_or(Ok(()), Err)
}

const NOT_REGISTERED: &str = "buffers cannot be registered";

struct Pump<'a, 'p, D> {
    pass: &'p Pass<'a>,
    direction: &'p D,
    notifier: Option<&'a Notifier>,
    row: u64,
    ring: IoRing<'a>,
    slots: Slots<'a>,
    flights: Vec<Option<Flight<'a>>>,
    free: Vec<usize>,
    listening: bool,
    /// Why nothing more is started; what is in flight is still waited for.
    stop: Option<Stop>,
}

impl<'a, D: Direction<'a>> Pump<'a, '_, D> {
    fn run(&mut self) {
        let mut done = Vec::new();
        loop {
            let starved = self.stop.is_none() && self.start();
            if self.free.len() == self.flights.len() {
                if self.stop.is_some() || !starved {
                    return;
                }
                // Nothing to wait for in the ring: wait for memory.
                match self.pass.feed.wait(Queue::Method) {
                    Some(extent) => self.launch(extent),
                    None => return,
                }
                continue;
            }
            if starved {
                self.listen();
            }
            let start = self.pass.run.meter.now();
            let waited = self.ring.submit_and_wait();
            self.pass.run.meter.add(Phase::Wait, start);
            if let Err(errno) = waited
                && !matches!(errno, Errno::INTR | Errno::AGAIN | Errno::BUSY)
            {
                return self.end(Stop::Failed(Error::os("io_uring failed", errno)));
            }
            self.ring.completed(&mut done);
            for done in &done {
                self.complete(*done);
            }
        }
    }

    /// Starts operations up to the queue depth. Returns true if there are more, but their memory is not allocated
    /// yet.
    fn start(&mut self) -> bool {
        let start = self.pass.run.meter.now();
        let mut queued = false;
        let starved = loop {
            if self.free.is_empty() || self.stop.is_some() {
                break false;
            }
            match self.pass.feed.take(Queue::Method) {
                FeedResult::Extent(extent) => self.launch(extent),
                FeedResult::NotYet => break true,
                FeedResult::Drained => break false,
            }
            queued = true;
        };
        if queued && !self.fills() {
            // Submitting here and not in the wait keeps the two times separate; an error will occur again there.
            let _ = self.ring.submit();
            self.pass.run.meter.add(Phase::Submit, start);
        }
        starved
    }

    /// Blocks are filled before they are written.
    fn fills(&self) -> bool {
        D::WRITES && self.direction.has_blocks()
    }

    fn launch(&mut self, extent: IoExtent) {
        if let Err(stop) = self.begin(extent) {
            stop.leave(self.pass.feed, extent);
            self.end(stop);
        }
    }

    fn begin(&mut self, mut extent: IoExtent) -> Result<(), Stop> {
        self.pass.check(&extent)?;
        let index = *self.free.last().expect("the caller has seen a free entry");
        let (mut left, part) = self.direction.place(index, &extent);
        let slot = match part {
            None => self.cover(&left)?,
            Some(_) => None,
        };
        if part.is_none() && self.fills() {
            let bytes = self.direction.fill(index, &extent);
            let bytes = bytes.inspect_err(|_| self.uncover(slot))?;
            if bytes == 0 {
                self.uncover(slot);
                return Ok(());
            }
            (left.len, left.need, extent.need) = (bytes, bytes, bytes);
        }
        self.free.pop();
        self.pass.run.meter.io_begins();
        let flight = Flight {
            extent,
            left,
            part,
            slot,
            tries: 0,
            start: self.pass.run.meter.now(),
        };
        self.queue(index, flight);
        if self.fills() {
            // Immediately, so that the disk works while the next block is filled.
            let start = self.pass.run.meter.now();
            let _ = self.ring.submit();
            self.pass.run.meter.add(Phase::Submit, start);
        }
        Ok(())
    }

    /// The slot of the memory that an operation accesses; fills it if necessary.
    fn cover(&mut self, place: &IoExtent) -> Result<Option<usize>, Stop> {
        let file = self.direction.locate(place.file).0;
        let (covered, what) = match &mut self.slots {
            Slots::Nothing => return Ok(None),
            Slots::Windows(windows) => {
                let Some((extent, present)) = self.direction.window(place) else {
                    return Ok(None);
                };
                let slot = windows.cover(&mut self.ring, present, &extent, file);
                (slot, NOT_REGISTERED)
            }
            Slots::DmaBuf(mapped) => {
                let slot = mapped.cover(&mut self.ring, file).map(Some);
                (slot, "the dma-buf cannot be mapped")
            }
        };
        // The limit is shared with the user's other processes, so it may be exhausted at any time. The next method
        // works without it.
        covered.map_err(|errno| {
            let error = Error::os(what, errno);
            Stop::Refused(match errno {
                Errno::NOMEM => error.with_remedy("raise the limit on locked memory: ulimit -l"),
                Errno::NOSPC => error.with_remedy("raise the parameter nvme.premap_max_mb"),
                _ => error,
            })
        })
    }

    fn uncover(&mut self, slot: Option<usize>) {
        match (&mut self.slots, slot) {
            (Slots::Windows(windows), Some(slot)) => windows.release(slot),
            (Slots::DmaBuf(mapped), Some(slot)) => mapped.release(slot),
            _ => {}
        }
    }

    fn queue(&mut self, index: usize, flight: Flight<'a>) {
        let left = flight.left;
        let memory = match (flight.part, &self.slots, flight.slot) {
            (Some(part), ..) => IoMemory::Memory(part.part(left.at, left.len)),
            (_, Slots::DmaBuf(mapped), Some(slot)) => {
                IoMemory::Window(mapped.offset(slot, left.at), slot as u32)
            }
            (_, _, Some(slot)) => IoMemory::Registered(left.at, slot as u32),
            (_, _, None) => IoMemory::Region(left.at),
        };
        let place = self.direction.locate(left.file);
        if D::WRITES {
            self.ring.write(index as u64, memory, left.len, place);
        } else {
            self.ring.read(index as u64, memory, left.len, place);
        }
        self.flights[index] = Some(flight);
    }

    /// Makes the ring wake us when memory is added.
    fn listen(&mut self) {
        if let (Some(notifier), false) = (self.notifier, self.listening) {
            self.ring.listen(WAKE_UP, notifier);
            self.listening = true;
        }
    }

    fn complete(&mut self, done: Completion) {
        if done.token == WAKE_UP {
            self.listening = false;
            if let Some(notifier) = self.notifier {
                notifier.clear();
            }
            return;
        }
        let index = done.token as usize;
        let mut flight = self.flights[index].expect("a completion belongs to an operation");
        let direct = self.pass.attempt.direct;
        let rest = self.rest(&mut flight, done.result);
        if let (Ok(Rest::Again(left)), None) = (&rest, &self.stop) {
            flight.left = *left;
            return self.queue(index, flight);
        }
        self.flights[index] = None;
        self.free.push(index);
        self.uncover(flight.slot);
        self.pass.run.meter.io_ends();
        // Bytes of a stream cannot be read again: what is in a block is written, if need be through the page cache.
        let rescues = self.fills() && flight.part.is_none();
        let rescue = |flight: &Flight<'a>, left, end| match self
            .direction
            .move_now(&Flight { left, ..*flight }, false)
        {
            Ok(()) => (Some(false), end),
            Err(Stop::Failed(error) | Stop::Refused(error) | Stop::NotDirect(error)) => {
                (None, Some(Stop::Failed(error)))
            }
        };
        let (moved, end) = match rest {
            Ok(Rest::Nothing) => (Some(direct), None),
            Ok(Rest::Again(left) | Rest::Buffered(left)) if rescues => rescue(&flight, left, None),
            // Nothing is started after a stop: the whole extent is moved again.
            Ok(Rest::Again(_)) => (None, None),
            Ok(Rest::Buffered(left)) => {
                match self.direction.move_now(&Flight { left, ..flight }, false) {
                    Ok(()) => (Some(direct), None),
                    Err(stop) => (None, Some(stop)),
                }
            }
            Err(stop @ (Stop::NotDirect(_) | Stop::Refused(_))) if rescues => {
                rescue(&flight, flight.left, Some(stop))
            }
            Err(stop) => (None, Some(stop)),
        };
        let (moved, end) = match moved.map(|_| self.empty(index, &flight)) {
            Some(Err(stop)) => (None, Some(stop)),
            _ => (moved, end),
        };
        match moved {
            Some(direct) => {
                let IoExtent {
                    file, need, head, ..
                } = flight.extent;
                let name = if D::WRITES { "write" } else { "read" };
                let meter = &self.pass.run.meter;
                let row = ROW_READS + self.row + index as u64;
                meter.span(name, row, flight.start, file, need);
                meter.moved(&flight.extent, need - head, direct);
            }
            None if !matches!(end, Some(Stop::Failed(_))) => {
                self.pass.feed.put_back(flight.extent);
            }
            None => {}
        }
        if let Some(stop) = end {
            self.end(stop);
        }
    }

    /// What remains to be moved after an operation.
    fn rest(&self, flight: &mut Flight<'a>, result: Result<u64, Errno>) -> Result<Rest, Stop> {
        let direct = self.pass.attempt.direct;
        let mapped = matches!(self.slots, Slots::DmaBuf(_));
        match result {
            Ok(0) => Err(self.direction.nothing_moved(flight)),
            Ok(moved) => {
                let align = direct.then(|| self.direction.grain());
                Ok(Rest::after(&flight.left, moved, align))
            }
            // An operation in a kernel worker thread may be interrupted by a signal.
            Err(Errno::INTR) => Ok(Rest::Again(flight.left)),
            Err(Errno::AGAIN | Errno::CANCELED) if mapped && flight.tries < MOST_TRIES => {
                flight.tries += 1;
                Ok(Rest::Again(flight.left))
            }
            Err(errno) if mapped => self.rejected(flight, errno),
            // The ring does not wait for this operation, or signals have kept the kernel from starting the thread
            // that would (ECANCELED: nothing here cancels operations). So do it here.
            Err(Errno::AGAIN | Errno::CANCELED) => {
                let moved = self.direction.move_now(flight, direct);
                moved.map(|()| Rest::Nothing)
            }
            Err(errno) => Err(self.direction.failed(flight, errno)),
        }
    }

    /// Handles an operation on a mapped dma-buf that the kernel refused.
    fn rejected(&self, flight: &Flight<'a>, errno: Errno) -> Result<Rest, Stop> {
        if errno == Errno::FAULT
            && let Some(moved) = self.direction.without_pages(flight)
        {
            return moved.map(|()| Rest::Nothing);
        }
        match errno {
            // The device or the mapping is gone; or direct I/O does not work with the file any more.
            Errno::AGAIN
            | Errno::CANCELED
            | Errno::FAULT
            | Errno::BADF
            | Errno::NODEV
            | Errno::INVAL
            | Errno::OPNOTSUPP => {
                let place = (self.pass.place)(flight.left.file);
                Err(Stop::Refused(Error::os(D::MAPPED, errno).at(place)))
            }
            errno => Err(self.direction.failed(flight, errno)),
        }
    }

    fn empty(&self, index: usize, flight: &Flight<'a>) -> Result<(), Stop> {
        if D::WRITES || !self.direction.has_blocks() {
            return Ok(());
        }
        let start = self.pass.run.meter.now();
        self.direction.empty(index, &flight.extent)?;
        self.pass.run.meter.add(Phase::Copy, start);
        Ok(())
    }

    fn end(&mut self, stop: Stop) {
        if let Stop::Failed(error) = &stop {
            // The other queue and the other rings must stop, too.
            self.pass.feed.stop(Some(error.clone()));
        }
        self.stop = Some(Stop::or(self.stop.take(), stop));
    }
}
