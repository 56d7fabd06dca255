//! Processes whose memory comes from a hold, frozen to a folder and thawed from it.

use crate::Token;
use crate::border::{self, Result, exclusive, shared};
use crate::buffer::empty;
use crate::load::path;
use crate::options::{self, Versioned, check_flags};
use crate::save::{give_report, no_report};
use dmafile_freeze::{Freeze, Thaw};
use libc::{c_char, c_int};
use std::ffi::{OsStr, OsString};
use std::mem::offset_of;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

/// For dmafile_freeze_options.flags: the processes run on afterwards.
pub const DMAFILE_FREEZE_LEAVE_RUNNING: u64 = 1;

/// Options of dmafile_freeze and dmafile_thaw. Zero selects the default, and `size` works as in struct
/// dmafile_options.
#[repr(C)]
pub struct FreezeOptions {
    /// sizeof(struct dmafile_freeze_options), in bytes.
    pub size: usize,
    /// Further options of criu, such as "--tcp-close", and NULL after the last one; NULL for none.
    pub criu: *const *const c_char,
    /// Only for a freeze: sockets of holds that are neither in this user's folder (dmafile_hold) nor in
    /// /run/dmafile, and NULL after the last one; NULL for none.
    pub sockets: *const *const c_char,
    /// Ends it early (-ECANCELED) when it is set; NULL for none. It must stay valid until the call has
    /// returned.
    pub cancel: *const Token,
    /// Only for a freeze: DMAFILE_FREEZE_LEAVE_RUNNING, or 0.
    pub flags: u64,
}

// SAFETY: as the trait requires.
unsafe impl Versioned for FreezeOptions {
    const NAME: &'static str = "dmafile_freeze_options";
    const SMALLEST: usize = offset_of!(Self, flags) + size_of::<u64>();
}

/// Processes that run again. Opaque.
pub struct Thawed {
    pids: Vec<u32>,
    thawed: Option<dmafile_freeze::Thawed>,
}

/// The strings up to NULL.
///
/// # Safety
/// `all` is null, or has NUL-terminated strings and null after the last one.
unsafe fn strings(all: *const *const c_char) -> Result<Vec<OsString>> {
    let mut found = Vec::new();
    if all.is_null() {
        return Ok(found);
    }
    for index in 0.. {
        // SAFETY: it is not after the null, as this function requires.
        let one = unsafe { all.add(index).read() };
        if one.is_null() {
            break;
        }
        // SAFETY: as this function requires.
        let bytes = unsafe { border::bytes(one, "options")? };
        found.push(OsStr::from_bytes(bytes).to_os_string());
    }
    Ok(found)
}

/// Freezes `count` processes, at least one, and their descendants: saves their state and memory to a new folder,
/// and ends them when all of it is on the disk. They become valid together. Memory that they took from a hold
/// (dmafile_take) stays there: the folder names it instead. It needs root, and runs criu(8), 3.19 or later.
/// `options` may be NULL. `report` is as in dmafile_save; it contains what `dmafile freeze --json` prints.
///
/// Returns 0, or a negative errno, and then the processes run on: -ENOENT without criu, -EOPNOTSUPP if it is too
/// old; -ESRCH for a process that does not exist; -EINVAL
/// if this process is one of them; -EBUSY for one with an io_uring, which criu cannot dump; -EEXIST
/// if the folder exists; -EIO if criu refuses, with its words in the message; others as dmafile_save.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_freeze(
    pids: *const u32,
    count: usize,
    folder: *const c_char,
    options: *const FreezeOptions,
    report: *mut *mut c_char,
) -> c_int {
    border::status(|| {
        // SAFETY: the header requires null or a place for a pointer.
        unsafe { no_report(report) };
        // SAFETY: the header requires null or options.
        let options = unsafe { options::copy(options)? };
        // SAFETY: the header requires `count` numbers.
        let pids = unsafe { border::array(pids, count, "pids")? };
        check_flags(
            u32::try_from(options.flags).unwrap_or(u32::MAX),
            DMAFILE_FREEZE_LEAVE_RUNNING as u32,
        )?;
        let mut freeze = Freeze::of(pids.iter().copied())
            // SAFETY: the header requires null or a string.
            .to(unsafe { path(folder)? })
            .leave_running(options.flags & DMAFILE_FREEZE_LEAVE_RUNNING != 0)
            // SAFETY: the header requires null or strings.
            .options(unsafe { strings(options.criu)? });
        // SAFETY: the header requires null or strings.
        for socket in unsafe { strings(options.sockets)? } {
            freeze = freeze.socket(socket);
        }
        // SAFETY: the header requires null or a token that lives until we return.
        if let Some(token) = unsafe { options.cancel.as_ref() } {
            freeze = freeze.cancel(token.0.clone());
        }
        let done = freeze.run()?;
        // SAFETY: the header requires null or a place for a pointer.
        unsafe { give_report(report, serde_json::to_string(&done)) };
        Ok(())
    })
}

