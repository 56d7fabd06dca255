//! Moves large files directly between disk and memory that devices can share, at the speed of the disk and with
//! almost no CPU time.
//!
//! A load opens a **file**, makes a **plan**, and moves the bytes with one **method** into a **buffer**
//! while that is still being allocated. The result is a file descriptor, a mapping and a report.
//!
//! ```no_run
//! use dmafile::{Kind, Load};
//!
//! let loaded = Load::new("model.safetensors").to(Kind::Memfd).run()?;
//! println!("{} bytes in {:?}", loaded.buffer.len(), loaded.report.seconds);
//! let fd = loaded.buffer.as_fd(); // pass it on: SCM_RIGHTS, exec, an import ioctl
//! # Ok::<(), dmafile::Error>(())
//! ```
//!
//! [`Save`] is the reverse: it writes memory, a file or a stream to the disk, completely or not at all.
//!
//! ```no_run
//! use dmafile::{Origin, Save};
//!
//! Save::new("fd:3".parse::<Origin>()?, "capture.bin").run()?; // on the disk, or unchanged
//! # Ok::<(), dmafile::Error>(())
//! ```
//!
//! Crates beside this one do what many programs leave out: `dmafile-gpu` (the memory of GPUs, and memory that is pinned
//! for them), `dmafile-hold` (several processes use one copy in memory), `dmafile-record` (recordings and snapshots) and
//! `dmafile-pins` (what memory is pinned, by whom).
//!
//! Linux only. io_uring is used from Linux 5.6 on. dmafile probes for what the system supports, falls back to
//! the next best method, and gives the reason in the plan.

#![forbid(unsafe_code)]

mod buffer;
mod control;
mod digest;
mod doctor;
mod error;
mod exporter;
pub mod facts;
mod flow;
mod folder;
pub mod format;
#[doc(hidden)]
pub mod internal;
mod load;
mod message;
mod method;
mod model;
mod open_files;
mod options;
mod pin;
mod plan;
mod pump;
mod reasons;
mod request;
mod save;
mod sink;
mod source;
mod sync;
use dmafile_sys as sys;
mod transfer;
mod verify;

pub use buffer::{Buffer, CpuAccess, CpuAccessMut, DmaBuf, ReservedRange};

pub use control::{CancelToken, Progress};
pub use doctor::{Check, Health, doctor, verdict};
pub use error::{Error, ErrorKind, Result, errno_name};
pub use flow::clock::Cpu;
pub use load::{Extent, Load, Loaded, Report};
pub use message::{Message, Names, Opt, Part};
pub use model::Digests;
pub use model::{Model, ModelFolder, ModelObject, Pattern, SMALL_READ, Tensor};
pub use options::{
    Allocation, BLOCK_RANGE, DEFAULT_CHUNK, Io, Kind, MemoryKind, Method, OPTIONS, Operation,
    OptionGroup, OptionInfo, OptionType, OptionValue, Pages, QUEUE_DEPTH_RANGE,
};
pub use pin::{PinDevice, Pinned};
pub use plan::{Attempt, Placement, Plan, Sizes};
pub use reasons::{About, Reason};
pub use save::{Origin, OriginKind, OriginPart, Save, SavePlan, SaveReport};
pub use sink::{
    CopyTo, Delivered, Discard, Memory, Piece, Ring, Sink, Slot, SlotReceiver, deliver,
};
pub use source::{ObjectReader, ReadBuf, RemoteObject, Shard, Traffic};
pub use verify::Verify;
pub use verify::{Algorithm, Verified};

/// Compiles the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
