//! What a transfer measures while it runs: bytes in place, phases, overlap, the timeline.

use super::feed::IoExtent;
use super::overlap::{Interval, Overlap, Overlapped};
use super::prefix::Prefix;
use super::trace::{ROW_ALLOC, ROW_MAIN, Span};
use crate::control::{Progress, ProgressFn};
use crate::sync::lock;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use strum::{IntoStaticStr, VariantArray};

/// Parts of a transfer that are timed separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "lowercase")]
pub(crate) enum Phase {
    Open,
    Plan,
    Alloc,
    Submit,
    Wait,
    Copy,
    Verify,
    Export,
    Reserve,
    Sync,
}

impl Phase {
    /// Those of a load.
    pub(crate) const OF_LOADS: &'static [Self] = &[
        Self::Open,
        Self::Plan,
        Self::Alloc,
        Self::Submit,
        Self::Wait,
        Self::Copy,
        Self::Verify,
        Self::Export,
    ];
    /// Those of a save.
    pub(crate) const OF_SAVES: &'static [Self] = &[
        Self::Open,
        Self::Plan,
        Self::Reserve,
        Self::Submit,
        Self::Wait,
        Self::Copy,
        Self::Verify,
        Self::Sync,
    ];

    pub(crate) fn name(self) -> &'static str {
        self.into()
    }
}

/// Shared by all threads of one transfer.
pub(crate) struct Meter<'a> {
    epoch: Instant,
    total: AtomicU64,
    phases: [AtomicU64; Phase::VARIANTS.len()],
    direct: AtomicU64,
    buffered: AtomicU64,
    /// Bytes in place according to a call that is still running.
    under_way: AtomicU64,
    /// How dmafile.ko reports that it moved bytes.
    modes: AtomicU32,
    overlap: Overlap,
    spans: Option<Mutex<Vec<Span>>>,
    prefix: Option<Prefix>,
    progress: Option<&'a ProgressFn>,
    last_progress: AtomicU64,
}

/// Minimum interval between calls of a progress function.
const PROGRESS_EVERY: Duration = Duration::from_millis(33);

impl<'a> Meter<'a> {
    /// `traced` records a timeline, `ordered` how far bytes are in place without a gap.
    pub(crate) fn new(
        epoch: Instant,
        traced: bool,
        ordered: bool,
        progress: Option<&'a ProgressFn>,
    ) -> Self {
        Self {
            epoch,
            total: AtomicU64::new(0),
            phases: Default::default(),
            direct: AtomicU64::new(0),
            buffered: AtomicU64::new(0),
            under_way: AtomicU64::new(0),
            modes: AtomicU32::new(0),
            overlap: Overlap::default(),
            spans: traced.then(Mutex::default),
            prefix: ordered.then(Prefix::default),
            progress,
            last_progress: AtomicU64::new(0),
        }
    }

    /// This many bytes of data will be moved; 0 if that is unknown.
    pub(crate) fn expect(&self, total: u64) {
        self.total.store(total, Ordering::Relaxed);
    }

    /// Time since the transfer began.
    pub(crate) fn now(&self) -> Duration {
        self.epoch.elapsed()
    }

    /// Adds the time since `from` to a phase.
    pub(crate) fn add(&self, phase: Phase, from: Duration) {
        self.add_time(phase, self.now() - from);
    }

