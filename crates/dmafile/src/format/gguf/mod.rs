//! GGUF: counts, typed metadata, descriptions of tensors, then their bytes, aligned.
//!
//! All numbers are little-endian. Each count and length is checked against the remaining bytes
//! of the file before it is used, and memory grows only with what has been read. Names and shapes have no other
//! limits, although ggml has: other programs write longer names and more dimensions, which the `gguf` package
//! reads, too.

use super::{Bad, Entry, Format, MAX_HEADER, Table, Value, elements, fill, in_order, quoted};
use crate::format::Dtype;
use std::collections::{BTreeMap, btree_map};
use std::fmt::Write as _;
use std::io::{BufReader, Read};

/// The first bytes of a file.
pub(super) const MAGIC: &[u8; 4] = b"GGUF";

/// The key of the tensor alignment.
const ALIGNMENT: &str = "general.alignment";

/// Tensor alignment of a file without that key.
const DEFAULT_ALIGNMENT: u64 = 32;

/// The maximum nesting of lists, which are read recursively. The format has no limit, but no known file nests
/// them at all.
const MAX_DEPTH: u32 = 4;

/// Texts are read in steps of this many bytes, so that memory is allocated only as they arrive.
const STEP: usize = 1 << 16;

// The minimum sizes in the file, in bytes.
const LEAST_TEXT: u64 = 8;
const LEAST_LIST: u64 = 12;
const LEAST_PAIR: u64 = LEAST_TEXT + 4 + 1;
const LEAST_TENSOR: u64 = LEAST_TEXT + 4 + 4 + 8;

pub(super) fn read(file: &mut impl Read, size: u64) -> Result<Table, Bad> {
    let mut header = GgufHeader {
        file: BufReader::new(file),
        at: 0,
        size,
        part: "its counts",
    };
    header.array::<{ MAGIC.len() }>()?;
    version(header.u32()?)?;
    let tensors = header.u64()?;
    let pairs = header.u64()?;
    header.room(tensors, LEAST_TENSOR, "tensors")?;
    header.room(pairs, LEAST_PAIR, "metadata pairs")?;

    header.part = "its metadata";
    let (metadata, alignment) = header.metadata(pairs)?;
    header.part = "its tensors' descriptions";
    let mut tensors = header.several(tensors, |header| header.tensor(alignment))?;

    // A file without tensors may end before the place where they would start.
    let data = header.at.next_multiple_of(alignment).min(size);
    let room = size - data;
    for tensor in &mut tensors {
        if tensor.offset > room || tensor.bytes > room - tensor.offset {
            return Err(Bad::new(format!(
                "the tensor {} has {} bytes at data offset {}, but the data has {room} bytes",
                quoted(&tensor.name),
                tensor.bytes,
                tensor.offset
            )));
        }
        tensor.offset += data;
    }
    Ok(Table {
        format: Format::Gguf,
        metadata,
        has_metadata: true,
        tensors: in_order(tensors)?,
        data,
    })
}

fn version(version: u32) -> Result<(), Bad> {
    match version {
        2 | 3 => Ok(()),
        1 => Err(Bad::new(
            "GGUF version 1, which is no longer in use: convert the file again",
        )),
        _ if version & 0xffff == 0 && version != 0 => Err(Bad::new(format!(
            "big-endian GGUF (version {}): only little-endian files are read",
            version.swap_bytes()
        ))),
        _ => Err(Bad::new(format!("unknown GGUF version {version}"))),
    }
}

/// Reads numbers, each by a method named like its type.
macro_rules! numbers {
    ($($type:ident)+) => {
        $(fn $type(&mut self) -> Result<$type, Bad> {
            self.array().map($type::from_le_bytes)
        })+
    };
}

/// A header, and how far it has been read.
struct GgufHeader<R> {
    file: BufReader<R>,
    at: u64,
    size: u64,
    /// The part that is being read.
    part: &'static str,
}

impl<R: Read> GgufHeader<R> {
    /// The number of remaining bytes.
    fn left(&self) -> u64 {
        self.size.min(MAX_HEADER).saturating_sub(self.at)
    }

    /// Refuses `count` items of at least `least` bytes each if the rest of the file is too short
    /// for them.
    fn room(&self, count: u64, least: u64, what: &str) -> Result<(), Bad> {
        let room = self.left() / least;
        if count > room {
            return Err(Bad::new(format!(
                "{count} {what} announced before byte {}, where at most {room} can follow",
                self.at
            )));
        }
        Ok(())
    }

