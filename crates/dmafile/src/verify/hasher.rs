//! The algorithms, each implemented by a crate.

use super::Algorithm;
use sha2::Digest as _;

/// A checksum that is being computed.
#[allow(missing_docs)]
pub enum Hasher {
    Crc32c(u32),
    Xxh3(Box<xxhash_rust::xxh3::Xxh3>),
    Blake3(Box<blake3::Hasher>),
    Sha256(sha2::Sha256),
    GitSha1(sha1::Sha1),
}

impl Hasher {
    /// Starts a checksum of this many bytes.
    pub fn new(algorithm: Algorithm, bytes: u64) -> Self {
        match algorithm {
            Algorithm::Crc32c => Self::Crc32c(0),
            Algorithm::Xxh3 => Self::Xxh3(Box::default()),
            Algorithm::Blake3 => Self::Blake3(Box::default()),
            Algorithm::Sha256 => Self::Sha256(sha2::Sha256::default()),
            Algorithm::GitSha1 => {
                Self::GitSha1(sha1::Sha1::new_with_prefix(format!("blob {bytes}\0")))
            }
        }
    }

    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Crc32c(sum) => *sum = crc32c::crc32c_append(*sum, bytes),
            Self::Xxh3(hasher) => hasher.update(bytes),
            Self::Blake3(hasher) => {
                hasher.update(bytes);
            }
            Self::Sha256(hasher) => hasher.update(bytes),
            Self::GitSha1(hasher) => hasher.update(bytes),
        }
    }

    /// The digest in lower-case hexadecimal.
    pub fn hex(self) -> String {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        match self {
            Self::Crc32c(sum) => format!("{sum:08x}"),
            Self::Xxh3(hasher) => format!("{:016x}", hasher.digest()),
            Self::Blake3(hasher) => hex(hasher.finalize().as_bytes()),
            Self::Sha256(hasher) => hex(&hasher.finalize()),
            Self::GitSha1(hasher) => hex(&hasher.finalize()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Published digests of "abc" (the polynomial of RFC 3720; FIPS 180-4; the reference programs of XXH3
    /// and BLAKE3), and the output of `git hash-object`.
    #[test]
    fn digests_equal_the_published_ones() {
        let of = |algorithm| {
            let mut hasher = Hasher::new(algorithm, 3);
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
            of(Algorithm::GitSha1),
            "f2ba8f84ab5c1bce84a7b441cb1959cfc7093b7f"
        );
        assert_eq!(
            of(Algorithm::Sha256),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
