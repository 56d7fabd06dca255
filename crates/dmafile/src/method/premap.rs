//! `premap`: the disk writes into memory that is DMA-mapped for it once, on kernels that support that
//! (kernel/linux-6.12). A dma-buf is mapped as a whole; of other memory, windows are mapped.

use super::{ReadJob, Stop, uring};
use crate::error::Error;
use crate::plan::Plan;
use crate::pump::RingMemory;
use crate::source::Source;

pub(super) fn run(job: &ReadJob<'_>) -> Result<(), Stop> {
    let Some(dma_buf) = job.dma_buf else {
        return uring::run(job);
    };
    let access = dma_buf
        .begin_device_access()
        .map_err(Stop::refused("cannot hand the dma-buf to a device"))?;
    let files = job.source.files();
    let windows = files.map(|(_, start, bytes)| window(job.plan, (start, start + bytes)));
    // Its ring ends here, and with the ring every mapping.
    let done = uring::into(job, RingMemory::Mapped(dma_buf.fd(), windows.collect()));
    match (done, access.end()) {
        (Err(Stop::Failed(error)), _) => Err(Stop::Failed(error)),
        (_, Err(errno)) => {
            Err(Error::os("cannot take the dma-buf back from a device", errno).into())
        }
        (done, Ok(())) => done,
    }
}

/// The range of a dma-buf that the blocks of the file `[start, end)` of the source are read into.
fn window(plan: &Plan, (start, end): (u64, u64)) -> (u64, u64) {
    let align = plan.tuning.align;
    let (first, last) = (plan.offset, plan.offset + plan.bytes);
    // A file of which nothing is requested has a window that is never used.
    let start = start.clamp(first, last);
    let end = end.clamp(start, last);
    let from = (start - first + plan.place.start).saturating_sub(start % align);
    (from, end.next_multiple_of(align) - first + plan.place.start)
}

/// True if `[start, end)` of the source, a part of one file, has a hole: the kernel would have to write
/// zeros there, but has no pages of the mapped memory.
pub(super) fn has_hole(source: &Source, start: u64, end: u64) -> bool {
    source.data(start, end, 0) != [(start, end)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Load;
    use crate::sys::uring::MAP_UNIT;

    /// The window for the file `[start, end)` of the source, with a plan for a range of it.
    fn window_of(offset: u64, length: u64, lead: u64, file: (u64, u64), size: u64) -> (u64, u64) {
        let dir = crate::source::folder_on_disk();
        let path = dir.path().join("file");
        std::fs::write(&path, [1; 4096]).unwrap();
        let mut plan = Load::new(&path).plan().unwrap();
        (plan.offset, plan.bytes, plan.place.start) = (offset, length, lead);
        plan.tuning.align = 512;
        let (start, end) = window(&plan, file);
        (
            start - start % MAP_UNIT,
            end.next_multiple_of(MAP_UNIT).min(size),
        )
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
