//! `threads`: pread(2) by one or several workers; and the copy lane, which copies from the page cache
//! what is there.

use super::fill::{read_buffered, read_direct};
use super::{ReadJob, Stop, bounce, work};
use crate::flow::feed::{IoExtent, Lane};
use crate::sync;
use crate::sys::{file, numa};

/// Moves the main lane with `workers` threads.
pub(super) fn run(job: &ReadJob<'_>, workers: usize) -> Result<(), Stop> {
    run_workers(job.plan.node, workers, |row| {
        work(job, Lane::Main, row, |extent| {
            if job.attempt.direct {
                read_direct(job, *extent)?;
            } else {
                read_buffered(job, *extent)?;
            }
            Ok(job.attempt.direct)
        })
    })
}

/// Copies what is in the page cache, with `workers` threads. What has been evicted since is read by
/// the plan's method.
pub(crate) fn copy_cached(job: &ReadJob<'_>, workers: usize) -> Result<(), Stop> {
    run_workers(job.plan.node, workers, |row| {
        work(job, Lane::Copy, row, |extent| copy(job, extent))
    })
}

fn copy(job: &ReadJob<'_>, extent: &IoExtent) -> Result<bool, Stop> {
    let mut left = *extent;
    loop {
        // If nothing is cached, there are only parts of blocks to copy that direct reads cannot put
        // into place; trying them without blocking would only start a read-ahead.
        if job.plan.to_copy == 0 {
            break;
        }
        // Any error, usually EAGAIN, only means that the bytes must be read by another method.
        let (fd, offset) = job.source.buffered(left.file);
        let got = job
            .touch(|| file::pread_cached(fd, &job.region, left.at, left.len, offset))?
            .unwrap_or(0);
        if got >= left.need {
            return Ok(false);
        }
        if got == 0 {
            break;
        }
        left.file += got;
        left.at += got;
        left.len -= got;
        left.need -= got;
    }
    let align = job.plan.tuning.align;
    let aligned = [left.file, left.at + job.region.address(), left.len]
        .iter()
        .all(|value| value % align == 0);
    if !job.attempt.direct {
        return read_buffered(job, left).map(|()| false);
    }
    let read = match aligned && job.attempt.lands_by_address() {
        true => read_direct(job, left),
        false => bounce::once(job, &left),
    };
    match read {
        Err(Stop::NotDirect(_) | Stop::Refused(_)) => read_buffered(job, left).map(|()| false),
        done => done.map(|()| true),
    }
}

/// Runs `each` in this thread and `workers - 1` others, and combines the results: a failure takes
/// precedence over a refusal.
///
/// New memory comes from `node`.
pub(crate) fn run_workers(
    node: Option<u32>,
    workers: usize,
    each: impl Fn(u64) -> Result<(), Stop> + Sync,
) -> Result<(), Stop> {
    std::thread::scope(|scope| {
        let each = &each;
        let spawn = |row| {
            let builder = std::thread::Builder::new().name(format!("dmafile-io-{row}"));
            builder.spawn_scoped(scope, move || {
                numa::prefer(node);
                each(row)
            })
        };
        // Fewer threads than requested (EAGAIN under RLIMIT_NPROC) do the same work.
        let others: Vec<_> = (1..workers as u64)
            .map_while(|row| spawn(row).ok())
            .collect();
        let mut end = each(0);
        for other in others {
            end = match (end, sync::join(other)) {
                (Err(Stop::Failed(error)), _) | (_, Err(Stop::Failed(error))) => {
                    Err(Stop::Failed(error))
                }
                (Err(refused), _) | (_, Err(refused)) => Err(refused),
                (Ok(()), Ok(())) => Ok(()),
            };
        }
        end
    })
}
