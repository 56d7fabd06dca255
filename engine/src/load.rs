//! Load: the request, what it gives, and what it reports.

use crate::buffer::{self, Buffer, Lent, Memory};
use crate::error::{Error, Result};
use crate::facts::{File, Host, Layout};
use crate::model::Shard;
use crate::module;
use crate::options::{Allocation, Io, Kind, Method, Pages};
use crate::plan::{self, Place, Plan, Reason, Request};
use crate::source::Source;
use crate::sys::{file, usage};
use crate::trace;
use crate::transfer::meter::{Meter, Phase};
use crate::transfer::{self, Outcome, Transfer};
use crate::verify::{Check, Verified, Verify};
use serde::Serialize;
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Asks a transfer to stop. Clones share one state; once set, it stays set.
///
/// The transfer ends as soon as what is in flight has landed (a disk read cannot be taken back),
/// with an error of kind [`ErrorKind::Cancelled`](crate::ErrorKind::Cancelled), and leaves
/// nothing behind.
#[derive(Clone, Debug, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// A token that is not set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets it. Safe to call from any thread, and in a signal handler.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it is set.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// The flag itself, for signal libraries that set one.
    pub fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.0)
    }
}

/// How far a transfer has come, in bytes of data; holes do not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// In place.
    pub done: u64,
    /// In all.
    pub total: u64,
}

type PlanFn = Box<dyn FnOnce(&Plan) + Send>;
pub(crate) type ProgressFn = Box<dyn Fn(Progress) + Send + Sync>;

/// Where the bytes come from.
enum Origin {
    Path(PathBuf),
    Open(Arc<Source>),
}

impl Origin {
    fn open(&self) -> Result<Arc<Source>> {
        match self {
            Self::Path(path) => Source::open(path).map(Arc::new),
            Self::Open(source) => Ok(Arc::clone(source)),
        }
    }
}

/// How much of its source a load takes.
pub(crate) enum Reach {
    /// From [`Load::offset`] on, as much as [`Load::length`] says.
    Asked,
    /// This many bytes from this one on.
    Part(u64, u64),
    /// Nothing but these ranges, in ascending order.
    Only(Vec<(u64, u64)>),
}

/// A load in the making: a file, and how its bytes should come into memory.
///
/// ```no_run
/// use dmafile::{CancelToken, Io, Kind, Load, Pages};
///
/// let token = CancelToken::new();
/// let loaded = Load::new("model.gguf")
///     .to(Kind::Anon)
///     .pages(Pages::Thp)
///     .io(Io::Direct)
///     .offset(4096)
///     .length(1 << 20)
///     .cancel(token.clone())
///     .progress(|progress| eprintln!("{} of {}", progress.done, progress.total))
///     .run()?;
/// let bytes: &[u8] = loaded.buffer.as_slice().expect("private memory");
/// # Ok::<(), dmafile::Error>(())
/// ```
pub struct Load {
    origin: Origin,
    reach: Reach,
    request: Request,
    verify: Option<Verify>,
    trace: bool,
    cancel: CancelToken,
    progress: Option<ProgressFn>,
    on_plan: Option<PlanFn>,
}

