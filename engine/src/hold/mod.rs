//! Files that one process holds in memory and others take by descriptor.
//!
//! [`Hold`] loads each file into a buffer of its own, seals it, and serves it on a Unix socket; [`Held`] is
//! what another process takes there: the same memory, not a copy. The kernel counts references to it, so
//! that it stays with its takers when the holder ends. [`Shared`] does without a holder: the first of several
//! processes loads, and each one that has the memory passes it on.

mod folder;
mod holder;
mod identity;
mod list;
mod load;
mod name;
mod peer;
mod place;
mod protocol;
mod serve;
mod set;
mod shared;
mod store;
mod systemd;
mod take;

use std::time::Duration;

/// Longer than anybody waits; what is added to the time of day stays in its range.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

pub use holder::{Hold, Holder};
pub use identity::FileIdentity;
pub use list::{Holding, Taker, holds, release};
pub use protocol::{Digest, HeldInfo};
pub use serve::Ended;
pub use shared::{Found, Shared, Vacant};
pub use take::{Held, HeldFile, Take};
