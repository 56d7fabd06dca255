//! What is true of this machine and of a file: what `plan` decides by and `doctor` shows.

use crate::error::{Result, errno_name};
use crate::source::Source;
use crate::sys::{self, Errno, host};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// What this machine offers and allows to this process now. Sizes are bytes.
///
/// Every capability is found by trying it, not by a version number. `None` is not known: a
/// container may hide it.
#[derive(Clone, Debug, Serialize)]
pub struct Host {
    /// Base page size.
    pub page: u64,
    /// Size of a transparent huge page; 0 where the kernel has none.
    pub thp_size: u64,
    /// `/sys/kernel/mm/transparent_hugepage/enabled`.
    pub thp: Option<String>,
    /// `/sys/kernel/mm/transparent_hugepage/shmem_enabled`.
    pub shmem_thp: Option<String>,
    /// Default size of a hugetlb page; 0 where the kernel has none.
    pub pool_page: u64,
    /// Bytes of the hugetlb pool that are neither used nor promised, as far as cgroups allow them.
    pub pool_free: u64,
    /// Memory the kernel could give out without swapping (`MemAvailable`).
    pub available: Option<u64>,
    /// Memory that the tightest cgroup still allows, and the file that limits it.
    pub cgroup: Option<(u64, PathBuf)>,
    /// Memory of dma-heaps counts against that limit (`mem_accounting`, since 2026).
    pub heaps_are_charged: bool,
    /// RLIMIT_MEMLOCK; `None` is no limit.
    pub memlock: Option<u64>,
    /// CAP_IPC_LOCK is effective: RLIMIT_MEMLOCK does not bind.
    pub pins_freely: bool,
    /// Processors this process may run on.
    pub cpus: usize,
    /// The NUMA node on which this thread's memory comes into being; `None` where there is but one,
    /// or a policy decides (numactl(8)).
    pub node: Option<u32>,
    /// Why io_uring cannot be used, by errno name; `None` where it can.
    pub uring_refused: Option<String>,
    /// A sysctl switches it off (`kernel.io_uring_disabled`).
    pub uring_disabled: bool,
    /// To a driver that maps a udmabuf for the CPU (`dma_buf_vmap`), all pages of a huge page look like
    /// its first one: so in Linux 6.11 and 6.12. Nothing in user space could try it, so the version
    /// tells.
    pub udmabuf_vmaps_wrong: bool,
}

impl Host {
    /// Looks at this machine, as this process may see it.
    pub fn probe() -> Self {
        let thp_dir = Path::new("/sys/kernel/mm/transparent_hugepage");
        let pool_page = host::kilobytes("/proc/meminfo", "Hugepagesize").unwrap_or(0);
        let pool = |name: &str| {
            let kb = pool_page >> 10;
            host::number(format!("/sys/kernel/mm/hugepages/hugepages-{kb}kB/{name}")).unwrap_or(0)
        };
        let free = pool("free_hugepages").saturating_sub(pool("resv_hugepages"));
        let uring_refused = sys::uring::Ring::probe()
            .err()
            .map(|errno| errno_name(errno.raw_os_error()));
        // Asked only for a remedy.
        let uring_disabled = uring_refused.is_some()
            && host::number("/proc/sys/kernel/io_uring_disabled").unwrap_or(0) > 0;
        Self {
            page: sys::map::page_size(),
            thp_size: host::number(thp_dir.join("hpage_pmd_size")).unwrap_or(0),
            thp: host::choice(thp_dir.join("enabled")),
            shmem_thp: host::choice(thp_dir.join("shmem_enabled")),
            pool_page,
            pool_free: (free * pool_page)
                .min(host::cgroup_pool_room(pool_page).unwrap_or(u64::MAX)),
            available: host::kilobytes("/proc/meminfo", "MemAvailable"),
            cgroup: host::cgroup_room(),
            heaps_are_charged: host::text("/sys/module/dma_heap/parameters/mem_accounting")
                .is_some_and(|text| text == "Y"),
            memlock: host::memlock(),
            pins_freely: host::may_pin_freely(),
            cpus: host::cpus(),
            node: sys::numa::node(),
            uring_refused,
            uring_disabled,
            udmabuf_vmaps_wrong: host::release()
                .is_some_and(|release| ((6, 11)..(6, 13)).contains(&release)),
        }
    }

