//! The report of a save.

use super::origin::OriginKind;
use super::plan::SavePlan;
use crate::error::Verb;
use crate::exporter::module;
use crate::flow::clock::{Clock, Cpu};
use crate::flow::meter::{Meter, Phase};
use crate::flow::trace;
use crate::options::{Io, Method};
use crate::plan::Attempt;
use crate::reasons::{About, Reason, Reasons};
use crate::verify::Verified;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The report of a save. Serialised, it is the JSON that the command prints.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct SaveReport {
    /// Bytes saved, holes included.
    pub bytes: u64,
    /// Offset of the first one in the file.
    pub offset: u64,
    /// Wall-clock time from opening the file to the end: with [`SaveReport::sync`], until it is on the
    /// disk.
    pub seconds: f64,
    /// The method that moved the last byte.
    pub method: Method,
    /// Direct, buffered, or auto if some bytes were written each way, such as the parts of blocks at
    /// either end.
    pub io: Io,
    /// What was saved: `memfd`, `dma-buf`, `file`, `block device`, `pipe`, `memory`, `parts`.
    pub kind: OriginKind,
    /// The file; in JSON, parts of its path that are not UTF-8 are replaced.
    #[serde(serialize_with = "crate::error::lossy")]
    pub to: PathBuf,
    /// True if the file was replaced atomically.
    pub atomic: bool,
    /// True if it is on the disk.
    pub sync: bool,
    /// Seconds by phase: `open`, `plan`, `reserve`, `submit`, `wait`, `copy`, `verify`, `sync`, `total`.
    /// Phases overlap. A phase that runs in several threads is the sum over them.
    pub phases: BTreeMap<&'static str, f64>,
    /// CPU time.
    pub cpu: Cpu,
    /// Seconds during which writes were in flight: T(I/O).
    pub io_seconds: f64,
    /// Bytes written directly to the disk.
    pub bytes_direct: u64,
    /// Bytes copied to the page cache.
    pub bytes_buffered: u64,
    /// Bytes in holes, which were not written.
    pub bytes_hole: u64,
    /// What was decided, and which methods were tried and given up.
    pub reasons: Vec<Reason>,
    /// The computed checksum of the saved bytes.
    pub verify: Option<Verified>,
    #[serde(skip)]
    trace: Option<serde_json::Value>,
}

impl SaveReport {
    pub(super) fn of(
        plan: &SavePlan,
        bytes: u64,
        meter: &Meter<'_>,
        clock: &Clock,
        log: &Reasons,
        (attempt, verify): (Attempt, Option<Verified>),
    ) -> Self {
        if let Some((choice, why)) = module::modes(Verb::Save, meter.modes()) {
            log.add(About::Mode, choice, why);
        }
        let (direct, buffered) = meter.totals();
        let mut phases: BTreeMap<_, _> = Phase::OF_SAVES
            .iter()
            .map(|&phase| (phase.name(), meter.phase(phase).as_secs_f64()))
            .collect();
        let seconds = meter.now().as_secs_f64();
        phases.insert("total", seconds);
        Self {
            bytes,
            offset: plan.offset,
            seconds,
            method: attempt.method,
            io: match (direct, buffered) {
                (0, 0) if attempt.direct => Io::Direct,
                (0, _) => Io::Buffered,
                (_, 0) => Io::Direct,
                _ => Io::Auto,
            },
            kind: plan.kind,
            to: plan.to.clone(),
            atomic: plan.atomic,
            sync: plan.sync,
            phases,
            cpu: clock.cpu(),
            io_seconds: meter.overlap().io.as_secs_f64(),
            bytes_direct: direct,
            bytes_buffered: buffered,
            bytes_hole: bytes.saturating_sub(direct + buffered),
            reasons: log.list(),
            verify,
            trace: meter.spans().map(|spans| trace::render(&spans)),
        }
    }

    /// The timeline in the Chrome trace format, if [`Save::trace`](crate::Save::trace) requested it.
    pub fn trace(&self) -> Option<&serde_json::Value> {
        self.trace.as_ref()
    }
}
