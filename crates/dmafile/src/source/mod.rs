//! What a load reads: one file, or the shards of one model, end to end.
//!
//! Several files share one space of offsets, each at a multiple of [`GRAIN`], so that what is aligned
//! in that space is aligned in its file, and a buffer whose first byte is offset 0 has each file as it
//! is. A single file begins at 0: the offsets are those of the file.

mod file;
mod object;
mod sampled;

use crate::error::{Error, Result, Verb};
use crate::sys::block::BlockDevice;
use crate::sys::{Errno, host, place};
use file::FileInput;
pub(crate) use file::{file_system, in_memory};
use object::ObjectInput;
pub(crate) use object::{MayFault, failed, too_short};
pub use object::{
    ObjectReader, ReadBuf, RemoteObject, Traffic, URL_SCHEMES, is_url, without_secrets,
};
pub(crate) use sampled::Sampled;
use serde::Serialize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

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

/// What is open for reading: files, or objects.
pub struct Source {
    path: PathBuf,
    parts: Vec<SourcePart>,
}

/// One of these.
enum Input {
    File(FileInput),
    Object(ObjectInput),
}

impl Input {
    fn path(&self) -> &Path {
        match self {
            Self::File(file) => file.path(),
            Self::Object(object) => &object.path,
        }
    }

    /// When it was opened, which counts for the load.
    fn size(&self) -> u64 {
        match self {
            Self::File(file) => file.size(),
            Self::Object(object) => object.size,
        }
    }

    fn size_now(&self) -> Result<u64> {
        match self {
            Self::File(file) => file.size_now(),
            // It does not change.
            Self::Object(object) => Ok(object.size),
        }
    }

    fn stored_in(&self) -> String {
        match self {
            Self::File(file) => file.file_system(),
            Self::Object(object) => object.object.store(),
        }
    }

    fn file(&self) -> Result<&FileInput, &'static str> {
        match self {
            Self::File(file) => Ok(file),
            Self::Object(_) => Err(NO_FILE),
        }
    }

    fn direct(&self) -> Result<BorrowedFd<'_>, &str> {
        self.file()?.direct()
    }

    fn align(&self) -> u64 {
        self.file().map_or(1, FileInput::align)
    }
}

const NO_FILE: &str = "it is an object, not a file";

/// `path` or `path at byte N`, for error messages.
fn place(path: &Path, offset: u64) -> String {
    match offset {
        0 => path.display().to_string(),
        _ => format!("{} at byte {offset}", path.display()),
    }
}

/// A file or an object, and where it begins.
struct SourcePart {
    input: Input,
    start: u64,
}

impl SourcePart {
    fn end(&self) -> u64 {
        self.start + self.input.size()
    }
}

impl Source {
    /// Used in place of a file system's name.
    pub const BLOCK_DEVICE: &str = "block device";

