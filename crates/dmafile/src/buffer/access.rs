//! CPU access to memory that other processes or devices may access, too.

use super::Buffer;
use crate::error::{Error, Result};
use crate::sys::Errno;

impl Buffer {
    /// Begins CPU reads of memory that others may access at the same time, until the result is dropped.
    ///
    /// # Errors
    /// The errno of a dma-buf's exporter (`DMA_BUF_IOCTL_SYNC`); no access has begun then.
    pub fn access(&self) -> Result<CpuAccess<'_>> {
        self.begin_access()?;
        Ok(CpuAccess(self))
    }

    /// Begins CPU reads and writes, until the result is dropped.
    ///
    /// # Errors
    /// As [`Buffer::access`].
    pub fn access_mut(&mut self) -> Result<CpuAccessMut<'_>> {
        let begun = self.memory.begin(true);
        begun.map_err(|errno| self.inaccessible(errno, 0))?;
        Ok(CpuAccessMut(self))
    }

    /// Announces to devices that the CPU begins to read through [`Buffer::as_ptr`], for bindings to
    /// languages without borrows; in Rust use [`Buffer::access`]. Each successful call must be followed
    /// by one [`Buffer::end_access`]; several accesses may overlap. Costs nothing unless the memory
    /// consists of dma-bufs; for those it waits until devices have finished writing.
    ///
    /// # Errors
    /// The errno of a dma-buf's exporter (`DMA_BUF_IOCTL_SYNC`); no access has begun then.
    pub fn begin_access(&self) -> Result<()> {
        let begun = self.memory.begin(false);
        begun.map_err(|errno| self.inaccessible(errno, 0))
    }

    /// Ends an access that [`Buffer::begin_access`] began.
    pub fn end_access(&self) {
        self.memory.end(false);
    }

    /// Where `len` bytes at `offset` within the requested bytes are in memory.
    fn inside(&self, offset: u64, len: usize) -> Result<u64> {
        match offset.checked_add(len as u64) {
            Some(end) if end <= self.len => Ok(self.offset + offset),
            _ => Err(self.inaccessible(Errno::INVAL, offset)),
        }
    }

    /// Copies bytes out, after CPU access has begun.
    fn copy_out(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let at = self.inside(offset, into.len())?;
        let copied = self.memory.copy_out(at, into);
        copied.map_err(|errno| self.inaccessible(errno, offset))
    }

    fn inaccessible(&self, errno: Errno, offset: u64) -> Error {
        let place = format!("{} at byte {offset} of {}", self.kind, self.len);
        Error::os("cannot access the buffer", errno).at(place)
    }
}

/// CPU reads of a buffer that other processes or devices may access, from [`Buffer::access`] until this
/// is dropped. Offsets count from the first requested byte.
#[must_use = "access ends where it is dropped"]
pub struct CpuAccess<'b>(&'b Buffer);

impl Drop for CpuAccess<'_> {
    fn drop(&mut self) {
        self.0.memory.end(false);
    }
}

impl CpuAccess<'_> {
    /// Copies `into.len()` bytes from `offset`. Concurrent writes by another process may or may not be
    /// visible, byte by byte.
    ///
    /// # Errors
    /// EINVAL outside the buffer; EIO if the owner of an `fd:N` has truncated it.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.0.copy_out(offset, into)
    }
}

/// As [`CpuAccess`], for writing as well. It borrows the buffer exclusively, so that no slice of it
/// exists at the same time.
#[must_use = "access ends where it is dropped"]
pub struct CpuAccessMut<'b>(&'b mut Buffer);

impl Drop for CpuAccessMut<'_> {
    fn drop(&mut self) {
        self.0.memory.end(true);
    }
}

impl CpuAccessMut<'_> {
    /// As [`CpuAccess::read_at`].
    ///
    /// # Errors
    /// As [`CpuAccess::read_at`].
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.0.copy_out(offset, into)
    }

    /// Copies `from` to `offset`.
    ///
    /// # Errors
    /// EINVAL outside the buffer; EPERM if it is sealed; ENOMEM if it was received on hugetlb pages,
    /// and the pool has none left to fill a hole.
    pub fn write_at(&mut self, offset: u64, from: &[u8]) -> Result<()> {
        let at = self.0.inside(offset, from.len())?;
        let copied = self.0.memory.copy_in(at, from);
        copied.map_err(|errno| self.0.inaccessible(errno, offset))
    }
}
