//! What a save will do and why.

use super::SaveRequest;
use super::origin::{DescriptorMemory, Opened, OriginKind};
use super::parts::Fit;
use super::to::To;
use crate::error::{Error, Result, Verb, errno_name};
use crate::facts::{Host, premap};
use crate::message::{Message, Opt};
use crate::options::{Io, Method};
use crate::plan::methods::{self, MemoryFacts, Need};
use crate::plan::{
    Attempt, BOUNCE_BLOCK, BUFFERED_BLOCK, COPY_BLOCK, DIRECT_BLOCK, DIRECT_DEPTH, LARGEST_RING,
    MOST_THREADS, MOST_WORKERS, PinnedBytes, asked_threads, limit_pinned,
};
use crate::reasons::{About, Reason, Reasons};
use crate::sys::file;
use serde::Serialize;
use std::path::PathBuf;

/// A plan for a save: data that `explain`, `--json`, logs and errors print alike. Sizes are in bytes.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct SavePlan {
    /// What is saved, as the caller named it.
    pub from: String,
    /// What it is.
    pub kind: OriginKind,
    /// Offset of the first byte to save.
    pub from_offset: u64,
    /// Number of bytes to save; `None` for a stream, which is saved up to its end.
    pub bytes: Option<u64>,
    /// The file; in JSON, parts of its path that are not UTF-8 are replaced.
    #[serde(serialize_with = "crate::error::lossy")]
    pub to: PathBuf,
    /// Offset in the file at which the first byte goes.
    pub offset: u64,
    /// True if a new file replaces the old one atomically; otherwise a part of an existing file is
    /// written.
    pub atomic: bool,
    /// True if the file is on the disk before the save returns.
    pub sync: bool,
    /// Methods in the order in which they are tried: the first is the choice, the others are fallbacks.
    pub methods: Vec<Attempt>,
    /// Bytes per operation.
    pub block: u64,
    /// Maximum number of operations in flight.
    pub queue_depth: u32,
    /// Alignment of direct writes; `None` if there are none.
    pub align: Option<u64>,
    /// Bytes that will be written; `None` for a stream.
    pub to_write: Option<u64>,
    /// Bytes in holes, which are not written.
    pub holes: u64,
    /// Size of a window of registered buffers; 0 without.
    pub window: u64,
    /// The reasons, one per choice.
    pub reasons: Vec<Reason>,
    /// Memory may be read through its mapping, at least by the CPU, because that fills no hole of it.
    #[serde(skip)]
    pub(super) by_address: bool,
    #[serde(skip)]
    pub(super) tuning: SaveTuning,
}

/// Parameters of all methods in the list.
#[derive(Clone, Copy, Debug)]
pub(super) struct SaveTuning {
    block: Option<u64>,
    depth: u32,
    threads: usize,
    grain: u64,
    /// The NUMA node that new memory comes from.
    pub(super) node: Option<u32>,
}

impl SavePlan {
    /// The method that is tried first.
    pub fn first(&self) -> Attempt {
        self.methods[0]
    }

    /// Bytes per operation of a method.
    pub(super) fn block_of(&self, attempt: Attempt) -> u64 {
        self.tuning.block_of(attempt)
    }

    /// Size of a block of the bounce ring; for several parts, it carries those that cannot be written
    /// from where they are.
    pub(super) fn ring_block_of(&self, attempt: Attempt) -> u64 {
        let tuning = self.tuning;
        tuning
            .block_of(attempt)
            .min(BOUNCE_BLOCK.next_multiple_of(tuning.grain))
    }

    /// Maximum number of operations that a method has in flight.
    pub(super) fn depth_of(&self, attempt: Attempt) -> u32 {
        self.tuning.depth_of(attempt)
    }
}

#[cfg(test)]
impl SavePlan {
    /// Makes all methods use blocks of this size instead of the file's.
    pub(super) fn set_block(&mut self, block: u64) {
        self.tuning.block = Some(block);
    }
}

impl SaveTuning {
    fn block_of(self, attempt: Attempt) -> u64 {
        let usual = match attempt.method {
            Method::Bounce => BOUNCE_BLOCK,
            Method::Module | Method::CopyFileRange => COPY_BLOCK,
            _ if attempt.direct => DIRECT_BLOCK,
            _ => BUFFERED_BLOCK,
        };
        self.block.unwrap_or(usual.next_multiple_of(self.grain))
    }

    fn depth_of(self, attempt: Attempt) -> u32 {
        let ring = u32::try_from(LARGEST_RING / self.block_of(attempt)).unwrap_or(u32::MAX);
        match (attempt.method, attempt.direct) {
            (Method::Module | Method::CopyFileRange, _) => 1,
            (Method::Bounce, _) => self.depth.min(ring.max(1)),
            (Method::Threads, true) => self.depth.min(MOST_WORKERS),
            (Method::Threads, false) => self.threads as u32,
            _ => self.depth,
        }
    }
}

