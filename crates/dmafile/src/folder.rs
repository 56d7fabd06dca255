//! A folder that is held open, and whether other users could change what is in it.
//!
//! A path may lead elsewhere by the next system call; a descriptor refers to the same folder until it is closed. So
//! a folder is opened once, judged by what its descriptor says, and everything in it is reached through that
//! descriptor. The path is for messages only.

use crate::error::{Error, Result};
use crate::sys::place::{self, Named};
use crate::sys::{Errno, file};
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// How the names of private folders begin that have links to memory: COMMAND opens it by them, and a thaw makes them
/// again.
pub const LINKS_PREFIX: &str = "dmafile-path-";

/// A folder that is held open.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    /// To look up and change names in it.
    folder: OwnedFd,
    /// To list, lock and sync it; None without permission to list it.
    listed: Option<OwnedFd>,
}

/// The effective user.
pub fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// A random number, for a name that nothing else has.
pub fn random() -> u64 {
    u64::from_ne_bytes(crate::sys::host::random())
}

/// The folder of a path, and its last name, if it has one.
pub fn split(path: &Path) -> (&Path, Option<&OsStr>) {
    let folder = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    (folder.unwrap_or(Path::new(".")), path.file_name())
}

impl Folder {
    /// Opens a folder, and follows links.
    ///
    /// # Errors
    /// ENOENT, ENOTDIR, EACCES.
    pub fn open(path: &Path) -> Result<Self, Errno> {
        let (folder, listed) = place::folder(path)?;
        Ok(Self {
            path: path.to_path_buf(),
            folder,
            listed,
        })
    }

    /// Opens a folder in this one.
    ///
    /// # Errors
    /// As [`Folder::open`]; ENOTDIR for a symbolic link.
    pub fn within(&self, name: &OsStr) -> Result<Self, Errno> {
        let (folder, listed) = place::folder_in(self.fd(), name)?;
        Ok(Self {
            path: self.place(name),
            folder,
            listed,
        })
    }

    /// Opens a folder by a path that begins in this one, and follows links.
    ///
    /// # Errors
    /// As [`Folder::open`].
    pub fn below(&self, path: &Path) -> Result<Self, Errno> {
        let (folder, listed) = place::folder_from(self.fd(), path)?;
        Ok(Self {
            path: self.path.join(path),
            folder,
            listed,
        })
    }

    /// Creates a folder in this one.
    ///
    /// # Errors
    /// EEXIST; ENOENT or EPERM if another user has replaced it since, which is possible only in a folder that is not
    /// [trusted](Folder::trust).
    pub fn make(&self, name: &OsStr, mode: u32) -> Result<Self, Errno> {
        place::make_folder(self.fd(), name, mode)?;
        let made = self.within(name)?;
        if made.look()?.owner.0 == user() {
            Ok(made)
        } else {
            Err(Errno::PERM)
        }
    }

    /// As [`Folder::make`], if there is none, and otherwise as [`Folder::within`].
    ///
    /// # Errors
    /// As these two, except EEXIST.
    pub fn make_or_open(&self, name: &OsStr, mode: u32) -> Result<Self, Errno> {
        match self.make(name, mode) {
            Err(Errno::EXIST) => self.within(name),
            made => made,
        }
    }

    /// The path by which it was opened, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of a file in it, for messages.
    pub fn place(&self, name: impl AsRef<Path>) -> PathBuf {
        self.path.join(name)
    }

    /// A path to a file in it that leads there wherever the folder is moved, for calls that take no descriptor. Without
    /// `/proc` it is the usual path.
    pub fn path_of(&self, name: impl AsRef<Path>) -> PathBuf {
        if place::has_link(self.fd()) {
            place::link_of(self.fd()).join(name)
        } else {
            self.place(name)
        }
    }

