//! The on-disk format of a recording (docs/recording.md): a header, records, and blocks of an index, each
//! of which contains the offset of the next one. Numbers are little-endian.

/// Number of index blocks that are reserved together, so that most are adjacent.
pub(super) const AREA: u64 = 64;
/// Bytes of a header, of the head of an index block, and of an entry.
pub(super) const HEAD: usize = 64;

const FILE_MAGIC: [u8; 8] = *b"DMAFREC1";
const INDEX_MAGIC: [u8; 8] = *b"DMAFIDX1";
const VERSION: u32 = 1;
/// Valid block sizes, in bytes.
const BLOCKS: std::ops::RangeInclusive<u64> = 512..=1 << 20;

/// The file ends here.
const END: u32 = 1;
/// Another file follows.
const MORE: u32 = 2;
/// The record has a checksum.
const SUMMED: u32 = 1;

/// The start of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileHeader {
    /// Everything begins at a multiple of this, in bytes.
    pub(super) block: u64,
    /// The same in all files of a recording, and different in every other recording.
    pub(super) recording: [u8; 16],
    /// Number of the file within the recording, from 0.
    pub(super) file: u32,
    /// When it was created, in nanoseconds since 1970.
    pub(super) created: i64,
    /// The number of its first record.
    pub(super) first: u64,
    /// Offset of the first block of its index.
    pub(super) index: u64,
}

/// The head of a block of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockHeader {
    /// Number of the block within the index, from 0.
    pub(super) number: u64,
    /// Offset of the next one, which may not exist yet.
    pub(super) next: u64,
    pub(super) ends: Ends,
}

/// Whether a block is the last of its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ends {
    No,
    /// And another file follows.
    File,
    Recording,
}

/// One record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RecordEntry {
    pub(super) number: u64,
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) timestamp: i64,
    pub(super) tag: u64,
    /// Total number of buffers dropped before it.
    pub(super) dropped: u64,
    pub(super) checksum: Option<u32>,
}

/// Number of entries that fit into an index block.
pub(super) fn room(block: u64) -> usize {
    block as usize / HEAD - 1
}

impl FileHeader {
    /// The block that a file begins with.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.block as usize);
        bytes.extend(FILE_MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((self.block as u32).to_le_bytes());
        bytes.extend(self.recording);
        bytes.extend(self.file.to_le_bytes());
        bytes.extend(0_u32.to_le_bytes());
        bytes.extend(self.created.to_le_bytes());
        bytes.extend(self.first.to_le_bytes());
        bytes.extend((self.index as u32).to_le_bytes());
        bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
        debug_assert_eq!(bytes.len(), HEAD);
        bytes.resize(self.block as usize, 0);
        bytes
    }

    /// Parses the first [`HEAD`] bytes of a file; None if they are not a header.
    pub(super) fn decode(bytes: &[u8; HEAD]) -> Option<Self> {
        let mut fields = Fields(bytes);
        let is_one = fields.take() == FILE_MAGIC && u32::from_le_bytes(fields.take()) == VERSION;
        let block = u32::from_le_bytes(fields.take()).into();
        let recording = fields.take();
        let file = u32::from_le_bytes(fields.take());
        let _: [u8; 4] = fields.take();
        let header = Self {
            block,
            recording,
            file,
            created: i64::from_le_bytes(fields.take()),
            first: u64::from_le_bytes(fields.take()),
            index: u32::from_le_bytes(fields.take()).into(),
        };
        let sum = u32::from_le_bytes(fields.take());
        let is_whole = sum == crc32c::crc32c(&bytes[..HEAD - 4]);
        let is_sound = block.is_power_of_two()
            && BLOCKS.contains(&block)
            && header.index >= block
            && header.index.is_multiple_of(block);
        (is_one && is_whole && is_sound).then_some(header)
    }
}

