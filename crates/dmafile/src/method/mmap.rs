//! `mmap`: copies from a mapping of the file, as many loaders do. If the file is truncated during the
//! load, the result is an error and not SIGBUS.

use super::fill::{cut_short, failed};
use super::{Job, Stop, work};
use crate::error::Error;
use crate::flow::feed::Lane;
use crate::sys::map::Mapping;
use crate::sys::{Errno, file, sandbox};

pub(super) fn run(job: &Job<'_>) -> Result<(), Stop> {
    let mut maps = Vec::new();
    for (_, start, size) in job.source.files() {
        let cannot_map =
            |errno| Error::os("cannot map the file", errno).at(job.source.place(start));
        let len = usize::try_from(size).map_err(|_| cannot_map(Errno::OVERFLOW))?;
        let (fd, _) = job.source.buffered(start);
        maps.push(Mapping::shared(fd, len, 1, false).map_err(cannot_map)?);
    }
    work(job, Lane::Main, 0, |extent| {
        let (number, offset) = job.source.locate(extent.file);
        let from = maps[number].region();
        let mut done = 0;
        while done < extent.need {
            let at = extent.at + done;
            match file::copy_mapped(&from, offset + done, &job.region, at, extent.need - done) {
                Ok(0) | Err(Errno::FAULT) => return Err(fault(job, extent.file + done).into()),
                Ok(got) => done += got,
                Err(errno) => {
                    let error = failed(job.source, extent.file + done, errno);
                    return Err(error.of_calls(&[sandbox::PROCESS_VM_READV]).into());
                }
            }
        }
        Ok(false)
    })
}

/// A page of the mapping could not be read: the file ends before it, or the disk failed; or it is a
/// page of the buffer.
fn fault(job: &Job<'_>, offset: u64) -> Error {
    if let Some(Err(error)) = job.descriptor.map(|target| job.still_whole(target)) {
        return error;
    }
    let to_its_end = (offset, job.source.end_at(offset));
    match job.source.missing(&[to_its_end]) {
        Ok(None) => Error::os("cannot read", Errno::IO).at(job.source.place(offset)),
        _ => cut_short(job.source, offset),
    }
}
