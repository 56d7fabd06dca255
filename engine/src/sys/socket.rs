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

/// Receives exactly `bytes.len()` bytes and the one descriptor that came with them.
///
/// Further descriptors that a sender slips in are closed.
pub(crate) fn receive(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<Option<OwnedFd>, Errno> {
    let mut got = 0;
    let mut first = None;
    while got < bytes.len() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let message = retry(|| {
            rustix::net::recvmsg(
                socket,
                &mut [IoSliceMut::new(&mut bytes[got..])],
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            )
        })?;
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = part {
                for fd in fds {
                    first.get_or_insert(fd);
                }
            }
        }
        if message.bytes == 0 {
            return Err(Errno::CONNRESET);
        }
        got += message.bytes;
    }
    Ok(first)
}
