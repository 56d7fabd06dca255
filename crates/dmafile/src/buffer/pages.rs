//! How the pages of a buffer are allocated.

use crate::options::Pages;
use crate::sys::Errno;
use crate::sys::map::{Region, page_size};
use crate::sys::{host, pagemap};
use std::sync::atomic::{AtomicU64, Ordering};

/// Tries to get pages of one size, and uses what it gets.
pub(super) struct Tactic {
    pages: Pages,
    /// Size of the huge pages to try; 0 without.
    huge: u64,
    /// Collapse on request, instead of huge page faults: for memory with a descriptor.
    collapse: bool,
    collapsed: AtomicU64,
    refused: AtomicU64,
}

/// After this many failures in a row to get a huge page, memory is considered fragmented.
const GIVE_UP_AFTER: u64 = 8;

/// The size of transparent huge pages; 0 without.
pub(super) fn huge() -> u64 {
    host::number("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").unwrap_or(0)
}

impl Tactic {
    pub(super) fn new(pages: Pages, collapse: bool) -> Self {
        let pool = || host::kilobytes("/proc/meminfo", "Hugepagesize");
        let huge = match pages {
            Pages::Huge => pool().unwrap_or(0),
            Pages::Thp => huge(),
            Pages::Auto | Pages::Base => 0,
        };
        Self {
            pages,
            huge,
            collapse,
            collapsed: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        }
    }

    /// Alignment at which memory should start and be populated.
    pub(super) fn grain(&self) -> u64 {
        self.huge.max(page_size())
    }

    /// Sets the page size for all of a fresh mapping, once.
    pub(super) fn advise(&self, region: &Region<'_>) {
        // Only advice: if the kernel does not follow it, the pages that it allocates are
        // counted.
        let _ = match self.pages {
            Pages::Thp => region.want_huge(),
            Pages::Base => region.want_small(),
            Pages::Auto | Pages::Huge => Ok(()),
        };
    }

    /// Allocates the pages of a range.
    pub(super) fn populate(&self, region: &Region<'_>, at: u64, len: u64) -> Result<(), Errno> {
        if self.pages == Pages::Thp && self.collapse && self.huge > 0 {
            self.collapse_within(region, at, len);
        }
        // Does nothing if huge pages are already present.
        region.populate(at, len)
    }

    fn collapse_within(&self, region: &Region<'_>, at: u64, len: u64) {
        let start = at.next_multiple_of(self.huge);
        let end = (at + len) - (at + len) % self.huge;
        if start >= end || self.refused.load(Ordering::Relaxed) >= GIVE_UP_AFTER {
            return;
        }
        if region.collapse(start, end - start, self.huge).is_ok() {
            self.collapsed.fetch_add(end - start, Ordering::Relaxed);
            return;
        }
        // One of them failed; find out which, and collapse the others.
        for page in (start..end).step_by(self.huge as usize) {
            if region.collapse(page, self.huge, self.huge).is_ok() {
                self.collapsed.fetch_add(self.huge, Ordering::Relaxed);
                self.refused.store(0, Ordering::Relaxed);
            } else if self.refused.fetch_add(1, Ordering::Relaxed) + 1 >= GIVE_UP_AFTER {
                return;
            }
        }
    }

    /// The page size it got, with a remark if that is not the one that was tried.
    pub(super) fn got(&self, region: &Region<'_>) -> (String, Option<String>) {
        if self.pages != Pages::Thp {
            // Existing memory keeps its page size.
            let pages = match self.pages {
                Pages::Auto => "existing".to_string(),
                tried => tried.to_string(),
            };
            return (pages, None);
        }
        let huge = if self.collapse {
            Some(self.collapsed.load(Ordering::Relaxed))
        } else {
            pagemap::huge_bytes(region)
        };
        let Some(huge) = huge else {
            return (
                "thp".to_string(),
                Some("requested; /proc/self/pagemap and smaps do not show what it got".to_string()),
            );
        };
        let mib = |bytes: u64| bytes >> 20;
        let all = region.len() - region.len() % self.huge.max(1);
        let remark = format!(
            "{} of {} MiB are on huge pages",
            mib(huge),
            mib(region.len())
        );
        match huge {
            0 => (
                "base".to_string(),
                Some(format!("{remark}: none were available")),
            ),
            some if some >= all => ("thp".to_string(), Some(remark)),
            _ => ("thp+base".to_string(), Some(remark)),
        }
    }
}
