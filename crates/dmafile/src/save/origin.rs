//! What is saved: memory behind a descriptor, a file, or the output of a pipe.

use super::overlap::Stored;
use super::parts::{OpenParts, OriginPart};
use crate::control::CancelToken;
use crate::error::{Error, Result, Verb};
use crate::exporter::module::{self, ModuleFacts};
use crate::message::Opt;
use crate::source::{self, Source};
use crate::sync::lock;
use crate::sys::map::{Borrowed, Mapping, Region, page_size};
use crate::sys::pagemap::mapped_from;
use crate::sys::{self, Errno, dmabuf, file, memfd, retry};
use rustix::fs::FileType;
use serde::Serialize;
use std::ffi::OsStr;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use strum::{Display, IntoStaticStr};

/// Where the bytes of a save come from.
///
/// The lifetime is that of the caller's memory, if [`Origin::Parts`] has any.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Origin<'m> {
    /// What a descriptor refers to: a memfd, a dma-buf, any regular file or block device, or a pipe.
    /// Created with [`Origin::fd`] or parsed from `fd:N` or `fd:N@OFFSET`.
    Fd {
        /// The descriptor.
        fd: Arc<OwnedFd>,
        /// The caller's number for it.
        number: i32,
        /// Offset of the first byte to save.
        at: u64,
    },
    /// A regular file or a block device.
    File(PathBuf),
    /// The bytes of a pipe, a socket or a terminal up to its end; `-` is standard input. For a regular
    /// file, the bytes from its current position on.
    Stream(Arc<OwnedFd>),
    /// Several ranges of memory, back to back; they are not copied together first.
    Parts(Vec<OriginPart<'m>>),
}

/// What is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Display, IntoStaticStr)]
#[serde(into = "&'static str")]
#[strum(serialize_all = "lowercase")]
#[non_exhaustive]
pub enum OriginKind {
    /// A memfd.
    Memfd,
    /// A dma-buf.
    #[strum(serialize = "dma-buf")]
    DmaBuf,
    /// A regular file.
    File,
    /// A block device.
    #[strum(serialize = "block device")]
    BlockDevice,
    /// A pipe or a socket, whose bytes pass once.
    Pipe,
    /// The caller's memory.
    Memory,
    /// Several ranges of memory and files.
    Parts,
}

impl<'m> Origin<'m> {
    /// The caller's memory.
    pub fn memory(bytes: &'m [u8]) -> Self {
        Self::Parts(vec![bytes.into()])
    }

    /// What a descriptor refers to, from byte `at` on.
    pub fn fd(fd: OwnedFd, at: u64) -> Self {
        let number = fd.as_raw_fd();
        let fd = Arc::new(fd);
        Self::Fd { fd, number, at }
    }
}

impl fmt::Display for Origin<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fd { number, at: 0, .. } => write!(f, "fd:{number}"),
            Self::Fd { number, at, .. } => write!(f, "fd:{number}@{at}"),
            Self::File(path) => path.display().fmt(f),
            Self::Stream(_) => f.write_str("-"),
            Self::Parts(parts) => match parts.as_slice() {
                [one] => one.fmt(f),
                several => write!(f, "{} parts", several.len()),
            },
        }
    }
}

impl FromStr for Origin<'_> {
    type Err = Error;

    /// As [`Origin::parse`].
    fn from_str(text: &str) -> Result<Self> {
        Self::parse(text.as_ref())
    }
}

impl Origin<'_> {
    /// `fd:N`, `fd:N@OFFSET` (in bytes), `-`, or the path of a file. A descriptor is duplicated; EBADF if
    /// it is not open.
    pub fn parse(word: &OsStr) -> Result<Self> {
        let text = &*word.to_string_lossy();
        let duplicate = |number| {
            file::duplicate(number).map(Arc::new).map_err(|errno| {
                Error::os("cannot use the descriptor", errno)
                    .at(text)
                    .with_remedy(
                        "pass an open one, for example from the shell with N</proc/PID/fd/M",
                    )
            })
        };
        if text == "-" {
            return duplicate(0).map(Self::Stream);
        }
        let Some(number) = text.strip_prefix("fd:") else {
            return Ok(Self::File(word.into()));
        };
        let bad = || {
            let why = format!("'{text}' is not a descriptor; for a file of this name use ./{text}");
            Error::usage(Opt::From, why)
        };
        let (number, at) = number.split_once('@').unwrap_or((number, "0"));
        let at = at.parse().map_err(|_| bad())?;
        let number = number.parse().map_err(|_| bad())?;
        let fd = duplicate(number)?;
        Ok(Self::Fd { fd, number, at })
    }
}

