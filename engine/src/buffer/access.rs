//! Access by the CPU to memory that other processes or devices may reach.

use super::Buffer;
use crate::error::{Error, Result};
use crate::sys::Errno;

impl Buffer {
    /// Begins to read by the CPU memory that others may reach at the same time, until what it returns
    /// is dropped.
    ///
    /// # Errors
    /// The errno of a dma-buf's exporter (`DMA_BUF_IOCTL_SYNC`); nothing has begun then.
    pub fn access(&self) -> Result<CpuAccess<'_>> {
        self.begin_access()?;
        Ok(CpuAccess(self))
    }

    /// Begins to read and write by the CPU, until what it returns is dropped.
    ///
    /// # Errors
    /// As [`Buffer::access`].
    pub fn access_mut(&mut self) -> Result<CpuAccessMut<'_>> {
        let begun = self.memory.begin(true);
        begun.map_err(|errno| self.inaccessible(errno, 0))?;
        Ok(CpuAccessMut(self))
    }

    /// Says to devices that the CPU begins to read by [`Buffer::as_ptr`], for bindings to languages
    /// that know no borrows; elsewhere [`Buffer::access`] is the way. [`Buffer::end_access`] has to
    /// follow, once for each that succeeded; several may overlap. Costs nothing unless the memory
    /// consists of dma-bufs; of those it waits for what devices have still to write.
    ///
    /// # Errors
    /// What a dma-buf's exporter says (`DMA_BUF_IOCTL_SYNC`); nothing has begun then.
    pub fn begin_access(&self) -> Result<()> {
        let begun = self.memory.begin(false);
        begun.map_err(|errno| self.inaccessible(errno, 0))
    }

    /// Says that the CPU has read what [`Buffer::begin_access`] began.
    pub fn end_access(&self) {
        self.memory.end(false);
    }

    /// Where `len` bytes at `offset` of the wanted ones lie in memory.
    fn inside(&self, offset: u64, len: usize) -> Result<u64> {
        match offset.checked_add(len as u64) {
            Some(end) if end <= self.len => Ok(self.offset + offset),
            _ => Err(self.inaccessible(Errno::INVAL, offset)),
        }
    }

    /// Copies bytes out, once access by the CPU has begun.
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

/// Reading by the CPU of a buffer that other processes or devices may reach, from
/// [`Buffer::access`] until it is dropped. Offsets count from the first wanted byte.
#[must_use = "access ends where it is dropped"]
pub struct CpuAccess<'b>(&'b Buffer);

impl Drop for CpuAccess<'_> {
    fn drop(&mut self) {
        self.0.memory.end(false);
    }
}

impl CpuAccess<'_> {
    /// Copies `into.len()` bytes from `offset`. What another process writes meanwhile may be seen or
    /// not, byte by byte.
    ///
    /// # Errors
    /// EINVAL outside the buffer; EIO where its owner has truncated an `fd:N`.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.0.copy_out(offset, into)
    }
}

/// As [`CpuAccess`], for writing too. It borrows the buffer exclusively, so that no slice of it is
/// held meanwhile.
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
    /// As there.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.0.copy_out(offset, into)
    }

    /// Copies `from` to `offset`.
    ///
    /// # Errors
    /// EINVAL outside the buffer; EPERM for one that is sealed; ENOMEM where it was received on hugetlb
    /// pages, and the pool has none left to fill a hole.
    pub fn write_at(&mut self, offset: u64, from: &[u8]) -> Result<()> {
        let at = self.0.inside(offset, from.len())?;
        let copied = self.0.memory.copy_in(at, from);
        copied.map_err(|errno| self.0.inaccessible(errno, offset))
    }
}