    /// What makes io_uring usable here.
    pub(crate) fn uring_remedy(&self) -> &'static str {
        match self.uring_refused.as_deref() {
            Some("EPERM") if self.uring_disabled => "sysctl -w kernel.io_uring_disabled=0",
            Some("EPERM") => {
                "allow io_uring_setup, io_uring_enter and io_uring_register in the seccomp profile \
                 of this container"
            }
            Some("ENOMEM") => "ulimit -l unlimited",
            _ => "Linux 5.6 or later reads by io_uring",
        }
    }

    /// Bytes that may be pinned at once, as far as limits say; the kernel has the last word.
    pub(crate) fn pin_limit(&self) -> u64 {
        match self.memlock {
            Some(limit) if !self.pins_freely => limit,
            _ => u64::MAX,
        }
    }
}

/// What is true of one file. Sizes are bytes.
#[derive(Clone, Debug, Serialize)]
pub struct File {
    /// Where it is.
    #[serde(serialize_with = "crate::error::lossy")]
    pub path: PathBuf,
    /// Its size when it was opened.
    pub size: u64,
    /// Its file system.
    pub file_system: String,
    /// Multiple that direct reads need in offset, length and memory.
    pub align: u64,
    /// `align` comes from `statx(STATX_DIOALIGN)`; otherwise it was found by reading.
    pub align_told: bool,
    /// Why direct I/O cannot be used; `None` where it can.
    pub direct_refused: Option<String>,
}

impl File {
    /// Opens a file and looks at it; nothing is moved but at most one block to try direct I/O.
    ///
    /// # Errors
    /// As [`Load::run`](crate::Load::run): what has no contents of a known size is refused.
    pub fn probe(path: impl AsRef<Path>) -> Result<Self> {
        Source::open(path.as_ref()).map(|source| Self::of(&source))
    }

    pub(crate) fn of(source: &Source) -> Self {
        Self {
            path: source.path().to_path_buf(),
            size: source.size(),
            file_system: source.file_system(),
            align: source.align(),
            align_told: source.align_is_told(),
            direct_refused: source.direct_refused(),
        }
    }
}

/// A range of the file that holds data, and whether it is copied from the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub start: u64,
    pub end: u64,
    pub cached: bool,
}

/// Where the bytes of a range of a file are.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    /// Data, in file order, without overlap.
    pub runs: Vec<Run>,
    /// How residency in the page cache was learned, or why not.
    pub learned: String,
    /// The ranges that were asked for, holes included, in ascending order.
    pub wanted: Vec<(u64, u64)>,
}

/// Joins ranges of the same file between which there is too little to be worth an operation.
fn bridged(source: &Source, ranges: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for &(start, end) in ranges {
        match joined.last_mut() {
            Some(last)
                if start - last.1 < SMALL_HOLE
                    && source.locate(start).0 == source.locate(last.1 - 1).0 =>
            {
                last.1 = end;
            }
            _ => joined.push((start, end)),
        }
    }
    joined
}

/// A hole shorter than this costs less to read than the extra operation to skip it.
const SMALL_HOLE: u64 = 64 << 10;
/// How finely a partly cached file is told apart.
const CACHE_GRAIN: u64 = 1 << 20;
/// How far behind a byte that is looked at the second one lies.
const PEEK_BESIDE: u64 = 64 << 10;
/// Places looked at before a file that `cachestat` will not speak of counts as cold.
const PEEKS: u64 = 16;

impl Layout {
    /// Finds holes in `[start, end)` and, where `look` is set, what sits in the page cache. With
    /// `only`, ascending ranges, nothing else is looked at or read.
    pub(crate) fn of(
        source: &Source,
        start: u64,
        end: u64,
        look: bool,
        only: Option<&[(u64, u64)]>,
    ) -> Self {
        let wanted = match only {
            None => source.within(start, end),
            Some(ranges) => ranges.to_vec(),
        };
        let data: Vec<_> = bridged(source, &wanted)
            .iter()
            .flat_map(|range| source.data(range.0, range.1, SMALL_HOLE))
            .collect();
        Self {
            wanted,
            ..Self::found(source, &data, look)
        }
    }

    /// Bytes that were asked for.
    pub(crate) fn bytes_wanted(&self) -> u64 {
        self.wanted.iter().map(|range| range.1 - range.0).sum()
    }

