//! How far the bytes are in place without a gap, for consumers that need them in file order.

use crate::sync;
use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard};

/// Ranges of memory whose bytes are in place.
#[derive(Default)]
pub(crate) struct Landed {
    state: Mutex<LandedState>,
    more: Condvar,
}

#[derive(Default)]
struct LandedState {
    upto: u64,
    beyond: BTreeMap<u64, u64>,
    over: bool,
}

impl Landed {
    /// The bytes of `[at, end)` are in place.
    pub(crate) fn add(&self, at: u64, end: u64) {
        let mut state = self.lock();
        state.beyond.insert(at, end);
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

    fn lock(&self) -> MutexGuard<'_, LandedState> {
        sync::lock(&self.state)
    }
}

/// Calls [`Landed::over`] when dropped, so also if the thread panics that reports bytes.
pub(crate) struct LandedGuard<'a>(pub(crate) &'a Landed);

impl Drop for LandedGuard<'_> {
    fn drop(&mut self) {
        self.0.over();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bytes_before_the_first_gap_count() {
        let landed = Landed::default();
        landed.add(10, 20);
        landed.add(0, 5);
        assert_eq!(landed.wait(0), Some(5));
        landed.add(5, 10);
        assert_eq!(landed.wait(5), Some(20));
        landed.over();
        assert_eq!(landed.wait(20), None);
    }

    #[test]
    fn a_wait_ends_if_the_thread_that_reports_bytes_panics() {
        let landed = Landed::default();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| landed.wait(0));
            let broken = scope.spawn(|| {
                let _over = LandedGuard(&landed);
                panic!("on purpose");
            });
            assert!(broken.join().is_err());
            assert_eq!(waiting.join().unwrap(), None);
        });
    }
}
