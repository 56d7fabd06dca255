//! What a real disk refuses, met in the middle of a transfer.

use super::*;
use crate::options::{Kind, Method, Pages};
use crate::{Load, buffer};
use std::time::Instant;

/// ext4, xfs and block devices refuse direct reads that are not aligned: the refusal that
/// overlayfs over squashfs and some FUSE daemons answer at the first read of any kind.
#[test]
fn a_direct_read_that_is_refused_is_left_to_the_next_rung() {
    let dir = crate::source::folder_on_disk();
    let path = dir.path().join("file");
    let bytes: Vec<u8> = (0..3_000_001_u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    std::fs::write(&path, &bytes).unwrap();
    std::fs::File::open(&path).unwrap().sync_all().unwrap();
    for method in [Method::Uring, Method::Threads] {
        let source = Source::open(&path).unwrap();
        if source.direct_refused().is_some() {
            eprintln!("SKIP: no direct I/O on {}", source.file_system());
            return;
        }
        let layout = Layout::of(&source, 0, source.size(), false, None);
        let load = Load::new(&path).method(method).pages(Pages::Small);
        let mut plan = load.plan().unwrap();
        // Nothing that a disk can read directly.
        plan.align = 1;
        plan.block = 100_001;
        let memory = buffer::make(&Kind::Memfd, &plan, Pages::Small, &mut Vec::new()).unwrap();
        let meter = Meter::new(Instant::now(), source.size(), false, false, None);
        let transfer = Transfer {
            plan: &plan,
            layout: &layout,
            source: &source,
            memory: &*memory,
            meter: &meter,
            cancel: &CancelToken::new(),
            checks: &[],
        };
        let outcome = transfer.run().unwrap();
        assert!(!outcome.rung.direct, "{method}");
        let whys: Vec<_> = outcome.reasons.iter().map(ToString::to_string).collect();
        // Once: no other direct rung is tried after it.
        assert_eq!(
            whys.iter().filter(|why| why.contains("EINVAL")).count(),
            1,
            "{whys:?}"
        );
        let mut got = vec![0; bytes.len()];
        memory.copy_out(0, &mut got).unwrap();
        assert!(got == bytes, "{method}: wrong bytes");
    }
}
