//! The methods that move bytes, one file each.
//!
//! A method takes extents from the feed until it is drained and puts their bytes in place. It sees
//! memory as a region and, if there is one, a descriptor; it does not depend on the kind of memory.

mod bounce;
mod copy_file_range;
mod fetch;
mod fill;
mod heap_read;
mod module;
mod premap;
mod threads;
mod uring;

use crate::error::Error;
use crate::flow::run::Run;
use crate::options::Method;
use crate::plan::Plan;
use crate::pump::{Pass, Stop};
use crate::source::{MayFault, Source};
use crate::sys::dmabuf_sync::SyncedDmaBuf;
use crate::sys::file;
use crate::sys::map::Region;
use std::os::fd::{BorrowedFd, OwnedFd};

pub(crate) use fill::cut_short;
pub(crate) use threads::copy_cached;

/// One attempt of a load to read what is in the feed.
#[derive(Clone, Copy)]
pub(crate) struct ReadJob<'a> {
    pub pass: Pass<'a>,
    pub plan: &'a Plan,
    pub source: &'a Source,
    pub region: Region<'a>,
    /// Whether the memory is accessed by the CPU, or through its descriptor.
    pub may_fault: MayFault,
    /// The buffer's descriptor, for methods that write to one.
    pub descriptor: Option<BorrowedFd<'a>>,
    /// The dma-buf, if the buffer is one, with the lock that controls access to it.
    pub dma_buf: Option<&'a SyncedDmaBuf>,
}

impl<'a> ReadJob<'a> {
    /// The descriptor through which this method reads a byte of the source, and the byte's offset in
    /// that file.
    fn input(&self, at: u64) -> Result<(BorrowedFd<'a>, u64), Error> {
        let input = self.source.input(self.pass.attempt.direct, at);
        input.map_err(|why| Error::new("no direct I/O", why).at(self.source.place(at)))
    }

    /// As [`ReadJob::input`], through the page cache.
    fn buffered(&self, at: u64) -> Result<(BorrowedFd<'a>, u64), Error> {
        let input = self.source.buffered(at);
        input.map_err(|why| Error::new("cannot read", why).at(self.source.place(at)))
    }

    /// The descriptor of the buffer, for methods that write to it.
    fn target(&self) -> Result<BorrowedFd<'a>, Error> {
        self.descriptor
            .ok_or_else(|| Error::new("no descriptor", "this method writes into one"))
    }

    /// Calls `touch`, in which the CPU reads or writes the region, when no device is accessing it.
    fn touch<T>(&self, touch: impl FnOnce() -> T) -> Result<T, Error> {
        match self.dma_buf {
            Some(access) => access.touch(touch).map_err(|errno| {
                Error::os("cannot access the dma-buf (DMA_BUF_IOCTL_SYNC)", errno)
            }),
            None => Ok(touch()),
        }
    }

    /// Checks that the owner has not truncated the memory: writing to its descriptor would extend it
    /// again and hide the loss.
    fn still_whole(&self, target: BorrowedFd<'_>) -> Result<(), Error> {
        if self.may_fault == MayFault::Never {
            return Ok(());
        }
        match file::stat(target) {
            Ok(stat) if stat.size < self.plan.place.writable_to => Err(fill::vanished(stat.size)),
            _ => Ok(()),
        }
    }
}

/// Moves what is in the feed with one method.
pub(crate) fn run(job: &ReadJob<'_>) -> Result<(), Stop> {
    match job.pass.attempt.method {
        Method::Auto => unreachable!("the plan has decided"),
        Method::Uring => uring::run(job),
        Method::Premap => premap::run(job),
        Method::Threads => threads::run(job, job.plan.workers(job.pass.attempt)),
        Method::Bounce => bounce::run(job),
        Method::Module => module::run(job),
        Method::CopyFileRange => copy_file_range::run(job),
        Method::Fetch => fetch::run(job, job.plan.workers(job.pass.attempt)),
        Method::HeapRead => {
            let why = "a heap reads into buffers that it makes";
            Err(Stop::Refused(Error::new("cannot read this way", why)))
        }
    }
}

/// Allocates a buffer and reads the file into it, in one call of the plan's first method: each chunk is read while
/// the next one is allocated.
pub(crate) fn fused(plan: &Plan, source: &Source, run: &Run<'_>) -> Result<OwnedFd, Stop> {
    match plan.first().method {
        Method::HeapRead => heap_read::fused(plan, source, run),
        _ => module::fused(plan, source, run),
    }
}

/// The descriptor through which the plan's first method reads a byte of the source, and the byte's offset in that
/// file.
fn input<'a>(plan: &Plan, source: &'a Source, at: u64) -> Result<(BorrowedFd<'a>, u64), Stop> {
    let refused = |why| Error::new("no direct I/O", why).at(source.whole());
    let input = source.input(plan.first().direct, at);
    input.map_err(|why| Stop::NotDirect(refused(why)))
}
