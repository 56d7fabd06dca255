//! The private folders by whose links a command opens held memory as a file (`{}` of `dmafile take`). The command
//! has a lock on its folder, and the folder is removed when the lock is free; so a thaw makes it again.

use dmafile::internal::Verb;
use dmafile::internal::folder::{Folder, LINKS_PREFIX, split, user};
use dmafile::{Error, Result};
use dmafile_sys::{Errno, file, place, process, stat};
use rustix::fs::{FlockOperation, flock, symlinkat};
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// A folder, and the links in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LinkFolder {
    pub path: PathBuf,
    pub user: u32,
    pub group: u32,
    /// Paths in the folder, and where they lead.
    pub links: Vec<(PathBuf, PathBuf)>,
}

/// The folders that these processes have a lock on, and the descriptors by process.
pub(crate) fn of(processes: &[u32]) -> (Vec<LinkFolder>, Vec<(u32, u32)>) {
    let (mut folders, mut descriptors) = (Vec::<LinkFolder>::new(), Vec::new());
    for &pid in processes {
        for (fd, path) in process::links(&process::folder(pid)).unwrap_or_default() {
            let name = path.file_name().unwrap_or_default();
            if !name.as_encoded_bytes().starts_with(LINKS_PREFIX.as_bytes()) {
                continue;
            }
            let open = process::folder(pid).join("fd").join(fd.to_string());
            let Ok(stat) = file::open(&open, false).and_then(stat::of) else {
                continue;
            };
            descriptors.push((pid, fd));
            if folders.iter().all(|one| one.path != path) {
                folders.push(LinkFolder {
                    links: links(&open),
                    path,
                    user: stat.owner.0,
                    group: stat.owner.1,
                });
            }
        }
    }
    (folders, descriptors)
}

/// The links in a folder, and in folders in it.
fn links(folder: &Path) -> Vec<(PathBuf, PathBuf)> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = PathBuf::from(entry.file_name());
        match std::fs::read_link(entry.path()) {
            Ok(target) => all.push((name, target)),
            Err(_) if entry.file_type().is_ok_and(|kind| kind.is_dir()) => {
                let inner = links(&entry.path()).into_iter();
                all.extend(inner.map(|(inner, target)| (name.join(inner), target)));
            }
            Err(_) => {}
        }
    }
    all
}

impl LinkFolder {
    /// How criu names it.
    pub fn key(&self) -> String {
        let path = self.path.to_string_lossy();
        path.trim_start_matches('/').to_string()
    }

    /// Makes it again, with its links, or opens it if another thaw has made it. Returns the descriptor that has the
    /// lock, which all thawed processes share.
    ///
    /// # Errors
    /// EPERM if what has its name is of another user, or open to others: they could make the path lead elsewhere.
    pub fn put(&self, what: Verb) -> Result<OwnedFd> {
        let failed = |errno: Errno| Error::os(what, errno).at(self.path.display().to_string());
        let (parent, Some(name)) = split(&self.path) else {
            return Err(failed(Errno::INVAL));
        };
        let parent = Folder::open(parent).map_err(failed)?;
        let folder = match parent.make(name, 0o700) {
            Ok(made) => {
                for (link, target) in &self.links {
                    self.put_link(&made, link, target).map_err(failed)?;
                }
                self.own(&made).map_err(failed)?;
                made
            }
            Err(Errno::EXIST) => parent.within(name).map_err(failed)?,
            Err(errno) => return Err(failed(errno)),
        };
        let named = folder.look().map_err(failed)?;
        // Another thaw may just have made it, and not have given it to the user yet.
        if ![self.user, user()].contains(&named.owner.0) || named.mode & 0o077 != 0 {
            return Err(failed(Errno::PERM).with_why("others could make it lead elsewhere"));
        }
        let fd = folder.listed().ok_or_else(|| failed(Errno::ACCESS))?;
        // EAGAIN: the process that was frozen runs on, and has it alone.
        match flock(fd, FlockOperation::NonBlockingLockShared) {
            Ok(()) | Err(Errno::AGAIN) => {}
            Err(errno) => return Err(failed(errno)),
        }
        file::dup(fd).map_err(failed)
    }

    fn put_link(&self, folder: &Folder, link: &Path, target: &Path) -> Result<(), Errno> {
        let name = link.file_name().ok_or(Errno::INVAL)?;
        match link.parent().map(Path::as_os_str) {
            Some(inner) if !inner.is_empty() => {
                let inner = folder.make_or_open(inner, 0o700)?;
                self.own(&inner)?;
                symlinkat(target, inner.fd(), name)
            }
            _ => symlinkat(target, folder.fd(), name),
        }
    }

    fn own(&self, folder: &Folder) -> Result<(), Errno> {
        let fd = folder.listed().ok_or(Errno::ACCESS)?;
        place::own(fd, (self.user, self.group))
    }

    /// True if nothing in it leads out of it, and its name is that of such a folder.
    pub fn is_plain(&self) -> bool {
        let plain = |part: &OsStr| part != ".." && part != "." && !part.is_empty();
        let name = self.path.file_name().unwrap_or_default();
        self.path.is_absolute()
            && name.as_encoded_bytes().starts_with(LINKS_PREFIX.as_bytes())
            && self.path.iter().all(plain)
            && self.links.iter().all(|(link, _)| {
                link.is_relative() && link.iter().count() <= 2 && link.iter().all(plain)
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Mode, mkdir};

    #[test]
    fn what_others_could_change_is_not_taken_for_the_folder() {
        let parent = tempfile::tempdir().unwrap();
        let own = user();
        let folder = |name: &str, user| LinkFolder {
            path: parent.path().join(format!("{LINKS_PREFIX}{name}")),
            user,
            group: stat::of(std::fs::File::open(parent.path()).unwrap())
                .unwrap()
                .owner
                .1,
            links: vec![
                ("model/a".into(), "/proc/7/fd/3".into()),
                ("b".into(), "/x".into()),
            ],
        };
        let made = folder("made", own);
        let lock = made.put(Verb::Thaw).unwrap();
        let mut found = links(&made.path);
        found.sort();
        assert_eq!(found, [made.links[1].clone(), made.links[0].clone()]);
        // Another thaw, at the same time.
        made.put(Verb::Thaw).unwrap();
        drop(lock);
        let open = folder("open", own);
        mkdir(&open.path, Mode::from_raw_mode(0o700)).unwrap();
        for (mode, is_safe) in [(0o700, true), (0o755, false), (0o720, false)] {
            rustix::fs::chmod(&open.path, Mode::from_raw_mode(mode)).unwrap();
            let put = open.put(Verb::Thaw);
            assert_eq!(put.is_ok(), is_safe, "{mode:o}");
            assert!(put.is_ok() || put.unwrap_err().raw_os_error() == Some(1));
        }
        rustix::fs::chmod(&open.path, Mode::from_raw_mode(0o700)).unwrap();
        // Only root can give it away.
        if std::os::unix::fs::chown(&open.path, Some(own + 1), None).is_ok() {
            assert_eq!(open.put(Verb::Thaw).unwrap_err().raw_os_error(), Some(1));
        }
        assert!(links(&open.path).is_empty());
    }
}
