//! Plans for machines and files that are not available here.

use super::{Plan, range};
use crate::error::Result;
use crate::exporter::module::ModuleFacts;
use crate::facts::target::{DmaBufFacts, ExistingMemory, MemoryTarget};
use crate::facts::{DataRun, File, HeldBack, Host, Layout};
use crate::options::{Allocation, Io, Kind, Method, Pages};
use crate::pin::{PinDevice, Pinned};
use crate::reasons::{About, Reasons};
use crate::request::{How, Request, Selection};
use std::sync::Arc;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn host() -> Host {
    Host {
        page: 4096,
        thp_size: 2 * MIB,
        thp: Some("madvise".to_string()),
        shmem_thp: Some("never".to_string()),
        pool_page: 2 * MIB,
        pool_free: 0,
        available: Some(16 * GIB),
        cgroup: None,
        heaps_are_charged: false,
        memlock: None,
        pins_freely: false,
        cpus: 2,
        node: None,
        uring_refused: None,
        premaps: false,
        uring_disabled: false,
        udmabuf_vmaps_wrong: false,
    }
}

fn file(size: u64) -> File {
    File {
        path: "model".into(),
        size,
        file_system: "ext4".to_string(),
        align: 512,
        align_told: true,
        request: 0,
        held_back: None,
        direct_refused: None,
        drops_behind: false,
        object: false,
        in_memory: false,
        device: Some("nvme0n1".to_string()),
        translated: false,
        premap_refused: Some("this kernel's io_uring has no extended buffer update".to_string()),
    }
}

/// A file on a disk for which memory can be mapped once, with or without an IOMMU.
fn premapping(size: u64, translated: bool) -> File {
    File {
        translated,
        premap_refused: None,
        ..file(size)
    }
}

/// A request, and the target that probing would find for it.
#[derive(Clone, Debug)]
struct Asked {
    kind: Kind,
    pages: Pages,
    exact_size: bool,
    method: Method,
    io: Io,
    offset: u64,
    length: Option<u64>,
    chunk: Option<u64>,
    block: Option<u64>,
    queue_depth: Option<u32>,
    allocation: Allocation,
    check_memory: bool,
    existing: Option<ExistingMemory>,
    dma_buf: Option<DmaBufFacts>,
    ring: Option<u64>,
    copies: bool,
}

impl Default for Asked {
    fn default() -> Self {
        let Request {
            kind,
            pages,
            exact_size,
            how,
            selection: _,
            offset,
            length,
            chunk,
            limit: _,
            allocation,
            check_memory,
        } = Request::default();
        let How {
            method,
            io,
            block,
            queue_depth,
        } = how;
        Self {
            kind,
            pages,
            exact_size,
            method,
            io,
            offset,
            length,
            chunk,
            block,
            queue_depth,
            allocation,
            check_memory,
            existing: None,
            dma_buf: None,
            ring: None,
            copies: false,
        }
    }
}

impl Asked {
    fn request(&self) -> Request {
        Request {
            kind: self.kind.clone(),
            pages: self.pages,
            exact_size: self.exact_size,
            how: How {
                method: self.method,
                io: self.io,
                block: self.block,
                queue_depth: self.queue_depth,
            },
            selection: Selection::Requested,
            offset: self.offset,
            length: self.length,
            chunk: self.chunk,
            limit: None,
            allocation: self.allocation,
            check_memory: self.check_memory,
        }
    }

    fn target(&self) -> MemoryTarget {
        MemoryTarget {
            existing: self.existing,
            dma_buf: self.dma_buf.clone(),
            ring: self.ring,
            copies: self.copies,
            ..MemoryTarget::of(self.kind.clone())
        }
    }
}

fn decide(asked: &Asked, file: &File, host: &Host, layout: &Layout) -> Result<Plan> {
    let log = Reasons::default();
    let plan = super::decide(&asked.request(), file, host, &asked.target(), layout, &log)?;
    Ok(Plan {
        reasons: log.list(),
        ..plan
    })
}

/// A plan for a file that is all data, cached or not.
fn plan_for(asked: &Asked, file: &File, host: &Host, cached: bool) -> Result<Plan> {
    asked.request().check()?;
    let (start, end) = range(&asked.request(), file)?;
    let layout = Layout {
        runs: vec![DataRun { start, end, cached }],
        learned: "told".to_string(),
        wanted: vec![(start, end)],
    };
    decide(asked, file, host, &layout)
}

fn methods_of(plan: &Plan) -> Vec<String> {
    plan.methods.iter().map(ToString::to_string).collect()
}

/// The reason for a choice, or for leaving out a method.
fn why<'p>(plan: &'p Plan, about: About, choice: &str) -> &'p str {
    let found = plan
        .reasons
        .iter()
        .find(|reason| reason.about == about && reason.choice == choice);
    &found
        .unwrap_or_else(|| panic!("no {about} {choice}: {:?}", plan.reasons))
        .why
}

/// An existing GiB of base pages.
fn full_memory() -> ExistingMemory {
    ExistingMemory {
        bytes: GIB,
        address: 0,
        at: None,
        empty: false,
        lacking: 0,
        hugetlb: false,
    }
}

#[test]
fn every_fallback_is_listed_if_everything_works() {
    let plan = plan_for(&Asked::default(), &file(GIB), &host(), false).unwrap();
    let want = [
        "uring direct registered",
        "uring direct",
        "threads direct",
        "threads buffered",
    ];
    assert_eq!(methods_of(&plan), want);
    assert_eq!(
        (plan.pages, plan.allocation),
        (Pages::Thp, Allocation::Ahead)
    );
    assert_eq!(plan.io(), Io::Direct);
}

