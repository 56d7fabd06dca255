//! Files that are held in memory for other processes, and taken from them.

use crate::border::{self, Header, Result, shared};
use crate::buffer::{c_string, empty};
use crate::load::path;
use crate::options::{self, watched, word};
use crate::{Buffer, Options, Token};
use dmafile::{Load, Opt};
use dmafile_hold::{Hold, Shared};
use libc::{c_char, c_int};
use serde_json::json;
use std::ffi::{CString, OsStr};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Files in memory that another process loaded, one buffer each. Opaque.
///
/// While it exists, the holder counts this process as a taker. Functions that take it `const` may be called by
/// several threads at once.
pub struct Held {
    files: Vec<(CString, Buffer)>,
    json: CString,
}

/// Files that this process holds in memory, and that one of its threads serves to others. Opaque.
pub struct Holder(dmafile_hold::Holder);

impl Held {
    fn new(held: dmafile_hold::Held) -> Result<Self> {
        let (pid, uid) = held.holder();
        let about = held.files().iter().map(|file| {
            let mut about = json!(file.info);
            about["huge"] = json!(file.huge);
            about
        });
        let json = json!({
            "name": held.name(),
            "socket": held.socket().to_string_lossy(),
            "holder": {"pid": pid, "uid": uid},
            "files": about.collect::<Vec<_>>(),
        });
        let json = c_string(json.to_string())?;
        let files = held.into_files().into_iter();
        let files = files.map(|file| {
            Ok((
                c_string(file.info.file_name().into_vec())?,
                Buffer::taken(file),
            ))
        });
        Ok(Self {
            files: files.collect::<Result<_>>()?,
            json,
        })
    }

    fn file(&self, index: usize) -> Result<&(CString, Buffer)> {
        self.files.get(index).ok_or_else(|| {
            let why = format!("number {index} of {}, counted from 0", self.files.len());
            border::Failure::new(libc::ERANGE, "no such file", &why)
        })
    }
}

/// Applies the caller's options to a [`Hold`] or [`Shared`].
///
/// # Safety
/// As [`Options::apply`], for the strings, token and callback.
macro_rules! with_options {
    ($builder:expr, $options:expr) => {{
        let options: Options = $options;
        if (options.offset, options.length) != (0, 0) {
            let why = "files are held whole; leave it 0";
            let what = "options.offset, options.length";
            return Err(border::Failure::new(libc::EINVAL, what, why));
        }
        let tuning = options.values()?;
        tuning.load(Load::new("")).check()?;
        let tuning = tuning.without(&[Opt::To, Opt::Pages, Opt::Verify]);
        let mut builder = $builder.names(&Header).each(move |load| tuning.load(load));
        if let Some(kind) = options::kind(options.to)? {
            builder = builder.to(kind);
        }
        if let Some(pages) = word(options.pages, "options.pages")? {
            builder = builder.pages(pages);
        }
        if let Some(verify) = word(options.verify, "options.verify")? {
            builder = builder.verify(verify);
        }
        watched!(builder, options)
    }};
}

/// Paths of the caller.
///
/// # Safety
/// `paths` is null or has `count` NUL-terminated strings.
unsafe fn paths(paths: *const *const c_char, count: usize) -> Result<Vec<PathBuf>> {
    border::check(paths.cast(), count, "paths")?;
    let each = (0..count).map(|index| {
        // SAFETY: not null where there are any; as this function requires.
        unsafe { path(paths.add(index).read()) }.map(Path::to_path_buf)
    });
    each.collect()
}

/// A path that may be omitted.
///
/// # Safety
/// `text` is null, or NUL-terminated.
unsafe fn optional_path(text: *const c_char) -> Result<Option<PathBuf>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: as this function requires.
    let bytes = unsafe { border::bytes(text, "path")? };
    Ok(Some(PathBuf::from(OsStr::from_bytes(bytes))))
}

