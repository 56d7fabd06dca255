//! What will be done and why: decided from facts, without touching anything.

mod ladder;
mod pages;
mod request;

use crate::error::{Error, Result};
use crate::facts::{self, Host, Layout};
use crate::method;
use crate::module;
use crate::options::{Allocation, DEFAULT_GATHER, Io, Kind, Method, Pages};
use serde::Serialize;
use std::path::PathBuf;

pub(crate) use ladder::{WINDOWS, registered_need};
pub(crate) use request::{DmaBufFacts, Place, Request, check, range};

/// One way of moving the bytes, tried in the order of the ladder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Rung {
    /// The method.
    pub method: Method,
    /// Reads pass by the page cache.
    pub direct: bool,
    /// io_uring with registered buffers.
    pub registered: bool,
}

impl Rung {
    /// Reads land where their bytes belong, in whole units of the file's direct alignment.
    pub(crate) fn lands_whole(self) -> bool {
        self.direct && self.method != Method::Bounce && !self.moves_in_one_call()
    }

    /// The kernel moves all of it by itself, parts of blocks too, and in one way.
    pub(crate) fn moves_in_one_call(self) -> bool {
        matches!(
            self.method,
            Method::Module | Method::HeapRead | Method::CopyFileRange
        )
    }
}

impl std::fmt::Display for Rung {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} {}",
            self.method,
            if self.direct { "direct" } else { "buffered" }
        )?;
        if self.registered {
            f.write_str(" registered")?;
        }
        Ok(())
    }
}

/// One choice and the reason for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reason {
    /// What was decided: `method`, `io`, `pages`, …
    pub about: &'static str,
    /// What it was decided to be.
    pub choice: String,
    /// Why.
    pub why: String,
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}: {}", self.about, self.choice, self.why)
    }
}

/// A plan: data that `explain`, `--json`, logs and errors print alike. Sizes are bytes.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// The file to load; in JSON what of its path is no UTF-8 is replaced.
    #[serde(serialize_with = "crate::error::lossy")]
    pub file: PathBuf,
    /// First byte of the file that is wanted.
    pub offset: u64,
    /// Bytes of the buffer: from the first to the last that is wanted; of chosen tensors, all that
    /// a load of the whole model would have.
    pub bytes: u64,
    /// Kind of memory.
    pub kind: String,
    /// Pages that will be tried for.
    pub pages: Pages,
    /// Ways of moving the bytes, the first being the choice and the rest what it falls back to.
    pub ladder: Vec<Rung>,
    /// Size of one operation.
    pub block: u64,
    /// Operations in flight.
    pub queue_depth: u32,
    /// How much is allocated before its reads begin.
    pub gather: u64,
    /// When pages come into being.
    pub allocation: Allocation,
    /// Memory and bytes come into being in one step, of dmafile.ko or a heap.
    pub born_full: bool,
    /// Multiple that direct reads keep to.
    pub align: u64,
    /// Where the wanted bytes start in the buffer, so that file and memory are congruent; or as
    /// `fd:N@OFFSET` asks.
    pub lead: u64,
    /// Where the memory that may be written to starts: 0, but for `fd:N@OFFSET`.
    pub floor: u64,
    /// Where it ends: the wanted range, rounded out to `align`; all of memory that exists; the
    /// wanted range alone for `fd:N@OFFSET`.
    pub capacity: u64,
    /// Bytes that will be read from the disk.
    pub to_read: u64,
    /// Bytes that will be copied from the page cache.
    pub to_copy: u64,
    /// Bytes of holes, which are not read.
    pub holes: u64,
    /// Size of one window of registered buffers; 0 without.
    pub window: u64,
    /// Worker threads for copies and for `threads`.
    pub threads: usize,
    /// Threads that allocate ahead of the reads, at most: one begins, others join where reads wait
    /// for it.
    pub allocators: usize,
    /// The NUMA node that memory shall come from; `None` where that is no question.
    pub node: Option<u32>,
    /// The reasons, one a choice.
    pub reasons: Vec<Reason>,
}

impl Plan {
    /// The first rung: what will be tried first.
    pub fn first(&self) -> Rung {
        self.ladder[0]
    }

    /// How many threads read at once by `threads`.
    pub(crate) fn workers(&self, rung: Rung) -> usize {
        // More than a few dozen threads queue for the same disk and the same locks.
        const MOST: u32 = 64;
        match rung.direct {
            true => self.queue_depth.min(MOST) as usize,
            false if self.bytes <= self.block => 1,
            false => self.threads,
        }
    }

    /// How many threads copy from the page cache at once.
    pub(crate) fn workers_for_copies(&self) -> usize {
        if self.to_copy <= self.block {
            1
        } else {
            self.threads
        }
    }

