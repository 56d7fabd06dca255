//! Refusals by a real disk in the middle of a transfer.

use super::*;
use crate::buffer::{self, Finish};
use crate::control::CancelToken;
use crate::error::Verb;
use crate::flow::meter::Meter;
use crate::load::Load;
use crate::options::{Kind, Method};
use crate::reasons::Reasons;
use crate::source::Source;
use std::path::Path;
use std::time::Instant;

/// A load into a new memfd, before its transfer.
struct Parts {
    task: LoadTask,
    memory: Box<dyn Finish>,
    cancel: CancelToken,
    log: Reasons,
}

impl Parts {
    /// For all of a file.
    fn of(path: &Path, plan: Plan, pages: Pages) -> Self {
        let source = Source::open(path).unwrap();
        let task = LoadTask {
            layout: Layout::of(&source, 0, source.size(), false, None),
            source: Sampled(source.into()),
            kind: Kind::Memfd,
            checks: Vec::new(),
            shards: Vec::new(),
            plan,
        };
        Self {
            memory: buffer::make(&task.kind, &task.plan, pages, &Reasons::default()).unwrap(),
            cancel: CancelToken::new(),
            log: Reasons::default(),
            task,
        }
    }

    fn run(&self) -> Run<'_> {
        Run {
            verb: Verb::Load,
            meter: Meter::new(Instant::now(), false, false, None),
            cancel: &self.cancel,
            log: &self.log,
        }
    }

    fn transfer<'a>(&'a self, run: &'a Run<'a>) -> LoadTransfer<'a> {
        LoadTransfer {
            task: &self.task,
            run,
            memory: &*self.memory,
        }
    }
}

/// ext4, XFS and block devices refuse unaligned direct reads, as overlayfs over squashfs and some FUSE
/// daemons refuse every first direct read.
#[test]
fn a_refused_direct_read_falls_back_to_buffered() {
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
        let load = Load::new(&path).method(method).pages(Pages::Base);
        let mut plan = load.plan().unwrap();
        // Unaligned, so that the disk cannot read directly.
        plan.tuning.align = 1;
        plan.tuning.block = 100_001;
        let parts = Parts::of(&path, plan, Pages::Base);
        let run = parts.run();
        let outcome = parts.transfer(&run).run().unwrap();
        assert!(!outcome.attempt.direct, "{method}");
        let whys: Vec<_> = parts.log.list().iter().map(ToString::to_string).collect();
        // Once: no other direct fallback is tried after it.
        assert_eq!(
            whys.iter().filter(|why| why.contains("EINVAL")).count(),
            1,
            "{whys:?}"
        );
        let mut got = vec![0; bytes.len()];
        parts.memory.copy_out(0, &mut got).unwrap();
        assert!(got == bytes, "{method}: wrong bytes");
    }
}

/// Nothing is read for nothing: each method looks at the token before each extent.
#[test]
fn a_cancelled_load_reads_nothing_more() {
    let dir = crate::source::folder_on_disk();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![1; 8 << 20]).unwrap();
    std::fs::File::open(&path).unwrap().sync_all().unwrap();
    for method in [Method::Uring, Method::Threads, Method::Bounce] {
        let load = Load::new(&path).method(method).pages(Pages::Base);
        let mut plan = load.plan().unwrap();
        // The thread that allocates ahead would notice, too.
        plan.allocation = Allocation::InRead;
        let parts = Parts::of(&path, plan, Pages::Base);
        parts.cancel.cancel();
        let run = parts.run();
        let error = parts.transfer(&run).run().err().expect("it is cancelled");
        assert_eq!(error.kind(), crate::ErrorKind::Cancelled, "{method}");
        assert_eq!(run.meter.totals(), (0, 0), "{method}");
    }
}

