//! Huge pages are had where an ordinary user can have them, and what is reported is so.
//!
//! One test that counts, because the kernel counts for the whole process.

mod common;

use common::{buffer_digest, cold, dir, file_digest, sparse};
use dmafile::{Load, Pages};

#[test]
fn huge_pages_come_where_a_user_gets_them() {
    let dir = dir();
    let size = (24 << 20) + 5;
    let path = cold(dir.path(), size);
    for kind in ["anon", "memfd"] {
        for pages in [Pages::Thp, Pages::Small] {
            let loaded = Load::new(&path)
                .to(kind.parse().unwrap())
                .pages(pages)
                .run()
                .unwrap();
            let what = format!("{kind} on {pages}, got {}", loaded.report.pages);
            let digest = file_digest(&path, 0, size as u64);
            assert_eq!(buffer_digest(&loaded.buffer), digest, "{what}");
            let huge = huge_kb();
            match pages {
                // Memory may be fragmented: then it says so. What it claims must be so.
                Pages::Thp if loaded.report.pages.contains("thp") => assert!(huge > 0, "{what}"),
                _ => assert_eq!(huge, 0, "{what}"),
            }
        }
    }
}

#[test]
fn holes_stay_holes_whatever_the_pages() {
    let dir = dir();
    // 4 KiB in every 2 MiB.
    let data: Vec<(u64, u64)> = (0..32).map(|n| (n << 21, (n << 21) + 4096)).collect();
    let path = sparse(dir.path(), 64 << 20, &data);
    let loaded = Load::new(&path).run().unwrap();
    assert_eq!(
        buffer_digest(&loaded.buffer),
        file_digest(&path, 0, 64 << 20)
    );
    let taken = rustix::fs::fstat(loaded.buffer.as_fd().unwrap())
        .unwrap()
        .st_blocks
        * 512;
    assert!(taken <= 1 << 20, "{taken} bytes for 128 KiB of data");
}

/// KiB of this process's memory that lie on transparent huge pages.
fn huge_kb() -> u64 {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let lines = smaps.lines().filter_map(|line| {
        let (name, rest) = line.split_once(':')?;
        let huge = matches!(name, "AnonHugePages" | "ShmemPmdMapped");
        huge.then(|| rest.split_whitespace().next()?.parse::<u64>().ok())?
    });
    lines.sum()
}
