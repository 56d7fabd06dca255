//! `uring`: one ring, one thread, reads in flight up to the queue depth; windows of registered buffers if the limit
//! on pinned memory allows. `bounce` and `premap` use it, too.

use super::bounce::{self, Bounce};
use super::fill::{cut_short, failed, is_refusal, read_buffered, read_direct, refused};
use super::{ReadJob, Stop, premap};
use crate::error::Error;
use crate::flow::feed::IoExtent;
use crate::options::Method;
use crate::pump::{self, Direction, Flight, Map, RingMemory};
use crate::sys::Errno;
use crate::sys::map::Region;

pub(super) fn run(job: &ReadJob<'_>) -> Result<(), Stop> {
    into(job, memory(job))
}

/// Reads into memory that a ring accesses in this way.
pub(super) fn into(job: &ReadJob<'_>, memory: RingMemory<'_>) -> Result<(), Stop> {
    read(job, None, memory, (job.plan.tuning.queue_depth, 0))
}

/// Reads into blocks, as many at once as there are, and copies what has been read. Several threads may do so, each
/// with separate blocks, whose rows of the trace begin at `row`.
pub(super) fn bounced(job: &ReadJob<'_>, bounce: &Bounce<'_>, row: u64) -> Result<(), Stop> {
    let depth = bounce.blocks.count as u32;
    read(job, Some(bounce), memory(job), (depth, row))
}

fn memory(job: &ReadJob<'_>) -> RingMemory<'static> {
    let map = match job.pass.attempt.method {
        Method::Premap => Map::Yes,
        // Everything goes through the same blocks repeatedly. Other windows are read into only once, so mapping
        // them in advance takes as long as mapping for each read.
        Method::Bounce if job.plan.tuning.premaps => Map::IfPossible,
        _ => Map::No,
    };
    if job.pass.attempt.registered {
        RingMemory::Registered(job.plan.sizes.window, map)
    } else {
        RingMemory::Plain
    }
}

fn read<'a>(
    job: &'a ReadJob<'a>,
    bounce: Option<&'a Bounce<'a>>,
    memory: RingMemory<'a>,
    queue: (u32, u64),
) -> Result<(), Stop> {
    let starts = job.source.files().map(|(_, start, _)| start);
    let files: Result<Vec<_>, Error> = starts.map(|at| Ok(job.input(at)?.0)).collect();
    let reads = RingReads { job, bounce };
    pump::move_all(&job.pass, &reads, (files?, job.region), memory, queue)
}

/// How a ring reads.
struct RingReads<'a> {
    job: &'a ReadJob<'a>,
    /// Where the bytes go after the read, if it does not put them into place.
    bounce: Option<&'a Bounce<'a>>,
}

impl<'a> Direction<'a> for RingReads<'a> {
    const WRITES: bool = false;
    const MAPPED: &'static str = "reads into mapped memory are refused";

    fn grain(&self) -> u64 {
        self.job.plan.tuning.align
    }

    fn locate(&self, at: u64) -> (usize, u64) {
        self.job.source.locate(at)
    }

    fn place(&self, index: usize, extent: &IoExtent) -> (IoExtent, Option<Region<'a>>) {
        let place = self.bounce.map(|bounce| bounce.place(index as u64, extent));
        (place.unwrap_or(*extent), None)
    }

    fn window(&self, place: &IoExtent) -> Option<(IoExtent, u64)> {
        let present = match self.bounce {
            Some(_) => u64::MAX,
            None => self.job.pass.feed.frontier(),
        };
        Some((*place, present))
    }

    fn fill(&self, _: usize, extent: &IoExtent) -> Result<u64, Stop> {
        Ok(extent.need)
    }

    fn empty(&self, index: usize, extent: &IoExtent) -> Result<(), Stop> {
        let copy = self.bounce.map(|bounce| bounce.copy(index as u64, extent));
        copy.unwrap_or(Ok(()))
    }

    fn has_blocks(&self) -> bool {
        self.bounce.is_some()
    }

    fn move_now(&self, flight: &Flight<'a>, direct: bool) -> Result<(), Stop> {
        if direct {
            read_direct(self.job, flight.left)
        } else {
            read_buffered(self.job, flight.left)
        }
    }

    fn nothing_moved(&self, flight: &Flight<'a>) -> Stop {
        cut_short(self.job.source, flight.left.file).into()
    }

    fn failed(&self, flight: &Flight<'a>, errno: Errno) -> Stop {
        if self.job.pass.attempt.direct && is_refusal(errno) {
            refused(self.job.source, errno)
        } else {
            failed(self.job.source, flight.left.file, errno).into()
        }
    }

    /// There are no pages that the CPU could zero.
    fn without_pages(&self, flight: &Flight<'a>) -> Option<Result<(), Stop>> {
        let left = &flight.left;
        let (start, end) = (left.file + left.head, left.file + left.need);
        premap::has_hole(self.job.source, start, end).then(|| bounce::once(self.job, left))
    }
}
