//! Properties of a file.

use super::{HeldBack, mount, premap};
use crate::error::Result;
use crate::source::Source;
use crate::sys::block::BlockDevice;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Properties of a file. Sizes are in bytes.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct File {
    /// Its path.
    #[serde(serialize_with = "crate::error::lossy")]
    pub path: PathBuf,
    /// Its size when it was opened.
    pub size: u64,
    /// Its file system; of an object, what it is stored in.
    pub file_system: String,
    /// Alignment of direct reads in offset, length and memory.
    pub align: u64,
    /// True if `align` comes from `statx(STATX_DIOALIGN)`; otherwise it was found by reading.
    pub align_told: bool,
    /// The size of the requests of its network file system, if that is known; otherwise 0.
    pub request: u64,
    /// How the options of its mount hold loads back; `None` if they do not.
    pub held_back: Option<HeldBack>,
    /// Why direct I/O cannot be used; `None` if it can.
    pub direct_refused: Option<String>,
    /// True if reads through the page cache can drop the pages that they bring in (`RWF_DONTCACHE`).
    pub drops_behind: bool,
    /// True if it is an object instead of a file ([`RemoteObject`](crate::RemoteObject)).
    pub object: bool,
    /// True if its file system keeps it in memory: the page cache is the file.
    pub in_memory: bool,
    /// The block device that it is or is stored on, as named in `/dev`; `None` if there is none.
    pub device: Option<String>,
    /// True if that device accesses memory through an IOMMU that translates, so that mapping for it
    /// costs the CPU more than a look-up.
    pub translated: bool,
    /// Why memory cannot be DMA-mapped once for direct reads of it; `None` if it can.
    pub premap_refused: Option<String>,
}

impl File {
    /// Opens and inspects a file; reads at most one block, to try direct I/O.
    ///
    /// # Errors
    /// As [`Load::run`](crate::Load::run): a file without contents of a known size is refused.
    pub fn probe(path: impl AsRef<Path>) -> Result<Self> {
        Source::open(path.as_ref()).map(|source| Self::of(&source))
    }

    pub(crate) fn of(source: &Source) -> Self {
        let direct_refused = source.direct_refused();
        let premap_refused = match &direct_refused {
            Some(why) => Some(why.clone()),
            None => premap::refused(source),
        };
        let device = source.device(0);
        Self {
            path: source.path().to_path_buf(),
            size: source.size(),
            file_system: source.file_system(),
            align: source.align(),
            align_told: source.align_is_told(),
            request: source.request(),
            held_back: mount::of(source),
            direct_refused,
            drops_behind: source.drops_behind(),
            object: source.is_objects(),
            in_memory: source.in_memory(),
            translated: device.as_ref().is_some_and(BlockDevice::is_translated),
            device: device.map(|device| device.name().to_string()),
            premap_refused,
        }
    }
}
