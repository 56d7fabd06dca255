//! The page size of the buffer.

use super::SMALL_FILE;
use crate::error::{Error, Result};
use crate::facts::Host;
use crate::facts::target::MemoryTarget;
use crate::message::Opt;
use crate::options::{DEFAULT_CHUNK, Kind, Pages};
use crate::reasons::{About, Reasons};
use crate::request::Request;

/// Decides on the page size to try. `footprint` returns how many bytes of memory the data needs on
/// pages of a size.
pub(super) fn pages(
    request: &Request,
    host: &Host,
    target: &MemoryTarget,
    bytes: u64,
    footprint: impl Fn(u64) -> u64,
    log: &Reasons,
) -> Result<Pages> {
    if target.dma_buf.is_some() {
        if request.pages != Pages::Auto {
            return Err(Error::usage(
                Opt::Pages,
                format!(
                    "'{}' is not available: the exporter of a dma-buf chooses its pages",
                    request.pages
                ),
            ));
        }
        log.add(
            About::Pages,
            "exporter",
            "the exporter of a dma-buf chooses its pages",
        );
        return Ok(Pages::Auto);
    }
    if let Some(existing) = target.existing {
        let may_choose = existing.empty && request.pages != Pages::Huge;
        if request.pages != Pages::Auto && !may_choose {
            return Err(Error::usage(
                Opt::Pages,
                format!(
                    "'{}' is not available: existing memory keeps its pages",
                    request.pages
                ),
            ));
        }
        if existing.hugetlb {
            log.add(
                About::Pages,
                Pages::Huge,
                "the page size of the existing memory",
            );
            return Ok(Pages::Huge);
        }
        if !may_choose {
            log.add(About::Pages, "existing", "existing memory keeps its pages");
            return Ok(Pages::Auto);
        }
    }
    let vmaps_wrong = matches!(target.kind, Kind::Udmabuf) && host.udmabuf_vmaps_wrong;
    if request.pages != Pages::Auto {
        let why = if vmaps_wrong && request.pages != Pages::Base {
            format!("requested; {VMAPS_WRONG}")
        } else {
            "requested".to_string()
        };
        log.add(About::Pages, request.pages, why);
        return Ok(request.pages);
    }
    if vmaps_wrong {
        let why = format!("{VMAPS_WRONG}; huge pages are for importers that do not");
        log.add(About::Pages, Pages::Base, why);
        return Ok(Pages::Base);
    }
    let (choice, why) = best_pages(request, host, target, bytes, footprint);
    log.add(About::Pages, choice, why);
    Ok(choice)
}

/// Silently wrong bytes in an importing driver are worse than slow pages.
const VMAPS_WRONG: &str =
    "drivers that vmap a udmabuf see wrong bytes on huge pages (Linux 6.11 and 6.12)";

/// Huge pages if an unprivileged user gets them.
fn best_pages(
    request: &Request,
    host: &Host,
    target: &MemoryTarget,
    bytes: u64,
    footprint: impl Fn(u64) -> u64,
) -> (Pages, String) {
    // Existing memory is not from the pool.
    let from_pool =
        target.existing.is_none() && !request.exact_size && (1..=bytes).contains(&host.pool_page);
    // A mapping reserves pages of the pool for all of it, including holes.
    let full = || footprint(host.pool_page) >= bytes - bytes / 4;
    if from_pool && host.pool_free >= bytes.next_multiple_of(host.pool_page) && full() {
        return (
            Pages::Huge,
            "the hugetlb pool has room for all of it".to_string(),
        );
    }
    let pool = if from_pool {
        ", and the hugetlb pool has no room"
    } else {
        ""
    };
    if host.thp_size == 0 {
        return (
            Pages::Base,
            format!("this kernel has no transparent huge pages, or /sys hides them{pool}"),
        );
    }
    if bytes <= SMALL_FILE.max(host.thp_size) {
        return (
            Pages::Base,
            "too small for huge pages to matter".to_string(),
        );
    }
    if host.thp_size > request.chunk.unwrap_or(DEFAULT_CHUNK) {
        return (
            Pages::Base,
            format!(
                "a huge page, {} MiB, is larger than a chunk",
                host.thp_size >> 20
            ),
        );
    }
    // Every page with one byte of data is allocated completely: between holes, most of it would be
    // wasted.
    let (small, huge) = (footprint(host.page), footprint(host.thp_size));
    if huge > small + small / 4 {
        let (small, huge) = (small >> 10, huge >> 10);
        return (
            Pages::Base,
            format!("{small} KiB of data between holes would take {huge} KiB of huge pages"),
        );
    }
    match (&target.kind, host.thp.as_deref()) {
        (Kind::Anon, Some("never")) => (
            Pages::Base,
            format!("transparent huge pages are switched off{pool}"),
        ),
        (Kind::Anon, _) => (Pages::Thp, "MADV_HUGEPAGE".to_string()),
        _ => (
            Pages::Thp,
            "MADV_COLLAPSE, which needs no privilege and no shmem_enabled".to_string(),
        ),
    }
}
