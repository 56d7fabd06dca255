//! The methods of a load: what file, memory and kernel allow.

use super::methods::{self, MemoryFacts, Need};
use super::pinned::PinnedBytes;
use super::{Attempt, pinned};
use crate::error::{Result, Verb, errno_name};
use crate::facts::target::MemoryTarget;
use crate::facts::{File, Host};
use crate::message::{Message, Opt, message};
use crate::options::{Io, Kind, Method, Pages};
use crate::reasons::{About, Reasons};
use crate::request::Request;

/// True if direct reads can go to the final addresses of the bytes, the first of which is byte `start`.
fn landing(target: &MemoryTarget, file: &File, start: u64) -> Result<(), Message> {
    if let Some(errno) = target.dma_buf.as_ref().and_then(|facts| facts.unpinnable) {
        let errno = errno_name(errno.raw_os_error());
        return Err(format!("the mapping of this dma-buf cannot be pinned ({errno})").into());
    }
    congruent(target, file, start)
}

/// True if whole blocks of the file can be read to the final place of their bytes.
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
pub(super) fn choose(
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
        ..
    } = wanted;
    let (asked, io) = (request.method, request.io);
    if file.object {
        return fetch(request, target, host);
    }
    let landing = landing(target, file, start);
    let by_blocks = match &landing {
        Err(why) if io != Io::Buffered && file.direct_refused.is_none() => Some(why),
        _ => None,
    };
    let memory = MemoryFacts {
        module: target.module().is_some(),
        heap: target.heap_reads() && whole,
        copies: target.copies,
        dma_buf: target.dma_buf.is_some(),
        // A dma-buf's pages can be accessed through its mapping, or by a device that it is mapped for. Other
        // memory is accessed by its pages anyway, and each is read into only once: mapping windows in advance
        // pays only if an IOMMU makes many small mappings expensive (kernel/docs/premap.md).
        premaps: target.dma_buf.is_some() || (file.translated && file.premap_refused.is_none()),
        parts: false,
        by_address: by_blocks.is_none(),
        cached: io == Io::Auto && to_copy > to_read,
    };
    let by_others = memory.module || memory.copies || memory.heap;
    if (asked, io) == (Method::Auto, Io::Auto) && !by_others {
        if to_read == 0 {
            // The disk has nothing to do.
            return Ok((vec![methods::BUFFERED], None));
        }
        if let Some(why) = by_blocks {
            log.add(About::Not, methods::URING, why.clone());
        }
    }
    let limited = request.limit.is_some();
    let met = |need, attempt: Attempt| match need {
        Need::DirectFile => match &file.direct_refused {
            Some(why) => Err(why.as_str().into()),
            None => Ok(()),
        },
        Need::Uring => methods::uring_works(host, &file.file_system, file.align_told),
        Need::Addresses if attempt.direct => landing.clone(),
        Need::Addresses | Need::RegistrablePages => Ok(()),
        Need::Premapping => congruent(target, file, start).and_then(|()| maps_once(file, target)),
        Need::ModuleMemory | Need::ReadingHeap | Need::CopyingKernel if limited => Err(message![
            "the kernel moves all bytes in one call: no ",
            Opt::Limit
        ]),
        Need::ModuleMemory if !memory.module => Err(message![
            "dmafile.ko moves bytes into its own dma-bufs only: ",
            Opt::To.set(Kind::Module)
        ]),
        Need::ReadingHeap if !target.heap_reads() => Err(message![
            "a heap only reads files into buffers that it allocates, on a kernel that has \
             DMA_HEAP_ALLOC_AND_READ_FILE: ",
            Opt::To.set("heap:NAME"),
        ]),
        Need::ReadingHeap if !whole => {
            Err("a heap reads whole files, without holes, while it allocates".into())
        }
        Need::CopyingKernel if matches!(target.kind, Kind::Anon | Kind::Caller) => {
            Err("there is no descriptor to copy into".into())
        }
        Need::Blocks if !attempt.direct => {
            Err("reads through the page cache need no bounce ring".into())
        }
        Need::Object => Err("it receives objects, and this is a file".into()),
        Need::ModuleMemory | Need::ReadingHeap | Need::CopyingKernel | Need::Blocks => Ok(()),
    };
    let order = methods::order(Verb::Load, (asked, io), memory);
    let (kept, left_out) = methods::keep(order, io, met);
    // That memory is not mapped once is reported separately.
    let premap = |one: &&methods::LeftOut| one.0.method == Method::Premap;
    methods::log_left_out(left_out.iter().filter(|one| !premap(one)), log);
    if kept.is_empty() {
        let ends = format!("to {}", target.kind);
        return Err(methods::none_left(
            Verb::Load,
            asked,
            &left_out,
            &ends,
            host,
        ));
    }
    let not_mapped = left_out.iter().find(premap).map(|one| one.1.clone());
    Ok((kept, not_mapped))
}

/// The only method for an object.
fn fetch(
    request: &Request,
    target: &MemoryTarget,
    host: &Host,
) -> Result<(Vec<Attempt>, Option<Message>)> {
    let (asked, io) = (request.method, request.io);
    if matches!(asked, Method::Auto | Method::Fetch) && io != Io::Direct {
        return Ok((vec![methods::FETCH], None));
    }
    let attempt = match asked {
        Method::Auto | Method::Fetch => Attempt::new(Method::Fetch, true, false),
        other => Attempt::new(other, io != Io::Buffered, false),
    };
    let left_out = (
        attempt,
        "an object is received, not read from a disk".into(),
    );
    let ends = format!("to {}", target.kind);
    Err(methods::none_left(
        Verb::Load,
        asked,
        &[left_out],
        &ends,
        host,
    ))
}

/// Checks that the memory can be DMA-mapped for the disk once; the error says why not.
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
    log.add(About::PreMapped, choice, why);
}

/// The size of a window of registered buffers; removes methods for which the limit on pinned memory is too low.
pub(super) fn window(
    methods: &mut Vec<Attempt>,
    host: &Host,
    target: &MemoryTarget,
    pages: Pages,
    in_flight: u64,
    log: &Reasons,
) -> u64 {
    let page = match pages {
        Pages::Base => host.page,
        // Existing memory may have them, too.
        Pages::Thp | Pages::Auto => host.thp_size.max(host.page),
        Pages::Huge => host.pool_page.max(host.page),
    };
    let pinned = |attempt: Attempt| match attempt.method {
        _ if !attempt.registered => None,
        // A mapped dma-buf pins nothing of this process: its exporter has charged it.
        Method::Premap if target.dma_buf.is_some() => None,
        // A separate ring, made of whole pages.
        Method::Bounce => Some(PinnedBytes::ring(in_flight)),
        _ => Some(PinnedBytes::windows(in_flight, page)),
    };
    pinned::limit_pinned(methods, host.pin_limit(), pinned, log)
}
