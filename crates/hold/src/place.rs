//! Where sockets are, which users could have put them there, and how a socket is placed at its path.

use dmafile::internal::{Verb, folder, folder::Folder, folder::split};
use dmafile::{Error, Result};
use dmafile_sys::place::{self, Named};
use dmafile_sys::{Errno, errno, sandbox, socket};
use rustix::fs::FileType;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Where root's sockets are.
const OF_ROOT: &str = "/run/dmafile";

/// Maximum number of connections that wait to be accepted.
const WAITING: i32 = 1024;

pub(super) use folder::user;

/// Where the folders of users without XDG_RUNTIME_DIR are, as in containers: in the first of these that can be used.
const OF_ALL: [&str; 2] = ["/dev/shm", "/tmp"];

/// The folder for this user's sockets, created if necessary: `/run/dmafile` for root, which others may
/// enter, and for other users `$XDG_RUNTIME_DIR/dmafile`, or else `/dev/shm/dmafile-UID`.
pub(super) fn own_folder() -> Result<Folder> {
    if user() == 0 {
        return make(Path::new(OF_ROOT), 0o755);
    }
    if let Some(path) = of_session() {
        open(split(&path).0)?.trust()?;
        return make(&path, 0o700);
    }
    let mut first = None;
    for place in OF_ALL {
        match among_all(place, true) {
            Ok(folder) => return Ok(folder),
            Err(error) => first = first.or(Some(error)),
        }
    }
    let error = first.expect("there is a place to look at");
    Err(error.with_remedy("set XDG_RUNTIME_DIR to a folder that only you can write to"))
}

/// This user's folder in one where all users may create some; `create` if there is none yet.
fn among_all(place: &str, create: bool) -> Result<Folder> {
    let name = OsString::from(format!("dmafile-{}", user()));
    let all = open(Path::new(place))?;
    let cannot = |errno| cannot_open(errno, &all.place(&name));
    // Neither follows a link.
    let own = if create {
        all.make_or_open(&name, 0o700)
    } else {
        all.within(&name)
    };
    let own = own.map_err(cannot)?;
    own.trust()?;
    own.trust_path()?;
    if own.look().map_err(cannot)?.owner.0 == user() {
        Ok(own)
    } else {
        Err(cannot(Errno::PERM).with_why("it belongs to another user"))
    }
}

/// Opens a folder that only this user and root can write to, and creates it if necessary.
pub(super) fn make(path: &Path, mode: u32) -> Result<Folder> {
    let (parent, name) = split(path);
    let folder = match (Folder::open(path), name) {
        (Err(Errno::NOENT), Some(name)) => open(parent)?
            .make_or_open(name, mode)
            .map_err(|errno| cannot_make(errno).at(path.display().to_string()))?,
        (opened, _) => opened.map_err(|errno| cannot_open(errno, path))?,
    };
    folder.trust()?;
    Ok(folder)
}

/// As [`make`], in a folder that is held open.
pub(super) fn make_in(folder: &Folder, name: &OsStr, mode: u32) -> Result<Folder> {
    let made = folder.make_or_open(name, mode);
    let made =
        made.map_err(|errno| cannot_make(errno).at(folder.place(name).display().to_string()))?;
    made.trust()?;
    Ok(made)
}

fn cannot_make(errno: Errno) -> Error {
    Error::os("cannot create the folder", errno)
}

fn cannot_open(errno: Errno, path: &Path) -> Error {
    Error::os("cannot use the folder", errno).at(path.display().to_string())
}

fn open(path: &Path) -> Result<Folder> {
    Folder::open(path).map_err(|errno| cannot_open(errno, path))
}

/// The folder of this user's session. The variable often names one that a container does not have.
fn of_session() -> Option<PathBuf> {
    let run = PathBuf::from(std::env::var_os("XDG_RUNTIME_DIR")?);
    let exists = run.is_absolute() && Folder::open(&run).err() != Some(Errno::NOENT);
    exists.then(|| run.join("dmafile"))
}

/// Where to look for sockets: first those of this user, then those of root.
pub(super) fn folders() -> Vec<PathBuf> {
    let mut all = Vec::new();
    if user() != 0 {
        all.extend(of_session());
        let others = OF_ALL
            .iter()
            .filter_map(|place| among_all(place, false).ok());
        all.extend(others.map(|folder| folder.path().to_path_buf()));
    }
    all.push(OF_ROOT.into());
    all
}

