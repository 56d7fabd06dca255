//! `uring` and `premap`: writes in flight up to the queue depth, directly from the origin's memory; and `bounce`, from
//! registered blocks.

use super::WriteJob;
use crate::error::{Error, Verb};
use crate::flow::feed::IoExtent;
use crate::options::Method;
use crate::pump::{self, Blocks, Direction, Flight, Map, RingMemory, Stop, run_workers};
use crate::sys::Errno;
use crate::sys::map::Region;

/// A shorter run is not worth a registration.
const SMALL_RUN: u64 = 1 << 20;

/// Writes directly from the origin's memory.
pub(super) fn by_address(job: &WriteJob<'_>) -> Result<(), Stop> {
    let attempt = job.pass.attempt;
    let depth = job.plan.depth_of(attempt);
    if attempt.method != Method::Premap {
        let region = job.region().map_err(|why| Error::new(Verb::Write, why))?;
        let memory = if attempt.registered {
            RingMemory::Registered(job.plan.window, Map::No)
        } else {
            RingMemory::Plain
        };
        return write(job, region, None, memory, (depth, 0));
    }
    let memory = job
        .origin
        .memory()
        .filter(|memory| memory.dma_buf.is_some());
    let none = || Error::new("no dma-buf", "this method writes from one");
    let dma_buf = memory.ok_or_else(none)?.fd();
    let start = job.origin.start;
    let ranges = vec![(start, start + job.origin.bytes.unwrap_or(0))];
    // A mapped dma-buf is not accessed by address: an access to this region is a bug, and panics.
    let nothing = Region::of_slice(&mut []);
    let memory = RingMemory::Mapped(dma_buf, ranges);
    write(job, nothing, None, memory, (depth, 0))
}

/// Writes from blocks, which several threads fill one after another, each its own.
pub(super) fn through(job: &WriteJob<'_>, blocks: &Blocks<'_>) -> Result<(), Stop> {
    // With fewer than two blocks the disk would be idle during a copy.
    let workers = job.fillers((blocks.count / 2).min(2)) as u64;
    run_workers(job.pass.node, workers as usize, |row| {
        let own = (blocks.count + workers - 1 - row) / workers;
        let first = row * blocks.count.div_ceil(workers);
        let memory = if job.pass.attempt.registered {
            RingMemory::Registered(blocks.region.len(), Map::No)
        } else {
            RingMemory::Plain
        };
        let own_blocks = OwnBlocks {
            blocks,
            first,
            end: first + own,
        };
        match own {
            0 => Ok(()),
            _ => write(
                job,
                blocks.region,
                Some(own_blocks),
                memory,
                (own as u32, first),
            ),
        }
    })
}

fn write<'a>(
    job: &'a WriteJob<'a>,
    region: Region<'a>,
    blocks: Option<OwnBlocks<'a>>,
    memory: RingMemory<'a>,
    queue: (u32, u64),
) -> Result<(), Stop> {
    let file = job.to.output(job.pass.attempt.direct)?;
    let writes = RingWrites {
        job,
        region,
        blocks,
    };
    pump::move_all(&job.pass, &writes, (vec![file], region), memory, queue)
}

/// The blocks that belong to a thread.
#[derive(Clone, Copy)]
struct OwnBlocks<'a> {
    blocks: &'a Blocks<'a>,
    first: u64,
    end: u64,
}

/// How a ring writes.
struct RingWrites<'a> {
    job: &'a WriteJob<'a>,
    region: Region<'a>,
    /// The blocks that bytes pass through.
    blocks: Option<OwnBlocks<'a>>,
}

impl<'a> Direction<'a> for RingWrites<'a> {
    const WRITES: bool = true;
    const MAPPED: &'static str = "writes from mapped memory are refused";

    fn grain(&self) -> u64 {
        self.job.to.grain
    }

    fn locate(&self, at: u64) -> (usize, u64) {
        (0, at)
    }

    fn place(&self, index: usize, extent: &IoExtent) -> (IoExtent, Option<Region<'a>>) {
        let part = self.job.in_place(extent);
        let at = match (part, self.blocks) {
            (Some(_), _) => 0,
            (None, Some(own)) => own.blocks.at(own.first + index as u64),
            (None, None) => extent.at,
        };
        let len = extent.need;
        (IoExtent { at, len, ..*extent }, part)
    }

    fn window(&self, place: &IoExtent) -> Option<(IoExtent, u64)> {
        let place = match self.blocks {
            Some(own) => IoExtent {
                len: own.blocks.size,
                run_end: own.blocks.at(own.end),
                ..*place
            },
            None if place.run_end - place.at < SMALL_RUN => return None,
            None => *place,
        };
        Some((place, u64::MAX))
    }

    fn fill(&self, index: usize, extent: &IoExtent) -> Result<u64, Stop> {
        match self.blocks {
            Some(own) => self.job.fill(own.blocks, own.first + index as u64, extent),
            None => Ok(extent.need),
        }
    }

    fn empty(&self, _: usize, _: &IoExtent) -> Result<(), Stop> {
        Ok(())
    }

    fn has_blocks(&self) -> bool {
        self.blocks.is_some()
    }

    fn move_now(&self, flight: &Flight<'a>, direct: bool) -> Result<(), Stop> {
        if self.job.pass.attempt.method == Method::Premap {
            // The region is not the memory.
            return Err(self.failed(flight, Errno::INVAL));
        }
        let memory = flight.part.unwrap_or(self.region);
        let IoExtent { file, at, need, .. } = flight.left;
        let done = self.job.write_all(&memory, direct, at, need, file);
        done.map_err(|stop| of_flight(flight, stop))
    }

    fn nothing_moved(&self, flight: &Flight<'a>) -> Stop {
        self.job.to.failed(flight.left.file, Errno::IO).into()
    }

    fn failed(&self, flight: &Flight<'a>, errno: Errno) -> Stop {
        let direct = self.job.pass.attempt.direct;
        let stop = self.job.stop(errno, flight.left.file, direct);
        of_flight(flight, stop)
    }

    fn without_pages(&self, _: &Flight<'a>) -> Option<Result<(), Stop>> {
        None
    }
}

fn of_flight(flight: &Flight<'_>, stop: Stop) -> Stop {
    match flight.part {
        Some(_) => WriteJob::stop_of_part(stop),
        None => stop,
    }
}
