//! Direct reads leave nothing in the page cache; cached pages are copied from it.

use dmafile::{About, Io, Kind, Load, Method, facts::File};
use dmafile_testkit::{buffer_digest, bytes_digest, cached, cold, dir, evict, file_digest, warm};

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
        (Method::Threads, Io::Direct),
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
fn a_cached_file_is_copied_from_the_page_cache() {
    let dir = dir();
    let path = cold(dir.path(), LEN as usize);
    let _warm = warm(&path, 0, LEN);
    let loaded = Load::new(&path).to(Kind::Anon).run().unwrap();
    assert_eq!(loaded.report.bytes_buffered, LEN);
    assert_eq!(loaded.report.io, Io::Buffered);
    assert_eq!(buffer_digest(&loaded.buffer), file_digest(&path, 0, LEN));
}

#[test]
fn a_partly_cached_file_is_copied_and_read_directly() {
    let dir = dir();
    let path = cold(dir.path(), LEN as usize);
    let digest = file_digest(&path, 0, LEN);
    for method in [Method::Auto, Method::Threads] {
        evict(&path);
        let warm = warm(&path, 4 << 20, 9 << 20);
        let before = cached(&path);
        // Pages that this user may not lock can have been reclaimed.
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

/// Loads into memory that is too misaligned for direct reads.
fn not_direct(path: &std::path::Path, offset: u64, io: Io) -> (String, dmafile::Report) {
    let len = (LEN - offset) as usize;
    let mut memory = vec![0; len + 4096];
    // One byte off the position where direct reads would be possible.
    let skew = (offset as usize + 1).wrapping_sub(memory.as_ptr().addr()) % 4096;
    let memory = &mut memory[skew..][..len];
    let load = Load::new(path).method(Method::Threads).io(io);
    let report = load.offset(offset).run_into(memory).unwrap();
    assert_eq!(report.bytes_direct, 0);
    (bytes_digest(memory), report)
}

/// Whether a read of the first byte with RWF_DONTCACHE (linux/fs.h) works.
fn knows_dontcache(path: &std::path::Path) -> bool {
    let file = std::fs::File::open(path).unwrap();
    let flags = rustix::io::ReadWriteFlags::from_bits_retain(0x80);
    let mut byte = [0];
    let into = &mut [std::io::IoSliceMut::new(&mut byte)];
    rustix::io::preadv2(&file, into, 0, flags).is_ok()
}

#[test]
fn buffered_reads_leave_the_page_cache_unchanged_if_possible() {
    let dir = dir();
    let path = cold(dir.path(), LEN as usize);
    let digest = file_digest(&path, 0, LEN);
    let can = knows_dontcache(&path);
    assert_eq!(File::probe(&path).unwrap().drops_behind, can);
    let choice = if can { "left as it was" } else { "filled" };
    for range in [0..0, 5 << 20..9 << 20] {
        evict(&path);
        let _warm = (!range.is_empty()).then(|| warm(&path, range.start, range.end));
        let before = cached(&path);
        let (got, report) = not_direct(&path, 0, Io::Auto);
        assert_eq!(got, digest);
        let told = report
            .reasons
            .iter()
            .find(|reason| reason.about == About::Cache);
        assert_eq!(told.expect("it is told").choice, choice);
        match choice {
            "filled" => assert!(cached(&path) >= LEN),
            _ => assert_eq!(cached(&path), before, "{range:?}"),
        }
    }
    // Blocks end at folio boundaries, wherever the first one begins.
    let digest_behind = file_digest(&path, 777, LEN - 777);
    evict(&path);
    let (got, _) = not_direct(&path, 777, Io::Auto);
    assert_eq!(got, digest_behind);
    if choice != "filled" {
        assert_eq!(cached(&path), 0);
    }
    // With --io buffered, the page cache is filled.
    evict(&path);
    let (got, report) = not_direct(&path, 0, Io::Buffered);
    assert_eq!(got, digest);
    assert!(cached(&path) >= LEN);
    assert!(
        !report
            .reasons
            .iter()
            .any(|reason| reason.about == About::Cache)
    );
}

#[test]
fn dirty_pages_are_loaded() {
    let dir = dir();
    let path = cold(dir.path(), LEN as usize);
    for (round, at) in [0, 5 << 20, LEN - 100].into_iter().enumerate() {
        // Written, but not yet on the disk.
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        rustix::io::pwrite(&file, &dmafile_testkit::noise(100, round as u64 + 7), at).unwrap();
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
