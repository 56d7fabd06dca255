//! `sendfile`: the kernel copies from the page cache into the buffer's descriptor.

use super::fill::{cut_short, failed, is_refusal, refused};
use super::{Job, Stop, work};
use crate::error::Error;
use crate::flow::feed::Lane;
use crate::message::{Opt, message};
use crate::options::{Kind, Method};
use crate::sys::{pipe, sandbox};
use std::os::fd::{AsFd, BorrowedFd};

pub(super) fn run(job: &Job<'_>) -> Result<(), Stop> {
    // It writes at the file position, which all duplicates of a descriptor share: so reopen it.
    let target = job.target()?;
    match pipe::reopen(target) {
        Ok(own) => send(job, own.as_fd()),
        // Without /proc. Nobody else has a new memfd yet, and its position must be 0 when they do.
        Err(_) if job.plan.kind == Kind::Memfd.to_string() => {
            let done = send(job, target);
            let back = pipe::seek(target, 0).map_err(|errno| Error::os("cannot seek", errno));
            done.and(back.map_err(Stop::Failed))
        }
        Err(errno) => {
            let error = Error::os("the buffer cannot be opened again", errno);
            Err(Stop::Refused(error.with_remedy(message![
                "mount /proc, or use ",
                Opt::Method.set(Method::Splice),
            ])))
        }
    }
}

/// Sends to a descriptor whose position nothing else uses.
fn send(job: &Job<'_>, to: BorrowedFd<'_>) -> Result<(), Stop> {
    work(job, Lane::Main, 0, |extent| {
        let fail = |done, errno| {
            let error = failed(job.source, extent.file + done, errno);
            Stop::Failed(error.of_calls(&[sandbox::SENDFILE]))
        };
        let (from, offset) = job.input(extent.file)?;
        let mut done = 0;
        pipe::seek(to, extent.at).map_err(|errno| fail(done, errno))?;
        while done < extent.need {
            job.still_whole(to)?;
            // Direct reads use whole blocks; what exceeds the requested range is zeroed later.
            match pipe::sendfile(to, from, offset + done, extent.len - done) {
                Ok(0) => return Err(cut_short(job.source, extent.file + done).into()),
                Ok(got) => done += got,
                Err(errno) if job.rung.direct && is_refusal(errno) => {
                    return Err(refused(job.source, errno));
                }
                Err(errno) => return Err(fail(done, errno)),
            }
        }
        Ok(job.rung.direct)
    })
}
