//! Memory that several processes share without a holder: the first one loads it, the others take it.
//!
//! Each process that has the memory serves it at its own socket, in a folder whose name is derived from the
//! request. A process that wants the memory locks that folder, takes the memory from any process that answers
//! there or else loads it, begins to serve it, and unlocks the folder. So as long as any process has the
//! memory, others can take it. If a process dies, the kernel unlocks the folder; it frees the memory with the
//! last process.

use super::holder::Holder;
use super::load::{Open, Wanted};
use super::place::{self, Access, Bound};
use super::protocol::HeldInfo;
use super::set::{Member, Set, now};
use super::take::{Held, take};
use crate::buffer::Buffer;
use crate::control::{CancelToken, Progress};
use crate::error::{Error, Result};
use crate::load::Load;
use crate::message::Names;
use crate::options::{Kind, Pages};
use crate::sys::place::{mark, unmark};
use crate::sys::{Errno, errno};
use crate::verify::{Algorithm, Hasher, Verify};
use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Interval at which the lock is tried.
const STEP: Duration = Duration::from_millis(5);

/// A builder for files that several processes of one user share in memory.
///
/// ```no_run
/// use dmafile::Shared;
/// use std::time::Duration;
///
/// // In each of several processes, at the same time or not: one of them loads.
/// let held = Shared::of(["model/"]).wait(Duration::from_secs(600)).run()?;
/// # Ok::<(), dmafile::Error>(())
/// ```
#[must_use = "nothing is loaded or taken before `run`"]
pub struct Shared {
    wanted: Wanted,
    at: Option<PathBuf>,
    wait: Duration,
}

impl Shared {
    /// Files and models, as for [`Hold::of`](super::Hold::of).
    pub fn of<P: Into<PathBuf>>(paths: impl IntoIterator<Item = P>) -> Self {
        Self {
            wanted: Wanted::new(paths.into_iter().map(Into::into).collect()),
            at: None,
            wait: Duration::ZERO,
        }
    }

    /// The folder in which processes find each other, created if necessary; default: `shared` in the folder of
    /// this user's sockets ([`Shared::place`]). It must belong to this user.
    pub fn at(mut self, folder: impl Into<PathBuf>) -> Self {
        self.at = Some(folder.into());
        self
    }

    /// The folder of this user's sockets by default, created if necessary: `/run/dmafile` for root, and for other users
    /// `$XDG_RUNTIME_DIR/dmafile`, or without that `/dev/shm/dmafile-UID`, or `/tmp/dmafile-UID`.
    ///
    /// # Errors
    /// EPERM if other users could change what is in it, or have put something else there; EACCES, EROFS and others of
    /// mkdir(2).
    pub fn place() -> Result<PathBuf> {
        Ok(place::own_folder()?.path().to_path_buf())
    }

    /// How long to wait for another process that is loading; default: not at all.
    pub fn wait(mut self, most: Duration) -> Self {
        self.wait = most.min(super::LONGEST);
        self
    }

    /// As [`Hold::to`](super::Hold::to).
    pub fn to(mut self, kind: Kind) -> Self {
        self.wanted.kind = kind;
        self
    }

    /// As [`Hold::pages`](super::Hold::pages).
    pub fn pages(mut self, pages: Pages) -> Self {
        self.wanted.pages = pages;
        self
    }

    /// As [`Hold::verify`](super::Hold::verify); processes that take the memory rely on the one that loaded it.
    pub fn verify(mut self, verify: Verify) -> Self {
        self.wanted.verify = Some(verify);
        self
    }

    /// As [`Hold::writable`](super::Hold::writable).
    pub fn writable(mut self, writable: bool) -> Self {
        self.wanted.writable = writable;
        self
    }

    /// As [`Hold::each`](super::Hold::each).
    pub fn each(mut self, with: impl Fn(Load) -> Load + Send + 'static) -> Self {
        self.wanted.each = Box::new(with);
        self
    }

    /// Lets `token` cancel the loads, and the wait for another process.
    pub fn cancel(mut self, token: CancelToken) -> Self {
        self.wanted.cancel = token;
        self
    }