/// The trusted folder of a socket's path, and the socket's name in it.
fn folder_of(path: &Path) -> Result<(Folder, OsString)> {
    let (folder, name) = split(path);
    let Some(name) = name else {
        return Err(failed(path)(Errno::ISDIR));
    };
    let folder = open(folder)?;
    folder.trust()?;
    Ok((folder, name.to_os_string()))
}

/// Checks whether a socket can be created there, before a long load.
pub(super) fn check(path: &Path, replace: bool) -> Result<()> {
    let (folder, name) = folder_of(path)?;
    if !replace && answers(&folder, &name)? {
        Err(in_use(path))
    } else {
        Ok(())
    }
}

fn in_use(path: &Path) -> Error {
    failed(path)(Errno::ADDRINUSE)
        .with_why("another holder serves there")
        .with_remedy("release it, replace it, or use another name")
}

fn failed(path: &Path) -> impl Fn(Errno) -> Error {
    let place = path.display().to_string();
    move |errno| {
        let error = Error::os("cannot create the socket", errno).at(&place);
        error.of_calls(&[
            sandbox::SOCKET,
            sandbox::FCHMOD,
            sandbox::BIND,
            sandbox::LISTEN,
            sandbox::CONNECT,
        ])
    }
}

/// Connects to a socket, after checking who could have put it there: its owner and that of its folder must be the
/// same user, or root, or this user. A folder that is looked in by default must not belong to another user.
pub(super) fn connect(what: Verb, path: &Path) -> Result<OwnedFd> {
    let failed = |errno| cannot_connect(what, errno, path);
    let real = path.canonicalize().map_err(|error| failed(errno(error)))?;
    let (Some(name), is_default) = (
        real.file_name(),
        folders().iter().any(|folder| folder == split(path).0),
    ) else {
        return Err(failed(Errno::NOTSOCK));
    };
    let folder = Folder::open(split(&real).0).map_err(failed)?;
    let found = folder.look_up(name).map_err(failed)?;
    let found = found.ok_or_else(|| failed(Errno::NOENT))?;
    if found.kind != FileType::Socket {
        return Err(failed(Errno::NOTSOCK));
    }
    let owner = found.owner.0;
    folder.trust_with((!is_default).then_some(owner))?;
    let of_folder = folder.look().map_err(failed)?.owner.0;
    if ![0, user(), of_folder].contains(&owner) {
        let why = format!("it belongs to user {owner}, and its folder to user {of_folder}");
        return Err(failed(Errno::PERM)
            .with_why(why)
            .with_remedy("take it from a folder in which only its owner can put sockets"));
    }
    socket::connect(&folder.path_of(name)).map_err(failed)
}

pub(super) fn cannot_connect(what: Verb, errno: Errno, path: &Path) -> Error {
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
    .of_calls(&[sandbox::SOCKET, sandbox::CONNECT, sandbox::READLINK])
}

/// A listening socket; its file is removed when this is dropped.
pub(super) struct Bound {
    pub path: PathBuf,
    listener: OwnedFd,
    /// None for an inherited socket.
    file: Option<SocketFile>,
}

/// The file of a socket.
struct SocketFile {
    folder: Folder,
    /// Its name at the moment.
    name: OsString,
    identity: Named,
    /// The name that another holder's socket has got, until that holder may be ended.
    replaced: Option<OsString>,
}

