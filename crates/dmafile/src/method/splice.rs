//! `splice`: as `sendfile`, through a separate, larger pipe.

use super::fill::{cut_short, failed, is_refusal, refused};
use super::{Job, Stop, work};
use crate::error::Error;
use crate::flow::feed::Lane;
use crate::sys::pipe::Pipe;
use crate::sys::sandbox;

/// An unprivileged user's largest pipe (/proc/sys/fs/pipe-max-size).
const PIPE: usize = 1 << 20;

pub(super) fn run(job: &Job<'_>) -> Result<(), Stop> {
    let to = job.target()?;
    let pipe = Pipe::new(PIPE)
        .map_err(|errno| Error::os("cannot make a pipe", errno).of_calls(&[sandbox::PIPE2]))?;
    work(job, Lane::Main, 0, |extent| {
        let fail = |done, errno| {
            let error = failed(job.source, extent.file + done, errno);
            Stop::Failed(error.of_calls(&[sandbox::SPLICE]))
        };
        let (from, offset) = job.input(extent.file)?;
        let mut done = 0;
        while done < extent.need {
            // Direct reads use whole blocks; what exceeds the requested range is zeroed later.
            let mut held = match pipe.fill(from, offset + done, extent.len - done) {
                Ok(0) => return Err(cut_short(job.source, extent.file + done).into()),
                Ok(got) => got,
                Err(errno) if job.rung.direct && is_refusal(errno) => {
                    return Err(refused(job.source, errno));
                }
                Err(errno) => return Err(fail(done, errno)),
            };
            job.still_whole(to)?;
            while held > 0 {
                let got = pipe
                    .drain(to, extent.at + done, held)
                    .map_err(|errno| fail(done, errno))?;
                if got == 0 {
                    return Err(fail(done, crate::sys::Errno::IO));
                }
                held -= got;
                done += got;
            }
        }
        Ok(job.rung.direct)
    })
}
