//! Where a save goes: a new file next to its final place, or a part of an existing one.

use super::replacement::Replacement;
use super::target::SaveTarget;
use crate::error::{Error, Result, Verb, errno_name};
use crate::folder::Folder;
use crate::message::{Opt, message};
use crate::reasons::{About, Reasons};
use crate::source;
use crate::sync::lock;
use crate::sys::block::BlockDevice;
use crate::sys::map::page_size;
use crate::sys::{Errno, cache, file, memfd, place, sandbox};
use rustix::fs::FileType;
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// An open file to write to.
pub(super) struct To {
    path: PathBuf,
    /// Dropped before the file is closed: until then nobody else uses its temporary name.
    how: Destination,
    /// For writes through the page cache.
    file: OwnedFd,
    /// For direct writes, or why there are none.
    direct: Result<OwnedFd, String>,
    /// Where the first byte goes.
    pub(super) at: u64,
    /// Alignment of direct writes, which is a multiple of blocks and pages.
    pub(super) grain: u64,
    /// Alignment of memory for direct writes.
    pub(super) align: u64,
    /// The minimum alignment of memory, if the place in the file is a multiple of the grain.
    pub(super) memory_align: u64,
    pub(super) align_told: bool,
    pub(super) file_system: String,
    device: Option<BlockDevice>,
    in_memory: bool,
    /// Space below this offset is reserved, and the size is at least this.
    reserved: AtomicU64,
    /// Held by the thread that is reserving more.
    reserving: Mutex<()>,
}

enum Destination {
    /// Not in its place yet.
    Replacement(Replacement),
    /// A part of a file of this size; None for a block device, whose size does not change.
    InPlace(Option<u64>),
}

/// How much is reserved ahead of a stream, at first and at most.
const FIRST_STEP: u64 = 1 << 20;
const LARGEST_STEP: u64 = 64 << 20;

impl To {
    /// A new file for a place, which is not visible before it is complete. If the folder is given, the path is one in
    /// it.
    pub(super) fn replace(path: &Path, folder: Option<Folder>, log: &Reasons) -> Result<Self> {
        let target = match (folder, path.file_name()) {
            (Some(folder), Some(name)) => SaveTarget::within(folder, name),
            _ => SaveTarget::of(path, false)?,
        };
        let (beside, file) = Replacement::create(target, log)?;
        Self::new(path, file, 0, Destination::Replacement(beside))
    }

    /// A new file that has its name from the start, and grows.
    pub(super) fn new_file(path: &Path, folder: &Folder, name: &OsStr) -> Result<Self> {
        let (place, folder) = (path.display().to_string(), folder.fd());
        let refuse = |errno, why: &str, remedy: &str| {
            let error = Error::os(Verb::Record, errno).with_why(why);
            Err(error.at(&place).with_remedy(remedy))
        };
        let file = match place::create(folder, name, place::NEW) {
            Ok(file) => file,
            Err(Errno::EXIST) => {
                let other = place::open(folder, name);
                return match other.and_then(|other| place::try_lock(other.as_fd())) {
                    Err(Errno::AGAIN) => refuse(
                        Errno::BUSY,
                        "another recorder writes to it",
                        "record to another file",
                    ),
                    _ => refuse(
                        Errno::EXIST,
                        "the file exists, and recordings never replace files",
                        "remove it, or record to another file",
                    ),
                };
            }
            Err(errno) => return Err(cannot_open(errno).at(place)),
        };
        // If the file system does not support marks, no other process can check them, either.
        let _ = place::try_lock(file.as_fd());
        Self::new(path, file, 0, Destination::InPlace(Some(0)))
    }

