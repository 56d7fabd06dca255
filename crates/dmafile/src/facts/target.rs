//! Properties of the target memory, probed before anything is decided.

use super::premap;
use crate::error::{Error, Result};
use crate::exporter::module::ModuleFacts;
use crate::exporter::{heap, module, udmabuf};
use crate::message::{Message, Opt, message};
use crate::options::{Allocation, Io, Kind, Method, Pages};
use crate::reasons::{About, Reasons};
use crate::request::Request;
use crate::source::Source;
use crate::sys::map::{Mapping, page_size};
use crate::sys::{Errno, dmabuf, file, memfd};
use rustix::fs::SealFlags;
use std::os::fd::{AsFd, BorrowedFd};

/// Memory for a load: its kind, and what is known about it before it is created.
#[derive(Clone, Debug)]
pub(crate) struct MemoryTarget {
    /// The requested kind, or the one that `dma-buf` stands for here.
    pub kind: Kind,
    /// Existing memory: the caller's, or that of an `fd:N`.
    pub existing: Option<ExistingMemory>,
    /// Memory that is accessed through the mapping of a dma-buf.
    pub dma_buf: Option<DmaBufFacts>,
    /// Size of the ring in bytes, if the file passes through one.
    pub ring: Option<u64>,
    /// True if the kernel can copy the file into existing memory (copy_file_range(2)).
    pub copies: bool,
}

/// Properties of existing memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExistingMemory {
    /// Its size in bytes.
    pub bytes: u64,
    /// Its address, or 0 if it will be mapped at the start of a page.
    pub address: u64,
    /// Where the only part to be written begins, in bytes; None for all of it.
    pub at: Option<u64>,
    /// Nothing is allocated in it yet and all of it may be written, so its page size can be chosen.
    pub empty: bool,
    /// Bytes of it that are not allocated yet.
    pub lacking: u64,
    /// True if it consists of hugetlb pages, which do not support write(2).
    pub hugetlb: bool,
}

/// Properties of a dma-buf.
#[derive(Clone, Debug, Default)]
pub(crate) struct DmaBufFacts {
    /// Why its mapping cannot be pinned, so that direct reads cannot go into it.
    pub unpinnable: Option<Errno>,
    /// dmafile.ko, if it created the dma-buf or will create it.
    pub module: Option<ModuleFacts>,
    /// True if it comes from a heap that reads files during allocation.
    pub heap_reads: bool,
    /// Why it cannot be mapped once for the file's disk, if that was tried.
    pub premap_refused: Option<String>,
}

impl MemoryTarget {
    /// The caller's memory.
    pub(crate) fn caller(memory: &[u8]) -> Self {
        Self {
            existing: Some(ExistingMemory {
                address: memory.as_ptr().addr() as u64,
                bytes: memory.len() as u64,
                at: None,
                empty: false,
                lacking: 0,
                hugetlb: false,
            }),
            ..Self::of(Kind::Caller)
        }
    }

    /// A ring of `bytes` bytes.
    pub(crate) fn ring(bytes: u64) -> Self {
        Self {
            ring: Some(bytes),
            ..Self::of(Kind::Anon)
        }
    }

    /// Memory of which only the kind is known.
    pub(crate) fn of(kind: Kind) -> Self {
        Self {
            kind,
            existing: None,
            dma_buf: None,
            ring: None,
            copies: false,
        }
    }

    /// Inspects the memory that a request names, without writing to it. For `dma-buf`, chooses the
    /// first kind that can be created here.
    ///
    /// # Errors
    /// If such memory cannot be created here, or a descriptor cannot be filled.
    pub(crate) fn probe(request: &Request, source: &Source, log: &Reasons) -> Result<Self> {
        let kind = match &request.kind {
            Kind::DmaBuf => {
                let best = best_dma_buf(request, source, log);
                best.map_err(|error| error.at("dma-buf"))?
            }
            kind => kind.clone(),
        };
        let mut target = Self::of(kind);
        match &target.kind {
            Kind::Fd { fd, number, at } => {
                let found = probe_fd(fd.as_fd(), *number, *at, source)?;
                (target.existing, target.dma_buf) = (Some(found.0), found.1);
                target.copies = source
                    .buffered(0)
                    .is_ok_and(|(from, _)| file::copies_range(from, fd.as_fd()));
            }
            Kind::Heap(name) => {
                let place = target.kind.to_string();
                let facts = probe_heap(name, Some(source)).map_err(|error| error.at(place))?;
                target.dma_buf = Some(facts);
            }
            Kind::Udmabuf => probe_udmabuf()?,
            Kind::Module => {
                // The module's own method does not need the mapping.
                let try_pin = !matches!(request.method, Method::Auto | Method::Module);
                let facts =
                    probe_module(try_pin.then_some(source)).map_err(|error| error.at("module"))?;
                target.dma_buf = Some(facts);
            }
            _ => {}
        }
        Ok(target)
    }