/// Threads take steps in any order, but memory is announced without gaps.
#[test]
fn memory_is_published_without_gaps() {
    const MIB: u64 = 1 << 20;
    let dir = crate::source::folder_on_disk();
    let path = dir.path().join("file");
    let file = std::fs::File::create(&path).unwrap();
    // The last two are on the same partial huge page.
    let data = [
        (0, 20 * MIB),
        (60 * MIB, 100 * MIB + 65536),
        (100 * MIB + 131_072, 100 * MIB + 196_608),
    ];
    for (start, end) in data {
        std::os::unix::fs::FileExt::write_all_at(&file, &vec![1; (end - start) as usize], start)
            .unwrap();
    }
    let mut plan = Load::new(&path).pages(Pages::Thp).plan().unwrap();
    plan.allocation = Allocation::Ahead;
    let parts = Parts::of(&path, plan, Pages::Thp);
    let run = parts.run();
    let transfer = parts.transfer(&run);
    let feed = Feed::new([], [], transfer.task.cut(), None);
    feed.hold();
    let steps = Steps::new(transfer);
    steps.shared_by(3);
    let mut taken: Vec<_> = std::iter::from_fn(|| steps.next()).collect();
    let (grain, end) = (parts.memory.grain(), parts.task.plan.place.writable_to);
    let merged = |ranges: &mut dyn Iterator<Item = (u64, u64)>| {
        let mut whole: Vec<(u64, u64)> = Vec::new();
        for (start, end) in ranges {
            match whole.last_mut() {
                Some(last) if last.1 >= start => last.1 = end,
                _ => whole.push((start, end)),
            }
        }
        whole
    };
    let mut runs = parts.task.layout.runs.iter().map(|run| {
        let start = run.start - run.start % grain;
        (start, run.end.next_multiple_of(grain).min(end))
    });
    let mut ranges = taken.iter().map(|step| (step.at, step.at + step.len));
    assert_eq!(merged(&mut ranges), merged(&mut runs));
    assert!(taken.is_sorted_by_key(|step| step.at));
    let each_once = taken
        .windows(2)
        .all(|pair| pair[0].at + pair[0].len <= pair[1].at);
    assert!(each_once, "{taken:?}");

    let first = taken.remove(0);
    for step in taken.into_iter().rev() {
        steps.done(step, &feed);
        assert_eq!(feed.frontier(), 0);
    }
    steps.done(first, &feed);
    assert_eq!(feed.frontier(), end);
}

/// One of several threads panics at the end of the memory, while the others wait for more.
#[test]
fn a_panic_in_a_thread_that_reads_ends_the_waits_of_the_others() {
    const BLOCK: u64 = 64 << 10;
    let dir = crate::source::folder_on_disk();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![1; 20 * BLOCK as usize]).unwrap();
    let load = Load::new(&path).length(8 * BLOCK).block(BLOCK);
    let mut plan = load
        .pages(Pages::Base)
        .method(Method::Threads)
        .plan()
        .unwrap();
    plan.tuning.threads = 3;
    let parts = Parts::of(&path, plan, Pages::Base);
    let run = parts.run();
    let transfer = parts.transfer(&run);
    // As if there were memory for the whole file.
    let cut = Cut {
        capacity: 20 * BLOCK,
        ..transfer.task.cut()
    };
    let feed = Feed::new([(0, 20 * BLOCK)], [], cut, None);
    feed.hold();
    feed.publish(9 * BLOCK);
    let (ended, end) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let read = std::panic::AssertUnwindSafe(|| {
                transfer.attempt(&feed, parts.task.plan.first(), method::run)
            });
            ended.send(std::panic::catch_unwind(read)).unwrap();
        });
        let end = end.recv_timeout(std::time::Duration::from_secs(60));
        feed.stop(None);
        let panic = end.expect("it hangs").unwrap_err();
        let text = panic.downcast_ref::<String>().unwrap();
        assert!(text.contains("is outside a buffer"), "{text}");
    });
}

/// A second allocating thread costs CPU time, so it joins only if reads wait for memory.
#[test]
fn more_threads_allocate_only_while_reads_wait() {
    /// What is in flight while memory is being allocated.
    enum Reads {
        /// Memory is read into as soon as it is announced.
        Waiting,
        /// One read takes very long.
        Lasting,
        NotBegun,
    }
    const SIZE: u64 = 96 << 20;
    let dir = crate::source::folder_on_disk();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![1; SIZE as usize]).unwrap();
    let threads = |allocation, reads| {
        let mut plan = Load::new(&path).pages(Pages::Base).plan().unwrap();
        (plan.tuning.allocators, plan.allocation) = (3, allocation);
        let parts = Parts::of(&path, plan, Pages::Base);
        let run = parts.run();
        let (transfer, meter) = (parts.transfer(&run), &run.meter);
        let feed = Feed::new([], [], transfer.task.cut(), None);
        feed.hold();
        if !matches!(reads, Reads::NotBegun) {
            meter.io_begins();
            meter.io_ends();
        }
        if matches!(reads, Reads::Lasting) {
            meter.io_begins();
        }
        let steps = Steps::new(transfer);
        steps.run(&feed);
        assert!(parts.log.list().is_empty());
        steps.threads()
    };
    // The second thread may take all remaining steps, so that a third does not join.
    assert!(threads(Allocation::Ahead, Reads::Waiting) > 1);
    assert_eq!(threads(Allocation::Ahead, Reads::Lasting), 1);
    assert_eq!(threads(Allocation::Ahead, Reads::NotBegun), 1);
    // With `before`, no reads happen during the allocation.
    assert_eq!(threads(Allocation::Before, Reads::NotBegun), 3);
}
