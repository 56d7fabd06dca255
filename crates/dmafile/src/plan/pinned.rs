//! How much memory registered buffers pin, and what the limit on pinned memory allows.

use super::Attempt;
use super::tuning::{DIRECT_BLOCK, DIRECT_DEPTH};
use crate::reasons::{About, Reasons};

/// Registered windows in turn: one being read, one being filled, one being emptied.
pub(crate) const WINDOWS: u64 = 3;
/// Windows that are pinned at the same time: the kernel pins a new one before it releases the old one.
const PINNED: u64 = WINDOWS + 1;
/// The size of a window, unless more is in flight: large enough to be worth a registration.
const WINDOW: u64 = 64 << 20;
/// The largest buffer that io_uring registers (io_uring_register(2)).
const LARGEST_WINDOW: u64 = 1 << 30;

/// Bytes that the limit on pinned memory must allow for registered buffers on pages of `page` bytes, with
/// the default block size and queue depth.
pub(crate) fn registered_need(page: u64) -> u64 {
    (DIRECT_BLOCK * u64::from(DIRECT_DEPTH) + 2 * page) * PINNED
}

/// What registered buffers pin. Sizes are in bytes.
#[derive(Clone, Copy)]
pub(crate) struct PinnedBytes {
    /// Number of windows that exist at once.
    windows: u64,
    /// Bytes in flight, which one window must hold; otherwise operations would wait for registrations.
    in_flight: u64,
    /// What partly covered pages add to a window, at either end.
    margin: u64,
}

impl PinnedBytes {
    /// For windows of memory on pages of `page` bytes.
    pub(crate) fn windows(in_flight: u64, page: u64) -> Self {
        Self {
            windows: PINNED,
            in_flight,
            margin: 2 * page,
        }
    }

    /// For one ring of whole pages.
    pub(crate) fn ring(in_flight: u64) -> Self {
        Self {
            windows: 1,
            in_flight,
            margin: 0,
        }
    }

    /// The maximum size of a window.
    fn most(self, limit: u64) -> u64 {
        (limit / self.windows).saturating_sub(self.margin)
    }

    /// Why it cannot be pinned under this limit; None if it can.
    fn exceeds(self, limit: u64) -> Option<String> {
        if self.in_flight <= self.most(limit) {
            return None;
        }
        let each = (self.in_flight + self.margin) >> 10;
        let what = match self.windows {
            1 => format!("a ring of {each} KiB exceeds"),
            windows => format!("{windows} windows of {each} KiB exceed"),
        };
        Some(format!(
            "{what} the limit on pinned memory, {} KiB (RLIMIT_MEMLOCK)",
            limit >> 10
        ))
    }

    /// The size of a window.
    fn window(self, limit: u64) -> u64 {
        match self.windows {
            1 => self.in_flight,
            _ => {
                let usual = self.in_flight.clamp(WINDOW, LARGEST_WINDOW);
                self.most(limit).max(self.in_flight).min(usual)
            }
        }
    }
}

/// Removes methods that would pin more than the limit allows, unless there is no other: then the kernel decides.
/// Returns the size of a window of registered buffers; 0 without.
pub(crate) fn limit_pinned(
    methods: &mut Vec<Attempt>,
    limit: u64,
    pinned: impl Fn(Attempt) -> Option<PinnedBytes>,
    log: &Reasons,
) -> u64 {
    let exceeding = |attempt: Attempt| pinned(attempt)?.exceeds(limit);
    let too_large: Vec<_> = methods
        .iter()
        .filter_map(|attempt| Some((*attempt, exceeding(*attempt)?)))
        .collect();
    if too_large.len() < methods.len() {
        for (attempt, why) in too_large {
            log.add(About::Not, attempt, why);
            methods.retain(|other| *other != attempt);
        }
    }
    let first = methods.iter().find_map(|attempt| pinned(*attempt));
    first.map_or(0, |pinned| pinned.window(limit))
}
