//! The boundary to C: no panic unwinds across it, pointers are checked before use, and every
//! failure has an errno and a message.

use dmafile::{Names, Opt};
use libc::{c_char, c_int};
use std::any::Any;
use std::cell::RefCell;
use std::ffi::CStr;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A failure, as C callers see it: an errno, and a message that is kept per thread.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    /// Positive, as in errno(3).
    errno: c_int,
    sentence: String,
}

pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    /// Formats the message like the engine does: `what: why (ERRNO)`.
    pub(crate) fn new(errno: c_int, what: &str, why: &str) -> Self {
        let name = dmafile::errno_name(errno);
        Self {
            errno,
            sentence: format!("{what}: {why} ({name})"),
        }
    }

    /// Adds what would help.
    pub(crate) fn remedy(mut self, remedy: &str) -> Self {
        self.sentence += "; ";
        self.sentence += remedy;
        self
    }

    pub(crate) fn panicked(cause: &(dyn Any + Send)) -> Self {
        let text = cause.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| cause.downcast_ref::<&str>().copied());
        let why = format!(
            "internal error in dmafile, please report it: {}",
            text.unwrap_or("panic without a message")
        );
        Self::new(libc::ENOTRECOVERABLE, "dmafile", &why)
    }
}

/// Names options by the members of `struct dmafile_options`, or by what the header has instead of
/// them.
pub(crate) struct Header;

impl Names for Header {
    fn option(&self, option: Opt) -> String {
        match option {
            Opt::From => "sources".to_string(),
            Opt::InPlace => "DMAFILE_SAVE_IN_PLACE".to_string(),
            _ => option.name().to_string(),
        }
    }

    fn set(&self, option: Opt, value: &str) -> String {
        match option {
            Opt::CheckMemory => "DMAFILE_NO_CHECK_MEMORY".to_string(),
            _ => format!("{}=\"{value}\"", self.option(option)),
        }
    }
}

impl From<dmafile::Error> for Failure {
    fn from(error: dmafile::Error) -> Self {
        let errno = error.raw_os_error().unwrap_or(match error.kind() {
            dmafile::ErrorKind::Usage => libc::EINVAL,
            dmafile::ErrorKind::Cancelled => libc::ECANCELED,
            _ => libc::EIO,
        });
        Self {
            errno,
            sentence: error.render(&Header),
        }
    }
}

thread_local! {
    /// The message of the last failure in this thread.
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Calls `with` with the message of the last failure in this thread.
pub(crate) fn last<T>(with: impl FnOnce(&str) -> T) -> T {
    let mut with = Some(with);
    let mut call = |text: &str| with.take().map(|with| with(text));
    // Thread-local storage is gone when a thread is about to end.
    let called = LAST.try_with(|last| last.try_borrow().ok().and_then(|last| call(&last)));
    let called = called.ok().flatten().or_else(|| call(""));
    called.expect("called in one way or the other")
}

/// Runs `work` and stores the message of its failure; Err holds the positive errno.
fn attempt<T>(work: impl FnOnce() -> Result<T>) -> Result<T, c_int> {
    // Unwind safety: a panic may leave handles in an odd state, but Rust keeps them memory-safe.
    let done = catch_unwind(AssertUnwindSafe(work));
    let done = done.unwrap_or_else(|cause| Err(Failure::panicked(&*cause)));
    done.map_err(|failure| {
        let keep = |last: &RefCell<String>| {
            if let Ok(mut last) = last.try_borrow_mut() {
                *last = failure.sentence;
            }
        };
        // In a thread that is about to end there is only the errno.
        let _ = LAST.try_with(keep);
        failure.errno
    })
}

/// 0, or a negative errno.
pub(crate) fn status(work: impl FnOnce() -> Result<()>) -> c_int {
    attempt(work).map_or_else(|errno| -errno, |()| 0)
}

/// A non-negative number, or a negative errno.
pub(crate) fn number<N: From<c_int>>(work: impl FnOnce() -> Result<N>) -> N {
    attempt(work).unwrap_or_else(|errno| N::from(-errno))
}

/// A pointer, or null with errno set.
pub(crate) fn pointer<T>(work: impl FnOnce() -> Result<*const T>) -> *const T {
    attempt(work).unwrap_or_else(|errno| {
        set_errno(errno);
        std::ptr::null()
    })
}

/// A value, or its default with errno set.
pub(crate) fn value<T: Default>(work: impl FnOnce() -> Result<T>) -> T {
    attempt(work).unwrap_or_else(|errno| {
        set_errno(errno);
        T::default()
    })
}

fn set_errno(errno: c_int) {
    // SAFETY: the address of this thread's errno is always valid.
    unsafe { *libc::__errno_location() = errno };
}

/// Frees a handle that came from `Box::into_raw`; null is a no-op.
///
/// # Safety
/// `handle` is null, or came from `Box::into_raw`, is freed only once, and is not in use elsewhere.
pub(crate) unsafe fn free<T>(handle: *mut T) {
    if !handle.is_null() {
        // SAFETY: as this function requires.
        let owned = unsafe { Box::from_raw(handle) };
        // There is no way to report that freeing failed.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(owned)));
    }
}

pub(crate) fn null(what: &str) -> Failure {
    Failure::new(libc::EINVAL, what, "it is NULL")
}

/// Borrows what a pointer of the caller points to.
///
/// # Safety
/// `pointer` is null, or valid for reads during the call, and nothing writes there.
pub(crate) unsafe fn shared<'a, T>(pointer: *const T, what: &str) -> Result<&'a T> {
    // SAFETY: as this function requires.
    unsafe { pointer.as_ref() }.ok_or_else(|| null(what))
}

/// Borrows mutably what a pointer of the caller points to.
///
/// # Safety
/// `pointer` is null, or valid for reads and writes during the call, and nothing else uses it.
pub(crate) unsafe fn exclusive<'a, T>(pointer: *mut T, what: &str) -> Result<&'a mut T> {
    // SAFETY: as this function requires.
    unsafe { pointer.as_mut() }.ok_or_else(|| null(what))
}

/// A string of the caller; None if it is null.
///
/// # Safety
/// `pointer` is null, or a NUL-terminated string that does not change during the call.
pub(crate) unsafe fn optional<'a>(pointer: *const c_char, what: &str) -> Result<Option<&'a str>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: as this function requires.
    let text = unsafe { CStr::from_ptr(pointer) };
    let text = text.to_str();
    text.map(Some)
        .map_err(|_| Failure::new(libc::EINVAL, what, "it is not UTF-8"))
}

