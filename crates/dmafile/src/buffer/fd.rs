//! `fd:N`: an existing memfd or dma-buf.

use super::cannot_map;
use super::dmabuf::ToFill;
use super::memfd::seal;
use super::memory::{CopyOut, Filled, Filling, Finish};
use super::pages::Tactic;
use crate::error::{Error, Result};
use crate::options::Pages;
use crate::plan::Plan;
use crate::sys::map::{Mapping, Region, View};
use crate::sys::{Errno, dmabuf, file, memfd};
use rustix::fs::SealFlags;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Takes it over, to be filled.
pub(super) fn existing(fd: &Arc<OwnedFd>, plan: &Plan, pages: Pages) -> Result<Box<dyn Finish>> {
    if dmabuf::is_one(fd.as_fd()) {
        let made = ToFill::new(fd, false).map_err(super::dmabuf::cannot_map)?;
        return Ok(Box::new(made));
    }
    Ok(Box::new(FdFilling::new(fd, plan, pages)?))
}

/// While it is being filled.
struct FdFilling {
    map: Mapping,
    tactic: Tactic,
    /// It was empty when it was passed in, so all of it was zero.
    fresh: bool,
    file: FdFilled,
}

/// The descriptor and its properties.
struct FdFilled {
    fd: Arc<OwnedFd>,
    /// Its owner may truncate it: then the CPU accesses it through the descriptor, which
    /// returns an error, and not through the mapping, which would raise SIGBUS.
    may_shrink: bool,
    /// Its size when it was passed in.
    len: u64,
}

impl FdFilling {
    fn new(fd: &Arc<OwnedFd>, plan: &Plan, pages: Pages) -> Result<Self> {
        let fail = |errno| cannot_map(errno, pages);
        let stat = file::stat(fd.as_fd()).map_err(fail)?;
        let seals = memfd::seals(fd.as_fd()).map_err(fail)?;
        if stat.size < plan.place.writable_to {
            let why = format!("its owner has since truncated it to {} bytes", stat.size);
            return Err(Error::new("cannot fill the descriptor", why)
                .with_errno(Errno::INVAL)
                .with_remedy("seal it against that (F_SEAL_SHRINK)"));
        }
        let hugetlb = stat.is_hugetlb();
        let pages = if hugetlb { Pages::Huge } else { pages };
        let tactic = Tactic::new(pages, true);
        let align = if hugetlb { 1 } else { tactic.grain() };
        let map =
            Mapping::unforked(fd.as_fd(), stat.size as usize, align as usize).map_err(fail)?;
        if pages == Pages::Thp {
            tactic.advise(&map.region());
        }
        Ok(Self {
            map,
            tactic,
            fresh: stat.allocated == 0,
            file: FdFilled {
                fd: Arc::clone(fd),
                // hugetlbfs does not support write(2); its owner is trusted not to truncate
                // it.
                may_shrink: !hugetlb && !seals.contains(SealFlags::SHRINK),
                len: stat.size,
            },
        })
    }
}

impl CopyOut for FdFilling {
    fn copy_out(&self, at: u64, into: &mut [u8]) -> Result<(), Errno> {
        if self.file.may_shrink {
            file::pread_all(self.file.fd.as_fd(), into, at)?
        } else {
            self.map.region().copy_out(at, into)
        }
        Ok(())
    }
}

impl Filling for FdFilling {
    fn region(&self) -> Region<'_> {
        self.map.region()
    }

    fn never_faults(&self) -> bool {
        !self.file.may_shrink
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.fd.as_fd())
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
        if !self.file.may_shrink {
            self.region().zero(at, len);
            return Ok(());
        }
        let mut done = 0;
        while done < len {
            let step = (len - done).min(ZEROS.len() as u64);
            file::pwrite_all(self.file.fd.as_fd(), &ZEROS[..step as usize], at + done)?;
            done += step;
        }
        Ok(())
    }
}

impl Finish for FdFilling {
    fn finish(self: Box<Self>) -> Result<Box<dyn Filled>, Errno> {
        Ok(Box::new(FilledExisting {
            view: Some(self.map.into_view()),
            file: self.file,
        }))
    }
}

/// Filled.
struct FilledExisting {
    /// None only if it could not be mapped again after it was sealed.
    view: Option<View>,
    file: FdFilled,
}

impl FilledExisting {
    /// The mapping, if accesses cannot raise SIGBUS.
    fn steady(&self) -> Option<&View> {
        self.view.as_ref().filter(|_| !self.file.may_shrink)
    }
}

impl CopyOut for FilledExisting {
    fn copy_out(&self, at: u64, into: &mut [u8]) -> Result<(), Errno> {
        match self.steady() {
            Some(view) => view.copy_out(at, into),
            None => file::pread_all(self.file.fd.as_fd(), into, at)?,
        }
        Ok(())
    }
}

impl Filled for FilledExisting {
    fn enter_forks(&self) {
        self.view.iter().for_each(View::enter_forks);
    }

    fn can_pin(&self) -> Result<bool, &'static str> {
        Ok(!self.view.as_ref().is_some_and(View::is_sealed))
    }

    fn address(&self) -> Option<*const u8> {
        self.steady().map(View::start)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.fd.as_fd())
    }

    fn copy_in(&mut self, at: u64, from: &[u8]) -> Result<(), Errno> {
        match self.view.as_mut().filter(|_| !self.file.may_shrink) {
            Some(view) => view.copy_in(at, from),
            None => file::pwrite_all(self.file.fd.as_fd(), from, at),
        }
    }

    fn bytes(&self) -> Option<&[u8]> {
        self.view.as_ref()?.bytes()
    }

    fn seal(&mut self) -> Result<(), Errno> {
        let sealed = seal(self.file.fd.as_fd(), &mut self.view, self.file.len);
        if sealed.is_ok() {
            self.file.may_shrink = false;
        }
        sealed
    }

    fn into_view(self: Box<Self>) -> Option<View> {
        self.view
    }

    fn into_descriptors(self: Box<Self>) -> Result<Vec<OwnedFd>, Errno> {
        // The caller may have a reference, too.
        let own = Arc::try_unwrap(self.file.fd).or_else(|fd| file::dup(fd.as_fd()))?;
        Ok(vec![own])
    }
}