impl Load {
    /// A load of the whole of `path` into a memfd, everything else left to the plan.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self::from(Origin::Path(path.into()))
    }

    /// A load of open files.
    pub(crate) fn of(source: Arc<Source>, reach: Reach) -> Self {
        let mut load = Self::from(Origin::Open(source));
        load.reach = reach;
        load
    }

    fn from(origin: Origin) -> Self {
        Self {
            origin,
            reach: Reach::Asked,
            request: Request::default(),
            verify: None,
            trace: false,
            cancel: CancelToken::new(),
            progress: None,
            on_plan: None,
        }
    }

    /// The kind of memory; default [`Kind::Memfd`].
    pub fn to(mut self, kind: Kind) -> Self {
        self.request.kind = kind;
        self
    }

    /// The size of its pages; default [`Pages::Auto`].
    pub fn pages(mut self, pages: Pages) -> Self {
        self.request.pages = pages;
        self
    }

    /// How bytes move; default [`Method::Auto`].
    pub fn method(mut self, method: Method) -> Self {
        self.request.method = method;
        self
    }

    /// Past or through the page cache; default [`Io::Auto`].
    pub fn io(mut self, io: Io) -> Self {
        self.request.io = io;
        self
    }

    /// First byte of the file that is wanted; default 0.
    pub fn offset(mut self, bytes: u64) -> Self {
        self.request.offset = bytes;
        self
    }

    /// How many bytes are wanted, at least 1; default to the end of the file.
    pub fn length(mut self, bytes: u64) -> Self {
        self.request.length = Some(bytes);
        self
    }

    /// How much of the buffer is allocated before its reads begin, in bytes: at least a block;
    /// default [`DEFAULT_GATHER`](crate::DEFAULT_GATHER). The first and the last ones are smaller.
    pub fn gather(mut self, bytes: u64) -> Self {
        self.request.gather = Some(bytes);
        self
    }

    /// The size of one operation in bytes, within [`BLOCK_RANGE`](crate::BLOCK_RANGE) and a
    /// multiple of the file's direct alignment; default left to the plan.
    pub fn block(mut self, bytes: u64) -> Self {
        self.request.block = Some(bytes);
        self
    }

    /// Operations in flight, within [`QUEUE_DEPTH_RANGE`](crate::QUEUE_DEPTH_RANGE); default left
    /// to the plan.
    pub fn queue_depth(mut self, operations: u32) -> Self {
        self.request.queue_depth = Some(operations);
        self
    }

    /// When pages come into being; default [`Allocation::Auto`].
    pub fn allocation(mut self, allocation: Allocation) -> Self {
        self.request.allocation = allocation;
        self
    }

    /// Computes a checksum while the bytes come; where one is expected and differs, the load
    /// fails (EBADMSG) and nothing is handed out.
    pub fn verify(mut self, verify: Verify) -> Self {
        self.verify = Some(verify);
        self
    }

    /// Whether to refuse early what exceeds available memory or a cgroup's limit; default true.
    pub fn check_memory(mut self, check: bool) -> Self {
        self.request.check_memory = check;
        self
    }

    /// Records a timeline, to be had from [`Report::trace`]; default false.
    pub fn trace(mut self, trace: bool) -> Self {
        self.trace = trace;
        self
    }

    /// Lets `token` end the load early.
    pub fn cancel(mut self, token: CancelToken) -> Self {
        self.cancel = token;
        self
    }

    /// Calls `progress` now and then, at most 30 times a second, from the threads that move the
    /// bytes, and once at the end. It should return soon.
    pub fn progress(mut self, progress: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        self.progress = Some(Box::new(progress));
        self
    }

    /// Calls `show` with the plan once it is made, before anything is moved.
    pub fn on_plan(mut self, show: impl FnOnce(&Plan) + Send + 'static) -> Self {
        self.on_plan = Some(Box::new(show));
        self
    }

    /// What would be done and why. Opens the file and tries what the machine offers; moves
    /// nothing, but for one block where direct I/O can only be found out by reading.
    ///
    /// # Errors
    /// As [`Load::run`], as far as they can be foreseen.
    pub fn plan(mut self) -> Result<Plan> {
        plan::check(&self.request)?;
        let source = self.origin.open()?;
        let reasons = self.look_at_place(&source)?;
        let decided = self.decide(&source, reasons);
        source.forget_misses();
        decided.map(|decided| decided.plan)
    }

    /// Loads into memory that it allocates.
    ///
    /// # Errors
    /// Kind `Usage` for values out of range; `Cancelled` by the token; `Failed` for everything
    /// else, with the errno of the call that failed: ENOENT, EACCES, EISDIR and their like for
    /// the file, ENODATA for an empty file or one that is cut short meanwhile, EIO from the
    /// disk, ENOMEM where memory is short, EOPNOTSUPP for a pair of method and memory that cannot
    /// be, EBADMSG for a wrong digest. Nothing is left behind, except in an `fd:N` that was being
    /// filled: its contents are undefined then.
    pub fn run(mut self) -> Result<Loaded> {
        let clock = Clock::start();
        plan::check(&self.request)?;
        let source = self.origin.open()?;
        let reasons = self.look_at_place(&source)?;
        let opened = clock.begin.elapsed();
        let decided = self.decide(&source, reasons)?;
        let plan = &decided.plan;
        let meter = self.meter(&clock, &decided.layout);
        meter.add_until(Phase::Open, std::time::Duration::ZERO, opened);
        meter.add_step(Phase::Plan, opened);

        let mut reasons = plan.reasons.clone();
        let born = self.born(&decided, &source, &meter, &mut reasons)?;
        let (memory, outcome) = match born {
            Some(born) => born,
            None => self.made(&decided, &source, &meter, &mut reasons)?,
        };
        let buffer = |memory| Buffer::new(memory, plan.kind.clone(), plan.lead, plan.bytes);
        let report = Report::of(&decided, &meter, &clock, reasons, outcome, &*memory);
        Ok(Loaded {
            buffer: buffer(memory),
            report,
        })
    }

    /// Loads into memory of the caller, whose first byte becomes the first wanted byte of the
    /// file; what lies behind the last one is zeroed.
    ///
    /// Direct reads land in memory whose address is congruent with the offset in the file, modulo
    /// the file's direct alignment (a page-aligned buffer and `offset(0)` are); elsewhere they are
    /// copied on from a small ring ([`Method::Bounce`]), and the plan says so.
    ///
    /// Do not fork meanwhile, on Linux before 6.5: a direct read into private memory may land in
    /// the child's copy of it (open(2), O_DIRECT).
    ///
    /// # Errors
    /// As [`Load::run`]; EINVAL where `memory` is too small. After an error its contents are
    /// undefined.
    pub fn run_into(mut self, memory: &mut [u8]) -> Result<Report> {
        let clock = Clock::start();
        self.request.kind = Kind::Caller;
        self.request.place = Some(Place {
            address: memory.as_ptr().addr() as u64,
            bytes: memory.len() as u64,
            at: None,
            empty: false,
            lacking: 0,
            hugetlb: false,
        });
        plan::check(&self.request)?;
        let source = self.origin.open()?;
        let opened = clock.begin.elapsed();
        let decided = self.decide(&source, Vec::new())?;
        let meter = self.meter(&clock, &decided.layout);
        meter.add_until(Phase::Open, std::time::Duration::ZERO, opened);
        meter.add_step(Phase::Plan, opened);
        let lent = Lent::new(memory);
        let outcome = self.transfer(&decided, &source, &lent, &meter)?;
        let reasons = decided.plan.reasons.clone();
        Ok(Report::of(
            &decided, &meter, &clock, reasons, outcome, &lent,
        ))
    }

    /// Memory and bytes in one step, where the plan says so.
    fn born(
        &self,
        decided: &Decided,
        source: &Source,
        meter: &Meter<'_>,
        reasons: &mut Vec<Reason>,
    ) -> Result<Option<(Box<dyn Memory>, Outcome)>> {
        let Decided {
            plan,
            layout,
            checks,
            ..
        } = decided;
        if !plan.born_full {
            return Ok(None);
        }
        let born = transfer::born(plan, layout, source, meter, &self.cancel, checks, reasons);
        source.forget_misses();
        let born = born?;
        if born.is_some() {
            meter.tell_progress(true);
        }
        Ok(born)
    }

    /// Memory, and bytes into it.
    fn made(
        &self,
        decided: &Decided,
        source: &Source,
        meter: &Meter<'_>,
        reasons: &mut Vec<Reason>,
    ) -> Result<(Box<dyn Memory>, Outcome)> {
        let plan = &decided.plan;
        let start = meter.now();
        let mut memory = buffer::make(&self.request.kind, plan, self.request.pages, reasons)?;
        meter.add_step(Phase::Alloc, start);
        let outcome = self.transfer(decided, source, &*memory, meter)?;
        let start = meter.now();
        memory
            .finish()
            .map_err(|errno| buffer::cannot_export(errno, &plan.kind))?;
        meter.add_step(Phase::Export, start);
        Ok((memory, outcome))
    }

    /// Memory that exists sets bounds to the plan, and so does who makes it. The reasons for a kind
    /// that was left to us.
    fn look_at_place(&mut self, source: &Source) -> Result<Vec<Reason>> {
        let request = &mut self.request;
        let mut reasons = Vec::new();
        if matches!(request.kind, Kind::DmaBuf) {
            let whole = matches!(self.reach, Reach::Asked)
                && (request.offset, request.length) == (0, None)
                && source.files().len() == 1
                && matches!(request.method, Method::Auto | Method::HeapRead)
                && matches!(request.allocation, Allocation::Auto | Allocation::Ahead);
            let best = buffer::best_dma_buf(request.pages, whole);
            (request.kind, reasons) = best.map_err(|error| error.at("dma-buf"))?;
        }
        match &request.kind {
            Kind::Fd { fd, number, at } => {
                let (place, dma_buf) = buffer::look_at(fd.as_fd(), *number, *at)?;
                (request.place, request.dma_buf) = (Some(place), dma_buf);
                request.copies = file::copies_range(source.buffered(0).0, fd.as_fd());
            }
            Kind::Heap(name) => {
                let facts = buffer::look_at_heap(name);
                let place = request.kind.to_string();
                request.dma_buf = Some(facts.map_err(|error| error.at(place))?);
            }
            Kind::Udmabuf => buffer::look_at_udmabuf()?,
            Kind::Dmafile => {
                // Its own method asks nothing of the mapping.
                let try_pin = !matches!(request.method, Method::Auto | Method::Module);
                let facts = buffer::look_at_dmafile(try_pin);
                request.dma_buf = Some(facts.map_err(|error| error.at("dmafile"))?);
            }
            _ => {}
        }
        Ok(reasons)
    }

    /// Makes the plan, `reasons` being those for what is decided already.
    fn decide(&mut self, source: &Source, reasons: Vec<Reason>) -> Result<Decided> {
        let request = &mut self.request;
        let ranged = request.offset != 0 || request.length.is_some();
        let only = match &self.reach {
            Reach::Asked => None,
            _ if ranged => {
                let why = "the bytes of tensors are known: leave --offset and --length away";
                return Err(Error::usage("--tensor", why));
            }
            Reach::Part(start, len) => {
                (request.offset, request.length) = (*start, Some(*len));
                None
            }
            Reach::Only(ranges) => Some(&ranges[..]),
        };
        let file = File::of(source);
        let (start, end) = plan::range(&self.request, &file)?;
        let host = Host::probe();
        // Only methods that can read some extents directly and copy others need to know.
        let look = self.request.io == Io::Auto
            && matches!(
                self.request.method,
                Method::Auto
                    | Method::Uring
                    | Method::Threads
                    | Method::Bounce
                    | Method::Module
                    | Method::HeapRead
                    | Method::CopyFileRange
            )
            && file.direct_refused.is_none();
        let mut layout = Layout::of(source, start, end, look, only);
        let mut plan = plan::decide(&self.request, &file, &host, &layout)?;
        plan.reasons.splice(0..0, reasons);
        if plan.first().moves_in_one_call() {
            layout.without_cache();
        }
        let checks = match &self.verify {
            Some(_) if only.is_some() => {
                let why = "chosen tensors have no digest of their own: load whole files";
                return Err(Error::usage("--verify", why));
            }
            Some(verify) => Check::all(verify, source, start, end)?,
            None => Vec::new(),
        };
        if let Some(check) = checks.iter().find(|check| check.by_name) {
            plan.reasons.push(Reason {
                about: "verify",
                choice: check.algorithm.to_string(),
                why: "expected as the Hugging Face cache names the file".to_string(),
            });
        }
        if let Some(show) = self.on_plan.take() {
            show(&plan);
        }
        Ok(Decided {
            plan,
            layout,
            checks,
            shards: match (start, end == source.size()) {
                (0, true) => Shard::several(source),
                _ => Vec::new(),
            },
        })
    }

    fn meter(&self, clock: &Clock, layout: &Layout) -> Meter<'_> {
        let total = layout.bytes(true) + layout.bytes(false);
        let progress = self.progress.as_ref();
        Meter::new(
            clock.begin,
            total,
            self.trace,
            self.verify.is_some(),
            progress,
        )
    }

    fn transfer(
        &self,
        decided: &Decided,
        source: &Source,
        memory: &dyn Memory,
        meter: &Meter<'_>,
    ) -> Result<Outcome> {
        let transfer = Transfer {
            plan: &decided.plan,
            layout: &decided.layout,
            source,
            memory,
            meter,
            cancel: &self.cancel,
            checks: &decided.checks,
        };
        let outcome = transfer.run();
        source.forget_misses();
        let outcome = outcome?;
        meter.tell_progress(true);
        Ok(outcome)
    }
}

