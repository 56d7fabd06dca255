//! A load through a ring: the sink gets the bytes that sha256sum reads, in order, and no slot changes
//! before the sink releases it.

use dmafile::{
    CancelToken, CopyTo, Discard, Error, ErrorKind, Io, Load, Memory, Method, Pages, Result, Ring,
    Sink, Slot, deliver,
};
use dmafile_testkit::{bytes_digest, cold, dir, evict, file_digest, noise, sparse, warm};
use std::collections::VecDeque;
use std::io::Write;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Small, so that small files use each slot of the ring often.
const BLOCK: u64 = 16 << 10;

fn small(path: &Path) -> Load {
    Load::new(path).block(BLOCK)
}

/// Keeps slots for a while, copies them only before it releases them, and checks that they have not
/// changed.
struct Late {
    seed: u64,
    bytes: Vec<u8>,
    kept: VecDeque<Vec<Kept>>,
    most: usize,
    begun: u32,
    finished: u32,
    /// Size of the ring.
    ring: u64,
    /// Offset of the first byte in the file.
    first: u64,
}

struct Kept {
    at: u64,
    memory: (usize, usize),
    was: Vec<u8>,
}

impl Late {
    fn new(seed: u64, len: u64) -> Self {
        Self {
            seed: seed | 1,
            bytes: vec![0xee; len as usize],
            kept: VecDeque::new(),
            most: 0,
            begun: 0,
            finished: 0,
            ring: 0,
            first: 0,
        }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed % below
    }

    fn let_go(&mut self) {
        for kept in self.kept.pop_front().expect("a slot was taken") {
            let (start, len) = kept.memory;
            // SAFETY: the ring keeps the bytes until this sink releases them.
            let now = unsafe { std::slice::from_raw_parts(start as *const u8, len) };
            assert!(now == kept.was, "a slot was filled again too early");
            self.bytes[(kept.at - self.first) as usize..][..len].copy_from_slice(now);
        }
    }
}

impl Sink for Late {
    fn begin(&mut self, ring: Memory<'_>) -> Result<()> {
        self.ring = ring.len();
        self.begun += 1;
        Ok(())
    }

    fn take(&mut self, slot: &Slot<'_>) -> Result<()> {
        let kept = slot.pieces().iter().map(|piece| {
            let len = piece.memory.len() as usize;
            let mut was = vec![0; len];
            piece.memory.copy_to(&mut was);
            let memory = (piece.memory.as_ptr().addr(), len);
            let at = piece.at;
            Kept { at, memory, was }
        });
        self.kept.push_back(kept.collect());
        self.most = self.most.max(self.kept.len());
        Ok(())
    }

    fn done(&mut self, wait: bool) -> Result<bool> {
        if !wait && self.random(3) > 0 {
            return Ok(false);
        }
        self.let_go();
        Ok(true)
    }

    fn finish(&mut self) -> Result<()> {
        self.finished += 1;
        while !self.kept.is_empty() {
            self.let_go();
        }
        Ok(())
    }
}

#[test]
fn every_method_delivers_the_bytes_of_the_file() {
    let dir = dir();
    for len in [1, 4095, 300_000, 2_000_003] {
        let path = cold(dir.path(), len as usize);
        let expected = file_digest(&path, 0, len);
        for method in [Method::Auto, Method::Uring, Method::Threads, Method::Bounce] {
            let mut sink = Late::new(len + method as u64, len);
            let load = small(&path).method(method);
            let report = load
                .run_through(Ring::new(4 * BLOCK, 4), &mut sink)
                .unwrap();
            assert_eq!(report.bytes, len, "{method}");
            assert_eq!((sink.begun, sink.finished), (1, 1));
            assert_eq!(bytes_digest(&sink.bytes), expected, "{method}, {len} bytes");
        }
    }
}

