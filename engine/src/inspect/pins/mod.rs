//! What is pinned, by whom, against which limit.
//!
//! Nothing is kept: every number is read from the kernel when it is asked for, and other processes go
//! on meanwhile. `docs/pins.md` says where the kernel makes each of them. A file here is a source.

mod btf;
mod dmabufs;
mod file;
mod hist;
mod holders;
mod pages;
mod rdma;
mod rings;
mod sites;
mod tracker;
mod vfio;
mod watch;
mod xdp;

pub use file::{FilePins, Mapper, of_file};
pub use holders::{Absent, Holder, Maker};
pub use pages::{PageGroup, PinnedPages, PinnedRange, Whose, pages};
pub use rings::{RegisteredBuffer, Ring};
pub use tracker::{Blocked, Region, RegionFile, ShortPin, blocked};
pub use watch::{Place, Row, Watch, Watched, watch};

use crate::error::{Error, Result};
use crate::sys::{Errno, host, map::page_size, process};
use holders::Person;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Pinned and locked memory, as [`pins()`] found it.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Pins {
    /// The machine as a whole.
    pub system: System,
    /// The processes that pin or lock memory, by their number; or the one that was asked for.
    pub processes: Vec<Process>,
    /// The users that pin memory, by their number; or the one whose process was asked for.
    pub users: Vec<User>,
    /// Each holder of pinned memory and each way in which it holds some: what all sources together
    /// tell. The same memory may be in several of them.
    pub holders: Vec<Holder>,
    /// What a kernel with the pin tracker says (docs/series.md), to others than root of processes that
    /// they may look into; None without it.
    pub regions: Option<Vec<Region>>,
    /// The sources that say nothing here, and why.
    pub absent: Vec<Absent>,
    /// How many of the processes that were looked for keep all of it or their rings from us.
    pub unreadable: u64,
    /// Whether `/proc` does not even list processes of other users (mounted with `hidepid=2`): how
    /// many there are cannot be told then.
    pub hidden: bool,
}

/// Pins of all kinds on this machine since it started, those of direct I/O in flight among them:
/// `nr_foll_pin_*` of `/proc/vmstat`.
///
/// The kernel adds up what its processors counted about once a second: the numbers may lag.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct System {
    /// Pins made; None where the kernel does not tell (before Linux 5.7).
    pub acquired: Option<u64>,
    /// Pins undone.
    pub released: Option<u64>,
    /// The difference, in pages; 0 where `released` is ahead for a moment. A page that is pinned
    /// twice counts twice, and a huge one in a registered buffer only once.
    pub pages: Option<u64>,
    /// The same in bytes, taking every page for a base page.
    pub bytes: Option<u64>,
}

/// What one process pins and locks.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// Its name, at most 15 bytes; a newline or a backslash in it are escaped (`comm` of proc(5)).
    pub name: String,
    /// Its real user.
    pub uid: u32,
    /// Bytes pinned on its account, by its rings and by drivers: `VmPin` of `/proc/PID/status`.
    /// What a ring pins of a huge page counts as the whole of it.
    pub pinned: u64,
    /// Bytes locked into memory (mlock(2)): `VmLck` of `/proc/PID/status`.
    pub locked: u64,
    /// The soft limit on locked and pinned memory, in bytes; None is no limit (RLIMIT_MEMLOCK of
    /// `/proc/PID/limits`).
    pub limit: Option<u64>,
    /// Whether CAP_IPC_LOCK is effective and lifts that limit. The root of a user namespace of
    /// its own has the capability in vain, which is false here.
    pub cap_ipc_lock: bool,
    /// Its io_uring rings; None where they may not be looked at.
    pub rings: Option<Vec<Ring>>,
}

/// What the processes of one user pin together. Registered buffers count against RLIMIT_MEMLOCK
/// so, not by process: a registration fails (ENOMEM) when with it the sum exceeds the limit of the
/// process that registers.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct User {
    /// The user.
    pub uid: u32,
    /// Bytes that its processes pin.
    pub pinned: u64,
    /// Bytes of those processes whose limit binds.
    pub charged: u64,
}

/// Looks at all processes for pinned and locked memory, or at process `pid`, whatever it pins.
///
/// Processes that end meanwhile are left out; those that may not be looked into are counted.
/// Whoever may trace a process may look into it (ptrace(2)): its user, and root.
///
/// ```no_run
/// for process in dmafile::pins(None)?.processes {
///     println!("{} {}: {} bytes", process.pid, process.name, process.pinned);
/// }
/// # Ok::<(), dmafile::Error>(())
/// ```
///
/// # Errors
/// ESRCH where there is no process `pid`, EPERM or EACCES where it is hidden; and where `/proc`
/// cannot be read.
pub fn pins(pid: Option<u32>) -> Result<Pins> {
    let asked = pid.map(find).transpose()?;
    let mut processes = Vec::new();
    let mut users = BTreeMap::new();
    let mut people = Vec::new();
    let mut unreadable = 0;
    for pid in process::all().map_err(|errno| Error::os("cannot list", errno).at("/proc"))? {
        let folder = process::folder(pid);
        let status = match process::status(&folder) {
            Ok(status) => status,
            Err(errno) if ended(errno) => continue,
            Err(errno) if hidden(errno) => {
                // Those of other users; not what was asked for.
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
    let regions = tracker::regions(&makers, asked.is_none());
    let (holders, absent) = holders::all(&people, &processes, asked.map(|asked| asked.pid));
    Ok(Pins {
        system: System::read(),
        users: users
            .into_values()
            .filter(|user| all_users || user.pinned > 0)
            .collect(),
        processes,
        holders,
        regions,
        absent,
        unreadable,
        hidden: hides_others(),
    })
}

/// There always is a first process.
fn hides_others() -> bool {
    let absent = process::status(&process::folder(1)).is_err_and(ended);
    absent && process::exists(1)
}

/// The process that was asked for.
fn find(pid: u32) -> Result<process::Status> {
    process::status(&process::folder(pid)).map_err(|errno| match errno {
        // A /proc that is mounted with hidepid=2 does not have it.
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
    let error = Error::os("cannot look into", errno).at(format!("process {pid}"));
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

    /// Whether it pins or locks memory, or may do so.
    fn holds(&self) -> bool {
        let of_rings = |ring: &Ring| ring.buffers.is_none() || ring.count > 0;
        self.pinned > 0 || self.locked > 0 || self.rings.iter().flatten().any(of_rings)
    }
}
