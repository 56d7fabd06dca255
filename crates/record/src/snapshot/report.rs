//! Plans and reports of snapshots.

use dmafile::{Algorithm, Buffer, Cpu, OriginKind, Plan, Reason, Report, SavePlan, SaveReport};
use serde::Serialize;
use std::path::PathBuf;

/// A plan for a snapshot.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct SnapshotPlan {
    /// The folder; in JSON, parts of its path that are not UTF-8 are replaced.
    #[serde(serialize_with = "dmafile::internal::lossy")]
    pub to: PathBuf,
    /// The number of the snapshot in the folder, which is part of the names of its files.
    pub generation: u64,
    /// The algorithm of the digests.
    pub algorithm: Algorithm,
    /// The sources, in order.
    pub sources: Vec<SourcePlan>,
}

/// The plan for one source.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct SourcePlan {
    /// Its name.
    pub name: String,
    /// How it will be saved.
    #[serde(flatten)]
    pub plan: SavePlan,
}

/// The report of saving a snapshot. Serialised, it is the JSON that the command prints.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct SnapshotReport {
    /// Bytes of all sources, holes included.
    pub bytes: u64,
    /// Wall-clock time from opening the files to the end: with [`SnapshotReport::sync`], until
    /// everything is on the disk.
    pub seconds: f64,
    /// The folder; in JSON, parts of its path that are not UTF-8 are replaced.
    #[serde(serialize_with = "dmafile::internal::lossy")]
    pub to: PathBuf,
    /// The number of the snapshot in the folder.
    pub generation: u64,
    /// True if it is on the disk.
    pub sync: bool,
    /// CPU time.
    pub cpu: Cpu,
    /// Bytes written directly to the disk.
    pub bytes_direct: u64,
    /// Bytes copied to the page cache.
    pub bytes_buffered: u64,
    /// Bytes in holes, which were not written.
    pub bytes_hole: u64,
    /// The sources, in order.
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
    /// The report of its save; its times count from when its bytes began to move.
    #[serde(flatten)]
    pub report: SaveReport,
}

/// The report of saving a snapshot to a store. Serialised, it is the JSON that the command prints.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct StoredSnapshot {
    /// Bytes of all sources.
    pub bytes: u64,
    /// Wall-clock time.
    pub seconds: f64,
    /// The folder: a URL without secrets.
    pub to: String,
    /// The number of the snapshot in the folder.
    pub generation: u64,
    /// CPU time.
    pub cpu: Cpu,
    /// The sources, in order.
    pub sources: Vec<StoredSource>,
    /// What was found and done in the folder.
    pub reasons: Vec<Reason>,
}

/// A source that was saved to a store.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct StoredSource {
    /// Its name.
    pub name: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// How long it took.
    pub seconds: f64,
    /// Its object.
    pub to: String,
    /// What was saved: `memfd`, `dma-buf`, `file`, `block device`, `pipe`.
    pub kind: OriginKind,
    /// The digest, as `ALGORITHM HEX`.
    pub digest: String,
}

/// A plan for loading a snapshot.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct SnapshotLoadPlan {
    /// The folder; in JSON, parts of its path that are not UTF-8 are replaced.
    #[serde(serialize_with = "dmafile::internal::lossy")]
    pub from: PathBuf,
    /// The number of the snapshot in the folder.
    pub generation: u64,
    /// The sources, in order.
    pub sources: Vec<SourceLoadPlan>,
}

/// The plan for loading one source.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct SourceLoadPlan {
    /// Its name.
    pub name: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// The plan of its load; None for an empty source, which becomes an empty memfd.
    pub plan: Option<Plan>,
}

/// A snapshot in memory.
#[derive(Debug)]
#[non_exhaustive]
pub struct LoadedSnapshot {
    /// Its sources, in the order in which they were saved.
    pub sources: Vec<LoadedSource>,
    /// The report.
    pub report: SnapshotLoadReport,
}

/// A source of a snapshot in memory.
#[derive(Debug)]
#[non_exhaustive]
pub struct LoadedSource {
    /// Its name.
    pub name: String,
    /// Its bytes. For an empty source it is an empty memfd, whatever kind was requested.
    pub buffer: Buffer,
}

/// The report of loading a snapshot. Serialised, it is the JSON that the command prints.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct SnapshotLoadReport {
    /// Bytes of all sources.
    pub bytes: u64,
    /// Wall-clock time from opening the files until the buffers are returned.
    pub seconds: f64,
    /// The folder; in JSON, parts of its path that are not UTF-8 are replaced.
    #[serde(serialize_with = "dmafile::internal::lossy")]
    pub from: PathBuf,
    /// The number of the snapshot in the folder.
    pub generation: u64,
    /// CPU time.
    pub cpu: Cpu,
    /// The sources, in order.
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
    /// Size of the largest pages of the saved memory in bytes; None if it was not memory.
    pub saved_page: Option<u64>,
    /// The report of its load; None for an empty source.
    pub report: Option<Report>,
}
