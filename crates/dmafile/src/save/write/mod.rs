//! The methods of writing, one file each.
//!
//! A method takes extents from the feed until it is drained, and writes their bytes to their place. In an
//! extent, `at` is the offset in what is saved.

mod pool;
mod ring;
mod whole;

use super::origin::{Block, DescriptorMemory, Opened};
use super::parts::Fit;
use super::plan::SavePlan;
use super::to::To;
use crate::control::CancelToken;
use crate::error::{Error, Result, Verb};
use crate::flow::feed::{Feed, IoExtent, Lane};
use crate::flow::meter::{Meter, Phase};
use crate::flow::trace::ROW_READS;
use crate::message::{Opt, message};
use crate::method::Stop;
use crate::options::{Io, Method};
use crate::plan::Attempt;
use crate::sync::lock;
use crate::sys::map::{Mapping, Region, page_size};
use crate::sys::{Errno, file, retry};
use std::sync::Mutex;

/// Bytes at either end of a run that no direct write reaches, and their offset in the target: those of a
/// stream, which cannot be read again.
pub(super) type EdgeBytes = Mutex<Vec<(u64, Vec<u8>)>>;

/// Called with what passes through a block: the block, the offset in the origin of its first byte, and
/// the number of bytes.
pub(super) type Passing<'a> = Option<&'a (dyn Fn(&Block<'_>, u64, u64) -> Result<()> + Sync + 'a)>;

/// The input of a method.
#[derive(Clone, Copy)]
pub(super) struct WriteJob<'a> {
    pub plan: &'a SavePlan,
    pub attempt: Attempt,
    pub origin: &'a Opened<'a>,
    pub to: &'a To,
    /// What memory must fulfil for parts to be written directly from there.
    pub fit: Fit,
    pub feed: &'a Feed,
    pub meter: &'a Meter<'a>,
    pub cancel: &'a CancelToken,
    /// The checksum of a stream.
    pub hash: Passing<'a>,
    pub kept: &'a EdgeBytes,
}

/// Writes everything in the feed with one method.
pub(super) fn run(job: &WriteJob<'_>) -> Result<(), Stop> {
    let through = match job.attempt.method {
        Method::Bounce => true,
        Method::Uring => job.origin.parts().is_some(),
        Method::Threads => job.region().is_err() || !job.plan.by_address,
        _ => false,
    };
    match job.attempt.method {
        Method::Module => whole::module(job),
        Method::CopyFileRange => whole::copy_range(job),
        Method::Threads if !through => pool::by_address(job),
        Method::Premap => ring::by_address(job),
        Method::Uring if !through => ring::by_address(job),
        Method::Uring => in_blocks(job, |blocks| ring::through(job, blocks)),
        _ if job.attempt.registered => in_blocks(job, |blocks| ring::through(job, blocks)),
        _ => in_blocks(job, |blocks| pool::through(job, blocks)),
    }
}

/// A ring of blocks, through which bytes pass that the disk cannot read from where they are.
#[derive(Clone, Copy)]
struct Blocks<'m> {
    ring: Region<'m>,
    block: u64,
    count: u64,
}

impl Blocks<'_> {
    fn block(&self, index: u64) -> Block<'_> {
        Block {
            ring: &self.ring,
            at: index * self.block,
            room: self.block,
        }
    }
}

