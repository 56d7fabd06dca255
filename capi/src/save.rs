//! Saves: memory and what descriptors stand for to the disk.

use crate::Token;
use crate::border::{self, Failure, Result};
use crate::load::path;
use crate::options::{self, Growing, check_flags, some, teller, word};
use dmafile::{Io, Method, Origin, OriginPart, Save};
use libc::{c_char, c_int, c_void};
use std::ffi::CString;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU8;

/// A range of bytes that is saved: memory of the caller, or a part of what a descriptor stands for.
#[repr(C)]
pub struct Part {
    /// Its first byte; NULL where a descriptor is meant.
    pub memory: *const c_void,
    /// Where `memory` is NULL and `bytes` is not 0: a memfd, a dma-buf, a regular file, a block device;
    /// a pipe where it is the only part.
    pub fd: c_int,
    /// The first byte of what `fd` stands for.
    pub offset: u64,
    /// How many bytes. UINT64_MAX where a descriptor is the only part: to its end.
    pub bytes: u64,
}

/// For dmafile_save_options.flags: do not wait until the file and its name are on the disk. A crash of the
/// machine soon after may leave the old file or an incomplete one.
pub const DMAFILE_SAVE_NO_SYNC: u32 = 1;
/// For dmafile_save_options.flags: write into the file or block device that exists, from byte `offset` of it
/// on, and touch nothing else of it. That is not atomic: what ends it early leaves old bytes and new ones.
pub const DMAFILE_SAVE_IN_PLACE: u32 = 2;

/// How a save should be done. Zeros are defaults, and `size` is used as in struct dmafile_options; so are
/// `verify`, `progress`, `user` and `cancel`, of a save.
#[repr(C)]
pub struct SaveOptions {
    /// sizeof(struct dmafile_save_options), in bytes.
    pub size: usize,
    /// How bytes move: "auto" (default), "uring", "threads", "bounce", "module", "copy-file-range",
    /// "premap".
    pub method: *const c_char,
    /// Past or through the page cache: "auto" (default), "direct", "buffered".
    pub io: *const c_char,
    /// A checksum to compute: "crc32c", "xxh3", "blake3" or "sha256" puts it into the report;
    /// "sha256=HEX" and its like fail the save where it differs (-EBADMSG). Default: none.
    pub verify: *const c_char,
    /// With DMAFILE_SAVE_IN_PLACE, where the first byte goes; else 0.
    pub offset: u64,
    /// Bytes of one operation: 4 KiB to 64 MiB, a multiple of the file's direct alignment; default left
    /// to the plan.
    pub block: u64,
    /// Operations in flight, 1 to 4096; default left to the plan.
    pub queue_depth: u32,
    /// DMAFILE_SAVE_NO_SYNC, DMAFILE_SAVE_IN_PLACE, or'ed.
    pub flags: u32,
    /// Called now and then, at most 30 times a second, and once at the end, with how many bytes are written
    /// and how many there will be: of a pipe, how many have come.
    pub progress: Option<extern "C" fn(done: u64, total: u64, user: *mut c_void)>,
    /// Handed to `progress` as it is.
    pub user: *mut c_void,
    /// Ends the save early (-ECANCELED) once it is set; NULL for none.
    pub cancel: *const Token,
}

// SAFETY: as the trait asks for.
unsafe impl Growing for SaveOptions {
    const NAME: &'static str = "dmafile_save_options";
    const SMALLEST: usize = offset_of!(Self, cancel) + size_of::<*const Token>();
}

/// What they say of how bytes move.
pub(crate) struct Ways {
    method: Option<Method>,
    io: Option<Io>,
    block: Option<u64>,
    queue_depth: Option<u32>,
}

impl Ways {
    pub(crate) fn apply<'m>(&self, mut save: Save<'m>) -> Save<'m> {
        if let Some(method) = self.method {
            save = save.method(method);
        }
        if let Some(io) = self.io {
            save = save.io(io);
        }
        if let Some(block) = self.block {
            save = save.block(block);
        }
        if let Some(operations) = self.queue_depth {
            save = save.queue_depth(operations);
        }
        save
    }
}