/// Takes the files that another process holds under `name` (`dmafile hold`, dmafile_hold): the same memory,
/// not a copy. Nothing is read. `socket` is the path of the holder's socket; NULL selects the one with that
/// name in this user's folder (dmafile_hold), or else in /run/dmafile. Waits up to `wait_ms` milliseconds until
/// something is held there (0: does not wait). `cancel` ends the wait; NULL for none.
///
/// The holder is not trusted: its memory must be of the kind that it claims, must not be able to shrink, and
/// must contain the bytes of each file.
///
/// Returns 0 and stores the files in `*held`; free them with dmafile_held_free. On failure stores NULL and
/// returns a negative errno: -ENOENT or -ECONNREFUSED if nothing is held there after the wait; -EACCES if
/// this user may not use the socket; -EPERM if other users could have put it there; -EPROTO for an invalid
/// answer; -ETIMEDOUT for no answer within 10 seconds; -EMFILE if the process has too many open descriptors;
/// -ECANCELED if the token was set; -EINVAL for NULL and for an invalid name.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_take(
    name: *const c_char,
    socket: *const c_char,
    wait_ms: u64,
    cancel: *const Token,
    held: *mut *mut Held,
) -> c_int {
    border::status(|| {
        // SAFETY: the header requires null or a place for a pointer.
        unsafe { empty(held, "held")? };
        // SAFETY: the header requires null or a string.
        let name = unsafe { border::required(name, "name")? };
        let mut take = dmafile_hold::Held::take(name).wait(Duration::from_millis(wait_ms));
        // SAFETY: the header requires null or a string.
        if let Some(socket) = unsafe { optional_path(socket)? } {
            take = take.socket(socket);
        }
        // SAFETY: the header requires null or a token that lives until we return.
        if let Some(token) = unsafe { cancel.as_ref() } {
            take = take.cancel(token.0.clone());
        }
        let made = Box::new(Held::new(take.run()?)?);
        // SAFETY: it is not null, so it is a place for a pointer.
        unsafe { held.write(Box::into_raw(made)) };
        Ok(())
    })
}

/// Shares files and models in memory between processes of one user, without a holder: the first process that
/// asks for them loads them, and the others take them from any process that has them. `paths` has `count`
/// paths, at least one; a model's folder or index stands for all of its files. Processes find each other in
/// `folder`, which must belong to this user; NULL selects "shared" in this user's folder (dmafile_hold). Waits up to `wait_ms` milliseconds for another process that is loading. `options`
/// apply to each load (`offset` and `length` must be 0); NULL means all defaults.
///
/// Until the handle is freed, a thread of this process passes the memory on. The memory is freed when the
/// last process is done with it. If the process that loads dies, the next one loads.
///
/// Returns 0 and stores the files in `*held`; free them with dmafile_held_free. On failure stores NULL and
/// returns a negative errno: as dmafile_load; -ETIMEDOUT if another process has not finished loading within
/// the wait; -EPERM if other users can write to the folder; -EEXIST for two files with the same name.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_shared(
    paths: *const *const c_char,
    count: usize,
    folder: *const c_char,
    wait_ms: u64,
    options: *const Options,
    held: *mut *mut Held,
) -> c_int {
    border::status(|| {
        // SAFETY: the header requires null or a place for a pointer.
        unsafe { empty(held, "held")? };
        // SAFETY: the header requires null or strings.
        let all = unsafe { self::paths(paths, count)? };
        let mut builder = Shared::of(all).wait(Duration::from_millis(wait_ms));
        // SAFETY: the header requires null or a string.
        if let Some(folder) = unsafe { optional_path(folder)? } {
            builder = builder.folder(folder);
        }
        // SAFETY: the header requires options, strings, a token and a callback that stay valid until we return.
        let builder = unsafe { with_options!(builder, options::copy(options)?) };
        let made = Box::new(Held::new(builder.run()?)?);
        // SAFETY: it is not null, so it is a place for a pointer.
        unsafe { held.write(Box::into_raw(made)) };
        Ok(())
    })
}

/// The number of files; 0 with errno EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_held_count(held: *const Held) -> usize {
    // SAFETY: the header requires null or a handle that is alive.
    border::value(|| Ok(unsafe { shared(held, "held")? }.files.len()))
}

