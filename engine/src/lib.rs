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
//! Several processes can use one copy in memory: [`Hold`] loads files and serves their memory, [`Held`] takes
//! it.
//!
//! Four features, all on by default, can be switched off:
//!
//! - `model`: `Model`, `Pattern` and the module `format`, for headers of models and selected tensors;
//! - `checksums`: `Load::verify`, `Save::verify`, and snapshots, which depend on them;
//! - `inspect`: `doctor` and `pins`;
//! - `hold`: `Hold`, `Held` and `Shared`, with `model` and `checksums`, which it needs.
//!
//! Linux only. io_uring is used from Linux 5.6 on. dmafile probes for what the system supports, falls back to
//! the next best method, and gives the reason in the plan.

#![deny(unsafe_code)]
// Only a build with all features reports dead code; with fewer, what they use is left over.
#![cfg_attr(not(all(feature = "hold", feature = "inspect")), allow(dead_code))]

mod buffer;
mod control;
mod device;
mod error;
mod exporter;
pub mod facts;
mod flow;
#[doc(hidden)]
pub mod folder;
#[cfg(feature = "model")]
pub mod format;
#[cfg(feature = "hold")]
mod hold;
#[cfg(feature = "inspect")]
mod inspect;
mod load;
mod message;
mod method;
#[cfg(feature = "model")]
mod model;
#[doc(hidden)]
pub mod open_files;
mod options;
mod plan;
mod reasons;
#[cfg(feature = "checksums")]
mod record;
mod request;
mod save;
mod sink;
#[cfg(feature = "checksums")]
mod snapshot;
mod source;
mod sync;
mod sys;
mod transfer;
mod verify;

/// What the fuzz targets call: parsers of what is not public, with checks of what they return (`fuzz/`).
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzz {
    pub use crate::hold::fuzz::*;
    pub use crate::snapshot::fuzz_manifest as manifest;
}

pub use buffer::{Buffer, CpuAccess, CpuAccessMut, DmaBuf, Retired};
/// System calls of the command that a sandbox may refuse.
#[doc(hidden)]
pub mod sandbox {
    pub use crate::sys::sandbox::{Call, FLOCK, READLINK, READLINKAT, refused};
}

pub use control::{CancelToken, Progress};
pub use device::Device;
pub use error::{Error, ErrorKind, Result, errno_name};
pub use flow::clock::Cpu;
#[cfg(feature = "hold")]
pub use hold::{
    Digest, Ended, FileIdentity, Found, Held, HeldFile, HeldInfo, Hold, Holder, Holding, Shared,
    Take, Taker, Vacant, holds, look_for_holder, release,
};
#[cfg(feature = "inspect")]
pub use inspect::doctor::{Check, Health, doctor, verdict};
#[cfg(feature = "inspect")]
pub use inspect::pins::{self, Pins, pins};
pub use load::{Extent, Load, Loaded, Report};
pub use message::{Message, Names, Opt, Part};
#[doc(hidden)]
pub use message::{one_line, unlisted};
#[cfg(all(feature = "model", feature = "checksums"))]
pub use model::Digests;
#[cfg(feature = "model")]
#[doc(hidden)]
pub use model::is_hidden;
#[cfg(feature = "model")]
pub use model::{Model, Pattern, SMALL_READ, Tensor};
pub use options::{
    Allocation, BLOCK_RANGE, DEFAULT_CHUNK, Io, Kind, Method, Pages, QUEUE_DEPTH_RANGE,
};
pub use plan::{Plan, Rung};
pub use reasons::Reason;
#[cfg(feature = "checksums")]
pub use record::{
    Capture, IN_FLIGHT_RANGE, Note, Record, RecordBuffer, Recorded, Recorder, Recording, Ticket,
    WhenFull,
};
pub use save::{Origin, OriginPart, Save, SavePlan, SaveReport};
pub use sink::{
    CopyTo, Handed, Hands, Memory, Piece, Place, Ring, Sink, Slot, ToDevice, hand_over,
};
#[cfg(feature = "checksums")]
pub use snapshot::{
    LoadedSnapshot, LoadedSource, MOST_SOURCES, SavedSource, Snapshot, SnapshotLoad,
    SnapshotLoadPlan, SnapshotLoadReport, SnapshotPlan, SnapshotReport, SourceLoadPlan,
    SourceLoadReport, SourcePlan,
};
pub use source::Shard;
pub use sys::driver::{DeviceMemory, OtherStream};
#[cfg(feature = "checksums")]
pub use verify::Verify;
pub use verify::{Algorithm, Verified};

/// Compiles the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
