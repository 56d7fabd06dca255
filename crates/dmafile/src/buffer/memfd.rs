//! `memfd`: memory with a descriptor; its size is sealed when it is complete.

use super::memory::{CopyOut, Filled, Filling, Finish};
use super::pages::{self, Tactic};
use super::{cannot_map, pages_of};
use crate::error::{Error, Result};
use crate::options::Pages;
use crate::pin::{PinDevice, Pinned};
use crate::plan::Plan;
use crate::sync;
use crate::sys::map::{Mapping, Region, View, page_size};
use crate::sys::{Errno, file, memfd};
use rustix::fs::SealFlags;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

/// While it is being filled.
pub(super) struct Memfd {
    /// The pin for a device, if there is one. Dropped before the mapping.
    pin: Mutex<Option<Box<dyn Pinned>>>,
    /// The device to pin it for, and the bytes to pin: offset of the first one, and number.
    pin_for: Option<(Arc<dyn PinDevice>, u64, u64)>,
    map: Mapping,
    fd: OwnedFd,
    tactic: Tactic,
    len: u64,
    /// Its size when complete; hugetlb memory is allocated in whole pages only.
    final_size: u64,
}

impl Memfd {
    pub(super) fn new(plan: &Plan, pages: Pages) -> Result<Self> {
        let exact = plan.place.start + plan.bytes;
        Self::with_size(plan, pages, exact)
    }

    /// A memfd that is pinned for a device as soon as all of its pages are present.
    pub(super) fn pinned(plan: &Plan, pages: Pages, device: &Arc<dyn PinDevice>) -> Result<Self> {
        let pin_for = Some((Arc::clone(device), plan.place.start, plan.bytes));
        let made = Self::new(plan, pages)?;
        Ok(Self { pin_for, ..made })
    }

    /// A memfd of whole pages, whose size is sealed from the start: for a udmabuf.
    pub(super) fn whole(plan: &Plan, pages: Pages) -> Result<Self> {
        let made = Self::with_size(plan, pages, plan.place.writable_to)?;
        memfd::seal(made.fd.as_fd(), SealFlags::SHRINK | SealFlags::GROW)
            .map_err(|errno| cannot_map(errno, pages))?;
        Ok(made)
    }

    fn with_size(plan: &Plan, pages: Pages, exact: u64) -> Result<Self> {
        let tactic = Tactic::new(pages, true);
        let (size, len, final_size) = if pages == Pages::Huge {
            let whole = plan.place.writable_to.next_multiple_of(tactic.grain());
            (whole, whole, whole)
        } else if plan.place.writable_to == exact.next_multiple_of(page_size()) {
            // A read may exceed the end of the file, within its last page.
            (exact, plan.place.writable_to, exact)
        } else {
            (plan.place.writable_to, plan.place.writable_to, exact)
        };
        let name = plan.file.file_name().unwrap_or_default().to_string_lossy();
        // The kernel accepts at most 249 bytes, without NUL.
        let name: String = name.chars().take(48).filter(|c| *c != '\0').collect();
        let mapped = || {
            let fd = memfd::create(&name, pages == Pages::Huge)?;
            memfd::resize(fd.as_fd(), size)?;
            let align = if pages == Pages::Huge {
                1
            } else {
                tactic.grain()
            };
            let map = Mapping::unforked(fd.as_fd(), len as usize, align as usize)?;
            Ok((fd, map))
        };
        let (fd, map) = mapped().map_err(|errno| cannot_map(errno, pages))?;
        tactic.advise(&map.region());
        Ok(Self {
            pin: Mutex::default(),
            pin_for: None,
            map,
            fd,
            tactic,
            len,
            final_size,
        })
    }

    /// Ends the filling and keeps only the mapping.
    pub(super) fn into_view(self) -> View {
        self.map.into_view()
    }
}

impl CopyOut for Memfd {
    fn copy_out(&self, at: u64, into: &mut [u8]) -> Result<(), Errno> {
        self.map.region().copy_out(at, into);
        Ok(())
    }
}

impl Filling for Memfd {
    fn region(&self) -> Region<'_> {
        self.map.region()
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

    fn populated(&self) -> Result<bool, Error> {
        let Some((device, at, bytes)) = &self.pin_for else {
            return Ok(false);
        };
        let mut pin = sync::lock(&self.pin);
        if pin.is_some() {
            return Ok(false);
        }
        let (at, bytes) = pages_of(*at, *bytes);
        let start = self.map.region().start().wrapping_add(at as usize);
        *pin = Some(device.pin(start, bytes, true)?);
        Ok(true)
    }
}

impl Finish for Memfd {
    fn finish(self: Box<Self>) -> Result<Box<dyn Filled>, Errno> {
        if self.len != self.final_size {
            memfd::resize(self.fd.as_fd(), self.final_size)?;
        }
        // Receivers can rely on its size, and udmabuf requires F_SEAL_SHRINK.
        memfd::seal(self.fd.as_fd(), SealFlags::SHRINK | SealFlags::GROW)?;
        Ok(Box::new(FilledMemfd {
            pin: sync::lock(&self.pin).take(),
            view: Some(self.map.into_view()),
            fd: self.fd,
            size: self.final_size,
        }))
    }
}

