//! The extents still to be moved, handed out in file order as their memory is allocated.

use crate::control::CancelToken;
use crate::error::Error;
use crate::sync;
use crate::sys::notifier::Notifier;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// A contiguous range that one operation moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IoExtent {
    /// Its offset in the file.
    pub file: u64,
    /// Its offset in the buffer's memory.
    pub at: u64,
    /// Number of bytes to request; direct reads round up, beyond the end of the requested range.
    pub len: u64,
    /// Number of bytes that must be read to include the requested ones.
    pub need: u64,
    /// How many of these precede the first requested byte, because the start was rounded down.
    pub head: u64,
    /// Offset in the buffer's memory of the end of the data that it belongs to.
    pub run_end: u64,
}

/// A range of bytes of the file: start, and end (exclusive).
pub(crate) type FileRange = (u64, u64);

/// What moves an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Queue {
    /// The method of the plan.
    Method,
    /// Threads that copy what is in the page cache.
    Cached,
}

/// The result of [`Feed::take`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FeedResult {
    Extent(IoExtent),
    /// The memory for the next extent is still being allocated.
    NotYet,
    /// There are no more extents.
    Drained,
}

/// How the ranges of a queue are cut into extents.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    /// Largest extent, in bytes.
    pub block: u64,
    /// In the file, extents for the method start and end at multiples of this.
    pub align: u64,
    /// The file offset of the memory's first byte, which may precede it: `at = file - base`, wrapping.
    pub base: u64,
    /// Distance from the end of a block in the file to the end of a block in memory, less than a
    /// block.
    pub phase: u64,
    /// End of the writable memory.
    pub capacity: u64,
}

/// How fast extents may be handed out.
struct Pace {
    /// Bytes in a second.
    limit: u64,
    begin: Instant,
    /// Waits end when it is set.
    cancel: CancelToken,
}

impl Pace {
    /// How long to wait, after so many bytes, before there are more.
    fn wait(&self, given: u64) -> Option<Duration> {
        if self.cancel.is_cancelled() {
            return None;
        }
        let due = Duration::from_secs_f64(given as f64 / self.limit as f64);
        let left = due.saturating_sub(self.begin.elapsed());
        (!left.is_zero()).then(|| left.min(LOOK))
    }
}

/// How often a wait looks for a cancellation.
const LOOK: Duration = Duration::from_millis(50);

/// The queue between the allocating thread and those that move bytes.
pub(crate) struct Feed {
    cut: Cut,
    state: Mutex<FeedState>,
    more: Condvar,
    pace: Option<Pace>,
    /// Signalled when memory is added, for a ring that waits in the kernel and not here.
    pub notifier: Option<Notifier>,
}

struct FeedState {
    method: VecDeque<FileRange>,
    cached: VecDeque<FileRange>,
    returned: Vec<IoExtent>,
    /// Memory below this offset of the buffer is allocated.
    frontier: u64,
    stopped: bool,
    error: Option<Error>,
    /// Bytes that were handed out to the method.
    given: u64,
}

impl Feed {
    /// `method` and `cached` are ranges of the file in ascending order. All memory counts as allocated
    /// until [`Feed::hold`] is called.
    pub(crate) fn new(
        method: impl IntoIterator<Item = FileRange>,
        cached: impl IntoIterator<Item = FileRange>,
        cut: Cut,
        notifier: Option<Notifier>,
    ) -> Self {
        Self {
            cut,
            state: Mutex::new(FeedState {
                method: method.into_iter().collect(),
                cached: cached.into_iter().collect(),
                returned: Vec::new(),
                frontier: u64::MAX,
                stopped: false,
                error: None,
                given: 0,
            }),
            more: Condvar::new(),
            pace: None,
            notifier,
        }
    }

    /// Hands out at most so many bytes in a second, until `cancel` is set.
    pub(crate) fn limit(&mut self, limit: u64, cancel: &CancelToken) {
        self.pace = Some(Pace {
            limit,
            begin: Instant::now(),
            cancel: cancel.clone(),
        });
    }

    /// From now on, extents are handed out only after [`Feed::publish`] has announced their memory.
    pub(crate) fn hold(&self) {
        self.lock().frontier = 0;
    }

    /// Announces that memory below `frontier` is allocated.
    pub(crate) fn publish(&self, frontier: u64) {
        let mut state = self.lock();
        state.frontier = state.frontier.max(frontier);
        drop(state);
        self.wake();
    }