    /// Opens one file.
    ///
    /// # Errors
    /// As [`FileInput::open`].
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_all(path, &[path.to_path_buf()])
    }

    /// A file that is open for reading, with `path` as its name in messages.
    ///
    /// # Errors
    /// As [`FileInput::open`].
    pub fn of(path: &Path, file: OwnedFd) -> Result<Self> {
        let link = place::link_of(file.as_fd());
        let input = Input::File(FileInput::of(path, file, &link, &Ok(()))?);
        Ok(Self {
            path: path.to_path_buf(),
            parts: vec![SourcePart { input, start: 0 }],
        })
    }

    /// Objects, at least one, in this order; `path` is the name of all of them in messages.
    ///
    /// # Errors
    /// ENODATA for one that is empty.
    pub fn of_objects(path: &Path, objects: Vec<Arc<dyn RemoteObject>>) -> Result<Self> {
        let inputs = objects.into_iter().map(ObjectInput::of);
        Self::all(path, inputs.map(|object| Ok(Input::Object(object?))))
    }

    /// Opens files, at least one, in this order; `path` is the name of all of them in messages.
    ///
    /// If two descriptors for each are too many for this process, none of them is read directly.
    pub fn open_all(path: &Path, files: &[PathBuf]) -> Result<Self> {
        let both = Self::room_for_both(files.len());
        let inputs = files.iter().map(|path| FileInput::open(path, &both));
        Self::all(path, inputs.map(|file| Ok(Input::File(file?))))
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
            Ok(Input::File(FileInput::of(&path, file, &link, &both)?))
        });
        Self::all(path, files)
    }

    fn all(path: &Path, inputs: impl Iterator<Item = Result<Input>>) -> Result<Self> {
        let mut parts: Vec<SourcePart> = Vec::new();
        for input in inputs {
            let input = input?;
            // A gap even if a file ends at such a multiple, so that no extent is in two files.
            let start = match parts.last() {
                None => Some(0),
                Some(last) => (last.end() + 1).checked_next_multiple_of(GRAIN),
            };
            let end = start.and_then(|start| start.checked_add(input.size()));
            let Some(start) = start.filter(|_| end.is_some_and(|end| end <= i64::MAX as u64))
            else {
                let place = input.path().display().to_string();
                return Err(Error::os(Verb::Load, Errno::OVERFLOW).at(place));
            };
            parts.push(SourcePart { input, start });
        }
        Ok(Self {
            path: path.to_path_buf(),
            parts,
        })
    }

    /// The part of each file within `[start, end)`.
    pub fn within(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let clip = |part: &SourcePart| (start.max(part.start), end.min(part.end()));
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
        parts.map(|part| (part.input.path(), part.start, part.input.size()))
    }

    /// True if it consists of files for which this is true.
    fn all_files(&self, is: impl Fn(&FileInput) -> bool) -> bool {
        self.parts
            .iter()
            .all(|part| part.input.file().is_ok_and(&is))
    }

    fn files_only(&self) -> impl Iterator<Item = &FileInput> {
        self.parts.iter().filter_map(|part| part.input.file().ok())
    }

    /// The end of the last file.
    pub fn size(&self) -> u64 {
        self.last().end()
    }

    fn last(&self) -> &SourcePart {
        self.parts.last().expect("there is at least one file")
    }

    /// The name of one file system, if there are several: FUSE and those that may be on top of it are
    /// preferred.
    pub fn file_system(&self) -> String {
        let names = self.parts.iter().map(|part| part.input.stored_in());
        names
            .max_by_key(|name| (name == "fuse", name == "overlayfs", name.starts_with("0x")))
            .expect("there is at least one file")
    }

    /// The name of the file system of the file at an offset.
    pub fn file_system_at(&self, at: u64) -> String {
        self.part(at).0.input.stored_in()
    }

    /// The block device that the file at an offset is or is stored on.
    pub fn device(&self, at: u64) -> Option<BlockDevice> {
        self.part(at).0.input.file().ok()?.device()
    }

    /// Alignment of offsets, lengths and memory of direct reads, in bytes.
    pub fn align(&self) -> u64 {
        let aligns = self.parts.iter().map(|part| part.input.align());
        aligns.max().expect("there is at least one file")
    }

    /// The size of the requests of their file systems, if that is larger than any block; otherwise 0.
    pub fn request(&self) -> u64 {
        self.files_only().map(FileInput::request).max().unwrap_or(0)
    }

    /// Its first file that is not on a block device, if there is one: on a server, for example.
    pub fn without_device(&self) -> Option<BorrowedFd<'_>> {
        let mut files = self.files_only();
        files
            .find(|file| file.is_without_device())
            .map(FileInput::buffered)
    }

    /// Returns true if `statx` reported the alignment of all files.
    pub fn align_is_told(&self) -> bool {
        self.all_files(FileInput::align_is_told)
    }

    /// Returns true if all of it is in memory.
    pub fn in_memory(&self) -> bool {
        self.all_files(|file| file.in_memory().is_some())
    }

    /// Returns true if reads can drop the pages that they bring into the page cache.
    pub fn drops_behind(&self) -> bool {
        self.all_files(FileInput::drops_behind)
    }

    /// Why some file cannot be read directly; None if all can.
    pub fn direct_refused(&self) -> Option<String> {
        if let [part] = &self.parts[..] {
            return part.input.direct().err().map(str::to_string);
        }
        for part in &self.parts {
            let path = part.input.path().display();
            match part.input.direct() {
                Err(why) => return Some(format!("{path}: {why}")),
                Ok(_) if part.input.align() > GRAIN => {
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

    fn part(&self, at: u64) -> (&SourcePart, u64) {
        let (number, offset) = self.locate(at);
        (&self.parts[number], offset)
    }

    /// Returns true if what it reads are objects.
    pub fn is_objects(&self) -> bool {
        matches!(self.last().input, Input::Object(_))
    }

    /// Its objects; none if it consists of files.
    pub(crate) fn objects(&self) -> Vec<Arc<dyn RemoteObject>> {
        let object = |part: &SourcePart| match &part.input {
            Input::Object(object) => Some(Arc::clone(&object.object)),
            Input::File(_) => None,
        };
        self.parts.iter().filter_map(object).collect()
    }

    /// The object at an offset, and its number; None for a file.
    pub(crate) fn object(&self, at: u64) -> Option<(usize, &dyn RemoteObject)> {
        let (number, _) = self.locate(at);
        match &self.parts[number].input {
            Input::Object(object) => Some((number, &*object.object)),
            Input::File(_) => None,
        }
    }

    /// Reads `into.len()` bytes of one file or object, apart from a load.
    pub fn read_at(&self, at: u64, into: &mut [u8]) -> Result<()> {
        let (part, offset) = self.part(at);
        match &part.input {
            Input::Object(object) => object.read_at(offset, into),
            Input::File(file) => crate::sys::file::pread_all(file.buffered(), into, offset)
                .map_err(|errno| Error::os("cannot read", errno).at(self.place(at))),
        }
    }

    /// The descriptor for reads of the file at an offset, and the offset in it; or why there is none.
    pub fn buffered(&self, at: u64) -> Result<(BorrowedFd<'_>, u64), &str> {
        let (part, offset) = self.part(at);
        part.input.file().map(|file| (file.buffered(), offset))
    }

    /// As [`Source::buffered`], for direct reads.
    pub fn direct(&self, at: u64) -> Result<(BorrowedFd<'_>, u64), &str> {
        let (part, offset) = self.part(at);
        part.input.direct().map(|fd| (fd, offset))
    }

    /// One of these two.
    pub fn input(&self, direct: bool, at: u64) -> Result<(BorrowedFd<'_>, u64), &str> {
        if direct {
            self.direct(at)
        } else {
            self.buffered(at)
        }
    }

    /// The size, when it was opened, of the file at an offset.
    pub fn size_at(&self, at: u64) -> u64 {
        self.part(at).0.input.size()
    }

    /// The current size of the file at an offset.
    pub fn size_now(&self, at: u64) -> Result<u64> {
        self.part(at).0.input.size_now()
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
                let now = part.start + part.input.size_now()?;
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
        place(part.input.path(), offset)
    }

    /// The ranges of `[start, end)` that have data; the others are holes and need not be read. Holes
    /// shorter than `small` count as data.
    pub fn data(&self, start: u64, end: u64, small: u64) -> Vec<(u64, u64)> {
        let mut list = Vec::new();
        for part in &self.parts {
            let (from, to) = (start.max(part.start), end.min(part.end()));
            if from >= to {
                continue;
            }
            let Ok(file) = part.input.file() else {
                list.push((from, to));
                continue;
            };
            let own = file.data(from - part.start, to - part.start, small);
            let own = own.iter();
            list.extend(own.map(|run| (run.0 + part.start, run.1 + part.start)));
        }
        list
    }

    /// Bytes of `[start, end)` of one file in the page cache, in whole pages; EPERM if the kernel does
    /// not allow the query, ENOSYS if it does not support it.
    pub fn resident(&self, start: u64, end: u64) -> Result<u64, Errno> {
        let (part, offset) = self.part(start);
        let file = part.input.file().map_err(|_| Errno::NOSYS)?;
        file.resident(offset, offset + (end - start))
    }

    /// Returns true if the page cache holds two bytes of one file; see [`FileInput::peek`].
    pub fn peek(&self, first: u64, second: u64) -> bool {
        let (part, offset) = self.part(first);
        let file = part.input.file();
        file.is_ok_and(|file| file.peek([offset, second - part.start]))
    }

    /// Drops the pages that misses of [`Source::peek`] have brought into the page cache.
    pub fn forget_misses(&self) {
        self.files_only().for_each(FileInput::forget_misses);
    }

    /// Returns true if there are any.
    pub fn has_misses(&self) -> bool {
        self.files_only().any(FileInput::has_misses)
    }

    /// Prevents misses of [`Source::peek`] from reading ahead.
    pub fn no_readahead(&self) {
        self.files_only().for_each(FileInput::no_readahead);
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
