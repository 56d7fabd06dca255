//! What the page cache holds of a file.
//!
//! `mincore(2)` is not asked: to someone who neither owns the file nor may write it, it answers
//! that everything is resident.

use super::{Errno, last_errno};
use std::os::fd::{AsRawFd, BorrowedFd};

/// `cachestat(2)` has the same number on every architecture that Rust's Linux targets share
/// (include/uapi/asm-generic/unistd.h); an older kernel answers ENOSYS.
const SYS_CACHESTAT: libc::c_long = 451;

/// struct cachestat_range of linux/mman.h.
#[repr(C)]
struct Range {
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
/// EPERM for a file that is neither ours nor writable to us; ENOSYS before 6.5.
pub(crate) fn resident(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<u64, Errno> {
    let range = Range { offset, len };
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

/// Drops the page that holds the byte at `offset`, if it is clean and nobody else uses it
/// (posix_fadvise(2)).
pub(crate) fn drop_page(fd: BorrowedFd<'_>, offset: u64) {
    let page = super::map::page_size();
    let len = std::num::NonZeroU64::new(page);
    // Advice only: a page that stays is a page more in the cache.
    let _ = rustix::fs::fadvise(
        fd,
        offset - offset % page,
        len,
        rustix::fs::Advice::DontNeed,
    );
}

/// Drops the pages of a range, but for those that are not on the disk or that somebody else uses
/// (posix_fadvise(2)). `len` 0 reaches to the end of the file.
pub(crate) fn drop_range(fd: BorrowedFd<'_>, offset: u64, len: u64) {
    let len = std::num::NonZeroU64::new(len);
    // Advice only, as in `drop_page`.
    let _ = rustix::fs::fadvise(fd, offset, len, rustix::fs::Advice::DontNeed);
}

/// Says that reads on this descriptor will jump about, so that a miss brings in no more than
/// what was asked for (posix_fadvise(2)).
pub(crate) fn no_readahead(fd: BorrowedFd<'_>) {
    // Advice only: a file system that refuses it reads ahead, nothing more.
    let _ = rustix::fs::fadvise(fd, 0, None, rustix::fs::Advice::Random);
}
