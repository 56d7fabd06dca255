//! Locks and condition variables for which a panic in one thread is not a panic in all.
//!
//! The state under a lock is valid between any two of its statements, and drop guards end the waits
//! for a thread that has panicked. These are the standard library's, not parking_lot's: that one
//! keeps waiting threads in a table of the process. fork(2) may copy the table while it is locked,
//! and then the first wait in the child never ends. Loads work in forked children, too.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

/// Locks it, even if a thread has panicked with the lock.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a signal; the same for the lock that it gets.
pub fn wait<'a, T>(more: &Condvar, held: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    more.wait(held).unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a thread. If it has panicked, its panic continues in this thread.
pub fn join<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    let ended = thread.join();
    ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// As [`wait`], at most this long.
pub fn wait_for<'a, T>(
    more: &Condvar,
    held: MutexGuard<'a, T>,
    most: Duration,
) -> MutexGuard<'a, T> {
    let waited = more.wait_timeout(held, most);
    waited.unwrap_or_else(PoisonError::into_inner).0
}
