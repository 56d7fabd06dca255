//! `bounce`: direct reads into a small ring of blocks, then one copy from there to the final place.
//! For memory that direct reads cannot go into: the mappings of dma-bufs, and memory whose address
//! does not fit the offset in the file. The page cache is not used.

use super::fill::{read_direct, vanished};
use super::pool::run_workers;
use super::{ReadJob, Stop, uring, work};
use crate::error::Error;
use crate::flow::feed::{IoExtent, Lane};
use crate::sys::map::{Mapping, Region, page_size};
use crate::sys::{Errno, file, sandbox};

/// With fewer blocks per thread, which reads ahead and copies, the disk would be idle during a
/// copy.
const SLOTS_PER_WORKER: u64 = 2;
/// Alignment of the start and size of a ring, so that it consists only of transparent huge pages:
/// they are pinned as a whole, and the disk accepts more of them at once.
const HUGE: u64 = 2 << 20;

/// The blocks that are read into, and where their bytes go from there.
#[derive(Clone, Copy)]
pub(super) struct Bounce<'m> {
    blocks: Region<'m>,
    block: u64,
    align: u64,
    /// The job that the bytes are read for.
    job: &'m ReadJob<'m>,
}

pub(super) fn run(job: &ReadJob<'_>) -> Result<(), Stop> {
    let blocks = job.plan.to_read.div_ceil(job.plan.tuning.block).max(1);
    match job.attempt.registered {
        true => {
            let slots = u64::from(job.plan.tuning.queue_depth).min(blocks);
            // Each ring on separate huge pages.
            let rings = (slots * job.plan.tuning.block / HUGE).min(slots / SLOTS_PER_WORKER);
            let workers = (job.plan.tuning.threads as u64).min(rings).max(1);
            run_workers(job.plan.node, workers as usize, |row| {
                // The first ones get the remainder.
                let own = (slots + workers - 1 - row) / workers;
                in_ring(job, own, job.plan.tuning.block, |inner, bounce| {
                    uring::bounced(inner, bounce, own, row * slots.div_ceil(workers))
                })
            })
        }
        false => {
            let workers = job.plan.workers(job.attempt).min(blocks as usize);
            in_ring(
                job,
                workers as u64,
                job.plan.tuning.block,
                |inner, bounce| {
                    run_workers(job.plan.node, workers, |row| {
                        work(inner, Lane::Main, row, |extent| {
                            read_direct(inner, bounce.place(row, extent))?;
                            bounce.copy(row, extent)?;
                            Ok(true)
                        })
                    })
                },
            )
        }
    }
}

/// Reads one extent that direct reads cannot put into place, in one of the two lanes.
pub(super) fn once(job: &ReadJob<'_>, extent: &IoExtent) -> Result<(), Stop> {
    let align = job.plan.tuning.align;
    let block = (extent.file % align + extent.need).next_multiple_of(align);
    in_ring(job, 1, block, |inner, bounce| {
        read_direct(inner, bounce.place(0, extent))?;
        bounce.copy(0, extent)
    })
}

/// Creates a ring of `slots` blocks for the duration of `reads`, with a job that reads into it.
fn in_ring(
    job: &ReadJob<'_>,
    slots: u64,
    block: u64,
    reads: impl FnOnce(&ReadJob<'_>, &Bounce<'_>) -> Result<(), Stop>,
) -> Result<(), Stop> {
    let cannot = |errno| Stop::Refused(Error::os("cannot create a ring to read into", errno));
    let (bytes, align) = (slots * block, job.plan.tuning.align.max(page_size()));
    let ring = match bytes >= HUGE {
        true => Mapping::anon(
            bytes.next_multiple_of(HUGE) as usize,
            align.max(HUGE) as usize,
        ),
        false => Mapping::anon(bytes as usize, align as usize),
    };
    let ring = ring.map_err(cannot)?;
    let blocks = ring.region();
    // Only advice: the ring works without huge pages.
    let _ = blocks.want_huge();
    // Before Linux 6.5 a fork could separate a page from the read that fills it.
    blocks.leave_out_of_forks(true);
    let inner = ReadJob {
        region: blocks,
        never_faults: true,
        descriptor: None,
        dma_buf: None,
        ..*job
    };
    let bounce = Bounce {
        blocks,
        block,
        align: job.plan.tuning.align,
        job,
    };
    reads(&inner, &bounce)
}

impl Bounce<'_> {
    /// What to read into a block for an extent: whole units of the file's direct I/O alignment.
    /// Extents end where blocks of the file do, so they still fit when rounded up.
    pub(super) fn place(&self, slot: u64, extent: &IoExtent) -> IoExtent {
        let head = extent.file % self.align;
        let need = head + extent.need;
        IoExtent {
            file: extent.file - head,
            at: slot * self.block,
            len: need.next_multiple_of(self.align),
            need,
            head,
            run_end: self.blocks.len(),
        }
    }

    /// Copies the bytes of an extent from its block to their final place.
    pub(super) fn copy(&self, slot: u64, extent: &IoExtent) -> Result<(), Stop> {
        let from = slot * self.block + extent.file % self.align;
        let to = &self.job.region;
        if self.job.never_faults {
            let copy = || to.copy_from(extent.at, &self.blocks, from, extent.need);
            return Ok(self.job.touch(copy)?);
        }
        let mut done = 0;
        while done < extent.need {
            let at = extent.at + done;
            let left = extent.need - done;
            match file::copy_mapped(&self.blocks, from + done, to, at, left) {
                Ok(0) | Err(Errno::FAULT) => return Err(vanished(at).into()),
                Ok(got) => done += got,
                // A sandbox; buffered reads do not need this copy.
                Err(errno) => {
                    let error = Error::os("cannot copy to the buffer", errno);
                    let error = error.of_calls(&[sandbox::PROCESS_VM_READV]);
                    return Err(Stop::Refused(error));
                }
            }
        }
        Ok(())
    }
}
