//! Several ranges of memory that are saved back to back, without copying them together first.

use super::origin::{Block, Opened, Origin, OriginKind, ReadAccess};
use super::overlap::Stored;
use super::to::To;
use crate::control::CancelToken;
use crate::error::{Error, Result, Verb};
use crate::flow::feed::FileRange;
use crate::sys::Errno;
use crate::sys::map::{Borrowed, Region};
use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU8;

/// A range of memory to save, one of several ([`Origin::Parts`](crate::Origin::Parts)).
///
/// ```no_run
/// use dmafile::{Origin, OriginPart, Save};
///
/// let (header, body) = (vec![1_u8; 100], vec![2_u8; 1 << 30]);
/// let parts = vec![OriginPart::from(&header[..]), OriginPart::from(&body[..])];
/// Save::new(Origin::Parts(parts), "both.bin").run()?;
/// # Ok::<(), dmafile::Error>(())
/// ```
#[derive(Clone)]
pub struct OriginPart<'m>(PartPiece<'m>);

#[derive(Clone)]
enum PartPiece<'m> {
    Memory(Borrowed<'m>),
    Fd {
        fd: Arc<OwnedFd>,
        number: i32,
        at: u64,
        bytes: u64,
    },
}

impl<'m> OriginPart<'m> {
    /// Memory that others may write to during the save: their writes may or may not be in the file, byte
    /// by byte.
    pub fn shared(memory: &'m [AtomicU8]) -> Self {
        Self(PartPiece::Memory(Borrowed::shown_shared(memory)))
    }

    /// `bytes` bytes of what a descriptor refers to, from byte `at` on: of a memfd, a dma-buf, a regular
    /// file or a block device. A save refuses a pipe (ESPIPE), and a range beyond the end (EINVAL).
    pub fn fd(fd: OwnedFd, at: u64, bytes: u64) -> Self {
        let number = fd.as_raw_fd();
        let fd = Arc::new(fd);
        Self(PartPiece::Fd {
            fd,
            number,
            at,
            bytes,
        })
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        match &self.0 {
            PartPiece::Memory(memory) => memory.region().len(),
            PartPiece::Fd { bytes, .. } => *bytes,
        }
    }
}

impl<'m> From<&'m [u8]> for OriginPart<'m> {
    fn from(memory: &'m [u8]) -> Self {
        Self(PartPiece::Memory(Borrowed::shown(memory)))
    }
}

impl fmt::Display for OriginPart<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            PartPiece::Memory(_) => f.write_str("memory"),
            PartPiece::Fd { number, at, .. } => write!(f, "fd:{number}@{at}"),
        }
    }
}

impl fmt::Debug for OriginPart<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OriginPart({self}, {} bytes)", self.bytes())
    }
}

/// Open parts, in the order of their bytes; none is empty.
pub(super) struct OpenParts<'m>(Vec<Placed<'m>>);

/// A part, and its range within the whole.
struct Placed<'m> {
    start: u64,
    end: u64,
    opened: Opened<'m>,
}

/// What memory must fulfil so that bytes can be written directly from there.
#[derive(Clone, Copy)]
pub(super) struct Fit {
    /// Offset in the file of the first byte of the whole.
    base: u64,
    /// Alignment of memory and of the offset in the file; None if writes need none.
    direct: Option<(u64, u64)>,
}

/// A shorter range is copied together with its neighbours: that is cheaper than a separate write.
const SMALL: u64 = 128 << 10;

impl Fit {
    /// For an origin that is written to a file, starting at byte `at`.
    pub(super) fn of(origin: &Opened<'_>, (to, at): (&To, u64), direct: bool) -> Self {
        Self {
            base: at.wrapping_sub(origin.start),
            direct: direct.then_some((to.memory_align, to.grain)),
        }
    }
}

