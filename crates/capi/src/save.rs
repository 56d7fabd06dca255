//! Saves: writes memory, or the contents of descriptors, to the disk.

use crate::Token;
use crate::border::{self, Failure, Result};
use crate::load::path;
use crate::options::{self, Member, Values, Versioned, check_flags, watched};
use dmafile::{Opt, Origin, OriginPart, Save};
use libc::{c_char, c_int, c_void};
use std::ffi::CString;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU8;

/// A range of bytes to save: memory of the caller, or a range of what a descriptor refers to.
#[repr(C)]
pub struct Part {
    /// Its first byte; NULL to use `fd`.
    pub memory: *const c_void,
    /// Used if `memory` is NULL and `bytes` is not 0: a memfd, a dma-buf, a regular file or a block device; a
    /// pipe only as the only part.
    pub fd: c_int,
    /// Offset of the first byte within `fd`.
    pub offset: u64,
    /// Number of bytes. UINT64_MAX, only if a descriptor is the only part: up to its end.
    pub bytes: u64,
}

/// For dmafile_save_options.flags: return before the bytes are on the disk: a system crash shortly afterwards
/// may leave the old file, or an incomplete one.
pub const DMAFILE_SAVE_NO_SYNC: u32 = 1;
/// For dmafile_save_options.flags: write into the existing file or block device, starting at byte `offset`,
/// and change nothing else in it. That is not atomic: if it ends early, old and new bytes are mixed.
pub const DMAFILE_SAVE_IN_PLACE: u32 = 2;

/// Options of a save. Zero selects the default, and `size` works as in struct dmafile_options; so do
/// `verify`, `progress`, `user` and `cancel`, for a save.
#[repr(C)]
pub struct SaveOptions {
    /// sizeof(struct dmafile_save_options), in bytes.
    pub size: usize,
    /// Method that moves the bytes: "auto" (default), "uring", "threads", "bounce", "module",
    /// "copy-file-range", "premap".
    pub method: *const c_char,
    /// Bypass or use the page cache: "auto" (default), "direct", "buffered".
    pub io: *const c_char,
    /// Compute a checksum of what is saved, and compare it with HEX if given; default: none. "crc32c",
    /// "crc64nvme", "xxh3", "blake3" or "sha256", which the report then contains; with "=HEX" the save fails
    /// (EBADMSG) if the digest differs, before the old file is replaced.
    pub verify: *const c_char,
    /// With DMAFILE_SAVE_IN_PLACE, where the first byte goes; otherwise 0.
    pub offset: u64,
    /// Size of one operation, 4 KiB to 64 MiB, a multiple of the file's alignment for direct I/O; default: 4
    /// MiB for direct I/O, 1 MiB through the page cache, 512 KiB for "bounce".
    pub block: u64,
    /// Operations in flight, 1 to 4096; default: 8 for direct I/O, 1 to 4 by the number of CPUs through the
    /// page cache. At most 64 threads, where each does one operation after another.
    pub queue_depth: u32,
    /// DMAFILE_SAVE_NO_SYNC, DMAFILE_SAVE_IN_PLACE, or'ed.
    pub flags: u32,
    /// Called at most 30 times a second, and once at the end, with the number of bytes written and the total
    /// (for a pipe: the number of bytes that have arrived); NULL for none.
    pub progress: Option<extern "C" fn(done: u64, total: u64, user: *mut c_void)>,
    /// Passed to `progress`.
    pub user: *mut c_void,
    /// Ends the save early (-ECANCELED) when it is set; NULL for none.
    pub cancel: *const Token,
}

// SAFETY: as the trait requires.
unsafe impl Versioned for SaveOptions {
    const NAME: &'static str = "dmafile_save_options";
    const SMALLEST: usize = offset_of!(Self, cancel) + size_of::<*const Token>();
}

impl SaveOptions {
    /// The options of the save.
    ///
    /// # Safety
    /// Its strings are null or end in NUL.
    pub(crate) unsafe fn values(&self) -> Result<Values> {
        use Member::{Number, Off, Text};
        check_flags(self.flags, DMAFILE_SAVE_NO_SYNC | DMAFILE_SAVE_IN_PLACE)?;
        if self.offset != 0 && self.flags & DMAFILE_SAVE_IN_PLACE == 0 {
            let why = "only a save with DMAFILE_SAVE_IN_PLACE has one";
            return Err(Failure::new(libc::EINVAL, "options.offset", why));
        }
        let off = self.flags & DMAFILE_SAVE_NO_SYNC != 0;
        let members = [
            (Opt::Method, Text(self.method)),
            (Opt::Io, Text(self.io)),
            (Opt::Verify, Text(self.verify)),
            (Opt::Block, Number(self.block)),
            (Opt::QueueDepth, Number(self.queue_depth.into())),
            (Opt::Sync, Off(off)),
        ];
        // SAFETY: as this function requires.
        unsafe { Values::of(&members) }
    }