    /// The I/O mode as the command line names it.
    pub fn io(&self) -> Io {
        match (self.to_read > 0 && self.first().direct, self.to_copy > 0) {
            (true, true) => Io::Auto,
            (true, false) => Io::Direct,
            _ => Io::Buffered,
        }
    }
}

/// Direct reads: 4 MiB blocks keep a disk busy at a queue depth of 8 with the fewest operations
/// (docs/measuring.md has the sweep).
const DIRECT_BLOCK: u64 = 4 << 20;
const DIRECT_DEPTH: u32 = 8;
/// Direct reads that are copied on: 8 of these stay in the CPU's cache, and fit the limit on pinned
/// memory that most systems set (8 MiB).
const BOUNCE_BLOCK: u64 = 512 << 10;
/// What one copy_file_range(2) moves: the kernel cuts it, and is waited for at its end. It is also how
/// often anybody looks whether the load is still wanted.
const COPY_BLOCK: u64 = 64 << 20;
/// More in flight keeps no disk busier, and all of it is memory beside the buffer.
const LARGEST_RING: u64 = 64 << 20;
/// Reads through the page cache: a block that stays in the CPU's cache on its way.
const BUFFERED_BLOCK: u64 = 1 << 20;
/// Threads that copy, and that allocate: so many move more than a memory channel does.
const MOST_THREADS: usize = 4;
/// What is worth a thread that allocates.
const ALLOCATOR_SHARE: u64 = 32 << 20;
/// Up to this, a second thread costs more than what it hides.
const SMALL_FILE: u64 = 4 << 20;

/// Decides. `layout` covers exactly the wanted range.
pub(crate) fn decide(
    request: &Request,
    file: &facts::File,
    host: &Host,
    layout: &Layout,
) -> Result<Plan> {
    let (start, end) = range(request, file)?;
    let mut reasons = Reasons::default();
    let kind = kind(request)?;
    // File and memory are congruent, so that every block lands where it belongs.
    let grain = file.align.max(host.page);
    let (floor, lead, capacity) = match request.place {
        Some(place) => {
            let at = place.at.unwrap_or(0);
            if place.bytes.saturating_sub(at) < end - start {
                return Err(request::too_small(request, place, end - start));
            }
            let capacity = place.at.map_or(place.bytes, |at| at + end - start);
            (at, at, capacity)
        }
        None => {
            let lead = start % grain;
            (0, lead, (lead + end - start).next_multiple_of(grain))
        }
    };
    let spread = |page| layout.spread(start.wrapping_sub(lead), page).min(capacity);
    if let (Kind::Dmafile, Some(module)) = (&request.kind, request.module())
        && capacity > module.max_buffer
    {
        let error = module::cannot_allocate(rustix::io::Errno::TOOBIG, &module);
        return Err(error.at(format!("{kind}, {capacity} bytes")));
    }
    let pages = pages::pages(request, host, end - start, spread, &mut reasons)?;
    let landing = ladder::landing(request, file);
    let one_run = layout.is_one_run(start, end);
    let wanted = ladder::Wanted {
        to_copy: layout.bytes(true),
        to_read: layout.bytes(false),
        whole: one_run
            && (start, end) == (0, file.size)
            && matches!(request.allocation, Allocation::Auto | Allocation::Ahead),
    };
    let mut ladder = ladder::ladder(request, file, host, pages, &landing, wanted, &mut reasons)?;

    let first = ladder[0];
    // One call reads in one way.
    let (to_copy, to_read) = match first.moves_in_one_call() && first.direct {
        true => (0, wanted.to_copy + wanted.to_read),
        false => (wanted.to_copy, wanted.to_read),
    };
    let block = request.block.unwrap_or(match first.method {
        Method::Bounce => BOUNCE_BLOCK.next_multiple_of(file.align),
        Method::CopyFileRange => COPY_BLOCK,
        _ if first.direct => DIRECT_BLOCK.next_multiple_of(file.align),
        _ => BUFFERED_BLOCK,
    });
    if ladder.iter().any(|rung| rung.direct) && !block.is_multiple_of(file.align) {
        return Err(Error::usage(
            "--block",
            format!(
                "{block} is no multiple of the file's direct alignment, {}",
                file.align
            ),
        ));
    }
    let mut queue_depth = request.queue_depth.unwrap_or(DIRECT_DEPTH);
    let most = u32::try_from(LARGEST_RING / block)
        .unwrap_or(u32::MAX)
        .max(1);
    if first.method == Method::Bounce && queue_depth > most {
        let why = format!("a ring of {} MiB has no more blocks", LARGEST_RING >> 20);
        reasons.add("depth", most, why);
        queue_depth = most;
    }
    if first.method == Method::CopyFileRange {
        // One call after the other.
        queue_depth = 1;
    }
    let module = request.module().filter(|_| first.method == Method::Module);
    let usual = module.map_or(DEFAULT_GATHER, |module| module.gather);
    let mut gather = request.gather.unwrap_or(usual).max(block);
    if request.gather.is_some_and(|asked| asked < block) {
        let asked = request.gather.unwrap_or(0);
        return Err(Error::usage(
            "--gather",
            format!("{asked} is out of range: {block} (a block) to {}", i64::MAX),
        ));
    }

    if let Some(module) = module {
        if gather > module.max_gather {
            let why = "dmafile.ko allocates no more at a time";
            reasons.add("gather", module.max_gather, why);
            gather = module.max_gather;
        }
        if request
            .queue_depth
            .is_some_and(|asked| asked != module.depth)
        {
            let why = "gathers in flight: dmafile.ko's parameter depth";
            reasons.add("depth", module.depth, why);
        }
        queue_depth = module.depth;
    }

    if first.method == Method::HeapRead
        && (request.gather.is_some() || request.queue_depth.is_some())
    {
        let why = "what is in flight is the kernel's choice: /sys/module/dma_heap_read/parameters";
        reasons.add("gather", "auto", why);
    }

    let window = ladder::window(&mut ladder, host, pages, block, queue_depth, &mut reasons);
    let first = ladder[0];
    describe_io(request, first, file, layout, &mut reasons);
    reasons.add(
        "method",
        first.to_string(),
        method::describe(first, request.method),
    );
    let allocation = allocation(request, pages, first, end - start, one_run, &mut reasons);
    if let Some(node) = host.node {
        let why = "the NUMA node that the load was called on; numactl asks for another";
        reasons.add("node", node, why);
    }
    let born_full = makes_and_fills(request, first, one_run)
        && matches!(allocation, Allocation::Ahead | Allocation::Before);

    if request.check_memory {
        let page = match pages {
            Pages::Thp => host.thp_size.max(host.page),
            _ => host.page,
        };
        let need = match request.kind {
            // Their pages come into being all at once, those of holes too.
            Kind::Heap(_) | Kind::Udmabuf | Kind::Dmafile => capacity,
            _ => spread(page),
        };
        let need = request.place.map_or(need, |place| need.min(place.lacking));
        let ring = match first.method {
            Method::Bounce => block * u64::from(queue_depth),
            _ => 0,
        };
        check_memory(request, file, host, pages, need, ring)?;
    }
    Ok(Plan {
        file: file.path.clone(),
        offset: start,
        bytes: end - start,
        kind,
        pages,
        ladder,
        block,
        queue_depth,
        gather,
        allocation,
        born_full,
        align: file.align,
        lead,
        floor,
        capacity,
        to_read,
        to_copy,
        // Small gaps between chosen tensors are read along.
        holes: layout.bytes_wanted().saturating_sub(to_copy + to_read),
        window,
        threads: host.cpus.clamp(1, MOST_THREADS),
        allocators: allocators(host, first, capacity),
        node: host.node,
        reasons: reasons.0,
    })
}

