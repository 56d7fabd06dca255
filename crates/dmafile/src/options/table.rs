//! The list of options: what each one is called, what it accepts and what it means, in every front end.

use super::{Allocation, Io, Method, Pages, out_of_range};
use crate::error::{Error, Result};
use crate::message::Opt;
use std::str::FromStr;

/// An option of loads or of saves. The command, the C API and the Python package build their arguments,
/// their help and their documentation from these. In texts, words of an option are in backquotes.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct OptionInfo {
    /// Which one; [`Opt::name`] is its name.
    pub option: Opt,
    /// What has it.
    pub of: Operation,
    /// Where it belongs in a help text.
    pub group: OptionGroup,
    /// What it accepts.
    pub accepts: OptionType,
    /// A name for its value.
    pub value: &'static str,
    /// Its default, in words.
    pub default: &'static str,
    /// What it is, on one line.
    pub help: &'static str,
    /// More about it; may be empty.
    pub details: &'static str,
}

/// What an option belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// Loads.
    Load,
    /// Saves.
    Save,
    /// Both.
    Any,
}

/// Where an option belongs in a help text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OptionGroup {
    /// Which bytes.
    What,
    /// Into which memory, or to where.
    Where,
    /// How; rarely needed.
    Tuning,
}

/// What an option accepts.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum OptionType {
    /// Yes or no; the default is yes. The text says what no means.
    Flag(&'static str),
    /// A number of bytes, in this range.
    Bytes(u64, u64),
    /// Another number, in this range.
    Count(u64, u64),
    /// One of these words.
    Word(fn() -> Vec<&'static str>),
    /// A text; some that it accepts.
    Text(&'static [&'static str]),
    /// Several texts.
    Texts,
}

use OptionType::{Bytes, Count, Flag, Text, Texts, Word};

/// Smallest and largest block, in bytes.
pub const BLOCK_RANGE: std::ops::RangeInclusive<u64> = 4 << 10..=64 << 20;
/// Smallest and largest queue depth, in operations.
pub const QUEUE_DEPTH_RANGE: std::ops::RangeInclusive<u32> = 1..=4096;
/// Default maximum size of a chunk of memory that is allocated while the previous one is being read
/// ([`Load::chunk`](crate::Load::chunk)), in bytes.
pub const DEFAULT_CHUNK: u64 = 128 << 20;

/// No file is larger.
const LARGEST: u64 = i64::MAX as u64;
const BLOCK: OptionType = Bytes(*BLOCK_RANGE.start(), *BLOCK_RANGE.end());
const DEPTH: OptionType = Count(
    *QUEUE_DEPTH_RANGE.start() as u64,
    *QUEUE_DEPTH_RANGE.end() as u64,
);

/// A row for each option: which it is, whose, its group, what it accepts, a name for the value, the default, what
/// it is, more about it.
macro_rules! options {
    ($($option:ident $of:ident $group:ident, $accepts:expr, $value:literal, $default:literal:
        $help:literal, $details:literal;)+) => {
        /// All options of loads and saves, those of each group together.
        pub const OPTIONS: &[OptionInfo] = &[$(OptionInfo {
            option: Opt::$option,
            of: Operation::$of,
            group: OptionGroup::$group,
            accepts: $accepts,
            value: $value,
            default: $default,
            help: $help,
            details: $details,
        },)+];
    };
}