    /// Its descriptor, for calls that take the descriptor of a folder and a name (`openat`).
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.folder.as_fd()
    }

    /// Its descriptor for listing, locking and syncing; None without permission to list it.
    pub fn listed(&self) -> Option<BorrowedFd<'_>> {
        self.listed.as_ref().map(AsFd::as_fd)
    }

    /// Its owner, permissions and identity.
    ///
    /// # Errors
    /// Those of stat(2).
    pub fn look(&self) -> Result<Named, Errno> {
        place::look_at(self.fd())
    }

    /// What has a name in it; None if nothing has. A symbolic link is not followed.
    ///
    /// # Errors
    /// EACCES without permission to enter the folder.
    pub fn look_up(&self, name: &OsStr) -> Result<Option<Named>, Errno> {
        place::look_up(self.fd(), name)
    }

    /// The names in it, in no order. They are read from the start each time.
    ///
    /// # Errors
    /// EACCES without permission to list it.
    pub fn names(&self) -> Result<Vec<OsString>, Errno> {
        place::names(self.listed().ok_or(Errno::ACCESS)?)
    }

    /// Returns `true` if a name in this folder still refers to `other`.
    pub fn has(&self, name: &OsStr, other: &Folder) -> bool {
        let there = self.look_up(name).ok().flatten();
        let own = other.look().ok();
        matches!((there, own), (Some(there), Some(own)) if there.is(&own))
    }

    /// Removes a name; a folder must be empty.
    ///
    /// # Errors
    /// ENOENT, EACCES, ENOTEMPTY and others of unlinkat(2).
    pub fn remove(&self, name: &OsStr) -> Result<(), Errno> {
        match place::unlink(self.fd(), name) {
            Err(Errno::ISDIR) => place::remove_folder(self.fd(), name),
            done => done,
        }
    }

    /// Refuses a folder in which users other than root and this one could create, replace or remove files.
    ///
    /// # Errors
    /// EPERM if it belongs to another user, if all users may write to it, or if a group may, except a group that has
    /// only this user.
    pub fn trust(&self) -> Result<()> {
        self.trust_with(None)
    }

    /// As [`Folder::trust`], but the folder may also belong to the user `other`.
    ///
    /// # Errors
    /// As [`Folder::trust`].
    pub fn trust_with(&self, other: Option<u32>) -> Result<()> {
        let refuse = |why: String, remedy: &str| {
            let error = Error::new("cannot use the folder", why).with_errno(Errno::PERM);
            Err(error
                .at(self.path.display().to_string())
                .with_remedy(remedy))
        };
        let found = self.look().map_err(|errno| {
            Error::os("cannot use the folder", errno).at(self.path.display().to_string())
        })?;
        let owner = found.owner.0;
        if !is_trusted(owner) && Some(owner) != other {
            let why = format!("it belongs to another user ({owner})");
            return refuse(why, "use a folder of your own");
        }
        match others_may_write(&found) {
            Some(Writers::All) => refuse(
                "every user may write to it".to_string(),
                "use a folder that others can't write to",
            ),
            Some(Writers::Group(group)) => refuse(
                format!("its group ({group}) may write to it"),
                "remove that permission (chmod g-w), or use another folder",
            ),
            None => Ok(()),
        }
    }

    /// Refuses a folder whose path other users could make lead elsewhere: by renaming or replacing it, or a folder that
    /// it is in. In a sticky folder, such as `/tmp`, they cannot rename what belongs to this user.
    ///
    /// # Errors
    /// EPERM for a folder above it that other users may change.
    pub fn trust_path(&self) -> Result<()> {
        let cannot =
            |errno| Error::os("cannot use the folder", errno).at(self.path.display().to_string());
        let mut below = self.look().map_err(cannot)?;
        let mut folder = place::folder_in(self.fd(), OsStr::new(".."))
            .map_err(cannot)?
            .0;
        loop {
            let found = place::look_at(folder.as_fd()).map_err(cannot)?;
            if found.is(&below) {
                return Ok(());
            }
            let others = others_may_write(&found).is_some() && !found.is_sticky();
            if others || !is_trusted(found.owner.0) {
                let place = std::fs::read_link(place::link_of(folder.as_fd())).ok();
                let place = place.unwrap_or_else(|| self.path.join(".."));
                let why = "another user may rename or replace what is in it";
                return Err(Error::new("cannot use the folder", why)
                    .with_errno(Errno::PERM)
                    .at(place.display().to_string())
                    .with_remedy("use a folder whose parents belong to root or to you"));
            }
            let above = place::folder_in(folder.as_fd(), OsStr::new(".."))
                .map_err(cannot)?
                .0;
            (below, folder) = (found, above);
        }
    }

    /// A second descriptor of the folder.
    ///
    /// # Errors
    /// EMFILE.
    pub fn dup(&self) -> Result<Self, Errno> {
        let listed = self.listed().map(file::dup).transpose()?;
        Ok(Self {
            path: self.path.clone(),
            folder: file::dup(self.fd())?,
            listed,
        })
    }
}

/// True if what belongs to a user may be relied on: root and this user; and the owner of `/`, which in a user
/// namespace without root is the user of all that the namespace does not map.
fn is_trusted(owner: u32) -> bool {
    let of_root = || {
        place::look_up(rustix::fs::CWD, OsStr::new("/"))
            .ok()
            .flatten()
    };
    [0, user()].contains(&owner) || of_root().is_some_and(|root| root.owner.0 == owner)
}

/// Users other than the owner that may write.
enum Writers {
    All,
    Group(u32),
}

/// Who may write to a file, besides its owner. With an access control list the bits of the group are its mask, so they
/// are set if any other user or group may write.
fn others_may_write(file: &Named) -> Option<Writers> {
    let (user, group) = file.owner;
    if file.mode & 0o002 != 0 {
        return Some(Writers::All);
    }
    (file.mode & 0o020 != 0 && !has_only(group, user)).then_some(Writers::Group(group))
}

/// True if a group has only one user: it has the number of that user, and no other member (useradd(8),
/// USERGROUPS_ENAB). Groups that are not in `/etc/group` are not known to.
fn has_only(group: u32, user: u32) -> bool {
    group == user
        && std::fs::read_to_string("/etc/group").is_ok_and(|text| is_private(&text, group))
}

