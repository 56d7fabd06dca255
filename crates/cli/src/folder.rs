//! A private folder that exists while COMMAND runs, and what removes it.
//!
//! COMMAND inherits a lock on the folder, so the folder is in use until the lock is free: until COMMAND and all
//! processes that inherited it have ended, however they ended. A process of its own waits for that. It may not exist
//! (COMMAND is the first process of a container), or may be killed; the next folder in the same place removes what was
//! left.

use crate::{Failure, Launcher};
use dmafile::internal::folder::{Folder, LINKS_PREFIX, random};
use dmafile::internal::{one_line, sandbox};
use rustix::fs::{AtFlags, FileType, FlockOperation, flock, fstat, readlink, statat, symlinkat};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::process::{child_subreaper, getpid, setsid};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

/// The word with which the command starts itself to remove the folder. Not a subcommand, so that help and
/// completions do not show it.
pub(crate) const WORD: &str = "remove-links";
/// Follows the folder in the arguments of the process that stays.
const STAYS: &str = "when-it-has-ended";
/// This process's standard input.
const STDIN: &str = "/proc/self/fd/0";

/// A folder that only this user may enter, and whose path no other user can make lead elsewhere. Dropping it
/// removes it.
pub(crate) struct Private {
    /// Where it is.
    place: Folder,
    name: OsString,
    /// The folder itself.
    top: Folder,
    /// The folder in it, if there is one.
    inner: Option<Folder>,
    /// The path of the last of these two.
    path: PathBuf,
}

impl Private {
    /// Creates the folder. `inner` is the name of a folder in it, for the links.
    pub(crate) fn new(launcher: &Launcher, inner: Option<&OsStr>) -> Result<Self, Failure> {
        let boot = boot();
        let mut first = None;
        // The reason is not one that does not exist, if there are others.
        let (there, missing): (Vec<_>, Vec<_>) = places().partition(|place| place.is_dir());
        for place in there.into_iter().chain(missing) {
            match Self::within(&place, &boot, inner) {
                Ok(made) => {
                    sweep(&made.place, &boot);
                    made.watch(launcher);
                    return Ok(made);
                }
                Err(failure) => first = first.or(Some(failure)),
            }
        }
        Err(first.expect("there is at least one place"))
    }

    fn within(place: &Path, boot: &str, inner: Option<&OsStr>) -> Result<Self, Failure> {
        /// Another process takes a folder for one that was left only between two system calls.
        const TRIES: u32 = 16;
        let failed = |errno: Errno| cannot(place, &errno.into());
        let real = place
            .canonicalize()
            .map_err(|error| cannot(place, &error))?;
        let place = Folder::open(&real).map_err(failed)?;
        let mut made = Err(Errno::AGAIN);
        for _ in 0..TRIES {
            let random = random();
            let name = OsString::from(format!("{}{random:016x}", prefix(boot)));
            made = locked(&place, &name).map(|top| (name, top));
            if !matches!(made, Err(Errno::AGAIN | Errno::EXIST | Errno::NOENT)) {
                break;
            }
        }
        let (name, top) = made.map_err(failed)?;
        let mut made = Self {
            path: real.join(&name),
            place,
            name,
            top,
            inner: None,
        };
        // After it was made, because in a sticky folder it matters whose it is.
        made.top.trust_path()?;
        // The names that were checked are those in the path.
        let here = readlink(link_of(made.top.fd()), Vec::new()).map_err(failed)?;
        if here.as_bytes() != made.path.as_os_str().as_encoded_bytes() {
            return Err(failed(Errno::NOENT));
        }
        if let Some(name) = inner {
            made.inner = Some(made.top.make(name, 0o700).map_err(failed)?);
            made.path.push(name);
        }
        Ok(made)
    }

    /// The path of the folder for links.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes a link in it.
    pub(crate) fn link(&self, target: &Path, name: &OsStr) -> io::Result<()> {
        let folder = self.inner.as_ref().unwrap_or(&self.top);
        Ok(symlinkat(target, folder.fd(), name)?)
    }

    /// Lets COMMAND inherit the lock.
    pub(crate) fn inherit(&self) -> io::Result<()> {
        Ok(fcntl_setfd(lock(&self.top)?, FdFlags::empty())?)
    }

    /// Starts the process that removes the folder. It must not be a child of COMMAND, which may wait for all of its
    /// children: so the child starts another process, and ends. If that is not possible, the next run removes the
    /// folder.
    fn watch(&self, launcher: &Launcher) {
        let adopts = getpid().is_init() || !matches!(child_subreaper(), Ok(None));
        if adopts {
            return;
        }
        let Ok(folder) = self.top.fd().try_clone_to_owned() else {
            return;
        };
        let child = launcher
            .command()
            .arg(WORD)
            .arg(self.place.place(&self.name))
            .stdin(folder)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // A signal to the process group of COMMAND may come before the other process is ready for it.
            .process_group(0)
            .spawn();
        if let Ok(mut child) = child {
            // ECHILD if SIGCHLD is ignored: even then it waits for the end.
            let _ = child.wait();
        }
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        remove(&self.place, &self.name, &self.top);
    }
}

