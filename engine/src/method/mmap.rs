//! `mmap`: copy from a mapping of the file, as many loaders do. A file cut short meanwhile gives
//! an error and not SIGBUS.

use super::fill::{cut_short, failed};
use super::{Job, Stop, work};
use crate::error::Error;
use crate::sys::map::Mapping;
use crate::sys::{Errno, file};
use crate::transfer::feed::Lane;

pub(super) fn run(job: &Job<'_>) -> Result<(), Stop> {
    let cannot_map = |errno| Error::os("cannot map the file", errno).at(job.source.place(0));
    let len = usize::try_from(job.source.size()).map_err(|_| cannot_map(Errno::OVERFLOW))?;
    let map = Mapping::shared(job.source.buffered(), len, 1, false).map_err(cannot_map)?;
    let from = map.region();
    work(job, Lane::Main, 0, |extent| {
        let mut done = 0;
        while done < extent.need {
            let (from_at, at) = (extent.file + done, extent.at + done);
            match file::copy_mapped(&from, from_at, &job.region, at, extent.need - done) {
                Ok(0) | Err(Errno::FAULT) => return Err(fault(job, from_at).into()),
                Ok(got) => done += got,
                Err(errno) => return Err(failed(job, from_at, errno).into()),
            }
        }
        Ok(false)
    })
}

/// A page of the mapping could not be had: the file ends before it, or the disk failed.
fn fault(job: &Job<'_>, offset: u64) -> Error {
    match job.source.size_now() {
        Ok(size) if size >= job.source.size() => {
            Error::os("cannot read", Errno::IO).at(job.source.place(offset))
        }
        _ => cut_short(job.source, offset),
    }
}
