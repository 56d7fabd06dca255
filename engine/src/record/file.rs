//! One file of a recording: its records, and the index that makes them count.

use super::format::{AREA, Ends, Entry, Head, Header, room};
use crate::error::Result;
use crate::save::part::{Folder, Growing};
use crate::sync::lock;
use std::path::Path;
use std::sync::Mutex;

/// A file that is being written.
pub(super) struct Writing {
    pub(super) growing: Growing,
    header: Header,
    index: Mutex<Index>,
}

/// How far its index has come.
struct Index {
    /// The header, and the file's name, are on the disk.
    begun: bool,
    /// Where the next block goes, and how many more of its area follow.
    at: u64,
    left: u64,
    number: u64,
}

impl Writing {
    /// A new file, with space for its header and the first blocks of its index.
    pub(super) fn create(folder: &Folder, path: &Path, header: Header) -> Result<Self> {
        let growing = Growing::create(folder, path)?;
        let block = growing.grain();
        let header = Header {
            block,
            index: block,
            ..header
        };
        let file = Self {
            growing,
            header,
            index: Mutex::new(Index {
                begun: false,
                at: block,
                left: AREA - 1,
                number: 0,
            }),
        };
        if let Err(error) = file.growing.reserve_ahead(file.start()) {
            file.growing.remove(folder);
            return Err(error);
        }
        Ok(file)
    }

    /// Which file of the recording it is.
    pub(super) fn number(&self) -> u32 {
        self.header.file
    }

    /// Where the first record goes.
    pub(super) fn start(&self) -> u64 {
        (1 + AREA) * self.header.block
    }

    /// Bytes of the blocks that a record of this length takes.
    pub(super) fn blocks(&self, length: u64) -> u64 {
        length.next_multiple_of(self.header.block)
    }

    /// Writes the header, and makes the file's name last.
    pub(super) fn begin(&self, folder: &Folder) -> Result<()> {
        let mut index = lock(&self.index);
        if !index.begun {
            self.growing.write_block(0, &self.header.encode())?;
            self.growing.sync_with_name(folder)?;
            index.begun = true;
        }
        Ok(())
    }

    /// Makes records count that are written: first they get to the disk, then what names them.
    /// `set_aside` is asked for places for more blocks of the index.
    pub(super) fn settle(
        &self,
        entries: &[Entry],
        ends: Ends,
        set_aside: impl Fn(u64) -> Result<u64>,
    ) -> Result<()> {
        let room = room(self.header.block);
        let mut index = lock(&self.index);
        self.growing.sync()?;
        let mut left = entries;
        loop {
            let (now, later) = left.split_at(left.len().min(room));
            let is_last = later.is_empty();
            let ends = if is_last { ends } else { Ends::No };
            let next = match index.left {
                0 if ends == Ends::No => set_aside(AREA * self.header.block)?,
                _ => index.at + self.header.block,
            };
            let head = Head {
                number: index.number,
                next,
                ends,
            };
            let block = head.encode(&self.header, now);
            self.growing.write_block(index.at, &block)?;
            index.left = index.left.checked_sub(1).unwrap_or(AREA - 1);
            index.at = next;
            index.number += 1;
            if is_last {
                break;
            }
            left = later;
        }
        self.growing.sync()
    }
}