/// Creates a ring for the duration of `write`.
fn in_blocks(
    job: &WriteJob<'_>,
    write: impl FnOnce(&Blocks<'_>) -> Result<(), Stop>,
) -> Result<(), Stop> {
    /// Alignment of the start and size of a ring, so that it consists only of transparent huge pages.
    const HUGE: u64 = 2 << 20;
    let cannot = |errno| Stop::Refused(Error::os("cannot create a ring to write from", errno));
    // Extents of parts are cut to this size.
    let block = match job.origin.parts() {
        Some(_) => job.plan.ring_block_of(job.attempt),
        None => job.plan.block_of(job.attempt),
    };
    let count = match job.origin.bytes {
        Some(bytes) => u64::from(job.plan.depth_of(job.attempt)).min(bytes.div_ceil(block).max(1)),
        None => job.plan.depth_of(job.attempt).into(),
    };
    let (bytes, align) = (count * block, job.to.grain.max(page_size()));
    let ring = match bytes >= HUGE {
        true => Mapping::anon(
            bytes.next_multiple_of(HUGE) as usize,
            align.max(HUGE) as usize,
        ),
        false => Mapping::anon(bytes as usize, align as usize),
    };
    let ring = ring.map_err(cannot)?;
    // Only advice: the ring works without huge pages.
    let _ = ring.region().want_huge();
    // Before Linux 6.5 a fork could separate a page from the write that reads it.
    ring.region().leave_out_of_forks(true);
    write(&Blocks {
        ring: ring.region(),
        block,
        count,
    })
}

/// What has been written of an extent.
struct WrittenExtent {
    bytes: u64,
    direct: bool,
    /// It is written, but this method must not write more.
    end: Option<Stop>,
}

impl<'a> WriteJob<'a> {
    /// The memory, if its bytes can be accessed by their addresses.
    fn region(&self) -> Result<Region<'a>, &str> {
        self.origin.region()
    }

    /// Where an extent of several parts is, if it can be written directly from there: in one of them,
    /// aligned.
    fn in_place(&self, extent: &IoExtent) -> Option<Region<'a>> {
        if self.attempt.method == Method::Bounce {
            return None;
        }
        self.origin.parts()?.find(extent.at, extent.need, self.fit)
    }

    /// How many blocks may be filled at once: one if the order matters.
    fn fillers(&self, most: u64) -> usize {
        match self.origin.is_stream() || self.hash.is_some() {
            true => 1,
            false => most.max(1) as usize,
        }
    }

    /// The next extent; None if there are no more.
    fn next(&self) -> Result<Option<IoExtent>, Stop> {
        if self.cancel.is_cancelled() {
            return Err(self.cancelled().into());
        }
        Ok(self.feed.wait(Lane::Main))
    }

    /// Fills a block with an extent; returns how many bytes of it to write from there. Fewer than all if
    /// a stream ends; its last bytes that no direct write reaches are kept.
    fn fill(&self, block: &Block<'_>, extent: &IoExtent) -> Result<u64, Stop> {
        let start = self.meter.now();
        let got = self
            .origin
            .fill(block, extent.at, extent.need, self.cancel)?;
        self.meter.add(Phase::Copy, start);
        if let Some(hash) = self.hash {
            let start = self.meter.now();
            hash(block, extent.at, got)?;
            self.meter.add(Phase::Verify, start);
        }
        let mut whole = got;
        if self.origin.is_stream() {
            if got < extent.need {
                self.feed.stop(None);
            }
            let end = extent.file + got;
            if got > 0 {
                self.to.reserve_ahead(end)?;
            }
            if self.attempt.direct {
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
                    let done = match direct && done < len {
                        true => done - done % self.to.grain,
                        false => done,
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

    /// This many bytes have been written with the method's I/O mode.
    fn done(&self, bytes: u64) -> WrittenExtent {
        WrittenExtent {
            bytes,
            direct: self.attempt.direct,
            end: None,
        }
    }

    fn cancelled(&self) -> Error {
        Error::cancelled(Verb::Save, self.to.place(0))
    }

    /// Bytes of an extent have been written.
    fn written(&self, extent: &IoExtent, bytes: u64, direct: bool) {
        let extent = IoExtent {
            need: extent.head + bytes,
            ..*extent
        };
        self.meter.landed(&extent, direct);
    }

    /// Takes extents one after another until there are none, or one fails. `step` writes an extent.
    fn each(
        &self,
        row: u64,
        step: impl Fn(&IoExtent) -> Result<WrittenExtent, Stop>,
    ) -> Result<(), Stop> {
        while let Some(extent) = self.next()? {
            let start = self.meter.now();
            self.meter.io_begins();
            let moved = step(&extent);
            self.meter.io_ends();
            match moved {
                Ok(WrittenExtent { bytes, direct, end }) => {
                    self.meter.add(Phase::Wait, start);
                    self.meter
                        .span("write", ROW_READS + row, start, extent.file, bytes);
                    self.written(&extent, bytes, direct);
                    if let Some(stop) = end {
                        return Err(stop);
                    }
                }
                Err(stop) => {
                    match &stop {
                        // The others must stop, too.
                        Stop::Failed(error) => self.feed.stop(Some(error.clone())),
                        Stop::Refused(_) | Stop::NotDirect(_) => self.feed.put_back(extent),
                    }
                    return Err(stop);
                }
            }
        }
        Ok(())
    }
}
