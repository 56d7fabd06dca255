//! What a caller holds of a transfer that runs: a way to stop it, and how far it has come.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Asks a transfer to stop. Clones share one state; once set, it stays set.
///
/// The transfer ends as soon as what is in flight has landed (a disk read cannot be taken back),
/// with an error of kind [`ErrorKind::Cancelled`](crate::ErrorKind::Cancelled), and leaves
/// nothing behind.
#[derive(Clone, Debug, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// A token that is not set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets it. Safe to call from any thread, and in a signal handler.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it is set.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// The flag itself, for signal libraries that set one.
    pub fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.0)
    }
}

/// How far a transfer has come, in bytes of data; holes do not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// In place.
    pub done: u64,
    /// In all.
    pub total: u64,
}

pub(crate) type ProgressFn = Box<dyn Fn(Progress) + Send + Sync>;
