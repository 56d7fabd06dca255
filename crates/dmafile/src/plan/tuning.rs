//! How much is moved at once: block, queue depth, chunk.

use super::Attempt;
use super::allocation::allocators;
use super::load::WantedRange;
use super::{MOST_COPIERS, MOST_THREADS, MOST_WORKERS};
use crate::error::{Error, Result};
use crate::facts::target::MemoryTarget;
use crate::facts::{File, Host};
use crate::message::Opt;
use crate::options::{BLOCK_RANGE, DEFAULT_CHUNK, Io, Method};
use crate::reasons::{About, Reasons};
use crate::request::Request;

/// Direct reads: 4 MiB blocks keep a disk busy at a queue depth of 8 with the fewest operations (see
/// docs/tuning.md).
pub(crate) const DIRECT_BLOCK: u64 = 4 << 20;
pub(crate) const DIRECT_DEPTH: u32 = 8;
/// Direct reads that are copied afterwards: 8 of these blocks stay in the CPU's cache, and fit the
/// usual limit on pinned memory (8 MiB).
pub(crate) const BOUNCE_BLOCK: u64 = 512 << 10;
/// Size of one copy_file_range(2): the kernel splits it, and the call waits for its end. A load can
/// be cancelled between two calls.
pub(crate) const COPY_BLOCK: u64 = 64 << 20;
/// More bytes in flight do not keep a disk busier, and need memory in addition to the buffer.
pub(crate) const LARGEST_RING: u64 = 64 << 20;
/// Reads through the page cache: a block that stays in the CPU's cache while it is copied.
pub(crate) const BUFFERED_BLOCK: u64 = 1 << 20;
/// Objects: a request costs a round trip, and stores count requests. A store gives each connection only a part of
/// its speed.
pub(crate) const FETCH_BLOCK: u64 = 8 << 20;
pub(crate) const FETCH_DEPTH: u32 = 16;

/// Parameters of all methods; a [`Plan`](super::Plan) shows those that the first one uses. Sizes are
/// in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoadTuning {
    /// Size of one operation.
    pub block: u64,
    /// Operations in flight.
    pub queue_depth: u32,
    /// Maximum size of a chunk that is allocated before its reads begin.
    pub chunk: u64,
    /// Alignment of direct reads.
    pub align: u64,
    /// Worker threads for copies and for `threads`.
    pub threads: usize,
    /// Maximum number of threads that allocate ahead of the reads.
    pub allocators: usize,
    /// True if reads drop the pages that they bring into the page cache.
    pub drop_behind: bool,
    /// True if memory can be DMA-mapped for the disk once.
    pub premaps: bool,
    /// The most to read in a second.
    pub limit: Option<u64>,
}

impl LoadTuning {
    /// The requested values, or those that suit the first method.
    pub(super) fn decide(
        request: &Request,
        file: &File,
        host: &Host,
        target: &MemoryTarget,
        methods: &[Attempt],
        wanted: WantedRange,
        log: &Reasons,
    ) -> Result<Self> {
        let first = methods[0];
        let alone = drop_behind(request, file, host, first, wanted, log);
        let block = block(request, file, methods, alone)?;
        let usual = match first.method {
            Method::Fetch => FETCH_DEPTH,
            _ => DIRECT_DEPTH,
        };
        let mut queue_depth = request.queue_depth.unwrap_or(usual);
        let most = u32::try_from(LARGEST_RING / block)
            .unwrap_or(u32::MAX)
            .max(1);
        if first.method == Method::Bounce && queue_depth > most {
            let why = format!("a ring has at most {} MiB", LARGEST_RING >> 20);
            log.add(About::Depth, most, why);
            queue_depth = most;
        }
        if first.method == Method::CopyFileRange {
            // One call after another.
            queue_depth = 1;
        }
        let module = target.module().filter(|_| first.method == Method::Module);
        let usual = module.map_or(DEFAULT_CHUNK, |module| module.chunk);
        let mut chunk = request.chunk.unwrap_or(usual).max(block);
        if request.chunk.is_some_and(|asked| asked < block) {
            let asked = request.chunk.unwrap_or(0);
            return Err(Error::usage(
                Opt::Chunk,
                format!("{asked} is out of range: {block} (a block) to {}", i64::MAX),
            ));
        }
        if let Some(module) = module {
            if chunk > module.max_chunk {
                let why = "the most that dmafile.ko allocates at a time";
                log.add(About::Chunk, module.max_chunk, why);
                chunk = module.max_chunk;
            }
            if request
                .queue_depth
                .is_some_and(|asked| asked != module.depth)
            {
                let why = "chunks in flight: dmafile.ko's parameter depth";
                log.add(About::Depth, module.depth, why);
            }
            queue_depth = module.depth;
        }
        if first.method == Method::HeapRead
            && (request.chunk.is_some() || request.queue_depth.is_some())
        {
            let why =
                "the kernel decides how much is in flight: /sys/module/dma_heap_read/parameters";
            log.add(About::Chunk, "auto", why);
        }
        if let Some(limit) = request.limit {
            log.add(About::Limit, limit, "bytes in a second, as requested");
        }
        Ok(Self {
            block,
            queue_depth,
            chunk,
            align: file.align,
            threads: asked_threads(request.queue_depth).unwrap_or_else(|| copiers(host.cpus)),
            allocators: allocators(host, first, alone.is_some(), wanted.capacity),
            drop_behind: alone.is_some(),
            premaps: file.premap_refused.is_none(),
            limit: request.limit,
        })
    }
}

