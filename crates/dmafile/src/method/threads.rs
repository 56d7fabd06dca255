//! `threads`: pread(2) by one or several workers; and the copies of what is in the page cache.

use super::fill::{read_buffered, read_direct};
use super::{ReadJob, Stop, bounce};
use crate::flow::feed::{IoExtent, Queue};
use crate::pump::{MovedExtent, each, run_workers};
use crate::sys::file;

/// Reads with `workers` threads.
pub(super) fn run(job: &ReadJob<'_>, workers: usize) -> Result<(), Stop> {
    let direct = job.pass.attempt.direct;
    run_workers(job.pass.node, workers, |row| {
        each(&job.pass, Queue::Method, row, |extent| {
            if direct {
                read_direct(job, *extent)?
            } else {
                read_buffered(job, *extent)?
            }
            Ok(MovedExtent::all(extent, direct))
        })
    })
}

/// Copies what is in the page cache, with `workers` threads. What has been evicted since is read by
/// the plan's method.
pub(crate) fn copy_cached(job: &ReadJob<'_>, workers: usize) -> Result<(), Stop> {
    run_workers(job.pass.node, workers, |row| {
        each(&job.pass, Queue::Cached, row, |extent| {
            let direct = copy(job, extent)?;
            Ok(MovedExtent::all(extent, direct))
        })
    })
}

/// Returns whether the bytes that were not in the page cache were read directly.
fn copy(job: &ReadJob<'_>, extent: &IoExtent) -> Result<bool, Stop> {
    let mut left = *extent;
    loop {
        // If nothing is cached, there are only parts of blocks to copy that direct reads cannot put
        // into place; trying them without blocking would only start a read-ahead.
        if job.plan.to_copy == 0 {
            break;
        }
        // Any error, usually EAGAIN, only means that the bytes must be read by another method.
        let (fd, offset) = job.buffered(left.file)?;
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
    let attempt = job.pass.attempt;
    if !attempt.direct {
        return read_buffered(job, left).map(|()| false);
    }
    let read = if aligned && attempt.reads_by_address() {
        read_direct(job, left)
    } else {
        bounce::once(job, &left)
    };
    match read {
        Err(Stop::NotDirect(_) | Stop::Refused(_)) => read_buffered(job, left).map(|()| false),
        done => done.map(|()| true),
    }
}
