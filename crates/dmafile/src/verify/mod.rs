//! Checksums, computed in file order while later extents are still being read.

mod follower;
mod hasher;

pub use follower::Follower;
pub use hasher::Hasher;

use crate::error::{Error, Result};
use crate::message::{Opt, message};
use crate::source::Source;
use crate::sys::Errno;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use strum::{Display, EnumString, IntoStaticStr};

/// A checksum algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Display, EnumString, IntoStaticStr)]
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
    /// The name that git gives to a file (`git hash-object`), 40 digits: SHA-1 over its size and its bytes.
    /// Only used to check small files of a Hugging Face cache ([`Verify::hub`]); it cannot be requested.
    #[strum(serialize = "git-sha1")]
    GitSha1,
}

impl Algorithm {
    /// Every algorithm that can be requested.
    pub const ALL: &'static [Self] = &[Self::Crc32c, Self::Xxh3, Self::Blake3, Self::Sha256];

    /// Its name on the command line and in JSON.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Number of hexadecimal digits.
    pub fn digits(self) -> usize {
        match self {
            Self::Crc32c => 8,
            Self::Xxh3 => 16,
            Self::GitSha1 => 40,
            Self::Blake3 | Self::Sha256 => 64,
        }
    }
}

/// A checksum to compute, and its expected value.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Verify {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The expected digest in lower-case hexadecimal. Without one the digest is only computed and
    /// reported, except for the SHA-256 of files in a Hugging Face cache, which are named by it.
    pub expected: Option<String>,
    /// Each file must be in a Hugging Face cache, and is compared with the digest that names it there.
    pub hub: bool,
}

impl Verify {
    /// Compares each file with the digest that names it in a Hugging Face cache (SHA-256, or git's SHA-1
    /// for small files), and fails the load if there is none.
    pub fn hub() -> Self {
        Self {
            algorithm: Algorithm::Sha256,
            expected: None,
            hub: true,
        }
    }

    /// Computes a checksum, and reports it.
    pub fn compute(algorithm: Algorithm) -> Self {
        Self {
            algorithm,
            expected: None,
            hub: false,
        }
    }

    /// Computes a checksum, and fails the load if it differs from `hex`.
    ///
    /// # Errors
    /// Kind [`Usage`](crate::ErrorKind::Usage) if `hex` is not a digest of this algorithm.
    pub fn expect(algorithm: Algorithm, hex: &str) -> Result<Self> {
        let hex = hex.to_ascii_lowercase();
        if hex.len() != algorithm.digits() || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
            let digits = algorithm.digits();
            let why = format!(
                "'{hex}' is not a valid {algorithm} digest, which has {digits} hexadecimal digits"
            );
            return Err(Error::usage(Opt::Verify, why));
        }
        Ok(Self {
            algorithm,
            expected: Some(hex),
            hub: false,
        })
    }
}

impl FromStr for Verify {
    type Err = Error;

    /// `ALGO` or `ALGO=HEX`, where ALGO is crc32c, xxh3 (or xxh3-64), blake3 or sha256; or `hub`.
    fn from_str(text: &str) -> Result<Self> {
        if text == "hub" {
            return Ok(Self::hub());
        }
        let (name, expected) = match text.split_once('=') {
            Some((name, hex)) => (name, Some(hex)),
            None => (text, None),
        };
        let wanted = if name == "xxh3-64" { "xxh3" } else { name };
        let known = Algorithm::ALL.iter().find(|one| one.name() == wanted);
        let algorithm = *known.ok_or_else(|| {
            let names: Vec<_> = Algorithm::ALL.iter().map(|one| one.name()).collect();
            let names = names.join(", ");
            Error::usage(Opt::Verify, format!("'{name}' is not one of {names}, hub"))
        })?;
        match expected {
            Some(hex) => Self::expect(algorithm, hex),
            None => Ok(Self::compute(algorithm)),
        }
    }
}

/// A computed digest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Verified {
    /// The file whose bytes these are; in JSON, parts of its path that are not UTF-8 are replaced.
    #[serde(serialize_with = "crate::error::lossy")]
    pub file: PathBuf,
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The digest in lower-case hexadecimal.
    pub digest: String,
    /// True if it equals the expected digest; false if none was given.
    pub matched: bool,
}

/// A digest to compute.
#[derive(Debug)]
pub struct DigestCheck {
    /// The file.
    pub file: PathBuf,
    /// The bytes of the source to hash.
    pub range: (u64, u64),
    /// How.
    pub algorithm: Algorithm,
    /// The digest that it must have.
    pub expected: Option<String>,
    /// The expected digest comes from the file's name in the Hugging Face cache.
    pub by_name: bool,
}

