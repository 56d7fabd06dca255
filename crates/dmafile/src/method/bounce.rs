//! `bounce`: direct reads into a small ring of blocks, then one copy from there to the final place.
//! For memory that direct reads cannot go into: the mappings of dma-bufs, and memory whose address
//! does not fit the offset in the file. The page cache is not used.

use super::fill::{read_direct, vanished};
use super::{ReadJob, Stop, uring};
use crate::error::Error;
use crate::flow::feed::{IoExtent, Queue};
use crate::pump::{Blocks, MovedExtent, each, run_workers};
use crate::source::MayFault;
use crate::sys::{Errno, file, sandbox};

/// With fewer blocks per thread, which reads ahead and copies, the disk would be idle during a
/// copy.
const BLOCKS_PER_WORKER: u64 = 2;
/// Rings of threads are on separate huge pages.
const HUGE: u64 = 2 << 20;

/// The blocks that are read into, and where their bytes go from there.
#[derive(Clone, Copy)]
pub(super) struct Bounce<'m> {
    pub(super) blocks: &'m Blocks<'m>,
    /// The job that the bytes are read for.
    job: &'m ReadJob<'m>,
}

pub(super) fn run(job: &ReadJob<'_>) -> Result<(), Stop> {
    let (tuning, node) = (job.plan.tuning, job.pass.node);
    let extents = job.plan.to_read.div_ceil(tuning.block).max(1);
    if !job.pass.attempt.registered {
        let workers = job.plan.workers(job.pass.attempt).min(extents as usize);
        return in_blocks(job, (workers as u64, tuning.block), |inner, bounce| {
            run_workers(node, workers, |row| {
                each(&inner.pass, Queue::Method, row, |extent| {
                    read_direct(inner, bounce.place(row, extent))?;
                    bounce.copy(row, extent)?;
                    Ok(MovedExtent::all(extent, true))
                })
            })
        });
    }
    let blocks = u64::from(tuning.queue_depth).min(extents);
    let rings = (blocks * tuning.block / HUGE).min(blocks / BLOCKS_PER_WORKER);
    let workers = (tuning.threads as u64).min(rings).max(1);
    run_workers(node, workers as usize, |row| {
        // The first ones get the remainder.
        let own = (blocks + workers - 1 - row) / workers;
        in_blocks(job, (own, tuning.block), |inner, bounce| {
            uring::bounced(inner, bounce, row * blocks.div_ceil(workers))
        })
    })
}

/// Reads one extent that direct reads cannot put into place, from either queue.
pub(super) fn once(job: &ReadJob<'_>, extent: &IoExtent) -> Result<(), Stop> {
    let align = job.plan.tuning.align;
    let block = (extent.file % align + extent.need).next_multiple_of(align);
    in_blocks(job, (1, block), |inner, bounce| {
        read_direct(inner, bounce.place(0, extent))?;
        bounce.copy(0, extent)
    })
}

/// Creates blocks for the duration of `reads`, with a job that reads into them.
fn in_blocks(
    job: &ReadJob<'_>,
    shape: (u64, u64),
    reads: impl FnOnce(&ReadJob<'_>, &Bounce<'_>) -> Result<(), Stop>,
) -> Result<(), Stop> {
    Blocks::with(shape, job.plan.tuning.align, |blocks| {
        let inner = ReadJob {
            region: blocks.region,
            may_fault: MayFault::Never,
            descriptor: None,
            dma_buf: None,
            ..*job
        };
        reads(&inner, &Bounce { blocks, job })
    })
}

impl Bounce<'_> {
    /// What to read into a block for an extent: whole units of the file's direct I/O alignment.
    /// Extents end where blocks of the file do, so they still fit when rounded up.
    pub(super) fn place(&self, index: u64, extent: &IoExtent) -> IoExtent {
        let align = self.job.plan.tuning.align;
        let head = extent.file % align;
        let need = head + extent.need;
        IoExtent {
            file: extent.file - head,
            at: self.blocks.at(index),
            len: need.next_multiple_of(align),
            need,
            head,
            run_end: self.blocks.region.len(),
        }
    }

    /// Copies the bytes of an extent from its block to their final place.
    pub(super) fn copy(&self, index: u64, extent: &IoExtent) -> Result<(), Stop> {
        let blocks = &self.blocks.region;
        let from = self.blocks.at(index) + extent.file % self.job.plan.tuning.align;
        let to = &self.job.region;
        if self.job.may_fault == MayFault::Never {
            let copy = || to.copy_from(extent.at, blocks, from, extent.need);
            return Ok(self.job.touch(copy)?);
        }
        let mut done = 0;
        while done < extent.need {
            let at = extent.at + done;
            let left = extent.need - done;
            match file::copy_mapped(blocks, from + done, to, at, left) {
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
