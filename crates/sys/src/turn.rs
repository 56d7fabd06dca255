//! Controls whether the CPU or a device accesses a dma-buf while it is being filled.
//!
//! While a device has its turn, the CPU may still copy other bytes in, or read what the device has
//! written. Each such access is then bracketed with `DMA_BUF_IOCTL_SYNC`, which applies to the whole
//! dma-buf. So only one is made at a time: if caches are not coherent, the beginning of one access would
//! drop what another one has written and not yet ended.

use super::{Errno, dmabuf};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// A dma-buf that the CPU is writing to, except during the turns of devices.
pub struct Turns {
    fd: Arc<OwnedFd>,
    /// Whether a device has its turn.
    lent: RwLock<bool>,
    /// Held during the only CPU access in a device's turn.
    one: Mutex<()>,
}

impl Turns {
    /// For a dma-buf for which CPU writes have begun (DMA_BUF_IOCTL_SYNC); the caller ends them.
    pub fn new(fd: &Arc<OwnedFd>) -> Self {
        Self {
            fd: Arc::clone(fd),
            lent: RwLock::new(false),
            one: Mutex::new(()),
        }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Gives the turn to a device, until the result is dropped.
    pub fn lend(&self) -> Result<DeviceTurn<'_>, Errno> {
        let mut lent = self.lent.write().unwrap_or_else(PoisonError::into_inner);
        self.sync(true)?;
        *lent = true;
        Ok(DeviceTurn(Some(self)))
    }

    fn take_back(&self) -> Result<(), Errno> {
        let mut lent = self.lent.write().unwrap_or_else(PoisonError::into_inner);
        *lent = false;
        self.sync(false)
    }

    /// Calls `touch`, in which the CPU reads or writes.
    pub fn touch<T>(&self, touch: impl FnOnce() -> T) -> Result<T, Errno> {
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

    /// Begins or ends CPU writes.
    fn sync(&self, end: bool) -> Result<(), Errno> {
        dmabuf::sync(self.fd(), true, end)
    }
}

/// A device's turn. Before it ends, everything must be unmapped from the device.
pub struct DeviceTurn<'a>(Option<&'a Turns>);

impl DeviceTurn<'_> {
    /// Ends it. If that fails, the CPU may not see what the device has written.
    pub fn take_back(mut self) -> Result<(), Errno> {
        self.0.take().map_or(Ok(()), Turns::take_back)
    }
}

impl Drop for DeviceTurn<'_> {
    fn drop(&mut self) {
        if let Some(turns) = self.0 {
            // After a panic the memory is discarded.
            let _ = turns.take_back();
        }
    }
}
