//! The answers of a holder are refused, or what they bring is what they claim. Part of the engine in a build for fuzzing.

use super::{Op, Talk, receive};
use crate::fuzz_descriptors as descriptors;
use dmafile::Buffer;
use dmafile::CancelToken;
use dmafile::internal::Verb;
use dmafile_sys::{memfd, socket};
use rustix::fs::SealFlags;
use rustix::net::Shutdown;
use std::collections::HashSet;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

const REST: &[u8] = br#""file":"/m/a","kind":"memfd","pages":"base","digest":null,"changed":false,
    "identity":{"device":[8,1],"inode":7,"size":8,"mtime_ns":1,"ctime_ns":1}"#;

/// Takes files from a holder that sends each line as an answer: letters for the descriptors that come with it
/// ([`descriptors`]), a space, and the message, in which `@rest` stands for those fields of a file that need no check.
pub fn taker(input: &[u8]) {
    let (ours, theirs) = socket::pair().expect("two sockets");
    for line in input.split(|&byte| byte == b'\n').take(16) {
        let space = line.iter().position(|&byte| byte == b' ');
        let (letters, message) = line.split_at(space.unwrap_or(0));
        let message = message.strip_prefix(b" ").unwrap_or(message);
        let message = descriptors::filled_in(message, &[("@rest", REST.to_vec())]);
        let fds: Vec<_> = letters
            .iter()
            .take(20)
            .filter_map(descriptors::make)
            .collect();
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        // One that the socket has no room for is not sent: the taker sees the end of the connection.
        let _ = socket::send(theirs.as_fd(), &message, &fds, false);
    }
    rustix::net::shutdown(&theirs, Shutdown::Write).expect("a connected socket");
    let talk = Talk {
        who: socket::credentials(ours.as_fd()).expect("a connected socket"),
        socket: ours,
        at: PathBuf::from("/run/dmafile/x"),
        until: Instant::now() + Duration::from_secs(5),
        cancel: CancelToken::new(),
        what: Verb::Take,
    };
    talk.request(Op::Take, Some("x"), 0).expect("room for it");
    let held = match receive(talk, "x") {
        Ok(held) => held,
        Err(error) => {
            let text = error.to_string();
            assert!(error.raw_os_error().is_some(), "{text}");
            assert!(!text.contains(char::is_control), "{text:?}");
            return;
        }
    };
    let mut names = HashSet::new();
    for file in held.files() {
        let (info, name) = (&file.info, file.info.file_name());
        let bytes = name.as_bytes();
        let parts: Vec<_> = Path::new(&name).components().collect();
        assert!(
            matches!(parts[..], [Component::Normal(part)] if part == name),
            "{info:?}"
        );
        assert!(
            bytes.len() <= 255 && !bytes.contains(&b'\n') && !bytes.contains(&0),
            "{info:?}"
        );
        assert!(
            file.name == info.name && !info.name.contains(char::is_control),
            "{info:?}"
        );
        assert!(names.insert(name), "{info:?}");
        buffer(&file.buffer, (info.offset, info.bytes), info.sealed);
        assert_eq!(
            (info.kind.clone(), info.descriptors),
            (dmafile::MemoryKind::Memfd, 1)
        );
    }
    assert!(!names.is_empty() && names.len() <= 10_000);
}

/// Checks that a buffer has the bytes that were claimed, and that they cannot disappear.
pub(crate) fn buffer(buffer: &Buffer, (offset, bytes): (u64, u64), sealed: bool) {
    assert!(bytes > 0);
    assert_eq!((buffer.offset(), buffer.len()), (offset, bytes));
    let fd = buffer.as_fd().expect("a memfd");
    let seals = memfd::seals(fd).expect("a memfd");
    assert!(seals.contains(SealFlags::SHRINK));
    assert!(!sealed || seals.contains(SealFlags::WRITE));
    let size = dmafile_sys::file::stat(fd).expect("a memfd").size;
    assert!(u128::from(offset) + u128::from(bytes) <= size.into());
    let address = buffer.as_ptr().expect("it is mapped") as u64;
    assert!(address.checked_add(bytes).is_some());
    if let Some(bytes) = buffer.as_slice() {
        // Both ends can be read.
        std::hint::black_box((bytes.first(), bytes.last()));
    }
}
