//! Memory that holds a file's bytes, one file a kind.

mod anon;
mod best;
mod caller;
mod dmabuf;
mod dmafile;
mod fd;
mod heap;
mod memfd;
mod pages;
mod udmabuf;

use crate::error::{Error, Result};
use crate::options::{Kind, Pages};
use crate::plan::Plan;
use crate::sys::map::{Mapping, Region};
use crate::sys::{self, Errno, file, socket};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

pub(crate) use best::best_dma_buf;
pub(crate) use caller::Lent;
pub(crate) use dmabuf::{born, cannot_allocate};
pub(crate) use dmafile::look_at_dmafile;
pub(crate) use fd::look_at;
pub(crate) use heap::look_at_heap;
pub(crate) use udmabuf::look_at_udmabuf;

/// A kind of memory, while it is filled and after.
pub(crate) trait Memory: Send + Sync {
    /// All of it.
    fn region(&self) -> Region<'_>;

    /// All of it, where a touch by the CPU raises no signal at any time.
    fn steady(&self) -> Option<Region<'_>> {
        Some(self.region())
    }

    /// Its descriptor, where it has one: what methods write into.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// The descriptor that is handed out, where it is one.
    fn exported(&self) -> Option<BorrowedFd<'_>> {
        match &self.dma_bufs()[..] {
            [] => self.descriptor(),
            [whole] => Some(whole.fd),
            _ => None,
        }
    }

    /// The dma-bufs that it consists of, in their order.
    fn dma_bufs(&self) -> Vec<DmaBuf<'_>> {
        Vec::new()
    }

    /// All of its pages are present, and reads into them may be in flight. Whether anything was made
    /// of them.
    fn populated(&self) -> Result<bool, Errno> {
        Ok(false)
    }

    /// The CPU begins to read, or to read and write: all of the dma-bufs or none.
    fn begin(&self, write: bool) -> Result<(), Errno> {
        let all = self.dma_bufs();
        for (done, one) in all.iter().enumerate() {
            if let Err(errno) = sys::dmabuf::sync(one.fd, write, false) {
                end(&all[..done], write);
                return Err(errno);
            }
        }
        Ok(())
    }

    /// It has done so.
    fn end(&self, write: bool) {
        end(&self.dma_bufs(), write);
    }

    /// Makes the pages of a range present.
    fn populate(&self, at: u64, len: u64) -> Result<(), Errno>;

    /// Multiple in which it is best populated.
    fn grain(&self) -> u64;

    /// Which pages it got, and a remark where that needs one.
    fn pages(&self) -> (String, Option<String>);

    /// Every byte that nobody has written is zero.
    fn is_fresh(&self) -> bool {
        true
    }

    /// Zeroes a range.
    fn zero(&self, at: u64, len: u64) -> Result<(), Errno> {
        self.region().zero(at, len);
        Ok(())
    }

    /// Copies bytes out.
    fn copy_out(&self, at: u64, into: &mut [u8]) -> Result<(), Errno> {
        self.region().copy_out(at, into);
        Ok(())
    }

    /// Copies bytes in. No slice of them may be held: memory takes `&mut self` for that.
    fn copy_in(&mut self, at: u64, from: &[u8]) -> Result<(), Errno> {
        self.region().copy_in(at, from);
        Ok(())
    }

    /// All that was to be written is: brings it into the shape in which it is handed out.
    fn finish(&mut self) -> Result<(), Errno> {
        Ok(())
    }

    /// The bytes, where nobody else can change them.
    fn bytes(&self) -> Option<&[u8]> {
        None
    }

    /// The bytes, where nobody else can reach them.
    fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        None
    }

    /// Forbids any change for good.
    fn seal(&mut self) -> Result<(), Errno> {
        Err(Errno::OPNOTSUPP)
    }

    /// Gives up the descriptor and keeps the mapping, where there is one.
    fn into_mapping(self: Box<Self>) -> Option<Mapping> {
        None
    }

    /// Gives up the mapping and keeps what is handed out.
    fn into_descriptors(self: Box<Self>) -> Result<Vec<OwnedFd>, Errno> {
        Err(Errno::OPNOTSUPP)
    }
}

