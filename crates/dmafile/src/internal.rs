//! What dmafile's own crates use of this one. Others should not: anything here may change between two versions.

pub use crate::control::ProgressFn;
pub use crate::error::{Verb, lossy};
pub use crate::facts::Host;
pub use crate::flow::clock::Clock;
pub use crate::message::Builder;
pub use crate::reasons::Reasons;
pub use crate::request::Reach;
pub use crate::save::{Staged, cannot_make};
pub use crate::source::Source;
pub use crate::verify::{DigestCheck, Hasher};
pub use crate::{save::part, sync};
