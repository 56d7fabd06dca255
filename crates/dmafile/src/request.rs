//! A request, and the checks that depend only on its values; what loads and saves share of it.

use crate::control::{CancelToken, ProgressFn};
use crate::error::{Error, Result};
use crate::message::{Builder, Names, Opt, message};
use crate::options::{
    Allocation, Io, Kind, Method, Operation, OptionInfo, OptionValue, Pages, out_of_range,
};
use crate::verify::Verify;
use std::ops::Deref;

/// How a load or a save moves the bytes; `None` and `Auto` are left to the plan.
#[derive(Clone, Debug)]
pub(crate) struct How {
    pub method: Method,
    pub io: Io,
    pub block: Option<u64>,
    pub queue_depth: Option<u32>,
}

impl Default for How {
    fn default() -> Self {
        Self {
            method: Method::Auto,
            io: Io::Auto,
            block: None,
            queue_depth: None,
        }
    }
}

impl How {
    pub(crate) fn check(&self) -> Result<()> {
        // Saves have the same ranges.
        OptionInfo::check(Operation::Load, Opt::Block, self.block)?;
        let depth = self.queue_depth.map(u64::from);
        OptionInfo::check(Operation::Load, Opt::QueueDepth, depth)
    }
}

/// What the builders of loads and saves share beside [`How`].
pub(crate) struct Common {
    pub verify: Option<Verify>,
    pub trace: bool,
    pub cancel: CancelToken,
    pub progress: Option<ProgressFn>,
    pub names: &'static dyn Names,
    /// The first option that was set to a value it does not accept.
    pub wrong: Option<Error>,
}

impl Default for Common {
    fn default() -> Self {
        Self {
            verify: None,
            trace: false,
            cancel: CancelToken::new(),
            progress: None,
            names: &Builder,
            wrong: None,
        }
    }
}

impl Common {
    /// Sets an option that loads and saves share; Err if it is not one.
    pub(crate) fn set(&mut self, how: &mut How, option: Opt, value: &OptionValue) -> Result<()> {
        match option {
            Opt::Method => how.method = value.parse(option)?,
            Opt::Io => how.io = value.parse(option)?,
            Opt::Block => how.block = Some(value.number(option)?),
            Opt::QueueDepth => {
                let depth = value.number(option)?;
                // What does not fit is out of range, too.
                how.queue_depth = Some(u32::try_from(depth).unwrap_or(u32::MAX));
            }
            Opt::Verify => self.verify = Some(value.parse(option)?),
            _ => return Err(Error::usage(option, "it is not an option here")),
        }
        Ok(())
    }