    /// As [`Hold::progress`](super::Hold::progress), if this process loads.
    pub fn progress(mut self, progress: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        self.wanted.progress = Some(Box::new(progress));
        self
    }

    /// Sets how messages name options; default: as this crate does.
    pub fn names(mut self, names: &'static dyn Names) -> Self {
        self.wanted.names = names;
        self
    }

    /// Takes the memory from a process that has it, or loads it. From then on a thread of this process passes
    /// it on, until the last of its files is dropped.
    ///
    /// # Errors
    /// As [`Load::run`], if this process loads; ETIMEDOUT if another one has not loaded it within `wait`;
    /// the errors of [`Shared::place`].
    pub fn run(self) -> Result<Held> {
        match self.find()? {
            Found::Held(held) => Ok(held),
            Found::Vacant(vacant) => vacant.load(),
        }
    }

    /// Takes the memory from a process that has it, as [`Shared::run`] does. If none has, the caller may also
    /// get the bytes from elsewhere than the disk: other processes wait while the [`Vacant`] exists.
    ///
    /// # Errors
    /// As [`Shared::run`].
    pub fn find(mut self) -> Result<Found> {
        self.wanted.check()?;
        let files = self.wanted.open()?;
        let key = self.key(&files);
        let folder = match self.at.take() {
            Some(folder) => folder,
            None => place::own_folder()?.place("shared"),
        };
        place::make(&folder, 0o700)?;
        let folder = folder.join(&key);
        let until = Instant::now() + self.wait;
        let lock = Lock::take(&folder, until, &self.wanted.cancel)?;
        let place = folder.join(format!("{}-{:x}", std::process::id(), now_in_ns()));
        if let Some(held) = look_around(&folder, &key, &self.wanted.cancel) {
            let members = held.files().iter();
            let members = members.map(|file| Member::of(file.info.clone(), &file.buffer));
            let holder = pass_on(&place, &key, members.collect::<Result<_>>()?)?;
            return Ok(Found::Held(held.passed_on(holder)));
        }
        Ok(Found::Vacant(Vacant {
            wanted: self.wanted,
            files,
            key,
            place,
            _lock: lock,
        }))
    }

    /// The same for all processes with the same request: the same files, in the same state, with the same
    /// options.
    fn key(&self, files: &[Open]) -> String {
        let Wanted {
            kind,
            pages,
            verify,
            writable,
            ..
        } = &self.wanted;
        let mut text = format!("1 {kind} {pages} {verify:?} {writable}\n");
        for file in files {
            let name = file.path.file_name().unwrap_or_default();
            text.push_str(&format!("{name:?} {:?}\n", file.identity));
        }
        let mut hasher = Hasher::new(Algorithm::Blake3, text.len() as u64);
        hasher.update(text.as_bytes());
        let mut key = hasher.hex();
        key.truncate(32);
        key
    }
}

/// The result of [`Shared::find`].
pub enum Found {
    /// Another process has the files in memory.
    Held(Held),
    /// No process has: this one must bring them into memory.
    Vacant(Vacant),
}

/// Files that no process has in memory yet. Other processes that ask for them wait until this one has filled
/// it, or has dropped it.
#[must_use = "other processes wait for it"]
pub struct Vacant {
    wanted: Wanted,
    files: Vec<Open>,
    key: String,
    place: PathBuf,
    _lock: Lock,
}

impl Vacant {
    /// Loads the files.
    ///
    /// # Errors
    /// As [`Load::run`].
    pub fn load(mut self) -> Result<Held> {
        let mut own: Vec<(Buffer, HeldInfo)> = Vec::new();
        let files = std::mem::take(&mut self.files);
        let members = self
            .wanted
            .load(files, |buffer, info| own.push((buffer, info)))?;
        self.share(members, own)
    }

    /// The path and size in bytes of each file.
    pub fn files(&self) -> impl Iterator<Item = (&Path, u64)> {
        let files = self.files.iter();
        files.map(|file| (&*file.path, file.identity.size))
    }

