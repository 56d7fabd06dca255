//! What the kernel tells of each page frame (`/proc/kpageflags` and its like, admin-guide/mm/pagemap.rst).

use super::{Errno, errno};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// KPF_* of linux/kernel-page-flags.h, as bits.
pub(crate) const LRU: u64 = 1 << 5;
pub(crate) const SLAB: u64 = 1 << 7;
pub(crate) const BUDDY: u64 = 1 << 10;
pub(crate) const MMAP: u64 = 1 << 11;
pub(crate) const ANON: u64 = 1 << 12;
pub(crate) const SWAPCACHE: u64 = 1 << 13;
pub(crate) const SWAPBACKED: u64 = 1 << 14;
pub(crate) const HUGE: u64 = 1 << 17;
pub(crate) const ZERO_PAGE: u64 = 1 << 24;

pub(crate) struct Frames {
    flags: File,
    count: File,
    /// None without memory cgroups.
    cgroup: Option<File>,
}

impl Frames {
    pub(crate) fn open() -> Result<Self, Errno> {
        let open = |name: &str| File::open(format!("/proc/{name}")).map_err(errno);
        Ok(Self {
            flags: open("kpageflags")?,
            count: open("kpagecount")?,
            cgroup: open("kpagecgroup").ok(),
        })
    }

    pub(crate) fn flags(&self, frame: u64) -> Result<u64, Errno> {
        entry(&self.flags, frame)
    }

    /// How often it is mapped.
    pub(crate) fn mapped(&self, frame: u64) -> Result<u64, Errno> {
        entry(&self.count, frame)
    }

    /// The inode of the cgroup that it is charged to.
    pub(crate) fn cgroup(&self, frame: u64) -> Option<u64> {
        let inode = entry(self.cgroup.as_ref()?, frame).ok()?;
        Some(inode).filter(|inode| *inode != 0)
    }
}

fn entry(file: &File, frame: u64) -> Result<u64, Errno> {
    let mut bytes = [0; 8];
    let at = frame.checked_mul(8).ok_or(Errno::OVERFLOW)?;
    file.read_exact_at(&mut bytes, at).map_err(errno)?;
    Ok(u64::from_ne_bytes(bytes))
}
