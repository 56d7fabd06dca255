//! A file that is written next to its final place: without a name if the file system supports that
//! (O_TMPFILE in open(2)), otherwise with one that the next save to the same place removes. It is
//! moved to its place atomically.

use super::to::{cannot_open, cannot_sync};
use crate::error::{Error, Result, errno_name};
use crate::message::{Message, Opt, message};
use crate::reasons::Reasons;
use crate::sys::{Errno, place, sandbox};
use rustix::fs::FileType;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Maximum number of concurrent saves to one place.
const MOST: usize = 16;
/// Maximum number of links that lead to a file (path_resolution(7)).
const MOST_LINKS: usize = 40;

/// The place of a file, and its temporary name.
pub(super) struct Beside {
    /// The requested path.
    path: PathBuf,
    folder: OwnedFd,
    /// For syncing; None without permission to list it.
    listed: Option<OwnedFd>,
    name: OsString,
    /// A file with this name existed.
    replaces: bool,
    /// Its temporary name; None while it has no name.
    called: Option<OsString>,
}

impl Beside {
    /// Creates an empty file for a place, with the owner, permissions and attributes of the file that
    /// it will replace.
    pub(super) fn create(path: &Path, log: &Reasons) -> Result<(Self, OwnedFd)> {
        let place = path.display().to_string();
        let (parent, name) = resolve(path)?;
        let (folder, listed) = place::folder(&parent).map_err(|errno| {
            let remedy = "make the folder first: mkdir -p";
            let error = cannot_open(errno).at(&place);
            match errno {
                Errno::NOENT => error
                    .with_why("there is no such folder")
                    .with_remedy(remedy),
                _ => error,
            }
        })?;
        let old = place::look_up(folder.as_fd(), &name);
        let old = old.map_err(|errno| cannot_open(errno).at(&place))?;
        let mut beside = Self {
            path: path.to_path_buf(),
            folder,
            listed,
            name,
            replaces: old.is_some(),
            called: None,
        };
        if let Some(old) = &old {
            beside.may_replace(old)?;
        }
        beside.clear_away();
        let file = beside.open(log).map_err(|error| error.at(&place))?;
        if let Some(old) = &old {
            beside.take_after(old, file.as_fd(), log)?;
        }
        Ok((beside, file))
    }

    /// Checks that this process may replace the existing file.
    fn may_replace(&self, old: &place::Named) -> Result<()> {
        let refuse = |why: &str, errno, remedy: Message| {
            Err(Error::os("cannot replace", errno)
                .with_why(why)
                .at(self.place())
                .with_remedy(remedy))
        };
        match old.kind {
            FileType::RegularFile => {}
            FileType::Directory => {
                return refuse("it is a folder", Errno::ISDIR, "name a file in it".into());
            }
            FileType::BlockDevice => {
                let remedy = message!["to write into it, use ", Opt::InPlace];
                return refuse("it is a block device", Errno::INVAL, remedy);
            }
            _ => {
                let why = "it is not a regular file";
                return refuse(why, Errno::INVAL, "name a file".into());
            }
        }
        if old.immutable {
            let remedy = "remove its flag: chattr -i -a";
            return refuse("it is immutable or append-only", Errno::PERM, remedy.into());
        }
        place::may_write(self.folder.as_fd(), &self.name)
            .map_err(|errno| cannot_open(errno).at(self.place()))
    }

    /// Creates the file.
    fn open(&mut self, log: &Reasons) -> Result<OwnedFd> {
        let refused = match place::nameless(self.folder.as_fd()) {
            Ok(file) => match place::can_link(file.as_fd()) {
                Ok(()) => {
                    log.add(
                        "file",
                        "without a name",
                        "it gets one when it is complete (O_TMPFILE)",
                    );
                    return Ok(file);
                }
                Err(Errno::NOENT) => {
                    "without /proc an unnamed file cannot be given a name".to_string()
                }
                Err(errno) => {
                    let name = errno_name(errno.raw_os_error());
                    format!("an unnamed file cannot be given a name: linkat is refused ({name})")
                }
            },
            Err(errno @ (Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT)) => {
                let name = errno_name(errno.raw_os_error());
                format!("the file system does not support unnamed files ({name})")
            }
            Err(errno) => return Err(cannot_make(errno)),
        };
        let (called, file) = self.claim(|name| {
            let file = place::create(self.folder.as_fd(), name)?;
            match self.marked(name, file.as_fd()) {
                true => Ok(file),
                // Another save has removed it as a leftover.
                false => Err(Errno::EXIST),
            }
        })?;
        log.add("file", called.to_string_lossy(), refused);
        self.called = Some(called);
        Ok(file)
    }

