//! How far all sources together have come.

use crate::control::{Progress, ProgressFn};
use crate::sync::lock;
use std::sync::{Arc, Mutex};

/// The sum of several transfers.
pub(super) struct Tally {
    tell: ProgressFn,
    each: Mutex<Vec<Progress>>,
}

impl Tally {
    /// Of transfers of this many bytes, as far as that is known before.
    pub(super) fn new(tell: ProgressFn, totals: impl Iterator<Item = u64>) -> Arc<Self> {
        let each = totals.map(|total| Progress { done: 0, total });
        Arc::new(Self {
            tell,
            each: Mutex::new(each.collect()),
        })
    }

    /// One of them has come that far.
    pub(super) fn set(&self, number: usize, progress: Progress) {
        let mut each = lock(&self.each);
        each[number] = progress;
        let sum = |of: fn(&Progress) -> u64| each.iter().map(of).fold(0, u64::saturating_add);
        // In the order in which it is counted: it is told with the lock held.
        (self.tell)(Progress {
            done: sum(|one| one.done),
            total: sum(|one| one.total),
        });
    }
}
