//! The plan of a load, as data.

use crate::error::{Error, Result};
use crate::message::{Message, Opt, message};
use crate::options::{Allocation, Io, MemoryKind, Method, Pages};
use crate::plan::LoadTuning;
use crate::reasons::{About, Reason, Reasons};
use serde::Serialize;
use std::path::PathBuf;

/// Beyond a few dozen, threads only queue for the same disk and the same locks.
pub(crate) const MOST_WORKERS: u32 = 64;

/// One method of the list that is tried in order, with its I/O mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Attempt {
    /// The method.
    pub method: Method,
    /// True if it bypasses the page cache.
    pub direct: bool,
    /// True if io_uring uses registered buffers.
    pub registered: bool,
}

impl Attempt {
    pub(crate) const fn new(method: Method, direct: bool, registered: bool) -> Self {
        Self {
            method,
            direct,
            registered,
        }
    }

    /// Reads go directly to their final place, in whole units of the file's direct I/O alignment.
    pub(crate) fn in_whole_blocks(self) -> bool {
        self.direct && self.method != Method::Bounce && !self.moves_in_one_call()
    }

    /// Bytes come from elsewhere than a file.
    pub(crate) fn receives(self) -> bool {
        self.method == Method::Fetch
    }

    /// Reads go to addresses of the memory's mapping, which the kernel pins.
    pub(crate) fn reads_by_address(self) -> bool {
        self.in_whole_blocks() && self.method != Method::Premap
    }

    /// The kernel moves everything in one call, including parts of blocks, with one I/O mode.
    pub(crate) fn moves_in_one_call(self) -> bool {
        matches!(
            self.method,
            Method::Module | Method::HeapRead | Method::CopyFileRange
        )
    }
}

impl std::fmt::Display for Attempt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.receives() {
            return write!(f, "{}", self.method);
        }
        write!(
            f,
            "{} {}",
            self.method,
            if self.direct { "direct" } else { "buffered" }
        )?;
        // With premap, buffers are always registered, so it is not mentioned.
        if self.registered && self.method != Method::Premap {
            f.write_str(" registered")?;
        }
        Ok(())
    }
}

/// A plan: data that `explain`, `--json`, logs and errors print alike. Sizes are in bytes.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Plan {
    /// The file to load; in JSON, parts of its path that are not UTF-8 are replaced.
    #[serde(serialize_with = "crate::error::lossy")]
    pub file: PathBuf,
    /// First byte of the file to load.
    pub offset: u64,
    /// Bytes from the first to the last requested one; for selected tensors, those of the whole model.
    pub bytes: u64,
    /// Kind of memory.
    pub kind: MemoryKind,
    /// The page size that will be tried.
    pub pages: Pages,
    /// Methods in the order in which they are tried: the first is the choice, the others are fallbacks.
    pub methods: Vec<Attempt>,
    /// How much is moved at once.
    #[serde(flatten)]
    pub sizes: Sizes,
    /// When pages are allocated.
    pub allocation: Allocation,
    /// One call of dmafile.ko or a heap allocates the memory and reads into it: a fused load.
    pub fused: bool,
    /// Where the bytes go in the buffer.
    #[serde(flatten)]
    pub place: Placement,
    /// Bytes that will be read from the disk.
    pub to_read: u64,
    /// Bytes that will be copied from the page cache.
    pub to_copy: u64,
    /// Bytes in holes, which are not read.
    pub holes: u64,
    /// The NUMA node that memory comes from; `None` on a machine with one, or if a memory policy
    /// decides.
    pub node: Option<u32>,
    /// The reasons, one per choice.
    pub reasons: Vec<Reason>,
    /// Parameters of all methods in the list, including the fallbacks.
    #[serde(skip)]
    pub(crate) tuning: LoadTuning,
}

/// How much the first method moves at once. Sizes are in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Sizes {
    /// Bytes per operation; `None` if the kernel decides.
    pub block: Option<u64>,
    /// Maximum number of operations in flight; for dmafile.ko, of chunks. `None` if the kernel decides.
    pub queue_depth: Option<u32>,
    /// Maximum size of a chunk of memory that is allocated before its reads begin; `None` if nothing is
    /// allocated ahead.
    pub chunk: Option<u64>,
    /// Alignment of direct reads; `None` if there are none.
    pub align: Option<u64>,
    /// Size of a window of registered buffers; 0 without.
    pub window: u64,
    /// Threads that copy from the page cache; `None` if there are none.
    pub threads: Option<usize>,
    /// Maximum number of threads that allocate ahead of the reads: one starts, others join if reads
    /// wait for it. `None` if nothing is allocated ahead.
    pub allocators: Option<usize>,
}

/// Where the requested bytes go in a buffer, in bytes from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Placement {
    /// Where they start, so that file and memory have the same alignment; for `fd:N@OFFSET` it is OFFSET.
    pub start: u64,
    /// Where writable memory starts: 0, except for `fd:N@OFFSET`.
    pub writable_from: u64,
    /// Where writable memory ends: the requested range, rounded up to pages and to the file's direct
    /// I/O alignment; for existing memory all of it; for `fd:N@OFFSET` the requested range.
    pub writable_to: u64,
}

impl Plan {
    /// The method that is tried first.
    pub fn first(&self) -> Attempt {
        self.methods[0]
    }

