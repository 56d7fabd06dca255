//! Windows of memory that are registered with a ring, one after another as reads or writes advance.

use crate::flow::feed::IoExtent;
use crate::plan::WINDOWS;
use crate::sys::Errno;
use crate::sys::uring::IoRing;

/// A range of the memory that is registered, and pinned for that time.
#[derive(Clone, Copy, Default)]
struct RegisteredWindow {
    start: u64,
    end: u64,
    in_flight: u32,
}

/// Registered windows, used in turn.
pub(crate) struct Windows {
    slots: [RegisteredWindow; WINDOWS as usize],
    current: usize,
    largest: u64,
    map: Map,
}

/// Whether windows are DMA-mapped, when they are registered, for the file that is read or written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Map {
    No,
    /// If that is refused, they are only registered.
    IfPossible,
    Yes,
}

impl Windows {
    pub(crate) fn open(ring: &mut IoRing<'_>, largest: u64, map: Map) -> Result<Self, Errno> {
        ring.open_slots(WINDOWS as u32)?;
        Ok(Self {
            slots: Default::default(),
            current: 0,
            largest,
            map,
        })
    }

    /// The window that covers an extent, registered now if necessary. None if all are in use: that
    /// extent is moved without. `present` is how far memory is allocated.
    pub(crate) fn cover(
        &mut self,
        ring: &mut IoRing<'_>,
        present: u64,
        extent: &IoExtent,
        file: usize,
    ) -> Result<Option<usize>, Errno> {
        let (start, end) = (extent.at, extent.at + extent.len);
        let window = &self.slots[self.current];
        if !(window.start <= start && end <= window.end) {
            let next = (self.current + 1) % self.slots.len();
            if self.slots[next].in_flight > 0 {
                return Ok(None);
            }
            // Only up to the end of data and allocated memory: registering would allocate the rest.
            let reach = extent.run_end.min(present).min(start + self.largest);
            let reach = reach.max(end);
            self.fill(ring, next as u32, (start, reach - start), file)?;
            self.slots[next] = RegisteredWindow {
                start,
                end: reach,
                in_flight: 0,
            };
            self.current = next;
        }
        self.slots[self.current].in_flight += 1;
        Ok(Some(self.current))
    }

    /// An operation in a slot's window has ended.
    pub(crate) fn release(&mut self, slot: usize) {
        self.slots[slot].in_flight -= 1;
    }

    pub(super) fn are_idle(&self) -> bool {
        self.slots.iter().all(|window| window.in_flight == 0)
    }

    fn fill(
        &mut self,
        ring: &mut IoRing<'_>,
        slot: u32,
        (at, len): (u64, u64),
        file: usize,
    ) -> Result<(), Errno> {
        if self.map != Map::No {
            let mapped = ring.fill_slot_mapped(slot, at, len, file);
            if mapped.is_ok() || self.map == Map::Yes {
                return mapped;
            }
            self.map = Map::No;
        }
        ring.fill_slot(slot, at, len)
    }
}
