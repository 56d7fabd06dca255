//! Methods in which the kernel moves the bytes by itself: dmafile.ko, and copy_file_range(2) on
//! kernels that can copy from memory (kernel/linux-6.12).

use super::{DescriptorMemory, WriteJob};
use crate::error::Error;
use crate::exporter::module;
use crate::flow::feed::Queue;
use crate::flow::meter::Phase;
use crate::pump::{MovedExtent, Stop, each};
use crate::sys::module::{BUFFERED, ModuleProgress, ModuleRange, MoveOptions};
use crate::sys::{self, Errno, file};
use std::os::fd::AsFd;

/// `module`: from a dma-buf of dmafile.ko. Waits for devices that are still writing to it.
pub(super) fn module(job: &WriteJob<'_>) -> Result<(), Stop> {
    let (node, _) = module::open().map_err(Stop::Refused)?;
    let memory = memory(job)?;
    let fd = job.to.output(job.pass.attempt.direct)?;
    let how = MoveOptions {
        chunk: 0,
        // Only direct I/O is left.
        strict: job.plan.methods.iter().all(|attempt| attempt.direct),
        in_order: false,
    };
    each(&job.pass, Queue::Method, 0, |extent| {
        let range = ModuleRange {
            file: extent.file,
            at: extent.at,
            len: extent.need,
        };
        let progress = ModuleProgress::default();
        let (moved, end) = sys::module::write(node.as_fd(), memory.fd(), fd, range, how, &progress);
        job.pass.run.meter.add_time(Phase::Submit, moved.submit);
        job.pass.run.meter.add_time(Phase::Copy, moved.copy);
        job.pass.run.meter.add_mode(moved.mode);
        match end {
            Ok(()) if job.pass.attempt.direct && how.strict && moved.mode & BUFFERED != 0 => {
                Err(job.stop(Errno::OPNOTSUPP, extent.file, true))
            }
            Ok(()) => Ok(MovedExtent::all(extent, moved.mode & BUFFERED == 0)),
            // Another exporter's dma-buf after all, or a security policy.
            Err(errno @ (Errno::NOTTY | Errno::XDEV | Errno::PERM | Errno::ACCESS)) => Err(
                Stop::Refused(Error::os("dmafile.ko refuses", errno).at(job.to.place(0))),
            ),
            Err(errno) => Err(job.stop(errno, extent.file + moved.bytes, job.pass.attempt.direct)),
        }
    })
}

/// `copy-file-range`: from a memfd or a dma-buf.
pub(super) fn copy_range(job: &WriteJob<'_>) -> Result<(), Stop> {
    let memory = memory(job)?;
    let fd = job.to.output(job.pass.attempt.direct)?;
    // One call after another: within a call the kernel has many writes in flight.
    each(&job.pass, Queue::Method, 0, |extent| {
        let mut done = 0;
        while done < extent.need {
            let (at, offset) = (extent.at + done, extent.file + done);
            match file::copy_range(memory.fd(), at, fd, offset, extent.need - done) {
                Ok(0) => {
                    let error = job.origin.cut_short(at);
                    let error = error.unwrap_or_else(|| job.origin.failed(at, Errno::NODATA));
                    return Err(error.into());
                }
                Ok(got) => done += got,
                Err(errno @ (Errno::XDEV | Errno::NOSYS | Errno::BADF)) => {
                    let error = Error::os("copy_file_range is refused", errno);
                    return Err(Stop::Refused(error.at(job.to.place(0))));
                }
                Err(errno) => return Err(job.stop(errno, offset, job.pass.attempt.direct)),
            }
        }
        Ok(MovedExtent::all(extent, job.pass.attempt.direct))
    })
}

fn memory<'a>(job: &WriteJob<'a>) -> Result<&'a DescriptorMemory, Stop> {
    let none = || Error::new("no descriptor", "this method writes from one").into();
    job.origin.memory().ok_or_else(none)
}
