//! What dmafile's own crates use of this one. Others should not: anything here may change between two versions.

pub use crate::error::lossy;
