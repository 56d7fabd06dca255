//! Options, and their values: kinds of memory, page sizes, methods, I/O modes.

mod kind;
mod table;

use crate::error::{Error, Result};
use crate::message::Opt;
use crate::pin::PinDevice;
use crate::sys;
use serde::Serialize;
use std::os::fd::{AsRawFd, OwnedFd};
use std::str::FromStr;
use std::sync::Arc;
use strum::{Display, EnumString, IntoStaticStr, VariantArray};

pub use kind::MemoryKind;
pub use table::{
    BLOCK_RANGE, DEFAULT_CHUNK, OPTIONS, Operation, OptionGroup, OptionInfo, OptionType,
    OptionValue, QUEUE_DEPTH_RANGE,
};

/// The kind of memory that a buffer consists of.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Kind {
    /// Private memory of this process, without a descriptor.
    Anon,
    /// A sealable memfd (memfd_create(2)).
    Memfd,
    /// An existing memfd or dma-buf; created with [`Kind::fd`] or parsed from `fd:N` or `fd:N@OFFSET`.
    Fd {
        /// The descriptor, shared with the buffer.
        fd: Arc<OwnedFd>,
        /// The caller's number for it.
        number: i32,
        /// Offset at which the bytes go, with nothing else changed. None: they go to its start, and
        /// what follows them is zeroed.
        at: Option<u64>,
    },
    /// A dma-buf over a memfd (`/dev/udmabuf`).
    Udmabuf,
    /// A dma-buf from `/dev/dma_heap/NAME`.
    Heap(String),
    /// A dma-buf from dmafile.ko, which reads files directly into its pages.
    Module,
    /// The best dma-buf that works here: [`Kind::Module`], [`Kind::Udmabuf`] or one from the system
    /// heap. The buffer names the kind that it became.
    DmaBuf,
    /// A memfd that is pinned for a device, and for all others of its driver, once its pages are there:
    /// while the last reads are in flight. Pinning allocates holes, too.
    /// What it has become is a [`Kind::Memfd`] that is pinned ([`Buffer::pinned`](crate::Buffer::pinned)).
    Pinned(Arc<dyn PinDevice>),
    /// The caller's memory; set by [`Load::run_into`](crate::Load::run_into).
    #[doc(hidden)]
    Caller,
}

impl Kind {
    /// Fills the memory behind an existing descriptor, from its start.
    pub fn fd(fd: OwnedFd) -> Self {
        Self::part_of(fd, None)
    }

    /// Fills a range of the memory behind an existing descriptor, from byte `at` on: as many bytes as
    /// are loaded. Nothing else in it changes.
    pub fn fd_at(fd: OwnedFd, at: u64) -> Self {
        Self::part_of(fd, Some(at))
    }

    fn part_of(fd: OwnedFd, at: Option<u64>) -> Self {
        let number = fd.as_raw_fd();
        let fd = Arc::new(fd);
        Self::Fd { fd, number, at }
    }

    /// As [`Kind::from_str`], for a caller that also accepts `others`, which the error then lists.
    #[doc(hidden)]
    pub fn parse_beside(others: &[&str], text: &str) -> Result<Self> {
        match text.parse() {
            Ok(MemoryKind::Anon) => return Ok(Self::Anon),
            Ok(MemoryKind::Memfd) => return Ok(Self::Memfd),
            Ok(MemoryKind::Udmabuf) => return Ok(Self::Udmabuf),
            Ok(MemoryKind::Module) => return Ok(Self::Module),
            Ok(MemoryKind::DmaBuf) => return Ok(Self::DmaBuf),
            Ok(MemoryKind::Heap(name))
                if !matches!(&*name, "" | "." | "..") && !name.contains('/') =>
            {
                return Ok(Self::Heap(name));
            }
            Ok(MemoryKind::Fd(number, at)) => {
                let fd = sys::file::duplicate(number).map_err(|errno| {
                    Error::os("cannot use the descriptor", errno)
                        .at(text)
                        .with_remedy(
                            "pass an open memfd, for example from the shell with N<>/proc/PID/fd/M",
                        )
                })?;
                let fd = Arc::new(fd);
                return Ok(Self::Fd { fd, number, at });
            }
            _ if text.starts_with("fd:") => {
                let why = format!("'{text}' is not a descriptor");
                return Err(Error::usage(Opt::To, why));
            }
            // Another word, or one for memory that is not requested by its name.
            _ => {}
        }
        let own = [
            "anon",
            "memfd",
            "fd:N",
            "udmabuf",
            "heap:NAME",
            "module",
            "dma-buf",
        ];
        Err(not_one_of(Opt::To, text, &[&own, others].concat()))
    }
}