#[test]
fn ranges_holes_and_cached_parts_arrive_at_their_offsets() {
    let dir = dir();
    let len = 5_000_000;
    let path = sparse(
        dir.path(),
        len,
        &[(100_000, 900_001), (4_000_000, 4_500_000)],
    );
    let whole = std::fs::read(&path).unwrap();
    let _warm = warm(&path, 0, 500 << 10);
    for (offset, length) in [
        (0, len),
        (12_345, 3_000_000),
        (999_999, 10),
        (899_000, 4_100_000),
    ] {
        for io in [Io::Auto, Io::Buffered, Io::Direct] {
            let mut memory = vec![0xee; length as usize];
            let mut sink = CopyTo::new(&mut memory, offset);
            let load = small(&path).offset(offset).length(length).io(io);
            load.run_through(Ring::new(6 * BLOCK, 3), &mut sink)
                .unwrap();
            let expected = &whole[offset as usize..][..length as usize];
            assert!(memory == expected, "{io}, {length} bytes at {offset}");
        }
    }
}

/// If the ring's memory ends with a page after the ring, no slot continues into that page.
#[test]
fn a_block_of_any_size_arrives_at_its_offset() {
    let dir = dir();
    let path = cold(dir.path(), 300_000);
    for block in [5000, 4097, 12_288] {
        let mut memory = vec![0xee; 300_000];
        let mut sink = CopyTo::new(&mut memory, 0);
        let load = Load::new(&path).block(block).io(Io::Buffered);
        let load = load.method(Method::Threads);
        load.run_through(Ring::new(3 * block, 3), &mut sink)
            .unwrap();
        assert_eq!(bytes_digest(&memory), file_digest(&path, 0, 300_000));
    }
}

#[test]
fn a_ring_is_no_larger_than_what_passes_through_it() {
    let dir = dir();
    for (len, offset) in [
        (1, 0),
        (10_000, 0),
        (10_000, 5_000),
        (17 << 20, 0),
        (41 << 20, 9),
    ] {
        let path = cold(dir.path(), len as usize);
        let mut sink = Late::new(len, len - offset);
        sink.first = offset;
        let load = Load::new(&path).offset(offset).block(2 << 20);
        let report = load.run_through(Ring::new(32 << 20, 4), &mut sink).unwrap();
        assert_eq!(report.bytes, len - offset);
        assert_eq!(
            bytes_digest(&sink.bytes),
            file_digest(&path, offset, len - offset)
        );
        // Whole units of direct reads at both ends.
        let most = len.next_multiple_of(64 << 10).min(32 << 20);
        assert!(sink.ring <= most, "{} for {len} bytes", sink.ring);
        assert!(sink.ring >= (len - offset).min(32 << 20));
    }
}

/// Before each hole, every slot has had data.
#[test]
fn holes_in_a_slot_are_zero() {
    let dir = dir();
    let (len, part): (u64, u64) = (20 << 20, 128 << 10);
    // First only data, then parts of data with larger holes between them.
    let mut data = vec![(0, len / 2)];
    data.extend(
        (len / 2..len)
            .step_by(3 * part as usize)
            .map(|at| (at + part, at + 2 * part)),
    );
    data.pop();
    let path = sparse(dir.path(), len, &data);
    let whole = std::fs::read(&path).unwrap();
    let mut memory = vec![0xee; len as usize];
    let mut sink = CopyTo::new(&mut memory, 0);
    small(&path)
        .run_through(Ring::new(4 << 20, 2), &mut sink)
        .unwrap();
    assert!(memory == whole);
}

/// For many schedules of taking and releasing slots.
#[test]
fn no_slot_is_filled_again_before_the_sink_releases_it() {
    let count = std::env::var("DMAFILE_SCHEDULES").map_or(200, |count| count.parse().unwrap());
    let dir = dir();
    let len = 200_000;
    let path = dir.path().join("file");
    let bytes = noise(len, 7);
    std::fs::write(&path, &bytes).unwrap();
    let mut most = 0;
    for seed in 0..count {
        let mut sink = Late::new(seed * 77 + 5, len as u64);
        let method = [Method::Uring, Method::Threads, Method::Bounce][seed as usize % 3];
        let io = [Io::Auto, Io::Direct][seed as usize % 2];
        let load = Load::new(&path).block(4096).method(method).io(io);
        let slots = 2 + (seed % 9) as u32;
        let ring = Ring::new(u64::from(slots) * 4096 * (1 + seed % 3), slots);
        load.run_through(ring, &mut sink).unwrap();
        assert!(sink.bytes == bytes, "schedule {seed}");
        most = most.max(sink.most);
    }
    assert!(most > 1, "the sink never had several slots");
}