    /// # Safety
    /// As [`Options::apply`](crate::Options).
    unsafe fn apply<'m>(&self, save: Save<'m>) -> Result<Save<'m>> {
        // SAFETY: as this function requires.
        let save = unsafe { watched!(self.values()?.save(save), self) };
        Ok(match self.flags & DMAFILE_SAVE_IN_PLACE {
            0 => save,
            _ => save.offset(self.offset),
        })
    }
}

/// Saves `count` parts back to back, without copying them together first, as the file at `path`, as `options`
/// say; NULL means all defaults. An existing file is replaced completely or not at all. When the function
/// returns, all of the file is on the disk, unless DMAFILE_SAVE_NO_SYNC is set.
///
/// If `report` is not NULL, it gets one JSON object, what `dmafile save --json` prints; free it with
/// dmafile_report_free. NULL on failure.
///
/// Returns the number of bytes saved; or a negative errno, with the old file unchanged and nothing left
/// behind, except for what DMAFILE_SAVE_IN_PLACE has written:
///   -EINVAL: NULL, an unknown word, a number out of range, a range beyond the end of a descriptor, or one of
///     the file into which it would be written in place, if the two overlap;
///   -E2BIG: an option is set that this version does not have, or `size` exceeds 4096;
///   -EBADF: a descriptor is not open for reading; -ESPIPE: a pipe among other parts;
///   -ENOSPC, -EDQUOT, -EFBIG: no room; before the first write, if the file system can reserve space;
///   -EIO: the disk failed, during a write or the sync;
///   -EROFS, -EACCES, -EPERM, -EISDIR, -ENOENT and similar: the file cannot be created;
///   -ENODATA: memory or a file was truncated during the save, or a pipe ended early;
///   -EOPNOTSUPP: the method does not work with this memory or file;
///   -EBADMSG: the checksum differs;
///   -ECANCELED: the token was set;
///   -ENOTRECOVERABLE: a bug in dmafile;
/// and any other error of the kernel.
///
/// Thread-safe. Concurrent writes to the memory may or may not be in the file, byte by byte. Exceeding
/// RLIMIT_FSIZE returns -EFBIG, without a signal.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_save(
    parts: *const Part,
    count: usize,
    path: *const c_char,
    options: *const SaveOptions,
    report: *mut *mut c_char,
) -> i64 {
    border::number(|| {
        // SAFETY: the header requires null or a place for a pointer.
        unsafe { no_report(report) };
        // SAFETY: the header requires null or options.
        let options = unsafe { options::copy(options)? };
        // SAFETY: the header requires `count` parts.
        let parts = unsafe { border::array(parts, count, "parts")? };
        // SAFETY: the header requires memory that stays until we return.
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
        // SAFETY: the header requires null or a string.
        let mut save = Save::new(origin, unsafe { self::path(path)? });
        if let Some(length) = length {
            save = save.length(length);
        }
        // SAFETY: the header requires strings, a token and a callback that stay valid until we return.
        let done = unsafe { options.apply(save)? }.run()?;
        // SAFETY: the header requires null or a place for a pointer.
        unsafe { give_report(report, serde_json::to_string(&done)) };
        Ok(done.bytes.cast_signed())
    })
}

/// Stores NULL at the place for a report.
///
/// # Safety
/// `place` is null or valid for writing.
pub(crate) unsafe fn no_report(place: *mut *mut c_char) {
    if !place.is_null() {
        // SAFETY: as this function requires.
        unsafe { place.write(std::ptr::null_mut()) };
    }
}

/// Passes a report to the caller, if it has a place for it.
///
/// # Safety
/// `place` is null or valid for writing.
pub(crate) unsafe fn give_report(place: *mut *mut c_char, json: serde_json::Result<String>) {
    if !place.is_null() {
        let json = json.expect("a report is plain data");
        let json = CString::new(json).expect("JSON has no NUL");
        // SAFETY: as this function requires.
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

/// Converts a part.
///
/// # Safety
/// Its memory stays valid for as long as the result.
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
        // SAFETY: not null, and not longer than memory can be; the caller has that many bytes there. They are
        // only read.
        _ => unsafe { std::slice::from_raw_parts(part.memory.cast::<AtomicU8>(), len) },
    })))
}

/// Duplicates a descriptor of the caller.
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

/// Frees a report of dmafile_save or dmafile_snapshot_save; NULL is a no-op. No other thread may be using it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_report_free(report: *mut c_char) {
    if !report.is_null() {
        // SAFETY: the header requires what dmafile_save returned, freed once.
        drop(unsafe { CString::from_raw(report) });
    }
}
