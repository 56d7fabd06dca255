//! What a transfer measures while it runs: bytes landed, phases, overlap, the timeline.

use crate::transfer::feed::Extent;
use crate::{Progress, ProgressFn};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Parts of a transfer that are timed apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    Open,
    Plan,
    Alloc,
    Submit,
    Wait,
    Copy,
    Verify,
    Export,
}

impl Phase {
    pub(crate) const ALL: [Self; 8] = [
        Self::Open,
        Self::Plan,
        Self::Alloc,
        Self::Submit,
        Self::Wait,
        Self::Copy,
        Self::Verify,
        Self::Export,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Plan => "plan",
            Self::Alloc => "alloc",
            Self::Submit => "submit",
            Self::Wait => "wait",
            Self::Copy => "copy",
            Self::Verify => "verify",
            Self::Export => "export",
        }
    }
}

/// One bar of the timeline.
#[derive(Clone, Debug)]
pub(crate) struct Span {
    pub name: &'static str,
    /// One of the rows below; reads and copies have one for each that may be in flight.
    pub row: u64,
    pub start: Duration,
    pub length: Duration,
    pub offset: u64,
    pub bytes: u64,
}

/// Rows of the timeline.
pub(crate) const ROW_MAIN: u64 = 0;
pub(crate) const ROW_ALLOC: u64 = 1;
pub(crate) const ROW_VERIFY: u64 = 2;
pub(crate) const ROW_READS: u64 = 16;
pub(crate) const ROW_COPIES: u64 = 8192;

/// Shared by all threads of one transfer.
pub(crate) struct Meter<'a> {
    epoch: Instant,
    total: u64,
    phases: [AtomicU64; Phase::ALL.len()],
    direct: AtomicU64,
    buffered: AtomicU64,
    /// Bytes that a call which still runs says are there.
    under_way: AtomicU64,
    /// How dmafile.ko says that it moved bytes.
    modes: AtomicU32,
    clock: Mutex<IoClock>,
    allocations: Mutex<Vec<(Duration, Duration)>>,
    exports: Mutex<Vec<(Duration, Duration)>>,
    spans: Option<Mutex<Vec<Span>>>,
    landed: Option<(Mutex<Landed>, Condvar)>,
    progress: Option<&'a ProgressFn>,
    last_progress: AtomicU64,
}

/// When reads were in flight.
#[derive(Default)]
struct IoClock {
    in_flight: u64,
    since: Duration,
    busy: Vec<(Duration, Duration)>,
}

/// How far the bytes are there without a gap, for those who need them in file order.
#[derive(Default)]
struct Landed {
    upto: u64,
    beyond: BTreeMap<u64, u64>,
    over: bool,
}

/// Calls to a progress function are at least this far apart.
const PROGRESS_EVERY: Duration = Duration::from_millis(33);

impl<'a> Meter<'a> {
    /// `total` bytes of data; `traced` keeps a timeline, `ordered` how far bytes are there
    /// without a gap.
    pub(crate) fn new(
        epoch: Instant,
        total: u64,
        traced: bool,
        ordered: bool,
        progress: Option<&'a ProgressFn>,
    ) -> Self {
        Self {
            epoch,
            total,
            phases: Default::default(),
            direct: AtomicU64::new(0),
            buffered: AtomicU64::new(0),
            under_way: AtomicU64::new(0),
            modes: AtomicU32::new(0),
            clock: Mutex::default(),
            allocations: Mutex::default(),
            exports: Mutex::default(),
            spans: traced.then(Mutex::default),
            landed: ordered.then(Default::default),
            progress,
            last_progress: AtomicU64::new(0),
        }
    }

    /// Time since the transfer began.
    pub(crate) fn now(&self) -> Duration {
        self.epoch.elapsed()
    }

    /// Adds the time since `from` to a phase.
    pub(crate) fn add(&self, phase: Phase, from: Duration) {
        self.add_time(phase, self.now() - from);
    }