#[test]
fn digests_are_those_of_the_file() {
    let dir = dir();
    let len = 1_500_000;
    let path = cold(dir.path(), len);
    let digest = file_digest(&path, 0, len as u64);
    let mut sink = Late::new(3, len as u64);
    let load = small(&path).verify(format!("sha256={digest}").parse().unwrap());
    let report = load
        .run_through(Ring::new(4 * BLOCK, 4), &mut sink)
        .unwrap();
    assert_eq!(report.verify[0].digest, digest);
    assert_eq!(bytes_digest(&sink.bytes), digest);
    let wrong = format!("sha256={}", "0".repeat(64));
    let mut sink = Late::new(3, len as u64);
    let load = small(&path).verify(wrong.parse().unwrap());
    let error = load
        .run_through(Ring::new(4 * BLOCK, 4), &mut sink)
        .unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EBADMSG));
    assert_eq!(sink.finished, 1);
}

/// Fails or cancels at its `n`-th slot.
struct Failing {
    left: u32,
    cancel: Option<CancelToken>,
    finished: bool,
}

impl Sink for Failing {
    fn take(&mut self, _: &Slot<'_>) -> Result<()> {
        self.left -= 1;
        match (self.left, &self.cancel) {
            (0, None) => Err(Error::usage("sink", "full")),
            (0, Some(cancel)) => {
                self.left = 1000;
                cancel.cancel();
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn done(&mut self, _: bool) -> Result<bool> {
        Ok(true)
    }

    fn finish(&mut self) -> Result<()> {
        self.finished = true;
        Ok(())
    }
}

#[test]
fn a_failing_sink_ends_the_load_with_its_error() {
    let dir = dir();
    let path = cold(dir.path(), 1_000_000);
    for left in [1, 2, 5, 61] {
        let mut sink = Failing {
            left,
            cancel: None,
            finished: false,
        };
        let load = small(&path);
        let error = load
            .run_through(Ring::new(4 * BLOCK, 4), &mut sink)
            .unwrap_err();
        assert_eq!(error.to_string(), "sink: full");
        assert!(sink.finished);
    }
}

#[test]
fn a_panicking_sink_leaves_no_thread_waiting() {
    let dir = dir();
    let path = cold(dir.path(), 1_000_000);
    let mut sink = Failing {
        left: 0,
        cancel: None,
        finished: false,
    };
    let load = AssertUnwindSafe(|| small(&path).run_through(Ring::new(4 * BLOCK, 4), &mut sink));
    assert!(catch_unwind(load).is_err());
    assert!(sink.finished);
}

/// A progress function panics in one of the threads that read, while others wait for free slots.
#[test]
fn a_panic_in_any_thread_that_reads_reaches_the_caller() {
    /// So slow that the progress function is called several times before the last read.
    struct Slow;
    impl Sink for Slow {
        fn take(&mut self, _: &Slot<'_>) -> Result<()> {
            std::thread::sleep(Duration::from_millis(5));
            Ok(())
        }
        fn done(&mut self, _: bool) -> Result<bool> {
            Ok(true)
        }
        fn finish(&mut self) -> Result<()> {
            Ok(())
        }
    }
    // What is cached is found out per MiB.
    const LEN: u64 = 2 << 20;
    let dir = dir();
    let path = cold(dir.path(), LEN as usize);
    let panics = |method: Method, threads: &'static [&str], cached: Range<u64>| {
        evict(&path);
        let _warm = (!cached.is_empty()).then(|| warm(&path, cached.start, cached.end));
        let load = small(&path).method(method).queue_depth(4);
        let over = Arc::new(AtomicBool::new(false));
        let load = load.progress(move |_| {
            let thread = std::thread::current();
            if threads.contains(&thread.name().unwrap()) {
                over.store(true, Ordering::Relaxed);
                panic!("the caller's own");
            }
            // The next call is in another thread.
            while !over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let (ended, end) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let run = || {
                load.run_through(Ring::new(4 * BLOCK, 4), &mut Slow)
                    .map(drop)
            };
            ended.send(catch_unwind(AssertUnwindSafe(run))).unwrap();
        });
        let end = end.recv_timeout(Duration::from_secs(60));
        let end = end.unwrap_or_else(|_| panic!("{method}, {threads:?}: it hangs"));
        let refused = [libc::ENOSYS, libc::EPERM, libc::EOPNOTSUPP].map(Some);
        if let Ok(Err(error)) = &end
            && refused.contains(&error.raw_os_error())
        {
            return eprintln!("SKIP: {error}");
        }
        let panic = end.unwrap_err();
        let text = panic.downcast_ref::<&str>();
        assert_eq!(text, Some(&"the caller's own"), "{method}, {threads:?}");
    };
    for method in [Method::Uring, Method::Threads, Method::Bounce] {
        panics(method, &["dmafile-read"], 0..0);
    }
    let others: &[_] = &["dmafile-io-1", "dmafile-io-2", "dmafile-io-3"];
    panics(Method::Threads, others, 0..0);
    if small(&path).io(Io::Direct).plan().is_err() {
        return eprintln!("SKIP: no direct I/O here, so only one queue");
    }
    // Both lanes: the other one waits for the slots after those of this one.
    panics(Method::Uring, &["dmafile-read"], LEN / 2..LEN);
    panics(Method::Uring, &["dmafile-copy"], 0..LEN / 2);
}

#[test]
fn a_cancellation_ends_the_load() {
    let dir = dir();
    let path = cold(dir.path(), 1_000_000);
    let token = CancelToken::new();
    let mut sink = Failing {
        left: 3,
        cancel: Some(token.clone()),
        finished: false,
    };
    let load = small(&path).cancel(token);
    let error = load
        .run_through(Ring::new(4 * BLOCK, 4), &mut sink)
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    assert!(sink.finished);
}

#[test]
fn a_file_that_shrinks_during_a_load_is_an_error() {
    struct Cutting<'a>(&'a Path);
    impl Sink for Cutting<'_> {
        fn take(&mut self, _: &Slot<'_>) -> Result<()> {
            let file = std::fs::OpenOptions::new()
                .write(true)
                .open(self.0)
                .unwrap();
            file.set_len(70_000).unwrap();
            Ok(())
        }
        fn done(&mut self, _: bool) -> Result<bool> {
            Ok(true)
        }
        fn finish(&mut self) -> Result<()> {
            Ok(())
        }
    }
    let dir = dir();
    let path = cold(dir.path(), 1_000_000);
    let load = small(&path);
    let error = load
        .run_through(Ring::new(4 * BLOCK, 4), &mut Cutting(&path))
        .unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENODATA), "{error}");
}

