//! Who pinned memory, as programs in the kernel record it (bpf.rs), which go on when this process has ended.

use super::pages::cgroups;
use super::tracker::{PinOwner, TrackedProcess, purpose};
use dmafile::Result;
use dmafile_sys::host;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
#[cfg(feature = "bpf")]
use std::ops::Range;
use std::path::Path;

/// What to record.
#[derive(Clone, Copy, Debug, Default)]
pub struct RecordPins {
    /// Bytes of kernel memory for it, from 64 KiB; None: a thousandth of the machine's memory, 4 MiB to 256
    /// MiB. A mebibyte is enough for 450 MiB of 4 KiB pages that lie together, for 7 MiB if they lie scattered, or for
    /// 3.5 GiB of huge pages.
    pub memory: Option<u64>,
    /// If true, short-term pins are recorded as well, so that each direct read costs much more.
    pub short: bool,
}

/// A recording that goes on.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct PinRecording {
    /// Seconds since it began.
    pub seconds: f64,
    /// Recorded folios that are pinned now.
    pub folios: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes of kernel memory that it takes.
    pub memory: u64,
    /// Bytes of these that what is pinned now needs.
    pub used: u64,
    /// Pins that were not recorded, because that memory was too small.
    pub lost: u64,
    /// Pins that were not recorded, because their memory was added to the machine after the beginning.
    pub beyond: u64,
    /// Calls that the programs did not see, because the same one was interrupted on that CPU. Then pins are missing, or
    /// some stay that have ended.
    pub missed: u64,
    /// True if the kernel runs no programs at its functions (kernel.ftrace_enabled is 0): what is pinned now is missing,
    /// and what is unpinned stays.
    pub paused: bool,
    /// Changes that were given up because others changed the same at the same time: the pins of as many folios may be
    /// wrong.
    pub disturbed: u64,
}

/// Begins to record long-term pins, as root. The recording goes on until [`stop_recording()`], also when this process
/// ends: programs at the kernel's functions that pin and unpin, whose names are in `/sys/fs/bpf/dmafile-pins`.
///
/// # Errors
/// EEXIST if they are recorded already; EACCES or EPERM without root, and under lockdown; ENOENT on kernels without BTF
/// or `/proc/kcore`, or if bpffs is not mounted; EOPNOTSUPP if the kernel cannot attach programs to its functions or does
/// not run them (kernel.ftrace_enabled), or if this library was built without the feature `bpf`; ENOMEM.
pub fn record(what: &RecordPins) -> Result<RecordingId> {
    #[cfg(feature = "bpf")]
    return super::bpf::begin(what).map(RecordingId);
    #[cfg(not(feature = "bpf"))]
    Err(without(what))
}

/// What tells a recording from a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordingId(#[cfg_attr(not(feature = "bpf"), allow(dead_code))] u64);

/// Ends the recording, or only this one, and removes it from the kernel; false if there was none.
///
/// # Errors
/// EACCES or EPERM without root, EAGAIN if another process begins or ends one at this moment, EOPNOTSUPP while the kernel
/// runs no programs (kernel.ftrace_enabled), or without the feature `bpf`.
pub fn stop_recording(only: Option<RecordingId>) -> Result<bool> {
    #[cfg(feature = "bpf")]
    return super::bpf::end(only.map(|only| only.0));
    #[cfg(not(feature = "bpf"))]
    Err(without(&only))
}

#[cfg(not(feature = "bpf"))]
fn without<T>(_: &T) -> dmafile::Error {
    dmafile::Error::os("cannot record pins", dmafile_sys::Errno::OPNOTSUPP)
        .with_why("this dmafile was built without it")
        .with_remedy("build it with clang: cargo build --features bpf")
}

/// Who pinned memory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[non_exhaustive]
pub struct RecordedBy {
    /// The process ID.
    pub pid: u32,
    /// The name of the thread that pinned it.
    pub name: String,
    /// True if the process has ended.
    pub gone: bool,
}

/// What one task pinned at one time.
#[derive(Clone, Debug)]
pub(super) struct Burst {
    pub by: RecordedBy,
    /// ns since boot.
    pub time: u64,
    /// When the process began, likewise.
    pub born: u64,
    pub cgroup: u64,
    pub uid: u32,
    /// Return addresses, innermost first.
    pub stack: Vec<u64>,
}

/// A folio that is pinned.
#[derive(Clone, Copy, Debug)]
pub(super) struct RecordedFolio {
    pub frame: u64,
    pub bytes: u64,
    pub pins: u64,
    pub burst: u32,
}

/// What the programs have recorded.
#[derive(Debug)]
pub(super) struct PinRecords {
    /// By frame.
    pub folios: Vec<RecordedFolio>,
    /// By number, those of the folios.
    pub bursts: BTreeMap<u32, Burst>,
    pub recording: PinRecording,
}

impl PinRecords {
    /// Reads the recording; None if there is none, or if this process may not see it.
    pub(super) fn read() -> Result<Option<Self>> {
        #[cfg(feature = "bpf")]
        return super::bpf::read();
        #[cfg(not(feature = "bpf"))]
        Ok(None)
    }

