//! dma-bufs that the CPU accesses through their mappings: from a heap or dmafile.ko, existing, or
//! received.

use super::DmaBuf;
use super::memory::{CopyOut, Filled, Filling, Finish};
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::sys::dmabuf_sync::SyncedDmaBuf;
use crate::sys::map::{Mapping, Region, View, page_size};
use crate::sys::{Errno, dmabuf, file};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// One dma-buf while it is being filled.
pub(super) struct ToFill {
    map: Mapping,
    piece: DmaBufPiece,
    /// All of it was zero when it was passed in.
    fresh: bool,
    synced: SyncedDmaBuf,
    /// CPU access for writing: from when it was created to be filled until it is complete, except
    /// while a device accesses it.
    access: WriteAccess,
}

/// One or several, filled.
pub(super) struct DmaBufs {
    /// All of them, back to back.
    view: View,
    pieces: Vec<DmaBufPiece>,
}

struct DmaBufPiece {
    /// The caller may have a reference, too.
    fd: Arc<OwnedFd>,
    bytes: u64,
}

impl DmaBufPiece {
    fn new(fd: Arc<OwnedFd>) -> Result<Self, Errno> {
        let bytes = dmabuf::size(fd.as_fd())?;
        Ok(Self { fd, bytes })
    }
}

/// CPU access for writing, until this is dropped (DMA_BUF_IOCTL_SYNC).
struct WriteAccess(Option<Arc<OwnedFd>>);

impl WriteAccess {
    fn begin(fd: &Arc<OwnedFd>) -> Result<Self, Errno> {
        dmabuf::sync(fd.as_fd(), true, false)?;
        Ok(Self(Some(Arc::clone(fd))))
    }

    /// Ends the access. If that fails, devices may not see what was written.
    fn end(mut self) -> Result<(), Errno> {
        self.0
            .take()
            .map_or(Ok(()), |fd| dmabuf::sync(fd.as_fd(), true, true))
    }
}

impl Drop for WriteAccess {
    fn drop(&mut self) {
        if let Some(fd) = &self.0 {
            // Ending an access that has begun should not fail, and a drop could not report it.
            let _ = dmabuf::sync(fd.as_fd(), true, true);
        }
    }
}

impl ToFill {
    pub(super) fn new(fd: &Arc<OwnedFd>, fresh: bool) -> Result<Self, Errno> {
        let piece = DmaBufPiece::new(Arc::clone(fd))?;
        Ok(Self {
            map: Mapping::chain(&[(piece.fd.as_fd(), piece.bytes)])?,
            access: WriteAccess::begin(fd)?,
            synced: SyncedDmaBuf::new(fd),
            piece,
            fresh,
        })
    }
}

impl CopyOut for ToFill {
    fn copy_out(&self, at: u64, into: &mut [u8]) -> Result<(), Errno> {
        self.synced.touch(|| self.map.region().copy_out(at, into))
    }
}

impl Filling for ToFill {
    fn region(&self) -> Region<'_> {
        self.map.region()
    }

    fn dma_buf(&self) -> Option<&SyncedDmaBuf> {
        Some(&self.synced)
    }

    /// The exporter has already allocated all of it.
    fn populate(&self, _at: u64, _len: u64) -> Result<(), Errno> {
        Ok(())
    }

    fn grain(&self) -> u64 {
        page_size()
    }

    fn pages(&self) -> (String, Option<String>) {
        exporters_pages()
    }

    fn is_fresh(&self) -> bool {
        self.fresh
    }
}

impl Finish for ToFill {
    fn finish(self: Box<Self>) -> Result<Box<dyn Filled>, Errno> {
        self.access.end()?;
        Ok(Box::new(DmaBufs {
            view: self.map.into_view(),
            pieces: vec![self.piece],
        }))
    }
}

impl DmaBufs {
    /// dma-bufs that have been filled elsewhere.
    pub(super) fn whole(fds: Vec<Arc<OwnedFd>>) -> Result<Self, Errno> {
        let pieces: Result<Vec<_>, Errno> = fds.into_iter().map(DmaBufPiece::new).collect();
        let pieces = pieces?;
        let parts: Vec<_> = pieces
            .iter()
            .map(|piece| (piece.fd.as_fd(), piece.bytes))
            .collect();
        Ok(Self {
            view: Mapping::chain(&parts)?.into_view(),
            pieces,
        })
    }

    /// Their total size in bytes.
    pub(super) fn len(&self) -> u64 {
        self.view.len()
    }
}

/// Takes over a dma-buf that was allocated and read into by one call.
pub(crate) fn adopt_fused(fd: OwnedFd, plan: &Plan) -> Result<Box<dyn Filled>> {
    name_after_file(&fd, plan);
    let filled = DmaBufs::whole(vec![Arc::new(fd)]).map_err(cannot_map)?;
    Ok(Box::new(filled))
}

/// The page size of a dma-buf.
pub(crate) fn exporters_pages() -> (String, Option<String>) {
    ("exporter".to_string(), None)
}

/// Sets its name to that of the file.
pub(super) fn name_after_file(fd: &OwnedFd, plan: &Plan) {
    if let Some(file) = plan.file.file_name() {
        dmabuf::name(fd.as_fd(), &file.to_string_lossy());
    }
}

pub(super) fn cannot_map(errno: Errno) -> Error {
    Error::os("cannot map the dma-buf", errno)
}

impl CopyOut for DmaBufs {
    fn copy_out(&self, at: u64, into: &mut [u8]) -> Result<(), Errno> {
        self.view.copy_out(at, into);
        Ok(())
    }
}

impl Filled for DmaBufs {
    fn address(&self) -> Option<*const u8> {
        Some(self.view.start())
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

    fn copy_in(&mut self, at: u64, from: &[u8]) -> Result<(), Errno> {
        self.view.copy_in(at, from)
    }

    fn into_view(self: Box<Self>) -> Option<View> {
        Some(self.view)
    }

    fn into_descriptors(self: Box<Self>) -> Result<Vec<OwnedFd>, Errno> {
        let own =
            |piece: DmaBufPiece| Arc::try_unwrap(piece.fd).or_else(|fd| file::dup(fd.as_fd()));
        self.pieces.into_iter().map(own).collect()
    }
}
