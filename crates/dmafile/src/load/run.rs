//! One load, from request to report: inspect, plan, create the memory, move the bytes, report.

use super::Load;
use super::report::{Loaded, Report};
use crate::buffer::{self, Buffer, CallerMemory, Filled};
use crate::error::{Error, Result, Verb};
use crate::facts::target::MemoryTarget;
use crate::facts::{File, Host, Layout};
use crate::flow::clock::Clock;
use crate::flow::meter::Phase;
use crate::flow::run::Run;
use crate::message::{Opt, message};
use crate::options::{Io, Kind, MemoryKind, Pages};
use crate::pin::PinDevice;
use crate::plan::{self, Plan};
use crate::reasons::{About, Reasons};
use crate::request::Selection;
use crate::sink::{Ring, Sink};
use crate::source::{Sampled, Shard};
use crate::transfer::{self, LoadTask, LoadTransfer, Outcome, Through};
use crate::verify::DigestCheck;
use std::time::Duration;

impl Load {
    /// Returns what would be done, and why. Opens the file and probes the machine; reads nothing,
    /// except one block if that is the only way to find out whether direct I/O works. For memory that is pinned
    /// for a device, the plan says whether the device can be used; it is not an error if it cannot.
    ///
    /// # Errors
    /// As [`Load::run`], as far as they can be foreseen.
    pub fn plan(mut self) -> Result<Plan> {
        let log = Reasons::named(self.common.names);
        let run = Run::of(Verb::Load, &self.common, &Clock::start(), &log, false);
        let LoadTask { mut plan, kind, .. } = self.prepare(None, &run)?;
        if let Some(show) = self.on_plan.take() {
            show(&plan);
        }
        if let Kind::Pinned(device) = kind {
            add_device(&mut plan, &*device, &log);
        }
        Ok(plan)
    }

    /// As [`Load::plan`], for a load through this ring ([`Load::run_through`]) into the memory of
    /// `device`. The plan says whether the device can be used; it is not an error if it cannot.
    ///
    /// # Errors
    /// As [`Load::run_through`], as far as they can be foreseen.
    pub fn plan_through(mut self, ring: Ring, device: &dyn PinDevice) -> Result<Plan> {
        let log = Reasons::named(self.common.names);
        self.request = self.request.through();
        let run = Run::of(Verb::Load, &self.common, &Clock::start(), &log, true);
        let mut plan = self.prepare_through(ring, &run)?.plan;
        plan.kind = MemoryKind::Device(device.name());
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
        let run = Run::of(
            Verb::Load,
            &self.common,
            &clock,
            &log,
            self.common.verify.is_some(),
        );
        let task = self.prepare(None, &run)?;
        let plan = &task.plan;
        if let Some(show) = self.on_plan.take() {
            show(plan);
        }
        if let Kind::Pinned(device) = &task.kind {
            device.describe()?;
        }
        let fused = if plan.fused {
            transfer::fused(&task, &run)?
        } else {
            None
        };
        let (filled, outcome, pages) = match fused {
            Some((filled, outcome)) => (filled, outcome, buffer::exporters_pages()),
            None => make_and_fill(&task, &run, self.request.pages)?,
        };
        let report = Report::of(&task, &run, &clock, outcome, pages, &filled.dma_bufs());
        let kind = match &task.kind {
            Kind::Pinned(_) => MemoryKind::Memfd,
            _ => plan.kind.clone(),
        };
        Ok(Loaded {
            buffer: Buffer::unforked(filled, kind, plan.place.start, plan.bytes),
            report,
        })
    }

    /// Loads into the caller's memory. The first requested byte of the file goes to the first byte of
    /// `memory`. What follows the last one is zeroed.
    ///
    /// Direct reads require that the address and the offset in the file are equal modulo the file's
    /// direct I/O alignment, as for a page-aligned buffer and `offset(0)`. Otherwise the bytes are
    /// copied from a small ring ([`Method::Bounce`](crate::Method::Bounce)), and the plan says so.
    ///
    /// Before Linux 6.5, do not fork during the load: a direct read into private memory may end up in
    /// the child's copy of it (see O_DIRECT in open(2)).
    ///
    /// # Errors
    /// As [`Load::run`]; EINVAL if `memory` is too small. After an error its contents are undefined.
    pub fn run_into(mut self, memory: &mut [u8]) -> Result<Report> {
        let (clock, log) = (Clock::start(), Reasons::named(self.common.names));
        let run = Run::of(
            Verb::Load,
            &self.common,
            &clock,
            &log,
            self.common.verify.is_some(),
        );
        let task = self.prepare(Some(MemoryTarget::caller(memory)), &run)?;
        if let Some(show) = self.on_plan.take() {
            show(&task.plan);
        }
        let memory = CallerMemory::new(memory);
        let transfer = LoadTransfer {
            task: &task,
            run: &run,
            memory: &memory,
        };
        let outcome = transfer.run()?;
        let pages = buffer::Filling::pages(&memory);
        Ok(Report::of(&task, &run, &clock, outcome, pages, &[]))
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
        self.request = self.request.through();
        let run = Run::of(Verb::Load, &self.common, &clock, &log, true);
        let task = self.prepare_through(ring, &run)?;
        if let Some(show) = self.on_plan.take() {
            show(&task.plan);
        }
        let start = run.meter.now();
        let through = Through::new(&task, &run, ring, self.request.pages)?;
        run.meter.add_step(Phase::Alloc, start);
        let outcome = through.run(sink)?;
        let pages = through.pages();
        Ok(Report::of(&task, &run, &clock, outcome, pages, &[]))
    }

