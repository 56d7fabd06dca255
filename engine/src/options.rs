//! The words of a request: kinds of memory, pages, methods, I/O modes, and their ranges.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::message::Opt;
use crate::sys;
use serde::Serialize;
use std::fmt;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, OwnedFd};
use std::str::FromStr;
use std::sync::Arc;
use strum::{Display, EnumString, IntoStaticStr, VariantArray};

/// Smallest and largest block, in bytes.
pub const BLOCK_RANGE: RangeInclusive<u64> = 4 << 10..=64 << 20;
/// Smallest and largest queue depth, in operations.
pub const QUEUE_DEPTH_RANGE: RangeInclusive<u32> = 1..=4096;
/// How much of a buffer is allocated before its reads begin, unless asked otherwise.
// AR-16.
pub const DEFAULT_GATHER: u64 = 128 << 20;

/// What kind of memory a buffer is made of.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Kind {
    /// Private memory of this process, without a descriptor.
    Anon,
    /// A sealable memfd (memfd_create(2)).
    Memfd,
    /// A memfd or a dma-buf that exists already; made with [`Kind::fd`] or parsed from `fd:N` or
    /// `fd:N@OFFSET`.
    Fd {
        /// The descriptor, shared with the buffer.
        fd: Arc<OwnedFd>,
        /// The number it is known by to whoever asked.
        number: i32,
        /// Where the bytes go, from its start; nothing else of it is touched. None: to its start,
        /// and what lies behind them is zeroed.
        at: Option<u64>,
    },
    /// A dma-buf over a memfd (`/dev/udmabuf`).
    Udmabuf,
    /// A dma-buf from `/dev/dma_heap/NAME`.
    Heap(String),
    /// A dma-buf from dmafile.ko, which reads files straight into its pages.
    Dmafile,
    /// A dma-buf, whichever kind this machine makes best: [`Kind::Dmafile`], [`Kind::Udmabuf`] or
    /// the system heap's, the first that works. A buffer names the kind that it became.
    DmaBuf,
    /// A memfd that is pinned for a device, and for all others of its driver, once its pages are there:
    /// while the last reads are in flight. Words: `cuda-host`, `cuda-host:N`, `hip-host`, `hip-host:N`.
    /// What it has become is a [`Kind::Memfd`] that is pinned ([`Buffer::pinned`](crate::Buffer::pinned)).
    Pinned(Device),
    /// Memory handed in by the caller; [`Load::run_into`](crate::Load::run_into) sets it.
    #[doc(hidden)]
    Caller,
}

impl Kind {
    /// Fill the memory behind a descriptor that exists, from its start to its end.
    pub fn fd(fd: OwnedFd) -> Self {
        Self::part_of(fd, None)
    }

    /// Fill the memory behind a descriptor that exists from byte `at` on, as far as the wanted bytes
    /// reach, and touch nothing else of it.
    pub fn fd_at(fd: OwnedFd, at: u64) -> Self {
        Self::part_of(fd, Some(at))
    }

    fn part_of(fd: OwnedFd, at: Option<u64>) -> Self {
        let number = fd.as_raw_fd();
        let fd = Arc::new(fd);
        Self::Fd { fd, number, at }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Anon => f.write_str("anon"),
            Self::Memfd => f.write_str("memfd"),
            Self::Fd {
                number, at: None, ..
            } => write!(f, "fd:{number}"),
            Self::Fd {
                number,
                at: Some(at),
                ..
            } => write!(f, "fd:{number}@{at}"),
            Self::Udmabuf => f.write_str("udmabuf"),
            Self::Heap(name) => write!(f, "heap:{name}"),
            Self::Dmafile => f.write_str("dmafile"),
            Self::DmaBuf => f.write_str("dma-buf"),
            Self::Pinned(device) => f.write_str(&device.host_word()),
            Self::Caller => f.write_str("caller"),
        }
    }
}

impl FromStr for Kind {
    type Err = Error;