impl FromStr for Kind {
    type Err = Error;

    /// `anon`, `memfd`, `fd:N`, `fd:N@OFFSET` (in bytes), `udmabuf`, `heap:NAME`, `module`,
    /// `dma-buf`. `fd:N` duplicates the descriptor; EBADF if N is not open. `dmafile-gpu` also parses words for
    /// [`Kind::Pinned`].
    fn from_str(text: &str) -> Result<Self> {
        Self::parse_beside(&[], text)
    }
}

/// What all options have whose values are a few words.
macro_rules! words_of {
    ($option:ident) => {
        impl $option {
            /// All values, in the order of the documentation.
            pub const ALL: &'static [Self] = Self::VARIANTS;

            /// Its name on the command line and in JSON.
            pub fn word(self) -> &'static str {
                self.into()
            }

            pub(crate) fn words() -> Vec<&'static str> {
                Self::ALL.iter().map(|one| one.word()).collect()
            }

            fn unknown(text: &str) -> Error {
                not_one_of(Opt::$option, text, &Self::words())
            }
        }
    };
}

/// The page size of a buffer.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Serialize, Display, EnumString, IntoStaticStr, VariantArray,
)]
#[serde(into = "&'static str")]
#[strum(serialize_all = "kebab-case", parse_err_ty = Error, parse_err_fn = Pages::unknown)]
#[non_exhaustive]
pub enum Pages {
    /// Huge pages if an unprivileged user gets them.
    Auto,
    /// Base pages: 4, 16 or 64 KiB, depending on the machine.
    Base,
    /// Transparent huge pages: `MADV_HUGEPAGE` for private memory, `MADV_COLLAPSE` for memfd.
    Thp,
    /// Pages of the hugetlb pool.
    Huge,
}

words_of!(Pages);

/// The method that moves the bytes.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Serialize, Display, EnumString, IntoStaticStr, VariantArray,
)]
#[serde(into = "&'static str")]
#[strum(serialize_all = "kebab-case", parse_err_ty = Error, parse_err_fn = Method::unknown)]
#[non_exhaustive]
pub enum Method {
    /// The fastest that works here.
    Auto,
    /// io_uring, with registered buffers if the limit on pinned memory allows.
    Uring,
    /// pread(2) in a pool of threads.
    Threads,
    /// Direct reads into a small ring, then one copy: for memory that direct reads cannot go into,
    /// such as the mappings of most dma-bufs.
    Bounce,
    /// dmafile.ko reads into the pages behind its own dma-bufs.
    Module,
    /// copy_file_range(2) into the buffer's descriptor, on kernels that copy between disks and memory.
    CopyFileRange,
    /// A heap reads the whole file while it allocates the dma-buf, on kernels that support it.
    HeapRead,
    /// io_uring reads into memory that is DMA-mapped for the disk once, mainly dma-bufs, on kernels
    /// that support it.
    Premap,
    /// Readers of an object ([`RemoteObject`](crate::RemoteObject)) receive parts of it where they belong.
    Fetch,
}

words_of!(Method);

impl Method {
    /// Those that saves support.
    pub(crate) const OF_SAVES: &'static [Self] = &[
        Self::Auto,
        Self::Uring,
        Self::Threads,
        Self::Bounce,
        Self::Module,
        Self::CopyFileRange,
        Self::Premap,
    ];

    pub(crate) fn words_of_saves() -> Vec<&'static str> {
        Self::OF_SAVES.iter().map(|one| one.word()).collect()
    }

    /// Why a method that other loaders have is refused; None for any other word.
    pub fn refused(word: &str) -> Option<&'static str> {
        (word == "cufile").then(|| {
            if std::path::Path::new("/sys/module/nvidia_fs").exists() {
                "this version supports loading into a device only through its ring"
            } else {
                "the module nvidia_fs is not loaded, without which cuFile copies as the ring does"
            }
        })
    }
}

/// True if I/O bypasses the page cache.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Serialize, Display, EnumString, IntoStaticStr, VariantArray,
)]
#[serde(into = "&'static str")]
#[strum(serialize_all = "kebab-case", parse_err_ty = Error, parse_err_fn = Io::unknown)]
#[non_exhaustive]
pub enum Io {
    /// Per extent: what is in the page cache is copied from there, the rest is read directly.
    Auto,
    /// Only `O_DIRECT`.
    Direct,
    /// Only through the page cache.
    Buffered,
}