    /// Inspects the file, this machine and, if it is not known yet, the target; then decides what to do. Moves nothing,
    /// except for probing.
    fn prepare(&self, target: Option<MemoryTarget>, run: &Run<'_>) -> Result<LoadTask> {
        let (request, log) = (&self.request, run.log);
        self.check()?;
        let source = Sampled(self.origin.open(&self.common.cancel)?);
        let target = match target {
            Some(known) => known,
            None => MemoryTarget::probe(request, &source, log)?,
        };
        run.meter.add_step(Phase::Open, Duration::ZERO);
        let opened = run.meter.now();
        let (file, host) = (File::of(&source), Host::probe());
        let (start, end) = plan::range(request, &file)?;
        let only = match &request.selection {
            Selection::Only(ranges) => Some(&ranges[..]),
            Selection::Requested | Selection::Part(..) => None,
        };
        // Only with this mode are some extents read directly and others copied.
        let asks = request.io == Io::Auto;
        let look = asks && file.direct_refused.is_none();
        let mut layout = Layout::of(&source, start, end, look, only);
        if asks && file.in_memory {
            layout.in_memory();
        }
        let mut plan = plan::decide(request, &file, &host, &target, &layout, log)?;
        if plan.first().moves_in_one_call() {
            layout.without_cache();
        }
        let checks = self.checks(&source, (start, end), log)?;
        plan.reasons = log.list();
        let shards = match (start, end == source.size()) {
            (0, true) => Shard::several(&source),
            _ => Vec::new(),
        };
        run.meter.expect(layout.bytes(true) + layout.bytes(false));
        run.meter.add_step(Phase::Plan, opened);
        Ok(LoadTask {
            source,
            kind: target.kind,
            plan,
            layout,
            checks,
            shards,
        })
    }

    /// As [`Load::prepare`], for a load through a ring.
    fn prepare_through(&self, ring: Ring, run: &Run<'_>) -> Result<LoadTask> {
        let mut task = self.prepare(Some(MemoryTarget::ring(ring.bytes)), run)?;
        let plan = &mut task.plan;
        plan.through_ring()?;
        let shape = ring.shape(plan.tuning.block, plan.span(), plan.end())?;
        plan.add(run.log, About::Ring, shape.bytes, shape.words());
        Ok(task)
    }

    /// The digests to compute of the files in a range of the source.
    fn checks(
        &self,
        source: &Sampled,
        (start, end): (u64, u64),
        log: &Reasons,
    ) -> Result<Vec<DigestCheck>> {
        let checks = match &self.common.verify {
            Some(_) if matches!(self.request.selection, Selection::Only(_)) => {
                let why = "cannot verify selected tensors";
                let remedy = message!["load whole files, or drop ", Opt::Verify];
                return Err(Error::usage(Opt::Verify, why).with_remedy(remedy));
            }
            Some(verify) => DigestCheck::all(verify, source, start, end)?,
            None => Vec::new(),
        };
        if let Some((check, from)) = checks.iter().find_map(|check| Some((check, check.from?))) {
            log.add(About::Verify, check.algorithm, from);
        }
        Ok(checks)
    }
}

/// Adds whether the device of a plan can be used.
fn add_device(plan: &mut Plan, device: &dyn PinDevice, log: &Reasons) {
    let (choice, why) = match device.describe() {
        Ok(described) => ("found", described),
        Err(error) => ("missing", error.why().to_string()),
    };
    plan.add(log, About::Device, choice, why);
}

/// Memory, its outcome, and the page size it got with a remark.
type FilledMemory = (Box<dyn Filled>, Outcome, (String, Option<String>));

/// Creates the memory, and moves the bytes into it.
fn make_and_fill(task: &LoadTask, run: &Run<'_>, pages: Pages) -> Result<FilledMemory> {
    let (plan, meter) = (&task.plan, &run.meter);
    let start = meter.now();
    let filling = buffer::make(&task.kind, plan, pages, run.log)?;
    meter.add_step(Phase::Alloc, start);
    let transfer = LoadTransfer {
        task,
        run,
        memory: &*filling,
    };
    let outcome = transfer.run()?;
    if let Kind::Pinned(_) = task.kind {
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
