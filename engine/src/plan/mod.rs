//! What will be done and why: decided from facts, without touching anything.

mod allocation;
mod decide;
mod ladder;
mod pages;
mod range;
mod room;
mod tuning;
mod types;

pub(crate) use decide::decide;
pub(crate) use ladder::WINDOWS;
#[cfg(feature = "inspect")]
pub(crate) use ladder::registered_need;
pub(crate) use range::range;
pub(crate) use tuning::Tuning;
pub use types::{Plan, Rung};

/// Threads that copy, and that allocate: so many move more than a memory channel does.
const MOST_THREADS: usize = 4;
/// Up to this, in bytes, a second thread costs more than what it hides.
const SMALL_FILE: u64 = 4 << 20;

#[cfg(test)]
mod tests;