/// Makes the memory of a plan, and the reasons for what it became.
pub(crate) fn make(
    kind: &Kind,
    plan: &Plan,
    asked: Pages,
    reasons: &mut Vec<crate::plan::Reason>,
) -> Result<Box<dyn Memory>> {
    let made = match make_with(kind, plan, plan.pages) {
        // The pool had room a moment ago, or a limit that we cannot see keeps us from it: another
        // size will do, unless it was this one that was asked for.
        Err(error) if plan.pages == Pages::Huge && asked == Pages::Auto => {
            reasons.push(crate::plan::Reason {
                about: "pages",
                choice: Pages::Thp.to_string(),
                why: format!("no page of the hugetlb pool after all: {error}"),
            });
            make_with(kind, plan, Pages::Thp)
        }
        made => made,
    };
    made.map_err(|error| error.at(format!("{kind}, {} bytes", plan.capacity)))
}

fn make_with(kind: &Kind, plan: &Plan, pages: Pages) -> Result<Box<dyn Memory>> {
    let made: Box<dyn Memory> = match kind {
        Kind::Anon => Box::new(anon::Anon::new(plan, pages)?),
        Kind::Memfd => Box::new(memfd::Memfd::new(plan, pages)?),
        Kind::Fd { fd, .. } => return fd::existing(fd, plan, pages),
        Kind::Udmabuf => Box::new(udmabuf::Udmabuf::new(plan, pages)?),
        Kind::Heap(name) => return Ok(Box::new(heap::make(name, plan)?)),
        Kind::Dmafile => return Ok(Box::new(dmafile::make(plan)?)),
        Kind::DmaBuf | Kind::Caller => {
            unreachable!("it has become another kind, or brings its own memory")
        }
    };
    if pages == Pages::Huge {
        // The pool promises pages when they are mapped; a cgroup's limit counts when they come.
        made.populate(0, 1)
            .map_err(|errno| cannot_map(errno, pages))?;
    }
    Ok(made)
}