/// Makes the plan. `runs` are the ranges in which the origin has data, in offsets of the target.
pub(super) fn decide(
    wanted: &SaveRequest,
    origin: &Opened<'_>,
    to: &To,
    host: &Host,
    runs: &[(u64, u64)],
    log: &Reasons,
) -> Result<SavePlan> {
    let data: u64 = runs.iter().map(|run| run.1 - run.0).sum();
    let holes = if origin.is_stream() {
        0
    } else {
        origin.bytes.map_or(0, |bytes| bytes.saturating_sub(data))
    };
    let by_address = match wanted.method {
        Method::Auto | Method::Module if module_has_made(origin) => {
            Err("dmafile.ko asks for no address".into())
        }
        _ => by_address(origin, to, runs, holes > 0),
    };
    let mut methods = choose(wanted, origin, to, host, &by_address, log)?;
    let tuning = SaveTuning {
        block: wanted.block,
        depth: wanted.queue_depth.unwrap_or(DIRECT_DEPTH),
        threads: asked_threads(wanted.queue_depth)
            .unwrap_or_else(|| host.cpus.clamp(1, MOST_THREADS)),
        grain: to.grain,
        node: host.node,
    };
    if let Some(block) = wanted.block
        && methods.iter().any(|attempt| attempt.direct)
        && !block.is_multiple_of(to.grain)
    {
        let why = format!(
            "{block} is not a multiple of the file's blocks, {}",
            to.grain
        );
        return Err(Error::usage(Opt::Block, why));
    }
    let window = window(&mut methods, tuning, origin, host, log);
    let first = methods[0];
    match (to.direct(), wanted.io) {
        (Err(why), Io::Auto) => log.add(About::Io, Io::Buffered, why),
        (_, Io::Auto) if first.direct => {
            log.add(
                About::Io,
                Io::Direct,
                "nothing of it stays in the page cache",
            );
        }
        (_, Io::Auto) => log.add(About::Io, Io::Buffered, "no direct method works here"),
        (_, asked) => log.add(About::Io, asked, "requested"),
    }
    let once = origin.passes_once();
    let how = methods::describe(Verb::Save, (first, wanted.method), (false, once));
    log.add(About::Method, first, how);
    let (how, why) = if to.is_in_place() {
        ("in place", "not atomic: a crash leaves old and new bytes")
    } else {
        ("atomic", "the old file or the new one, never a mixture")
    };
    log.add(About::Place, how, why);
    let (how, why) = if wanted.sync {
        ("yes", "it is on the disk when the save has ended")
    } else {
        ("no", "requested: a crash soon after may lose it")
    };
    log.add(About::Sync, how, why);
    Ok(SavePlan {
        from: wanted.from.clone(),
        kind: origin.kind,
        from_offset: origin.start,
        bytes: origin.bytes,
        to: to.path().to_path_buf(),
        offset: to.at,
        atomic: !to.is_in_place(),
        sync: wanted.sync,
        block: tuning.block_of(first),
        queue_depth: tuning.depth_of(first),
        align: first.direct.then_some(to.grain),
        to_write: (!origin.is_stream()).then_some(data),
        holes,
        by_address: by_address.is_ok() || holes == 0,
        window,
        reasons: log.list(),
        methods,
        tuning,
    })
}