impl DigestCheck {
    /// The checks that `verify` requires for the bytes `[start, end)` of a source: one digest per file.
    pub fn all(verify: &Verify, source: &Source, start: u64, end: u64) -> Result<Vec<Self>> {
        let mut checks = Vec::new();
        for (path, at, size) in source.files() {
            let range = (start.max(at), end.min(at + size));
            if range.0 >= range.1 {
                continue;
            }
            let whole = range == (at, at + size);
            let named = match verify {
                Verify { hub: true, .. } => Some(named_in_hub(path, whole)?),
                Verify { expected: None, .. } if whole => named_in_cache(path)
                    .ok()
                    .filter(|(algorithm, _)| *algorithm == verify.algorithm),
                _ => None,
            };
            let by_name = named.is_some();
            let (algorithm, expected) = match named {
                Some((algorithm, digest)) => (algorithm, Some(digest)),
                None => (verify.algorithm, verify.expected.clone()),
            };
            checks.push(Self {
                file: path.to_path_buf(),
                range,
                algorithm,
                expected,
                by_name,
            });
        }
        if verify.expected.is_some() && checks.len() > 1 {
            return Err(Error::usage(
                Opt::Verify,
                format!(
                    "{}=HEX works for one file only, but there are several",
                    verify.algorithm
                ),
            ));
        }
        Ok(checks)
    }

    /// Compares a computed digest with the expected one, if there is one.
    pub fn compare(&self, digest: String) -> Result<Verified> {
        if let Some(expected) = self.expected.as_ref().filter(|wanted| **wanted != digest) {
            return Err(Error::new(
                "wrong digest",
                format!("{} is {digest} and should be {expected}", self.algorithm),
            )
            .with_errno(Errno::BADMSG)
            .at(self.file.display().to_string())
            .with_remedy("the file is damaged, or is not the expected one: download it again"));
        }
        Ok(Verified {
            file: self.file.clone(),
            algorithm: self.algorithm,
            digest,
            matched: self.expected.is_some(),
        })
    }
}

/// As [`named_in_cache`], for a file that must have such a name.
fn named_in_hub(path: &Path, whole: bool) -> Result<(Algorithm, String)> {
    let named = if whole {
        named_in_cache(path)
    } else {
        Err("only a whole file is named by its digest")
    };
    named.map_err(|why| {
        Error::new("cannot verify", why)
            .with_errno(Errno::INVAL)
            .at(path.display().to_string())
            .with_remedy(message![
                "name its digest: ",
                Opt::Verify.set("sha256=HEX"),
                ", or load the whole file from such a cache"
            ])
    })
}

/// The digest that names a file in a Hugging Face cache, or why there is none:
/// `models--…/snapshots/REVISION/NAME` is a link to `models--…/blobs/DIGEST`, where DIGEST is the SHA-256
/// of a large file (Git LFS) or git's own name of any other.
fn named_in_cache(path: &Path) -> Result<(Algorithm, String), &'static str> {
    const NONE: &str = "it is not in a Hugging Face cache (models--…/blobs), whose files are named by their digests";
    let blob = path.canonicalize().map_err(|_| NONE)?;
    let folder = |path: &Path| {
        let parent = path.parent()?;
        Some((
            parent.to_path_buf(),
            parent.file_name()?.to_str()?.to_string(),
        ))
    };
    let (blobs, name) = folder(&blob).ok_or(NONE)?;
    let (_, repository) = folder(&blobs).ok_or(NONE)?;
    let kinds = ["models--", "datasets--", "spaces--"];
    if name != "blobs" || !kinds.iter().any(|kind| repository.starts_with(kind)) {
        return Err(NONE);
    }
    let digest = blob.file_name().and_then(|name| name.to_str());
    let digest = digest.filter(|name| name.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')));
    let known = [Algorithm::Sha256, Algorithm::GitSha1];
    let named = digest.and_then(|name| {
        let algorithm = known.into_iter().find(|one| one.digits() == name.len())?;
        Some((algorithm, name.to_string()))
    });
    named.ok_or("its name in the Hugging Face cache is not a known digest")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_parsed_strictly() {
        let verify: Verify = "xxh3-64=78AF5F94892F3950".parse().unwrap();
        assert_eq!(verify.expected.as_deref(), Some("78af5f94892f3950"));
        for bad in [
            "md5",
            "crc32c=12",
            "sha256=",
            "crc32c=0000000g",
            "",
            "git-sha1",
            "hub=",
            "Hub",
        ] {
            assert!(bad.parse::<Verify>().is_err(), "{bad}");
        }
    }
}
