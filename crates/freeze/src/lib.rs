//! Checkpoints of processes whose memory comes from a hold, made and restored by
//! [CRIU](https://criu.org): the images name such memory, and a thaw takes it from the hold again, so that no byte of
//! it is written, read or copied.

#![forbid(unsafe_code)]

mod criu;
mod folders;
mod freeze;
mod image;
mod manifest;
mod memory;
mod place;
mod thaw;
mod work;

pub use freeze::{Freeze, Frozen};
pub use thaw::{Roots, Thaw, Thawed};