    /// Marks a file as in use. False if it has lost its name before.
    fn marked(&self, name: &OsStr, file: BorrowedFd<'_>) -> bool {
        let inode = |named: place::Named| named.inode;
        // If the file system does not support marks, no other save can check them and remove this
        // name, either.
        let _ = place::mark(file);
        let now = place::look_up(self.folder.as_fd(), name).ok().flatten();
        now.map(inode) == place::look_at(file).ok().map(inode)
    }

    /// The first temporary name for which `make` does not find a file in use.
    fn claim<T>(&self, make: impl Fn(&OsStr) -> Result<T, Errno>) -> Result<(OsString, T)> {
        for name in self.names() {
            match make(&name) {
                Ok(made) => return Ok((name, made)),
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(cannot_make(errno)),
            }
        }
        let why = format!("{MOST} saves to it are in progress, or have left files in its folder");
        Err(Error::os("cannot write", Errno::BUSY)
            .with_why(why)
            .with_remedy(format!("wait for them, or remove {}", self.pattern())))
    }

    /// The temporary names for this place: few, so that leftovers are found.
    fn names(&self) -> impl Iterator<Item = OsString> {
        let stem = self.stem();
        (0..MOST).map(move |number| {
            let mut name = stem.clone();
            name.push(format!(".dmafile-{number}"));
            name
        })
    }

    fn stem(&self) -> OsString {
        /// Short enough for any file system, with what is added to it.
        const LONGEST: usize = 100;
        let mut stem = b".".to_vec();
        let bytes = self.name.as_bytes();
        let cut = match std::str::from_utf8(bytes) {
            Ok(text) => (0..=LONGEST.min(text.len())).rfind(|&at| text.is_char_boundary(at)),
            Err(_) => None,
        };
        stem.extend(&bytes[..cut.unwrap_or(LONGEST.min(bytes.len()))]);
        OsString::from_vec(stem)
    }

    fn pattern(&self) -> String {
        format!("{}.dmafile-*", self.stem().to_string_lossy())
    }

    /// Removes what killed saves to this place have left behind.
    fn clear_away(&self) {
        let folder = self.folder.as_fd();
        for name in self.names() {
            let Ok(Some(left)) = place::look_up(folder, &name) else {
                continue;
            };
            if left.kind != FileType::RegularFile {
                continue;
            }
            let Ok(file) = place::open(folder, &name) else {
                continue;
            };
            if place::mark(file.as_fd()).is_ok() && self.marked(&name, file.as_fd()) {
                // A file that may not be removed stays, and its name is skipped.
                let _ = place::unlink(folder, &name);
            }
        }
    }

    /// Gives the new file the owner, permissions and attributes of the old one.
    fn take_after(&self, old: &place::Named, file: BorrowedFd<'_>, log: &Reasons) -> Result<()> {
        let cannot = |what: &str, errno| {
            Error::os(format!("cannot keep {what}"), errno)
                .at(self.place())
                .with_remedy("run as its owner, or remove it first")
        };
        place::own(file, old.owner, old.mode)
            .map_err(|errno| cannot("its owner and permissions", errno))?;
        let attributes = place::attributes(self.folder.as_fd(), &self.name)
            .map_err(|errno| cannot("its extended attributes", errno))?;
        let (mut kept, mut left) = (0, Vec::new());
        for (name, value) in attributes {
            if OF_CONTENTS.iter().any(|of| name == *of) {
                left.push(name.to_string_lossy().into_owned());
                continue;
            }
            place::set_attribute(file, &name, &value).map_err(|errno| {
                cannot(&format!("the attribute {}", name.to_string_lossy()), errno)
            })?;
            kept += 1;
        }
        let mut why = format!(
            "of the old file: {:o}, {}:{}",
            old.mode, old.owner.0, old.owner.1
        );
        if kept > 0 {
            why += &format!(", {kept} extended attributes");
        }
        if !left.is_empty() {
            why += &format!("; not {}, which described the old bytes", left.join(", "));
        }
        log.add("keeps", "mode and owner", why);
        if old.links > 1 {
            let others = old.links - 1;
            let why = format!("{others} other hard links keep the old bytes");
            log.add("links", old.links, why);
        }
        Ok(())
    }