#[test]
fn auto_uses_base_pages_if_huge_pages_would_fill_holes() {
    // 4 KiB in every 2 MiB of a GiB.
    let runs = (0..512).map(|n| DataRun {
        start: n * 2 * MIB + 4096,
        end: n * 2 * MIB + 8192,
        cached: false,
    });
    let layout = Layout {
        runs: runs.collect(),
        learned: "told".to_string(),
        wanted: vec![(0, GIB)],
    };
    assert_eq!(layout.footprint(0, 4096), 2 * MIB);
    assert_eq!(layout.footprint(0, 2 * MIB), GIB);
    // Two runs on one page count once.
    assert_eq!(layout.footprint(0, 4 * MIB), GIB);
    let plan = |pages, available| {
        let request = Asked {
            pages,
            ..Asked::default()
        };
        let host = Host {
            available: Some(available),
            ..host()
        };
        decide(&request, &file(GIB), &host, &layout)
    };
    let small = plan(Pages::Auto, 2 * MIB).unwrap();
    assert_eq!(small.pages, Pages::Base);
    assert!(why(&small, About::Pages, "base").contains("2048 KiB of data between holes"));
    assert_eq!(plan(Pages::Thp, GIB).unwrap().pages, Pages::Thp);
    // A request for these pages is refused, with what it would need.
    let error = plan(Pages::Thp, GIB - 1).unwrap_err().to_string();
    assert!(error.contains("1073741824 bytes are needed"), "{error}");
}

/// A dma-buf whose mapping cannot be the target of direct reads.
fn unpinnable(method: Method) -> Asked {
    Asked {
        kind: Kind::Heap("system".to_string()),
        method,
        dma_buf: Some(DmaBufFacts {
            unpinnable: Some(rustix::io::Errno::FAULT),
            ..DmaBufFacts::default()
        }),
        ..Asked::default()
    }
}

#[test]
fn a_dma_buf_is_premapped_if_the_kernel_supports_it() {
    let bounces = [
        "bounce direct registered",
        "bounce direct",
        "threads buffered",
    ];
    for translated in [false, true] {
        let file = premapping(GIB, translated);
        let plan = plan_for(&unpinnable(Method::Auto), &file, &host(), false).unwrap();
        assert_eq!(methods_of(&plan)[0], "premap direct");
        assert_eq!(methods_of(&plan)[1..], bounces);
        assert_eq!(
            why(&plan, About::PreMapped, "yes"),
            "heap:system mapped once for nvme0n1; reads go into it without a copy"
        );
        assert_eq!(
            (plan.sizes.block, plan.sizes.queue_depth),
            (Some(4 * MIB), Some(8))
        );
        assert_eq!(plan.allocation, Allocation::InRead);
    }
    let plan = plan_for(&unpinnable(Method::Auto), &file(GIB), &host(), false).unwrap();
    assert_eq!(methods_of(&plan), bounces);
    assert_eq!(
        why(&plan, About::PreMapped, "no"),
        "this kernel's io_uring has no extended buffer update; reading into a registered ring, \
         then copying"
    );
    // A mapped dma-buf pins nothing of this process.
    let poor = Host {
        memlock: Some(0),
        ..host()
    };
    let file = premapping(GIB, false);
    let plan = plan_for(&unpinnable(Method::Auto), &file, &poor, false).unwrap();
    assert_eq!(
        methods_of(&plan),
        ["premap direct", "bounce direct", "threads buffered"]
    );
    // Without direct reads it is not mentioned.
    let buffered = Asked {
        io: Io::Buffered,
        ..unpinnable(Method::Auto)
    };
    let plan = plan_for(&buffered, &file, &host(), false).unwrap();
    assert!(
        plan.reasons
            .iter()
            .all(|reason| reason.about != About::PreMapped)
    );
}

#[test]
fn memory_that_cannot_be_premapped_is_copied_from_a_premapped_ring() {
    let refuses = |asked: Asked| Asked {
        dma_buf: asked.dma_buf.map(|facts| DmaBufFacts {
            premap_refused: Some("its exporter does not map it".to_string()),
            ..facts
        }),
        ..asked
    };
    let apart = |asked: Asked| Asked {
        existing: Some(ExistingMemory {
            at: Some(777),
            ..full_memory()
        }),
        length: Some(MIB),
        ..asked
    };
    for (asked, reason) in [
        (
            refuses(unpinnable(Method::Auto)),
            "its exporter does not map it; ",
        ),
        (apart(unpinnable(Method::Auto)), "differ modulo 512; "),
        (unpinnable(Method::Bounce), ""),
    ] {
        let plan = plan_for(&asked, &premapping(GIB, false), &host(), false).unwrap();
        assert_eq!(methods_of(&plan)[0], "bounce direct registered");
        let why = why(&plan, About::PreMapped, "ring");
        let ring = "the ring is mapped once for nvme0n1, and copied from";
        assert!(why.ends_with(&format!("{reason}{ring}")), "{why}");
    }
}

#[test]
fn windows_of_other_memory_are_premapped_only_with_an_iommu() {
    for kind in [Kind::Anon, Kind::Memfd, Kind::Udmabuf] {
        let asked = Asked {
            kind,
            ..Asked::default()
        };
        let plan = |file: File| plan_for(&asked, &file, &host(), false).unwrap();
        let (with, without) = (plan(premapping(GIB, true)), plan(premapping(GIB, false)));
        assert_eq!(
            methods_of(&with)[..2],
            ["premap direct", "uring direct registered"]
        );
        assert_eq!(
            (with.sizes.window, with.allocation),
            (without.sizes.window, without.allocation)
        );
        assert!(why(&with, About::PreMapped, "yes").contains("a window at a time for nvme0n1"));
        assert_eq!(methods_of(&without)[0], "uring direct registered");
        assert!(why(&without, About::PreMapped, "no").contains("no IOMMU"));
        // On other kernels it is not mentioned.
        let stock = File {
            translated: true,
            ..file(GIB)
        };
        let stock = plan(stock);
        assert_eq!(methods_of(&stock)[0], "uring direct registered");
        assert!(
            stock
                .reasons
                .iter()
                .all(|reason| reason.about != About::PreMapped)
        );
    }
    // Windows are pinned, so the limit on pinned memory applies.
    let asked = Asked::default();
    let poor = Host {
        memlock: Some(8 * MIB),
        ..host()
    };
    let plan = plan_for(&asked, &premapping(GIB, true), &poor, false).unwrap();
    assert_eq!(methods_of(&plan)[0], "uring direct");
    let insist = Asked {
        method: Method::Premap,
        ..asked
    };
    let plan = plan_for(&insist, &premapping(GIB, false), &poor, false).unwrap();
    assert_eq!(methods_of(&plan), ["premap direct"]);
    assert!(plan.sizes.window >= 32 * MIB);
}

