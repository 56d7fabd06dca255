//! Finds the pages that are pinned now, including those pinned earlier, by reading the kernel's own memory.
//!
//! A large folio has an exact count of its pins. On a stock kernel a small one has none: a pin adds 1024 to its
//! reference count, from which those of mappings and the page cache are subtracted. A kernel with the series
//! that was booted with `pin_owner=on` counts the pins of both, and reports them without its memory being read.

use super::btf::Btf;
use super::file::{InspectedFile, Mapper};
use super::recording::{PinRecords, RecordedBy};
use super::{denied, ended, find, hidden, tracker};
use crate::frames::{self, Frames, Tracked};
use crate::kcore::{self, Kcore};
use dmafile::{Error, Result};
use dmafile_sys::Errno;
use dmafile_sys::map::page_size;
use dmafile_sys::pagemap::Pagemap;
use dmafile_sys::process::{self, folder};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The pinned pages, by type and by the processes that map them.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct PinnedPages {
    /// Bytes of all folios that are pinned.
    pub bytes: u64,
    /// Number of these folios.
    pub folios: u64,
    /// Folios with the same properties.
    pub groups: Vec<PageGroup>,
    /// Ranges in the memory of the requested process; empty for all processes.
    pub ranges: Vec<PinnedRange>,
    /// Number of processes that could not be inspected.
    pub unreadable: u64,
    /// True if pins are being recorded, so that groups without `recorded` were pinned before, or for a short term.
    pub recording: bool,
}

/// Pinned folios of one type, file and cgroup that are mapped by the same processes.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct PageGroup {
    /// The processes that map them; empty if they belong to a descriptor that was never mapped, or is no
    /// longer.
    pub mapped: Vec<Mapper>,
    /// The cgroup that they are charged to, as a path below its mount; None if they are not charged, or if the
    /// kernel does not report it.
    pub cgroup: Option<String>,
    /// anonymous, shmem, hugetlb or file.
    pub sort: &'static str,
    /// Their file, if they have one: major and minor number as in `/proc/PID/maps`.
    pub device: Option<String>,
    /// Its inode.
    pub inode: Option<u64>,
    /// Its name, if a process maps it.
    pub file: Option<String>,
    /// True if the kernel counts their pins exactly: those of folios of several pages, and, with `pin_owner=on`
    /// on a kernel with the series, all.
    pub exact: bool,
    /// Number of folios.
    pub folios: u64,
    /// Their size in bytes.
    pub bytes: u64,
    /// Pins on them, as the kernel counts: one per pinned page, or one for several.
    pub pins: u64,
    /// The process that pinned them last for a long term, if that was recorded ([`record()`](super::record())).
    pub recorded: Option<RecordedBy>,
}

/// Pinned memory of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PinnedRange {
    /// Address of its first byte.
    pub address: u64,
    /// Its size in bytes.
    pub bytes: u64,
    /// Pins on each of its folios.
    pub pins: u64,
    /// As in [`PageGroup`].
    pub exact: bool,
}

/// Which pinned pages to look for.
#[derive(Clone, Debug, Default)]
pub enum Whose<'a> {
    /// All of them.
    #[default]
    All,
    /// Those that a process maps.
    Process(u32),
    /// Those of a regular file or a memfd.
    File(&'a Path),
}

/// What a pin adds to the reference count of a small folio (GUP_PIN_COUNTING_BIAS).
const BIAS: u64 = 1024;
/// Number of entries of the kernel's table of pages that are read at once.
const CHUNK: u64 = 16384;

