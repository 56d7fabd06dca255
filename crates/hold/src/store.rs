//! What the service manager keeps for the next start of a holder: the descriptors, and a memfd with a table
//! that describes them.

use super::identity::FileIdentity;
use super::load::HoldOptions;
use super::protocol::HeldInfo;
use super::set::{Member, Set};
use super::systemd::Manager;
use dmafile::internal::{Hasher, is_hidden};
use dmafile::{Buffer, Error, Result, Verify};
use dmafile_sys::{Errno, file, host, memfd};
use rustix::fs::SealFlags;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// The maximum length of the table in bytes.
const LONGEST: u64 = 16 << 20;
/// The version of the table.
const VERSION: u32 = 1;
/// The seals of memory that nothing can change any more.
const SEALS: SealFlags = SealFlags::WRITE
    .union(SealFlags::SHRINK)
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// Describes the descriptors.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoreTable {
    v: u32,
    /// The kernel's boot that the memory was loaded in: it may have been handed over to another kernel since.
    boot: String,
    since: u64,
    writable: bool,
    /// The requested paths, with the identity of whatever determines which files they stand for.
    roots: Roots,
    files: Vec<HeldInfo>,
}

/// Paths, and what was there.
pub(super) type Roots = Vec<(PathBuf, FileIdentity)>;

impl StoreTable {
    /// The table in these bytes; None if there is none of this version, or if it names files that a hold cannot have.
    fn parse(text: &[u8]) -> Option<Self> {
        let mut table: Self = serde_json::from_slice(text).ok()?;
        let mut names = BTreeSet::new();
        let mut files = table.files.iter_mut();
        let are_named = files.all(|info| info.complete() && names.insert(info.file_name()));
        (are_named && table.v == VERSION).then_some(table)
    }
}