#[test]
fn method_premap_is_refused_with_the_reason() {
    let error = plan_for(&unpinnable(Method::Premap), &file(GIB), &host(), false).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP), "{error}");
    let error = error.to_string();
    assert!(error.contains("no extended buffer update"), "{error}");
    let no_uring = Host {
        uring_refused: Some("EPERM".to_string()),
        ..host()
    };
    let asked = unpinnable(Method::Premap);
    let error = plan_for(&asked, &premapping(GIB, false), &no_uring, false).unwrap_err();
    assert!(
        error.to_string().contains("io_uring is refused (EPERM)"),
        "{error}"
    );
}

#[test]
fn windows_of_registered_buffers_do_not_exceed_the_kernel_limit() {
    for (block, depth, window) in [(4 * MIB, 8, 64 * MIB), (64 * MIB, 4096, GIB)] {
        let request = Asked {
            block: Some(block),
            queue_depth: Some(depth),
            ..Asked::default()
        };
        let plan = plan_for(&request, &file(GIB), &host(), false).unwrap();
        assert_eq!(plan.sizes.window, window);
    }
}

#[test]
fn each_missing_feature_removes_its_fallbacks() {
    // Four windows at a time, each with a part of a huge page at either end.
    for (limit, registered) in [(144 * MIB, true), (144 * MIB - 4, false)] {
        let limited = Host {
            memlock: Some(limit),
            ..host()
        };
        let plan = plan_for(&Asked::default(), &file(GIB), &limited, false).unwrap();
        assert_eq!(
            (plan.first().registered, plan.sizes.window > 0),
            (registered, registered)
        );
    }
    let small_memlock = Host {
        memlock: Some(8 * MIB),
        ..host()
    };
    let plan = plan_for(&Asked::default(), &file(GIB), &small_memlock, false).unwrap();
    assert_eq!(methods_of(&plan)[0], "uring direct");
    assert!(why(&plan, About::Not, "uring direct registered").contains("RLIMIT_MEMLOCK"));
    let free = Host {
        pins_freely: true,
        ..small_memlock
    };
    let plan = plan_for(&Asked::default(), &file(GIB), &free, false).unwrap();
    assert_eq!(methods_of(&plan)[0], "uring direct registered");

    let no_uring = Host {
        uring_refused: Some("EPERM".to_string()),
        ..host()
    };
    let plan = plan_for(&Asked::default(), &file(GIB), &no_uring, false).unwrap();
    assert_eq!(methods_of(&plan), ["threads direct", "threads buffered"]);
    assert!(why(&plan, About::Not, "uring direct").contains("EPERM"));

    let refused = Some("O_DIRECT is refused at open (EINVAL)".to_string());
    let no_direct = File {
        direct_refused: refused,
        ..file(GIB)
    };
    let plan = plan_for(&Asked::default(), &no_direct, &host(), false).unwrap();
    assert_eq!(methods_of(&plan), ["threads buffered"]);
    assert!(why(&plan, About::Io, "buffered").contains("EINVAL"));
    let insist = Asked {
        io: Io::Direct,
        ..Asked::default()
    };
    let error = plan_for(&insist, &no_direct, &host(), false).unwrap_err();
    assert!(
        error.to_string().contains("O_DIRECT is refused at open"),
        "{error}"
    );
}

#[test]
fn io_uring_is_not_used_for_files_that_may_be_on_fuse() {
    let on = |name: &str, align_told| File {
        file_system: name.to_string(),
        align_told,
        ..file(GIB)
    };
    for (file, ring) in [
        (on("fuse", false), false),
        (on("overlayfs", false), false),
        (on("overlayfs", true), true),
        (on("0x1234", false), false),
        (on("btrfs", false), true),
        (on("block device", true), true),
    ] {
        let plan = plan_for(&Asked::default(), &file, &host(), false).unwrap();
        assert_eq!(
            plan.first().method == Method::Uring,
            ring,
            "{}",
            file.file_system
        );
        let insist = Asked {
            method: Method::Uring,
            ..Asked::default()
        };
        assert_eq!(plan_for(&insist, &file, &host(), false).is_ok(), ring);
    }
}

#[test]
fn blocks_are_at_least_as_large_as_the_requests_of_a_server() {
    for method in [Method::Uring, Method::Threads, Method::Bounce] {
        for request in [0, MIB, 2 * MIB] {
            let asked = Asked {
                method,
                io: Io::Direct,
                ..Asked::default()
            };
            let file = File {
                request,
                ..file(GIB)
            };
            let plan = plan_for(&asked, &file, &host(), false).unwrap();
            let block = plan.sizes.block.unwrap();
            assert!(block >= request, "{method} {request}: {block}");
        }
    }
}

#[test]
fn a_mount_that_holds_a_load_back_is_one_of_the_reasons() {
    let slow = File {
        held_back: Some(HeldBack {
            why: "why".to_string(),
            remedy: "remedy".to_string(),
        }),
        ..file(GIB)
    };
    for (file, says) in [(slow, vec!["why; remedy"]), (file(GIB), vec![])] {
        let plan = plan_for(&Asked::default(), &file, &host(), false).unwrap();
        let reasons = plan.reasons.iter();
        let own = reasons.filter(|reason| reason.about == About::Mount);
        assert_eq!(own.map(|reason| &*reason.why).collect::<Vec<_>>(), says);
    }
}

