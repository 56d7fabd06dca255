//! The folder of a snapshot: its manifest, its files, and the lock on it.

use super::manifest::{self, Manifest, SourceEntry};
use dmafile::internal::{Source, cannot_make, folder};
use dmafile::{Error, Result, Save};
use dmafile_sys::{Errno, file, place, sandbox};
use rustix::fs::FileType;
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

/// The file that a save locks.
const LOCK: &str = ".dmafile-snapshot.lock";

pub(super) struct SnapshotFolder(folder::Folder);

/// Keeps other savers out while it exists.
pub(super) struct SaverLock<'a> {
    folder: &'a SnapshotFolder,
    file: OwnedFd,
}

impl Drop for SaverLock<'_> {
    fn drop(&mut self) {
        // While it is locked, nobody else removes it.
        if self.folder.has_lock(&self.file).unwrap_or(false) {
            let _ = place::unlink(self.folder.0.fd(), OsStr::new(LOCK));
        }
        place::unlock(self.file.as_fd());
    }
}

impl SnapshotFolder {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let folder = folder::Folder::open(path).map_err(|errno| {
            Error::os("cannot open the folder", errno).at(path.display().to_string())
        })?;
        Ok(Self(folder))
    }

    /// A save of a file in it.
    pub(super) fn save<'m>(&self, save: Save<'m>, name: &str) -> Result<Save<'m>> {
        let folder = self.0.dup().map_err(|errno| {
            Error::os("cannot open the folder", errno).at(self.0.path().display().to_string())
        })?;
        Ok(save.within(folder, name))
    }

    /// True if its path still leads to it.
    pub(super) fn is_in_place(&self) -> bool {
        let now = folder::Folder::open(self.0.path()).and_then(|now| now.look());
        matches!((now, self.0.look()), (Ok(now), Ok(own)) if now.is(&own))
    }

    /// Locks a file in it (flock(2)), which only those can open who may write to the folder: a lock of the folder itself
    /// is open to all who may read it.
    ///
    /// # Errors
    /// EBUSY while another save has it.
    pub(super) fn lock(&self) -> Result<SaverLock<'_>> {
        let failed = |errno| {
            Error::os("cannot save a snapshot", errno).at(self.0.path().display().to_string())
        };
        if self.0.listed().is_none() {
            let remedy = "ask for permission to list the folder";
            return Err(failed(Errno::ACCESS).with_remedy(remedy));
        }
        loop {
            let file = self.open_lock()?;
            let marked = place::try_lock(file.as_fd());
            if marked == Err(Errno::AGAIN) {
                return Err(failed(Errno::BUSY)
                    .with_why("another snapshot is being saved there")
                    .with_remedy("wait until that has ended, or save to another folder"));
            }
            let lock = SaverLock { folder: self, file };
            marked.map_err(|errno| {
                failed(errno)
                    .with_why("its file system cannot lock the folder (flock(2))")
                    .with_remedy("save to another file system")
                    .of_calls(&[sandbox::FLOCK])
            })?;
            // The save that had it may have ended, and removed it, in between.
            if self.has_lock(&lock.file).map_err(failed)? {
                return Ok(lock);
            }
        }
    }

    /// True if this file is the one to lock.
    fn has_lock(&self, file: &OwnedFd) -> Result<bool, Errno> {
        let there = self.0.look_up(OsStr::new(LOCK))?;
        let own = place::look_at(file.as_fd())?;
        Ok(there.is_some_and(|there| there.is(&own)))
    }

    /// Creates the file to lock, or opens what another save has created.
    fn open_lock(&self) -> Result<OwnedFd> {
        let (fd, name) = (self.0.fd(), OsStr::new(LOCK));
        let failed = |errno| {
            Error::os("cannot lock the folder", errno).at(self.place(LOCK).display().to_string())
        };
        let remedy = "remove it if no snapshot is being saved there";
        let refuse = |errno, why: &str| Err(failed(errno).with_why(why).with_remedy(remedy));
        let folder = self.0.look().map_err(failed)?;
        // To lock a file, all who may write to the folder must be able to open it; nobody else.
        let writers = folder.mode & 0o022;
        let mode = place::PRIVATE | (writers * 3);
        loop {
            match place::create(fd, name, place::PRIVATE) {
                Ok(file) => {
                    // So that they can use what this save may leave behind. Only root can give it to the owner.
                    let (user, group) = folder.owner;
                    let _ = place::own(file.as_fd(), (user, group))
                        .or_else(|_| place::own(file.as_fd(), (folder::user(), group)));
                    if writers != 0 {
                        let _ = place::set_mode(file.as_fd(), mode);
                    }
                    return Ok(file);
                }
                Err(Errno::EXIST) => {}
                Err(errno) => {
                    return Err(cannot_make(errno).at(self.place(LOCK).display().to_string()));
                }
            }
            let file = match place::open(fd, name) {
                Ok(file) => file,
                // Removed since.
                Err(Errno::NOENT) => continue,
                Err(errno @ Errno::LOOP) => return refuse(errno, "it is a symbolic link"),
                Err(errno @ (Errno::ACCESS | Errno::PERM)) => {
                    return refuse(errno, "it belongs to another user's save");
                }
                Err(errno) => return refuse(errno, "it is not a file"),
            };
            let found = place::look_at(file.as_fd()).map_err(failed)?;
            if found.kind != FileType::RegularFile {
                return refuse(Errno::INVAL, "it is not a regular file");
            }
            let owners = [0, folder::user(), folder.owner.0];
            if writers == 0 && !owners.contains(&found.owner.0) {
                return refuse(Errno::PERM, "it belongs to another user");
            }
            if found.mode & !mode != 0 {
                // Otherwise a reader could keep this saver, and all later ones, out.
                let _ = place::set_mode(file.as_fd(), mode);
            }
            return Ok(file);
        }
    }

    /// The path of a file in it.
    pub(super) fn place(&self, name: &str) -> PathBuf {
        self.0.place(name)
    }

    /// Opens a regular file in it; refuses links.
    fn open_file(&self, name: &str) -> Result<OwnedFd> {
        let place = self.place(name).display().to_string();
        let refuse = |why: &str| {
            Error::new("cannot use the snapshot", why)
                .with_errno(Errno::BADMSG)
                .at(&place)
                .with_remedy("restore the regular file that was saved")
        };
        let file = place::open_to_read(self.0.fd(), OsStr::new(name));
        let file = file.map_err(|errno| match errno {
            Errno::LOOP => refuse("it is a symbolic link"),
            Errno::NXIO => refuse("it is not a regular file"),
            errno => Error::os("cannot open", errno).at(&place),
        })?;
        let kind = place::look_at(file.as_fd()).map(|found| found.kind);
        match kind.map_err(|errno| Error::os("cannot stat", errno).at(&place))? {
            FileType::RegularFile => Ok(file),
            _ => Err(refuse("it is not a regular file")),
        }
    }

    /// True if a file has this name.
    pub(super) fn has(&self, name: &str) -> Result<bool> {
        let found = self.0.look_up(OsStr::new(name));
        let found = found.map_err(|errno| {
            Error::os("cannot stat", errno).at(self.place(name).display().to_string())
        })?;
        Ok(found.is_some())
    }

    /// Waits until the current manifest would survive a crash.
    pub(super) fn settle(&self) -> Result<()> {
        let file = self.open_file(manifest::NAME)?;
        let synced = place::sync(file.as_fd()).and_then(|()| match self.0.listed() {
            Some(folder) => place::sync(folder),
            None => place::sync_all(file.as_fd()),
        });
        synced.map_err(|errno| {
            Error::os("cannot sync", errno).at(self.place(manifest::NAME).display().to_string())
        })
    }

    /// Files of complete or incomplete snapshots that `kept` does not name, each with its
    /// generation.
    pub(super) fn others(&self, kept: Option<&Manifest>) -> Result<Vec<(String, u64)>> {
        if self.0.listed().is_none() {
            return Ok(Vec::new());
        }
        let names = self.0.names().map_err(|errno| {
            Error::os("cannot list the folder", errno).at(self.0.path().display().to_string())
        })?;
        let is_kept = |name: &str| {
            kept.is_some_and(|kept| kept.sources.iter().any(|entry| entry.file == name))
        };
        let names = names.into_iter().filter_map(|name| name.into_string().ok());
        let files = names.filter_map(|name| Some((manifest::generation_of(&name)?, name)));
        let others = files.filter(|(_, name)| !is_kept(name));
        Ok(others
            .map(|(generation, name)| (name, generation))
            .collect())
    }

    /// Removes files; returns those that could not be removed.
    pub(super) fn remove(&self, files: Vec<(String, u64)>) -> Vec<(String, u64)> {
        let stays = |file: &(String, u64)| {
            place::unlink(self.0.fd(), OsStr::new(&file.0))
                .is_err_and(|errno| errno != Errno::NOENT)
        };
        files.into_iter().filter(stays).collect()
    }
}