/// An open origin.
pub(super) struct Opened<'m> {
    name: String,
    /// Its type.
    pub(super) kind: OriginKind,
    /// Offset of the first byte to save.
    pub(super) start: u64,
    /// Number of bytes; None for a stream, which is saved up to its end.
    pub(super) bytes: Option<u64>,
    body: Arc<Body<'m>>,
}

enum Body<'m> {
    Nothing,
    Memory(DescriptorMemory),
    /// Memory that is borrowed from the caller.
    Caller(Borrowed<'m>),
    File(Source),
    Stream(PipeStream),
    Parts(OpenParts<'m>),
}

/// Memory behind a descriptor.
pub(super) struct DescriptorMemory {
    fd: Arc<OwnedFd>,
    /// Err if it cannot be mapped, or should not be accessed through a mapping. A dma-buf is mapped only
    /// when needed: that maps all of its pages at once, which costs more than dmafile.ko takes to write
    /// them.
    map: OnceLock<Result<Mapping, String>>,
    /// Why its pages cannot be registered: the kernel registers only memory that may be written to.
    pub(super) unregistrable: Option<&'static str>,
    /// Size of its largest pages in bytes.
    pub(super) page: u64,
    pub(super) dma_buf: Option<DmaBufOrigin>,
}

/// Properties of a dma-buf.
pub(super) struct DmaBufOrigin {
    bytes: u64,
    /// Why its mapping cannot be pinned, so that no device can read from its addresses.
    unpinnable: OnceLock<Option<Errno>>,
    /// dmafile.ko, if it created the dma-buf.
    pub(super) module: Option<ModuleFacts>,
}

/// A pipe, and how far it has been read.
struct PipeStream {
    fd: Arc<OwnedFd>,
    state: Mutex<PipeRead>,
}

#[derive(Default)]
struct PipeRead {
    bytes: u64,
    ended: bool,
}

/// Interval at which a cancellation is checked while waiting for a pipe.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

impl<'m> Opened<'m> {
    /// Opens it and determines its type.
    pub(super) fn open(origin: &Origin<'m>, length: Option<u64>) -> Result<Self> {
        let (start, body, size, kind) = match origin {
            Origin::Fd { fd, number, at } => {
                let (body, size, kind) =
                    of_descriptor(fd, *number).map_err(|error| error.at(origin.to_string()))?;
                (*at, body, size, kind)
            }
            Origin::File(path) => {
                let (body, size, kind) = of_file(path)?;
                (0, body, size, kind)
            }
            Origin::Stream(fd) => (0, Body::stream(fd), None, OriginKind::Pipe),
            Origin::Parts(parts) => {
                let (parts, size, kind) = OpenParts::open(parts)?;
                (0, Body::Parts(parts), Some(size), kind)
            }
        };
        let bytes = match size {
            None if start > 0 => {
                let error = Error::os(Verb::Save, Errno::SPIPE).at(origin.to_string());
                return Err(error.with_why("a pipe has no offsets"));
            }
            None => length,
            Some(size) => Some(range(origin, size, start, length)?),
        };
        Ok(Self {
            name: origin.to_string(),
            kind,
            start,
            bytes,
            body: Arc::new(match bytes {
                Some(0) => Body::Nothing,
                _ => body,
            }),
        })
    }

    /// The caller's memory.
    pub(super) fn of_caller(memory: Borrowed<'m>) -> Self {
        Self {
            name: "the caller's memory".to_string(),
            kind: OriginKind::Memory,
            start: 0,
            bytes: Some(memory.region().len()),
            body: Arc::new(Body::Caller(memory)),
        }
    }

    /// Includes memory in children that are forked from now on: those may read it, too.
    pub(super) fn enter_forks(&self) {
        if let Some(Ok(map)) = self.memory().and_then(|memory| memory.map.get()) {
            map.region().leave_out_of_forks(false);
        }
    }

    /// A range of it, which must be inside.
    pub(super) fn part(&self, at: u64, len: u64) -> Self {
        Self {
            name: self.name.clone(),
            kind: self.kind,
            start: self.start + at,
            bytes: Some(len),
            body: Arc::clone(&self.body),
        }
    }

    /// `name` or `name at byte N`, for error messages.
    pub(super) fn place(&self, at: u64) -> String {
        match at {
            0 => self.name.clone(),
            _ => format!("{} at byte {at}", self.name),
        }
    }

    pub(super) fn memory(&self) -> Option<&DescriptorMemory> {
        match &*self.body {
            Body::Memory(memory) => Some(memory),
            _ => None,
        }
    }

    /// Its mapping; or why it has none.
    pub(super) fn region(&self) -> Result<Region<'_>, &str> {
        match &*self.body {
            Body::Memory(memory) => memory.region(),
            Body::Caller(memory) => Ok(memory.region()),
            Body::Parts(_) => Err("each part has its own mapping"),
            Body::Stream(_) => Err("a pipe has no memory to write from"),
            Body::Nothing | Body::File(_) => Err("bytes on a disk must be read first"),
        }
    }

    /// True if it is the caller's memory, which has no holes.
    pub(super) fn is_callers(&self) -> bool {
        matches!(*self.body, Body::Caller(_))
    }

    pub(super) fn parts(&self) -> Option<&OpenParts<'m>> {
        match &*self.body {
            Body::Parts(parts) => Some(parts),
            _ => None,
        }
    }

    /// Its mapping, if a disk can read from there.
    pub(super) fn in_memory(&self) -> Option<Region<'_>> {
        let region = self.region().ok()?;
        if self
            .memory()
            .is_some_and(|memory| memory.unpinnable().is_some())
        {
            return None;
        }
        Some(region.part(self.start, self.bytes?))
    }

    /// Where its bytes are stored; of memory that is mapped from a file, only that of this one.
    pub(super) fn stored(&self, file: BorrowedFd<'_>) -> Vec<Stored> {
        let one = match &*self.body {
            Body::Nothing => None,
            Body::Memory(memory) if memory.dma_buf.is_some() => None,
            Body::Memory(memory) => Stored::of(memory.fd.as_fd(), self.start, self.bytes),
            Body::File(source) => {
                let (fd, at) = source.buffered(self.start).expect(IS_FILE);
                Stored::of(fd, at, self.bytes)
            }
            Body::Stream(stream) => Stored::of_stream(stream.fd.as_fd(), self.bytes),
            Body::Caller(memory) => {
                let mapped = mapped_from(&memory.region(), file).into_iter();
                let stored = mapped.filter_map(|(at, from, bytes)| {
                    let stored = Stored::of(file, from, Some(bytes))?;
                    Some(Stored { at, ..stored })
                });
                return stored.collect();
            }
            Body::Parts(parts) => return parts.stored(file),
        };
        one.into_iter().collect()
    }

    pub(super) fn is_stream(&self) -> bool {
        matches!(*self.body, Body::Stream(_))
    }

    /// True if it cannot, or should not, be read twice: a checksum is then computed as the bytes pass.
    pub(super) fn passes_once(&self) -> bool {
        matches!(*self.body, Body::Stream(_) | Body::File(_))
    }

    /// The ranges of `[start, end)` that have data; the others are holes.
    pub(super) fn data(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        match &*self.body {
            Body::Nothing => Vec::new(),
            Body::Memory(memory) if memory.dma_buf.is_none() => {
                file::data(memory.fd.as_fd(), start, end, 0)
            }
            Body::File(source) => source.data(start, end, 0),
            Body::Parts(parts) => parts.data(start, end),
            Body::Memory(_) | Body::Caller(_) | Body::Stream(_) => vec![(start, end)],
        }
    }

    /// Begins CPU access, after waiting for devices that are still writing (fences).
    pub(super) fn begin(&self, cancel: &CancelToken) -> Result<ReadAccess<'_>> {
        if let Body::Parts(parts) = &*self.body {
            return parts.begin(cancel);
        }
        let Some(memory) = self.memory().filter(|memory| memory.dma_buf.is_some()) else {
            return Ok(ReadAccess(Vec::new()));
        };
        loop {
            match dmabuf::try_sync(memory.fd.as_fd(), false, false) {
                Ok(()) => return Ok(ReadAccess(vec![memory.fd.as_fd()])),
                Err(Errno::INTR | Errno::AGAIN) if cancel.is_cancelled() => {
                    return Err(Error::cancelled(Verb::Save, &self.name));
                }
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(errno) => {
                    let what = "cannot access the dma-buf (DMA_BUF_IOCTL_SYNC)";
                    return Err(Error::os(what, errno).at(&self.name));
                }
            }
        }
    }

    /// Copies bytes out of it, by a system call if an access could raise a signal.
    pub(super) fn copy_out(&self, at: u64, into: &mut [u8]) -> Result<()> {
        let mut read = |fd, offset| file::pread_all(fd, &mut *into, offset);
        let done = match &*self.body {
            Body::Memory(memory) => match (&memory.dma_buf, memory.map()) {
                (Some(_), Ok(map)) => {
                    map.region().copy_out(at, into);
                    return Ok(());
                }
                _ => read(memory.fd.as_fd(), at),
            },
            Body::Caller(memory) => {
                memory.region().copy_out(at, into);
                return Ok(());
            }
            Body::File(source) => {
                let (fd, offset) = source.buffered(at).expect(IS_FILE);
                read(fd, offset)
            }
            Body::Parts(parts) => return parts.copy_out(at, into),
            Body::Nothing | Body::Stream(_) => Ok(()),
        };
        done.map_err(|errno| match errno {
            Errno::IO => self.cut_short(at).unwrap_or_else(|| self.failed(at, errno)),
            errno => self.failed(at, errno),
        })
    }

    /// Reads up to `len` bytes from `at` on into a block of a ring; fewer only at the end of a stream. The
    /// block has room for the rounding of direct reads.
    pub(super) fn fill(
        &self,
        block: &Block<'_>,
        at: u64,
        len: u64,
        cancel: &CancelToken,
    ) -> Result<u64> {
        match &*self.body {
            Body::Nothing => Ok(0),
            Body::Stream(stream) => stream.fill(block, len, self.bytes, cancel, &self.name),
            Body::Parts(parts) => parts.fill(block, at, len, cancel),
            Body::Memory(memory) => match (&memory.dma_buf, memory.map()) {
                (Some(_), Ok(map)) => {
                    block.ring.copy_from(block.at, &map.region(), at, len);
                    Ok(len)
                }
                _ => self.read(memory.fd.as_fd(), block, (at, at), len),
            },
            Body::Caller(memory) => {
                block.ring.copy_from(block.at, &memory.region(), at, len);
                Ok(len)
            }
            Body::File(source) => {
                if self.read_direct(source, block, at, len)? {
                    return Ok(len);
                }
                let (fd, offset) = source.buffered(at).expect(IS_FILE);
                self.read(fd, block, (at, offset), len)
            }
        }
    }

    /// Reads directly what the page cache does not have. False if it has it, or if that is not possible.
    fn read_direct(&self, source: &Source, block: &Block<'_>, at: u64, len: u64) -> Result<bool> {
        let align = source.align();
        let Ok((fd, offset)) = source.direct(at) else {
            return Ok(false);
        };
        let rounded = len.next_multiple_of(align);
        let possible =
            offset.is_multiple_of(align) && block.at.is_multiple_of(align) && rounded <= block.room;
        if !possible || source.resident(at, at + len).is_ok_and(|bytes| bytes > 0) {
            return Ok(false);
        }
        match retry(|| file::pread(fd, block.ring, block.at, rounded, offset)) {
            Ok(got) if got >= len => Ok(true),
            // The rest, or the error, comes from a read through the page cache.
            Ok(_) | Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(false),
            Err(errno) => Err(self.failed(at, errno)),
        }
    }

    fn read(
        &self,
        fd: BorrowedFd<'_>,
        block: &Block<'_>,
        (at, offset): (u64, u64),
        len: u64,
    ) -> Result<u64> {
        let mut done = 0;
        while done < len {
            let (to, from) = (block.at + done, offset + done);
            match retry(|| file::pread(fd, block.ring, to, len - done, from)) {
                Ok(0) => {
                    let error = self.cut_short(at + done);
                    return Err(error.unwrap_or_else(|| self.failed(at + done, Errno::NODATA)));
                }
                Ok(got) => done += got,
                Err(errno) => return Err(self.failed(at + done, errno)),
            }
        }
        Ok(done)
    }

    /// The error if bytes that existed are gone.
    pub(super) fn cut_short(&self, at: u64) -> Option<Error> {
        let now = match &*self.body {
            Body::Memory(memory) if memory.dma_buf.is_none() => {
                file::stat(memory.fd.as_fd()).ok()?.size
            }
            Body::File(source) => source.size_now(0).ok()?,
            Body::Parts(parts) => return parts.cut_short(),
            _ => return None,
        };
        if now >= self.start + self.bytes? {
            return None;
        }
        let error = Error::new(
            Verb::Save,
            format!("its owner has since truncated it to {now} bytes"),
        );
        Some(
            error
                .with_errno(Errno::NODATA)
                .at(self.place(at))
                .with_remedy("save it again when nothing changes its size"),
        )
    }

    pub(super) fn failed(&self, at: u64, errno: Errno) -> Error {
        Error::os("cannot read", errno).at(self.place(at))
    }

    /// The error if a stream ended before the expected number of bytes.
    pub(super) fn missing(&self) -> Option<Error> {
        let Body::Stream(stream) = &*self.body else {
            return None;
        };
        let got = lock(&stream.state).bytes;
        let wanted = self.bytes.filter(|wanted| got < *wanted)?;
        let why = format!("it ended after {got} of {wanted} bytes");
        let error = Error::new(Verb::Save, why).with_errno(Errno::NODATA);
        Some(error.at(&self.name))
    }

    /// Bytes read from a stream so far.
    pub(super) fn came(&self) -> u64 {
        match &*self.body {
            Body::Stream(stream) => lock(&stream.state).bytes,
            _ => self.bytes.unwrap_or(0),
        }
    }
}

