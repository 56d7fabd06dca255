//! What is kept in a cache has the bytes that were fetched.

use dmafile::{Algorithm, Load, Verify};
use dmafile_remote::{CacheOptions, CacheSlot, Cached, FetchedFile, OpenOptions, Remote};
use dmafile_testkit::noise;
use dmafile_testkit::server::Server;
use std::os::unix::fs::FileExt;
use std::path::Path;

fn remote(folder: &Path) -> Remote {
    Remote::new(OpenOptions {
        cache: Some(CacheOptions {
            folder: folder.to_path_buf(),
            limit: None,
        }),
        ..OpenOptions::default()
    })
}

/// Fetches a file, changes one byte of the memory if that is wanted, and keeps it.
fn fetch(remote: &Remote, slot: &CacheSlot, url: &str, change: bool) -> dmafile::Result<()> {
    let object = remote.open(url)?;
    let verify = Verify::compute(Algorithm::Xxh3);
    let loaded = Load::of_object(object.clone()).verify(verify).run()?;
    let fd = loaded.buffer.as_fd().unwrap();
    let memory = std::fs::File::from(fd.try_clone_to_owned().unwrap());
    if change {
        let mut byte = [0];
        memory.read_exact_at(&mut byte, 300_000).unwrap();
        memory.write_all_at(&[!byte[0]], 300_000).unwrap();
    }
    let file = FetchedFile {
        name: "x.bin",
        object: &*object,
        fd,
        at: loaded.report.offset,
        digest: loaded
            .report
            .verify
            .first()
            .map(|own| (own.algorithm, &*own.digest)),
    };
    slot.write(&[file])?.expect("it can be kept").run()
}

#[test]
fn memory_that_was_changed_is_not_kept() {
    let server = Server::plain();
    let dir = tempfile::tempdir().unwrap();
    let url = server.put("/x.bin", noise(700_001, 1));
    let remote = remote(dir.path());
    let slot = || match remote.reserve(&url).unwrap().unwrap() {
        Cached::Absent(slot) => slot,
        Cached::Here(path) => panic!("{} is there", path.display()),
        Cached::Closed(error) => panic!("{error}"),
    };
    let error = fetch(&remote, &slot(), &url, true).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EBADMSG), "{error}");
    assert!(
        error.to_string().contains("its memory was changed"),
        "{error}"
    );
    assert_eq!(remote.find_cached(&url).unwrap(), None);
    let files = walk(dir.path());
    assert!(
        files.iter().all(|file| file.ends_with("dmafile.lock")),
        "{files:?}"
    );
    fetch(&remote, &slot(), &url, false).unwrap();
    let found = remote.find_cached(&url).unwrap().unwrap();
    assert_eq!(std::fs::read(found).unwrap(), noise(700_001, 1));
}

#[test]
fn what_was_replaced_after_a_look_is_not_kept_as_what_was_seen() {
    let server = Server::plain();
    let dir = tempfile::tempdir().unwrap();
    let url = server.put_tagged("/x.bin", noise(700_001, 1), "\"one\"");
    let remote = remote(dir.path());
    let Cached::Absent(slot) = remote.reserve(&url).unwrap().unwrap() else {
        panic!("it is there");
    };
    server.put_tagged("/x.bin", noise(700_001, 2), "\"two\"");
    let object = remote.open(&url).unwrap();
    let verify = Verify::compute(Algorithm::Xxh3);
    let loaded = Load::of_object(object.clone())
        .verify(verify)
        .run()
        .unwrap();
    let own = &loaded.report.verify[0];
    let file = FetchedFile {
        name: "x.bin",
        object: &*object,
        fd: loaded.buffer.as_fd().unwrap(),
        at: loaded.report.offset,
        digest: Some((own.algorithm, &own.digest)),
    };
    assert!(slot.write(&[file]).unwrap().is_none());
    // A date is no version.
    server.put_tagged("/x.bin", noise(700_001, 3), "");
    server.say("/x.bin", "Last-Modified: Sat, 28 Nov 2026 10:00:00 GMT\r\n");
    drop(slot);
    assert!(remote.reserve(&url).unwrap().is_none());
}

fn walk(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        if entry.file_type().unwrap().is_dir() {
            all.extend(walk(&entry.path()));
        } else {
            all.push(entry.path());
        }
    }
    all
}
