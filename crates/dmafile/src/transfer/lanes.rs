//! The two lanes of a transfer: the method of the plan reads what is on the disk, threads copy what is
//! in the page cache.

use super::LoadTransfer;
use crate::flow::feed::{Feed, FileRange, Panics};
use crate::message::message;
use crate::method::{self, Stop};
use crate::plan::Attempt;
use crate::sync;
use crate::sys::numa;

/// Which lanes have something to do.
#[derive(Clone, Copy)]
pub(super) struct Lanes {
    pub(super) main: bool,
    pub(super) copy: bool,
}

impl LoadTransfer<'_> {
    /// The ranges of the file for the method and for the copy lane.
    pub(super) fn lanes(&self) -> (Vec<FileRange>, Vec<FileRange>) {
        let (mut main, mut copy) = (Vec::new(), Vec::new());
        self.work.meter.in_place(0, self.work.plan.lead);
        let mut done = self.work.plan.offset;
        for run in &self.work.layout.runs {
            self.work
                .meter
                .in_place(self.work.at(done), self.work.at(run.start));
            done = run.end;
            if run.cached {
                copy.push((run.start, run.end));
                continue;
            }
            // Memory beyond this range must not be written: a part of a block at either end cannot be
            // read directly.
            let align = self.work.plan.tuning.align;
            let mut middle = (run.start, run.end);
            if self.work.plan.first().lands_whole() {
                if self.work.at(run.start) < self.work.plan.floor + run.start % align {
                    middle.0 = run.start.next_multiple_of(align).min(run.end);
                }
                if self.work.at(run.end.next_multiple_of(align)) > self.work.plan.capacity {
                    middle.1 = (run.end - run.end % align).max(middle.0);
                }
            }
            copy.extend(
                [(run.start, middle.0), (middle.1, run.end)]
                    .iter()
                    .filter(|r| r.0 < r.1),
            );
            main.extend([middle].iter().filter(|r| r.0 < r.1));
        }
        self.work.meter.in_place(
            self.work.at(done),
            self.work.at(self.work.plan.offset + self.work.plan.bytes),
        );
        (main, copy)
    }

    /// Runs the lanes that have something to do until all extents are moved; errors are left in the
    /// feed. Returns the last method of the main lane.
    pub(super) fn read(&self, feed: &Feed, lanes: Lanes) -> Attempt {
        match (lanes.main, lanes.copy) {
            (true, true) => std::thread::scope(|scope| {
                let copier = || {
                    numa::prefer(self.work.plan.node);
                    self.lane_copy(feed);
                };
                let name = "dmafile-copy".to_string();
                let thread = std::thread::Builder::new()
                    .name(name)
                    .spawn_scoped(scope, copier);
                let attempt = self.lane_main(feed);
                match thread {
                    Ok(thread) => sync::join(thread),
                    // No thread can be created: one lane after the other.
                    Err(_) => self.lane_copy(feed),
                }
                attempt
            }),
            (true, false) => self.lane_main(feed),
            (false, copy) => {
                if copy {
                    self.lane_copy(feed);
                }
                self.work.plan.first()
            }
        }
    }

    fn lane_copy(&self, feed: &Feed) {
        let _panics = Panics::of(feed);
        let job = self.job(feed, self.work.plan.first());
        if let Err(stop) = method::copy_cached(&job, self.work.plan.workers_for_copies()) {
            let (Stop::Failed(error) | Stop::Refused(error) | Stop::NotDirect(error)) = stop;
            feed.stop(Some(error));
        }
    }

    /// Tries the methods in order.
    fn lane_main(&self, feed: &Feed) -> Attempt {
        let _panics = Panics::of(feed);
        let mut tried = self.work.plan.first();
        let mut attempts = self.work.plan.methods.iter().copied().peekable();
        while let Some(attempt) = attempts.next() {
            tried = attempt;
            let error = match method::run(&self.job(feed, attempt)) {
                Ok(()) => break,
                Err(Stop::Failed(error)) => {
                    feed.stop(Some(error));
                    break;
                }
                Err(Stop::Refused(error)) => error,
                Err(Stop::NotDirect(error)) => {
                    while attempts.next_if(|next| next.direct).is_some() {}
                    error
                }
            };
            let Some(next) = attempts.peek() else {
                feed.stop(Some(error));
                break;
            };
            let why = message![format!("{attempt} ended: "), &error];
            self.work.log.add("method", next, why);
        }
        tried
    }
}