/// What a load is going to do.
struct Decided {
    plan: Plan,
    layout: Layout,
    checks: Vec<Check>,
    shards: Vec<Shard>,
}

/// A whole load: the buffer and how it went.
#[derive(Debug)]
pub struct Loaded {
    /// The memory.
    pub buffer: Buffer,
    /// The account.
    pub report: Report,
}

fn none_one_or_all<S: serde::Serializer>(all: &[Verified], to: S) -> Result<S::Ok, S::Error> {
    match all {
        [] => to.serialize_none(),
        [one] => one.serialize(to),
        all => all.serialize(to),
    }
}

/// When a load began, by the wall and by the CPU.
struct Clock {
    begin: Instant,
    cpu: (std::time::Duration, std::time::Duration),
}

impl Clock {
    fn start() -> Self {
        Self {
            begin: Instant::now(),
            cpu: usage::cpu(),
        }
    }
}

/// Processor time of the whole process during the load, in seconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Cpu {
    /// In user space.
    pub user: f64,
    /// In the kernel.
    pub system: f64,
}

/// A part of a buffer, in bytes from its first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Extent {
    /// Where it begins.
    pub at: u64,
    /// How long it is.
    pub bytes: u64,
}

/// How a load went. Serialised, it is the JSON that the command prints.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Bytes of files (or of chosen tensors) that were wanted, and are there.
    pub bytes: u64,
    /// Where they start in the buffer.
    pub offset: u64,
    /// Wall time from open to hand-over.
    pub seconds: f64,
    /// The method that moved the last byte.
    pub method: Method,
    /// Direct, buffered, or auto where some bytes came each way.
    pub io: Io,
    /// Kind of memory.
    pub kind: String,
    /// The pages it got: `4k`, `thp`, `huge`, or `thp+4k` where huge pages ran out; `exporter` where
    /// whoever exports a dma-buf has chosen them.
    pub pages: String,
    /// Seconds by phase: `open`, `plan`, `alloc`, `submit`, `wait`, `copy`, `verify`, `export`,
    /// `total`. Phases overlap, and those that several threads work in are summed over them.
    pub phases: BTreeMap<&'static str, f64>,
    /// Processor time.
    pub cpu: Cpu,
    /// Seconds in which reads were in flight: T(I/O).
    pub io_seconds: f64,
    /// Seconds of allocation that passed while reads were in flight. The smaller of T(I/O) and
    /// `phases.alloc` is hidden entirely when this equals it (AR-22).
    pub hidden: f64,
    /// Seconds of `phases.export` that passed while reads were in flight: a udmabuf is made of pages
    /// that reads are still on their way to (AR-36).
    pub hidden_export: f64,
    /// Bytes that came from the disk directly.
    pub bytes_direct: u64,
    /// Bytes that were copied from the page cache.
    pub bytes_buffered: u64,
    /// Bytes of holes, which were not read.
    pub bytes_hole: u64,
    /// Where each file lies in the buffer, where a load of a model has several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shards: Vec<Shard>,
    /// The dma-bufs that the buffer consists of, in the order of their descriptors.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub dma_bufs: Vec<Extent>,
    /// What was decided, and what was given up on the way.
    pub reasons: Vec<Reason>,
    /// The checksums that were asked for, one a file; in JSON null for none, and an object for one.
    #[serde(serialize_with = "none_one_or_all")]
    pub verify: Vec<Verified>,
    #[serde(skip)]
    trace: Option<serde_json::Value>,
}

