//! One save, from request to report: inspect, plan, reserve, write, sync, report.

use super::Save;
use super::origin::{Block, Opened};
use super::overlap;
use super::parts::Fit;
use super::plan::{self, SavePlan};
use super::report::SaveReport;
use super::to::To;
use super::write::{self, EdgeBytes, Passing, WriteJob};
use crate::error::{Error, Result, Verb};
use crate::facts::Host;
use crate::flow::clock::Clock;
use crate::flow::feed::{Cut, Feed, FileRange};
use crate::flow::meter::Phase;
use crate::flow::run::Run;
use crate::flow::trace::ROW_VERIFY;
use crate::options::{Io, Method};
use crate::plan::Attempt;
use crate::pump::{self, Pass, Stop};
use crate::reasons::Reasons;
use crate::sync::{self, lock};
use crate::sys::file;
use crate::verify::{DigestCheck, Follower, Verified, Verify};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What a save is going to do.
struct SaveTask<'m> {
    origin: Opened<'m>,
    to: To,
    plan: SavePlan,
    /// Where there is data, in offsets of the target: whole blocks, except at either end.
    runs: Vec<FileRange>,
    opened: Duration,
    /// True if its space is reserved.
    reserved: bool,
}

/// A planned save, with a temporary file: nothing has been moved yet, and dropping it leaves nothing
/// behind.
pub struct Staged<'m> {
    save: Save<'m>,
    decided: SaveTask<'m>,
    log: Reasons,
}

impl Staged<'_> {
    /// What it will do.
    pub fn plan(&self) -> &SavePlan {
        &self.decided.plan
    }

    /// Size of the largest pages of the saved memory in bytes.
    pub fn page(&self) -> Option<u64> {
        self.decided.origin.memory().map(|memory| memory.page)
    }

    /// Reserves space for all of it.
    pub fn reserve(&mut self) -> Result<()> {
        self.decided.reserve(&self.log)
    }

    /// The rest of [`Save::run`]. Its time counts from here.
    pub fn run(mut self) -> Result<SaveReport> {
        self.decided.opened = Duration::ZERO;
        self.save
            .carry_out(self.decided, &Clock::start(), &self.log)
    }
}

impl SaveTask<'_> {
    /// Reserves space for all of it, if the size is known.
    fn reserve(&mut self, log: &Reasons) -> Result<()> {
        let bytes = self.origin.bytes.filter(|_| !self.origin.is_stream());
        if let Some(bytes) = bytes.filter(|_| !self.reserved) {
            let to = &self.to;
            to.reserve(&self.runs, to.at + bytes, log)?;
        }
        self.reserved = true;
        Ok(())
    }
}

impl<'m> Save<'m> {
    /// Returns what would be done, and why. Opens both ends and probes the machine; moves nothing, and
    /// leaves nothing behind.
    ///
    /// # Errors
    /// As [`Save::run`], as far as they can be foreseen.
    pub fn plan(mut self) -> Result<SavePlan> {
        let decided = self.prepare(&Clock::start(), &Reasons::named(self.common.names))?;
        Ok(decided.plan)
    }

    /// Saves. When it returns, the file is in its place, and on the disk unless [`Save::sync`] is false.
    ///
    /// # Errors
    /// Kind `Usage` for values out of range; `Cancelled` by the token; `Failed` for everything else, with
    /// the errno of the call that failed: ENOSPC and EDQUOT (before the first write, if the file system can
    /// reserve space), EIO from the disk during a write or the sync, EFBIG above RLIMIT_FSIZE, EROFS,
    /// EACCES, EPERM for an immutable file, EISDIR, EINVAL if the origin is a part of the file that would be
    /// overwritten, ENODATA if the origin ends early, EOPNOTSUPP for a
    /// method that does not work with the memory or file, EBADMSG for a wrong digest. The old file is
    /// unchanged, and nothing is left behind; a part that is written in place is undefined.
    pub fn run(mut self) -> Result<SaveReport> {
        let (clock, log) = (Clock::start(), Reasons::named(self.common.names));
        let decided = self.prepare(&clock, &log)?;
        self.carry_out(decided, &clock, &log)
    }