/// Looks for pinned pages among all page frames. As root, reads about 16 MiB per GiB of memory; or 2 to 4 MiB
/// from `/proc/kpagepins` and `/proc/kpageflags` on a kernel with the series and `pin_owner=on` if it has no
/// `/proc/kcore` or refuses to open it.
///
/// Pages change during the call. A process that maps a page has nearly always pinned it, but the kernel does
/// not say. Unexplained references to a small folio, from 1024 on, count as pins.
///
/// # Errors
/// EACCES or EPERM without root, and under lockdown (confidentiality); ENOENT if the kernel lacks
/// `/proc/kcore`, `/proc/kpageflags` or its types (`/sys/kernel/btf/vmlinux`), which a file needs on all
/// kernels; ESRCH and those of open(2) for the requested process or file.
pub fn pages(whose: &Whose<'_>) -> Result<PinnedPages> {
    let target = match whose {
        Whose::File(path) => Some(InspectedFile::open(path)?),
        Whose::Process(pid) => find(*pid).map(|_| None)?,
        Whose::All => None,
    };
    let pid = match whose {
        Whose::Process(pid) => Some(*pid),
        _ => None,
    };
    let frames = Frames::open().map_err(|errno| refused("/proc/kpageflags", errno))?;
    let mut folios = match Kernel::open() {
        Ok(kernel) => kernel.pinned(&frames)?,
        Err(error) if !tracker::is_on() => return Err(error),
        Err(error) if target.is_some() => {
            return Err(
                error.with_remedy("only all pages, or those of a process, can be listed here")
            );
        }
        Err(_) => tracked(&frames)?,
    };
    if let Some(target) = &target {
        folios.retain(|one| {
            one.file
                .as_ref()
                .is_some_and(|(device, inode)| (device, *inode) == (&target.device, target.inode))
        });
    }
    let mut mapped = MappedBy::default();
    if !folios.is_empty() {
        mapped.look(&folios, pid)?;
    }
    // Pins that are over by now are of no interest, so it is read after the pages.
    let records = PinRecords::read()?;
    Ok(sum(&folios, mapped, pid, records.as_ref()))
}

fn refused(place: &str, errno: Errno) -> Error {
    let error = Error::os("cannot list pinned pages", errno).at(place);
    match errno {
        Errno::PERM | Errno::ACCESS => denied(error, " (with CAP_SYS_RAWIO and CAP_SYS_ADMIN)"),
        Errno::NOENT => error
            .with_why("this kernel does not have it")
            .with_remedy(""),
        _ => error,
    }
}

fn strange() -> Error {
    Error::new(
        "cannot list pinned pages",
        "the kernel's tables have an unknown format",
    )
    .at(kcore::PATH)
}

/// A pinned folio.
#[derive(Clone, Debug)]
struct Folio {
    frame: u64,
    pages: u64,
    pins: u64,
    exact: bool,
    flags: u64,
    cgroup: Option<u64>,
    file: Option<FileId>,
}

/// Device and inode, as in `/proc/PID/maps`.
type FileId = (String, u64);

/// The folios whose pins the kernel's pin tracker counts. Their files are not reported.
fn tracked(frames: &Frames) -> Result<Vec<Folio>> {
    let mut folios = Vec::new();
    frames
        .tracked(|page| add(&mut folios, &page))
        .map_err(|errno| refused("/proc/kpagepins", errno))?;
    for folio in &mut folios {
        folio.cgroup = frames.cgroup(folio.frame);
    }
    Ok(folios)
}

/// Adds a page to the previous folio if it belongs to it, or starts a new one.
fn add(folios: &mut Vec<Folio>, page: &Tracked) {
    match folios.last_mut() {
        Some(last) if page.flags & frames::TAIL != 0 => {
            if last.frame + last.pages == page.frame {
                last.pages += 1;
            }
        }
        // Pinned after the first page of its folio was inspected.
        None if page.flags & frames::TAIL != 0 => {}
        _ => folios.push(Folio {
            frame: page.frame,
            pages: 1,
            pins: page.pins,
            exact: true,
            flags: page.flags,
            cgroup: None,
            file: None,
        }),
    }
}

/// The kernel's array of page structures, and the offsets of its fields.
pub(super) struct Kernel {
    core: Kcore,
    layout: EntryLayout,
    /// Memory sections by number: where the entry of frame 0 would be.
    sections: BTreeMap<u64, u64>,
    pages_per_section: u64,
    files: Option<Files>,
}

