//! Folders: for the images, which get their name when they are complete, and for what exists only while criu runs.

use dmafile::internal::folder::{Folder, random, split};
use dmafile::{Error, Result};
use dmafile_sys::{Errno, errno, place, stat};
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// A folder beside the one that it will become. Dropping it removes it.
pub(crate) struct Unfinished {
    parent: Folder,
    name: OsString,
    folder: Folder,
    /// What it is named until then.
    now: OsString,
    path: PathBuf,
    done: bool,
}

impl Unfinished {
    /// Creates the folder, and removes those that were left beside it.
    pub fn beside(what: &'static str, to: &Path) -> Result<Self> {
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
        sweep(&parent, &prefix);
        let mut now = prefix;
        now.push(format!("{:016x}", random()));
        let folder = parent.make(&now, 0o700).map_err(failed)?;
        folder.trust_path()?;
        if let Some(listed) = folder.listed() {
            place::try_lock(listed).map_err(failed)?;
        }
        Ok(Self {
            path: parent.path_of(&now),
            parent,
            name: name.to_os_string(),
            folder,
            now,
            done: false,
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits until all of it is on the disk, and gives it its name.
    pub fn finish(mut self, what: &'static str) -> Result<()> {
        let failed = |errno: Errno| Error::os(what, errno).at(self.path.display().to_string());
        let (folder, parent) = (synced(&self.folder), synced(&self.parent));
        place::sync_all(folder).map_err(failed)?;
        place::rename_new(self.parent.fd(), &self.now, &self.name).map_err(failed)?;
        self.done = true;
        place::sync(parent).map_err(failed)
    }
}

/// A descriptor of a folder that can be synced.
fn synced(folder: &Folder) -> BorrowedFd<'_> {
    folder.listed().unwrap_or_else(|| folder.fd())
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.done && self.parent.has(&self.now, &self.folder) {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

/// Removes what an interrupted freeze has left: folders that no process has locked.
fn sweep(parent: &Folder, prefix: &OsStr) {
    for name in parent.names().unwrap_or_default() {
        if !name
            .as_encoded_bytes()
            .starts_with(prefix.as_encoded_bytes())
        {
            continue;
        }
        let left = parent.within(&name);
        let unused =
            left.is_ok_and(|left| left.listed().is_some_and(|fd| place::try_lock(fd).is_ok()));
        if unused {
            let _ = std::fs::remove_dir_all(parent.path_of(&name));
        }
    }
}

/// A private folder for criu's socket, log and script. Dropping it removes it.
pub(crate) struct RunFolder(PathBuf);

impl RunFolder {
    pub fn new(what: &'static str) -> Result<Self> {
        let name = format!("dmafile-criu-{:016x}", random());
        let mut first = None;
        // The path of a socket must be short.
        for place in [Path::new("/run"), &std::env::temp_dir(), Path::new("/tmp")] {
            let path = place.join(&name);
            match std::fs::DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) => {
                    let error = Error::os(what, errno(error)).at(path.display().to_string());
                    first = first.or(Some(error));
                }
            }
        }
        Err(first.expect("there are several places"))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn hook(&self) -> PathBuf {
        self.0.join("hook")
    }

    /// Writes the script that criu runs when it has dumped. The processes may end only if this process says so; if it
    /// ends before, they run on. The sign of its life is a descriptor, because its number can be used again.
    pub fn write_hook(&self, what: &'static str, life: BorrowedFd<'_>) -> Result<()> {
        let failed = |errno: Errno| Error::os(what, errno).at(self.hook().display().to_string());
        let inode = stat::of(life.as_fd()).map_err(failed)?.number;
        let text = format!(
            "#!/bin/sh\n\
             [ \"$CRTOOLS_SCRIPT_ACTION\" = post-dump ] || exit 0\n\
             cd '{}' && : >asked || exit 1\n\
             while [ \"$(readlink /proc/{}/fd/{})\" = 'socket:[{inode}]' ]; do\n\
             \t[ -e yes ] && exit 0\n\
             \t[ -e no ] && exit 1\n\
             \tsleep 0.01\n\
             done\n\
             [ -e yes ]\n",
            self.0.display(),
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
        self.0.join("asked").exists()
    }

    pub fn answer(&self, yes: bool) -> std::io::Result<()> {
        std::fs::write(self.0.join(if yes { "yes" } else { "no" }), b"")
    }
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
