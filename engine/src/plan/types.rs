//! A plan as data.

use crate::error::{Error, Result};
use crate::message::{Opt, message};
use crate::options::{Allocation, Io, Method, Pages};
use crate::plan::Tuning;
use crate::reasons::Reason;
use serde::Serialize;
use std::path::PathBuf;

/// More than a few dozen threads queue for the same disk and the same locks.
pub(crate) const MOST_WORKERS: u32 = 64;

/// One way of moving the bytes, tried in the order of the ladder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
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

    /// Reads land at addresses of the memory's mapping, which the kernel pins.
    pub(crate) fn lands_by_address(self) -> bool {
        self.lands_whole() && self.method != Method::Premap
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
        // What is mapped is registered anyway.
        if self.registered && self.method != Method::Premap {
            f.write_str(" registered")?;
        }
        Ok(())
    }
}

/// A plan: data that `explain`, `--json`, logs and errors print alike. Sizes are bytes.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
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
    /// Size of one operation; `None` where the kernel cuts a load as it likes.
    pub block: Option<u64>,
    /// Operations in flight, at most; of dmafile.ko, gathers. `None` where that is the kernel's choice.
    pub queue_depth: Option<u32>,
    /// How much is allocated before its reads begin; `None` where nothing is allocated ahead of them.
    pub gather: Option<u64>,
    /// When pages come into being.
    pub allocation: Allocation,
    /// Memory is allocated and read into by one call of dmafile.ko or a heap: a fused load.
    // The key is older than the word.
    #[serde(rename = "born_full")]
    pub fused: bool,
    /// Multiple that direct reads keep to; `None` where there are none.
    pub align: Option<u64>,
    /// Where the wanted bytes start in the buffer, so that file and memory are congruent; or as
    /// `fd:N@OFFSET` asks.
    pub lead: u64,
    /// Where the memory that may be written to starts: 0, but for `fd:N@OFFSET`.
    pub floor: u64,
    /// Where it ends: the wanted range, rounded out to pages and to the file's direct alignment; all
    /// of memory that exists; the wanted range alone for `fd:N@OFFSET`.
    pub capacity: u64,
    /// Bytes that will be read from the disk.
    pub to_read: u64,
    /// Bytes that will be copied from the page cache.
    pub to_copy: u64,
    /// Bytes of holes, which are not read.
    pub holes: u64,
    /// Size of one window of registered buffers; 0 without.
    pub window: u64,
    /// Threads that copy from the page cache; `None` where none do.
    pub threads: Option<usize>,
    /// Threads that allocate ahead of the reads, at most: one begins, others join where reads wait
    /// for it. `None` where nothing is allocated ahead.
    pub allocators: Option<usize>,
    /// The NUMA node that memory shall come from; `None` where that is no question.
    pub node: Option<u32>,
    /// The reasons, one a choice.
    pub reasons: Vec<Reason>,
    /// What methods work with, those further down the ladder too.
    #[serde(skip)]
    pub(crate) tuning: Tuning,
}

impl Plan {
    /// The first rung: what will be tried first.
    pub fn first(&self) -> Rung {
        self.ladder[0]
    }

    /// Shows of the tuning what the first rung will use.
    pub(super) fn with_sizes(mut self) -> Self {
        let (first, tuning) = (self.first(), self.tuning);
        let in_one_call = first.moves_in_one_call();
        // The rung itself has something to do; else only the threads that copy.
        let moves = in_one_call || self.to_read > 0;
        let copies = !in_one_call && self.to_copy > 0;
        let ahead = self.allocation == Allocation::Ahead;
        let by_ko = first.method == Method::Module;
        let cuts = !by_ko && first.method != Method::HeapRead;
        self.block = (cuts && (moves || copies)).then_some(tuning.block);
        self.queue_depth = match first.method {
            Method::HeapRead => None,
            _ if moves => Some(self.concurrency(first)),
            _ if copies => Some(self.workers_for_copies() as u32),
            _ => None,
        };
        self.gather = (by_ko || (cuts && ahead)).then_some(tuning.gather);
        self.align = (first.direct && moves).then_some(tuning.align);
        self.threads = match (first.method, first.direct) {
            _ if copies => Some(self.workers_for_copies()),
            (Method::Threads, false) if moves => Some(self.workers(first)),
            _ => None,
        };
        let allocates = !self.fused && self.allocation != Allocation::InRead;
        self.allocators = allocates.then_some(tuning.allocators);
        self
    }

    /// The same for memory that is filled again and again: what is registered for reads covers memory
    /// that is read into once.
    ///
    /// # Errors
    /// EOPNOTSUPP where no rung is left.
    pub(crate) fn through_ring(&mut self) -> Result<()> {
        self.ladder.retain(|rung| !rung.registered);
        if self.ladder.is_empty() {
            let why = "it fills no ring";
            return Err(Error::new(Opt::Method.set(Method::Premap), why)
                .with_errno(rustix::io::Errno::OPNOTSUPP)
                .with_remedy(message!["leave it to ", Opt::Method.set(Method::Auto)]));
        }
        (self.window, self.allocation) = (0, Allocation::Ahead);
        self.kind = "ring".to_string();
        Ok(())
    }

    /// Operations that a rung has in flight, at most.
    fn concurrency(&self, rung: Rung) -> u32 {
        match rung.method {
            Method::Uring | Method::Premap | Method::Module => self.tuning.queue_depth,
            Method::Bounce if rung.registered => self.tuning.queue_depth,
            Method::Threads | Method::Bounce => self.workers(rung) as u32,
            _ => 1,
        }
    }

    /// How many threads read at once in the method `threads`.
    pub(crate) fn workers(&self, rung: Rung) -> usize {
        let tuning = self.tuning;
        match rung.direct {
            true => tuning.queue_depth.min(MOST_WORKERS) as usize,
            false if self.bytes <= tuning.block || tuning.drop_behind => 1,
            false => tuning.threads,
        }
    }

    /// How many threads copy from the page cache at once.
    pub(crate) fn workers_for_copies(&self) -> usize {
        match self.to_copy <= self.tuning.block {
            true => 1,
            false => self.tuning.threads,
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