#[test]
fn on_btrfs_pages_are_allocated_before_direct_reads() {
    let on = |name: &str| File {
        file_system: name.to_string(),
        ..file(MIB)
    };
    let asked = |io| Asked {
        io,
        ..Asked::default()
    };
    for (name, io, want) in [
        ("btrfs", Io::Direct, Allocation::Ahead),
        ("btrfs", Io::Buffered, Allocation::InRead),
        ("ext4", Io::Direct, Allocation::InRead),
    ] {
        let plan = plan_for(&asked(io), &on(name), &host(), false).unwrap();
        assert_eq!(plan.allocation, want, "{name}, {io}");
    }
}

#[test]
fn a_cached_file_is_copied_by_threads() {
    let plan = plan_for(&Asked::default(), &file(GIB), &host(), true).unwrap();
    assert_eq!(methods_of(&plan), ["threads buffered"]);
    assert_eq!(
        (plan.to_copy, plan.to_read, plan.io()),
        (GIB, 0, Io::Buffered)
    );
}

#[test]
fn auto_selects_the_largest_available_pages() {
    let pages = |request: &Asked, host: &Host, size| {
        plan_for(request, &file(size), host, false).unwrap().pages
    };
    let pool = Host {
        pool_free: GIB,
        ..host()
    };
    assert_eq!(pages(&Asked::default(), &pool, GIB), Pages::Huge);
    assert_eq!(pages(&Asked::default(), &pool, GIB + 1), Pages::Thp);
    // Memory of an exact size cannot end within a huge page.
    let exact = Asked {
        exact_size: true,
        ..Asked::default()
    };
    assert_eq!(pages(&exact, &pool, GIB), Pages::Thp);
    assert_eq!(pages(&Asked::default(), &host(), 4 * MIB), Pages::Base);
    let never = Host {
        thp: Some("never".to_string()),
        ..host()
    };
    let anon = Asked {
        kind: Kind::Anon,
        ..Asked::default()
    };
    assert_eq!(pages(&anon, &never, GIB), Pages::Base);
    let enormous = Host {
        thp_size: 512 * MIB,
        ..host()
    };
    assert_eq!(pages(&Asked::default(), &enormous, GIB), Pages::Base);
    let none = Host {
        thp_size: 0,
        ..host()
    };
    assert_eq!(pages(&Asked::default(), &none, GIB), Pages::Base);
}

#[test]
fn the_pages_of_a_ring_depend_on_its_own_size() {
    let ring = Asked {
        kind: Kind::Anon,
        ring: Some(256 * MIB),
        ..Asked::default()
    };
    let pool = |pool_free| Host {
        pool_free,
        ..host()
    };
    let pages = |size, host: &Host| plan_for(&ring, &file(size), host, false).unwrap().pages;
    assert_eq!(pages(16 * GIB, &pool(256 * MIB)), Pages::Huge);
    assert_eq!(pages(16 * GIB, &pool(254 * MIB)), Pages::Thp);
    // A ring is never larger than the file.
    assert_eq!(pages(7 * MIB, &pool(8 * MIB)), Pages::Huge);
    assert_eq!(pages(4 * MIB, &host()), Pages::Base);
    // It has no holes.
    let layout = Layout {
        runs: vec![DataRun {
            start: 0,
            end: 4096,
            cached: false,
        }],
        learned: "told".to_string(),
        wanted: vec![(0, GIB)],
    };
    let plan = decide(&ring, &file(GIB), &host(), &layout).unwrap();
    assert_eq!(plan.pages, Pages::Thp);
}

#[test]
fn memory_has_the_alignment_of_the_file_offset() {
    for offset in [0, 1, 511, 512, 4096, 4097, 123_456_789] {
        for length in [1, 512, 4096, 1_000_000] {
            let request = Asked {
                offset,
                length: Some(length),
                ..Asked::default()
            };
            let plan = plan_for(&request, &file(GIB), &host(), false).unwrap();
            assert_eq!(plan.place.start % 512, offset % 512);
            assert!(plan.place.start < 4096 && plan.place.writable_to >= plan.place.start + length);
            assert_eq!(plan.place.writable_to % 4096, 0);
        }
    }
}

#[test]
fn a_file_that_does_not_fit_into_memory_is_refused() {
    let little = Host {
        available: Some(GIB),
        ..host()
    };
    assert!(plan_for(&Asked::default(), &file(GIB), &little, false).is_ok());
    let error = plan_for(&Asked::default(), &file(GIB + 1), &little, false).unwrap_err();
    assert!(error.to_string().contains("MemAvailable"), "{error}");
    let limited = Host {
        cgroup: Some((MIB, "/sys/fs/cgroup/memory.max".into())),
        ..host()
    };
    let error = plan_for(&Asked::default(), &file(2 * MIB), &limited, false).unwrap_err();
    assert!(
        error.to_string().contains("/sys/fs/cgroup/memory.max"),
        "{error}"
    );
    // A load of all available memory would be killed for what the kernel needs in addition.
    let limited = Host {
        cgroup: Some((64 * MIB, "/sys/fs/cgroup/memory.max".into())),
        ..host()
    };
    assert!(plan_for(&Asked::default(), &file(61 * MIB), &limited, false).is_ok());
    assert!(plan_for(&Asked::default(), &file(63 * MIB), &limited, false).is_err());
    let insist = Asked {
        check_memory: false,
        ..Asked::default()
    };
    assert!(plan_for(&insist, &file(65 * MIB), &limited, false).is_ok());
}

