//! Checksums, computed in file order while later extents are still on their way.

use crate::error::{Error, Result};
use serde::Serialize;
use sha2::Digest as _;
use std::fmt;
use std::str::FromStr;

/// A checksum algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
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
    pub const ALL: [Self; 4] = [Self::Crc32c, Self::Xxh3, Self::Blake3, Self::Sha256];

    /// Its name on the command line and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Crc32c => "crc32c",
            Self::Xxh3 => "xxh3",
            Self::Blake3 => "blake3",
            Self::Sha256 => "sha256",
        }
    }

    fn digits(self) -> usize {
        match self {
            Self::Crc32c => 8,
            Self::Xxh3 => 16,
            Self::Blake3 | Self::Sha256 => 64,
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A checksum to compute, and what it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verify {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The digest in lower-case hexadecimal; without one it is only computed and reported.
    pub expected: Option<String>,
}

impl FromStr for Verify {
    type Err = Error;

    /// `ALGO` or `ALGO=HEX`, where ALGO is crc32c, xxh3 (or xxh3-64), blake3 or sha256.
    fn from_str(text: &str) -> Result<Self> {
        let (name, expected) = match text.split_once('=') {
            Some((name, hex)) => (name, Some(hex.to_ascii_lowercase())),
            None => (text, None),
        };
        let wanted = if name == "xxh3-64" { "xxh3" } else { name };
        let algorithm = Algorithm::ALL
            .into_iter()
            .find(|algorithm| algorithm.name() == wanted)
            .ok_or_else(|| {
                let names = Algorithm::ALL.map(Algorithm::name).join(", ");
                Error::usage("--verify", format!("'{name}' is none of {names}"))
            })?;
        if let Some(hex) = &expected
            && (hex.len() != algorithm.digits() || !hex.bytes().all(|b| b.is_ascii_hexdigit()))
        {
            return Err(Error::usage(
                "--verify",
                format!(
                    "'{hex}' is no {algorithm}: {} hexadecimal digits",
                    algorithm.digits()
                ),
            ));
        }
        Ok(Self {
            algorithm,
            expected,
        })
    }
}

/// A digest that was computed, and the one that was expected if any.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The digest in lower-case hexadecimal.
    pub digest: String,
    /// It was compared with an expected one, and equal.
    pub matched: bool,
}

/// A checksum in the making.
pub(crate) enum Hasher {
    Crc32c(u32),
    Xxh3(Box<xxhash_rust::xxh3::Xxh3>),
    Blake3(Box<blake3::Hasher>),
    Sha256(sha2::Sha256),
}

impl Hasher {
    pub(crate) fn new(algorithm: Algorithm) -> Self {
        match algorithm {
            Algorithm::Crc32c => Self::Crc32c(0),
            Algorithm::Xxh3 => Self::Xxh3(Box::default()),
            Algorithm::Blake3 => Self::Blake3(Box::default()),
            Algorithm::Sha256 => Self::Sha256(sha2::Sha256::default()),
        }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Crc32c(sum) => *sum = crc32c::crc32c_append(*sum, bytes),
            Self::Xxh3(hasher) => hasher.update(bytes),
            Self::Blake3(hasher) => {
                hasher.update(bytes);
            }
            Self::Sha256(hasher) => hasher.update(bytes),
        }
    }

    pub(crate) fn hex(self) -> String {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        match self {
            Self::Crc32c(sum) => format!("{sum:08x}"),
            Self::Xxh3(hasher) => format!("{:016x}", hasher.digest()),
            Self::Blake3(hasher) => hex(hasher.finalize().as_bytes()),
            Self::Sha256(hasher) => hex(&hasher.finalize()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Published digests of "abc" (RFC 3720's polynomial; FIPS 180-4; the XXH3 and BLAKE3
    /// reference programs).
    #[test]
    fn digests_are_the_published_ones() {
        let of = |algorithm| {
            let mut hasher = Hasher::new(algorithm);
            hasher.update(b"a");
            hasher.update(b"bc");
            hasher.hex()
        };
        assert_eq!(of(Algorithm::Crc32c), "364b3fb7");
        assert_eq!(of(Algorithm::Xxh3), "78af5f94892f3950");
        assert_eq!(
            of(Algorithm::Blake3),
            "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
        );
        assert_eq!(
            of(Algorithm::Sha256),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }

    #[test]
    fn digests_are_parsed_strictly() {
        let verify: Verify = "xxh3-64=78AF5F94892F3950".parse().unwrap();
        assert_eq!(verify.expected.as_deref(), Some("78af5f94892f3950"));
        for bad in ["md5", "crc32c=12", "sha256=", "crc32c=0000000g", ""] {
            assert!(bad.parse::<Verify>().is_err(), "{bad}");
        }
    }
}
