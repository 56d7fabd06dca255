//! The methods that can work here, in the order in which they are tried.

use super::Attempt;
use super::tuning::{DIRECT_BLOCK, DIRECT_DEPTH};
use crate::error::{Error, Result, errno_name};
use crate::facts::target::MemoryTarget;
use crate::facts::{File, Host};
use crate::message::{Message, Opt, message};
use crate::options::{Io, Kind, Method, Pages};
use crate::reasons::Reasons;
use crate::request::Request;

/// Registered windows in turn: one being read, one being filled, one being emptied.
pub(crate) const WINDOWS: u64 = 3;
/// Windows that are pinned at the same time: the kernel pins a new one before it releases the old one.
const PINNED: u64 = WINDOWS + 1;
/// The size of a window, unless more is in flight: large enough to be worth a registration.
const WINDOW: u64 = 64 << 20;
/// The largest buffer that io_uring registers (io_uring_register(2)).
const LARGEST_WINDOW: u64 = 1 << 30;

/// Bytes that the limit on pinned memory must allow for registered buffers on pages of `page` bytes, with
/// the default block size and queue depth.
pub(crate) fn registered_need(page: u64) -> u64 {
    (DIRECT_BLOCK * u64::from(DIRECT_DEPTH) + 2 * page) * PINNED
}

/// Whether direct reads can go to the final addresses of the bytes, the first of which is byte `start`.
fn landing(target: &MemoryTarget, file: &File, start: u64) -> Result<(), Message> {
    if let Some(errno) = target.dma_buf.as_ref().and_then(|facts| facts.unpinnable) {
        let errno = errno_name(errno.raw_os_error());
        return Err(format!("the mapping of this dma-buf cannot be pinned ({errno})").into());
    }
    congruent(target, file, start)
}

/// Whether whole blocks of the file can be read to the final place of their bytes.
fn congruent(target: &MemoryTarget, file: &File, start: u64) -> Result<(), Message> {
    match target.existing {
        Some(memory)
            if memory.address.wrapping_add(memory.at.unwrap_or(0)) % file.align
                != start % file.align =>
        {
            Err(message![
                "the memory's address and ",
                Opt::Offset,
                format!(" differ modulo {}", file.align),
            ])
        }
        _ => Ok(()),
    }
}

/// What to read from a file.
#[derive(Clone, Copy)]
pub(super) struct WantedRange {
    /// The first byte.
    pub start: u64,
    /// Bytes in the page cache.
    pub to_copy: u64,
    /// Bytes not in the page cache.
    pub to_read: u64,
    /// It is the whole file, without a hole, and memory may be allocated during the read.
    pub whole: bool,
    /// Size of the target memory in bytes.
    pub capacity: u64,
}