/// The number of threads that a requested queue depth means.
pub(crate) fn asked_threads(queue_depth: Option<u32>) -> Option<usize> {
    queue_depth.map(|depth| depth.min(MOST_WORKERS) as usize)
}

/// Number of threads that copy from the page cache: one per CPU, but at most half of many CPUs.
pub(super) fn copiers(cpus: usize) -> usize {
    cpus.clamp(1, MOST_THREADS).max(cpus / 2).min(MOST_COPIERS)
}

/// The block size with which reads through the page cache can drop the pages that they bring in; None
/// if that is not possible, or if the request does not allow it.
///
/// A folio of the page cache, at most a huge page, is dropped as a whole when a part of it has been
/// read. So no two blocks may share one, and only one thread reads: with several, read-ahead for one
/// brings in what another has read and dropped, and that stays (docs/tuning.md).
fn drop_behind(
    request: &Request,
    file: &File,
    host: &Host,
    first: Attempt,
    wanted: WantedRange,
    log: &Reasons,
) -> Option<u64> {
    let buffered = first.method == Method::Threads && !first.direct;
    if request.io != Io::Auto || !buffered || wanted.to_read == 0 || file.in_memory {
        return None;
    }
    let folio = host.thp_size.max(host.page);
    let usual = DIRECT_BLOCK.next_multiple_of(folio);
    let block = request.block.unwrap_or(usual);
    let possible = block.is_multiple_of(folio) && BLOCK_RANGE.contains(&block);
    let kept = if !file.drops_behind {
        "this kernel or file system does not support RWF_DONTCACHE".into()
    } else if !possible || request.chunk.is_some_and(|chunk| chunk < block) {
        format!("RWF_DONTCACHE needs blocks in multiples of {folio} bytes, in whole chunks")
    } else {
        let why = "reads leave nothing in the page cache (RWF_DONTCACHE)";
        log.add(About::Cache, "left as it was", why);
        return Some(block);
    };
    log.add(About::Cache, "filled", kept);
    None
}

fn block(request: &Request, file: &File, methods: &[Attempt], alone: Option<u64>) -> Result<u64> {
    let first = methods[0];
    let block = request.block.or(alone).unwrap_or(match first.method {
        // A network file system would send smaller requests.
        Method::Bounce => BOUNCE_BLOCK.max(file.request).next_multiple_of(file.align),
        Method::CopyFileRange => COPY_BLOCK,
        Method::Fetch => FETCH_BLOCK,
        _ if first.direct => DIRECT_BLOCK.next_multiple_of(file.align),
        _ => BUFFERED_BLOCK,
    });
    if methods.iter().any(|attempt| attempt.direct) && !block.is_multiple_of(file.align) {
        return Err(Error::usage(
            Opt::Block,
            format!(
                "{block} is not a multiple of the file's direct alignment, {}",
                file.align
            ),
        ));
    }
    Ok(block)
}
