//! CPU time of this process and its threads, and waking a ring from another thread.

use super::Errno;
use rustix::event::EventfdFlags;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
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

/// An event that wakes a thread through poll(2) or a ring (eventfd(2)).
pub struct Bell(OwnedFd);

impl Bell {
    pub fn new() -> Result<Self, Errno> {
        rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self)
    }

    pub fn ring(&self) {
        // EAGAIN means that it has been signalled 2^64 times without being reset: the waiter is
        // awake.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Resets it.
    pub fn hush(&self) {
        // EAGAIN means that it has not been signalled.
        let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