impl BlockHeader {
    /// An index block with these entries, at most [`room`] of them.
    pub(super) fn encode(&self, of: &FileHeader, entries: &[RecordEntry]) -> Vec<u8> {
        let flags = match self.ends {
            Ends::No => 0,
            Ends::File => END | MORE,
            Ends::Recording => END,
        };
        let mut bytes = Vec::with_capacity(of.block as usize);
        bytes.extend(INDEX_MAGIC);
        bytes.extend(of.recording);
        bytes.extend(of.file.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(self.number.to_le_bytes());
        bytes.extend(self.next.to_le_bytes());
        bytes.extend((entries.len() as u32).to_le_bytes());
        bytes.extend([0; 12]);
        debug_assert_eq!(bytes.len(), HEAD);
        for entry in entries {
            entry.encode(&mut bytes);
        }
        bytes.resize(of.block as usize, 0);
        let sum = crc32c::crc32c(&bytes);
        bytes[HEAD - 4..HEAD].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Parses an index block; None if it is invalid, or does not have this number.
    pub(super) fn decode(
        bytes: &[u8],
        of: &FileHeader,
        number: u64,
    ) -> Option<(Self, Vec<RecordEntry>)> {
        let (head, body) = bytes.split_first_chunk::<HEAD>()?;
        let mut fields = Fields(head);
        let is_one = fields.take() == INDEX_MAGIC
            && fields.take() == of.recording
            && u32::from_le_bytes(fields.take()) == of.file;
        let flags = u32::from_le_bytes(fields.take());
        let head = Self {
            number: u64::from_le_bytes(fields.take()),
            next: u64::from_le_bytes(fields.take()),
            ends: match (flags & END != 0, flags & MORE != 0) {
                (false, _) => Ends::No,
                (true, true) => Ends::File,
                (true, false) => Ends::Recording,
            },
        };
        let count = u32::from_le_bytes(fields.take()) as usize;
        let _: [u8; 8] = fields.take();
        let sum = u32::from_le_bytes(fields.take());
        let mut unsigned = crc32c::crc32c(&bytes[..HEAD - 4]);
        unsigned = crc32c::crc32c_append(unsigned, &[0; 4]);
        unsigned = crc32c::crc32c_append(unsigned, body);
        let is_sound = head.number == number && count <= room(of.block) && sum == unsigned;
        let entries = body.chunks_exact(HEAD).take(count);
        (is_one && is_sound).then(|| (head, entries.map(RecordEntry::decode).collect()))
    }
}

impl RecordEntry {
    fn encode(&self, into: &mut Vec<u8>) {
        into.extend(self.number.to_le_bytes());
        into.extend(self.offset.to_le_bytes());
        into.extend(self.length.to_le_bytes());
        into.extend(self.timestamp.to_le_bytes());
        into.extend(self.tag.to_le_bytes());
        into.extend(self.dropped.to_le_bytes());
        into.extend(self.checksum.unwrap_or(0).to_le_bytes());
        into.extend(self.checksum.map_or(0, |_| SUMMED).to_le_bytes());
        into.extend([0; 8]);
    }

    fn decode(bytes: &[u8]) -> Self {
        let mut fields = Fields(bytes);
        let mut number = || u64::from_le_bytes(fields.take());
        let (number, offset, length) = (number(), number(), number());
        let timestamp = i64::from_le_bytes(fields.take());
        let tag = u64::from_le_bytes(fields.take());
        let dropped = u64::from_le_bytes(fields.take());
        let sum = u32::from_le_bytes(fields.take());
        let flags = u32::from_le_bytes(fields.take());
        Self {
            number,
            offset,
            length,
            timestamp,
            tag,
            dropped,
            checksum: (flags & SUMMED != 0).then_some(sum),
        }
    }
}

/// Takes fields off the front of `bytes`, whose length is known to suffice.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (field, rest) = self
            .0
            .split_first_chunk()
            .expect("the format has this field");
        self.0 = rest;
        *field
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: FileHeader = FileHeader {
        block: 4096,
        recording: [7; 16],
        file: 3,
        created: -5,
        first: 1 << 40,
        index: 8192,
    };

    fn entries(count: u64) -> Vec<RecordEntry> {
        let entry = |number| RecordEntry {
            number,
            offset: number << 12,
            length: 100 * number,
            timestamp: -(number as i64),
            tag: u64::MAX - number,
            dropped: number / 2,
            checksum: number.is_multiple_of(2).then_some(number as u32),
        };
        (0..count).map(entry).collect()
    }

    #[test]
    fn a_header_is_decoded_only_if_no_byte_has_changed() {
        let bytes = HEADER.encode();
        assert_eq!(bytes.len(), 4096);
        let head: [u8; HEAD] = bytes[..HEAD].try_into().unwrap();
        assert_eq!(FileHeader::decode(&head), Some(HEADER));
        for at in 0..HEAD {
            let mut bad = head;
            bad[at] ^= 1;
            assert_eq!(FileHeader::decode(&bad), None, "byte {at}");
        }
    }

    #[test]
    fn an_index_block_is_decoded_only_if_no_byte_has_changed() {
        let head = BlockHeader {
            number: 9,
            next: 1 << 33,
            ends: Ends::File,
        };
        let full = entries(room(4096) as u64);
        let bytes = head.encode(&HEADER, &full);
        assert_eq!(bytes.len(), 4096);
        assert_eq!(BlockHeader::decode(&bytes, &HEADER, 9), Some((head, full)));
        assert_eq!(BlockHeader::decode(&bytes, &HEADER, 8), None);
        let other = FileHeader { file: 4, ..HEADER };
        assert_eq!(BlockHeader::decode(&bytes, &other, 9), None);
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 1;
            assert_eq!(BlockHeader::decode(&bad, &HEADER, 9), None, "byte {at}");
        }
    }
}
