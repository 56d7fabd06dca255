//! Reads the pin tracker of a kernel with the series (kernel/docs/series.md): long-term pins as regions, and
//! pages that could not be migrated. `/proc/PID/pins` for the process's own, debugfs for root.

use super::sites::site;
use dmafile::{Error, Result};
use dmafile_sys::{Errno, errno, host, process};
use serde::Serialize;
use std::fs;
use std::path::Path;

const REGIONS: &str = "/sys/kernel/debug/pin_owner/regions";
const BLOCKED: &str = "/sys/kernel/debug/pin_owner/blocked";

/// Memory that was pinned long-term by one call, or by several for adjacent ranges.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PinnedRegion {
    /// Its number; None if only the process's own list was readable.
    pub id: Option<u64>,
    /// The process that pinned it; None if it is gone, or not in this PID namespace.
    pub pid: Option<u32>,
    /// True if that process has ended: the pins belong to a process that received its descriptor, or
    /// have leaked.
    pub gone: bool,
    /// The user of that process at that time.
    pub uid: u32,
    /// The name of that process at that time.
    pub name: String,
    /// Its purpose, or the function that pinned if the purpose is unknown.
    pub by: String,
    /// The kernel function that pinned; None if it has no name any more.
    pub function: Option<String>,
    /// Where it starts: an address of the process, or an offset in the memfd.
    pub start: u64,
    /// Where it ends (exclusive).
    pub end: u64,
    /// True if a device may write there.
    pub writes: bool,
    /// Remaining pins.
    pub pins: u64,
    /// Bytes of the folios that it keeps in place.
    pub bytes: u64,
    /// Seconds since it was pinned.
    pub age: f64,
    /// The memfd, if it was pinned through its descriptor.
    pub memfd: Option<RegionFile>,
    /// True if its number of pins may be wrong, because an unpin may have been attributed to another
    /// region on the same folio, or the other way round.
    pub guessed: bool,
    /// The call stack, with `pin_owner=on,stack`.
    pub stack: Vec<String>,
}

/// The memfd that contains a region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct RegionFile {
    /// Major and minor number in hexadecimal, as in `/proc/PID/maps`.
    pub device: String,
    /// Its inode.
    pub inode: u64,
    /// Its name.
    pub name: String,
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
    /// How many of these are long-term.
    pub long: u64,
    /// The newest region among these, if it still exists.
    pub region: Option<PinnedRegion>,
    /// References that neither pins nor mappings nor caches explain; negative if some of these were gone
    /// already.
    pub unexplained: i64,
    /// The first holder of the short-term pins.
    pub short: Option<ShortPin>,
}

/// The first of the pins that belong to no region: mostly direct I/O.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ShortPin {
    /// Its process ID.
    pub pid: u32,
    /// Its age in seconds when the migration failed.
    pub age: f64,
    /// Its purpose, or the function.
    pub by: String,
}

/// A process whose own list is read.
pub(super) struct TrackedProcess<'a> {
    pub pid: u32,
    pub uid: u32,
    pub name: &'a str,
}

/// True if this kernel tracks pins, and tracking was enabled at boot.
pub(super) fn is_on() -> bool {
    // EOPNOTSUPP if it is not enabled.
    fs::read("/proc/self/pins").is_ok()
}

