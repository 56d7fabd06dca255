//! What a load reads: one file, or the shards of one model, end to end.
//!
//! Several files share one space of offsets, each at a multiple of [`GRAIN`], so that what is aligned
//! in that space is aligned in its file, and a buffer whose first byte is offset 0 has each file as it
//! is. A single file begins at 0: the offsets are those of the file.

mod file;
mod sampled;

use crate::error::{Error, Result, Verb};
use crate::sys::block::BlockDevice;
use crate::sys::{Errno, host, place};
use file::Input;
pub(crate) use file::{file_system, in_memory};
pub(crate) use sampled::Sampled;
use serde::Serialize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Alignment of files: no direct I/O alignment and no base page is larger.
const GRAIN: u64 = 2 << 20;

/// A file of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Shard {
    /// Its path; in JSON, parts that are not UTF-8 are replaced.
    #[serde(serialize_with = "crate::error::lossy")]
    pub file: PathBuf,
    /// Offset of its first byte within the requested bytes of a buffer.
    pub at: u64,
    /// Its size in bytes.
    pub bytes: u64,
}

impl Shard {
    pub(crate) fn all(source: &Source) -> Vec<Self> {
        let files = source.files();
        files
            .map(|(file, at, bytes)| Self {
                file: file.to_path_buf(),
                at,
                bytes,
            })
            .collect()
    }

    /// The files of a source; none if there is only one.
    pub fn several(source: &Source) -> Vec<Self> {
        let mut all = Self::all(source);
        if all.len() == 1 {
            all.clear();
        }
        all
    }
}

/// Open files.
pub struct Source {
    path: PathBuf,
    parts: Vec<FilePart>,
}

/// A file and where it begins.
struct FilePart {
    file: Input,
    start: u64,
}

impl FilePart {
    fn end(&self) -> u64 {
        self.start + self.file.size()
    }
}

impl Source {
    /// Used in place of a file system's name.
    pub const BLOCK_DEVICE: &str = "block device";

