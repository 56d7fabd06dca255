//! Ordinary users get huge pages if the system allows them, and the reported page size is correct.
//!
//! Only one test counts pages, because the kernel counts them for the whole process.

use dmafile::{Load, Pages};
use dmafile_testkit::{buffer_digest, cold, dir, file_digest, sparse};

#[test]
fn the_reported_page_size_is_that_of_the_memory() {
    let dir = dir();
    let size = (24 << 20) + 5;
    let path = cold(dir.path(), size);
    for kind in ["anon", "memfd"] {
        for pages in [Pages::Thp, Pages::Base] {
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
                // Fragmented memory may prevent huge pages, but a report of them must be true.
                Pages::Thp if loaded.report.pages.contains("thp") => assert!(huge > 0, "{what}"),
                _ => assert_eq!(huge, 0, "{what}"),
            }
        }
    }
}

#[test]
fn holes_take_no_memory_with_huge_pages() {
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

/// KiB of this process on transparent huge pages.
fn huge_kb() -> u64 {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let lines = smaps.lines().filter_map(|line| {
        let (name, rest) = line.split_once(':')?;
        let huge = matches!(name, "AnonHugePages" | "ShmemPmdMapped");
        huge.then(|| rest.split_whitespace().next()?.parse::<u64>().ok())?
    });
    lines.sum()
}
