//! `dmafile pins`

mod file;
mod holders;
mod pages;
mod record;
mod tracker;
mod watch;

use crate::Failure;
use crate::args::{PinsArgs, Subject};
use crate::output::{write_json, write_stdout};
use dmafile_pins::Pins;
use indicatif::BinaryBytes;
use std::fmt::Write;

pub(crate) fn run(args: &PinsArgs) -> Result<u8, Failure> {
    if args.record {
        return record::run(args);
    }
    if let Some(seconds) = args.watch {
        return watch::run(args, seconds);
    }
    if args.blocked {
        return tracker::run(args.json);
    }
    if args.pages {
        return pages::run(args);
    }
    let pid = match &args.subject {
        Some(Subject::File(path)) => return file::run(path, args.json),
        Some(Subject::Process(pid)) => Some(*pid),
        None => None,
    };
    show(pid, args.json)
}

fn show(pid: Option<u32>, json: bool) -> Result<u8, Failure> {
    let pins = dmafile_pins::pins(pid)?;
    if json {
        return write_json(&pins);
    }
    write_stdout(text(&pins).as_bytes())
}

fn text(pins: &Pins) -> String {
    let mut text = String::new();
    // Writing to a String does not fail.
    let _ = match (&pins.system.pages, &pins.system.bytes) {
        (Some(pages), Some(bytes)) => writeln!(
            text,
            "pinned on this machine: {pages} pages, {}",
            BinaryBytes(*bytes)
        ),
        _ => writeln!(
            text,
            "pinned on this machine: unknown, /proc/vmstat has no nr_foll_pin_acquired"
        ),
    };
    text.push('\n');
    let owners = pins.owners.as_deref().unwrap_or_default();
    match &pins.recording {
        Some(recording) => record::section(&mut text, recording, owners),
        None if owners.is_empty() => {}
        None => {
            text.push_str("long-term pins, as the kernel tracks them\n");
            text += &tracker::table(owners);
        }
    }
    if !owners.is_empty() || pins.recording.is_some() {
        text.push_str("\nas each interface counts them\n");
    }
    if pins.holders.is_empty() {
        text.push_str("no visible process pins or locks memory\n");
    } else {
        text += &holders::table(&pins.holders, &pins.processes);
    }
    for user in &pins.users {
        let _ = writeln!(
            text,
            "user {} pins {}, of which {} count against a limit",
            user.uid,
            BinaryBytes(user.pinned),
            BinaryBytes(user.charged),
        );
    }
    for absent in &pins.absent {
        let _ = writeln!(text, "{}: {}", absent.by, absent.why);
    }
    let busy = pins.processes.iter().flat_map(|process| &process.rings);
    let busy = busy.flatten().filter(|ring| ring.buffers.is_none()).count();
    if busy > 0 {
        let rings = counted(busy as u64, "ring");
        let _ = writeln!(
            text,
            "{rings} did not list buffers: busy, or before Linux 5.6"
        );
    }
    unreadable(&mut text, pins.unreadable);
    if pins.hidden {
        text.push_str("/proc hides processes of other users (hidepid=2); run as root\n");
    }
    text
}

/// Reports the number of processes that could not be inspected.
fn unreadable(text: &mut String, count: u64) {
    if count > 0 {
        let processes = match count {
            1 => "1 process".to_string(),
            _ => format!("{count} processes"),
        };
        let _ = writeln!(
            text,
            "{processes} could not be inspected; run as root (with CAP_SYS_PTRACE)"
        );
    }
}

/// A number with a noun whose plural takes an s.
fn counted(count: u64, thing: &str) -> String {
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}

/// A name chosen by a program, escaped so that it cannot control the terminal.
fn shown(name: &str) -> String {
    name.replace(char::is_control, "?")
}

/// What follows the name of a process.
fn gone(gone: bool) -> &'static str {
    if gone { " (gone)" } else { "" }
}

/// Says that something has begun.
fn say(line: &str) {
    // If stderr is closed, nothing waits for it.
    let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
}
