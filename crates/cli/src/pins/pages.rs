//! `dmafile pins --pages`

use super::{counted, gone, shown, unreadable};
use crate::Failure;
use crate::args::{PinsArgs, Subject};
use crate::output::{write_json, write_stdout};
use crate::text::columns;
use dmafile_pins::{PageGroup, PinnedPages, Whose, pages};
use indicatif::BinaryBytes;
use std::fmt::Write;
use tabwriter::Alignment;

pub(super) fn run(args: &PinsArgs) -> Result<u8, Failure> {
    let whose = match &args.subject {
        None => Whose::All,
        Some(Subject::Process(pid)) => Whose::Process(*pid),
        Some(Subject::File(path)) => Whose::File(path),
    };
    let pinned = pages(&whose)?;
    if args.json {
        return write_json(&pinned);
    }
    write_stdout(text(&pinned).as_bytes())
}

fn text(pinned: &PinnedPages) -> String {
    let mut text = String::new();
    // Writing to a String does not fail.
    let _ = writeln!(
        text,
        "pinned now: {} in {}",
        BinaryBytes(pinned.bytes),
        counted(pinned.folios, "folio")
    );
    if !pinned.groups.is_empty() {
        text.push('\n');
        table(&mut text, pinned);
    }
    if pinned.groups.iter().any(|group| !group.exact) {
        text.push_str(
            "~ estimated from the references of 4 KiB pages, which have no count of pins\n",
        );
    }
    let older = |group: &PageGroup| group.recorded.is_none();
    if pinned.recording && pinned.groups.iter().any(older) {
        text.push_str("before recording: or for a short term, such as direct I/O\n");
    }
    if !pinned.ranges.is_empty() {
        text.push_str("\nin its memory\n");
        for range in &pinned.ranges {
            let _ = writeln!(
                text,
                "{:x}-{:x} {}, {} on each folio",
                range.address,
                range.address + range.bytes,
                BinaryBytes(range.bytes),
                counted(range.pins, "pin")
            );
        }
    }
    unreadable(&mut text, pinned.unreadable);
    text
}

fn table(text: &mut String, pinned: &PinnedPages) {
    let pinned_by = if pinned.recording { "PINNED BY\t" } else { "" };
    let mut table = format!(
        "{:>10}\t{:>8}\tTYPE\tMAPPED BY\t{pinned_by}CGROUP\tFILE\n",
        "BYTES", "PINS"
    );
    for group in &pinned.groups {
        let by: Vec<_> = group
            .mapped
            .iter()
            .take(3)
            .map(|one| format!("{} {}", one.pid, shown(&one.name)))
            .collect();
        let by = match group.mapped.len() {
            0 => "no process".to_string(),
            1..=3 => by.join(", "),
            count => format!("{} and {} more", by.join(", "), count - 3),
        };
        let file = match (&group.file, group.inode) {
            (Some(name), _) => shown(name),
            (None, Some(inode)) => {
                let device = group.device.as_deref().unwrap_or_default();
                format!("inode {inode} on {device}")
            }
            (None, None) => "-".to_string(),
        };
        let pins = format!("{}{}", if group.exact { "" } else { "~" }, group.pins);
        let _ = writeln!(
            table,
            "{:>10}\t{pins:>8}\t{}\t{by}\t{}{}\t{file}",
            BinaryBytes(group.bytes).to_string(),
            group.sort,
            match &group.recorded {
                _ if !pinned.recording => String::new(),
                Some(by) => format!("{} {}{}\t", by.pid, shown(&by.name), gone(by.gone)),
                None => "before recording\t".to_string(),
            },
            group
                .cgroup
                .as_deref()
                .map_or_else(|| "-".to_string(), shown),
        );
    }
    *text += &columns(&table, Alignment::Left);
}