#[test]
fn an_invalid_ring_or_method_is_refused_before_the_load() {
    let dir = dir();
    let path = cold(dir.path(), 100_000);
    let run = |load: Load, ring| {
        let mut sink = Late::new(1, 100_000);
        let error = load.run_through(ring, &mut sink).unwrap_err();
        assert_eq!(sink.begun, 0);
        error
    };
    let error = run(small(&path), Ring::new(1 << 20, 1));
    assert_eq!(
        error.to_string(),
        "ring: 1 is out of range: 2 to 1024 slots"
    );
    let error = run(small(&path), Ring::new(8191, 2));
    assert_eq!(error.kind(), ErrorKind::Usage);
    let error = run(small(&path).method(Method::Premap), Ring::default());
    assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP), "{error}");
    let error = run(small(&path).method(Method::CopyFileRange), Ring::default());
    assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP), "{error}");
}

/// Peak memory is the size of the ring and little more, however large the file is.
#[test]
fn memory_use_is_that_of_the_ring() {
    const MIB: u64 = 1 << 20;
    let resident = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status
            .lines()
            .find(|line| line.starts_with("VmHWM"))
            .unwrap();
        line.split_whitespace()
            .nth(1)
            .unwrap()
            .parse::<u64>()
            .unwrap()
            << 10
    };
    if std::env::var_os("DMAFILE_ALONE").is_none() {
        // Other tests of this program use memory too.
        let own = std::env::current_exe().unwrap();
        let alone = std::process::Command::new(own)
            .args(["--exact", "memory_use_is_that_of_the_ring"])
            .env("DMAFILE_ALONE", "1")
            .status();
        assert!(alone.unwrap().success());
        return;
    }
    let dir = dir();
    let path = dir.path().join("file");
    let mut file = std::fs::File::create(&path).unwrap();
    let some = noise(MIB as usize, 1);
    for _ in 0..256 {
        file.write_all(&some).unwrap();
    }
    evict(&path);
    let before = resident();
    let ring = Ring::new(16 * MIB, 8);
    let load = Load::new(&path).pages(Pages::Thp);
    load.run_through(ring, &mut Discard).unwrap();
    let more = resident() - before;
    assert!(more <= ring.bytes + 64 * MIB, "{} MiB", more / MIB);
}

