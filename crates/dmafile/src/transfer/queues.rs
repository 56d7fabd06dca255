//! The two queues of a load: the method of the plan reads what is on the disk, threads copy what is in the page cache.

use super::LoadTransfer;
use crate::flow::feed::{Feed, FileRange, Panics};
use crate::method;
use crate::plan::Attempt;
use crate::pump::{self, Stop};
use crate::sync;
use crate::sys::numa;

/// Which queues have something in them.
#[derive(Clone, Copy)]
pub(super) struct Work {
    pub(super) reads: bool,
    pub(super) copies: bool,
}

impl LoadTransfer<'_> {
    /// The ranges of the file for the method, and those to be copied. Everything else is in place.
    pub(super) fn queues(&self) -> (Vec<FileRange>, Vec<FileRange>) {
        let (task, meter) = (self.task, &self.run.meter);
        let plan = &task.plan;
        let (mut reads, mut copies) = (Vec::new(), Vec::new());
        meter.in_place(0, plan.place.start);
        let mut done = plan.offset;
        for run in &task.layout.runs {
            meter.in_place(task.at(done), task.at(run.start));
            done = run.end;
            if run.cached {
                copies.push((run.start, run.end));
                continue;
            }
            // Memory beyond this range must not be written: a part of a block at either end cannot be
            // read directly.
            let align = plan.tuning.align;
            let mut middle = (run.start, run.end);
            if plan.first().in_whole_blocks() {
                if task.at(run.start) < plan.place.writable_from + run.start % align {
                    middle.0 = run.start.next_multiple_of(align).min(run.end);
                }
                if task.at(run.end.next_multiple_of(align)) > plan.place.writable_to {
                    middle.1 = (run.end - run.end % align).max(middle.0);
                }
            }
            let some = |range: &(u64, u64)| range.0 < range.1;
            copies.extend(
                [(run.start, middle.0), (middle.1, run.end)]
                    .into_iter()
                    .filter(some),
            );
            reads.extend([middle].into_iter().filter(some));
        }
        meter.in_place(task.at(done), task.at(plan.offset + plan.bytes));
        (reads, copies)
    }

    /// Moves everything in the queues; errors are left in the feed. Returns the last method that was tried.
    pub(super) fn read(&self, feed: &Feed, work: Work) -> Attempt {
        if !work.copies {
            return self.read_all(feed, work);
        }
        std::thread::scope(|scope| {
            // A thread is only needed if there are reads, too.
            let copier = work.reads.then(|| {
                let builder = std::thread::Builder::new().name("dmafile-copy".to_string());
                builder.spawn_scoped(scope, || {
                    numa::prefer(self.task.plan.node);
                    self.copy_all(feed);
                })
            });
            let attempt = self.read_all(feed, work);
            match copier {
                Some(Ok(thread)) => sync::join(thread),
                // No thread can be created: one queue after the other.
                Some(Err(_)) | None => self.copy_all(feed),
            }
            attempt
        })
    }

    fn copy_all(&self, feed: &Feed) {
        let _panics = Panics::of(feed);
        let plan = &self.task.plan;
        let copied = self.attempt(feed, plan.first(), |job| {
            method::copy_cached(job, plan.workers_for_copies())
        });
        if let Err(Stop::Failed(error) | Stop::Refused(error) | Stop::NotDirect(error)) = copied {
            feed.stop(Some(error));
        }
    }

    /// Tries the methods in order.
    fn read_all(&self, feed: &Feed, work: Work) -> Attempt {
        let plan = &self.task.plan;
        if !work.reads {
            return plan.first();
        }
        let _panics = Panics::of(feed);
        let (attempt, done) = pump::try_in_order(&plan.methods, self.run.log, |attempt| {
            self.attempt(feed, attempt, method::run)
        });
        if let Err(error) = done {
            feed.stop(Some(error));
        }
        attempt
    }
}
