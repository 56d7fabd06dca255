//! Where sockets are, which users could have put them there, and how a socket is placed at its path.

use crate::error::{Error, Result};
use crate::sys::place::{exchange, look_up, rename_new};
use crate::sys::{Errno, errno, host, sandbox, socket};
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Where root's sockets are.
const OF_ROOT: &str = "/run/dmafile";

/// Maximum number of connections that wait to be accepted.
const WAITING: i32 = 1024;

pub(super) fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The folder for this user's sockets, created if necessary: `/run/dmafile` for root, which others may
/// enter, and `$XDG_RUNTIME_DIR/dmafile` for other users.
pub(super) fn own_folder() -> Result<PathBuf> {
    let (folder, mode) = match user() {
        0 => (PathBuf::from(OF_ROOT), 0o755),
        _ => (of_user()?, 0o700),
    };
    make(&folder, mode)?;
    Ok(folder)
}

/// Creates a folder that only this user can write to.
pub(super) fn make(folder: &Path, mode: u32) -> Result<()> {
    let made = fs::DirBuilder::new().mode(mode).create(folder);
    if let Err(error) = made.as_ref()
        && error.kind() != std::io::ErrorKind::AlreadyExists
    {
        return Err(
            Error::os("cannot make the folder", errno(error)).at(folder.display().to_string())
        );
    }
    trust(folder, user())
}

fn of_user() -> Result<PathBuf> {
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(run) if Path::new(&run).is_absolute() => Ok(Path::new(&run).join("dmafile")),
        _ => Err(
            Error::new("cannot find the socket", "XDG_RUNTIME_DIR is not set")
                .with_errno(Errno::NOENT)
                .with_remedy("name a socket"),
        ),
    }
}

/// Where to look for sockets: first those of this user, then those of root.
pub(super) fn folders() -> Vec<PathBuf> {
    let own = of_user().ok().filter(|_| user() != 0);
    own.into_iter().chain([OF_ROOT.into()]).collect()
}

/// Refuses a folder that users other than root, this user and `owner` can write to.
fn trust(folder: &Path, owner: u32) -> Result<()> {
    let place = || folder.display().to_string();
    let failed =
        |error: std::io::Error| Error::os("cannot use the folder", errno(error)).at(place());
    let found = fs::metadata(folder).map_err(failed)?;
    let refuse = |why: &str, code| {
        Error::new("cannot use the folder", why)
            .with_errno(code)
            .at(place())
    };
    if !found.is_dir() {
        return Err(refuse("it is not a folder", Errno::NOTDIR));
    }
    if ![0, user(), owner].contains(&found.uid()) {
        let why = format!("it belongs to another user ({})", found.uid());
        return Err(refuse(&why, Errno::PERM));
    }
    if found.mode() & 0o002 != 0 {
        return Err(refuse("every user can put a socket there", Errno::PERM)
            .with_remedy("use a folder that others can't write to"));
    }
    Ok(())
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Checks whether a socket can be created there, before a long load.
pub(super) fn check(path: &Path, replace: bool) -> Result<()> {
    trust(folder_of(path), user())?;
    match !replace && answers(path)? {
        true => Err(in_use(path)),
        false => Ok(()),
    }
}

fn cannot_make(errno: Errno, path: &Path) -> Error {
    let error = Error::os("cannot make the socket", errno).at(path.display().to_string());
    error.of_calls(&[
        sandbox::SOCKET,
        sandbox::BIND,
        sandbox::LISTEN,
        sandbox::CONNECT,
        sandbox::RENAMEAT2,
    ])
}

fn in_use(path: &Path) -> Error {
    cannot_make(Errno::ADDRINUSE, path)
        .with_why("another holder serves there")
        .with_remedy("release it, replace it, or use another name")
}

/// Connects to a socket, after checking its folder.
pub(super) fn connect(what: &str, path: &Path) -> Result<OwnedFd> {
    let failed = |errno| cannot_connect(what, errno, path);
    let found = fs::metadata(path).map_err(|error| failed(errno(error)))?;
    if FileType::from_raw_mode(found.mode()) != FileType::Socket {
        return Err(failed(Errno::NOTSOCK));
    }
    trust(folder_of(path), found.uid())?;
    socket::connect(path).map_err(failed)
}

pub(super) fn cannot_connect(what: &str, errno: Errno, path: &Path) -> Error {
    let error = Error::os(what, errno).at(path.display().to_string());
    match errno {
        Errno::NOENT => error
            .with_why("nothing is held there")
            .with_remedy("start dmafile hold, or wait for it"),
        Errno::CONNREFUSED => error
            .with_why("its holder has ended")
            .with_remedy("start dmafile hold again"),
        Errno::ACCESS => error
            .with_why("this user may not use the socket")
            .with_remedy("ask its owner to change the mode or group of the socket"),
        Errno::PROTOTYPE | Errno::NOTSOCK => error
            .with_why("it is not the socket of a holder")
            .with_remedy("check the path"),
        _ => error,
    }
    .of_calls(&[sandbox::SOCKET, sandbox::CONNECT])
}

/// A listening socket; its file is removed when this is dropped.
pub(super) struct Bound {
    pub path: PathBuf,
    listener: OwnedFd,
    /// The inode of its file; None for an inherited socket.
    inode: Option<u64>,
}

/// Who may connect.
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    pub mode: u32,
    pub group: Option<u32>,
}

