//! A folder that any loader can read as the model: held files are links to their memory, others are links
//! to the originals.

use super::set::Set;
use dmafile::internal::{folder::Folder, folder::split, folder::user, is_hidden};
use dmafile::{Error, Result};
use dmafile_sys::place::{self, Named};
use dmafile_sys::{Errno, errno, file, process};
use rustix::fs::FileType;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// The file that marks a folder as made by this module, and lists the links that may be removed. It is locked
/// (flock(2)) for as long as its holder runs.
const MARK: &str = ".dmafile-hold";
/// The maximum length of that file in bytes.
const LONGEST: u64 = 64 << 20;

/// The folder; removed when this is dropped.
pub(super) struct LinkFolder {
    spot: Spot,
    folder: Folder,
    identity: Named,
    /// Its name at the moment.
    name: OsString,
    mark: OwnedFd,
    /// The links in it, and their targets.
    links: Vec<(OsString, PathBuf)>,
    /// The name that another holder's folder has got, until [`LinkFolder::stay`].
    replaced: Option<OsString>,
}

/// Where a folder is to be.
pub(super) struct Spot {
    parent: Folder,
    name: OsString,
    path: PathBuf,
    /// The socket of the holder.
    at: PathBuf,
}

/// What is there already.
enum There {
    Nothing,
    /// An empty folder without a mark.
    Empty(Folder),
    /// The folder of a holder that has ended, and its mark, locked.
    Left(Folder, OwnedFd),
    /// The folder of the holder that is to be replaced.
    Other,
}

impl Spot {
    /// Finds out whether the folder can be made there, before a long load: it must be empty, or left behind by an
    /// earlier holder, or belong to the holder at the socket `at` that is to be replaced.
    ///
    /// # Errors
    /// EEXIST for a folder with other files, EBUSY for that of another holder, EPERM if other users could change it.
    pub(super) fn check(path: &Path, at: &Path, replace: bool) -> Result<Self> {
        let cannot = |errno| cannot_make(errno).at(path.display().to_string());
        if !process::folder(std::process::id()).exists() {
            return Err(cannot(Errno::NOENT)
                .with_why("its links lead to /proc, which is not mounted")
                .with_remedy("mount /proc, or do without the folder"));
        }
        let path = std::path::absolute(path).map_err(|error| cannot(errno(error)))?;
        let (parent, Some(name)) = split(&path) else {
            return Err(cannot(Errno::EXIST).with_remedy("name a folder in it"));
        };
        let spot = Self {
            parent: Folder::open(parent).map_err(cannot)?,
            name: name.to_os_string(),
            at: std::path::absolute(at).unwrap_or_else(|_| at.to_path_buf()),
            path: path.clone(),
        };
        spot.there(replace)?;
        Ok(spot)
    }

    fn cannot(&self, errno: Errno) -> Error {
        cannot_make(errno).at(self.path.display().to_string())
    }

    fn there(&self, replace: bool) -> Result<There> {
        let folder = match self.parent.within(&self.name) {
            Ok(folder) => folder,
            Err(Errno::NOENT) => return Ok(There::Nothing),
            Err(Errno::NOTDIR) => {
                let error = self
                    .cannot(Errno::EXIST)
                    .with_why("it is a link, or not a folder");
                return Err(error.with_remedy("name a folder that is empty or does not exist"));
            }
            Err(errno) => return Err(self.cannot(errno)),
        };
        let cannot = |errno| self.cannot(errno);
        folder.trust()?;
        folder.trust_path()?;
        let names = folder.names().map_err(cannot)?;
        let not_empty = || {
            let error = self.cannot(Errno::EXIST).with_why("it is not empty");
            error.with_remedy("name a folder that is empty or does not exist")
        };
        if names.is_empty() {
            return Ok(There::Empty(folder));
        }
        let Some((mark, locked)) = open_mark(&folder).map_err(cannot)? else {
            return Err(not_empty());
        };
        let told = Mark::read(&mark);
        if !locked && told.is_alive() {
            return if replace && told.at == self.at {
                Ok(There::Other)
            } else {
                Err(self
                    .cannot(Errno::BUSY)
                    .with_why("another holder uses it")
                    .with_remedy("name another folder, or release that holder"))
            };
        }
        let is_left = |name: &OsStr| name == MARK || told.made(&folder, name);
        match names.iter().all(|name| is_left(name)) {
            // A process that the holder had forked keeps the lock.
            true if !locked => Ok(There::Other),
            true => Ok(There::Left(folder, mark)),
            false => Err(not_empty()),
        }
    }
}