/// The methods to try, in order, with the reasons for those left out.
fn choose(
    wanted: &SaveRequest,
    origin: &Opened<'_>,
    to: &To,
    host: &Host,
    by_address: &Result<(), Message>,
    log: &Reasons,
) -> Result<Vec<Attempt>> {
    let (asked, io) = (wanted.method, wanted.io);
    if !Method::OF_SAVES.contains(&asked) {
        let words = Method::words_of_saves();
        let why = format!(
            "{asked} is a load method; saves support {}",
            words.join(", ")
        );
        return Err(Error::usage(Opt::Method, why));
    }
    let source = origin.memory();
    let parts = origin.parts().is_some();
    let memory = MemoryFacts {
        module: module_has_made(origin),
        copies: source.is_some_and(|memory| copies(memory, to)),
        dma_buf: source.is_some_and(|memory| memory.dma_buf.is_some()),
        parts,
        by_address: by_address.is_ok(),
        ..MemoryFacts::default()
    };
    if let (Method::Auto, false, Err(why)) = (asked, memory.module, by_address)
        && (source.is_some() || parts)
    {
        log.add(About::Not, methods::URING, why.clone());
    }
    let met = |need, attempt: Attempt| match need {
        Need::DirectFile => to.direct().map(drop).map_err(Message::from),
        Need::Uring => methods::uring_works(host, &to.file_system, to.align_told),
        // Parts that are not aligned go through a ring, and buffered writes copy.
        Need::Addresses if parts || attempt == methods::BUFFERED => Ok(()),
        Need::Addresses => by_address.clone(),
        Need::RegistrablePages if parts => Err("each part is written only once".into()),
        Need::RegistrablePages => match source.and_then(|memory| memory.unregistrable) {
            Some(why) => Err(why.into()),
            None => Ok(()),
        },
        Need::Premapping => maps_once(source, to),
        Need::ModuleMemory if !memory.module => {
            Err("dmafile.ko writes its own dma-bufs only".into())
        }
        Need::CopyingKernel if !memory.copies => {
            Err("this kernel does not copy from such memory to a file".into())
        }
        Need::Object => Err("it receives objects".into()),
        Need::ModuleMemory | Need::CopyingKernel | Need::ReadingHeap | Need::Blocks => Ok(()),
    };
    let order = methods::order(Verb::Save, (asked, io), memory);
    let (kept, left_out) = methods::keep(order, io, met);
    methods::log_left_out(&left_out, log);
    if kept.is_empty() {
        let ends = format!("of {}", wanted.from);
        Err(methods::none_left(
            Verb::Save,
            asked,
            &left_out,
            &ends,
            host,
        ))
    } else {
        Ok(kept)
    }
}

/// Checks that the disk can read the bytes from their addresses; the error says why not.
fn by_address(
    origin: &Opened<'_>,
    to: &To,
    runs: &[(u64, u64)],
    holes: bool,
) -> Result<(), Message> {
    if let Some(parts) = origin.parts() {
        let why = "no part of 128 KiB or more is aligned in memory as it must be in the file";
        let any = parts.any_in_place(runs, Fit::of(origin, (to, to.at), true));
        return any.then_some(()).ok_or_else(|| why.into());
    }
    let region = origin.region().map_err(Message::from)?;
    if let Some(errno) = origin.memory().and_then(DescriptorMemory::unpinnable) {
        let errno = errno_name(errno.raw_os_error());
        return Err(format!("the mapping of this dma-buf cannot be pinned ({errno})").into());
    }
    let address = region.address().wrapping_add(origin.start);
    if address % to.align != to.at % to.align {
        let why = format!("its address and file offset differ modulo {}", to.align);
        return Err(why.into());
    }
    if holes && address % to.grain != to.at % to.grain {
        // A block that begins in a hole would allocate a page there.
        return Err("its holes do not end where blocks of the file do".into());
    }
    Ok(())
}

/// True if it is a dma-buf of dmafile.ko, which the module can write by itself.
fn module_has_made(origin: &Opened<'_>) -> bool {
    let dma_buf = origin.memory().and_then(|memory| memory.dma_buf.as_ref());
    dma_buf.is_some_and(|dma_buf| dma_buf.module.is_some())
}

/// True if the kernel can copy from the memory to the file by itself.
fn copies(memory: &DescriptorMemory, to: &To) -> bool {
    // Between two files in memory it could, but that is an ordinary copy.
    !to.is_in_memory() && file::copies_range(memory.fd(), to.buffered())
}

/// Checks that the memory can be DMA-mapped for the disk once; the error says why not.
fn maps_once(memory: Option<&DescriptorMemory>, to: &To) -> Result<(), Message> {
    let Some(memory) = memory.filter(|memory| memory.dma_buf.is_some()) else {
        return Err("only dma-bufs are mapped once, to be saved".into());
    };
    let file = to.direct().map_err(Message::from)?;
    let refused = premap::dma_buf_refused_for(file, to.device(), memory.fd());
    refused.map_or(Ok(()), |why| Err(why.into()))
}

/// The size of a window of registered buffers; removes methods for which the limit on pinned memory is
/// too low.
fn window(
    methods: &mut Vec<Attempt>,
    tuning: SaveTuning,
    origin: &Opened<'_>,
    host: &Host,
    log: &Reasons,
) -> u64 {
    let page = origin.memory().map_or(host.page, |memory| memory.page);
    let page = page.max(host.thp_size);
    let pinned = |attempt: Attempt| {
        let in_flight = tuning.block_of(attempt) * u64::from(tuning.depth_of(attempt));
        match (attempt.registered, attempt.method) {
            (true, Method::Bounce) => Some(PinnedBytes::ring(in_flight)),
            (true, Method::Uring) => Some(PinnedBytes::windows(in_flight, page)),
            _ => None,
        }
    };
    limit_pinned(methods, host.pin_limit(), pinned, log)
}