/// Since Linux 7.0, if the administrator enables it.
#[test]
fn heap_memory_counts_if_the_kernel_charges_it() {
    let mut host = Host {
        cgroup: Some((MIB, "/sys/fs/cgroup/memory.max".into())),
        ..host()
    };
    assert!(plan_for(&of_heap(), &file(2 * MIB), &host, false).is_ok());
    host.heaps_are_charged = true;
    let error = plan_for(&of_heap(), &file(2 * MIB), &host, false).unwrap_err();
    assert!(error.to_string().contains("memory.max"), "{error}");
}

#[test]
fn values_out_of_range_name_the_range() {
    let bad = [
        (
            Asked {
                block: Some(0),
                ..Asked::default()
            },
            "4096 to 67108864",
        ),
        (
            Asked {
                block: Some(65 * MIB),
                ..Asked::default()
            },
            "4096 to 67108864",
        ),
        (
            Asked {
                block: Some(5000),
                ..Asked::default()
            },
            "alignment, 512",
        ),
        (
            Asked {
                queue_depth: Some(0),
                ..Asked::default()
            },
            "1 to 4096",
        ),
        (
            Asked {
                queue_depth: Some(4097),
                ..Asked::default()
            },
            "1 to 4096",
        ),
        (
            Asked {
                chunk: Some(4095),
                ..Asked::default()
            },
            "4096 to",
        ),
        (
            Asked {
                chunk: Some(MIB),
                ..Asked::default()
            },
            "4194304 (a block)",
        ),
        (
            Asked {
                length: Some(0),
                ..Asked::default()
            },
            "1 to",
        ),
    ];
    for (request, range) in bad {
        let error = plan_for(&request, &file(GIB), &host(), false).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Usage, "{error}");
        assert!(
            error.to_string().contains(range),
            "{error} should say {range}"
        );
    }
}

#[test]
fn memory_that_direct_reads_cannot_fill_uses_bounce_buffers() {
    let bounces = [
        "bounce direct registered",
        "bounce direct",
        "threads buffered",
    ];
    let dma_buf = |pins: bool| Asked {
        dma_buf: Some(DmaBufFacts {
            unpinnable: (!pins).then_some(rustix::io::Errno::FAULT),
            ..DmaBufFacts::default()
        }),
        ..Asked::default()
    };
    let plan = plan_for(&dma_buf(false), &file(GIB), &host(), false).unwrap();
    assert_eq!(methods_of(&plan), bounces);
    assert_eq!(plan.allocation, Allocation::InRead);
    assert!(
        plan.sizes.block.unwrap() * u64::from(plan.sizes.queue_depth.unwrap()) <= 8 * MIB,
        "a small ring"
    );
    // If its exporter allows its pages to be pinned, direct reads work.
    let plan = plan_for(&dma_buf(true), &file(GIB), &host(), false).unwrap();
    assert_eq!(methods_of(&plan)[0], "uring direct registered");
    // The caller's memory, with an address that does not match the offset.
    let request = Asked {
        kind: Kind::Caller,
        existing: Some(ExistingMemory {
            bytes: GIB,
            address: 100,
            at: None,
            empty: false,
            lacking: 0,
            hugetlb: false,
        }),
        ..Asked::default()
    };
    let plan = plan_for(&request, &file(GIB), &host(), false).unwrap();
    assert_eq!(methods_of(&plan), bounces);
    // No benefit if all of it is cached, or without direct I/O.
    let plan = plan_for(&dma_buf(false), &file(GIB), &host(), true).unwrap();
    assert_eq!(methods_of(&plan), ["threads buffered"]);
    let refused = File {
        direct_refused: Some("tmpfs".to_string()),
        ..file(GIB)
    };
    let plan = plan_for(&dma_buf(false), &refused, &host(), false).unwrap();
    assert_eq!(methods_of(&plan), ["threads buffered"]);
}

#[test]
fn buffered_reads_by_one_thread_drop_their_pages_if_possible() {
    let refused = |drops_behind| File {
        direct_refused: Some("no".to_string()),
        drops_behind,
        ..file(GIB)
    };
    let small = |io, block| Asked {
        pages: Pages::Base,
        io,
        block,
        ..Asked::default()
    };
    let auto = small(Io::Auto, None);
    let plan = plan_for(&auto, &refused(true), &host(), false).unwrap();
    assert!(plan.tuning.drop_behind);
    assert_eq!(
        (plan.sizes.block, plan.sizes.threads),
        (Some(4 * MIB), Some(1))
    );
    assert_eq!(plan.allocation, Allocation::Ahead);
    assert_eq!(
        why(&plan, About::Cache, "left as it was"),
        "reads leave nothing in the page cache (RWF_DONTCACHE)"
    );
    assert!(why(&plan, About::Method, "threads buffered").contains("one pread after another"));
    // A folio is at most a huge page, and no two blocks may share one.
    let large = Host {
        thp_size: 32 * MIB,
        ..host()
    };
    let plan = plan_for(&auto, &refused(true), &large, false).unwrap();
    assert_eq!(plan.sizes.block, Some(32 * MIB));
    let larger = Host {
        thp_size: 512 * MIB,
        ..host()
    };
    let none = [
        (auto.clone(), refused(false), host()),
        (auto.clone(), refused(true), larger),
        (small(Io::Auto, Some(MIB)), refused(true), host()),
        (
            Asked {
                chunk: Some(MIB),
                ..auto.clone()
            },
            refused(true),
            host(),
        ),
    ];
    for (asked, file, host) in none {
        let plan = plan_for(&asked, &file, &host, false).unwrap();
        assert!(!plan.tuning.drop_behind, "{plan:?}");
        assert_eq!((plan.sizes.block, plan.sizes.threads), (Some(MIB), Some(2)));
        assert_eq!(plan.allocation, Allocation::InRead);
        why(&plan, About::Cache, "filled");
    }
    // Nothing to drop or to decide.
    let in_memory = File {
        in_memory: true,
        ..refused(false)
    };
    for (asked, file, cached) in [
        (auto.clone(), file(GIB), false),
        (auto.clone(), file(GIB), true),
        (auto.clone(), in_memory, false),
        (small(Io::Buffered, None), refused(true), false),
    ] {
        let plan = plan_for(&asked, &file, &host(), cached).unwrap();
        assert!(!plan.tuning.drop_behind, "{plan:?}");
        assert!(!plan.reasons.iter().any(|one| one.about == About::Cache));
    }
}