/// A block of a ring, to be filled.
pub(super) struct Block<'a> {
    pub(super) ring: &'a Region<'a>,
    pub(super) at: u64,
    pub(super) room: u64,
}

/// CPU access for reading, until this is dropped (DMA_BUF_IOCTL_SYNC).
pub(super) struct ReadAccess<'a>(Vec<BorrowedFd<'a>>);

impl ReadAccess<'_> {
    /// CPU access to all of these.
    pub(super) fn all(mut these: Vec<Self>) -> Self {
        Self(
            these
                .iter_mut()
                .flat_map(|one| std::mem::take(&mut one.0))
                .collect(),
        )
    }
}

impl Drop for ReadAccess<'_> {
    fn drop(&mut self) {
        for fd in &self.0 {
            // Ending an access that has begun should not fail, and a drop could not report it.
            let _ = dmabuf::sync(*fd, false, true);
        }
    }
}

impl DescriptorMemory {
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn map(&self) -> &Result<Mapping, String> {
        self.map.get_or_init(|| {
            let bytes = self.dma_buf.as_ref().map_or(0, |dma_buf| dma_buf.bytes);
            let map = Mapping::chain(&[(self.fd(), bytes)]);
            let map = map.or_else(|_| Mapping::shared(self.fd(), bytes as usize, 1, false));
            // Only the CPU needs a mapping; a device can use the dma-buf without.
            map.map_err(|errno| {
                let name = crate::error::errno_name(errno.raw_os_error());
                format!("this process cannot map the dma-buf ({name})")
            })
        })
    }

