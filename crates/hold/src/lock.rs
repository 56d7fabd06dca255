//! A lock on a folder that belongs to a process, and ends with it.
//!
//! flock(2) belongs to an open file, which a forked child has too: a killed process would leave its lock to its
//! children. The locks of fcntl(2) belong to the process, but it loses them when any of its threads closes the file,
//! and they do not exclude its own threads. So this process remembers its locks, and does not open a file that it
//! has locked.

use dmafile::internal::{folder::Folder, sync};
use dmafile_sys::Errno;
use dmafile_sys::place::{self, Named};
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, TryLockError};

/// The name of the file that is locked.
pub(super) const NAME: &str = "lock";

/// The locks of this process, and perhaps of those that it was forked from.
static LOCKS: Mutex<Vec<(u32, Named)>> = Mutex::new(Vec::new());

/// A lock, until it is dropped.
pub(super) struct Lock {
    file: Option<OwnedFd>,
    identity: Named,
    /// The process that has it; a forked child has not.
    pid: u32,
}

impl Lock {
    /// Locks a folder. None if it is locked, or has been removed.
    pub(super) fn take(folder: &Folder) -> Result<Option<Self>, Errno> {
        let mut locks = match LOCKS.try_lock() {
            Ok(locks) => locks,
            Err(TryLockError::Poisoned(locks)) => locks.into_inner(),
            // Not waited for: in a forked child another thread's copy stays locked.
            Err(TryLockError::WouldBlock) => return Ok(None),
        };
        let (name, pid) = (OsStr::new(NAME), std::process::id());
        locks.retain(|(owner, _)| *owner == pid);
        let there = folder.look_up(name)?;
        if there.is_some_and(|there| locks.iter().any(|(_, own)| own.is(&there))) {
            return Ok(None);
        }
        let opened = match there {
            Some(_) => place::open(folder.fd(), name),
            None => place::create_private(folder.fd(), name),
        };
        let file = match opened {
            // Another process has just created or removed it, or the folder.
            Err(Errno::EXIST | Errno::NOENT) => return Ok(None),
            opened => opened?,
        };
        match place::lock(file.as_fd()) {
            Err(Errno::AGAIN) => return Ok(None),
            locked => locked?,
        }
        let identity = place::look_at(file.as_fd())?;
        let there = folder.look_up(name)?;
        if !there.is_some_and(|there| there.is(&identity)) {
            return Ok(None);
        }
        locks.push((pid, identity));
        Ok(Some(Self {
            file: Some(file),
            identity,
            pid,
        }))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            return;
        }
        let mut locks = sync::lock(&LOCKS);
        locks.retain(|(_, own)| !own.is(&self.identity));
        drop(self.file.take());
    }
}