    /// Ends the transfer. Only the first error is kept.
    pub(crate) fn stop(&self, error: Option<Error>) {
        let mut state = self.lock();
        state.stopped = true;
        if state.error.is_none() {
            state.error = error;
        }
        drop(state);
        self.wake();
    }

    /// The error that stopped it.
    pub(crate) fn error(&self) -> Option<Error> {
        self.lock().error.clone()
    }

    pub(crate) fn failed(&self) -> bool {
        self.lock().error.is_some()
    }

    pub(crate) fn stopped(&self) -> bool {
        self.lock().stopped
    }

    /// The next extent of a queue, without blocking.
    pub(crate) fn take(&self, queue: Queue) -> FeedResult {
        self.next(&mut self.lock(), queue)
    }

    /// Waits for the next extent of a queue; None if there are no more.
    pub(crate) fn wait(&self, queue: Queue) -> Option<IoExtent> {
        let mut state = self.lock();
        loop {
            match self.next(&mut state, queue) {
                FeedResult::Extent(extent) => return Some(extent),
                FeedResult::Drained => return None,
                FeedResult::NotYet => {
                    state = match &self.pace {
                        Some(pace) => {
                            // It may be due by now, or wait for memory.
                            let time = pace.wait(state.given).unwrap_or(LOOK / 50);
                            sync::wait_for(&self.more, state, time)
                        }
                        None => sync::wait(&self.more, state),
                    };
                }
            }
        }
    }

    /// Memory below this offset is allocated.
    pub(crate) fn frontier(&self) -> u64 {
        self.lock().frontier
    }

    /// Returns an extent that the method could not move; it is handed out again.
    pub(crate) fn put_back(&self, extent: IoExtent) {
        self.lock().returned.push(extent);
    }

    /// The ranges that have not been handed out to the method, in file order, for a feed with other
    /// cuts.
    pub(crate) fn left(&self) -> Vec<FileRange> {
        let state = self.lock();
        let returned = state.returned.iter();
        let returned =
            returned.map(|extent| (extent.file + extent.head, extent.file + extent.need));
        let mut left: Vec<_> = state.method.iter().copied().chain(returned).collect();
        left.sort_unstable();
        left
    }

    fn next(&self, state: &mut FeedState, queue: Queue) -> FeedResult {
        if state.stopped {
            return FeedResult::Drained;
        }
        let frontier = state.frontier;
        let pace = self.pace.as_ref().filter(|_| queue == Queue::Method);
        if pace.is_some_and(|pace| pace.wait(state.given).is_some()) && !state.method.is_empty() {
            return FeedResult::NotYet;
        }
        let runs = match queue {
            Queue::Method => {
                if let Some(extent) = state.returned.pop() {
                    return FeedResult::Extent(extent);
                }
                &mut state.method
            }
            Queue::Cached => &mut state.cached,
        };
        let Some(run) = runs.front_mut() else {
            return FeedResult::Drained;
        };
        let align = match queue {
            Queue::Method => self.cut.align,
            // A copy needs no alignment, and the caller's memory has no room for rounding.
            Queue::Cached => 1,
        };
        let cut = Cut { align, ..self.cut };
        let (extent, next) = cut.first(*run);
        if extent.at + extent.len > frontier {
            return FeedResult::NotYet;
        }
        if next < run.1 {
            run.0 = next;
        } else {
            runs.pop_front();
        }
        if queue == Queue::Method {
            state.given += extent.need;
        }
        FeedResult::Extent(extent)
    }

    fn wake(&self) {
        self.more.notify_all();
        if let Some(notifier) = &self.notifier {
            notifier.notify();
        }
    }

    fn lock(&self) -> MutexGuard<'_, FeedState> {
        sync::lock(&self.state)
    }
}

/// Ends the transfer when it is dropped by a panic: other threads must not wait for bytes that this one does
/// not move any more.
pub(crate) struct Panics<'a> {
    feed: &'a Feed,
    /// The whole load may run while a panic of the caller unwinds.
    already: bool,
}

impl<'a> Panics<'a> {
    pub(crate) fn of(feed: &'a Feed) -> Self {
        let already = std::thread::panicking();
        Self { feed, already }
    }
}

impl Drop for Panics<'_> {
    fn drop(&mut self) {
        if !self.already && std::thread::panicking() {
            self.feed.stop(None);
        }
    }
}

