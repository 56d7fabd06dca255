//! Descriptors and a few bytes over a Unix socket (SCM_RIGHTS, unix(7)).

use super::{Errno, retry};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

/// How many descriptors one message carries (SCM_MAX_FD).
pub(crate) const MOST: usize = 253;

/// Sends `bytes` with descriptors attached, at most [`MOST`]. Unless it may `wait`, EAGAIN where there
/// is no room for them now.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    wait: bool,
) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOBIG);
    }
    let mut flags = SendFlags::NOSIGNAL;
    flags.set(SendFlags::DONTWAIT, !wait);
    let sent = retry(|| rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags))?;
    // A message this small goes whole or not at all.
    if sent == bytes.len() {
        Ok(())
    } else {
        Err(Errno::IO)
    }
}

/// Receives `bytes.len()` bytes, which come in one piece, and the descriptors that came with them.
/// EPROTO for fewer bytes: who sends them in pieces is no [`send`]. Unless it may `wait`, EAGAIN where
/// nothing has come yet, and nothing is lost then. EMFILE where there was no room for all of the
/// descriptors.
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    wait: bool,
) -> Result<Vec<OwnedFd>, Errno> {
    let mut received = Vec::new();
    // Credentials come along where the socket asks for them (SO_PASSCRED).
    let mut space =
        [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST), ScmCredentials(1))];
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
            received.extend(fds);
        }
    }
    match message.bytes {
        0 => Err(Errno::CONNRESET),
        got if got < wanted => Err(Errno::PROTO),
        // What did not fit into this process's table of descriptors is gone.
        _ if message.flags.contains(ReturnFlags::CTRUNC) => Err(Errno::MFILE),
        _ => Ok(received),
    }
}