/// The CPU has read these, or read and written.
fn end(all: &[DmaBuf<'_>], write: bool) {
    for one in all {
        // It has begun, so that it can end; there is nobody to tell in a drop.
        let _ = sys::dmabuf::sync(one.fd, write, true);
    }
}

/// A buffer that is full could not be brought into the shape in which it is handed out.
pub(crate) fn cannot_export(errno: Errno, kind: &str) -> Error {
    let error = Error::os("cannot finish the buffer", errno).at(kind);
    match errno {
        Errno::MFILE => error.remedy("raise the limit on open files: ulimit -n"),
        Errno::NOMEM if kind == "udmabuf" => error.remedy("free memory: a udmabuf pins its pages"),
        _ => error,
    }
}

/// A mapping failed: ENOMEM has more causes than too little memory.
fn cannot_map(errno: Errno, pages: Pages) -> Error {
    let error = Error::os("cannot make the buffer", errno);
    match (errno, pages, crate::sys::host::address_space()) {
        (Errno::NOMEM, Pages::Huge, _) => error
            .why("the hugetlb pool has no room for it")
            .remedy("make it larger: sysctl vm.nr_hugepages=N, or use --pages thp"),
        (Errno::NOMEM, _, Some(limit)) => error
            .why(format!(
                "it does not fit the limit on address space, {limit} bytes"
            ))
            .remedy("raise it: ulimit -v"),
        (Errno::NOMEM, ..) => error.remedy("free memory, or raise vm.overcommit_memory's limit"),
        (Errno::INVAL, Pages::Huge, _) => error
            .why("this kernel has no hugetlb pages")
            .remedy("use --pages thp"),
        (Errno::FAULT, Pages::Huge, _) => error
            .why("a cgroup limits hugetlb pages to less")
            .remedy("raise its hugetlb limit, or use --pages thp"),
        (Errno::FBIG, ..) => error
            .why("it exceeds the limit on file size")
            .remedy("raise it: ulimit -f"),
        _ => error,
    }
}

/// A filled buffer: the wanted bytes of the file, and around them zeros.
///
/// The memory may begin before the first wanted byte ([`Buffer::offset`]) so that direct reads
/// land where they belong. Dropping it unmaps the memory and closes the descriptor.
pub struct Buffer {
    memory: Box<dyn Memory>,
    kind: String,
    offset: u64,
    len: u64,
}

impl Buffer {
    pub(crate) fn new(memory: Box<dyn Memory>, kind: String, offset: u64, len: u64) -> Self {
        Self {
            memory,
            kind,
            offset,
            len,
        }
    }

    /// The kind of memory, as the command line names it.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// Where the wanted bytes start in the descriptor, in bytes: less than a page, or the file's
    /// direct alignment where that is larger; for `fd:N@OFFSET` that offset.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// How many bytes were wanted.
    #[expect(clippy::len_without_is_empty, reason = "a load of no bytes is refused")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The descriptor, to be mapped, sent or inherited; None for private memory, and where a limit
    /// forced several ([`Buffer::dma_bufs`]).
    pub fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.memory.exported()
    }

    /// The dma-bufs that the buffer consists of, one behind the other: one, or several where the
    /// limit of `/dev/udmabuf` (`size_limit_mb`) forced them; none where it is no dma-buf.
    pub fn dma_bufs(&self) -> Vec<DmaBuf<'_>> {
        self.memory.dma_bufs()
    }

    /// Gives up the mapping and keeps the descriptor.
    ///
    /// # Errors
    /// EOPNOTSUPP for private memory, which has none; EMFILE where an `fd:N` is held by its owner
    /// too and no second descriptor can be had; EFBIG where there are several
    /// ([`Buffer::into_fds`]).
    pub fn into_fd(self) -> Result<OwnedFd> {
        let kind = self.kind.clone();
        let mut all = self.into_fds()?;
        match (all.pop(), all.is_empty()) {
            (Some(one), true) => Ok(one),
            _ => Err(Error::os("cannot hand the buffer on", Errno::FBIG)
                .at(kind)
                .why("it consists of several dma-bufs")
                .remedy("take all of them, or raise size_limit_mb of udmabuf")),
        }
    }

    /// Gives up the mapping and keeps the descriptors, in their order; usually one.
    ///
    /// # Errors
    /// As [`Buffer::into_fd`], several descriptors excepted.
    pub fn into_fds(self) -> Result<Vec<OwnedFd>> {
        let kind = self.kind;
        self.memory.into_descriptors().map_err(|errno| {
            let error = Error::os("cannot hand the buffer on", errno).at(kind);
            match errno {
                Errno::OPNOTSUPP => error
                    .why("private memory has no descriptor")
                    .remedy("load it --to memfd"),
                _ => error,
            }
        })
    }

    /// Gives the memory back, closes the descriptor, and keeps the addresses: for bindings to
    /// languages where somebody may still hold one ([`Buffer::as_ptr`]) who has said to be done
    /// with it.
    pub fn retire(self) -> Retired {
        let mut addresses = self.memory.into_mapping();
        if let Some(mapping) = &mut addresses {
            // Where the kernel will not, the memory is given back with the addresses.
            let _ = mapping.blank();
        }
        Retired {
            _addresses: addresses,
        }
    }

    /// As [`Buffer::into_fds`], for programs that this process executes: close-on-exec is off.
    ///
    /// # Errors
    /// As there.
    pub fn into_inherited_fds(self) -> Result<Vec<OwnedFd>> {
        let fds = self.into_fds()?;
        for fd in &fds {
            file::inherit(fd.as_fd())
                .map_err(|errno| Error::os("cannot hand the buffer on", errno))?;
        }
        Ok(fds)
    }

    /// The wanted bytes, where nobody else can change them: private memory, or sealed.
    pub fn as_slice(&self) -> Option<&[u8]> {
        let (start, end) = self.range();
        self.memory.bytes().map(|bytes| &bytes[start..end])
    }

    /// The wanted bytes, where nobody else can reach them: private memory.
    pub fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        let (start, end) = self.range();
        self.memory.bytes_mut().map(|bytes| &mut bytes[start..end])
    }

    /// Where the first wanted byte lies in this process, for bindings to languages that know memory
    /// by its address. [`Buffer::len`] bytes lie there until the buffer is dropped, sealed or given
    /// up. None where a touch could raise a signal: an `fd:N` that its owner may cut short.
    ///
    /// It carries no promise about who else writes there: others may at any time, unless
    /// [`Buffer::as_slice`] gives the bytes, and a reference made of it would be unsound then. Write
    /// through it only where [`Buffer::as_mut_slice`] gives the bytes, and while no slice is held.
    pub fn as_ptr(&self) -> Option<*const u8> {
        let start = self.memory.steady()?.start();
        Some(start.wrapping_add(self.range().0))
    }

    fn range(&self) -> (usize, usize) {
        (self.offset as usize, (self.offset + self.len) as usize)
    }

    /// Brackets reading by the CPU of memory that others may reach at the same time.
    pub fn access(&self) -> CpuAccess<'_> {
        let begun = self.memory.begin(false);
        CpuAccess {
            buffer: self,
            begun,
        }
    }

    /// Brackets reading and writing by the CPU.
    pub fn access_mut(&mut self) -> CpuAccessMut<'_> {
        let begun = self.memory.begin(true);
        CpuAccessMut {
            buffer: self,
            begun,
        }
    }

    /// Says to devices that the CPU begins to read by [`Buffer::as_ptr`], for bindings to languages
    /// that know no borrows; elsewhere [`Buffer::access`] is the way. [`Buffer::end_access`] has to
    /// follow, once for each that succeeded; several may overlap. Costs nothing unless the memory
    /// consists of dma-bufs; of those it waits for what devices have still to write.
    ///
    /// # Errors
    /// What a dma-buf's exporter says (`DMA_BUF_IOCTL_SYNC`); nothing has begun then.
    pub fn begin_access(&self) -> Result<()> {
        let begun = self.memory.begin(false);
        begun.map_err(|errno| self.inaccessible(errno, 0))
    }

    /// Says that the CPU has read what [`Buffer::begin_access`] began.
    pub fn end_access(&self) {
        self.memory.end(false);
    }

    /// Where `len` bytes at `offset` of the wanted ones lie in memory.
    fn inside(&self, offset: u64, len: usize) -> Result<u64> {
        match offset.checked_add(len as u64) {
            Some(end) if end <= self.len => Ok(self.offset + offset),
            _ => Err(self.inaccessible(Errno::INVAL, offset)),
        }
    }

    /// Copies bytes out, once access by the CPU has begun.
    fn copy_out(&self, begun: Result<(), Errno>, offset: u64, into: &mut [u8]) -> Result<()> {
        let at = self.inside(offset, into.len())?;
        let copied = begun.and_then(|()| self.memory.copy_out(at, into));
        copied.map_err(|errno| self.inaccessible(errno, offset))
    }

    fn inaccessible(&self, errno: Errno, offset: u64) -> Error {
        let place = format!("{} at byte {offset} of {}", self.kind, self.len);
        Error::os("cannot access the buffer", errno).at(place)
    }

    /// Forbids any change of the contents or the size, here and everywhere, for good
    /// (`F_SEAL_WRITE`, fcntl(2)). [`Buffer::as_slice`] works from then on.
    ///
    /// # Errors
    /// EBUSY while somebody else has it mapped for writing or pinned (a udmabuf over it does),
    /// EOPNOTSUPP for private memory and for dma-bufs of others than udmabuf, EPERM for an `fd:N` made without `MFD_ALLOW_SEALING` or
    /// sealed against more seals.
    pub fn seal(&mut self) -> Result<()> {
        self.memory.seal().map_err(|errno| {
            let error = Error::os("cannot seal the buffer", errno).at(&self.kind);
            match errno {
                Errno::OPNOTSUPP if self.dma_bufs().is_empty() => {
                    error.why("private memory is nobody else's to change")
                }
                Errno::OPNOTSUPP => error.why("a dma-buf knows no seals"),
                Errno::BUSY if !self.dma_bufs().is_empty() => {
                    error.why("a udmabuf pins its pages for writing, as long as it lives")
                }
                Errno::BUSY => error.remedy("unmap it for writing everywhere else first"),
                Errno::PERM => error
                    .why("its owner has forbidden seals")
                    .remedy("make the memfd with MFD_ALLOW_SEALING"),
                _ => error,
            }
        })
    }

    /// Sends the descriptor, or all of its dma-bufs, over a Unix socket (SCM_RIGHTS, unix(7)), with
    /// where its bytes lie.
    ///
    /// # Errors
    /// EOPNOTSUPP for private memory; E2BIG for more than 253 dma-bufs, which no message carries;
    /// what sendmsg(2) says.
    pub fn send(&self, socket: &UnixStream) -> Result<()> {
        self.send_to(socket, true)
    }

    /// As [`Buffer::send`], without waiting: EAGAIN where the socket is full, whatever it is set to.
    ///
    /// # Errors
    /// As there.
    pub fn try_send(&self, socket: &UnixStream) -> Result<()> {
        self.send_to(socket, false)
    }

    fn send_to(&self, socket: &UnixStream, wait: bool) -> Result<()> {
        let refuse = |errno| Error::os("cannot send the buffer", errno).at(&self.kind);
        let mut fds: Vec<_> = self.dma_bufs().iter().map(|one| one.fd).collect();
        if fds.is_empty() {
            fds.extend(self.as_fd());
        }
        if fds.is_empty() {
            return Err(refuse(Errno::OPNOTSUPP)
                .why("private memory has no descriptor")
                .remedy("load it --to memfd"));
        }
        if fds.len() > socket::MOST {
            let why = format!("{} dma-bufs are more than a message carries", fds.len());
            return Err(refuse(Errno::TOOBIG)
                .why(why)
                .remedy("raise size_limit_mb of udmabuf, so that there are fewer"));
        }
        let mut message = MAGIC.to_vec();
        message.extend(self.offset.to_le_bytes());
        message.extend(self.len.to_le_bytes());
        socket::send(socket.as_fd(), &message, &fds, wait).map_err(refuse)
    }

    /// Receives what [`Buffer::send`] sent.
    ///
    /// The sender is not trusted: what comes must be a memfd that cannot shrink, or dma-bufs, and
    /// hold the range it claims.
    ///
    /// # Errors
    /// EPROTO for anything else than a buffer, ECONNRESET where the sender went away, EMFILE where this
    /// process has no room for the descriptors. A socket that does not block, or has a timeout, gives
    /// EAGAIN where nothing has come; nothing is lost then.
    pub fn receive(socket: &UnixStream) -> Result<Self> {
        Self::receive_from(socket, true)
    }

    /// As [`Buffer::receive`], without waiting: EAGAIN where nothing has come, whatever the socket.
    ///
    /// # Errors
    /// As there.
    pub fn try_receive(socket: &UnixStream) -> Result<Self> {
        Self::receive_from(socket, false)
    }

    fn receive_from(socket: &UnixStream, wait: bool) -> Result<Self> {
        let mut message = [0; 24];
        let fds = socket::receive(socket.as_fd(), &mut message, wait).map_err(|errno| {
            let error = Error::os("cannot receive a buffer", errno);
            match errno {
                Errno::MFILE => error
                    .why("not all of its descriptors could be taken")
                    .remedy(
                        "raise the limit on open files: ulimit -n; or a security policy forbids it",
                    ),
                _ => error,
            }
        })?;
        let refuse =
            |why: &str| Error::new("cannot receive a buffer", why).with_errno(Errno::PROTO);
        let number =
            |at: usize| u64::from_le_bytes(message[at..at + 8].try_into().expect("eight bytes"));
        if message[..8] != *MAGIC {
            return Err(refuse("what came is no buffer of ours"));
        }
        let (offset, len) = (number(8), number(16));
        let end = offset.checked_add(len).filter(|_| len > 0);
        let end = end.ok_or_else(|| refuse("its range is empty or has no end"))?;
        let (memory, kind) = adopt(fds, end).map_err(|why| refuse(&why))?;
        Ok(Self::new(memory, kind.to_string(), offset, len))
    }
}