/// Who may connect.
#[derive(Clone, Copy, Debug)]
pub(super) struct SocketAccess {
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
            file: None,
        })
    }

    /// Creates a socket next to its path, with its permissions; connections wait until it is served.
    pub(super) fn beside(path: &Path, access: SocketAccess) -> Result<Self> {
        let (folder, name) = folder_of(path)?;
        Self::in_folder(folder, &name, access)
    }

    /// As [`Bound::beside`], in a trusted folder.
    pub(super) fn in_folder(folder: Folder, name: &OsStr, access: SocketAccess) -> Result<Self> {
        let path = folder.place(name);
        let failed = failed(&path);
        let own = beside(name);
        // Nobody may connect before the permissions are set.
        let listener = socket::bind(&folder.path_of(&own), 0).map_err(&failed)?;
        let identity = place::permit_socket(folder.fd(), &own, access.group, access.mode);
        let identity = identity.inspect_err(|_| {
            let _ = folder.remove(&own);
        });
        let bound = Self {
            listener,
            file: Some(SocketFile {
                identity: identity.map_err(&failed)?,
                folder,
                name: own,
                replaced: None,
            }),
            path: path.clone(),
        };
        socket::listen(bound.listener.as_fd(), WAITING).map_err(failed)?;
        Ok(bound)
    }

    /// Moves the socket atomically to its path. A socket there is replaced if no process listens on it. If one
    /// does, the result is EADDRINUSE, unless `replace` is set: then both change places, and back if this is dropped
    /// before [`Bound::stay`]. An inherited socket stays where it is.
    pub(super) fn put(&mut self, replace: bool) -> Result<()> {
        let failed = failed(&self.path);
        let Some(file) = &mut self.file else {
            return Ok(());
        };
        let name = self.path.file_name().expect("it was made with one");
        let folder = file.folder.fd();
        match place::rename_new(folder, &file.name, name) {
            Ok(()) => {
                file.name = name.to_os_string();
                return Ok(());
            }
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(failed(errno)),
        }
        let there = file.folder.look_up(name).map_err(&failed)?;
        if there.is_some_and(|there| there.kind != FileType::Socket) {
            return Err(failed(Errno::EXIST).with_remedy("remove it, or name another socket"));
        }
        if !replace && answers(&file.folder, name)? {
            return Err(in_use(&self.path));
        }
        // An exchange, so that a socket that another process has put there in between is not lost.
        match place::exchange(folder, &file.name, name) {
            Err(Errno::NOENT) => {
                // The other holder has just ended.
                place::rename_new(folder, &file.name, name).map_err(&failed)?;
                file.name = name.to_os_string();
                return Ok(());
            }
            exchanged => exchanged.map_err(&failed)?,
        }
        let other = std::mem::replace(&mut file.name, name.to_os_string());
        if answers(&file.folder, &other)? {
            file.replaced = Some(other);
        } else {
            let _ = file.folder.remove(&other);
        }
        if file.replaced.is_some() && !replace {
            Err(in_use(&self.path))
        } else {
            Ok(())
        }
    }

    /// Stays at its path. Returns where the holder that it has replaced can still be reached.
    pub(super) fn stay(&mut self) -> Result<Option<Replaced>> {
        let Some(file) = &mut self.file else {
            return Ok(None);
        };
        let Some(name) = file.replaced.take() else {
            return Ok(None);
        };
        match file.folder.dup() {
            Ok(folder) => Ok(Some(Replaced { folder, name })),
            Err(errno) => {
                file.replaced = Some(name);
                Err(failed(&self.path)(errno))
            }
        }
    }

    pub(super) fn listener(&self) -> &OwnedFd {
        &self.listener
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // A third holder may have replaced this one.
        let is_own = |name: &OsStr| {
            let there = self.folder.look_up(name).ok().flatten();
            there.is_some_and(|there| there.is(&self.identity))
        };
        if !is_own(&self.name) {
            return;
        }
        if let Some(other) = &self.replaced
            && place::exchange(self.folder.fd(), other, &self.name).is_ok()
        {
            self.name.clone_from(other);
        }
        let _ = self.folder.remove(&self.name);
    }
}

/// The socket of a holder that another one has replaced; removed when this is dropped.
pub(super) struct Replaced {
    folder: Folder,
    name: OsString,
}

impl Replaced {
    pub(super) fn path(&self) -> PathBuf {
        self.folder.path_of(&self.name)
    }
}

impl Drop for Replaced {
    fn drop(&mut self) {
        let _ = self.folder.remove(&self.name);
    }
}

/// True if a process listens on a socket.
fn answers(folder: &Folder, name: &OsStr) -> Result<bool> {
    match socket::connect(&folder.path_of(name)) {
        Err(Errno::NOENT | Errno::CONNREFUSED) => Ok(false),
        Err(errno) if sandbox::SOCKET.refuses(errno) || sandbox::CONNECT.refuses(errno) => {
            Err(failed(&folder.place(name))(errno))
        }
        _ => Ok(true),
    }
}

/// A temporary name next to that of a socket.
fn beside(name: &OsStr) -> OsString {
    // Only this user can write to the folder, but two of its processes may do so at once.
    let random = folder::random();
    let mut own = OsString::from(".");
    own.push(name);
    own.push(format!(".{random:016x}"));
    own
}
