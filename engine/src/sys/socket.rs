//! A descriptor and a few bytes over a Unix socket (SCM_RIGHTS, unix(7)).

use super::Errno;
use super::file::retry;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Sends `bytes` with one descriptor attached.
pub(crate) fn send(socket: BorrowedFd<'_>, bytes: &[u8], fd: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let fds = [fd];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let sent = retry(|| {
        rustix::net::sendmsg(
            socket,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        )
    })?;
    // A message this small goes whole or not at all.
    if sent == bytes.len() {
        Ok(())
    } else {
        Err(Errno::IO)
    }
}

/// Receives `bytes.len()` bytes, which come in one piece, and the one descriptor that came with them.
/// EPROTO for fewer: who sends them in pieces is no [`send`]. Unless it may `wait`, EAGAIN where
/// nothing has come yet, and nothing is lost then.
///
/// Further descriptors that a sender slips in are closed.
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    wait: bool,
) -> Result<Option<OwnedFd>, Errno> {
    let mut first = None;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut flags = RecvFlags::CMSG_CLOEXEC;
    flags.set(RecvFlags::DONTWAIT, !wait);
    let wanted = bytes.len();
    let message = retry(|| {
        let mut into = [IoSliceMut::new(bytes)];
        rustix::net::recvmsg(socket, &mut into, &mut control, flags)
    })?;
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = part {
            for fd in fds {
                first.get_or_insert(fd);
            }
        }
    }
    match message.bytes {
        0 => Err(Errno::CONNRESET),
        got if got < wanted => Err(Errno::PROTO),
        _ => Ok(first),
    }
}
