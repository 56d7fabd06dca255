//! Memory that processes share: memfds, and anonymous mappings with MAP_SHARED, which the kernel keeps in the same
//! file system. CRIU handles both as memfds, and names them by the number of their inode.

use dmafile_sys::{Errno, file, memfd, process};
use rustix::fs::SealFlags;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

/// The seals that CRIU can restore only after the process has its mappings again.
const LATE: SealFlags = SealFlags::FUTURE_WRITE;

/// An object, open.
#[derive(Debug)]
pub(crate) struct Object {
    pub fd: OwnedFd,
    pub size: u64,
    pub seals: SealFlags,
}

/// The processes of a tree, its root first.
pub(crate) fn tree(root: u32) -> Vec<u32> {
    let mut all = vec![root];
    let mut next = 0;
    while let Some(&pid) = all.get(next) {
        let tasks = std::fs::read_dir(process::folder(pid).join("task"));
        for task in tasks.into_iter().flatten().flatten() {
            let children = std::fs::read_to_string(task.path().join("children"));
            let children = children.unwrap_or_default();
            all.extend(
                children
                    .split_whitespace()
                    .filter_map(|pid| pid.parse::<u32>().ok()),
            );
        }
        next += 1;
    }
    all
}

/// The objects of these processes, by the number that CRIU gives them. Those that CRIU itself has to restore are left
/// out.
pub(crate) fn of(processes: &[u32]) -> BTreeMap<u32, Object> {
    let mut all = BTreeMap::new();
    for &pid in processes {
        for place in places(&process::folder(pid)) {
            if let Ok((number, object)) = object(&place) {
                all.entry(number).or_insert(object);
            }
        }
    }
    all
}

/// The number that CRIU gives to memory: the low bits of its inode's.
pub(crate) fn number(fd: impl AsFd) -> Result<u32, Errno> {
    Ok(dmafile_sys::stat::of(fd)?.number as u32)
}

fn object(place: &Path) -> Result<(u32, Object), Errno> {
    let fd = file::open(place, false)?;
    // EINVAL for anything else than memory: only that has seals.
    let seals = memfd::seals(fd.as_fd())?;
    if seals.intersects(LATE) {
        return Err(Errno::OPNOTSUPP);
    }
    let stat = dmafile_sys::stat::of(&fd)?;
    Ok((
        stat.number as u32,
        Object {
            fd,
            size: stat.size,
            seals,
        },
    ))
}

/// The paths in /proc of what a process has open or mapped, if that is memory.
fn places(folder: &Path) -> Vec<PathBuf> {
    const NAMES: [&str; 3] = ["/memfd:", "/dev/zero", "/anon_hugepage"];
    let mut all = Vec::new();
    for name in ["fd", "map_files"] {
        let links = std::fs::read_dir(folder.join(name));
        for link in links.into_iter().flatten().flatten() {
            let target = std::fs::read_link(link.path()).unwrap_or_default();
            let target = target.to_string_lossy();
            if NAMES.iter().any(|name| target.starts_with(name)) {
                all.push(link.path());
            }
        }
    }
    all
}
