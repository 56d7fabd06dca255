//! The limit on open files: the command uses all that it may, COMMAND gets back what the user has set.

use dmafile::open_files::OpenFiles;
use std::sync::OnceLock;

/// The limit that this process was started with, if it has been raised.
static BEFORE: OnceLock<OpenFiles> = OnceLock::new();

/// Raises the limit: models, holds and takers have a descriptor for each file.
pub(crate) fn raise() {
    if let Some(before) = OpenFiles::raise() {
        // Only the first one counts.
        let _ = BEFORE.set(before);
    }
}

/// Before COMMAND is executed, which inherits these descriptors. If the limit were below their numbers, it could
/// open no file at all.
pub(crate) fn restore(inherited: &[u64]) {
    let before = BEFORE.get();
    let before = before.filter(|before| inherited.iter().all(|number| before.allows(*number)));
    if let Some(before) = before {
        before.restore();
    }
}