/// Lets the processes run again that dmafile_freeze has frozen to `folder`, as children of this process. Memory that
/// is held comes from its hold; if nothing holds it, its file is loaded, after waiting up to `wait_ms` milliseconds
/// for another process that is loading it. All other memory is filled from the folder. Every byte is compared with
/// its digest before anything runs. It needs root, and runs criu(8), 3.19 or later. `options` may be NULL.
///
/// Returns 0 and stores the processes in `*thawed`; free it with dmafile_thawed_free. On failure stores NULL, and
/// nothing has run: -ENOENT without criu or images, -EOPNOTSUPP if criu is too old; -EPERM if other users can change
/// the images; -EBADMSG if one is damaged; -ESTALE if what is held, or the file that would be loaded in its place, is
/// not what the processes had; -EIO if criu refuses, with its words in the message; others as dmafile_load.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_thaw(
    folder: *const c_char,
    wait_ms: u64,
    options: *const FreezeOptions,
    thawed: *mut *mut Thawed,
) -> c_int {
    border::status(|| {
        // SAFETY: the header requires null or a place for a pointer.
        unsafe { empty(thawed, "thawed")? };
        // SAFETY: the header requires null or options.
        let options = unsafe { options::copy(options)? };
        if options.flags != 0 || !options.sockets.is_null() {
            let why = "only a freeze has flags and sockets; leave them 0";
            return Err(border::Failure::new(libc::EINVAL, "options", why));
        }
        // SAFETY: the header requires null or a string.
        let mut thaw = Thaw::of(unsafe { path(folder)? })
            .wait(Duration::from_millis(wait_ms))
            // SAFETY: the header requires null or strings.
            .options(unsafe { strings(options.criu)? });
        // SAFETY: the header requires null or a token that lives until we return.
        if let Some(token) = unsafe { options.cancel.as_ref() } {
            thaw = thaw.cancel(token.0.clone());
        }
        let done = thaw.run()?;
        let made = Thawed {
            pids: done.pids().to_vec(),
            thawed: Some(done),
        };
        // SAFETY: it is not null, so it is a place for a pointer.
        unsafe { thawed.write(Box::into_raw(Box::new(made))) };
        Ok(())
    })
}

/// The number of processes, without their descendants; 0 with errno EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_thawed_count(thawed: *const Thawed) -> usize {
    border::value(|| {
        // SAFETY: the header requires null or what is alive.
        Ok(unsafe { shared(thawed, "thawed")? }.pids.len())
    })
}

/// The ID of the process with the given number, from 0 to dmafile_thawed_count - 1, in the order in which they were
/// named for dmafile_freeze.
///
/// 0 with errno ERANGE for any other number, EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_thawed_pid(thawed: *const Thawed, index: usize) -> u32 {
    border::value(|| {
        // SAFETY: the header requires null or what is alive.
        let pids = &unsafe { shared(thawed, "thawed")? }.pids;
        pids.get(index).copied().ok_or_else(|| {
            let why = format!("number {index} of {}, counted from 0", pids.len());
            border::Failure::new(libc::ERANGE, "no such process", &why)
        })
    })
}

/// Waits until all of them have ended. Returns the exit status of the last one: 128 and the number of a signal that
/// ended it; or -ECHILD if it was called before, -EINVAL for NULL. No other thread may be using it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_thawed_wait(thawed: *mut Thawed) -> c_int {
    border::number(|| {
        // SAFETY: the header requires null or what is alive, used by nobody else.
        let thawed = unsafe { exclusive(thawed, "thawed")? }.thawed.take();
        let again = || border::Failure::new(libc::ECHILD, "thawed", "they have ended");
        Ok(thawed.ok_or_else(again)?.wait())
    })
}

/// Frees it; the processes run on. Until then their holders count this process as a taker. NULL is a no-op. No other
/// thread may be using it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_thawed_free(thawed: *mut Thawed) {
    // SAFETY: the header requires null or what `dmafile_thaw` returned, freed once.
    unsafe { border::free(thawed) };
}
