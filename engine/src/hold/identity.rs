//! The identity of a file, for detecting changes.

use crate::sys::Errno;
use crate::sys::stat::{self, Inode};
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
        stat::of(fd).map(|inode| Self::from(&inode))
    }

    /// The identity of the file that a path refers to. A network file system may answer
    /// from its cache.
    pub(super) fn at(path: &Path) -> Result<Self, Errno> {
        stat::path(path).map(|inode| Self::from(&inode))
    }
}

impl From<&Inode> for FileIdentity {
    fn from(inode: &Inode) -> Self {
        Self {
            device: inode.device,
            inode: inode.number,
            size: inode.size,
            mtime_ns: inode.mtime_ns,
            ctime_ns: inode.ctime_ns,
        }
    }
}
