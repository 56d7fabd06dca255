//! Recordings are read as docs/recording.md says, or refused.
#![no_main]

use dmafile_record::{Record, Recording};
use libfuzzer_sys::fuzz_target;
use rustix::fs::MemfdFlags;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, symlink};
use std::path::PathBuf;
use std::sync::LazyLock;

const BADMSG: i32 = rustix::io::Errno::BADMSG.raw_os_error();
const FILE: &[u8] = b"DMAFREC1";
const INDEX: &[u8] = b"DMAFIDX1";
/// Maximum number of files, and of bytes of a record that is read.
const MOST: usize = 4;
const LONGEST: u64 = 1 << 16;

/// Memory in the place of files, which would be slower; a file of the recording without bytes is as good as none.
static FILES: LazyLock<(PathBuf, Vec<File>)> = LazyLock::new(|| {
    let name = format!("dmafile-fuzz-recording-{}", std::process::id());
    let first = std::env::temp_dir().join(name);
    let memory = |file| {
        let fd = rustix::fs::memfd_create("recording", MemfdFlags::CLOEXEC).expect("memory");
        let link = match file {
            0 => first.clone(),
            file => first.with_extension(file.to_string()),
        };
        symlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), link).expect("a temporary folder");
        File::from(fd)
    };
    let files = (0..=MOST).map(memory).collect();
    (first, files)
});

fuzz_target!(|input: &[u8]| {
    check(vec![Part::new(input)]);
    // Each further header begins the next file.
    let starts = (1..input.len()).filter(|&at| input[at..].starts_with(FILE));
    let mut parts = Vec::new();
    let mut begin = 0;
    for end in starts.take(MOST - 1).chain([input.len()]) {
        parts.push(Part::new(&input[begin..end]).summed());
        begin = end;
    }
    check(parts);
});

/// A file of a recording: bytes, and after them a hole.
struct Part {
    bytes: Vec<u8>,
    size: u64,
}

impl Part {
    fn new(bytes: &[u8]) -> Self {
        Self {
            bytes: bytes.to_vec(),
            size: bytes.len() as u64,
        }
    }

    /// With sums that are right: no mutation makes them so. Four bytes of the header that have no meaning say
    /// how large the hole is.
    fn summed(mut self) -> Self {
        let bytes = &mut self.bytes;
        if bytes.len() < 64 {
            return self;
        }
        let sum = crc32c::crc32c(&bytes[..60]);
        bytes[60..64].copy_from_slice(&sum.to_le_bytes());
        let block = number(bytes, 12, 4).clamp(64, 1 << 20) as usize;
        self.size += number(bytes, 36, 4) << 12;
        for at in 64..bytes.len() {
            if !bytes[at..].starts_with(INDEX) {
                continue;
            }
            let end = (at + block).min(bytes.len());
            if end - at < 64 {
                break;
            }
            bytes[at + 60..at + 64].fill(0);
            let hole = vec![0; at + block - end];
            let sum = crc32c::crc32c_append(crc32c::crc32c(&bytes[at..end]), &hole);
            bytes[at + 60..at + 64].copy_from_slice(&sum.to_le_bytes());
        }
        self
    }

    fn write(&self, file: &File) {
        file.set_len(0).expect("memory");
        file.write_all_at(&self.bytes, 0).expect("memory");
        file.set_len(self.size).expect("a hole needs none");
    }

    /// The bytes in a range that is inside the file.
    fn read(&self, offset: u64, length: u64) -> Vec<u8> {
        let from = usize::try_from(offset).map_or(self.bytes.len(), |at| at.min(self.bytes.len()));
        let mut read = self.bytes[from..].to_vec();
        read.resize(length as usize, 0);
        read
    }

    fn has(&self, offset: u64, length: u64) -> bool {
        u128::from(offset) + u128::from(length) <= self.size.into()
    }
}

fn number(bytes: &[u8], at: usize, size: usize) -> u64 {
    let mut number = [0; 8];
    number[..size].copy_from_slice(&bytes[at..at + size]);
    u64::from_le_bytes(number)
}

