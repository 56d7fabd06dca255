//! The C library of dmafile: what `include/dmafile.h` declares, over the crate [`dmafile`].
//!
//! Everything here is an edge: pointers come from C and are looked at, work is the engine's, and
//! failures leave as a negative errno and a sentence. The comments are those of the header, which is
//! generated from them; in it, each pointer has to be what its function says (the border can see
//! that one is NULL, not that it is stale).

#![expect(
    clippy::missing_safety_doc,
    reason = "the comments are the header's; it states once, at its top, what pointers have to be"
)]

mod border;
mod buffer;
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
pub use hold::*;
pub use load::{dmafile_load, dmafile_load_into};
pub use model::*;
pub use options::{DMAFILE_NO_MEMORY_CHECK, Options};
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

/// Copies the sentence of the last failure in the calling thread to `text`, at most `len` bytes
/// with the NUL that always ends it: "what: where: why (ERRNO); remedy", in UTF-8, cut between
/// characters where it does not fit. Calls that succeed leave it; before any failure it is empty.
///
/// Returns how many bytes the whole sentence has without NUL, as snprintf(3) does: it was cut where
/// that is `len` or more. `text` may be NULL where `len` is 0. -EINVAL for another NULL, which
/// leaves the sentence as it was.
///
/// Thread-safe: each thread has its own sentence.
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
            // SAFETY: not null; the header asks for `len` bytes to write, and `fits` is fewer.
            unsafe {
                text.copy_from_nonoverlapping(sentence.as_ptr(), fits);
                text.add(fits).write(0);
            }
        }
        c_int::try_from(sentence.len()).unwrap_or(c_int::MAX)
    })
}
