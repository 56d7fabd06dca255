//! `premap`: the disk writes into memory that is DMA-mapped for it once, on kernels that support that
//! (kernel/linux-6.12). A dma-buf is mapped as a whole, without access to its pages, so no copy is needed
//! even if its mapping cannot be pinned. For other memory, windows are mapped.

use super::{ReadJob, Stop, uring};
use crate::error::Error;
use crate::plan::Plan;
use crate::source::Source;
use crate::sys::uring::{IoRing, MAP_UNIT, MOST_SLOTS};
use crate::sys::{Errno, dmabuf};
use std::os::fd::BorrowedFd;

pub(super) fn run(job: &ReadJob<'_>) -> Result<(), Stop> {
    let Some(dma_buf) = job.dma_buf else {
        return uring::run(job);
    };
    let lent = dma_buf
        .lend()
        .map_err(|errno| refused("cannot hand the dma-buf to a device", errno))?;
    // Its ring ends here, and with the ring every mapping.
    let done = uring::mapped(job, dma_buf.fd());
    match (done, lent.take_back()) {
        (Err(Stop::Failed(error)), _) => Err(Stop::Failed(error)),
        (_, Err(errno)) => {
            Err(Error::os("cannot take the dma-buf back from a device", errno).into())
        }
        (done, Ok(())) => done,
    }
}

/// Falls back to the next method.
fn refused(what: &str, errno: Errno) -> Stop {
    Stop::Refused(Error::os(what, errno))
}

/// The range of the dma-buf that the blocks of a file are read into, in bytes from the dma-buf's start.
#[derive(Clone, Copy)]
struct DmaBufWindow {
    start: u64,
    end: u64,
    mapped: bool,
    in_flight: u32,
}

/// A mapped dma-buf. It has a slot for each file, because a mapping is for one.
pub(super) struct MappedDmaBuf<'a> {
    dma_buf: BorrowedFd<'a>,
    slots: Vec<DmaBufWindow>,
}

impl<'a> MappedDmaBuf<'a> {
    pub(super) fn open(
        ring: &mut IoRing<'_>,
        job: &ReadJob<'_>,
        dma_buf: BorrowedFd<'a>,
    ) -> Result<Self, Stop> {
        let size = dmabuf::size(dma_buf);
        let size = size.map_err(|errno| refused("cannot query the dma-buf", errno))?;
        let files = job.source.files();
        if files.len() > MOST_SLOTS {
            return Err(refused("too many files to map a dma-buf for", Errno::MFILE));
        }
        let windows = files.map(|(_, start, bytes)| window(job.plan, (start, start + bytes), size));
        let slots: Vec<_> = windows.collect();
        ring.open_slots(slots.len() as u32)
            .map_err(|errno| refused("buffers cannot be registered", errno))?;
        Ok(Self { dma_buf, slots })
    }

    /// The slot for reads of the file with this number; maps it if necessary.
    pub(super) fn cover(&mut self, ring: &mut IoRing<'_>, file: usize) -> Result<usize, Errno> {
        if !self.slots[file].mapped {
            self.unmap_idle(ring)?;
            let window = &mut self.slots[file];
            let range = (window.start, window.end - window.start);
            ring.map_slot(file as u32, self.dma_buf, range, file)?;
            window.mapped = true;
        }
        self.slots[file].in_flight += 1;
        Ok(file)
    }

    /// The offset of a byte of memory in a slot's window.
    pub(super) fn offset(&self, slot: usize, at: u64) -> u64 {
        at - self.slots[slot].start
    }

    /// A read into a slot's window has ended.
    pub(super) fn landed(&mut self, slot: usize) {
        self.slots[slot].in_flight -= 1;
    }

    /// Unmaps windows without reads. A mapping covers all of the dma-buf, however small its window is.
    /// Files are read in order, so earlier ones are not needed any more.
    fn unmap_idle(&mut self, ring: &mut IoRing<'_>) -> Result<(), Errno> {
        for (slot, window) in self.slots.iter_mut().enumerate() {
            if window.mapped && window.in_flight == 0 {
                ring.empty_slot(slot as u32)?;
                window.mapped = false;
            }
        }
        Ok(())
    }
}

/// The range of a dma-buf of `size` bytes that the blocks of the file `[start, end)` of the source are
/// read into.
fn window(plan: &Plan, (start, end): (u64, u64), size: u64) -> DmaBufWindow {
    let align = plan.tuning.align;
    let (first, last) = (plan.offset, plan.offset + plan.bytes);
    // A file of which nothing is requested has a window that is never used.
    let start = start.clamp(first, last);
    let end = end.clamp(start, last);
    let from = (start - first + plan.lead).saturating_sub(start % align);
    let to = end.next_multiple_of(align) - first + plan.lead;
    DmaBufWindow {
        start: from - from % MAP_UNIT,
        end: to.next_multiple_of(MAP_UNIT).min(size),
        mapped: false,
        in_flight: 0,
    }
}

/// Whether `[start, end)` of the source, a part of one file, has a hole: the kernel would have to write
/// zeros there, but has no pages of the mapped memory.
pub(super) fn has_hole(source: &Source, start: u64, end: u64) -> bool {
    source.data(start, end, 0) != [(start, end)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Load;

    /// The window for the file `[start, end)` of the source, with a plan for a range of it.
    fn window_of(offset: u64, length: u64, lead: u64, file: (u64, u64), size: u64) -> (u64, u64) {
        let dir = crate::source::folder_on_disk();
        let path = dir.path().join("file");
        std::fs::write(&path, [1; 4096]).unwrap();
        let mut plan = Load::new(&path).plan().unwrap();
        (plan.offset, plan.bytes, plan.lead) = (offset, length, lead);
        plan.tuning.align = 512;
        let window = window(&plan, file, size);
        (window.start, window.end)
    }

    #[test]
    fn windows_include_all_blocks_of_a_file_inside_the_dma_buf() {
        const MIB: u64 = 1 << 20;
        // All of one file, whose last block extends beyond its end.
        assert_eq!(window_of(0, 5000, 0, (0, 5000), 8192), (0, 8192));
        // The last block ends where the dma-buf does.
        assert_eq!(window_of(0, 4096, 0, (0, 4096), 4096), (0, 4096));
        // A range that begins inside of a block.
        assert_eq!(window_of(9000, 100, 808, (0, MIB), 4096), (0, 4096));
        // A range of an existing dma-buf, from byte 12288 on.
        assert_eq!(window_of(8192, 4097, 12288, (0, MIB), MIB), (12288, 20480));
        // The second one of two files.
        let second = (2 * MIB, 2 * MIB + 777);
        assert_eq!(
            window_of(0, 2 * MIB + 777, 0, second, 4 * MIB),
            (2 * MIB, 2 * MIB + 4096)
        );
        // A file that the range does not include.
        assert_eq!(window_of(0, MIB, 0, second, 4 * MIB), (MIB, MIB));
    }
}
