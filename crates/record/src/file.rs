//! One file of a recording: its records, and the index that makes them valid.

use super::format::{AREA, BlockHeader, Ends, FileHeader, RecordEntry, room};
use dmafile::Result;
use dmafile::internal::{folder::Folder, part::AppendFile, sync::lock};
use std::path::Path;
use std::sync::Mutex;

/// A file that is being written.
pub(super) struct Writing {
    pub(super) growing: AppendFile,
    header: FileHeader,
    index: Mutex<IndexProgress>,
}

/// The progress of its index.
struct IndexProgress {
    /// True if the header and the file's name are on the disk.
    begun: bool,
    /// Offset of the next block, and how many more of its area follow.
    at: u64,
    left: u64,
    number: u64,
}

impl Writing {
    /// A new file, with space for its header and the first blocks of its index.
    pub(super) fn create(folder: &Folder, path: &Path, header: FileHeader) -> Result<Self> {
        let growing = AppendFile::create(folder, path)?;
        let block = growing.grain();
        let header = FileHeader {
            block,
            index: block,
            ..header
        };
        let file = Self {
            growing,
            header,
            index: Mutex::new(IndexProgress {
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

    /// Its number within the recording.
    pub(super) fn number(&self) -> u32 {
        self.header.file
    }

    /// Where the first record goes.
    pub(super) fn start(&self) -> u64 {
        (1 + AREA) * self.header.block
    }

    /// Bytes of the blocks that a record of this length occupies.
    pub(super) fn blocks(&self, length: u64) -> u64 {
        length.next_multiple_of(self.header.block)
    }

    /// Writes the header, and makes the file's name durable.
    pub(super) fn begin(&self, folder: &Folder) -> Result<()> {
        let mut index = lock(&self.index);
        if !index.begun {
            self.growing.write_block(0, &self.header.encode())?;
            self.growing.sync_with_name(folder)?;
            index.begun = true;
        }
        Ok(())
    }

    /// Makes written records valid: first syncs them to the disk, then the index entries that
    /// name them. `set_aside` reserves places for more blocks of the index.
    pub(super) fn settle(
        &self,
        entries: &[RecordEntry],
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
            let head = BlockHeader {
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
