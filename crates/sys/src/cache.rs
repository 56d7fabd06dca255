//! The contents of the page cache for a file.
//!
//! `mincore(2)` is not used: to a user who neither owns the file nor may write to it, it reports
//! that everything is resident.

use super::{Errno, last_errno};
use std::os::fd::{AsRawFd, BorrowedFd};

/// `cachestat(2)` has the same number on all architectures of Rust's Linux targets
/// (include/uapi/asm-generic/unistd.h); an older kernel returns ENOSYS.
const SYS_CACHESTAT: libc::c_long = 451;

/// struct cachestat_range of linux/mman.h.
#[repr(C)]
struct CachestatRange {
    offset: u64,
    len: u64,
}

/// struct cachestat of linux/mman.h, in pages.
#[repr(C)]
#[derive(Default)]
struct Counts {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Pages of `len` bytes at `offset` that are in the page cache (cachestat(2), Linux 6.5).
///
/// EPERM for a file that this user neither owns nor may write to; ENOSYS before 6.5.
pub fn resident(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<u64, Errno> {
    let range = CachestatRange { offset, len };
    let mut counts = Counts::default();
    // SAFETY: both structures live through the call and have the kernel's layout.
    let result = unsafe {
        libc::syscall(
            SYS_CACHESTAT,
            fd.as_raw_fd(),
            &raw const range,
            &raw mut counts,
            0,
        )
    };
    match result {
        0 => Ok(counts.cached),
        _ => Err(last_errno()),
    }
}

/// Drops the page that contains the byte at `offset`, if it is clean and not in use
/// (posix_fadvise(2)).
pub fn drop_page(fd: BorrowedFd<'_>, offset: u64) {
    let page = super::map::page_size();
    let len = std::num::NonZeroU64::new(page);
    // Only advice: at worst, a page stays in the cache.
    let _ = rustix::fs::fadvise(
        fd,
        offset - offset % page,
        len,
        rustix::fs::Advice::DontNeed,
    );
}

/// Drops the pages of a range, except for those that are dirty or in use (posix_fadvise(2)).
/// With `len` 0 the range extends to the end of the file.
pub fn drop_range(fd: BorrowedFd<'_>, offset: u64, len: u64) {
    let len = std::num::NonZeroU64::new(len);
    // Only advice, as in `drop_page`.
    let _ = rustix::fs::fadvise(fd, offset, len, rustix::fs::Advice::DontNeed);
}

/// Announces random reads on this descriptor, so that a miss brings in no more than requested
/// (posix_fadvise(2)).
pub fn no_readahead(fd: BorrowedFd<'_>) {
    // Only advice: at worst, the file system reads ahead.
    let _ = rustix::fs::fadvise(fd, 0, None, rustix::fs::Advice::Random);
}
