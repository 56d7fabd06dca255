//! Unix sockets: send descriptors and a few bytes (SCM_RIGHTS, unix(7)), and identify the other end.

use super::map::Region;
use super::{Errno, last_errno, retry};
use rustix::fs::Mode;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    sockopt,
};
use rustix::process::{Pid, PidfdFlags};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The maximum number of descriptors in a message (SCM_MAX_FD).
pub const MOST: usize = 253;

/// Sends `bytes` with descriptors attached, at most [`MOST`]. Unless it may `wait`, EAGAIN if the socket
/// is full.
pub fn send(
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
    // A message this small is sent completely or not at all.
    if sent == bytes.len() {
        Ok(())
    } else {
        Err(Errno::IO)
    }
}

/// Receives `bytes.len()` bytes, which must arrive in one piece, and the descriptors with them. EPROTO for
/// fewer bytes: [`send`] does not split them. Unless it may `wait`, EAGAIN if nothing has arrived yet, and
/// nothing is lost then. EMFILE if this process has too many open descriptors to receive all of them.
pub fn receive(
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

/// Receives at most `len` bytes of a stream to an offset of memory (recv(2)); returns their number, 0 if the other end
/// has closed. EFAULT if the memory is gone, EAGAIN after the socket's timeout.
pub fn receive_at(
    socket: BorrowedFd<'_>,
    into: &Region<'_>,
    at: u64,
    len: u64,
) -> Result<u64, Errno> {
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    let start = into.span(at, len as u64).cast();
    loop {
        // SAFETY: inside the region; the kernel checks the pages itself.
        let got = unsafe { libc::recv(socket.as_raw_fd(), start, len, 0) };
        match u64::try_from(got) {
            Ok(got) => return Ok(got),
            Err(_) => match last_errno() {
                Errno::INTR => continue,
                errno => return Err(errno),
            },
        }
    }
}

/// As [`receive`], for at most `bytes.len()` bytes; returns their number, 0 if the other end has closed.
/// EMSGSIZE if a message of a SOCK_SEQPACKET socket is longer.
pub fn receive_up_to(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    wait: bool,
) -> Result<(usize, Vec<OwnedFd>), Errno> {
    let mut received = Vec::new();
    // Credentials are included if the socket has SO_PASSCRED.
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
        // Descriptors that did not fit into this process's table are lost.
        flags if flags.contains(ReturnFlags::CTRUNC) && message.bytes > 0 => Err(Errno::MFILE),
        _ => Ok((message.bytes, received)),
    }
}

/// Receives a message without blocking; returns its length, 0 if the other end has closed. The kernel
/// closes descriptors that were sent with it. EMSGSIZE if it is longer than `bytes`.
pub fn receive_bytes(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<usize, Errno> {
    let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC;
    let wanted = bytes.len();
    match retry(|| rustix::net::recv(socket, &mut *bytes, flags))?.1 {
        got if got <= wanted => Ok(got),
        _ => Err(Errno::MSGSIZE),
    }
}

/// How much the other end has not received yet of what was sent: 0 if it has received everything, or has
/// closed the socket. The number includes the kernel's overhead (SIOCOUTQ).
pub fn unreceived(socket: BorrowedFd<'_>) -> Result<u64, Errno> {
    let mut count = Queued(0);
    super::ioctl::request(socket, &mut count)?;
    Ok(u64::try_from(count.0).unwrap_or(0))
}

#[repr(C)]
struct Queued(libc::c_int);

// SAFETY: the kernel writes one int (unix_ioctl).
unsafe impl super::ioctl::Argument for Queued {
    const OPCODE: super::ioctl::Opcode = libc::TIOCOUTQ as super::ioctl::Opcode;
}

/// Two connected sockets that preserve message boundaries, and block.
pub fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    let flags = SocketFlags::CLOEXEC;
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// A non-blocking socket that preserves message boundaries (SOCK_SEQPACKET).
fn seqpacket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// Creates a socket with this path, whose file has at most the permissions `mode`; connecting is possible only after
/// [`listen`].
pub fn bind(path: &Path, mode: u32) -> Result<OwnedFd, Errno> {
    let socket = seqpacket()?;
    // The file gets the permissions of the socket, less umask(2).
    rustix::fs::fchmod(&socket, Mode::from_raw_mode(mode))?;
    at(path, |address| rustix::net::bind(&socket, address))?;
    Ok(socket)
}

/// Allows connections; at most `waiting` of them wait to be accepted.
pub fn listen(socket: BorrowedFd<'_>, waiting: i32) -> Result<(), Errno> {
    rustix::net::listen(socket, waiting)
}

/// Connects. ECONNREFUSED if no process is listening any more, EAGAIN if too many connections wait to be
/// accepted, EPROTOTYPE if it is a socket of another type.
pub fn connect(path: &Path) -> Result<OwnedFd, Errno> {
    let socket = seqpacket()?;
    at(path, |address| rustix::net::connect(&socket, address))?;
    Ok(socket)
}

/// Calls a function with the address of a path. A path that is too long for an address is used relative to
/// its folder.
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

/// The next connection; EAGAIN if there is none.
pub fn accept(listener: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    retry(|| rustix::net::accept_with(listener, flags))
}

/// Returns true if it is a listening socket that preserves message boundaries.
pub fn is_listener(socket: BorrowedFd<'_>) -> Result<bool, Errno> {
    Ok(sockopt::socket_acceptconn(socket)?
        && sockopt::socket_domain(socket)? == AddressFamily::UNIX
        && sockopt::socket_type(socket)? == SocketType::SEQPACKET)
}

/// The process that connected, or listened: process, user and group at that time (SO_PEERCRED). The
/// process is 0 if it is in another PID namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    pub pid: u32,
    pub uid: u32,
    pub gid: u32,
}

/// The credentials of the other end.
pub fn credentials(socket: BorrowedFd<'_>) -> Result<Credentials, Errno> {
    // Not rustix's, in which a process ID cannot be 0.
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

/// The process at the other end, which connected, as a pidfd: readable once it has ended. ESRCH if it has; EOPNOTSUPP if
/// it is in another PID namespace, on Linux before 6.5.
pub fn peer_process(socket: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let mut process: libc::c_int = -1;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `process`, which is that long.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            (&raw mut process).cast(),
            &raw mut len,
        )
    };
    match done {
        // SAFETY: the kernel has just made this descriptor, for this process.
        0 if process >= 0 => return Ok(unsafe { OwnedFd::from_raw_fd(process) }),
        -1 if last_errno() == Errno::SRCH => return Err(Errno::SRCH),
        _ => {}
    }
    // Before Linux 6.5. Its number could be that of another process by now, if it has just ended.
    let pid = i32::try_from(credentials(socket)?.pid)
        .ok()
        .and_then(Pid::from_raw);
    rustix::process::pidfd_open(pid.ok_or(Errno::OPNOTSUPP)?, PidfdFlags::empty())
}

/// Sends a datagram to the service manager's socket; a name that begins with `@` is an abstract one.
pub fn send_datagram(to: &Path, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
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
