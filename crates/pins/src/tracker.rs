//! Reads the pin tracker of a kernel with the series (kernel/docs/pins.md): who pinned memory long-term,
//! and pages that could not be migrated. `/proc/PID/pins` for the process's own, debugfs for root.

use super::sites::site;
use dmafile::{Error, Result};
use dmafile_sys::{Errno, errno, host, process};
use serde::Serialize;
use std::fs;
use std::path::Path;

const OWNERS: &str = "/sys/kernel/debug/pin_owner/owners";
const BLOCKED: &str = "/sys/kernel/debug/pin_owner/blocked";

/// Pinned memory whose last long-term pins were made by one process from one place, as the kernel's pin tracker or a
/// recording knows.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PinOwner {
    /// The process that pinned it.
    pub pid: u32,
    /// True if that process has ended: the pins belong to a process that received its descriptor, or
    /// have leaked.
    pub gone: bool,
    /// The user of that process; the tracker does not know it if the process has ended.
    pub uid: Option<u32>,
    /// The name of that process; the tracker does not know it if the process has ended.
    pub name: Option<String>,
    /// The path of the process's cgroup below their mount, which names its container or service; the tracker does not
    /// know it, nor does anybody if the cgroup has been removed.
    pub cgroup: Option<String>,
    /// Its purpose, or the function that pinned if the purpose is unknown.
    pub by: String,
    /// Pins on this memory, also those of others that are older.
    pub pins: u64,
    /// Bytes of the folios that they keep in place.
    pub bytes: u64,
    /// Seconds since the oldest of them.
    pub age: f64,
    /// The functions that led to the pins, innermost first; empty if they are unknown.
    pub functions: Vec<String>,
}

/// A folio that could not be migrated.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Blocked {
    /// Seconds since the last attempt.
    pub age: f64,
    /// What failed, in the kernel's words.
    pub why: String,
    /// The first page frame of the folio.
    pub frame: u64,
    /// Its bytes.
    pub bytes: u64,
    /// anon, file or other.
    pub of: String,
    /// Number of consecutive failures.
    pub times: u64,
    /// Pins on it.
    pub pins: u64,
    /// References that neither pins nor mappings nor caches explain; negative if some of these were gone
    /// already.
    pub unexplained: i64,
    /// The process that pinned it last for a long term; None if all pins were short.
    pub owner: Option<BlockedBy>,
}

/// The owner of a folio when it could not be migrated.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct BlockedBy {
    /// Its process ID.
    pub pid: u32,
    /// The age of its pin in seconds when the migration failed.
    pub age: f64,
    /// Its purpose, or the function.
    pub by: String,
    /// The functions that led to the pin, innermost first.
    pub functions: Vec<String>,
}

/// A visible process.
pub(super) struct TrackedProcess<'a> {
    pub pid: u32,
    pub uid: u32,
    pub name: &'a str,
}

/// True if this kernel tracks pins, and tracking was enabled at boot.
pub(super) fn is_on() -> bool {
    // EOPNOTSUPP if it is not enabled.
    fs::File::open("/proc/self/pins").is_ok()
}

