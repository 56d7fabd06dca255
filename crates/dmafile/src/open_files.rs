//! The limit on open files (RLIMIT_NOFILE), for the command: a library leaves that of its process alone, as long as it
//! is enough.

use crate::sys::host;

/// A soft limit.
#[derive(Clone, Copy, Debug)]
pub struct OpenFiles(Option<u64>);

impl OpenFiles {
    /// Raises the limit to the most that this process may have, and returns what it was; None if it stays.
    pub fn raise() -> Option<Self> {
        let limits = host::open_files().ok()?;
        if limits.soft == limits.hard {
            return None;
        }
        host::set_open_files(limits.hard).ok()?;
        Some(Self(limits.soft))
    }

    /// Returns `true` if the number of a descriptor is below the limit.
    pub fn allows(self, number: u64) -> bool {
        self.0.is_none_or(|limit| number < limit)
    }

    /// Sets it again. Descriptors that are open stay open.
    pub fn restore(self) {
        // It is not above the hard limit.
        let _ = host::set_open_files(self.0);
    }
}