    /// dmafile.ko, if the memory is one of its dma-bufs.
    pub(crate) fn module(&self) -> Option<ModuleFacts> {
        self.dma_buf.as_ref()?.module
    }

    /// True if a heap that reads files during allocation will create the buffer.
    pub(crate) fn heap_reads(&self) -> bool {
        matches!(self.kind, Kind::Heap(_))
            && self.dma_buf.as_ref().is_some_and(|facts| facts.heap_reads)
    }
}

/// True if a heap could allocate the buffer and read the file in one call: the request must be for a
/// whole file, and allow the method.
fn may_fuse(request: &Request, source: &Source) -> bool {
    request.is_whole()
        && !source.is_objects()
        && source.files().len() == 1
        && matches!(request.method, Method::Auto | Method::HeapRead)
        && matches!(request.allocation, Allocation::Auto | Allocation::Ahead)
}

/// True if a dma-buf could be mapped once for the disk: the request must allow the method.
fn may_map(request: &Request) -> bool {
    request.io != Io::Buffered && matches!(request.method, Method::Auto | Method::Premap)
}

/// The first kind of dma-buf that can be created here, which it probes. The log says why it is this
/// one and not an earlier one.
fn best_dma_buf(request: &Request, source: &Source, log: &Reasons) -> Result<Kind> {
    type Probe = fn() -> Result<()>;
    let mut all: [(Kind, bool, Probe, &str); 3] = [
        (
            Kind::Module,
            false,
            || probe_module(None).map(drop),
            "the disk writes into its pages while they are being allocated",
        ),
        (
            Kind::Udmabuf,
            true,
            probe_udmabuf,
            "the disk writes into its pages",
        ),
        (
            Kind::Heap("system".to_string()),
            false,
            || probe_heap("system", None).map(drop),
            "the last resort: bytes are copied",
        ),
    ];
    let heap_first = match probe_heap("system", Some(source)) {
        Ok(facts) if facts.heap_reads && may_fuse(request, source) => {
            Some("it lets the disk write into its pages while they are being allocated")
        }
        Ok(facts) if facts.premap_refused.is_none() && may_map(request) => {
            Some("the disk writes into its pages, for which they are mapped once")
        }
        _ => None,
    };
    if let Some(why) = heap_first {
        all.swap(1, 2);
        all[1].3 = why;
    }
    let (mut refused, mut first) = (Vec::new(), None);
    for (kind, chooses_pages, probe, why) in all {
        let probed = match request.pages {
            Pages::Auto => probe(),
            _ if chooses_pages => probe(),
            pages => Err(
                Error::new(Opt::Pages.set(pages), "its exporter chooses them")
                    .with_errno(Errno::OPNOTSUPP),
            ),
        };
        match probed {
            Ok(()) => {
                log.add(About::Kind, &kind, format!("probed: {why}"));
                return Ok(kind);
            }
            Err(error) => {
                log.add(About::Not, &kind, &error);
                refused.push(message![format!("{kind}: "), &error]);
                first.get_or_insert(error);
            }
        }
    }
    let errno = first.and_then(|error| error.raw_os_error());
    let errno = errno.map_or(Errno::OPNOTSUPP, Errno::from_raw_os_error);
    Err(
        Error::new("cannot create a dma-buf", Message::join(refused, "; and "))
            .with_errno(errno)
            .with_remedy(message![
                "modprobe dmafile or udmabuf (`dmafile doctor` says more), or ",
                Opt::To.set(Kind::Memfd),
            ]),
    )
}

/// True if a udmabuf can be created here.
fn probe_udmabuf() -> Result<()> {
    udmabuf::open()
        .map(drop)
        .map_err(|error| error.at("udmabuf"))
}

