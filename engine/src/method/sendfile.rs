//! `sendfile`: the kernel copies from the page cache into the buffer's descriptor (AR-5c).

use super::fill::{cut_short, failed, is_refusal, refused};
use super::{Job, Stop, work};
use crate::error::Error;
use crate::sys::pipe;
use crate::transfer::feed::Lane;

pub(super) fn run(job: &Job<'_>) -> Result<(), Stop> {
    let to = job.target()?;
    // The descriptor may be the caller's: its position is put back.
    let position = pipe::position(to)
        .map_err(|errno| Error::os("the buffer's descriptor has no position", errno))?;
    let moved = work(job, Lane::Main, 0, |extent| {
        let fail = |done, errno| Stop::Failed(failed(job, extent.file + done, errno));
        let (from, offset) = job.input(extent.file)?;
        let mut done = 0;
        pipe::seek(to, extent.at).map_err(|errno| fail(done, errno))?;
        while done < extent.need {
            // Direct reads keep to whole blocks; what lies past the wanted range is zeroed later.
            match pipe::sendfile(to, from, offset + done, extent.len - done) {
                Ok(0) => return Err(cut_short(job.source, extent.file + done).into()),
                Ok(got) => done += got,
                Err(errno) if job.rung.direct && is_refusal(errno) => {
                    return Err(refused(job, errno));
                }
                Err(errno) => return Err(fail(done, errno)),
            }
        }
        Ok(job.rung.direct)
    });
    pipe::seek(to, position).map_err(|errno| Error::os("cannot put the position back", errno))?;
    moved
}
