//! One load, from request to report: inspect, plan, create the memory, move the bytes, report.

use super::Load;
use super::report::{Loaded, Report};
use crate::buffer::{self, Buffer, CallerMemory, DmaBuf, Filled};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::facts::target::MemoryTarget;
use crate::facts::{File, Host, Layout};
use crate::flow::clock::Clock;
use crate::flow::meter::{Meter, Phase};
use crate::message::{Opt, message};
use crate::options::{Io, Kind, Method};
use crate::plan::{self, Plan};
use crate::reasons::Reasons;
use crate::request::{Reach, Request};
use crate::sink::{Ring, Sink};
use crate::source::{Shard, Source};
use crate::transfer::{self, LoadTransfer, Outcome, Through, Work};
use crate::verify::DigestCheck;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

/// What was found. Nothing has been allocated yet, and nothing moved except for probing.
struct LoadFacts {
    source: Peeked,
    file: File,
    host: Host,
    target: MemoryTarget,
    layout: Layout,
    /// Time from the start of the load until the file was open and the target known.
    opened: Duration,
}

/// What a load is going to do.
pub(super) struct LoadDecision {
    source: Peeked,
    target: MemoryTarget,
    pub(super) plan: Plan,
    pub(super) layout: Layout,
    checks: Vec<DigestCheck>,
    pub(super) shards: Vec<Shard>,
    opened: Duration,
}

