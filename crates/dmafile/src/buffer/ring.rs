//! A ring of slots that a file passes through. To the methods that fill it, it looks as long as the file.

use super::anon::Anon;
use super::memory::{CopyOut, Filling};
use crate::error::Result;
use crate::options::Pages;
use crate::sys::Errno;
use crate::sys::map::Region;

pub(crate) struct RingBuffer {
    memory: Anon,
    /// Size of the ring; its memory may end with the page after that.
    bytes: u64,
    /// How many bytes pass through it, and the offset of the first one in its slot.
    len: u64,
    phase: u64,
}

impl RingBuffer {
    /// `bytes` bytes for `len` bytes that pass through: a multiple of the slot size, unless no slot is filled
    /// twice. A slot begins where `at + phase` is a multiple of the slot size.
    pub(super) fn new(bytes: u64, len: u64, phase: u64, pages: Pages) -> Result<Self> {
        let memory = Anon::sized(bytes, false, pages)?;
        Ok(Self {
            memory,
            bytes,
            len,
            phase,
        })
    }

    /// The memory of the ring itself: each byte occurs once.
    pub(crate) fn memory(&self) -> Region<'_> {
        self.memory.region().part(0, self.bytes)
    }
}

impl CopyOut for RingBuffer {
    fn copy_out(&self, at: u64, into: &mut [u8]) -> Result<(), Errno> {
        let left = (self.bytes - (at + self.phase) % self.bytes).min(into.len() as u64);
        let (first, rest) = into.split_at_mut(left as usize);
        self.region().copy_out(at, first);
        if !rest.is_empty() {
            self.region().copy_out(at + left, rest);
        }
        Ok(())
    }
}

impl Filling for RingBuffer {
    fn region(&self) -> Region<'_> {
        self.memory.ring(self.bytes, self.len, self.phase)
    }

    /// `at` is an offset in the memory of the ring itself, not in the bytes that pass through it.
    fn populate(&self, at: u64, len: u64) -> Result<(), Errno> {
        self.memory.populate(at, len)
    }

    fn grain(&self) -> u64 {
        self.memory.grain()
    }

    fn pages(&self) -> (String, Option<String>) {
        self.memory.pages()
    }
}