/// Takes over what somebody sent, and says what it is; why not, where it does not hold `end` bytes
/// that stay. Descriptors that do not belong to it are closed.
fn adopt(mut fds: Vec<OwnedFd>, end: u64) -> Result<(Box<dyn Memory>, &'static str), String> {
    let all = fds.iter().all(|fd| sys::dmabuf::is_one(fd.as_fd()));
    if fds.is_empty() {
        return Err("no descriptor came with it".to_string());
    }
    if !all {
        let memory = memfd::Memfd::adopt(fds.swap_remove(0), end)?;
        return Ok((Box::new(memory), "memfd"));
    }
    let memory = dmabuf::DmaBufs::whole(fds.into_iter().map(Arc::new).collect());
    let memory = memory.map_err(|errno| format!("its dma-bufs cannot be mapped ({errno:?})"))?;
    if end > memory.region().len() {
        return Err("its range lies outside its dma-bufs".to_string());
    }
    Ok((Box::new(memory), "dma-buf"))
}

/// A dma-buf of a buffer.
#[derive(Clone, Copy, Debug)]
pub struct DmaBuf<'b> {
    /// Its descriptor.
    pub fd: BorrowedFd<'b>,
    /// Where it begins in the buffer, in bytes from the buffer's first: the wanted ones start at
    /// [`Buffer::offset`].
    pub at: u64,
    /// How many bytes it has.
    pub bytes: u64,
}

