//! What a file is: statx(2), or stat(2) where a sandbox refuses that.

use super::sandbox::may_return;
use super::{Errno, retry};
use rustix::fs::{AtFlags, CWD, FileType, Stat, Statx, StatxAttributes, StatxFlags};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

/// An inode.
#[derive(Clone, Copy, Debug)]
pub struct Inode {
    pub kind: FileType,
    /// Permissions, with the setuid, setgid and sticky bits.
    pub mode: u32,
    /// User and group.
    pub owner: (u32, u32),
    /// Number of its names.
    pub links: u32,
    /// 0 for a block device.
    pub size: u64,
    /// Number of bytes allocated for it.
    pub allocated: u64,
    /// Preferred size of reads and writes.
    pub block: u64,
    pub number: u64,
    /// Major and minor number of the device that it is on.
    pub device: (u32, u32),
    /// Major and minor number of the device that it is.
    pub is_device: (u32, u32),
    /// Last change of its contents, in nanoseconds since 1970.
    pub mtime_ns: i64,
    /// Last change of any kind, in nanoseconds since 1970.
    pub ctime_ns: i64,
    /// Memory and offset alignment of direct I/O, if the kernel reports it (STATX_DIOALIGN, Linux 6.1).
    /// Zeros mean that direct I/O is not supported. Only statx tells it.
    pub direct: Option<(u32, u32)>,
    /// True if it cannot be changed or replaced (chattr(1)). Without statx it is false, and a change fails.
    pub immutable: bool,
}

/// The file behind a descriptor.
pub fn of(fd: impl AsFd) -> Result<Inode, Errno> {
    let fd = fd.as_fd();
    match rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, ASKED) {
        Ok(stat) => Ok(told(&stat)),
        Err(errno) if may_return(errno) => rustix::fs::fstat(fd).map(|stat| simple(&stat)),
        Err(errno) => Err(errno),
    }
}

/// What a name in a folder refers to. A symbolic link is not followed.
pub fn name(folder: BorrowedFd<'_>, name: impl rustix::path::Arg + Copy) -> Result<Inode, Errno> {
    at(folder, name, AtFlags::SYMLINK_NOFOLLOW, AtFlags::empty())
}

/// As [`path`], without following a symbolic link.
pub fn link(path: &Path) -> Result<Inode, Errno> {
    name(CWD, path)
}

/// What a path refers to. A network file system may answer from its cache.
pub fn path(path: &Path) -> Result<Inode, Errno> {
    at(CWD, path, AtFlags::empty(), AtFlags::STATX_DONT_SYNC)
}

const ASKED: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::DIOALIGN);

/// `more` are flags that only statx knows.
fn at(
    folder: BorrowedFd<'_>,
    name: impl rustix::path::Arg + Copy,
    flags: AtFlags,
    more: AtFlags,
) -> Result<Inode, Errno> {
    match retry(|| rustix::fs::statx(folder, name, flags | more, ASKED)) {
        Ok(stat) => Ok(told(&stat)),
        // EACCES for the path comes back.
        Err(errno) if may_return(errno) => {
            retry(|| rustix::fs::statat(folder, name, flags)).map(|stat| simple(&stat))
        }
        Err(errno) => Err(errno),
    }
}

/// A time in nanoseconds.
pub fn ns(seconds: i64, more: i64) -> i64 {
    seconds.saturating_mul(1_000_000_000).saturating_add(more)
}

fn told(stat: &Statx) -> Inode {
    let fixed = StatxAttributes::IMMUTABLE | StatxAttributes::APPEND;
    let mode = u32::from(stat.stx_mode);
    let tells_direct = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::DIOALIGN);
    Inode {
        kind: FileType::from_raw_mode(mode),
        mode: mode & 0o7777,
        owner: (stat.stx_uid, stat.stx_gid),
        links: stat.stx_nlink,
        size: stat.stx_size,
        allocated: stat.stx_blocks * 512,
        block: stat.stx_blksize.into(),
        number: stat.stx_ino,
        device: (stat.stx_dev_major, stat.stx_dev_minor),
        is_device: (stat.stx_rdev_major, stat.stx_rdev_minor),
        mtime_ns: ns(stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec.into()),
        ctime_ns: ns(stat.stx_ctime.tv_sec, stat.stx_ctime.tv_nsec.into()),
        direct: tells_direct.then_some((stat.stx_dio_mem_align, stat.stx_dio_offset_align)),
        immutable: stat.stx_attributes.intersects(fixed),
    }
}

fn simple(stat: &Stat) -> Inode {
    let numbers = |device| (rustix::fs::major(device), rustix::fs::minor(device));
    Inode {
        kind: FileType::from_raw_mode(stat.st_mode),
        mode: stat.st_mode & 0o7777,
        owner: (stat.st_uid, stat.st_gid),
        links: u32::try_from(stat.st_nlink).unwrap_or(u32::MAX),
        size: u64::try_from(stat.st_size).unwrap_or(0),
        allocated: u64::try_from(stat.st_blocks).unwrap_or(0) * 512,
        block: u64::try_from(stat.st_blksize).unwrap_or(0),
        number: stat.st_ino,
        device: numbers(stat.st_dev),
        is_device: numbers(stat.st_rdev),
        mtime_ns: ns(stat.st_mtime, stat.st_mtime_nsec as i64),
        ctime_ns: ns(stat.st_ctime, stat.st_ctime_nsec as i64),
        direct: None,
        immutable: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn both_calls_tell_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, b"four").unwrap();
        for path in [&*path, dir.path(), Path::new("/dev/null")] {
            let file = File::open(path).unwrap();
            let all = of(&file).unwrap();
            let simple = simple(&rustix::fs::fstat(&file).unwrap());
            let same = Inode {
                direct: None,
                immutable: false,
                ..all
            };
            assert_eq!(format!("{same:?}"), format!("{simple:?}"));
            let by_path = super::path(path).unwrap();
            assert_eq!(format!("{all:?}"), format!("{by_path:?}"));
        }
    }
}
