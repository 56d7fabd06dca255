//! The progress of all sources together.

use dmafile::Progress;
use dmafile::internal::{ProgressFn, sync::lock};
use std::sync::{Arc, Mutex};

/// The sum of several transfers.
pub(super) struct Tally {
    tell: ProgressFn,
    each: Mutex<Vec<Progress>>,
}

impl Tally {
    /// For transfers of this many bytes, as far as the numbers are known.
    pub(super) fn new(tell: ProgressFn, totals: impl Iterator<Item = u64>) -> Arc<Self> {
        let each = totals.map(|total| Progress::new(0, total));
        Arc::new(Self {
            tell,
            each: Mutex::new(each.collect()),
        })
    }

    /// Sets the progress of one of them.
    pub(super) fn set(&self, number: usize, progress: Progress) {
        let mut each = lock(&self.each);
        each[number] = progress;
        let sum = |of: fn(&Progress) -> u64| each.iter().map(of).fold(0, u64::saturating_add);
        // Called with the lock held, so that the calls have the order of the counts.
        (self.tell)(Progress::new(sum(|one| one.done), sum(|one| one.total)));
    }
}
