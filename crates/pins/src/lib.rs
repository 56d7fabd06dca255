//! What is pinned, by which process, and against which limit.
//!
//! Nothing is cached: every number is read from the kernel when it is requested, while other processes
//! continue to run. `docs/pins.md` says where the kernel counts each of them. Each file here is one
//! source.

#![forbid(unsafe_code)]

#[cfg(feature = "bpf")]
mod bpf;
mod btf;
mod dmabufs;
mod file;
mod frames;
mod hist;
mod holders;
mod kcore;
mod netlink;
mod pages;
mod rdma;
mod recording;
mod rings;
mod sites;
mod tracefs;
mod tracker;
mod vfio;
mod watch;
mod xdp;

pub use file::{FilePins, Mapper, of_file};
pub use holders::{Absent, Maker, PinHolder};
pub use pages::{PageGroup, PinnedPages, PinnedRange, Whose, pages};
pub use recording::{PinRecording, RecordPins, RecordedBy, RecordingId, record, stop_recording};
pub use rings::{ProcessRing, RegisteredBuffer};
pub use tracker::{Blocked, BlockedBy, PinOwner, blocked};
pub use watch::{CallSite, Row, Watch, Watched, watch};

use dmafile::{Error, Result};
use dmafile_sys::{Errno, host, map::page_size, process};
use holders::Person;
use recording::PinRecords;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What to do where the kernel denies something: run as root, or on another kernel. `with` are root's capabilities that
/// it takes.
fn denied(error: Error, with: &'static str) -> Error {
    match host::choice("/sys/kernel/security/lockdown").as_deref() {
        Some("confidentiality") => error
            .with_why("the kernel is locked down (confidentiality)")
            .with_remedy(""),
        Some(_) => error.with_remedy(format!("run as root{with}")),
        // It is locked down, or not; containers and small systems do not mount securityfs.
        None => error.with_remedy(format!(
            "run as root{with}, on a kernel that is not locked down"
        )),
    }
}

/// Pinned and locked memory, as [`pins()`] found it.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Pins {
    /// The machine as a whole.
    pub system: System,
    /// The processes that pin or lock memory, by process ID; or only the requested one.
    pub processes: Vec<Process>,
    /// The users that pin memory, by user ID; or only the one of the requested process.
    pub users: Vec<User>,
    /// Every process that holds pinned memory, once for each method by which it does, from all
    /// sources. The same memory may be in several entries.
    pub holders: Vec<PinHolder>,
    /// Who made long-term pins, from a kernel with the pin tracker (kernel/docs/pins.md); without root,
    /// only processes that this one may inspect; or what is recorded ([`record()`]). None without both.
    pub owners: Option<Vec<PinOwner>>,
    /// The recording that `owners` is from. None if the kernel tracks pins, or nothing records them.
    pub recording: Option<PinRecording>,
    /// The sources that are not available here, and why.
    pub absent: Vec<Absent>,
    /// Number of processes that could not be inspected, completely or only their rings.
    pub unreadable: u64,
    /// True if `/proc` does not even list processes of other users (mounted with `hidepid=2`). Their
    /// number is unknown then.
    pub hidden: bool,
}

/// The visible processes.
fn visible() -> Result<Vec<u32>> {
    process::all().map_err(|errno| {
        let error = Error::os("cannot list", errno).at("/proc");
        match errno {
            Errno::NOENT => error
                .with_why("it is not mounted")
                .with_remedy("mount -t proc proc /proc"),
            _ => error,
        }
    })
}

/// All pins on this machine since it started, including those of direct I/O in flight: `nr_foll_pin_*`
/// of `/proc/vmstat`.
///
/// The kernel adds up the counters of its CPUs about once a second, so the numbers may lag.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct System {
    /// Pins acquired; None if the kernel does not report them (before Linux 5.7).
    pub acquired: Option<u64>,
    /// Pins released.
    pub released: Option<u64>,
    /// The difference, in pages; 0 if `released` is temporarily larger. A page that is pinned twice
    /// counts twice; a huge page in a registered buffer counts once.
    pub pages: Option<u64>,
    /// The same in bytes, with every page counted as a base page.
    pub bytes: Option<u64>,
}

