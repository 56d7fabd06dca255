//! Counts pins and unpins from now on, in the kernel: probes on its functions, and a histogram of each by
//! process and stack.

use super::btf::Btf;
use super::denied;
use super::hist::{self, Bucket};
use super::sites::site;
use crate::tracefs::Instance;
use dmafile::{CancelToken, Error, Result};
use dmafile_sys::Errno;
use dmafile_sys::process::{self, folder};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What was pinned and unpinned during [`watch()`].
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Watched {
    /// Duration in seconds.
    pub seconds: f64,
    /// True if short-term pins (direct I/O) were counted as well.
    pub short: bool,
    /// True if `pinned` is the requested number of pages and not the result: before Linux 6.9, probes cannot
    /// see both the arguments and the return value of a function.
    pub requested: bool,
    /// One row per process and purpose.
    pub rows: Vec<Row>,
    /// Calls that the kernel's probes missed.
    pub missed: u64,
    /// Calls that did not fit into the histograms.
    pub dropped: u64,
    /// Functions that this kernel does not have, or does not allow probes on.
    pub absent: Vec<String>,
}

/// What one process pinned for one purpose.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Row {
    /// The process ID; None for kernel workers. A thread whose process ended immediately has its thread ID
    /// here.
    pub pid: Option<u32>,
    /// Its name; `kworker` for all kernel workers.
    pub name: String,
    /// The purpose of the pins, or the calling function if that is unknown.
    pub by: String,
    /// Pins acquired; the kernel counts one per page, or one for a whole folio of a memfd.
    pub pinned: u64,
    /// Pins released by this process, which need not have acquired them: workers and interrupts release
    /// pins, too.
    pub unpinned: u64,
    /// The callers.
    pub places: Vec<CallSite>,
}

/// A caller of the functions that pin.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct CallSite {
    /// The function, with its module in brackets.
    pub function: String,
    /// As in [`Row`].
    pub pinned: u64,
    /// As in [`Row`].
    pub unpinned: u64,
    /// Number of calls.
    pub calls: u64,
}

/// What to watch.
#[derive(Clone, Copy, Debug, Default)]
pub struct Watch {
    /// For how long; None: until the token is set.
    pub time: Option<Duration>,
    /// If true, short-term pins are counted as well: each direct read then costs a probe.
    pub short: bool,
    /// Only this process.
    pub pid: Option<u32>,
}

