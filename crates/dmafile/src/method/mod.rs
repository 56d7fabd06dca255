//! The methods that move bytes, one file each.
//!
//! A method takes extents from the feed until it is drained and puts their bytes in place. It sees
//! memory as a region and, if there is one, a descriptor; it does not depend on the kind of memory.

mod bounce;
mod copy_file_range;
mod fill;
mod heap_read;
mod module;
mod pool;
mod premap;
mod uring;
mod windows;

use crate::control::CancelToken;
use crate::error::{Error, Verb};
use crate::flow::feed::{Feed, IoExtent, Lane, Panics};
use crate::flow::meter::{Meter, Phase};
use crate::flow::trace::{ROW_COPIES, ROW_READS};
use crate::options::Method;
use crate::plan::{Attempt, Plan};
use crate::source::Source;
use crate::sys::file;
use crate::sys::map::Region;
use crate::sys::turn::Turns;
use std::os::fd::{BorrowedFd, OwnedFd};

pub(crate) use fill::cut_short;
pub(crate) use pool::{copy_cached, run_workers};
pub(crate) use windows::{Map, Windows};

/// The input of a method.
#[derive(Clone, Copy)]
pub(crate) struct ReadJob<'a> {
    pub plan: &'a Plan,
    pub attempt: Attempt,
    pub source: &'a Source,
    pub region: Region<'a>,
    /// CPU accesses never raise a signal; otherwise the memory is accessed through its descriptor.
    pub never_faults: bool,
    /// The buffer's descriptor, for methods that write to one.
    pub descriptor: Option<BorrowedFd<'a>>,
    /// The dma-buf, if the buffer is one, with the lock that controls access to it.
    pub dma_buf: Option<&'a Turns>,
    pub feed: &'a Feed,
    pub meter: &'a Meter<'a>,
    pub cancel: &'a CancelToken,
}

impl<'a> ReadJob<'a> {
    /// The descriptor through which this method reads a byte of the source, and the byte's offset in
    /// that file.
    fn input(&self, at: u64) -> Result<(BorrowedFd<'a>, u64), Error> {
        let input = self.source.input(self.attempt.direct, at);
        input.map_err(|why| Error::new("no direct I/O", why).at(self.source.place(at)))
    }

    /// The descriptor of the buffer, for methods that write to it.
    fn target(&self) -> Result<BorrowedFd<'a>, Error> {
        self.descriptor
            .ok_or_else(|| Error::new("no descriptor", "this method writes into one"))
    }

    /// Calls `touch`, in which the CPU reads or writes the region, when no device is accessing it.
    fn touch<T>(&self, touch: impl FnOnce() -> T) -> Result<T, Error> {
        match self.dma_buf {
            Some(turns) => turns.touch(touch).map_err(|errno| {
                Error::os("cannot access the dma-buf (DMA_BUF_IOCTL_SYNC)", errno)
            }),
            None => Ok(touch()),
        }
    }

    /// Checks that the owner has not truncated the memory: writing to its descriptor would extend it
    /// again and hide the loss.
    fn still_whole(&self, target: BorrowedFd<'_>) -> Result<(), Error> {
        if self.never_faults {
            return Ok(());
        }
        match file::stat(target) {
            Ok(stat) if stat.size < self.plan.capacity => Err(fill::vanished(stat.size)),
            _ => Ok(()),
        }
    }
}

/// Why a method ended early.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The transfer has failed.
    Failed(Error),
    /// This method does not work here; what was not moved is back in the feed, for the next one.
    Refused(Error),
    /// As `Refused`, and no direct read will work.
    NotDirect(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// Moves the main lane of the feed with one method.
pub(crate) fn run(job: &ReadJob<'_>) -> Result<(), Stop> {
    match job.attempt.method {
        Method::Auto => unreachable!("the plan has decided"),
        Method::Uring => uring::run(job),
        Method::Premap => premap::run(job),
        Method::Threads => pool::run(job, job.plan.workers(job.attempt)),
        Method::Bounce => bounce::run(job),
        Method::Module => module::run(job),
        Method::CopyFileRange => copy_file_range::run(job),
        Method::HeapRead => {
            let why = "a heap reads into buffers that it makes";
            Err(Stop::Refused(Error::new("cannot read this way", why)))
        }
    }
}

/// The input of a fused call, which allocates a buffer and reads a file into it.
pub(crate) struct Fused<'a> {
    pub plan: &'a Plan,
    pub source: &'a Source,
    pub meter: &'a Meter<'a>,
    pub cancel: &'a CancelToken,
    /// Everything must be allocated before the first read.
    pub in_order: bool,
}

impl<'a> Fused<'a> {
    /// The descriptor through which the plan's first method reads a byte of the source, and the
    /// byte's offset in that file.
    fn input(&self, at: u64) -> Result<(BorrowedFd<'a>, u64), Stop> {
        let refused = |why| Error::new("no direct I/O", why).at(self.source.whole());
        let input = self.source.input(self.plan.first().direct, at);
        input.map_err(|why| Stop::NotDirect(refused(why)))
    }
}

/// Allocates and reads in one call of the plan's first method: each chunk is read while the next one
/// is allocated.
pub(crate) fn fused(fused: &Fused<'_>) -> Result<OwnedFd, Stop> {
    match fused.plan.first().method {
        Method::HeapRead => heap_read::fused(fused),
        _ => module::fused(fused),
    }
}

/// Takes extents one after another until there are none, or one fails. `step` moves an extent and
/// returns whether its bytes were read directly.
fn work(
    job: &ReadJob<'_>,
    lane: Lane,
    row: u64,
    step: impl Fn(&IoExtent) -> Result<bool, Stop>,
) -> Result<(), Stop> {
    let _panics = Panics::of(job.feed);
    while let Some(extent) = job.feed.wait(lane) {
        let start = job.meter.now();
        job.meter.io_begins();
        let moved = if job.cancel.is_cancelled() {
            Err(Stop::Failed(Error::cancelled(
                Verb::Load,
                job.source.place(extent.file),
            )))
        } else {
            step(&extent)
        };
        job.meter.io_ends();
        match moved {
            Ok(direct) => {
                let (phase, name) = match direct {
                    true => (Phase::Wait, "read"),
                    false => (Phase::Copy, "copy"),
                };
                job.meter.add(phase, start);
                let rows = match lane {
                    Lane::Main => ROW_READS,
                    Lane::Copy => ROW_COPIES,
                };
                job.meter
                    .span(name, rows + row, start, extent.file, extent.need);
                job.meter.landed(&extent, direct);
            }
            Err(stop) => {
                match &stop {
                    // The other workers and lanes must stop, too.
                    Stop::Failed(error) => job.feed.stop(Some(error.clone())),
                    Stop::Refused(_) | Stop::NotDirect(_) => job.feed.put_back(extent),
                }
                return Err(stop);
            }
        }
    }
    Ok(())
}
