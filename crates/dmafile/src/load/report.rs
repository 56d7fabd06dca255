//! The result of a load: the buffer, and a report.

use crate::buffer::{Buffer, DmaBuf};
use crate::error::Verb;
use crate::exporter::module;
use crate::flow::clock::{Clock, Cpu};
use crate::flow::meter::Phase;
use crate::flow::run::Run;
use crate::flow::trace;
use crate::options::{Io, MemoryKind, Method};
use crate::reasons::{About, Reason};
use crate::source::{Shard, Traffic};
use crate::transfer::{LoadTask, Outcome};
use crate::verify::Verified;
use serde::Serialize;
use std::collections::BTreeMap;

/// A completed load: the buffer and its report.
#[derive(Debug)]
#[non_exhaustive]
pub struct Loaded {
    /// The memory.
    pub buffer: Buffer,
    /// How the load went.
    pub report: Report,
}

fn none_one_or_all<S: serde::Serializer>(all: &[Verified], to: S) -> Result<S::Ok, S::Error> {
    match all {
        [] => to.serialize_none(),
        [one] => one.serialize(to),
        all => all.serialize(to),
    }
}

/// A range of a buffer, in bytes from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Extent {
    /// Its offset.
    pub at: u64,
    /// Its length.
    pub bytes: u64,
}

/// The report of a load. Serialised, it is the JSON that the command prints.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// Number of requested bytes (of files, or of selected tensors), all of which are in the buffer.
    pub bytes: u64,
    /// Where they start in the buffer.
    pub offset: u64,
    /// Wall-clock time from opening the file until the buffer is returned.
    pub seconds: f64,
    /// The method that moved the last byte.
    pub method: Method,
    /// Direct, buffered, or auto if some bytes were read each way.
    pub io: Io,
    /// Kind of memory.
    pub kind: MemoryKind,
    /// The page size it got: `base`, `thp`, `huge`, or `thp+base` if memory was too fragmented;
    /// `exporter` if the exporter of a dma-buf chose it; `existing` for memory that existed before.
    pub pages: String,
    /// Seconds by phase: `open`, `plan`, `alloc`, `submit`, `wait`, `copy`, `verify`, `export`, `total`.
    /// Phases overlap. A phase that runs in several threads is the sum over them.
    pub phases: BTreeMap<&'static str, f64>,
    /// CPU time.
    pub cpu: Cpu,
    /// Seconds during which reads were in flight: T(I/O).
    pub io_seconds: f64,
    /// Seconds of allocation during which reads were in flight. If this equals the smaller of T(I/O) and
    /// `phases.alloc`, that one is hidden completely.
    pub hidden: f64,
    /// Seconds of `phases.export` during which reads were in flight: a udmabuf is created while the last
    /// reads into its pages are in flight.
    pub hidden_export: f64,
    /// Bytes read directly from the disk.
    pub bytes_direct: u64,
    /// Bytes copied from the page cache; of an object, bytes received.
    pub bytes_buffered: u64,
    /// Bytes in holes, which were not read.
    pub bytes_hole: u64,
    /// What the objects of stores took, of those that say it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remote: Option<Traffic>,
    /// Where each file is in the buffer, if a model has several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shards: Vec<Shard>,
    /// The dma-bufs that the buffer consists of, in the order of their descriptors.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub dma_bufs: Vec<Extent>,
    /// What was decided, and which methods were tried and given up.
    pub reasons: Vec<Reason>,
    /// The computed checksums, one per file; in JSON null for none, and an object for one.
    #[serde(serialize_with = "none_one_or_all")]
    pub verify: Vec<Verified>,
    #[serde(skip)]
    trace: Option<serde_json::Value>,
}

/// What all objects took together.
fn traffic(task: &LoadTask) -> Option<Traffic> {
    let objects = task.source.objects();
    let all = objects.iter().filter_map(|object| object.traffic());
    all.reduce(|sum, one| Traffic {
        requests: sum.requests + one.requests,
        retries: sum.retries + one.retries,
        why: sum.why.or(one.why),
    })
}

impl Report {
    pub(super) fn of(
        task: &LoadTask,
        run: &Run<'_>,
        clock: &Clock,
        outcome: Outcome,
        (pages, remark): (String, Option<String>),
        dma_bufs: &[DmaBuf<'_>],
    ) -> Self {
        let (plan, meter, log) = (&task.plan, &run.meter, run.log);
        task.source.forget_misses();
        if let Some(why) = remark {
            log.add(About::Got, &pages, why);
        }
        if let Some((choice, why)) = module::modes(Verb::Load, meter.modes()) {
            log.add(About::Mode, choice, why);
        }
        let overlap = meter.overlap();
        let (direct, buffered) = meter.totals();
        let mut phases: BTreeMap<_, _> = Phase::OF_LOADS
            .iter()
            .map(|&phase| (phase.name(), meter.phase(phase).as_secs_f64()))
            .collect();
        let seconds = meter.now().as_secs_f64();
        phases.insert("total", seconds);
        Self {
            bytes: task.layout.bytes_wanted(),
            offset: plan.place.start,
            seconds,
            method: outcome.attempt.method,
            io: match (direct, buffered) {
                (_, 0) => Io::Direct,
                (0, _) => Io::Buffered,
                _ => Io::Auto,
            },
            kind: plan.kind.clone(),
            pages,
            phases,
            cpu: clock.cpu(),
            io_seconds: overlap.io.as_secs_f64(),
            hidden: overlap.allocated.as_secs_f64(),
            hidden_export: overlap.exported.as_secs_f64(),
            bytes_direct: direct,
            bytes_buffered: buffered,
            bytes_hole: plan.holes,
            remote: traffic(task),
            shards: task.shards.clone(),
            dma_bufs: dma_bufs
                .iter()
                .map(|one| Extent {
                    at: one.at,
                    bytes: one.bytes,
                })
                .collect(),
            reasons: log.list(),
            verify: outcome.verified,
            trace: meter.spans().map(|spans| trace::render(&spans)),
        }
    }

    /// The timeline in the Chrome trace format, if [`Load::trace`](crate::Load::trace) requested it.
    pub fn trace(&self) -> Option<&serde_json::Value> {
        self.trace.as_ref()
    }
}
