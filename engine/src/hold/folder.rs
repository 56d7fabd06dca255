//! A folder that any loader can read as the model: held files are links to their memory, others are links
//! to the originals.

use super::set::Set;
use crate::error::{Error, Result};
use crate::sys::{Errno, errno, process};
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};

/// The file that marks a folder as made by this module: its links may be removed.
const MARK: &str = ".dmafile-hold";

/// The folder; removed when this is dropped.
pub(super) struct LinkFolder(PathBuf);

impl LinkFolder {
    /// Creates it. A folder that an earlier holder left behind is replaced; any other existing folder that
    /// is not empty is refused (EEXIST).
    pub(super) fn make(path: &Path, set: &Set, asked: &[PathBuf]) -> Result<Self> {
        let failed = |error: io::Error| {
            Error::os("cannot make the folder", errno(error)).at(path.display().to_string())
        };
        if !process::folder(std::process::id()).exists() {
            return Err(failed(ErrorKind::NotFound.into())
                .with_errno(Errno::NOENT)
                .with_why("its links lead to /proc, which is not mounted")
                .with_remedy("mount /proc, or do without the folder"));
        }
        let path = std::path::absolute(path).map_err(failed)?;
        match fs::DirBuilder::new().mode(0o700).create(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                if path.join(MARK).exists() {
                    clear(&path);
                }
                if fs::read_dir(&path).map_err(failed)?.next().is_some() {
                    return Err(failed(ErrorKind::AlreadyExists.into())
                        .with_errno(Errno::EXIST)
                        .with_why("it is not empty")
                        .with_remedy("name a folder that is empty or does not exist"));
                }
            }
            made => made.map_err(failed)?,
        }
        let folder = Self(path);
        folder.fill(set, asked).map_err(failed)?;
        Ok(folder)
    }

    fn fill(&self, set: &Set, asked: &[PathBuf]) -> io::Result<()> {
        fs::write(self.0.join(MARK), "")?;
        for member in &set.members {
            let number = member.fds[0].as_raw_fd();
            let memory = format!("/proc/{}/fd/{number}", std::process::id());
            symlink(memory, self.0.join(&member.info.name))?;
        }
        for path in asked {
            let index = path.to_string_lossy().ends_with(".index.json");
            let beside = match path.is_dir() {
                true => path.as_path(),
                false if index => path.parent().unwrap_or(Path::new("")),
                false => continue,
            };
            for entry in fs::read_dir(std::path::absolute(beside)?)? {
                let entry = entry?;
                match symlink(entry.path(), self.0.join(entry.file_name())) {
                    // It is held, or two folders have a file with this name: the first one counts.
                    Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                    linked => linked?,
                }
            }
        }
        Ok(())
    }
}

impl Drop for LinkFolder {
    fn drop(&mut self) {
        clear(&self.0);
        // If the folder has other files, this fails, and the folder stays.
        let _ = fs::remove_dir(&self.0);
    }
}

/// Removes the links and the mark.
fn clear(path: &Path) {
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        let link = entry.file_type().is_ok_and(|kind| kind.is_symlink());
        if link || entry.file_name() == MARK {
            let _ = fs::remove_file(entry.path());
        }
    }
}