/// What one process pins and locks.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Process {
    /// Its process ID.
    pub pid: u32,
    /// Its name, at most 15 bytes, with newlines and backslashes escaped (`comm` in proc(5)).
    pub name: String,
    /// Its real user ID.
    pub uid: u32,
    /// Bytes pinned and charged to it, by its rings and by drivers: `VmPin` in `/proc/PID/status`. If
    /// a ring pins a part of a huge page, the whole huge page counts.
    pub pinned: u64,
    /// Bytes locked into memory (mlock(2)): `VmLck` in `/proc/PID/status`.
    pub locked: u64,
    /// The soft limit on locked and pinned memory in bytes; None if there is no limit (RLIMIT_MEMLOCK
    /// in `/proc/PID/limits`).
    pub limit: Option<u64>,
    /// True if CAP_IPC_LOCK is effective and lifts that limit. In a user namespace other than the
    /// initial one the capability has no effect, and this is false.
    pub cap_ipc_lock: bool,
    /// Its io_uring rings; None without permission to inspect them.
    pub rings: Option<Vec<ProcessRing>>,
}

/// What all processes of one user pin together. Registered buffers count against RLIMIT_MEMLOCK per
/// user, not per process: a registration fails (ENOMEM) if it would raise the sum above the limit of
/// the process that registers.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct User {
    /// The user ID.
    pub uid: u32,
    /// Bytes that its processes pin.
    pub pinned: u64,
    /// Bytes of those processes to which the limit applies.
    pub charged: u64,
}

/// Looks for pinned and locked memory in all processes, or in process `pid` even if it pins nothing.
///
/// Processes that end during the call are left out; those that cannot be inspected are counted. A
/// process can be inspected by users who may trace it (ptrace(2)): its own, and root.
///
/// ```no_run
/// for process in dmafile_pins::pins(None)?.processes {
///     println!("{} {}: {} bytes", process.pid, process.name, process.pinned);
/// }
/// # Ok::<(), dmafile::Error>(())
/// ```
///
/// # Errors
/// ESRCH if there is no process `pid`, EPERM or EACCES if it is hidden, and any error of reading
/// `/proc`.
pub fn pins(pid: Option<u32>) -> Result<Pins> {
    let asked = pid.map(find).transpose()?;
    let mut processes = Vec::new();
    let mut users = BTreeMap::new();
    let mut people = Vec::new();
    let mut unreadable = 0;
    for pid in visible()? {
        let folder = process::folder(pid);
        let status = match process::status(&folder) {
            Ok(status) => status,
            Err(errno) if ended(errno) => continue,
            Err(errno) if hidden(errno) => {
                // Counted only for other users' processes, not for the requested one.
                unreadable += u64::from(asked.is_none());
                continue;
            }
            Err(errno) => return Err(failed(pid, errno)),
        };
        // A kernel thread or a zombie has no descriptors.
        let links = match status.locked {
            Some(_) => process::links(&folder),
            None => Ok(Vec::new()),
        };
        let wanted = asked.as_ref().is_none_or(|asked| asked.pid == pid);
        people.push(Person::new(&status, links.clone().unwrap_or_default()));
        if asked.as_ref().is_some_and(|asked| asked.uid != status.uid) {
            continue;
        }
        let cap_ipc_lock = process::pins_freely(&folder, status.effective);
        let user = users.entry(status.uid).or_insert(User {
            uid: status.uid,
            pinned: 0,
            charged: 0,
        });
        user.pinned += status.pinned;
        user.charged += if cap_ipc_lock { 0 } else { status.pinned };
        if !wanted {
            continue;
        }
        match Process::look(&status, cap_ipc_lock, links) {
            Ok(process) => {
                unreadable += u64::from(process.rings.is_none());
                if asked.is_some() || process.holds() {
                    processes.push(process);
                }
            }
            Err(errno) if ended(errno) => {}
            Err(errno) => return Err(failed(pid, errno)),
        }
    }
    if let (Some(asked), true) = (&asked, processes.is_empty()) {
        return Err(failed(asked.pid, Errno::SRCH));
    }
    processes.sort_unstable_by_key(|process| process.pid);
    let all_users = asked.is_some();
    let makers = people.iter().map(Person::maker);
    let makers: Vec<_> = match &asked {
        Some(asked) => makers.filter(|maker| maker.pid == asked.pid).collect(),
        None => makers.collect(),
    };
    let (mut owners, mut recording) = (tracker::owners(&makers, asked.is_none()), None);
    if owners.is_none()
        && let Some(records) = PinRecords::read()?
    {
        owners = Some(records.owners(&makers, asked.is_none()));
        recording = Some(records.recording);
    }
    let (holders, absent) = holders::all(&people, &processes, asked.map(|asked| asked.pid));
    Ok(Pins {
        system: System::read(),
        users: users
            .into_values()
            .filter(|user| all_users || user.pinned > 0)
            .collect(),
        processes,
        holders,
        owners,
        recording,
        absent,
        unreadable,
        hidden: hides_others(),
    })
}

