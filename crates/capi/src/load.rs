//! Loads of files.

use crate::border::{self, Result};
use crate::buffer::empty;
use crate::{Buffer, Options, options};
use dmafile::Load;
use libc::{c_char, c_int, c_void};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A path of the caller, which may be any bytes.
///
/// # Safety
/// `path` is null, or NUL-terminated and does not change during the call.
pub(crate) unsafe fn path<'a>(path: *const c_char) -> Result<&'a Path> {
    // SAFETY: as this function requires.
    let bytes = unsafe { border::bytes(path, "path")? };
    Ok(Path::new(OsStr::from_bytes(bytes)))
}

/// Loads the file at `path` into newly allocated memory, as `options` say; NULL means all defaults.
/// Returns when every byte is in place.
///
/// Returns 0 and stores the buffer in `*buffer`; free it with dmafile_buffer_free. On failure returns a
/// negative errno, stores NULL in `*buffer`, and leaves nothing behind, except that the contents of an
/// "fd:N" that was being filled are undefined:
///   -EINVAL: NULL, an unknown word, or a number out of range;
///   -E2BIG: an option is set that this version does not have, or `size` exceeds 4096;
///   -ENOENT, -EACCES, -EISDIR and similar: the file cannot be opened;
///   -ENODATA: the file is empty, or was truncated during the load;
///   -EIO: the disk failed;
///   -ENOMEM: not enough memory, or a limit on it was reached;
///   -EOPNOTSUPP: the method does not work with this kind of memory;
///   -EBADMSG: the checksum differs;
///   -ECANCELED: the token was set;
///   -ENOTRECOVERABLE: a bug in dmafile;
/// and any other error of the kernel. dmafile_strerror_r returns the message.
///
/// Thread-safe. Threads that the load starts inherit the caller's signal mask and end before it
/// returns. Beyond the limit on file size (RLIMIT_FSIZE), which applies to memfds too, the kernel
/// sends SIGXFSZ; a program that ignores or handles it gets -EFBIG instead.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_load(
    path: *const c_char,
    options: *const Options,
    buffer: *mut *mut Buffer,
) -> c_int {
    border::status(|| {
        // SAFETY: the header requires null or a place for a pointer.
        unsafe { empty(buffer, "buffer")? };
        // SAFETY: the header requires null or a string.
        let load = Load::new(unsafe { self::path(path)? });
        // SAFETY: the header requires null or options.
        let options = unsafe { options::copy(options)? };
        // SAFETY: the header requires strings, a token and a callback that stay valid until we
        // return.
        let loaded = unsafe { options.apply(load)? }.run()?;
        // SAFETY: it is not null, so it is a place for a pointer.
        unsafe { Buffer::of(loaded)?.give(buffer) };
        Ok(())
    })
}

/// Loads the file at `path` into `len` bytes of the caller's memory at `memory`, as `options` say;
/// NULL means all defaults, and their `to` must be NULL. The first requested byte of the file goes
/// to the first byte of `memory`. What follows the last one is zeroed, up to `len`.
///
/// Direct reads into place require that the address and the offset in the file are equal modulo the
/// file's direct I/O alignment. Memory from mmap(2), or aligned to 4096 bytes, with an offset of 0
/// meets that. Otherwise the bytes are read into a small ring and copied.
///
/// Returns the number of bytes loaded, at least 1; or a negative errno, with the contents undefined:
/// -EINVAL if `memory` is too small, otherwise as dmafile_load.
///
/// Thread-safe; nothing else may use the memory during the call. Before Linux 6.5, do not fork(2)
/// during the call: a direct read into private memory may end up in the child's copy of it (see
/// O_DIRECT in open(2)).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_load_into(
    path: *const c_char,
    options: *const Options,
    memory: *mut c_void,
    len: usize,
) -> i64 {
    border::number(|| {
        // SAFETY: the header requires null or a string.
        let load = Load::new(unsafe { self::path(path)? });
        // SAFETY: the header requires null or options.
        let options = unsafe { options::copy(options)? };
        // SAFETY: the header requires strings, a token and a callback that stay valid until we
        // return.
        let load = unsafe { options.apply_elsewhere(load)? };
        border::check(memory.cast(), len.max(1), "memory")?;
        // SAFETY: not null; the header requires `len` bytes that nothing else uses. They are C
        // memory, so every byte has some value.
        let memory = unsafe { std::slice::from_raw_parts_mut(memory.cast::<u8>(), len) };
        Ok(load.run_into(memory)?.bytes.cast_signed())
    })
}
