//! safetensors: the length of a JSON header in 8 bytes, the header, the tensors without gaps.
//!
//! The format's own crate parses the descriptions of tensors. This module checks what the crate
//! leaves to the holder of the whole file, or accepts: where the data ends, and duplicate names.

use super::{
    Bad, Entry, Format, MAX_HEADER, Table, Value, elements, fill, in_order, quoted, spelled,
};
use crate::format::Dtype;
use safetensors::Dtype as Theirs;
use safetensors::tensor::TensorInfo;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use std::collections::{BTreeMap, btree_map};
use std::fmt;
use std::io::Read;
use std::marker::PhantomData;

/// The size of the header's length field in bytes.
const PREFIX: u64 = 8;

/// What is allocated before any of the header has been read.
const FIRST_BYTES: u64 = 1 << 20;

pub(super) fn read(file: &mut impl Read, size: u64) -> Result<Table, Bad> {
    let header = header(file, size)?;
    let data = PREFIX + header.len() as u64;
    let room = size - data;
    let header = parse(&header)?;

    let tensors = header
        .tensors
        .into_iter()
        .map(|(name, info)| entry(name, info, data, room));
    let tensors = in_order(tensors.collect::<Result<_, _>>()?)?;
    let mut end = data;
    for tensor in &tensors {
        if tensor.offset != end {
            return Err(Bad::new(format!(
                "a gap of {} bytes before the tensor {}",
                tensor.offset - end,
                quoted(&tensor.name)
            )));
        }
        end += tensor.bytes;
    }
    if end != size {
        return Err(Bad::new(format!(
            "{} bytes that belong to no tensor at its end, from byte {end}",
            size - end
        )));
    }
    Ok(Table {
        format: Format::Safetensors,
        has_metadata: header.metadata.is_some(),
        metadata: header.metadata.unwrap_or_default(),
        tensors,
        data,
    })
}

/// Reads the header; memory is allocated only as it arrives.
fn header(file: &mut impl Read, size: u64) -> Result<Vec<u8>, Bad> {
    let mut length = [0; PREFIX as usize];
    fill(file, &mut length)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER {
        return Err(Bad::new(format!(
            "neither GGUF nor safetensors, whose header would have {length} bytes (at most \
             {MAX_HEADER} are allowed)"
        )));
    }
    if length > size - PREFIX {
        return Err(Bad::new(format!(
            "a header of {length} bytes, where the file has {} left",
            size - PREFIX
        )));
    }
    let mut header = Vec::with_capacity(length.min(FIRST_BYTES) as usize);
    file.take(length)
        .read_to_end(&mut header)
        .map_err(Bad::Io)?;
    if header.len() as u64 != length {
        return Err(Bad::Io(std::io::ErrorKind::UnexpectedEof.into()));
    }
    Ok(header)
}

fn parse(header: &[u8]) -> Result<Header, Bad> {
    let text = std::str::from_utf8(header).map_err(|error| {
        Bad::new(format!(
            "the header is not UTF-8 from byte {} of the file",
            PREFIX as usize + error.valid_up_to()
        ))
    })?;
    // Most writers use spaces to align the data; the format's own reader accepts what JSON does.
    let text = text.trim_matches([' ', '\t', '\r', '\n']);
    if !text.starts_with('{') {
        return Err(Bad::new("the header does not start with {"));
    }
    if !text.ends_with('}') {
        return Err(Bad::new("the header does not end with } and whitespace"));
    }
    let header = serde_json::from_str(text).map(|Object(header)| header);
    header.map_err(|error| {
        let what = error.to_string();
        let what = what
            .rsplit_once(" at line ")
            .map_or(&*what, |(what, _)| what);
        Bad::new(format!(
            "line {}, column {} of the header: {}",
            error.line(),
            error.column(),
            spelled(what, 120, "'\"\\")
        ))
    })
}

/// A tensor, with its offset converted from the end of the header to the file.
fn entry(name: String, info: TensorInfo, data: u64, room: u64) -> Result<Entry, Bad> {
    let unsound = |what: &str| Err(Bad::new(format!("the tensor {} {what}", quoted(&name))));
    let Some(dtype) = ours(info.dtype) else {
        return unsound(&format!("has an unknown dtype, {}", info.dtype));
    };
    let shape: Vec<u64> = info.shape.into_iter().map(|dim| dim as u64).collect();
    let (start, end) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
    if start > end {
        return unsound(&format!(
            "ends before it starts: data_offsets [{start}, {end}]"
        ));
    }
    if end > room {
        return unsound(&format!(
            "ends at data offset {end}, but the data has {room} bytes"
        ));
    }
    let Some(count) = elements(&shape) else {
        return unsound("has a shape whose size overflows");
    };
    match dtype.bytes(count) {
        Some(bytes) if bytes == end - start => Ok(Entry {
            name,
            dtype,
            shape,
            offset: data + start,
            bytes,
        }),
        Some(bytes) => unsound(&format!(
            "has {} bytes, but its shape and {dtype} make {bytes}",
            end - start
        )),
        None => unsound(&format!(
            "has {count} elements of {dtype}, which is not a whole number of bytes"
        )),
    }
}