options! {
    Tensors Load What, Texts, "PATTERN", "all":
        "Only these tensors of a model", "Each pattern is a name, a glob, or `re:` and a regular expression.";
    Offset Load What, Bytes(0, u64::MAX), "BYTES", "0":
        "First byte of the file to load", "";
    Length Load What, Bytes(1, u64::MAX), "BYTES", "to the end of the file":
        "How many bytes to load", "A range that ends after the file is refused.";
    Verify Load What, Text(&["crc32c", "crc64nvme", "xxh3", "blake3", "sha256", "store"]),
        "ALGO[=HEX]|store", "none":
        "Compute a checksum, and compare it with HEX if given",
        "`crc32c`, `crc64nvme`, `xxh3`, `blake3` or `sha256`, which the report then contains; with `=HEX` the \
         load fails (EBADMSG) if the digest differs. `store` compares each file with the digest that is stored \
         with it (its name in a Hugging Face cache; what the store of an object says), and refuses files \
         without one.";
    To Load Where,
        Text(&["anon", "memfd", "udmabuf", "heap:system", "module", "dma-buf"]),
        "KIND", "`memfd`":
        "Kind of memory: `memfd`, `anon`, `dma-buf`, `fd:N`, and others",
        "`memfd` (sealable); `anon` (private, without a descriptor); `udmabuf` (a dma-buf over a memfd, or \
         several); `heap:NAME` (a dma-buf from /dev/dma_heap/NAME); `module` (a dma-buf of dmafile.ko); \
         `dma-buf` (the best of the last three that works here); `fd:N` (fills an existing memfd or dma-buf \
         from its start, and keeps a duplicate of N); `fd:N@OFFSET` (fills a range of it, from byte OFFSET \
         on, and changes nothing else).";
    Pages Load Where, Word(Pages::words), "PAGES", "auto":
        "Page size", "";
    InPlace Save What, Bytes(0, u64::MAX), "BYTES", "the file is replaced":
        "Write in place, from this byte on",
        "The file or block device must exist; nothing else in it changes. That is not atomic: a save that \
         ends early leaves a mixture of old and new bytes. The source may be another range of the file, if \
         the two do not overlap.";
    Length Save What, Bytes(0, u64::MAX), "BYTES", "to the end of the source":
        "How many bytes to save", "";
    Verify Save What, Text(&["crc32c", "crc64nvme", "xxh3", "blake3", "sha256"]), "ALGO[=HEX]", "none":
        "Compute a checksum of what is saved, and compare it with HEX if given",
        "`crc32c`, `crc64nvme`, `xxh3`, `blake3` or `sha256`, which the report then contains; with `=HEX` the \
         save fails (EBADMSG) if the digest differs, before the old file is replaced.";
    Sync Save What,
        Flag("Return before the bytes are on the disk: a system crash shortly afterwards may leave the old \
         file, or an incomplete one"),
        "", "yes":
        "Return only when the bytes and the name are on the disk", "";
    Method Load Tuning, Word(Method::words), "METHOD", "auto":
        "Method that moves the bytes", "";
    Method Save Tuning, Word(Method::words_of_saves), "METHOD", "auto":
        "Method that moves the bytes", "";
    Io Any Tuning, Word(Io::words), "MODE", "auto":
        "Bypass or use the page cache", "";
    Allocation Load Tuning, Word(Allocation::words), "WHEN", "auto":
        "When memory is allocated",
        "`ahead` (one chunk ahead of the reads), `in-read` (by the reads themselves), `before` (all of it \
         before the first read).";
    Chunk Load Tuning, Bytes(*BLOCK_RANGE.start(), LARGEST), "BYTES", "128 MiB":
        "Largest chunk of memory that is allocated before it is read into, at least a block", "";
    Block Load Tuning, BLOCK, "BYTES",
        "4 MiB for direct I/O, 1 MiB through the page cache, 512 KiB for `bounce`, 8 MiB for objects":
        "Size of one operation, 4 KiB to 64 MiB, a multiple of the file's alignment for direct I/O", "";
    Block Save Tuning, BLOCK, "BYTES",
        "4 MiB for direct I/O, 1 MiB through the page cache, 512 KiB for `bounce`":
        "Size of one operation, 4 KiB to 64 MiB, a multiple of the file's alignment for direct I/O", "";
    QueueDepth Load Tuning, DEPTH, "OPERATIONS",
        "8 for direct I/O, 1 to 8 by the number of CPUs through the page cache, 16 for objects":
        "Operations in flight, 1 to 4096", "At most 64 threads, where each does one operation after another.";
    QueueDepth Save Tuning, DEPTH, "OPERATIONS",
        "8 for direct I/O, 1 to 4 by the number of CPUs through the page cache":
        "Operations in flight, 1 to 4096", "At most 64 threads, where each does one operation after another.";
    Limit Load Tuning, Bytes(64 << 10, LARGEST), "BYTES", "none":
        "The most to read or receive in a second, at least 64 KiB",
        "It is held on average, block by block. Methods in which the kernel moves all bytes in one call are left \
         out.";
    CheckMemory Load Tuning,
        Flag("Load even what exceeds available memory or a cgroup's limit, at the risk of an out-of-memory \
         kill"),
        "", "yes":
        "Refuse early what exceeds available memory or a cgroup's limit", "";
}

impl OptionInfo {
    /// The options of loads, or of saves.
    pub fn all(of: Operation) -> impl Iterator<Item = &'static Self> {
        OPTIONS
            .iter()
            .filter(move |info| info.of == of || info.of == Operation::Any)
    }

    /// An option of loads, or of saves, by its name.
    pub fn named(of: Operation, name: &str) -> Option<&'static Self> {
        Self::all(of).find(|info| info.option.name() == name)
    }

    /// Refuses a number that is out of range.
    pub(crate) fn check(of: Operation, option: Opt, number: Option<u64>) -> Result<()> {
        let info = Self::all(of).find(|info| info.option == option);
        match (number, info.expect("in the table").accepts) {
            (Some(number), Bytes(low, high) | Count(low, high))
                if !(low..=high).contains(&number) =>
            {
                Err(out_of_range(option, number, (low, high)))
            }
            _ => Ok(()),
        }
    }
}

/// The value of an option, for [`Load::set`](crate::Load::set) and [`Save::set`](crate::Save::set).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OptionValue {
    /// For a flag.
    Flag(bool),
    /// A number of bytes, or another number.
    Number(u64),
    /// A word, or a text.
    Text(String),
}

impl OptionValue {
    pub(crate) fn flag(&self, option: Opt) -> Result<bool> {
        match self {
            Self::Flag(flag) => Ok(*flag),
            _ => Err(Error::usage(option, "it is either true or false")),
        }
    }

    pub(crate) fn number(&self, option: Opt) -> Result<u64> {
        match self {
            Self::Number(number) => Ok(*number),
            _ => Err(Error::usage(option, "it is a number")),
        }
    }

    pub(crate) fn parse<T: FromStr<Err = Error>>(&self, option: Opt) -> Result<T> {
        self.parse_by(option, str::parse)
    }

    pub(crate) fn parse_by<T>(&self, option: Opt, by: fn(&str) -> Result<T>) -> Result<T> {
        match self {
            Self::Text(text) => by(text),
            _ => Err(Error::usage(option, "it is a text")),
        }
    }
}

impl From<bool> for OptionValue {
    fn from(flag: bool) -> Self {
        Self::Flag(flag)
    }
}

impl From<u64> for OptionValue {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

impl From<&str> for OptionValue {
    fn from(text: &str) -> Self {
        Self::Text(text.to_string())
    }
}