/// Where the folder may be, in order of preference.
fn places() -> impl Iterator<Item = PathBuf> {
    let named = ["XDG_RUNTIME_DIR", "TMPDIR"]
        .into_iter()
        .filter_map(std::env::var_os);
    let all = named
        .chain(["/tmp".into(), "/dev/shm".into()])
        .map(PathBuf::from);
    all.filter(|place| place.is_absolute())
}

/// A part of the names: locks of another machine on the same file system are not seen here. Empty if it is not known.
fn boot() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.chars().take(8).collect()
}

fn prefix(boot: &str) -> String {
    format!("{LINKS_PREFIX}{boot}-")
}

/// Creates a folder and locks it. EAGAIN, ENOENT if another process has taken it for one that was left.
fn locked(place: &Folder, name: &OsStr) -> Result<Folder, Errno> {
    let made = place.make(name, 0o700)?;
    let locks = || {
        flock(lock(&made)?, FlockOperation::NonBlockingLockExclusive)?;
        is_private(&made)
    };
    match locks() {
        Ok(true) if place.has(name, &made) => Ok(made),
        Ok(_) => Err(Errno::NOENT),
        Err(errno) => {
            // The process that has the lock removes it.
            if errno != Errno::AGAIN {
                remove(place, name, &made);
            }
            Err(errno)
        }
    }
}

/// The descriptor that has the lock.
fn lock(folder: &Folder) -> Result<BorrowedFd<'_>, Errno> {
    folder.listed().ok_or(Errno::ACCESS)
}

fn is_private(folder: &Folder) -> Result<bool, Errno> {
    let stat = fstat(folder.fd())?;
    Ok(stat.st_uid == dmafile::internal::folder::user() && stat.st_mode & 0o777 == 0o700)
}

fn cannot(place: &Path, error: &io::Error) -> Failure {
    let calls = [sandbox::READLINK, sandbox::READLINKAT, sandbox::FLOCK];
    Failure::of_calls(
        "cannot create a folder for COMMAND's path",
        &one_line(&place.to_string_lossy()),
        error,
        "set TMPDIR to a folder that only this user may write to",
        &calls,
    )
}

/// Removes folders that are not used any more.
fn sweep(place: &Folder, boot: &str) {
    let names = place.names().unwrap_or_default();
    let prefix = prefix(boot);
    for name in names {
        let is_named = name.as_encoded_bytes().starts_with(prefix.as_bytes());
        if boot.is_empty() || !is_named {
            continue;
        }
        let Ok(left) = place.within(&name) else {
            continue;
        };
        let unused = || flock(lock(&left)?, FlockOperation::NonBlockingLockExclusive);
        if is_private(&left) == Ok(true) && unused().is_ok() {
            remove(place, &name, &left);
        }
    }
}

/// Removes the links in a folder, and in folders in it; then the folder, if it is empty. What COMMAND has put there
/// stays.
fn remove(place: &Folder, name: &OsStr, folder: &Folder) {
    const DEPTH: u32 = 1;
    clear(folder, DEPTH);
    if place.has(name, folder) {
        let _ = place.remove(name);
    }
}

fn clear(folder: &Folder, depth: u32) {
    for name in folder.names().unwrap_or_default() {
        let stat = statat(folder.fd(), &name, AtFlags::SYMLINK_NOFOLLOW);
        match stat.map(|stat| FileType::from_raw_mode(stat.st_mode)) {
            Ok(FileType::Symlink) => {
                let _ = folder.remove(&name);
            }
            Ok(FileType::Directory) if depth > 0 => {
                if let Ok(inner) = folder.within(&name) {
                    clear(&inner, depth - 1);
                    let _ = folder.remove(&name);
                }
            }
            _ => {}
        }
    }
}

/// `dmafile remove-links FOLDER`, which only [`Private::watch`] calls: stdin is the folder.
pub(crate) fn run(launcher: &Launcher, args: &[OsString]) -> Result<u8, Failure> {
    match args {
        [folder] => {
            let child = launcher
                .command()
                .arg(WORD)
                .arg(folder)
                .arg(STAYS)
                .current_dir("/")
                .spawn();
            child
                .map(|_| 0)
                .map_err(|error| Failure::os("cannot start", &launcher.to_string(), &error, ""))
        }
        [folder, stays] if stays == STAYS => {
            let name = Path::new(folder).file_name().unwrap_or_default();
            stay(name).map_err(|error| {
                Failure::os("cannot remove", &folder.to_string_lossy(), &error, "")
            })?;
            Ok(0)
        }
        _ => Err(Failure::usage("remove-links is an internal command")),
    }
}

/// Waits until nothing uses the folder, and removes it.
fn stay(name: &OsStr) -> io::Result<()> {
    // A signal that ends COMMAND may be sent to its whole terminal or service; this process must end after it.
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::default())?;
    }
    // Fails if this is already a session leader.
    let _ = setsid();
    // Opened again, because a lock belongs to an open descriptor: this one must not be COMMAND's.
    let folder = Folder::open(Path::new(STDIN))?;
    let place = folder.within("..".as_ref())?;
    while let Err(errno) = flock(lock(&folder)?, FlockOperation::LockExclusive) {
        if errno != Errno::INTR {
            return Err(errno.into());
        }
    }
    remove(&place, name, &folder);
    Ok(())
}

fn link_of(fd: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}