/// A function that pins or unpins, and where its arguments are. On these kernels they do not call each
/// other, except for the one that has a condition.
struct Probe {
    name: &'static str,
    function: &'static str,
    /// Which argument is the number of pages; None means one page.
    count: Option<u8>,
    /// The return type of a function that pins, and which argument has the flags.
    pins: Option<(&'static str, Option<u8>)>,
    /// An additional argument to fetch, and the condition on it.
    condition: Option<(&'static str, &'static str)>,
}

const fn pinning(
    name: &'static str,
    function: &'static str,
    count: u8,
    returned: &'static str,
    flags: u8,
) -> Probe {
    Probe {
        name,
        function,
        count: Some(count),
        pins: Some((returned, Some(flags))),
        condition: None,
    }
}

const fn unpinning(name: &'static str, function: &'static str, count: Option<u8>) -> Probe {
    Probe {
        name,
        function,
        count,
        pins: None,
        condition: None,
    }
}

const PROBES: &[Probe] = &[
    pinning("fast", "pin_user_pages_fast", 2, "s32", 3),
    pinning("plain", "pin_user_pages", 2, "s64", 3),
    pinning("remote", "pin_user_pages_remote", 3, "s64", 4),
    pinning("unlocked", "pin_user_pages_unlocked", 2, "s64", 4),
    Probe {
        // Returns folios; always long-term.
        pins: Some(("s64", None)),
        ..pinning("memfd", "memfd_pin_folios", 5, "s64", 0)
    },
    unpinning("un_pages", "unpin_user_pages", Some(2)),
    Probe {
        // Otherwise it calls the function above.
        condition: Some(("dirty=$arg3:u8", "dirty != 0")),
        ..unpinning("un_dirty", "unpin_user_pages_dirty_lock", Some(2))
    },
    unpinning("un_range", "unpin_user_page_range_dirty_lock", Some(2)),
    unpinning("un_page", "unpin_user_page", None),
    unpinning("un_user_folio", "unpin_user_folio", Some(2)),
    unpinning("un_folio", "unpin_folio", None),
    unpinning("un_folios", "unpin_folios", Some(2)),
];

/// Keys of a histogram: of newer kernels, then of older ones.
const STACKS: [&str; 2] = ["common_stacktrace", "stacktrace"];
/// Number of buckets of each histogram.
const SIZE: u32 = 16384;
/// FOLL_LONGTERM where it was a macro, and therefore not in the kernel's types (up to Linux 6.2).
const LONGTERM_OF_MACRO: u64 = 0x10000;

/// Counts pins and unpins from now until `what.time` is over or the token is set. Calls `started` when
/// counting has begun.
///
/// Adds probes to the kernel, and an instance of its tracing, and removes them at the end. If the process is
/// killed before, the next call removes what it left.
///
/// # Errors
/// EACCES or EPERM without root, and under lockdown; ENOENT if there is no tracefs, or if the kernel has no
/// probes; and an error if the requested process does not exist.
pub fn watch(what: &Watch, stop: &CancelToken, started: impl FnOnce()) -> Result<Watched> {
    what.pid.map(super::find).transpose()?;
    let longterm = if what.short { None } else { Some(longterm()?) };
    let (instance, probes) = start(longterm)?;
    let begun = Instant::now();
    started();
    let mut names = ThreadNames::default();
    // Short enough to react to a signal, and long enough to cost nothing.
    const PAUSE: Duration = Duration::from_millis(100);
    const LOOK_EVERY: u32 = 10;
    for round in 1_u32.. {
        if stop.is_cancelled() || what.time.is_some_and(|time| begun.elapsed() >= time) {
            break;
        }
        std::thread::sleep(what.time.map_or(PAUSE, |time| {
            time.saturating_sub(begun.elapsed()).min(PAUSE)
        }));
        // A thread's process can be found only while it is alive.
        if round % LOOK_EVERY == 1 {
            for (_, entries, _) in probes.read(&instance)? {
                entries.iter().for_each(|entry| names.learn(entry.tid));
            }
        }
    }
    let failed = |errno| Error::os("cannot watch pins", errno).at("tracefs");
    instance.switch(false).map_err(failed)?;
    let seconds = begun.elapsed().as_secs_f64();
    let missed = instance.missed().map_err(failed)?;
    let read = probes.read(&instance)?;
    drop(instance);
    let dropped = read.iter().map(|(_, _, dropped)| dropped).sum();
    let mut rows = rows(&read, &mut names, what.short);
    rows.retain(|row| what.pid.is_none() || row.pid == what.pid);
    Ok(Watched {
        seconds,
        short: what.short,
        requested: probes.requested,
        rows,
        missed,
        dropped,
        absent: probes.absent.iter().map(ToString::to_string).collect(),
    })
}

/// The flag of long-term pins.
fn longterm() -> Result<u64> {
    let types = Btf::read().map_err(|error| {
        error.with_remedy(
            "count short pins as well, which needs no flag: dmafile pins --watch --all",
        )
    })?;
    Ok(types.constant("FOLL_LONGTERM").unwrap_or(LONGTERM_OF_MACRO))
}

/// The probes that have been set.
struct Probes {
    there: Vec<&'static Probe>,
    absent: Vec<&'static str>,
    requested: bool,
}

type ProbeRead = (&'static Probe, Vec<Bucket>, u64);

impl Probes {
    fn read(&self, instance: &Instance) -> Result<Vec<ProbeRead>> {
        let one = |probe: &&'static Probe| {
            let text = instance.histogram(probe.name).map_err(|errno| {
                Error::os("cannot watch pins", errno).at("a histogram of tracefs")
            })?;
            let (entries, dropped) = hist::parse(&text);
            Ok((*probe, entries, dropped))
        };
        self.there.iter().map(one).collect()
    }
}

fn start(longterm: Option<u64>) -> Result<(Instance, Probes)> {
    let mut instance = Instance::new().map_err(refused)?;
    let mut probes = Probes {
        there: Vec::new(),
        absent: Vec::new(),
        requested: false,
    };
    for probe in PROBES {
        let done = match (probe.pins, probes.requested) {
            (Some(_), false) => match instance.probe('r', probe.name, &probe.returning()) {
                // This kernel cannot fetch arguments in a return probe.
                Err(Errno::INVAL) => {
                    probes.requested = true;
                    instance.probe('p', probe.name, &probe.entering())
                }
                done => done,
            },
            _ => instance.probe('p', probe.name, &probe.entering()),
        };
        match done {
            Ok(()) => probes.there.push(probe),
            Err(Errno::NOENT | Errno::INVAL) => probes.absent.push(probe.function),
            Err(errno) => return Err(refused(errno)),
        }
    }
    if probes.there.iter().all(|probe| probe.pins.is_none()) {
        return Err(refused(Errno::NOENT).with_why("none of the functions that pin can be probed"));
    }
    for probe in &probes.there {
        let set = |stack| instance.trigger(probe.name, &probe.trigger(stack, longterm));
        let done = match set(STACKS[0]) {
            Err(Errno::INVAL) => set(STACKS[1]),
            done => done,
        };
        done.map_err(refused)?;
    }
    instance.switch(true).map_err(refused)?;
    Ok((instance, probes))
}

fn refused(errno: Errno) -> Error {
    let error = Error::os("cannot watch pins", errno).at("tracefs");
    match errno {
        Errno::ACCESS => error.with_remedy("run as root"),
        Errno::PERM => denied(error, ""),
        Errno::NOENT => error
            .with_why("it is not mounted, or has no probes (CONFIG_KPROBE_EVENTS)")
            .with_remedy("mount it: mount -t tracefs tracefs /sys/kernel/tracing"),
        Errno::INVAL => error
            .with_why("the kernel has no such histogram (CONFIG_HIST_TRIGGERS)")
            .with_remedy(""),
        _ => error,
    }
}

impl Probe {
    fn returning(&self) -> String {
        let (returned, flags) = self.pins.unwrap_or_default();
        let flags = flags.map_or(String::new(), |flags| format!(" flags=$arg{flags}:x32"));
        format!("{} n=$retval:{returned}{flags}", self.function)
    }

