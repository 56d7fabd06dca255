//! `memfd`: memory with a descriptor, whose size is sealed when it is handed out.

use super::pages::Tactic;
use super::{Memory, cannot_map};
use crate::error::Result;
use crate::options::Pages;
use crate::plan::Plan;
use crate::sys::map::{Mapping, Region, page_size};
use crate::sys::{Errno, file, memfd};
use rustix::fs::SealFlags;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

pub(super) struct Memfd {
    /// None only where it could not be mapped again after it was sealed.
    map: Option<Mapping>,
    fd: OwnedFd,
    tactic: Tactic,
    len: u64,
    /// The size in which it is handed out; hugetlb memory comes in whole pages only.
    final_size: u64,
}

impl Memfd {
    pub(super) fn new(plan: &Plan, pages: Pages) -> Result<Self> {
        let exact = plan.lead + plan.bytes;
        Self::with_size(plan, pages, exact)
    }

    /// A memfd of whole pages, whose size is sealed from the start: what a udmabuf is made of.
    pub(super) fn whole(plan: &Plan, pages: Pages) -> Result<Self> {
        let made = Self::with_size(plan, pages, plan.capacity)?;
        memfd::seal(made.fd.as_fd(), SealFlags::SHRINK | SealFlags::GROW)
            .map_err(|errno| cannot_map(errno, pages))?;
        Ok(made)
    }

    fn with_size(plan: &Plan, pages: Pages, exact: u64) -> Result<Self> {
        let tactic = Tactic::new(pages, true);
        let (size, len, final_size) = if pages == Pages::Huge {
            let whole = plan.capacity.next_multiple_of(tactic.grain());
            (whole, whole, whole)
        } else if plan.capacity == exact.next_multiple_of(page_size()) {
            // A read may go beyond the end of the file, inside its last page.
            (exact, plan.capacity, exact)
        } else {
            (plan.capacity, plan.capacity, exact)
        };
        let name = plan.file.file_name().unwrap_or_default().to_string_lossy();
        // The kernel takes at most 249 bytes and no NUL.
        let name: String = name.chars().take(48).filter(|c| *c != '\0').collect();
        let mapped = || {
            let fd = memfd::create(&name, pages == Pages::Huge)?;
            memfd::resize(fd.as_fd(), size)?;
            let align = if pages == Pages::Huge {
                1
            } else {
                tactic.grain()
            };
            let map = Mapping::shared(fd.as_fd(), len as usize, align as usize, true)?;
            Ok((fd, map))
        };
        let (fd, map) = mapped().map_err(|errno| cannot_map(errno, pages))?;
        tactic.advise(&map.region());
        Ok(Self {
            map: Some(map),
            fd,
            tactic,
            len,
            final_size,
        })
    }

    /// Takes over a memfd that somebody sent, after a check that it cannot shrink below `end`.
    pub(super) fn adopt(fd: OwnedFd, end: u64) -> Result<Self, String> {
        let seals = memfd::seals(fd.as_fd()).map_err(|_| "its descriptor is no memfd")?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err("its memfd may shrink under us".to_string());
        }
        let stat = file::stat(fd.as_fd()).map_err(|_| "its memfd cannot be asked for its size")?;
        if end > stat.size {
            return Err("its range lies outside its memfd".to_string());
        }
        let len = usize::try_from(stat.size).map_err(|_| "it is larger than memory can be")?;
        let sealed = seals.contains(SealFlags::WRITE);
        let map = if sealed {
            Mapping::sealed(fd.as_fd(), len)
        } else {
            Mapping::shared(fd.as_fd(), len, 1, true)
        };
        let map = map.map_err(|errno| format!("its memfd cannot be mapped ({errno:?})"))?;
        Ok(Self {
            map: Some(map),
            fd,
            tactic: Tactic::new(Pages::Auto, true),
            len: stat.size,
            final_size: stat.size,
        })
    }
}

/// What a buffer is until it is sealed, which comes after all that asks for a region.
pub(super) const MAPPED: &str = "mapped while it is filled";

/// Seals against any change. Writable mappings forbid that, so ours is taken off and made anew, in
/// its place, for whoever may still hold an address: what it was where the seal is refused, of bytes
/// that nobody can change where it is not.
pub(super) fn seal(fd: BorrowedFd<'_>, map: &mut Option<Mapping>, len: u64) -> Result<(), Errno> {
    if let Some(map) = map {
        map.blank()?;
    }
    let sealed = memfd::seal(fd, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW);
    let len = len as usize;
    let shown = match (map.take(), sealed) {
        (Some(mut old), _) => old.show(fd, len, sealed.is_ok()).map(|()| old),
        (None, Ok(())) => Mapping::sealed(fd, len),
        (None, Err(_)) => Mapping::shared(fd, len, 1, true),
    };
    *map = Some(shown?);
    sealed
}

impl Memory for Memfd {
    fn region(&self) -> Region<'_> {
        self.map.as_ref().expect(MAPPED).region()
    }

    fn steady(&self) -> Option<Region<'_>> {
        self.map.as_ref().map(Mapping::region)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd.as_fd())
    }

    fn populate(&self, at: u64, len: u64) -> Result<(), Errno> {
        self.tactic.populate(&self.region(), at, len)
    }

    fn grain(&self) -> u64 {
        self.tactic.grain()
    }

    fn pages(&self) -> (String, Option<String>) {
        self.tactic.got(&self.region())
    }

    fn copy_in(&mut self, at: u64, from: &[u8]) -> Result<(), Errno> {
        match &self.map {
            // A store there would be a signal.
            Some(map) if map.is_sealed() => return Err(Errno::PERM),
            Some(map) => map.region().copy_in(at, from),
            None => file::pwrite_all(self.fd.as_fd(), from, at)?,
        }
        Ok(())
    }

    fn copy_out(&self, at: u64, into: &mut [u8]) -> Result<(), Errno> {
        match &self.map {
            Some(map) => map.region().copy_out(at, into),
            None => file::pread_all(self.fd.as_fd(), into, at)?,
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<(), Errno> {
        // Direct sendfile and splice write whole blocks, and so may have made it longer.
        if self.tactic.grain() == page_size() || self.len != self.final_size {
            memfd::resize(self.fd.as_fd(), self.final_size)?;
        }
        // Whoever receives it can rely on its size, and udmabuf asks for F_SEAL_SHRINK.
        memfd::seal(self.fd.as_fd(), SealFlags::SHRINK | SealFlags::GROW)
    }

    fn bytes(&self) -> Option<&[u8]> {
        self.map.as_ref()?.bytes()
    }

    fn seal(&mut self) -> Result<(), Errno> {
        seal(self.fd.as_fd(), &mut self.map, self.final_size)
    }

    fn into_mapping(self: Box<Self>) -> Option<Mapping> {
        self.map
    }

    fn into_descriptors(self: Box<Self>) -> Result<Vec<OwnedFd>, Errno> {
        Ok(vec![self.fd])
    }
}
