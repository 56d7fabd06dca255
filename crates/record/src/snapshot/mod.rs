//! Snapshots: several sources in one folder, which become valid together or not at all.
//!
//! Each source has a separate file, `NAME.GENERATION.dmafile`, and a manifest names those that are valid. A
//! new snapshot writes files of a new generation, then replaces the manifest atomically. Until then the
//! previous snapshot is complete and unchanged.

mod folder;
mod load;
mod manifest;
mod report;
mod save;
mod store;
mod tally;

pub use load::SnapshotLoad;
pub use manifest::MOST_SOURCES;
#[cfg(fuzzing)]
pub use manifest::fuzz::manifest as fuzz_manifest;
pub use report::{
    LoadedSnapshot, LoadedSource, SavedSource, SnapshotLoadPlan, SnapshotLoadReport, SnapshotPlan,
    SnapshotReport, SourceLoadPlan, SourceLoadReport, SourcePlan, StoredSnapshot, StoredSource,
};
pub use save::Snapshot;
pub use store::{SnapshotStore, SourceUpload};
