//! Unix sockets: descriptors and a few bytes over them (SCM_RIGHTS, unix(7)), and who is at the other end.

use super::{Errno, last_errno, retry};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    sockopt,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

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
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
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
    let wanted = bytes.len();
    match receive_up_to(socket, bytes, wait)? {
        (0, _) => Err(Errno::CONNRESET),
        (got, _) if got < wanted => Err(Errno::PROTO),
        (_, received) => Ok(received),
    }
}

/// As [`receive`], at most `bytes.len()` bytes; how many, 0 where the other end has closed. EMSGSIZE for
/// a longer message of a socket that keeps messages apart.
pub(crate) fn receive_up_to(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    wait: bool,
) -> Result<(usize, Vec<OwnedFd>), Errno> {
    let mut received = Vec::new();
    // Credentials come along where the socket asks for them (SO_PASSCRED).
    let mut space =
        [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST), ScmCredentials(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut flags = RecvFlags::CMSG_CLOEXEC;
    flags.set(RecvFlags::DONTWAIT, !wait);
    let message = retry(|| {
        let mut into = [IoSliceMut::new(bytes)];
        rustix::net::recvmsg(socket, &mut into, &mut control, flags)
    })?;
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = part {
            received.extend(fds);
        }
    }
    match message.flags {
        flags if flags.contains(ReturnFlags::TRUNC) => Err(Errno::MSGSIZE),
        // What did not fit into this process's table of descriptors is gone.
        flags if flags.contains(ReturnFlags::CTRUNC) && message.bytes > 0 => Err(Errno::MFILE),
        _ => Ok((message.bytes, received)),
    }
}

/// Receives a message without waiting; its length, 0 where the other end has closed. Descriptors that
/// came with it are closed by the kernel, and enter no table. EMSGSIZE where it is longer than `bytes`.
pub(crate) fn receive_bytes(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<usize, Errno> {
    let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC;
    let wanted = bytes.len();
    match retry(|| rustix::net::recv(socket, &mut *bytes, flags))?.1 {
        got if got <= wanted => Ok(got),
        _ => Err(Errno::MSGSIZE),
    }
}

/// A socket that keeps messages apart (SOCK_SEQPACKET); its calls do not wait.
fn seqpacket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// Makes a socket with this path, on which nobody can connect before [`listen`].
pub(crate) fn bind(path: &Path) -> Result<OwnedFd, Errno> {
    let socket = seqpacket()?;
    at(path, |address| rustix::net::bind(&socket, address))?;
    Ok(socket)
}

/// Lets others connect; so many may wait to be accepted.
pub(crate) fn listen(socket: BorrowedFd<'_>, waiting: i32) -> Result<(), Errno> {
    rustix::net::listen(socket, waiting)
}

/// Connects. ECONNREFUSED where nobody listens any more, EAGAIN where too many wait to be accepted,
/// EPROTOTYPE where it is a socket of another type.
pub(crate) fn connect(path: &Path) -> Result<OwnedFd, Errno> {
    let socket = seqpacket()?;
    at(path, |address| rustix::net::connect(&socket, address))?;
    Ok(socket)
}

/// Calls with the address of a path. One that is too long for an address is reached by way of its folder.
fn at(
    path: &Path,
    mut call: impl FnMut(&SocketAddrUnix) -> Result<(), Errno>,
) -> Result<(), Errno> {
    let folder;
    let mut short = PathBuf::new();
    let address = match SocketAddrUnix::new(path) {
        Err(Errno::NAMETOOLONG) => {
            let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
                return Err(Errno::NAMETOOLONG);
            };
            folder = super::place::folder(parent)?.0;
            short.push(format!("/proc/self/fd/{}", folder.as_raw_fd()));
            short.push(name);
            SocketAddrUnix::new(&short)?
        }
        other => other?,
    };
    retry(|| call(&address))
}

/// The next one that has connected; EAGAIN where nobody has.
pub(crate) fn accept(listener: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    retry(|| rustix::net::accept_with(listener, flags))
}

/// Whether others can connect to it, and messages are kept apart.
pub(crate) fn is_listener(socket: BorrowedFd<'_>) -> Result<bool, Errno> {
    Ok(sockopt::socket_acceptconn(socket)?
        && sockopt::socket_domain(socket)? == AddressFamily::UNIX
        && sockopt::socket_type(socket)? == SocketType::SEQPACKET)
}

/// Who connected, or listened: process, user and group at that time (SO_PEERCRED). The process is 0
/// where it is one of another PID namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Credentials {
    pub pid: u32,
    pub uid: u32,
    pub gid: u32,
}

/// Who is at the other end.
pub(crate) fn credentials(socket: BorrowedFd<'_>) -> Result<Credentials, Errno> {
    // Not rustix's: its process number can't be 0.
    let mut found = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `found`, which is that long.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut len,
        )
    };
    match done {
        0 => Ok(Credentials {
            pid: u32::try_from(found.pid).unwrap_or(0),
            uid: found.uid,
            gid: found.gid,
        }),
        _ => Err(last_errno()),
    }
}

/// Sends a datagram to the service manager's socket, whose name begins with `@` where it is abstract.
pub(crate) fn send_datagram(to: &Path, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let address = match to.as_os_str().as_bytes() {
        [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name)?,
        _ => SocketAddrUnix::new(to)?,
    };
    retry(|| rustix::net::connect(&socket, &address))?;
    send(socket.as_fd(), bytes, fds, true)
}