#[derive(Default)]
struct Reasons(Vec<Reason>);

impl Reasons {
    fn add(&mut self, about: &'static str, choice: impl ToString, why: impl Into<String>) {
        self.0.push(Reason {
            about,
            choice: choice.to_string(),
            why: why.into(),
        });
    }
}

/// The kinds that this build can make.
fn kind(request: &Request) -> Result<String> {
    let refuse = |why: &str, remedy: &str| {
        Err(Error::new("cannot make the buffer", why)
            .at(request.kind.to_string())
            .with_errno(rustix::io::Errno::OPNOTSUPP)
            .remedy(remedy))
    };
    match &request.kind {
        Kind::Caller if request.place.is_none() => {
            refuse("no memory was handed in", "call Load::run_into")
        }
        made => Ok(made.to_string()),
    }
}

fn describe_io(
    request: &Request,
    first: Rung,
    file: &facts::File,
    layout: &Layout,
    reasons: &mut Reasons,
) {
    match (request.io, &file.direct_refused) {
        (Io::Direct | Io::Buffered, _) => reasons.add("io", request.io, "asked for"),
        (Io::Auto, Some(why)) => reasons.add("io", Io::Buffered, why.clone()),
        (Io::Auto, None) if first.moves_in_one_call() => {
            let (cached, all) = (layout.bytes(true), layout.bytes(true) + layout.bytes(false));
            let choice = if first.direct {
                Io::Direct
            } else {
                Io::Buffered
            };
            let why = format!(
                "{cached} of {all} bytes are cached, and one call reads in one way ({})",
                layout.learned
            );
            reasons.add("io", choice, why);
        }
        (Io::Auto, None) if !first.direct && request.method != Method::Auto => {
            reasons.add("io", Io::Buffered, format!("what {} is for", first.method));
        }
        (Io::Auto, None) => {
            let choice = match (layout.bytes(true), layout.bytes(false)) {
                (0, _) => Io::Direct,
                (_, 0) => Io::Buffered,
                _ => Io::Auto,
            };
            reasons.add("io", choice, layout.learned.clone());
        }
    }
}

