//! How every method handles the result of a read.

use super::{ReadJob, Stop};
use crate::error::Error;
use crate::flow::feed::IoExtent;
use crate::message::{Opt, message};
use crate::options::Io;
use crate::pump::Rest;
use crate::source::Source;
use crate::sys::{Errno, file, retry};

/// Reads an extent completely through the page cache.
pub(super) fn read_buffered(job: &ReadJob<'_>, mut extent: IoExtent) -> Result<(), Stop> {
    loop {
        let (fd, offset) = job.buffered(extent.file)?;
        let read = if job.plan.tuning.drop_behind {
            file::pread_dropping
        } else {
            file::pread
        };
        let got = job
            .touch(|| retry(|| read(fd, &job.region, extent.at, extent.len, offset)))?
            .map_err(|errno| failed(job.source, extent.file, errno))?;
        match check_end(job, &extent, got, None)? {
            Rest::Nothing => return Ok(()),
            Rest::Again(rest) | Rest::Buffered(rest) => extent = rest,
        }
    }
}

/// Reads an extent completely, bypassing the page cache. EINVAL means that direct I/O does not
/// work here after all: the whole extent must then be moved by another method.
pub(super) fn read_direct(job: &ReadJob<'_>, extent: IoExtent) -> Result<(), Stop> {
    let mut left = extent;
    loop {
        let (fd, offset) = job.input(left.file)?;
        // The kernel moves at most MAX_RW_COUNT bytes per call; a block is much smaller.
        let got = match retry(|| file::pread(fd, &job.region, left.at, left.len, offset)) {
            Ok(got) => got,
            Err(errno) if is_refusal(errno) => return Err(refused(job.source, errno)),
            Err(errno) => return Err(failed(job.source, left.file, errno).into()),
        };
        match check_end(job, &left, got, Some(job.plan.tuning.align))? {
            Rest::Nothing => return Ok(()),
            Rest::Again(rest) => left = rest,
            Rest::Buffered(rest) => return read_buffered(job, rest),
        }
    }
}

/// What remains of an extent. An end of file inside the requested range means that it was truncated.
fn check_end(
    job: &ReadJob<'_>,
    extent: &IoExtent,
    got: u64,
    direct: Option<u64>,
) -> Result<Rest, Stop> {
    match got {
        0 => Err(cut_short(job.source, extent.file).into()),
        _ => Ok(Rest::after(extent, got, direct)),
    }
}

/// True if an errno means that direct I/O is not supported, rather than that the disk failed.
pub(super) fn is_refusal(errno: Errno) -> bool {
    matches!(errno, Errno::INVAL | Errno::OPNOTSUPP)
}

/// Direct I/O was accepted at open, but refused at a read.
pub(super) fn refused(source: &Source, errno: Errno) -> Stop {
    Stop::NotDirect(
        Error::os("direct read refused", errno)
            .at(source.whole())
            .with_remedy(message![
                "use ",
                Opt::Io.set(Io::Buffered),
                " or ",
                Opt::Io.set(Io::Auto),
            ]),
    )
}

/// A read at `offset` that failed permanently.
pub(super) fn failed(source: &Source, offset: u64, errno: Errno) -> Error {
    let error = Error::os("cannot read", errno).at(source.place(offset));
    match errno {
        // EBADF and EIO: after its server had restarted, an NFS client could not open the file again.
        Errno::STALE | Errno::BADF => error
            .with_why("its server does not have this file any more, but perhaps a new one")
            .with_remedy("load it again"),
        Errno::IO if source.without_device().is_some() => error.with_remedy(
            "see the kernel log, here or on its server; if the file was replaced there, load it again",
        ),
        Errno::TIMEDOUT => error.with_remedy("load it again when its server answers"),
        _ => error,
    }
}

/// Memory that its owner truncated, at byte `at`.
pub(super) fn vanished(at: u64) -> Error {
    let why = "its owner truncated it while it was being filled";
    Error::new("cannot write to the buffer", why)
        .with_errno(Errno::FAULT)
        .at(format!("byte {at}"))
        .with_remedy("seal it against that (F_SEAL_SHRINK)")
}

/// The file ended before its size at open.
pub(crate) fn cut_short(source: &Source, offset: u64) -> Error {
    let size = source.size_at(offset);
    Error::new(
        "cannot read",
        format!("the file was truncated while it was being loaded, from {size} bytes"),
    )
    .with_errno(Errno::NODATA)
    .at(source.place(offset))
    .with_remedy("load it again when nothing writes to it")
}