/// The kernel's array of page structures.
#[cfg(feature = "bpf")]
pub(super) struct PageTable {
    /// The address of the entry of frame 0, which need not exist.
    pub first: u64,
    /// The size of an entry, as a power of two.
    pub shift: u32,
    /// The bits of the first word of an entry that say that it begins a large folio.
    pub head: u64,
    /// The offset in an entry of what says which folio a page belongs to.
    pub compound: u32,
    /// Number of frames.
    pub frames: u64,
}

/// Offsets from the start of an entry.
#[derive(Clone, Copy, Debug)]
struct EntryLayout {
    size: u64,
    flags: usize,
    head: u64,
    compound: usize,
    references: usize,
    mapping: usize,
    /// Offset from the first entry of a folio.
    pages: usize,
    pins: usize,
}

/// The pointers that lead from a page to its file.
#[derive(Clone, Copy, Debug)]
struct Files {
    host: u64,
    inode: u64,
    superblock: u64,
    device: u64,
}

impl Kernel {
    pub(super) fn open() -> Result<Self> {
        let core = Kcore::open().map_err(|errno| refused(kcore::PATH, errno))?;
        let types = Btf::read()?;
        let layout = EntryLayout::of(&core, &types).ok_or_else(strange)?;
        let (sections, pages_per_section) = sections(&core).ok_or_else(strange)?;
        let files = || {
            Some(Files {
                host: types.offset("address_space", "host")?,
                inode: types.offset("inode", "i_ino")?,
                superblock: types.offset("inode", "i_sb")?,
                device: types.offset("super_block", "s_dev")?,
            })
        };
        Ok(Self {
            files: files(),
            core,
            layout,
            sections,
            pages_per_section,
        })
    }

    #[cfg(feature = "bpf")]
    pub(super) fn core(&self) -> &Kcore {
        &self.core
    }

    /// Where the entries are, if they are one array whose entries have a power of two as size.
    #[cfg(feature = "bpf")]
    pub(super) fn page_table(&self) -> Result<PageTable> {
        let mut bases = self.sections.values();
        let first = bases
            .next()
            .copied()
            .filter(|first| bases.all(|base| base == first));
        let last = self.core.frames().into_iter().map(|range| range.end).max();
        match (first, last) {
            (Some(first), Some(frames)) if self.layout.size.is_power_of_two() => Ok(PageTable {
                first,
                shift: self.layout.size.trailing_zeros(),
                head: self.layout.head,
                compound: self.layout.compound as u32,
                frames,
            }),
            _ => Err(strange()),
        }
    }

    /// All pinned folios, by frame.
    fn pinned(&self, frames: &Frames) -> Result<Vec<Folio>> {
        let failed = |errno| refused(kcore::PATH, errno);
        let mut known = BTreeMap::new();
        let mut folios = Vec::new();
        let mut buffer = Vec::new();
        for range in self.core.frames() {
            let mut frame = range.start;
            while frame < range.end {
                let section = frame / self.pages_per_section;
                // An even number, so that the first two entries of a folio are in one chunk.
                let chunk = (frame / CHUNK + 1) * CHUNK;
                let end = range
                    .end
                    .min(chunk)
                    .min((section + 1) * self.pages_per_section);
                let Some(base) = self.sections.get(&section) else {
                    frame = end;
                    continue;
                };
                buffer.resize(((end - frame) * self.layout.size) as usize, 0);
                match self.core.read(base + frame * self.layout.size, &mut buffer) {
                    Ok(()) => {}
                    // Memory without entries: removed, or a part of a section.
                    Err(Errno::FAULT) => {
                        frame = end;
                        continue;
                    }
                    Err(errno) => return Err(failed(errno)),
                }
                let mut next = frame;
                while next < end {
                    let entries = &buffer[((next - frame) * self.layout.size) as usize..];
                    let found = self.layout.look(next, entries);
                    next += found.pages();
                    if let Some(folio) = self.confirm(frames, found, &mut known) {
                        folios.push(folio);
                    }
                }
                // A folio may extend into the next chunk.
                frame = next;
            }
        }
        Ok(folios)
    }

