//! The identity of a file, for detecting changes.

use dmafile::{CancelToken, RemoteObject};
use dmafile_sys::stat::{self, Inode};
use dmafile_sys::{Errno, file};
use serde::{Deserialize, Serialize};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// Distinguishes a file from all others, and from earlier and later states of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct FileIdentity {
    /// Major and minor number of its device; of an object both are 0, and so are the times.
    pub device: (u32, u32),
    /// Its inode; of an object, a number made of its name and version.
    pub inode: u64,
    /// Its size in bytes.
    pub size: u64,
    /// Last change of its contents, in nanoseconds since 1970.
    pub mtime_ns: i64,
    /// Last change of any kind, in nanoseconds since 1970.
    pub ctime_ns: i64,
}

impl FileIdentity {
    /// The identity of an object: it has no device.
    pub(super) fn of_object(object: &dyn RemoteObject) -> Self {
        let mut hasher = DefaultHasher::new();
        (object.name(), object.version()).hash(&mut hasher);
        Self {
            device: (0, 0),
            inode: hasher.finish(),
            size: object.size(),
            mtime_ns: 0,
            ctime_ns: 0,
        }
    }

    /// True for that of an object, which nobody looks at again.
    pub(super) fn is_of_object(&self) -> bool {
        self.device == (0, 0)
    }

    /// The identity of an open file.
    pub(super) fn of(fd: BorrowedFd<'_>) -> Result<Self, Errno> {
        stat::of(fd).map(|inode| Self::from(&inode))
    }

    /// As [`of`](Self::of), after everything that was written to the file through a mapping has been written back,
    /// so that any later change gets the file another identity, even a store to a page that was already dirty.
    /// If the file is being changed all the time, it is the identity of a moment. ECANCELED if the token is set.
    pub(super) fn settled(fd: BorrowedFd<'_>, cancel: &CancelToken) -> Result<Self, Errno> {
        const TRIES: usize = 8;
        // How much is written between two looks at the token.
        const PART: usize = 256 << 20;
        let mut before = Self::of(fd)?;
        for _ in 0..TRIES {
            before.pass();
            for at in (0..before.size.max(1)).step_by(PART) {
                if cancel.is_cancelled() {
                    return Err(Errno::CANCELED);
                }
                file::write_back(fd, at, PART as u64)?;
            }
            let after = Self::of(fd)?;
            if after == before {
                break;
            }
            before = after;
        }
        Ok(before)
    }

    /// Waits until the clock that files get their times from, which advances in ticks, is past the last change: a
    /// further change in the same tick would get the same time.
    fn pass(&self) {
        // For a file that got its time from another machine's clock.
        const LONGEST: Duration = Duration::from_millis(100);
        let tick = || {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
            stat::ns(now.tv_sec, now.tv_nsec)
        };
        let begin = Instant::now();
        while tick() <= self.ctime_ns && begin.elapsed() < LONGEST {
            std::thread::sleep(Duration::from_millis(1));
        }
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