    fn entering(&self) -> String {
        let mut text = self.function.to_string();
        if let Some(count) = self.count {
            text += &format!(" n=$arg{count}:s64");
        }
        if let Some((_, Some(flags))) = self.pins {
            text += &format!(" flags=$arg{flags}:x32");
        }
        if let Some((fetch, _)) = self.condition {
            text += &format!(" {fetch}");
        }
        // An int: its upper half is undefined.
        match self.function {
            "pin_user_pages_fast" => text.replace("n=$arg2:s64", "n=$arg2:s32"),
            _ => text,
        }
    }

    fn trigger(&self, stack: &str, longterm: Option<u64>) -> String {
        let values = match self.count {
            Some(_) => ":vals=n",
            None => "",
        };
        let flag = match (self.pins, longterm) {
            (Some((_, Some(_))), Some(flag)) => Some(format!("(flags & {flag:#x})")),
            _ => None,
        };
        // A function that pins may return an error.
        let some = self.pins.map(|_| "n > 0".to_string());
        let condition = self.condition.map(|(_, condition)| condition.to_string());
        let all: Vec<_> = [flag, some, condition].into_iter().flatten().collect();
        let filter = if all.is_empty() {
            String::new()
        } else {
            format!(" if {}", all.join(" && "))
        };
        format!("hist:keys=common_pid.execname,{stack}{values}:size={SIZE}{filter}")
    }
}

/// The process of each thread; None for a kernel thread.
#[derive(Default)]
struct ThreadNames(BTreeMap<u32, Option<Option<(u32, String)>>>);

impl ThreadNames {
    fn learn(&mut self, tid: u32) {
        self.0.entry(tid).or_insert_with(|| {
            let status = process::status(&folder(tid)).ok()?;
            // Only kernel threads and zombies have no memory.
            status.locked?;
            let leader = process::status(&folder(status.pid)).ok();
            Some(Some((
                status.pid,
                leader.map_or(status.name, |leader| leader.name),
            )))
        });
    }

