//! How bytes move between a file and memory, in either direction: a ring, a pool of workers, and blocks in between.
//! Nothing here knows what is loaded or saved.

mod blocks;
mod mapped;
mod ring;
mod windows;
mod workers;

use crate::error::Error;
use crate::flow::feed::{Feed, IoExtent};
use crate::flow::run::Run;
use crate::plan::Attempt;
use crate::sys::Errno;

pub(crate) use blocks::Blocks;
pub(crate) use mapped::MappedDmaBuf;
pub(crate) use ring::{Direction, Flight, RingMemory, move_all};
pub(crate) use windows::{Map, Windows};
pub(crate) use workers::{MovedExtent, each, run_workers, try_in_order};

/// One attempt to move what is in a feed.
#[derive(Clone, Copy)]
pub(crate) struct Pass<'a> {
    pub attempt: Attempt,
    pub feed: &'a Feed,
    pub run: &'a Run<'a>,
    /// Where a byte of the file is, for errors.
    pub place: &'a (dyn Fn(u64) -> String + Sync),
    /// The NUMA node that new memory comes from.
    pub node: Option<u32>,
}

impl Pass<'_> {
    /// Refuses to move an extent after a cancellation.
    fn check(&self, extent: &IoExtent) -> Result<(), Stop> {
        let place = || (self.place)(extent.file);
        Ok(self.run.check(place)?)
    }
}

/// Why a method ended early.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The transfer has failed.
    Failed(Error),
    /// This method does not work here; what was not moved is back in the feed, for the next one.
    Refused(Error),
    /// As `Refused`, and no direct I/O will work.
    NotDirect(Error),
}

impl Stop {
    /// A method that the kernel refuses.
    pub(crate) fn refused(what: &'static str) -> impl Fn(Errno) -> Self {
        move |errno| Self::Refused(Error::os(what, errno))
    }

    /// Ends the other workers of a failed transfer. The next method gets what this one has not moved.
    fn leave(&self, feed: &Feed, extent: IoExtent) {
        match self {
            Self::Failed(error) => feed.stop(Some(error.clone())),
            Self::Refused(_) | Self::NotDirect(_) => feed.put_back(extent),
        }
    }

    /// A failure takes precedence over a refusal, and otherwise the first one over the second.
    fn or(first: Option<Self>, second: Self) -> Self {
        match (first, second) {
            (Some(Self::Failed(error)), _) => Self::Failed(error),
            (_, Self::Failed(error)) => Self::Failed(error),
            (Some(first), _) => first,
            (None, second) => second,
        }
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// What remains of an extent after an operation that moved fewer bytes than requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rest {
    /// All of its bytes have been moved.
    Nothing,
    /// This remains to be moved in the same I/O mode.
    Again(IoExtent),
    /// The rest does not begin at an offset where direct I/O may.
    Buffered(IoExtent),
}

impl Rest {
    /// After `moved` bytes, at least one. An operation may move less (a signal, a network file system) and is
    /// continued where it stopped: for direct I/O, at the last multiple of this alignment.
    pub(crate) fn after(extent: &IoExtent, moved: u64, direct: Option<u64>) -> Self {
        if moved >= extent.need {
            return Self::Nothing;
        }
        let skip = direct.map_or(moved, |align| moved - moved % align);
        let rest = IoExtent {
            file: extent.file + skip,
            at: extent.at + skip,
            len: extent.len - skip,
            need: extent.need - skip,
            head: extent.head.saturating_sub(skip),
            ..*extent
        };
        match skip {
            0 => Self::Buffered(rest),
            _ => Self::Again(rest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_operation_is_continued_where_it_stopped() {
        let extent = IoExtent {
            file: 4096,
            at: 0,
            len: 8192,
            need: 5000,
            head: 100,
            run_end: 8192,
        };
        let rest = |skip| IoExtent {
            file: 4096 + skip,
            at: skip,
            len: 8192 - skip,
            need: 5000 - skip,
            head: 100_u64.saturating_sub(skip),
            run_end: 8192,
        };
        for (moved, direct, want) in [
            (8192, Some(512), Rest::Nothing),
            (5000, Some(512), Rest::Nothing),
            (4999, Some(512), Rest::Again(rest(4608))),
            (512, Some(512), Rest::Again(rest(512))),
            (511, Some(512), Rest::Buffered(rest(0))),
            (5000, None, Rest::Nothing),
            (4999, None, Rest::Again(rest(4999))),
            (1, None, Rest::Again(rest(1))),
        ] {
            assert_eq!(
                Rest::after(&extent, moved, direct),
                want,
                "{moved} {direct:?}"
            );
        }
    }
}
