//! Descriptors of every sort, for peers that send them, and text that is shorter than what it stands for. Part of the
//! engine in a build for fuzzing.

use dmafile_sys::{file, memfd};
use rustix::fs::{Mode, OFlags, SealFlags};
use std::os::fd::{AsFd, OwnedFd};

/// A memfd with these bytes at its start.
pub(super) fn memory(bytes: &[u8], size: u64, seals: SealFlags) -> OwnedFd {
    let fd = memfd::create("fuzz", false).expect("a memfd");
    memfd::resize(fd.as_fd(), size).expect("sparse memory");
    file::pwrite_all(fd.as_fd(), bytes, 0).expect("memory");
    memfd::seal(fd.as_fd(), seals).expect("no mapping");
    fd
}

/// The descriptor for a letter; None for any other letter.
pub(super) fn make(letter: &u8) -> Option<OwnedFd> {
    let fixed = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let sealed = fixed | SealFlags::WRITE;
    let open = |path, flags| {
        rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty()).expect("it is there")
    };
    Some(match letter {
        b's' => memory(b"sealed", 8192, sealed),
        b'r' => memfd::read_only(memory(b"sealed", 8192, sealed).as_fd()).expect("/proc"),
        b'w' => memory(b"writable", 8192, fixed),
        b'u' => memory(b"unsealed", 8192, SealFlags::empty()),
        b't' => memory(b"tiny", 4, sealed),
        b'e' => memory(b"", 0, sealed),
        b'b' => memory(b"big", 1 << 40, sealed),
        b'p' => rustix::pipe::pipe().expect("a pipe").0,
        b'n' => open(c"/dev/null", OFlags::RDWR),
        b'd' => open(c"/", OFlags::RDONLY),
        b'f' => open(c"/proc/self/exe", OFlags::RDONLY),
        _ => return None,
    })
}

/// The text with a value in the place of each name.
pub(super) fn filled_in(text: &[u8], values: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut filled = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&byte, after)) = rest.split_first() {
        let is_here = |(name, _): &&(&str, Vec<u8>)| rest.starts_with(name.as_bytes());
        match values.iter().find(is_here) {
            Some((name, value)) => {
                filled.extend(value);
                rest = &rest[name.len()..];
            }
            None => {
                filled.push(byte);
                rest = after;
            }
        }
    }
    filled
}
