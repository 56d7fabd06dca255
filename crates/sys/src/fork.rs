//! Keeps forks of this process away from a moment in which a child must not begin.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The process that is in such a moment, or forks; 0 without. A forked child may find its parent here.
static INSIDE: AtomicU32 = AtomicU32::new(0);
/// True if fork(3) knows the handlers below.
static KNOWN: AtomicBool = AtomicBool::new(false);

/// Runs `work`, which is short, while no thread of this process is in fork(3). Programs that fork by a system
/// call of their own are not kept from it.
pub(super) fn hold_off<T>(work: impl FnOnce() -> T) -> T {
    /// Also ends it if `work` panics.
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            leave();
        }
    }
    enter();
    let _end = End;
    if !KNOWN.load(Ordering::Relaxed) {
        // SAFETY: the handlers only access the statics above, and yield.
        let known = unsafe { libc::pthread_atfork(Some(enter), Some(leave), Some(leave)) };
        // Without memory for them, the next call tries again.
        KNOWN.store(known == 0, Ordering::Relaxed);
    }
    work()
}

extern "C" fn enter() {
    let me = std::process::id();
    while let Err(other) = INSIDE.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed) {
        // A fork before the handlers were known has copied the moment of a thread that does not exist here.
        let stale = other != me
            && INSIDE
                .compare_exchange(other, me, Ordering::Acquire, Ordering::Relaxed)
                .is_ok();
        if stale {
            return;
        }
        std::thread::yield_now();
    }
}

extern "C" fn leave() {
    INSIDE.store(0, Ordering::Release);
}