    /// What the kernel reports about a page that looks pinned; None if it is not.
    fn confirm(
        &self,
        frames: &Frames,
        found: EntryState,
        known: &mut BTreeMap<u64, Option<FileId>>,
    ) -> Option<Folio> {
        let (frame, pages, mapping) = match found {
            EntryState::Nothing { .. } => return None,
            EntryState::Large {
                frame,
                pages,
                mapping,
                ..
            } => (frame, pages, mapping),
            EntryState::Small { frame, mapping, .. } => (frame, 1, mapping),
        };
        // It may have been freed since.
        let flags = frames.flags(frame).ok()?;
        if flags & (frames::BUDDY | frames::SLAB | frames::ZERO_PAGE) != 0 {
            return None;
        }
        let (pins, exact) = match found {
            EntryState::Large { pins, .. } => (pins, true),
            EntryState::Small { references, .. } => {
                // Only pages that a process can map can be pinned; others may have many references, too.
                let mappable = frames::LRU | frames::MMAP | frames::ANON | frames::SWAPBACKED;
                if flags & mappable == 0 {
                    return None;
                }
                match frames.pins(frame) {
                    Some(pins) => (pins, true),
                    None => {
                        let mapped = frames.mapped(frame).ok()?;
                        (small_pins(references, mapped, mapping, flags), false)
                    }
                }
            }
            EntryState::Nothing { .. } => return None,
        };
        // The lowest bits of the pointer say whether it refers to a file.
        let is_file = mapping != 0 && mapping & 3 == 0 && flags & frames::ANON == 0;
        let file = is_file.then(|| known.entry(mapping).or_insert_with(|| self.file(mapping)));
        (pins > 0).then(|| Folio {
            frame,
            pages,
            pins,
            exact,
            flags,
            cgroup: frames.cgroup(frame),
            file: file.cloned().flatten(),
        })
    }

    fn file(&self, mapping: u64) -> Option<FileId> {
        let files = self.files?;
        let word = |address: u64| self.core.word(address).ok();
        let inode = word(mapping + files.host)?;
        let superblock = word(inode + files.superblock)?;
        let device = word(superblock + files.device)? as u32;
        let (major, minor) = (device >> 20, device & 0xf_ffff);
        Some((
            format!("{major:02x}:{minor:02x}"),
            word(inode + files.inode)?,
        ))
    }
}

/// Pins of a small folio: 1024 references each, after subtracting those of mappings and the page cache. A
/// deleted file no longer has its reference.
fn small_pins(references: u64, mapped: u64, mapping: u64, flags: u64) -> u64 {
    let cached = match flags & frames::ANON {
        0 => mapping != 0,
        _ => flags & frames::SWAPCACHE != 0,
    };
    references.saturating_sub(mapped + u64::from(cached)) / BIAS
}

/// The result of inspecting one entry, or the first one of a folio.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EntryState {
    Nothing {
        pages: u64,
    },
    Large {
        frame: u64,
        pages: u64,
        pins: u64,
        mapping: u64,
    },
    Small {
        frame: u64,
        references: u64,
        mapping: u64,
    },
}

impl EntryState {
    /// Number of entries it covers.
    fn pages(&self) -> u64 {
        match self {
            Self::Nothing { pages } | Self::Large { pages, .. } => *pages,
            Self::Small { .. } => 1,
        }
    }
}

impl EntryLayout {
    fn of(core: &Kcore, types: &Btf) -> Option<Self> {
        let info = &core.info;
        let at = |name: &str| {
            let member = info.offset(&format!("page.{name}"));
            member
                .or_else(|| types.offset("page", name))
                .map(|at| at as usize)
        };
        let of_folio = |name: &str| types.offset("folio", name).map(|at| at as usize);
        Some(Self {
            size: info.size("page").or_else(|| types.size("page"))?,
            flags: at("flags")?,
            head: info.number("PG_head_mask")?,
            compound: at("compound_head").or_else(|| at("compound_info"))?,
            references: at("_refcount")?,
            mapping: at("mapping")?,
            pages: of_folio("_folio_nr_pages").or_else(|| of_folio("_nr_pages"))?,
            pins: of_folio("_pincount")?,
        })
    }

