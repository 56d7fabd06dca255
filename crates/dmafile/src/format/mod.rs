//! Model files: headers that name the tensors in them, parsed with limits on everything.
//!
//! A header is not trusted: every value is checked before it is used, no count makes us allocate
//! more than a small multiple of the header's own size, and nothing panics.

mod dtype;
mod gguf;
mod safetensors;

use crate::error::{Error, Result};
use crate::sys::{Errno, errno};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read};

pub use dtype::Dtype;

/// The largest header that is read, in bytes: the limit of the safetensors format, applied to all
/// formats.
pub const MAX_HEADER: u64 = 100_000_000;

/// A format of model files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, strum::Display, strum::IntoStaticStr)]
#[serde(into = "&'static str")]
#[strum(serialize_all = "lowercase")]
#[non_exhaustive]
pub enum Format {
    /// safetensors: a JSON header, then the tensors.
    Safetensors,
    /// GGUF, versions 2 and 3, little-endian.
    Gguf,
}

/// A tensor as the header of its file describes it. Every field has been checked: its bytes are
/// inside the file, match dtype and shape in number, and belong to no other tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry {
    /// Its name, unique in its file.
    pub name: String,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Sizes of its dimensions, the slowest-varying first (C order); empty for a scalar.
    pub shape: Vec<u64>,
    /// Offset of its first byte in the file.
    pub offset: u64,
    /// Its size in bytes.
    pub bytes: u64,
}

/// A value of a header's metadata.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum Value {
    /// A boolean.
    Bool(bool),
    /// An unsigned integer of any width.
    Unsigned(u64),
    /// A signed integer of any width.
    Signed(i64),
    /// A floating point number.
    Float(f64),
    /// Text. In a GGUF file it need not be UTF-8: other bytes are written as `\xNN`.
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
    /// Several texts, each as in [`Value::Text`].
    Texts(Vec<String>),
    /// Lists of lists.
    Lists(Vec<Value>),
}

/// The parsed header of one file.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Table {
    /// The format.
    pub format: Format,
    /// Everything else in the header, by name.
    pub metadata: BTreeMap<String, Value>,
    /// True if the header has metadata, which may be empty; it is optional in safetensors files.
    pub has_metadata: bool,
    /// The tensors, in the order of their bytes in the file.
    pub tensors: Vec<Entry>,
    /// Offset of the end of the header, where tensors may begin.
    pub data: u64,
}