    fn fill(&mut self, into: &mut [u8]) -> Result<(), Bad> {
        let wanted = into.len() as u64;
        if wanted > self.left() {
            return Err(Bad::new(if self.size > MAX_HEADER {
                format!("a header of more than {MAX_HEADER} bytes")
            } else {
                format!("the file ends inside {}, after byte {}", self.part, self.at)
            }));
        }
        fill(&mut self.file, into)?;
        self.at += wanted;
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Bad> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    numbers!(u8 i8 u16 i16 u32 i32 u64 i64 f32 f64);

    fn bool(&mut self) -> Result<bool, Bad> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(Bad::new(format!(
                "a boolean of {other} before byte {}: neither 0 nor 1",
                self.at
            ))),
        }
    }

    /// The bytes of a string.
    fn string(&mut self) -> Result<Vec<u8>, Bad> {
        let length = self.u64()?;
        self.room(length, 1, "bytes of a string")?;
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < length {
            let have = bytes.len();
            bytes.resize((length as usize).min(have + STEP), 0);
            self.fill(&mut bytes[have..])?;
        }
        Ok(bytes)
    }

    /// The name of a tensor or value, by which others refer to it.
    fn name(&mut self) -> Result<String, Bad> {
        let bytes = self.string()?;
        let start = self.at - bytes.len() as u64;
        String::from_utf8(bytes)
            .map_err(|_| Bad::new(format!("a name at byte {start} is not UTF-8")))
    }

    /// A text. The tokens of a vocabulary may be parts of characters, which are escaped.
    fn text(&mut self) -> Result<String, Bad> {
        String::from_utf8(self.string()?).or_else(|error| Ok(escaped(error.as_bytes())))
    }

    /// The metadata, and the alignment that it sets.
    fn metadata(&mut self, pairs: u64) -> Result<(BTreeMap<String, Value>, u64), Bad> {
        let mut metadata = BTreeMap::new();
        let mut alignment = DEFAULT_ALIGNMENT;
        for _ in 0..pairs {
            let key = self.name()?;
            let kind = self.kind()?;
            let value = self.value(kind, 0)?;
            if key == ALIGNMENT {
                alignment = aligned(kind, &value)?;
            }
            match metadata.entry(key) {
                btree_map::Entry::Vacant(place) => {
                    place.insert(value);
                }
                btree_map::Entry::Occupied(place) => {
                    return Err(Bad::new(format!(
                        "two values for the key {}",
                        quoted(place.key())
                    )));
                }
            }
        }
        Ok((metadata, alignment))
    }

    fn kind(&mut self) -> Result<ValueType, Bad> {
        let id = self.u32()?;
        ValueType::from_repr(id).ok_or_else(|| {
            Bad::new(format!(
                "a value of the unknown type {id} before byte {}",
                self.at
            ))
        })
    }

    /// A value inside of `depth` lists.
    fn value(&mut self, kind: ValueType, depth: u32) -> Result<Value, Bad> {
        Ok(match kind {
            ValueType::U8 => Value::Unsigned(self.u8()?.into()),
            ValueType::I8 => Value::Signed(self.i8()?.into()),
            ValueType::U16 => Value::Unsigned(self.u16()?.into()),
            ValueType::I16 => Value::Signed(self.i16()?.into()),
            ValueType::U32 => Value::Unsigned(self.u32()?.into()),
            ValueType::I32 => Value::Signed(self.i32()?.into()),
            ValueType::F32 => Value::Float(self.f32()?.into()),
            ValueType::Bool => Value::Bool(self.bool()?),
            ValueType::Text => Value::Text(self.text()?),
            ValueType::List => self.list(depth)?,
            ValueType::U64 => Value::Unsigned(self.u64()?),
            ValueType::I64 => Value::Signed(self.i64()?),
            ValueType::F64 => Value::Float(self.f64()?),
        })
    }

    fn list(&mut self, depth: u32) -> Result<Value, Bad> {
        if depth == MAX_DEPTH {
            return Err(Bad::new(format!(
                "arrays nested more than {MAX_DEPTH} deep, before byte {}",
                self.at
            )));
        }
        let kind = self.kind()?;
        let count = self.u64()?;
        self.room(count, kind.least(), "values of an array")?;
        Ok(match kind {
            ValueType::U8 => Value::Bytes(self.several(count, Self::u8)?),
            ValueType::I8 => Value::Signeds(self.several(count, |from| from.i8().map(i64::from))?),
            ValueType::U16 => {
                Value::Unsigneds(self.several(count, |from| from.u16().map(u64::from))?)
            }
            ValueType::I16 => {
                Value::Signeds(self.several(count, |from| from.i16().map(i64::from))?)
            }
            ValueType::U32 => {
                Value::Unsigneds(self.several(count, |from| from.u32().map(u64::from))?)
            }
            ValueType::I32 => {
                Value::Signeds(self.several(count, |from| from.i32().map(i64::from))?)
            }
            ValueType::F32 => Value::Floats(self.several(count, |from| from.f32().map(f64::from))?),
            ValueType::Bool => Value::Bools(self.several(count, Self::bool)?),
            ValueType::Text => Value::Texts(self.several(count, Self::text)?),
            ValueType::List => Value::Lists(self.several(count, |from| from.list(depth + 1))?),
            ValueType::U64 => Value::Unsigneds(self.several(count, Self::u64)?),
            ValueType::I64 => Value::Signeds(self.several(count, Self::i64)?),
            ValueType::F64 => Value::Floats(self.several(count, Self::f64)?),
        })
    }

    fn several<T>(
        &mut self,
        count: u64,
        one: impl Fn(&mut Self) -> Result<T, Bad>,
    ) -> Result<Vec<T>, Bad> {
        let mut all = Vec::new();
        for _ in 0..count {
            all.push(one(self)?);
        }
        Ok(all)
    }

    /// A tensor, with its offset counted from the start of the data.
    fn tensor(&mut self, alignment: u64) -> Result<Entry, Bad> {
        let name = self.name()?;
        let unsound = |what: String| Err(Bad::new(format!("the tensor {} {what}", quoted(&name))));

        let dimensions = u64::from(self.u32()?);
        self.room(dimensions, 8, "dimensions")?;
        let mut shape = self.several(dimensions, Self::u64)?;
        // The format has the fastest-varying dimension first.
        shape.reverse();

        let id = self.u32()?;
        let Some(dtype) = dtype(id) else {
            return unsound(format!("has the unknown type {id}"));
        };
        let Some(count) = elements(&shape) else {
            return unsound("has a shape whose size overflows".to_string());
        };
        let block = dtype.block_elements();
        let row = shape.last().copied().unwrap_or(1);
        if !row.is_multiple_of(block) {
            return unsound(format!(
                "has rows of {row} elements, but {dtype} comes in blocks of {block}"
            ));
        }
        let Some(bytes) = dtype.bytes(count) else {
            return unsound("has a size that overflows".to_string());
        };

        let offset = self.u64()?;
        if !offset.is_multiple_of(alignment) {
            return unsound(format!(
                "starts at data offset {offset}, not at a multiple of {alignment}"
            ));
        }
        Ok(Entry {
            name,
            dtype,
            shape,
            offset,
            bytes,
        })
    }
}

