//! What the kernel reports about any process, from its folder under `/proc` (proc(5)).
//!
//! ENOENT or ESRCH: the process has ended. EACCES or EPERM: this process may not inspect it.
//!
//! Parsed here, because procfs (0.18) ends names at a colon, refuses those that are not UTF-8,
//! and requires lines that sandboxes leave out.

use super::{Errno, errno};
use rustix::process::{Pid, test_kill_process};
use rustix::thread::CapabilitySet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The contents of `status` of a process.
#[derive(Clone, Debug)]
pub struct Status {
    /// The process, even for the folder of a thread.
    pub pid: u32,
    pub name: String,
    /// The real user, to whom per-user limits apply.
    pub uid: u32,
    /// Bytes locked; None if it has no memory: a kernel thread, a zombie.
    pub locked: Option<u64>,
    /// Bytes pinned.
    pub pinned: u64,
    pub effective: CapabilitySet,
}

/// The folder of a process.
pub fn folder(pid: u32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}"))
}

/// The visible processes, in no order. ENOENT if `/proc` is not mounted.
pub fn all() -> Result<Vec<u32>, Errno> {
    let mut pids = Vec::new();
    for entry in fs::read_dir("/proc").map_err(errno)? {
        let name = entry.map_err(errno)?.file_name();
        pids.extend(name.to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    if pids.is_empty() {
        // At least this process would be visible.
        Err(Errno::NOENT)
    } else {
        Ok(pids)
    }
}

/// Returns true if a process exists, even if `/proc` hides it.
pub fn exists(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| matches!(test_kill_process(pid), Ok(()) | Err(Errno::PERM)))
}

/// What distinguishes a process from others that get its number later: this PID namespace, and when it started (proc(5)).
/// None if it has ended, or without `/proc`.
pub fn identity(pid: u32) -> Option<String> {
    let namespace = fs::read_link("/proc/self/ns/pid").ok()?;
    Some(format!("{} {}", namespace.display(), started(pid)?))
}

/// When a process began, in ticks since boot; None if it has ended, or without `/proc`.
pub fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(folder(pid).join("stat")).ok()?;
    // The name before it may contain anything.
    let fields = stat.rsplit_once(')')?.1;
    fields.split_whitespace().nth(19)?.parse().ok()
}

/// Returns true if a process does not run, because of a signal or a debugger. False if that cannot be found out.
pub fn is_stopped(pid: u32) -> bool {
    let text = text(&folder(pid).join("status")).unwrap_or_default();
    let state = text.lines().find_map(|line| line.strip_prefix("State:"));
    state.is_some_and(|state| state.trim_start().starts_with(['T', 't']))
}

/// The file `status` of this folder.
pub fn status(folder: &Path) -> Result<Status, Errno> {
    // A process that ends during the read leaves an empty file.
    parse_status(&text(&folder.join("status"))?).ok_or(Errno::SRCH)
}

fn parse_status(text: &str) -> Option<Status> {
    let field = |name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .map(str::trim)
    };
    let bytes = |name: &str| {
        let kb: u64 = field(name)?.strip_suffix("kB")?.trim().parse().ok()?;
        kb.checked_mul(1024)
    };
    Some(Status {
        pid: field("Tgid")?.parse().ok()?,
        name: field("Name")?.to_string(),
        uid: field("Uid")?.split_whitespace().next()?.parse().ok()?,
        locked: bytes("VmLck"),
        pinned: bytes("VmPin").unwrap_or(0),
        effective: CapabilitySet::from_bits_retain(u64::from_str_radix(field("CapEff")?, 16).ok()?),
    })
}

/// Returns true if CAP_IPC_LOCK is effective, which lifts RLIMIT_MEMLOCK (capabilities(7)): only in the
/// initial user namespace; in others the capability has no effect.
pub fn pins_freely(folder: &Path, effective: CapabilitySet) -> bool {
    /// PROC_USER_INIT_INO
    const FIRST: &str = "user:[4026531837]";
    effective.contains(CapabilitySet::IPC_LOCK)
        && match fs::read_link(folder.join("ns/user")) {
            Ok(link) => link.as_os_str() == FIRST,
            // Without user namespaces there is no link; if it may not be read, the capability
            // decides. Without /proc nothing does.
            Err(_) => folder.join("status").exists(),
        }
}

