//! The checksum of what is saved, computed in order: of memory concurrently with the writes; of a
//! stream as its bytes pass.

use super::origin::Opened;
use crate::error::Result;
use crate::verify::{Algorithm, Hasher};

/// How much is hashed between two checks for a cancellation.
const STEP: u64 = 1 << 20;

/// A checksum that is being computed.
pub(super) struct Hash<'a> {
    origin: &'a Opened<'a>,
    /// Where the origin has data; everything else is zeros.
    runs: &'a [(u64, u64)],
    hasher: Hasher,
    /// The first byte of the origin that has not been hashed.
    next: u64,
}

impl<'a> Hash<'a> {
    /// For an origin, from its first byte on.
    pub(super) fn new(
        algorithm: Algorithm,
        origin: &'a Opened<'a>,
        runs: &'a [(u64, u64)],
    ) -> Self {
        Self {
            origin,
            runs,
            hasher: Hasher::new(algorithm, origin.bytes.unwrap_or(0)),
            next: origin.start,
        }
    }

    /// The next bytes.
    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.hasher.update(bytes);
        self.next += bytes.len() as u64;
    }

    /// Hashes all bytes up to `end`, read from the origin.
    pub(super) fn upto(&mut self, end: u64) -> Result<()> {
        static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
        // Small enough to stay in the CPU's cache between the copy and the hash.
        let mut scratch = vec![0; ZEROS.len()];
        while self.next < end {
            let after = self.runs.partition_point(|run| run.1 <= self.next);
            let run = self.runs.get(after).filter(|run| run.0 < end);
            let (data, stop_at) = match run {
                Some(run) if run.0 <= self.next => (true, run.1.min(end)),
                Some(run) => (false, run.0),
                None => (false, end),
            };
            let len = (stop_at - self.next).min(scratch.len() as u64) as usize;
            if data {
                self.origin.copy_out(self.next, &mut scratch[..len])?;
                self.bytes(&scratch[..len]);
            } else {
                self.bytes(&ZEROS[..len]);
            }
        }
        Ok(())
    }

    /// As [`Hash::upto`], until `over` says that the result is not needed any more.
    pub(super) fn all(&mut self, end: u64, over: impl Fn() -> bool) -> Result<()> {
        while self.next < end && !over() {
            self.upto((self.next + STEP).min(end))?;
        }
        Ok(())
    }

    pub(super) fn hex(self) -> String {
        self.hasher.hex()
    }
}