    /// Adds a time that somebody else has taken.
    pub(crate) fn add_time(&self, phase: Phase, time: Duration) {
        self.phases[phase as usize].fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// A step that has ended already.
    pub(crate) fn add_until(&self, phase: Phase, from: Duration, to: Duration) {
        self.add_time(phase, to - from);
        if let Some(spans) = &self.spans {
            let (name, row, length) = (phase.name(), ROW_MAIN, to - from);
            lock(spans).push(Span {
                name,
                row,
                start: from,
                length,
                offset: 0,
                bytes: 0,
            });
        }
    }

    /// As [`Meter::add`], with a bar on the main row.
    pub(crate) fn add_step(&self, phase: Phase, from: Duration) {
        self.add(phase, from);
        self.span(phase.name(), ROW_MAIN, from, 0, 0);
    }

    pub(crate) fn phase(&self, phase: Phase) -> Duration {
        Duration::from_nanos(self.phases[phase as usize].load(Ordering::Relaxed))
    }

    /// A bar from `start` to now.
    pub(crate) fn span(
        &self,
        name: &'static str,
        row: u64,
        start: Duration,
        offset: u64,
        bytes: u64,
    ) {
        if let Some(spans) = &self.spans {
            let length = self.now() - start;
            let span = Span {
                name,
                row,
                start,
                length,
                offset,
                bytes,
            };
            lock(spans).push(span);
        }
    }

    pub(crate) fn spans(&self) -> Option<Vec<Span>> {
        self.spans
            .as_ref()
            .map(|spans| std::mem::take(&mut *lock(spans)))
    }

    /// As [`Meter::add`], and keeps when it was: the same time, so that no overlap is longer.
    fn add_among(&self, phase: Phase, times: &Mutex<Vec<(Duration, Duration)>>, start: Duration) {
        let now = self.now();
        self.add_time(phase, now - start);
        lock(times).push((start, now));
    }

    /// Memory was allocated from `start` to now.
    pub(crate) fn allocated(&self, start: Duration, at: u64, bytes: u64) {
        self.add_among(Phase::Alloc, &self.allocations, start);
        self.span("alloc", ROW_ALLOC, start, at, bytes);
    }

    /// Memory was allocated and read into by one call, from `start` to now. Allocation took `alloc`
    /// of it, the first gather's `first`, and from then on reads were in flight.
    pub(crate) fn allocated_in_reads(
        &self,
        start: Duration,
        alloc: Duration,
        first: Duration,
        bytes: u64,
    ) {
        self.add_time(Phase::Alloc, alloc);
        let (now, reads) = (self.now(), start + first);
        // When the later ones were is not known, and nothing hangs on it.
        lock(&self.allocations).push((start, start + alloc));
        lock(&self.clock).busy.push((reads.min(now), now));
        self.span("alloc", ROW_ALLOC, start, 0, bytes);
    }

    /// What others will import was made, of `bytes` of memory, from `start` to now.
    pub(crate) fn exported(&self, start: Duration, bytes: u64) {
        self.add_among(Phase::Export, &self.exports, start);
        self.span(Phase::Export.name(), ROW_ALLOC, start, 0, bytes);
    }

    /// A read or copy begins.
    pub(crate) fn io_begins(&self) {
        let mut clock = lock(&self.clock);
        if clock.in_flight == 0 {
            clock.since = self.now();
        }
        clock.in_flight += 1;
    }

    /// A read or copy has ended, well or not.
    pub(crate) fn io_ends(&self) {
        let mut clock = lock(&self.clock);
        clock.in_flight -= 1;
        if clock.in_flight == 0 {
            let since = clock.since;
            clock.busy.push((since, self.now()));
        }
    }

    /// Whether the reads that have begun have all ended, well or not: nothing is in flight now.
    pub(crate) fn idle(&self) -> bool {
        let clock = lock(&self.clock);
        clock.in_flight == 0 && !clock.busy.is_empty()
    }

    /// How long reads were in flight, how long memory was allocated meanwhile (AR-22), and how long
    /// what others will import was made meanwhile (AR-36).
    pub(crate) fn overlap(&self) -> (Duration, Duration, Duration) {
        let busy = &lock(&self.clock).busy;
        let io = busy.iter().map(|(start, end)| *end - *start).sum();
        let allocated = Self::within(busy, &lock(&self.allocations));
        (io, allocated, Self::within(busy, &lock(&self.exports)))
    }

    /// How much of `these` passed in `busy` times, which ascend.
    fn within(busy: &[(Duration, Duration)], these: &[(Duration, Duration)]) -> Duration {
        let mut hidden = Duration::ZERO;
        // There are few of these, and few gaps between reads.
        for (start, end) in these {
            let first = busy.partition_point(|(_, busy_end)| busy_end <= start);
            for (busy_start, busy_end) in &busy[first..] {
                if busy_start >= end {
                    break;
                }
                hidden += *end.min(busy_end) - *start.max(busy_start);
            }
        }
        hidden
    }

    /// An extent's wanted bytes are in place.
    pub(crate) fn landed(&self, extent: &Extent, direct: bool) {
        let counter = if direct { &self.direct } else { &self.buffered };
        counter.fetch_add(extent.need - extent.head, Ordering::Relaxed);
        self.in_place(extent.at, extent.at + extent.need);
        self.tell_progress(false);
    }

    /// A call that still runs has put so many bytes in place, which count when it has ended.
    pub(crate) fn under_way(&self, bytes: u64) {
        self.under_way.store(bytes, Ordering::Relaxed);
        if bytes > 0 {
            self.tell_progress(false);
        }
    }

    /// How dmafile.ko says that it moved some of the bytes.
    pub(crate) fn add_mode(&self, mode: u32) {
        self.modes.fetch_or(mode, Ordering::Relaxed);
    }

    /// How it moved all of them; 0 where it moved none.
    pub(crate) fn modes(&self) -> u32 {
        self.modes.load(Ordering::Relaxed)
    }

    /// What lies between two places in memory is there: it has come, or nothing is to come where
    /// zeros are.
    pub(crate) fn in_place(&self, at: u64, end: u64) {
        if let Some((landed, more)) = &self.landed {
            let mut landed = lock(landed);
            landed.beyond.insert(at, end);
            landed.advance();
            more.notify_all();
        }
    }

    /// Wakes those that wait for bytes: no more will come.
    pub(crate) fn over(&self) {
        if let Some((landed, more)) = &self.landed {
            lock(landed).over = true;
            more.notify_all();
        }
    }

    /// Waits until bytes beyond `have` are in place without a gap; how far they reach, or None
    /// when no more will come.
    pub(crate) fn wait_landed(&self, have: u64) -> Option<u64> {
        let (landed, more) = self.landed.as_ref()?;
        let mut landed = lock(landed);
        while landed.upto <= have && !landed.over {
            landed = more.wait(landed).expect("no holder of this lock panics");
        }
        (landed.upto > have).then_some(landed.upto)
    }

    /// Bytes that came directly and through the page cache.
    pub(crate) fn moved(&self) -> (u64, u64) {
        let direct = self.direct.load(Ordering::Relaxed);
        (direct, self.buffered.load(Ordering::Relaxed))
    }

    pub(crate) fn tell_progress(&self, last: bool) {
        let Some(progress) = self.progress else {
            return;
        };
        let now = self.now().as_nanos() as u64;
        let then = self.last_progress.load(Ordering::Relaxed);
        let due = now.saturating_sub(then) >= PROGRESS_EVERY.as_nanos() as u64;
        // Whoever wins the exchange calls; the others go on moving bytes.
        let won = || {
            let order = Ordering::Relaxed;
            self.last_progress
                .compare_exchange(then, now, order, order)
                .is_ok()
        };
        if last || (due && won()) {
            let (direct, buffered) = self.moved();
            let under_way = self.under_way.load(Ordering::Relaxed);
            progress(Progress {
                done: (direct + buffered + under_way).min(self.total),
                total: self.total,
            });
        }
    }
}

impl Landed {
    fn advance(&mut self) {
        while let Some((&start, &end)) = self.beyond.first_key_value() {
            if start > self.upto {
                break;
            }
            self.upto = self.upto.max(end);
            self.beyond.pop_first();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no holder of this lock panics")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(at: u64, need: u64) -> Extent {
        Extent {
            file: at,
            at,
            len: need,
            need,
            head: 0,
            run_end: at + need,
        }
    }

    #[test]
    fn bytes_count_as_landed_only_without_a_gap() {
        let meter = Meter::new(Instant::now(), 30, false, true, None);
        meter.landed(&extent(10, 10), true);
        meter.landed(&extent(0, 5), true);
        assert_eq!(meter.wait_landed(0), Some(5));
        meter.in_place(5, 10);
        assert_eq!(meter.wait_landed(5), Some(20));
        meter.over();
        assert_eq!(meter.wait_landed(20), None);
    }

    #[test]
    fn overlap_is_what_both_did_at_once() {
        let meter = Meter::new(Instant::now(), 0, false, false, None);
        let ms = Duration::from_millis;
        lock(&meter.clock).busy = vec![(ms(10), ms(20)), (ms(30), ms(40))];
        *lock(&meter.allocations) = vec![(ms(0), ms(12)), (ms(15), ms(35)), (ms(50), ms(60))];
        *lock(&meter.exports) = vec![(ms(39), ms(50))];
        assert_eq!(meter.overlap(), (ms(20), ms(12), ms(1)));
    }

    #[test]
    fn what_is_hidden_is_no_longer_than_what_was_done() {
        let meter = Meter::new(Instant::now(), 0, false, false, None);
        meter.io_begins();
        for _ in 0..100 {
            meter.allocated(meter.now(), 0, 1);
            meter.exported(meter.now(), 1);
        }
        meter.io_ends();
        let (_, allocated, exported) = meter.overlap();
        assert_eq!(allocated, meter.phase(Phase::Alloc));
        assert_eq!(exported, meter.phase(Phase::Export));
    }
}