/// Process 1 always exists.
fn hides_others() -> bool {
    let absent = process::status(&process::folder(1)).is_err_and(ended);
    absent && process::exists(1)
}

/// The requested process.
fn find(pid: u32) -> Result<process::Status> {
    process::status(&process::folder(pid)).map_err(|errno| match errno {
        // It exists, but is hidden: /proc is mounted with hidepid=2.
        errno if ended(errno) && process::exists(pid) => failed(pid, Errno::PERM),
        errno if ended(errno) => failed(pid, Errno::SRCH),
        errno => failed(pid, errno),
    })
}

fn ended(errno: Errno) -> bool {
    matches!(errno, Errno::NOENT | Errno::SRCH)
}

fn hidden(errno: Errno) -> bool {
    matches!(errno, Errno::ACCESS | Errno::PERM)
}

fn failed(pid: u32, errno: Errno) -> Error {
    let error = Error::os("cannot inspect", errno).at(format!("process {pid}"));
    match errno {
        Errno::SRCH => error.with_remedy("list those that pin memory: dmafile pins"),
        _ if hidden(errno) => error.with_remedy("run as root"),
        _ => error,
    }
}

impl System {
    fn read() -> Self {
        let acquired = host::vmstat("nr_foll_pin_acquired");
        let released = host::vmstat("nr_foll_pin_released");
        let pages = match (acquired, released) {
            (Some(acquired), Some(released)) => Some(acquired.saturating_sub(released)),
            _ => None,
        };
        Self {
            acquired,
            released,
            pages,
            bytes: pages.map(|pages| pages * page_size()),
        }
    }
}

impl Process {
    fn look(
        status: &process::Status,
        cap_ipc_lock: bool,
        links: Result<Vec<(u32, PathBuf)>, Errno>,
    ) -> Result<Self, Errno> {
        let folder = process::folder(status.pid);
        let rings = match links.and_then(|links| rings::of(&folder, &links)) {
            Ok(rings) => Some(rings),
            Err(errno) if hidden(errno) => None,
            Err(errno) => return Err(errno),
        };
        Ok(Self {
            pid: status.pid,
            name: status.name.clone(),
            uid: status.uid,
            pinned: status.pinned,
            locked: status.locked.unwrap_or(0),
            limit: process::memlock(&folder)?,
            cap_ipc_lock,
            rings,
        })
    }

    /// True if it pins or locks memory, or might.
    fn holds(&self) -> bool {
        let of_rings = |ring: &ProcessRing| ring.buffers.is_none() || ring.count > 0;
        self.pinned > 0 || self.locked > 0 || self.rings.iter().flatten().any(of_rings)
    }
}
