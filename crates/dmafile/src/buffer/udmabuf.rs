//! `udmabuf`: a memfd with one dma-buf over it, or several if a limit requires that.

use super::memfd::Memfd;
use super::memory::{CopyOut, Filled, Filling, Finish};
use super::{DmaBuf, cannot_export};
use crate::error::{Error, Result};
use crate::exporter::udmabuf;
use crate::options::{MemoryKind, Pages};
use crate::plan::Plan;
use crate::sys::map::{Region, View};
use crate::sys::{Errno, dmabuf, host};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

/// While it is being filled.
pub(super) struct Udmabuf {
    memfd: Memfd,
    node: OwnedFd,
    size: u64,
    /// The dma-bufs, when all pages are present.
    made: OnceLock<Vec<UdmabufPiece>>,
}

struct UdmabufPiece {
    fd: OwnedFd,
    at: u64,
    bytes: u64,
}

impl Udmabuf {
    pub(super) fn new(plan: &Plan, pages: Pages) -> Result<Self> {
        let node = udmabuf::open()?;
        let memfd = Memfd::whole(plan, pages)?;
        Ok(Self {
            size: memfd.region().len(),
            memfd,
            node,
            made: OnceLock::new(),
        })
    }

    /// Makes the dma-bufs, if they are not there; whether it did.
    fn complete(&self) -> Result<bool, Errno> {
        if self.made.get().is_some() {
            return Ok(false);
        }
        let made = self.make()?;
        // No other thread makes them.
        Ok(self.made.set(made).is_ok())
    }

    /// Creates the dma-bufs: one, or as many as the limit requires.
    fn make(&self) -> Result<Vec<UdmabufPiece>, Errno> {
        let memfd = self.memfd.descriptor().expect("a memfd has a descriptor");
        let one = |at: u64, bytes: u64| {
            let fd = dmabuf::udmabuf(self.node.as_fd(), memfd, at, bytes)?;
            Ok(UdmabufPiece { fd, at, bytes })
        };
        match one(0, self.size) {
            Ok(whole) => return Ok(vec![whole]),
            // The kernel reports an exceeded limit like this, but other errors, too: smaller
            // pieces show which it is.
            Err(Errno::INVAL) if self.size > limit() => {}
            Err(errno) => return Err(errno),
        }
        let step = limit();
        let starts = (0..self.size).step_by(step as usize);
        starts.map(|at| one(at, step.min(self.size - at))).collect()
    }
}

/// The largest dma-buf that the module creates: its parameter, or the kernel's default if that
/// cannot be read. In whole MiB, and therefore in whole huge pages unless the number is odd.
fn limit() -> u64 {
    const DEFAULT_MIB: u64 = 64;
    let mib = host::number("/sys/module/udmabuf/parameters/size_limit_mb").unwrap_or(DEFAULT_MIB);
    let mib = mib.clamp(1, 1 << 20);
    (if mib > 1 { mib - mib % 2 } else { mib }) << 20
}

impl CopyOut for Udmabuf {
    fn copy_out(&self, at: u64, into: &mut [u8]) -> Result<(), Errno> {
        self.memfd.copy_out(at, into)
    }
}

impl Filling for Udmabuf {
    fn region(&self) -> Region<'_> {
        self.memfd.region()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.memfd.descriptor()
    }

    fn populate(&self, at: u64, len: u64) -> Result<(), Errno> {
        self.memfd.populate(at, len)
    }

    fn grain(&self) -> u64 {
        self.memfd.grain()
    }

    fn pages(&self) -> (String, Option<String>) {
        self.memfd.pages()
    }

    fn populated(&self) -> Result<bool, Error> {
        self.complete()
            .map_err(|errno| cannot_export(errno, &MemoryKind::Udmabuf))
    }
}

impl Finish for Udmabuf {
    fn finish(self: Box<Self>) -> Result<Box<dyn Filled>, Errno> {
        self.complete()?;
        Ok(Box::new(UdmabufFilled {
            view: self.memfd.into_view(),
            pieces: self.made.into_inner().unwrap_or_default(),
        }))
    }
}

/// Filled. The dma-bufs hold the memfd's pages.
struct UdmabufFilled {
    view: View,
    pieces: Vec<UdmabufPiece>,
}

impl CopyOut for UdmabufFilled {
    fn copy_out(&self, at: u64, into: &mut [u8]) -> Result<(), Errno> {
        self.view.copy_out(at, into);
        Ok(())
    }
}

impl Filled for UdmabufFilled {
    fn enter_forks(&self) {
        self.view.enter_forks();
    }

    fn address(&self) -> Option<*const u8> {
        Some(self.view.start())
    }

    fn dma_bufs(&self) -> Vec<DmaBuf<'_>> {
        let pieces = self.pieces.iter().map(|piece| DmaBuf {
            fd: piece.fd.as_fd(),
            at: piece.at,
            bytes: piece.bytes,
        });
        pieces.collect()
    }

    fn copy_in(&mut self, at: u64, from: &[u8]) -> Result<(), Errno> {
        self.view.copy_in(at, from)
    }

    fn seal(&mut self) -> Result<(), Errno> {
        // The dma-bufs keep its pages pinned for writing (F_SEAL_WRITE in fcntl(2)).
        Err(Errno::BUSY)
    }

    fn into_view(self: Box<Self>) -> Option<View> {
        Some(self.view)
    }

    fn into_descriptors(self: Box<Self>) -> Result<Vec<OwnedFd>, Errno> {
        Ok(self.pieces.into_iter().map(|piece| piece.fd).collect())
    }
}
