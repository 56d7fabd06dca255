//! A thousand takes leak no descriptor, mapping or thread, nor do descriptors that clients send.
//!
//! One test, because it counts for the whole process.

use dmafile_hold::{Held, Hold};
use dmafile_testkit::{cold, dir};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketType,
};
use std::fs;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

/// Descriptors, mappings of memfds, and threads of this process.
fn counts() -> (usize, usize, usize) {
    let count = |folder: &str| fs::read_dir(folder).unwrap().count();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let mapped = maps.lines().filter(|line| line.contains("memfd:")).count();
    (count("/proc/self/fd"), mapped, count("/proc/self/task"))
}

/// Waits until the thread of the holder has dropped the clients that have disconnected.
fn settled(wanted: (usize, usize, usize)) -> (usize, usize, usize) {
    for _ in 0..6000 {
        if counts() == wanted {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    counts()
}

/// Sends a request with 253 descriptors; returns the answer.
fn ask_with_descriptors(at: &Path) -> String {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(at).unwrap()).unwrap();
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    let many: Vec<_> = (0..253).map(|_| pipe.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
    let text = [IoSlice::new(br#"{"v":1,"op":"list"}"#)];
    rustix::net::sendmsg(&socket, &text, &mut control, SendFlags::empty()).unwrap();
    let mut bytes = vec![0; 1 << 16];
    let got = rustix::net::recv(&socket, &mut bytes, RecvFlags::empty())
        .unwrap()
        .1;
    String::from_utf8(bytes[..got].to_vec()).unwrap()
}

#[test]
fn takes_leak_no_descriptor_mapping_or_thread() {
    let dir = dir();
    let path = cold(dir.path(), 3 << 20);
    let at = dir.path().join("socket");
    let hold = || Hold::of([&path]).name("a").socket(&at).start().unwrap();
    // Some things are allocated on first use.
    let threads = counts().2;
    let holder = hold();
    drop(Held::take("a").socket(&at).run().unwrap());
    drop(holder);
    // Nothing waits for the thread that looks at the files.
    while counts().2 != threads {
        std::thread::sleep(Duration::from_millis(1));
    }
    let outside = counts();
    let holder = hold();
    let before = counts();
    assert_eq!(before.1, outside.1, "a holder maps nothing");
    for round in 0..1000 {
        let held = Held::take("a").socket(&at).run().unwrap();
        let file = &held.files()[0];
        assert_eq!(file.buffer.as_slice().unwrap().len(), 3 << 20);
        if round % 100 == 0 {
            drop(held);
            assert_eq!(settled(before), before, "round {round}");
        }
    }
    for _ in 0..10 {
        assert!(ask_with_descriptors(&at).contains(r#""total":1"#));
    }
    assert_eq!(settled(before), before);
    drop(holder);
    assert_eq!(settled(outside), outside);
}
