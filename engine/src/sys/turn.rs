//! Whose turn it is to touch a dma-buf while it is filled: the CPU's, or a device's that it is mapped for.
//!
//! In a device's turn the CPU may still copy other bytes in, or read what has landed. Each such access is
//! then one between `DMA_BUF_IOCTL_SYNC` calls, which are for all of a dma-buf: so no two at a time, or
//! where caches are not coherent the beginning of one would drop what another has written and not ended.

use super::{Errno, dmabuf};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// A dma-buf that the CPU is writing to, but for the turns of devices.
pub(crate) struct Turns {
    fd: Arc<OwnedFd>,
    /// It is a device's turn.
    lent: RwLock<bool>,
    /// Held by the one access by the CPU in a device's turn.
    one: Mutex<()>,
}

impl Turns {
    /// For a dma-buf to which CPU writes have begun (DMA_BUF_IOCTL_SYNC); the caller ends them.
    pub(crate) fn new(fd: &Arc<OwnedFd>) -> Self {
        Self {
            fd: Arc::clone(fd),
            lent: RwLock::new(false),
            one: Mutex::new(()),
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Gives the turn to a device, until what is returned is dropped.
    pub(crate) fn lend(&self) -> Result<Lent<'_>, Errno> {
        let mut lent = self.lent.write().unwrap_or_else(PoisonError::into_inner);
        self.sync(true)?;
        *lent = true;
        Ok(Lent(Some(self)))
    }

    fn take_back(&self) -> Result<(), Errno> {
        let mut lent = self.lent.write().unwrap_or_else(PoisonError::into_inner);
        *lent = false;
        self.sync(false)
    }

    /// The CPU reads or writes.
    pub(crate) fn touch<T>(&self, touch: impl FnOnce() -> T) -> Result<T, Errno> {
        let lent = self.lent.read().unwrap_or_else(PoisonError::into_inner);
        if !*lent {
            return Ok(touch());
        }
        let _one = self.one.lock().unwrap_or_else(PoisonError::into_inner);
        self.sync(false)?;
        let touched = touch();
        self.sync(true)?;
        Ok(touched)
    }

    /// Begins or ends writing by the CPU.
    fn sync(&self, end: bool) -> Result<(), Errno> {
        dmabuf::sync(self.fd(), true, end)
    }
}

/// A device's turn. When it ends, nothing is mapped for the device any more.
pub(crate) struct Lent<'a>(Option<&'a Turns>);

impl Lent<'_> {
    /// Ends it. Where that fails, the CPU may not see what the device has written.
    pub(crate) fn take_back(mut self) -> Result<(), Errno> {
        self.0.take().map_or(Ok(()), Turns::take_back)
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        if let Some(turns) = self.0 {
            // After a panic: the memory is given up.
            let _ = turns.take_back();
        }
    }
}
