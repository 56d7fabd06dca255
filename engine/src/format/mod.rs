//! Model files: headers that name the tensors in them, read with bounds on everything.
//!
//! A header is a stranger's: nothing in it is believed before it is checked, no count makes us
//! allocate more than the header itself is long (times a small constant), and nothing panics.

mod dtype;
mod gguf;
mod safetensors;

use crate::error::{Error, Result};
use crate::sys::Errno;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read};

pub use dtype::Dtype;

/// The largest header that is read, in bytes: that of the safetensors format, for all formats.
pub const MAX_HEADER: u64 = 100_000_000;

/// A format of model files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// safetensors: a JSON header, then the tensors.
    Safetensors,
    /// GGUF, versions 2 and 3, little-endian.
    Gguf,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Safetensors => "safetensors",
            Self::Gguf => "gguf",
        })
    }
}

/// A tensor as the header of its file describes it. Every field has been checked: the bytes lie
/// inside the file, are as many as dtype and shape need, and belong to no other tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name, unique in its file.
    pub name: String,
    /// What its elements are.
    pub dtype: Dtype,
    /// Elements by dimension, the slowest varying first (C order); empty for a scalar.
    pub shape: Vec<u64>,
    /// Where its bytes start in the file.
    pub offset: u64,
    /// How many bytes it has.
    pub bytes: u64,
}

/// A value of a header's metadata.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Value {
    /// A boolean.
    Bool(bool),
    /// An unsigned integer of any width.
    Unsigned(u64),
    /// A signed integer of any width.
    Signed(i64),
    /// A floating point number.
    Float(f64),
    /// Text.
    Text(String),
    /// Several booleans.
    Bools(Vec<bool>),
    /// Several bytes.
    Bytes(Vec<u8>),
    /// Several unsigned integers wider than a byte.
    Unsigneds(Vec<u64>),
    /// Several signed integers.
    Signeds(Vec<i64>),
    /// Several floating point numbers.
    Floats(Vec<f64>),
    /// Several texts.
    Texts(Vec<String>),
    /// Lists of lists.
    Lists(Vec<Value>),
}

/// What the header of one file says.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// The format.
    pub format: Format,
    /// Everything else that the header says, by name.
    pub metadata: BTreeMap<String, Value>,
    /// The tensors, in the order of their bytes in the file.
    pub tensors: Vec<Entry>,
    /// Where the header ends and the tensors may begin.
    pub data: u64,
}

impl Table {
    /// Reads the header at the start of a file of `size` bytes; its first bytes tell the format.
    ///
    /// # Errors
    /// EBADMSG for what is no sound model file, with the place in the header; what reading gives.
    pub fn read(file: &mut impl Read, size: u64) -> Result<Self> {
        let mut magic = [0; 8];
        let have = size.min(8) as usize;
        let table = fill(file, &mut magic[..have]).and_then(|()| {
            if magic.starts_with(gguf::MAGIC) {
                gguf::read(&mut io::Read::chain(&magic[..have], file), size)
            } else {
                safetensors::read(&mut io::Read::chain(&magic[..have], file), size)
            }
        });
        table.map_err(Bad::into_error)
    }
}

/// Why a header is refused.
#[derive(Debug)]
enum Bad {
    /// It could not be read.
    Io(io::Error),
    /// What is wrong with it.
    Unsound(String),
}

impl Bad {
    fn new(why: impl Into<String>) -> Self {
        Self::Unsound(why.into())
    }

    fn into_error(self) -> Error {
        match self {
            Self::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Self::new("the file ends inside its header").into_error()
            }
            Self::Io(error) => Error::os(
                "cannot read the header",
                Errno::from_raw_os_error(error.raw_os_error().unwrap_or(libc::EIO)),
            ),
            Self::Unsound(why) => Error::new("not a sound model file", why)
                .with_errno(Errno::BADMSG)
                .remedy("fetch it again, or load it as plain bytes"),
        }
    }
}

fn fill(file: &mut impl Read, into: &mut [u8]) -> Result<(), Bad> {
    file.read_exact(into).map_err(Bad::Io)
}

/// Puts tensors into the order of their bytes, and refuses those that overlap or whose names are
/// not unique. Formats may allow gaps: they are not looked at here.
fn in_order(mut tensors: Vec<Entry>) -> Result<Vec<Entry>, Bad> {
    tensors.sort_by(|a, b| (a.offset, a.bytes).cmp(&(b.offset, b.bytes)));
    for pair in tensors.windows(2) {
        // Each lies inside the file, so that its end does not wrap.
        if pair[0].offset + pair[0].bytes > pair[1].offset {
            return Err(Bad::new(format!(
                "the tensors {:?} and {:?} share bytes",
                pair[0].name, pair[1].name
            )));
        }
    }
    Ok(tensors)
}
