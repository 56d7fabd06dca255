//! udmabufs: dma-bufs over memory of a memfd, which stays pinned for as long as the dma-buf exists.
//! They do not count in any process's `VmPin`; they are visible in the `fdinfo` of descriptors, in
//! mappings, and for root in debugfs.

use super::holders::{Maker, Person, PinHolder};
use dmafile_sys::{host, process};
use std::collections::{BTreeMap, BTreeSet};

/// The kernel's name for descriptors and mappings of dma-bufs; the buffer's own name may follow.
const LINK: &str = "/dmabuf:";
const UDMABUF: &str = "udmabuf";
/// All dma-bufs of the machine, including those that no process has a descriptor of.
const LIST: &str = "/sys/kernel/debug/dma_buf/bufinfo";

/// The visible udmabufs: inode and size in bytes.
type VisibleUdmabufs = BTreeMap<u64, u64>;

pub(super) fn holders(people: &[Person]) -> Vec<PinHolder> {
    let mut seen = host::text(LIST).map_or_else(VisibleUdmabufs::new, |list| listed(&list));
    let mut held = BTreeSet::new();
    for (at, person) in people.iter().enumerate() {
        let folder = process::folder(person.pid);
        for (fd, link) in &person.links {
            if !link.to_string_lossy().starts_with(LINK) {
                continue;
            }
            let info = process::fdinfo(&folder, *fd).ok();
            if let Some((inode, bytes)) = info.as_deref().and_then(described) {
                seen.insert(inode, bytes);
                held.insert((inode, at));
            }
        }
    }
    if !seen.is_empty() {
        for (at, person) in people.iter().enumerate() {
            let maps = process::maps(&process::folder(person.pid)).unwrap_or_default();
            let ours = maps.iter().filter(|map| map.name.starts_with(LINK));
            held.extend(ours.map(|map| (map.inode, at)));
        }
    }
    seen.into_iter()
        .map(|(inode, bytes)| {
            let of = held.range((inode, 0)..=(inode, usize::MAX));
            let mut by: Vec<_> = of.map(|(_, at)| &people[*at]).collect();
            by.sort_unstable_by_key(|person| person.pid);
            PinHolder {
                inode: Some(inode),
                ..PinHolder::of(&by, Maker::Udmabuf, Some(bytes))
            }
        })
        .collect()
}

/// Inode and size from the `fdinfo` of a dma-buf, if it is a udmabuf.
fn described(fdinfo: &str) -> Option<(u64, u64)> {
    let field = |name: &str| {
        let mut lines = fdinfo.lines();
        let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value.map(str::trim)
    };
    if field("exp_name")? != UDMABUF {
        return None;
    }
    Some((field("ino")?.parse().ok()?, field("size")?.parse().ok()?))
}

/// The udmabufs in debugfs: one line `size flags mode count exporter inode name` each, followed by
/// lines about attached devices.
fn listed(list: &str) -> VisibleUdmabufs {
    let one = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        let [size, _, _, _, UDMABUF, inode, ..] = words[..] else {
            return None;
        };
        Some((inode.parse().ok()?, size.parse().ok()?))
    };
    list.lines().filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fdinfo_distinguishes_udmabufs_from_other_dma_bufs() {
        let info = "pos:\t0\nflags:\t02\nmnt_id:\t12\nino:\t17\nsize:\t65536\ncount:\t1\n\
                    exp_name:\tudmabuf\nname:\tframes\n";
        assert_eq!(described(info), Some((17, 65536)));
        assert_eq!(described(&info.replace("udmabuf", "system")), None);
        assert_eq!(described("pos:\t0\n"), None);
    }

    #[test]
    fn udmabufs_are_found_in_the_list_of_debugfs() {
        let list = "\nDma-buf Objects:\n\
            size    \tflags   \tmode    \tcount   \texp_name\tino     \tname\n\
            00065536\t00000002\t00080007\t00000002\tudmabuf\t00000017\t<none>\n\
            \tAttached Devices:\nTotal 0 devices attached\n\n\
            01048576\t00000002\t00080007\t00000001\tsystem\t00000018\tudmabuf\n\
            \tAttached Devices:\n\t0000:00:02.0\nTotal 1 devices attached\n\n\
            \nTotal 2 objects, 1114112 bytes\n";
        assert_eq!(listed(list), VisibleUdmabufs::from([(17, 65536)]));
    }
}
