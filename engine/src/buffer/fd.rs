//! `fd:N`: a memfd or a dma-buf that exists already.

use super::dmabuf::DmaBufs;
use super::dmafile::module_behind;
use super::memfd::{MAPPED, seal};
use super::pages::Tactic;
use super::{Memory, cannot_map};
use crate::error::{Error, Result};
use crate::options::Pages;
use crate::plan::{DmaBufFacts, Place, Plan};
use crate::sys::map::{Mapping, Region, page_size};
use crate::sys::{Errno, dmabuf, file, memfd};
use rustix::fs::SealFlags;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// Looks at a descriptor that is to be filled, without touching its contents.
pub(crate) fn look_at(
    fd: BorrowedFd<'_>,
    number: i32,
    at: Option<u64>,
) -> Result<(Place, Option<DmaBufFacts>)> {
    let refuse = |why: &str, errno, remedy: &str| {
        Error::new("cannot fill the descriptor", why)
            .with_errno(errno)
            .at(format!("fd:{number}"))
            .remedy(remedy)
    };
    let not_writable = || {
        refuse(
            "it is not open for writing",
            Errno::ACCESS,
            "open it for reading and writing",
        )
    };
    if dmabuf::is_one(fd) {
        if memfd::is_writable(fd) == Ok(false) {
            return Err(not_writable());
        }
        let look = || {
            let bytes = dmabuf::size(fd)?;
            let map = Mapping::chain(&[(fd, bytes.min(page_size()))])?;
            Ok((bytes, map.region().can_be_pinned(0).err()))
        };
        let (bytes, unpinnable) = look().map_err(|errno: Errno| {
            let why = "it is a dma-buf that this process cannot map";
            refuse(why, errno, "fill one whose exporter lets the CPU in")
        })?;
        let place = Place {
            bytes,
            address: 0,
            at,
            empty: false,
            lacking: 0,
            hugetlb: false,
        };
        let module = module_behind(fd);
        return Ok((
            place,
            Some(DmaBufFacts {
                unpinnable,
                module,
                ..DmaBufFacts::default()
            }),
        ));
    }
    let stat = file::stat(fd).map_err(|errno| Error::os("cannot ask about", errno))?;
    let seals = memfd::seals(fd).map_err(|_| {
        refuse(
            "it is neither a memfd nor a dma-buf",
            Errno::INVAL,
            "make one with memfd_create(2)",
        )
    })?;
    if seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
        return Err(refuse(
            "it is sealed against writing",
            Errno::PERM,
            "fill it before sealing",
        ));
    }
    if memfd::appends(fd) == Ok(true) {
        return Err(refuse(
            "it is open for appending, so that nothing can be written in place",
            Errno::INVAL,
            "open it without O_APPEND",
        ));
    }
    if memfd::is_writable(fd) == Ok(false) {
        return Err(not_writable());
    }
    let place = Place {
        bytes: stat.size,
        address: 0,
        at,
        // Of a part, the pages are not ours to choose.
        empty: stat.allocated == 0 && stat.fs_magic != HUGETLBFS_MAGIC && at.is_none(),
        lacking: stat.size.saturating_sub(stat.allocated),
        hugetlb: stat.fs_magic == HUGETLBFS_MAGIC,
    };
    Ok((place, None))
}

/// Takes it, to be filled.
pub(super) fn existing(fd: &Arc<OwnedFd>, plan: &Plan, pages: Pages) -> Result<Box<dyn Memory>> {
    if dmabuf::is_one(fd.as_fd()) {
        let made = DmaBufs::to_fill(fd, false);
        return match made {
            Ok(made) => Ok(Box::new(made)),
            Err(errno) => Err(Error::os("cannot map the dma-buf", errno)),
        };
    }
    Ok(Box::new(Existing::new(fd, plan, pages)?))
}

