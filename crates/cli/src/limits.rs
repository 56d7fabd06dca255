//! The limit on open files: the command uses all that it may, COMMAND gets back what the user has set.

use dmafile::internal::open_files::OpenFiles;
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

/// Before COMMAND is executed, which inherits the descriptors in these lists of numbers. If the limit were below
/// them, it could open no file at all.
pub(crate) fn restore<'n>(lists: impl Iterator<Item = &'n str>) {
    let mut numbers = lists.flat_map(|list| list.split(','));
    let allows = |before: &&OpenFiles| {
        numbers.all(|number| number.parse().is_ok_and(|number| before.allows(number)))
    };
    if let Some(before) = BEFORE.get().filter(allows) {
        before.restore();
    }
}
