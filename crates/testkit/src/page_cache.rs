//! Control of the page cache, for tests that depend on it while other programs use the machine.
#![allow(unsafe_code, reason = "mincore(2) and mlock(2) take mappings")]
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::time::Duration;

/// A part of a file, mapped to query or to lock its pages.
struct Mapping(*mut libc::c_void, usize);

impl Mapping {
    fn of(file: &File, range: Range<u64>) -> Self {
        let (start, len) = (
            range.start as libc::off_t,
            (range.end - range.start) as usize,
        );
        let null = std::ptr::null_mut();
        let (prot, flags) = (libc::PROT_READ, libc::MAP_SHARED);
        // SAFETY: a new mapping, which is never read.
        let at = unsafe { libc::mmap(null, len, prot, flags, file.as_raw_fd(), start) };
        assert_ne!(at, libc::MAP_FAILED);
        Self(at, len)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: its own mapping.
        unsafe { libc::munmap(self.0, self.1) };
    }
}

/// True if a page of it is in the page cache.
fn any_cached(file: &File) -> bool {
    let len = file.metadata().unwrap().len();
    if len == 0 {
        return false;
    }
    let mapping = Mapping::of(file, 0..len);
    let mut pages = vec![0; mapping.1.div_ceil(4096)];
    // SAFETY: a byte for each page; pages are larger on some machines, never smaller.
    let answer = unsafe { libc::mincore(mapping.0, mapping.1, pages.as_mut_ptr()) };
    assert_eq!(answer, 0);
    pages.iter().any(|page| page & 1 != 0)
}

/// Writes a file back and drops it from the page cache. A page that another process uses, or that is still
/// being read ahead or written back, stays at first, so this tries repeatedly. On tmpfs, pages cannot be
/// dropped.
pub fn evict(file: &File) {
    // The descriptor may be open for writing only.
    let file = &File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
    for _ in 0..100 {
        file.sync_all().unwrap();
        // SAFETY: advice on an open file.
        let done =
            unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        assert_eq!(done, 0);
        if !any_cached(file) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A part of a file that is locked in the page cache until this is dropped: the kernel may reclaim unlocked
/// pages at any time. If the lock exceeds RLIMIT_MEMLOCK, the pages are only read in.
#[must_use]
pub struct Warm(Mapping);

impl Warm {
    pub fn range(file: &File, range: Range<u64>) -> Self {
        let mapping = Mapping::of(file, range);
        // SAFETY: its own mapping; locking reads in these pages, and none after them.
        unsafe {
            libc::madvise(mapping.0, mapping.1, libc::MADV_RANDOM);
            if libc::mlock(mapping.0, mapping.1) != 0 {
                libc::madvise(mapping.0, mapping.1, libc::MADV_POPULATE_READ);
            }
        }
        Self(mapping)
    }
}