impl LinkFolder {
    /// Creates it next to its place, or in its place if nothing else uses that.
    pub(super) fn make(spot: Spot, set: &Set, asked: &[PathBuf], replace: bool) -> Result<Self> {
        let (folder, name, mark) = match spot.there(replace)? {
            There::Nothing => {
                let folder = spot.parent.make(&spot.name, 0o700);
                (
                    folder.map_err(|errno| spot.cannot(errno))?,
                    spot.name.clone(),
                    None,
                )
            }
            There::Empty(folder) => (folder, spot.name.clone(), None),
            There::Left(folder, mark) => (folder, spot.name.clone(), Some(mark)),
            There::Other => {
                let mut beside = OsString::from(".");
                beside.push(&spot.name);
                beside.push(".dmafile-hold");
                (spot.make_beside(&beside)?, beside, None)
            }
        };
        let cannot = |errno| cannot_make(errno).at(spot.path.display().to_string());
        let identity = folder.look().map_err(cannot)?;
        let has_mark = mark.is_some();
        let mark = match mark {
            Some(mark) => mark,
            None => new_mark(&folder).map_err(|errno| {
                let _ = spot.parent.remove(&name);
                cannot(errno)
            })?,
        };
        let mut made = Self {
            links: Vec::new(),
            replaced: None,
            spot,
            folder,
            identity,
            name,
            mark,
        };
        if has_mark {
            Mark::read(&made.mark).clear(&made.folder);
        }
        made.folder.trust()?;
        made.folder.trust_path()?;
        made.fill(set, asked)
            .map_err(|errno| made.spot.cannot(errno))?;
        Ok(made)
    }

    fn fill(&mut self, set: &Set, asked: &[PathBuf]) -> Result<(), Errno> {
        let mut links = Vec::new();
        for member in &set.members {
            let number = member.fds[0].as_raw_fd();
            let memory = format!("/proc/{}/fd/{number}", std::process::id());
            links.push((member.info.file_name(), PathBuf::from(memory)));
        }
        for path in asked {
            let index = path.as_os_str().as_bytes().ends_with(b".index.json");
            let beside = match path.is_dir() {
                true => path.as_path(),
                false if index => path.parent().unwrap_or(Path::new("")),
                false => continue,
            };
            let beside = std::path::absolute(beside).map_err(errno)?;
            for entry in std::fs::read_dir(beside).map_err(errno)? {
                let entry = entry.map_err(errno)?;
                let name = entry.file_name();
                if !is_hidden(&name) {
                    links.push((name, entry.path()));
                }
            }
        }
        // Listed before they are made, so that a killed holder leaves none that is not listed.
        Mark::new(&self.spot.at, &links).write(&self.mark)?;
        for (name, target) in links {
            match place::symlink(self.folder.fd(), &name, &target) {
                // It is held, or two folders have a file with this name: the first one counts.
                Err(Errno::EXIST) => continue,
                linked => linked?,
            }
            self.links.push((name, target));
        }
        Ok(())
    }

    /// Moves it to its place, from which it goes back if this is dropped before [`LinkFolder::stay`].
    pub(super) fn put(&mut self) -> Result<()> {
        if self.name == self.spot.name {
            return Ok(());
        }
        let folder = self.spot.parent.fd();
        let (own, place) = (&self.name, &self.spot.name);
        match place::exchange(folder, own, place) {
            Ok(()) => {
                self.replaced = Some(std::mem::replace(&mut self.name, place.clone()));
                Ok(())
            }
            Err(Errno::NOENT) => {
                // The other holder has just ended.
                place::rename_new(folder, own, place).map_err(|errno| self.spot.cannot(errno))?;
                self.name = place.clone();
                Ok(())
            }
            Err(Errno::BUSY) => Err(self
                .spot
                .cannot(Errno::BUSY)
                .with_why("it is a mount point, and cannot be replaced in one step")
                .with_remedy("name a folder in it")),
            Err(errno) => Err(self.spot.cannot(errno)),
        }
    }

    /// Stays in its place: removes the folder that it has replaced.
    pub(super) fn stay(&mut self) {
        let Some(name) = self.replaced.take() else {
            return;
        };
        let parent = &self.spot.parent;
        if let Ok(other) = parent.within(&name) {
            if let Ok(Some((mark, _))) = open_mark(&other) {
                Mark::read(&mark).clear(&other);
            }
            remove_marked(parent, &name, &other);
        }
    }
}