impl LoadDecision {
    /// The report of a load that has moved every byte.
    fn report(
        &self,
        (clock, meter, log): (&Clock, &Meter<'_>, &Reasons),
        outcome: Outcome,
        pages: (String, Option<String>),
        dma_bufs: &[DmaBuf<'_>],
    ) -> Report {
        self.source.forget_misses();
        Report::of(self, meter, clock, log, outcome, pages, dma_bufs)
    }
}

/// An open source whose page cache is sampled by non-blocking reads. Pages that a miss brought into
/// the page cache are dropped when the load ends, however it ends.
struct Peeked(Arc<Source>);

impl Deref for Peeked {
    type Target = Source;

    fn deref(&self) -> &Source {
        &self.0
    }
}

impl Drop for Peeked {
    fn drop(&mut self) {
        if self.0.has_misses() {
            // The load has ended early, and these reads may still be in flight.
            std::thread::sleep(LANDING);
            self.0.forget_misses();
        }
    }
}

/// How long a disk may take to read single pages; an error is delayed by at most this much.
const LANDING: Duration = Duration::from_millis(20);

impl Load {
    /// Returns what would be done, and why. Opens the file and probes the machine; reads nothing,
    /// except one block if that is the only way to find out whether direct I/O works. For memory that is pinned
    /// for a device, the plan says whether the device can be used; it is not an error if it cannot.
    ///
    /// # Errors
    /// As [`Load::run`], as far as they can be foreseen.
    pub fn plan(mut self) -> Result<Plan> {
        let log = Reasons::named(self.common.names);
        let LoadDecision {
            mut plan, target, ..
        } = self.prepare(None, &Clock::start(), &log)?;
        if let Kind::Pinned(device) = target.kind {
            add_device(&mut plan, device, &log);
        }
        Ok(plan)
    }

    /// As [`Load::plan`], for a load through this ring ([`Load::run_through`]) into the memory of
    /// `device`. The plan says whether the device can be used; it is not an error if it cannot.
    ///
    /// # Errors
    /// As [`Load::run_through`], as far as they can be foreseen.
    pub fn plan_through(mut self, ring: Ring, device: Device) -> Result<Plan> {
        let log = Reasons::named(self.common.names);
        let mut plan = self.prepare_through(ring, &Clock::start(), &log)?.plan;
        plan.kind = device.to_string();
        add_device(&mut plan, device, &log);
        Ok(plan)
    }

    /// Loads into newly allocated memory.
    ///
    /// # Errors
    /// Kind `Usage` for values out of range; `Cancelled` by the token; `Failed` for everything else,
    /// with the errno of the call that failed: ENOENT, EACCES, EISDIR and similar for the file,
    /// ENODATA if it is empty or is truncated during the load, EIO from the disk, ENOMEM if there is
    /// not enough memory, EOPNOTSUPP for a method that does not work with the memory, EBADMSG for a
    /// wrong digest. Nothing is left behind, except that the contents of an `fd:N` that was being
    /// filled are undefined.
    pub fn run(self) -> Result<Loaded> {
        let loaded = self.run_to_seal()?;
        loaded.buffer.enter_forks();
        Ok(loaded)
    }

    /// As [`Load::run`], for memory that will be sealed; children that are forked before then do not get it.
    #[doc(hidden)]
    pub fn run_to_seal(mut self) -> Result<Loaded> {
        let (clock, log) = (Clock::start(), Reasons::named(self.common.names));
        let decided = self.prepare(None, &clock, &log)?;
        if let Kind::Pinned(device) = decided.target.kind {
            device.check()?;
        }
        let meter = self.meter(&clock, &decided, self.common.verify.is_some());
        let work = self.work(&decided, &meter, &log);
        let plan = &decided.plan;
        let fused = match plan.fused {
            true => transfer::fused(&work)?,
            false => None,
        };
        let (filled, outcome, pages) = match fused {
            Some((filled, outcome)) => (filled, outcome, buffer::exporters_pages()),
            None => make_and_fill(&work, &self.request, &decided.target)?,
        };
        let report = decided.report((&clock, &meter, &log), outcome, pages, &filled.dma_bufs());
        let kind = match &decided.target.kind {
            Kind::Pinned(_) => Kind::Memfd.to_string(),
            _ => plan.kind.clone(),
        };
        Ok(Loaded {
            buffer: Buffer::unforked(filled, kind, plan.lead, plan.bytes),
            report,
        })
    }

    /// Loads into the caller's memory. The first requested byte of the file goes to the first byte of
    /// `memory`. What follows the last one is zeroed.
    ///
    /// Direct reads require that the address and the offset in the file are equal modulo the file's
    /// direct I/O alignment, as for a page-aligned buffer and `offset(0)`. Otherwise the bytes are
    /// copied from a small ring ([`Method::Bounce`]), and the plan says so.
    ///
    /// Before Linux 6.5, do not fork during the load: a direct read into private memory may end up in
    /// the child's copy of it (see O_DIRECT in open(2)).
    ///
    /// # Errors
    /// As [`Load::run`]; EINVAL if `memory` is too small. After an error its contents are undefined.
    pub fn run_into(mut self, memory: &mut [u8]) -> Result<Report> {
        let (clock, log) = (Clock::start(), Reasons::named(self.common.names));
        let decided = self.prepare(Some(MemoryTarget::caller(memory)), &clock, &log)?;
        let meter = self.meter(&clock, &decided, self.common.verify.is_some());
        let lent = CallerMemory::new(memory);
        let transfer = LoadTransfer {
            work: self.work(&decided, &meter, &log),
            memory: &lent,
        };
        let outcome = transfer.run()?;
        let pages = buffer::Filling::pages(&lent);
        Ok(decided.report((&clock, &meter, &log), outcome, pages, &[]))
    }

    /// Loads through a ring into a sink, instead of into a buffer. The slots of the ring are filled in file
    /// order, handed to the sink, and filled again when the sink has finished with them. Several reads are
    /// in flight at the same time, and the sink can have several slots.
    ///
    /// [`Load::to`] has no effect here; [`Load::pages`] applies to the ring. Holes of the file become zeros.
    /// The digest ([`Load::verify`]) is checked after the sink has taken all bytes.
    ///
    /// # Errors
    /// As for [`Load::run`]; errors of the sink; EAGAIN if a thread cannot be created. The sink may then have
    /// taken some of the bytes. None of the slots is in use any more.
    pub fn run_through(mut self, ring: Ring, sink: &mut dyn Sink) -> Result<Report> {
        let (clock, log) = (Clock::start(), Reasons::named(self.common.names));
        let decided = self.prepare_through(ring, &clock, &log)?;
        self.show(&decided.plan);
        let meter = self.meter(&clock, &decided, true);
        let work = self.work(&decided, &meter, &log);
        let start = meter.now();
        let through = Through::new(work, ring, self.request.pages)?;
        meter.add_step(Phase::Alloc, start);
        let outcome = through.run(sink)?;
        let pages = through.pages();
        Ok(decided.report((&clock, &meter, &log), outcome, pages, &[]))
    }

    /// Inspects and decides for a load through a ring.
    fn prepare_through(
        &mut self,
        ring: Ring,
        clock: &Clock,
        log: &Reasons,
    ) -> Result<LoadDecision> {
        self.request.kind = Kind::Anon;
        // Only the ring needs memory.
        self.request.check_memory = false;
        let seen = self.look(Some(MemoryTarget::ring(ring.bytes)), clock, log)?;
        let mut decided = self.decide(seen, log)?;
        let plan = &mut decided.plan;
        plan.through_ring()?;
        let shape = ring.shape(plan.tuning.block, plan.reach(), plan.end())?;
        log.add("ring", shape.bytes, shape.words());
        plan.reasons.extend(log.list().pop());
        Ok(decided)
    }

    /// Inspects, decides, and shows the plan.
    fn prepare(
        &mut self,
        target: Option<MemoryTarget>,
        clock: &Clock,
        log: &Reasons,
    ) -> Result<LoadDecision> {
        let seen = self.look(target, clock, log)?;
        let decided = self.decide(seen, log)?;
        self.show(&decided.plan);
        Ok(decided)
    }

    fn show(&mut self, plan: &Plan) {
        if let Some(show) = self.on_plan.take() {
            show(plan);
        }
    }

    /// Opens the file and inspects it, this machine, and the target if that is not known yet.
    fn look(
        &self,
        target: Option<MemoryTarget>,
        clock: &Clock,
        log: &Reasons,
    ) -> Result<LoadFacts> {
        let request = &self.request;
        self.check()?;
        let source = Peeked(self.origin.open()?);
        let target = match target {
            Some(known) => known,
            None => MemoryTarget::probe(request, &source, log)?,
        };
        let opened = clock.begin.elapsed();
        let (file, host) = (File::of(&source), Host::probe());
        let (start, end) = plan::range(request, &file)?;
        let only = match &request.reach {
            Reach::Only(ranges) => Some(&ranges[..]),
            Reach::Asked | Reach::Part(..) => None,
        };
        let residency = asks_for_residency(request);
        let look = residency && file.direct_refused.is_none();
        let mut layout = Layout::of(&source, start, end, look, only);
        if residency && file.in_memory {
            layout.in_memory();
        }
        Ok(LoadFacts {
            source,
            file,
            host,
            target,
            layout,
            opened,
        })
    }

    /// Makes the plan.
    fn decide(&self, seen: LoadFacts, log: &Reasons) -> Result<LoadDecision> {
        let LoadFacts {
            source,
            file,
            host,
            target,
            mut layout,
            opened,
        } = seen;
        let request = &self.request;
        let mut plan = plan::decide(request, &file, &host, &target, &layout, log)?;
        if plan.first().moves_in_one_call() {
            layout.without_cache();
        }
        let (start, end) = (plan.offset, plan.offset + plan.bytes);
        let checks = match &self.common.verify {
            Some(_) if matches!(request.reach, Reach::Only(_)) => {
                let why = "cannot verify selected tensors";
                let remedy = message!["load whole files, or drop ", Opt::Verify];
                return Err(Error::usage(Opt::Verify, why).with_remedy(remedy));
            }
            Some(verify) => DigestCheck::all(verify, &source, start, end)?,
            None => Vec::new(),
        };
        if let Some(check) = checks.iter().find(|check| check.by_name) {
            let why = "expected from the file's name in the Hugging Face cache";
            log.add("verify", check.algorithm, why);
        }
        plan.reasons = log.list();
        let shards = match (start, end == source.size()) {
            (0, true) => Shard::several(&source),
            _ => Vec::new(),
        };
        Ok(LoadDecision {
            source,
            target,
            plan,
            layout,
            checks,
            shards,
            opened,
        })
    }

    /// `ordered`: it must also track how far the bytes are in place without a gap.
    fn meter(&self, clock: &Clock, decided: &LoadDecision, ordered: bool) -> Meter<'_> {
        let layout = &decided.layout;
        let meter = Meter::new(
            clock.begin,
            layout.bytes(true) + layout.bytes(false),
            self.common.trace,
            ordered,
            self.common.progress.as_ref(),
        );
        meter.add_until(Phase::Open, Duration::ZERO, decided.opened);
        meter.add_step(Phase::Plan, decided.opened);
        meter
    }

    fn work<'a>(
        &'a self,
        decided: &'a LoadDecision,
        meter: &'a Meter<'a>,
        log: &'a Reasons,
    ) -> Work<'a> {
        Work {
            plan: &decided.plan,
            layout: &decided.layout,
            source: &decided.source,
            checks: &decided.checks,
            meter,
            cancel: &self.common.cancel,
            log,
        }
    }
}