    fn found(source: &Source, data: &[(u64, u64)], look: bool) -> Self {
        if !look {
            let runs = data.iter().map(|&(start, end)| Run {
                start,
                end,
                cached: false,
            });
            return Self {
                runs: runs.collect(),
                learned: "not asked".to_string(),
                wanted: Vec::new(),
            };
        }
        let bytes: u64 = data.iter().map(|(start, end)| end - start).sum();
        let resident: Result<u64, Errno> = data
            .iter()
            .map(|&(start, end)| source.resident(start, end))
            .sum();
        match resident {
            Ok(0) => Self::told(data, |_| false, "cachestat: nothing is cached"),
            Ok(cached) if cached >= bytes => {
                Self::told(data, |_| true, "cachestat: all of it is cached")
            }
            Ok(_) => Self::told(
                data,
                |(start, end)| {
                    source
                        .resident(start, end)
                        .is_ok_and(|cached| cached == end - start)
                },
                "cachestat, by the MiB: partly cached",
            ),
            Err(errno) => Self::peeked(source, data, errno),
        }
    }

    /// The second way to learn: read single bytes without waiting.
    fn peeked(source: &Source, data: &[(u64, u64)], errno: Errno) -> Self {
        let name = errno_name(errno.raw_os_error());
        source.no_readahead();
        let bytes: u64 = data.iter().map(|(start, end)| end - start).sum();
        let step = (bytes / PEEKS).max(1);
        let mut sample = data.iter().flat_map(|&(start, end)| {
            let beside = move |at: u64| (at + PEEK_BESIDE).min(end - 1);
            let offsets = (start..end).step_by(step as usize);
            offsets.map(move |at| (at, beside(at)))
        });
        let mut some = sample.by_ref().take(2 * PEEKS as usize);
        if some.any(|(at, beside)| source.peek(at, beside)) {
            let how = format!("RWF_NOWAIT, by the MiB (cachestat: {name})");
            Self::told(data, |(start, end)| source.peek(start, end - 1), &how)
        } else {
            let how = format!("RWF_NOWAIT (cachestat: {name}): no sample is cached");
            Self::told(data, |_| false, &how)
        }
    }

    fn told(
        data: &[(u64, u64)],
        mut cached: impl FnMut((u64, u64)) -> bool,
        learned: &str,
    ) -> Self {
        let mut runs: Vec<Run> = Vec::new();
        for &(start, end) in data {
            let mut from = start;
            while from < end {
                let to = (from + 1).next_multiple_of(CACHE_GRAIN).min(end);
                let run = Run {
                    start: from,
                    end: to,
                    cached: cached((from, to)),
                };
                match runs.last_mut() {
                    Some(last) if last.end == from && last.cached == run.cached => last.end = to,
                    _ => runs.push(run),
                }
                from = to;
            }
        }
        Self {
            runs,
            learned: learned.to_string(),
            wanted: Vec::new(),
        }
    }

    /// Bytes of memory that the data takes on pages of `grain` bytes, where its file offset less
    /// `base` is its place in memory.
    pub(crate) fn spread(&self, base: u64, grain: u64) -> u64 {
        let (mut bytes, mut done) = (0, 0);
        for run in &self.runs {
            let (start, end) = (run.start.wrapping_sub(base), run.end.wrapping_sub(base));
            let start = done.max(start - start % grain);
            done = end.next_multiple_of(grain);
            bytes += done.saturating_sub(start);
        }
        bytes
    }

    /// Whether all of `[start, end)` is data of one file, without a hole.
    pub(crate) fn is_one_run(&self, start: u64, end: u64) -> bool {
        // There is a gap between two files.
        let mut at = start;
        let without_gap = self.runs.iter().all(|run| {
            let follows = run.start == at;
            at = run.end;
            follows
        });
        without_gap && at == end
    }

    /// The same data, wherever it is now.
    pub(crate) fn without_cache(&mut self) {
        for run in &mut self.runs {
            run.cached = false;
        }
        self.runs.dedup_by(|next, last| {
            let joins = last.end == next.start;
            if joins {
                last.end = next.end;
            }
            joins
        });
    }

    /// Bytes of data that are (or are not) cached.
    pub(crate) fn bytes(&self, cached: bool) -> u64 {
        let runs = self.runs.iter().filter(|run| run.cached == cached);
        runs.map(|run| run.end - run.start).sum()
    }
}
