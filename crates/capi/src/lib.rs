//! The C library of dmafile: implements what `include/dmafile.h` declares, on top of the crate
//! [`dmafile`].
//!
//! These functions only check pointers and convert types. The engine does the work, and failures are
//! returned as a negative errno and a message. The header, comments included, is generated from
//! these sources. A function can check that a pointer is not NULL, but not that it is valid: the
//! caller must ensure what the comments require.

#![expect(
    clippy::missing_safety_doc,
    reason = "the comments are the header's; it states once, at its top, what pointers must be"
)]

mod border;
mod buffer;
mod freeze;
mod hold;
mod load;
mod model;
mod options;
mod recorder;
mod recording;
mod save;
mod snapshot;
mod stream;
mod token;

pub use buffer::*;
pub use freeze::*;
pub use hold::*;
pub use load::{dmafile_load, dmafile_load_into, dmafile_load_object};
pub use model::*;
pub use options::{DMAFILE_NO_CHECK_MEMORY, Options};
pub use recorder::*;
pub use recording::*;
pub use save::{
    DMAFILE_SAVE_IN_PLACE, DMAFILE_SAVE_NO_SYNC, Part, SaveOptions, dmafile_report_free,
    dmafile_save,
};
pub use snapshot::*;
pub use stream::*;
pub use token::*;

use libc::{c_char, c_int};
use std::ffi::CStr;

const VERSION: &CStr =
    match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("a version has no NUL"),
    };

/// The version of the library, "MAJOR.MINOR.PATCH". A constant.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn dmafile_version() -> *const c_char {
    VERSION.as_ptr()
}

/// Copies the message of the last failure in the calling thread to `text`: "what: where: why
/// (ERRNO); remedy", in UTF-8. At most `len` bytes are written, including the terminating NUL; a
/// longer message is truncated between characters. Calls that succeed leave the message unchanged;
/// before the first failure it is empty.
///
/// Returns the length of the whole message in bytes, without NUL, as snprintf(3) does: if that is
/// `len` or more, the message was truncated. `text` may be NULL if `len` is 0. Any other NULL
/// returns -EINVAL and leaves the message unchanged.
///
/// Thread-safe: each thread has its own message.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_strerror_r(text: *mut c_char, len: usize) -> c_int {
    if text.is_null() && len > 0 {
        return -libc::EINVAL;
    }
    border::last(|sentence| {
        if len > 0 {
            let room = sentence.len().min(len - 1);
            let fits = (0..=room).rev().find(|&at| sentence.is_char_boundary(at));
            let fits = fits.unwrap_or(0);
            let text = text.cast::<u8>();
            // SAFETY: not null; the header requires `len` writable bytes, and `fits` is less than
            // `len`.
            unsafe {
                text.copy_from_nonoverlapping(sentence.as_ptr(), fits);
                text.add(fits).write(0);
            }
        }
        c_int::try_from(sentence.len()).unwrap_or(c_int::MAX)
    })
}
