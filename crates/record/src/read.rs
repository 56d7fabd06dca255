//! Reads a recording, complete or as a crash has left it.

use super::format::{BlockHeader, Ends, FileHeader, HEAD, RecordEntry};
use crate::name_of;
use dmafile::{Error, Result};
use dmafile_sys::{self, Errno, file};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

/// A record of a [`Recording`]. Sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Record {
    /// Its number, from 0.
    pub number: u64,
    /// Index of its file in [`Recording::files`].
    pub file: usize,
    /// Offset of its first byte in that file.
    pub offset: u64,
    /// Its length.
    pub length: u64,
    /// When it was captured, in nanoseconds of the recorder's clock.
    pub timestamp: i64,
    /// The tag that was appended with it.
    pub tag: u64,
    /// Total number of buffers dropped before it.
    pub dropped: u64,
    /// Its CRC-32C, if one was computed.
    pub checksum: Option<u32>,
}

/// A recording that is being read: its acknowledged records, in order. A recording that is still in
/// progress can be read up to where it was when it was opened.
#[derive(Debug)]
pub struct Recording {
    files: Vec<PathBuf>,
    open: Vec<OwnedFd>,
    records: Vec<Record>,
    complete: bool,
}

impl Recording {
    /// Reads the index of the recording that begins with this file. If it is a later file of a recording,
    /// only that file is read.
    ///
    /// # Errors
    /// EBADMSG for a file that is not a recording, and any error of open(2) and read(2).
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let mut recording = Self {
            files: Vec::new(),
            open: Vec::new(),
            records: Vec::new(),
            complete: false,
        };
        let fd = open(path)?;
        let first = header(&fd, path)?;
        let first = first.ok_or_else(|| {
            let error = Error::os("cannot read the recording", Errno::BADMSG);
            error
                .with_why("it does not begin with the header of a recording")
                .at(path.display().to_string())
        })?;
        let mut next = Some((path.to_path_buf(), fd, first));
        while let Some((path, fd, header)) = next {
            let (ends, number) = recording.add(path, fd, &header)?;
            recording.complete = ends == Ends::Recording;
            next = match ends {
                Ends::File if first.file == 0 => follower(recording.path(0), &header, number)?,
                _ => None,
            };
        }
        Ok(recording)
    }

    /// The files, in order.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// The records, in order.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// Returns `true` if the recording was finished and all of it is here. Otherwise a crash may have ended it,
    /// or it is still in progress.
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// The bytes of a record.
    ///
    /// # Errors
    /// EBADMSG if they do not match its checksum; EIO, ENOMEM.
    ///
    /// # Panics
    /// If the record belongs to another recording that has more files.
    pub fn read(&self, record: &Record) -> Result<Vec<u8>> {
        let cannot = |errno| self.cannot_read(record, errno);
        let mut bytes = Vec::new();
        let length = usize::try_from(record.length).map_err(|_| cannot(Errno::NOMEM))?;
        bytes
            .try_reserve_exact(length)
            .map_err(|_| cannot(Errno::NOMEM))?;
        bytes.resize(length, 0);
        self.read_into(record, &mut bytes)?;
        Ok(bytes)
    }

    /// As [`Recording::read`], into the caller's memory, which must be as long as the record.
    ///
    /// # Errors
    /// As [`Recording::read`]. After EBADMSG the bytes are in `memory`.
    ///
    /// # Panics
    /// As [`Recording::read`], and if the lengths differ.
    pub fn read_into(&self, record: &Record, memory: &mut [u8]) -> Result<()> {
        assert_eq!(memory.len() as u64, record.length, "room for the record");
        let fd = self.open[record.file].as_fd();
        let read = file::pread_all(fd, memory, record.offset);
        read.map_err(|errno| self.cannot_read(record, errno))?;
        match record.checksum {
            Some(sum) if sum != crc32c::crc32c(memory) => {
                let why = "its checksum differs: it is damaged";
                Err(self.cannot_read(record, Errno::BADMSG).with_why(why))
            }
            _ => Ok(()),
        }
    }

    fn cannot_read(&self, record: &Record, errno: Errno) -> Error {
        let path = self.path(record.file).display();
        let place = format!("{path} at byte {}", record.offset);
        Error::os("cannot read the record", errno).at(place)
    }

    fn path(&self, file: usize) -> &Path {
        &self.files[file]
    }

    /// Adds the records of a file; returns how it ends, and the number of the next record.
    fn add(&mut self, path: PathBuf, fd: OwnedFd, header: &FileHeader) -> Result<(Ends, u64)> {
        let cannot =
            |errno| Error::os("cannot read the recording", errno).at(path.display().to_string());
        let size = file::stat(fd.as_fd()).map_err(cannot)?.size;
        let mut block = vec![0; header.block as usize];
        let mut ends = Ends::No;
        let (mut at, mut number, mut expected) = (header.index, 0, header.first);
        let file = self.files.len();
        'blocks: while ends == Ends::No
            && at.checked_add(header.block).is_some_and(|end| end <= size)
        {
            file::pread_all(fd.as_fd(), &mut block, at).map_err(cannot)?;
            let Some((head, entries)) = BlockHeader::decode(&block, header, number) else {
                break;
            };
            for entry in entries {
                // If a record has been cut off, so has everything after it.
                let end = entry.offset.checked_add(entry.length);
                let is_whole = entry.number == expected && end.is_some_and(|end| end <= size);
                match expected.checked_add(1) {
                    Some(following) if is_whole => expected = following,
                    _ => break 'blocks,
                }
                self.records.push(record(&entry, file));
            }
            (at, number, ends) = (head.next, number + 1, head.ends);
        }
        self.files.push(path);
        self.open.push(fd);
        Ok((ends, expected))
    }
}