/// The owners of long-term pins: these processes, or all; None if this kernel does not track pins.
pub(super) fn owners(makers: &[TrackedProcess<'_>], all: bool) -> Option<Vec<PinOwner>> {
    if let Ok(text) = fs::read_to_string(OWNERS) {
        let mut owners = parse_owners(&text, makers, host::uptime());
        let wanted = |pid| makers.iter().any(|maker| maker.pid == pid);
        owners.retain(|owner| all || wanted(owner.pid));
        return Some(owners);
    }
    let mut owners = None;
    for maker in makers {
        // EOPNOTSUPP if it is not enabled.
        if let Ok(text) = fs::read_to_string(process::folder(maker.pid).join("pins")) {
            let found = owners.get_or_insert_with(Vec::new);
            found.extend(parse_own(&text, maker, host::uptime()));
        }
    }
    owners
}

/// Folios that could not be migrated recently, newest last.
///
/// # Errors
/// EACCES without root, and ENOENT if the kernel does not track pins.
pub fn blocked() -> Result<Vec<Blocked>> {
    let text = fs::read_to_string(BLOCKED).map_err(|error| {
        let errno = errno(&error);
        let error = Error::os("cannot list pages that failed to migrate", errno).at(BLOCKED);
        match errno {
            Errno::NOENT if Path::new("/proc/self/pins").exists() => error
                .with_why("the kernel's pin tracker is off")
                .with_remedy("boot with pin_owner=on"),
            Errno::NOENT => error
                .with_why("this kernel does not track pins")
                .with_remedy("build the series of kernel/linux-6.12, and boot with pin_owner=on"),
            _ => error.with_remedy("run as root"),
        }
    })?;
    let now = host::uptime();
    Ok(text
        .lines()
        .filter_map(|line| parse_blocked(line, now))
        .collect())
}

/// Parses debugfs: the process and whether it exists before each line; `-` for short pins.
fn parse_owners(text: &str, makers: &[TrackedProcess<'_>], now: f64) -> Vec<PinOwner> {
    let one = |line: &str| {
        let (pid, rest) = line.split_once(' ')?;
        let (state, rest) = rest.split_once(' ')?;
        let pid = pid.parse().ok()?;
        let gone = state == "gone";
        let maker = makers.iter().find(|maker| maker.pid == pid && !gone);
        Some(PinOwner {
            pid,
            gone,
            uid: maker.map(|maker| maker.uid),
            name: maker.map(|maker| maker.name.to_string()),
            ..parse_line(rest, now)?
        })
    };
    text.lines().skip(2).filter_map(one).collect()
}

/// Parses `/proc/PID/pins`: two sums, then the lines.
fn parse_own(text: &str, maker: &TrackedProcess<'_>, now: f64) -> Vec<PinOwner> {
    let lines = text.lines().skip(2);
    lines
        .filter_map(|line| {
            Some(PinOwner {
                pid: maker.pid,
                uid: Some(maker.uid),
                name: Some(maker.name.to_string()),
                ..parse_line(line, now)?
            })
        })
        .collect()
}

/// `PINS BYTES SINCE FUNCTION...`
fn parse_line(line: &str, now: f64) -> Option<PinOwner> {
    let mut words = line.split(' ');
    let mut number = || words.next()?.parse::<u64>().ok();
    let (pins, bytes, since) = (number()?, number()?, number()?);
    let functions = functions(words);
    Some(PinOwner {
        pid: 0,
        gone: false,
        uid: None,
        name: None,
        cgroup: None,
        by: purpose(&functions),
        pins,
        bytes,
        age: age(since, now),
        functions,
    })
}

/// `WHEN WHY PFN ORDER OF TIMES PINS UNEXPLAINED PID TID SINCE FUNCTION...`
fn parse_blocked(line: &str, now: f64) -> Option<Blocked> {
    let mut words = line.split(' ');
    let mut word = || words.next();
    let when: u64 = word()?.parse().ok()?;
    let why = word()?.to_string();
    let frame = u64::from_str_radix(word()?.strip_prefix("0x")?, 16).ok()?;
    let order = word()?.parse().ok()?;
    let of = word()?.to_string();
    let (times, pins) = (word()?.parse().ok()?, word()?.parse().ok()?);
    let unexplained = word()?.parse().ok()?;
    let pid = word()?.parse::<u32>().ok();
    let (_thread, since) = (word()?, word()?.parse::<u64>().ok());
    let functions = functions(words);
    Some(Blocked {
        age: age(when, now),
        why,
        frame,
        bytes: dmafile_sys::map::page_size().checked_shl(order)?,
        of,
        times,
        pins,
        unexplained,
        owner: pid.zip(since).map(|(pid, since)| BlockedBy {
            pid,
            age: age(since, when as f64 / 1e9),
            by: purpose(&functions),
            functions,
        }),
    })
}

/// `?` for a stack that is unknown.
fn functions<'a>(words: impl Iterator<Item = &'a str>) -> Vec<String> {
    let known = words.filter(|word| *word != "?" && !word.is_empty());
    known.map(str::to_string).collect()
}

/// The purpose of a call stack, or its first function that is no part of the kernel's own pinning.
pub(super) fn purpose(functions: &[String]) -> String {
    let known = site(functions.iter().map(String::as_str)).map(|site| site.name);
    let is_caller = |function: &&str| {
        let own = [
            "pin_user_pages",
            "internal_get_user_pages",
            "lockless_pages",
            "follow_",
            "gup_",
            "__gup_",
            "__get_user_pages",
            "memfd_pin_folios",
        ];
        !own.iter().any(|start| function.starts_with(start))
    };
    let first = || functions.iter().map(String::as_str).find(is_caller);
    known.or_else(first).unwrap_or("?").to_string()
}

/// The age in seconds of a time in nanoseconds since boot.
fn age(since: u64, now: f64) -> f64 {
    (now - since as f64 / 1e9).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAKER: TrackedProcess<'_> = TrackedProcess {
        pid: 7,
        uid: 1000,
        name: "server",
    };

    #[test]
    fn pins_of_the_own_process_are_parsed() {
        let text = "pins 1041\nbytes 71307264\n\
            1024 4194304 12000000000 pin_user_pages_fast io_pin_pages io_sqe_buffers_register\n\
            17 67108864 13000000000 memfd_pin_folios udmabuf_create\n\
            3 12288 14000000000 ?\n";
        let [ring, memfd, unknown] = &parse_own(text, &MAKER, 22.0)[..] else {
            panic!("three lines");
        };
        assert_eq!((ring.pid, ring.uid, ring.gone), (7, Some(1000), false));
        assert_eq!(ring.name.as_deref(), Some("server"));
        assert_eq!((ring.pins, ring.bytes, ring.age), (1024, 4 << 20, 10.0));
        assert_eq!(ring.by, "io_uring buffer");
        assert_eq!(ring.functions.len(), 3);
        assert_eq!((memfd.by.as_str(), memfd.bytes), ("udmabuf", 64 << 20));
        assert_eq!((unknown.by.as_str(), unknown.functions.len()), ("?", 0));
    }

    #[test]
    fn pins_of_all_processes_are_parsed() {
        let text = "pins 9\nbytes 1073791000\n\
            7 exists 2 8192 1000000000 gup_fast_fallback pin_user_pages_fast drv_pin vfs_ioctl\n\
            8 gone 512 1073741824 0 ib_umem_get\n\
            7 gone 1 4096 500000000 drv_pin\n\
            9 exists 1 4096 0 ? ?\n\
            - - 3 12288 - ?\n";
        let owners = parse_owners(text, &[MAKER], 1.5);
        assert_eq!(owners.len(), 4, "{owners:?}");
        let [own, rdma, earlier, other] = &owners[..] else {
            panic!("four owners");
        };
        assert_eq!((own.pid, own.gone, own.age), (7, false, 0.5));
        assert_eq!((own.name.as_deref(), &*own.by), (Some("server"), "drv_pin"));
        assert_eq!((rdma.gone, &*rdma.by, &rdma.name), (true, "RDMA", &None));
        // An earlier process with the same number.
        assert_eq!((earlier.pid, earlier.uid, earlier.gone), (7, None, true));
        assert_eq!((&*other.by, &other.name), ("?", &None));
    }

    #[test]
    fn a_page_that_did_not_move_has_the_owner_at_that_time() {
        let line = "4000000000 longterm_pin 0x1a2b3 9 anon 5 3 -1 8 9 2500000000 \
                    memfd_pin_folios udmabuf_create";
        let one = parse_blocked(line, 5.0).unwrap();
        assert_eq!(
            (one.age, one.why.as_str(), one.frame),
            (1.0, "longterm_pin", 0x1a2b3)
        );
        assert_eq!(
            (one.bytes, one.times, one.pins, one.unexplained),
            (dmafile_sys::map::page_size() << 9, 5, 3, -1)
        );
        let owner = one.owner.unwrap();
        assert_eq!((owner.pid, owner.age, &*owner.by), (8, 1.5, "udmabuf"));
        let line = "1 seal_write 0x1 0 file 1 0 1 - - - ?";
        let one = parse_blocked(line, 5.0).unwrap();
        assert_eq!((one.owner, one.unexplained), (None, 1));
        assert_eq!(parse_blocked("", 5.0), None);
        let too_large = "1 x 0x1 99 file 1 0 1 - - - ?";
        assert_eq!(parse_blocked(too_large, 5.0), None);
    }
}
