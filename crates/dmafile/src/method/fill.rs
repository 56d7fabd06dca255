//! How every method handles the result of a read.

use super::{ReadJob, Stop};
use crate::error::Error;
use crate::flow::feed::IoExtent;
use crate::message::{Opt, message};
use crate::options::Io;
use crate::source::Source;
use crate::sys::{Errno, file, retry};

/// What remains to be done for an extent after reading `got` bytes.
pub(super) enum Rest {
    /// All requested bytes have been read.
    Nothing,
    /// This remains to be read in the same mode.
    Again(IoExtent),
    /// The rest does not start at an offset where a direct read may.
    Buffered(IoExtent),
}

/// Evaluates the result of a read. An end of file inside the requested range means that it was
/// truncated.
pub(super) fn judge(
    job: &ReadJob<'_>,
    extent: &IoExtent,
    got: u64,
    direct: bool,
) -> Result<Rest, Stop> {
    if got >= extent.need {
        return Ok(Rest::Nothing);
    }
    if got == 0 {
        return Err(Stop::Failed(cut_short(job.source, extent.file)));
    }
    // A short read is legal (a signal, a network file system): continue where it stopped; direct
    // reads continue from the last aligned offset.
    let skip = if direct {
        got - got % job.plan.tuning.align
    } else {
        got
    };
    let rest = IoExtent {
        file: extent.file + skip,
        at: extent.at + skip,
        len: extent.len - skip,
        need: extent.need - skip,
        head: extent.head.saturating_sub(skip),
        ..*extent
    };
    Ok(match skip {
        0 => Rest::Buffered(rest),
        _ => Rest::Again(rest),
    })
}

/// Reads an extent completely through the page cache.
pub(super) fn read_buffered(job: &ReadJob<'_>, mut extent: IoExtent) -> Result<(), Stop> {
    loop {
        let (fd, offset) = job.source.buffered(extent.file);
        let read = match job.plan.tuning.drop_behind {
            true => file::pread_dropping,
            false => file::pread,
        };
        let got = job
            .touch(|| retry(|| read(fd, &job.region, extent.at, extent.len, offset)))?
            .map_err(|errno| failed(job.source, extent.file, errno))?;
        match judge(job, &extent, got, false)? {
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
        match judge(job, &left, got, true)? {
            Rest::Nothing => return Ok(()),
            Rest::Again(rest) => left = rest,
            Rest::Buffered(rest) => return read_buffered(job, rest),
        }
    }
}

/// Whether an errno means that direct I/O is not supported, rather than that the disk failed.
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
    Error::os("cannot read", errno).at(source.place(offset))
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
