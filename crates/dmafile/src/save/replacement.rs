//! A file that is written next to its final place: without a name if the file system supports that
//! (O_TMPFILE in open(2)), otherwise with one that the next save to the same place removes. It is
//! moved to its place atomically.
//!
//! A temporary name belongs to the save that has marked its file (flock(2)), from before the file has the name until it
//! has it no more. A save removes the name of another only while it holds the mark of that file itself; so it never
//! removes one in use. Where the file system supports no marks, no save removes names of others.

use super::target::{ExistingFile, SaveTarget};
use super::to::{cannot_open, cannot_sync};
use crate::error::{Error, Result, Verb, errno_name};
use crate::message::{Message, Opt, message};
use crate::reasons::{About, Reasons};
use crate::sys::place::{self, Named, PRIVATE};
use crate::sys::{Errno, sandbox};
use rustix::fs::FileType;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// Maximum number of concurrent saves to one place.
const MOST: usize = 16;

/// The place of a file, and its temporary name.
pub(super) struct Replacement {
    target: SaveTarget,
    /// A file with this name existed.
    replaces: bool,
    /// Its temporary name; None while it has no name.
    called: Option<OsString>,
    /// The new file, to tell it from others that may get its name.
    own: Named,
    /// What it gets when all bytes are there; None if it has that already.
    later: Option<FilePermissions>,
}

/// Who may access a file.
struct FilePermissions {
    mode: u32,
    /// Its access control list, if one is to replace what it has from its folder. `None` within for none.
    list: Option<Option<Vec<u8>>>,
}

impl Replacement {
    /// Creates an empty file for a place, with the owner and attributes of the file that it will replace. Others cannot
    /// open it before [`Replacement::admit`].
    pub(super) fn create(target: SaveTarget, log: &Reasons) -> Result<(Self, OwnedFd)> {
        let old = target.find()?;
        if let Some(old) = &old {
            may_replace(&target, old)?;
        }
        target.clear_away();
        let at = |error: Error| error.at(target.place());
        let (file, called) = target.open(log).map_err(at)?;
        let own =
            place::look_at(file.as_fd()).map_err(|errno| at(Error::os("cannot stat", errno)))?;
        let mut beside = Self {
            replaces: old.is_some(),
            called,
            own,
            later: None,
            target,
        };
        beside.later = match &old {
            Some(old) => Some(beside.take_after(old, file.as_fd(), log)?),
            None if beside.called.is_none() => None,
            None => Some(beside.usual()?),
        };
        Ok((beside, file))
    }

    /// The access to a new file. Only the kernel knows all that it depends on: a file shows it, which is removed again.
    fn usual(&self) -> Result<FilePermissions> {
        let target = &self.target;
        let at = |error: Error| error.at(target.place());
        let (called, file) = target.claim_new(place::NEW).map_err(at)?;
        let found = place::look_at(file.as_fd());
        let _ = place::unlink(target.folder.fd(), &called);
        let mode = found
            .map_err(|errno| at(Error::os("cannot stat", errno)))?
            .mode;
        Ok(FilePermissions { mode, list: None })
    }

    /// Gives the new file the owner and attributes of the old one; returns who may access that.
    fn take_after(
        &self,
        old: &ExistingFile,
        file: BorrowedFd<'_>,
        log: &Reasons,
    ) -> Result<FilePermissions> {
        let cannot = |what: &str, errno| cannot_keep(&self.target, what, errno);
        let is = &old.is;
        place::own(file, is.owner).map_err(|errno| cannot(OWNER, errno))?;
        let named = (self.target.folder.fd(), &*self.target.name);
        let attributes = place::attributes(old.fd(), named)
            .map_err(|errno| cannot("its extended attributes", errno))?;
        let (mut kept, mut left, mut list) = (0, Vec::new(), None);
        for (name, value) in attributes {
            if OF_CONTENTS.iter().any(|of| name == *of) {
                left.push(name.to_string_lossy().into_owned());
                continue;
            }
            kept += 1;
            if name == LIST {
                list = Some(value);
                continue;
            }
            place::set_attribute(file, &name, &value).map_err(|errno| {
                cannot(&format!("the attribute {}", name.to_string_lossy()), errno)
            })?;
        }
        let mut why = format!(
            "of the old file: {:o}, {}:{}",
            is.mode, is.owner.0, is.owner.1
        );
        if kept > 0 {
            why += &format!(", {kept} extended attributes");
        }
        if !left.is_empty() {
            why += &format!("; not {}, which described the old bytes", left.join(", "));
        }
        log.add(About::Keeps, "mode and owner", why);
        if is.links > 1 {
            let others = is.links - 1;
            let why = format!("{others} other hard links keep the old bytes");
            log.add(About::Links, is.links, why);
        }
        Ok(FilePermissions {
            mode: is.mode,
            list: Some(list),
        })
    }