#[test]
fn a_bounce_ring_fits_into_a_low_pin_limit() {
    let request = |depth| Asked {
        dma_buf: Some(DmaBufFacts {
            unpinnable: Some(rustix::io::Errno::FAULT),
            ..DmaBufFacts::default()
        }),
        queue_depth: depth,
        ..Asked::default()
    };
    let host = Host {
        memlock: Some(8 * MIB),
        ..host()
    };
    let plan = plan_for(&request(None), &file(GIB), &host, false).unwrap();
    assert!(plan.first().registered);
    let plan = plan_for(&request(Some(17)), &file(GIB), &host, false).unwrap();
    assert_eq!(methods_of(&plan)[0], "bounce direct");
    let why = why(&plan, About::Not, "bounce direct registered");
    assert_eq!(
        why,
        "a ring of 8704 KiB exceeds the limit on pinned memory, 8192 KiB (RLIMIT_MEMLOCK)"
    );
}

#[test]
fn requested_direct_reads_into_an_unpinnable_dma_buf_are_refused() {
    for method in [Method::Uring, Method::Threads] {
        let request = Asked {
            dma_buf: Some(DmaBufFacts {
                unpinnable: Some(rustix::io::Errno::FAULT),
                ..DmaBufFacts::default()
            }),
            method,
            io: Io::Direct,
            ..Asked::default()
        };
        let error = plan_for(&request, &file(GIB), &host(), false).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP), "{error}");
        assert!(error.to_string().contains("EFAULT"), "{error}");
    }
}

#[derive(Debug)]
struct NoDevice;

impl PinDevice for NoDevice {
    fn name(&self) -> String {
        "none:0".to_string()
    }

    fn memory(&self) -> String {
        "none-host".to_string()
    }

    fn describe(&self) -> Result<String> {
        unreachable!("only plans are made here")
    }

    fn pin(&self, _: *const u8, _: u64, _: bool) -> Result<Box<dyn Pinned>> {
        unreachable!("only plans are made here")
    }
}

#[test]
fn holes_count_for_memory_that_is_allocated_at_once() {
    let poor = Host {
        available: Some(64 * MIB),
        ..host()
    };
    let sparse = Layout {
        runs: vec![DataRun {
            start: 0,
            end: MIB,
            cached: false,
        }],
        learned: "told".to_string(),
        wanted: vec![(0, GIB)],
    };
    let refused = |kind: Kind| {
        let request = Asked {
            dma_buf: matches!(kind, Kind::Heap(_)).then_some(DmaBufFacts::default()),
            kind,
            ..Asked::default()
        };
        decide(&request, &file(GIB), &poor, &sparse).is_err()
    };
    let kinds = [
        Kind::Anon,
        Kind::Memfd,
        Kind::Udmabuf,
        Kind::Heap("system".to_string()),
        Kind::Pinned(Arc::new(NoDevice)),
    ];
    assert_eq!(kinds.map(refused), [false, false, true, true, true]);
}

#[test]
fn only_the_missing_pages_of_existing_memory_are_counted() {
    let poor = Host {
        available: Some(64 * MIB),
        ..host()
    };
    let plan = |lacking| {
        let request = Asked {
            existing: Some(ExistingMemory {
                bytes: 2 * GIB,
                address: 0,
                at: Some(GIB),
                empty: false,
                lacking,
                hugetlb: false,
            }),
            ..Asked::default()
        };
        plan_for(&request, &file(GIB), &poor, false)
    };
    assert!(plan(2 * GIB).is_err());
    assert!(plan(32 * MIB).is_ok());
    assert!(plan(0).is_ok());
}

#[test]
fn a_bounce_ring_is_limited_whatever_is_requested() {
    let request = Asked {
        dma_buf: Some(DmaBufFacts {
            unpinnable: Some(rustix::io::Errno::FAULT),
            ..DmaBufFacts::default()
        }),
        queue_depth: Some(4096),
        block: Some(64 * MIB),
        ..Asked::default()
    };
    let plan = plan_for(&request, &file(GIB), &host(), false).unwrap();
    assert_eq!(
        (plan.sizes.queue_depth, plan.sizes.window),
        (Some(1), 64 * MIB)
    );
    assert!(why(&plan, About::Depth, "1").contains("64 MiB"));
    assert!(why(&plan, About::Not, "uring direct").contains("EFAULT"));
}

#[test]
fn udmabufs_use_base_pages_if_the_kernel_maps_other_pages_wrongly() {
    let wrong = Host {
        udmabuf_vmaps_wrong: true,
        pool_free: 4 * GIB,
        ..host()
    };
    let pages = |kind, pages| {
        let request = Asked {
            kind,
            pages,
            ..Asked::default()
        };
        plan_for(&request, &file(GIB), &wrong, false).unwrap()
    };
    assert_eq!(pages(Kind::Udmabuf, Pages::Auto).pages, Pages::Base);
    assert_eq!(pages(Kind::Memfd, Pages::Auto).pages, Pages::Huge);
    let asked = pages(Kind::Udmabuf, Pages::Thp);
    assert_eq!(asked.pages, Pages::Thp);
    assert!(why(&asked, About::Pages, "thp").contains("vmap"));
}

/// A request for a dma-buf of dmafile.ko.
fn of_module(kind: Kind) -> Asked {
    let module = ModuleFacts {
        features: 0xf,
        max_buffer: 16 * GIB,
        chunk: 32 * MIB,
        max_chunk: GIB,
        depth: 4,
        align: 4096,
    };
    Asked {
        kind,
        dma_buf: Some(DmaBufFacts {
            module: Some(module),
            ..DmaBufFacts::default()
        }),
        ..Asked::default()
    }
}