    /// Inspects the entry of a frame, together with the following ones.
    fn look(&self, frame: u64, entries: &[u8]) -> EntryState {
        /// Larger than any folio.
        const MOST: u64 = 1 << 22;
        let word = |at: usize| entries.get(at..).and_then(|bytes| bytes.first_chunk());
        let long = |at| word(at).map_or(0, |bytes| u64::from_ne_bytes(*bytes));
        let int = |at: usize| {
            let bytes = entries.get(at..).and_then(|bytes| bytes.first_chunk());
            bytes.map_or(0, |bytes| i32::from_ne_bytes(*bytes).max(0) as u64)
        };
        let nothing = EntryState::Nothing { pages: 1 };
        // Not the first page of its folio.
        if long(self.compound) & 1 == 1 {
            return nothing;
        }
        let (references, mapping) = (int(self.references), long(self.mapping));
        if long(self.flags) & self.head != 0 {
            let pages = int(self.pages);
            let whole = pages.is_power_of_two() && (2..=MOST).contains(&pages);
            if references == 0 || !whole || !frame.is_multiple_of(pages) {
                return nothing;
            }
            return match int(self.pins) {
                0 => EntryState::Nothing { pages },
                pins => EntryState::Large {
                    frame,
                    pages,
                    pins,
                    mapping,
                },
            };
        }
        match references {
            0..BIAS => nothing,
            _ => EntryState::Small {
                frame,
                references,
                mapping,
            },
        }
    }
}

/// Where the entries of each memory section are (`mem_section`, mm/sparse.c), and the number of pages per
/// section.
fn sections(core: &Kcore) -> Option<(BTreeMap<u64, u64>, u64)> {
    /// SECTION_HAS_MEM_MAP and SECTION_IS_ONLINE; other low bits are not part of the address, either.
    const THERE: u64 = 2 | 4;
    const BITS: u64 = 0xfff;
    let info = &core.info;
    let size = info.size("mem_section")?;
    let bits = info.number("SECTION_SIZE_BITS")?;
    let number = 1 << info.number("MAX_PHYSMEM_BITS")?.checked_sub(bits)?;
    let map = info.offset("mem_section.section_mem_map")? as usize;
    let table = info.symbol("mem_section")?;
    let roots = info.length("mem_section")?;
    let mut sections = BTreeMap::new();
    let mut take = |first: u64, bytes: &[u8]| {
        for (at, entry) in bytes.chunks_exact(size as usize).enumerate() {
            let coded = entry.get(map..).and_then(|bytes| bytes.first_chunk());
            let coded = coded.map_or(0, |bytes| u64::from_ne_bytes(*bytes));
            if coded & THERE == THERE {
                sections.insert(first + at as u64, coded & !BITS);
            }
        }
    };
    if roots == number {
        let mut bytes = vec![0; (size * roots) as usize];
        core.read(table, &mut bytes).ok()?;
        take(0, &bytes);
    } else {
        // Each root has a page of sections.
        let each = page_size() / size;
        let mut pointers = vec![0; (8 * roots) as usize];
        core.read(table, &mut pointers).ok()?;
        let mut bytes = vec![0; (each * size) as usize];
        for (root, pointer) in pointers.chunks_exact(8).enumerate() {
            let pointer = u64::from_ne_bytes(*pointer.first_chunk().expect("8 bytes"));
            if pointer != 0 {
                core.read(pointer, &mut bytes).ok()?;
                take(root as u64 * each, &bytes);
            }
        }
    }
    Some((sections, (1 << bits) / page_size()))
}