/// The methods to try, in order, with the reasons for those left out; and why memory is not mapped once, if
/// that would have been one.
pub(super) fn methods(
    request: &Request,
    file: &File,
    host: &Host,
    target: &MemoryTarget,
    wanted: WantedRange,
    log: &Reasons,
) -> Result<(Vec<Attempt>, Option<Message>)> {
    let WantedRange {
        start,
        to_copy,
        to_read,
        whole,
        capacity: _,
    } = wanted;
    let landing = landing(target, file, start);
    let attempt = |method, direct, registered| Attempt {
        method,
        direct,
        registered,
    };
    let uring = [
        attempt(Method::Uring, true, true),
        attempt(Method::Uring, true, false),
    ];
    // Bytes are copied from where they were read: the blocks of a ring are registered, those of a pool are
    // not.
    let bounce = [
        attempt(Method::Bounce, true, true),
        attempt(Method::Bounce, true, false),
    ];
    let premap = attempt(Method::Premap, true, true);
    // A dma-buf's pages can be accessed through its mapping, or by a device that it is mapped for. Other
    // memory is accessed by its pages anyway, and each is read into only once: mapping windows in advance
    // pays only if an IOMMU makes many small mappings expensive (kernel/docs/series.md).
    let pays = target.dma_buf.is_some() || (file.translated && file.premap_refused.is_none());
    let mapped = pays.then_some(premap);
    // The I/O mode that is better for most of the bytes.
    let in_one_call = |method| match request.io == Io::Auto && to_copy > to_read {
        true => vec![attempt(method, false, false)],
        false => vec![attempt(method, true, false), attempt(method, false, false)],
    };
    let asked = request.method;
    let all: Vec<Attempt> = match asked {
        Method::Auto if target.module().is_some() => {
            let last = attempt(Method::Threads, false, false);
            let module = in_one_call(Method::Module);
            module.into_iter().chain([last]).collect()
        }
        Method::Auto if target.copies => {
            let last = attempt(Method::Threads, false, false);
            let copies = in_one_call(Method::CopyFileRange);
            let mapped = target.dma_buf.is_some() && to_copy <= to_read;
            let mapped = mapped.then_some(premap);
            mapped.into_iter().chain(copies).chain([last]).collect()
        }
        // The fallbacks if the buffer could not be created that way.
        Method::Auto if target.heap_reads() && whole => {
            let heap = in_one_call(Method::HeapRead);
            let direct = [premap, bounce[0], bounce[1]].into_iter();
            let last = [attempt(Method::Threads, false, false)];
            heap.into_iter().chain(direct).chain(last).collect()
        }
        Method::Module | Method::HeapRead | Method::CopyFileRange => in_one_call(asked),
        Method::Auto => match (&landing, request.io) {
            (Err(why), Io::Auto | Io::Direct) if file.direct_refused.is_none() => {
                log.add("not", uring[1], why.clone());
                let last = [bounce[0], bounce[1], attempt(Method::Threads, false, false)];
                mapped.into_iter().chain(last).collect()
            }
            _ => {
                let last = [
                    uring[0],
                    uring[1],
                    attempt(Method::Threads, true, false),
                    attempt(Method::Threads, false, false),
                ];
                mapped.into_iter().chain(last).collect()
            }
        },
        Method::Premap => vec![premap],
        Method::Uring => vec![uring[0], uring[1], attempt(Method::Uring, false, false)],
        Method::Threads => vec![attempt(asked, true, false), attempt(asked, false, false)],
        Method::Bounce if request.io == Io::Buffered => vec![attempt(asked, false, false)],
        Method::Bounce => vec![bounce[0], bounce[1], attempt(Method::Threads, false, false)],
    };
    let by_others = target.module().is_some() || target.copies || (target.heap_reads() && whole);
    if request.io == Io::Auto && asked == Method::Auto && to_read == 0 && !by_others {
        // The disk has nothing to do.
        return Ok((vec![attempt(Method::Threads, false, false)], None));
    }
    let (mut left_out, mut not_mapped) = (None, None);
    let mut kept = Vec::new();
    for attempt in all {
        let why = match (request.io, attempt.direct) {
            (Io::Direct, false) | (Io::Buffered, true) => continue,
            (_, true) => match &file.direct_refused {
                Some(why) => Err(Message::from(why.as_str())),
                None if attempt.method == Method::Premap => congruent(target, file, start),
                None if !attempt.lands_whole() => Ok(()),
                None => landing.clone(),
            },
            _ => Ok(()),
        }
        .and_then(
            |()| match no_uring(host, &file.file_system, file.align_told) {
                Some(why) if attempt.registered || attempt.method == Method::Uring => {
                    Err(why.into())
                }
                _ if attempt.method == Method::HeapRead && target.heap_reads() && !whole => {
                    Err("a heap reads whole files, without holes, while it allocates".into())
                }
                _ if attempt.method == Method::Premap => maps_once(file, target),
                _ => serves(attempt, target),
            },
        );
        match why {
            Ok(()) => kept.push(attempt),
            Err(why) => {
                // It is reported separately.
                if attempt.method != Method::Premap {
                    log.add("not", attempt, why.clone());
                } else {
                    not_mapped = Some(why.clone());
                }
                left_out.get_or_insert((attempt, why));
            }
        }
    }
    if kept.is_empty() {
        let (attempt, why) = left_out.unwrap_or((
            attempt(asked, false, false),
            message!["no method supports this I/O mode (", Opt::Io, ")"],
        ));
        let first = match attempt.method {
            Method::Uring if host.uring_refused.is_some() => {
                format!("{}, or ", host.uring_remedy())
            }
            _ => String::new(),
        };
        let remedy = message![
            first,
            "leave ",
            Opt::Method,
            " and ",
            Opt::Io,
            " to auto, or see `dmafile explain`",
        ];
        return Err(Error::new("cannot load like this", why)
            .at(format!("{attempt} to {}", target.kind))
            .with_errno(rustix::io::Errno::OPNOTSUPP)
            .with_remedy(remedy));
    }
    Ok((kept, not_mapped))
}

