//! What the kernel reports for each page frame (`/proc/kpageflags` and similar,
//! admin-guide/mm/pagemap.rst).

use dmafile_sys::{Errno, errno};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// KPF_* of linux/kernel-page-flags.h, as bits.
pub const LRU: u64 = 1 << 5;
pub const SLAB: u64 = 1 << 7;
pub const BUDDY: u64 = 1 << 10;
pub const MMAP: u64 = 1 << 11;
pub const ANON: u64 = 1 << 12;
pub const SWAPCACHE: u64 = 1 << 13;
pub const SWAPBACKED: u64 = 1 << 14;
/// The first page of a folio of several.
#[cfg(feature = "bpf")]
pub const HEAD: u64 = 1 << 15;
/// A page of a folio other than the first one.
pub const TAIL: u64 = 1 << 16;
pub const HUGE: u64 = 1 << 17;
pub const ZERO_PAGE: u64 = 1 << 24;

pub struct Frames {
    flags: File,
    count: File,
    /// None without memory cgroups.
    cgroup: Option<File>,
    /// None on kernels without the series.
    pins: Option<File>,
}

/// In a word of `/proc/kpagepins` (the series' Documentation/mm/pin_owner.rst): the pins of the page's folio.
const PINS: u64 = 0xffff_ffff;
/// True if that number is exact.
const PINS_EXACT: u64 = 1 << 33;

/// Number of words that are read at once.
const CHUNK: usize = 1 << 17;

/// A page whose pins the kernel's pin tracker counts.
pub struct Tracked {
    pub frame: u64,
    pub flags: u64,
    /// Pins of its folio, never 0.
    pub pins: u64,
}

impl Frames {
    pub fn open() -> Result<Self, Errno> {
        let open = |name: &str| File::open(format!("/proc/{name}")).map_err(errno);
        Ok(Self {
            flags: open("kpageflags")?,
            count: open("kpagecount")?,
            cgroup: open("kpagecgroup").ok(),
            pins: open("kpagepins").ok(),
        })
    }

    pub fn flags(&self, frame: u64) -> Result<u64, Errno> {
        entry(&self.flags, frame)
    }

    /// Number of pages of the folio that begins at this frame.
    #[cfg(feature = "bpf")]
    pub fn pages(&self, frame: u64) -> Result<u64, Errno> {
        /// A huge page of 2 MiB is read at once; larger ones in steps.
        const STEP: usize = 512;
        let mut words = [0_u8; STEP * 8];
        let mut pages = 1;
        if self.flags(frame)? & HEAD == 0 {
            return Ok(pages);
        }
        loop {
            let at = (frame + pages).checked_mul(8).ok_or(Errno::OVERFLOW)?;
            let got = self.flags.read_at(&mut words, at).map_err(errno)? & !7;
            let tails = numbers(&words[..got]).take_while(|flags| flags & TAIL != 0);
            let tails = tails.count();
            pages += tails as u64;
            if tails < STEP {
                return Ok(pages);
            }
        }
    }

    /// How many times it is mapped.
    pub fn mapped(&self, frame: u64) -> Result<u64, Errno> {
        entry(&self.count, frame)
    }

    /// The inode of the cgroup that it is charged to.
    pub fn cgroup(&self, frame: u64) -> Option<u64> {
        let inode = entry(self.cgroup.as_ref()?, frame).ok()?;
        Some(inode).filter(|inode| *inode != 0)
    }

    /// The number of pins of its folio, if the kernel's pin tracker counts it.
    pub fn pins(&self, frame: u64) -> Option<u64> {
        exact_pins(entry(self.pins.as_ref()?, frame).ok()?)
    }

    /// Calls `each` for all pages that have pins according to the tracker, by frame. ENOENT on kernels
    /// without it.
    pub fn tracked(&self, mut each: impl FnMut(Tracked)) -> Result<(), Errno> {
        let file = self.pins.as_ref().ok_or(Errno::NOENT)?;
        let (mut words, mut flags) = (vec![0_u8; CHUNK * 8], vec![0_u8; CHUNK * 8]);
        let mut at = 0;
        loop {
            let got = file.read_at(&mut words, at).map_err(errno)? & !7;
            if got == 0 {
                return Ok(());
            }
            let pinned: Vec<_> = numbers(&words[..got])
                .enumerate()
                .filter_map(|(page, word)| Some((page, exact_pins(word).filter(|pins| *pins > 0)?)))
                .collect();
            if !pinned.is_empty() {
                let flags = &mut flags[..got];
                self.flags.read_exact_at(flags, at).map_err(errno)?;
                for (page, pins) in pinned {
                    each(Tracked {
                        frame: at / 8 + page as u64,
                        flags: numbers(&flags[page * 8..])
                            .next()
                            .expect("a flag for each page"),
                        pins,
                    });
                }
            }
            at += got as u64;
        }
    }
}

fn numbers(bytes: &[u8]) -> impl Iterator<Item = u64> {
    let words = bytes.chunks_exact(8);
    words.map(|word| u64::from_ne_bytes(*word.first_chunk().expect("8 bytes")))
}

fn entry(file: &File, frame: u64) -> Result<u64, Errno> {
    let mut bytes = [0; 8];
    let at = frame.checked_mul(8).ok_or(Errno::OVERFLOW)?;
    file.read_exact_at(&mut bytes, at).map_err(errno)?;
    Ok(u64::from_ne_bytes(bytes))
}

fn exact_pins(word: u64) -> Option<u64> {
    (word & PINS_EXACT != 0).then_some(word & PINS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_tracked_pages_have_an_exact_pin_count() {
        assert_eq!(exact_pins(PINS_EXACT), Some(0));
        // Two pins with a known owner.
        assert_eq!(exact_pins(PINS_EXACT | (1 << 32) | 2), Some(2));
        // A small folio may be pinned.
        assert_eq!(exact_pins(1), None);
        assert_eq!(exact_pins(0), None);
    }
}