/// The ID of this boot of the kernel; empty if it cannot be read.
fn boot() -> String {
    host::text("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

fn name_of(name: &str, what: impl std::fmt::Display) -> String {
    format!("dmafile-{name}-{what}")
}

/// The requested paths, and for a folder its indexes: as long as all of them are unchanged, they stand for
/// the same files. Uses stat, reads nothing. None if one of them cannot be found.
pub(super) fn roots(paths: &[PathBuf]) -> Option<Roots> {
    let mut all = Roots::new();
    let mut add = |path: &Path| {
        let path = std::path::absolute(path).ok()?;
        let identity = FileIdentity::at(&path).ok()?;
        all.push((path, identity));
        Some(())
    };
    for path in paths {
        add(path)?;
        let mut indexes: Vec<_> = if path.is_dir() {
            std::fs::read_dir(path)
                .ok()?
                .flatten()
                .map(|entry| entry.path())
                .collect()
        } else {
            Vec::new()
        };
        indexes.retain(|path| {
            path.to_string_lossy().ends_with(".index.json")
                && !path.file_name().is_some_and(is_hidden)
        });
        indexes.sort();
        for index in indexes {
            add(&index)?;
        }
    }
    Some(all)
}

/// Makes the manager keep the files. `roots` is what the requested paths were before the files were opened: what
/// has been replaced since may stand for other files, and then nothing is kept.
pub(super) fn keep(
    manager: &Manager,
    set: &Set,
    wanted: &HoldOptions,
    roots_before: Option<Roots>,
) -> Result<()> {
    let Some(roots) = roots_before.filter(|before| roots(&wanted.paths).as_ref() == Some(before))
    else {
        return Ok(());
    };
    let failed = |errno| Error::os("cannot store the descriptors", errno);
    let table = StoreTable {
        v: VERSION,
        boot: boot(),
        since: set.since,
        writable: wanted.writable,
        roots,
        files: set
            .members
            .iter()
            .map(|member| member.info.clone())
            .collect(),
    };
    let text = serde_json::to_vec(&table).map_err(|_| failed(Errno::INVAL))?;
    let fd = memfd::create("dmafile-table", false).map_err(failed)?;
    memfd::resize(fd.as_fd(), text.len() as u64).map_err(failed)?;
    file::pwrite_all(fd.as_fd(), &text, 0).map_err(failed)?;
    memfd::seal(fd.as_fd(), SEALS).map_err(failed)?;
    let members = set.members.iter().flat_map(Member::borrowed);
    for (number, fd) in members.enumerate() {
        manager.store(&name_of(&set.name, number), fd)?;
    }
    manager.store(&name_of(&set.name, "table"), &fd)
}

/// Makes the manager close everything that it keeps for a hold.
pub(super) fn forget(manager: &Manager, set: &Set) -> Result<()> {
    let count = set.members.iter().map(|member| member.fds.len()).sum();
    for number in 0..count {
        manager.forget(&name_of(&set.name, number))?;
    }
    manager.forget(&name_of(&set.name, "table"))
}

/// Removes and returns what the manager has kept for a hold with this name.
pub(super) fn own(name: &str, fds: &mut Vec<(String, OwnedFd)>) -> Vec<(String, OwnedFd)> {
    let prefix = name_of(name, "");
    let is_own = |what: &str| what == "table" || what.parse::<usize>().is_ok();
    let (own, others) = std::mem::take(fds)
        .into_iter()
        .partition(|(name, _)| name.strip_prefix(&prefix).is_some_and(is_own));
    *fds = others;
    own
}

/// What the manager has kept.
pub(super) struct Kept {
    pub set: Set,
    /// It was loaded before the kernel of this boot was started.
    pub is_handed_over: bool,
}

/// The kept files, if they are what is requested and unchanged on the disk.
pub(super) fn find(name: &str, own: Vec<(String, OwnedFd)>, wanted: &HoldOptions) -> Option<Kept> {
    let prefix = name_of(name, "");
    let own = own.into_iter();
    let mut own: Vec<_> = own
        .filter_map(|(name, fd)| Some((name.strip_prefix(&prefix)?.to_string(), fd)))
        .collect();
    let table = own.iter().position(|(what, _)| what == "table")?;
    let table = read(own.swap_remove(table).1.as_fd())?;
    if Some(&table.roots) != roots(&wanted.paths).as_ref() || table.writable != wanted.writable {
        return None;
    }
    let mut sorted: Vec<Option<OwnedFd>> = own.iter().map(|_| None).collect();
    for (what, fd) in own {
        *sorted.get_mut(what.parse::<usize>().ok()?)? = Some(fd);
    }
    let mut sorted = sorted.into_iter();
    let mut members = Vec::new();
    let is_handed_over = table.boot != boot();
    for info in table.files {
        let fds: Option<Vec<OwnedFd>> = sorted.by_ref().take(info.descriptors).collect();
        members.push(again(info, fds?, wanted, is_handed_over)?);
    }
    let set = Set {
        name: name.to_string(),
        members,
        since: table.since,
    };
    sorted.next().is_none().then_some(Kept {
        set,
        is_handed_over,
    })
}

fn read(fd: BorrowedFd<'_>) -> Option<StoreTable> {
    let seals = memfd::seals(fd).ok()?;
    let size = file::stat(fd).ok()?.size;
    if size > LONGEST {
        return None;
    }
    let mut text = vec![0; size as usize];
    file::pread_all(fd, &mut text, 0).ok()?;
    let table = StoreTable::parse(&text)?;
    // Linux before 7.1 loses the seals of what it hands over.
    (seals.contains(SealFlags::WRITE) || table.boot != boot()).then_some(table)
}

/// Puts the seals back that a kernel has lost which handed the memory over. None if that is not possible.
fn seal_again(info: &HeldInfo, fds: &[OwnedFd]) -> Option<()> {
    if info.sealed {
        for fd in fds {
            let has = memfd::seals(fd.as_fd()).ok()?;
            if !has.contains(SEALS) {
                memfd::seal(fd.as_fd(), SEALS).ok()?;
            }
        }
    }
    Some(())
}

/// Whether memory that was handed over has the digest of the file. Without one, nobody can tell.
fn is_intact(info: &HeldInfo, buffer: &Buffer) -> bool {
    let (Some(known), true) = (&info.digest, info.sealed) else {
        return false;
    };
    let (Ok(algorithm), Some(bytes)) = (known.algorithm.parse(), buffer.as_slice()) else {
        return false;
    };
    let mut hasher = Hasher::new(algorithm, info.bytes);
    hasher.update(bytes);
    hasher.hex() == known.digest
}

/// A kept file, if it is the one that was loaded, and its memory matches the table.
fn again(
    info: HeldInfo,
    fds: Vec<OwnedFd>,
    wanted: &HoldOptions,
    is_handed_over: bool,
) -> Option<Member> {
    let same = FileIdentity::at(&info.file) == Ok(info.identity);
    let kind = info.kind == wanted.kind.memory();
    let digest = match (&wanted.verify, &info.digest) {
        (None, _) => true,
        (Some(_), None) => false,
        // The file's name was compared when it was loaded; under another name it would be another file.
        (Some(Verify { stored: true, .. }), Some(known)) => known.matched,
        (Some(verify), Some(known)) => {
            let expected = verify.expected.as_ref();
            known.algorithm == verify.algorithm.name()
                && expected.is_none_or(|digest| *digest == known.digest)
        }
    };
    if !same || !kind || !digest || fds.len() != info.descriptors {
        return None;
    }
    if is_handed_over {
        seal_again(&info, &fds)?;
    }
    let (range, sealed) = ((info.offset, info.bytes), info.sealed);
    let buffer = Buffer::of_peer(fds, &info.kind, range, sealed).ok()?;
    if is_handed_over && !is_intact(&info, &buffer) {
        return None;
    }
    Member::of(info, &buffer).ok()
}

#[cfg(fuzzing)]
#[path = "../../../fuzz/inside/store.rs"]
pub(super) mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_this_version_and_names_that_files_of_a_hold_can_have() {
        let table = |version: u32, names: &[&str]| {
            let file = |name: &&str| {
                serde_json::json!({
                    "name": name, "file": "/x", "kind": "memfd", "pages": "base", "bytes": 1, "offset": 0,
                    "sealed": true, "digest": null, "changed": false, "descriptors": 1,
                    "identity": {"device": [0, 1], "inode": 1, "size": 1, "mtime_ns": 0, "ctime_ns": 0},
                })
            };
            let files: Vec<_> = names.iter().map(file).collect();
            let table = serde_json::json!({
                "v": version, "boot": "", "since": 0, "writable": false, "roots": [], "files": files,
            });
            StoreTable::parse(table.to_string().as_bytes())
        };
        assert!(table(1, &["a", "b"]).is_some());
        for (version, names) in [
            (0, ["a", "b"]),
            (2, ["a", "b"]),
            (1, ["a", "a"]),
            (1, ["a", "../b"]),
            (1, ["a", ""]),
        ] {
            assert!(table(version, &names).is_none(), "{version} {names:?}");
        }
    }
}
