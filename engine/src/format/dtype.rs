//! What the elements of a tensor are.

use serde::Serialize;
use std::fmt;

/// Declares the types: their name, elements in a block, bits of a block.
macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $elements:literal, $bits:literal;)+) => {
        /// The type of a tensor's elements. Quantised ones come in blocks of several elements.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
        #[non_exhaustive]
        pub enum Dtype {
            $($(#[$doc])* #[serde(rename = $name)] $variant),+
        }

        impl Dtype {
            /// Every type.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Its name as the formats spell it: `BF16`, `Q4_K`.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name),+
                }
            }

            /// Elements in a block; 1 where each stands for itself.
            pub fn block_elements(self) -> u64 {
                match self {
                    $(Self::$variant => $elements),+
                }
            }

            /// Bits of a block: a multiple of 8, but for types narrower than a byte.
            pub fn block_bits(self) -> u64 {
                match self {
                    $(Self::$variant => $bits),+
                }
            }
        }
    };
}

dtypes! {
    /// A boolean, one byte.
    Bool = "BOOL", 1, 8;
    /// Unsigned, 8 bits.
    U8 = "U8", 1, 8;
    /// Signed, 8 bits.
    I8 = "I8", 1, 8;
    /// Unsigned, 16 bits.
    U16 = "U16", 1, 16;
    /// Signed, 16 bits.
    I16 = "I16", 1, 16;
    /// Unsigned, 32 bits.
    U32 = "U32", 1, 32;
    /// Signed, 32 bits.
    I32 = "I32", 1, 32;
    /// Unsigned, 64 bits.
    U64 = "U64", 1, 64;
    /// Signed, 64 bits.
    I64 = "I64", 1, 64;
    /// Floating point, 16 bits (IEEE 754).
    F16 = "F16", 1, 16;
    /// Floating point, 16 bits: the upper half of 32.
    Bf16 = "BF16", 1, 16;
    /// Floating point, 32 bits.
    F32 = "F32", 1, 32;
    /// Floating point, 64 bits.
    F64 = "F64", 1, 64;
    /// Complex, two times 32 bits.
    C64 = "C64", 1, 64;
    /// Floating point, 8 bits (OCP FP8).
    F8E4m3 = "F8_E4M3", 1, 8;
    /// Floating point, 8 bits (OCP FP8).
    F8E5m2 = "F8_E5M2", 1, 8;
    /// Floating point, 8 bits, without negative zero.
    F8E4m3fnuz = "F8_E4M3FNUZ", 1, 8;
    /// Floating point, 8 bits, without negative zero.
    F8E5m2fnuz = "F8_E5M2FNUZ", 1, 8;
    /// A power of two, 8 bits (OCP MX).
    F8E8m0 = "F8_E8M0", 1, 8;
    /// Floating point, 6 bits (OCP MX), packed.
    F6E2m3 = "F6_E2M3", 1, 6;
    /// Floating point, 6 bits (OCP MX), packed.
    F6E3m2 = "F6_E3M2", 1, 6;
    /// Floating point, 4 bits (OCP MX), packed.
    F4 = "F4", 1, 4;
}

impl Dtype {
    /// The bytes of `elements` in a row; None where they end inside a block or byte, or overflow.
    pub fn bytes(self, elements: u64) -> Option<u64> {
        if !elements.is_multiple_of(self.block_elements()) {
            return None;
        }
        let bits = (elements / self.block_elements()).checked_mul(self.block_bits())?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