/// Whether a thread allocates ahead of the reads, or the reads fault their pages in.
fn allocation(
    request: &Request,
    pages: Pages,
    first: Rung,
    bytes: u64,
    one_run: bool,
    reasons: &mut Reasons,
) -> Allocation {
    let into_descriptor = matches!(
        first.method,
        Method::Sendfile | Method::Splice | Method::CopyFileRange
    );
    let (choice, why) = if request.allocation != Allocation::Auto {
        (request.allocation, "asked for")
    } else if matches!(request.kind, Kind::Caller) {
        (Allocation::InRead, "the caller's memory is there")
    } else if makes_and_fills(request, first, one_run) {
        (
            Allocation::Ahead,
            match first.method {
                Method::Module => {
                    "dmafile.ko allocates while it reads, in one call: the buffer is born full"
                }
                _ => "the heap allocates while it reads, in one call: the buffer is born full",
            },
        )
    } else if request.dma_buf.is_some() {
        (Allocation::InRead, "a dma-buf has its pages from the start")
    } else if bytes <= SMALL_FILE && pages != Pages::Thp {
        (
            Allocation::InRead,
            "small: a second thread costs more than it hides",
        )
    } else if matches!(pages, Pages::Thp | Pages::Huge) {
        (
            Allocation::Ahead,
            "huge pages are zeroed a gather ahead, while the disk works",
        )
    } else if into_descriptor {
        (
            Allocation::InRead,
            "the kernel allocates pages as it writes them, without zeroing",
        )
    } else if first.direct {
        (
            Allocation::Ahead,
            "faulting pages in would hold up the submission of reads",
        )
    } else {
        (
            Allocation::InRead,
            "copies fault their pages in as fast as a thread ahead of them",
        )
    };
    reasons.add("allocation", choice, why);
    choice
}

/// How many threads allocate ahead: where reads are copies, the processors have them to do.
fn allocators(host: &Host, first: Rung, capacity: u64) -> usize {
    match first.direct {
        true => host
            .cpus
            .min((capacity / ALLOCATOR_SHARE) as usize)
            .clamp(1, MOST_THREADS),
        false => 1,
    }
}

/// Whether a buffer can come into being with its bytes in it: one new one, of one run of one file.
fn makes_and_fills(request: &Request, first: Rung, one_run: bool) -> bool {
    match first.method {
        Method::Module => matches!(request.kind, Kind::Dmafile) && one_run,
        // Of no other file there would be this way.
        Method::HeapRead => true,
        _ => false,
    }
}

/// Refuses early what cannot fit. `need` are the bytes of the pages that hold data: holes take no
/// memory.
fn check_memory(
    request: &Request,
    file: &facts::File,
    host: &Host,
    pages: Pages,
    need: u64,
    ring: u64,
) -> Result<()> {
    // A hugetlb pool is counted by the kernel when it is mapped, and memory that is there is there.
    if need == 0 || pages == Pages::Huge {
        return Ok(());
    }
    let need = need + ring.min(need);
    let refuse = |room: u64, limit: String| {
        Err(Error::new(
            "not enough memory",
            format!("{need} bytes are needed and {room} are available ({limit})"),
        )
        .at(file.path.display().to_string())
        .with_errno(rustix::io::Errno::NOMEM)
        .remedy("free memory, load a range (--offset, --length), or try all the same with --no-memory-check"))
    };
    if let Some(room) = host.available.filter(|room| *room < need) {
        return refuse(room, "MemAvailable".to_string());
    }
    if matches!(request.kind, Kind::Heap(_)) && !host.heaps_are_charged {
        return Ok(());
    }
    if let Some((room, file)) = &host.cgroup {
        let room = room.saturating_sub(beside(need));
        if room < need {
            return refuse(room, file.display().to_string());
        }
    }
    Ok(())
}

/// What a cgroup is charged beside a buffer, whose kernel would kill rather than refuse: page
/// tables and the index of the pages (16 bytes a page), then threads, rings and what each processor
/// has charged ahead. Linux 6.1 killed a load of 46 MiB that had 47.
fn beside(need: u64) -> u64 {
    const MOST: u64 = 2 << 20;
    need / 128 + (need / 16).min(MOST)
}

#[cfg(test)]
mod tests;
