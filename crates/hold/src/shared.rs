//! Memory that several processes share without a holder: the first one loads it, the others take it.
//!
//! Each process that has the memory serves it at its own socket, in a folder whose name is derived from the
//! request. A process that wants the memory locks that folder, takes the memory from any process that answers
//! there or else loads it, begins to serve it, and unlocks the folder. So as long as any process has the
//! memory, others can take it. If a process dies, the kernel unlocks the folder; it frees the memory with the
//! last process.

use super::holder::Holder;
use super::load::{HoldOptions, OpenFile, hold_setters};
use super::lock::{self, Lock};
use super::place::{self, Bound, SocketAccess};
use super::protocol::{HeldInfo, Op};
use super::set::{Member, Set, now};
use super::take::{Held, ORPHAN_TIMEOUT, REPLY_TIMEOUT, Talk, has_ended, receive};
use dmafile::internal::{Hasher, Verb, folder::Folder};
use dmafile::{
    Algorithm, Buffer, CancelToken, Error, Kind, Load, Names, Pages, Progress, Result, Verify,
};
use dmafile_sys::{Errno, file, process};
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval at which the lock is tried.
const LOCK_STEP: Duration = Duration::from_millis(5);
/// How long a process may take to answer before the next one is asked, too.
const HEAD_START: Duration = Duration::from_millis(50);
/// Interval at which answers are looked for.
const STEP: Duration = Duration::from_millis(5);

/// A builder for files that several processes of one user share in memory.
///
/// ```no_run
/// use dmafile_hold::Shared;
/// use std::time::Duration;
///
/// // In each of several processes, at the same time or not: one of them loads.
/// let held = Shared::of(["model/"]).wait(Duration::from_secs(600)).run()?;
/// # Ok::<(), dmafile::Error>(())
/// ```
#[must_use = "nothing is loaded or taken before `run`"]
pub struct Shared {
    wanted: HoldOptions,
    folder: Option<PathBuf>,
    wait: Duration,
}

impl Shared {
    /// Files and models, as for [`Hold::of`](super::Hold::of).
    pub fn of<P: Into<PathBuf>>(paths: impl IntoIterator<Item = P>) -> Self {
        Self {
            wanted: HoldOptions::new(paths.into_iter().map(Into::into).collect()),
            folder: None,
            wait: Duration::ZERO,
        }
    }

    /// The folder in which processes find each other, created if necessary; default: `shared` in the folder of
    /// this user's sockets ([`Shared::place`]). It must belong to this user.
    pub fn folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.folder = Some(folder.into());
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

    hold_setters!();

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
        let folder = match self.folder.take() {
            Some(folder) => folder,
            None => place::own_folder()?.place("shared"),
        };
        let all = place::make(&folder, 0o700)?;
        let until = Instant::now() + self.wait;
        let (folder, lock) = lock(&all, &key, until, &self.wanted.cancel)?;
        if let Some(held) = look_around(&folder, &key, &self.wanted.cancel) {
            let members = held.files().iter();
            let members = members.map(|file| Member::of(file.info.clone(), &file.buffer));
            let holder = pass_on(folder, &key, members.collect::<Result<_>>()?)?;
            return Ok(Found::Held(held.passed_on(holder)));
        }
        Ok(Found::Vacant(Vacant {
            wanted: Box::new(self.wanted),
            files,
            key,
            folder,
            _lock: lock,
        }))
    }

    /// The same for all processes with the same request: the same files, in the same state, with the same
    /// options.
    fn key(&self, files: &[OpenFile]) -> String {
        let HoldOptions {
            kind,
            pages,
            verify,
            writable,
            ..
        } = &self.wanted;
        let mut text = format!("2 {kind} {pages} {verify:?} {writable}\n");
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
    wanted: Box<HoldOptions>,
    files: Vec<OpenFile>,
    key: String,
    folder: Folder,
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
    /// EPROTO for anything other than such a memfd, EBUSY if it is mapped for writing, EBADMSG for a wrong
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
        let holder = pass_on(self.folder, &self.key, members)?;
        Ok(Held::own(self.key, own, holder))
    }
}

