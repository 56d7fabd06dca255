//! `bounce`: direct reads into a small ring of blocks, and one copy from there to where the bytes
//! belong. For memory that direct reads cannot land in: the mappings of dma-bufs, and memory whose
//! address does not fit the offset in the file. No page cache comes into being.

use super::fill::{read_direct, vanished};
use super::pool::crowd;
use super::{Job, Stop, uring, work};
use crate::error::Error;
use crate::flow::feed::{Extent, Lane};
use crate::sys::map::{Mapping, Region, page_size};
use crate::sys::{Errno, file};

/// A ring from which one thread reads ahead and copies on: fewer blocks would leave the disk idle
/// during a copy.
const SLOTS_PER_WORKER: u64 = 2;
/// Where a ring may begin and end so that transparent huge pages hold it and nothing else: they are
/// pinned whole, and the disk takes more of them at once.
const HUGE: u64 = 2 << 20;

/// The blocks that reads land in, and where their bytes go from there.
#[derive(Clone, Copy)]
pub(super) struct Bounce<'m> {
    blocks: Region<'m>,
    block: u64,
    align: u64,
    /// What is read is for.
    job: &'m Job<'m>,
}

pub(super) fn run(job: &Job<'_>) -> Result<(), Stop> {
    let blocks = job.plan.to_read.div_ceil(job.plan.tuning.block).max(1);
    match job.rung.registered {
        true => {
            let slots = u64::from(job.plan.tuning.queue_depth).min(blocks);
            // Rings on huge pages of their own.
            let rings = (slots * job.plan.tuning.block / HUGE).min(slots / SLOTS_PER_WORKER);
            let workers = (job.plan.tuning.threads as u64).min(rings).max(1);
            crowd(job.plan.node, workers as usize, |row| {
                // The first ones get what does not divide evenly.
                let own = (slots + workers - 1 - row) / workers;
                in_ring(job, own, job.plan.tuning.block, |inner, bounce| {
                    uring::bounced(inner, bounce, own, row * slots.div_ceil(workers))
                })
            })
        }
        false => {
            let workers = job.plan.workers(job.rung).min(blocks as usize);
            in_ring(
                job,
                workers as u64,
                job.plan.tuning.block,
                |inner, bounce| {
                    crowd(job.plan.node, workers, |row| {
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

/// Reads one extent that direct reads cannot land in, in one of the two lanes.
pub(super) fn once(job: &Job<'_>, extent: &Extent) -> Result<(), Stop> {
    let align = job.plan.tuning.align;
    let block = (extent.file % align + extent.need).next_multiple_of(align);
    in_ring(job, 1, block, |inner, bounce| {
        read_direct(inner, bounce.place(0, extent))?;
        bounce.copy(0, extent)
    })
}

/// Makes a ring of `slots` blocks for as long as `reads` takes, with a job that reads into it.
fn in_ring(
    job: &Job<'_>,
    slots: u64,
    block: u64,
    reads: impl FnOnce(&Job<'_>, &Bounce<'_>) -> Result<(), Stop>,
) -> Result<(), Stop> {
    let cannot = |errno| Stop::Refused(Error::os("cannot make a ring to read into", errno));
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
    // Advice: it is as good as any where there are none.
    let _ = blocks.want_huge();
    // Before Linux 6.5 a fork could part a page from the read that fills it.
    blocks.leave_out_of_forks(true);
    let inner = Job {
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
    /// What to read into a block, for an extent: whole units of the file's direct alignment.
    /// Extents end where blocks of the file do, so that rounded out they still fit.
    pub(super) fn place(&self, slot: u64, extent: &Extent) -> Extent {
        let head = extent.file % self.align;
        let need = head + extent.need;
        Extent {
            file: extent.file - head,
            at: slot * self.block,
            len: need.next_multiple_of(self.align),
            need,
            head,
            run_end: self.blocks.len(),
        }
    }

    /// Copies the bytes of an extent from its block to where they belong.
    pub(super) fn copy(&self, slot: u64, extent: &Extent) -> Result<(), Stop> {
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
                // A sandbox: buffered reads need no such copy.
                Err(errno) => {
                    let error = Error::os("cannot copy to the buffer (process_vm_readv)", errno);
                    return Err(Stop::Refused(error));
                }
            }
        }
        Ok(())
    }
}
