//! The folder of a snapshot: its manifest, its files, and the lock on it.

use super::manifest::{self, Entry, Manifest};
use crate::error::{Error, Result};
use crate::source::Source;
use crate::sys::{Errno, file, place};
use rustix::fs::FileType;
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

pub(super) struct Folder {
    path: PathBuf,
    folder: OwnedFd,
    /// For listing, locking and syncing; None without permission to list it.
    listed: Option<OwnedFd>,
}

impl Drop for Folder {
    fn drop(&mut self) {
        if let Some(listed) = &self.listed {
            place::unmark(listed.as_fd());
        }
    }
}

impl Folder {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let (folder, listed) = place::folder(path).map_err(|errno| {
            Error::os("cannot open the folder", errno).at(path.display().to_string())
        })?;
        Ok(Self {
            path: path.to_path_buf(),
            folder,
            listed,
        })
    }

    /// Keeps other savers out until this is dropped (flock(2)).
    ///
    /// # Errors
    /// EBUSY while there is another.
    pub(super) fn lock(&self) -> Result<()> {
        let failed =
            |errno| Error::os("cannot save a snapshot", errno).at(self.path.display().to_string());
        let listed = self.listed.as_ref().ok_or_else(|| {
            let remedy = "ask for permission to list the folder";
            failed(Errno::ACCESS).with_remedy(remedy)
        })?;
        place::mark(listed.as_fd()).map_err(|errno| match errno {
            Errno::AGAIN => failed(Errno::BUSY)
                .with_why("another one is being saved there")
                .with_remedy("wait until that has ended, or save to another folder"),
            errno => failed(errno)
                .with_why("its file system cannot lock the folder (flock(2))")
                .with_remedy("save to another file system"),
        })
    }

    /// The path of a file in it.
    pub(super) fn place(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The manifest; None if there is none.
    pub(super) fn manifest(&self) -> Result<Option<Manifest>> {
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
        if len > manifest::LARGEST {
            let why = format!("its manifest has more than {} bytes", manifest::LARGEST);
            let error = Error::new("cannot use the snapshot", why).with_errno(Errno::BADMSG);
            return Err(error.at(place));
        }
        Manifest::parse(&text[..len], &path).map(Some)
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
        let file = place::open_to_read(self.folder.as_fd(), OsStr::new(name));
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

    /// Opens the file of a source and checks its size; None for an empty source.
    pub(super) fn open_source(&self, entry: &Entry) -> Result<Option<Source>> {
        let path = self.place(&entry.file);
        let place = path.display().to_string();
        let file = self.open_file(&entry.file)?;
        let stat = file::stat(file.as_fd());
        let size = stat.map_err(|errno| Error::os("cannot stat", errno).at(&place))?;
        if size.size != entry.bytes {
            let why = format!("it has {} bytes and should have {}", size.size, entry.bytes);
            return Err(Error::new("wrong size", why)
                .with_errno(Errno::BADMSG)
                .at(place)
                .with_remedy(DAMAGED));
        }
        match entry.bytes {
            0 => Ok(None),
            _ => Source::of(&path, file).map(Some),
        }
    }

    /// Whether a file has this name.
    pub(super) fn has(&self, name: &str) -> Result<bool> {
        let found = place::look_up(self.folder.as_fd(), OsStr::new(name));
        let found = found.map_err(|errno| {
            Error::os("cannot stat", errno).at(self.place(name).display().to_string())
        })?;
        Ok(found.is_some())
    }

    /// Waits until the current manifest would survive a crash.
    pub(super) fn settle(&self) -> Result<()> {
        let file = self.open_file(manifest::NAME)?;
        let listed = self.listed.as_ref().map(AsFd::as_fd);
        let synced = place::sync(file.as_fd())
            .and_then(|()| listed.map_or_else(|| place::sync_all(file.as_fd()), place::sync));
        synced.map_err(|errno| {
            Error::os("cannot sync", errno).at(self.place(manifest::NAME).display().to_string())
        })
    }

    /// Files of complete or incomplete snapshots that `kept` does not name, each with its
    /// generation.
    pub(super) fn others(&self, kept: Option<&Manifest>) -> Result<Vec<(String, u64)>> {
        let Some(listed) = &self.listed else {
            return Ok(Vec::new());
        };
        let names = place::names(listed.as_fd()).map_err(|errno| {
            Error::os("cannot list the folder", errno).at(self.path.display().to_string())
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
            place::unlink(self.folder.as_fd(), OsStr::new(&file.0))
                .is_err_and(|errno| errno != Errno::NOENT)
        };
        files.into_iter().filter(stays).collect()
    }
}

/// Remedy for a file that differs from what was saved.
pub(super) const DAMAGED: &str = "it is damaged: use another snapshot";
