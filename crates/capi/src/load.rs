//! Loads of files.

use crate::border::{self, Result};
use crate::buffer::empty;
use crate::options::User;
use crate::{Buffer, Options, options};
use dmafile::{Load, ObjectReader, ReadBuf, RemoteObject};
use libc::{c_char, c_int, c_void};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

/// A path of the caller, which may be any bytes.
///
/// # Safety
/// `path` is null, or NUL-terminated and does not change during the call.
pub(crate) unsafe fn path<'a>(path: *const c_char) -> Result<&'a Path> {
    // SAFETY: as this function requires.
    let bytes = unsafe { border::bytes(path, "path")? };
    Ok(Path::new(OsStr::from_bytes(bytes)))
}

/// Loads, and gives the buffer to the caller.
///
/// # Safety
/// `options` is null, or as the header requires; `buffer` is a place for a pointer.
unsafe fn run(load: Load, options: *const Options, buffer: *mut *mut Buffer) -> Result<()> {
    // SAFETY: as this function requires.
    let options = unsafe { options::copy(options)? };
    // SAFETY: the header requires strings, a token and a callback that stay valid until we
    // return.
    let loaded = unsafe { options.apply(load)? }.run()?;
    // SAFETY: as this function requires.
    unsafe { Buffer::of(loaded)?.give(buffer) };
    Ok(())
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
        // SAFETY: the header requires null or options, and `empty` a place for a pointer.
        unsafe { run(load, options, buffer) }
    })
}

/// The `read` of a CallerObject.
type ReadFn =
    extern "C" fn(user: *mut c_void, offset: u64, memory: *mut c_void, len: usize) -> c_int;

/// Loads `size` bytes that are in no file, for example an object in a store, into newly allocated memory,
/// as `options` say; NULL means all defaults. `name` is their name in messages, in UTF-8.
///
/// `read` is called for each part, with `user`, while later memory is being allocated. It reads `len` bytes
/// from byte `offset` on to `memory`, and returns 0, or a negative errno, which ends the load. It is called
/// from several threads at the same time, as many as the option `queue_depth` says, and must not use `memory`
/// after it has returned. The bytes must not change during the load.
///
/// Returns 0 and stores the buffer in `*buffer`, or a negative errno: that of `read`, -ENODATA for a size of 0,
/// otherwise as dmafile_load.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_load_object(
    name: *const c_char,
    size: u64,
    read: Option<
        extern "C" fn(user: *mut c_void, offset: u64, memory: *mut c_void, len: usize) -> c_int,
    >,
    user: *mut c_void,
    options: *const Options,
    buffer: *mut *mut Buffer,
) -> c_int {
    border::status(|| {
        // SAFETY: the header requires null or a place for a pointer.
        unsafe { empty(buffer, "buffer")? };
        // SAFETY: the header requires null or a string.
        let name = unsafe { self::path(name)? };
        let read = read.ok_or_else(|| border::null("read"))?;
        let object = CallerObject {
            name: name.to_string_lossy().into_owned(),
            size,
            read,
            user: User::of(user),
        };
        let load = Load::of_object(Arc::new(object));
        // SAFETY: the header requires null or options, and `empty` a place for a pointer.
        unsafe { run(load, options, buffer) }
    })
}

/// What the caller reads.
struct CallerObject {
    name: String,
    size: u64,
    read: ReadFn,
    user: User,
}

impl RemoteObject for CallerObject {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn reader(&self) -> io::Result<Box<dyn ObjectReader + '_>> {
        Ok(Box::new(CallerReader(self)))
    }
}

struct CallerReader<'a>(&'a CallerObject);

impl ObjectReader for CallerReader<'_> {
    fn read(&mut self, offset: u64, into: &mut ReadBuf<'_>) -> io::Result<()> {
        let object = self.0;
        while into.remaining() > 0 {
            into.check()?;
            let at = offset + into.filled();
            into.fill(usize::MAX, |memory| {
                let start = memory.as_mut_ptr().cast();
                match (object.read)(object.user.pointer(), at, start, memory.len()) {
                    0 => Ok(memory.len()),
                    errno if errno < 0 => Err(io::Error::from_raw_os_error(-errno)),
                    other => Err(io::Error::other(format!("read returned {other}"))),
                }
            })?;
        }
        Ok(())
    }
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
