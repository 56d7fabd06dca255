//! The pages of a mapping (`/proc/PID/pagemap`, admin-guide/mm/pagemap.rst).

use super::ioctl::{Argument, Opcode, opcode, request};
use super::map::{Mapping, Region, page_size};
use super::{Errno, errno};
use std::fs::{self, File};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// struct pm_scan_arg of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// struct page_region of linux/fs.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

// SAFETY: PAGEMAP_SCAN updates the structure, and writes at most `vec_len` entries to the array at `vec`,
// which is mutably borrowed for longer than the call.
unsafe impl Argument for Scan {
    const OPCODE: Opcode = opcode::read_write::<Self>(b'f', 16);
}

const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_HUGE: u64 = 1 << 6;

/// Bytes of a mapping on transparent huge pages; None if that cannot be found out.
pub fn huge_bytes(region: &Region<'_>) -> Option<u64> {
    // Kernels before 6.7 do not support the scan, and a sandbox may hide it.
    scanned(region).ok().or_else(|| looked_up(region))
}

fn scanned(region: &Region<'_>) -> Result<u64, Errno> {
    let pagemap = File::open("/proc/self/pagemap").map_err(errno)?;
    let whole = region.address()..region.address() + region.len();
    let found = scan(&pagemap, whole, PAGE_IS_HUGE)?;
    Ok(found.iter().map(|one| one.end - one.start).sum())
}

/// The ranges with pages of a category.
fn scan(pagemap: &File, whole: Range<u64>, category: u64) -> Result<Vec<Range<u64>>, Errno> {
    let mut found = [PageRegion::default(); 64];
    let mut all = Vec::new();
    let mut start = whole.start;
    while start < whole.end {
        let mut scan = Scan {
            size: size_of::<Scan>() as u64,
            start,
            end: whole.end,
            vec: found.as_mut_ptr().expose_provenance() as u64,
            vec_len: found.len() as u64,
            category_mask: category,
            return_mask: category,
            ..Scan::default()
        };
        let got = request(pagemap, &mut scan)?;
        all.extend(found[..got as usize].iter().map(|one| one.start..one.end));
        if scan.walk_end <= start {
            return Err(Errno::IO);
        }
        start = scan.walk_end;
    }
    Ok(all)
}

/// The pages that a process has in memory.
pub struct Pagemap(File);

/// In an entry: the page is present, and the rest is its frame.
const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;

impl Pagemap {
    /// For the process with this folder.
    pub fn open(folder: &Path) -> Result<Self, Errno> {
        File::open(folder.join("pagemap")).map(Self).map_err(errno)
    }

    /// Calls `each` with the address and the frame of every present page in a range. All frames are 0
    /// without CAP_SYS_ADMIN.
    pub fn frames(&self, whole: Range<u64>, mut each: impl FnMut(u64, u64)) -> Result<(), Errno> {
        let page = page_size();
        // Skips huge holes; before 6.7 they are read.
        let some = scan(&self.0, whole.clone(), PAGE_IS_PRESENT).unwrap_or_else(|_| vec![whole]);
        let mut buffer = vec![0_u8; 512 << 10];
        for range in some {
            let mut at = range.start;
            while at < range.end {
                let pages = ((range.end - at) / page).min(buffer.len() as u64 / 8);
                let bytes = &mut buffer[..pages as usize * 8];
                let got = self.0.read_at(bytes, at / page * 8).map_err(errno)?;
                if got < 8 {
                    break;
                }
                for entry in bytes[..got].chunks_exact(8) {
                    let entry = u64::from_ne_bytes(*entry.first_chunk().expect("8 bytes"));
                    if entry & PRESENT != 0 {
                        each(at, entry & FRAME);
                    }
                    at += page;
                }
            }
        }
        Ok(())
    }
}

/// The ranges of a region that are mapped from a file: each with its offset in the region, its offset in the file, and
/// its length. None are found without `/proc`, and if the file cannot be mapped for reading.
pub fn mapped_from(region: &Region<'_>, file: BorrowedFd<'_>) -> Vec<(u64, u64, u64)> {
    // The list shows other numbers of a file than fstat(2) does on some file systems, but the same for each mapping.
    let Ok(probe) = Mapping::shared(file, 1, 1, false) else {
        return Vec::new();
    };
    let Ok(maps) = fs::read_to_string("/proc/self/maps") else {
        return Vec::new();
    };
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let parse = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let offset = words.nth(1)?;
        let file = (words.next()?.to_string(), words.next()?.to_string());
        Some((hex(start)?..hex(end)?, hex(offset)?, file))
    };
    let all: Vec<_> = maps.lines().filter_map(parse).collect();
    let at = probe.region().address();
    let Some((_, _, wanted)) = all.iter().find(|(range, ..)| range.contains(&at)) else {
        return Vec::new();
    };
    let (first, last) = (region.address(), region.address() + region.len());
    let of_file = all.iter().filter(|(_, _, file)| file == wanted);
    let within = of_file.filter_map(|(range, offset, _)| {
        let (start, end) = (range.start.max(first), range.end.min(last));
        (start < end).then(|| (start - first, offset + start - range.start, end - start))
    });
    within.collect()
}

/// From `/proc/self/smaps`, which covers all memory of this process and takes correspondingly long.
fn looked_up(region: &Region<'_>) -> Option<u64> {
    let (first, last) = (region.address(), region.address() + region.len());
    let smaps = fs::read_to_string("/proc/self/smaps").ok()?;
    let mut inside = false;
    let mut bytes = 0;
    for line in smaps.lines() {
        if let Some((range, _)) = line.split_once(' ')
            && let Some((start, end)) = range.split_once('-')
            && let (Ok(start), Ok(end)) =
                (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16))
        {
            inside = start < last && end > first;
        } else if inside
            && let Some((name, rest)) = line.split_once(':')
            && matches!(name, "AnonHugePages" | "ShmemPmdMapped")
        {
            let kb: u64 = rest.split_whitespace().next()?.parse().ok()?;
            bytes += kb * 1024;
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pagemap_scan_and_pagemap_count_the_same_pages() {
        const HUGE: u64 = 2 << 20;
        let map = Mapping::anon(5 * HUGE as usize, HUGE as usize).unwrap();
        let region = map.region();
        region.want_huge().unwrap();
        region.populate(HUGE, HUGE).unwrap();
        region.populate(3 * HUGE, HUGE).unwrap();
        let told = looked_up(&region).unwrap();
        assert!(told <= 2 * HUGE, "{told}");
        match scanned(&region) {
            Ok(seen) => assert_eq!(seen, told),
            Err(errno) => eprintln!("SKIP: no PAGEMAP_SCAN here ({errno})"),
        }
        assert_eq!(huge_bytes(&region), Some(told));
    }
}