    /// Why a dma-buf's mapping cannot be pinned, if so.
    pub(super) fn unpinnable(&self) -> Option<Errno> {
        let dma_buf = self.dma_buf.as_ref()?;
        *dma_buf.unpinnable.get_or_init(|| {
            let map = self.map().as_ref().ok()?;
            map.region().can_be_pinned(0).err()
        })
    }

    /// Its mapping; or why it has none.
    pub(super) fn region(&self) -> Result<Region<'_>, &str> {
        self.map()
            .as_ref()
            .map(Mapping::region)
            .map_err(String::as_str)
    }
}

impl Body<'_> {
    fn stream(fd: &Arc<OwnedFd>) -> Self {
        Self::Stream(PipeStream {
            fd: Arc::clone(fd),
            state: Mutex::default(),
        })
    }
}

impl PipeStream {
    fn fill(
        &self,
        block: &Block<'_>,
        len: u64,
        wanted: Option<u64>,
        cancel: &CancelToken,
        name: &str,
    ) -> Result<u64> {
        let mut state = lock(&self.state);
        let len = wanted.map_or(len, |wanted| len.min(wanted - state.bytes));
        let mut done = 0;
        let fd = self.fd.as_fd();
        while done < len && !state.ended {
            if cancel.is_cancelled() {
                return Err(Error::cancelled(Verb::Save, name));
            }
            let failed = |errno| Error::os("cannot read", errno).at(name);
            if !file::wait_readable(fd, POLL_INTERVAL).map_err(failed)? {
                continue;
            }
            match file::read(fd, block.ring, block.at + done, len - done) {
                Ok(0) => state.ended = true,
                Ok(got) => done += got,
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(errno) => return Err(failed(errno)),
            }
        }
        state.bytes += done;
        Ok(done)
    }
}

