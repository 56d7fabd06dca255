//! `heap-read`: a heap allocates a dma-buf and reads a whole file into it in the same call, on
//! kernels with DMA_HEAP_ALLOC_AND_READ_FILE (the series in kernel/linux-6.12).
//!
//! Only a fatal signal ends the call early, and it reports no progress.

use super::fill::{cut_short, is_refusal, refused};
use super::{Stop, input};
use crate::error::Error;
use crate::exporter::cannot_allocate;
use crate::flow::feed::IoExtent;
use crate::flow::meter::Phase;
use crate::flow::run::Run;
use crate::flow::trace::ROW_READS;
use crate::options::MemoryKind;
use crate::plan::Plan;
use crate::source::Source;
use crate::sys::{Errno, dmabuf};
use std::os::fd::{AsFd, OwnedFd};

/// Allocates and reads in one call.
pub(super) fn fused(plan: &Plan, source: &Source, run: &Run<'_>) -> Result<OwnedFd, Stop> {
    let meter = &run.meter;
    let refuse =
        |what: &str, errno| Stop::Refused(Error::os(what, errno).at(plan.kind.to_string()));
    let MemoryKind::Heap(name) = &plan.kind else {
        return Err(refuse("no heap", Errno::OPNOTSUPP));
    };
    let heap = dmabuf::open_heap(name).map_err(|errno| refuse("cannot open the heap", errno))?;
    let direct = plan.first().direct;
    let (file, _) = input(plan, source, 0)?;
    run.check(|| source.whole())?;
    let start = meter.now();
    meter.io_begins();
    let made = dmabuf::allocate_and_read(heap.as_fd(), file);
    meter.io_ends();
    let fd = made.map_err(|errno| match errno {
        Errno::NODATA => Stop::Failed(cut_short(source, source.size_now(0).unwrap_or(0))),
        Errno::NOMEM | Errno::MFILE => Stop::Failed(cannot_allocate(errno).at(source.whole())),
        Errno::NOTTY | Errno::PERM | Errno::ACCESS => refuse("the heap refuses", errno),
        errno if is_refusal(errno) && direct => refused(source, errno),
        errno if is_refusal(errno) => refuse("the heap refuses", errno),
        // The call does not report where it failed.
        errno => Stop::Failed(Error::os("cannot read", errno).at(source.whole())),
    })?;
    meter.add(Phase::Wait, start);
    meter.span("heap", ROW_READS, start, 0, plan.bytes);
    run.check(|| source.whole())?;
    // The kernel has read up to the end of the file. Nothing may follow the requested bytes.
    let size = source.size_now(0)?;
    if size < plan.bytes {
        return Err(Stop::Failed(cut_short(source, size)));
    }
    if size > plan.bytes {
        let error = Error::new("cannot use the buffer", "the file grew during the load");
        return Err(Stop::Refused(error.at(source.whole())));
    }
    let extent = IoExtent {
        file: 0,
        at: 0,
        len: plan.bytes,
        need: plan.bytes,
        head: 0,
        run_end: plan.bytes,
    };
    meter.moved(&extent, plan.bytes, direct);
    Ok(fd)
}
