//! Checksums of the requested bytes, computed in file order as they are read.

use super::LoadTask;
use crate::buffer::CopyOut;
use crate::error::{Error, Result};
use crate::flow::feed::Feed;
use crate::flow::meter::Phase;
use crate::flow::run::Run;
use crate::flow::trace::ROW_VERIFY;
use crate::verify::{Follower, Verified};

impl LoadTask {
    /// Compares digests with what is expected.
    pub(super) fn check_digests(&self, digests: Vec<String>) -> Result<Vec<Verified>> {
        let pairs = self.checks.iter().zip(digests);
        pairs.map(|(check, digest)| check.compare(digest)).collect()
    }

    /// Hashes the requested bytes of each file in file order as they are read.
    pub(super) fn hash(
        &self,
        run: &Run<'_>,
        memory: &(impl CopyOut + ?Sized),
        feed: &Feed,
    ) -> Result<Vec<String>> {
        let unfinished = || Error::new("cannot verify", "not all bytes arrived");
        let copy = |file: u64, into: &mut [u8]| {
            let copied = memory.copy_out(self.at(file), into);
            copied.map_err(|errno| Error::os("cannot verify the buffer", errno))
        };
        // A transfer that has failed or been cancelled needs no digest.
        let stop = || run.cancel.is_cancelled() || feed.failed();
        let data = self.layout.runs.iter();
        let data: Vec<_> = data.map(|run| (run.start, run.end)).collect();
        let mut digests = Vec::new();
        for check in &self.checks {
            let (mut at, end) = check.range;
            let mut follower = Follower::new(check.algorithm, end - at, at, &data);
            while at < end {
                let there = run.meter.wait_in_place(self.at(at));
                let upto = there.map(|there| self.file(there).min(end));
                let (start, upto) = (run.meter.now(), upto.ok_or_else(unfinished)?);
                if !follower.advance(upto, copy, stop)? {
                    return Err(unfinished());
                }
                run.meter.add(Phase::Verify, start);
                let offset = at - self.plan.offset;
                run.meter
                    .span("verify", ROW_VERIFY, start, offset, upto - at);
                at = upto;
            }
            digests.push(follower.hex());
        }
        Ok(digests)
    }
}
