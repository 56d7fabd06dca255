//! What dmafile's own crates use of this one. Others should not: anything here may change between two versions.

pub use crate::control::ProgressFn;
pub use crate::error::{Verb, can_hash, lossy};
pub use crate::facts::Host;
pub use crate::flow::clock::Clock;
pub use crate::message::{Builder, one_line, unlisted};
pub use crate::model::{is_hidden, names_collection};
pub use crate::reasons::Reasons;
pub use crate::request::Selection;
pub use crate::save::part;
pub use crate::save::{OriginReader, Staged, cannot_make};
pub use crate::source::{Source, URL_SCHEMES, is_url, without_secrets};
pub use crate::verify::{DigestCheck, Follower, Hasher};

/// Folders that are held open.
pub mod folder {
    pub use crate::folder::*;
}

/// Limits on open files.
pub mod open_files {
    pub use crate::open_files::*;
}

/// Locks whose holder may have panicked.
pub mod sync {
    pub use crate::sync::*;
}

/// System calls of the command that a sandbox may refuse.
pub mod sandbox {
    pub use crate::sys::sandbox::{Call, FLOCK, READLINK, READLINKAT, refused};
}