#[test]
fn dmafile_ko_fills_only_its_own_dma_bufs() {
    let request = of_module(Kind::Module);
    let plan = plan_for(&request, &file(GIB), &host(), false).unwrap();
    let want = ["module direct", "module buffered", "threads buffered"];
    assert_eq!(methods_of(&plan), want);
    assert!(plan.fused && plan.allocation == Allocation::Ahead);
    assert_eq!(
        (plan.sizes.chunk, plan.sizes.queue_depth),
        (Some(32 * MIB), Some(4))
    );
    assert!(why(&plan, About::Allocation, "ahead").contains("in one call"));
    assert!(why(&plan, About::Io, "direct").contains("0 of 1073741824 bytes are cached"));

    let error = plan_for(&request, &file(17 * GIB), &host(), false).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("up to 17179869184 bytes (EFBIG); "),
        "{error}"
    );

    // An existing one is not allocated.
    let exists = Asked {
        existing: Some(full_memory()),
        ..of_module(Kind::Memfd)
    };
    let plan = plan_for(&exists, &file(GIB), &host(), false).unwrap();
    assert_eq!(methods_of(&plan), want);
    assert!(!plan.fused && plan.allocation == Allocation::InRead);

    // It does not work with other memory.
    let asked = Asked {
        method: Method::Module,
        ..Asked::default()
    };
    let error = plan_for(&asked, &file(GIB), &host(), false).unwrap_err();
    assert!(
        error.to_string().contains("to=module (EOPNOTSUPP)"),
        "{error}"
    );
}

#[test]
fn dmafile_ko_reads_directly_unless_most_bytes_are_cached() {
    let plan = |cached: u64, io| {
        let runs = [(0, cached, true), (cached, GIB, false)];
        let runs = runs.into_iter().filter(|run| run.0 < run.1);
        let layout = Layout {
            runs: runs
                .map(|(start, end, cached)| DataRun { start, end, cached })
                .collect(),
            learned: "told".to_string(),
            wanted: vec![(0, GIB)],
        };
        let request = Asked {
            io,
            ..of_module(Kind::Module)
        };
        decide(&request, &file(GIB), &host(), &layout).unwrap()
    };
    let mostly = plan(600 * MIB, Io::Auto);
    assert_eq!(methods_of(&mostly), ["module buffered", "threads buffered"]);
    assert!(
        why(&mostly, About::Io, "buffered").contains("629145600 of 1073741824 bytes are cached")
    );
    let hardly = plan(400 * MIB, Io::Auto);
    assert_eq!(hardly.first().to_string(), "module direct");
    assert!(mostly.fused && hardly.fused);
    assert_eq!((mostly.to_copy, mostly.to_read), (600 * MIB, 424 * MIB));
    assert_eq!((hardly.to_copy, hardly.to_read), (0, GIB));
    assert_eq!((mostly.io(), hardly.io()), (Io::Buffered, Io::Direct));
    assert_eq!(methods_of(&plan(GIB, Io::Direct)), ["module direct"]);
    assert_eq!(plan(GIB, Io::Auto).io(), Io::Buffered);
}

#[test]
fn a_file_with_holes_is_allocated_before_it_is_read() {
    let request = of_module(Kind::Module);
    let run = |start, end| DataRun {
        start,
        end,
        cached: false,
    };
    let plan = |runs| {
        let layout = Layout {
            runs,
            learned: "told".to_string(),
            wanted: vec![(0, GIB)],
        };
        decide(&request, &file(GIB), &host(), &layout).unwrap()
    };
    for runs in [
        vec![run(MIB, GIB)],
        vec![run(0, MIB)],
        vec![run(0, MIB), run(2 * MIB, GIB)],
    ] {
        assert!(!plan(runs).fused);
    }
    assert!(plan(vec![run(0, MIB), run(MIB, GIB)]).fused);
}

/// A request for a buffer of a heap whose kernel reads files into new ones.
fn of_heap() -> Asked {
    Asked {
        kind: Kind::Heap("system".to_string()),
        dma_buf: Some(DmaBufFacts {
            unpinnable: Some(rustix::io::Errno::FAULT),
            heap_reads: true,
            ..DmaBufFacts::default()
        }),
        ..Asked::default()
    }
}

#[test]
fn a_heap_that_supports_it_reads_whole_files() {
    let plan = plan_for(&of_heap(), &file(GIB), &host(), false).unwrap();
    let want = [
        "heap-read direct",
        "heap-read buffered",
        "bounce direct registered",
        "bounce direct",
        "threads buffered",
    ];
    assert_eq!(methods_of(&plan), want);
    assert!(plan.fused && plan.allocation == Allocation::Ahead);
    assert!(why(&plan, About::Allocation, "ahead").contains("the heap allocates and reads"));
    let cached = plan_for(&of_heap(), &file(GIB), &host(), true).unwrap();
    assert_eq!(cached.first().to_string(), "heap-read buffered");

    // A part of a file, or another order of allocation, uses the other method.
    let part = Asked {
        offset: 4096,
        ..of_heap()
    };
    let before = Asked {
        allocation: Allocation::Before,
        ..of_heap()
    };
    for request in [part, before] {
        let plan = plan_for(&request, &file(GIB), &host(), false).unwrap();
        assert_eq!(plan.first().method, Method::Bounce);
        assert!(!plan.fused);
        let asked = Asked {
            method: Method::HeapRead,
            ..request
        };
        let error = plan_for(&asked, &file(GIB), &host(), false).unwrap_err();
        assert!(error.to_string().contains("whole files"), "{error}");
    }
    let asked = Asked {
        method: Method::HeapRead,
        ..Asked::default()
    };
    let error = plan_for(&asked, &file(GIB), &host(), false).unwrap_err();
    assert!(error.to_string().contains("to=heap:NAME"), "{error}");
}

