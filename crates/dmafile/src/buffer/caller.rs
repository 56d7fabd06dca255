//! The caller's memory, for one load: it is filled, but never becomes a buffer.

use super::memory::{CopyOut, Filling};
use crate::sys::Errno;
use crate::sys::map::{Region, page_size};

pub(crate) struct CallerMemory<'m>(Region<'m>);

impl<'m> CallerMemory<'m> {
    pub(crate) fn new(memory: &'m mut [u8]) -> Self {
        Self(Region::of_slice(memory))
    }
}

impl CopyOut for CallerMemory<'_> {
    fn copy_out(&self, at: u64, into: &mut [u8]) -> Result<(), Errno> {
        self.0.copy_out(at, into);
        Ok(())
    }
}

impl Filling for CallerMemory<'_> {
    fn region(&self) -> Region<'_> {
        self.0
    }

    /// It may be a mapping of anything.
    fn never_faults(&self) -> bool {
        false
    }

    fn populate(&self, at: u64, len: u64) -> Result<(), Errno> {
        self.0.populate(at, len)
    }

    fn grain(&self) -> u64 {
        page_size()
    }

    fn pages(&self) -> (String, Option<String>) {
        ("existing".to_string(), None)
    }

    fn is_fresh(&self) -> bool {
        false
    }
}
