//! Files: opening them, their properties, where their data is, reading into a region and writing from one.

use super::map::{Region, iovec, page_size};
use super::sandbox::may_return;
use super::{Errno, host, last_errno, retry, stat};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{FileType, Mode, OFlags, SeekFrom};
use rustix::time::Timespec;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

/// What an open file is, and its file system (fstatfs(2)).
#[derive(Clone, Copy, Debug)]
pub struct Stat {
    pub kind: FileType,
    pub size: u64,
    pub identity: (u32, u32, u64),
    /// The block device that it is or is stored on, as major and minor number; major 0 if there is none.
    pub device: (u32, u32),
    /// As [`stat::Inode::direct`].
    pub direct: Option<(u32, u32)>,
    /// 0 if a sandbox hides it.
    pub fs_magic: u64,
    pub fs_block: u64,
    /// Number of bytes allocated for it.
    pub allocated: u64,
}

impl Stat {
    /// Returns true if it consists of pages of the hugetlb pool.
    pub fn is_hugetlb(&self) -> bool {
        self.fs_magic == libc::HUGETLBFS_MAGIC as u64
    }

    /// The size of a block of its file system, at least a page. A network file system may have the size of its
    /// requests in that place (NFS), which says nothing about alignment.
    pub fn block(&self) -> u64 {
        match self.fs_block {
            block @ 512..=LARGEST_BLOCK if block.is_power_of_two() => block.max(page_size()),
            _ => page_size(),
        }
    }

    /// The size of the requests of such a network file system; 0 for the others.
    pub fn request(&self) -> u64 {
        match self.fs_block {
            size if size > LARGEST_BLOCK && !self.is_hugetlb() => size,
            _ => 0,
        }
    }
}

/// Linux has no file systems with larger blocks.
const LARGEST_BLOCK: u64 = 64 << 10;

/// Opens for reading, without blocking on a FIFO.
pub fn open(path: &Path, direct: bool) -> Result<OwnedFd, Errno> {
    let mut flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    flags.set(OFlags::DIRECT, direct);
    let fd = retry(|| rustix::fs::open(path, flags, Mode::empty()))?;
    // With it, io_uring would return EAGAIN for everything that it cannot read immediately.
    let flags = rustix::fs::fcntl_getfl(&fd)?;
    rustix::fs::fcntl_setfl(&fd, flags - OFlags::NONBLOCK)?;
    Ok(fd)
}

/// Returns true if a device node can be opened for reading and writing.
pub fn try_node(path: &Path) -> Result<(), Errno> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    retry(|| rustix::fs::open(path, flags, Mode::empty())).map(drop)
}

/// Duplicates a descriptor.
pub fn dup(fd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    rustix::io::fcntl_dupfd_cloexec(fd, 3)
}

/// The same descriptor by the lowest number that is free: other programs may have a low limit on open files, or use
/// select(2).
pub fn lowest(fd: OwnedFd) -> OwnedFd {
    match dup(fd.as_fd()) {
        Ok(dup) if dup.as_raw_fd() < fd.as_raw_fd() => dup,
        _ => fd,
    }
}

/// Duplicates a descriptor by a number that was passed to the process.
pub fn duplicate(number: i32) -> Result<OwnedFd, Errno> {
    // Not rustix's, which requires an open descriptor: this may be any number.
    // SAFETY: the call touches no memory; EBADF if the number is not open.
    match unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 3) } {
        // SAFETY: a descriptor that the kernel has just made for us.
        fd if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(last_errno()),
    }
}

pub fn stat(fd: BorrowedFd<'_>) -> Result<Stat, Errno> {
    let inode = stat::of(fd)?;
    let (fs_magic, fs_block) = match rustix::fs::fstatfs(fd) {
        Ok(fs) => (fs.f_type as u64, fs.f_bsize as u64),
        Err(errno) if may_return(errno) => (0, inode.block),
        Err(errno) => return Err(errno),
    };
    let (size, device) = match inode.kind {
        FileType::BlockDevice => (rustix::fs::seek(fd, SeekFrom::End(0))?, inode.is_device),
        _ => (inode.size, inode.device),
    };
    Ok(Stat {
        kind: inode.kind,
        size,
        identity: (inode.device.0, inode.device.1, inode.number),
        device,
        direct: inode.direct,
        fs_magic,
        fs_block,
        allocated: inode.allocated,
    })
}

