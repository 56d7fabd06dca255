//! Plans and reports as text.

use dmafile::internal::one_line;
use dmafile::{Cpu, Method, Plan, Reason, Report, SavePlan, SaveReport, Verified};
use dmafile_record::{
    SnapshotLoadPlan, SnapshotLoadReport, SnapshotPlan, SnapshotReport, StoredSnapshot,
};
use indicatif::BinaryBytes;
use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};
use std::io::Write as _;
use std::path::Path;
use tabwriter::{Alignment, TabWriter};

/// The plan, one line per choice, with its reason.
pub(crate) fn plan(plan: &Plan) -> String {
    let mut text = String::new();
    let mut line = |name: &str, choice: &str, why: &str| {
        // Writing to a String does not fail.
        let _ = writeln!(text, "  {name:<11} {choice:<24} {why}");
    };
    line(
        "file",
        &BinaryBytes(plan.bytes).to_string(),
        &plan.file.display().to_string(),
    );
    let place = match plan.offset {
        0 => String::new(),
        offset => format!(
            "from byte {offset}, at byte {} of the buffer",
            plan.place.start
        ),
    };
    line("to", &plan.kind.to_string(), &place);
    for reason in &plan.reasons {
        line(reason.about.word(), &reason.choice, &reason.why);
    }
    let methods: Vec<_> = plan
        .methods
        .iter()
        .skip(1)
        .map(ToString::to_string)
        .collect();
    if !methods.is_empty() {
        line("if refused", &methods.join(", then "), "");
    }
    let aligned = match plan.sizes.align {
        Some(align) => format!(", aligned to {align} bytes"),
        None => String::new(),
    };
    let in_flight = |bytes: u64| match plan.sizes.queue_depth {
        Some(depth) if depth > 1 => (
            format!("{} x {depth}", BinaryBytes(bytes)),
            format!("in flight{aligned}"),
        ),
        _ => (
            BinaryBytes(bytes).to_string(),
            format!("one at a time{aligned}"),
        ),
    };
    if let Some(block) = plan.sizes.block {
        let (shape, why) = in_flight(block);
        line("block", &shape, &why);
    }
    match (plan.sizes.chunk, plan.sizes.block) {
        (Some(chunk), Some(_)) => {
            let bytes = BinaryBytes(chunk).to_string();
            line(
                "chunk",
                &bytes,
                "allocated before its reads begin (--chunk)",
            );
        }
        // dmafile.ko has chunks in flight.
        (Some(chunk), None) => {
            let (shape, why) = in_flight(chunk);
            line("chunk", &shape, &format!("{why} (--chunk)"));
        }
        (None, _) => {}
    }
    let bytes = match plan.first().method {
        Method::Fetch => format!("{} to receive", BinaryBytes(plan.to_read)),
        _ => format!(
            "{} from disk, {} from the page cache, {} of holes",
            BinaryBytes(plan.to_read),
            BinaryBytes(plan.to_copy),
            BinaryBytes(plan.holes),
        ),
    };
    line("bytes", &bytes, "");
    text.lines().fold(String::from("plan\n"), |all, line| {
        all + line.trim_end() + "\n"
    })
}

/// The plan of a save, one line per choice, with its reason.
pub(crate) fn save_plan(plan: &SavePlan) -> String {
    let mut text = String::from("plan\n");
    let mut line = |name: &str, choice: &str, why: &str| {
        let line = format!("  {name:<11} {choice:<24} {why}");
        text += line.trim_end();
        text.push('\n');
    };
    let size = match plan.bytes {
        Some(bytes) => BinaryBytes(bytes).to_string(),
        None => "until end of input".to_string(),
    };
    let from = match plan.from_offset {
        0 => format!("{}, a {}", plan.from, plan.kind),
        at => format!("{}, a {}, from byte {at}", plan.from, plan.kind),
    };
    line("from", &size, &from);
    let place = if plan.atomic {
        String::new()
    } else {
        format!("from byte {}", plan.offset)
    };
    line("to", &plan.to.display().to_string(), &place);
    for reason in &plan.reasons {
        line(reason.about.word(), &reason.choice, &reason.why);
    }
    let others: Vec<_> = plan
        .methods
        .iter()
        .skip(1)
        .map(ToString::to_string)
        .collect();
    if !others.is_empty() {
        line("if refused", &others.join(", then "), "");
    }
    let aligned = match plan.align {
        Some(align) => format!(", aligned to {align} bytes"),
        None => String::new(),
    };
    let (shape, how) = match plan.queue_depth {
        1 => (BinaryBytes(plan.block).to_string(), "one at a time"),
        depth => (
            format!("{} x {depth}", BinaryBytes(plan.block)),
            "in flight",
        ),
    };
    line("block", &shape, &format!("{how}{aligned}"));
    if let Some(bytes) = plan.to_write {
        let bytes = format!(
            "{} to write, {} of holes",
            BinaryBytes(bytes),
            BinaryBytes(plan.holes)
        );
        line("bytes", &bytes, "");
    }
    text
}