impl SaveOptions {
    /// # Safety
    /// Its strings are null or end in NUL.
    pub(crate) unsafe fn ways(&self) -> Result<Ways> {
        check_flags(self.flags, DMAFILE_SAVE_NO_SYNC | DMAFILE_SAVE_IN_PLACE)?;
        if self.offset != 0 && self.flags & DMAFILE_SAVE_IN_PLACE == 0 {
            let why = "only a save with DMAFILE_SAVE_IN_PLACE has one";
            return Err(Failure::new(libc::EINVAL, "options.offset", why));
        }
        // SAFETY: as this function asks for.
        let (method, io) = unsafe {
            (
                word(self.method, "options.method")?,
                word(self.io, "options.io")?,
            )
        };
        Ok(Ways {
            method,
            io,
            block: some(self.block),
            queue_depth: some(self.queue_depth),
        })
    }

    /// # Safety
    /// As [`Options::apply`](crate::Options).
    unsafe fn apply<'m>(&self, save: Save<'m>) -> Result<Save<'m>> {
        // SAFETY: as this function asks for.
        let mut save = unsafe { self.ways()? }.apply(save.names(&border::Header));
        // SAFETY: as this function asks for.
        if let Some(verify) = unsafe { word(self.verify, "options.verify")? } {
            save = save.verify(verify);
        }
        save = save.sync(self.flags & DMAFILE_SAVE_NO_SYNC == 0);
        if self.flags & DMAFILE_SAVE_IN_PLACE != 0 {
            save = save.in_place(self.offset);
        }
        if let Some(call) = self.progress {
            save = save.progress(teller(call, self.user));
        }
        // SAFETY: as this function asks for.
        if let Some(token) = unsafe { self.cancel.as_ref() } {
            save = save.cancel(token.0.clone());
        }
        Ok(save)
    }
}

/// Saves `count` parts, one behind the other and without gathering them first, as the file at `path`,
/// which is replaced whole or not at all, as `options` say; NULL there is all defaults. When it returns,
/// all of it is on the disk, unless DMAFILE_SAVE_NO_SYNC is set.
///
/// `report` is NULL, or gets one JSON object, what `dmafile save --json` prints, to be freed with
/// dmafile_report_free; NULL on failure.
///
/// Returns how many bytes were saved; or a negative errno, with the file as it was and nothing left
/// behind, except for what DMAFILE_SAVE_IN_PLACE has written:
///   -EINVAL for NULL, an unknown word, a number out of its range, a range past the end of what a
///   descriptor stands for;
///   -E2BIG where an option is set that this version does not know, or `size` is beyond 4096;
///   -EBADF for a descriptor that is not open for reading, -ESPIPE for a pipe beside other parts;
///   -ENOSPC, -EDQUOT, -EFBIG before the first write, where the file system reserves space;
///   -EIO from the disk, at a write or the sync;
///   -EROFS, -EACCES, -EPERM, -EISDIR, -ENOENT and their like for the file;
///   -ENODATA where memory or a file is cut short meanwhile, or a pipe ends early;
///   -EOPNOTSUPP for a method that cannot serve;
///   -EBADMSG where the checksum differs;
///   -ECANCELED by its token;
///   -ENOTRECOVERABLE for a mistake in dmafile;
/// and whatever else the kernel gives.
///
/// Thread-safe. What is written to the memory meanwhile may be in the file or not, byte by byte. What
/// would exceed RLIMIT_FSIZE is -EFBIG, without a signal.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_save(
    parts: *const Part,
    count: usize,
    path: *const c_char,
    options: *const SaveOptions,
    report: *mut *mut c_char,
) -> i64 {
    border::number(|| {
        // SAFETY: the header asks for null or a place for a pointer.
        unsafe { no_report(report) };
        // SAFETY: the header asks for null or options.
        let options = unsafe { options::copy(options)? };
        // SAFETY: the header asks for `count` parts.
        let parts = unsafe { border::array(parts, count, "parts")? };
        // SAFETY: the header asks for memory that stays until we return.
        let parts = parts.iter().map(|part| unsafe { shown(part) });
        let mut parts = parts.collect::<Result<Vec<_>>>()?;
        let mut length = None;
        let origin = match (count, parts.pop()) {
            (1, Some(Shown::Fd(fd, at, bytes))) => {
                length = (bytes != u64::MAX).then_some(bytes);
                Origin::fd(fd, at)
            }
            (_, last) => Origin::Parts(parts.into_iter().chain(last).map(Shown::part).collect()),
        };
        // SAFETY: the header asks for null or a string.
        let mut save = Save::new(origin, unsafe { self::path(path)? });
        if let Some(length) = length {
            save = save.length(length);
        }
        // SAFETY: the header asks for strings, a token and a callback that last until we return.
        let done = unsafe { options.apply(save)? }.run()?;
        // SAFETY: the header asks for null or a place for a pointer.
        unsafe { give_report(report, serde_json::to_string(&done)) };
        Ok(done.bytes.cast_signed())
    })
}

