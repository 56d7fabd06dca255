//! Checksums, computed in file order while later extents are still being read.

mod follower;

pub use crate::digest::{Algorithm, Hasher};
pub use follower::Follower;

use crate::error::{Error, Result};
use crate::message::{Opt, message};
use crate::source::{RemoteObject, Source, failed};
use crate::sys::Errno;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// A checksum to compute, and its expected value.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Verify {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The expected digest in lower-case hexadecimal. Without one the digest is only computed and
    /// reported, except where it is stored with the bytes, as the SHA-256 of files in a Hugging Face cache is.
    pub expected: Option<String>,
    /// Each file is compared with the digest that is stored with it, and must have one.
    pub stored: bool,
}

impl Verify {
    /// Compares each file with the digest that is stored with it, and fails the load if there is none: the one that
    /// names it in a Hugging Face cache (SHA-256, or git's SHA-1 for small files), or the one that the store of an
    /// object keeps ([`RemoteObject::digest`](crate::RemoteObject::digest)).
    pub fn stored() -> Self {
        Self {
            algorithm: Algorithm::Sha256,
            expected: None,
            stored: true,
        }
    }

    /// Computes a checksum, and reports it.
    pub fn compute(algorithm: Algorithm) -> Self {
        Self {
            algorithm,
            expected: None,
            stored: false,
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
            stored: false,
        })
    }
}

impl FromStr for Verify {
    type Err = Error;

    /// `ALGO` or `ALGO=HEX`, where ALGO is crc32c, crc64nvme, xxh3 (or xxh3-64), blake3 or sha256; or `store`.
    fn from_str(text: &str) -> Result<Self> {
        if text == "store" {
            return Ok(Self::stored());
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
            Error::usage(
                Opt::Verify,
                format!("'{name}' is not one of {names}, store"),
            )
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
    /// Where the expected digest comes from, if the user has not named it.
    pub from: Option<&'static str>,
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
            let stored = || match source.object(at) {
                Some((_, object)) => of_object(object),
                None => named_in_cache(path),
            };
            let stored = match verify {
                Verify { stored: true, .. } => Some(required(path, whole, stored)?),
                // Asking a store may take a request.
                Verify { expected: None, .. } if whole && verify.algorithm.may_be_stored() => {
                    stored()
                        .ok()
                        .filter(|stored| stored.algorithm == verify.algorithm)
                }
                _ => None,
            };
            let file = path.to_path_buf();
            checks.push(match stored {
                Some(stored) => Self {
                    file,
                    range,
                    algorithm: stored.algorithm,
                    expected: Some(stored.digest),
                    from: Some(stored.from),
                },
                None => Self {
                    file,
                    range,
                    algorithm: verify.algorithm,
                    expected: verify.expected.clone(),
                    from: None,
                },
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

/// A digest that is stored with the bytes.
struct StoredDigest {
    algorithm: Algorithm,
    digest: String,
    from: &'static str,
}

/// The digest that is stored with a file, which must have one.
fn required(
    path: &Path,
    whole: bool,
    stored: impl FnOnce() -> Result<StoredDigest>,
) -> Result<StoredDigest> {
    if whole {
        return stored();
    }
    Err(no_digest("only a whole file has a stored digest").at(path.display().to_string()))
}

fn no_digest(why: &str) -> Error {
    Error::new("cannot verify", why)
        .with_errno(Errno::INVAL)
        .with_remedy(message![
            "name its digest: ",
            Opt::Verify.set("sha256=HEX"),
            ", or load a whole file that has one"
        ])
}

/// The digest that the store of an object keeps.
fn of_object(object: &dyn RemoteObject) -> Result<StoredDigest> {
    let found = object.digest();
    match found.map_err(|error| failed(error, || object.name()))? {
        Some((algorithm, digest)) => Ok(StoredDigest {
            algorithm,
            digest,
            from: "expected by its store",
        }),
        None => Err(
            no_digest("its store keeps no digest of all its bytes that is known here")
                .at(object.name()),
        ),
    }
}

/// The digest that names a file in a Hugging Face cache, or why there is none:
/// `models--…/snapshots/REVISION/NAME` is a link to `models--…/blobs/DIGEST`, where DIGEST is the SHA-256
/// of a large file (Git LFS) or git's own name of any other.
fn named_in_cache(path: &Path) -> Result<StoredDigest> {
    let named = name_in_cache(path);
    let (algorithm, digest) = named.map_err(|why| no_digest(why).at(path.display().to_string()))?;
    Ok(StoredDigest {
        algorithm,
        digest,
        from: "expected from the file's name in the Hugging Face cache",
    })
}

fn name_in_cache(path: &Path) -> Result<(Algorithm, String), &'static str> {
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
            "store=",
            "Store",
        ] {
            assert!(bad.parse::<Verify>().is_err(), "{bad}");
        }
    }
}