/// Adds whether the device of a plan can be used.
fn add_device(plan: &mut Plan, device: Device, log: &Reasons) {
    let (choice, why) = match device.describe() {
        Ok((model, version)) => ("found", format!("{model}, driver {version}")),
        Err(error) => ("missing", error.why().to_string()),
    };
    log.add("device", choice, why);
    plan.reasons.extend(log.list().pop());
}

/// Only methods that can read some extents directly and copy others need to know what is cached.
fn asks_for_residency(request: &Request) -> bool {
    let method = matches!(
        request.method,
        Method::Auto
            | Method::Uring
            | Method::Premap
            | Method::Threads
            | Method::Bounce
            | Method::Module
            | Method::HeapRead
            | Method::CopyFileRange
    );
    request.io == Io::Auto && method
}

/// Memory, its outcome, and the page size it got with a remark.
type FilledMemory = (Box<dyn Filled>, Outcome, (String, Option<String>));

/// Creates the memory, and moves the bytes into it.
fn make_and_fill(
    work: &Work<'_>,
    request: &Request,
    target: &MemoryTarget,
) -> Result<FilledMemory> {
    let Work {
        plan, meter, log, ..
    } = *work;
    let start = meter.now();
    let filling = buffer::make(&target.kind, plan, request.pages, log)?;
    meter.add_step(Phase::Alloc, start);
    let transfer = LoadTransfer {
        work: *work,
        memory: &*filling,
    };
    let outcome = transfer.run()?;
    if let Kind::Pinned(_) = target.kind {
        // Where nothing was allocated ahead of the reads.
        filling.populated()?;
    }
    let pages = filling.pages();
    let start = meter.now();
    let filled = filling
        .finish()
        .map_err(|errno| buffer::cannot_export(errno, &plan.kind))?;
    meter.add_step(Phase::Export, start);
    Ok((filled, outcome, pages))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_sample_reads_are_dropped_if_a_load_ends_early() {
        const LEN: u64 = 4 << 20;
        let dir = crate::source::folder_on_disk();
        let path = dir.path().join("file");
        std::fs::write(&path, vec![1; LEN as usize]).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let source = Arc::new(Source::open(&path).unwrap());
        if source.resident(0, LEN) != Ok(0) {
            eprintln!("SKIP: this file system keeps files in memory, or no cachestat");
            return;
        }
        let peeked = Peeked(Arc::clone(&source));
        peeked.no_readahead();
        assert!(!peeked.peek(0, LEN - 1));
        // Unlike the sample reads, these reads wait for the disk.
        for at in [0, LEN - 1] {
            let (fd, at) = source.buffered(at);
            crate::sys::file::pread_all(fd, &mut [0], at).unwrap();
        }
        assert_ne!(source.resident(0, LEN), Ok(0), "no pages came in");
        drop(peeked);
        assert_eq!(source.resident(0, LEN), Ok(0));
    }
}
