//! All sources in one list: which process holds what pinned, and by which means.

use super::{Process, dmabufs, rdma, tracker, vfio, xdp};
use dmafile::errno_name;
use dmafile_sys::{Errno, process::Status};
use serde::Serialize;
use std::fmt;
use std::path::PathBuf;

/// A means by which memory is pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Maker {
    /// Buffers registered with io_uring, as its rings list them.
    IoUring,
    /// Memory of a memfd under a dma-buf (`/dev/udmabuf`).
    Udmabuf,
    /// A device that a process drives; its memory counts in `VmLck`.
    Vfio,
    /// Memory registered with an RDMA device; the length is the requested one.
    Rdma,
    /// Packet memory of an AF_XDP socket (umem).
    AfXdp,
    /// `VmPin`: the kernel's sum for a process, which includes registered buffers and RDMA.
    Pinned,
    /// `VmLck`: mlock(2) and similar.
    Locked,
}

impl fmt::Display for Maker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::IoUring => "io_uring buffer",
            Self::Udmabuf => "udmabuf",
            Self::Vfio => "VFIO",
            Self::Rdma => "RDMA",
            Self::AfXdp => "AF_XDP",
            Self::Pinned => "VmPin",
            Self::Locked => "VmLck",
        })
    }
}

/// What one process holds pinned by one means; each udmabuf and each umem is a separate entry.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct PinHolder {
    /// The process ID; None if no visible process has it: it is in a socket's queue, with a driver,
    /// or with a process that cannot be seen.
    pub pid: Option<u32>,
    /// The name of the process.
    pub name: Option<String>,
    /// Its real user ID.
    pub uid: Option<u32>,
    /// By which means.
    pub by: Maker,
    /// Size in bytes; None if it is unknown.
    pub bytes: Option<u64>,
    /// Number of buffers, regions or descriptors.
    pub count: u64,
    /// Inode of the dma-buf or the socket, which is the same in every process.
    pub inode: Option<u64>,
    /// Other processes that hold the same.
    pub also: Vec<u32>,
    /// The device, if there is one.
    pub device: Option<String>,
}

/// A source that is not available here.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Absent {
    /// The kind of pins that is not listed.
    pub by: Maker,
    /// Why.
    pub why: String,
}

/// Why a list of the kernel is not available.
pub(super) fn refusal(errno: Errno) -> String {
    let name = errno_name(errno.raw_os_error());
    format!("netlink refuses the list ({name})")
}

/// A process, and what its descriptors refer to.
pub(super) struct Person {
    pub pid: u32,
    pub name: String,
    pub uid: u32,
    pub links: Vec<(u32, PathBuf)>,
}

impl Person {
    pub(super) fn new(status: &Status, links: Vec<(u32, PathBuf)>) -> Self {
        Self {
            pid: status.pid,
            name: status.name.clone(),
            uid: status.uid,
            links,
        }
    }

    pub(super) fn maker(&self) -> tracker::TrackedProcess<'_> {
        tracker::TrackedProcess {
            pid: self.pid,
            uid: self.uid,
            name: &self.name,
        }
    }
}

impl PinHolder {
    /// An entry for memory that these processes hold.
    pub(super) fn of(people: &[&Person], by: Maker, bytes: Option<u64>) -> Self {
        let first = people.first();
        Self {
            pid: first.map(|person| person.pid),
            name: first.map(|person| person.name.clone()),
            uid: first.map(|person| person.uid),
            by,
            bytes,
            count: 1,
            inode: None,
            also: people.iter().skip(1).map(|person| person.pid).collect(),
            device: None,
        }
    }

    fn of_process(process: &Process, by: Maker, bytes: u64, count: u64) -> Self {
        Self {
            pid: Some(process.pid),
            name: Some(process.name.clone()),
            uid: Some(process.uid),
            by,
            bytes: Some(bytes),
            count,
            inode: None,
            also: Vec::new(),
            device: None,
        }
    }
}

/// What all sources report about these processes, or about one of them.
pub(super) fn all(
    people: &[Person],
    processes: &[Process],
    asked: Option<u32>,
) -> (Vec<PinHolder>, Vec<Absent>) {
    let (mut holders, mut absent) = (Vec::new(), Vec::new());
    let vfio = vfio::holders(people);
    for process in processes {
        let drives = vfio.iter().find(|(person, _)| person.pid == process.pid);
        let rings = process.rings.as_deref().unwrap_or_default();
        let (count, bytes) = rings.iter().fold((0, 0), |(count, bytes), ring| {
            (count + ring.count, bytes + ring.bytes)
        });
        if count > 0 {
            holders.push(PinHolder::of_process(process, Maker::IoUring, bytes, count));
        }
        if process.pinned > 0 {
            holders.push(PinHolder::of_process(
                process,
                Maker::Pinned,
                process.pinned,
                1,
            ));
        }
        if let Some((_, devices)) = drives {
            let count = devices.len() as u64;
            let mut holder = PinHolder::of_process(process, Maker::Vfio, process.locked, count);
            holder.device = Some(devices.join(", "));
            holders.push(holder);
        } else if process.locked > 0 {
            holders.push(PinHolder::of_process(
                process,
                Maker::Locked,
                process.locked,
                1,
            ));
        }
    }
    holders.extend(dmabufs::holders(people));
    for (by, found) in [
        (Maker::Rdma, rdma::holders(people)),
        (Maker::AfXdp, xdp::holders(people)),
    ] {
        let (found, why) = found;
        holders.extend(found);
        absent.extend(why.map(|why| Absent { by, why }));
    }
    if let Some(asked) = asked {
        holders.retain(|holder| holder.pid == Some(asked) || holder.also.contains(&asked));
        for holder in &mut holders {
            put_first(holder, people, asked);
        }
    }
    holders.sort_by_key(|holder| (holder.pid.is_none(), holder.pid, holder.by, holder.inode));
    (holders, absent)
}

/// Puts this process first among those that hold the same.
fn put_first(holder: &mut PinHolder, people: &[Person], asked: u32) {
    let person = people.iter().find(|person| person.pid == asked);
    if let (Some(person), true) = (person, holder.pid != Some(asked)) {
        holder.also.retain(|pid| *pid != asked);
        holder.also.extend(holder.pid);
        holder.also.sort_unstable();
        holder.pid = Some(asked);
        holder.name = Some(person.name.clone());
        holder.uid = Some(person.uid);
    }
}