/// Where a buffer was ([`Buffer::retire`]): nobody else's memory comes there before this is dropped.
/// Until then the addresses read as zeros, and a write there raises SIGSEGV.
pub struct Retired {
    _addresses: Option<Mapping>,
}

/// First bytes of a message that carries a buffer.
const MAGIC: &[u8; 8] = b"dmafile1";

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("kind", &self.kind)
            .field("offset", &self.offset)
            .field("len", &self.len)
            .finish()
    }
}

/// Reading by the CPU of a buffer that other processes or devices may reach, from when it is made
/// until it is dropped. Offsets count from the first wanted byte.
pub struct CpuAccess<'b> {
    buffer: &'b Buffer,
    /// `DMA_BUF_IOCTL_SYNC` at the start, for dma-bufs.
    begun: Result<(), Errno>,
}

impl Drop for CpuAccess<'_> {
    fn drop(&mut self) {
        if self.begun.is_ok() {
            self.buffer.memory.end(false);
        }
    }
}

impl CpuAccess<'_> {
    /// Copies `into.len()` bytes from `offset`. What somebody else writes meanwhile may be seen
    /// or not, byte by byte.
    ///
    /// # Errors
    /// EINVAL outside the buffer; EIO where its owner has cut an `fd:N` short.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.buffer.copy_out(self.begun, offset, into)
    }
}

/// As [`CpuAccess`], for writing too. It borrows the buffer exclusively, so that no slice of it is
/// held meanwhile.
pub struct CpuAccessMut<'b> {
    buffer: &'b mut Buffer,
    begun: Result<(), Errno>,
}

impl Drop for CpuAccessMut<'_> {
    fn drop(&mut self) {
        if self.begun.is_ok() {
            self.buffer.memory.end(true);
        }
    }
}

impl CpuAccessMut<'_> {
    /// See [`CpuAccess::read_at`].
    ///
    /// # Errors
    /// As there.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.buffer.copy_out(self.begun, offset, into)
    }

    /// Copies `from` to `offset`.
    ///
    /// # Errors
    /// EINVAL outside the buffer, EPERM for one that is sealed.
    pub fn write_at(&mut self, offset: u64, from: &[u8]) -> Result<()> {
        let at = self.buffer.inside(offset, from.len())?;
        let copied = self
            .begun
            .and_then(|()| self.buffer.memory.copy_in(at, from));
        copied.map_err(|errno| self.buffer.inaccessible(errno, offset))
    }
}
