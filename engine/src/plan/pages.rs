//! The size of the buffer's pages.

use super::{Reasons, Request, SMALL_FILE};
use crate::error::{Error, Result};
use crate::facts::Host;
use crate::options::{Kind, Method, Pages};

/// Decides on the pages to try for.
pub(super) fn pages(
    request: &Request,
    host: &Host,
    bytes: u64,
    reasons: &mut Reasons,
) -> Result<Pages> {
    if let Some(place) = request.place {
        let may_choose = place.empty && request.pages != Pages::Huge;
        if request.pages != Pages::Auto && !may_choose {
            return Err(Error::usage(
                "--pages",
                format!(
                    "'{}' cannot be had: memory that exists keeps its pages",
                    request.pages
                ),
            ));
        }
        if !may_choose {
            reasons.add("pages", "4k", "memory that exists keeps its pages");
            return Ok(Pages::Auto);
        }
    }
    if request.pages != Pages::Auto {
        reasons.add("pages", request.pages, "asked for");
        return Ok(request.pages);
    }
    let (choice, why) = best_pages(request, host, bytes);
    reasons.add("pages", choice, why);
    Ok(choice)
}

/// Huge pages wherever an ordinary user gets them.
fn best_pages(request: &Request, host: &Host, bytes: u64) -> (Pages, String) {
    // Memory that exists is not the pool's, and hugetlbfs has no write(2).
    let from_pool = request.place.is_none()
        && !matches!(request.method, Method::Sendfile | Method::Splice)
        && (1..=bytes).contains(&host.pool_page);
    if from_pool && host.pool_free >= bytes.next_multiple_of(host.pool_page) {
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
            Pages::Small,
            format!("this kernel has no transparent huge pages{pool}"),
        );
    }
    if bytes <= SMALL_FILE.max(host.thp_size) {
        return (
            Pages::Small,
            "too small for huge pages to matter".to_string(),
        );
    }
    match (&request.kind, host.thp.as_deref()) {
        (Kind::Anon, Some("never")) => (
            Pages::Small,
            format!("transparent huge pages are switched off{pool}"),
        ),
        (Kind::Anon, _) => (Pages::Thp, "MADV_HUGEPAGE".to_string()),
        _ => (
            Pages::Thp,
            "MADV_COLLAPSE, which needs no privilege and no shmem_enabled".to_string(),
        ),
    }
}