    /// `anon`, `memfd`, `fd:N`, `fd:N@OFFSET` (in bytes), `udmabuf`, `heap:NAME`, `dmafile`,
    /// `dma-buf`, `cuda-host`, `hip-host`, each also with `:N`. `fd:N` duplicates the descriptor; EBADF where N is not open.
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "anon" => return Ok(Self::Anon),
            "memfd" => return Ok(Self::Memfd),
            "udmabuf" => return Ok(Self::Udmabuf),
            "dmafile" => return Ok(Self::Dmafile),
            "dma-buf" => return Ok(Self::DmaBuf),
            _ => {}
        }
        if let Some(device) = Device::of_host_word(text) {
            return Ok(Self::Pinned(device));
        }
        if let Some(name) = text.strip_prefix("heap:")
            && !matches!(name, "" | "." | "..")
            && !name.contains('/')
        {
            return Ok(Self::Heap(name.to_string()));
        }
        if let Some(number) = text.strip_prefix("fd:") {
            let bad = || Error::usage(Opt::To, format!("'{text}' names no descriptor"));
            let (number, at) = match number.split_once('@') {
                None => (number, None),
                Some((number, at)) => (number, Some(at.parse().map_err(|_| bad())?)),
            };
            let number: i32 = number.parse().map_err(|_| bad())?;
            let fd = sys::file::duplicate(number).map_err(|errno| {
                Error::os("cannot use the descriptor", errno)
                    .at(text)
                    .with_remedy(
                        "pass an open memfd, for example from the shell with N<>/proc/PID/fd/M",
                    )
            })?;
            return Ok(Self::Fd {
                fd: Arc::new(fd),
                number,
                at,
            });
        }
        Err(Error::usage(
            Opt::To,
            format!(
                "'{text}' is none of anon, memfd, fd:N, udmabuf, heap:NAME, dmafile, dma-buf, cuda-host, hip-host"
            ),
        ))
    }
}

/// How large the pages of a buffer should be.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Serialize, Display, EnumString, IntoStaticStr, VariantArray,
)]
#[serde(into = "&'static str")]
#[strum(serialize_all = "kebab-case", parse_err_ty = Error, parse_err_fn = Pages::unknown)]
#[non_exhaustive]
pub enum Pages {
    /// Huge wherever an ordinary user gets them.
    Auto,
    /// Base pages, whatever their size is on this machine.
    #[strum(serialize = "4k")]
    Small,
    /// Transparent huge pages: `MADV_HUGEPAGE` for private memory, `MADV_COLLAPSE` for memfd.
    Thp,
    /// Pages of the hugetlb pool.
    Huge,
}

impl Pages {
    /// Every value, in the order the documentation lists them.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// The word for it on the command line and in JSON.
    pub fn word(self) -> &'static str {
        self.into()
    }

    fn unknown(text: &str) -> Error {
        none_of(Opt::Pages, Self::ALL, text)
    }
}

/// How bytes move.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Serialize, Display, EnumString, IntoStaticStr, VariantArray,
)]
#[serde(into = "&'static str")]
#[strum(serialize_all = "kebab-case", parse_err_ty = Error, parse_err_fn = Method::unknown)]
#[non_exhaustive]
pub enum Method {
    /// The fastest that works here.
    Auto,
    /// io_uring, buffers registered where the pin limit allows.
    Uring,
    /// pread(2) on a pool of threads.
    Threads,
    /// pread(2), one after the other: the plain baseline.
    Read,
    /// Copy from a mapping of the file.
    Mmap,
    /// Direct reads into a small ring, and one copy from there: for memory that direct reads
    /// cannot land in, the mappings of most dma-bufs above all.
    Bounce,
    /// sendfile(2) into the buffer's descriptor.
    Sendfile,
    /// splice(2) through a pipe into the buffer's descriptor.
    Splice,
    /// dmafile.ko moves the bytes, into the pages behind its own dma-bufs.
    Module,
    /// copy_file_range(2) into the buffer's descriptor, on kernels that copy between disks and memory.
    CopyFileRange,
    /// A heap reads the whole file while it allocates the dma-buf, on kernels that have the flag.
    HeapRead,
    /// io_uring reads into memory that is DMA-mapped once for the disk, dma-bufs above all, on kernels
    /// that map buffers so.
    Premap,
}

