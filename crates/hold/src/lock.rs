//! A lock on a folder that belongs to a process, and ends with it.
//!
//! flock(2) belongs to an open file, which a forked child has too: a killed process would leave its lock to its
//! children. The locks of fcntl(2) belong to the process, but it loses them when any of its threads closes the file,
//! and they do not exclude its own threads. So this process remembers its locks, and does not open a file that it
//! has locked.

use dmafile::internal::folder::Folder;
use dmafile_sys::Errno;
use dmafile_sys::place::{self, Named};
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

/// The name of the file that is locked.
pub(super) const NAME: &str = "lock";

/// The locks of this process, and perhaps of those that it was forked from.
static LOCKS: Mutex<Vec<(u32, Named)>> = Mutex::new(Vec::new());

/// The process whose thread has [`LOCKS`]; 0 for none.
static HOLDER: AtomicU32 = AtomicU32::new(0);

/// Access to [`LOCKS`].
struct Locks(MutexGuard<'static, Vec<(u32, Named)>>);

impl Locks {
    /// Waits for other threads of this process. None in a forked child if another thread had them when it was forked:
    /// its copy stays locked.
    fn open() -> Option<Self> {
        /// How long a thread may take to say that it has them; then it was the parent's.
        const UNNAMED: Duration = Duration::from_secs(1);
        let (pid, begin) = (std::process::id(), Instant::now());
        loop {
            let guard = match LOCKS.try_lock() {
                Ok(guard) => guard,
                Err(TryLockError::Poisoned(guard)) => guard.into_inner(),
                Err(TryLockError::WouldBlock) => {
                    match HOLDER.load(Ordering::Acquire) {
                        0 if begin.elapsed() < UNNAMED => {}
                        holder if holder == pid => {}
                        _ => return None,
                    }
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                }
            };
            HOLDER.store(pid, Ordering::Release);
            return Some(Self(guard));
        }
    }
}

impl Drop for Locks {
    fn drop(&mut self) {
        HOLDER.store(0, Ordering::Release);
    }
}

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
        let Some(mut locks) = Locks::open() else {
            return Ok(None);
        };
        let locks = &mut locks.0;
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
        let locks = Locks::open();
        if let Some(mut locks) = locks {
            locks.0.retain(|(_, own)| !own.is(&self.identity));
            // Before another thread may lock it again.
            drop(self.file.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread that locks one folder does not make another folder look locked.
    #[test]
    fn threads_do_not_hinder_each_other() {
        let dir = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let path = dir.path().join(thread.to_string());
                std::fs::create_dir(&path).unwrap();
                let folder = Folder::open(&path).unwrap();
                scope.spawn(move || {
                    for round in 0..200 {
                        let lock = Lock::take(&folder).unwrap();
                        assert!(lock.is_some(), "round {round}");
                        assert!(Lock::take(&folder).unwrap().is_none(), "it is locked");
                    }
                });
            }
        });
    }
}
