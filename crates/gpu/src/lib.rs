//! The memory of GPUs, and host memory that is pinned for them, beside the crate [`dmafile`].
//!
//! A file goes into the memory of a GPU through a ring ([`ToDevice`]). Host memory is pinned while it is filled
//! ([`Kind::Pinned`](dmafile::Kind::Pinned), which a [`Device`] is converted to) or later
//! ([`Buffer::pin`](dmafile::Buffer::pin)).
//!
//! ```no_run
//! use dmafile::Load;
//! use dmafile_gpu::Device;
//!
//! let device: Device = "cuda:0".parse()?;
//! let loaded = Load::new("experts.bin").to(device.into()).run()?;
//! # Ok::<(), dmafile::Error>(())
//! ```

#![forbid(unsafe_code)]

mod device;
mod doctor;
mod kind;
mod sink;

pub use device::Device;
pub use dmafile_sys::driver::{DeviceMemory, OtherStream};
pub use doctor::doctor;
pub use kind::{options, parse_kind};
pub use sink::{Place, ToDevice};
