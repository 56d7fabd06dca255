//! A request, and the checks that depend only on its values.

use crate::error::{Error, Result};
use crate::message::{Opt, message};
use crate::options::{Allocation, BLOCK_RANGE, Io, Kind, Method, Pages, QUEUE_DEPTH_RANGE};
use std::ops::RangeInclusive;

/// What the caller requested; `None` and `Auto` are left to the plan. Sizes are in bytes.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub kind: Kind,
    pub pages: Pages,
    pub exact_size: bool,
    pub method: Method,
    pub io: Io,
    pub reach: Reach,
    pub offset: u64,
    pub length: Option<u64>,
    pub chunk: Option<u64>,
    pub block: Option<u64>,
    pub queue_depth: Option<u32>,
    pub allocation: Allocation,
    pub check_memory: bool,
}

impl Default for Request {
    /// The whole file into a memfd; the plan chooses everything else.
    fn default() -> Self {
        Self {
            kind: Kind::Memfd,
            pages: Pages::Auto,
            exact_size: false,
            method: Method::Auto,
            io: Io::Auto,
            reach: Reach::Asked,
            offset: 0,
            length: None,
            chunk: None,
            block: None,
            queue_depth: None,
            allocation: Allocation::Auto,
            check_memory: true,
        }
    }
}

/// Which part of its source a load takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reach {
    /// The requested length, from the requested offset on.
    Asked,
    /// A start and a length, in bytes.
    Part(u64, u64),
    /// Only these ranges, in ascending order.
    Only(Vec<(u64, u64)>),
}

/// Refuses a value that is out of range.
pub(crate) fn in_range(option: Opt, value: u64, range: RangeInclusive<u64>) -> Result<()> {
    if range.contains(&value) {
        return Ok(());
    }
    let (low, high) = range.into_inner();
    Err(Error::usage(
        option,
        format!("{value} is out of range: {low} to {high}"),
    ))
}

impl Request {
    /// Checks the values of a request that do not depend on the file.
    pub(crate) fn check(&self) -> Result<()> {
        let any = i64::MAX as u64;
        if let Some(block) = self.block {
            in_range(Opt::Block, block, BLOCK_RANGE)?;
        }
        if let Some(depth) = self.queue_depth {
            let (low, high) = QUEUE_DEPTH_RANGE.into_inner();
            in_range(Opt::QueueDepth, depth.into(), low.into()..=high.into())?;
        }
        if let Some(chunk) = self.chunk {
            let least = self.block.unwrap_or(*BLOCK_RANGE.start());
            in_range(Opt::Chunk, chunk, least..=any)?;
        }
        if self.length == Some(0) {
            in_range(Opt::Length, 0, 1..=any)?;
        }
        if self.reach != Reach::Asked && (self.offset != 0 || self.length.is_some()) {
            let why = message![
                "selects its own bytes: cannot be combined with ",
                Opt::Offset,
                " or ",
                Opt::Length
            ];
            return Err(Error::usage(Opt::Tensors, why));
        }
        Ok(())
    }

    /// Whether all of a file is requested.
    pub(crate) fn is_whole(&self) -> bool {
        (&self.reach, self.offset, self.length) == (&Reach::Asked, 0, None)
    }
}
