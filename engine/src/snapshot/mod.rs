//! Snapshots: several sources in one folder, valid all at once or not at all.
//!
//! Each source has a file of its own, `NAME.GENERATION.dmafile`, and a manifest names those that are valid.
//! A new snapshot writes files of a new generation, then replaces the manifest in one step: until then the
//! snapshot before is whole, and nothing has touched it.

mod folder;
mod load;
mod manifest;
mod report;
mod save;
mod tally;

pub use load::SnapshotLoad;
pub use manifest::MOST_SOURCES;
pub use report::{
    LoadedSnapshot, LoadedSource, SavedSource, SnapshotLoadPlan, SnapshotLoadReport, SnapshotPlan,
    SnapshotReport, SourceLoadPlan, SourceLoadReport, SourcePlan,
};
pub use save::Snapshot;
