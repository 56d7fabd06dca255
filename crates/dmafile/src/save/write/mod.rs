//! The methods of writing.
//!
//! A method takes extents from the feed until it is drained, and writes their bytes to their place. In an
//! extent, `at` is the offset in what is saved.

mod ring;
mod threads;
mod whole;

use super::origin::{Block, DescriptorMemory, Opened};
use super::parts::Fit;
use super::plan::SavePlan;
use super::to::To;
use crate::error::{Error, Result};
use crate::flow::feed::IoExtent;
use crate::flow::meter::Phase;
use crate::message::{Opt, message};
use crate::options::{Io, Method};
use crate::pump::{Blocks, Pass, Stop};
use crate::sync::lock;
use crate::sys::map::Region;
use crate::sys::{Errno, file, retry};
use std::sync::Mutex;

/// Bytes at either end of a run that no direct write reaches, and their offset in the target: those of a
/// stream, which cannot be read again.
pub(super) type EdgeBytes = Mutex<Vec<(u64, Vec<u8>)>>;

/// Called with what passes through a block: the block, the offset in the origin of its first byte, and
/// the number of bytes.
pub(super) type Passing<'a> = Option<&'a (dyn Fn(&Block<'_>, u64, u64) -> Result<()> + Sync + 'a)>;

/// One attempt of a save to write what is in the feed.
#[derive(Clone, Copy)]
pub(super) struct WriteJob<'a> {
    pub pass: Pass<'a>,
    pub plan: &'a SavePlan,
    pub origin: &'a Opened<'a>,
    pub to: &'a To,
    /// What memory must fulfil for parts to be written directly from there.
    pub fit: Fit,
    /// The checksum of a stream.
    pub hash: Passing<'a>,
    pub kept: &'a EdgeBytes,
}

/// Writes everything in the feed with one method.
pub(super) fn run(job: &WriteJob<'_>) -> Result<(), Stop> {
    let attempt = job.pass.attempt;
    let in_blocks = |by_ring: bool| {
        if by_ring {
            in_blocks(job, |blocks| ring::through(job, blocks))
        } else {
            in_blocks(job, |blocks| threads::through(job, blocks))
        }
    };
    match attempt.method {
        Method::Module => whole::module(job),
        Method::CopyFileRange => whole::copy_range(job),
        Method::Premap => ring::by_address(job),
        Method::Uring if job.origin.parts().is_none() => ring::by_address(job),
        Method::Uring => in_blocks(true),
        Method::Threads if job.region().is_ok() && job.plan.by_address => threads::by_address(job),
        _ => in_blocks(attempt.registered),
    }
}

/// Creates blocks for the duration of `write`.
fn in_blocks(
    job: &WriteJob<'_>,
    write: impl FnOnce(&Blocks<'_>) -> Result<(), Stop>,
) -> Result<(), Stop> {
    let attempt = job.pass.attempt;
    // Extents of parts are cut to this size.
    let size = match job.origin.parts() {
        Some(_) => job.plan.ring_block_of(attempt),
        None => job.plan.block_of(attempt),
    };
    let depth = u64::from(job.plan.depth_of(attempt));
    let extents = job.origin.bytes.map(|bytes| bytes.div_ceil(size).max(1));
    let count = extents.map_or(depth, |extents| depth.min(extents));
    Blocks::with((count, size), job.to.grain, write)
}

impl<'a> WriteJob<'a> {
    /// The memory, if its bytes can be accessed by their addresses.
    fn region(&self) -> Result<Region<'a>, &str> {
        self.origin.region()
    }

    /// Where an extent of several parts is, if it can be written directly from there: in one of them,
    /// aligned.
    fn in_place(&self, extent: &IoExtent) -> Option<Region<'a>> {
        if self.pass.attempt.method == Method::Bounce {
            return None;
        }
        self.origin.parts()?.find(extent.at, extent.need, self.fit)
    }

    /// How many blocks may be filled at once: one if the order matters.
    fn fillers(&self, most: u64) -> usize {
        if self.origin.is_stream() || self.hash.is_some() {
            1
        } else {
            most.max(1) as usize
        }
    }

    /// Fills a block with an extent; returns how many bytes of it to write from there. Fewer than all if
    /// a stream ends; its last bytes that no direct write reaches are kept.
    fn fill(&self, blocks: &Blocks<'_>, index: u64, extent: &IoExtent) -> Result<u64, Stop> {
        let block = Block {
            ring: &blocks.region,
            at: blocks.at(index),
            room: blocks.size,
        };
        let meter = &self.pass.run.meter;
        let start = meter.now();
        let cancel = self.pass.run.cancel;
        let got = self.origin.fill(&block, extent.at, extent.need, cancel)?;
        meter.add(Phase::Copy, start);
        if let Some(hash) = self.hash {
            let start = meter.now();
            hash(&block, extent.at, got)?;
            meter.add(Phase::Verify, start);
        }
        let mut whole = got;
        if self.origin.is_stream() {
            if got < extent.need {
                self.pass.feed.stop(None);
            }
            let end = extent.file + got;
            if got > 0 {
                self.to.reserve_ahead(end)?;
            }
            if self.pass.attempt.direct {
                whole = got - got % self.to.grain;
            }
            if whole < got {
                let mut bytes = vec![0; (got - whole) as usize];
                block.ring.copy_out(block.at + whole, &mut bytes);
                lock(self.kept).push((extent.file + whole, bytes));
            }
        }
        Ok(whole)
    }

    /// Writes bytes of a region to their place, with one write after another.
    fn write_all(
        &self,
        region: &Region<'_>,
        direct: bool,
        mut at: u64,
        mut len: u64,
        mut offset: u64,
    ) -> Result<(), Stop> {
        let fd = self.to.output(direct)?;
        while len > 0 {
            match retry(|| file::pwrite(fd, region, at, len, offset)) {
                Ok(0) => return Err(self.to.failed(offset, Errno::IO).into()),
                Ok(done) => {
                    // A direct write continues at the next block.
                    let done = if direct && done < len {
                        done - done % self.to.grain
                    } else {
                        done
                    };
                    if done == 0 {
                        return self.write_all(region, false, at, len, offset);
                    }
                    (at, offset, len) = (at + done, offset + done, len - done);
                }
                Err(errno) => return Err(self.stop(errno, offset, direct)),
            }
        }
        Ok(())
    }

    /// Why a write ended, at `offset` of the target.
    fn stop(&self, errno: Errno, offset: u64, direct: bool) -> Stop {
        match errno {
            Errno::INVAL | Errno::OPNOTSUPP if direct => Stop::NotDirect(
                Error::os("direct write refused", errno)
                    .at(self.to.place(0))
                    .with_remedy(message![
                        "use ",
                        Opt::Io.set(Io::Buffered),
                        " or ",
                        Opt::Io.set(Io::Auto),
                    ]),
            ),
            // Memory whose pages are gone, or that no device may read.
            Errno::FAULT => match self.origin.cut_short(self.origin.start) {
                Some(error) => error.into(),
                None => Stop::Refused(self.origin.failed(self.origin.start, errno)),
            },
            errno => self.to.failed(offset, errno).into(),
        }
    }

    /// Why a write from one of several parts ended: the reason may be that part, and not direct writes in
    /// general.
    fn stop_of_part(stop: Stop) -> Stop {
        match stop {
            Stop::NotDirect(error) => Stop::Refused(error),
            stop => stop,
        }
    }
}