    /// Copies the sizes that the first method will use from the tuning into the plan.
    pub(super) fn with_sizes(mut self) -> Self {
        let (first, tuning) = (self.first(), self.tuning);
        let in_one_call = first.moves_in_one_call();
        // Whether the method itself has something to do; otherwise only the copying threads have.
        let moves = in_one_call || self.to_read > 0;
        let copies = !in_one_call && self.to_copy > 0;
        let ahead = self.allocation == Allocation::Ahead;
        let by_module = first.method == Method::Module;
        let cuts = !by_module && first.method != Method::HeapRead;
        self.sizes.block = (cuts && (moves || copies)).then_some(tuning.block);
        self.sizes.queue_depth = match first.method {
            Method::HeapRead => None,
            _ if moves => Some(self.concurrency(first)),
            _ if copies => Some(self.workers_for_copies() as u32),
            _ => None,
        };
        self.sizes.chunk = (by_module || (cuts && ahead)).then_some(tuning.chunk);
        self.sizes.align = (first.direct && moves).then_some(tuning.align);
        self.sizes.threads = match (first.method, first.direct) {
            _ if copies => Some(self.workers_for_copies()),
            (Method::Threads, false) if moves => Some(self.workers(first)),
            _ => None,
        };
        let allocates = !self.fused && self.allocation != Allocation::InRead;
        self.sizes.allocators = allocates.then_some(tuning.allocators);
        self
    }

    /// Adds a choice to the log, and to the plan.
    pub(crate) fn add(
        &mut self,
        log: &Reasons,
        about: About,
        choice: impl ToString,
        why: impl Into<Message>,
    ) {
        log.add(about, choice, why);
        self.reasons.extend(log.list().pop());
    }

    /// The file offset of the memory's first byte, wrapping.
    pub(crate) fn base(&self) -> u64 {
        self.offset.wrapping_sub(self.place.start)
    }

    /// How far into a block the memory begins, if blocks begin at multiples of their size or, for direct
    /// reads, of the file's alignment.
    pub(crate) fn phase(&self) -> u64 {
        if self.tuning.drop_behind {
            // No two blocks share a folio of the page cache.
            self.base() % self.tuning.block
        } else {
            self.base() % self.tuning.align
        }
    }

    /// Number of bytes from the beginning of the first block to the end of the wanted bytes.
    pub(crate) fn span(&self) -> u64 {
        self.phase() + self.place.start + self.bytes
    }

    /// Number of bytes from there to the end of all reads, which may be rounded up.
    pub(crate) fn end(&self) -> u64 {
        self.phase() + self.place.writable_to
    }

    /// Adapts the plan to memory that is filled repeatedly: windows that are registered for reads are for
    /// memory that is read into only once.
    ///
    /// # Errors
    /// EOPNOTSUPP if no method is left.
    pub(crate) fn through_ring(&mut self) -> Result<()> {
        let before = self.first();
        self.methods.retain(|attempt| !attempt.registered);
        if self.methods.is_empty() {
            let why = "it cannot read into a ring";
            return Err(Error::new(Opt::Method.set(Method::Premap), why)
                .with_errno(rustix::io::Errno::OPNOTSUPP)
                .with_remedy(message!["use ", Opt::Method.set(Method::Auto)]));
        }
        self.allocation = Allocation::Ahead;
        self.kind = MemoryKind::Ring;
        // The ring is allocated once.
        self.sizes = Sizes {
            window: 0,
            chunk: None,
            allocators: None,
            ..self.sizes
        };
        self.reasons
            .retain(|reason| reason.about != About::Allocation);
        let first = self.first();
        let mut reasons = self.reasons.iter_mut();
        if let Some(reason) = reasons.find(|reason| reason.about == About::Method)
            && first != before
        {
            reason.choice = first.to_string();
            reason.why = "the memory of a ring is pinned for the device, not for reads".into();
        }
        Ok(())
    }

    /// Maximum number of operations that a method has in flight.
    fn concurrency(&self, attempt: Attempt) -> u32 {
        match attempt.method {
            Method::Uring | Method::Premap | Method::Module => self.tuning.queue_depth,
            Method::Bounce if attempt.registered => self.tuning.queue_depth,
            Method::Threads | Method::Bounce | Method::Fetch => self.workers(attempt) as u32,
            _ => 1,
        }
    }

    /// Number of threads that read at once with the methods `threads` and `fetch`.
    pub(crate) fn workers(&self, attempt: Attempt) -> usize {
        let tuning = self.tuning;
        match attempt.direct || attempt.receives() {
            true => tuning.queue_depth.min(MOST_WORKERS) as usize,
            false if self.bytes <= tuning.block || tuning.drop_behind => 1,
            false => tuning.threads,
        }
    }

    /// Number of threads that copy from the page cache at once.
    pub(crate) fn workers_for_copies(&self) -> usize {
        if self.to_copy <= self.tuning.block {
            1
        } else {
            self.tuning.threads
        }
    }

    /// The I/O mode, as the command line names it.
    pub fn io(&self) -> Io {
        match (self.to_read > 0 && self.first().direct, self.to_copy > 0) {
            (true, true) => Io::Auto,
            (true, false) => Io::Direct,
            _ => Io::Buffered,
        }
    }
}
