//! Loads through a ring that is made of pages of the hugetlb pool.
//!
//! Only one test, because it changes the pool, which all loads on this machine share.

use dmafile::{CopyTo, Load, Memory, Pages, Result, Ring, Sink, Slot};
use dmafile_testkit::{bytes_digest, cold, default_huge_page, file_digest};
use std::fs::{self, File};

const POOL: &str = "/proc/sys/vm/nr_hugepages";
const MIB: u64 = 1 << 20;

/// More pages in the pool, until it is dropped. Until then, no test of the command that relies on
/// the pool runs, and no load of another test.
struct Grown {
    before: u64,
    _alone: File,
}

impl Grown {
    /// None without permission, or if memory is too fragmented.
    fn by(pages: u64) -> Option<Self> {
        let alone = File::open(POOL).ok()?;
        rustix::fs::flock(&alone, rustix::fs::FlockOperation::LockExclusive).unwrap();
        let before = pool();
        fs::write(POOL, (before + pages).to_string()).ok()?;
        let grown = Self {
            before,
            _alone: alone,
        };
        (pool() == before + pages).then_some(grown)
    }
}

impl Drop for Grown {
    fn drop(&mut self) {
        fs::write(POOL, self.before.to_string()).unwrap();
    }
}

fn pool() -> u64 {
    fs::read_to_string(POOL).unwrap().trim().parse().unwrap()
}

/// Copies the bytes, and remembers the size of the ring.
struct Copies<'m> {
    to: CopyTo<'m>,
    ring: u64,
}

impl Sink for Copies<'_> {
    fn begin(&mut self, ring: Memory<'_>) -> Result<()> {
        self.ring = ring.len();
        Ok(())
    }

    fn take(&mut self, slot: &Slot<'_>) -> Result<()> {
        self.to.take(slot)
    }

    fn done(&mut self, wait: bool) -> Result<bool> {
        self.to.done(wait)
    }

    fn finish(&mut self) -> Result<()> {
        self.to.finish()
    }
}

#[test]
fn a_ring_on_hugetlb_pages_has_its_own_size() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let Some(grown) = Grown::by(8) else {
        return eprintln!("SKIP: the pool of huge pages cannot be grown");
    };
    if default_huge_page() != 2 * MIB {
        return eprintln!("SKIP: huge pages of another size than 2 MiB");
    }
    let len = 40 * MIB + 5;
    let path = cold(dir.path(), len as usize);
    let loaded = |load: Load, ring: Ring, len: u64| {
        let mut bytes = vec![0xee; len as usize];
        let mut sink = Copies {
            to: CopyTo::new(&mut bytes, 0),
            ring: 0,
        };
        let report = load.run_through(ring, &mut sink).unwrap();
        let size = sink.ring;
        assert_eq!(bytes_digest(&bytes), file_digest(&path, 0, len), "{ring:?}");
        (report, size)
    };
    let run = |load: Load, ring: Ring| loaded(load, ring, len);
    let load = || Load::new(&path).block(MIB);
    // The last page of the pool is not used completely.
    for slots in [3, 4, 5] {
        let ring = Ring::new(u64::from(slots) * 3 * MIB, slots);
        let (report, bytes) = run(load().pages(Pages::Huge), ring);
        assert_eq!((report.pages.as_str(), bytes), ("huge", ring.bytes));
    }
    // The file needs less than the ring.
    let half = 5 * MIB + 1;
    let page = rustix::param::page_size() as u64;
    let (report, bytes) = loaded(
        load().length(half).pages(Pages::Huge),
        Ring::new(12 * MIB, 4),
        half,
    );
    assert_eq!((report.pages.as_str(), bytes), ("huge", 5 * MIB + page));
    // The pool has room for a ring, although not for the file.
    let (report, _) = run(load(), Ring::new(16 * MIB, 4));
    if grown.before == 0 {
        assert_eq!(report.pages, "huge");
    }
    // A slot is at least a block: this ring is larger than requested, and than the pool.
    if grown.before == 0 {
        let (report, bytes) = run(load().block(9 * MIB), Ring::new(16 * MIB, 2));
        assert_eq!(bytes, 18 * MIB);
        assert_ne!(report.pages, "huge");
        let why = |reason: &dmafile::Reason| reason.why.contains("no hugetlb pages: ");
        assert!(report.reasons.iter().any(why), "{:?}", report.reasons);
    }
    drop(grown);
}