/// The report of a save: one line, or with details.
pub(crate) fn save_report(report: &SaveReport, verbose: bool) -> String {
    let mut text = Moved {
        verb: "saved",
        bytes: report.bytes,
        seconds: report.seconds,
        cpu: &report.cpu,
        method: &report.method,
        parts: [
            (report.bytes_direct, "direct"),
            (report.bytes_buffered, "to the page cache"),
            (report.bytes_hole, "of holes"),
        ],
        end: match (report.atomic, report.sync) {
            (true, true) => "on the disk",
            (true, false) => "not synced",
            (false, true) => "in place, not atomic, on the disk",
            (false, false) => "in place, not atomic, not synced",
        },
        phases: phases(
            &[
                "open", "plan", "reserve", "submit", "wait", "copy", "verify", "sync", "total",
            ],
            &report.phases,
        ),
    }
    .text(verbose);
    if let Some(verified) = &report.verify {
        let _ = writeln!(text, "{}", digest(verified));
    }
    text
}

/// The plan of a snapshot, source by source.
pub(crate) fn snapshot_plan(plan: &SnapshotPlan) -> String {
    let mut text = format!(
        "snapshot {} in {}, {} digests\n",
        plan.generation,
        one_line(&plan.to.to_string_lossy()),
        plan.algorithm,
    );
    for source in &plan.sources {
        text += &source_head(&source.name);
        text += &save_plan(&source.plan);
    }
    text
}

/// The plan for loading a source of a snapshot.
pub(crate) fn source_plan(name: &str, of: &Plan) -> String {
    source_head(name) + &plan(of)
}

/// The plan for loading a snapshot.
pub(crate) fn snapshot_load_plan(plan: &SnapshotLoadPlan) -> String {
    let text = |source: &dmafile_record::SourceLoadPlan| match &source.plan {
        Some(plan) => source_plan(&source.name, plan),
        None => source_head(&source.name) + "plan\n  to          an empty memfd\n",
    };
    plan.sources.iter().map(text).collect()
}

/// The heading of the plan of one of several files.
pub(crate) fn file_head(file: &Path) -> String {
    format!("file {}\n", one_line(&file.to_string_lossy()))
}

fn source_head(name: &str) -> String {
    format!("source {}\n", one_line(name))
}

/// Reasons that were shown with the plan, by source.
type Planned = BTreeMap<String, Vec<Reason>>;

/// The reports of the sources of a snapshot.
pub(crate) fn snapshot_sources(report: &SnapshotReport, planned: &Planned) -> String {
    let mut text = String::new();
    for source in &report.sources {
        let planned = planned.get(&source.name).map_or(&[][..], Vec::as_slice);
        text += &source_head(&source.name);
        text += &found_out(&source.report.reasons, planned);
        text += &save_report(&source.report, true);
    }
    text + &found_out(&report.reasons, &[])
}

/// The report of a snapshot.
pub(crate) fn snapshot_report(report: &SnapshotReport) -> String {
    let end = if report.sync {
        "on the disk"
    } else {
        "not synced"
    };
    let times = (report.seconds, &report.cpu);
    snapshot_saved(report.generation, report.bytes, times, end)
}

fn snapshot_saved(generation: u64, bytes: u64, (seconds, used): (f64, &Cpu), end: &str) -> String {
    let (bytes, used) = (BinaryBytes(bytes), cpu(used, false));
    format!("snapshot {generation} saved: {bytes} in {seconds:.3} s, CPU {used}; {end}\n")
}

/// The sources of a snapshot in a store.
pub(crate) fn stored_sources(report: &StoredSnapshot) -> String {
    let mut text = String::new();
    for source in &report.sources {
        text += &source_head(&source.name);
        let bytes = BinaryBytes(source.bytes);
        let _ = writeln!(text, "  {bytes} in {:.3} s", source.seconds);
        let _ = writeln!(text, "{}", source.digest);
    }
    text + &found_out(&report.reasons, &[])
}

/// The report of a snapshot in a store.
pub(crate) fn stored_snapshot(report: &StoredSnapshot) -> String {
    let times = (report.seconds, &report.cpu);
    snapshot_saved(report.generation, report.bytes, times, "in the store")
}

/// The reports of the sources of a snapshot that was loaded.
pub(crate) fn snapshot_loads(of: &SnapshotLoadReport, planned: &Planned) -> String {
    let mut text = String::new();
    for source in &of.sources {
        text += &source_head(&source.name);
        match &source.report {
            Some(one) => {
                let planned = planned.get(&source.name).map_or(&[][..], Vec::as_slice);
                text += &found_out(&one.reasons, planned);
                text += &report(one, true);
            }
            None => text += "an empty memfd\n",
        }
    }
    text
}

/// The report of a snapshot that was loaded.
pub(crate) fn snapshot_load_report(of: &SnapshotLoadReport) -> String {
    format!(
        "snapshot {} loaded: {} in {:.3} s, CPU {}\n",
        of.generation,
        BinaryBytes(of.bytes),
        of.seconds,
        cpu(&of.cpu, false),
    )
}

