//! GGUF: counts, typed metadata, descriptions of tensors, then their bytes, aligned.
//!
//! Every number is little-endian. Each count and length is held against the bytes that can still
//! come before anything is made of it, and memory grows with what has come.

use super::{Bad, Entry, Format, MAX_HEADER, Table, Value, elements, fill, in_order, quoted};
use crate::format::Dtype;
use std::collections::{BTreeMap, btree_map};
use std::io::{BufReader, Read};

/// What a file starts with.
pub(super) const MAGIC: &[u8; 4] = b"GGUF";

/// The key that says how tensors are aligned.
const ALIGNMENT: &str = "general.alignment";

/// How tensors are aligned in a file without that key.
const DEFAULT_ALIGNMENT: u64 = 32;

/// Alignments that make sense: the format wants multiples of 8, and no page is above 1 GiB.
const ALIGNMENTS: std::ops::RangeInclusive<u64> = 8..=1 << 30;

/// The longest key, in bytes.
const MAX_KEY: u64 = 65535;

/// The longest name of a tensor, in bytes.
const MAX_NAME: u64 = 64;

/// The most dimensions of a tensor.
const MAX_DIMENSIONS: u32 = 4;

/// How deep lists may lie in lists. The format sets no limit; nobody is known to nest at all.
const MAX_DEPTH: u32 = 4;

/// What is read at once of a text, so that memory for it is taken as it comes.
const STEP: usize = 1 << 16;

// The least bytes that a thing takes in the file.
const LEAST_TEXT: u64 = 8;
const LEAST_LIST: u64 = 12;
const LEAST_PAIR: u64 = LEAST_TEXT + 4 + 1;
const LEAST_TENSOR: u64 = LEAST_TEXT + 4 + 4 + 8;

pub(super) fn read(file: &mut impl Read, size: u64) -> Result<Table, Bad> {
    let mut header = Header {
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

    // A file without tensors need not reach the place where they would start.
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
        tensors: in_order(tensors)?,
        data,
    })
}

