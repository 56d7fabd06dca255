//! The dma-bufs that memory consists of while it is filled, and whose turn it is to touch them: the
//! CPU's, or a device's that they are mapped for.
//!
//! In a device's turn the CPU may still copy other bytes in, or read what has landed. Each such access is
//! then one between `DMA_BUF_IOCTL_SYNC` calls, which are for all of a dma-buf: so no two at a time, or
//! where caches are not coherent the beginning of one would drop what another has written and not ended.

use super::{Errno, dmabuf};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// A dma-buf of several that lie one behind the other.
pub(crate) struct Piece {
    /// The caller may keep it too.
    pub fd: Arc<OwnedFd>,
    /// Where it begins in memory.
    pub at: u64,
    pub bytes: u64,
}

/// All of them.
pub(crate) struct Pieces {
    list: Vec<Piece>,
    /// The CPU's turn lies between calls of its own, which have begun it and will end it.
    bracketed: bool,
    /// It is a device's turn.
    lent: RwLock<bool>,
    /// Held by the one access by the CPU in a device's turn.
    one: Mutex<()>,
}

impl Pieces {
    /// `bracketed`: the CPU's writing has begun (DMA_BUF_IOCTL_SYNC).
    pub(crate) fn new(list: Vec<Piece>, bracketed: bool) -> Self {
        Self {
            list,
            bracketed,
            lent: RwLock::new(false),
            one: Mutex::new(()),
        }
    }

    pub(crate) fn list(&self) -> &[Piece] {
        &self.list
    }

    pub(crate) fn into_list(self) -> Vec<Piece> {
        self.list
    }

    /// Gives the turn to a device, until what is returned is dropped.
    pub(crate) fn lend(&self) -> Result<Lent<'_>, Errno> {
        let mut lent = self.lent.write().unwrap_or_else(PoisonError::into_inner);
        if self.bracketed {
            self.sync(true)?;
        }
        *lent = true;
        Ok(Lent(Some(self)))
    }

    fn take_back(&self) -> Result<(), Errno> {
        let mut lent = self.lent.write().unwrap_or_else(PoisonError::into_inner);
        *lent = false;
        match self.bracketed {
            true => self.sync(false),
            false => Ok(()),
        }
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
        let mut pieces = self.list.iter();
        pieces.try_for_each(|piece| dmabuf::sync(piece.fd.as_fd(), true, end))
    }
}

impl Piece {
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A device's turn. It is over, and nothing is mapped for the device any more, before this is dropped.
pub(crate) struct Lent<'a>(Option<&'a Pieces>);

impl Lent<'_> {
    /// Ends it. Where that fails, the CPU may not see what the device has written.
    pub(crate) fn take_back(mut self) -> Result<(), Errno> {
        self.0.take().map_or(Ok(()), Pieces::take_back)
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        if let Some(pieces) = self.0 {
            // After a panic: the memory is given up.
            let _ = pieces.take_back();
        }
    }
}
