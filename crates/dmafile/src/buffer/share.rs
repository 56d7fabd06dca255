//! Sends a buffer to another process over a Unix socket: its descriptors, and where its bytes are.

use super::dmabuf::DmaBufs;
use super::memfd::FilledMemfd;
use super::{Buffer, Filled};
use crate::error::{Error, Result};
use crate::message::{Opt, message};
use crate::options::{Kind, MemoryKind};
use crate::sys::{Errno, dmabuf, memfd, socket};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// The first bytes of a message with a buffer.
const MAGIC: &[u8; 8] = b"dmafile1";

impl Buffer {
    /// Sends the descriptor, or all of its dma-bufs, over a Unix socket (SCM_RIGHTS, see unix(7)), with
    /// the offset and length of its bytes. A memfd is sent as a descriptor of its own: its position, flags and
    /// locks are not shared with this buffer's. A dma-buf cannot be reopened, nor can a memfd without `/proc`;
    /// then they are.
    ///
    /// # Errors
    /// EOPNOTSUPP for private memory; E2BIG for more than 253 dma-bufs, which do not fit into a message;
    /// any error of sendmsg(2).
    pub fn send(&self, socket: &UnixStream) -> Result<()> {
        self.send_to(socket, true)
    }

    /// As [`Buffer::send`], without blocking: EAGAIN if the socket is full, even if it is blocking.
    ///
    /// # Errors
    /// As [`Buffer::send`].
    pub fn try_send(&self, socket: &UnixStream) -> Result<()> {
        self.send_to(socket, false)
    }

    fn send_to(&self, socket: &UnixStream, wait: bool) -> Result<()> {
        let refuse = |errno| Error::os("cannot send the buffer", errno).at(self.kind.to_string());
        let mut fds: Vec<_> = self.dma_bufs().iter().map(|one| one.fd).collect();
        if fds.is_empty() {
            fds.extend(self.as_fd());
        }
        if fds.is_empty() {
            return Err(refuse(Errno::OPNOTSUPP)
                .with_why("private memory has no descriptor")
                .with_remedy(message!["load it ", Opt::To.set(Kind::Memfd)]));
        }
        if fds.len() > socket::MOST {
            let why = format!("{} dma-bufs do not fit into a message", fds.len());
            return Err(refuse(Errno::TOOBIG)
                .with_why(why)
                .with_remedy("raise size_limit_mb of udmabuf, so that there are fewer"));
        }
        let again: Result<Vec<_>, Errno> = fds.iter().map(|fd| memfd::again(*fd)).collect();
        let again = again.map_err(refuse)?;
        let own = again.iter().zip(&fds);
        let fds: Vec<_> = own
            .map(|(own, shared)| own.as_ref().map_or(*shared, AsFd::as_fd))
            .collect();
        let mut message = MAGIC.to_vec();
        message.extend(self.offset.to_le_bytes());
        message.extend(self.len.to_le_bytes());
        socket::send(socket.as_fd(), &message, &fds, wait).map_err(refuse)
    }

    /// Receives what [`Buffer::send`] sent.
    ///
    /// The sender is not trusted: its memory must be a memfd that cannot shrink, or dma-bufs, and contain
    /// the claimed range.
    ///
    /// # Errors
    /// EPROTO for anything other than a buffer, ECONNRESET if the sender is gone, EMFILE if this process
    /// has too many open descriptors. A non-blocking socket, or one with a timeout, gives EAGAIN if
    /// nothing has arrived; nothing is lost then.
    pub fn receive(socket: &UnixStream) -> Result<Self> {
        Self::receive_from(socket, true)
    }

    /// As [`Buffer::receive`], without blocking: EAGAIN if nothing has arrived, even if the socket is
    /// blocking.
    ///
    /// # Errors
    /// As [`Buffer::receive`].
    pub fn try_receive(socket: &UnixStream) -> Result<Self> {
        Self::receive_from(socket, false)
    }

    fn receive_from(socket: &UnixStream, wait: bool) -> Result<Self> {
        let mut message = [0; 24];
        let fds = socket::receive(socket.as_fd(), &mut message, wait).map_err(|errno| {
            let error = Error::os("cannot receive a buffer", errno);
            match errno {
                Errno::MFILE => error
                    .with_why("not all of its descriptors could be received")
                    .with_remedy(
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
            return Err(refuse("the message is not from dmafile"));
        }
        let (offset, len) = (number(8), number(16));
        let end = offset.checked_add(len).filter(|_| len > 0);
        let end = end.ok_or_else(|| refuse("its range is empty or overflows"))?;
        let (memory, kind) = adopt(fds, end).map_err(|why| refuse(&why))?;
        Ok(Self::new(memory, kind, offset, len))
    }
}

impl Buffer {
    /// Takes over what a peer sent and claims: the kind of memory, where its bytes are (offset and
    /// length), and whether it is sealed. Returns the reason if a claim is wrong.
    #[doc(hidden)]
    pub fn of_peer(
        fds: Vec<OwnedFd>,
        kind: &MemoryKind,
        (offset, len): (u64, u64),
        sealed: bool,
    ) -> Result<Self, String> {
        let buffer = Self::of_peer_to_seal(fds, kind, (offset, len))?;
        if sealed && buffer.memory.bytes().is_none() {
            return Err("the holder says it is sealed, but it is not".to_string());
        }
        buffer.enter_forks();
        Ok(buffer)
    }

    /// The same for memory that will be sealed here; children that are forked before then do not get it.
    #[doc(hidden)]
    pub fn of_peer_to_seal(
        fds: Vec<OwnedFd>,
        kind: &MemoryKind,
        (offset, len): (u64, u64),
    ) -> Result<Self, String> {
        let end = offset.checked_add(len).filter(|_| len > 0);
        let end = end.ok_or("its range is empty or overflows")?;
        let is_memfd = *kind == MemoryKind::Memfd;
        if is_memfd && fds.len() != 1 {
            return Err(format!("{} descriptors for a memfd", fds.len()));
        }
        let (memory, found) = adopt(fds, end)?;
        if is_memfd != (found == MemoryKind::Memfd) {
            return Err(format!(
                "the holder says it is a {kind}, but it is a {found}"
            ));
        }
        Ok(Self::unforked(memory, found, offset, len))
    }
}

/// Takes over what a peer sent, and returns its kind; or the reason, if it does not contain `end` bytes
/// that cannot disappear. Other descriptors are closed.
fn adopt(mut fds: Vec<OwnedFd>, end: u64) -> Result<(Box<dyn Filled>, MemoryKind), String> {
    let all = fds.iter().all(|fd| dmabuf::is_one(fd.as_fd()));
    if fds.is_empty() {
        return Err("the message carries no descriptor".to_string());
    }
    if !all {
        let memory = FilledMemfd::adopt(fds.swap_remove(0), end)?;
        return Ok((Box::new(memory), MemoryKind::Memfd));
    }
    let memory = DmaBufs::whole(fds.into_iter().map(Arc::new).collect());
    let memory = memory.map_err(|errno| format!("its dma-bufs cannot be mapped ({errno:?})"))?;
    if end > memory.len() {
        return Err("its range is outside its dma-bufs".to_string());
    }
    Ok((Box::new(memory), MemoryKind::DmaBuf))
}