/// Properties of a heap's memory, for loads of the source if there is one: tried with a page.
fn probe_heap(name: &str, source: Option<&Source>) -> Result<DmaBufFacts> {
    let node = heap::open(name)?;
    let fd = heap::allocate(&node, page_size())?;
    Ok(DmaBufFacts {
        unpinnable: first_page(fd.as_fd())?,
        heap_reads: dmabuf::reads_files(node.as_fd()),
        premap_refused: source.and_then(|source| premap::dma_buf_refused(source, fd.as_fd())),
        ..DmaBufFacts::default()
    })
}

/// Properties of dmafile.ko. With a source, also whether direct reads by other methods can go into
/// its buffers: tried with a page.
fn probe_module(source: Option<&Source>) -> Result<DmaBufFacts> {
    let Some(source) = source else {
        return Ok(DmaBufFacts {
            module: Some(module::open()?.1),
            ..DmaBufFacts::default()
        });
    };
    let (fd, module) = module::allocate(page_size())?;
    Ok(DmaBufFacts {
        unpinnable: first_page(fd.as_fd())?,
        module: Some(module),
        premap_refused: premap::dma_buf_refused(source, fd.as_fd()),
        ..DmaBufFacts::default()
    })
}

/// Maps the first page of a dma-buf: returns why it cannot be pinned, if it cannot.
fn first_page(fd: BorrowedFd<'_>) -> Result<Option<Errno>> {
    let map = Mapping::chain(&[(fd, page_size())]);
    let map = map.map_err(|errno| Error::os("cannot map the dma-buf", errno))?;
    Ok(map.region().can_be_pinned(0).err())
}

/// Inspects a descriptor to be filled, without changing its contents.
fn probe_fd(
    fd: BorrowedFd<'_>,
    number: i32,
    at: Option<u64>,
    source: &Source,
) -> Result<(ExistingMemory, Option<DmaBufFacts>)> {
    let refuse = |why: &str, errno, remedy: &str| {
        Error::new("cannot fill the descriptor", why)
            .with_errno(errno)
            .at(format!("fd:{number}"))
            .with_remedy(remedy)
    };
    let not_writable = || {
        refuse(
            "it is not open for writing",
            Errno::ACCESS,
            "open it for reading and writing",
        )
    };
    if dmabuf::is_one(fd) {
        if memfd::is_writable(fd) == Ok(false) {
            return Err(not_writable());
        }
        let probe = || {
            let bytes = dmabuf::size(fd)?;
            let map = Mapping::chain(&[(fd, bytes.min(page_size()))])?;
            Ok((bytes, map.region().can_be_pinned(0).err()))
        };
        let (bytes, unpinnable) = probe().map_err(|errno: Errno| {
            let why = "it is a dma-buf that this process cannot map";
            refuse(why, errno, "use one whose exporter allows CPU access")
        })?;
        let existing = ExistingMemory {
            bytes,
            address: 0,
            at,
            empty: false,
            lacking: 0,
            hugetlb: false,
        };
        let facts = DmaBufFacts {
            unpinnable,
            module: module::behind(fd),
            premap_refused: premap::dma_buf_refused(source, fd),
            ..DmaBufFacts::default()
        };
        return Ok((existing, Some(facts)));
    }
    let stat = file::stat(fd).map_err(|errno| Error::os("cannot stat", errno))?;
    let seals = memfd::seals(fd).map_err(|_| {
        refuse(
            "it is neither a memfd nor a dma-buf",
            Errno::INVAL,
            "create one with memfd_create(2)",
        )
    })?;
    if seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
        return Err(refuse(
            "it is sealed against writing",
            Errno::PERM,
            "fill it before sealing",
        ));
    }
    if memfd::appends(fd) == Ok(true) {
        return Err(refuse(
            "it is open for appending, so it cannot be written in place",
            Errno::INVAL,
            "open it without O_APPEND",
        ));
    }
    if memfd::is_writable(fd) == Ok(false) {
        return Err(not_writable());
    }
    let existing = ExistingMemory {
        bytes: stat.size,
        address: 0,
        at,
        // The page size of a part cannot be chosen.
        empty: stat.allocated == 0 && !stat.is_hugetlb() && at.is_none(),
        lacking: stat.size.saturating_sub(stat.allocated),
        hugetlb: stat.is_hugetlb(),
    };
    Ok((existing, None))
}
