//! `struct dmafile_token`: cancels loads and saves.

use crate::border;
use dmafile::CancelToken;
use libc::c_int;

/// Cancels the loads and saves whose options name it. Once set, it stays set. Opaque.
pub struct Token(pub(crate) CancelToken);

/// Creates a token that is not set; free it with dmafile_token_free. NULL with errno on failure.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn dmafile_token_new() -> *mut Token {
    let made = border::pointer(|| Ok(Box::into_raw(Box::new(Token(CancelToken::new())))));
    made.cast_mut()
}

/// Sets a token. Its loads and saves return -ECANCELED as soon as the operations in flight have
/// completed (a disk read cannot be aborted), and leave nothing behind.
///
/// Returns 0; -EINVAL for NULL, for which dmafile_strerror_r has no message.
///
/// Thread-safe and async-signal-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_token_cancel(token: *const Token) -> c_int {
    // Not through `border`, which stores a message: a signal handler must not allocate.
    // SAFETY: the header requires null or a token that is alive.
    match unsafe { token.as_ref() } {
        Some(token) => {
            token.0.cancel();
            0
        }
        None => -libc::EINVAL,
    }
}

/// Returns 1 if a token is set, otherwise 0; -EINVAL for NULL, for which dmafile_strerror_r has no message.
///
/// Thread-safe and async-signal-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_token_is_cancelled(token: *const Token) -> c_int {
    // SAFETY: the header requires null or a token that is alive.
    match unsafe { token.as_ref() } {
        Some(token) => c_int::from(token.0.is_cancelled()),
        None => -libc::EINVAL,
    }
}

/// Frees a token; NULL is a no-op. No load may be using it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_token_free(token: *mut Token) {
    // SAFETY: the header requires null or what `dmafile_token_new` returned, freed once.
    unsafe { border::free(token) };
}
