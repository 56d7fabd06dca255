//! The output of a kernel with the pin tracker, and `dmafile pins --blocked`

use super::{counted, shown};
use crate::Failure;
use crate::output::{write_json, write_stdout};
use crate::text::columns;
use dmafile_pins::{Blocked, PinnedRegion, blocked};
use indicatif::{BinaryBytes, HumanDuration};
use serde::Serialize;
use std::fmt::Write;
use std::time::Duration;
use tabwriter::Alignment;

/// One line per region.
pub(super) fn table(regions: &[PinnedRegion]) -> String {
    let mut table = format!(
        "{:>7}\tUSER\t{:>10}\t{:>8}\tBY\tNAME\tWHAT\n",
        "PID", "BYTES", "SINCE"
    );
    for region in regions {
        let pid = region
            .pid
            .map_or_else(|| "-".to_string(), |pid| pid.to_string());
        let gone = if region.gone { " (gone)" } else { "" };
        // Writing to a String does not fail.
        let _ = writeln!(
            table,
            "{pid:>7}\t{}\t{:>10}\t{:>8}\t{}\t{}{gone}\t{}",
            region.uid,
            BinaryBytes(region.bytes).to_string(),
            age(region.age),
            shown(&region.by),
            shown(&region.name),
            what(region),
        );
    }
    columns(&table, Alignment::Left)
}

fn what(region: &PinnedRegion) -> String {
    let place = match &region.memfd {
        Some(memfd) => format!("{}, from {:#x}", shown(&memfd.name), region.start),
        None => format!("memory at {:x}", region.start),
    };
    let guessed = if region.guessed { ", ~" } else { "" };
    format!("{place}, {}{guessed}", counted(region.pins, "pin"))
}

fn age(seconds: f64) -> String {
    format!("{:#}", HumanDuration(Duration::from_secs_f64(seconds)))
}

/// `--blocked`
#[derive(Serialize)]
struct Ring {
    blocked: Vec<Blocked>,
}

pub(super) fn run(json: bool) -> Result<u8, Failure> {
    let ring = Ring {
        blocked: blocked()?,
    };
    if json {
        return write_json(&ring);
    }
    let mut text = String::new();
    for one in &ring.blocked {
        text += &sentence(one);
        text.push('\n');
    }
    if ring.blocked.is_empty() {
        text.push_str("nothing failed to move\n");
    }
    write_stdout(text.as_bytes())
}

fn sentence(one: &Blocked) -> String {
    let of = match one.of.as_str() {
        "anon" => "anonymous memory",
        "file" => "a file",
        _ => "the kernel",
    };
    let failed = match one.why.as_str() {
        "longterm_pin" => "could not be moved for a long-term pin",
        "contig_range" => "could not be moved for contiguous memory (CMA, huge pages)",
        "memory_hotplug" => "kept memory from going offline",
        "memory_failure" => "could not be moved off failing memory",
        "syscall_or_cpuset" => "could not be moved to another node",
        "seal_write" => "kept a memfd from being sealed against writing",
        "not_isolated" => "could not be taken off its list",
        "unmovable" => "cannot be migrated",
        "not_freed" => "was not given back",
        _ => "did not move",
    };
    let mut text = format!(
        "{} ago: {} of {of}, page {:#x}, {failed}",
        age(one.age),
        BinaryBytes(one.bytes),
        one.frame
    );
    // Writing to a String does not fail.
    if failed == "did not move" {
        let _ = write!(text, " ({})", shown(&one.why));
    }
    if one.times > 1 {
        let _ = write!(text, ", {} times", one.times);
    }
    let mut held = Vec::new();
    if one.long > 0 {
        let by = one.region.as_ref().map_or_else(
            || "since unmapped".to_string(),
            |region| {
                let pid = region.pid.map_or_else(String::new, |pid| format!("{pid} "));
                let gone = if region.gone { " (gone)" } else { "" };
                let (name, by) = (shown(&region.name), shown(&region.by));
                format!(
                    "the last by {pid}{name}{gone}, {by}, since {}",
                    age(region.age)
                )
            },
        );
        held.push(format!("{}, {by}", counted(one.long, "long-term pin")));
    }
    if one.pins > one.long {
        let by = one.short.as_ref().map_or_else(String::new, |short| {
            let (since, by) = (age(short.age), shown(&short.by));
            format!(", the first by {}, {by}, {since} before", short.pid)
        });
        held.push(format!("{}{by}", counted(one.pins - one.long, "short pin")));
    }
    if let Ok(count @ 1..) = u64::try_from(one.unexplained) {
        let references = counted(count, "reference");
        held.push(format!(
            "{references} that no pin, mapping or cache explains"
        ));
    }
    if held.is_empty() {
        held.push("already released when the kernel looked".to_string());
    }
    text + ": " + &held.join("; ")
}
