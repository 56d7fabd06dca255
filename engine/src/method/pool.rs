//! `threads` and `read`: pread(2) by one or several workers; and the copy lane, which takes from
//! the page cache what sits there.

use super::fill::{read_buffered, read_direct};
use super::{Job, Stop, bounce, work};
use crate::flow::feed::{Extent, Lane};
use crate::sys::{file, numa};

/// Moves the main lane with `workers` threads.
pub(super) fn run(job: &Job<'_>, workers: usize) -> Result<(), Stop> {
    crowd(job.plan.node, workers, |row| {
        work(job, Lane::Main, row, |extent| {
            if job.rung.direct {
                read_direct(job, *extent)?;
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
    crowd(job.plan.node, workers, |row| {
        work(job, Lane::Copy, row, |extent| copy(job, extent))
    })
}

fn copy(job: &Job<'_>, extent: &Extent) -> Result<bool, Stop> {
    let mut left = *extent;
    loop {
        // Where nothing is cached, all there is to copy are parts of blocks that direct reads cannot
        // land in; and asking for them would start a read ahead.
        if job.plan.to_copy == 0 {
            break;
        }
        // Errors, EAGAIN above all, mean only that the bytes must come another way.
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
    if !job.rung.direct {
        return read_buffered(job, left).map(|()| false);
    }
    let read = match aligned && job.rung.lands_by_address() {
        true => read_direct(job, left),
        false => bounce::once(job, &left),
    };
    match read {
        Err(Stop::NotDirect(_) | Stop::Refused(_)) => read_buffered(job, left).map(|()| false),
        done => done.map(|()| true),
    }
}

/// Runs `each` on this thread and `workers - 1` others, and joins their ends: a failure counts
/// more than a refusal.
///
/// New memory comes from `node`.
pub(crate) fn crowd(
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
        // Fewer threads than wished for (EAGAIN under RLIMIT_NPROC) do the same work.
        let others: Vec<_> = (1..workers as u64)
            .map_while(|row| spawn(row).ok())
            .collect();
        let mut end = each(0);
        for other in others {
            let other = other.join().expect("a thread of ours does not panic");
            end = match (end, other) {
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
