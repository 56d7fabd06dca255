//! `threads` and `read`: pread(2) by one or several workers; and the copy lane, which takes from
//! the page cache what sits there.

use super::fill::{read_buffered, read_direct};
use super::{Job, Stop, work};
use crate::sys::file;
use crate::transfer::feed::{Extent, Lane};
use std::sync::Mutex;

/// Moves the main lane with `workers` threads.
pub(super) fn run(job: &Job<'_>, workers: usize) -> Result<(), Stop> {
    crowd(workers, |row| {
        work(job, Lane::Main, row, |extent| {
            if job.rung.direct {
                read_direct(job, job.file()?, *extent)?;
            } else {
                read_buffered(job, *extent)?;
            }
            Ok(job.rung.direct)
        })
    })
}

/// Copies what sits in the page cache, with `workers` threads. What has left it meanwhile is
/// read as the rung reads.
pub(crate) fn copy_cached(job: &Job<'_>, workers: usize) -> Result<(), Stop> {
    crowd(workers, |row| {
        work(job, Lane::Copy, row, |extent| copy(job, extent))
    })
}

fn copy(job: &Job<'_>, extent: &Extent) -> Result<bool, Stop> {
    let mut left = *extent;
    loop {
        // Errors, EAGAIN above all, mean only that the bytes must come another way.
        let fd = job.source.buffered();
        let got = file::pread_cached(fd, &job.region, left.at, left.len, left.file).unwrap_or(0);
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
    let align = job.plan.align;
    let aligned = [left.file, left.at + job.region.address(), left.len]
        .iter()
        .all(|value| value % align == 0);
    if aligned && job.rung.direct {
        match read_direct(job, job.file()?, left) {
            Err(Stop::Refused(_)) => read_buffered(job, left).map(|()| false),
            done => done.map(|()| true),
        }
    } else {
        read_buffered(job, left).map(|()| false)
    }
}

/// Runs `each` on this thread and `workers - 1` others, and joins their ends: a failure counts
/// more than a refusal.
fn crowd(workers: usize, each: impl Fn(u64) -> Result<(), Stop> + Sync) -> Result<(), Stop> {
    let ends = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for row in 1..workers as u64 {
            let (each, ends) = (&each, &ends);
            let spawned = std::thread::Builder::new().spawn_scoped(scope, move || {
                let end = each(row);
                ends.lock().expect("no holder panics").push(end);
            });
            // Fewer threads than wished for (EAGAIN under RLIMIT_NPROC) do the same work.
            if spawned.is_err() {
                break;
            }
        }
        let end = each(0);
        ends.lock().expect("no holder panics").push(end);
    });
    let ends = ends.into_inner().expect("no holder panics");
    let (mut failed, mut refused) = (None, None);
    for end in ends {
        match end {
            Err(Stop::Failed(error)) => failed = Some(Stop::Failed(error)),
            Err(Stop::Refused(error)) => refused = Some(Stop::Refused(error)),
            Ok(()) => {}
        }
    }
    failed.or(refused).map_or(Ok(()), Err)
}
