//! Folders: for the images, which get their name when they are complete, and for what exists only while criu runs.

use dmafile::internal::Verb;
use dmafile::internal::folder::{Folder, random, split};
use dmafile::{Error, Result};
use dmafile_sys::{Errno, errno, place, stat};
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// A new folder, locked by this process. Dropping it removes it.
struct Private {
    parent: Folder,
    name: OsString,
    folder: Folder,
    path: PathBuf,
    is_kept: bool,
}

impl Private {
    /// Creates it, and removes those with the same prefix that interrupted processes have left.
    fn new(what: Verb, parent: Folder, prefix: &OsStr) -> Result<Self> {
        sweep(&parent, prefix);
        let mut name = prefix.to_os_string();
        name.push(format!("{:016x}", random()));
        let path = parent.path_of(&name);
        let failed = |errno| Error::os(what, errno).at(path.display().to_string());
        let folder = parent.make(&name, 0o700).map_err(failed)?;
        let made = Self {
            parent,
            name,
            folder,
            path,
            is_kept: false,
        };
        made.folder.trust_path()?;
        place::try_lock(synced(&made.folder))
            .map_err(|errno| Error::os(what, errno).at(made.path.display().to_string()))?;
        Ok(made)
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        if !self.is_kept && self.parent.has(&self.name, &self.folder) {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

/// Removes this user's folders that no process has locked.
fn sweep(parent: &Folder, prefix: &OsStr) {
    for name in parent.names().unwrap_or_default() {
        if !name
            .as_encoded_bytes()
            .starts_with(prefix.as_encoded_bytes())
        {
            continue;
        }
        let is_left = parent
            .within(&name)
            .is_ok_and(|left| left.trust().is_ok() && place::try_lock(synced(&left)).is_ok());
        if is_left {
            let _ = std::fs::remove_dir_all(parent.path_of(&name));
        }
    }
}

/// A descriptor of a folder that can be locked and synced.
fn synced(folder: &Folder) -> BorrowedFd<'_> {
    folder.listed().unwrap_or_else(|| folder.fd())
}

/// A folder beside the one that it will become. Dropping it removes it.
pub(crate) struct Unfinished {
    folder: Private,
    /// What it will be named.
    name: OsString,
}

impl Unfinished {
    /// Creates the folder, and removes those that were left beside it.
    pub fn beside(what: Verb, to: &Path) -> Result<Self> {
        let failed = |errno: Errno| Error::os(what, errno).at(to.display().to_string());
        let (parent, Some(name)) = split(to) else {
            return Err(failed(Errno::INVAL));
        };
        let parent = Folder::open(parent).map_err(failed)?;
        if parent.look_up(name).map_err(failed)?.is_some() {
            return Err(failed(Errno::EXIST).with_remedy("name a folder that does not exist"));
        }
        let mut prefix = OsString::from(".");
        prefix.push(name);
        prefix.push(".freezing-");
        Ok(Self {
            folder: Private::new(what, parent, &prefix)?,
            name: name.to_os_string(),
        })
    }

    pub fn path(&self) -> &Path {
        &self.folder.path
    }

    /// Waits until all of it is on the disk, and gives it its name.
    pub fn finish(mut self, what: Verb) -> Result<()> {
        let own = &mut self.folder;
        let failed = |errno: Errno| Error::os(what, errno).at(own.path.display().to_string());
        place::sync_all(synced(&own.folder)).map_err(failed)?;
        place::rename_new(own.parent.fd(), &own.name, &self.name).map_err(failed)?;
        own.is_kept = true;
        let failed = |errno: Errno| Error::os(what, errno).at(own.path.display().to_string());
        place::sync(synced(&own.parent)).map_err(failed)
    }
}

/// A private folder for criu's socket, log and script. Dropping it removes it.
pub(crate) struct RunFolder {
    /// As criu can use it.
    path: PathBuf,
    /// The sign for criu's script that this process lives, and has not given up.
    life: Option<UnixStream>,
    _folder: Private,
}

impl RunFolder {
    pub fn new(what: Verb) -> Result<Self> {
        let (life, _) = UnixStream::pair().map_err(|error| Error::os(what, errno(error)))?;
        let mut first = None;
        // The path of a socket must be short.
        for place in [Path::new("/run"), &std::env::temp_dir(), Path::new("/tmp")] {
            let parent = Folder::open(place)
                .map_err(|errno| Error::os(what, errno).at(place.display().to_string()));
            match parent.and_then(|parent| Private::new(what, parent, OsStr::new("dmafile-criu-")))
            {
                Ok(made) => {
                    return Ok(Self {
                        path: place.join(&made.name),
                        life: Some(life),
                        _folder: made,
                    });
                }
                Err(error) => first = first.or(Some(error)),
            }
        }
        Err(first.expect("there are several places"))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn hook(&self) -> PathBuf {
        self.path().join("hook")
    }

    /// Writes the script that criu runs when it has come to `action`. It may go on only if this process says so; if it
    /// ends or gives up before, frozen processes run on, and thawed ones are killed. The sign of its life is a
    /// descriptor, because its number can be used again.
    pub fn write_hook(&self, what: Verb, action: &str) -> Result<()> {
        let failed = |errno: Errno| Error::os(what, errno).at(self.hook().display().to_string());
        let Some(life) = &self.life else {
            return Err(failed(Errno::CANCELED));
        };
        let inode = stat::of(life).map_err(failed)?.number;
        let text = format!(
            "#!/bin/sh\n\
             [ \"$CRTOOLS_SCRIPT_ACTION\" = {action} ] || exit 0\n\
             cd '{}' && : >asked || exit 1\n\
             while [ \"$(readlink /proc/{}/fd/{})\" = 'socket:[{inode}]' ]; do\n\
             \t[ -e yes ] && exit 0\n\
             \tsleep 0.01\n\
             done\n\
             [ -e yes ]\n",
            self.path().display(),
            std::process::id(),
            life.as_raw_fd(),
        );
        let write = || {
            std::fs::write(self.hook(), text)?;
            std::fs::set_permissions(self.hook(), PermissionsExt::from_mode(0o700))
        };
        write().map_err(|error| failed(errno(error)))
    }

    /// True if the script waits for an answer.
    pub fn is_asked(&self) -> bool {
        self.path().join("asked").exists()
    }

    /// Lets criu go on.
    pub fn allow(&self) -> std::io::Result<()> {
        std::fs::write(self.path().join("yes"), b"")
    }

    /// Lets criu fail, unless it has been allowed to go on. This cannot fail: nothing is written.
    pub fn give_up(&mut self) {
        self.life = None;
    }
}
