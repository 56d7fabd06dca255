//! Direct reads leave nothing in the page cache; what sits there is copied from it.

mod common;

use common::{buffer_digest, cached, cold, dir, evict, file_digest, warm};
use dmafile::{Io, Kind, Load, Method};

const LEN: u64 = (24 << 20) + 777;

#[test]
fn a_cold_file_stays_out_of_the_page_cache() {
    let dir = dir();
    let path = cold(dir.path(), LEN as usize);
    let digest = file_digest(&path, 0, LEN);
    for (method, io) in [
        (Method::Auto, Io::Auto),
        (Method::Uring, Io::Direct),
        (Method::Threads, Io::Auto),
        (Method::Read, Io::Direct),
    ] {
        evict(&path);
        assert_eq!(cached(&path), 0);
        let loaded = Load::new(&path).method(method).io(io).run().unwrap();
        assert_eq!(cached(&path), 0, "{method} {io}");
        assert_eq!(loaded.report.bytes_direct, LEN);
        assert_eq!(loaded.report.io, Io::Direct);
        assert_eq!(buffer_digest(&loaded.buffer), digest);
    }
}

#[test]
fn a_warm_file_is_copied() {
    let dir = dir();
    let path = cold(dir.path(), LEN as usize);
    let _warm = warm(&path, 0, LEN);
    let loaded = Load::new(&path).to(Kind::Anon).run().unwrap();
    assert_eq!(loaded.report.bytes_buffered, LEN);
    assert_eq!(loaded.report.io, Io::Buffered);
    assert_eq!(buffer_digest(&loaded.buffer), file_digest(&path, 0, LEN));
}

#[test]
fn a_file_that_is_partly_warm_comes_both_ways() {
    let dir = dir();
    let path = cold(dir.path(), LEN as usize);
    let digest = file_digest(&path, 0, LEN);
    for method in [Method::Auto, Method::Threads] {
        evict(&path);
        let warm = warm(&path, 4 << 20, 9 << 20);
        let before = cached(&path);
        // It need not all be there for one who may not lock pages.
        assert!(
            (4 << 20..8 << 20).contains(&before),
            "{before} bytes are cached"
        );
        let loaded = Load::new(&path).method(method).run().unwrap();
        assert_eq!(buffer_digest(&loaded.buffer), digest);
        assert_eq!(loaded.report.io, Io::Auto);
        assert_eq!(
            loaded.report.bytes_direct + loaded.report.bytes_buffered,
            LEN
        );
        assert!(loaded.report.bytes_buffered >= 4 << 20);
        assert!(
            cached(&path) <= before,
            "the rest went through the page cache"
        );
        drop(warm);
    }
}

#[test]
fn dirty_pages_are_not_missed() {
    let dir = dir();
    let path = cold(dir.path(), LEN as usize);
    for (round, at) in [0, 5 << 20, LEN - 100].into_iter().enumerate() {
        // Written, and not yet on the disk.
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        rustix::io::pwrite(&file, &common::noise(100, round as u64 + 7), at).unwrap();
        for io in [Io::Auto, Io::Direct] {
            let loaded = Load::new(&path).io(io).run().unwrap();
            assert_eq!(
                buffer_digest(&loaded.buffer),
                file_digest(&path, 0, LEN),
                "{io} {at}"
            );
        }
    }
}
