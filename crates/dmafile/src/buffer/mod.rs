//! Memory that holds a file's bytes; one source file per kind.

mod access;
mod anon;
mod caller;
mod dmabuf;
mod empty;
mod fd;
mod heap;
mod make;
mod memfd;
mod memory;
mod module;
mod pages;
mod ring;
mod share;
mod udmabuf;

use crate::error::{Error, Result};
use crate::message::{Opt, message};
use crate::options::{Kind, MemoryKind};
use crate::pin::{PinDevice, Pinned};
use crate::sync;
use crate::sys::map::{View, page_size};
use crate::sys::{Errno, file};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;

pub use access::{CpuAccess, CpuAccessMut};
pub(crate) use caller::CallerMemory;
pub(crate) use dmabuf::{adopt_fused, exporters_pages};
use make::cannot_map;
pub(crate) use make::{cannot_export, make, make_ring};
pub(crate) use memory::{CopyOut, Filled, Filling, Finish};
pub(crate) use ring::RingBuffer;

/// A filled buffer: the requested bytes of the file, with zeros around them.
///
/// The memory may begin before the first requested byte ([`Buffer::offset`]), so that direct reads are aligned.
/// Dropping the buffer unmaps the memory and closes the descriptor.
pub struct Buffer {
    // Dropped before the memory, which must be unpinned before it is unmapped.
    pinned: Mutex<Option<Box<dyn Pinned>>>,
    memory: Box<dyn Filled>,
    kind: MemoryKind,
    offset: u64,
    len: u64,
}

impl Buffer {
    pub(crate) fn new(memory: Box<dyn Filled>, kind: MemoryKind, offset: u64, len: u64) -> Self {
        let made = Self::unforked(memory, kind, offset, len);
        made.enter_forks();
        made
    }

    /// As [`Buffer::new`], but children that are forked do not get it before it is sealed: they would map it for
    /// writing, which forbids the seal.
    pub(crate) fn unforked(
        mut memory: Box<dyn Filled>,
        kind: MemoryKind,
        offset: u64,
        len: u64,
    ) -> Self {
        Self {
            pinned: Mutex::new(memory.take_pin()),
            memory,
            kind,
            offset,
            len,
        }
    }

    /// Includes it in children that are forked from now on.
    #[doc(hidden)]
    pub fn enter_forks(&self) {
        self.memory.enter_forks();
    }

    /// An empty buffer that still has a descriptor: an empty memfd.
    #[doc(hidden)]
    pub fn empty() -> Result<Self> {
        let memory = empty::Empty::new().map_err(|errno| {
            Error::os("cannot allocate memory", errno).at(MemoryKind::Memfd.to_string())
        })?;
        Ok(Self::new(Box::new(memory), MemoryKind::Memfd, 0, 0))
    }

    /// The kind of memory.
    pub fn kind(&self) -> &MemoryKind {
        &self.kind
    }

