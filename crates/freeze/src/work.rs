//! Work on many things at once.

use dmafile::internal::Verb;
use dmafile::{CancelToken, Error, Result};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::ScopedJoinHandle;

/// Number of threads.
const WORKERS: usize = 8;

/// Runs `with` for each, on several threads; returns the first error.
pub(crate) fn for_each<T: Sync>(
    what: Verb,
    all: &[T],
    cancel: &CancelToken,
    with: impl Fn(&T) -> Result<()> + Sync,
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(one) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
            if cancel.is_cancelled() {
                return Err(Error::cancelled(what, ""));
            }
            if let Err(error) = with(one) {
                next.store(all.len(), Ordering::Relaxed);
                return Err(error);
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..WORKERS.min(all.len()))
            .map(|_| scope.spawn(work))
            .collect();
        // All have ended before this returns, because the scope waits.
        threads.into_iter().try_for_each(joined)
    })
}

/// What a thread returns.
pub(crate) fn joined<T>(thread: ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