/// Where a snapshot is.
pub(super) trait SnapshotPlace {
    /// The manifest; None if there is none.
    fn manifest(&self) -> Result<Option<Manifest>>;

    /// Opens the file of a source and checks its size; None for an empty source.
    fn open_source(&self, entry: &SourceEntry) -> Result<Option<Source>>;
}

impl SnapshotPlace for SnapshotFolder {
    fn manifest(&self) -> Result<Option<Manifest>> {
        let path = self.place(manifest::NAME);
        let place = path.display().to_string();
        let file = match self.open_file(manifest::NAME) {
            Err(error) if error.raw_os_error() == Some(Errno::NOENT.raw_os_error()) => {
                return Ok(None);
            }
            file => file?,
        };
        let mut text = vec![0; manifest::LARGEST + 1];
        let mut len = 0;
        while len < text.len() {
            match file::read_at(file.as_fd(), &mut text[len..], len as u64) {
                Ok(0) => break,
                Ok(got) => len += got,
                Err(errno) => return Err(Error::os("cannot read", errno).at(place)),
            }
        }
        Manifest::parse(&text[..len], &path).map(Some)
    }

    fn open_source(&self, entry: &SourceEntry) -> Result<Option<Source>> {
        let path = self.place(&entry.file);
        let place = path.display().to_string();
        let file = self.open_file(&entry.file)?;
        let stat = file::stat(file.as_fd());
        let size = stat.map_err(|errno| Error::os("cannot stat", errno).at(&place))?;
        entry.check_size(size.size, place)?;
        match entry.bytes {
            0 => Ok(None),
            _ => Source::of(&path, file).map(Some),
        }
    }
}
