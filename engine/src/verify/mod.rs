//! Checksums, computed in file order while later extents are still on their way.

#[cfg(feature = "checksums")]
mod hasher;
#[cfg(not(feature = "checksums"))]
#[path = "no_hasher.rs"]
mod hasher;

pub(crate) use hasher::Hasher;

use crate::error::{Error, Result};
use crate::message::Opt;
use crate::source::Source;
use crate::sys::Errno;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use strum::{Display, EnumString, IntoStaticStr, VariantArray};

/// A checksum algorithm.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Serialize, Display, EnumString, IntoStaticStr, VariantArray,
)]
#[serde(into = "&'static str")]
#[strum(serialize_all = "lowercase")]
#[non_exhaustive]
pub enum Algorithm {
    /// CRC-32C (Castagnoli), 8 hexadecimal digits.
    Crc32c,
    /// XXH3, 64 bits, 16 digits.
    Xxh3,
    /// BLAKE3, 64 digits.
    Blake3,
    /// SHA-256, 64 digits: what `sha256sum` prints.
    Sha256,
}

impl Algorithm {
    /// Every algorithm.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// Its name on the command line and in JSON.
    pub fn name(self) -> &'static str {
        self.into()
    }

    fn digits(self) -> usize {
        match self {
            Self::Crc32c => 8,
            Self::Xxh3 => 16,
            Self::Blake3 | Self::Sha256 => 64,
        }
    }
}

/// A checksum to compute, and what it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Verify {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The digest in lower-case hexadecimal. Without one it is only computed and reported, but for
    /// the SHA-256 of files in a Hugging Face cache, which are named by theirs.
    pub expected: Option<String>,
}

impl Verify {
    /// Computes a checksum, and reports it.
    pub fn compute(algorithm: Algorithm) -> Self {
        Self {
            algorithm,
            expected: None,
        }
    }

    /// Computes a checksum, and fails the load where it is not this one, in hexadecimal.
    ///
    /// # Errors
    /// Kind [`Usage`](crate::ErrorKind::Usage) where `hex` is not a digest of this algorithm.
    pub fn expect(algorithm: Algorithm, hex: &str) -> Result<Self> {
        let hex = hex.to_ascii_lowercase();
        if hex.len() != algorithm.digits() || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
            let digits = algorithm.digits();
            let why = format!("'{hex}' is no {algorithm}: {digits} hexadecimal digits");
            return Err(Error::usage(Opt::Verify, why));
        }
        Ok(Self {
            algorithm,
            expected: Some(hex),
        })
    }
}

impl FromStr for Verify {
    type Err = Error;

    /// `ALGO` or `ALGO=HEX`, where ALGO is crc32c, xxh3 (or xxh3-64), blake3 or sha256.
    fn from_str(text: &str) -> Result<Self> {
        let (name, expected) = match text.split_once('=') {
            Some((name, hex)) => (name, Some(hex)),
            None => (text, None),
        };
        let wanted = if name == "xxh3-64" { "xxh3" } else { name };
        let algorithm: Algorithm = wanted.parse().map_err(|_| {
            let names: Vec<_> = Algorithm::ALL.iter().map(|one| one.name()).collect();
            let names = names.join(", ");
            Error::usage(Opt::Verify, format!("'{name}' is none of {names}"))
        })?;
        match expected {
            Some(hex) => Self::expect(algorithm, hex),
            None => Ok(Self::compute(algorithm)),
        }
    }
}

/// A digest that was computed, and the one that was expected if any.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Verified {
    /// The file whose bytes these are; in JSON what of its path is no UTF-8 is replaced.
    #[serde(serialize_with = "crate::error::lossy")]
    pub file: PathBuf,
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The digest in lower-case hexadecimal.
    pub digest: String,
    /// It was compared with an expected one, and equal.
    pub matched: bool,
}

/// A digest that is to be computed.
#[derive(Debug)]
pub(crate) struct Check {
    pub file: PathBuf,
    /// The bytes of the source that it is of.
    pub range: (u64, u64),
    pub algorithm: Algorithm,
    pub expected: Option<String>,
    /// It is known by the file's name in the Hugging Face cache.
    pub by_name: bool,
}

impl Check {
    /// What `verify` asks of a source of which `[start, end)` is wanted: one digest a file.
    pub(crate) fn all(verify: &Verify, source: &Source, start: u64, end: u64) -> Result<Vec<Self>> {
        let algorithm = verify.algorithm;
        let check = |(path, at, size): (&Path, u64, u64)| {
            let range = (start.max(at), end.min(at + size));
            let whole = range == (at, at + size);
            let named = match verify.expected {
                None if whole && algorithm == Algorithm::Sha256 => blob_digest(path),
                _ => None,
            };
            Self {
                file: path.to_path_buf(),
                range,
                algorithm,
                by_name: named.is_some(),
                expected: verify.expected.clone().or(named),
            }
        };
        let checks = source.files().map(check);
        let checks: Vec<_> = checks
            .filter(|check| check.range.0 < check.range.1)
            .collect();
        if verify.expected.is_some() && checks.len() > 1 {
            return Err(Error::usage(
                Opt::Verify,
                format!("{algorithm}=HEX is of one file, and these are several"),
            ));
        }
        Ok(checks)
    }

    /// Compares what was computed with what is expected, if anything is.
    pub(crate) fn judge(&self, digest: String) -> Result<Verified> {
        if let Some(expected) = self.expected.as_ref().filter(|wanted| **wanted != digest) {
            return Err(Error::new(
                "wrong digest",
                format!("{} is {digest} and should be {expected}", self.algorithm),
            )
            .with_errno(Errno::BADMSG)
            .at(self.file.display().to_string())
            .with_remedy("the file is damaged or another one: fetch it again"));
        }
        Ok(Verified {
            file: self.file.clone(),
            algorithm: self.algorithm,
            digest,
            matched: self.expected.is_some(),
        })
    }
}

/// The SHA-256 that the Hugging Face cache names a large file by:
/// `models--…/snapshots/REVISION/NAME` is a link to `models--…/blobs/SHA256`.
fn blob_digest(path: &Path) -> Option<String> {
    let blob = path.canonicalize().ok()?;
    let name = blob.file_name()?.to_str()?;
    let hex = name.len() == Algorithm::Sha256.digits()
        && name.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    let blobs = blob.parent()?;
    let repository = blobs.parent()?.file_name()?.to_str()?;
    let cache = blobs.file_name()? == "blobs"
        && ["models--", "datasets--", "spaces--"]
            .iter()
            .any(|kind| repository.starts_with(kind));
    (hex && cache).then(|| name.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_parsed_strictly() {
        let verify: Verify = "xxh3-64=78AF5F94892F3950".parse().unwrap();
        assert_eq!(verify.expected.as_deref(), Some("78af5f94892f3950"));
        for bad in ["md5", "crc32c=12", "sha256=", "crc32c=0000000g", ""] {
            assert!(bad.parse::<Verify>().is_err(), "{bad}");
        }
    }
}