    /// Lets others access the file, when all bytes are there: those that its permissions allow.
    pub(super) fn admit(&self, file: BorrowedFd<'_>) -> Result<()> {
        let Some(access) = &self.later else {
            return Ok(());
        };
        let listed = match &access.list {
            None => Ok(()),
            Some(None) => place::remove_attribute(file, OsStr::new(LIST)),
            Some(Some(list)) => place::set_attribute(file, OsStr::new(LIST), list),
        };
        listed
            .and_then(|()| place::set_mode(file, access.mode))
            .map_err(|errno| {
                if self.replaces {
                    cannot_keep(&self.target, OWNER, errno)
                } else {
                    Error::os("cannot set its permissions", errno).at(self.target.place())
                }
            })
    }

    /// Moves the file to its place; durably if `sync` is set.
    pub(super) fn put(mut self, file: &OwnedFd, sync: bool) -> Result<()> {
        let place = self.target.place();
        let failed = |errno| {
            let error = cannot_open(errno).at(&place);
            match errno {
                Errno::ISDIR => error.with_why("a folder has taken its place"),
                _ => error,
            }
        };
        let (folder, name) = (self.target.folder.fd(), &self.target.name);
        if self.called.is_none() && !self.replaces {
            match place::link(file.as_fd(), folder, name) {
                // Another process was faster.
                Err(Errno::EXIST) => {}
                done => {
                    done.map_err(failed)?;
                    return self.settle(file, sync);
                }
            }
        }
        if self.called.is_none() {
            let _ = place::try_lock(file.as_fd());
            let link = |name: &OsStr| place::link(file.as_fd(), folder, name);
            let claimed = self.target.claim(link);
            self.called = Some(claimed.map_err(|error| error.at(&place))?.0);
        }
        if let Some(called) = &self.called {
            if !self.target.is_at(called, &self.own) {
                let called = called.display();
                let why = format!("another program has removed its temporary file {called}");
                return Err(Error::os(Verb::Write, Errno::NOENT)
                    .with_why(why)
                    .at(place)
                    .with_remedy("save it again"));
            }
            place::rename(folder, called, name)
                .map_err(|errno| failed(errno).of_calls(&[sandbox::RENAMEAT]))?;
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
        let synced = place::sync(file.as_fd()).and_then(|()| match self.target.folder.listed() {
            Some(folder) => place::sync(folder),
            None => place::sync_all(file.as_fd()),
        });
        synced.map_err(|errno| {
            let why = "the new file is in its place, but a crash may bring the old one back";
            cannot_sync(errno).with_why(why).at(self.target.place())
        })
    }
}

impl Drop for Replacement {
    /// The file is still open, and marked.
    fn drop(&mut self) {
        if let Some(called) = &self.called
            && self.target.is_at(called, &self.own)
        {
            // If it fails, the next save tries again.
            let _ = place::unlink(self.target.folder.fd(), called);
        }
    }
}

/// Temporary files of a place.
impl SaveTarget {
    /// Creates a file, without a name if possible.
    fn open(&self, log: &Reasons) -> Result<(OwnedFd, Option<OsString>)> {
        let refused = match place::tmpfile(self.folder.fd()) {
            Ok(file) => match place::can_link(file.as_fd()) {
                Ok(()) => {
                    log.add(
                        About::File,
                        "without a name",
                        "it gets one when it is complete (O_TMPFILE)",
                    );
                    return Ok((file, None));
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
        let (called, file) = self.claim_new(PRIVATE)?;
        log.add(About::File, called.to_string_lossy(), refused);
        Ok((file, Some(called)))
    }

    /// A new file with these permissions and the first unused temporary name, marked as in use.
    fn claim_new(&self, mode: u32) -> Result<(OsString, OwnedFd)> {
        self.claim(|name| {
            let file = place::create(self.folder.fd(), name, mode)?;
            if self.keeps(name, file.as_fd()) {
                Ok(file)
            } else {
                Err(Errno::EXIST)
            }
        })
    }

    /// Marks a new file as in use. False if another save takes it for a leftover, and removes it.
    fn keeps(&self, name: &OsStr, file: BorrowedFd<'_>) -> bool {
        // Without support for marks nobody removes it.
        place::try_lock(file) != Err(Errno::AGAIN)
            && place::look_at(file).is_ok_and(|own| self.is_at(name, &own))
    }

    /// True if a name refers to this file.
    fn is_at(&self, name: &OsStr, file: &Named) -> bool {
        let there = self.folder.look_up(name).ok().flatten();
        there.is_some_and(|there| there.is(file))
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
        Err(Error::os(Verb::Write, Errno::BUSY)
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
        let folder = self.folder.fd();
        for name in self.names() {
            let found = self.folder.look_up(&name).ok().flatten();
            if found.is_none_or(|left| left.kind != FileType::RegularFile) {
                continue;
            }
            let Ok(file) = place::open(folder, &name) else {
                continue;
            };
            // The mark is held until the name is gone.
            if place::try_lock(file.as_fd()).is_ok() && self.keeps(&name, file.as_fd()) {
                // A file that may not be removed stays, and its name is skipped.
                let _ = place::unlink(folder, &name);
            }
        }
    }
}

/// Checks that this process may replace an existing file.
fn may_replace(target: &SaveTarget, old: &ExistingFile) -> Result<()> {
    let refuse = |why: &str, errno, remedy: Message| {
        Err(Error::os("cannot replace", errno)
            .with_why(why)
            .at(target.place())
            .with_remedy(remedy))
    };
    match old.is.kind {
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
    if old.is.immutable {
        let why = "it is immutable or append-only";
        return refuse(why, Errno::PERM, "remove its flag: chattr -i -a".into());
    }
    target.refuse_of_others(
        &old.is,
        "it is a file",
        "remove it first, or save elsewhere",
    )?;
    place::may_write(old.fd(), (target.folder.fd(), &target.name))
        .map_err(|errno| cannot_open(errno).at(target.place()))
}

const OWNER: &str = "its owner and permissions";
/// The access control list of a file (acl(5)).
const LIST: &str = "system.posix_acl_access";

fn cannot_keep(target: &SaveTarget, what: &str, errno: Errno) -> Error {
    Error::os(format!("cannot keep {what}"), errno)
        .at(target.place())
        .with_remedy("run as its owner, or remove it first")
}

/// Extended attributes that describe a file's bytes and are not kept: a write to the file would remove
/// them, too (capabilities(7)).
const OF_CONTENTS: [&str; 3] = ["security.capability", "security.ima", "security.evm"];

/// The error if no file can be created in the folder.
pub fn cannot_make(errno: Errno) -> Error {
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
    use crate::sys::file;
    use std::fs;
    use std::path::Path;

    /// As [`Replacement::create`] does where there is no O_TMPFILE.
    fn named(to: &Path) -> (Replacement, OwnedFd) {
        let target = SaveTarget::of(to, false).unwrap();
        target.clear_away();
        let (called, file) = target.claim_new(PRIVATE).unwrap();
        let beside = Replacement {
            replaces: false,
            called: Some(called),
            own: place::look_at(file.as_fd()).unwrap(),
            later: None,
            target,
        };
        (beside, file)
    }

    /// Another descriptor of a file, as another process has, with the mark.
    fn marked(path: &Path) -> fs::File {
        let file = fs::File::open(path).unwrap();
        place::try_lock(file.as_fd()).unwrap();
        file
    }

    fn names(dir: &Path) -> Vec<OsString> {
        let mut names: Vec<_> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_that_another_save_has_marked_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let target = SaveTarget::of(&dir.path().join("to"), false).unwrap();
        let name = target.names().next().unwrap();
        let file = place::create(target.folder.fd(), &name, PRIVATE).unwrap();
        // Between creation and mark, it looks like a leftover.
        let cleaner = marked(&dir.path().join(&name));
        assert!(!target.keeps(&name, file.as_fd()));
        // Closing it is not enough: a child that another test has just forked may have it too.
        place::unlock(cleaner.as_fd());
        assert!(target.keeps(&name, file.as_fd()));
        // Removed by the cleaner, and made again by a third.
        place::unlink(target.folder.fd(), &name).unwrap();
        assert!(!target.keeps(&name, file.as_fd()));
        fs::write(dir.path().join(&name), "other").unwrap();
        assert!(!target.keeps(&name, file.as_fd()));
    }

    #[test]
    fn names_in_use_are_not_cleared_away() {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("to");
        let (first, file) = named(&to);
        let (second, other) = named(&to);
        for beside in [&first, &second] {
            assert_eq!(beside.own.mode, 0o600);
        }
        assert_eq!(names(dir.path()), [".to.dmafile-0", ".to.dmafile-1"]);
        file::pwrite_all(file.as_fd(), b"first", 0).unwrap();
        file::pwrite_all(other.as_fd(), b"other", 0).unwrap();
        first.put(&file, false).unwrap();
        assert_eq!(fs::read(&to).unwrap(), b"first");
        second.put(&other, false).unwrap();
        assert_eq!(fs::read(&to).unwrap(), b"other");
        assert_eq!(names(dir.path()), ["to"]);
    }

    /// If it happens all the same, where marks do not reach other machines.
    #[test]
    fn another_file_is_neither_moved_into_place_nor_removed() {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("to");
        fs::write(&to, "old").unwrap();
        let (beside, file) = named(&to);
        let name = dir.path().join(beside.called.as_ref().unwrap());
        fs::remove_file(&name).unwrap();
        fs::write(&name, "incomplete").unwrap();
        let error = beside.put(&file, false).unwrap_err();
        assert!(error.to_string().contains("save it again"), "{error}");
        assert_eq!(fs::read(&to).unwrap(), b"old");
        assert_eq!(fs::read(&name).unwrap(), b"incomplete");
        // Nor by a save that fails.
        fs::remove_file(&name).unwrap();
        let (beside, file) = named(&to);
        fs::remove_file(&name).unwrap();
        fs::write(&name, "incomplete").unwrap();
        drop((beside, file));
        assert_eq!(fs::read(&name).unwrap(), b"incomplete");
    }
}