/// Number of bytes to save from an origin of `size` bytes.
fn range(origin: &Origin<'_>, size: u64, start: u64, length: Option<u64>) -> Result<u64> {
    let left = size.checked_sub(start);
    let bytes = left.filter(|left| length.is_none_or(|length| length <= *left));
    let bytes = bytes.map(|left| length.unwrap_or(left));
    bytes.ok_or_else(|| {
        let wanted = match length {
            Some(length) => format!("{length} bytes from byte {start} on are"),
            None => format!("byte {start} is"),
        };
        Error::new(Verb::Save, format!("{wanted} past the end at byte {size}"))
            .with_errno(Errno::INVAL)
            .at(origin.to_string())
            .with_remedy("choose a range inside it")
    })
}

/// What a descriptor refers to, and its size.
fn of_descriptor(
    fd: &Arc<OwnedFd>,
    number: i32,
) -> Result<(Body<'static>, Option<u64>, OriginKind)> {
    if !sys::file::is_readable(fd.as_fd()).unwrap_or(false) {
        return Err(Error::os(Verb::Save, Errno::BADF)
            .with_why("the descriptor is not open for reading")
            .with_remedy("open it for reading, or for reading and writing"));
    }
    if dmabuf::is_one(fd.as_fd()) {
        return of_dma_buf(fd);
    }
    let stat = file::stat(fd.as_fd()).map_err(|errno| Error::os("cannot stat", errno))?;
    match stat.kind {
        FileType::RegularFile if source::in_memory(&stat).is_some() => of_memory(fd, &stat),
        FileType::RegularFile | FileType::BlockDevice => {
            match of_file(Path::new(&format!("/proc/self/fd/{}", fd.as_raw_fd()))) {
                // A file that this process may not reopen is read through the given descriptor.
                Err(error) if error.raw_os_error() != Some(Errno::INVAL.raw_os_error()) => {
                    let why = format!("fd:{number} cannot be reopened");
                    let memory = DescriptorMemory {
                        fd: Arc::clone(fd),
                        map: Err(why).into(),
                        unregistrable: None,
                        page: page_size(),
                        dma_buf: None,
                    };
                    Ok((Body::Memory(memory), Some(stat.size), OriginKind::File))
                }
                done => done,
            }
        }
        FileType::Fifo | FileType::Socket | FileType::CharacterDevice => {
            Ok((Body::stream(fd), None, OriginKind::Pipe))
        }
        _ => Err(Error::os(Verb::Save, Errno::INVAL)
            .with_why("it is neither memory, a file nor a pipe")
            .with_remedy("pass a memfd, a dma-buf or a regular file")),
    }
}

