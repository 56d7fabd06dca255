//! Reads what is saved part by part, for what is saved to somewhere else than a file.

use super::origin::{Block, Opened, Origin, OriginKind};
use crate::control::CancelToken;
use crate::error::Result;
use crate::sys::map::Region;

/// What is saved, opened once.
pub struct OriginReader {
    name: String,
    opened: Opened<'static>,
}

impl OriginReader {
    /// Opens it; `length` bytes of it, if that is given.
    pub fn open(origin: &Origin<'static>, length: Option<u64>) -> Result<Self> {
        Ok(Self {
            name: origin.to_string(),
            opened: Opened::open(origin, length)?,
        })
    }

    /// Its name, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it is.
    pub fn kind(&self) -> OriginKind {
        self.opened.kind
    }

    /// Size of its largest pages in bytes, if it is memory.
    pub fn page(&self) -> Option<u64> {
        self.opened.memory().map(|memory| memory.page)
    }

    /// Its size in bytes; None if only its end tells.
    pub fn bytes(&self) -> Option<u64> {
        self.opened.bytes
    }

    /// Copies bytes from `at` on, and returns how many: fewer than there is room for only at its end. Of a pipe, these
    /// are the next ones. Waits for devices that are still writing to the memory.
    pub fn read(&self, at: u64, into: &mut [u8], cancel: &CancelToken) -> Result<usize> {
        let room = into.len() as u64;
        if self.opened.is_stream() {
            let region = Region::of_slice(into);
            let block = Block {
                ring: &region,
                at: 0,
                room,
            };
            return Ok(self.opened.fill(&block, at, room, cancel)? as usize);
        }
        let length = room.min(self.bytes().unwrap_or(0).saturating_sub(at)) as usize;
        let access = self.opened.begin(cancel)?;
        let copied = self
            .opened
            .copy_out(self.opened.start + at, &mut into[..length]);
        drop(access);
        copied.map(|()| length)
    }

    /// Checks, after the last byte, that there were as many as expected.
    pub fn finish(&self) -> Result<()> {
        let short = self.opened.missing();
        let short = short.or_else(|| self.opened.cut_short(self.opened.start));
        short.map_or(Ok(()), Err)
    }
}
