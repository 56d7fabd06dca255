//! Memory in two states: being filled, and filled. Finishing consumes the value that lends regions,
//! so no region exists when slices can be made.

use super::DmaBuf;
use crate::error::Error;
use crate::pin::Pinned;
use crate::sys::dmabuf_sync::SyncedDmaBuf;
use crate::sys::map::{Region, View};
use crate::sys::{self, Errno};
use std::os::fd::{BorrowedFd, OwnedFd};

/// Memory whose bytes can be copied out, in either state.
pub(crate) trait CopyOut: Send + Sync {
    /// Copies `into.len()` bytes at `at` of the memory.
    fn copy_out(&self, at: u64, into: &mut [u8]) -> Result<(), Errno>;
}

/// Memory while it is being filled.
pub(crate) trait Filling: CopyOut {
    /// All of it.
    fn region(&self) -> Region<'_>;

    /// CPU accesses never raise a signal.
    fn never_faults(&self) -> bool {
        true
    }

    /// Its descriptor, if it has one: methods write to it.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// The dma-buf, if it is one, with the lock that controls access to it.
    fn dma_buf(&self) -> Option<&SyncedDmaBuf> {
        None
    }

    /// Allocates the pages of a range.
    fn populate(&self, at: u64, len: u64) -> Result<(), Errno>;

    /// Alignment at which it is best populated.
    fn grain(&self) -> u64;

    /// Called when all of its pages are present, while reads into them may still be in flight.
    /// Returns whether anything was created from them.
    fn populated(&self) -> Result<bool, Error> {
        Ok(false)
    }

    /// The page size it got, with a remark if necessary.
    fn pages(&self) -> (String, Option<String>);

    /// True if every byte that was not written is zero.
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
    /// Converts the memory to its final form, when everything has been written.
    fn finish(self: Box<Self>) -> Result<Box<dyn Filled>, Errno>;
}

/// Memory of a buffer.
pub(crate) trait Filled: CopyOut {
    /// The address of its first byte; None if an access may raise a signal.
    fn address(&self) -> Option<*const u8>;

    /// Includes it in children that are forked from now on, if it was left out of them while it was filled.
    fn enter_forks(&self) {}

    /// Checks that a device may write to the mapping when it is pinned; an error says why it cannot be pinned.
    fn can_pin(&self) -> Result<bool, &'static str> {
        Ok(true)
    }

    /// Takes the pin, if the memory was pinned while it was being filled.
    fn take_pin(&mut self) -> Option<Box<dyn Pinned>> {
        None
    }

    /// Its descriptor, if it is a single one and not a dma-buf.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// The dma-bufs that it consists of, in order.
    fn dma_bufs(&self) -> Vec<DmaBuf<'_>> {
        Vec::new()
    }

    /// Its descriptor, if it is a single one.
    fn exported(&self) -> Option<BorrowedFd<'_>> {
        match &self.dma_bufs()[..] {
            [] => self.descriptor(),
            [whole] => Some(whole.fd),
            _ => None,
        }
    }

    /// Begins CPU access, for reading or for reading and writing: to all dma-bufs or to none.
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

    /// Ends CPU access.
    fn end(&self, write: bool) {
        end(&self.dma_bufs(), write);
    }

    /// Copies bytes in. `&mut self` ensures that no slice of it exists.
    fn copy_in(&mut self, at: u64, from: &[u8]) -> Result<(), Errno>;

    /// The bytes, if nothing else can change them.
    fn bytes(&self) -> Option<&[u8]> {
        None
    }

    /// True if its first huge page is mapped as such; None if there is none, or if that cannot be
    /// found out.
    fn has_huge_mapping(&self) -> Option<bool> {
        None
    }

    /// The bytes, if nothing else can access them.
    fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        None
    }

    /// Permanently forbids any change.
    fn seal(&mut self) -> Result<(), Errno> {
        Err(Errno::OPNOTSUPP)
    }

    /// Closes the descriptor and keeps the mapping, if there is one.
    fn into_view(self: Box<Self>) -> Option<View>;

    /// Removes the mapping and keeps the descriptors.
    fn into_descriptors(self: Box<Self>) -> Result<Vec<OwnedFd>, Errno> {
        Err(Errno::OPNOTSUPP)
    }
}

fn end(all: &[DmaBuf<'_>], write: bool) {
    for one in all {
        // Ending an access that has begun should not fail, and a drop could not report it.
        let _ = sys::dmabuf::sync(one.fd, write, true);
    }
}