impl Table {
    /// Parses the header at the start of a file of `size` bytes; the first bytes determine the
    /// format. Bytes after the header may be read, but none beyond `size`.
    ///
    /// # Errors
    /// EBADMSG if it is not a valid model file, with the place in the header; any error of
    /// reading.
    pub fn read(file: &mut impl Read, size: u64) -> Result<Self> {
        let mut file = file.take(size);
        let mut magic = [0; gguf::MAGIC.len()];
        let have = size.min(magic.len() as u64) as usize;
        let table = fill(&mut file, &mut magic[..have]).and_then(|()| {
            let mut file = magic[..have].chain(file);
            if &magic == gguf::MAGIC {
                gguf::read(&mut file, size)
            } else {
                safetensors::read(&mut file, size)
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
    /// It is invalid, with the reason.
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
            Self::Io(error) => Error::os("cannot read the header", errno(error)),
            Self::Unsound(why) => Error::new("not a valid model file", why)
                .with_errno(Errno::BADMSG)
                .with_remedy("download it again, or load it as plain bytes"),
        }
    }
}

fn fill(file: &mut impl Read, into: &mut [u8]) -> Result<(), Bad> {
    file.read_exact(into).map_err(Bad::Io)
}

/// Number of elements of a shape; None if it overflows. Empty tensors are checked as well: code
/// that computes strides multiplies all dimensions that are not 0.
fn elements(shape: &[u64]) -> Option<u64> {
    let full = shape
        .iter()
        .try_fold(1_u64, |n, &dim| n.checked_mul(dim.max(1)))
        .filter(|&n| i64::try_from(n).is_ok())?;
    Some(if shape.contains(&0) { 0 } else { full })
}

/// Sorts tensors by the order of their bytes, and refuses overlaps and duplicate names. Gaps are
/// not checked here, because some formats allow them.
fn in_order(mut tensors: Vec<Entry>) -> Result<Vec<Entry>, Bad> {
    let mut names = BTreeSet::new();
    for tensor in &tensors {
        if !names.insert(tensor.name.as_str()) {
            return Err(Bad::new(format!(
                "two tensors are named {}",
                quoted(&tensor.name)
            )));
        }
    }
    tensors.sort_by_key(|tensor| (tensor.offset, tensor.bytes));
    for pair in tensors.windows(2) {
        // Each is inside the file, so its end does not overflow.
        if pair[0].offset + pair[0].bytes > pair[1].offset {
            return Err(Bad::new(format!(
                "the tensors {} and {} share bytes",
                quoted(&pair[0].name),
                quoted(&pair[1].name)
            )));
        }
    }
    Ok(tensors)
}

/// Quotes an untrusted name for a one-line message.
pub(crate) fn quoted(name: &str) -> String {
    format!("\"{}\"", spelled(name, 64, "'"))
}

/// Escapes control characters, and quotes and backslashes except those in `plain`, and truncates
/// the result to `most` bytes.
fn spelled(text: &str, most: usize, plain: &str) -> String {
    let mut line = String::new();
    for char in text.chars() {
        if line.len() >= most {
            line.push_str("...");
            break;
        }
        if plain.contains(char) {
            line.push(char);
        } else {
            line.extend(char.escape_debug());
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn read(file: &[u8]) -> Result<Table> {
        Table::read(&mut &file[..], file.len() as u64)
    }

    /// The message for a refused file.
    pub(super) fn refusal(file: &[u8]) -> String {
        let error = read(file).expect_err("a file that must be refused");
        assert_eq!(error.raw_os_error(), Some(libc::EBADMSG), "{error}");
        let text = error.to_string();
        assert!(!text.contains('\n') && text.len() < 600, "{text}");
        text
    }

    /// Asserts what every user of a table relies on.
    pub(super) fn assert_sound(table: &Table, size: u64) {
        let mut names = BTreeSet::new();
        let mut end = table.data;
        assert!(end <= size);
        for tensor in &table.tensors {
            assert!(names.insert(&tensor.name), "{} appears twice", tensor.name);
            assert!(tensor.offset >= end, "{} shares bytes", tensor.name);
            assert_eq!(
                elements(&tensor.shape).and_then(|n| tensor.dtype.bytes(n)),
                Some(tensor.bytes)
            );
            end = tensor
                .offset
                .checked_add(tensor.bytes)
                .expect("an end that does not wrap");
            assert!(end <= size, "{} ends outside of the file", tensor.name);
        }
    }

    #[test]
    fn shapes_that_overflow_have_no_elements() {
        assert_eq!(elements(&[]), Some(1));
        assert_eq!(elements(&[3, 0, 5]), Some(0));
        assert_eq!(elements(&[1 << 62]), Some(1 << 62));
        assert_eq!(elements(&[1 << 63]), None);
        assert_eq!(elements(&[0, 1 << 32, 1 << 32]), None);
        assert_eq!(elements(&[1 << 32, 1 << 32, 0]), None);
    }

    #[test]
    fn untrusted_text_stays_on_one_line() {
        assert_eq!(quoted("a\n\u{1b}[2J"), r#""a\n\u{1b}[2J""#);
        assert_eq!(quoted("it's \"so\""), r#""it's \"so\"""#);
        assert_eq!(quoted(&"x".repeat(64)).len(), 66);
        assert_eq!(quoted(&"x".repeat(1000)).len(), 69);
        // The limit applies to the escaped length.
        assert!(quoted(&"\u{7f}".repeat(64)).len() < 80);
        assert_eq!(spelled("it's \"so\"\r\n", 100, "'\""), r#"it's "so"\r\n"#);
        assert_eq!(spelled("\u{202e}", 100, ""), r"\u{202e}");
    }

    #[test]
    fn a_file_shorter_than_its_header_is_refused() {
        for file in [&b""[..], b"G", b"GGUF", b"{}", b"\0\0\0\0\0\0\0"] {
            let text = refusal(file);
            assert!(text.contains("ends inside"), "{text}");
        }
    }

    #[test]
    fn a_read_error_is_not_reported_as_an_invalid_file() {
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::Error::from_raw_os_error(libc::EIO))
            }
        }
        let error = Table::read(&mut Broken, 100).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
    }

    #[test]
    fn nothing_is_read_past_the_size() {
        let mut file = &b"\x02\0\0\0\0\0\0\0{}and more"[..];
        let table = Table::read(&mut file, 10).unwrap();
        assert_eq!((table.data, table.tensors.len()), (10, 0));
        assert_eq!(file, b"and more");
    }
}
