//! A checksum of bytes in order, while they are still being moved: it follows.

use super::{Algorithm, Hasher};
use crate::error::Result;

/// How much is copied and hashed at once: little enough to stay in the CPU's cache between the two.
const STEP: usize = 64 << 10;

/// A checksum of a range, of which some parts have data; the others are holes, which are zeros.
pub struct Follower<'a> {
    hasher: Hasher,
    /// Where there is data, in ascending order.
    runs: &'a [(u64, u64)],
    /// The first byte that has not been hashed.
    next: u64,
    scratch: Vec<u8>,
}

impl<'a> Follower<'a> {
    /// For a range of so many bytes (0 if that is unknown) that begins at `start`.
    pub fn new(algorithm: Algorithm, bytes: u64, start: u64, runs: &'a [(u64, u64)]) -> Self {
        Self {
            hasher: Hasher::new(algorithm, bytes),
            runs,
            next: start,
            scratch: vec![0; STEP],
        }
    }

    /// Hashes everything up to `end`. `copy` copies the bytes at an offset; they are there. Returns whether it did, or
    /// was stopped because `stop` returned true.
    pub fn advance(
        &mut self,
        end: u64,
        mut copy: impl FnMut(u64, &mut [u8]) -> Result<()>,
        stop: impl Fn() -> bool,
    ) -> Result<bool> {
        let mut runs = &self.runs[self.runs.partition_point(|run| run.1 <= self.next)..];
        while self.next < end {
            if stop() {
                return Ok(false);
            }
            let (is_data, until) = match runs.first() {
                Some(run) if run.0 <= self.next => (true, run.1),
                Some(run) => (false, run.0),
                None => (false, end),
            };
            let len = (until.min(end) - self.next).min(STEP as u64);
            if is_data {
                let bytes = &mut self.scratch[..len as usize];
                copy(self.next, bytes)?;
                self.hasher.update(bytes);
            } else {
                // Reading a hole would allocate memory.
                self.hasher.zeros(len);
            }
            self.next += len;
            if is_data && self.next == until {
                runs = &runs[1..];
            }
        }
        Ok(true)
    }

    /// The digest in lower-case hexadecimal.
    pub fn hex(self) -> String {
        self.hasher.hex()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// In however many steps, the digest is that of the data with zeros in its holes.
        #[test]
        fn a_digest_includes_holes_and_does_not_depend_on_the_steps(
            start in 0_u64..5,
            pieces in prop::collection::vec((any::<bool>(), 1_u64..200_000), 0..6),
            steps in prop::collection::vec(1_u64..300_000, 0..8),
        ) {
            let (mut bytes, mut runs) = (vec![0_u8; start as usize], Vec::new());
            for (data, len) in pieces {
                let at = bytes.len() as u64;
                bytes.extend((0..len).map(|n| if data { (n % 251 + 1) as u8 } else { 0 }));
                if data {
                    runs.push((at, at + len));
                }
            }
            let end = bytes.len() as u64;
            let mut whole = Hasher::new(Algorithm::Xxh3, end - start);
            whole.update(&bytes[start as usize..]);
            let mut follower = Follower::new(Algorithm::Xxh3, end - start, start, &runs);
            let mut upto = start;
            for step in steps.into_iter().chain([u64::MAX / 2]) {
                upto = (upto + step).min(end);
                let copy = |at: u64, into: &mut [u8]| {
                    let inside = runs.iter().any(|run| run.0 <= at && at + into.len() as u64 <= run.1);
                    assert!(inside, "a hole is read");
                    into.copy_from_slice(&bytes[at as usize..][..into.len()]);
                    Ok(())
                };
                prop_assert!(follower.advance(upto, copy, || false).unwrap());
            }
            prop_assert_eq!(follower.hex(), whole.hex());
        }
    }

    #[test]
    fn a_follower_ends_when_it_is_stopped() {
        let mut follower = Follower::new(Algorithm::Crc32c, 0, 0, &[(0, 1 << 30)]);
        assert!(!follower.advance(1 << 30, |_, _| Ok(()), || true).unwrap());
    }
}
