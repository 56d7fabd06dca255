//! How far the bytes are in place without a gap, for consumers that need them in file order.

use crate::sync;
use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard};

/// Ranges of memory whose bytes are in place.
#[derive(Default)]
pub(crate) struct Prefix {
    state: Mutex<PrefixState>,
    more: Condvar,
}

#[derive(Default)]
struct PrefixState {
    upto: u64,
    beyond: BTreeMap<u64, u64>,
    over: bool,
}

impl Prefix {
    /// The bytes of `[at, end)` are in place.
    pub(crate) fn add(&self, at: u64, end: u64) {
        let mut state = self.lock();
        let known = state.beyond.entry(at).or_insert(end);
        *known = end.max(*known);
        while let Some((&start, &end)) = state.beyond.first_key_value() {
            if start > state.upto {
                break;
            }
            state.upto = state.upto.max(end);
            state.beyond.pop_first();
        }
        self.more.notify_all();
    }

    /// No more will arrive.
    pub(crate) fn over(&self) {
        self.lock().over = true;
        self.more.notify_all();
    }

    /// Waits until bytes beyond `have` are in place without a gap; returns their end, or None if no
    /// more will arrive.
    pub(crate) fn wait(&self, have: u64) -> Option<u64> {
        let mut state = self.lock();
        while state.upto <= have && !state.over {
            state = sync::wait(&self.more, state);
        }
        (state.upto > have).then_some(state.upto)
    }

    fn lock(&self) -> MutexGuard<'_, PrefixState> {
        sync::lock(&self.state)
    }
}

/// Calls [`Prefix::over`] when dropped, so also if the thread panics that reports bytes.
pub(crate) struct PrefixGuard<'a>(pub(crate) &'a Prefix);

impl Drop for PrefixGuard<'_> {
    fn drop(&mut self) {
        self.0.over();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bytes_before_the_first_gap_count() {
        let prefix = Prefix::default();
        prefix.add(10, 20);
        prefix.add(0, 5);
        assert_eq!(prefix.wait(0), Some(5));
        prefix.add(5, 10);
        assert_eq!(prefix.wait(5), Some(20));
        prefix.over();
        assert_eq!(prefix.wait(20), None);
    }

    #[test]
    fn a_wait_ends_if_the_thread_that_reports_bytes_panics() {
        let prefix = Prefix::default();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| prefix.wait(0));
            let broken = scope.spawn(|| {
                let _over = PrefixGuard(&prefix);
                panic!("on purpose");
            });
            assert!(broken.join().is_err());
            assert_eq!(waiting.join().unwrap(), None);
        });
    }
}