    /// Lets `token` cancel [`Vacant::fill`].
    pub fn cancel(mut self, token: CancelToken) -> Self {
        self.wanted.cancel = token;
        self
    }

    /// Takes over memory that contains the bytes of the files: for each file a memfd of its size that cannot
    /// shrink (F_SEAL_SHRINK). It is sealed here against all changes, unless [`Shared::writable`] is set, and
    /// compared with its digest, if [`Shared::verify`] is set.
    ///
    /// # Errors
    /// EPROTO for anything else than such a memfd, EBUSY if it is mapped for writing, EBADMSG for a wrong
    /// digest, ESTALE if a file has changed since.
    pub fn fill(mut self, memory: Vec<OwnedFd>) -> Result<Held> {
        let files = std::mem::take(&mut self.files);
        let mut own: Vec<(Buffer, HeldInfo)> = Vec::new();
        let members = self
            .wanted
            .adopt(files, memory, |buffer, info| own.push((buffer, info)))?;
        self.share(members, own)
    }

    fn share(self, members: Vec<Member>, own: Vec<(Buffer, HeldInfo)>) -> Result<Held> {
        let holder = pass_on(&self.place, &self.key, members)?;
        Ok(Held::own(self.key, own, holder))
    }
}

/// For a socket name that this process has not used before.
fn now_in_ns() -> u128 {
    let since = std::time::UNIX_EPOCH.elapsed();
    since.map_or(0, |since| since.as_nanos())
}

/// Serves what this process has.
fn pass_on(place: &Path, key: &str, members: Vec<Member>) -> Result<Holder> {
    let access = Access {
        mode: 0o600,
        group: None,
    };
    let mut bound = Bound::beside(place, access)?;
    bound.put(false)?;
    let set = Set {
        name: key.to_string(),
        members,
        since: now(),
    };
    Holder::serve(set, bound)
}

/// Takes the files from a process that has them. Removes sockets of processes that have ended.
fn look_around(folder: &Path, key: &str, cancel: &CancelToken) -> Option<Held> {
    for entry in fs::read_dir(folder).ok()?.flatten() {
        let path = entry.path();
        if entry.file_name() == LOCK {
            continue;
        }
        match take(&path, key, Instant::now(), cancel) {
            Ok(held) => return Some(held),
            Err(error) if error.raw_os_error() == Some(libc::ECONNREFUSED) => {
                let _ = fs::remove_file(&path);
            }
            // It is just ending, or is stopped; or the token is set, which the load will notice.
            Err(_) => {}
        }
    }
    None
}

/// The name of the file that is locked.
const LOCK: &str = "lock";

/// A lock on a folder, released when dropped.
struct Lock {
    file: File,
}

impl Drop for Lock {
    fn drop(&mut self) {
        unmark(self.file.as_fd());
    }
}

impl Lock {
    fn take(folder: &Path, until: Instant, cancel: &CancelToken) -> Result<Self> {
        let path = folder.join(LOCK);
        let place = || path.display().to_string();
        let failed = |errno| Error::os("cannot share", errno).at(place());
        loop {
            place::make(folder, 0o700)?;
            let file = File::options()
                .create(true)
                .truncate(false)
                .write(true)
                .mode(0o600)
                .open(&path)
                .map_err(|error| failed(errno(error)))?;
            match mark(file.as_fd()) {
                Ok(()) if is_at(&file, &path) => return Ok(Self { file }),
                // The file was removed while we waited.
                Ok(()) => continue,
                Err(Errno::AGAIN) => {}
                Err(errno) => return Err(failed(errno)),
            }
            if cancel.is_set() {
                return Err(Error::cancelled(place()));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(failed(Errno::TIMEDOUT)
                    .with_why("another process is still loading it")
                    .with_remedy("wait longer"));
            }
            std::thread::sleep(STEP.min(left));
        }
    }
}

/// Whether a path refers to this open file.
fn is_at(file: &File, path: &Path) -> bool {
    let (own, there) = (file.metadata(), fs::metadata(path));
    own.is_ok_and(|own| {
        there.is_ok_and(|there| (own.dev(), own.ino()) == (there.dev(), there.ino()))
    })
}