struct Existing {
    /// None only where it could not be mapped again after it was sealed.
    map: Option<Mapping>,
    fd: Arc<OwnedFd>,
    tactic: Tactic,
    /// It was empty when it came, and so every byte of it was zero.
    fresh: bool,
    /// Its owner may cut it short: then the CPU reaches it through the descriptor, where that
    /// gives an error, and not through the mapping, where it raises SIGBUS.
    may_shrink: bool,
    /// Its size when it came.
    len: u64,
}

impl Existing {
    fn new(fd: &Arc<OwnedFd>, plan: &Plan, pages: Pages) -> Result<Self> {
        let fail = |errno| cannot_map(errno, pages);
        let stat = file::stat(fd.as_fd()).map_err(fail)?;
        let seals = memfd::seals(fd.as_fd()).map_err(fail)?;
        if stat.size < plan.capacity {
            let why = format!(
                "its owner has cut it short meanwhile, to {} bytes",
                stat.size
            );
            return Err(Error::new("cannot fill the descriptor", why)
                .with_errno(Errno::INVAL)
                .remedy("seal it against that (F_SEAL_SHRINK)"));
        }
        let hugetlb = stat.fs_magic == HUGETLBFS_MAGIC;
        let pages = if hugetlb { Pages::Huge } else { pages };
        let tactic = Tactic::new(pages, true);
        let align = if hugetlb { 1 } else { tactic.grain() };
        let map =
            Mapping::shared(fd.as_fd(), stat.size as usize, align as usize, true).map_err(fail)?;
        if pages == Pages::Thp {
            tactic.advise(&map.region());
        }
        Ok(Self {
            map: Some(map),
            fd: Arc::clone(fd),
            tactic,
            fresh: stat.allocated == 0,
            // hugetlbfs has no write(2); its owner is trusted not to shrink it.
            may_shrink: !hugetlb && !seals.contains(SealFlags::SHRINK),
            len: stat.size,
        })
    }
}

impl Memory for Existing {
    fn region(&self) -> Region<'_> {
        self.map.as_ref().expect(MAPPED).region()
    }

    /// The mapping, where a touch of it cannot raise SIGBUS.
    fn steady(&self) -> Option<Region<'_>> {
        let map = self.map.as_ref().filter(|_| !self.may_shrink)?;
        Some(map.region())
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

    fn is_fresh(&self) -> bool {
        self.fresh
    }

    fn zero(&self, at: u64, len: u64) -> Result<(), Errno> {
        static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
        if let Some(region) = self.steady() {
            region.zero(at, len);
            return Ok(());
        }
        let mut done = 0;
        while done < len {
            let step = (len - done).min(ZEROS.len() as u64);
            file::pwrite_all(self.fd.as_fd(), &ZEROS[..step as usize], at + done)?;
            done += step;
        }
        Ok(())
    }

    fn copy_out(&self, at: u64, into: &mut [u8]) -> Result<(), Errno> {
        match self.steady() {
            Some(region) => region.copy_out(at, into),
            None => file::pread_all(self.fd.as_fd(), into, at)?,
        }
        Ok(())
    }

    fn copy_in(&mut self, at: u64, from: &[u8]) -> Result<(), Errno> {
        match self.steady() {
            // A store there would be a signal.
            Some(_) if self.map.as_ref().is_some_and(Mapping::is_sealed) => {
                return Err(Errno::PERM);
            }
            Some(region) => region.copy_in(at, from),
            None => file::pwrite_all(self.fd.as_fd(), from, at)?,
        }
        Ok(())
    }

    fn bytes(&self) -> Option<&[u8]> {
        self.map.as_ref()?.bytes()
    }

    fn seal(&mut self) -> Result<(), Errno> {
        let sealed = seal(self.fd.as_fd(), &mut self.map, self.len);
        if sealed.is_ok() {
            self.may_shrink = false;
        }
        sealed
    }

    fn into_mapping(self: Box<Self>) -> Option<Mapping> {
        self.map
    }

    fn into_descriptors(self: Box<Self>) -> Result<Vec<OwnedFd>, Errno> {
        // The caller may have kept it too.
        let own = Arc::try_unwrap(self.fd).or_else(|fd| file::twin(fd.as_fd()))?;
        Ok(vec![own])
    }
}
