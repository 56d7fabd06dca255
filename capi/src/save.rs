//! Saves: memory and what descriptors stand for to the disk.

use crate::Token;
use crate::border::{self, Failure, Result};
use crate::load::path;
use crate::options::word;
use dmafile::{Origin, OriginPart, Save};
use libc::{c_char, c_int, c_void};
use std::ffi::CString;
use std::os::fd::{BorrowedFd, OwnedFd};
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
    /// How many bytes.
    pub bytes: u64,
}

/// Saves `count` parts, one behind the other and without gathering them first, as the file at `path`,
/// which is replaced whole or not at all. Where `offset` is not NULL they are written into the file or
/// block device that exists, from byte `*offset` on: that is not atomic. When it returns, all of it is
/// on the disk.
///
/// `verify` is NULL or as in dmafile_options, and `cancel` NULL or a token that ends the save early.
/// `report` is NULL, or gets one JSON object, what `dmafile save --json` prints, to be freed with
/// dmafile_report_free; NULL on failure.
///
/// Returns how many bytes were saved; or a negative errno, and the file is as it was, but for a part that
/// is written in place: -EINVAL for NULL, an unknown word, a range past the end; -EBADF, -ESPIPE for a
/// pipe beside other parts, -ENOSPC, -EDQUOT, -EIO, -EROFS, -EACCES, -EFBIG, -EISDIR; -ENODATA where a file is cut short
/// meanwhile; -EBADMSG where the checksum differs; -ECANCELED by its token.
///
/// Thread-safe. What is written to the memory meanwhile may be in the file or not, byte by byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_save(
    parts: *const Part,
    count: usize,
    path: *const c_char,
    offset: *const u64,
    verify: *const c_char,
    cancel: *const Token,
    report: *mut *mut c_char,
) -> i64 {
    border::number(|| {
        if !report.is_null() {
            // SAFETY: the header asks for null or a place for a pointer.
            unsafe { report.write(std::ptr::null_mut()) };
        }
        border::check(parts.cast(), count, "parts")?;
        let parts = match count {
            0 => &[],
            // SAFETY: not null; the header asks for `count` parts.
            _ => unsafe { std::slice::from_raw_parts(parts, count) },
        };
        // SAFETY: the header asks for memory that stays until we return.
        let parts = parts.iter().map(|part| unsafe { shown(part) });
        let mut parts = parts.collect::<Result<Vec<_>>>()?;
        let mut length = None;
        let origin = match (count, parts.pop()) {
            (1, Some(Shown::Fd(fd, at, bytes))) => {
                length = Some(bytes);
                Origin::fd(fd, at)
            }
            (_, last) => Origin::Parts(parts.into_iter().chain(last).map(Shown::part).collect()),
        };
        // SAFETY: the header asks for null or a string.
        let mut save = Save::new(origin, unsafe { self::path(path)? }).names(&border::Header);
        if let Some(length) = length {
            save = save.length(length);
        }
        // SAFETY: the header asks for null or a place with a number.
        if let Some(offset) = unsafe { offset.as_ref() } {
            save = save.in_place(*offset);
        }
        // SAFETY: the header asks for null or a string.
        if let Some(verify) = unsafe { word(verify, "verify")? } {
            save = save.verify(verify);
        }
        // SAFETY: the header asks for null or a token that lives until we return.
        if let Some(token) = unsafe { cancel.as_ref() } {
            save = save.cancel(token.0.clone());
        }
        let done = save.run()?;
        if !report.is_null() {
            let json = serde_json::to_string(&done).expect("a report is plain data");
            let json = CString::new(json).expect("JSON has no NUL");
            // SAFETY: not null, and so a place for a pointer.
            unsafe { report.write(json.into_raw()) };
        }
        Ok(done.bytes.cast_signed())
    })
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
        if part.fd < 0 {
            return Err(Failure::new(
                libc::EBADF,
                "parts",
                "a descriptor is negative",
            ));
        }
        // SAFETY: not negative; a number that is not open is EBADF in the call.
        let fd = unsafe { BorrowedFd::borrow_raw(part.fd) }.try_clone_to_owned();
        let fd = fd.map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::EBADF);
            Failure::new(
                errno,
                &format!("fd:{}", part.fd),
                "cannot use the descriptor",
            )
        })?;
        return Ok(Shown::Fd(fd, part.offset, part.bytes));
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

/// Frees a report of dmafile_save; NULL is nothing to free. No other thread may be using it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_report_free(report: *mut c_char) {
    if !report.is_null() {
        // SAFETY: the header asks for what dmafile_save gave, freed once.
        drop(unsafe { CString::from_raw(report) });
    }
}