#[test]
fn copy_file_range_is_used_if_the_kernel_supports_it() {
    let there = |copies| Asked {
        copies,
        existing: Some(full_memory()),
        ..Asked::default()
    };
    let plan = plan_for(&there(true), &file(GIB), &host(), false).unwrap();
    let want = [
        "copy-file-range direct",
        "copy-file-range buffered",
        "threads buffered",
    ];
    assert_eq!(methods_of(&plan), want);
    assert_eq!(plan.sizes.block, Some(64 << 20));
    let cached = plan_for(&there(true), &file(GIB), &host(), true).unwrap();
    assert_eq!(cached.first().to_string(), "copy-file-range buffered");
    let without = plan_for(&there(false), &file(GIB), &host(), false).unwrap();
    assert_eq!(without.first().method, Method::Uring);

    // If requested, it works with any memory that has a descriptor.
    let asked = |kind| Asked {
        method: Method::CopyFileRange,
        kind,
        ..Asked::default()
    };
    let plan = plan_for(&asked(Kind::Memfd), &file(GIB), &host(), false).unwrap();
    assert_eq!(plan.first().to_string(), "copy-file-range direct");
    let error = plan_for(&asked(Kind::Anon), &file(GIB), &host(), false).unwrap_err();
    assert!(error.to_string().contains("no descriptor"), "{error}");
}

#[test]
fn a_machine_with_more_cpus_copies_and_allocates_with_more_threads() {
    for (cpus, cached, copiers, allocators) in [
        (1, true, 1, 1),
        (2, true, 2, 1),
        (4, true, 4, 1),
        (6, true, 4, 2),
        (12, true, 6, 4),
        (16, true, 8, 4),
        (256, true, 8, 4),
        (1, false, 1, 1),
        (256, false, 8, 4),
    ] {
        let host = Host { cpus, ..host() };
        let plan = plan_for(&Asked::default(), &file(GIB), &host, cached).unwrap();
        let (tuning, of) = (plan.tuning, format!("{cpus} CPUs, cached: {cached}"));
        assert_eq!(
            (tuning.threads, tuning.allocators),
            (copiers, allocators),
            "{of}"
        );
    }
}

/// The sizes in a plan: block, depth, chunk, alignment, threads that copy and that allocate.
fn sizes(plan: &Plan) -> String {
    let json = serde_json::to_value(plan).unwrap();
    let keys = [
        "block",
        "queue_depth",
        "chunk",
        "align",
        "threads",
        "allocators",
    ];
    let mib = |value: &serde_json::Value| match value.as_u64() {
        Some(bytes) if bytes >= MIB => format!("{}M", bytes / MIB),
        _ => value.to_string(),
    };
    keys.map(|key| mib(&json[key])).join(" ")
}

#[test]
fn a_plan_has_only_the_sizes_that_will_be_used() {
    let asked = |method, io, allocation| Asked {
        method,
        io,
        allocation,
        queue_depth: Some(100),
        ..Asked::default()
    };
    let (auto, in_read) = (Allocation::Auto, Allocation::InRead);
    let with = |dma_buf, asked: Asked| Asked { dma_buf, ..asked };
    let heap = Asked {
        kind: Kind::Heap("system".to_string()),
        ..asked(Method::HeapRead, Io::Auto, auto)
    };
    let heap_reads = DmaBufFacts {
        heap_reads: true,
        ..DmaBufFacts::default()
    };
    let copies = Asked {
        copies: true,
        existing: Some(full_memory()),
        ..asked(Method::CopyFileRange, Io::Auto, auto)
    };
    for (asked, cached, want) in [
        (Asked::default(), false, "4M 8 128M 512 null 2"),
        (Asked::default(), true, "1M 2 128M null 2 1"),
        // More threads would queue for the same disk.
        (
            asked(Method::Threads, Io::Direct, auto),
            false,
            "4M 64 128M 512 null 2",
        ),
        (
            asked(Method::Threads, Io::Buffered, in_read),
            false,
            "1M 64 null null 64 null",
        ),
        (
            asked(Method::Threads, Io::Direct, in_read),
            false,
            "4M 64 null 512 null null",
        ),
        (
            asked(Method::Threads, Io::Direct, Allocation::Before),
            false,
            "4M 64 null 512 null 2",
        ),
        (
            asked(Method::Uring, Io::Buffered, in_read),
            false,
            "1M 100 null null null null",
        ),
        // All of it is in the page cache, so the ring has nothing to do.
        (
            asked(Method::Uring, Io::Auto, in_read),
            true,
            "4M 64 null null 64 null",
        ),
        (copies, false, "64M 1 null 512 null null"),
        (of_module(Kind::Module), false, "null 4 32M 512 null null"),
        (
            with(Some(heap_reads), heap),
            false,
            "null null null 512 null null",
        ),
    ] {
        let plan = plan_for(&asked, &file(GIB), &host(), cached).unwrap();
        assert_eq!(sizes(&plan), want, "{asked:?}, cached: {cached}");
    }
}

#[test]
fn an_object_is_fetched_by_many_readers_into_memory_that_is_allocated_meanwhile() {
    let object = File {
        object: true,
        align: 1,
        direct_refused: Some("it is an object".to_string()),
        ..file(GIB)
    };
    for kind in [Kind::Memfd, Kind::Anon, Kind::Udmabuf] {
        let asked = Asked {
            kind,
            ..Asked::default()
        };
        let plan = plan_for(&asked, &object, &host(), false).unwrap();
        assert_eq!(methods_of(&plan), ["fetch"]);
        assert_eq!(plan.allocation, Allocation::Ahead);
        assert_eq!(plan.sizes.block, Some(super::FETCH_BLOCK));
        assert_eq!(plan.sizes.queue_depth, Some(super::FETCH_DEPTH));
    }
}