impl<'m> OpenParts<'m> {
    /// Opens the parts; returns them with their total size and a description.
    pub(super) fn open(parts: &[OriginPart<'m>]) -> Result<(Self, u64, OriginKind)> {
        let (mut all, mut start) = (Vec::new(), 0_u64);
        for part in parts {
            let opened = match &part.0 {
                PartPiece::Memory(memory) => Opened::of_caller(memory.clone()),
                PartPiece::Fd {
                    fd,
                    number,
                    at,
                    bytes,
                } => {
                    let (fd, number, at) = (Arc::clone(fd), *number, *at);
                    let opened = Opened::open(&Origin::Fd { fd, number, at }, Some(*bytes))?;
                    if opened.is_stream() {
                        let error = Error::os(Verb::Save, Errno::SPIPE).at(part.to_string());
                        return Err(error.with_why("a pipe cannot be one of several parts"));
                    }
                    opened
                }
            };
            let end = start.checked_add(part.bytes());
            let end = end.ok_or_else(|| Error::os(Verb::Save, Errno::OVERFLOW))?;
            if start < end {
                all.push(Placed { start, end, opened });
            }
            start = end;
        }
        let in_memory = all.iter().all(|one| one.opened.is_callers());
        let kind = if in_memory {
            OriginKind::Memory
        } else {
            OriginKind::Parts
        };
        Ok((Self(all), start, kind))
    }

    /// The parts that have bytes of `[start, end)`, and which.
    fn across(&self, start: u64, end: u64) -> impl Iterator<Item = (&Placed<'m>, u64, u64)> {
        let first = self.0.partition_point(|one| one.end <= start);
        let these = self.0[first..]
            .iter()
            .take_while(move |one| one.start < end);
        these.map(move |one| (one, one.start.max(start), one.end.min(end)))
    }

    pub(super) fn copy_out(&self, at: u64, into: &mut [u8]) -> Result<()> {
        for (one, from, upto) in self.across(at, at + into.len() as u64) {
            let into = &mut into[(from - at) as usize..(upto - at) as usize];
            one.opened.copy_out(one.place(from), into)?;
        }
        Ok(())
    }

    /// Copies or reads bytes into a block of a ring.
    pub(super) fn fill(
        &self,
        block: &Block<'_>,
        at: u64,
        len: u64,
        cancel: &CancelToken,
    ) -> Result<u64> {
        for (one, from, upto) in self.across(at, at + len) {
            let done = from - at;
            let block = Block {
                ring: block.ring,
                at: block.at + done,
                room: block.room - done,
            };
            one.opened
                .fill(&block, one.place(from), upto - from, cancel)?;
        }
        Ok(len)
    }

    /// The ranges of `[start, end)` that have data; the others are holes.
    pub(super) fn data(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let mut all: Vec<(u64, u64)> = Vec::new();
        for (one, from, upto) in self.across(start, end) {
            for (from, upto) in one.opened.data(one.place(from), one.place(upto)) {
                let back = |at: u64| at - one.opened.start + one.start;
                let (from, upto) = (back(from), back(upto));
                match all.last_mut() {
                    Some(last) if last.1 == from => last.1 = upto,
                    _ => all.push((from, upto)),
                }
            }
        }
        all
    }

    /// Where their bytes are stored, as [`Opened::stored`].
    pub(super) fn stored(&self, file: BorrowedFd<'_>) -> Vec<Stored> {
        let stored = self.0.iter().flat_map(|one| {
            let all = one.opened.stored(file).into_iter();
            all.map(|stored| Stored {
                at: one.start + stored.at,
                ..stored
            })
        });
        stored.collect()
    }

    /// Begins CPU access to all of them.
    pub(super) fn begin(&self, cancel: &CancelToken) -> Result<ReadAccess<'_>> {
        let all = self.0.iter().map(|one| one.opened.begin(cancel));
        all.collect::<Result<_>>().map(ReadAccess::all)
    }

    /// The error for the first part whose bytes are gone.
    pub(super) fn cut_short(&self) -> Option<Error> {
        let mut all = self.0.iter();
        all.find_map(|one| one.opened.cut_short(one.opened.start))
    }

    /// The address of these bytes, if they are in one part and can be written directly from there.
    pub(super) fn find(&self, at: u64, len: u64, fit: Fit) -> Option<Region<'_>> {
        let (one, from, upto) = self.across(at, at + len).next()?;
        let whole = (from, upto) == (at, at + len);
        let memory = one.region(fit).filter(|_| whole)?;
        Some(memory.part(at - one.start, len))
    }

    /// Splits ranges of the file, so that those that can be written directly are separate from the others,
    /// none of which is larger than `block`.
    pub(super) fn split(&self, ranges: &[FileRange], fit: Fit, block: u64) -> Vec<FileRange> {
        let mut split = Vec::new();
        let pass = |split: &mut Vec<_>, mut from: u64, upto: u64| {
            while from < upto {
                let end = (from + block - from % block).min(upto);
                split.push((from, end));
                from = end;
            }
        };
        for (start, end) in joined(ranges) {
            let mut done = start;
            for (from, upto) in self.in_place((start, end), fit) {
                pass(&mut split, done, from);
                split.push((from, upto));
                done = upto;
            }
            pass(&mut split, done, end);
        }
        split
    }

    /// True if anything in these ranges of the file can be written directly.
    pub(super) fn any_in_place(&self, ranges: &[FileRange], fit: Fit) -> bool {
        let mut all = ranges.iter();
        all.any(|range| self.in_place(*range, fit).next().is_some())
    }

    /// The parts of a range of the file that can be written directly, in whole blocks.
    fn in_place(&self, (start, end): FileRange, fit: Fit) -> impl Iterator<Item = FileRange> {
        let grain = fit.direct.map_or(1, |(_, grain)| grain);
        let parts = self.across(start.wrapping_sub(fit.base), end.wrapping_sub(fit.base));
        parts.filter_map(move |(one, from, upto)| {
            let from = from.wrapping_add(fit.base).next_multiple_of(grain);
            let upto = upto.wrapping_add(fit.base) / grain * grain;
            let enough = from + SMALL <= upto || (from, upto) == (start, end);
            (enough && one.region(fit).is_some()).then_some((from, upto))
        })
    }
}

impl Placed<'_> {
    /// The offset within this part of a byte of the whole.
    fn place(&self, at: u64) -> u64 {
        at - self.start + self.opened.start
    }

    /// Its mapping, if bytes can be written directly from there.
    fn region(&self, fit: Fit) -> Option<Region<'_>> {
        let region = self.opened.in_memory()?;
        let holes = !self.opened.is_callers();
        let Some((align, grain)) = fit.direct else {
            // A file in memory is read as a file, which does not fill its holes.
            return (!holes).then_some(region);
        };
        // A block that begins in a hole would allocate a page there.
        let align = if holes { grain } else { align };
        let place = self.start.wrapping_add(fit.base);
        let fits = region.address() % align == place % align;
        fits.then_some(region)
    }
}

/// Ranges in ascending order, with adjacent ones merged.
fn joined(ranges: &[FileRange]) -> Vec<FileRange> {
    let mut joined: Vec<FileRange> = Vec::new();
    for &(start, end) in ranges {
        match joined.last_mut() {
            Some(last) if last.1 == start => last.1 = end,
            _ => joined.push((start, end)),
        }
    }
    joined
}
