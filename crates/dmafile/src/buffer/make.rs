//! Creates the memory of a plan, and explains why it could not be created.

use super::anon::Anon;
use super::memfd::Memfd;
use super::udmabuf::Udmabuf;
use super::{Filling, Finish, RingBuffer, fd, heap, module};
use crate::error::{Error, Result};
use crate::message::{Opt, message};
use crate::options::{Kind, MemoryKind, Pages};
use crate::plan::Plan;
use crate::reasons::{About, Reasons};
use crate::sys::{Errno, host, sandbox};

/// Creates the memory of a plan, and logs the reasons for its form.
pub(crate) fn make(
    kind: &Kind,
    plan: &Plan,
    asked: Pages,
    log: &Reasons,
) -> Result<Box<dyn Finish>> {
    let made = with_pages(plan.pages, asked, log, |pages| make_with(kind, plan, pages));
    made.map_err(|error| error.at(format!("{kind}, {} bytes", plan.place.writable_to)))
}

/// Creates a ring of `bytes` bytes for a plan, and logs the reasons for its form.
pub(crate) fn make_ring(
    bytes: u64,
    plan: &Plan,
    asked: Pages,
    log: &Reasons,
) -> Result<RingBuffer> {
    let made = with_pages(plan.pages, asked, log, |pages| {
        let ring = RingBuffer::new(bytes, plan.place.writable_to, plan.phase(), pages)?;
        if pages == Pages::Huge {
            take_from_pool(&ring)?;
        }
        Ok(ring)
    });
    made.map_err(|error| error.at(format!("{bytes} bytes")))
}

fn with_pages<M>(
    pages: Pages,
    asked: Pages,
    log: &Reasons,
    make: impl Fn(Pages) -> Result<M>,
) -> Result<M> {
    match make(pages) {
        // The pool had room a moment ago, or a limit that we cannot see applies: use another page
        // size, unless this one was requested.
        Err(error) if pages == Pages::Huge && asked == Pages::Auto => {
            let why = message!["no hugetlb pages: ", &error];
            log.add(About::Pages, Pages::Thp, why);
            make(Pages::Thp)
        }
        made => made,
    }
}

fn make_with(kind: &Kind, plan: &Plan, pages: Pages) -> Result<Box<dyn Finish>> {
    let made: Box<dyn Finish> = match kind {
        Kind::Anon => Box::new(Anon::new(plan, pages)?),
        Kind::Memfd => Box::new(Memfd::new(plan, pages)?),
        Kind::Pinned(device) => Box::new(Memfd::pinned(plan, pages, device)?),
        Kind::Fd { fd, .. } => return fd::existing(fd, plan, pages),
        Kind::Udmabuf => Box::new(Udmabuf::new(plan, pages)?),
        Kind::Heap(name) => return Ok(Box::new(heap::make(name, plan)?)),
        Kind::Module => return Ok(Box::new(module::make(plan)?)),
        Kind::DmaBuf | Kind::Caller => {
            unreachable!("it has become another kind, or brings its own memory")
        }
    };
    if pages == Pages::Huge {
        take_from_pool(&*made)?;
    }
    Ok(made)
}

/// The pool reserves pages when they are mapped; a cgroup's limit applies when they are allocated.
fn take_from_pool(made: &(impl Filling + ?Sized)) -> Result<()> {
    let taken = made.populate(0, 1);
    taken.map_err(|errno| cannot_map(errno, Pages::Huge))
}

/// The error for a filled buffer that could not be converted to its final form.
pub(crate) fn cannot_export(errno: Errno, kind: &MemoryKind) -> Error {
    let error = Error::os("cannot finish the buffer", errno).at(kind.to_string());
    match errno {
        Errno::MFILE => error.with_remedy("raise the limit on open files: ulimit -n"),
        Errno::NOMEM if *kind == MemoryKind::Udmabuf => {
            error.with_remedy("free memory: a udmabuf pins its pages")
        }
        _ => error,
    }
}

/// The error for a failed mapping: ENOMEM does not only mean too little memory.
pub(super) fn cannot_map(errno: Errno, pages: Pages) -> Error {
    let error = Error::os("cannot create the buffer", errno);
    match (errno, pages, host::address_space()) {
        (Errno::NOMEM, Pages::Huge, _) => error
            .with_why("the hugetlb pool is too small for it")
            .with_remedy(message![
                "enlarge it: sysctl vm.nr_hugepages=N, or use ",
                Opt::Pages.set(Pages::Thp)
            ]),
        (Errno::NOMEM, _, Some(limit)) => error
            .with_why(format!(
                "it exceeds the limit on address space, {limit} bytes"
            ))
            .with_remedy("raise it: ulimit -v"),
        (Errno::NOMEM, ..) => {
            error.with_remedy("free memory, or raise vm.overcommit_memory's limit")
        }
        (Errno::INVAL, Pages::Huge, _) => error
            .with_why("this kernel has no hugetlb pages")
            .with_remedy(message!["use ", Opt::Pages.set(Pages::Thp)]),
        (Errno::FAULT, Pages::Huge, _) => error
            .with_why("a cgroup limits hugetlb pages to less")
            .with_remedy(message![
                "raise its hugetlb limit, or use ",
                Opt::Pages.set(Pages::Thp)
            ]),
        (Errno::FBIG, ..) => error
            .with_why("it exceeds the limit on file size")
            .with_remedy("raise it: ulimit -f"),
        _ => error.of_calls(&[sandbox::MEMFD_CREATE, sandbox::FTRUNCATE]),
    }
}