/// A dtype of the format's crate; None for one that was added to it later.
fn ours(dtype: Theirs) -> Option<Dtype> {
    Some(match dtype {
        Theirs::BOOL => Dtype::Bool,
        Theirs::U8 => Dtype::U8,
        Theirs::I8 => Dtype::I8,
        Theirs::U16 => Dtype::U16,
        Theirs::I16 => Dtype::I16,
        Theirs::U32 => Dtype::U32,
        Theirs::I32 => Dtype::I32,
        Theirs::U64 => Dtype::U64,
        Theirs::I64 => Dtype::I64,
        Theirs::F16 => Dtype::F16,
        Theirs::BF16 => Dtype::Bf16,
        Theirs::F32 => Dtype::F32,
        Theirs::F64 => Dtype::F64,
        Theirs::C64 => Dtype::C64,
        Theirs::F8_E4M3 => Dtype::F8E4m3,
        Theirs::F8_E5M2 => Dtype::F8E5m2,
        Theirs::F8_E4M3FNUZ => Dtype::F8E4m3fnuz,
        Theirs::F8_E5M2FNUZ => Dtype::F8E5m2fnuz,
        Theirs::F8_E8M0 => Dtype::F8E8m0,
        Theirs::F6_E2M3 => Dtype::F6E2m3,
        Theirs::F6_E3M2 => Dtype::F6E3m2,
        Theirs::F4 => Dtype::F4,
        _ => return None,
    })
}

/// Parsed only from a JSON object: serde would accept a list for a struct.
trait FromObject: Sized {
    const WHAT: &str;

    fn from_object<'de, A: MapAccess<'de>>(object: A) -> Result<Self, A::Error>;
}

struct Object<T>(T);

impl<'de, T: FromObject> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Fields<T>(PhantomData<T>);

        impl<'de, T: FromObject> Visitor<'de> for Fields<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(T::WHAT)
            }

            fn visit_map<A: MapAccess<'de>>(self, object: A) -> Result<Object<T>, A::Error> {
                T::from_object(object).map(Object)
            }
        }

        from.deserialize_map(Fields(PhantomData))
    }
}

/// The header as it was written, in order and with every name, so that no duplicate hides
/// another.
struct Header {
    metadata: Option<BTreeMap<String, Value>>,
    tensors: Vec<(String, TensorInfo)>,
}

impl FromObject for Header {
    const WHAT: &str = "tensors by name";

    fn from_object<'de, A: MapAccess<'de>>(mut object: A) -> Result<Self, A::Error> {
        let mut metadata = None;
        let mut tensors = Vec::new();
        while let Some(name) = object.next_key::<String>()? {
            if name != "__metadata__" {
                tensors.push((name, object.next_value::<Object<TensorInfo>>()?.0));
                continue;
            }
            // Writers without metadata may leave null.
            let value = object.next_value::<Option<Object<_>>>()?;
            if metadata.replace(value.map(|Object(texts)| texts)).is_some() {
                return Err(A::Error::custom("__metadata__ appears twice"));
            }
        }
        let metadata = metadata.flatten();
        Ok(Self { metadata, tensors })
    }
}

impl FromObject for TensorInfo {
    const WHAT: &str = "the dtype, shape and data_offsets of a tensor";

    fn from_object<'de, A: MapAccess<'de>>(object: A) -> Result<Self, A::Error> {
        Self::deserialize(MapAccessDeserializer::new(object))
    }
}

impl FromObject for BTreeMap<String, Value> {
    const WHAT: &str = "__metadata__ with strings as values";

    fn from_object<'de, A: MapAccess<'de>>(mut object: A) -> Result<Self, A::Error> {
        let mut texts = Self::new();
        while let Some(name) = object.next_key::<String>()? {
            let btree_map::Entry::Vacant(place) = texts.entry(name) else {
                return Err(A::Error::custom("a name in __metadata__ appears twice"));
            };
            place.insert(Value::Text(object.next_value()?));
        }
        Ok(texts)
    }
}

#[cfg(test)]
mod tests;
