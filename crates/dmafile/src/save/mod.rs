//! The save request, as a builder.

mod origin;
mod overlap;
pub mod part;
mod parts;
mod plan;
mod reader;
mod replacement;
mod report;
mod run;
mod target;
mod to;
mod write;

use crate::control::{CancelToken, Progress};
use crate::error::{Error, Result};
use crate::folder::Folder;
use crate::message::{Names, Opt};
use crate::options::{Io, Method, OptionValue};
use crate::request::{Common, How, common_setters};
use crate::verify::{Algorithm, Verify};
use std::ops::Deref;
use std::path::PathBuf;

pub use origin::{Origin, OriginKind};
pub use parts::OriginPart;
pub use plan::SavePlan;
pub use reader::OriginReader;
pub use replacement::cannot_make;
pub use report::SaveReport;
pub use run::Staged;

type SavePlanFn = Box<dyn FnOnce(&SavePlan) + Send>;

/// What the caller requested. Sizes are in bytes.
struct SaveRequest {
    /// What is saved, as the caller named it.
    from: String,
    length: Option<u64>,
    how: How,
    sync: bool,
}

impl Deref for SaveRequest {
    type Target = How;

    fn deref(&self) -> &How {
        &self.how
    }
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
    common: Common,
    on_plan: Option<SavePlanFn>,
}

impl Save<'static> {
    /// Opens what is to be saved, for a save to somewhere else than a file.
    #[doc(hidden)]
    pub fn reader(&self) -> Result<OriginReader> {
        self.check()?;
        OriginReader::open(&self.origin, self.wanted.length)
    }

    /// The queue depth that was asked for.
    #[doc(hidden)]
    pub fn depth(&self) -> Option<u32> {
        self.wanted.how.queue_depth
    }
}

impl<'m> Save<'m> {
    /// Saves all of `origin` as the file `path`; the plan chooses everything else.
    pub fn new(origin: Origin<'m>, path: impl Into<PathBuf>) -> Self {
        Self {
            wanted: SaveRequest {
                from: origin.to_string(),
                length: None,
                how: How::default(),
                sync: true,
            },
            origin,
            path: path.into(),
            folder: None,
            in_place: None,
            common: Common::default(),
            on_plan: None,
        }
    }

    /// Saves as the file `name` of a folder, wherever its path leads by now.
    #[doc(hidden)]
    pub fn within(mut self, folder: Folder, name: &str) -> Self {
        self.path = folder.place(name);
        self.folder = Some(folder);
        self
    }

    common_setters!(wanted);

    fn set_to(&mut self, option: Opt, value: &OptionValue) -> Result<()> {
        match option {
            Opt::InPlace => self.in_place = Some(value.number(option)?),
            Opt::Length => self.wanted.length = Some(value.number(option)?),
            Opt::Sync => self.wanted.sync = value.flag(option)?,
            _ => self.common.set(&mut self.wanted.how, option, value)?,
        }
        Ok(())
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

    /// Sets whether to wait until the file and its name are on the disk; default true. If false, a system
    /// crash shortly afterwards may leave the old file, or an incomplete one.
    pub fn sync(mut self, sync: bool) -> Self {
        self.wanted.sync = sync;
        self
    }

    /// Calls `show` with the plan, before any byte is moved.
    pub fn on_plan(mut self, show: impl FnOnce(&SavePlan) + Send + 'static) -> Self {
        self.on_plan = Some(Box::new(show));
        self
    }

    /// Checks everything that depends neither on files nor on this machine: that values are in range.
    /// [`Save::plan`] and [`Save::run`] do this first.
    ///
    /// # Errors
    /// Kind [`Usage`](crate::ErrorKind::Usage).
    pub fn check(&self) -> Result<()> {
        self.common.check()?;
        self.wanted.how.check()?;
        let verify = self.common.verify.as_ref();
        if verify.is_some_and(|verify| verify.stored || !Algorithm::ALL.contains(&verify.algorithm))
        {
            let why = "store is for loads only";
            return Err(Error::usage(Opt::Verify, why).with_remedy("name an algorithm"));
        }
        Ok(())
    }
}