/// Which processes map which of the pinned folios.
#[derive(Default)]
struct MappedBy {
    people: Vec<Mapper>,
    /// For each folio, by index in the list, the indexes of processes.
    by: BTreeMap<usize, Vec<usize>>,
    /// For each folio, its file.
    files: BTreeMap<usize, FileId>,
    names: BTreeMap<FileId, String>,
    ranges: Vec<PinnedRange>,
    unreadable: u64,
}

impl MappedBy {
    fn look(&mut self, folios: &[Folio], asked: Option<u32>) -> Result<()> {
        let all = super::visible()?;
        for pid in all {
            match self.look_at(pid, folios, asked == Some(pid)) {
                Ok(()) => {}
                Err(errno) if ended(errno) => {}
                Err(errno) if hidden(errno) => self.unreadable += 1,
                Err(errno) => return Err(super::failed(pid, errno)),
            }
        }
        Ok(())
    }

    fn look_at(&mut self, pid: u32, folios: &[Folio], asked: bool) -> Result<(), Errno> {
        let folder = folder(pid);
        let status = process::status(&folder)?;
        if status.locked.is_none() {
            return Ok(());
        }
        let maps = process::maps(&folder)?;
        let pagemap = Pagemap::open(&folder)?;
        let person = self.people.len();
        let mut bytes = 0;
        for map in &maps {
            // Kernel pages mapped into every process, above the process's own addresses.
            if map.name == "[vsyscall]" {
                continue;
            }
            let mut any = false;
            let whole = Range {
                start: map.start,
                end: map.end,
            };
            pagemap.frames(whole, |address, frame| {
                let Some(at) = holding(folios, frame) else {
                    return;
                };
                any = true;
                bytes += page_size();
                if map.inode != 0 && folios[at].flags & frames::ANON == 0 {
                    let file = self.files.entry(at);
                    file.or_insert_with(|| (map.device.clone(), map.inode));
                }
                let by = self.by.entry(at).or_default();
                if by.last() != Some(&person) {
                    by.push(person);
                }
                if asked {
                    extend(&mut self.ranges, address, &folios[at]);
                }
            })?;
            if any && map.inode != 0 {
                let key = (map.device.clone(), map.inode);
                self.names.entry(key).or_insert_with(|| map.name.clone());
            }
        }
        self.people.push(Mapper {
            pid,
            name: status.name,
            uid: status.uid,
            bytes,
        });
        Ok(())
    }
}

/// The folio that contains a frame.
fn holding(folios: &[Folio], frame: u64) -> Option<usize> {
    let at = folios
        .partition_point(|one| one.frame <= frame)
        .checked_sub(1)?;
    (frame - folios[at].frame < folios[at].pages).then_some(at)
}

/// Adds a page to the last range, or starts a new one.
fn extend(ranges: &mut Vec<PinnedRange>, address: u64, folio: &Folio) {
    match ranges.last_mut() {
        Some(last)
            if last.address + last.bytes == address
                && (last.pins, last.exact) == (folio.pins, folio.exact) =>
        {
            last.bytes += page_size();
        }
        _ => ranges.push(PinnedRange {
            address,
            bytes: page_size(),
            pins: folio.pins,
            exact: folio.exact,
        }),
    }
}

fn sort(flags: u64) -> &'static str {
    match flags {
        _ if flags & frames::HUGE != 0 => "hugetlb",
        _ if flags & frames::ANON != 0 => "anonymous",
        _ if flags & frames::SWAPBACKED != 0 => "shmem",
        _ => "file",
    }
}