/// The position of a descriptor, and the size of a regular file, which may change. None for what has no position, such
/// as a pipe.
pub fn position(fd: BorrowedFd<'_>) -> Option<(u64, Option<u64>)> {
    let at = rustix::fs::tell(fd).ok()?;
    let stat = rustix::fs::fstat(fd).ok()?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    let size = u64::try_from(stat.st_size).ok();
    Some((at, size.filter(|_| kind == FileType::RegularFile)))
}

/// The next range of data at or after `from`: `SEEK_DATA` and `SEEK_HOLE` (lseek(2)).
///
/// None if there is only a hole left. A file system without support for holes returns the rest of the file.
pub fn next_data(fd: BorrowedFd<'_>, from: u64) -> Result<Option<(u64, u64)>, Errno> {
    match rustix::fs::seek(fd, SeekFrom::Data(from)) {
        Ok(data) => {
            let hole = rustix::fs::seek(fd, SeekFrom::Hole(data))?;
            Ok(Some((data, hole)))
        }
        Err(Errno::NXIO) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// The ranges of `[start, end)` of a file that have data; the others are holes.
///
/// Holes shorter than `small` count as data. The list has at most 64 Ki entries; what follows them counts as
/// data.
pub fn data(fd: BorrowedFd<'_>, start: u64, end: u64, small: u64) -> Vec<(u64, u64)> {
    let mut list: Vec<(u64, u64)> = Vec::new();
    let mut from = start;
    while from < end {
        // An error means that holes cannot be found: all of it counts as data.
        let whole = (from, end);
        let next = if list.len() < 1 << 16 {
            next_data(fd, from).unwrap_or(Some(whole))
        } else {
            Some(whole)
        };
        // A network or FUSE server that returns nonsense counts as an error.
        let next = next.map(|(data, hole)| {
            if from <= data && data < hole {
                (data, hole)
            } else {
                whole
            }
        });
        let Some((data, hole)) = next.filter(|(data, _)| *data < end) else {
            break;
        };
        match list.last_mut() {
            Some(last) if data - last.1 < small => last.1 = hole.min(end),
            _ => list.push((data, hole.min(end))),
        }
        from = hole;
    }
    list
}

/// pwrite(2) of `len` bytes at `at` of the region.
pub fn pwrite(
    fd: impl AsFd,
    region: &Region<'_>,
    at: u64,
    len: u64,
    offset: u64,
) -> Result<u64, Errno> {
    // Not rustix's, which requires a slice: others may write to these bytes at the same time.
    // SAFETY: `span` has checked that the bytes are inside the region, which exists during the call.
    let done = unsafe {
        libc::pwrite64(
            fd.as_fd().as_raw_fd(),
            region.span(at, len).cast(),
            len as usize,
            offset as libc::off64_t,
        )
    };
    u64::try_from(done).map_err(|_| last_errno())
}

/// read(2) of up to `len` bytes to `at` of the region, from a pipe.
pub fn read(fd: BorrowedFd<'_>, region: &Region<'_>, at: u64, len: u64) -> Result<u64, Errno> {
    // SAFETY: as in `pread`.
    let got = unsafe { libc::read(fd.as_raw_fd(), region.span(at, len).cast(), len as usize) };
    u64::try_from(got).map_err(|_| last_errno())
}

/// Writes the dirty pages of a range of a file to its file system, and waits for that. The next store through a
/// mapping of one of them then updates the file's times; a store to a page that is still dirty does not.
///
/// With sync_file_range(2), because fdatasync(2) also waits for the disk's cache; but where the pages belong to
/// another file (overlayfs), and where it is refused, with fdatasync(2). What refuses both has nothing to write.
pub fn write_back(fd: BorrowedFd<'_>, at: u64, len: u64) -> Result<(), Errno> {
    let (at, len) = (at as libc::off64_t, len as libc::off64_t);
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: the call takes numbers only.
    let range = || match unsafe { libc::sync_file_range(fd.as_raw_fd(), at, len, flags) } {
        0 => Ok(()),
        _ => Err(last_errno()),
    };
    let failed = |errno: &Errno| [Errno::IO, Errno::NOSPC, Errno::DQUOT].contains(errno);
    // Or unknown, in a sandbox.
    let stacked = rustix::fs::fstatfs(fd).map_or(true, |fs| {
        fs.f_type as u64 == libc::OVERLAYFS_SUPER_MAGIC as u64
    });
    if !stacked {
        match retry(range) {
            Err(errno) if !failed(&errno) => {}
            done => return done,
        }
    }
    match retry(|| rustix::fs::fdatasync(fd)) {
        Err(errno) if failed(&errno) => Err(errno),
        _ => Ok(()),
    }
}

/// Waits up to `most` until a pipe has something to read, or has ended; returns whether it has.
pub fn wait_readable(fd: BorrowedFd<'_>, most: Duration) -> Result<bool, Errno> {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    let most = Timespec::try_from(most).map_err(|_| Errno::INVAL)?;
    match rustix::event::poll(&mut fds, Some(&most)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// The maximum size that this process may give to a file, in bytes; None if there is no limit
/// (RLIMIT_FSIZE).
pub fn size_limit() -> Option<u64> {
    host::limits(libc::RLIMIT_FSIZE).ok()?.soft
}

/// pread(2) into `len` bytes at `at` of the region.
pub fn pread(
    fd: impl AsFd,
    region: &Region<'_>,
    at: u64,
    len: u64,
    offset: u64,
) -> Result<u64, Errno> {
    // Not rustix's, which requires a `&mut`: others may read these bytes at the same time.
    // SAFETY: `span` has checked that the bytes are inside the region, which exists during the call.
    let got = unsafe {
        libc::pread64(
            fd.as_fd().as_raw_fd(),
            region.span(at, len).cast(),
            len as usize,
            offset as libc::off64_t,
        )
    };
    u64::try_from(got).map_err(|_| last_errno())
}

/// Copies up to `len` bytes from `offset` of `from` to byte `at` of `to` (copy_file_range(2)); file
/// positions are neither used nor changed.
pub fn copy_range(
    from: BorrowedFd<'_>,
    offset: u64,
    to: BorrowedFd<'_>,
    at: u64,
    len: u64,
) -> Result<u64, Errno> {
    let (mut offset, mut at) = (offset, at);
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    retry(|| rustix::fs::copy_file_range(from, Some(&mut offset), to, Some(&mut at), len))
        .map(|got| got as u64)
}

/// Returns true if the kernel can copy from one to the other; probed with a zero-length copy.
pub fn copies_range(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> bool {
    copy_range(from, 0, to, 0, 0) == Ok(0)
}

/// As [`pread`], but only what the page cache already has (RWF_NOWAIT, Linux 4.14).
pub fn pread_cached(
    fd: impl AsFd,
    region: &Region<'_>,
    at: u64,
    len: u64,
    offset: u64,
) -> Result<u64, Errno> {
    preadv2(fd, region, (at, len), offset, libc::RWF_NOWAIT)
}

/// As [`pread`], but drops pages that it brings into the page cache when they have been read; what was there
/// before stays (RWF_DONTCACHE, Linux 6.14).
///
/// EOPNOTSUPP if the kernel or the file system does not support that.
pub fn pread_dropping(
    fd: impl AsFd,
    region: &Region<'_>,
    at: u64,
    len: u64,
    offset: u64,
) -> Result<u64, Errno> {
    preadv2(fd, region, (at, len), offset, libc::RWF_DONTCACHE)
}

/// Returns true if [`pread_dropping`] works, tried at the end of a file of `size` bytes, where nothing is read.
pub fn drops_behind(fd: impl AsFd, size: u64) -> bool {
    let mut byte = [0_u8];
    let region = Region::of_slice(&mut byte);
    retry(|| pread_dropping(&fd, &region, 0, 1, size)).is_ok()
}

fn preadv2(
    fd: impl AsFd,
    region: &Region<'_>,
    (at, len): (u64, u64),
    offset: u64,
    flags: libc::c_int,
) -> Result<u64, Errno> {
    let iov = iovec(region.span(at, len), len as usize);
    // SAFETY: one vector over memory inside the region, for the time of the call.
    let got = unsafe {
        libc::preadv64v2(
            fd.as_fd().as_raw_fd(),
            &raw const iov,
            1,
            offset as libc::off64_t,
            flags,
        )
    };
    u64::try_from(got).map_err(|_| last_errno())
}

/// Copies from or to memory of this process that may disappear (a mapped file that is truncated): a fault
/// returns EFAULT and does not raise SIGBUS (process_vm_readv(2) on this process).
pub fn copy_mapped(
    from: &Region<'_>,
    from_at: u64,
    into: &Region<'_>,
    at: u64,
    len: u64,
) -> Result<u64, Errno> {
    let local = iovec(into.span(at, len), len as usize);
    let remote = iovec(from.span(from_at, len), len as usize);
    // SAFETY: both vectors are inside live regions; the kernel checks the pages themselves.
    let got = unsafe {
        libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0)
    };
    u64::try_from(got).map_err(|_| last_errno())
}

/// Writes all of `bytes` at `offset`.
pub fn pwrite_all(fd: BorrowedFd<'_>, mut bytes: &[u8], mut offset: u64) -> Result<(), Errno> {
    while !bytes.is_empty() {
        let done = retry(|| rustix::io::pwrite(fd, bytes, offset))?;
        if done == 0 {
            return Err(Errno::IO);
        }
        bytes = &bytes[done..];
        offset += done as u64;
    }
    Ok(())
}

/// Returns true if a descriptor is open for reading.
pub fn is_readable(fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    let flags = rustix::fs::fcntl_getfl(fd)?;
    Ok(flags & OFlags::ACCMODE != OFlags::WRONLY && !flags.contains(OFlags::PATH))
}

/// Clears close-on-exec, so that a program that this process executes inherits the descriptor.
pub fn inherit(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())
}

/// Reads up to `into.len()` bytes at `offset`.
pub fn read_at(fd: BorrowedFd<'_>, into: &mut [u8], offset: u64) -> Result<usize, Errno> {
    retry(|| rustix::io::pread(fd, &mut *into, offset))
}

/// Reads exactly `into.len()` bytes at `offset`; EIO if the file ends before.
pub fn pread_all(fd: BorrowedFd<'_>, mut into: &mut [u8], mut offset: u64) -> Result<(), Errno> {
    while !into.is_empty() {
        let done = retry(|| rustix::io::pread(fd, &mut *into, offset))?;
        if done == 0 {
            return Err(Errno::IO);
        }
        into = &mut into[done..];
        offset += done as u64;
    }
    Ok(())
}

/// Takes over a descriptor that this process was started with, and sets close-on-exec.
///
/// EBADF if the number is not open. Nothing else in this process may own it.
pub fn inherited(number: i32) -> Result<OwnedFd, Errno> {
    // As in `duplicate`, it may be any number. A copy, so that other uses of the number are not affected.
    let own = duplicate(number)?;
    // SAFETY: the number is open, as was just checked, and according to its starter this program has no
    // other use for it.
    drop(unsafe { OwnedFd::from_raw_fd(number) });
    Ok(own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_requests_is_not_that_of_blocks() {
        let of = |fs_block| Stat {
            fs_block,
            fs_magic: 0,
            ..stat(std::fs::File::open("/dev/null").unwrap().as_fd()).unwrap()
        };
        let page = page_size();
        for (size, block, request) in [
            (0, page, 0),
            (512, page, 0),
            (4096, page, 0),
            (64 << 10, 64 << 10, 0),
            // NFS by default, and with wsize=98304.
            (1 << 20, page, 1 << 20),
            (98_304, page, 98_304),
        ] {
            assert_eq!((of(size).block(), of(size).request()), (block, request));
        }
    }
}