fn of_dma_buf(fd: &Arc<OwnedFd>) -> Result<(Body<'static>, Option<u64>, OriginKind)> {
    let ask = |errno| Error::os("cannot query the dma-buf", errno);
    let bytes = dmabuf::size(fd.as_fd()).map_err(ask)?;
    let module = module::behind(fd.as_fd());
    let module = module.filter(|module| module.features & sys::module::FEATURE_WRITE != 0);
    let memory = DescriptorMemory {
        fd: Arc::clone(fd),
        map: OnceLock::new(),
        unregistrable: None,
        page: page_size(),
        dma_buf: Some(DmaBufOrigin {
            bytes,
            unpinnable: OnceLock::new(),
            module,
        }),
    };
    Ok((Body::Memory(memory), Some(bytes), OriginKind::DmaBuf))
}

/// A memfd, or a file of a file system in memory, which can only be read from memory.
fn of_memory(
    fd: &Arc<OwnedFd>,
    stat: &file::Stat,
) -> Result<(Body<'static>, Option<u64>, OriginKind)> {
    let kind = match memfd::seals(fd.as_fd()) {
        Ok(_) => OriginKind::Memfd,
        Err(_) => OriginKind::File,
    };
    let huge = stat.is_hugetlb();
    let (map, unregistrable) = if huge && stat.allocated < stat.size {
        // Reading a hole would allocate a huge page from the pool.
        (Err("it has holes, on huge pages".to_string()), None)
    } else {
        let size = stat
            .size
            .next_multiple_of(if huge { stat.fs_block } else { 1 }) as usize;
        let writable = if huge {
            Mapping::shared_sparse(fd.as_fd(), size)
        } else {
            Mapping::unforked(fd.as_fd(), size.max(1), 1)
        };
        match writable {
            Ok(map) => (Ok(map), None),
            Err(_) => {
                let map = Mapping::shared(fd.as_fd(), size.max(1), 1, false);
                let why = "it is read-only; io_uring registers only writable memory";
                let map = map.map_err(|errno| {
                    let name = crate::error::errno_name(errno.raw_os_error());
                    format!("it cannot be mapped ({name})")
                });
                (map, Some(why))
            }
        }
    };
    let memory = DescriptorMemory {
        fd: Arc::clone(fd),
        map: map.into(),
        unregistrable,
        page: stat.fs_block.max(page_size()),
        dma_buf: None,
    };
    Ok((Body::Memory(memory), Some(stat.size), kind))
}

