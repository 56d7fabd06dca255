//! What the service manager has kept is not used, or its descriptors are what the table says. Part of the engine in a
//! build for fuzzing.

use super::{FileIdentity, HoldOptions, Member, Set, boot, find, own, roots};
use crate::fuzz_descriptors as descriptors;
use crate::take::fuzz::buffer;
use crate::{name, protocol::MOST_FILES};
use dmafile::Buffer;
use rustix::fs::SealFlags;
use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// Finds the files of the hold `x` in what the first line describes, as `NAME=LETTER:...`: the letter of a descriptor
/// ([`descriptors`]), T for the table, which is the rest of the input, or U for the same without seals. In the table
/// `@path`, `@identity` and `@roots` stand for what a valid table has there, and `@boot` for this boot.
pub fn store(input: &[u8]) {
    let end = input.iter().position(|&byte| byte == b'\n').unwrap_or(0);
    let (kept, table) = input.split_at(end);
    let path = PathBuf::from("/proc/self/exe");
    let table = filled_in(table, &path);
    let mut fds: Vec<_> = kept
        .split(|&byte| byte == b':')
        .take(20)
        .filter_map(|one| kept_one(one, &table))
        .collect();
    let all = fds.len();
    let own = own("x", &mut fds);
    assert_eq!(own.len() + fds.len(), all);
    assert!(own.iter().all(|(name, _)| name.starts_with("dmafile-x-")));
    let count = own.len();
    let wanted = HoldOptions::new(vec![path.clone()]);
    if let Some(kept) = find("x", own, &wanted) {
        check(kept.set, count);
    }
}

fn kept_one(one: &[u8], table: &[u8]) -> Option<(String, OwnedFd)> {
    let (letter, name) = one.split_last()?;
    let name = std::str::from_utf8(name.strip_suffix(b"=")?).ok()?;
    let sealed = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let fd = match letter {
        b'T' => descriptors::memory(table, table.len() as u64, sealed),
        b'U' => descriptors::memory(table, table.len() as u64, SealFlags::empty()),
        letter => descriptors::make(letter)?,
    };
    Some((name.to_string(), fd))
}

/// The table with what depends on the machine.
fn filled_in(table: &[u8], path: &PathBuf) -> Vec<u8> {
    let roots = roots(std::slice::from_ref(path)).expect("this program");
    let values = [
        ("@path", serde_json::to_vec(path)),
        ("@identity", serde_json::to_vec(&roots[0].1)),
        ("@roots", serde_json::to_vec(&roots)),
        ("@boot", serde_json::to_vec(&boot())),
    ];
    let values = values.map(|(name, value)| (name, value.expect("plain data")));
    descriptors::filled_in(table, &values)
}

fn check(set: Set, kept: usize) {
    let mut names = HashSet::new();
    let mut count = 0;
    for Member { info, fds } in set.members {
        assert!(
            name::is_plain(&info.file_name()) && names.insert(info.file_name()),
            "{info:?}"
        );
        assert_eq!(Ok(info.identity), FileIdentity::at(&info.file));
        assert_eq!(
            (info.kind.clone(), info.descriptors, fds.len()),
            (dmafile::MemoryKind::Memfd, 1, 1)
        );
        count += fds.len();
        let range = (info.offset, info.bytes);
        let adopted = Buffer::of_peer(fds, &info.kind, range, info.sealed);
        buffer(&adopted.expect("a taker can use it"), range, info.sealed);
    }
    // All of them, and the table.
    assert_eq!(count + 1, kept);
    assert!(names.len() <= MOST_FILES);
}
