//! `anon`: private memory of this process.

use super::cannot_map;
use super::memory::{CopyOut, Filled, Filling, Finish};
use super::pages::Tactic;
use crate::error::Result;
use crate::options::Pages;
use crate::plan::Plan;
use crate::sys::Errno;
use crate::sys::map::{Mapping, Region, View};

/// While it is being filled.
pub(super) struct Anon {
    map: Mapping,
    tactic: Tactic,
}

impl Anon {
    pub(super) fn new(plan: &Plan, pages: Pages) -> Result<Self> {
        // It has holes, or tensors that were not selected.
        let sparse = plan.to_read + plan.to_copy < plan.bytes;
        Self::sized(plan.place.writable_to, sparse, pages)
    }

    /// `capacity` bytes, of which some will not be touched if it is `sparse`.
    pub(super) fn sized(capacity: u64, sparse: bool, pages: Pages) -> Result<Self> {
        let tactic = Tactic::new(pages, false);
        let grain = tactic.grain();
        let map = if pages == Pages::Huge {
            Mapping::anon_huge(capacity.next_multiple_of(grain) as usize)
        } else if sparse {
            Mapping::anon_sparse(capacity as usize, grain as usize)
        } else {
            Mapping::anon(capacity as usize, grain as usize)
        };
        let map = map.map_err(|errno| cannot_map(errno, pages))?;
        tactic.advise(&map.region());
        // Before Linux 6.5 a fork could separate a page from the direct read that fills it: the
        // read would end up in the child's copy (see O_DIRECT in open(2)).
        map.region().leave_out_of_forks(true);
        Ok(Self { map, tactic })
    }

    /// The first `bytes` bytes as a ring for `len` bytes; the first one is at offset `phase`.
    pub(super) fn ring(&self, bytes: u64, len: u64, phase: u64) -> Region<'_> {
        self.map.ring(bytes, len, phase)
    }
}

impl CopyOut for Anon {
    fn copy_out(&self, at: u64, into: &mut [u8]) -> Result<(), Errno> {
        self.map.region().copy_out(at, into);
        Ok(())
    }
}

impl Filling for Anon {
    fn region(&self) -> Region<'_> {
        self.map.region()
    }

    fn populate(&self, at: u64, len: u64) -> Result<(), Errno> {
        self.tactic.populate(&self.map.region(), at, len)
    }

    fn grain(&self) -> u64 {
        self.tactic.grain()
    }

    fn pages(&self) -> (String, Option<String>) {
        self.tactic.got(&self.map.region())
    }
}

impl Finish for Anon {
    fn finish(self: Box<Self>) -> Result<Box<dyn Filled>, Errno> {
        Ok(Box::new(Private::new(self.map.into_view())))
    }
}

/// Filled.
pub(super) struct Private {
    view: View,
    /// It is copy-on-write: each page is shared with another buffer until it is written to.
    copied: bool,
}

impl Private {
    fn new(view: View) -> Self {
        let copied = false;
        Self { view, copied }
    }

    /// Copy-on-write memory: each page is shared with another buffer until it is written to.
    pub(super) fn copied(view: View) -> Self {
        let copied = true;
        Self { view, copied }
    }
}

impl CopyOut for Private {
    fn copy_out(&self, at: u64, into: &mut [u8]) -> Result<(), Errno> {
        self.view.copy_out(at, into);
        Ok(())
    }
}

impl Filled for Private {
    fn enter_forks(&self) {
        self.view.enter_forks();
    }

    fn can_pin(&self) -> Result<bool, &'static str> {
        if self.copied {
            Err("copy-on-write memory cannot be pinned: pin the original")
        } else {
            Ok(true)
        }
    }

    fn address(&self) -> Option<*const u8> {
        Some(self.view.start())
    }

    fn copy_in(&mut self, at: u64, from: &[u8]) -> Result<(), Errno> {
        self.view.copy_in(at, from)
    }

    fn bytes(&self) -> Option<&[u8]> {
        self.view.bytes()
    }

    fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        self.view.bytes_mut()
    }

    fn into_view(self: Box<Self>) -> Option<View> {
        Some(self.view)
    }
}
