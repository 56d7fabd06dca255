//! Types of tensor elements.

use serde::Serialize;
use strum::{Display, IntoStaticStr, VariantArray};

/// Declares the types: name, elements per block, bits per block.
macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $elements:literal, $bits:literal;)+) => {
        /// The type of a tensor's elements. Quantised types are stored in blocks of several
        /// elements.
        #[derive(
            Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Display, IntoStaticStr, VariantArray,
        )]
        #[serde(into = "&'static str")]
        #[non_exhaustive]
        pub enum Dtype {
            $($(#[$doc])* #[strum(serialize = $name)] $variant),+
        }

        impl Dtype {
            /// Elements per block; 1 for a type without blocks.
            pub fn block_elements(self) -> u64 {
                match self {
                    $(Self::$variant => $elements),+
                }
            }

            /// Bits per block: a multiple of 8, except for types narrower than a byte.
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
    /// 4 bits and a scale, in blocks of 32.
    Q4_0 = "Q4_0", 32, 144;
    /// 4 bits, a scale and a minimum, in blocks of 32.
    Q4_1 = "Q4_1", 32, 160;
    /// 5 bits and a scale, in blocks of 32.
    Q5_0 = "Q5_0", 32, 176;
    /// 5 bits, a scale and a minimum, in blocks of 32.
    Q5_1 = "Q5_1", 32, 192;
    /// 8 bits and a scale, in blocks of 32.
    Q8_0 = "Q8_0", 32, 272;
    /// 8 bits, a scale and a sum, in blocks of 32.
    Q8_1 = "Q8_1", 32, 320;
    /// 2 bits, in blocks of 256.
    Q2K = "Q2_K", 256, 672;
    /// 3 bits, in blocks of 256.
    Q3K = "Q3_K", 256, 880;
    /// 4 bits, in blocks of 256.
    Q4K = "Q4_K", 256, 1152;
    /// 5 bits, in blocks of 256.
    Q5K = "Q5_K", 256, 1408;
    /// 6 bits, in blocks of 256.
    Q6K = "Q6_K", 256, 1680;
    /// 8 bits, in blocks of 256.
    Q8K = "Q8_K", 256, 2336;
    /// 2.06 bits by a codebook, in blocks of 256.
    Iq2Xxs = "IQ2_XXS", 256, 528;
    /// 2.31 bits by a codebook, in blocks of 256.
    Iq2Xs = "IQ2_XS", 256, 592;
    /// 3.06 bits by a codebook, in blocks of 256.
    Iq3Xxs = "IQ3_XXS", 256, 784;
    /// 1.56 bits by a codebook, in blocks of 256.
    Iq1S = "IQ1_S", 256, 400;
    /// 4.5 bits by a table, in blocks of 32.
    Iq4Nl = "IQ4_NL", 32, 144;
    /// 3.44 bits by a codebook, in blocks of 256.
    Iq3S = "IQ3_S", 256, 880;
    /// 2.56 bits by a codebook, in blocks of 256.
    Iq2S = "IQ2_S", 256, 656;
    /// 4.25 bits by a table, in blocks of 256.
    Iq4Xs = "IQ4_XS", 256, 1088;
    /// 1.75 bits by a codebook, in blocks of 256.
    Iq1M = "IQ1_M", 256, 448;
    /// Ternary, 1.69 bits, in blocks of 256.
    Tq1_0 = "TQ1_0", 256, 432;
    /// Ternary, 2.06 bits, in blocks of 256.
    Tq2_0 = "TQ2_0", 256, 528;
    /// Floating point, 4 bits (OCP MX) and a scale, in blocks of 32.
    Mxfp4 = "MXFP4", 32, 136;
    /// Floating point, 4 bits and four scales, in blocks of 64.
    Nvfp4 = "NVFP4", 64, 288;
    /// 1 bit and a scale, in blocks of 128.
    Q1_0 = "Q1_0", 128, 144;
    /// 2 bits and a scale, in blocks of 64.
    Q2_0 = "Q2_0", 64, 144;
}

impl Dtype {
    /// All types.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// Its name, as the file formats spell it: `BF16`, `Q4_K`.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// The size of `elements` consecutive elements in bytes; None if they end inside a block or
    /// byte, or on overflow.
    pub fn bytes(self, elements: u64) -> Option<u64> {
        if !elements.is_multiple_of(self.block_elements()) {
            return None;
        }
        let bits = (elements / self.block_elements()).checked_mul(self.block_bits())?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}
