//! Where a path leads: a name in a folder that is held open. What was checked there is what is used.

use super::to::cannot_open;
use crate::error::{Error, Result};
use crate::folder::{Folder, split, user};
use crate::sys::place::{self, Named};
use crate::sys::{Errno, sandbox};
use rustix::fs::FileType;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Maximum number of links that lead to a file (path_resolution(7)).
const MOST_LINKS: usize = 40;

/// A name in a folder, which need not exist.
pub(super) struct SaveTarget {
    /// The path by which it was requested, for messages.
    pub(super) path: PathBuf,
    pub(super) folder: Folder,
    pub(super) name: OsString,
    /// It is a link of `/proc`, which leads to a file, but not by its text.
    pub(super) is_magic: bool,
}

/// A file that exists.
pub(super) struct ExistingFile {
    fd: OwnedFd,
    pub(super) is: Named,
}

impl ExistingFile {
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl SaveTarget {
    /// Follows the links of a path; with `magic` except those of `/proc`, by whose text a file can be replaced, but
    /// not opened.
    ///
    /// # Errors
    /// ENOENT if there is no folder for the file; EACCES for a link of another user in a folder in which all users
    /// may create links, whether or not this kernel follows those (fs.protected_symlinks in proc_sys_fs(5)).
    pub(super) fn of(path: &Path, magic: bool) -> Result<Self> {
        let place = path.display().to_string();
        let cannot = |errno| cannot_open(errno).at(&place);
        let (mut end, mut above) = (path.to_path_buf(), None::<Folder>);
        for _ in 0..MOST_LINKS {
            let (parent, name) = split(&end);
            let slash = end.as_os_str().as_bytes().ends_with(b"/");
            let Some(name) = name.filter(|_| !slash) else {
                return Err(cannot(Errno::ISDIR).with_why("it is a folder"));
            };
            let folder = match &above {
                Some(above) => above.below(parent),
                None => Folder::open(parent),
            };
            let mut target = Self {
                path: path.to_path_buf(),
                folder: folder.map_err(|errno| no_folder(errno).at(&place))?,
                name: name.to_os_string(),
                is_magic: false,
            };
            let found = target.find()?;
            let Some(link) = found.filter(|found| found.is.kind == FileType::Symlink) else {
                return Ok(target);
            };
            if magic && place::is_in_proc(target.folder.fd()) {
                target.is_magic = true;
                return Ok(target);
            }
            target.refuse_of_others(&link.is, "it is a link", "name its target")?;
            let target_of = place::target_of(link.fd());
            end = target_of.map_err(|errno| cannot(errno).of_calls(&[sandbox::READLINKAT]))?;
            above = Some(target.folder);
        }
        Err(cannot(Errno::LOOP).with_why("its symbolic links form a loop"))
    }

    /// A file in a folder; no link is followed.
    pub(super) fn within(folder: Folder, name: &OsStr) -> Self {
        Self {
            path: folder.place(name),
            folder,
            name: name.to_os_string(),
            is_magic: false,
        }
    }

    /// What has the name; None if nothing has.
    pub(super) fn find(&self) -> Result<Option<ExistingFile>> {
        let found = place::find(self.folder.fd(), &self.name);
        let found = found.and_then(|fd| {
            fd.map(|fd| {
                let is = place::look_at(fd.as_fd())?;
                Ok(ExistingFile { fd, is })
            })
            .transpose()
        });
        found.map_err(|errno| cannot_open(errno).at(self.place()))
    }

    /// The type of the file that a link of `/proc` leads to.
    pub(super) fn kind_behind(&self) -> Result<FileType, Errno> {
        place::kind(self.folder.fd(), &self.name)
    }

    /// Refuses what another user may have put in the way: in a folder that all users may write to, but where only
    /// owners remove files (`/tmp`), what belongs neither to this user nor to the folder's owner.
    pub(super) fn refuse_of_others(&self, found: &Named, what: &str, remedy: &str) -> Result<()> {
        const SHARED: u32 = 0o1002;
        let cannot = |errno| cannot_open(errno).at(self.place());
        let folder = self.folder.look().map_err(cannot)?;
        let owner = found.owner.0;
        if folder.mode & SHARED != SHARED || [user(), folder.owner.0].contains(&owner) {
            return Ok(());
        }
        let folder = self.folder.path().display();
        let why = format!("{what} of another user ({owner}) in {folder}, to which all users write");
        Err(cannot(Errno::ACCESS).with_why(why).with_remedy(remedy))
    }

    /// For messages.
    pub(super) fn place(&self) -> String {
        self.path.display().to_string()
    }
}

/// The error if the folder of a file cannot be opened.
fn no_folder(errno: Errno) -> Error {
    let error = cannot_open(errno);
    match errno {
        Errno::NOENT => error
            .with_why("there is no such folder")
            .with_remedy("create it first: mkdir -p"),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbolic_links_are_resolved_to_a_folder_and_a_name() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir(at("sub")).unwrap();
        std::os::unix::fs::symlink("sub/real", at("link")).unwrap();
        std::os::unix::fs::symlink(at("link"), at("again")).unwrap();
        std::os::unix::fs::symlink("round", at("round")).unwrap();
        let resolve = |path: &Path| {
            let target = SaveTarget::of(path, false)?;
            Ok((target.folder.path().to_path_buf(), target.name))
        };
        let (folder, name) = resolve(&at("again")).unwrap();
        assert_eq!((folder, name), (at("sub"), "real".into()));
        assert_eq!(resolve(Path::new("a")).unwrap(), (".".into(), "a".into()));
        let errno = |path: &Path| {
            let error: Error = resolve(path).unwrap_err();
            error.raw_os_error()
        };
        assert_eq!(errno(&at("round")), Some(libc::ELOOP));
        assert_eq!(errno(Path::new("/")), Some(libc::EISDIR));
        assert_eq!(errno(&at("sub/")), Some(libc::EISDIR));
        assert_eq!(errno(&at("..")), Some(libc::EISDIR));
    }

    #[test]
    fn a_target_stays_where_it_was_found() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir(at("one")).unwrap();
        std::fs::create_dir(at("two")).unwrap();
        std::os::unix::fs::symlink("one", at("current")).unwrap();
        let target = SaveTarget::of(&at("current/file"), false).unwrap();
        std::fs::remove_file(at("current")).unwrap();
        std::os::unix::fs::symlink("two", at("current")).unwrap();
        std::fs::write(at("current/file"), "x").unwrap();
        assert!(target.find().unwrap().is_none());
    }
}