impl Drop for LinkFolder {
    fn drop(&mut self) {
        let parent = &self.spot.parent;
        let is_own = |name: &OsStr| {
            let there = parent.look_up(name).ok().flatten();
            there.is_some_and(|there| there.is(&self.identity))
        };
        if let Some(other) = &self.replaced
            && is_own(&self.name)
            && place::exchange(parent.fd(), other, &self.name).is_ok()
        {
            let place = std::mem::replace(&mut self.name, other.clone());
            // Its holder removes it, unless it has ended while this folder was in its place.
            if let Ok(theirs) = parent.within(&place) {
                let _ = remove_left(parent, &place, &theirs);
            }
        }
        remove_links(&self.folder, &self.links);
        // If another holder has replaced it, that one removes the folder.
        remove_marked(parent, &self.name, &self.folder);
        place::unlock(self.mark.as_fd());
    }
}

/// Removes a mark, and a folder that has nothing else in it. A folder with other files stays.
fn remove_marked(parent: &Folder, name: &OsStr, folder: &Folder) {
    let _ = folder.remove(OsStr::new(MARK));
    if parent.has(name, folder) {
        let _ = parent.remove(name);
    }
}

fn remove_links(folder: &Folder, links: &[(OsString, PathBuf)]) {
    for (name, target) in links {
        if place::read_link(folder.fd(), name).as_ref() == Ok(target) {
            let _ = folder.remove(name);
        }
    }
}

fn cannot_make(errno: Errno) -> Error {
    Error::os("cannot create the folder", errno)
}

impl Spot {
    /// Creates a folder with a temporary name. One that a killed holder has left is removed first.
    fn make_beside(&self, name: &OsStr) -> Result<Folder> {
        let busy = || {
            let error = self
                .cannot(Errno::BUSY)
                .with_why("another holder is replacing it");
            error.with_remedy(format!(
                "wait for it, or remove {}",
                self.parent.place(name).display()
            ))
        };
        if let Ok(left) = self.parent.within(name) {
            left.trust()?;
            let removed = remove_left(&self.parent, name, &left);
            if !removed.map_err(|errno| self.cannot(errno))? {
                return Err(busy());
            }
        }
        self.parent.make(name, 0o700).map_err(|errno| match errno {
            Errno::EXIST => busy(),
            errno => self.cannot(errno),
        })
    }
}

/// Creates the mark, and locks it.
fn new_mark(folder: &Folder) -> Result<OwnedFd, Errno> {
    let mark = place::create_private(folder.fd(), OsStr::new(MARK))?;
    // Without support for locks (flock(2)), the process in the mark decides.
    let _ = place::try_lock(mark.as_fd());
    Ok(mark)
}

/// Opens the mark of a folder, and whether it could be locked; None if there is none that this user made.
fn open_mark(folder: &Folder) -> Result<Option<(OwnedFd, bool)>, Errno> {
    let mark = match place::open(folder.fd(), OsStr::new(MARK)) {
        Err(Errno::NOENT | Errno::LOOP | Errno::NXIO | Errno::ISDIR) => return Ok(None),
        mark => mark?,
    };
    let found = place::look_at(mark.as_fd())?;
    if found.kind != FileType::RegularFile
        || ![0, user()].contains(&found.owner.0)
        || found.links != 1
    {
        return Ok(None);
    }
    let locked = place::try_lock(mark.as_fd()).is_ok();
    Ok(Some((mark, locked)))
}

/// Removes what a holder that has ended left; false if a holder uses it.
fn remove_left(parent: &Folder, name: &OsStr, folder: &Folder) -> Result<bool, Errno> {
    if let Some((mark, locked)) = open_mark(folder)? {
        let mark = Mark::read(&mark);
        if !locked && mark.is_alive() {
            return Ok(false);
        }
        mark.clear(folder);
    }
    remove_marked(parent, name, folder);
    Ok(true)
}

/// What a mark says: the process of the holder, its socket, and the links.
#[derive(Default)]
struct Mark {
    pid: u32,
    /// When the process started, and its PID namespace: a number alone may be another process's by now.
    process: String,
    at: PathBuf,
    links: Vec<(OsString, PathBuf)>,
}

impl Mark {
    fn new(at: &Path, links: &[(OsString, PathBuf)]) -> Self {
        Self {
            pid: std::process::id(),
            process: process::identity(std::process::id()).unwrap_or_default(),
            at: at.to_path_buf(),
            links: links.to_vec(),
        }
    }