impl Cut {
    /// The first extent of a range of the file, and where the next one starts.
    fn first(&self, (start, end): FileRange) -> (IoExtent, u64) {
        let file = start - start % self.align;
        let at = file.wrapping_sub(self.base);
        // Cut at the ends of blocks in memory, but at an aligned offset of the file.
        let stop_at = at + self.block - (at + self.phase) % self.block;
        let next = (file + (stop_at - at)).min(end);
        let rounded = (next - file).next_multiple_of(self.align);
        let extent = IoExtent {
            file,
            at,
            len: rounded.min(self.capacity - at),
            need: next - file,
            head: start - file,
            run_end: end.wrapping_sub(self.base),
        };
        (extent, next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn drain(feed: &Feed, queue: Queue) -> Vec<IoExtent> {
        std::iter::from_fn(|| feed.wait(queue)).collect()
    }

    #[test]
    fn extents_are_handed_out_only_after_their_memory_is_published() {
        let cut = Cut {
            block: 8192,
            align: 512,
            base: 0,
            phase: 0,
            capacity: 20480,
        };
        let feed = Feed::new([(0, 20000)], [], cut, None);
        feed.hold();
        assert_eq!(feed.take(Queue::Method), FeedResult::NotYet);
        feed.publish(8192);
        assert!(matches!(feed.take(Queue::Method), FeedResult::Extent(e) if e.at == 0));
        assert_eq!(feed.take(Queue::Method), FeedResult::NotYet);
        feed.publish(20480);
        assert_eq!(drain(&feed, Queue::Method).len(), 2);
        assert_eq!(feed.take(Queue::Cached), FeedResult::Drained);
    }

    #[test]
    fn returned_extents_are_handed_out_again_and_a_stop_ends_all() {
        let cut = Cut {
            block: 4096,
            align: 4096,
            base: 0,
            phase: 0,
            capacity: 8192,
        };
        let feed = Feed::new([(0, 8192)], [], cut, None);
        let first = feed.wait(Queue::Method).unwrap();
        feed.put_back(first);
        assert_eq!(feed.left(), [(0, 4096), (4096, 8192)]);
        assert_eq!(feed.wait(Queue::Method), Some(first));
        assert_eq!(feed.left(), [(4096, 8192)]);
        feed.stop(Some(Error::new("a", "b")));
        feed.stop(Some(Error::new("late", "b")));
        assert_eq!(feed.wait(Queue::Method), None);
        assert_eq!(feed.error().unwrap().to_string(), "a: b");
    }

    #[test]
    fn a_panic_under_the_lock_does_not_panic_other_threads() {
        let cut = Cut {
            block: 4096,
            align: 4096,
            base: 0,
            phase: 0,
            capacity: 8192,
        };
        let feed = Feed::new([(0, 8192)], [], cut, None);
        feed.hold();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| feed.wait(Queue::Method));
            let broken = scope.spawn(|| {
                let _held = feed.lock();
                panic!("on purpose");
            });
            assert!(broken.join().is_err());
            feed.stop(Some(Error::new("a", "b")));
            assert_eq!(waiting.join().expect("no panic of this thread"), None);
        });
        assert!(feed.failed());
    }

    proptest! {
        /// Extents cover exactly the requested bytes, in order, aligned and inside the memory, and none
        /// crosses a block boundary in memory. The memory begins at a page of the file, or at any byte
        /// if it is the caller's.
        #[test]
        fn extents_cover_exactly_the_range(
            start in 0_u64..100_000,
            len in 1_u64..1_000_000,
            block_in_aligns in 1_u64..40,
            align in prop::sample::select(vec![1_u64, 512, 4096]),
            borrowed in any::<bool>(),
        ) {
            let block = block_in_aligns * align.max(512);
            let (base, start) = if borrowed { (start, start.next_multiple_of(align)) } else { (start - start % 4096, start) };
            let phase = base % align;
            let capacity = (start - base + len).next_multiple_of(4096);
            let cut = Cut { block, align, base, phase, capacity };
            let feed = Feed::new([(start, start + len)], [], cut, None);
            let mut next = start;
            for extent in std::iter::from_fn(|| feed.wait(Queue::Method)) {
                prop_assert!(extent.file + extent.need > next, "no progress");
                prop_assert!(extent.file <= next && next - extent.file < align.max(1));
                prop_assert_eq!(extent.at, extent.file - base);
                prop_assert_eq!(extent.file % align, 0);
                prop_assert!(extent.len >= extent.need && extent.len < extent.need + align);
                prop_assert!(extent.at + extent.len <= capacity);
                let first = extent.at + phase;
                prop_assert_eq!(first / block, (first + extent.need - 1) / block);
                next = extent.file + extent.need;
            }
            prop_assert_eq!(next, start + len);
        }
    }
}
