//! Memory in its two lives: while it is filled, and filled. Filling ends by taking the memory that
//! lends its regions, so that no region is left when slices begin.

use super::DmaBuf;
use crate::device::Pinned;
use crate::error::Error;
use crate::sys::map::{Region, View};
use crate::sys::turn::Turns;
use crate::sys::{self, Errno};
use std::os::fd::{BorrowedFd, OwnedFd};

/// Memory whose bytes can be copied out, in either life.
pub(crate) trait CopyOut: Send + Sync {
    /// Copies `into.len()` bytes at `at` of the memory.
    fn copy_out(&self, at: u64, into: &mut [u8]) -> Result<(), Errno>;
}

/// Memory while it is filled.
pub(crate) trait Filling: CopyOut {
    /// All of it.
    fn region(&self) -> Region<'_>;

    /// A touch by the CPU raises no signal at any time.
    fn never_faults(&self) -> bool {
        true
    }

    /// Its descriptor, where it has one: what methods write into.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// The dma-buf that it is, and whose turn it is to touch it.
    fn dma_buf(&self) -> Option<&Turns> {
        None
    }

    /// Makes the pages of a range present.
    fn populate(&self, at: u64, len: u64) -> Result<(), Errno>;

    /// Multiple in which it is best populated.
    fn grain(&self) -> u64;

    /// All of its pages are present, and reads into them may be in flight. Whether anything was made
    /// of them.
    fn populated(&self) -> Result<bool, Error> {
        Ok(false)
    }

    /// Which pages it got, and a remark where that needs one.
    fn pages(&self) -> (String, Option<String>);

    /// Every byte that was not written is zero.
    fn is_fresh(&self) -> bool {
        true
    }

    /// Zeroes a range.
    fn zero(&self, at: u64, len: u64) -> Result<(), Errno> {
        self.region().zero(at, len);
        Ok(())
    }
}

/// Memory that becomes a buffer.
pub(crate) trait Finish: Filling {
    /// All that was to be written is: brings it into the shape in which it is handed out.
    fn finish(self: Box<Self>) -> Result<Box<dyn Filled>, Errno>;
}

/// Memory of a buffer.
pub(crate) trait Filled: CopyOut {
    /// The address of its first byte; None where a touch may raise a signal.
    fn address(&self) -> Option<*const u8>;

    /// Whether it can be pinned for a device where it is mapped, and written to there; or why not.
    fn can_pin(&self) -> Result<bool, &'static str> {
        Ok(true)
    }

    /// What pins it, where it was pinned while it was filled.
    fn take_pin(&mut self) -> Option<Pinned> {
        None
    }

    /// The descriptor that is handed out, where it is one and no dma-buf.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// The dma-bufs that it consists of, in their order.
    fn dma_bufs(&self) -> Vec<DmaBuf<'_>> {
        Vec::new()
    }

    /// The descriptor that is handed out, where it is one.
    fn exported(&self) -> Option<BorrowedFd<'_>> {
        match &self.dma_bufs()[..] {
            [] => self.descriptor(),
            [whole] => Some(whole.fd),
            _ => None,
        }
    }

    /// The CPU begins to read, or to read and write: all of the dma-bufs or none.
    fn begin(&self, write: bool) -> Result<(), Errno> {
        let all = self.dma_bufs();
        for (done, one) in all.iter().enumerate() {
            if let Err(errno) = sys::dmabuf::sync(one.fd, write, false) {
                end(&all[..done], write);
                return Err(errno);
            }
        }
        Ok(())
    }

    /// The CPU has done what it began.
    fn end(&self, write: bool) {
        end(&self.dma_bufs(), write);
    }

    /// Copies bytes in. No slice of them may be held: memory takes `&mut self` for that.
    fn copy_in(&mut self, at: u64, from: &[u8]) -> Result<(), Errno>;

    /// The bytes, where nobody else can change them.
    fn bytes(&self) -> Option<&[u8]> {
        None
    }

    /// Whether its first huge page is mapped as such; None where there is none, or nobody can say.
    fn has_huge_mapping(&self) -> Option<bool> {
        None
    }

    /// The bytes, where nobody else can reach them.
    fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        None
    }

    /// Forbids any change for good.
    fn seal(&mut self) -> Result<(), Errno> {
        Err(Errno::OPNOTSUPP)
    }

    /// Gives up the descriptor and keeps the mapping, where there is one.
    fn into_view(self: Box<Self>) -> Option<View>;

    /// Gives up the mapping and keeps what is handed out.
    fn into_descriptors(self: Box<Self>) -> Result<Vec<OwnedFd>, Errno> {
        Err(Errno::OPNOTSUPP)
    }
}

fn end(all: &[DmaBuf<'_>], write: bool) {
    for one in all {
        // It has begun, so that it can end; a drop has nobody to report to.
        let _ = sys::dmabuf::sync(one.fd, write, true);
    }
}