    /// A part of an existing file or block device, from byte `at` on.
    pub(super) fn in_place(path: &Path, at: u64) -> Result<Self> {
        let place = path.display().to_string();
        let refuse = |why: &str, errno, remedy: &str| {
            Error::os("cannot write into", errno)
                .with_why(why)
                .at(&place)
                .with_remedy(remedy)
        };
        let cannot = |errno| match errno {
            Errno::NOENT => refuse(
                "there is no such file",
                errno,
                "an offset needs an existing file; leave it out to write a new one",
            ),
            Errno::ISDIR => refuse("it is a folder", errno, "name a file in it"),
            Errno::BUSY => refuse(
                "the device is in use",
                errno,
                "first unmount it, and stop everything else that uses it",
            ),
            errno => cannot_open(errno).at(&place),
        };
        let target = SaveTarget::of(path, true).map_err(|error| match error.raw_os_error() {
            Some(libc::ENOENT) => cannot(Errno::NOENT),
            Some(libc::EISDIR) => cannot(Errno::ISDIR),
            _ => error,
        })?;
        let is_file = |kind| match kind {
            FileType::RegularFile | FileType::BlockDevice => Ok(kind),
            FileType::Directory => Err(cannot(Errno::ISDIR)),
            _ => Err(refuse(
                "it is neither a file nor a block device",
                Errno::INVAL,
                "name a regular file or a block device",
            )),
        };
        let found = target.find()?.ok_or_else(|| cannot(Errno::NOENT))?;
        // Checked first: opening anything but a file may block or have side effects.
        let kind = if target.is_magic {
            is_file(target.kind_behind().map_err(cannot)?)?
        } else {
            is_file(found.is.kind)?
        };
        let alone = kind == FileType::BlockDevice;
        let opened = place::open_to_write(target.folder.fd(), &target.name, alone, target.is_magic);
        let file = opened.map_err(cannot)?;
        let stat = stat(&file, path)?;
        is_file(stat.kind)?;
        let how = match stat.kind {
            FileType::BlockDevice => Destination::InPlace(None),
            _ => Destination::InPlace(Some(stat.size)),
        };
        Self::new(path, file, at, how)
    }