impl Bound {
    /// An inherited socket. It becomes non-blocking, in all processes that have it.
    pub(super) fn inherited(listener: OwnedFd) -> Result<Self> {
        rustix::io::ioctl_fionbio(&listener, true)
            .map_err(|errno| Error::os("cannot use an inherited descriptor", errno))?;
        let name = rustix::net::getsockname(&listener).ok();
        let name = name.and_then(|name| rustix::net::SocketAddrUnix::try_from(name).ok());
        let path = name.and_then(|name| Some(name.path()?.to_string_lossy().into_owned()));
        Ok(Self {
            path: path.unwrap_or_default().into(),
            listener,
            inode: None,
        })
    }

    /// Creates a socket with its permissions, and renames it atomically to its path. An existing socket is
    /// replaced if no process listens on it. If one does, the result is EADDRINUSE, unless `replace` is
    /// set: then the path at which that process can still be reached is returned as well.
    pub(super) fn new(
        path: &Path,
        access: Access,
        replace: bool,
    ) -> Result<(Self, Option<Beside>)> {
        let failed = |errno| cannot_make(errno, path);
        let folder = folder_of(path);
        trust(folder, user())?;
        let Some(name) = path.file_name() else {
            return Err(failed(Errno::ISDIR));
        };
        let (folder_fd, _) = crate::sys::place::folder(folder).map_err(failed)?;
        let beside = Beside::new(folder, name);
        let listener = socket::bind(&beside.0).map_err(failed)?;
        let own = beside.0.file_name().expect("it was made with one");
        let mode = Mode::from_raw_mode(access.mode);
        if let Some(group) = access.group {
            let group = Some(Gid::from_raw(group));
            rustix::fs::chownat(&folder_fd, own, None, group, AtFlags::empty()).map_err(failed)?;
        }
        rustix::fs::chmodat(&folder_fd, own, mode, AtFlags::empty()).map_err(failed)?;
        socket::listen(listener.as_fd(), WAITING).map_err(failed)?;
        let inode = look_up(folder_fd.as_fd(), own)
            .map_err(failed)?
            .map(|own| own.inode);
        let bound = |path: &Path, listener| Self {
            path: path.to_path_buf(),
            listener,
            inode,
        };
        match rename_new(folder_fd.as_fd(), own, name) {
            Ok(()) => return Ok((bound(path, listener), None)),
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(failed(errno)),
        }
        let there = look_up(folder_fd.as_fd(), name).map_err(failed)?;
        if there.is_some_and(|there| there.kind != FileType::Socket) {
            return Err(failed(Errno::EXIST).with_remedy("remove it, or name another socket"));
        }
        if !replace && answers(path)? {
            return Err(in_use(path));
        }
        // An exchange, so that a socket that another process has put there in between is not lost.
        let swap = || exchange(folder_fd.as_fd(), own, name);
        swap().map_err(failed)?;
        let alive = answers(&beside.0)?;
        if alive && !replace {
            let _ = swap();
            return Err(in_use(path));
        }
        Ok((bound(path, listener), alive.then_some(beside)))
    }

    pub(super) fn listener(&self) -> &OwnedFd {
        &self.listener
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        // Another holder may have replaced it.
        let stat = || {
            let own = look_up(CWD, self.path.as_os_str()).ok()??;
            Some(own.inode)
        };
        if self.inode.is_some() && stat() == self.inode {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Whether a process listens on it. An error if that cannot be found out in a sandbox.
fn answers(path: &Path) -> Result<bool> {
    match socket::connect(path) {
        Err(Errno::NOENT | Errno::CONNREFUSED) => Ok(false),
        Err(errno) if sandbox::SOCKET.refuses(errno) || sandbox::CONNECT.refuses(errno) => {
            Err(cannot_make(errno, path))
        }
        _ => Ok(true),
    }
}

/// A temporary name next to that of a socket; removed when this is dropped.
pub(super) struct Beside(pub PathBuf);

impl Beside {
    fn new(folder: &Path, name: &OsStr) -> Self {
        // Only this user can write to the folder, but two of its processes may do so at once.
        let random = u64::from_ne_bytes(host::random());
        let mut own = OsString::from(".");
        own.push(name);
        own.push(format!(".{random:016x}"));
        Self(folder.join(own))
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}