    /// Where the requested bytes start in the descriptor, in bytes: less than a page, or less than the file's
    /// direct I/O alignment if that is larger; for `fd:N@OFFSET` it is OFFSET.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The number of requested bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns `true` if there are none, as for an empty source of a snapshot; a load of 0 bytes is refused.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The descriptor, to map, send or inherit; None for private memory, and if a limit required several
    /// ([`Buffer::dma_bufs`]).
    pub fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.memory.exported()
    }

    /// The dma-bufs that the buffer consists of, back to back: one, or several if the limit of `/dev/udmabuf`
    /// (`size_limit_mb`) required them; none if it is not a dma-buf.
    pub fn dma_bufs(&self) -> Vec<DmaBuf<'_>> {
        self.memory.dma_bufs()
    }

    /// Unmaps the buffer and returns its descriptor.
    ///
    /// # Errors
    /// EOPNOTSUPP for private memory, which has none; EMFILE if the owner of an `fd:N` still uses it and no
    /// second descriptor can be created; EFBIG if there are several ([`Buffer::into_fds`]).
    pub fn into_fd(self) -> Result<OwnedFd> {
        let kind = self.kind.clone();
        let mut all = self.into_fds()?;
        match (all.pop(), all.is_empty()) {
            (Some(one), true) => Ok(one),
            _ => Err(Error::os("cannot pass the buffer on", Errno::FBIG)
                .at(kind.to_string())
                .with_why("it consists of several dma-bufs")
                .with_remedy("take all of them, or raise size_limit_mb of udmabuf")),
        }
    }

    /// Unmaps the buffer and returns its descriptors in order; usually one.
    ///
    /// # Errors
    /// As [`Buffer::into_fd`], except for EFBIG.
    pub fn into_fds(self) -> Result<Vec<OwnedFd>> {
        let kind = self.kind;
        drop(self.pinned);
        self.memory.into_descriptors().map_err(|errno| {
            let error = Error::os("cannot pass the buffer on", errno).at(kind.to_string());
            match errno {
                Errno::OPNOTSUPP => error
                    .with_why("private memory has no descriptor")
                    .with_remedy(message!["load it ", Opt::To.set(Kind::Memfd)]),
                _ => error,
            }
        })
    }

    /// Frees the memory and closes the descriptor, but keeps the address range reserved: for bindings to
    /// languages where code may still hold an address ([`Buffer::as_ptr`]) after releasing the buffer.
    pub fn into_reserved(self) -> ReservedRange {
        drop(self.pinned);
        let mut addresses = self.memory.into_view();
        if let Some(view) = &mut addresses {
            // If the kernel refuses, the memory is freed with the address range.
            let _ = view.blank();
        }
        ReservedRange {
            _addresses: addresses,
        }
    }

    /// The same bytes as private, writable memory (copy-on-write): a page is shared with this buffer, and takes
    /// no memory, until it is written to. For bindings to languages whose arrays cannot be read-only.
    ///
    /// # Errors
    /// EPERM if others can change the bytes, which is true for everything but a sealed memfd
    /// ([`Buffer::seal`]); ENOMEM.
    pub fn copy_on_write(&self) -> Result<Self> {
        let failed = |errno| Error::os("cannot map the buffer", errno).at(self.kind.to_string());
        let Some(fd) = self.as_fd().filter(|_| self.kind == MemoryKind::Memfd) else {
            return Err(failed(Errno::PERM).with_why("it is not a sealed memfd"));
        };
        let stat = file::stat(fd).map_err(failed)?;
        let len = self.range().1;
        let view = View::copied(fd, len, memfd::alignment(stat.is_hugetlb(), len))
            .inspect(View::want_huge)
            .map_err(failed)?;
        let memory = Box::new(anon::Private::copied(view));
        Ok(Self::new(memory, MemoryKind::Anon, self.offset, self.len))
    }

    /// As [`Buffer::into_fds`], but without close-on-exec: for programs that this process executes.
    ///
    /// # Errors
    /// As [`Buffer::into_fds`].
    pub fn into_inherited_fds(self) -> Result<Vec<OwnedFd>> {
        let fds = self.into_fds()?.into_iter().map(file::lowest);
        let fds: Vec<_> = fds.collect();
        for fd in &fds {
            file::inherit(fd.as_fd())
                .map_err(|errno| Error::os("cannot pass the buffer on", errno))?;
        }
        Ok(fds)
    }

    /// The requested bytes, if nothing else can change them: private memory, or sealed.
    pub fn as_slice(&self) -> Option<&[u8]> {
        let (start, end) = self.range();
        self.memory.bytes().map(|bytes| &bytes[start..end])
    }

    /// The requested bytes, if nothing else can reach them: private memory.
    pub fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        let (start, end) = self.range();
        self.memory.bytes_mut().map(|bytes| &mut bytes[start..end])
    }

    /// The address of the first requested byte in this process, for bindings to languages that identify memory
    /// by address. [`Buffer::len`] bytes are there until the buffer is dropped, sealed or given up. None if an
    /// access could raise a signal: for an `fd:N` that its owner may truncate, and for a received buffer on
    /// hugetlb pages that is not sealed.
    ///
    /// Others may write there at any time, unless [`Buffer::as_slice`] returns the bytes; a reference made from
    /// the pointer would be unsound then. Write through it only if [`Buffer::as_mut_slice`] returns the bytes,
    /// and while no slice exists.
    pub fn as_ptr(&self) -> Option<*const u8> {
        let start = self.memory.address()?;
        Some(start.wrapping_add(self.range().0))
    }

    /// Returns true if this process maps the first huge page of received memory as one; None if there is none, or if
    /// that cannot be found out.
    #[doc(hidden)]
    pub fn has_huge_mapping(&self) -> Option<bool> {
        self.memory.has_huge_mapping()
    }

    /// Pins the memory for a device. All devices of the same driver can then read it directly, and write to it
    /// unless it is sealed, without another copy. Only the pages of the requested bytes are pinned, those of
    /// holes included, which are then allocated. They stay pinned until [`Buffer::unpin`], or until the buffer is
    /// dropped or consumed.
    ///
    /// # Errors
    /// EBUSY if it is already pinned; EOPNOTSUPP if the driver cannot pin memory that is mapped read-only (as a
    /// sealed buffer is), if the memory has no address ([`Buffer::as_ptr`]) or no bytes, and for a copy-on-write
    /// buffer; ENODEV if the device cannot be used; otherwise the driver's error.
    pub fn pin(&self, device: &dyn PinDevice) -> Result<()> {
        let refuse =
            |errno| Error::os("cannot pin memory for the device", errno).at(self.kind.to_string());
        let mut pinned = sync::lock(&self.pinned);
        if let Some(pinned) = &*pinned {
            let why = format!("it is already pinned for {}", pinned.device());
            return Err(refuse(Errno::BUSY).with_why(why));
        }
        let writable = self.memory.can_pin();
        let writable = writable.map_err(|why| refuse(Errno::OPNOTSUPP).with_why(why))?;
        let Some(start) = self.memory.address().filter(|_| self.len > 0) else {
            let why = "it is empty, or accessing it might raise a signal";
            return Err(refuse(Errno::OPNOTSUPP).with_why(why));
        };
        let (at, bytes) = pages_of(self.offset, self.len);
        let start = start.wrapping_add(at as usize);
        *pinned = Some(device.pin(start, bytes, writable)?);
        Ok(())
    }

    /// Unpins the memory; does nothing if it is not pinned.
    ///
    /// # Errors
    /// The driver's error, if a second attempt failed too. The memory then stays pinned and mapped
    /// until the process ends, whatever happens to the buffer.
    pub fn unpin(&self) -> Result<()> {
        let pinned = sync::lock(&self.pinned).take();
        pinned.map_or(Ok(()), |pinned| pinned.end())
    }

    /// The name of the device that it is pinned for, if any.
    pub fn pinned(&self) -> Option<String> {
        let pinned = sync::lock(&self.pinned);
        pinned.as_ref().map(|pinned| pinned.device())
    }

    fn range(&self) -> (usize, usize) {
        (self.offset as usize, (self.offset + self.len) as usize)
    }

    /// Permanently forbids every process to change the contents or the size (`F_SEAL_WRITE`, see fcntl(2)).
    /// [`Buffer::as_slice`] works from then on.
    ///
    /// # Errors
    /// EBUSY while it is pinned ([`Buffer::pin`]) or mapped for writing elsewhere, as by a child that was forked
    /// since the load and still runs; if something else still references its pages after 3 seconds; and for a udmabuf, which pins its memfd; EOPNOTSUPP for private memory and for
    /// other dma-bufs; EPERM for an `fd:N` created without `MFD_ALLOW_SEALING` or sealed against more seals.
    pub fn seal(&mut self) -> Result<()> {
        if let Some(device) = self.pinned() {
            return Err(Error::os("cannot seal the buffer", Errno::BUSY)
                .at(self.kind.to_string())
                .with_why(format!("it is pinned for {device}"))
                .with_remedy("seal it before it is pinned, or unpin it first"));
        }
        self.memory.seal().map_err(|errno| {
            let error = Error::os("cannot seal the buffer", errno).at(self.kind.to_string());
            match errno {
                Errno::OPNOTSUPP if self.dma_bufs().is_empty() => {
                    error.with_why("no other process can change private memory")
                }
                Errno::OPNOTSUPP => error.with_why("dma-bufs cannot be sealed"),
                Errno::BUSY if !self.dma_bufs().is_empty() => {
                    error.with_why("a udmabuf pins its pages for writing as long as it exists")
                }
                Errno::BUSY => error.with_remedy(
                    "unmap it for writing everywhere else first; children that were forked while it was mapped \
                     here have it, too, until they end or execute another program",
                ),
                Errno::PERM => error
                    .with_why("its owner does not allow seals")
                    .with_remedy("create the memfd with MFD_ALLOW_SEALING"),
                _ => error,
            }
        })
    }
}

/// The pages that contain a range: offset of the first one, and size of all in bytes.
fn pages_of(at: u64, bytes: u64) -> (u64, u64) {
    let page = page_size();
    let start = at - at % page;
    (start, (at + bytes).next_multiple_of(page) - start)
}

/// One dma-buf of a buffer.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct DmaBuf<'b> {
    /// Its descriptor.
    pub fd: BorrowedFd<'b>,
    /// Offset of its first byte in the buffer, counted from the buffer's first byte: the requested bytes start
    /// at [`Buffer::offset`].
    pub at: u64,
    /// Its size in bytes.
    pub bytes: u64,
}

/// The address range of a buffer after [`Buffer::into_reserved`]. It is not reused before this is dropped. Until then
/// it reads as zeros, and a write there raises SIGSEGV.
#[must_use = "the addresses are kept free until it is dropped"]
pub struct ReservedRange {
    _addresses: Option<View>,
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("kind", &self.kind)
            .field("offset", &self.offset)
            .field("len", &self.len)
            .finish()
    }
}
