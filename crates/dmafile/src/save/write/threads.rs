//! `threads`, and `bounce` without registered buffers: pwrite(2) by one or several workers.

use super::WriteJob;
use crate::error::{Error, Verb};
use crate::flow::feed::Queue;
use crate::pump::{Blocks, MovedExtent, Stop, each, run_workers};

/// Writes directly from the origin's memory.
pub(super) fn by_address(job: &WriteJob<'_>) -> Result<(), Stop> {
    let region = job.region().map_err(|why| Error::new(Verb::Write, why))?;
    let attempt = job.pass.attempt;
    run_workers(job.pass.node, job.plan.depth_of(attempt) as usize, |row| {
        each(&job.pass, Queue::Method, row, |extent| {
            job.write_all(&region, attempt.direct, extent.at, extent.need, extent.file)?;
            Ok(MovedExtent::all(extent, attempt.direct))
        })
    })
}

/// Writes from blocks, one per worker.
pub(super) fn through(job: &WriteJob<'_>, blocks: &Blocks<'_>) -> Result<(), Stop> {
    let direct = job.pass.attempt.direct;
    run_workers(job.pass.node, job.fillers(blocks.count), |row| {
        each(&job.pass, Queue::Method, row, |extent| {
            if let Some(part) = job.in_place(extent) {
                let done = job.write_all(&part, direct, 0, extent.need, extent.file);
                return done
                    .map(|()| MovedExtent::all(extent, direct))
                    .map_err(WriteJob::stop_of_part);
            }
            let bytes = job.fill(blocks, row, extent)?;
            let write =
                |direct| job.write_all(&blocks.region, direct, blocks.at(row), bytes, extent.file);
            let moved = |direct, end| MovedExtent { bytes, direct, end };
            match write(direct) {
                // Bytes of a stream cannot be read again.
                Err(Stop::NotDirect(error)) => {
                    write(false).map(|()| moved(false, Some(Stop::NotDirect(error))))
                }
                done => done.map(|()| moved(direct, None)),
            }
        })
    })
}
