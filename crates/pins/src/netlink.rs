//! Lists that the kernel sends over netlink sockets (netlink(7)).

use dmafile_sys::{Errno, retry};
use rustix::net::netlink::{RDMA, SOCK_DIAG};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::time::Duration;

/// The netlink family.
#[derive(Clone, Copy)]
pub enum Family {
    /// RDMA devices and what is registered with them (rdma/rdma_netlink.h).
    Rdma,
    /// Sockets (sock_diag(7)).
    SocketDiag,
}

const HEADER: usize = 16;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// NLM_F_REQUEST | NLM_F_DUMP
const DUMP: u16 = 0x301;
const NLA_TYPE_MASK: u16 = 0x3fff;

/// All messages of a list, without their headers. `kind` is the type of the request, `body` is
/// what follows its header.
pub fn dump(family: Family, kind: u16, body: &[u8]) -> Result<Vec<Vec<u8>>, Errno> {
    let protocol = match family {
        Family::Rdma => RDMA,
        Family::SocketDiag => SOCK_DIAG,
    };
    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(protocol),
    )?;
    // The kernel answers immediately, or is broken.
    set_socket_timeout(&socket, Timeout::Recv, Some(Duration::from_secs(10)))?;
    let mut request = Vec::with_capacity(HEADER + body.len());
    let length = u32::try_from(HEADER + body.len()).map_err(|_| Errno::TOOBIG)?;
    request.extend(length.to_ne_bytes());
    request.extend(kind.to_ne_bytes());
    request.extend(DUMP.to_ne_bytes());
    request.extend([0; 8]);
    request.extend(body);
    retry(|| rustix::net::send(&socket, &request, SendFlags::empty()))?;
    let mut messages = Vec::new();
    let mut buffer = vec![0_u8; 64 << 10];
    loop {
        let (_, got) = retry(|| rustix::net::recv(&socket, &mut buffer[..], RecvFlags::TRUNC))?;
        let Some(received) = buffer.get(..got).filter(|received| !received.is_empty()) else {
            return Err(Errno::MSGSIZE);
        };
        if !take(received, &mut messages)? {
            return Ok(messages);
        }
    }
}

/// Takes the messages of a datagram; false after the last one of the list.
fn take(mut datagram: &[u8], messages: &mut Vec<Vec<u8>>) -> Result<bool, Errno> {
    while datagram.len() >= HEADER {
        let length = u32::from_ne_bytes(datagram[..4].try_into().expect("4 bytes")) as usize;
        let kind = u16::from_ne_bytes([datagram[4], datagram[5]]);
        let body = datagram.get(HEADER..length).ok_or(Errno::PROTO)?;
        match kind {
            NLMSG_ERROR | NLMSG_DONE => {
                let code = body
                    .first_chunk()
                    .map_or(0, |code| i32::from_ne_bytes(*code));
                if code < 0 {
                    return Err(Errno::from_raw_os_error(-code));
                }
                return Ok(false);
            }
            _ => messages.push(body.to_vec()),
        }
        datagram = datagram.get(length.next_multiple_of(4)..).unwrap_or(&[]);
    }
    Ok(true)
}

/// An attribute for a request.
pub fn attribute(kind: u16, value: u32) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..2].copy_from_slice(&8_u16.to_ne_bytes());
    bytes[2..4].copy_from_slice(&kind.to_ne_bytes());
    bytes[4..].copy_from_slice(&value.to_ne_bytes());
    bytes
}

/// The attributes in a message, or in an attribute: types and values.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = u16::from_ne_bytes(*bytes.first_chunk()?) as usize;
        let kind = u16::from_ne_bytes(*bytes.get(2..)?.first_chunk()?) & NLA_TYPE_MASK;
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        Some((kind, value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u16, body: &[u8]) -> Vec<u8> {
        let mut bytes = ((HEADER + body.len()) as u32).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend([0; 10]);
        bytes.extend(body);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn a_list_ends_at_nlmsg_done() {
        let mut messages = Vec::new();
        let more = [message(20, b"abcde"), message(20, b"fgh")].concat();
        assert_eq!(take(&more, &mut messages), Ok(true));
        let last = [message(20, b"i"), message(NLMSG_DONE, &[0; 4])].concat();
        assert_eq!(take(&last, &mut messages), Ok(false));
        assert_eq!(
            messages,
            [b"abcde".to_vec(), b"fgh".to_vec(), b"i".to_vec()]
        );
        let refused = message(NLMSG_ERROR, &(-2_i32).to_ne_bytes());
        assert_eq!(take(&refused, &mut messages), Err(Errno::NOENT));
        assert_eq!(take(&more[..18], &mut messages), Err(Errno::PROTO));
    }

    #[test]
    fn attributes_are_padded_and_a_truncated_one_ends_the_list() {
        let mut bytes = attribute(2, 7).to_vec();
        // Nested, five bytes, padding.
        bytes.extend([9, 0, 3, 0x80, 1, 2, 3, 4, 5, 0, 0, 0]);
        bytes.extend([200, 0, 4, 0, 1]);
        let found: Vec<_> = attributes(&bytes).collect();
        let seven = 7_u32.to_ne_bytes();
        assert_eq!(found, [(2, &seven[..]), (3, &[1, 2, 3, 4, 5][..])]);
        // A length smaller than its own header would cause an endless loop.
        assert_eq!(attributes(&[0, 0, 1, 0]).count(), 0);
    }
}