/// For a socket name that this process has not used before.
fn now_in_ns() -> u128 {
    let since = std::time::UNIX_EPOCH.elapsed();
    since.map_or(0, |since| since.as_nanos())
}

/// Serves what this process has, in the folder.
fn pass_on(folder: Folder, key: &str, members: Vec<Member>) -> Result<Holder> {
    let access = SocketAccess {
        mode: 0o600,
        group: None,
    };
    let name = format!("{}-{:x}", std::process::id(), now_in_ns());
    let mut bound = Bound::in_folder(folder, OsStr::new(&name), access)?;
    bound.put(false)?;
    let set = Set {
        name: key.to_string(),
        members,
        since: now(),
    };
    Holder::serve(set, bound)
}

/// Takes the files from a process that has them. Removes sockets of processes that have ended.
///
/// If a process does not answer soon, the next one is asked as well, and the first answer counts: a process may be
/// stopped, and others wait for the lock meanwhile.
fn look_around(folder: &Folder, key: &str, cancel: &CancelToken) -> Option<Held> {
    let mut names = folder.names().ok()?.into_iter();
    let mut asked: Vec<(OsString, Talk, Instant)> = Vec::new();
    let mut last = Instant::now();
    loop {
        if asked.is_empty() || last.elapsed() >= HEAD_START {
            match names.by_ref().find(|name| name != lock::NAME) {
                Some(name) => {
                    last = Instant::now();
                    let talk = ask(&folder.place(&name), key, cancel);
                    let talk = talk.inspect_err(|error| clean_up(folder, &name, error));
                    asked.extend(talk.ok().map(|talk| (name, talk, last)));
                    continue;
                }
                None if asked.is_empty() => return None,
                None => {}
            }
        }
        let poll = |talk: &Talk| file::wait_readable(talk.socket(), Duration::ZERO) == Ok(true);
        if let Some(number) = asked.iter().position(|(_, talk, _)| poll(talk)) {
            let (name, talk, _) = asked.swap_remove(number);
            match receive(talk, key) {
                Ok(held) => return Some(held),
                Err(error) => clean_up(folder, &name, &error),
            }
            continue;
        }
        asked.retain(|(name, talk, since)| {
            let is_overdue = since.elapsed() >= ORPHAN_TIMEOUT;
            let ended = is_overdue && has_ended(talk.who.pid);
            if ended {
                // A process that it forked keeps the socket open.
                let _ = folder.remove(name);
            }
            let stopped = is_overdue && process::is_stopped(talk.who.pid);
            !ended && !stopped && since.elapsed() < REPLY_TIMEOUT
        });
        if cancel.is_cancelled() {
            // The load will notice.
            return None;
        }
        if let Some((_, talk, _)) = asked.last() {
            // Only this one wakes it up; usually there is no other.
            let _ = file::wait_readable(talk.socket(), STEP);
        }
    }
}

/// Asks a process for the files.
fn ask(socket: &Path, key: &str, cancel: &CancelToken) -> Result<Talk> {
    let talk = Talk::at_once(Verb::Take, socket, Instant::now() + REPLY_TIMEOUT, cancel)?;
    talk.request(Op::Take, Some(key), 0)?;
    Ok(talk)
}

/// Removes the socket of a process that has ended.
fn clean_up(folder: &Folder, name: &OsStr, error: &Error) {
    if error.raw_os_error() == Some(libc::ECONNREFUSED) {
        let _ = folder.remove(name);
    }
}

/// Locks the folder of a set, and waits until `until` for another process that has it.
fn lock(all: &Folder, key: &str, until: Instant, cancel: &CancelToken) -> Result<(Folder, Lock)> {
    loop {
        let folder = place::make_in(all, OsStr::new(key), 0o700)?;
        let place = || folder.place(lock::NAME).display().to_string();
        let failed = |errno| Error::os("cannot share", errno).at(place());
        if let Some(lock) = Lock::take(&folder).map_err(failed)? {
            return Ok((folder, lock));
        }
        if cancel.is_cancelled() {
            return Err(Error::cancelled(Verb::Load, place()));
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(failed(Errno::TIMEDOUT)
                .with_why("another process is still loading it")
                .with_remedy("wait longer"));
        }
        std::thread::sleep(LOCK_STEP.min(left));
    }
}