/// The alignment that the metadata sets.
fn aligned(kind: ValueType, value: &Value) -> Result<u64, Bad> {
    match *value {
        Value::Unsigned(bytes) if kind == ValueType::U32 && bytes.is_power_of_two() => Ok(bytes),
        Value::Unsigned(bytes) if kind == ValueType::U32 => Err(Bad::new(format!(
            "{ALIGNMENT} is {bytes}: it must be a power of two"
        ))),
        _ => Err(Bad::new(format!(
            "{ALIGNMENT} is not an unsigned number of 32 bits"
        ))),
    }
}

/// A text in which each byte that is not UTF-8 is written as `\xNN`.
fn escaped(bytes: &[u8]) -> String {
    let mut text = String::new();
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        for byte in chunk.invalid() {
            // Writing to a String does not fail.
            let _ = write!(text, "\\x{byte:02x}");
        }
    }
    text
}

/// The type of a value, with its number in the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::FromRepr)]
#[repr(u32)]
enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    List,
    U64,
    I64,
    F64,
}

impl ValueType {
    /// The minimum size of a value in the file, in bytes.
    fn least(self) -> u64 {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
            Self::Text => LEAST_TEXT,
            Self::List => LEAST_LIST,
        }
    }
}

/// The type with this number in ggml; None for numbers that it has dropped or never used.
fn dtype(id: u32) -> Option<Dtype> {
    Some(match id {
        0 => Dtype::F32,
        1 => Dtype::F16,
        2 => Dtype::Q4_0,
        3 => Dtype::Q4_1,
        6 => Dtype::Q5_0,
        7 => Dtype::Q5_1,
        8 => Dtype::Q8_0,
        9 => Dtype::Q8_1,
        10 => Dtype::Q2K,
        11 => Dtype::Q3K,
        12 => Dtype::Q4K,
        13 => Dtype::Q5K,
        14 => Dtype::Q6K,
        15 => Dtype::Q8K,
        16 => Dtype::Iq2Xxs,
        17 => Dtype::Iq2Xs,
        18 => Dtype::Iq3Xxs,
        19 => Dtype::Iq1S,
        20 => Dtype::Iq4Nl,
        21 => Dtype::Iq3S,
        22 => Dtype::Iq2S,
        23 => Dtype::Iq4Xs,
        24 => Dtype::I8,
        25 => Dtype::I16,
        26 => Dtype::I32,
        27 => Dtype::I64,
        28 => Dtype::F64,
        29 => Dtype::Iq1M,
        30 => Dtype::Bf16,
        34 => Dtype::Tq1_0,
        35 => Dtype::Tq2_0,
        39 => Dtype::Mxfp4,
        40 => Dtype::Nvfp4,
        41 => Dtype::Q1_0,
        42 => Dtype::Q2_0,
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