fn record(entry: &RecordEntry, file: usize) -> Record {
    Record {
        number: entry.number,
        file,
        offset: entry.offset,
        length: entry.length,
        timestamp: entry.timestamp,
        tag: entry.tag,
        dropped: entry.dropped,
        checksum: entry.checksum,
    }
}

fn open(path: &Path) -> Result<OwnedFd> {
    file::open(path, false)
        .map_err(|errno| Error::os("cannot open", errno).at(path.display().to_string()))
}

/// The header of a file; None if it has none.
fn header(fd: &OwnedFd, path: &Path) -> Result<Option<FileHeader>> {
    let mut bytes = [0; HEAD];
    match file::pread_all(fd.as_fd(), &mut bytes, 0) {
        Ok(()) => Ok(FileHeader::decode(&bytes)),
        // The file is shorter than a header. Errors of the disk are reported by the next read.
        Err(Errno::IO) if file::stat(fd.as_fd()).is_ok_and(|stat| stat.size < HEAD as u64) => {
            Ok(None)
        }
        Err(errno) => {
            let error = Error::os("cannot read the recording", errno);
            Err(error.at(path.display().to_string()))
        }
    }
}

/// The next file of the same recording, which begins with the record of this number, if there is one.
fn follower(
    first: &Path,
    before: &FileHeader,
    number: u64,
) -> Result<Option<(PathBuf, OwnedFd, FileHeader)>> {
    let path = name_of(first, before.file + 1);
    if !path.exists() {
        return Ok(None);
    }
    let fd = open(&path)?;
    let header = header(&fd, &path)?;
    let is_next = |header: &FileHeader| {
        header.recording == before.recording
            && header.file == before.file + 1
            && header.first == number
    };
    Ok(header.filter(is_next).map(|header| (path, fd, header)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = 512;

    /// A file of a recording with one block of records, which have no bytes.
    fn write(path: &Path, file: u32, first: u64, numbers: &[u64], ends: Ends) {
        let header = FileHeader {
            block: BLOCK as u64,
            recording: [7; 16],
            file,
            created: 0,
            first,
            index: BLOCK as u64,
        };
        let entry = |&number: &u64| RecordEntry {
            number,
            offset: 0,
            length: 0,
            timestamp: 0,
            tag: 0,
            dropped: 0,
            checksum: None,
        };
        let entries: Vec<_> = numbers.iter().map(entry).collect();
        let head = BlockHeader {
            number: 0,
            next: 2 * BLOCK as u64,
            ends,
        };
        let bytes = [header.encode(), head.encode(&header, &entries)].concat();
        std::fs::write(path, bytes).unwrap();
    }

    fn numbers(recording: &Recording) -> Vec<u64> {
        let records = recording.records().iter();
        records.map(|record| record.number).collect()
    }

    #[test]
    fn a_file_that_does_not_go_on_with_the_next_number_does_not_follow() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        write(&path, 0, 0, &[0, 1], Ends::File);
        for (first, files) in [(2, 2), (1, 1), (3, 1), (0, 1)] {
            write(&name_of(&path, 1), 1, first, &[first], Ends::Recording);
            let recording = Recording::open(&path).unwrap();
            assert_eq!(recording.files().len(), files, "{first}");
            assert_eq!(recording.is_complete(), files == 2, "{first}");
            assert_eq!(numbers(&recording), [0, 1, 2][..1 + files], "{first}");
        }
    }

    #[test]
    fn there_is_no_record_after_the_last_number() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let last = u64::MAX;
        write(&path, 1, last - 1, &[last - 1, last, 0], Ends::Recording);
        let recording = Recording::open(&path).unwrap();
        assert_eq!(numbers(&recording), [last - 1]);
        assert!(!recording.is_complete());
    }
}
