//! What this machine can do, and what is pinned on it.

pub(crate) mod doctor;
pub mod pins;