fn sum(
    folios: &[Folio],
    mapped: MappedBy,
    asked: Option<u32>,
    records: Option<&PinRecords>,
) -> PinnedPages {
    let asked = asked.map(|pid| mapped.people.iter().position(|one| one.pid == pid));
    let cgroups = if folios.iter().any(|one| one.cgroup.is_some()) {
        cgroups()
    } else {
        BTreeMap::new()
    };
    let mut groups = BTreeMap::<_, (u64, u64, u64)>::new();
    for (at, folio) in folios.iter().enumerate() {
        let by = mapped.by.get(&at).cloned().unwrap_or_default();
        if asked.is_some_and(|asked| asked.is_none_or(|asked| !by.contains(&asked))) {
            continue;
        }
        let key = (
            by,
            folio.cgroup,
            sort(folio.flags),
            folio.file.as_ref().or_else(|| mapped.files.get(&at)),
            folio.exact,
            records
                .and_then(|records| records.of_frame(folio.frame))
                .map(|burst| &burst.by),
        );
        let sums = groups.entry(key).or_default();
        sums.0 += 1;
        sums.1 += folio.pages * page_size();
        sums.2 += folio.pins;
    }
    let groups: Vec<_> = groups
        .into_iter()
        .map(
            |((by, cgroup, sort, file, exact, who), (folios, bytes, pins))| PageGroup {
                mapped: by.iter().map(|at| mapped.people[*at].clone()).collect(),
                cgroup: cgroup.and_then(|inode| cgroups.get(&inode).cloned()),
                sort,
                file: file.and_then(|file| mapped.names.get(file).cloned()),
                inode: file.map(|(_, inode)| *inode),
                device: file.map(|(device, _)| device.clone()),
                exact,
                folios,
                bytes,
                pins,
                recorded: who.cloned(),
            },
        )
        .collect();
    PinnedPages {
        bytes: groups.iter().map(|group| group.bytes).sum(),
        folios: groups.iter().map(|group| group.folios).sum(),
        groups,
        ranges: mapped.ranges,
        unreadable: mapped.unreadable,
        recording: records.is_some(),
    }
}