    /// Inspects and plans, without writing. The file is replaced completely, whatever was set before.
    pub fn stage(mut self) -> Result<Staged<'m>> {
        self.in_place = None;
        let log = Reasons::named(self.common.names);
        let decided = self.prepare(&Clock::start(), &log)?;
        Ok(Staged {
            save: self,
            decided,
            log,
        })
    }

    fn carry_out(
        &self,
        mut decided: SaveTask<'m>,
        clock: &Clock,
        log: &Reasons,
    ) -> Result<SaveReport> {
        let run = Run::of(Verb::Save, &self.common, clock, log, false);
        let meter = &run.meter;
        meter.expect(decided.runs.iter().map(|run| run.1 - run.0).sum());
        meter.add_until(Phase::Open, Duration::ZERO, decided.opened);
        meter.add_step(Phase::Plan, decided.opened);

        let start = meter.now();
        decided.reserve(log)?;
        meter.add_step(Phase::Reserve, start);
        let SaveTask {
            origin,
            to,
            plan,
            runs,
            ..
        } = decided;
        let access = origin.begin(&self.common.cancel)?;
        let transfer = SaveTransfer {
            verify: self.common.verify.as_ref(),
            origin: &origin,
            to: &to,
            at: to.at,
            plan: &plan,
            runs: &runs,
            run: &run,
        };
        let (attempt, verified, edges) = transfer.run()?;
        drop(access);

        let start = meter.now();
        to.complete()?;
        if self.wanted.sync {
            to.sync()?;
        }
        run.check(|| to.place(0))?;
        if self.wanted.io != Io::Buffered {
            to.leave_no_cache(&edges);
        }
        to.put(self.wanted.sync)?;
        meter.add_step(Phase::Sync, start);
        meter.tell_progress(true);
        let bytes = origin.came();
        Ok(SaveReport::of(
            &plan,
            bytes,
            meter,
            clock,
            log,
            (attempt, verified),
        ))
    }

    /// Inspects, plans, and shows the plan.
    fn prepare(&mut self, clock: &Clock, log: &Reasons) -> Result<SaveTask<'m>> {
        self.check()?;
        let origin = Opened::open(&self.origin, self.wanted.length)?;
        let to = match self.in_place {
            None => To::replace(&self.path, self.folder.take(), log)?,
            Some(at) => To::in_place(&self.path, at)?,
        };
        let end = to.at.checked_add(origin.bytes.unwrap_or(0));
        if end.is_none_or(|end| end > i64::MAX as u64) {
            let error = Error::os(Verb::Save, rustix::io::Errno::OVERFLOW);
            return Err(error.at(to.place(to.at)));
        }
        overlap::refuse(&origin, &to)?;
        let opened = clock.begin.elapsed();
        let host = Host::probe();
        let runs = runs(&origin, &to);
        let plan = plan::decide(&self.wanted, &origin, &to, &host, &runs, log)?;
        if let Some(show) = self.on_plan.take() {
            show(&plan);
        }
        Ok(SaveTask {
            origin,
            to,
            plan,
            runs,
            opened,
            reserved: false,
        })
    }
}

/// Where there is data, in offsets of the target: rounded to whole blocks, within the bounds of the save,
/// so that the disk gets whole blocks wherever possible.
fn runs(origin: &Opened<'_>, to: &To) -> Vec<FileRange> {
    let Some(bytes) = origin.bytes.filter(|_| !origin.is_stream()) else {
        return Vec::new();
    };
    let (start, end) = (to.at, to.at + bytes);
    let mut runs: Vec<FileRange> = Vec::new();
    for (from, upto) in origin.data(origin.start, origin.start + bytes) {
        let place = |at: u64| at - origin.start + start;
        let from = place(from);
        let from = (from - from % to.grain).max(start);
        let upto = place(upto).next_multiple_of(to.grain).min(end);
        match runs.last_mut() {
            Some(last) if last.1 >= from => last.1 = upto.max(last.1),
            _ => runs.push((from, upto)),
        }
    }
    runs
}

/// The part of a run that direct writes can reach, and the rest at either end.
fn middle((start, end): FileRange, grain: u64) -> (FileRange, [FileRange; 2]) {
    let from = start.next_multiple_of(grain).min(end);
    let upto = (end - end % grain).max(from);
    ((from, upto), [(start, from), (upto, end)])
}

/// The bytes to move.
pub(super) struct SaveTransfer<'a> {
    pub(super) verify: Option<&'a Verify>,
    pub(super) origin: &'a Opened<'a>,
    pub(super) to: &'a To,
    /// Where the first byte goes.
    pub(super) at: u64,
    pub(super) plan: &'a SavePlan,
    pub(super) runs: &'a [FileRange],
    pub(super) run: &'a Run<'a>,
}

