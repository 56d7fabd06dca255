//! Where the bytes of a file are: on the disk, in the page cache, or nowhere (holes).

use crate::error::errno_name;
use crate::source::Source;
use crate::sys::Errno;

/// A range of the file that has data, and whether it is copied from the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DataRun {
    pub start: u64,
    pub end: u64,
    pub cached: bool,
}

/// Where the bytes of a range of a file are.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    /// Data, in file order, without overlaps.
    pub runs: Vec<DataRun>,
    /// How the contents of the page cache were found out, or why not.
    pub learned: String,
    /// The requested ranges, holes included, in ascending order.
    pub wanted: Vec<(u64, u64)>,
}

/// Joins ranges of the same file if the gap between them is not worth a separate operation.
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

/// A shorter hole costs less to read than an extra operation to skip it.
const SMALL_HOLE: u64 = 64 << 10;
/// Granularity at which a partly cached file is divided.
const CACHE_GRAIN: u64 = 1 << 20;
/// Distance between the two bytes that are sampled at each place.
const PEEK_BESIDE: u64 = 64 << 10;
/// Number of places that are sampled before a file that `cachestat` does not report on counts as
/// cold.
const PEEKS: u64 = 16;

impl Layout {
    /// Finds holes in `[start, end)` and, if `look` is set, what is in the page cache. With
    /// `only`, in ascending order, everything outside these ranges is ignored.
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

    /// Number of requested bytes.
    pub(crate) fn bytes_wanted(&self) -> u64 {
        self.wanted.iter().map(|range| range.1 - range.0).sum()
    }

    fn found(source: &Source, data: &[(u64, u64)], look: bool) -> Self {
        if !look {
            let runs = data.iter().map(|&(start, end)| DataRun {
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
                "cachestat, per MiB: partly cached",
            ),
            Err(errno) => Self::peeked(source, data, errno),
        }
    }

    /// The alternative to `cachestat`: reads single bytes without blocking.
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
            let how = format!("RWF_NOWAIT, per MiB (cachestat: {name})");
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
        let mut runs: Vec<DataRun> = Vec::new();
        for &(start, end) in data {
            let mut from = start;
            while from < end {
                let to = (from + 1).next_multiple_of(CACHE_GRAIN).min(end);
                let run = DataRun {
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

    /// Bytes of memory that the data needs on pages of `grain` bytes, where the place of a byte
    /// in memory is its file offset minus `base`.
    pub(crate) fn footprint(&self, base: u64, grain: u64) -> u64 {
        let (mut bytes, mut done) = (0, 0);
        for run in &self.runs {
            let (start, end) = (run.start.wrapping_sub(base), run.end.wrapping_sub(base));
            let start = done.max(start - start % grain);
            done = end.next_multiple_of(grain);
            bytes += done.saturating_sub(start);
        }
        bytes
    }

    /// True if all of `[start, end)` is data of one file, without a hole.
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

    /// The same data of a file that exists only in memory.
    pub(crate) fn in_memory(&mut self) {
        for run in &mut self.runs {
            run.cached = true;
        }
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
