//! Waking a thread, or a ring, from another thread.

use super::Errno;
use rustix::event::EventfdFlags;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// An event that wakes a thread through poll(2) or a ring (eventfd(2)).
pub struct Notifier(OwnedFd);

impl Notifier {
    pub fn new() -> Result<Self, Errno> {
        rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self)
    }

    pub fn notify(&self) {
        // EAGAIN means that it has been signalled 2^64 times without being reset: the waiter is
        // awake.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Resets it.
    pub fn clear(&self) {
        // EAGAIN means that it has not been signalled.
        let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