    /// Opens one file.
    ///
    /// # Errors
    /// As [`Input::open`].
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_all(path, &[path.to_path_buf()])
    }

    /// A file that is open for reading, with `path` as its name in messages.
    ///
    /// # Errors
    /// As [`Input::open`].
    pub fn of(path: &Path, file: OwnedFd) -> Result<Self> {
        let link = place::link_of(file.as_fd());
        let file = Input::of(path, file, &link, &Ok(()))?;
        Ok(Self {
            path: path.to_path_buf(),
            parts: vec![FilePart { file, start: 0 }],
        })
    }

    /// Opens files, at least one, in this order; `path` is the name of all of them in messages.
    ///
    /// If two descriptors for each are too many for this process, none of them is read directly.
    pub fn open_all(path: &Path, files: &[PathBuf]) -> Result<Self> {
        let both = Self::room_for_both(files.len());
        Self::all(path, files.iter().map(|path| Input::open(path, &both)))
    }

    /// Checks that there is room for two descriptors of each file; the error says why not.
    fn room_for_both(files: usize) -> Result<(), String> {
        match files {
            1 => Ok(()),
            _ => host::room_for_files(2 * files as u64).map_err(|most| {
                format!(
                    "{files} files need two descriptors each for that, and this process may have {most} \
                     (RLIMIT_NOFILE)"
                )
            }),
        }
    }

    /// As [`Source::open_all`], for files that are open for reading.
    pub fn of_all(path: &Path, files: Vec<(PathBuf, OwnedFd)>) -> Result<Self> {
        let both = Self::room_for_both(files.len());
        let files = files.into_iter().map(|(path, file)| {
            let link = place::link_of(file.as_fd());
            Input::of(&path, file, &link, &both)
        });
        Self::all(path, files)
    }

    fn all(path: &Path, files: impl Iterator<Item = Result<Input>>) -> Result<Self> {
        let mut parts: Vec<FilePart> = Vec::new();
        for file in files {
            let file = file?;
            // A gap even if a file ends at such a multiple, so that no extent is in two files.
            let start = match parts.last() {
                None => Some(0),
                Some(last) => (last.end() + 1).checked_next_multiple_of(GRAIN),
            };
            let end = start.and_then(|start| start.checked_add(file.size()));
            let Some(start) = start.filter(|_| end.is_some_and(|end| end <= i64::MAX as u64))
            else {
                let place = file.path().display().to_string();
                return Err(Error::os(Verb::Load, Errno::OVERFLOW).at(place));
            };
            parts.push(FilePart { file, start });
        }
        Ok(Self {
            path: path.to_path_buf(),
            parts,
        })
    }

    /// The part of each file within `[start, end)`.
    pub fn within(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let clip = |part: &FilePart| (start.max(part.start), end.min(part.end()));
        let ranges = self.parts.iter().map(clip);
        ranges.filter(|range| range.0 < range.1).collect()
    }

    /// Its name in messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Each file: its path, its start, and its size when it was opened, which counts for the load.
    pub fn files(&self) -> impl ExactSizeIterator<Item = (&Path, u64, u64)> {
        let parts = self.parts.iter();
        parts.map(|part| (part.file.path(), part.start, part.file.size()))
    }

    /// The end of the last file.
    pub fn size(&self) -> u64 {
        self.last().end()
    }

    fn last(&self) -> &FilePart {
        self.parts.last().expect("there is at least one file")
    }

    /// The name of one file system, if there are several: FUSE and those that may be on top of it are
    /// preferred.
    pub fn file_system(&self) -> String {
        let names = self.parts.iter().map(|part| part.file.file_system());
        names
            .max_by_key(|name| (name == "fuse", name == "overlayfs", name.starts_with("0x")))
            .expect("there is at least one file")
    }

    /// The name of the file system of the file at an offset.
    pub fn file_system_at(&self, at: u64) -> String {
        self.part(at).0.file.file_system()
    }

    /// The block device that the file at an offset is or is stored on.
    pub fn device(&self, at: u64) -> Option<BlockDevice> {
        self.part(at).0.file.device()
    }

    /// Alignment of offsets, lengths and memory of direct reads, in bytes.
    pub fn align(&self) -> u64 {
        let aligns = self.parts.iter().map(|part| part.file.align());
        aligns.max().expect("there is at least one file")
    }

    /// Returns true if `statx` reported the alignment of all files.
    pub fn align_is_told(&self) -> bool {
        self.parts.iter().all(|part| part.file.align_is_told())
    }

    /// Returns true if all of it is in memory.
    pub fn in_memory(&self) -> bool {
        let mut parts = self.parts.iter();
        parts.all(|part| part.file.in_memory().is_some())
    }

    /// Returns true if reads can drop the pages that they bring into the page cache.
    pub fn drops_behind(&self) -> bool {
        self.parts.iter().all(|part| part.file.drops_behind())
    }

    /// Why some file cannot be read directly; None if all can.
    pub fn direct_refused(&self) -> Option<String> {
        if let [part] = &self.parts[..] {
            return part.file.direct().err().map(str::to_string);
        }
        for part in &self.parts {
            let path = part.file.path().display();
            match part.file.direct() {
                Err(why) => return Some(format!("{path}: {why}")),
                Ok(_) if part.file.align() > GRAIN => {
                    return Some(format!("{path}: its blocks are larger than 2 MiB"));
                }
                Ok(_) => {}
            }
        }
        None
    }

    /// The number of the file at an offset, and the offset in that file. A gap belongs to the file
    /// before it.
    pub fn locate(&self, at: u64) -> (usize, u64) {
        let number = self.parts.partition_point(|part| part.start <= at) - 1;
        (number, at - self.parts[number].start)
    }

    fn part(&self, at: u64) -> (&FilePart, u64) {
        let (number, offset) = self.locate(at);
        (&self.parts[number], offset)
    }

    /// The descriptor for reads at an offset, and the offset in its file.
    pub fn buffered(&self, at: u64) -> (BorrowedFd<'_>, u64) {
        let (part, offset) = self.part(at);
        (part.file.buffered(), offset)
    }

    /// As [`Source::buffered`], for direct reads; or why they are not possible.
    pub fn direct(&self, at: u64) -> Result<(BorrowedFd<'_>, u64), &str> {
        let (part, offset) = self.part(at);
        part.file.direct().map(|fd| (fd, offset))
    }

    /// One of these two.
    pub fn input(&self, direct: bool, at: u64) -> Result<(BorrowedFd<'_>, u64), &str> {
        if direct {
            self.direct(at)
        } else {
            Ok(self.buffered(at))
        }
    }

    /// The size, when it was opened, of the file at an offset.
    pub fn size_at(&self, at: u64) -> u64 {
        self.part(at).0.file.size()
    }

    /// The current size of the file at an offset.
    pub fn size_now(&self, at: u64) -> Result<u64> {
        self.part(at).0.file.size_now()
    }

    /// The current end of a file that has been truncated before the end of one of these ranges, which
    /// ascend.
    pub fn missing(&self, ranges: &[(u64, u64)]) -> Result<Option<u64>> {
        for part in &self.parts {
            let last = ranges.partition_point(|range| range.0 < part.end());
            let Some(range) = last.checked_sub(1).map(|last| ranges[last]) else {
                continue;
            };
            let wanted = range.1.min(part.end());
            if wanted > part.start {
                let now = part.start + part.file.size_now()?;
                if now < wanted {
                    return Ok(Some(now));
                }
            }
        }
        Ok(None)
    }

    /// All of it, for error messages.
    pub fn whole(&self) -> String {
        self.path.display().to_string()
    }

    /// `path` or `path at byte N` for the file at an offset, for error messages.
    pub fn place(&self, at: u64) -> String {
        let (part, offset) = self.part(at);
        part.file.place(offset)
    }

    /// The ranges of `[start, end)` that have data; the others are holes and need not be read. Holes
    /// shorter than `small` count as data.
    pub fn data(&self, start: u64, end: u64, small: u64) -> Vec<(u64, u64)> {
        let mut list = Vec::new();
        for part in &self.parts {
            let (from, to) = (start.max(part.start), end.min(part.end()));
            if from < to {
                let own = part.file.data(from - part.start, to - part.start, small);
                list.extend(
                    own.iter()
                        .map(|run| (run.0 + part.start, run.1 + part.start)),
                );
            }
        }
        list
    }

    /// Bytes of `[start, end)` of one file in the page cache, in whole pages; EPERM if the kernel does
    /// not allow the query, ENOSYS if it does not support it.
    pub fn resident(&self, start: u64, end: u64) -> Result<u64, Errno> {
        let (part, offset) = self.part(start);
        part.file.resident(offset, offset + (end - start))
    }

    /// Returns true if the page cache holds two bytes of one file; see [`Input::peek`].
    pub fn peek(&self, first: u64, second: u64) -> bool {
        let (part, offset) = self.part(first);
        part.file.peek([offset, second - part.start])
    }

    /// Drops the pages that misses of [`Source::peek`] have brought into the page cache.
    pub fn forget_misses(&self) {
        self.parts.iter().for_each(|part| part.file.forget_misses());
    }

    /// Returns true if there are any.
    pub fn has_misses(&self) -> bool {
        self.parts.iter().any(|part| part.file.has_misses())
    }

    /// Prevents misses of [`Source::peek`] from reading ahead.
    pub fn no_readahead(&self) {
        self.parts.iter().for_each(|part| part.file.no_readahead());
    }
}

/// A folder on a disk for the files of a test: next to the build, or where DMAFILE_TEST_DIR says, on
/// machines that cannot write there.
#[cfg(test)]
pub fn folder_on_disk() -> tempfile::TempDir {
    let target = std::env::var("DMAFILE_TEST_DIR")
        .unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/../../target").to_string());
    std::fs::create_dir_all(&target).unwrap();
    tempfile::tempdir_in(target).unwrap()
}
