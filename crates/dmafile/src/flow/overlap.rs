//! What happened at the same time: reads in flight, allocation, and export.

use crate::sync::lock;
use std::sync::Mutex;
use std::time::Duration;

/// Start and end, since the transfer began.
pub(super) type Interval = (Duration, Duration);

/// Records when reads were in flight, when memory was allocated, and when dma-bufs were created over
/// it.
#[derive(Default)]
pub(super) struct Overlap {
    reads: Mutex<Reads>,
    pub(super) allocations: Mutex<Vec<Interval>>,
    pub(super) exports: Mutex<Vec<Interval>>,
}

#[derive(Default)]
struct Reads {
    in_flight: u64,
    since: Duration,
    /// Intervals during which at least one read was in flight, in ascending order.
    busy: Vec<Interval>,
}

/// How long each took, and how much of it happened while reads were in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overlapped {
    /// Time during which reads were in flight.
    pub io: Duration,
    /// Time of allocation while reads were in flight.
    pub allocated: Duration,
    /// Time of export while reads were in flight.
    pub exported: Duration,
}

impl Overlap {
    /// A read or copy begins.
    pub(super) fn begin(&self, now: impl FnOnce() -> Duration) {
        let mut reads = lock(&self.reads);
        if reads.in_flight == 0 {
            reads.since = now();
        }
        reads.in_flight += 1;
    }

    /// A read or copy has ended, successfully or not.
    pub(super) fn end(&self, now: impl FnOnce() -> Duration) {
        let mut reads = lock(&self.reads);
        reads.in_flight -= 1;
        if reads.in_flight == 0 {
            let since = reads.since;
            reads.busy.push((since, now()));
        }
    }

    /// Reads were in flight during this interval, which begins after all others.
    pub(super) fn was_busy(&self, interval: Interval) {
        lock(&self.reads).busy.push(interval);
    }

    /// True if nothing is in flight now.
    pub(super) fn idle(&self) -> bool {
        let reads = lock(&self.reads);
        reads.in_flight == 0 && !reads.busy.is_empty()
    }

    pub(super) fn sums(&self) -> Overlapped {
        let busy = &lock(&self.reads).busy;
        Overlapped {
            io: busy.iter().map(|(start, end)| *end - *start).sum(),
            allocated: within(busy, &lock(&self.allocations)),
            exported: within(busy, &lock(&self.exports)),
        }
    }
}

/// How much of `these` is within the `busy` intervals, which ascend.
fn within(busy: &[Interval], these: &[Interval]) -> Duration {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlap_is_the_time_of_both_activities() {
        let ms = Duration::from_millis;
        let overlap = Overlap::default();
        overlap.was_busy((ms(10), ms(20)));
        overlap.was_busy((ms(30), ms(40)));
        *lock(&overlap.allocations) = vec![(ms(0), ms(12)), (ms(15), ms(35)), (ms(50), ms(60))];
        *lock(&overlap.exports) = vec![(ms(39), ms(50))];
        let sums = overlap.sums();
        assert_eq!(
            (sums.io, sums.allocated, sums.exported),
            (ms(20), ms(12), ms(1))
        );
    }
}