words_of!(Io);

/// When the pages of a buffer are allocated.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Serialize, Display, EnumString, IntoStaticStr, VariantArray,
)]
#[serde(into = "&'static str")]
#[strum(serialize_all = "kebab-case", parse_err_ty = Error, parse_err_fn = Allocation::unknown)]
#[non_exhaustive]
pub enum Allocation {
    /// Whichever is cheaper.
    Auto,
    /// By a separate thread, one chunk ahead of the reads.
    Ahead,
    /// By the reads themselves, page by page.
    InRead,
    /// All of them before the first read, for comparison.
    Before,
}

words_of!(Allocation);

/// The error for a word that is not one of an option's.
fn not_one_of(option: Opt, text: &str, words: &[&str]) -> Error {
    Error::usage(
        option,
        match Method::refused(text) {
            Some(why) if option == Opt::Method => format!("'{text}' is refused: {why}"),
            _ => format!("'{text}' is not one of {}", words.join(", ")),
        },
    )
}

/// The error for a number that is out of an option's range.
pub(crate) fn out_of_range(option: Opt, number: u64, (low, high): (u64, u64)) -> Error {
    Error::usage(option, format!("{number} is out of range: {low} to {high}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::verify::Algorithm;

    #[test]
    fn option_values_are_parsed_from_their_own_text() {
        for &method in Method::ALL {
            assert_eq!(method.word().parse::<Method>().unwrap(), method);
            assert_eq!(format!("{method:>15}"), format!("{:>15}", method.word()));
            assert_eq!(serde_json::to_value(method).unwrap(), method.word());
        }
        let error = "slow".parse::<Io>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "io: 'slow' is not one of auto, direct, buffered"
        );
    }

    /// The list is constant text, so it cannot be made of these.
    #[test]
    fn texts_in_the_list_agree_with_the_constants() {
        use crate::plan::{
            BOUNCE_BLOCK, BUFFERED_BLOCK, DIRECT_BLOCK, DIRECT_DEPTH, FETCH_BLOCK, FETCH_DEPTH,
            MOST_COPIERS, MOST_THREADS,
        };
        let text = |of, option, what: fn(&OptionInfo) -> &'static str| {
            what(
                OptionInfo::all(of)
                    .find(|info| info.option == option)
                    .unwrap(),
            )
        };
        let mib = |bytes| format!("{} MiB", bytes >> 20);
        let (load, save) = (Operation::Load, Operation::Save);
        assert_eq!(
            text(load, Opt::Chunk, |info| info.default),
            mib(DEFAULT_CHUNK)
        );
        let objects = (
            format!(", {} for objects", mib(FETCH_BLOCK)),
            format!(", {FETCH_DEPTH} for objects"),
        );
        let none = (String::new(), String::new());
        let all = [(load, MOST_COPIERS, objects), (save, MOST_THREADS, none)];
        for (of, most, (block_of_objects, depth_of_objects)) in all {
            assert_eq!(
                text(of, Opt::Block, |info| info.default),
                format!(
                    "{} for direct I/O, {} through the page cache, {} KiB for `bounce`{block_of_objects}",
                    mib(DIRECT_BLOCK),
                    mib(BUFFERED_BLOCK),
                    BOUNCE_BLOCK >> 10
                )
            );
            let depth = format!(
                "{DIRECT_DEPTH} for direct I/O, 1 to {most} by the number of CPUs through the page \
                 cache{depth_of_objects}"
            );
            assert_eq!(text(of, Opt::QueueDepth, |info| info.default), depth);
            let (low, high) = BLOCK_RANGE.into_inner();
            let range = format!("{} KiB to {}", low >> 10, mib(high));
            assert!(text(of, Opt::Block, |info| info.help).contains(&range));
            let names: Vec<_> = Algorithm::ALL.iter().map(|one| one.name()).collect();
            let verify = OptionInfo::all(of).find(|info| info.option == Opt::Verify);
            let OptionType::Text(words) = verify.unwrap().accepts else {
                panic!("it is a text");
            };
            assert_eq!(words.strip_suffix(&["store"]).unwrap_or(words), names);
        }
    }

    #[test]
    fn kinds_are_parsed_strictly() {
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
            "gpu-host",
        ] {
            let error = word.parse::<Kind>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage, "{word}");
        }
        let error = "fd:987654".parse::<Kind>().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
    }
}