/// The name of the file with the given number, from 0 to dmafile_held_count - 1, in the order in which they
/// were loaded, without its folder. It belongs to `held`.
///
/// NULL with errno ERANGE for any other number, EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_held_name(held: *const Held, index: usize) -> *const c_char {
    // SAFETY: the header requires null or a handle that is alive.
    border::pointer(|| Ok(unsafe { shared(held, "held")? }.file(index)?.0.as_ptr()))
}

/// The bytes of the file with the given number. The buffer belongs to `held`: do not free it, and do not use
/// it after `held` is freed. Sealed memory, which is the default, is mapped read-only (dmafile_buffer_data);
/// writing to it raises SIGSEGV.
///
/// NULL with errno ERANGE for any other number, EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_held_buffer(held: *const Held, index: usize) -> *const Buffer {
    // SAFETY: the header requires null or a handle that is alive.
    border::pointer(|| Ok(&raw const unsafe { shared(held, "held")? }.file(index)?.1))
}

/// What the holder reports about the files, as one JSON object: what `dmafile take --json` prints. It belongs
/// to `held`. `changed` is null if a file system did not answer whether its file has changed.
///
/// NULL with errno EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_held_json(held: *const Held) -> *const c_char {
    // SAFETY: the header requires null or a handle that is alive.
    border::pointer(|| Ok(unsafe { shared(held, "held")? }.json.as_ptr()))
}

/// Frees what was taken, including its buffers; NULL is a no-op. No other thread may be using it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_held_free(held: *mut Held) {
    // SAFETY: the header requires null or a handle that is alive, freed once.
    unsafe { border::free(held) };
}

/// Loads files and models, each file into separate sealed memory, and serves them to other processes from a
/// thread until dmafile_hold_stop. They are served under `name`; if that is NULL, under the file name of the
/// only path, without its extension. `socket` is the path of the socket, in a folder that only trusted users
/// can write to; NULL selects the name's socket in this user's folder: /run/dmafile for root, and for other users
/// $XDG_RUNTIME_DIR/dmafile, or /dev/shm/dmafile-UID without that variable.
/// Only this user may take the files: the socket has mode 0600. `paths`, `count` and `options` are as in
/// dmafile_shared.
///
/// Returns 0 and stores a handle in `*holder`. On failure stores NULL and returns a negative errno: as
/// dmafile_load; -EADDRINUSE if another holder serves there; -EPERM for a folder that every user can write
/// to; -EEXIST for two files with the same name; -EINVAL for an invalid name.
///
/// Thread-safe. In a child of fork(2) the handle does nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_hold(
    paths: *const *const c_char,
    count: usize,
    name: *const c_char,
    socket: *const c_char,
    options: *const Options,
    holder: *mut *mut Holder,
) -> c_int {
    border::status(|| {
        // SAFETY: the header requires null or a place for a pointer.
        unsafe { empty(holder, "holder")? };
        // SAFETY: the header requires null or strings.
        let mut builder = Hold::of(unsafe { self::paths(paths, count)? });
        // SAFETY: the header requires null or a string.
        if let Some(name) = unsafe { border::optional(name, "name")? } {
            builder = builder.name(name);
        }
        // SAFETY: the header requires null or a string.
        if let Some(socket) = unsafe { optional_path(socket)? } {
            builder = builder.socket(socket);
        }
        // SAFETY: the header requires options, strings, a token and a callback that stay valid until we return.
        let builder = unsafe { with_options!(builder, options::copy(options)?) };
        let made = Box::new(Holder(builder.start()?));
        // SAFETY: it is not null, so it is a place for a pointer.
        unsafe { holder.write(Box::into_raw(made)) };
        Ok(())
    })
}

/// Returns 1 while the hold is served, 0 after `dmafile release`, -EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_hold_serving(holder: *const Holder) -> c_int {
    border::number(|| {
        // SAFETY: the header requires null or a handle that is alive.
        let holder = unsafe { shared(holder, "holder")? };
        Ok(c_int::from(holder.0.is_serving()))
    })
}

/// Ends a hold and frees its handle; NULL is a no-op. Processes that have taken the memory keep it. No other
/// thread may be using the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_hold_stop(holder: *mut Holder) {
    // SAFETY: the header requires null or a handle that is alive, freed once.
    unsafe { border::free(holder) };
}
