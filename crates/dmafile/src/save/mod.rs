//! The save request, as a builder.

mod hash;
mod origin;
mod overlap;
pub mod part;
mod parts;
mod plan;
mod replacement;
mod report;
mod run;
mod target;
mod to;
mod write;

use crate::control::{CancelToken, Progress, ProgressFn};
use crate::error::{Error, Result};
use crate::folder::Folder;
use crate::message::{Builder, Names, Opt};
use crate::options::{Io, Method};
use crate::request::in_range;
use crate::verify::{Algorithm, Verify};
use std::path::PathBuf;

pub use origin::Origin;
pub use parts::OriginPart;
pub use plan::SavePlan;
pub use replacement::cannot_make;
pub use report::SaveReport;
pub use run::Staged;

type SavePlanFn = Box<dyn FnOnce(&SavePlan) + Send>;

/// What the caller requested; `None` and `Auto` are left to the plan. Sizes are in bytes.
struct SaveRequest {
    /// What is saved, as the caller named it.
    from: String,
    length: Option<u64>,
    method: Method,
    io: Io,
    block: Option<u64>,
    queue_depth: Option<u32>,
    sync: bool,
}

/// A builder for a save: memory, and the file to write it to.
///
/// The new file is written next to its final place, without a name if the file system supports that
/// (O_TMPFILE), and replaces the old one atomically when all of it is on the disk. Until then, and after
/// any error, the old file is unchanged. The new file gets the owner, permissions and extended attributes
/// of the old one. A symbolic link is followed, unless another user has made it in a folder in which all users may
/// create files (EACCES).
///
/// ```no_run
/// use dmafile::{Load, Origin, Save};
///
/// let loaded = Load::new("model.safetensors").run()?;
/// let (at, bytes) = (loaded.buffer.offset(), loaded.buffer.len());
/// let memfd = loaded.buffer.into_fd()?;
/// let report = Save::new(Origin::fd(memfd, at), "copy.safetensors").length(bytes).run()?;
/// assert!(report.sync && report.atomic);
/// # Ok::<(), dmafile::Error>(())
/// ```
#[must_use = "nothing is saved before `run`"]
pub struct Save<'m> {
    origin: Origin<'m>,
    path: PathBuf,
    /// The folder of the file, if it is open already.
    folder: Option<Folder>,
    in_place: Option<u64>,
    wanted: SaveRequest,
    verify: Option<Verify>,
    trace: bool,
    cancel: CancelToken,
    progress: Option<ProgressFn>,
    on_plan: Option<SavePlanFn>,
    names: &'static dyn Names,
}

impl<'m> Save<'m> {
    /// Saves all of `origin` as the file `path`; the plan chooses everything else.
    pub fn new(origin: Origin<'m>, path: impl Into<PathBuf>) -> Self {
        Self {
            wanted: SaveRequest {
                from: origin.to_string(),
                length: None,
                method: Method::Auto,
                io: Io::Auto,
                block: None,
                queue_depth: None,
                sync: true,
            },
            origin,
            path: path.into(),
            folder: None,
            in_place: None,
            verify: None,
            trace: false,
            cancel: CancelToken::new(),
            progress: None,
            on_plan: None,
            names: &Builder,
        }
    }

    /// Saves as the file `name` of a folder, wherever its path leads by now.
    #[doc(hidden)]
    pub fn within(mut self, folder: Folder, name: &str) -> Self {
        self.path = folder.place(name);
        self.folder = Some(folder);
        self
    }

    /// Writes into the existing file or block device, starting at this byte, and changes nothing else
    /// in it. That is not atomic: if the save ends early, old and new bytes are mixed. A range of the same file may
    /// be the origin if the two do not overlap.
    pub fn offset(mut self, bytes: u64) -> Self {
        self.in_place = Some(bytes);
        self
    }

