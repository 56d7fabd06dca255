//! What a save will do and why.

use super::SaveRequest;
use super::origin::{DescriptorMemory, Opened};
use super::parts::Fit;
use super::to::To;
use crate::error::{Error, Result, errno_name};
use crate::facts::{Host, premap};
use crate::message::{Message, Opt, message};
use crate::options::{Io, Method};
use crate::plan::{
    Attempt, BOUNCE_BLOCK, BUFFERED_BLOCK, COPY_BLOCK, DIRECT_BLOCK, DIRECT_DEPTH, LARGEST_RING,
    MOST_THREADS, MOST_WORKERS, PinnedBytes, no_uring,
};
use crate::reasons::{Reason, Reasons};
use crate::sys::{Errno, file};
use serde::Serialize;
use std::path::PathBuf;

/// A plan for a save: data that `explain`, `--json`, logs and errors print alike. Sizes are in bytes.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct SavePlan {
    /// What is saved, as the caller named it.
    pub from: String,
    /// Its type: `memfd`, `dma-buf`, `file`, `block device`, `pipe`, `memory`, `parts`.
    pub kind: String,
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
    let holes = match origin.is_stream() {
        true => 0,
        false => origin.bytes.map_or(0, |bytes| bytes.saturating_sub(data)),
    };
    let by_address = match wanted.method {
        Method::Auto | Method::Module if module_has_made(origin) => {
            Err("dmafile.ko asks for no address".into())
        }
        _ => by_address(origin, to, runs, holes > 0),
    };
    let mut methods = methods(wanted, origin, to, host, &by_address, log)?;
    let tuning = SaveTuning {
        block: wanted.block,
        depth: wanted.queue_depth.unwrap_or(DIRECT_DEPTH),
        threads: host.cpus.clamp(1, MOST_THREADS),
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
        (Err(why), Io::Auto) => log.add("io", Io::Buffered, why),
        (_, Io::Auto) if first.direct => {
            log.add("io", Io::Direct, "nothing of it stays in the page cache");
        }
        (_, Io::Auto) => log.add("io", Io::Buffered, "no direct method works here"),
        (_, asked) => log.add("io", asked, "requested"),
    }
    log.add("method", first, describe(first, wanted.method, origin));
    let (how, why) = match to.is_in_place() {
        true => ("in place", "not atomic: a crash leaves old and new bytes"),
        false => ("atomic", "the old file or the new one, never a mixture"),
    };
    log.add("place", how, why);
    let (how, why) = match wanted.sync {
        true => ("yes", "it is on the disk when the save has ended"),
        false => ("no", "requested: a crash soon after may lose it"),
    };
    log.add("sync", how, why);
    Ok(SavePlan {
        from: wanted.from.clone(),
        kind: origin.kind.to_string(),
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

fn attempt(method: Method, direct: bool, registered: bool) -> Attempt {
    Attempt {
        method,
        direct,
        registered,
    }
}

/// The methods to try, in order, with the reasons for those left out.
fn methods(
    wanted: &SaveRequest,
    origin: &Opened<'_>,
    to: &To,
    host: &Host,
    by_address: &Result<(), Message>,
    log: &Reasons,
) -> Result<Vec<Attempt>> {
    let uring = [
        attempt(Method::Uring, true, true),
        attempt(Method::Uring, true, false),
    ];
    let bounce = [
        attempt(Method::Bounce, true, true),
        attempt(Method::Bounce, true, false),
    ];
    let premap = attempt(Method::Premap, true, true);
    let last = attempt(Method::Threads, false, false);
    let both = |method| vec![attempt(method, true, false), attempt(method, false, false)];
    let memory = origin.memory();
    let dma_buf = memory.and_then(|memory| memory.dma_buf.as_ref());
    let copies = memory.is_some_and(|memory| copies(memory, to));
    let through = || bounce.into_iter().chain([last]);
    let all: Vec<Attempt> = match wanted.method {
        Method::Auto if module_has_made(origin) => {
            both(Method::Module).into_iter().chain(through()).collect()
        }
        Method::Auto if dma_buf.is_some() => {
            let mut all = vec![premap];
            if copies {
                all.extend(both(Method::CopyFileRange));
            }
            match by_address {
                Ok(()) => all.extend(uring),
                Err(why) => log.add("not", uring[1], why.clone()),
            }
            all.into_iter().chain(through()).collect()
        }
        Method::Auto if origin.parts().is_some() => {
            let direct = [uring[1], attempt(Method::Threads, true, false)];
            match by_address {
                Ok(()) => direct.into_iter().chain(through()).collect(),
                Err(why) => {
                    log.add("not", uring[1], why.clone());
                    through().collect()
                }
            }
        }
        Method::Auto => match by_address {
            Ok(()) => vec![
                uring[0],
                uring[1],
                attempt(Method::Threads, true, false),
                last,
            ],
            Err(why) => {
                if memory.is_some() {
                    log.add("not", uring[1], why.clone());
                }
                through().collect()
            }
        },
        Method::Uring => vec![uring[0], uring[1], attempt(Method::Uring, false, false)],
        Method::Threads => both(Method::Threads),
        Method::Bounce => through().collect(),
        Method::Premap => vec![premap],
        Method::Module | Method::CopyFileRange => both(wanted.method),
        other => {
            let words = Method::words_of_saves();
            let why = format!(
                "{other} is a load method; saves support {}",
                words.join(", ")
            );
            return Err(Error::usage(Opt::Method, why));
        }
    };
    let mut left_out = None;
    let mut kept = Vec::new();
    for attempt in all {
        let why = match (wanted.io, attempt.direct) {
            (Io::Direct, false) | (Io::Buffered, true) => continue,
            (_, true) => to.direct().map(drop).map_err(Message::from),
            _ => Ok(()),
        }
        .and_then(|()| match no_uring(host, &to.file_system, to.align_told) {
            Some(why) if attempt.registered || attempt.method == Method::Uring => Err(why.into()),
            _ => Ok(()),
        })
        .and_then(|()| match attempt.method {
            // Parts that are not aligned go through a ring.
            Method::Uring | Method::Threads if origin.parts().is_some() => match attempt.registered
            {
                true => Err("each part is written only once".into()),
                false => Ok(()),
            },
            Method::Uring => by_address.clone(),
            Method::Threads if attempt.direct => by_address.clone(),
            Method::Module if !module_has_made(origin) => {
                Err("dmafile.ko writes its own dma-bufs only".into())
            }
            Method::CopyFileRange if !copies => {
                Err("this kernel does not copy from such memory to a file".into())
            }
            Method::Premap => maps_once(memory, to),
            _ => Ok(()),
        })
        .and_then(|()| match memory.and_then(|memory| memory.unregistrable) {
            Some(why) if attempt.registered && attempt.method == Method::Uring => Err(why.into()),
            _ => Ok(()),
        });
        match why {
            Ok(()) => kept.push(attempt),
            Err(why) => {
                log.add("not", attempt, why.clone());
                left_out.get_or_insert((attempt, why));
            }
        }
    }
    if kept.is_empty() {
        let (attempt, why) = left_out.unwrap_or((
            attempt(wanted.method, false, false),
            message!["no method supports this I/O mode (", Opt::Io, ")"],
        ));
        return Err(Error::new("cannot save this way", why)
            .at(format!("{attempt} of {}", wanted.from))
            .with_errno(Errno::OPNOTSUPP)
            .with_remedy(message![
                "leave ",
                Opt::Method,
                " and ",
                Opt::Io,
                " to auto, or see `dmafile save --explain`"
            ]));
    }
    Ok(kept)
}

/// Whether the disk can read the bytes from their addresses; otherwise why not.
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

/// Whether it is a dma-buf of dmafile.ko, which the module can write by itself.
fn module_has_made(origin: &Opened<'_>) -> bool {
    let dma_buf = origin.memory().and_then(|memory| memory.dma_buf.as_ref());
    dma_buf.is_some_and(|dma_buf| dma_buf.module.is_some())
}

/// Whether the kernel can copy from the memory to the file by itself.
fn copies(memory: &DescriptorMemory, to: &To) -> bool {
    // Between two files in memory it could, but that is an ordinary copy.
    !to.is_in_memory() && file::copies_range(memory.fd(), to.buffered())
}

/// Whether the memory can be DMA-mapped for the disk once; otherwise why not.
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
    let limit = host.pin_limit();
    let pinned = |attempt: &Attempt| {
        let in_flight = tuning.block_of(*attempt) * u64::from(tuning.depth_of(*attempt));
        match (attempt.registered, attempt.method) {
            (true, Method::Bounce) => Some(PinnedBytes::ring(in_flight)),
            (true, Method::Uring) => {
                let page = origin.memory().map_or(host.page, |memory| memory.page);
                let page = page.max(host.thp_size);
                Some(PinnedBytes::windows(in_flight, page))
            }
            _ => None,
        }
    };
    let exceeds = |attempt: &Attempt| pinned(attempt).and_then(|pinned| pinned.exceeds(limit));
    let too_large: Vec<_> = methods
        .iter()
        .filter_map(|attempt| Some((*attempt, exceeds(attempt)?)))
        .collect();
    if too_large.len() < methods.len() {
        for (attempt, why) in too_large {
            log.add("not", attempt, why);
            methods.retain(|other| *other != attempt);
        }
    }
    let by_windows = |attempt: &&Attempt| attempt.registered && attempt.method == Method::Uring;
    let first = methods.iter().find(by_windows).and_then(pinned);
    first.map_or(0, |pinned| pinned.window(limit))
}

/// The reason for choosing a method.
fn describe(attempt: Attempt, asked: Method, origin: &Opened<'_>) -> String {
    let what = match (attempt.method, attempt.direct, attempt.registered) {
        (Method::Uring, true, true) => "the disk reads from registered memory, no copy",
        (Method::Uring, true, false) => "the disk reads from the memory, no copy",
        (Method::Uring, false, _) => "io_uring's workers copy to the page cache",
        (Method::Threads, true, _) => "a pool of direct pwrites, no copy",
        (Method::Threads, false, _) => "a pool of pwrites, copied to the page cache",
        (Method::Premap, ..) => "the disk reads from memory that is mapped once for it, no copy",
        (Method::Bounce, _, registered) => match (origin.passes_once(), registered) {
            (true, true) => "read into a registered ring, from which the disk reads",
            (true, false) => "read into a ring, and a pool of direct pwrites from there",
            (false, true) => "one copy to a registered ring, from which the disk reads",
            (false, false) => "one copy to a ring, and a pool of direct pwrites from there",
        },
        (Method::Module, true, _) => "the disk reads from the buffer's own pages",
        (Method::CopyFileRange, true, _) => "the kernel lets the disk read from the memory's pages",
        _ => "the kernel copies to the page cache",
    };
    match asked {
        Method::Auto => format!("the first method that works here: {what}"),
        _ => format!("requested: {what}"),
    }
}
