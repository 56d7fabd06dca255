//! Blocks that bytes pass through on their way between a file and memory that the disk cannot access.

use super::Stop;
use crate::error::Error;
use crate::sys::map::{Mapping, Region, page_size};

/// Alignment of the start and size of larger rings of blocks, so that they consist only of transparent huge pages:
/// they are pinned as a whole, and the disk accepts more of them at once.
const HUGE: u64 = 2 << 20;

/// A ring of blocks.
#[derive(Clone, Copy)]
pub(crate) struct Blocks<'m> {
    pub region: Region<'m>,
    /// Size of a block in bytes.
    pub size: u64,
    pub count: u64,
}

impl Blocks<'_> {
    /// Creates `count` blocks of `size` bytes for the duration of `moves`. The first one begins at a multiple of
    /// `align`, and of a page.
    pub(crate) fn with<T>(
        (count, size): (u64, u64),
        align: u64,
        moves: impl FnOnce(&Blocks<'_>) -> Result<T, Stop>,
    ) -> Result<T, Stop> {
        let (bytes, align) = (count * size, align.max(page_size()));
        let (bytes, align) = if bytes >= HUGE {
            (bytes.next_multiple_of(HUGE), align.max(HUGE))
        } else {
            (bytes, align)
        };
        let ring = Mapping::anon(bytes as usize, align as usize)
            .map_err(|errno| Stop::Refused(Error::os("cannot create a ring of blocks", errno)))?;
        let region = ring.region();
        // Only advice: it works without huge pages.
        let _ = region.want_huge();
        // Before Linux 6.5 a fork could separate a page from the operation that uses it.
        region.leave_out_of_forks(true);
        moves(&Blocks {
            region,
            size,
            count,
        })
    }

    /// Where a block begins in the region.
    pub(crate) fn at(&self, index: u64) -> u64 {
        index * self.size
    }
}
