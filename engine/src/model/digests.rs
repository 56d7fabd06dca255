//! Checksums of a model's files, of bytes that come in several loads.

use super::Model;
use crate::error::Result;
use crate::verify::{Check, Hasher, Verified, Verify};

/// The digests of all files of a model in the making: the bytes are handed in part by part, in the
/// order of [`Model::load`]'s buffer.
///
/// ```no_run
/// use dmafile::{Algorithm, Kind, Model, Verify};
///
/// let model = Model::open("model/")?;
/// let mut digests = model.digests(&Verify::compute(Algorithm::Sha256))?;
/// let first = model.load().length(1 << 20).to(Kind::Anon).run()?;
/// digests.update(first.buffer.as_slice().expect("private memory"));
/// # Ok::<(), dmafile::Error>(())
/// ```
pub struct Digests {
    /// Each file with its hasher.
    checks: Vec<(Check, Hasher)>,
    /// How many bytes have been handed in.
    at: u64,
}

impl Model {
    /// Begins the digests of all files.
    ///
    /// # Errors
    /// Kind `Usage` for an expected digest where there are several files.
    pub fn digests(&self, verify: &Verify) -> Result<Digests> {
        let checks = Check::all(verify, &self.source, 0, self.source.size())?;
        let begin = |check: Check| {
            let bytes = check.range.1 - check.range.0;
            let hasher = Hasher::new(check.algorithm, bytes);
            (check, hasher)
        };
        Ok(Digests {
            checks: checks.into_iter().map(begin).collect(),
            at: 0,
        })
    }
}

impl Digests {
    /// The next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        let (first, last) = (self.at, self.at + bytes.len() as u64);
        for (check, hasher) in &mut self.checks {
            let (start, end) = (check.range.0.max(first), check.range.1.min(last));
            if start < end {
                hasher.update(&bytes[(start - first) as usize..(end - first) as usize]);
            }
        }
        self.at = last;
    }

    /// The digests, one a file, of what has been handed in.
    ///
    /// # Errors
    /// EBADMSG for one that is not what is expected.
    pub fn finish(self) -> Result<Vec<Verified>> {
        let checks = self.checks.into_iter();
        checks
            .map(|(check, hasher)| check.judge(hasher.hex()))
            .collect()
    }
}