    /// Fields that end with a zero byte, which is in no path.
    fn write(&self, mark: &OwnedFd) -> Result<(), Errno> {
        let mut text = Vec::new();
        let mut add = |field: &OsStr| {
            text.extend(field.as_bytes());
            text.push(0);
        };
        add(OsStr::new(&self.pid.to_string()));
        add(OsStr::new(&self.process));
        add(self.at.as_os_str());
        for (name, target) in &self.links {
            add(name);
            add(target.as_os_str());
        }
        rustix::fs::ftruncate(mark, 0)?;
        file::pwrite_all(mark.as_fd(), &text, 0)
    }

    /// An incomplete mark has no links.
    fn read(mark: &OwnedFd) -> Self {
        let read = || {
            let size = file::stat(mark.as_fd()).ok()?.size;
            let mut text = vec![0; usize::try_from(size.min(LONGEST)).ok()?];
            file::pread_all(mark.as_fd(), &mut text, 0).ok()?;
            Self::parse(&text)
        };
        read().unwrap_or_default()
    }

    fn parse(text: &[u8]) -> Option<Self> {
        let text = text.strip_suffix(&[0])?;
        let mut fields = text.split(|&byte| byte == 0);
        let mut next = || Some(OsString::from_vec(fields.next()?.to_vec()));
        let mut found = Self {
            pid: next()?.to_str()?.parse().ok()?,
            process: next()?.into_string().ok()?,
            at: next()?.into(),
            links: Vec::new(),
        };
        while let (Some(name), Some(target)) = (next(), next()) {
            let is_name = !name.is_empty() && !name.as_bytes().contains(&b'/');
            found.links.push((is_name.then_some(name)?, target.into()));
        }
        Some(found)
    }

    /// True if the holder may still run: for certain if its process is another one by now, or in another PID namespace,
    /// it cannot be found out.
    fn is_alive(&self) -> bool {
        let here = process::identity(std::process::id()).unwrap_or_default();
        let namespace = |identity: &str| identity.split(' ').next().map(str::to_string);
        let is_here = !here.is_empty() && namespace(&here) == namespace(&self.process);
        !is_here || process::identity(self.pid).as_deref() == Some(&*self.process)
    }

    fn made(&self, folder: &Folder, name: &OsStr) -> bool {
        let target = place::read_link(folder.fd(), name);
        let target = target.as_ref().ok();
        self.links
            .iter()
            .any(|(own, to)| own == name && Some(to) == target)
    }

    fn clear(&self, folder: &Folder) {
        remove_links(folder, &self.links);
    }
}

#[cfg(fuzzing)]
#[path = "../../../fuzz/inside/mark.rs"]
pub(super) mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_read_as_it_was_written() {
        let file = tempfile::tempfile().unwrap().into();
        let links = vec![
            (
                OsString::from_vec(b"model\xff.gguf".to_vec()),
                PathBuf::from("/proc/7/fd/3"),
            ),
            ("config.json".into(), "/models/config.json".into()),
        ];
        let mark = Mark::new(Path::new("/run/x"), &links);
        mark.write(&file).unwrap();
        let read = Mark::read(&file);
        assert_eq!(
            (read.pid, &*read.at),
            (std::process::id(), Path::new("/run/x"))
        );
        assert_eq!(read.links, links);
        assert!(read.is_alive());
        Mark { pid: 1, ..mark }.write(&file).unwrap();
        assert!(!Mark::read(&file).is_alive());
    }

    /// The new holder fails after it has put its folder in place; the old one has ended meanwhile, or ends afterwards.
    #[test]
    fn no_folder_is_left_if_a_holder_ends_while_it_is_being_replaced() {
        let set = Set {
            name: "m".to_string(),
            members: Vec::new(),
            since: 0,
        };
        for ends_first in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("links");
            let make = |replace| {
                let spot = Spot::check(&path, Path::new("/run/m"), replace).unwrap();
                LinkFolder::make(spot, &set, &[], replace).unwrap()
            };
            let old = make(false);
            let mut new = make(true);
            new.put().unwrap();
            let (first, second) = if ends_first { (old, new) } else { (new, old) };
            drop(first);
            assert!(path.exists(), "the second one has it");
            drop(second);
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn a_mark_of_another_form_lists_nothing() {
        for bad in [
            "",
            "x",
            "1\0p\0",
            "1\0p\0/at\0../x\0/y\0",
            "x\0p\0/at\0a\0b\0",
        ] {
            assert!(
                Mark::parse(bad.as_bytes()).is_none_or(|mark| mark.links.is_empty()),
                "{bad:?}"
            );
        }
        let cut = Mark::parse(b"1\0p\0/at\0a\0b\0c\0").unwrap();
        assert_eq!(cut.links.len(), 1);
    }
}