/// The regions of these processes, or of all; None if this kernel does not track pins.
pub(super) fn regions(makers: &[TrackedProcess<'_>], all: bool) -> Option<Vec<PinnedRegion>> {
    if let Ok(text) = fs::read_to_string(REGIONS) {
        let mut regions = parse_regions(&text, host::uptime());
        let wanted = |pid| makers.iter().any(|maker| Some(maker.pid) == pid);
        regions.retain(|region| all || wanted(region.pid));
        return Some(regions);
    }
    let mut regions = None;
    for maker in makers {
        // EOPNOTSUPP if it is not enabled.
        if let Ok(text) = fs::read_to_string(process::folder(maker.pid).join("pins")) {
            let found = regions.get_or_insert_with(Vec::new);
            found.extend(parse_own(&text, maker, host::uptime()));
        }
    }
    regions
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
    let regions = regions(&[], true).unwrap_or_default();
    let now = host::uptime();
    let one = |line| parse_blocked(line, &regions, now);
    Ok(text.lines().filter_map(one).collect())
}

/// Parses debugfs: number, process, user and name before each line, and stacks after it.
fn parse_regions(text: &str, now: f64) -> Vec<PinnedRegion> {
    let mut regions: Vec<PinnedRegion> = Vec::new();
    for line in text.lines() {
        if line.starts_with("    ") {
            if let Some(last) = regions.last_mut() {
                last.stack.push(line.trim().to_string());
            }
            continue;
        }
        let mut words = line.splitn(5, ' ');
        let mut word = || words.next();
        let (id, pid, uid, name) = (word(), word(), word(), word());
        let Some((Some(id), Some(pid), Some(uid), Some(name), rest)) =
            word().map(|rest| (id, pid, uid, name, rest))
        else {
            continue;
        };
        let (Ok(id), Ok(uid)) = (id.parse(), uid.parse()) else {
            continue;
        };
        regions.extend(parse_line(rest, now).map(|region| PinnedRegion {
            id: Some(id),
            pid: pid.parse().ok().filter(|pid| *pid != 0),
            gone: pid == "gone",
            uid,
            name: unescaped(name),
            ..region
        }));
    }
    regions
}

/// Parses `/proc/PID/pins`: two sums, then the lines.
fn parse_own(text: &str, maker: &TrackedProcess<'_>, now: f64) -> Vec<PinnedRegion> {
    let lines = text.lines().filter_map(|line| parse_line(line, now));
    lines
        .map(|region| PinnedRegion {
            pid: Some(maker.pid),
            uid: maker.uid,
            name: maker.name.to_string(),
            ..region
        })
        .collect()
}

/// `START-END ACCESS PINS BYTES SINCE FUNCTION`; for a memfd preceded by `@` and followed by its device,
/// inode and name; and `~` for a guess.
fn parse_line(line: &str, now: f64) -> Option<PinnedRegion> {
    let mut words = line.split(' ');
    let range = words.next()?;
    let is_memfd = range.starts_with('@');
    let (start, end) = range.trim_start_matches('@').split_once('-')?;
    let hex = |word: &str| u64::from_str_radix(word, 16).ok();
    let (start, end) = (hex(start)?, hex(end)?);
    let writes = words.next()? == "w";
    let mut number = || words.next()?.parse::<u64>().ok();
    let (pins, bytes, since) = (number()?, number()?, number()?);
    let function = Some(words.next()?).filter(|function| *function != "0");
    let memfd = if is_memfd {
        let (major, minor) = words.next()?.split_once(':')?;
        let (major, minor): (u32, u32) = (major.parse().ok()?, minor.parse().ok()?);
        Some(RegionFile {
            device: format!("{major:02x}:{minor:02x}"),
            inode: words.next()?.parse().ok()?,
            name: unescaped(words.next()?),
        })
    } else {
        None
    };
    Some(PinnedRegion {
        id: None,
        pid: None,
        gone: false,
        uid: 0,
        name: String::new(),
        by: purpose(function),
        function: function.map(str::to_string),
        start,
        end,
        writes,
        pins,
        bytes,
        age: age(since, now),
        memfd,
        guessed: words.next() == Some("~"),
        stack: Vec::new(),
    })
}

/// `WHEN WHY NAME=VALUE...`
fn parse_blocked(line: &str, regions: &[PinnedRegion], now: f64) -> Option<Blocked> {
    let (when, rest) = line.split_once(' ')?;
    let (why, rest) = rest.split_once(' ')?;
    let field = |name: &str| {
        let mut words = rest.split(' ');
        words.find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
    };
    let number = |name| field(name)?.parse::<u64>().ok();
    let id = number("region")?;
    let short = || {
        Some(ShortPin {
            pid: number("short-tgid")?.try_into().ok()?,
            age: number("short-ms")? as f64 / 1e3,
            by: purpose(field("short-site").filter(|function| *function != "0")),
        })
    };
    Some(Blocked {
        age: age(when.parse().ok()?, now),
        why: why.to_string(),
        frame: u64::from_str_radix(field("pfn")?.strip_prefix("0x")?, 16).ok()?,
        bytes: dmafile_sys::map::page_size().checked_shl(number("order")?.try_into().ok()?)?,
        of: field("of")?.to_string(),
        times: number("times")?,
        pins: number("pins")?,
        long: number("long")?,
        region: regions
            .iter()
            .find(|one| id != 0 && one.id == Some(id))
            .cloned(),
        unexplained: field("unexplained")?.parse().ok()?,
        short: short(),
    })
}

fn purpose(function: Option<&str>) -> String {
    let known = function.and_then(|function| site([function]));
    let name = known.map(|site| site.name).or(function);
    name.unwrap_or("?").to_string()
}

/// The age in seconds of a time in nanoseconds since boot.
fn age(since: u64, now: f64) -> f64 {
    (now - since as f64 / 1e9).max(0.0)
}

/// Undoes seq_escape() in a name: `\040` is a space.
fn unescaped(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let digits = tail.get(..3).filter(|_| *first == b'\\');
        let code =
            digits.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        bytes.push(code.unwrap_or(*first));
        rest = if code.is_some() { &tail[3..] } else { tail };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = "pins 1041\nbytes 71307264\n\
        7f12a4000000-7f12a4400000 w 1024 4194304 12000000000 io_pin_pages\n\
        @0-4000000 w 17 67108864 13000000000 udmabuf_create 0:17 1031 memfd:my\\040weights ~\n";

    #[test]
    fn regions_of_the_own_process_are_parsed() {
        let maker = TrackedProcess {
            pid: 7,
            uid: 1000,
            name: "server",
        };
        let [ring, memfd] = &parse_own(OWN, &maker, 22.0)[..] else {
            panic!("two regions");
        };
        assert_eq!(
            (ring.pid, ring.uid, ring.name.as_str()),
            (Some(7), 1000, "server")
        );
        assert_eq!((ring.start, ring.end), (0x7f12_a400_0000, 0x7f12_a440_0000));
        assert_eq!((ring.pins, ring.bytes, ring.writes), (1024, 4 << 20, true));
        assert_eq!(
            (ring.by.as_str(), ring.age, ring.guessed),
            ("io_uring buffer", 10.0, false)
        );
        assert_eq!((memfd.start, memfd.end, memfd.guessed), (0, 64 << 20, true));
        let file = memfd.memfd.as_ref().unwrap();
        assert_eq!((file.device.as_str(), file.inode), ("00:11", 1031));
        assert_eq!(
            (file.name.as_str(), memfd.by.as_str()),
            ("memfd:my weights", "udmabuf")
        );
    }

    #[test]
    fn regions_of_all_processes_are_parsed_with_stacks() {
        let text = "1 4711 1000 server 1000-3000 r 2 8192 1000000000 drv_pin\n\
            \x20   drv_pin+0x24/0x60 [drv]\n    vfs_ioctl+0x1/0x2\n\
            2 gone 0 my\\040trainer 0-40000000 w 512 1073741824 0 ib_umem_get\n\
            3 0 0 other 5000-6000 w 1 4096 0 0\n\
            0 - 0 unknown 3 pins, for which there was no memory\n";
        let regions = parse_regions(text, 1.5);
        assert_eq!(regions.len(), 3, "{regions:?}");
        assert_eq!((regions[0].id, regions[0].pid), (Some(1), Some(4711)));
        assert_eq!((regions[0].by.as_str(), regions[0].age), ("drv_pin", 0.5));
        assert_eq!(
            regions[0].stack,
            ["drv_pin+0x24/0x60 [drv]", "vfs_ioctl+0x1/0x2"]
        );
        assert_eq!((regions[1].pid, regions[1].gone), (None, true));
        assert_eq!(
            (regions[1].name.as_str(), regions[1].by.as_str()),
            ("my trainer", "RDMA")
        );
        // In another PID namespace, and pinned by a function that is gone.
        assert_eq!(
            (regions[2].pid, regions[2].gone, &*regions[2].by),
            (None, false, "?")
        );
    }

    #[test]
    fn a_page_that_did_not_move_has_the_region_that_pins_it() {
        let regions = parse_regions("9 7 0 server 1000-2000 w 1 4096 0 io_pin_pages\n", 5.0);
        let line = "4000000000 longterm_pin pfn=0x1a2b3 order=9 of=anon times=5 pins=3 long=1 region=9 \
                    unexplained=-1 short-tgid=8 short-ms=1500 short-site=iov_iter_extract_pages";
        let one = parse_blocked(line, &regions, 5.0).unwrap();
        assert_eq!(
            (one.age, one.why.as_str(), one.frame),
            (1.0, "longterm_pin", 0x1a2b3)
        );
        assert_eq!(
            (one.bytes, one.times, one.pins, one.long),
            (dmafile_sys::map::page_size() << 9, 5, 3, 1)
        );
        assert_eq!(one.region.as_ref().and_then(|region| region.pid), Some(7));
        let short = one.short.unwrap();
        assert_eq!(
            (short.pid, short.age, &*short.by, one.unexplained),
            (8, 1.5, "direct I/O", -1)
        );
        let line =
            "1 seal_write pfn=0x1 order=0 of=file times=1 pins=0 long=0 region=0 unexplained=1";
        let one = parse_blocked(line, &regions, 5.0).unwrap();
        assert_eq!((one.region, one.short, one.unexplained), (None, None, 1));
        assert_eq!(parse_blocked("", &regions, 5.0), None);
        assert_eq!(
            parse_blocked("1 x pfn=0x1 order=99 of=file", &regions, 5.0),
            None
        );
    }

    #[test]
    fn names_are_unescaped() {
        assert_eq!(unescaped("a\\040b\\012c\\\\"), "a b\nc\\\\");
        assert_eq!(unescaped("\\134x\\9"), "\\x\\9");
    }
}