/// The paths of memory cgroups below their mount, by inode.
pub(super) fn cgroups() -> BTreeMap<u64, String> {
    let mut paths = BTreeMap::new();
    // Version 1 has a mount for memory, version 2 one for everything.
    let places = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"].map(Path::new);
    let Some(root) = places
        .into_iter()
        .find(|place| place.join("cgroup.procs").exists())
    else {
        return paths;
    };
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let below = folder.strip_prefix(root).unwrap_or(&folder);
        if let Ok(data) = fs::metadata(&folder) {
            paths.insert(data.ino(), format!("/{}", below.display()));
        }
        let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
        folders.extend(
            entries
                .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
                .map(|entry| entry.path()),
        );
    }
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The layout of Linux 6.12.
    const LAYOUT: EntryLayout = EntryLayout {
        size: 64,
        flags: 0,
        head: 64,
        compound: 8,
        references: 52,
        mapping: 24,
        pages: 96,
        pins: 92,
    };

    fn entries(fields: &[(usize, &[u8])]) -> Vec<u8> {
        let mut bytes = vec![0; 256];
        for (at, value) in fields {
            bytes[*at..*at + value.len()].copy_from_slice(value);
        }
        bytes
    }

    #[test]
    fn pins_of_large_folios_are_read() {
        let head = [
            (0, &64_u64.to_ne_bytes()[..]),
            (52, &3_i32.to_ne_bytes()[..]),
        ];
        let pages = (96, &512_u32.to_ne_bytes()[..]);
        let pins = (92, &7_i32.to_ne_bytes()[..]);
        let mapping = (24, &0x8000_u64.to_ne_bytes()[..]);
        let pinned = entries(&[head[0], head[1], pages, pins, mapping]);
        let large = EntryState::Large {
            frame: 1024,
            pages: 512,
            pins: 7,
            mapping: 0x8000,
        };
        assert_eq!(LAYOUT.look(1024, &pinned), large);
        let free = entries(&[head[0], head[1], pages]);
        assert_eq!(LAYOUT.look(1024, &free), EntryState::Nothing { pages: 512 });
        // A folio cannot begin there, and its size is impossible.
        assert_eq!(LAYOUT.look(1025, &pinned), EntryState::Nothing { pages: 1 });
        let odd = entries(&[head[0], head[1], pins, (96, &3_u32.to_ne_bytes()[..])]);
        assert_eq!(LAYOUT.look(1024, &odd), EntryState::Nothing { pages: 1 });
        let tail = entries(&[head[0], (8, &1_u64.to_ne_bytes()[..]), pages, pins]);
        assert_eq!(LAYOUT.look(1024, &tail), EntryState::Nothing { pages: 1 });
        // A truncated entry is not a pinned folio.
        assert_eq!(
            LAYOUT.look(1024, &pinned[..64]),
            EntryState::Nothing { pages: 1 }
        );
    }

    #[test]
    fn references_of_mappings_and_the_cache_are_not_counted_as_pins() {
        let page = |references: i32| entries(&[(52, &references.to_ne_bytes()[..])]);
        assert_eq!(
            LAYOUT.look(5, &page(1023)),
            EntryState::Nothing { pages: 1 }
        );
        let small = EntryState::Small {
            frame: 5,
            references: 2049,
            mapping: 0,
        };
        assert_eq!(LAYOUT.look(5, &page(2049)), small);
        // Negative if freed.
        assert_eq!(LAYOUT.look(5, &page(-1)), EntryState::Nothing { pages: 1 });
        // An anonymous page, mapped once, pinned twice; shmem, mapped 1100 times, not pinned.
        let (file, shmem) = (0xff00, frames::SWAPBACKED);
        assert_eq!(small_pins(2049, 1, 0xff01, frames::ANON), 2);
        assert_eq!(small_pins(1101, 1100, file, shmem), 0);
        assert_eq!(small_pins(1101 + 1024, 1100, file, shmem), 1);
        assert_eq!(
            small_pins(1026, 1, 0xff01, frames::ANON | frames::SWAPCACHE),
            1
        );
        assert_eq!(small_pins(1024, 0, file, shmem), 0);
        // A deleted memfd.
        assert_eq!(small_pins(1024, 0, 0, shmem), 1);
        assert_eq!(small_pins(5, 9, 0, 0), 0);
    }

    #[test]
    fn pages_of_a_folio_are_merged() {
        let mut folios = Vec::new();
        let mut see = |frame, flags, pins| {
            let page = Tracked { frame, flags, pins };
            add(&mut folios, &page);
        };
        // A folio whose first page was not pinned yet, a small one, and two adjacent large ones.
        see(3, frames::TAIL, 1);
        see(4, frames::ANON, 2);
        see(6, frames::TAIL, 1);
        for (frame, flags) in [(8, 0), (9, frames::TAIL), (10, 0), (11, frames::TAIL)] {
            see(frame, flags | frames::SWAPBACKED, 5);
        }
        let found: Vec<_> = folios
            .iter()
            .map(|one| (one.frame, one.pages, one.pins))
            .collect();
        assert_eq!(found, [(4, 1, 2), (8, 2, 5), (10, 2, 5)]);
        assert!(folios.iter().all(|one| one.exact));
    }

    #[test]
    fn the_folio_of_a_frame_is_found() {
        let folio = |frame, pages| Folio {
            frame,
            pages,
            pins: 1,
            exact: pages > 1,
            flags: 0,
            cgroup: None,
            file: None,
        };
        let folios = [folio(4, 1), folio(512, 512), folio(1024, 1)];
        let found = [3, 4, 5, 512, 1023, 1024, 1025].map(|frame| holding(&folios, frame));
        assert_eq!(
            found,
            [None, Some(0), None, Some(1), Some(1), Some(2), None]
        );
        let mut ranges = Vec::new();
        let page = page_size();
        for at in [0, 1, 2, 5] {
            extend(&mut ranges, at * page, &folios[0]);
        }
        extend(&mut ranges, 6 * page, &folios[1]);
        let lengths: Vec<_> = ranges
            .iter()
            .map(|one| (one.address / page, one.bytes / page))
            .collect();
        assert_eq!(lengths, [(0, 3), (5, 1), (6, 1)]);
    }
}
