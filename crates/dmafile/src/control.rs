//! Controls for a running transfer: a way to cancel it, and its progress.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Cancels a transfer. Clones share one state; once set, it stays set.
///
/// The transfer ends as soon as the operations in flight have completed (a disk read cannot be
/// aborted), with an error of kind [`ErrorKind::Cancelled`](crate::ErrorKind::Cancelled), and
/// leaves nothing behind.
#[derive(Clone, Debug, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// A token that is not set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets it. Can be called from any thread, and from a signal handler.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Returns `true` if it is set.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// The flag itself, for signal handling libraries that set one.
    pub fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.0)
    }
}

/// Progress of a transfer, in bytes of data; holes do not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Bytes in place.
    pub done: u64,
    /// All bytes.
    pub total: u64,
}

impl Progress {
    #[doc(hidden)]
    pub fn new(done: u64, total: u64) -> Self {
        Self { done, total }
    }
}

/// What is called with the progress.
pub type ProgressFn = Box<dyn Fn(Progress) + Send + Sync>;
