//! The kernel's own memory (`/proc/kcore`, an ELF file), and its self-description (VMCOREINFO,
//! admin-guide/kdump/vmcoreinfo.rst).

use dmafile_sys::map::page_size;
use dmafile_sys::{Errno, errno};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

pub const PATH: &str = "/proc/kcore";

const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
/// Size of a program header in bytes.
const HEADER: usize = 56;
/// Larger than any note that the kernel writes.
const LARGEST_NOTE: u64 = 1 << 20;

/// A segment of memory in the file.
#[derive(Clone, Copy, Debug)]
struct Segment {
    start: u64,
    bytes: u64,
    offset: u64,
    /// Its physical address; None for memory that is mapped page by page.
    physical: Option<u64>,
}

pub struct Kcore {
    file: File,
    segments: Vec<Segment>,
    pub info: VmCoreInfo,
}

impl Kcore {
    /// EACCES or EPERM without root and under lockdown, ENOENT if the kernel has none, EPROTO if it
    /// cannot be parsed.
    pub fn open() -> Result<Self, Errno> {
        let file = File::open(PATH).map_err(errno)?;
        let mut head = [0; 64];
        file.read_exact_at(&mut head, 0).map_err(errno)?;
        // 64 bits, in this machine's byte order; dmafile runs on no others.
        if head[..5] != *b"\x7fELF\x02" {
            return Err(Errno::PROTO);
        }
        let table = number(&head, 32).ok_or(Errno::PROTO)?;
        let count = u16::from_ne_bytes([head[56], head[57]]);
        let mut headers = vec![0; usize::from(count) * HEADER];
        file.read_exact_at(&mut headers, table).map_err(errno)?;
        let mut segments = Vec::new();
        let mut info = None;
        for header in headers.chunks_exact(HEADER) {
            let kind = u32::from_ne_bytes(*header.first_chunk().expect("56 bytes"));
            let field = |at| number(header, at).expect("56 bytes");
            let (offset, bytes) = (field(8), field(32));
            match kind {
                PT_LOAD => segments.push(Segment {
                    start: field(16),
                    bytes,
                    offset,
                    physical: Some(field(24)).filter(|at| *at != u64::MAX),
                }),
                PT_NOTE if bytes < LARGEST_NOTE => {
                    let mut notes = vec![0; bytes as usize];
                    file.read_exact_at(&mut notes, offset).map_err(errno)?;
                    info = vmcoreinfo(&notes);
                }
                _ => {}
            }
        }
        Ok(Self {
            file,
            segments,
            info: info.ok_or(Errno::PROTO)?,
        })
    }

    /// Reads kernel memory at an address; EFAULT if the file does not contain it.
    pub fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Errno> {
        let holds = |one: &&Segment| {
            let at = address.checked_sub(one.start);
            at.is_some_and(|at| at < one.bytes && into.len() as u64 <= one.bytes - at)
        };
        let segment = self.segments.iter().find(holds).ok_or(Errno::FAULT)?;
        let offset = segment.offset + (address - segment.start);
        self.file.read_exact_at(into, offset).map_err(errno)
    }

    /// A pointer or 64-bit number at an address.
    pub fn word(&self, address: u64) -> Result<u64, Errno> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// The page frames of all memory.
    pub fn frames(&self) -> Vec<Range<u64>> {
        let memory = self.segments.iter().filter_map(|one| {
            let first = one.physical?.div_ceil(page_size());
            let last = one.physical?.checked_add(one.bytes)? / page_size();
            Some(first..last)
        });
        merged(memory.collect())
    }
}

/// Merges overlapping ranges: the kernel's code is also part of memory.
fn merged(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|one| one.start);
    let mut all: Vec<Range<u64>> = Vec::new();
    for one in ranges {
        match all.last_mut() {
            Some(last) if one.start <= last.end => last.end = last.end.max(one.end),
            _ => all.push(one),
        }
    }
    all
}

fn number(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// The text of the note with that name.
fn vmcoreinfo(mut notes: &[u8]) -> Option<VmCoreInfo> {
    loop {
        let size = |at: usize| {
            let bytes = notes.get(at..)?.first_chunk()?;
            Some(u32::from_ne_bytes(*bytes) as usize)
        };
        let (name, text) = (size(0)?, size(4)?);
        let begin = 12 + name.next_multiple_of(4);
        let value = notes.get(begin..begin.checked_add(text)?)?;
        if notes.get(12..)?.starts_with(b"VMCOREINFO\0") {
            return Some(VmCoreInfo(String::from_utf8_lossy(value).into_owned()));
        }
        notes = notes.get(begin + text.next_multiple_of(4)..)?;
    }
}

/// VMCOREINFO: lines of `KIND(NAME)=VALUE`.
#[derive(Clone, Debug)]
pub struct VmCoreInfo(String);

impl VmCoreInfo {
    fn value(&self, kind: &str, name: &str) -> Option<&str> {
        let key = format!("{kind}({name})=");
        self.0.lines().find_map(|line| line.strip_prefix(&key))
    }

    fn decimal(&self, kind: &str, name: &str) -> Option<u64> {
        self.value(kind, name)?.parse().ok()
    }

    /// The address of a variable.
    pub fn symbol(&self, name: &str) -> Option<u64> {
        u64::from_str_radix(self.value("SYMBOL", name)?, 16).ok()
    }

    pub fn offset(&self, name: &str) -> Option<u64> {
        self.decimal("OFFSET", name)
    }

    pub fn size(&self, name: &str) -> Option<u64> {
        self.decimal("SIZE", name)
    }

    pub fn length(&self, name: &str) -> Option<u64> {
        self.decimal("LENGTH", name)
    }

    pub fn number(&self, name: &str) -> Option<u64> {
        self.decimal("NUMBER", name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(name: &[u8], text: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for number in [name.len() as u32, text.len() as u32, 0] {
            bytes.extend(number.to_ne_bytes());
        }
        for part in [name, text] {
            bytes.extend(part);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        bytes
    }

    #[test]
    fn vmcoreinfo_is_found_among_other_notes() {
        let text = b"OSRELEASE=6.12.117\nSYMBOL(mem_section)=ffff8a4d3ffd7000\nSIZE(page)=64\n\
                     OFFSET(page._refcount)=52\nLENGTH(mem_section)=4096\nNUMBER(PG_head_mask)=64\n\
                     NUMBER(phys_base)=-457179136\n";
        let notes = [note(b"CORE\0", &[1, 2, 3]), note(b"VMCOREINFO\0", text)].concat();
        let info = vmcoreinfo(&notes).unwrap();
        assert_eq!(info.symbol("mem_section"), Some(0xffff_8a4d_3ffd_7000));
        assert_eq!(
            (info.size("page"), info.offset("page._refcount")),
            (Some(64), Some(52))
        );
        assert_eq!(
            (info.length("mem_section"), info.number("PG_head_mask")),
            (Some(4096), Some(64))
        );
        assert_eq!((info.number("phys_base"), info.size("pag")), (None, None));
        assert!(vmcoreinfo(&notes[..notes.len() - 40]).is_none());
        assert!(vmcoreinfo(&[]).is_none());
    }

    #[test]
    fn overlapping_segments_are_merged() {
        assert_eq!(merged(vec![10..20, 1..5, 12..14, 20..22]), [1..5, 10..22]);
    }
}
