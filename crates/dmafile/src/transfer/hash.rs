//! Checksums of the requested bytes, computed in file order as they are read.

use super::Work;
use crate::buffer::CopyOut;
use crate::error::{Error, Result};
use crate::flow::feed::Feed;
use crate::flow::meter::Phase;
use crate::flow::trace::ROW_VERIFY;
use crate::verify::{Hasher, Verified};

impl Work<'_> {
    /// Compares digests with what is expected.
    pub(super) fn judge(&self, digests: Vec<String>) -> Result<Vec<Verified>> {
        let pairs = self.checks.iter().zip(digests);
        pairs.map(|(check, digest)| check.judge(digest)).collect()
    }

    /// Hashes the requested bytes of each file in file order as they are read.
    pub(super) fn hash(
        &self,
        memory: &(impl CopyOut + ?Sized),
        feed: &Feed,
    ) -> Result<Vec<String>> {
        // Small enough to stay in the CPU's cache between the copy and the hash.
        let mut scratch = vec![0; 64 << 10];
        let mut digests = Vec::new();
        for check in self.checks {
            let mut hasher = Hasher::new(check.algorithm, check.range.1 - check.range.0);
            let (mut at, end) = (self.at(check.range.0), self.at(check.range.1));
            while at < end {
                let Some(upto) = self.meter.wait_landed(at) else {
                    return Err(unfinished());
                };
                let (start, first) = (self.meter.now(), at);
                at = upto.min(end);
                self.hash_range(memory, (first, at), &mut hasher, &mut scratch, feed)?;
                self.meter.add(Phase::Verify, start);
                let offset = first - self.plan.lead;
                self.meter
                    .span("verify", ROW_VERIFY, start, offset, at - first);
            }
            digests.push(hasher.hex());
        }
        Ok(digests)
    }

    /// Hashes what is between two offsets in memory.
    fn hash_range(
        &self,
        memory: &(impl CopyOut + ?Sized),
        (mut at, end): (u64, u64),
        hasher: &mut Hasher,
        scratch: &mut [u8],
        feed: &Feed,
    ) -> Result<()> {
        static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
        let runs = &self.layout.runs;
        let mut next = runs.partition_point(|run| self.at(run.end) <= at);
        while at < end {
            // A transfer that has failed or been cancelled needs no digest.
            if self.cancel.is_cancelled() || feed.failed() {
                return Err(unfinished());
            }
            let run = runs.get(next).filter(|run| self.at(run.start) < end);
            // Holes are zeros; reading them would allocate memory.
            let hole_end = run.map_or(end, |run| self.at(run.start));
            if at < hole_end {
                let len = (hole_end - at).min(ZEROS.len() as u64);
                hasher.update(&ZEROS[..len as usize]);
                at += len;
                continue;
            }
            let run_end = run.map_or(end, |run| self.at(run.end)).min(end);
            let len = (run_end - at).min(scratch.len() as u64);
            let chunk = &mut scratch[..len as usize];
            memory
                .copy_out(at, chunk)
                .map_err(|errno| Error::os("cannot verify the buffer", errno))?;
            hasher.update(chunk);
            at += len;
            next += usize::from(at == run_end);
        }
        Ok(())
    }
}

fn unfinished() -> Error {
    Error::new("verify", "not all bytes arrived")
}
