//! dma-bufs that the CPU reaches by their own mappings: made by a heap, there already, or received.

use super::{DmaBuf, Memory};
use crate::error::Error;
use crate::plan::Plan;
use crate::sys::map::{Mapping, Region, page_size};
use crate::sys::{Errno, dmabuf, file};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

pub(super) struct DmaBufs {
    /// All of them, one behind the other.
    map: Mapping,
    pieces: Vec<Piece>,
    /// Every byte was zero when it came.
    fresh: bool,
    /// The CPU is writing: from when it was made to be filled until it is whole.
    filling: Vec<Access>,
}

struct Piece {
    /// The caller may keep it too.
    fd: Arc<OwnedFd>,
    bytes: u64,
}

/// Writing by the CPU, from when it is made until it is dropped (DMA_BUF_IOCTL_SYNC).
struct Access(Option<Arc<OwnedFd>>);

impl Access {
    fn begin(fd: &Arc<OwnedFd>) -> Result<Self, Errno> {
        dmabuf::sync(fd.as_fd(), true, false)?;
        Ok(Self(Some(Arc::clone(fd))))
    }

    /// Ends it; what was written may not have come to where devices look.
    fn end(mut self) -> Result<(), Errno> {
        self.0
            .take()
            .map_or(Ok(()), |fd| dmabuf::sync(fd.as_fd(), true, true))
    }
}

impl Drop for Access {
    fn drop(&mut self) {
        if let Some(fd) = &self.0 {
            // It has begun, so that it can end; there is nobody to tell in a drop.
            let _ = dmabuf::sync(fd.as_fd(), true, true);
        }
    }
}

impl DmaBufs {
    /// What others have filled.
    pub(super) fn whole(fds: Vec<Arc<OwnedFd>>) -> Result<Self, Errno> {
        let mut pieces = Vec::new();
        for fd in fds {
            let bytes = dmabuf::size(fd.as_fd())?;
            pieces.push(Piece { fd, bytes });
        }
        let parts: Vec<_> = pieces
            .iter()
            .map(|piece| (piece.fd.as_fd(), piece.bytes))
            .collect();
        let map = Mapping::chain(&parts)?;
        Ok(Self {
            map,
            pieces,
            fresh: false,
            filling: Vec::new(),
        })
    }

    /// One that is to be filled.
    pub(super) fn to_fill(fd: &Arc<OwnedFd>, fresh: bool) -> Result<Self, Errno> {
        let mut made = Self::whole(vec![Arc::clone(fd)])?;
        made.filling.push(Access::begin(fd)?);
        Ok(Self { fresh, ..made })
    }
}

/// One that was made and filled in one step.
pub(crate) fn born(fd: OwnedFd, plan: &Plan) -> crate::error::Result<Box<dyn Memory>> {
    name_after_file(&fd, plan);
    let memory = DmaBufs::whole(vec![Arc::new(fd)]).map_err(cannot_map)?;
    Ok(Box::new(memory))
}

/// Names it after the file.
pub(super) fn name_after_file(fd: &OwnedFd, plan: &Plan) {
    if let Some(file) = plan.file.file_name() {
        dmabuf::name(fd.as_fd(), &file.to_string_lossy());
    }
}

/// A dma-buf does not come into being.
pub(crate) fn cannot_allocate(errno: Errno) -> Error {
    let error = Error::os("cannot allocate the buffer", errno);
    match errno {
        Errno::NOMEM => error
            .why("memory, or the limit of a cgroup, has no room for it")
            .remedy("free memory, raise memory.max, or load a range (--offset, --length)"),
        Errno::MFILE => error.remedy("raise the limit on open files: ulimit -n"),
        _ => error,
    }
}

pub(super) fn cannot_map(errno: Errno) -> Error {
    Error::os("cannot map the dma-buf", errno)
}

impl Memory for DmaBufs {
    fn region(&self) -> Region<'_> {
        self.map.region()
    }

    fn dma_bufs(&self) -> Vec<DmaBuf<'_>> {
        let mut at = 0;
        let pieces = self.pieces.iter().map(|piece| {
            let one = DmaBuf {
                fd: piece.fd.as_fd(),
                at,
                bytes: piece.bytes,
            };
            at += piece.bytes;
            one
        });
        pieces.collect()
    }

    /// Its exporter has made all of it present.
    fn populate(&self, _at: u64, _len: u64) -> Result<(), Errno> {
        Ok(())
    }

    fn grain(&self) -> u64 {
        page_size()
    }

    fn pages(&self) -> (String, Option<String>) {
        ("exporter".to_string(), None)
    }

    fn is_fresh(&self) -> bool {
        self.fresh
    }

    fn finish(&mut self) -> Result<(), Errno> {
        self.filling.drain(..).try_for_each(Access::end)
    }

    fn into_mapping(self: Box<Self>) -> Option<Mapping> {
        Some(self.map)
    }

    fn into_descriptors(self: Box<Self>) -> Result<Vec<OwnedFd>, Errno> {
        drop(self.filling);
        let own = |piece: Piece| Arc::try_unwrap(piece.fd).or_else(|fd| file::twin(fd.as_fd()));
        self.pieces.into_iter().map(own).collect()
    }
}
