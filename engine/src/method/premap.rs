//! `premap`: the disk writes into memory that is DMA-mapped once for it, on kernels that map buffers so
//! (kernel/linux-6.12, PM-1 to PM-12). A dma-buf is mapped as a whole, and reached without its pages:
//! there is no copy where its mapping cannot be pinned. Of other memory windows are mapped.

use super::{Job, Stop, uring};
use crate::error::Error;
use crate::plan::Plan;
use crate::source::Source;
use crate::sys::Errno;
use crate::sys::pieces::Pieces;
use crate::sys::uring::{MAP_UNIT, MOST_SLOTS, Ring};

pub(super) fn run(job: &Job<'_>) -> Result<(), Stop> {
    let Some(pieces) = job.pieces else {
        return uring::run(job);
    };
    let lent = pieces
        .lend()
        .map_err(|errno| refused("cannot hand the dma-buf to a device", errno))?;
    // Its ring ends with it, and with the ring every mapping.
    let done = uring::mapped(job, pieces);
    let back = lent.take_back();
    done?;
    back.map_err(|errno| Error::os("cannot take the dma-buf back from a device", errno).into())
}

/// Another way will do.
pub(super) fn refused(what: &str, errno: Errno) -> Stop {
    Stop::Refused(Error::os(what, errno))
}

/// A part of a dma-buf, for one file; a range of memory.
#[derive(Clone, Copy, Default)]
struct Window {
    start: u64,
    end: u64,
    mapped: bool,
    in_flight: u32,
}

/// The dma-bufs of a load, a slot for each and each file: a mapping is for one file.
pub(super) struct Mapped<'a> {
    pieces: &'a Pieces,
    slots: Vec<Window>,
}

impl<'a> Mapped<'a> {
    pub(super) fn open(ring: &mut Ring<'_>, job: &Job<'_>, pieces: &'a Pieces) -> Result<Self, Stop> {
        let files = job.source.files().len();
        let slots = files * pieces.list().len();
        if slots > MOST_SLOTS {
            return Err(refused("too many files and dma-bufs to map", Errno::MFILE));
        }
        ring.open_slots(slots as u32)
            .map_err(|errno| refused("buffers cannot be registered", errno))?;
        let ranges = job.source.files().map(|(_, start, size)| (start, start + size));
        let windows = ranges.flat_map(|range| windows(job.plan, range, pieces));
        Ok(Self {
            pieces,
            slots: windows.collect(),
        })
    }

    /// The slot of the window with these bytes of memory, for the file with that number, mapped now if it
    /// was not; and where they lie in the window. None where none has them all.
    pub(super) fn cover(
        &mut self,
        ring: &mut Ring<'_>,
        (at, len): (u64, u64),
        file: usize,
    ) -> Result<Option<usize>, Errno> {
        let count = self.pieces.list().len();
        let holds = |number: &usize| {
            let window = &self.slots[file * count + number];
            window.start <= at && at + len <= window.end
        };
        let Some(number) = (0..count).find(holds) else {
            return Ok(None);
        };
        let slot = file * count + number;
        if !self.slots[slot].mapped {
            self.unmap_idle(ring)?;
            let piece = &self.pieces.list()[number];
            let window = &mut self.slots[slot];
            let range = (window.start - piece.at, window.end - window.start);
            ring.map_slot(slot as u32, piece.fd(), range, file)?;
            window.mapped = true;
        }
        self.slots[slot].in_flight += 1;
        Ok(Some(slot))
    }

    /// Where in a slot's window a byte of memory lies.
    pub(super) fn offset(&self, slot: usize, at: u64) -> u64 {
        at - self.slots[slot].start
    }

    /// A read into a slot's window has ended.
    pub(super) fn landed(&mut self, slot: usize) {
        self.slots[slot].in_flight -= 1;
    }

    /// A mapping is of all of a dma-buf, however small its window is. Reads go on in the order of the
    /// files: what was mapped for one before them is done with.
    fn unmap_idle(&mut self, ring: &mut Ring<'_>) -> Result<(), Errno> {
        for (slot, window) in self.slots.iter_mut().enumerate() {
            if window.mapped && window.in_flight == 0 {
                ring.empty_slot(slot as u32)?;
                window.mapped = false;
            }
        }
        Ok(())
    }
}

/// What of each dma-buf the blocks of a file land in, which lies in `[start, end)` of the source.
fn windows(plan: &Plan, (start, end): (u64, u64), pieces: &Pieces) -> Vec<Window> {
    let align = plan.tuning.align;
    let (first, last) = (plan.offset, plan.offset + plan.bytes);
    let (start, end) = (start.max(first), end.min(last));
    let at = |file: u64| (file - first) + plan.lead;
    let list = pieces.list().iter();
    list.map(|piece| {
        if start >= end {
            return Window::default();
        }
        let piece_end = piece.at + piece.bytes;
        let from = at(start).saturating_sub(start % align).clamp(piece.at, piece_end);
        let to = (at(end) + (end.next_multiple_of(align) - end)).clamp(piece.at, piece_end);
        if from >= to {
            return Window::default();
        }
        Window {
            start: from - (from - piece.at) % MAP_UNIT,
            end: (piece.at + (to - piece.at).next_multiple_of(MAP_UNIT)).min(piece_end),
            ..Window::default()
        }
    })
    .collect()
}

/// Whether a part of the file, `[start, end)` of the source, has a hole in it: its blocks are not read but
/// zeroed by the CPU, which reaches no pages of what is mapped.
pub(super) fn has_hole(source: &Source, start: u64, end: u64) -> bool {
    source.data(start, end, 0) != [(start, end)]
}
