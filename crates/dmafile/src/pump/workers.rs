//! Threads that take extents and move them one after another, and the order in which methods are tried.

use super::{Pass, Stop};
use crate::error::{Error, Verb};
use crate::flow::feed::{IoExtent, Panics, Queue};
use crate::flow::meter::Phase;
use crate::flow::trace::{ROW_COPIES, ROW_READS};
use crate::message::message;
use crate::plan::Attempt;
use crate::reasons::{About, Reasons};
use crate::sync;
use crate::sys::numa;

/// What has been moved of an extent.
pub(crate) struct MovedExtent {
    /// Bytes that count; fewer than all at the end of a stream.
    pub bytes: u64,
    /// They bypassed the page cache.
    pub direct: bool,
    /// These are moved, but this method must not move more.
    pub end: Option<Stop>,
}

impl MovedExtent {
    /// All of an extent.
    pub(crate) fn all(extent: &IoExtent, direct: bool) -> Self {
        Self {
            bytes: extent.need - extent.head,
            direct,
            end: None,
        }
    }
}

/// Takes extents one after another until there are none, or one fails. `step` moves an extent.
pub(crate) fn each(
    pass: &Pass<'_>,
    queue: Queue,
    row: u64,
    step: impl Fn(&IoExtent) -> Result<MovedExtent, Stop>,
) -> Result<(), Stop> {
    let meter = &pass.run.meter;
    let _panics = Panics::of(pass.feed);
    while let Some(extent) = pass.feed.wait(queue) {
        let start = meter.now();
        meter.io_begins();
        let moved = pass.check(&extent).and_then(|()| step(&extent));
        meter.io_ends();
        let moved = moved.inspect_err(|stop| stop.leave(pass.feed, extent))?;
        let (phase, name) = match (pass.run.verb, moved.direct) {
            (Verb::Load, _) if pass.attempt.receives() => (Phase::Wait, "receive"),
            (Verb::Load, true) => (Phase::Wait, "read"),
            (Verb::Load, false) => (Phase::Copy, "copy"),
            _ => (Phase::Wait, "write"),
        };
        meter.add(phase, start);
        let rows = match queue {
            Queue::Method => ROW_READS,
            Queue::Cached => ROW_COPIES,
        };
        meter.span(name, rows + row, start, extent.file, extent.need);
        meter.moved(&extent, moved.bytes, moved.direct);
        if let Some(stop) = moved.end {
            return Err(stop);
        }
    }
    Ok(())
}

/// Runs `work` in this thread and `workers - 1` others, and combines the results.
///
/// New memory comes from `node`.
pub(crate) fn run_workers(
    node: Option<u32>,
    workers: usize,
    work: impl Fn(u64) -> Result<(), Stop> + Sync,
) -> Result<(), Stop> {
    std::thread::scope(|scope| {
        let work = &work;
        let spawn = |row| {
            let builder = std::thread::Builder::new().name(format!("dmafile-io-{row}"));
            builder.spawn_scoped(scope, move || {
                numa::prefer(node);
                work(row)
            })
        };
        // Fewer threads than requested (EAGAIN under RLIMIT_NPROC) do the same work.
        let others: Vec<_> = (1..workers as u64)
            .map_while(|row| spawn(row).ok())
            .collect();
        let mut end = work(0).err();
        for other in others {
            if let Err(stop) = sync::join(other) {
                end = Some(Stop::or(end, stop));
            }
        }
        end.map_or(Ok(()), Err)
    })
}

/// Tries methods in order until one has moved everything, or has failed. Returns the last one, and its error.
pub(crate) fn try_in_order(
    methods: &[Attempt],
    log: &Reasons,
    mut attempt: impl FnMut(Attempt) -> Result<(), Stop>,
) -> (Attempt, Result<(), Error>) {
    let mut left = methods.iter().copied().peekable();
    let mut tried = methods[0];
    while let Some(next) = left.next() {
        tried = next;
        let error = match attempt(next) {
            Ok(()) => break,
            Err(Stop::Failed(error)) => return (tried, Err(error)),
            Err(Stop::Refused(error)) => error,
            Err(Stop::NotDirect(error)) => {
                while left.next_if(|other| other.direct).is_some() {}
                error
            }
        };
        let Some(other) = left.peek() else {
            return (tried, Err(error));
        };
        log.add(
            About::Method,
            other,
            message![format!("{tried} ended: "), &error],
        );
    }
    (tried, Ok(()))
}
