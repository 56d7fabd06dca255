//! CPU time and disk reads of this process and its threads.

use std::time::Duration;

/// User and system time of all threads so far, io_uring's workers included (getrusage(2)).
pub fn cpu() -> (Duration, Duration) {
    let usage = used_by(libc::RUSAGE_SELF);
    let time = |tv: libc::timeval| {
        Duration::from_secs(tv.tv_sec as u64) + Duration::from_micros(tv.tv_usec as u64)
    };
    (time(usage.ru_utime), time(usage.ru_stime))
}

/// Reads that this thread has sent to disks so far, in blocks of 512 bytes (getrusage(2)). Does
/// not change if the kernel does not count, or if a file system reads in other threads.
pub fn blocks_read() -> libc::c_long {
    used_by(libc::RUSAGE_THREAD).ru_inblock
}

/// All zero if a filter refuses the call.
fn used_by(who: libc::c_int) -> libc::rusage {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the structure is the kernel's own and lives through the call.
    unsafe {
        libc::getrusage(who, usage.as_mut_ptr());
        usage.assume_init()
    }
}