/// Filled, or received.
pub(super) struct FilledMemfd {
    /// The pin for a device, until the buffer takes it.
    pin: Option<Box<dyn Pinned>>,
    /// None if an access could raise a signal, or if it could not be mapped again after it was
    /// sealed: then its bytes are accessed by system calls.
    view: Option<View>,
    fd: OwnedFd,
    size: u64,
}

impl FilledMemfd {
    /// Takes over a received memfd, after checking that its first `end` bytes cannot disappear.
    pub(super) fn adopt(fd: OwnedFd, end: u64) -> Result<Self, String> {
        let seals = memfd::seals(fd.as_fd()).map_err(|_| "its descriptor is not a memfd")?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err("its memfd is not sealed against shrinking".to_string());
        }
        let stat =
            file::stat(fd.as_fd()).map_err(|_| "the size of its memfd cannot be determined")?;
        let sealed = seals.contains(SealFlags::WRITE);
        if end > stat.size {
            return Err("its range is outside its memfd".to_string());
        }
        let len = usize::try_from(stat.size).map_err(|_| "it is larger than memory can be")?;
        let mapped = match sealed {
            true => {
                let view = View::sealed(fd.as_fd(), len, alignment(stat.is_hugetlb(), len));
                view.inspect(View::want_huge).map(Some)
            }
            // The sender may punch holes, which returns pages to the pool; if that is then empty, the
            // next access raises SIGBUS. So it is read through its descriptor.
            false if stat.is_hugetlb() => Ok(None),
            false => Mapping::unforked(fd.as_fd(), len, 1).map(|map| Some(map.into_view())),
        };
        let view = mapped.map_err(|errno| format!("its memfd cannot be mapped ({errno:?})"))?;
        // The sender could change offset and flags of its own descriptor, which this one may share.
        let again = memfd::again(fd.as_fd()).ok().flatten();
        Ok(Self {
            pin: None,
            view,
            fd: again.unwrap_or(fd),
            size: stat.size,
        })
    }
}

/// Alignment at which to map a memfd, so that its huge pages can be mapped as such.
pub(super) fn alignment(hugetlb: bool, len: usize) -> usize {
    let huge = pages::huge() as usize;
    // The kernel aligns hugetlb memory itself.
    if hugetlb || len < huge { 1 } else { huge }
}

/// Seals it against any change. Writable mappings forbid that, so this one is removed and mapped
/// again at the same place, because its addresses may be in use: as it was if the seal is refused,
/// otherwise with bytes that no process can change.
pub(super) fn seal(fd: BorrowedFd<'_>, view: &mut Option<View>, len: u64) -> Result<(), Errno> {
    if let Some(view) = view {
        view.blank()?;
    }
    let sealed = memfd::seal(fd, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW);
    let len = len as usize;
    let shown = match (view.take(), sealed) {
        (Some(mut old), _) => old.show(fd, len, sealed.is_ok()).map(|()| old),
        (None, Ok(())) => View::sealed(fd, len, 1),
        // Memory that was not mapped stays unmapped: an access might raise a signal.
        (None, Err(errno)) => return Err(errno),
    };
    *view = Some(shown?);
    sealed
}

impl CopyOut for FilledMemfd {
    fn copy_out(&self, at: u64, into: &mut [u8]) -> Result<(), Errno> {
        match &self.view {
            Some(view) => view.copy_out(at, into),
            None => file::pread_all(self.fd.as_fd(), into, at)?,
        }
        Ok(())
    }
}

impl Filled for FilledMemfd {
    fn address(&self) -> Option<*const u8> {
        self.view.as_ref().map(View::start)
    }

    fn enter_forks(&self) {
        self.view.iter().for_each(View::enter_forks);
    }

    fn can_pin(&self) -> Result<bool, &'static str> {
        Ok(!self.view.as_ref().is_some_and(View::is_sealed))
    }

    fn take_pin(&mut self) -> Option<Box<dyn Pinned>> {
        self.pin.take()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd.as_fd())
    }

    fn copy_in(&mut self, at: u64, from: &[u8]) -> Result<(), Errno> {
        match &mut self.view {
            Some(view) => view.copy_in(at, from),
            // hugetlbfs does not support write(2). Mapped only for this, because nothing else may
            // access it.
            None => {
                let map = Mapping::shared_sparse(self.fd.as_fd(), self.size as usize)?;
                let copied = map.region().try_copy_in(at, from);
                copied.map_err(|errno| match errno {
                    Errno::FAULT => Errno::NOMEM,
                    other => other,
                })
            }
        }
    }

    fn bytes(&self) -> Option<&[u8]> {
        self.view.as_ref()?.bytes()
    }

    fn has_huge_mapping(&self) -> Option<bool> {
        let huge = pages::huge();
        let view = self
            .view
            .as_ref()
            .filter(|view| huge > 0 && view.len() >= huge)?;
        view.first_is_huge(huge)
    }

    fn seal(&mut self) -> Result<(), Errno> {
        seal(self.fd.as_fd(), &mut self.view, self.size)
    }

    fn into_view(self: Box<Self>) -> Option<View> {
        self.view
    }

    fn into_descriptors(self: Box<Self>) -> Result<Vec<OwnedFd>, Errno> {
        Ok(vec![self.fd])
    }
}
