//! The identity of a file, for detecting changes.

use crate::sys::{Errno, retry};
use rustix::fs::{AtFlags, CWD, Statx, StatxFlags};
use serde::{Deserialize, Serialize};
use std::os::fd::BorrowedFd;
use std::path::Path;

/// Distinguishes a file from all others, and from earlier and later states of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct FileIdentity {
    /// Major and minor number of its device.
    pub device: (u32, u32),
    /// Its inode.
    pub inode: u64,
    /// Its size in bytes.
    pub size: u64,
    /// Last change of its contents, in nanoseconds since 1970.
    pub mtime_ns: i64,
    /// Last change of any kind, in nanoseconds since 1970.
    pub ctime_ns: i64,
}

impl FileIdentity {
    /// The identity of an open file.
    pub(super) fn of(fd: BorrowedFd<'_>) -> Result<Self, Errno> {
        rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)
            .map(|stat| Self::from(&stat))
    }

    /// The identity of the file that a path refers to. A network file system may answer
    /// from its cache.
    pub(super) fn at(path: &Path) -> Result<Self, Errno> {
        let flags = AtFlags::STATX_DONT_SYNC;
        retry(|| rustix::fs::statx(CWD, path, flags, StatxFlags::BASIC_STATS))
            .map(|stat| Self::from(&stat))
    }
}

impl From<&Statx> for FileIdentity {
    fn from(stat: &Statx) -> Self {
        let ns = |seconds: i64, more: u32| {
            seconds
                .saturating_mul(1_000_000_000)
                .saturating_add(more.into())
        };
        Self {
            device: (stat.stx_dev_major, stat.stx_dev_minor),
            inode: stat.stx_ino,
            size: stat.stx_size,
            mtime_ns: ns(stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec),
            ctime_ns: ns(stat.stx_ctime.tv_sec, stat.stx_ctime.tv_nsec),
        }
    }
}