    /// ID and name of the process of an entry.
    fn of(&mut self, entry: &Bucket) -> (Option<u32>, String) {
        self.learn(entry.tid);
        if entry.name.starts_with("kworker/") {
            return (None, "kworker".to_string());
        }
        match self.0.get(&entry.tid).cloned().flatten().flatten() {
            Some((pid, name)) => (Some(pid), name),
            None => (Some(entry.tid), entry.name.clone()),
        }
    }
}

/// Sums up the histograms, by process and purpose.
fn rows(read: &[ProbeRead], names: &mut ThreadNames, short: bool) -> Vec<Row> {
    let mut rows = BTreeMap::<(Option<u32>, String, String), BTreeMap<String, CallSite>>::new();
    for (probe, entries, _) in read {
        for entry in entries {
            let callers = hist::callers(&entry.stack, probe.function);
            let bare = callers
                .iter()
                .map(|frame| frame.split(' ').next().unwrap_or(frame));
            let found = site(bare);
            if !short && probe.pins.is_none() && found.is_some_and(|site| site.is_short) {
                continue;
            }
            let function = callers.first().cloned().unwrap_or_else(|| "?".to_string());
            let by = found.map_or_else(|| function.clone(), |site| site.name.to_string());
            let (pid, name) = names.of(entry);
            let places = rows.entry((pid, name, by)).or_default();
            let place = places.entry(function.clone()).or_insert(CallSite {
                function,
                pinned: 0,
                unpinned: 0,
                calls: 0,
            });
            place.calls += entry.hits;
            match probe.pins {
                Some(_) => place.pinned += entry.sum,
                None => place.unpinned += entry.sum,
            }
        }
    }
    rows.into_iter()
        .map(|((pid, name, by), places)| {
            let places: Vec<_> = places.into_values().collect();
            Row {
                pid,
                name,
                by,
                pinned: places.iter().map(|place| place.pinned).sum(),
                unpinned: places.iter().map(|place| place.unpinned).sum(),
                places,
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probe(name: &str) -> &'static Probe {
        PROBES.iter().find(|probe| probe.name == name).unwrap()
    }

    #[test]
    fn probes_have_the_syntax_of_the_kernel() {
        let fast = probe("fast");
        let returning = "pin_user_pages_fast n=$retval:s32 flags=$arg3:x32";
        assert_eq!(fast.returning(), returning);
        assert_eq!(
            fast.entering(),
            "pin_user_pages_fast n=$arg2:s32 flags=$arg3:x32"
        );
        assert_eq!(
            fast.trigger("stacktrace", Some(0x100)),
            "hist:keys=common_pid.execname,stacktrace:vals=n:size=16384 if (flags & 0x100) && n > 0"
        );
        assert_eq!(probe("memfd").returning(), "memfd_pin_folios n=$retval:s64");
        let dirty = probe("un_dirty");
        let entering = "unpin_user_pages_dirty_lock n=$arg2:s64 dirty=$arg3:u8";
        assert_eq!(dirty.entering(), entering);
        assert!(
            dirty
                .trigger("stacktrace", None)
                .ends_with(" if dirty != 0")
        );
        assert_eq!(
            probe("un_page").trigger("stacktrace", None),
            "hist:keys=common_pid.execname,stacktrace:size=16384"
        );
    }

    #[test]
    fn rows_are_summed_by_process_and_purpose() {
        let entry = |tid, name: &str, stack: &[&str], sum| Bucket {
            tid,
            name: name.to_string(),
            stack: stack.iter().map(ToString::to_string).collect(),
            hits: 1,
            sum,
        };
        let pinned = vec![
            entry(
                4_194_305,
                "server",
                &["io_pin_pages", "io_sqe_buffer_register"],
                7,
            ),
            entry(4_194_305, "server", &["drv_pin [drv]", "vfs_ioctl"], 2),
        ];
        let unpinned = vec![
            entry(4_194_306, "kworker/0:1", &["io_release_ubuf"], 3),
            entry(4_194_307, "kworker/1:1", &["io_buffer_unmap"], 4),
            entry(4_194_305, "server", &["__bio_release_pages"], 9),
        ];
        let read = [(probe("fast"), pinned, 0), (probe("un_page"), unpinned, 0)];
        let all = rows(&read, &mut ThreadNames::default(), false);
        let seen: Vec<_> = all
            .iter()
            .map(|row| {
                (
                    row.pid,
                    row.by.as_str(),
                    row.pinned,
                    row.unpinned,
                    row.places.len(),
                )
            })
            .collect();
        assert_eq!(
            seen,
            [
                (None, "io_uring buffer", 0, 7, 2),
                (Some(4_194_305), "drv_pin [drv]", 2, 0, 1),
                (Some(4_194_305), "io_uring buffer", 7, 0, 1),
            ]
        );
        assert_eq!(rows(&read, &mut ThreadNames::default(), true).len(), 4);
    }
}