impl SaveTransfer<'_> {
    /// Writes every byte, or fails. Either way nothing is in flight when it returns. Returns the last
    /// method, the checksum, and what was written through the page cache at either end of runs.
    fn run(&self) -> Result<(Attempt, Option<Verified>, Vec<FileRange>)> {
        let (start, end) = (
            self.origin.start,
            self.origin.start + self.origin.bytes.unwrap_or(0),
        );
        let data: Vec<FileRange> = if self.origin.is_stream() {
            vec![(start, u64::MAX)]
        } else {
            let runs = self.runs.iter();
            runs.map(|run| (self.from(run.0), self.from(run.1)))
                .collect()
        };
        let check = self.check();
        let bytes = self.origin.bytes.unwrap_or(0);
        let follower = check
            .as_ref()
            .map(|check| Follower::new(check.algorithm, bytes, start, &data));
        let copy = |at: u64, into: &mut [u8]| self.origin.copy_out(at, into);
        if self.origin.passes_once() {
            let follower = follower.map(Mutex::new);
            let pass = |block: &Block<'_>, at, len| {
                let Some(follower) = &follower else {
                    return Ok(());
                };
                let mut follower = lock(follower);
                follower.advance(at, copy, || false)?;
                let inside = |from: u64, into: &mut [u8]| {
                    block.ring.copy_out(block.at + (from - at), into);
                    Ok(())
                };
                follower.advance(at + len, inside, || false).map(drop)
            };
            let passing: Passing<'_> = if follower.is_some() {
                Some(&pass)
            } else {
                None
            };
            let (attempt, edges) = self.write(passing)?;
            let digest = follower.map(|follower| {
                let mut follower = follower
                    .into_inner()
                    .unwrap_or_else(std::sync::PoisonError::into_inner);
                if !self.origin.is_stream() {
                    follower.advance(end, copy, || false)?;
                }
                Ok(follower.hex())
            });
            let verified = compare(check, digest.transpose()?)?;
            return Ok((attempt, verified, edges));
        }
        let (wrote, digest) = if let Some(follower) = follower {
            let (follower, meter) = (Mutex::new(Some(follower)), &self.run.meter);
            let digest = |over: &AtomicBool| {
                let begin = meter.now();
                let stopped = || over.load(Ordering::Relaxed) || self.run.cancel.is_cancelled();
                let mut follower = lock(&follower).take().expect("computed once");
                follower.advance(end, copy, stopped)?;
                meter.add(Phase::Verify, begin);
                meter.span("verify", ROW_VERIFY, begin, 0, end - start);
                Ok(Some(follower.hex()))
            };
            checksum_beside(digest, || self.write(None))
        } else {
            (self.write(None), Ok(None))
        };
        let (attempt, edges) = wrote?;
        self.run.check(|| self.to.place(0))?;
        Ok((attempt, compare(check, digest?)?, edges))
    }

    /// The offset in the origin of a byte of the target.
    fn from(&self, at: u64) -> u64 {
        at - self.at + self.origin.start
    }

    fn write(&self, hash: Passing<'_>) -> Result<(Attempt, Vec<FileRange>)> {
        let direct = self.plan.methods.iter().any(|attempt| attempt.direct);
        let grain = if direct { self.to.grain } else { 1 };
        let kept = EdgeBytes::default();
        let (main, mut edges) = if self.origin.is_stream() {
            (vec![self.head(hash, &kept, grain)?], Vec::new())
        } else {
            let parts = self.runs.iter().map(|run| middle(*run, grain));
            let (main, edges): (Vec<_>, Vec<_>) = parts.unzip();
            (main, edges.into_flattened())
        };
        edges.retain(|edge| edge.0 < edge.1);
        let attempt = self.walk(main, grain, hash, &kept)?;
        self.clear_holes()?;
        for edge in &edges {
            let mut bytes = vec![0; (edge.1 - edge.0) as usize];
            self.origin.copy_out(self.from(edge.0), &mut bytes)?;
            self.write_edge(edge.0, &bytes)?;
        }
        for (at, bytes) in lock(&kept).drain(..) {
            self.write_edge(at, &bytes)?;
            edges.push((at, at + bytes.len() as u64));
        }
        if self.origin.is_stream() {
            if let Some(error) = self.origin.missing() {
                return Err(error);
            }
            self.to.ends_at(self.at + self.origin.came())?;
        }
        // A hole at the end hides that the origin was truncated: no read has reached its end.
        if let Some(error) = self.origin.cut_short(self.origin.start) {
            return Err(error);
        }
        Ok((attempt, edges))
    }

    /// Takes the bytes of a stream that precede the first whole block of the target; returns the range of
    /// what follows.
    fn head(&self, hash: Passing<'_>, kept: &EdgeBytes, grain: u64) -> Result<FileRange> {
        let start = self.at.next_multiple_of(grain);
        // Whole blocks, of which the last may be short.
        let end = match self.origin.bytes {
            Some(bytes) => (self.at + bytes).max(start),
            None => i64::MAX as u64,
        };
        let head = start - self.at;
        if head > 0 {
            let page = crate::sys::map::page_size();
            let room = head.next_multiple_of(page);
            let memory = crate::sys::map::Mapping::anon(room as usize, page as usize)
                .map_err(|errno| Error::os("cannot create a ring to write from", errno))?;
            let block = Block {
                ring: &memory.region(),
                at: 0,
                room,
            };
            let got = self
                .origin
                .fill(&block, self.origin.start, head, self.run.cancel)?;
            if let Some(hash) = hash {
                hash(&block, self.origin.start, got)?;
            }
            let mut bytes = vec![0; got as usize];
            block.ring.copy_out(0, &mut bytes);
            self.to.reserve_ahead(self.at + got)?;
            lock(kept).push((self.at, bytes));
        }
        Ok((start, end))
    }

    /// Tries the methods in order; returns the last one.
    pub(super) fn walk(
        &self,
        mut left: Vec<FileRange>,
        grain: u64,
        hash: Passing<'_>,
        kept: &EdgeBytes,
    ) -> Result<Attempt> {
        left.retain(|range| range.0 < range.1);
        if left.is_empty() {
            return Ok(self.plan.first());
        }
        let place = |at| self.to.place(at);
        let (attempt, done) = pump::try_in_order(&self.plan.methods, self.run.log, |attempt| {
            let block = self.plan.block_of(attempt);
            let base = self.at.wrapping_sub(self.origin.start);
            let cut = Cut {
                block,
                // A buffered method may have to write all of it.
                align: if attempt.direct { grain } else { 1 },
                base,
                // Blocks end where those of the target do.
                phase: base % block,
                capacity: u64::MAX,
            };
            let fit = Fit::of(self.origin, (self.to, self.at), attempt.direct);
            let mut ranges = std::mem::take(&mut left);
            if let Some(parts) = self
                .origin
                .parts()
                .filter(|_| attempt.method != Method::Bounce)
            {
                ranges = parts.split(&ranges, fit, self.plan.ring_block_of(attempt));
            }
            let feed = Feed::new(ranges, [], cut, None);
            let done = write::run(&WriteJob {
                pass: Pass {
                    attempt,
                    feed: &feed,
                    run: self.run,
                    place: &place,
                    node: self.plan.tuning.node,
                },
                plan: self.plan,
                origin: self.origin,
                to: self.to,
                fit,
                hash,
                kept,
            });
            if let Some(error) = feed.error() {
                return Err(Stop::Failed(error));
            }
            if self.origin.is_stream() && feed.stopped() && !matches!(done, Err(Stop::Failed(_))) {
                // The stream has ended, and all of it is written.
                return Ok(());
            }
            left = feed.left();
            done
        });
        done.map(|()| attempt)
    }

    /// In place, writes zeros where the origin has holes.
    fn clear_holes(&self) -> Result<()> {
        if self.origin.is_stream() {
            return Ok(());
        }
        let mut done = self.at;
        let end = self.at + self.origin.bytes.unwrap_or(0);
        for run in self.runs.iter().chain([&(end, end)]) {
            self.to.clear(done, run.0)?;
            done = run.1;
        }
        Ok(())
    }

    /// Writes a part of a block, after all whole blocks around it: the page cache and direct writes must
    /// not access one page at the same time.
    fn write_edge(&self, at: u64, bytes: &[u8]) -> Result<()> {
        self.run.check(|| self.to.place(0))?;
        let meter = &self.run.meter;
        let (start, len) = (meter.now(), bytes.len() as u64);
        file::pwrite_all(self.to.buffered(), bytes, at)
            .map_err(|errno| self.to.failed(at, errno))?;
        meter.add(Phase::Copy, start);
        meter.copied(len);
        Ok(())
    }

    /// The requested checksum.
    fn check(&self) -> Option<DigestCheck> {
        let verify = self.verify?;
        Some(DigestCheck {
            file: self.to.path().to_path_buf(),
            range: (0, 0),
            algorithm: verify.algorithm,
            expected: verify.expected.clone(),
            from: None,
        })
    }
}