/// A source that is saved was opened by its path.
const IS_FILE: &str = "it is a file";

fn of_file(path: &Path) -> Result<(Body<'static>, Option<u64>, OriginKind)> {
    let source = match Source::open(path) {
        Ok(source) => source,
        // An empty origin has nothing to read.
        Err(error) if error.raw_os_error() == Some(Errno::NODATA.raw_os_error()) => {
            return Ok((Body::Nothing, Some(0), OriginKind::File));
        }
        Err(error) => return Err(error.of(Verb::Save)),
    };
    let size = source.size();
    if source.in_memory() {
        let (fd, _) = source.buffered(0).expect(IS_FILE);
        let dup = file::dup(fd).map_err(|errno| Error::os("cannot stat", errno))?;
        let dup = Arc::new(dup);
        let stat = file::stat(dup.as_fd()).map_err(|errno| Error::os("cannot stat", errno))?;
        return of_memory(&dup, &stat);
    }
    let kind = if source.file_system() == Source::BLOCK_DEVICE {
        OriginKind::BlockDevice
    } else {
        OriginKind::File
    };
    Ok((Body::File(source), Some(size), kind))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn invalid_sources_are_refused() {
        assert!(matches!("model".parse(), Ok(Origin::File(_))));
        assert!(matches!("./fd:3".parse(), Ok(Origin::File(_))));
        assert!(matches!("-".parse(), Ok(Origin::Stream(_))));
        let fd: Origin = "fd:0@4096".parse().unwrap();
        assert_eq!(fd.to_string(), "fd:0@4096");
        for bad in ["fd:", "fd:x", "fd:0@", "fd:0@-1", "fd:0@1K"] {
            let error = bad.parse::<Origin>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage, "{bad}");
        }
        let error = "fd:987654".parse::<Origin>().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
    }
}
