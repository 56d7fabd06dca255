//! Loads of files.

use crate::border::{self, Result};
use crate::buffer::empty;
use crate::{Buffer, Options, options};
use dmafile::Load;
use libc::{c_char, c_int, c_void};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A path of the caller, in whatever bytes.
///
/// # Safety
/// `path` is null, or ends in NUL and does not change meanwhile.
pub(crate) unsafe fn path<'a>(path: *const c_char) -> Result<&'a Path> {
    // SAFETY: as this function asks for.
    let bytes = unsafe { border::bytes(path, "path")? };
    Ok(Path::new(OsStr::from_bytes(bytes)))
}

/// Loads the file at `path` into memory that is allocated for it, as `options` say; NULL there is
/// all defaults. Returns when every byte is in place.
///
/// Returns 0, with the buffer in `*buffer`, to be freed with dmafile_buffer_free. On failure a
/// negative errno, with NULL in `*buffer`, and nothing is left behind, except in an "fd:N" that was
/// being filled, whose contents are undefined then:
///   -EINVAL for NULL, an unknown word, a number out of its range;
///   -E2BIG where an option is set that this version does not know, or `size` is beyond 4096;
///   -ENOENT, -EACCES, -EISDIR and their like for the file;
///   -ENODATA for an empty file, or one that is cut short meanwhile;
///   -EIO from the disk;
///   -ENOMEM where memory is short, or a limit on it is;
///   -EOPNOTSUPP for a pair of method and memory that cannot be;
///   -EBADMSG where the checksum differs;
///   -ECANCELED by its token;
///   -ENOTRECOVERABLE for a mistake in dmafile;
/// and whatever else the kernel gives. dmafile_strerror_r has the sentence.
///
/// Thread-safe. Threads that it starts inherit the caller's signal mask, and have ended when it
/// returns. Beyond the limit on file size (RLIMIT_FSIZE), which holds for memfds too, the kernel
/// sends SIGXFSZ; a program that ignores or handles that gets -EFBIG instead.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_load(
    path: *const c_char,
    options: *const Options,
    buffer: *mut *mut Buffer,
) -> c_int {
    border::status(|| {
        // SAFETY: the header asks for null or a place for a pointer.
        unsafe { empty(buffer, "buffer")? };
        // SAFETY: the header asks for null or a string.
        let load = Load::new(unsafe { self::path(path)? });
        // SAFETY: the header asks for null or options.
        let options = unsafe { options::copy(options)? };
        // SAFETY: the header asks for strings, a token and a callback that last until we return.
        let loaded = unsafe { options.apply(load)? }.run()?;
        // SAFETY: it is not null, and so a place for a pointer.
        unsafe { Buffer::of(loaded)?.give(buffer) };
        Ok(())
    })
}

/// Loads the file at `path` into `len` bytes of the caller's at `memory`, as `options` say (their
/// `to` has to be NULL); NULL there is all defaults. The first wanted byte of the file goes to the
/// first of `memory`; what lies behind the last is zeroed, up to `len`.
///
/// Direct reads need an address that is congruent with the offset in the file, modulo the file's
/// direct alignment: memory from mmap(2), or aligned to 4096, and an offset of 0 are. Elsewhere the
/// bytes come through the page cache.
///
/// Returns how many bytes of the file are there, at least 1; or a negative errno, with the contents
/// undefined: -EINVAL where `memory` is too small, else as dmafile_load.
///
/// Thread-safe; nobody may use the memory meanwhile. Do not fork(2) meanwhile on Linux before 6.5: a
/// direct read into private memory may land in the child's copy of it (open(2), O_DIRECT).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_load_into(
    path: *const c_char,
    options: *const Options,
    memory: *mut c_void,
    len: usize,
) -> i64 {
    border::number(|| {
        // SAFETY: the header asks for null or a string.
        let load = Load::new(unsafe { self::path(path)? });
        // SAFETY: the header asks for null or options.
        let options = unsafe { options::copy(options)? };
        // SAFETY: the header asks for strings, a token and a callback that last until we return.
        let load = unsafe { options.apply_elsewhere(load)? };
        border::check(memory.cast(), len.max(1), "memory")?;
        // SAFETY: not null; the header asks for `len` bytes that nobody else uses, of C memory,
        // which has bytes of some value in it.
        let memory = unsafe { std::slice::from_raw_parts_mut(memory.cast::<u8>(), len) };
        Ok(load.run_into(memory)?.bytes.cast_signed())
    })
}
