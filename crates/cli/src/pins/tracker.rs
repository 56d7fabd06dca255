//! The output of a kernel with the pin tracker, and `dmafile pins --blocked`

use super::{counted, gone, shown};
use crate::Failure;
use crate::output::{write_json, write_stdout};
use crate::text::columns;
use dmafile_pins::{Blocked, PinOwner, blocked};
use indicatif::{BinaryBytes, HumanDuration};
use serde::Serialize;
use std::fmt::Write;
use std::time::Duration;
use tabwriter::Alignment;

/// One line for each process and purpose.
pub(super) fn table(owners: &[PinOwner]) -> String {
    let mut table = format!(
        "{:>7}\tUSER\t{:>10}\t{:>8}\tBY\tNAME\tWHAT\n",
        "PID", "BYTES", "SINCE"
    );
    for owner in owners {
        let name = match &owner.name {
            Some(name) => shown(name) + gone(owner.gone),
            None if owner.gone => "(gone)".into(),
            None => "-".into(),
        };
        let uid = owner
            .uid
            .map_or_else(|| "-".to_string(), |uid| uid.to_string());
        // Writing to a String does not fail.
        let _ = writeln!(
            table,
            "{:>7}\t{uid}\t{:>10}\t{:>8}\t{}\t{name}\t{}{}",
            owner.pid,
            BinaryBytes(owner.bytes).to_string(),
            age(owner.age),
            shown(&owner.by),
            counted(owner.pins, "pin"),
            match owner.cgroup.as_deref() {
                Some(cgroup) if cgroup != "/" => format!(", in {}", shown(cgroup)),
                _ => String::new(),
            },
        );
    }
    columns(&table, Alignment::Left)
}

pub(super) fn age(seconds: f64) -> String {
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
    if one.pins > 0 {
        let by = one.owner.as_ref().map_or_else(String::new, |owner| {
            let (since, by) = (age(owner.age), shown(&owner.by));
            format!(
                ", the last long-term one by {}, {by}, {since} before",
                owner.pid
            )
        });
        held.push(format!("{}{by}", counted(one.pins, "pin")));
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
