//! Controls whether the CPU or a device accesses a dma-buf while it is being filled.
//!
//! While a device accesses it, the CPU may still copy other bytes in, or read what the device has
//! written. Each such access is then bracketed with `DMA_BUF_IOCTL_SYNC`, which applies to the whole
//! dma-buf. So only one is made at a time: if caches are not coherent, the beginning of one access would
//! drop what another one has written and not yet ended.

use super::{Errno, dmabuf};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// A dma-buf that the CPU is writing to, except while a device accesses it.
pub struct SyncedDmaBuf {
    fd: Arc<OwnedFd>,
    /// A device accesses it.
    by_device: RwLock<bool>,
    /// Held during the only CPU access meanwhile.
    one: Mutex<()>,
}

impl SyncedDmaBuf {
    /// For a dma-buf for which CPU writes have begun (DMA_BUF_IOCTL_SYNC); the caller ends them.
    pub fn new(fd: &Arc<OwnedFd>) -> Self {
        Self {
            fd: Arc::clone(fd),
            by_device: RwLock::new(false),
            one: Mutex::new(()),
        }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// A device accesses it until the result is dropped.
    pub fn begin_device_access(&self) -> Result<DeviceAccess<'_>, Errno> {
        let mut by_device = self
            .by_device
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        self.sync(true)?;
        *by_device = true;
        Ok(DeviceAccess(Some(self)))
    }

    fn end(&self) -> Result<(), Errno> {
        let mut by_device = self
            .by_device
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        *by_device = false;
        self.sync(false)
    }

    /// Calls `touch`, in which the CPU reads or writes.
    pub fn touch<T>(&self, touch: impl FnOnce() -> T) -> Result<T, Errno> {
        let by_device = self
            .by_device
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        if !*by_device {
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

/// An access by a device. Before it ends, everything must be unmapped from the device.
pub struct DeviceAccess<'a>(Option<&'a SyncedDmaBuf>);

impl DeviceAccess<'_> {
    /// Ends it. If that fails, the CPU may not see what the device has written.
    pub fn end(mut self) -> Result<(), Errno> {
        self.0.take().map_or(Ok(()), SyncedDmaBuf::end)
    }
}

impl Drop for DeviceAccess<'_> {
    fn drop(&mut self) {
        if let Some(access) = self.0 {
            // After a panic the memory is discarded.
            let _ = access.end();
        }
    }
}
