//! Packet memory of AF_XDP sockets (umem), by sock_diag(7) as for `ss --xdp`: those of this network
//! namespace.

use super::holders::{Maker, Person, PinHolder, refusal};
use crate::netlink::{self, Family, attributes};
use dmafile_sys::{Errno, host};
use std::collections::BTreeMap;

/// SOCK_DIAG_BY_FAMILY
const BY_FAMILY: u16 = 20;
const AF_XDP: u8 = 44;
/// XDP_SHOW_UMEM
const SHOW_UMEM: u32 = 1 << 2;
/// XDP_DIAG_UMEM
const UMEM: u16 = 5;
/// Bytes of struct xdp_diag_msg.
const MESSAGE: usize = 16;

/// The memory of one socket, as in `linux/xdp_diag.h`. Several sockets may share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Umem {
    inode: u64,
    id: u32,
    bytes: u64,
}

pub(super) fn holders(people: &[Person]) -> (Vec<PinHolder>, Option<String>) {
    // The request would load the kernel's module for it, which is only useful if there is a socket.
    let there = host::text("/proc/net/protocols").map_or(0, |text| sockets(&text));
    if there == 0 {
        return (Vec::new(), None);
    }
    let mut request = [0; 20];
    request[0] = AF_XDP;
    request[8..12].copy_from_slice(&SHOW_UMEM.to_ne_bytes());
    let messages = match netlink::dump(Family::SocketDiag, BY_FAMILY, &request) {
        Ok(messages) => messages,
        Err(errno) => {
            let why = match errno {
                Errno::NOENT => "the kernel has no list of them (CONFIG_XDP_SOCKETS_DIAG)".into(),
                errno => refusal(errno),
            };
            return (Vec::new(), Some(format!("{there} here, but {why}")));
        }
    };
    let umems: Vec<_> = messages.iter().filter_map(|one| umem(one)).collect();
    // The kernel's list ends at a socket that is not bound yet.
    let missing = there.saturating_sub(messages.len() as u64);
    let why = (missing > 0).then(|| format!("{missing} not listed: one is not bound to a device"));
    (joined(&umems, people), why)
}

/// Each umem once, with all processes that have a socket that uses it.
fn joined(umems: &[Umem], people: &[Person]) -> Vec<PinHolder> {
    let mut by_id = BTreeMap::<u32, Vec<Umem>>::new();
    for umem in umems {
        by_id.entry(umem.id).or_default().push(*umem);
    }
    let has = |person: &Person, umems: &[Umem]| {
        let link = |umem: &Umem| format!("socket:[{}]", umem.inode);
        let links: Vec<_> = umems.iter().map(link).collect();
        let mut own = person.links.iter();
        own.any(|(_, link)| {
            links
                .iter()
                .any(|wanted| link.as_os_str() == wanted.as_str())
        })
    };
    by_id
        .into_values()
        .map(|umems| {
            let mut by: Vec<_> = people.iter().filter(|one| has(one, &umems)).collect();
            by.sort_unstable_by_key(|person| person.pid);
            PinHolder {
                inode: Some(umems[0].inode),
                ..PinHolder::of(&by, Maker::AfXdp, Some(umems[0].bytes))
            }
        })
        .collect()
}

/// Number of AF_XDP sockets, from the table of protocols: name, size, number.
fn sockets(protocols: &str) -> u64 {
    let mut lines = protocols.lines();
    lines
        .find_map(|line| {
            line.strip_prefix("XDP ")?
                .split_whitespace()
                .nth(1)?
                .parse()
                .ok()
        })
        .unwrap_or(0)
}

fn umem(message: &[u8]) -> Option<Umem> {
    let inode = u32::from_ne_bytes(*message.get(4..)?.first_chunk()?);
    let (_, value) = attributes(message.get(MESSAGE..)?).find(|(kind, _)| *kind == UMEM)?;
    Some(Umem {
        inode: inode.into(),
        bytes: u64::from_ne_bytes(*value.first_chunk()?),
        id: u32::from_ne_bytes(*value.get(8..)?.first_chunk()?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_counted_in_the_table_of_protocols() {
        let table = "protocol  size sockets  memory press maxhdr  slab module     cl co\n\
                     PACKET    1472      0      -1   NI       0   no   kernel      n  n\n\
                     XDP        960      2      -1   NI       0   no   kernel      n  n\n";
        assert_eq!(sockets(table), 2);
        assert_eq!(sockets(""), 0);
    }

    #[test]
    fn memory_that_sockets_share_is_listed_once() {
        let mut message = vec![44, 3, 0, 0];
        message.extend(682_u32.to_ne_bytes());
        message.extend([0; 8]);
        // An attribute of struct xdp_diag_umem.
        message.extend([52, 0, 5, 0]);
        message.extend(32768_u64.to_ne_bytes());
        message.extend(9_u32.to_ne_bytes());
        message.extend([0; 36]);
        let first = umem(&message).unwrap();
        assert_eq!(
            first,
            Umem {
                inode: 682,
                id: 9,
                bytes: 32768
            }
        );
        let second = Umem {
            inode: 683,
            ..first
        };
        let person = |pid, link: &str| Person {
            pid,
            name: "x".into(),
            uid: 0,
            links: vec![(5, link.into())],
        };
        let people = [person(8, "socket:[683]"), person(7, "socket:[682]")];
        let [holder] = &joined(&[first, second], &people)[..] else {
            panic!("one memory");
        };
        assert_eq!((holder.pid, &holder.also[..]), (Some(7), &[8][..]));
        assert_eq!(umem(&message[..40]), None);
    }
}
