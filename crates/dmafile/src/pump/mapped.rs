//! Slots of a ring in which a dma-buf is DMA-mapped for the disk, on kernels that support that (kernel/linux-6.12).
//! It is mapped without access to its pages, so no copy is needed even if its mapping cannot be pinned.

use super::Stop;
use crate::error::Error;
use crate::sys::uring::{IoRing, MAP_UNIT, MOST_SLOTS};
use crate::sys::{Errno, dmabuf};
use std::os::fd::BorrowedFd;
use std::thread::sleep;
use std::time::Duration;

/// What was unmapped counts for the limit on mappings until the kernel has handed it back to its exporter, soon after.
/// So often, and after this time, it is tried again.
const RETRIES: u32 = 50;
const PAUSE: Duration = Duration::from_millis(2);

/// The range of a dma-buf that the blocks of a file are in, in bytes from the dma-buf's start.
#[derive(Clone, Copy)]
struct DmaBufWindow {
    start: u64,
    end: u64,
    mapped: bool,
    in_flight: u32,
}

/// A mapped dma-buf. It has a slot for each file, because a mapping is for one.
pub(crate) struct MappedDmaBuf<'a> {
    dma_buf: BorrowedFd<'a>,
    slots: Vec<DmaBufWindow>,
}

impl<'a> MappedDmaBuf<'a> {
    /// For each file, `ranges` has the range of the dma-buf that its blocks are in.
    pub(super) fn open(
        ring: &mut IoRing<'_>,
        dma_buf: BorrowedFd<'a>,
        ranges: Vec<(u64, u64)>,
    ) -> Result<Self, Stop> {
        let size = dmabuf::size(dma_buf).map_err(Stop::refused("cannot query the dma-buf"))?;
        if ranges.len() > MOST_SLOTS {
            let why = Error::os("too many files to map a dma-buf for", Errno::MFILE);
            return Err(Stop::Refused(why));
        }
        let slots: Vec<_> = ranges
            .into_iter()
            .map(|(start, end)| DmaBufWindow {
                start: start - start % MAP_UNIT,
                end: end.next_multiple_of(MAP_UNIT).min(size),
                mapped: false,
                in_flight: 0,
            })
            .collect();
        ring.open_slots(slots.len() as u32)
            .map_err(Stop::refused("buffers cannot be registered"))?;
        Ok(Self { dma_buf, slots })
    }

    /// The slot for the file with this number; maps it if necessary.
    pub(super) fn cover(&mut self, ring: &mut IoRing<'_>, file: usize) -> Result<usize, Errno> {
        if !self.slots[file].mapped {
            let freed = self.unmap_idle(ring)?;
            let window = &mut self.slots[file];
            let range = (window.start, window.end - window.start);
            let mut tries = if freed { RETRIES } else { 0 };
            loop {
                match ring.map_slot(file as u32, self.dma_buf, range, file) {
                    Err(Errno::NOSPC) if tries > 0 => sleep(PAUSE),
                    done => break done?,
                }
                tries -= 1;
            }
            window.mapped = true;
        }
        self.slots[file].in_flight += 1;
        Ok(file)
    }

    /// The offset of a byte of memory in a slot's window.
    pub(super) fn offset(&self, slot: usize, at: u64) -> u64 {
        at - self.slots[slot].start
    }

    /// An operation in a slot's window has ended.
    pub(super) fn release(&mut self, slot: usize) {
        self.slots[slot].in_flight -= 1;
    }

    pub(super) fn are_idle(&self) -> bool {
        self.slots.iter().all(|window| window.in_flight == 0)
    }

    /// Unmaps windows that are not in use. A mapping covers all of the dma-buf, however small its window is.
    /// Files are moved in order, so earlier ones are not needed any more.
    /// Returns true if there were any.
    fn unmap_idle(&mut self, ring: &mut IoRing<'_>) -> Result<bool, Errno> {
        let mut any = false;
        for (slot, window) in self.slots.iter_mut().enumerate() {
            if window.mapped && window.in_flight == 0 {
                ring.empty_slot(slot as u32)?;
                window.mapped = false;
                any = true;
            }
        }
        Ok(any)
    }
}
