//! Memory handed in by the caller.

use super::Memory;
use crate::sys::Errno;
use crate::sys::map::{Region, page_size};

/// Memory that is lent for the time of one load.
pub(crate) struct Lent<'m>(Region<'m>);

impl<'m> Lent<'m> {
    pub(crate) fn new(memory: &'m mut [u8]) -> Self {
        Self(Region::lent(memory))
    }
}

impl Memory for Lent<'_> {
    fn region(&self) -> Region<'_> {
        self.0
    }

    /// It may be a mapping of anything.
    fn steady(&self) -> Option<Region<'_>> {
        None
    }

    fn populate(&self, at: u64, len: u64) -> Result<(), Errno> {
        self.0.populate(at, len)
    }

    fn grain(&self) -> u64 {
        page_size()
    }

    fn pages(&self) -> (String, Option<String>) {
        ("4k".to_string(), None)
    }

    fn is_fresh(&self) -> bool {
        false
    }
}
