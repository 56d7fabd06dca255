//! Memory of size 0: an empty memfd.

use super::memory::{CopyOut, Filled};
use crate::sys::map::View;
use crate::sys::{Errno, memfd};
use rustix::fs::SealFlags;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

pub(crate) struct Empty(OwnedFd);

impl Empty {
    pub(crate) fn new() -> Result<Self, Errno> {
        let fd = memfd::create("dmafile", false)?;
        memfd::seal(fd.as_fd(), SealFlags::SHRINK | SealFlags::GROW)?;
        Ok(Self(fd))
    }
}

impl CopyOut for Empty {
    fn copy_out(&self, _: u64, _: &mut [u8]) -> Result<(), Errno> {
        Ok(())
    }
}

impl Filled for Empty {
    fn address(&self) -> Option<*const u8> {
        Some(NonNull::dangling().as_ptr())
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }

    fn copy_in(&mut self, _: u64, _: &[u8]) -> Result<(), Errno> {
        Ok(())
    }

    fn bytes(&self) -> Option<&[u8]> {
        Some(&[])
    }

    fn seal(&mut self) -> Result<(), Errno> {
        memfd::seal(self.0.as_fd(), SealFlags::WRITE)
    }

    fn into_view(self: Box<Self>) -> Option<View> {
        None
    }

    fn into_descriptors(self: Box<Self>) -> Result<Vec<OwnedFd>, Errno> {
        Ok(vec![self.0])
    }
}