    /// Adds a time that was measured elsewhere.
    pub(crate) fn add_time(&self, phase: Phase, time: Duration) {
        self.phases[phase as usize].fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Adds a step that has already ended.
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

    /// As [`Meter::add`], with a bar in the main row.
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

    /// As [`Meter::add`], and records the interval: the same one, so that the overlap is never
    /// longer.
    fn add_among(&self, phase: Phase, times: &Mutex<Vec<Interval>>, start: Duration) {
        let now = self.now();
        self.add_time(phase, now - start);
        lock(times).push((start, now));
    }

    /// Memory was allocated from `start` to now.
    pub(crate) fn allocated(&self, start: Duration, at: u64, bytes: u64) {
        self.add_among(Phase::Alloc, &self.overlap.allocations, start);
        self.span("alloc", ROW_ALLOC, start, at, bytes);
    }

    /// Memory was allocated and read into by one call, from `start` to now. Allocation took `alloc`
    /// of that time, and `first` for the first chunk, after which reads were in flight.
    pub(crate) fn allocated_in_reads(
        &self,
        start: Duration,
        alloc: Duration,
        first: Duration,
        bytes: u64,
    ) {
        self.add_time(Phase::Alloc, alloc);
        let (now, reads) = (self.now(), start + first);
        // When the later allocations were is unknown, but does not matter.
        lock(&self.overlap.allocations).push((start, start + alloc));
        self.overlap.was_busy((reads.min(now), now));
        self.span("alloc", ROW_ALLOC, start, 0, bytes);
    }

    /// A dma-buf was created over `bytes` of memory, from `start` to now.
    pub(crate) fn exported(&self, start: Duration, bytes: u64) {
        self.add_among(Phase::Export, &self.overlap.exports, start);
        self.span(Phase::Export.name(), ROW_ALLOC, start, 0, bytes);
    }

    /// A read or copy begins.
    pub(crate) fn io_begins(&self) {
        self.overlap.begin(|| self.now());
    }

    /// A read or copy has ended, successfully or not.
    pub(crate) fn io_ends(&self) {
        self.overlap.end(|| self.now());
    }

    /// True if nothing is in flight now.
    pub(crate) fn idle(&self) -> bool {
        self.overlap.idle()
    }

    /// How long reads were in flight, and what happened at the same time.
    pub(crate) fn overlap(&self) -> Overlapped {
        self.overlap.sums()
    }

    /// This many of the requested bytes of an extent have been moved, from the first one on.
    pub(crate) fn moved(&self, extent: &IoExtent, bytes: u64, direct: bool) {
        let counter = if direct { &self.direct } else { &self.buffered };
        counter.fetch_add(bytes, Ordering::Relaxed);
        self.in_place(extent.at, extent.at + extent.head + bytes);
        self.tell_progress(false);
    }

    /// This many bytes were copied to or from the page cache.
    pub(crate) fn copied(&self, bytes: u64) {
        self.buffered.fetch_add(bytes, Ordering::Relaxed);
        self.tell_progress(false);
    }

    /// A call that is still running has put this many bytes in place; they count when it has ended.
    pub(crate) fn under_way(&self, bytes: u64) {
        self.under_way.store(bytes, Ordering::Relaxed);
        if bytes > 0 {
            self.tell_progress(false);
        }
    }

    /// How dmafile.ko reports that it moved some of the bytes.
    pub(crate) fn add_mode(&self, mode: u32) {
        self.modes.fetch_or(mode, Ordering::Relaxed);
    }

    /// How it moved all of them; 0 if it moved none.
    pub(crate) fn modes(&self) -> u32 {
        self.modes.load(Ordering::Relaxed)
    }

    /// Everything between two offsets in memory is in place: it has been read, or it is a hole.
    pub(crate) fn in_place(&self, at: u64, end: u64) {
        if let Some(prefix) = &self.prefix {
            prefix.add(at, end);
        }
    }

    /// Wakes threads that wait for bytes: no more will arrive.
    pub(crate) fn over(&self) {
        if let Some(prefix) = &self.prefix {
            prefix.over();
        }
    }

    /// Waits until bytes beyond `have` are in place without a gap; returns their end, or None if no
    /// more will arrive.
    pub(crate) fn wait_in_place(&self, have: u64) -> Option<u64> {
        self.prefix.as_ref()?.wait(have)
    }

    /// Bytes read directly and through the page cache.
    pub(crate) fn totals(&self) -> (u64, u64) {
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
        // Only the thread that wins the exchange calls; the others continue to move bytes.
        let won = || {
            let order = Ordering::Relaxed;
            self.last_progress
                .compare_exchange(then, now, order, order)
                .is_ok()
        };
        if last || (due && won()) {
            let (direct, buffered) = self.totals();
            let under_way = self.under_way.load(Ordering::Relaxed);
            let done = direct + buffered + under_way;
            // The total of a stream is unknown.
            let total = match self.total.load(Ordering::Relaxed) {
                0 => done,
                total => total,
            };
            progress(Progress {
                done: done.min(total),
                total,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_time_is_at_most_the_time_of_the_phase() {
        let meter = Meter::new(Instant::now(), false, false, None);
        meter.io_begins();
        for _ in 0..100 {
            meter.allocated(meter.now(), 0, 1);
            meter.exported(meter.now(), 1);
        }
        meter.io_ends();
        let hidden = meter.overlap();
        assert_eq!(hidden.allocated, meter.phase(Phase::Alloc));
        assert_eq!(hidden.exported, meter.phase(Phase::Export));
    }
}
