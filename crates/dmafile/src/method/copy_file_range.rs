//! `copy-file-range`: the kernel moves bytes between the file and the pages of the buffer, which has a
//! descriptor: a memfd or a dma-buf. Works on kernels with the series in kernel/linux-6.12; others
//! return EXDEV or EINVAL.

use super::fill::{cut_short, failed};
use super::{ReadJob, Stop};
use crate::error::Error;
use crate::flow::feed::Queue;
use crate::pump::{MovedExtent, each};
use crate::sys::{Errno, file, sandbox};

pub(super) fn run(job: &ReadJob<'_>) -> Result<(), Stop> {
    let to = match job.dma_buf {
        Some(dma_buf) => dma_buf.fd(),
        None => job.target()?,
    };
    // One call after another: within a call the kernel has many reads in flight.
    each(&job.pass, Queue::Method, 0, |extent| {
        let (from, offset) = job.input(extent.file)?;
        let mut done = 0;
        while done < extent.need {
            job.still_whole(to)?;
            let left = extent.need - done;
            match file::copy_range(from, offset + done, to, extent.at + done, left) {
                Ok(0) => return Err(cut_short(job.source, extent.file + done).into()),
                Ok(got) => done += got,
                Err(errno) if done == 0 && is_refusal(errno) => return Err(refused(job, errno)),
                Err(errno) => {
                    return Err(failed(job.source, extent.file + done, errno).into());
                }
            }
        }
        Ok(MovedExtent::all(extent, job.pass.attempt.direct))
    })
}

/// True if an errno means that the kernel cannot do this copy, or that a sandbox refuses it.
fn is_refusal(errno: Errno) -> bool {
    matches!(errno, Errno::XDEV | Errno::INVAL | Errno::OPNOTSUPP) || sandbox::may_return(errno)
}

fn refused(job: &ReadJob<'_>, errno: Errno) -> Stop {
    let error = Error::os("the kernel does not copy between disks and memory", errno);
    let error = error.at(job.source.whole());
    Stop::Refused(error.with_remedy("boot one with the series in kernel/linux-6.12"))
}
