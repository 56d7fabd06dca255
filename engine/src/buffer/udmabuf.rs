//! `udmabuf`: a memfd, and one dma-buf over it, or several where a limit forces them.

use super::memfd::Memfd;
use super::{DmaBuf, Memory};
use crate::error::{Error, Result};
use crate::options::Pages;
use crate::plan::Plan;
use crate::sys::map::{Mapping, Region};
use crate::sys::{Errno, dmabuf, host};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

pub(super) struct Udmabuf {
    memfd: Memfd,
    node: OwnedFd,
    size: u64,
    /// The dma-bufs, once all pages are there.
    made: OnceLock<Vec<Piece>>,
}

struct Piece {
    fd: OwnedFd,
    at: u64,
    bytes: u64,
}

/// Whether they can be made here.
pub(crate) fn look_at_udmabuf() -> Result<()> {
    open().map(drop).map_err(|error| error.at("udmabuf"))
}

fn open() -> Result<OwnedFd> {
    dmabuf::open_udmabuf().map_err(|errno| {
        let error = Error::os("cannot make the buffer", errno);
        match errno {
            Errno::NOENT | Errno::NXIO | Errno::NODEV => {
                error.why("there is no /dev/udmabuf").remedy(
                    "modprobe udmabuf (CONFIG_UDMABUF; in a container, on its host), or --to memfd",
                )
            }
            _ => error
                .why("/dev/udmabuf cannot be opened")
                .remedy("ask for access to it: usermod -aG kvm USER, or a udev rule"),
        }
    })
}

impl Udmabuf {
    pub(super) fn new(plan: &Plan, pages: Pages) -> Result<Self> {
        let node = open()?;
        let memfd = Memfd::whole(plan, pages)?;
        Ok(Self {
            size: memfd.region().len(),
            memfd,
            node,
            made: OnceLock::new(),
        })
    }

    /// Makes the dma-bufs: one, or as many as the limit asks for.
    fn make(&self) -> Result<Vec<Piece>, Errno> {
        let memfd = self.memfd.descriptor().expect("a memfd has a descriptor");
        let one = |at: u64, bytes: u64| {
            let fd = dmabuf::udmabuf(self.node.as_fd(), memfd, at, bytes)?;
            Ok(Piece { fd, at, bytes })
        };
        match one(0, self.size) {
            Ok(whole) => return Ok(vec![whole]),
            // The limit answers so, and much else: pieces within it tell.
            Err(Errno::INVAL) if self.size > limit() => {}
            Err(errno) => return Err(errno),
        }
        let step = limit();
        let starts = (0..self.size).step_by(step as usize);
        starts.map(|at| one(at, step.min(self.size - at))).collect()
    }
}

/// The largest dma-buf that the module makes: its parameter, or the kernel's default where that
/// cannot be read. In whole MiB, and so in whole huge pages but for an odd number.
fn limit() -> u64 {
    const DEFAULT_MIB: u64 = 64;
    let mib = host::number("/sys/module/udmabuf/parameters/size_limit_mb").unwrap_or(DEFAULT_MIB);
    let mib = mib.clamp(1, 1 << 20);
    (if mib > 1 { mib - mib % 2 } else { mib }) << 20
}

impl Memory for Udmabuf {
    fn region(&self) -> Region<'_> {
        self.memfd.region()
    }

    fn steady(&self) -> Option<Region<'_>> {
        self.memfd.steady()
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

    fn populated(&self) -> Result<bool, Errno> {
        if self.made.get().is_some() {
            return Ok(false);
        }
        let made = self.make()?;
        // Nobody else makes them.
        Ok(self.made.set(made).is_ok())
    }

    fn finish(&mut self) -> Result<(), Errno> {
        self.populated().map(drop)
    }

    fn dma_bufs(&self) -> Vec<DmaBuf<'_>> {
        let pieces = self.made.get().map_or(&[][..], |made| &made[..]);
        let pieces = pieces.iter();
        pieces
            .map(|piece| DmaBuf {
                fd: piece.fd.as_fd(),
                at: piece.at,
                bytes: piece.bytes,
            })
            .collect()
    }

    fn seal(&mut self) -> Result<(), Errno> {
        // The dma-bufs keep its pages pinned, for writing (fcntl(2), F_SEAL_WRITE).
        Err(Errno::BUSY)
    }

    fn into_mapping(self: Box<Self>) -> Option<Mapping> {
        Box::new(self.memfd).into_mapping()
    }

    fn into_descriptors(self: Box<Self>) -> Result<Vec<OwnedFd>, Errno> {
        let made = self.made.into_inner().unwrap_or_default();
        Ok(made.into_iter().map(|piece| piece.fd).collect())
    }
}