fn version(version: u32) -> Result<(), Bad> {
    match version {
        2 | 3 => Ok(()),
        1 => Err(Bad::new(
            "GGUF version 1, which is no longer in use: convert the file anew",
        )),
        _ if version & 0xffff == 0 && version != 0 => Err(Bad::new(format!(
            "big-endian GGUF (version {}): only little-endian files are read",
            version.swap_bytes()
        ))),
        _ => Err(Bad::new(format!(
            "GGUF version {version}, which is not known here"
        ))),
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

/// A header and how far it has been read.
struct Header<R> {
    file: BufReader<R>,
    at: u64,
    size: u64,
    /// The part of it that is being read.
    part: &'static str,
}

impl<R: Read> Header<R> {
    /// The bytes that can still come.
    fn left(&self) -> u64 {
        self.size.min(MAX_HEADER).saturating_sub(self.at)
    }

    /// Refuses `count` things of at least `least` bytes each where they cannot come any more.
    fn room(&self, count: u64, least: u64, what: &str) -> Result<(), Bad> {
        let room = self.left() / least;
        if count > room {
            return Err(Bad::new(format!(
                "{count} {what} claimed before byte {}, where at most {room} can follow",
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

    /// A text of at most `most` bytes.
    fn text(&mut self, most: u64) -> Result<String, Bad> {
        let length = self.u64()?;
        let start = self.at;
        self.room(length, 1, "bytes of text")?;
        if length > most {
            return Err(Bad::new(format!(
                "a name of {length} bytes at byte {start}: at most {most} are allowed"
            )));
        }
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < length {
            let have = bytes.len();
            bytes.resize((length as usize).min(have + STEP), 0);
            self.fill(&mut bytes[have..])?;
        }
        String::from_utf8(bytes)
            .map_err(|_| Bad::new(format!("a text at byte {start} is not UTF-8")))
    }

    /// The metadata, and the alignment that it asks for.
    fn metadata(&mut self, pairs: u64) -> Result<(BTreeMap<String, Value>, u64), Bad> {
        let mut metadata = BTreeMap::new();
        let mut alignment = DEFAULT_ALIGNMENT;
        for _ in 0..pairs {
            let key = self.text(MAX_KEY)?;
            if key.is_empty() {
                return Err(Bad::new(format!("an empty key before byte {}", self.at)));
            }
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

    fn kind(&mut self) -> Result<Kind, Bad> {
        let id = self.u32()?;
        Kind::from_repr(id).ok_or_else(|| {
            Bad::new(format!(
                "a value of the unknown type {id} before byte {}",
                self.at
            ))
        })
    }

    /// A value that lies inside of `depth` lists.
    fn value(&mut self, kind: Kind, depth: u32) -> Result<Value, Bad> {
        Ok(match kind {
            Kind::U8 => Value::Unsigned(self.u8()?.into()),
            Kind::I8 => Value::Signed(self.i8()?.into()),
            Kind::U16 => Value::Unsigned(self.u16()?.into()),
            Kind::I16 => Value::Signed(self.i16()?.into()),
            Kind::U32 => Value::Unsigned(self.u32()?.into()),
            Kind::I32 => Value::Signed(self.i32()?.into()),
            Kind::F32 => Value::Float(self.f32()?.into()),
            Kind::Bool => Value::Bool(self.bool()?),
            Kind::Text => Value::Text(self.text(u64::MAX)?),
            Kind::List => self.list(depth)?,
            Kind::U64 => Value::Unsigned(self.u64()?),
            Kind::I64 => Value::Signed(self.i64()?),
            Kind::F64 => Value::Float(self.f64()?),
        })
    }

    fn list(&mut self, depth: u32) -> Result<Value, Bad> {
        if depth == MAX_DEPTH {
            return Err(Bad::new(format!(
                "lists in lists, more than {MAX_DEPTH} deep, before byte {}",
                self.at
            )));
        }
        let kind = self.kind()?;
        let count = self.u64()?;
        self.room(count, kind.least(), "values of a list")?;
        Ok(match kind {
            Kind::U8 => Value::Bytes(self.several(count, Self::u8)?),
            Kind::I8 => Value::Signeds(self.several(count, |from| from.i8().map(i64::from))?),
            Kind::U16 => Value::Unsigneds(self.several(count, |from| from.u16().map(u64::from))?),
            Kind::I16 => Value::Signeds(self.several(count, |from| from.i16().map(i64::from))?),
            Kind::U32 => Value::Unsigneds(self.several(count, |from| from.u32().map(u64::from))?),
            Kind::I32 => Value::Signeds(self.several(count, |from| from.i32().map(i64::from))?),
            Kind::F32 => Value::Floats(self.several(count, |from| from.f32().map(f64::from))?),
            Kind::Bool => Value::Bools(self.several(count, Self::bool)?),
            Kind::Text => Value::Texts(self.several(count, |from| from.text(u64::MAX))?),
            Kind::List => Value::Lists(self.several(count, |from| from.list(depth + 1))?),
            Kind::U64 => Value::Unsigneds(self.several(count, Self::u64)?),
            Kind::I64 => Value::Signeds(self.several(count, Self::i64)?),
            Kind::F64 => Value::Floats(self.several(count, Self::f64)?),
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

    /// A tensor, at its offset from where the data starts.
    fn tensor(&mut self, alignment: u64) -> Result<Entry, Bad> {
        let name = self.text(MAX_NAME)?;
        let unsound = |what: String| Err(Bad::new(format!("the tensor {} {what}", quoted(&name))));

        let dimensions = self.u32()?;
        if dimensions > MAX_DIMENSIONS {
            return unsound(format!(
                "has {dimensions} dimensions, more than {MAX_DIMENSIONS}"
            ));
        }
        let mut shape = self.several(dimensions.into(), Self::u64)?;
        // The format has the fastest varying dimension first.
        shape.reverse();

        let id = self.u32()?;
        let Some(dtype) = dtype(id) else {
            return unsound(format!("has the unknown type {id}"));
        };
        let Some(count) = elements(&shape) else {
            return unsound("has a shape of too many elements to count".to_string());
        };
        let block = dtype.block_elements();
        let row = shape.last().copied().unwrap_or(1);
        if !row.is_multiple_of(block) || (block > 1 && count == 0) {
            return unsound(format!(
                "has rows of {row} elements, {count} in all, but {dtype} comes in blocks of {block}"
            ));
        }
        let Some(bytes) = dtype.bytes(count) else {
            return unsound("has more bytes than can be counted".to_string());
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

/// The alignment that the metadata asks for.
fn aligned(kind: Kind, value: &Value) -> Result<u64, Bad> {
    match *value {
        Value::Unsigned(bytes)
            if kind == Kind::U32 && bytes.is_power_of_two() && ALIGNMENTS.contains(&bytes) =>
        {
            Ok(bytes)
        }
        Value::Unsigned(bytes) if kind == Kind::U32 => Err(Bad::new(format!(
            "{ALIGNMENT} is {bytes}: it has to be a power of two from {} to {}",
            ALIGNMENTS.start(),
            ALIGNMENTS.end()
        ))),
        _ => Err(Bad::new(format!(
            "{ALIGNMENT} is not an unsigned number of 32 bits"
        ))),
    }
}

/// The type of a value, each at its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::FromRepr)]
#[repr(u32)]
enum Kind {
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

impl Kind {
    /// The least bytes that a value takes in the file.
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

/// A type of elements by its number in ggml; None for those that it dropped or never had.
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
mod tests {
    use super::*;
    use crate::format::tests::{assert_sound, read, refusal};
    use proptest::prelude::*;

    /// A file of `version` with the pairs and tensors that were written by `pair` and `tensor`.
    fn file(pairs: &[Vec<u8>], tensors: &[Vec<u8>], data: usize) -> Vec<u8> {
        let mut file = MAGIC.to_vec();
        file.extend(3_u32.to_le_bytes());
        file.extend((tensors.len() as u64).to_le_bytes());
        file.extend((pairs.len() as u64).to_le_bytes());
        file.extend(pairs.concat());
        file.extend(tensors.concat());
        file.resize(file.len().next_multiple_of(32) + data, 0);
        file
    }

    fn text(text: &str) -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
    }

    fn pair(key: &str, kind: Kind, value: &[u8]) -> Vec<u8> {
        [&text(key)[..], &(kind as u32).to_le_bytes(), value].concat()
    }

    fn list(kind: Kind, count: u64, values: &[u8]) -> Vec<u8> {
        [
            &(kind as u32).to_le_bytes()[..],
            &count.to_le_bytes(),
            values,
        ]
        .concat()
    }

    /// `dims` are in the order of the file.
    fn tensor(name: &str, dims: &[u64], dtype: u32, offset: u64) -> Vec<u8> {
        let mut tensor = text(name);
        tensor.extend((dims.len() as u32).to_le_bytes());
        tensor.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
        tensor.extend(dtype.to_le_bytes());
        tensor.extend(offset.to_le_bytes());
        tensor
    }

    #[test]
    fn values_and_tensors_are_read() {
        let file = file(
            &[
                pair("general.architecture", Kind::Text, &text("llama")),
                pair("split.no", Kind::U16, &[1, 0]),
                pair("list", Kind::List, &list(Kind::I8, 2, &[0xff, 1])),
                pair(
                    "lists",
                    Kind::List,
                    &list(
                        Kind::List,
                        2,
                        &[list(Kind::Bool, 1, &[1]), list(Kind::Text, 0, &[])].concat(),
                    ),
                ),
            ],
            &[tensor("b", &[64, 2], 2, 64), tensor("a", &[3, 4], 0, 0)],
            // As llama.cpp pads the last tensor.
            64 + 96,
        );
        let table = read(&file).unwrap();
        assert_eq!(table.format, Format::Gguf);
        assert_eq!(
            table.metadata["general.architecture"],
            Value::Text("llama".into())
        );
        assert_eq!(table.metadata["split.no"], Value::Unsigned(1));
        assert_eq!(table.metadata["list"], Value::Signeds(vec![-1, 1]));
        assert_eq!(
            table.metadata["lists"],
            Value::Lists(vec![Value::Bools(vec![true]), Value::Texts(vec![])])
        );
        let [a, b] = &table.tensors[..] else {
            panic!("{:?}", table.tensors);
        };
        assert_eq!(
            (&*a.name, a.dtype, &a.shape[..]),
            ("a", Dtype::F32, &[4, 3][..])
        );
        assert_eq!((a.offset, a.bytes), (table.data, 48));
        assert_eq!(
            (&*b.name, b.dtype, &b.shape[..]),
            ("b", Dtype::Q4_0, &[2, 64][..])
        );
        assert_eq!((b.offset, b.bytes), (table.data + 64, 72));
    }

    #[test]
    fn a_vocabulary_has_no_tensors_and_may_end_with_its_metadata() {
        let mut file = file(&[pair("k", Kind::U8, &[7])], &[], 0);
        file.truncate(24 + 8 + 1 + 4 + 1);
        let table = read(&file).unwrap();
        assert_eq!((table.data, table.tensors.len()), (file.len() as u64, 0));
    }

    #[test]
    fn the_alignment_is_the_files_own() {
        let aligned = |bytes: u32| pair(ALIGNMENT, Kind::U32, &bytes.to_le_bytes());
        let tensors = [tensor("a", &[8], 24, 0), tensor("b", &[8], 24, 8)];
        let table = read(&file(&[aligned(8)], &tensors, 32)).unwrap();
        assert_eq!(table.tensors[1].offset, table.data + 8);
        for bytes in [0, 1, 4, 24, 33, 1 << 31] {
            let text = refusal(&file(&[aligned(bytes)], &tensors, 32));
            assert!(text.contains("general.alignment is"), "{text}");
        }
        let text = refusal(&file(
            &[pair(ALIGNMENT, Kind::U64, &[8, 0, 0, 0, 0, 0, 0, 0])],
            &[],
            0,
        ));
        assert!(text.contains("not an unsigned number of 32 bits"), "{text}");
        let text = refusal(&file(&[], &tensors, 32));
        assert!(text.contains("not at a multiple of 32"), "{text}");
    }

    #[test]
    fn tensors_have_to_fit() {
        for (dims, dtype, offset, expected) in [
            (
                &[8][..],
                24,
                64,
                "8 bytes at data offset 64, but the data has 64",
            ),
            (&[65], 24, 0, "65 bytes at data offset 0"),
            (
                &[8],
                24,
                u64::MAX - 31,
                "8 bytes at data offset 18446744073709551584",
            ),
            (&[8], 24, 1, "not at a multiple of 32"),
            (&[1, 1, 1, 1, 1], 24, 0, "5 dimensions"),
            (&[1 << 32, 1 << 31], 24, 0, "too many elements"),
            (&[1 << 62], 28, 0, "more bytes than can be counted"),
            (&[31, 32], 2, 0, "rows of 31 elements"),
            (&[0], 2, 0, "rows of 0 elements"),
            (&[32, 0], 2, 0, "rows of 32 elements, 0 in all"),
            (&[], 2, 0, "rows of 1 elements"),
            (&[1], 4, 0, "unknown type 4"),
            (&[1], u32::MAX, 0, "unknown type 4294967295"),
        ] {
            let text = refusal(&file(&[], &[tensor("a", dims, dtype, offset)], 64));
            assert!(text.contains(expected), "{text}");
        }
        let two = [tensor("a", &[33], 24, 0), tensor("b", &[1], 24, 32)];
        assert!(refusal(&file(&[], &two, 64)).contains(r#"the tensors "a" and "b" share bytes"#));
        let twice = [tensor("a", &[1], 24, 0), tensor("a", &[1], 24, 32)];
        assert!(refusal(&file(&[], &twice, 64)).contains("two tensors are named \"a\""));
        let long = "n".repeat(64);
        assert!(read(&file(&[], &[tensor(&long, &[1], 24, 0)], 64)).is_ok());
        let long = "n".repeat(65);
        assert!(refusal(&file(&[], &[tensor(&long, &[1], 24, 0)], 64)).contains("65 bytes"));
    }

    #[test]
    fn metadata_has_to_be_sound() {
        let mut deep = list(Kind::U8, 0, &[]);
        for _ in 1..MAX_DEPTH {
            deep = list(Kind::List, 1, &deep);
        }
        assert!(read(&file(&[pair("k", Kind::List, &deep)], &[], 0)).is_ok());
        let deeper = list(Kind::List, 1, &deep);
        let byte = pair("k", Kind::U8, &[0]);
        let unfit = [&2_u64.to_le_bytes()[..], b"\xff\xff"].concat();
        for (pairs, expected) in [
            (
                vec![pair("k", Kind::List, &deeper)],
                "lists in lists, more than 4 deep",
            ),
            (vec![pair("k", Kind::Bool, &[2])], "boolean of 2"),
            (vec![byte.clone(), byte], "two values for the key \"k\""),
            (vec![pair("", Kind::U8, &[0])], "empty key"),
            (
                vec![pair(&"k".repeat(65536), Kind::U8, &[0])],
                "name of 65536 bytes",
            ),
            (vec![pair("k", Kind::Text, &unfit)], "not UTF-8"),
            (
                vec![pair("k", Kind::Text, &[0xff; 8])],
                "18446744073709551615 bytes of text",
            ),
            (
                vec![pair("k", Kind::List, &list(Kind::U64, 1 << 61, &[]))],
                "2305843009213693952 values of a list",
            ),
            (
                vec![[text("k"), vec![13, 0, 0, 0]].concat()],
                "unknown type 13",
            ),
        ] {
            let text = refusal(&file(&pairs, &[], 0));
            assert!(text.contains(expected), "{text}");
        }
    }

    #[test]
    fn versions_have_to_be_known() {
        for (version, expected) in [
            (0_u32, "version 0"),
            (1, "version 1, which is no longer"),
            (4, "version 4"),
            (3 << 24, "big-endian GGUF (version 3)"),
        ] {
            let mut file = file(&[], &[], 0);
            file[4..8].copy_from_slice(&version.to_le_bytes());
            let text = refusal(&file);
            assert!(text.contains(expected), "{text}");
        }
    }

    #[test]
    fn a_header_ends_at_its_bound() {
        // A sparse file of 200 MB whose one text is longer than headers may be.
        let start = file(
            &[pair("k", Kind::Text, &(MAX_HEADER).to_le_bytes())],
            &[],
            0,
        );
        let text = Table::read(&mut start.chain(std::io::repeat(b'x')), 2 * MAX_HEADER)
            .unwrap_err()
            .to_string();
        assert!(text.contains("100000000 bytes of text"), "{text}");
    }

    /// A value: its type, its bytes, and what is made of it.
    fn value() -> impl Strategy<Value = (Kind, Vec<u8>, Value)> {
        macro_rules! number {
            ($type:ident, $kind:ident, $one:ident, $many:ident) => {
                prop_oneof![
                    any::<$type>().prop_map(|n| (
                        Kind::$kind,
                        n.to_le_bytes().to_vec(),
                        Value::$one(n.into())
                    )),
                    prop::collection::vec(any::<$type>(), 0..5).prop_map(|all| {
                        let bytes: Vec<u8> = all.iter().flat_map(|n| n.to_le_bytes()).collect();
                        let list = list(Kind::$kind, all.len() as u64, &bytes);
                        let all = all.into_iter().map(Into::into).collect();
                        (Kind::List, list, Value::$many(all))
                    })
                ]
            };
        }
        let texts = prop::collection::vec(".*", 0..4);
        let bools = prop::collection::vec(any::<bool>(), 0..4);
        prop_oneof![
            number!(u8, U8, Unsigned, Bytes),
            number!(i8, I8, Signed, Signeds),
            number!(u16, U16, Unsigned, Unsigneds),
            number!(i16, I16, Signed, Signeds),
            number!(u32, U32, Unsigned, Unsigneds),
            number!(i32, I32, Signed, Signeds),
            number!(u64, U64, Unsigned, Unsigneds),
            number!(i64, I64, Signed, Signeds),
            number!(f32, F32, Float, Floats),
            number!(f64, F64, Float, Floats),
            any::<bool>().prop_map(|bit| (Kind::Bool, vec![bit.into()], Value::Bool(bit))),
            bools.prop_map(|all| {
                let bytes: Vec<u8> = all.iter().map(|&bit| bit.into()).collect();
                (
                    Kind::List,
                    list(Kind::Bool, all.len() as u64, &bytes),
                    Value::Bools(all),
                )
            }),
            ".*".prop_map(|all| (Kind::Text, text(&all), Value::Text(all))),
            texts.prop_map(|all| {
                let bytes: Vec<u8> = all.iter().flat_map(|one| text(one)).collect();
                (
                    Kind::List,
                    list(Kind::Text, all.len() as u64, &bytes),
                    Value::Texts(all),
                )
            }),
        ]
    }

    /// A file and the table in it.
    fn good() -> impl Strategy<Value = (Vec<u8>, Table)> {
        let types: Vec<u32> = (0..64).filter(|&id| dtype(id).is_some()).collect();
        let shape = prop::collection::vec(1_u64..4, 0..=MAX_DIMENSIONS as usize);
        let tensors =
            prop::collection::btree_map(".{0,16}", (prop::sample::select(types), shape), 0..6);
        let metadata = prop::collection::btree_map("[a-z0-9_.]{1,20}", value(), 0..6);
        (metadata, tensors, 3..8_u32).prop_map(|(mut metadata, tensors, shift)| {
            let alignment = 1_u32 << shift;
            metadata.insert(
                ALIGNMENT.into(),
                (
                    Kind::U32,
                    alignment.to_le_bytes().to_vec(),
                    Value::Unsigned(alignment.into()),
                ),
            );
            let mut entries = Vec::new();
            let mut written = Vec::new();
            let mut end = 0;
            for (name, (id, mut dims)) in tensors {
                let dtype = dtype(id).unwrap();
                match dims.first_mut() {
                    Some(row) => *row *= dtype.block_elements(),
                    None if dtype.block_elements() > 1 => dims.push(dtype.block_elements()),
                    None => {}
                }
                let offset = u64::next_multiple_of(end, alignment.into());
                written.push(tensor(&name, &dims, id, offset));
                let bytes = dtype.bytes(dims.iter().product()).unwrap();
                end = offset + bytes;
                dims.reverse();
                entries.push(Entry {
                    name,
                    dtype,
                    shape: dims,
                    offset,
                    bytes,
                });
            }
            let pairs: Vec<_> = metadata
                .iter()
                .map(|(key, (kind, bytes, _))| pair(key, *kind, bytes))
                .collect();
            let mut file = file(&pairs, &written, 0);
            let header = 24 + pairs.concat().len() + written.concat().len();
            let data = header.next_multiple_of(alignment as usize) as u64;
            file.resize((data + end) as usize, 0);
            entries.iter_mut().for_each(|entry| entry.offset += data);
            let table = Table {
                format: Format::Gguf,
                metadata: metadata
                    .into_iter()
                    .map(|(key, (.., value))| (key, value))
                    .collect(),
                tensors: entries,
                data,
            };
            (file, table)
        })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read((file, table) in good()) {
            assert_sound(&table, file.len() as u64);
            // Compared as text, for which NaN is NaN.
            prop_assert_eq!(format!("{:?}", read(&file).unwrap()), format!("{table:?}"));
        }

        #[test]
        fn changed_files_are_refused_or_sound(
            (mut file, _) in good(),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
            cut in prop::option::of(any::<prop::sample::Index>()),
        ) {
            for (place, byte) in changes {
                let place = place.index(file.len());
                file[place] = byte;
            }
            if let Some(cut) = cut {
                file.truncate(cut.index(file.len() + 1));
            }
            match read(&file) {
                Ok(table) => assert_sound(&table, file.len() as u64),
                Err(_) => drop(refusal(&file)),
            }
        }

        #[test]
        fn no_bytes_make_it_panic(rest in prop::collection::vec(prop_oneof![Just(0), 0_u8..16, any::<u8>()], 0..300)) {
            let file = [&MAGIC[..], &[3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0], &rest].concat();
            if let Ok(table) = read(&file) {
                assert_sound(&table, file.len() as u64);
            }
        }
    }
}