    /// Number of bytes to save; default: up to the end of the origin.
    pub fn length(mut self, bytes: u64) -> Self {
        self.wanted.length = Some(bytes);
        self
    }

    /// The method that moves the bytes: [`Method::Auto`] (default), `Uring`, `Threads`, `Bounce`,
    /// `Module`, `CopyFileRange` or `Premap`.
    pub fn method(mut self, method: Method) -> Self {
        self.wanted.method = method;
        self
    }

    /// Bypass or use the page cache; default [`Io::Auto`]: bypass it if possible. Parts of blocks at
    /// either end always go through it, and are dropped from it when they are on the disk.
    pub fn io(mut self, io: Io) -> Self {
        self.wanted.io = io;
        self
    }

    /// Bytes per operation, within [`BLOCK_RANGE`](crate::BLOCK_RANGE) and a multiple of the file's block
    /// size; default: chosen by the plan.
    pub fn block(mut self, bytes: u64) -> Self {
        self.wanted.block = Some(bytes);
        self
    }

    /// Operations in flight, within [`QUEUE_DEPTH_RANGE`](crate::QUEUE_DEPTH_RANGE); default: chosen by
    /// the plan.
    pub fn queue_depth(mut self, operations: u32) -> Self {
        self.wanted.queue_depth = Some(operations);
        self
    }

    /// Sets whether to wait until the file and its name are on the disk; default true. If false, a system
    /// crash shortly afterwards may leave the old file, or an incomplete one.
    pub fn sync(mut self, sync: bool) -> Self {
        self.wanted.sync = sync;
        self
    }

    /// Computes a checksum of the saved bytes. If one is expected and differs, the save fails (EBADMSG)
    /// before the old file is replaced.
    pub fn verify(mut self, verify: Verify) -> Self {
        self.verify = Some(verify);
        self
    }

    /// Records a timeline, available from [`SaveReport::trace`]; default false.
    pub fn trace(mut self, trace: bool) -> Self {
        self.trace = trace;
        self
    }

    /// Lets `token` cancel the save.
    pub fn cancel(mut self, token: CancelToken) -> Self {
        self.cancel = token;
        self
    }

    /// Calls `progress` at most 30 times a second, from the threads that move the bytes, and once at the
    /// end. It should return quickly. For a stream, the total is what has arrived so far.
    pub fn progress(mut self, progress: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        self.progress = Some(Box::new(progress));
        self
    }

    /// Sets how messages name options; default: as this crate does.
    pub fn names(mut self, names: &'static dyn Names) -> Self {
        self.names = names;
        self
    }

    /// Calls `show` with the plan, before any byte is moved.
    pub fn on_plan(mut self, show: impl FnOnce(&SavePlan) + Send + 'static) -> Self {
        self.on_plan = Some(Box::new(show));
        self
    }

    /// The methods of [`Method`] that saves support.
    pub const METHODS: &'static [Method] = &plan::METHODS;

    /// Checks everything that depends neither on files nor on this machine: that values are in range.
    /// [`Save::plan`] and [`Save::run`] do this first.
    ///
    /// # Errors
    /// Kind [`Usage`](crate::ErrorKind::Usage).
    pub fn check(&self) -> Result<()> {
        let (block, depth) = (self.wanted.block, self.wanted.queue_depth);
        if let Some(block) = block {
            in_range(Opt::Block, block, crate::options::BLOCK_RANGE)?;
        }
        if let Some(depth) = depth {
            let (low, high) = crate::options::QUEUE_DEPTH_RANGE.into_inner();
            in_range(Opt::QueueDepth, depth.into(), low.into()..=high.into())?;
        }
        let verify = self.verify.as_ref();
        if verify.is_some_and(|verify| verify.hub || !Algorithm::ALL.contains(&verify.algorithm)) {
            let why = "hub is for loads only";
            return Err(Error::usage(Opt::Verify, why).with_remedy("name an algorithm"));
        }
        Ok(())
    }
}
