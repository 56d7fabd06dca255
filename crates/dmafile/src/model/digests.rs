//! Checksums of a model's files, computed over bytes that are loaded piece by piece.

use super::Model;
use crate::error::Result;
use crate::verify::{DigestCheck, Hasher, Verified, Verify};

/// The digests of all files of a model, computed step by step: pass in the bytes part by part, in
/// the order of [`Model::load`]'s buffer.
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
    checks: Vec<(DigestCheck, Hasher)>,
    /// Number of bytes passed in so far.
    at: u64,
}

impl Model {
    /// Starts the digests of all files.
    ///
    /// # Errors
    /// Kind `Usage` for an expected digest if there are several files.
    pub fn digests(&self, verify: &Verify) -> Result<Digests> {
        let checks = DigestCheck::all(verify, &self.source, 0, self.source.size())?;
        let begin = |check: DigestCheck| {
            let hasher = Hasher::new(check.algorithm, check.range.1 - check.range.0);
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

    /// Returns the digests of the bytes passed in, one per file.
    ///
    /// # Errors
    /// EBADMSG if one differs from the expected digest.
    pub fn finish(self) -> Result<Vec<Verified>> {
        let checks = self.checks.into_iter();
        checks
            .map(|(check, hasher)| check.compare(hasher.hex()))
            .collect()
    }
}
