//! `dmafile pins`

use crate::Failure;
use crate::args::PinsArgs;
use crate::output::{write_json, write_stdout};
use crate::text::columns;
use dmafile::Pins;
use dmafile::pins::{Process, Ring};
use indicatif::BinaryBytes;
use std::fmt::Write;
use tabwriter::Alignment;

pub(crate) fn run(args: &PinsArgs) -> Result<u8, Failure> {
    let pins = dmafile::pins(args.pid)?;
    if args.json {
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
    if pins.processes.is_empty() {
        text.push_str("no process is seen to pin or lock memory\n");
    } else {
        table(&mut text, &pins.processes);
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
    let busy = pins.processes.iter().flat_map(|process| &process.rings);
    let busy = busy.flatten().filter(|ring| ring.buffers.is_none()).count();
    if busy > 0 {
        let _ = writeln!(
            text,
            "{busy} {} not list buffers: busy, or before Linux 5.6",
            if busy == 1 { "ring did" } else { "rings did" }
        );
    }
    if pins.unreadable > 0 {
        let _ = writeln!(
            text,
            "{} {} could not be looked into; run as root (with CAP_SYS_PTRACE)",
            pins.unreadable,
            if pins.unreadable == 1 {
                "process"
            } else {
                "processes"
            }
        );
    }
    if pins.hidden {
        text.push_str("/proc hides processes of other users (hidepid=2); run as root\n");
    }
    text
}

fn table(text: &mut String, processes: &[Process]) {
    let head = [
        "PID",
        "USER",
        "PINNED",
        "LOCKED",
        "RINGS",
        "BUFFERS",
        "REGISTERED",
        "LIMIT",
    ];
    let mut table = head.join("\t");
    table += "\tNAME\n";
    for process in processes {
        let _ = writeln!(table, "{}\t{}", row(process).join("\t"), name(process));
    }
    *text += &columns(&table, Alignment::Right);
}

fn row(process: &Process) -> [String; 8] {
    let sum = |of: fn(&Ring) -> u64| {
        let rings = process.rings.as_ref()?;
        let listed = rings.iter().all(|ring| ring.buffers.is_some());
        listed.then(|| rings.iter().map(of).sum::<u64>())
    };
    let known = |cell: Option<String>| cell.unwrap_or_else(|| "?".to_string());
    let limit = match process.limit {
        _ if process.cap_ipc_lock => "CAP_IPC_LOCK".to_string(),
        Some(limit) => BinaryBytes(limit).to_string(),
        None => "none".to_string(),
    };
    [
        process.pid.to_string(),
        process.uid.to_string(),
        BinaryBytes(process.pinned).to_string(),
        BinaryBytes(process.locked).to_string(),
        known(process.rings.as_ref().map(|rings| rings.len().to_string())),
        known(sum(|ring| ring.count).map(|count| count.to_string())),
        known(sum(|ring| ring.bytes).map(|bytes| BinaryBytes(bytes).to_string())),
        limit,
    ]
}

/// The name; whoever chose it shall not command the terminal.
fn name(process: &Process) -> String {
    process.name.replace(char::is_control, "?")
}
