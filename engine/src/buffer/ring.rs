//! A ring of slots in huge pages, which a file goes through: as long as the file for those that fill it,
//! and no larger than its slots.

use super::cannot_map;
use super::memory::{CopyOut, Filling};
use super::pages::Tactic;
use crate::error::Result;
use crate::options::Pages;
use crate::sys::Errno;
use crate::sys::map::{Mapping, Region, page_size};

pub(crate) struct Ring {
    map: Mapping,
    tactic: Tactic,
    /// Bytes that go through it, and where the first of them lies.
    len: u64,
    phase: u64,
}

impl Ring {
    /// `bytes`, whole slots, for `len` that go through. A slot begins wherever `at + phase` is a
    /// multiple of its size.
    pub(crate) fn new(bytes: u64, len: u64, phase: u64, pages: Pages) -> Result<Self> {
        let tactic = Tactic::new(pages, false);
        let align = tactic.grain().max(page_size());
        let map = match pages {
            Pages::Huge => Mapping::anon_huge(bytes.next_multiple_of(align) as usize),
            _ => Mapping::anon(bytes as usize, align as usize),
        };
        let map = map.map_err(|errno| cannot_map(errno, pages).at(format!("{bytes} bytes")))?;
        tactic.advise(&map.region());
        // Before Linux 6.5 a fork could part a page from the read that fills it; and a child has no
        // business in memory that a device reads.
        map.region().leave_out_of_forks(true);
        Ok(Self {
            map,
            tactic,
            len,
            phase,
        })
    }

    /// All of its memory, once.
    pub(crate) fn memory(&self) -> Region<'_> {
        self.map.region()
    }
}

impl CopyOut for Ring {
    fn copy_out(&self, at: u64, into: &mut [u8]) -> Result<(), Errno> {
        let size = self.map.region().len();
        let left = (size - (at + self.phase) % size).min(into.len() as u64);
        let (first, rest) = into.split_at_mut(left as usize);
        self.region().copy_out(at, first);
        if !rest.is_empty() {
            self.region().copy_out(at + left, rest);
        }
        Ok(())
    }
}

impl Filling for Ring {
    fn region(&self) -> Region<'_> {
        self.map.ring(self.len, self.phase)
    }

    /// Of its memory, not of what goes through.
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
