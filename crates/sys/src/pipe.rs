//! Moves bytes between descriptors inside the kernel: sendfile(2) and splice(2).

use super::{Errno, retry};
use rustix::fs::{Mode, OFlags, SeekFrom};
use rustix::pipe::{PipeFlags, SpliceFlags};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Moves up to `len` bytes from `offset` of `from` to the position of `to`.
pub fn sendfile(
    to: BorrowedFd<'_>,
    from: BorrowedFd<'_>,
    offset: u64,
    len: u64,
) -> Result<u64, Errno> {
    let mut offset = offset;
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    retry(|| rustix::fs::sendfile(to, from, Some(&mut offset), len)).map(|got| got as u64)
}

/// Moves the file position.
pub fn seek(fd: BorrowedFd<'_>, to: u64) -> Result<(), Errno> {
    rustix::fs::seek(fd, SeekFrom::Start(to)).map(drop)
}

/// Opens the file behind a descriptor again, for writing, with a separate position (proc(5)).
pub fn reopen(fd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    retry(|| rustix::fs::open(&path, flags, Mode::empty()))
}

/// The largest pipe that this user may have, up to `want` bytes.
pub struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
}

impl Pipe {
    pub fn new(want: usize) -> Result<Self, Errno> {
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let mut size = want;
        // Unprivileged users are limited by /proc/sys/fs/pipe-max-size; a smaller pipe works as
        // well.
        while size > 65536 && rustix::pipe::fcntl_setpipe_size(&write, size).is_err() {
            size /= 2;
        }
        Ok(Self { read, write })
    }

    /// Moves up to `len` bytes from `offset` of `from` into the pipe.
    pub fn fill(&self, from: BorrowedFd<'_>, offset: u64, len: u64) -> Result<u64, Errno> {
        let mut offset = offset;
        splice(from, Some(&mut offset), self.write.as_fd(), None, len)
    }

    /// Moves up to `len` bytes from the pipe to `offset` of `to`.
    pub fn drain(&self, to: BorrowedFd<'_>, offset: u64, len: u64) -> Result<u64, Errno> {
        let mut offset = offset;
        splice(self.read.as_fd(), None, to, Some(&mut offset), len)
    }
}

fn splice(
    from: BorrowedFd<'_>,
    mut from_at: Option<&mut u64>,
    to: BorrowedFd<'_>,
    mut to_at: Option<&mut u64>,
    len: u64,
) -> Result<u64, Errno> {
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    retry(|| {
        rustix::pipe::splice(
            from,
            from_at.as_deref_mut(),
            to,
            to_at.as_deref_mut(),
            len,
            SpliceFlags::empty(),
        )
    })
    .map(|got| got as u64)
}