impl Method {
    /// Every value, in the order the documentation lists them.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// The word for it on the command line and in JSON.
    pub fn word(self) -> &'static str {
        self.into()
    }

    fn unknown(text: &str) -> Error {
        if text == "cufile" {
            let why = match std::path::Path::new("/sys/module/nvidia_fs").exists() {
                true => "this version loads into a device through its ring alone",
                false => {
                    "the module nvidia_fs is not loaded, without which cuFile copies as the ring does"
                }
            };
            return Error::usage(Opt::Method, format!("'cufile' is refused: {why}"));
        }
        none_of(Opt::Method, Self::ALL, text)
    }
}

/// Whether reads pass by the page cache.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Serialize, Display, EnumString, IntoStaticStr, VariantArray,
)]
#[serde(into = "&'static str")]
#[strum(serialize_all = "kebab-case", parse_err_ty = Error, parse_err_fn = Io::unknown)]
#[non_exhaustive]
pub enum Io {
    /// Per extent: what sits in the page cache is copied from it, the rest is read directly.
    Auto,
    /// `O_DIRECT` only.
    Direct,
    /// Through the page cache only.
    Buffered,
}

impl Io {
    /// Every value, in the order the documentation lists them.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// The word for it on the command line and in JSON.
    pub fn word(self) -> &'static str {
        self.into()
    }

    fn unknown(text: &str) -> Error {
        none_of(Opt::Io, Self::ALL, text)
    }
}

/// When the pages of a buffer come into being.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Serialize, Display, EnumString, IntoStaticStr, VariantArray,
)]
#[serde(into = "&'static str")]
#[strum(serialize_all = "kebab-case", parse_err_ty = Error, parse_err_fn = Allocation::unknown)]
#[non_exhaustive]
pub enum Allocation {
    /// Whichever is cheaper.
    Auto,
    // AR-15.
    /// By a thread of its own, one gather ahead of the reads.
    Ahead,
    /// Inside the read, page by page as it lands.
    InRead,
    // AR-21.
    /// All of them before the first read: the order to compare with.
    Before,
}

impl Allocation {
    /// Every value, in the order the documentation lists them.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// The word for it on the command line and in JSON.
    pub fn word(self) -> &'static str {
        self.into()
    }

    fn unknown(text: &str) -> Error {
        none_of(Opt::Allocation, Self::ALL, text)
    }
}

/// What a word says that is none of an option's.
fn none_of<T: Copy + Into<&'static str>>(option: Opt, all: &[T], text: &str) -> Error {
    let words: Vec<&str> = all.iter().map(|&value| value.into()).collect();
    Error::usage(option, format!("'{text}' is none of {}", words.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn words_round_trip() {
        for &method in Method::ALL {
            assert_eq!(method.word().parse::<Method>().unwrap(), method);
            assert_eq!(format!("{method:>15}"), format!("{:>15}", method.word()));
            assert_eq!(serde_json::to_value(method).unwrap(), method.word());
        }
        let error = "slow".parse::<Io>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "io: 'slow' is none of auto, direct, buffered"
        );
    }

    #[test]
    fn kinds_are_parsed_strictly() {
        for word in [
            "anon",
            "memfd",
            "udmabuf",
            "heap:system",
            "dmafile",
            "dma-buf",
            "cuda-host",
            "cuda-host:1",
            "hip-host",
        ] {
            assert_eq!(word.parse::<Kind>().unwrap().to_string(), word);
        }
        for word in [
            "",
            "heap:",
            "heap:..",
            "heap:../x",
            "fd:",
            "fd:x",
            "fd:1@",
            "fd:1@-1",
            "memfd ",
            "cuda-host:",
            "cuda-host:x",
            "cuda:0-host",
        ] {
            let error = word.parse::<Kind>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage, "{word}");
        }
        let error = "fd:987654".parse::<Kind>().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
    }
}