/// Empties the place of a report.
///
/// # Safety
/// `place` is null or valid for writing.
pub(crate) unsafe fn no_report(place: *mut *mut c_char) {
    if !place.is_null() {
        // SAFETY: as this function asks for.
        unsafe { place.write(std::ptr::null_mut()) };
    }
}

/// Hands a report to the caller, where it has a place for it.
///
/// # Safety
/// `place` is null or valid for writing.
pub(crate) unsafe fn give_report(place: *mut *mut c_char, json: serde_json::Result<String>) {
    if !place.is_null() {
        let json = json.expect("a report is plain data");
        let json = CString::new(json).expect("JSON has no NUL");
        // SAFETY: as this function asks for.
        unsafe { place.write(json.into_raw()) };
    }
}

enum Shown<'m> {
    Memory(OriginPart<'m>),
    Fd(OwnedFd, u64, u64),
}

impl<'m> Shown<'m> {
    fn part(self) -> OriginPart<'m> {
        match self {
            Self::Memory(part) => part,
            Self::Fd(fd, at, bytes) => OriginPart::fd(fd, at, bytes),
        }
    }
}

/// What a part names.
///
/// # Safety
/// Its memory is there for as long as what comes back.
unsafe fn shown<'m>(part: &Part) -> Result<Shown<'m>> {
    if part.memory.is_null() && part.bytes > 0 {
        return Ok(Shown::Fd(
            duplicate(part.fd, "parts")?,
            part.offset,
            part.bytes,
        ));
    }
    let len = usize::try_from(part.bytes).unwrap_or(usize::MAX);
    border::check(part.memory.cast(), len, "parts")?;
    Ok(Shown::Memory(OriginPart::shared(match len {
        0 => &[],
        // SAFETY: not null, and as long as memory can be; the caller has that many bytes there. They are
        // only read.
        _ => unsafe { std::slice::from_raw_parts(part.memory.cast::<AtomicU8>(), len) },
    })))
}

/// A duplicate of a descriptor of the caller.
pub(crate) fn duplicate(fd: c_int, what: &str) -> Result<OwnedFd> {
    if fd < 0 {
        let why = "a descriptor is negative";
        return Err(Failure::new(libc::EBADF, what, why));
    }
    // SAFETY: not negative; a number that is not open is EBADF in the call.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    fd.try_clone_to_owned().map_err(|error| {
        let errno = error.raw_os_error().unwrap_or(libc::EBADF);
        let what = format!("fd:{}", fd.as_raw_fd());
        Failure::new(errno, &what, "cannot use the descriptor")
    })
}

/// Frees a report of dmafile_save or dmafile_snapshot_save; NULL is nothing to free. No other thread may be using it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_report_free(report: *mut c_char) {
    if !report.is_null() {
        // SAFETY: the header asks for what dmafile_save gave, freed once.
        drop(unsafe { CString::from_raw(report) });
    }
}