/// The soft limit on locked and pinned memory, in bytes; None if there is no limit
/// (RLIMIT_MEMLOCK).
pub fn memlock(folder: &Path) -> Result<Option<u64>, Errno> {
    let text = text(&folder.join("limits"))?;
    let soft = text
        .lines()
        .find_map(|line| line.strip_prefix("Max locked memory"))
        .and_then(|line| line.split_whitespace().next())
        .ok_or(Errno::SRCH)?;
    // "unlimited" is not a number.
    Ok(soft.parse().ok())
}

/// Its descriptors and what they refer to, as the kernel names it (`/dmabuf:`, `socket:[7]`).
pub fn links(folder: &Path) -> Result<Vec<(u32, PathBuf)>, Errno> {
    let mut links = Vec::new();
    for entry in fs::read_dir(folder.join("fd")).map_err(errno)? {
        let entry = entry.map_err(errno)?;
        match fs::read_link(entry.path()) {
            Ok(link) => {
                let name = entry.file_name();
                let fd = name.to_str().and_then(|name| name.parse::<u32>().ok());
                links.extend(fd.map(|fd| (fd, link)));
            }
            // Closed since.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(errno(error)),
        }
    }
    links.sort_unstable();
    Ok(links)
}

/// What the kernel reports about a descriptor.
pub fn fdinfo(folder: &Path, fd: u32) -> Result<String, Errno> {
    text(&folder.join("fdinfo").join(fd.to_string()))
}

/// A line of `maps`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapsLine {
    pub start: u64,
    pub end: u64,
    /// The offset of `start` in the file.
    pub offset: u64,
    /// Major and minor number, in hexadecimal.
    pub device: String,
    /// 0 for memory without a file.
    pub inode: u64,
    /// As in `maps`; empty if there is none.
    pub name: String,
}

impl MapsLine {
    /// Size in bytes of the intersection with a range of addresses.
    pub fn common(&self, start: u64, bytes: u64) -> u64 {
        let end = start.saturating_add(bytes).min(self.end);
        end.saturating_sub(start.max(self.start))
    }
}

/// The mappings of a process.
pub fn maps(folder: &Path) -> Result<Vec<MapsLine>, Errno> {
    let text = text(&folder.join("maps"))?;
    Ok(text.lines().filter_map(parse_mapped).collect())
}

fn parse_mapped(line: &str) -> Option<MapsLine> {
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let offset = words.nth(1)?;
    let device = words.next()?.to_string();
    let hex = |word: &str| u64::from_str_radix(word, 16).ok();
    Some(MapsLine {
        start: hex(start)?,
        end: hex(end)?,
        offset: hex(offset)?,
        device,
        inode: words.next()?.parse().ok()?,
        name: words.next().unwrap_or("").trim_start().to_string(),
    })
}

/// The buffers registered with a ring, as address and length; None if the kernel does not list
/// them: before Linux 5.6, or because the ring was busy at every attempt.
pub fn registered(folder: &Path, ring: u32) -> Result<Option<Vec<(u64, u64)>>, Errno> {
    // The kernel only tries to lock the ring, and a large registration holds the lock for a long
    // time.
    const TRIES: u32 = 50;
    const PAUSE: Duration = Duration::from_millis(2);
    for _ in 0..TRIES {
        let listed = parse_registered(&fdinfo(folder, ring)?);
        if listed.is_some() {
            return Ok(listed);
        }
        std::thread::sleep(PAUSE);
    }
    Ok(None)
}

/// The list in a ring's `fdinfo`: `UserBufs:` with the number of slots, then one line each. For
/// a busy ring the lines are missing; newer kernels omit the whole list.
fn parse_registered(fdinfo: &str) -> Option<Vec<(u64, u64)>> {
    let mut lines = fdinfo.lines();
    let slots: usize = lines
        .find_map(|line| line.strip_prefix("UserBufs:"))?
        .trim()
        .parse()
        .ok()?;
    let mut buffers = Vec::new();
    for _ in 0..slots {
        let (_, slot) = lines.next()?.split_once(": ")?;
        if slot == "<none>" {
            continue;
        }
        let (address, len) = slot.split_once('/')?;
        let address = u64::from_str_radix(address.strip_prefix("0x")?, 16).ok()?;
        let len = len.parse().ok()?;
        // Up to Linux 6.12 an empty slot is a buffer at the last address. One at 0 is kernel
        // memory, which a block device has lent to the ring (ublk), and is not pinned.
        if address != u64::MAX && address != 0 && len != 0 {
            buffers.push((address, len));
        }
    }
    Some(buffers)
}