/// Whether the memory can be DMA-mapped for the disk once; otherwise why not.
fn maps_once(file: &File, target: &MemoryTarget) -> Result<(), Message> {
    let of_dma_buf = target.dma_buf.as_ref();
    let refused = file.premap_refused.as_ref();
    let refused = refused.or_else(|| of_dma_buf?.premap_refused.as_ref());
    refused.map_or(Ok(()), |why| Err(why.as_str().into()))
}

/// Reports whether memory is mapped once, and why not if that would make a difference.
pub(super) fn describe_mapping(
    methods: &[Attempt],
    refused: Option<Message>,
    file: &File,
    target: &MemoryTarget,
    log: &Reasons,
) {
    let first = methods[0];
    let device = file.device.as_deref().unwrap_or("the disk");
    let possible = file.premap_refused.is_none();
    let (choice, why) = match (first.method, refused) {
        (Method::Premap, _) => {
            let how = match target.dma_buf {
                Some(_) => "mapped once",
                // The memfd under a udmabuf, which is created when all pages are present.
                None => "mapped a window at a time",
            };
            let why = format!(
                "{} {how} for {device}; reads go into it without a copy",
                target.kind
            );
            ("yes", why.into())
        }
        (Method::Bounce, refused) if first.registered && possible => {
            let why = format!("the ring is mapped once for {device}, and copied from");
            let why = match refused {
                Some(refused) => message![refused, "; ", why],
                None => why.into(),
            };
            ("ring", why)
        }
        (Method::Bounce, Some(why)) if first.registered => (
            "no",
            message![why, "; reading into a registered ring, then copying"],
        ),
        (Method::Bounce, Some(why)) => ("no", message![why, "; reading into a ring, then copying"]),
        (_, Some(why)) => ("no", why),
        // The driver maps the same pages, and as often.
        (Method::Uring, None) if first.registered && possible => (
            "no",
            "there is no IOMMU to make mappings expensive, and each window is read into once"
                .into(),
        ),
        _ => return,
    };
    log.add("pre-mapped", choice, why);
}

/// Why io_uring cannot read or write a file of this file system here; None if it can.
pub(crate) fn no_uring(host: &Host, file_system: &str, align_told: bool) -> Option<String> {
    if let Some(errno) = &host.uring_refused {
        return Some(format!("io_uring is refused ({errno})"));
    }
    // For a FUSE file with FOPEN_DIRECT_IO, io_uring continues a short read by itself, but at the wrong
    // offset: fuse_direct_IO does not advance ki_pos (seen with Linux 6.18). The result would be wrong
    // bytes without an error, through a stacked file system, too. Such a file system is trusted only if the
    // real file beneath it reports its alignment, which FUSE never does.
    let stacked = file_system == "overlayfs" || file_system.starts_with("0x");
    let what = match file_system {
        "fuse" => "a FUSE file",
        _ if stacked && !align_told => "a file that may be on FUSE",
        _ => return None,
    };
    Some(format!(
        "io_uring may repeat bytes of {what} after a short read"
    ))
}

/// The size of a window of registered buffers; removes the registered method if the limit on pinned memory
/// is too low for windows that hold the reads in flight.
pub(super) fn window(
    methods: &mut Vec<Attempt>,
    host: &Host,
    target: &MemoryTarget,
    pages: Pages,
    block: u64,
    depth: u32,
    log: &Reasons,
) -> u64 {
    // A mapped dma-buf pins nothing of this process: its exporter has charged it.
    let pins = |attempt: &&Attempt| {
        let mapped = attempt.method == Method::Premap && target.dma_buf.is_some();
        attempt.registered && !mapped
    };
    let Some(registered) = methods.iter().find(pins).copied() else {
        return 0;
    };
    // A page that is partly in a window counts completely, at either end.
    let (windows, margin) = match (registered.method, pages) {
        // A separate ring, made of whole pages.
        (Method::Bounce, _) => (1, 0),
        (_, Pages::Base) => (PINNED, 2 * host.page),
        // Existing memory may have them, too.
        (_, Pages::Thp | Pages::Auto) => (PINNED, 2 * host.thp_size.max(host.page)),
        (_, Pages::Huge) => (PINNED, 2 * host.pool_page.max(host.page)),
    };
    // One window must hold what is in flight; otherwise reads would wait for registrations.
    let in_flight = block * u64::from(depth);
    let limit = host.pin_limit();
    let instead = methods.iter().any(|attempt| !pins(&attempt));
    let pinned = PinnedBytes {
        windows,
        in_flight,
        margin,
    };
    if let (Some(why), true) = (pinned.exceeds(limit), instead) {
        methods.retain(|attempt| !pins(&attempt));
        log.add("not", registered.to_string(), why);
        return 0;
    }
    match registered.method {
        Method::Bounce => in_flight,
        // If there is no other method, try: the kernel decides.
        _ => pinned.window(limit),
    }
}