/// Reasons that the transfer itself added, after the plan was shown.
pub(crate) fn found_out(reasons: &[Reason], planned: &[Reason]) -> String {
    let mut text = String::new();
    for reason in reasons.iter().filter(|reason| !planned.contains(reason)) {
        let _ = writeln!(
            text,
            "  {:<11} {:<24} {}",
            reason.about, reason.choice, reason.why
        );
    }
    text
}

fn phases(order: &[&str], all: &BTreeMap<&'static str, f64>) -> String {
    let phases = order.iter();
    let phases = phases.filter_map(|&name| Some(format!("{name} {}", ms(*all.get(name)?))));
    phases.collect::<Vec<_>>().join(", ")
}

fn digest(verified: &Verified) -> String {
    let end = if verified.matched {
        "as expected"
    } else {
        "computed"
    };
    format!("  {} {} ({end})", verified.algorithm, verified.digest)
}

/// CPU time, and how much of it in user space and in the kernel.
fn cpu(used: &Cpu, verbose: bool) -> String {
    let total = used.user + used.system;
    if verbose {
        format!(
            "{total:.3} s (user {:.3}, system {:.3})",
            used.user, used.system
        )
    } else {
        format!("{total:.3} s")
    }
}

/// What the reports of loads and saves have in common.
struct Moved<'a> {
    verb: &'a str,
    bytes: u64,
    seconds: f64,
    cpu: &'a Cpu,
    method: &'a dyn Display,
    /// How many bytes went each way.
    parts: [(u64, &'a str); 3],
    end: &'a str,
    phases: String,
}

impl Moved<'_> {
    /// One line, or several with details.
    fn text(&self, verbose: bool) -> String {
        let rate = BinaryBytes((self.bytes as f64 / self.seconds) as u64);
        let head = format!(
            "{} {} in {:.3} s: {rate}/s, CPU {}",
            self.verb,
            BinaryBytes(self.bytes),
            self.seconds,
            cpu(self.cpu, verbose),
        );
        let (method, end, phases) = (self.method, self.end, &self.phases);
        let some = self.parts.iter().filter(|(bytes, _)| verbose || *bytes > 0);
        let some: Vec<_> = some.collect();
        let parts = match some[..] {
            [] => "nothing to move".to_string(),
            // All bytes went one way.
            [(_, how)] => (*how).to_string(),
            _ => {
                let each = some.iter();
                let each = each.map(|(bytes, how)| format!("{} {how}", BinaryBytes(*bytes)));
                each.collect::<Vec<_>>().join(", ")
            }
        };
        if verbose {
            format!("{head}\n  by {method}, {parts}; {end}\n  phases in ms: {phases}\n")
        } else {
            format!("{head}; by {method}, {parts}; {end}\n")
        }
    }
}

/// The report of a load: one line, or with details.
pub(crate) fn report(report: &Report, verbose: bool) -> String {
    let mut text = Moved {
        verb: "loaded",
        bytes: report.bytes,
        seconds: report.seconds,
        cpu: &report.cpu,
        method: &report.method,
        parts: [
            (report.bytes_direct, "direct"),
            match report.method {
                Method::Fetch => (report.bytes_buffered, "received"),
                _ => (report.bytes_buffered, "from the page cache"),
            },
            (report.bytes_hole, "of holes"),
        ],
        end: &format!("{} on {} pages", report.kind, report.pages),
        phases: phases(
            &[
                "open", "plan", "alloc", "submit", "wait", "copy", "verify", "export", "total",
            ],
            &report.phases,
        ),
    }
    .text(verbose);
    if verbose {
        let alloc = report.phases.get("alloc").copied().unwrap_or(0.0);
        let _ = write!(
            text,
            "  T(alloc) {} ms, T(I/O) {} ms, {} ms of allocation hidden behind the reads",
            ms(alloc),
            ms(report.io_seconds),
            ms(report.hidden),
        );
        if report.hidden_export > 0.0 {
            let hidden = ms(report.hidden_export);
            let _ = write!(text, ", and {hidden} ms of creating the dma-buf");
        }
        text.push('\n');
        if let Some(remote) = &report.remote {
            let _ = write!(text, "  {} requests", remote.requests);
            if let Some(why) = &remote.why {
                let _ = write!(text, ", {} of them again: {why}", remote.retries);
            }
            text.push('\n');
        }
    }
    for verified in &report.verify {
        text += &digest(verified);
        if report.verify.len() > 1 {
            let _ = write!(text, " {}", one_line(&verified.file.to_string_lossy()));
        }
        text.push('\n');
    }
    text
}

/// Formats a table of lines whose cells are separated by tabs, with each column as wide as its
/// longest cell. The last cell of a line belongs to no column.
pub(crate) fn columns(table: &str, alignment: Alignment) -> String {
    let mut writer = TabWriter::new(Vec::new()).alignment(alignment);
    let text = writer
        .write_all(table.as_bytes())
        .and_then(|()| writer.flush())
        .map(|()| writer.into_inner().unwrap_or_default())
        .unwrap_or_default();
    String::from_utf8_lossy(&text)
        .lines()
        .fold(String::new(), |all, line| all + line.trim_end() + "\n")
}

fn ms(seconds: f64) -> String {
    format!("{:.1}", seconds * 1000.0)
}