/// Names of processes need not be UTF-8.
fn text(path: &Path) -> Result<String, Errno> {
    let bytes = fs::read(path).map_err(errno)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tdd (of=x)\nState:\tS (sleeping)\nTgid:\t41\nPid:\t42\n\
                          Uid:\t1000\t0\t0\t0\nVmLck:\t      28 kB\nVmPin:\t    4112 kB\n\
                          CapEff:\t000001ffffffffff\n";

    #[test]
    fn status_fields_are_found_by_name() {
        let status = parse_status(STATUS).unwrap();
        assert_eq!((status.pid, status.uid), (41, 1000));
        assert_eq!(status.name, "dd (of=x)");
        assert_eq!((status.locked, status.pinned), (Some(28 << 10), 4112 << 10));
        assert_eq!(status.effective.bits(), 0x1ff_ffff_ffff);
    }

    #[test]
    fn kernel_threads_have_no_locked_or_pinned_memory() {
        let text: String = STATUS
            .lines()
            .filter(|line| !line.starts_with("Vm"))
            .map(|line| format!("{line}\n"))
            .collect();
        let status = parse_status(&text).unwrap();
        assert_eq!((status.locked, status.pinned), (None, 0));
        assert!(parse_status("").is_none());
    }

    #[test]
    fn names_of_mappings_may_have_spaces_or_be_empty() {
        let line = "7f4f44c0b000-7f4f44c1b000 rw-s 00002000 00:01 4                          \
                    /memfd:a b (deleted)";
        let mapped = parse_mapped(line).unwrap();
        assert_eq!(
            (mapped.start, mapped.end),
            (0x7f4f_44c0_b000, 0x7f4f_44c1_b000)
        );
        assert_eq!(
            (mapped.offset, mapped.device.as_str(), mapped.inode),
            (0x2000, "00:01", 4)
        );
        assert_eq!(mapped.name, "/memfd:a b (deleted)");
        assert_eq!(mapped.common(0x7f4f_44c1_a000, 0x2000), 0x1000);
        assert_eq!(mapped.common(0x7f4f_44c1_b000, 0x2000), 0);
        assert_eq!(mapped.common(u64::MAX - 1, 0x2000), 0);
        let none = parse_mapped("7ffd0000-7ffd1000 rw-p 00000000 00:00 0 ").unwrap();
        assert_eq!((none.inode, none.name.as_str()), (0, ""));
        assert_eq!(parse_mapped("x"), None);
    }

    #[test]
    fn registered_buffers_are_parsed_from_every_kernel_version() {
        let two = Some(vec![(0x7f00_0000_1000, 4096), (0x7f00_0020_0000, 1 << 30)]);
        // 5.6 to 6.12: an empty slot has an impossible address, and a length computed from it.
        let old = "SqMask:\t0x3\nUserFiles:\t1\n    0: 7: x\nUserBufs:\t4\n    \
                   0: 0x7f0000001000/4096\n    1: 0xffffffffffffffff/1\n    \
                   2: 0x7f0000200000/1073741824\n    3: 0xffffffffffffffff/0\nPollList:\n";
        // From 6.13: an empty slot is marked as such; from 6.15 there are kernel buffers.
        let new = "SqThread:\t-1\nUserFiles:\t0\nUserBufs:\t4\n    0: <none>\n    \
                   1: 0x7f0000001000/4096\n    2: 0x7f0000200000/1073741824\n    3: 0x0/65536\n\
                   Personalities:\n    1\n\tUid:\t0\n";
        // Buffers that are mapped once have further lines. A dma-buf has no address.
        let mapped = "UserBufs:\t3\n    0: 0x7f0000001000/4096\n    \
                      1: 0xffffffffffffffff/4294967295\n    \
                      2: 0x7f0000200000/1073741824\n\
                      PreMapped:\t0: 0x7f0000001000/4096 pages /dev/nvme0n1\n\
                      PreMapped:\t1: 0x0/65536 dma-buf /dev/nvme0n1\nPollList:\n";
        assert_eq!(parse_registered(old), two);
        assert_eq!(parse_registered(new), two);
        assert_eq!(parse_registered(mapped), two);
        assert_eq!(parse_registered("UserBufs:\t0\nPollList:\n"), Some(vec![]));
    }

    #[test]
    fn busy_rings_and_old_kernels_list_no_buffers() {
        assert_eq!(parse_registered("UserBufs:\t2\nPollList:\n"), None);
        assert_eq!(parse_registered("pos:\t0\nflags:\t02\n"), None);
        assert_eq!(parse_registered("UserBufs:\t1\n    0: 0x10/\n"), None);
    }
}
