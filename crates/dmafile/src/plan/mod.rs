//! What will be done and why: decided from facts, without touching anything.

mod allocation;
mod decide;
mod load;
pub(crate) mod methods;
mod pages;
mod pinned;
mod range;
mod room;
mod tuning;
mod types;

pub(crate) use decide::decide;
pub(crate) use pinned::{PinnedBytes, WINDOWS, limit_pinned, registered_need};
pub(crate) use range::range;
pub(crate) use tuning::{
    BOUNCE_BLOCK, BUFFERED_BLOCK, COPY_BLOCK, DIRECT_BLOCK, DIRECT_DEPTH, LARGEST_RING, LoadTuning,
    asked_threads,
};
#[cfg(test)]
pub(crate) use tuning::{FETCH_BLOCK, FETCH_DEPTH};
pub(crate) use types::MOST_WORKERS;
pub use types::{Attempt, Placement, Plan, Sizes};

/// Maximum number of threads that allocate, or write through the page cache, and of those that copy on a
/// machine with few CPUs: together they exceed the speed of a memory channel.
pub(crate) const MOST_THREADS: usize = 4;
/// Maximum number of threads that copy: more would use more CPU time for little (docs/tuning.md).
pub(crate) const MOST_COPIERS: usize = 8;
/// Up to this size, in bytes, a second thread costs more than it saves.
const SMALL_FILE: u64 = 4 << 20;

#[cfg(test)]
mod tests;