fn check(parts: Vec<Part>) {
    let (first, files) = &*FILES;
    for (file, part) in files.iter().zip(&parts) {
        part.write(file);
    }
    files[parts.len()].set_len(0).expect("memory");
    let opened = Recording::open(first);
    let expected = Expected::of(&parts);
    let (recording, expected) = match (opened, expected) {
        (Ok(recording), Some(expected)) => (recording, expected),
        (Err(error), None) => {
            assert_eq!(error.raw_os_error(), Some(BADMSG), "{error}");
            return;
        }
        (opened, _) => panic!("{opened:?}"),
    };
    assert_eq!(recording.files().len(), expected.files);
    assert_eq!(recording.is_complete(), expected.complete);
    assert_eq!(recording.records().len(), expected.records.len());
    let mut before = None;
    for (record, (file, entry)) in recording.records().iter().zip(&expected.records) {
        let Record {
            number: own,
            file: index,
            offset,
            length,
            timestamp,
            tag,
            dropped,
            checksum,
            ..
        } = *record;
        let field = |at| number(entry, at, 8);
        assert_eq!(
            (index, own, offset, length),
            (*file, field(0), field(8), field(16))
        );
        assert_eq!(
            (timestamp as u64, tag, dropped),
            (field(24), field(32), field(40))
        );
        let sum = (number(entry, 52, 4) & 1 == 1).then(|| number(entry, 48, 4) as u32);
        assert_eq!(checksum, sum);
        assert!(before.is_none_or(|before| before + 1 == own));
        before = Some(own);
        let part = &parts[*file];
        assert!(part.has(offset, length));
        if length > LONGEST {
            continue;
        }
        let bytes = part.read(offset, length);
        let is_whole = checksum.is_none_or(|sum| sum == crc32c::crc32c(&bytes));
        match recording.read(record) {
            Ok(read) => assert!(read == bytes && is_whole),
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(BADMSG), "{error}");
                assert!(!is_whole);
            }
        }
    }
}

/// What is in a recording, by its documentation.
struct Expected {
    files: usize,
    complete: bool,
    /// The file of each, and its entry.
    records: Vec<(usize, Vec<u8>)>,
}

impl Expected {
    /// None if it does not begin with a header.
    fn of(parts: &[Part]) -> Option<Self> {
        let mut found = Self {
            files: 0,
            complete: false,
            records: Vec::new(),
        };
        let first = header(parts.first()?)?;
        let mut next = number(&first, 48, 8);
        for (file, part) in parts.iter().enumerate() {
            let Some(header) = header(part) else { break };
            let follows = header[16..32] == first[16..32]
                && number(&header, 32, 4) == number(&first, 32, 4) + file as u64
                && number(&header, 48, 8) == next;
            if file > 0 && !follows {
                break;
            }
            found.files += 1;
            let flags = found.add(file, part, &header, &mut next);
            found.complete = flags & 3 == 1;
            if flags & 3 != 3 || number(&first, 32, 4) != 0 {
                break;
            }
        }
        Some(found)
    }

    /// Follows the index of a file; returns the flags of the last valid block.
    fn add(&mut self, file: usize, part: &Part, header: &[u8], next: &mut u64) -> u64 {
        let block = number(header, 12, 4);
        let (mut at, mut index, mut flags) = (number(header, 56, 4), 0, 0);
        while flags & 1 == 0 && part.has(at, block) {
            let mut bytes = part.read(at, block);
            let sum = number(&bytes, 60, 4);
            bytes[60..64].fill(0);
            let count = number(&bytes, 48, 4);
            if !bytes.starts_with(INDEX)
                || bytes[8..24] != header[16..32]
                || bytes[24..28] != header[32..36]
                || number(&bytes, 32, 8) != index
                || u64::from(crc32c::crc32c(&bytes)) != sum
                || count >= block / 64
            {
                return 0;
            }
            for entry in bytes[64..].chunks(64).take(count as usize) {
                if number(entry, 0, 8) != *next
                    || !part.has(number(entry, 8, 8), number(entry, 16, 8))
                {
                    return 0;
                }
                self.records.push((file, entry.to_vec()));
                match next.checked_add(1) {
                    Some(more) => *next = more,
                    // There is no such number.
                    None => return 0,
                }
            }
            (at, index, flags) = (number(&bytes, 40, 8), index + 1, number(&bytes, 28, 4));
        }
        flags
    }
}

/// The first bytes of a file, if they are a header.
fn header(part: &Part) -> Option<Vec<u8>> {
    let bytes = part.has(0, 64).then(|| part.read(0, 64))?[..64].to_vec();
    let (block, index) = (number(&bytes, 12, 4), number(&bytes, 56, 4));
    let is_one = bytes.starts_with(FILE)
        && number(&bytes, 8, 4) == 1
        && number(&bytes, 60, 4) == u64::from(crc32c::crc32c(&bytes[..60]))
        && block.is_power_of_two()
        && (512..=1 << 20).contains(&block)
        && index >= block
        && index.is_multiple_of(block);
    is_one.then_some(bytes)
}
