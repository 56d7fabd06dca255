//! Replaces the algorithms if the feature `checksums` is off: `Load::verify` and
//! `Save::verify` do not exist then, so no checksum is ever computed.

use super::Algorithm;

/// Never created.
pub(crate) struct Hasher;

impl Hasher {
    pub(crate) fn new(_: Algorithm, _: u64) -> Self {
        unreachable!("nothing asks for a checksum")
    }

    pub(crate) fn update(&mut self, _: &[u8]) {}

    pub(crate) fn hex(self) -> String {
        String::new()
    }
}