/// True if the text of `/etc/group` has a group, and with no other member than the user of its name.
fn is_private(text: &str, group: u32) -> bool {
    let mut found = text.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let number = fields.nth(1)?.parse::<u32>().ok()?;
        (number == group).then(|| (name, fields.next().unwrap_or("")))
    });
    let mut members = found.next().into_iter().chain(found).peekable();
    members.peek().is_some()
        && members.all(|(name, members)| {
            members
                .split(',')
                .all(|member| member.trim().is_empty() || member == name)
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn open(path: &Path) -> Folder {
        Folder::open(path).unwrap()
    }

    #[test]
    fn a_folder_is_the_same_wherever_its_path_leads() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir(at("one")).unwrap();
        std::fs::create_dir(at("two")).unwrap();
        symlink("one", at("current")).unwrap();
        let folder = open(&at("current"));
        std::fs::remove_file(at("current")).unwrap();
        symlink("two", at("current")).unwrap();
        std::fs::write(folder.path_of("file"), "x").unwrap();
        std::fs::rename(at("one"), at("three")).unwrap();
        std::fs::write(folder.path_of("other"), "x").unwrap();
        let mut names = open(&at("three")).names().unwrap();
        names.sort();
        assert_eq!(names, ["file", "other"]);
        assert!(open(&at("two")).names().unwrap().is_empty());
        // A second list is as complete as the first.
        assert_eq!(folder.names().unwrap().len(), 2);
        assert_eq!(folder.names().unwrap().len(), 2);
    }

    #[test]
    fn folders_inside_are_made_and_opened_without_following_links() {
        let dir = tempfile::tempdir().unwrap();
        let folder = open(dir.path());
        let name = OsStr::new("sub");
        let sub = folder.make(name, 0o700).unwrap();
        assert_eq!(folder.make(name, 0o700).unwrap_err(), Errno::EXIST);
        assert!(folder.has(name, &sub));
        assert_eq!(sub.look().unwrap().mode, 0o700);
        symlink("sub", dir.path().join("link")).unwrap();
        let errno = folder.make_or_open(OsStr::new("link"), 0o700).unwrap_err();
        assert_eq!(errno, Errno::NOTDIR);
        assert_eq!(folder.within(OsStr::new("none")).unwrap_err(), Errno::NOENT);
        folder.remove(name).unwrap();
        folder.remove(OsStr::new("link")).unwrap();
        folder.make(name, 0o700).unwrap();
        assert!(!folder.has(name, &sub));
    }

    #[test]
    fn a_folder_that_others_may_write_to_is_not_trusted() {
        let dir = tempfile::tempdir().unwrap();
        let folder = open(dir.path());
        let with = |mode| {
            std::fs::set_permissions(dir.path(), Permissions::from_mode(mode)).unwrap();
            folder.trust().map_err(|error| error.raw_os_error())
        };
        assert_eq!(with(0o700), Ok(()));
        assert_eq!(with(0o755), Ok(()));
        assert_eq!(with(0o757), Err(Some(libc::EPERM)));
        assert_eq!(with(0o1777), Err(Some(libc::EPERM)));
        if user() == 0 {
            let give = |owner, group| {
                std::os::unix::fs::chown(dir.path(), Some(owner), Some(group)).unwrap();
            };
            give(0, 65534);
            assert_eq!(with(0o2775), Err(Some(libc::EPERM)));
            assert_eq!(with(0o755), Ok(()));
            give(65534, 65534);
            assert_eq!(with(0o700), Err(Some(libc::EPERM)));
            folder.trust_with(Some(65534)).unwrap();
            folder.trust_with(Some(65533)).unwrap_err();
        }
    }

    #[test]
    fn a_path_is_trusted_if_nobody_else_can_change_where_it_leads() {
        let dir = tempfile::tempdir().unwrap();
        let (above, below) = (dir.path().join("above"), dir.path().join("above/below"));
        std::fs::create_dir_all(&below).unwrap();
        let folder = open(&below);
        let with = |mode| {
            std::fs::set_permissions(&above, Permissions::from_mode(mode)).unwrap();
            folder.trust_path().map_err(|error| error.raw_os_error())
        };
        assert_eq!(with(0o755), Ok(()));
        assert_eq!(with(0o1777), Ok(()));
        assert_eq!(with(0o777), Err(Some(libc::EPERM)));
        if user() == 0 {
            std::os::unix::fs::chown(&above, Some(65534), None).unwrap();
            assert_eq!(with(0o755), Err(Some(libc::EPERM)));
            assert_eq!(with(0o1777), Err(Some(libc::EPERM)));
        }
    }

    #[test]
    fn a_private_group_has_the_number_of_its_user_and_no_other_member() {
        let text = "root:x:0:\nann:x:1000:ann\nbob:x:1001:ann\nbob2:x:1002:,\n";
        for (group, want) in [
            (0, true),
            (1000, true),
            (1001, false),
            (1002, true),
            (5, false),
        ] {
            assert_eq!(is_private(text, group), want, "{group}");
        }
        assert!(!is_private("a:x:7:\nb:x:7:eve\n", 7));
    }
}