/// A sink can keep half of the slots, less one, even if the file has fewer slots than the ring.
#[test]
fn a_sink_can_keep_slots_while_it_takes_the_next() {
    struct Keeping {
        kept: u32,
        most: u32,
        last: bool,
    }
    impl Sink for Keeping {
        fn take(&mut self, slot: &Slot<'_>) -> Result<()> {
            self.kept += 1;
            self.last = slot.is_last();
            Ok(())
        }
        fn done(&mut self, wait: bool) -> Result<bool> {
            match (self.last || self.kept > self.most, wait) {
                (true, _) => self.kept -= 1,
                (false, true) => return Err(Error::usage("sink", "waits for a slot that is kept")),
                (false, false) => return Ok(false),
            }
            Ok(true)
        }
        fn finish(&mut self) -> Result<()> {
            Ok(())
        }
    }
    let dir = dir();
    for (slots, of_file) in [(2, 1), (8, 4), (8, 7), (8, 8), (8, 9), (8, 30), (9, 5)] {
        let path = cold(dir.path(), of_file * BLOCK as usize - 1);
        let mut sink = Keeping {
            kept: 0,
            most: slots / 2 - 1,
            last: false,
        };
        let ring = Ring::new(u64::from(slots) * BLOCK, slots);
        let run = small(&path).run_through(ring, &mut sink);
        assert!(run.is_ok(), "{of_file} of {slots} slots: {run:?}");
    }
}

/// Another thread takes the bytes and releases slots out of order.
#[test]
fn slots_can_be_released_in_any_order() {
    let dir = dir();
    let len = 700_001;
    let path = cold(dir.path(), len);
    let (mut sink, slots) = deliver(None);
    let got = std::thread::scope(|scope| {
        let load = scope.spawn(|| small(&path).run_through(Ring::new(4 * BLOCK, 4), &mut sink));
        let (mut got, mut held) = (vec![0xee; len], Vec::new());
        while let Some(piece) = slots.next() {
            held.push(piece);
            if held.len() == 2 {
                // The newer one first.
                for piece in held.drain(..).rev() {
                    // SAFETY: the bytes stay until the slot is released.
                    let bytes = unsafe {
                        std::slice::from_raw_parts(piece.address as *const u8, piece.bytes as usize)
                    };
                    got[piece.at as usize..][..bytes.len()].copy_from_slice(bytes);
                    assert!(slots.done(piece.slot));
                    assert!(!slots.done(piece.slot), "it was already released");
                }
            }
        }
        for piece in held {
            // SAFETY: as above.
            let bytes = unsafe {
                std::slice::from_raw_parts(piece.address as *const u8, piece.bytes as usize)
            };
            got[piece.at as usize..][..bytes.len()].copy_from_slice(bytes);
            assert!(slots.done(piece.slot));
        }
        load.join().unwrap().unwrap();
        got
    });
    assert_eq!(bytes_digest(&got), file_digest(&path, 0, len as u64));
    assert!(!slots.done(0));
    assert!(slots.wait(std::time::Duration::ZERO), "no more will come");
}

#[test]
fn a_dropped_receiver_ends_the_load() {
    let dir = dir();
    let path = cold(dir.path(), 700_001);
    for taken in 0..3 {
        let (mut sink, slots) = deliver(None);
        std::thread::scope(|scope| {
            let load = scope.spawn(|| small(&path).run_through(Ring::new(4 * BLOCK, 4), &mut sink));
            for _ in 0..taken {
                assert!(slots.next().is_some());
            }
            drop(slots);
            let error = load.join().unwrap().unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EPIPE), "{error}");
        });
    }
    // A load that fails before it begins.
    let (sink, slots) = deliver(None);
    let mut sink = sink;
    assert!(
        Load::new("/none")
            .run_through(Ring::default(), &mut sink)
            .is_err()
    );
    drop(sink);
    assert_eq!(slots.next(), None);
}