/// Compares a digest with the expected one.
fn compare(check: Option<DigestCheck>, digest: Option<String>) -> Result<Option<Verified>> {
    let pair = check.zip(digest);
    pair.map(|(check, digest)| check.compare(digest))
        .transpose()
}

/// Computes a checksum in a separate thread while `write` runs; after it, if no thread can be started. The
/// argument of `sum` is set when the checksum is not needed any more.
pub(super) fn checksum_beside<S: Send, W>(
    sum: impl Fn(&AtomicBool) -> S + Sync,
    write: impl FnOnce() -> Result<W>,
) -> (Result<W>, S) {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().name("dmafile-verify".to_string());
        // Also on a panic: the scope waits for the other thread.
        let _over = ChecksumGuard(&over);
        let spawned = builder.spawn_scoped(scope, || sum(&over));
        let wrote = write();
        over.store(wrote.is_err(), Ordering::Relaxed);
        let sum = match spawned {
            Ok(thread) => sync::join(thread),
            Err(_) => sum(&over),
        };
        (wrote, sum)
    })
}

/// Signals that the checksum is not needed any more.
struct ChecksumGuard<'a>(&'a AtomicBool);

impl Drop for ChecksumGuard<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::save::Origin;
    use std::io::Write;

    /// ext4, XFS and block devices refuse unaligned direct writes, as other file systems refuse every
    /// first direct write.
    #[test]
    fn a_refused_direct_write_falls_back_to_buffered() {
        const LEN: usize = 3_000_001;
        let dir = crate::source::folder_on_disk();
        let to = dir.path().join("to");
        let bytes: Vec<u8> = (0..LEN as u32)
            .map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8)
            .collect();
        let file = dir.path().join("from");
        std::fs::write(&file, &bytes).unwrap();
        for ((method, kind), registered) in [
            (Method::Uring, "memfd"),
            (Method::Threads, "memfd"),
            (Method::Bounce, "memfd"),
            (Method::Bounce, "file"),
            (Method::Bounce, "pipe"),
        ]
        .into_iter()
        .flat_map(|way| [(way, true), (way, false)])
        {
            let what = format!("{method} of a {kind}, registered: {registered}");
            let mut writer = None;
            let origin = match kind {
                "memfd" => {
                    let fd = crate::sys::memfd::create("test", false).unwrap();
                    std::fs::File::from(fd.try_clone().unwrap())
                        .write_all(&bytes)
                        .unwrap();
                    Origin::fd(fd, 0)
                }
                "file" => Origin::File(file.clone()),
                _ => {
                    let (read, mut write) = std::io::pipe().unwrap();
                    let bytes = bytes.clone();
                    writer = Some(std::thread::spawn(move || write.write_all(&bytes)));
                    Origin::Stream(std::sync::Arc::new(read.into()))
                }
            };
            let (clock, log) = (Clock::start(), Reasons::default());
            let mut save = Save::new(origin, &to).method(method);
            let mut decided = save.prepare(&clock, &log).unwrap();
            if let Err(why) = decided.to.direct() {
                eprintln!("SKIP: {why}");
                return;
            }
            // Unaligned, so that the disk cannot write directly.
            decided.to.grain = 1;
            decided.plan.set_block(100_001);
            let methods = &mut decided.plan.methods;
            methods.retain(|attempt| registered || !attempt.registered);
            let report = save.carry_out(decided, &clock, &log).unwrap();
            let whys: Vec<_> = report.reasons.iter().map(ToString::to_string).collect();
            // Once: no other direct fallback is tried after it.
            let refusals = whys.iter().filter(|why| why.contains("EINVAL")).count();
            assert_eq!(refusals, 1, "{what}: {whys:?}");
            assert_eq!(
                (report.io, report.bytes_direct),
                (Io::Buffered, 0),
                "{what}"
            );
            assert!(std::fs::read(&to).unwrap() == bytes, "{what}: wrong bytes");
            if let Some(writer) = writer {
                writer.join().unwrap().unwrap();
            }
        }
    }

    #[test]
    fn only_whole_blocks_are_written_directly() {
        let all = |run, grain| {
            let (middle, [head, tail]) = middle(run, grain);
            [head, middle, tail]
        };
        assert_eq!(all((0, 8192), 4096), [(0, 0), (0, 8192), (8192, 8192)]);
        assert_eq!(
            all((1, 8193), 4096),
            [(1, 4096), (4096, 8192), (8192, 8193)]
        );
        // Less than a block, inside one block and across two.
        assert_eq!(all((5, 100), 4096), [(5, 100), (100, 100), (100, 100)]);
        assert_eq!(
            all((4000, 5000), 4096),
            [(4000, 4096), (4096, 4096), (4096, 5000)]
        );
    }
}
