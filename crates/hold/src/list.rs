//! Lists what is held, and releases it.

use super::name;
use super::place;
use super::protocol::{HeldInfo, Op};
use super::take::{Talk, is_barred};
use dmafile::internal::Verb;
use dmafile::{CancelToken, Error, Result};
use dmafile_sys::errno;
use serde::Serialize;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// A holder's description of what it holds.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Holding {
    /// Its name.
    pub name: String,
    /// The path of the socket.
    #[serde(serialize_with = "dmafile::internal::lossy")]
    pub socket: PathBuf,
    /// The holder's process ID; 0 means another PID namespace.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// When it was loaded, in seconds since 1970.
    pub since: u64,
    /// Bytes of all files.
    pub bytes: u64,
    /// True if no process can change any of them.
    pub sealed: bool,
    /// True if any of them has changed on the disk since; None if that is unknown, because a file system does not
    /// answer.
    pub changed: Option<bool>,
    /// The files.
    pub files: Vec<HeldInfo>,
    /// Number of takes by processes that still run, and have not returned it. Children that they forked do not count.
    pub takers: usize,
    /// Number of takes by processes whose end the holder does not see: those in another PID namespace, on Linux before
    /// 6.5, and those for which it has no descriptors left. They do not keep an idle holder from ending.
    pub unknown_takers: usize,
    /// Up to a thousand of them.
    pub some_takers: Vec<Taker>,
}

/// A process that has taken held files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Taker {
    /// The process ID; 0 means another PID namespace.
    pub pid: u32,
    /// Its user when it connected.
    pub uid: u32,
}

/// Lists what is held at one socket, or at all sockets of this user and of root. Without `socket`,
/// sockets that have no holder or that this user may not use are skipped. `cancel` ends the wait for
/// a holder that does not answer; it may take up to 10 seconds.
///
/// # Errors
/// ECANCELED; as [`Take::run`](super::Take::run), if `socket` is given.
pub fn holds(socket: Option<&Path>, cancel: &CancelToken) -> Result<Vec<Holding>> {
    if let Some(socket) = socket {
        return Ok(vec![ask(socket, cancel)?]);
    }
    let mut all = Vec::new();
    for folder in place::folders() {
        let entries = match std::fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => {
                let place = folder.display().to_string();
                let error = Error::os("cannot list the folder", errno(error)).at(place);
                if is_barred(&error) {
                    continue;
                } else {
                    return Err(error);
                }
            }
        };
        for entry in entries.flatten() {
            let is_socket = entry.file_type().is_ok_and(|kind| kind.is_socket());
            let name = entry.file_name();
            let named = name.to_str().is_some_and(|name| name::check(name).is_ok());
            if is_socket && named {
                match ask(&entry.path(), cancel) {
                    Err(error) if cancel.is_cancelled() => return Err(error),
                    answer => all.extend(answer.ok()),
                }
            }
        }
    }
    all.sort_by(|one, other| (&one.name, &one.socket).cmp(&(&other.name, &other.socket)));
    Ok(all)
}

/// Ends a hold. Processes that have taken the memory keep it. `cancel` ends the wait for a holder
/// that does not answer; it may take up to 10 seconds.
///
/// # Errors
/// ECANCELED; EPERM unless this process belongs to the holder's user or to root; otherwise as
/// [`Take::run`](super::Take::run).
pub fn release(name: &str, socket: Option<&Path>, cancel: &CancelToken) -> Result<()> {
    name::check(name)?;
    let places = match socket {
        Some(socket) => vec![socket.to_path_buf()],
        None => {
            let folders = place::folders().into_iter();
            folders.map(|folder| folder.join(name)).collect()
        }
    };
    let mut first = None;
    for at in places {
        match end(&at, name, cancel) {
            Err(error) if cancel.is_cancelled() => return Err(error),
            Err(error) if first.is_none() => first = Some(error),
            Err(_) => {}
            Ok(()) => return Ok(()),
        }
    }
    first.map_or(Ok(()), Err)
}

pub(super) fn end(at: &Path, name: &str, cancel: &CancelToken) -> Result<()> {
    let mut talk = Talk::begin(Verb::Release, at, Instant::now(), cancel)?;
    talk.ask(Op::Release, Some(name), 0).map(drop)
}

fn ask(at: &Path, cancel: &CancelToken) -> Result<Holding> {
    let mut talk = Talk::begin(Verb::List, at, Instant::now(), cancel)?;
    let mut files = Vec::new();
    loop {
        let (answer, _) = talk.ask(Op::List, None, files.len())?;
        let none = answer.files.is_empty();
        files.extend(answer.files);
        if files.len() >= answer.total {
            let takers = answer.some_takers.into_iter();
            return Ok(Holding {
                socket: at.to_path_buf(),
                pid: talk.who.pid,
                uid: talk.who.uid,
                name: answer.name,
                since: answer.since,
                bytes: files
                    .iter()
                    .map(|file| file.bytes)
                    .fold(0, u64::saturating_add),
                sealed: files.iter().all(|file| file.sealed),
                changed: any_changed(&files),
                takers: answer.takers,
                unknown_takers: answer.unknown_takers,
                some_takers: takers.map(|(pid, uid)| Taker { pid, uid }).collect(),
                files,
            });
        }
        if none {
            return Err(talk.unsound("it has fewer files than it announces"));
        }
    }
}

fn any_changed(files: &[HeldInfo]) -> Option<bool> {
    let all = || files.iter().map(|file| file.changed);
    if all().any(|changed| changed == Some(true)) {
        Some(true)
    } else {
        all().all(|changed| changed.is_some()).then_some(false)
    }
}
