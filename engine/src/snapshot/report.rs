//! What will be done with a snapshot, and what has been.

use crate::buffer::Buffer;
use crate::flow::clock::Cpu;
use crate::load::Report;
use crate::plan::Plan;
use crate::reasons::Reason;
use crate::save::{SavePlan, SaveReport};
use crate::verify::Algorithm;
use serde::Serialize;
use std::path::PathBuf;

/// A plan for a snapshot.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct SnapshotPlan {
    /// The folder; in JSON what of its path is no UTF-8 is replaced.
    #[serde(serialize_with = "crate::error::lossy")]
    pub to: PathBuf,
    /// Which snapshot of the folder it will be: part of the names of its files.
    pub generation: u64,
    /// Of the digests.
    pub algorithm: Algorithm,
    /// The sources, in their order.
    pub sources: Vec<SourcePlan>,
}

/// A source of a snapshot to be.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct SourcePlan {
    /// Its name.
    pub name: String,
    /// How it will be saved.
    #[serde(flatten)]
    pub plan: SavePlan,
}

/// How a snapshot was saved. Serialised, it is the JSON that the command prints.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct SnapshotReport {
    /// Bytes of all sources, holes included.
    pub bytes: u64,
    /// Wall time from open to the end: with [`SnapshotReport::sync`], until all of it is on the disk.
    pub seconds: f64,
    /// The folder; in JSON what of its path is no UTF-8 is replaced.
    #[serde(serialize_with = "crate::error::lossy")]
    pub to: PathBuf,
    /// Which snapshot of the folder it is.
    pub generation: u64,
    /// It is on the disk.
    pub sync: bool,
    /// Processor time.
    pub cpu: Cpu,
    /// Bytes that went to the disk directly.
    pub bytes_direct: u64,
    /// Bytes that were copied to the page cache.
    pub bytes_buffered: u64,
    /// Bytes of holes, which were not written.
    pub bytes_hole: u64,
    /// The sources, in their order.
    pub sources: Vec<SavedSource>,
    /// What was found and done in the folder.
    pub reasons: Vec<Reason>,
}

/// A source that was saved.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct SavedSource {
    /// Its name.
    pub name: String,
    /// How it was saved; its times count from when its bytes began to move.
    #[serde(flatten)]
    pub report: SaveReport,
}

/// A plan for loading a snapshot.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct SnapshotLoadPlan {
    /// The folder; in JSON what of its path is no UTF-8 is replaced.
    #[serde(serialize_with = "crate::error::lossy")]
    pub from: PathBuf,
    /// Which snapshot of the folder it is.
    pub generation: u64,
    /// The sources, in their order.
    pub sources: Vec<SourceLoadPlan>,
}

/// A source of a snapshot that is to be loaded.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct SourceLoadPlan {
    /// Its name.
    pub name: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// How it will be loaded; None of a source without a byte, which becomes an empty memfd.
    pub plan: Option<Plan>,
}

/// A snapshot in memory.
#[derive(Debug)]
#[non_exhaustive]
pub struct LoadedSnapshot {
    /// Its sources, in the order in which they were saved.
    pub sources: Vec<LoadedSource>,
    /// How it went.
    pub report: SnapshotLoadReport,
}

/// A source of a snapshot in memory.
#[derive(Debug)]
#[non_exhaustive]
pub struct LoadedSource {
    /// Its name.
    pub name: String,
    /// Its bytes. Of a source without a byte it is an empty memfd, whatever kind was asked for.
    pub buffer: Buffer,
}

/// How a snapshot was loaded. Serialised, it is the JSON that the command prints.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct SnapshotLoadReport {
    /// Bytes of all sources.
    pub bytes: u64,
    /// Wall time from open to hand-over.
    pub seconds: f64,
    /// The folder; in JSON what of its path is no UTF-8 is replaced.
    #[serde(serialize_with = "crate::error::lossy")]
    pub from: PathBuf,
    /// Which snapshot of the folder it is.
    pub generation: u64,
    /// Processor time.
    pub cpu: Cpu,
    /// The sources, in their order.
    pub sources: Vec<SourceLoadReport>,
}

/// A source that was loaded.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct SourceLoadReport {
    /// Its name.
    pub name: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// What was saved, as the manifest says: `memfd`, `dma-buf`, `file`, `block device`, `pipe`.
    pub saved_from: String,
    /// Bytes of the largest pages of the memory that was saved; None of what was no memory.
    pub saved_page: Option<u64>,
    /// How it was loaded; None of a source without a byte.
    pub report: Option<Report>,
}