/// A string of the caller that must not be null.
///
/// # Safety
/// As [`optional`].
pub(crate) unsafe fn required<'a>(pointer: *const c_char, what: &str) -> Result<&'a str> {
    // SAFETY: as this function requires.
    unsafe { optional(pointer, what)? }.ok_or_else(|| null(what))
}

/// The bytes of a string that must not be null: a path.
///
/// # Safety
/// As [`optional`].
pub(crate) unsafe fn bytes<'a>(pointer: *const c_char, what: &str) -> Result<&'a [u8]> {
    if pointer.is_null() {
        return Err(null(what));
    }
    // SAFETY: as this function requires.
    Ok(unsafe { CStr::from_ptr(pointer) }.to_bytes())
}

/// Refuses null if `len` is not 0.
pub(crate) fn check(pointer: *const u8, len: usize, what: &str) -> Result<()> {
    if pointer.is_null() && len > 0 {
        return Err(null(what));
    }
    // Neither Rust slices nor Linux mappings can be longer.
    if isize::try_from(len).is_err() {
        return Err(Failure::new(
            libc::EINVAL,
            what,
            "it is longer than memory can be",
        ));
    }
    Ok(())
}

/// An array of the caller; null is an empty one.
///
/// # Safety
/// `first` is null, or points to `count` values that do not change for `'a`.
pub(crate) unsafe fn array<'a, T>(first: *const T, count: usize, what: &str) -> Result<&'a [T]> {
    check(first.cast(), count.saturating_mul(size_of::<T>()), what)?;
    Ok(match count {
        0 => &[],
        // SAFETY: not null; the rest is as this function requires.
        _ => unsafe { std::slice::from_raw_parts(first, count) },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sentence() -> String {
        last(str::to_string)
    }

    #[test]
    fn a_panic_becomes_an_errno_and_a_message() {
        let failed = status(|| panic!("half past {}", 3));
        assert_eq!(failed, -libc::ENOTRECOVERABLE);
        assert_eq!(
            sentence(),
            "dmafile: internal error in dmafile, please report it: half past 3 (ENOTRECOVERABLE)"
        );
        let failed: i64 = number(|| panic!("one"));
        assert_eq!(failed, -i64::from(libc::ENOTRECOVERABLE));
        assert!(sentence().contains("please report it: one"));
        assert!(pointer::<u8>(|| std::panic::panic_any(7)).is_null());
        assert!(sentence().contains("without a message"));
    }

    #[test]
    fn messages_use_the_option_names_of_the_header() {
        let load = dmafile::Load::new("file").queue_depth(0);
        assert_eq!(status(|| Ok(load.check()?)), -libc::EINVAL);
        assert_eq!(sentence(), "queue_depth: 0 is out of range: 1 to 4096");
        let pattern = "re:(".parse::<dmafile::Pattern>();
        assert_eq!(status(|| Ok(pattern.map(drop)?)), -libc::EINVAL);
        assert!(sentence().starts_with("tensors: "), "{}", sentence());
        let set = |option, value| Header.set(option, value);
        assert_eq!(set(Opt::CheckMemory, "false"), "DMAFILE_NO_CHECK_MEMORY");
        assert_eq!(set(Opt::To, "memfd"), "to=\"memfd\"");
    }

    #[test]
    fn a_panic_in_a_destructor_does_not_cross_the_c_boundary() {
        struct Bad;
        impl Drop for Bad {
            fn drop(&mut self) {
                panic!("dropped");
            }
        }
        // SAFETY: the pointer comes from Box::into_raw, as `free` requires.
        unsafe { free(Box::into_raw(Box::new(Bad))) };
    }

    #[test]
    fn each_thread_has_its_own_message_and_success_keeps_it() {
        status(|| Err(Failure::new(libc::EBUSY, "this thread", "it is")));
        std::thread::spawn(|| assert_eq!(sentence(), ""))
            .join()
            .unwrap();
        assert_eq!(status(|| Ok(())), 0);
        assert_eq!(sentence(), "this thread: it is (EBUSY)");
    }
}