/// What registered buffers pin. Sizes are in bytes.
#[derive(Clone, Copy)]
pub(crate) struct PinnedBytes {
    /// Number of windows that exist at once.
    pub windows: u64,
    /// Bytes in flight, which one window must hold.
    pub in_flight: u64,
    /// What partly covered pages add to a window.
    pub margin: u64,
}

impl PinnedBytes {
    /// For windows of memory on pages of `page` bytes.
    pub(crate) fn windows(in_flight: u64, page: u64) -> Self {
        Self {
            windows: PINNED,
            in_flight,
            margin: 2 * page,
        }
    }

    /// For one ring of whole pages.
    pub(crate) fn ring(in_flight: u64) -> Self {
        Self {
            windows: 1,
            in_flight,
            margin: 0,
        }
    }

    /// The maximum size of a window.
    fn most(self, limit: u64) -> u64 {
        (limit / self.windows).saturating_sub(self.margin)
    }

    /// Why it cannot be pinned under this limit; None if it can.
    pub(crate) fn exceeds(self, limit: u64) -> Option<String> {
        if self.in_flight <= self.most(limit) {
            return None;
        }
        let each = (self.in_flight + self.margin) >> 10;
        let what = match self.windows {
            1 => format!("a ring of {each} KiB exceeds"),
            windows => format!("{windows} windows of {each} KiB exceed"),
        };
        Some(format!(
            "{what} the limit on pinned memory, {} KiB (RLIMIT_MEMLOCK)",
            limit >> 10
        ))
    }

    /// The size of a window.
    pub(crate) fn window(self, limit: u64) -> u64 {
        let usual = self.in_flight.clamp(WINDOW, LARGEST_WINDOW);
        self.most(limit).max(self.in_flight).min(usual)
    }
}

/// Whether a method works with a kind of memory and an I/O mode at all; otherwise why not.
fn serves(attempt: Attempt, target: &MemoryTarget) -> Result<(), Message> {
    match attempt.method {
        Method::Bounce if !attempt.direct => {
            Err("reads through the page cache need no bounce ring".into())
        }
        Method::CopyFileRange if matches!(target.kind, Kind::Anon | Kind::Caller) => {
            Err("there is no descriptor to copy into".into())
        }
        Method::Module if target.module().is_none() => Err(message![
            "dmafile.ko moves bytes into its own dma-bufs only: ",
            Opt::To.set(Kind::Module)
        ]),
        Method::HeapRead if !target.heap_reads() => Err(message![
            "a heap only reads files into buffers that it allocates, on a kernel that has \
             DMA_HEAP_ALLOC_AND_READ_FILE: ",
            Opt::To.set("heap:NAME"),
        ]),
        _ => Ok(()),
    }
}

/// The reason for choosing a method.
pub(super) fn describe(attempt: Attempt, asked: Method, alone: bool) -> String {
    let what = match (attempt.method, attempt.direct, attempt.registered) {
        (Method::Uring, true, true) => "the disk writes into registered buffers, no copy",
        (Method::Uring, true, false) => "the disk writes into the buffer, no copy",
        (Method::Uring, false, _) => "io_uring's workers copy from the page cache",
        (Method::Threads, true, _) => "a pool of direct preads, no copy",
        (Method::Threads, false, _) if alone => {
            "one pread after another, copied from the page cache"
        }
        (Method::Threads, false, _) => "a pool of preads, copied from the page cache",
        (Method::Premap, ..) => "the disk writes into memory that is mapped for it once, no copy",
        (Method::Bounce, _, true) => "the disk writes into a registered ring, one copy from there",
        (Method::Bounce, ..) => "a pool of direct preads, one copy from there",
        (Method::Module | Method::CopyFileRange, true, _) => {
            "the disk writes into the buffer's own pages, in one call"
        }
        (Method::Module | Method::HeapRead | Method::CopyFileRange, false, _) => {
            "the kernel copies from the page cache into the buffer's own pages"
        }
        (Method::HeapRead, true, _) => "the heap lets the disk write into the buffer's pages",
        (Method::Auto, ..) => "",
    };
    if asked == Method::Auto {
        format!("the first method that works here: {what}")
    } else {
        format!("requested: {what}")
    }
}
