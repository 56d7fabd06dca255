//! The algorithms of checksums, each implemented by a crate.

use crc::{CRC_64_NVME, Crc, Digest, Table};
use serde::Serialize;
use sha2::Digest as _;
use strum::{Display, EnumString, IntoStaticStr};

/// A checksum algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Display, EnumString, IntoStaticStr)]
#[serde(into = "&'static str")]
#[strum(serialize_all = "lowercase")]
#[non_exhaustive]
pub enum Algorithm {
    /// CRC-32C (Castagnoli), 8 hexadecimal digits.
    Crc32c,
    /// CRC-64/NVME, 16 digits: what S3 keeps of an object.
    Crc64Nvme,
    /// XXH3, 64 bits, 16 digits.
    Xxh3,
    /// BLAKE3, 64 digits.
    Blake3,
    /// SHA-256, 64 digits: what `sha256sum` prints.
    Sha256,
    /// The name that git gives to a file (`git hash-object`), 40 digits: SHA-1 over its size and its bytes.
    /// Only used to check small files of the Hugging Face Hub ([`Verify::stored`](crate::Verify::stored)); it cannot be requested.
    #[strum(serialize = "git-sha1")]
    GitSha1,
}

impl Algorithm {
    /// Every algorithm that can be requested.
    pub const ALL: &'static [Self] = &[
        Self::Crc32c,
        Self::Crc64Nvme,
        Self::Xxh3,
        Self::Blake3,
        Self::Sha256,
    ];

    /// Its name on the command line and in JSON.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// True if something may keep its digests with the bytes: the name of a file, or a store.
    pub(crate) fn may_be_stored(self) -> bool {
        !matches!(self, Self::Xxh3 | Self::Blake3)
    }

    /// Number of hexadecimal digits.
    pub fn digits(self) -> usize {
        match self {
            Self::Crc32c => 8,
            Self::Xxh3 | Self::Crc64Nvme => 16,
            Self::GitSha1 => 40,
            Self::Blake3 | Self::Sha256 => 64,
        }
    }
}

static CRC64: Crc<u64, Table<16>> = Crc::<u64, Table<16>>::new(&CRC_64_NVME);

/// A checksum that is being computed.
#[allow(missing_docs)]
pub enum Hasher {
    Crc32c(u32),
    Crc64Nvme(Digest<'static, u64, Table<16>>),
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
            Algorithm::Crc64Nvme => Self::Crc64Nvme(CRC64.digest()),
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
            Self::Crc64Nvme(hasher) => hasher.update(bytes),
            Self::Xxh3(hasher) => hasher.update(bytes),
            Self::Blake3(hasher) => {
                hasher.update(bytes);
            }
            Self::Sha256(hasher) => hasher.update(bytes),
            Self::GitSha1(hasher) => hasher.update(bytes),
        }
    }

    /// Adds so many zeros, as in a hole of a file.
    pub fn zeros(&mut self, mut count: u64) {
        static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
        while count > 0 {
            let step = count.min(ZEROS.len() as u64);
            self.update(&ZEROS[..step as usize]);
            count -= step;
        }
    }

    /// The digest in lower-case hexadecimal.
    pub fn hex(self) -> String {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        match self {
            Self::Crc32c(sum) => format!("{sum:08x}"),
            Self::Crc64Nvme(hasher) => format!("{:016x}", hasher.finalize()),
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
    /// and BLAKE3), of "123456789" (the catalogue of CRCs), and the output of `git hash-object`.
    #[test]
    fn digests_equal_the_published_ones() {
        let of = |algorithm| {
            let mut hasher = Hasher::new(algorithm, 3);
            hasher.update(b"a");
            hasher.update(b"bc");
            hasher.hex()
        };
        assert_eq!(of(Algorithm::Crc32c), "364b3fb7");
        let mut check = Hasher::new(Algorithm::Crc64Nvme, 9);
        check.update(b"1234");
        check.update(b"56789");
        assert_eq!(check.hex(), "ae8b14860a799888");
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
