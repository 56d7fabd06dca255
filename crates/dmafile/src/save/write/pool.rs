//! `threads`, and `bounce` without registered buffers: pwrite(2) by one or several workers.

use super::{Blocks, WriteJob, WrittenExtent};
use crate::error::Verb;
use crate::method::{Stop, run_workers};

/// Writes directly from the origin's memory.
pub(super) fn by_address(job: &WriteJob<'_>) -> Result<(), Stop> {
    let region = job
        .region()
        .map_err(|why| super::Error::new(Verb::Write, why))?;
    let workers = job.plan.depth_of(job.attempt) as usize;
    run_workers(job.plan.tuning.node, workers, |row| {
        job.each(row, |extent| {
            let direct = job.attempt.direct;
            job.write_all(&region, direct, extent.at, extent.need, extent.file)?;
            Ok(job.done(extent.need))
        })
    })
}

/// Writes from blocks, one per worker.
pub(super) fn through(job: &WriteJob<'_>, blocks: &Blocks<'_>) -> Result<(), Stop> {
    let workers = job.fillers(blocks.count);
    run_workers(job.plan.tuning.node, workers, |row| {
        let block = blocks.block(row);
        job.each(row, |extent| {
            if let Some(part) = job.in_place(extent) {
                let done = job.write_all(&part, job.attempt.direct, 0, extent.need, extent.file);
                return done
                    .map(|()| job.done(extent.need))
                    .map_err(WriteJob::stop_of_part);
            }
            let bytes = job.fill(&block, extent)?;
            let write = |direct| job.write_all(&blocks.ring, direct, block.at, bytes, extent.file);
            match write(job.attempt.direct) {
                // Bytes of a stream cannot be read again.
                Err(Stop::NotDirect(error)) => write(false).map(|()| WrittenExtent {
                    bytes,
                    direct: false,
                    end: Some(Stop::NotDirect(error)),
                }),
                done => done.map(|()| job.done(bytes)),
            }
        })
    })
}