    /// Moves the file to its place; durably if `sync` is set.
    pub(super) fn put(mut self, file: &OwnedFd, sync: bool) -> Result<()> {
        let folder = self.folder.as_fd();
        let failed = |errno| match errno {
            Errno::ISDIR => cannot_open(errno).with_why("a folder has taken its place"),
            errno => cannot_open(errno),
        };
        if self.called.is_none() && !self.replaces {
            match place::link(file.as_fd(), folder, &self.name) {
                // Another process was faster.
                Err(Errno::EXIST) => {}
                done => {
                    done.map_err(|errno| failed(errno).at(self.place()))?;
                    return self.settle(file, sync);
                }
            }
        }
        if self.called.is_none() {
            let _ = place::mark(file.as_fd());
            let claimed = self.claim(|name| place::link(file.as_fd(), folder, name));
            let (called, ()) = claimed.map_err(|error| error.at(self.place()))?;
            self.called = Some(called);
        }
        if let Some(called) = &self.called {
            place::rename(self.folder.as_fd(), called, &self.name)
                .map_err(|errno| failed(errno).at(self.place()))
                .map_err(|error| error.of_calls(&[sandbox::RENAMEAT]))?;
        }
        self.called = None;
        self.settle(file, sync)
    }

    /// Waits until its name is on the disk.
    fn settle(&self, file: &OwnedFd, sync: bool) -> Result<()> {
        if !sync {
            return Ok(());
        }
        // Btrfs logs nothing of a file before it has a name.
        let synced = place::sync(file.as_fd()).and_then(|()| match &self.listed {
            Some(folder) => place::sync(folder.as_fd()),
            None => place::sync_all(file.as_fd()),
        });
        synced.map_err(|errno| {
            let why = "the new file is in its place, but a crash may bring the old one back";
            cannot_sync(errno).with_why(why).at(self.place())
        })
    }

    fn place(&self) -> String {
        self.path.display().to_string()
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        if let Some(called) = &self.called {
            // The next save will try again.
            let _ = place::unlink(self.folder.as_fd(), called);
        }
    }
}

/// Extended attributes that describe a file's bytes and are not kept: a write to the file would remove
/// them, too (capabilities(7)).
const OF_CONTENTS: [&str; 3] = ["security.capability", "security.ima", "security.evm"];

/// The folder and the file name of a path, after following links.
fn resolve(path: &Path) -> Result<(PathBuf, OsString)> {
    let refuse = |errno, why: &str| {
        let error = cannot_open(errno).at(path.display().to_string());
        Err(error.with_why(why))
    };
    let mut end = path.to_path_buf();
    for _ in 0..MOST_LINKS {
        let link = std::fs::read_link(&end);
        let parent = match end.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
            _ => PathBuf::from("."),
        };
        let Ok(link) = link else {
            let slash = end.as_os_str().as_bytes().ends_with(b"/");
            return match end.file_name() {
                Some(name) if !slash => Ok((parent, name.to_os_string())),
                _ => refuse(Errno::ISDIR, "it is a folder"),
            };
        };
        end = parent.join(link);
    }
    refuse(Errno::LOOP, "its symbolic links form a loop")
}

/// The error if no file can be created in the folder.
fn cannot_make(errno: Errno) -> Error {
    let error = cannot_open(errno);
    let remedy: Message = match errno {
        Errno::ACCESS | Errno::PERM => "ask for write permission in its folder".into(),
        _ => error.remedy().clone(),
    };
    error.with_remedy(remedy)
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
        let (folder, name) = resolve(&at("again")).unwrap();
        assert_eq!((folder, name), (at("sub"), "real".into()));
        assert_eq!(resolve(Path::new("a")).unwrap(), (".".into(), "a".into()));
        let errno = |path: &Path| resolve(path).unwrap_err().raw_os_error();
        assert_eq!(errno(&at("round")), Some(libc::ELOOP));
        assert_eq!(errno(Path::new("/")), Some(libc::EISDIR));
        assert_eq!(errno(&at("sub/")), Some(libc::EISDIR));
        assert_eq!(errno(&at("..")), Some(libc::EISDIR));
    }
}
