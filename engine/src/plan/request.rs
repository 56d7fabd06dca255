//! What a caller asked for, and whether it can be meant.

use crate::error::{Error, Result};
use crate::facts;
use crate::module::Module;
use crate::options::{Allocation, BLOCK_RANGE, Io, Kind, Method, Pages, QUEUE_DEPTH_RANGE};

/// What a caller asked for; `None` and `Auto` leave it to the plan. Sizes are bytes.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub kind: Kind,
    pub pages: Pages,
    pub method: Method,
    pub io: Io,
    pub offset: u64,
    pub length: Option<u64>,
    pub gather: Option<u64>,
    pub block: Option<u64>,
    pub queue_depth: Option<u32>,
    pub allocation: Allocation,
    pub check_memory: bool,
    /// Memory that exists: the caller's, or that of an `fd:N`.
    pub place: Option<Place>,
    /// Memory that is reached by the mapping of a dma-buf.
    pub dma_buf: Option<DmaBufFacts>,
    /// The kernel copies the file into memory that exists (copy_file_range(2)).
    pub copies: bool,
}

impl Default for Request {
    /// The whole file into a memfd, everything else left to the plan.
    fn default() -> Self {
        Self {
            kind: Kind::Memfd,
            pages: Pages::Auto,
            method: Method::Auto,
            io: Io::Auto,
            offset: 0,
            length: None,
            gather: None,
            block: None,
            queue_depth: None,
            allocation: Allocation::Auto,
            check_memory: true,
            place: None,
            dma_buf: None,
            copies: false,
        }
    }
}

impl Request {
    /// dmafile.ko, where the memory is one of its dma-bufs.
    pub(crate) fn module(&self) -> Option<Module> {
        self.dma_buf?.module
    }

    /// A heap is to make the buffer, one that reads files while it allocates.
    pub(crate) fn heap_reads(&self) -> bool {
        matches!(self.kind, Kind::Heap(_)) && self.dma_buf.is_some_and(|facts| facts.heap_reads)
    }
}

/// What is true of memory that exists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// Its size in bytes.
    pub bytes: u64,
    /// Its address, or 0 where it will be mapped at the start of a page.
    pub address: u64,
    /// The only part of it to be written begins here, in bytes; None where all of it is.
    pub at: Option<u64>,
    /// Nothing is allocated in it yet, and all of it is ours, so that its pages may be chosen.
    pub empty: bool,
    /// Bytes of it that are still to be allocated.
    pub lacking: u64,
    /// It is made of hugetlb pages, which write(2) does not reach.
    pub hugetlb: bool,
}

/// What is true of a dma-buf.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DmaBufFacts {
    /// Why its mapping cannot be pinned, so that direct reads cannot land in it.
    pub unpinnable: Option<rustix::io::Errno>,
    /// dmafile.ko, where it is one of its own.
    pub module: Option<Module>,
    /// It is of a heap that reads files while it allocates.
    pub heap_reads: bool,
}

/// Checks the values of a request that need no file.
pub(crate) fn check(request: &Request) -> Result<()> {
    let range = |name: &str, value: u64, (low, high): (u64, u64)| {
        if (low..=high).contains(&value) {
            return Ok(());
        }
        Err(Error::usage(
            name,
            format!("{value} is out of range: {low} to {high}"),
        ))
    };
    if let Some(block) = request.block {
        range("--block", block, BLOCK_RANGE)?;
    }
    if let Some(depth) = request.queue_depth {
        let (low, high) = QUEUE_DEPTH_RANGE;
        range("--queue-depth", depth.into(), (low.into(), high.into()))?;
    }
    if let Some(gather) = request.gather {
        let least = request.block.unwrap_or(BLOCK_RANGE.0);
        range("--gather", gather, (least, i64::MAX as u64))?;
    }
    if request.length == Some(0) {
        range("--length", 0, (1, i64::MAX as u64))?;
    }
    Ok(())
}

/// The wanted range `[start, end)` of a file of `size` bytes.
pub(crate) fn range(request: &Request, file: &facts::File) -> Result<(u64, u64)> {
    let past = |what: &str, value: u64| {
        Error::new(
            "cannot load",
            format!("{what} {value} lies past the end, {} bytes", file.size),
        )
        .at(file.path.display().to_string())
        .with_errno(rustix::io::Errno::INVAL)
        .remedy("choose a range inside the file")
    };
    let start = request.offset;
    if start >= file.size {
        return Err(past("--offset", start));
    }
    match request.length {
        None => Ok((start, file.size)),
        Some(length) => match start.checked_add(length) {
            Some(end) if end <= file.size => Ok((start, end)),
            _ => Err(past("--length", length)),
        },
    }
}

/// Memory that exists does not hold the wanted bytes.
pub(super) fn too_small(request: &Request, place: Place, need: u64) -> Error {
    let room = match place.at {
        None => place.bytes.to_string(),
        Some(at) => format!("what is left of {} from byte {at} on", place.bytes),
    };
    Error::new(
        "cannot load",
        format!("{need} bytes do not fit into {room}"),
    )
    .with_errno(rustix::io::Errno::INVAL)
    .at(request.kind.to_string())
    .remedy("make the memory larger (ftruncate(2) for a memfd), or load a range")
}
