//! Locks and waits on them, where a panic of one thread is not one of all.
//!
//! What a lock guards is sound between any two of its statements, and drop guards end the waits for
//! a thread that has panicked. The standard library's, and not parking_lot's: that one keeps the
//! threads that wait in a table of the process, which fork(2) may copy while it is locked, and then
//! the first wait in the child never ends. Loads go on in forks.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn wait<'a, T>(more: &Condvar, held: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    more.wait(held).unwrap_or_else(PoisonError::into_inner)
}

/// As [`wait`], and at most so long.
pub(crate) fn wait_for<'a, T>(
    more: &Condvar,
    held: MutexGuard<'a, T>,
    most: Duration,
) -> MutexGuard<'a, T> {
    let waited = more.wait_timeout(held, most);
    waited.unwrap_or_else(PoisonError::into_inner).0
}