impl Report {
    fn of(
        decided: &Decided,
        meter: &Meter<'_>,
        clock: &Clock,
        mut reasons: Vec<Reason>,
        outcome: Outcome,
        memory: &dyn Memory,
    ) -> Self {
        let plan = &decided.plan;
        let (pages, remark) = memory.pages();
        reasons.extend(outcome.reasons);
        if let Some(why) = remark {
            reasons.push(Reason {
                about: "got",
                choice: pages.clone(),
                why,
            });
        }
        if let Some((choice, why)) = module::modes(meter.modes()) {
            reasons.push(Reason {
                about: "mode",
                choice,
                why,
            });
        }
        let (io, hidden, hidden_export) = meter.overlap();
        let (direct, buffered) = meter.moved();
        let mut phases: BTreeMap<_, _> = Phase::ALL
            .iter()
            .map(|&phase| (phase.name(), meter.phase(phase).as_secs_f64()))
            .collect();
        let seconds = meter.now().as_secs_f64();
        phases.insert("total", seconds);
        let (user, system) = usage::cpu();
        Self {
            bytes: decided.layout.bytes_wanted(),
            offset: plan.lead,
            seconds,
            method: outcome.rung.method,
            io: match (direct, buffered) {
                (_, 0) => Io::Direct,
                (0, _) => Io::Buffered,
                _ => Io::Auto,
            },
            kind: plan.kind.clone(),
            pages,
            phases,
            cpu: Cpu {
                user: (user.saturating_sub(clock.cpu.0)).as_secs_f64(),
                system: (system.saturating_sub(clock.cpu.1)).as_secs_f64(),
            },
            io_seconds: io.as_secs_f64(),
            hidden: hidden.as_secs_f64(),
            hidden_export: hidden_export.as_secs_f64(),
            bytes_direct: direct,
            bytes_buffered: buffered,
            bytes_hole: plan.holes,
            shards: decided.shards.clone(),
            dma_bufs: memory
                .dma_bufs()
                .iter()
                .map(|one| Extent {
                    at: one.at,
                    bytes: one.bytes,
                })
                .collect(),
            reasons,
            verify: outcome.verified,
            trace: meter.spans().map(|spans| trace::render(&spans)),
        }
    }

    /// The timeline in the Chrome trace format, where [`Load::trace`] asked for one.
    pub fn trace(&self) -> Option<&serde_json::Value> {
        self.trace.as_ref()
    }
}