    fn new(path: &Path, file: OwnedFd, at: u64, how: Destination) -> Result<Self> {
        let stat = stat(&file, path)?;
        let in_memory = source::in_memory(&stat);
        let refused = match (in_memory, stat.direct) {
            (Some(fs), _) => Some(format!(
                "{fs} files are in memory, so there is no direct I/O"
            )),
            (None, Some((_, 0))) => {
                Some("statx says that this file allows no direct I/O".to_string())
            }
            _ => None,
        };
        let open = || {
            place::reopen_direct(file.as_fd()).map_err(|errno| {
                let name = errno_name(errno.raw_os_error());
                format!("O_DIRECT is refused at open ({name})")
            })
        };
        let direct = refused.map_or_else(open, Err);
        // A partly written block would be read first, and each page must be written with one I/O
        // mode.
        let usual = stat.block();
        let (align, memory_align) = match stat.direct {
            Some((memory, offset)) => (u64::from(memory.max(offset)).max(1), memory.max(1).into()),
            None => (usual, usual),
        };
        Ok(Self {
            path: path.to_path_buf(),
            direct,
            at,
            grain: usual.max(align),
            align,
            memory_align,
            align_told: stat.direct.is_some(),
            file_system: source::file_system(&stat),
            device: BlockDevice::of(stat.device),
            in_memory: in_memory.is_some(),
            how,
            file,
            reserved: AtomicU64::new(at),
            reserving: Mutex::default(),
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// `path` or `path at byte N`, for error messages.
    pub(super) fn place(&self, at: u64) -> String {
        match at {
            0 => self.path.display().to_string(),
            _ => format!("{} at byte {at}", self.path.display()),
        }
    }

    pub(super) fn is_in_place(&self) -> bool {
        matches!(self.how, Destination::InPlace(_))
    }

    pub(super) fn is_in_memory(&self) -> bool {
        self.in_memory
    }

    pub(super) fn device(&self) -> Option<&BlockDevice> {
        self.device.as_ref()
    }

    pub(super) fn buffered(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(super) fn direct(&self) -> Result<BorrowedFd<'_>, &str> {
        match &self.direct {
            Ok(fd) => Ok(fd.as_fd()),
            Err(why) => Err(why),
        }
    }

    /// One of these two.
    pub(super) fn output(&self, direct: bool) -> Result<BorrowedFd<'_>, Error> {
        if direct {
            self.direct()
                .map_err(|why| Error::new("no direct I/O", why).at(self.place(0)))
        } else {
            Ok(self.buffered())
        }
    }

    /// Reserves space for these ranges, the last of which ends at `end` or before, and sets the size,
    /// so that a full disk is detected before anything is written.
    pub(super) fn reserve(&self, runs: &[(u64, u64)], end: u64, log: &Reasons) -> Result<()> {
        self.fits(end)?;
        let Destination::InPlace(None) = self.how else {
            let mut refused = None;
            for (start, stop_at) in runs {
                match self.reserve_range(*start, *stop_at) {
                    Err(errno) if is_unknown(errno) => {
                        refused = Some(errno);
                        break;
                    }
                    done => done.map_err(|errno| self.failed(*start, errno))?,
                }
            }
            let (choice, why) = match refused {
                Some(errno) => {
                    let name = errno_name(errno.raw_os_error());
                    ("not reserved", format!("fallocate is refused ({name})"))
                }
                None => ("reserved", "before the first write".to_string()),
            };
            if !runs.is_empty() {
                log.add(About::Space, choice, why);
            }
            return self.grow(end);
        };
        Ok(())
    }

    /// Reserves space for a stream up to `end`.
    pub(super) fn reserve_ahead(&self, end: u64) -> Result<()> {
        if end <= self.reserved() {
            return Ok(());
        }
        let _alone = lock(&self.reserving);
        let reserved = self.reserved();
        if end <= reserved {
            return Ok(());
        }
        self.fits(end)?;
        if let Destination::InPlace(None) = self.how {
            self.reserved.store(end, Ordering::Relaxed);
            return Ok(());
        }
        let step = (reserved - self.at).clamp(FIRST_STEP, LARGEST_STEP);
        let limit = file::size_limit().unwrap_or(u64::MAX);
        let ahead = end.max(reserved + step).min(limit.max(end));
        let upto = match self.reserve_range(reserved, ahead) {
            // There may be room for what has arrived.
            Err(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => {
                self.reserve_range(reserved, end)
                    .map_err(|errno| self.failed(reserved, errno))?;
                end
            }
            Err(errno) if !is_unknown(errno) => return Err(self.failed(reserved, errno)),
            // Without a reservation a larger size has no benefit.
            Err(_) => end,
            Ok(()) => ahead,
        };
        self.grow(upto)?;
        self.reserved.store(upto, Ordering::Relaxed);
        Ok(())
    }

    /// Space below this offset is reserved.
    pub(super) fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Relaxed)
    }

    fn reserve_range(&self, start: u64, end: u64) -> Result<(), Errno> {
        /// A signal can end it between two of these.
        const STEP: u64 = 16 << 30;
        let mut at = start;
        while at < end {
            let len = (end - at).min(STEP);
            place::reserve(self.buffered(), at, len)?;
            at += len;
        }
        Ok(())
    }

    /// Sets the size to at least `end`.
    fn grow(&self, end: u64) -> Result<()> {
        match self.how {
            Destination::InPlace(None) => return Ok(()),
            Destination::InPlace(Some(size)) if end <= size => return Ok(()),
            _ => {}
        }
        self.resize(end, end)
    }

    /// A stream has ended at `end`: releases what was reserved beyond.
    pub(super) fn ends_at(&self, end: u64) -> Result<()> {
        let size = match self.how {
            Destination::InPlace(None) => return Ok(()),
            Destination::InPlace(Some(size)) => size.max(end),
            Destination::Replacement(_) => end,
        };
        self.resize(size, end)
    }

    fn resize(&self, size: u64, end: u64) -> Result<()> {
        memfd::resize(self.buffered(), size)
            .map_err(|errno| self.failed(end, errno).of_calls(&[sandbox::FTRUNCATE]))
    }

    /// True if the file may become that long.
    fn fits(&self, end: u64) -> Result<()> {
        if let Destination::InPlace(None) = self.how {
            let size = stat(&self.file, &self.path)?.size;
            if end > size {
                let why = format!("it has {size} bytes, and the save would end at byte {end}");
                let error = Error::os("cannot write into", Errno::NOSPC).with_why(why);
                return Err(error
                    .at(self.place(0))
                    .with_remedy("save less, or elsewhere"));
            }
            return Ok(());
        }
        match file::size_limit() {
            Some(limit) if end > limit => Err(self.failed(0, Errno::FBIG)),
            _ => Ok(()),
        }
    }

    /// Zeros a range in which the origin has a hole.
    pub(super) fn clear(&self, start: u64, end: u64) -> Result<()> {
        static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
        let from = match self.how {
            // A new file has zeros there.
            Destination::Replacement(_) => return Ok(()),
            Destination::InPlace(Some(size)) if start >= size => return Ok(()),
            Destination::InPlace(_) => start,
        };
        if start >= end || place::punch(self.buffered(), from, end - from).is_ok() {
            return Ok(());
        }
        let mut at = from;
        while at < end {
            let len = (end - at).min(ZEROS.len() as u64);
            file::pwrite_all(self.buffered(), &ZEROS[..len as usize], at)
                .map_err(|errno| self.failed(at, errno))?;
            at += len;
        }
        Ok(())
    }

    /// All of it is written: gives it its permissions.
    pub(super) fn complete(&self) -> Result<()> {
        match &self.how {
            Destination::Replacement(beside) => beside.admit(self.buffered()),
            Destination::InPlace(_) => Ok(()),
        }
    }

    /// Waits until all of it is on the disk.
    pub(super) fn sync(&self) -> Result<()> {
        let fd = self.buffered();
        let synced = match self.how {
            Destination::Replacement(_) => place::sync(fd),
            Destination::InPlace(_) => place::sync_data(fd),
        };
        synced.map_err(|errno| cannot_sync(errno).at(self.place(0)))
    }

    /// Drops from the page cache what was written through it.
    pub(super) fn leave_no_cache(&self, edges: &[(u64, u64)]) {
        match self.how {
            Destination::Replacement(_) => cache::drop_range(self.buffered(), 0, 0),
            Destination::InPlace(_) => {
                for (start, end) in edges {
                    let first = start - start % page_size();
                    let len = end.next_multiple_of(page_size()) - first;
                    cache::drop_range(self.buffered(), first, len);
                }
            }
        }
    }

    /// Moves it to its place, durably if `sync` is set.
    pub(super) fn put(self, sync: bool) -> Result<()> {
        match self.how {
            Destination::Replacement(beside) => beside.put(&self.file, sync),
            Destination::InPlace(_) => Ok(()),
        }
    }

    /// A write at `offset` that failed permanently.
    pub(super) fn failed(&self, offset: u64, errno: Errno) -> Error {
        cannot_write(errno).at(self.place(offset))
    }
}

fn stat(file: &OwnedFd, path: &Path) -> Result<file::Stat> {
    file::stat(file.as_fd())
        .map_err(|errno| Error::os("cannot stat", errno).at(path.display().to_string()))
}

/// True if space cannot be reserved here: the file system does not support it, or a sandbox refuses it.
fn is_unknown(errno: Errno) -> bool {
    matches!(errno, Errno::OPNOTSUPP | Errno::NOSYS | Errno::NODEV)
        || sandbox::FALLOCATE.refuses(errno)
}

/// The error if a file cannot be created, or opened for writing.
pub(super) fn cannot_open(errno: Errno) -> Error {
    let error = Error::os(Verb::Write, errno);
    match errno {
        Errno::ACCESS => error.with_remedy("ask for write permission on it, or run as its owner"),
        Errno::PERM => error.with_remedy("see chattr(1) for its flags: lsattr"),
        Errno::TXTBSY => error.with_remedy("it is a running program: stop it first"),
        _ => with_usual_remedy(error, errno),
    }
}

/// The error if bytes cannot be written.
pub(super) fn cannot_write(errno: Errno) -> Error {
    with_usual_remedy(Error::os(Verb::Write, errno), errno)
}

/// The error if written bytes cannot be synced.
pub(super) fn cannot_sync(errno: Errno) -> Error {
    let calls = [sandbox::FSYNC, sandbox::FDATASYNC, sandbox::SYNCFS];
    with_usual_remedy(Error::os("cannot sync", errno), errno).of_calls(&calls)
}

fn with_usual_remedy(error: Error, errno: Errno) -> Error {
    match errno {
        Errno::NOSPC => error.with_remedy("free space on its file system, or save elsewhere"),
        Errno::DQUOT => error.with_remedy("free space, or ask for a larger quota"),
        Errno::FBIG => error.with_remedy("raise the limit on file size: ulimit -f"),
        Errno::ROFS => error.with_remedy("save elsewhere, or mount it for writing"),
        Errno::IO => error.with_remedy("the device failed to write: see the kernel log"),
        Errno::INVAL | Errno::OPNOTSUPP => error.with_remedy(message![
            "leave ",
            Opt::Method,
            " and ",
            Opt::Io,
            " to auto, or save elsewhere"
        ]),
        _ => error,
    }
}