    /// The owners of long-term pins: these processes, or all. One for each process and call stack.
    pub(super) fn owners(&self, makers: &[TrackedProcess<'_>], all: bool) -> Vec<PinOwner> {
        let kernel = Functions::read();
        // The programs see version 2 only; cgroups() prefers version 1.
        let cgroups = if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
            cgroups()
        } else {
            BTreeMap::new()
        };
        let now = host::uptime();
        let mut owners = BTreeMap::<_, PinOwner>::new();
        for folio in &self.folios {
            let Some(burst) = self.bursts.get(&folio.burst) else {
                continue;
            };
            let key = (burst.by.pid, burst.born, burst.cgroup, &burst.stack);
            let owner = owners.entry(key).or_insert_with(|| {
                let functions = kernel.of_stack(&burst.stack);
                let by = &burst.by;
                let maker = makers.iter().find(|maker| maker.pid == by.pid && !by.gone);
                PinOwner {
                    pid: by.pid,
                    gone: by.gone,
                    uid: Some(burst.uid),
                    name: Some(maker.map_or(&*by.name, |maker| maker.name).to_string()),
                    cgroup: cgroups.get(&burst.cgroup).cloned(),
                    by: purpose(&functions),
                    pins: 0,
                    bytes: 0,
                    age: 0.0,
                    functions,
                }
            });
            owner.pins += folio.pins;
            owner.bytes += folio.bytes;
            owner.age = owner.age.max(now - burst.time as f64 / 1e9);
        }
        let mut owners: Vec<_> = owners.into_values().collect();
        let wanted = |pid| makers.iter().any(|maker| maker.pid == pid);
        owners.retain(|owner| all || !owner.gone && wanted(owner.pid));
        owners.sort_by(|one, next| next.bytes.cmp(&one.bytes).then(one.pid.cmp(&next.pid)));
        owners
    }

    /// Who pinned the folio that begins at this frame.
    pub(super) fn of_frame(&self, frame: u64) -> Option<&Burst> {
        let at = self
            .folios
            .binary_search_by_key(&frame, |folio| folio.frame)
            .ok()?;
        self.bursts.get(&self.folios[at].burst)
    }
}

impl RecordedBy {
    /// `born` is when the process began, in ns since boot.
    #[cfg(feature = "bpf")]
    pub(super) fn of(pid: u32, born: u64, name: String) -> Self {
        /// USER_HZ, which is 100 on all architectures that dmafile runs on.
        const TICK: u64 = 1_000_000_000 / 100;
        let gone = dmafile_sys::process::started(pid) != Some(born / TICK);
        Self { pid, name, gone }
    }
}

/// The kernel's functions by address; none if it does not tell addresses.
pub(super) struct Functions(Vec<(u64, String)>);

impl Functions {
    pub(super) fn read() -> Self {
        Self::parse(&fs::read_to_string("/proc/kallsyms").unwrap_or_default())
    }

    /// `ADDRESS TYPE NAME`, and `[MODULE]` behind a tab.
    fn parse(text: &str) -> Self {
        let one = |line: &str| {
            let mut words = line.split_ascii_whitespace();
            let address = u64::from_str_radix(words.next()?, 16).ok()?;
            let is_code = matches!(words.next()?, "t" | "T" | "w" | "W");
            (is_code && address != 0).then_some((address, words.next()?.to_string()))
        };
        let mut all: Vec<_> = text.lines().filter_map(one).collect();
        all.sort();
        Self(all)
    }

    #[cfg(feature = "bpf")]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The addresses of a function, up to the next one.
    #[cfg(feature = "bpf")]
    pub(super) fn range(&self, name: &str) -> Option<Range<u64>> {
        /// Larger than any function; what is beyond is another section.
        const LARGEST: u64 = 1 << 20;
        let (start, _) = self.0.iter().find(|one| one.1 == name)?;
        let next = self.0.partition_point(|one| one.0 <= *start);
        let end = self.0.get(next)?.0;
        (end - start < LARGEST).then_some(*start..end)
    }

    /// The functions of a stack, without the programs that recorded it.
    fn of_stack(&self, stack: &[u64]) -> Vec<String> {
        let name = |address: &u64| {
            // A return address; a call at the end of a function returns to the next one.
            let at = self.0.partition_point(|one| one.0 < *address);
            Some(&self.0[at.checked_sub(1)?].1)
        };
        let own = |name: &&String| {
            !["bpf_", "try_grab_"]
                .iter()
                .any(|start| name.starts_with(start))
        };
        stack.iter().filter_map(name).filter(own).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn return_addresses_are_named_by_the_function_before_them() {
        let text = "ffffffff81000000 T first\nffffffff81000100 t second\nffffffff81000100 D data\n\
                    ffffffffc0000000 t drv_pin\t[drv]\nffffffffc0000200 t bpf_prog_1_put\t[bpf]\n";
        let stack = [
            0xffff_ffff_8100_0080,
            0xffff_ffff_8100_0100,
            0xffff_ffff_c000_0010,
            0xffff_ffff_c000_0210,
            5,
        ];
        let functions = Functions::parse(text);
        assert_eq!(functions.of_stack(&stack), ["first", "first", "drv_pin"]);
        #[cfg(feature = "bpf")]
        assert_eq!(
            ["first", "second", "none"].map(|name| functions.range(name)),
            [
                Some(0xffff_ffff_8100_0000..0xffff_ffff_8100_0100),
                None,
                None
            ]
        );
        // Addresses are 0 for users.
        let hidden = Functions::parse("0 T first\n0 t second\n");
        assert!(hidden.of_stack(&stack).is_empty());
    }
}
