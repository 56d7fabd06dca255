//! Files that one process holds in memory, and that others take by descriptor.
//!
//! [`Hold`] loads each file into a separate buffer, seals it, and serves it on a Unix socket. With [`Held`]
//! another process takes it: the same memory, not a copy. The kernel counts references to the memory, so it
//! stays with its takers when the holder ends. [`Shared`] needs no holder: the first of several processes
//! loads the files, and every process that has the memory passes it on.

#![forbid(unsafe_code)]

mod doctor;
mod flight;
mod folder;
mod holder;
mod identity;
mod list;
mod load;
mod lock;
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
mod takers;
mod watch;

#[cfg(fuzzing)]
#[path = "../../../fuzz/inside/descriptors.rs"]
mod fuzz_descriptors;

/// What the fuzz targets call.
#[cfg(fuzzing)]
pub mod fuzz {
    pub use crate::{
        folder::fuzz::mark, peer::fuzz::holder, store::fuzz::store, take::fuzz::taker,
    };
}

use std::time::Duration;

/// Longer than any useful wait, and short enough that adding it to the current time does not overflow.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

pub use doctor::{doctor, not_handed_over};
pub use holder::{Hold, Holder};
pub use identity::FileIdentity;
pub use list::{Holding, Taker, holds, release};
pub use protocol::{Digest, HeldInfo};
pub use serve::Ended;
pub use shared::{Found, Shared, Vacant};
pub use take::{Held, HeldFile, Take};
pub use watch::look_for_holder;
