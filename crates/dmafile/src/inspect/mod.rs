//! What this machine supports, and what is pinned on it.

pub(crate) mod doctor;
pub mod pins;