    /// Keeps why an option could not be set.
    pub(crate) fn keep(&mut self, set: Result<()>) {
        if let (Err(error), None) = (set, &self.wrong) {
            self.wrong = Some(error);
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.wrong.clone().map_or(Ok(()), Err)
    }
}

/// Defines the setters that the builders of loads and saves share; `$request` is their field with [`How`].
macro_rules! common_setters {
    ($request:ident) => {
        /// The method that moves the bytes; default [`Method::Auto`].
        pub fn method(mut self, method: Method) -> Self {
            self.$request.how.method = method;
            self
        }

        /// Bypass or use the page cache; default [`Io::Auto`].
        pub fn io(mut self, io: Io) -> Self {
            self.$request.how.io = io;
            self
        }

        /// Bytes per operation, within [`BLOCK_RANGE`](crate::BLOCK_RANGE) and a multiple of the file's
        /// alignment for direct I/O; default: chosen by the plan.
        pub fn block(mut self, bytes: u64) -> Self {
            self.$request.how.block = Some(bytes);
            self
        }

        /// Operations in flight, within [`QUEUE_DEPTH_RANGE`](crate::QUEUE_DEPTH_RANGE); default: chosen
        /// by the plan.
        pub fn queue_depth(mut self, operations: u32) -> Self {
            self.$request.how.queue_depth = Some(operations);
            self
        }

        /// Computes a checksum of the bytes. If one is expected and differs, the operation fails (EBADMSG):
        /// a load returns nothing, a save does not replace the old file.
        pub fn verify(mut self, verify: Verify) -> Self {
            self.common.verify = Some(verify);
            self
        }

        /// Records a timeline, which the report then has; default false.
        pub fn trace(mut self, trace: bool) -> Self {
            self.common.trace = trace;
            self
        }

        /// Lets `token` cancel it.
        pub fn cancel(mut self, token: CancelToken) -> Self {
            self.common.cancel = token;
            self
        }

        /// Calls `progress` at most 30 times a second, from the threads that move the bytes, and once at
        /// the end. It should return quickly. For a stream, the total is what has arrived so far.
        pub fn progress(mut self, progress: impl Fn(Progress) + Send + Sync + 'static) -> Self {
            self.common.progress = Some(Box::new(progress));
            self
        }

        /// Sets how messages name options, for programs whose options have other names; default: as this
        /// crate does.
        pub fn names(mut self, names: &'static dyn Names) -> Self {
            self.common.names = names;
            self
        }

        /// Sets one of [`OPTIONS`](crate::OPTIONS), as its own method does. If it does not accept the value,
        /// `check`, `plan` and `run` return the error.
        pub fn set(mut self, option: Opt, value: impl Into<OptionValue>) -> Self {
            let set = self.set_to(option, &value.into());
            self.common.keep(set);
            self
        }

        /// Sets several, in this order.
        pub fn set_all<'v>(self, values: impl IntoIterator<Item = &'v (Opt, OptionValue)>) -> Self {
            let set = |all: Self, (option, value): &(Opt, OptionValue)| {
                all.set(*option, OptionValue::clone(value))
            };
            values.into_iter().fold(self, set)
        }
    };
}
pub(crate) use common_setters;

/// What the caller requested; `None` and `Auto` are left to the plan. Sizes are in bytes.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub kind: Kind,
    pub pages: Pages,
    pub exact_size: bool,
    pub how: How,
    pub selection: Selection,
    pub offset: u64,
    pub length: Option<u64>,
    pub chunk: Option<u64>,
    /// Bytes in a second.
    pub limit: Option<u64>,
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
            how: How::default(),
            selection: Selection::Requested,
            offset: 0,
            length: None,
            chunk: None,
            limit: None,
            allocation: Allocation::Auto,
            check_memory: true,
        }
    }
}

/// Which part of its source a load takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection {
    /// The requested length, from the requested offset on.
    Requested,
    /// A start and a length, in bytes.
    Part(u64, u64),
    /// Only these ranges, in ascending order.
    Only(Vec<(u64, u64)>),
}

impl Deref for Request {
    type Target = How;

    fn deref(&self) -> &How {
        &self.how
    }
}

impl Request {
    /// Checks the values of a request that do not depend on the file.
    pub(crate) fn check(&self) -> Result<()> {
        self.how.check()?;
        OptionInfo::check(Operation::Load, Opt::Chunk, self.chunk)?;
        if let (Some(chunk), Some(block)) = (self.chunk, self.block)
            && chunk < block
        {
            return Err(out_of_range(Opt::Chunk, chunk, (block, i64::MAX as u64)));
        }
        OptionInfo::check(Operation::Load, Opt::Length, self.length)?;
        OptionInfo::check(Operation::Load, Opt::Limit, self.limit)?;
        if self.selection != Selection::Requested && (self.offset != 0 || self.length.is_some()) {
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

    /// This request for a load that goes through a ring: only the ring needs memory.
    pub(crate) fn through(&self) -> Self {
        Self {
            kind: Kind::Anon,
            check_memory: false,
            ..self.clone()
        }
    }

    /// True if all of a file is requested.
    pub(crate) fn is_whole(&self) -> bool {
        (&self.selection, self.offset, self.length) == (&Selection::Requested, 0, None)
    }
}
