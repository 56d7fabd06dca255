//! When the pages of a buffer are allocated, and by how many threads.

use super::MOST_THREADS;
use super::tuning::copiers;
use super::{Attempt, SMALL_FILE};
use crate::facts::target::MemoryTarget;
use crate::facts::{File, Host};
use crate::options::{Allocation, Kind, Method, Pages};
use crate::request::Request;

/// Amount of memory that is worth another allocating thread.
const ALLOCATOR_SHARE: u64 = 32 << 20;

/// Chooses between a thread that allocates ahead of the reads and reads that fault their pages in, and says why.
pub(super) fn allocation(
    request: &Request,
    file: &File,
    target: &MemoryTarget,
    pages: Pages,
    (first, alone): (Attempt, bool),
    bytes: u64,
    fuses: bool,
) -> (Allocation, &'static str) {
    if request.allocation != Allocation::Auto {
        (request.allocation, "requested")
    } else if matches!(target.kind, Kind::Caller) {
        (Allocation::InRead, "the caller's memory already exists")
    } else if fuses {
        (
            Allocation::Ahead,
            match first.method {
                Method::Module => "dmafile.ko allocates and reads in one call",
                _ => "the heap allocates and reads in one call",
            },
        )
    } else if target.dma_buf.is_some() {
        (Allocation::InRead, "a dma-buf has its pages from the start")
    } else if bytes <= SMALL_FILE && pages != Pages::Thp && needs_pages(file, first) {
        (
            Allocation::Ahead,
            "btrfs may read through the page cache into pages that are not allocated",
        )
    } else if bytes <= SMALL_FILE && pages != Pages::Thp {
        (
            Allocation::InRead,
            "small: a second thread would cost more than it saves",
        )
    } else if first.method == Method::Fetch && pages == Pages::Huge {
        (
            Allocation::InRead,
            "the thread that receives bytes zeroes a huge page just before, so it stays in the CPU's cache",
        )
    } else if matches!(pages, Pages::Thp | Pages::Huge) {
        (
            Allocation::Ahead,
            "huge pages are zeroed one chunk ahead of the reads",
        )
    } else if first.method == Method::CopyFileRange {
        (
            Allocation::InRead,
            "the kernel allocates pages as it writes them, without zeroing",
        )
    } else if first.method == Method::Fetch {
        (
            Allocation::Ahead,
            "memory is allocated faster than bytes arrive",
        )
    } else if first.direct {
        (
            Allocation::Ahead,
            "faulting pages in would hold up the submission of reads",
        )
    } else if alone {
        (
            Allocation::Ahead,
            "a single thread reads, and should not fault pages in as well",
        )
    } else {
        (
            Allocation::InRead,
            "copies fault their pages in as fast as a thread ahead of them would",
        )
    }
}

/// On Btrfs, a direct read into memory whose first page is not present silently goes through the
/// page cache (seen with Linux 7.3, which takes the fault for a refusal).
fn needs_pages(file: &File, first: Attempt) -> bool {
    let into_mapping = matches!(first.method, Method::Uring | Method::Threads);
    first.direct && into_mapping && file.file_system == "btrfs"
}

/// Maximum number of threads that allocate ahead: as many as CPUs, without those that copies need.
pub(super) fn allocators(host: &Host, first: Attempt, alone: bool, capacity: u64) -> usize {
    let copiers = if first.direct || alone || first.method == Method::Fetch {
        0
    } else {
        copiers(host.cpus)
    };
    (host.cpus - copiers)
        .min((capacity / ALLOCATOR_SHARE) as usize)
        .clamp(1, MOST_THREADS)
}

/// True if one call can allocate the buffer and read into it: a new buffer, for one run of one file.
pub(super) fn fuses(target: &MemoryTarget, first: Attempt, one_run: bool) -> bool {
    match first.method {
        Method::Module => matches!(target.kind, Kind::Module) && one_run,
        // It is only ever listed for that.
        Method::HeapRead => true,
        _ => false,
    }
}
