//! `dmafile pins --watch`

use super::{counted, say, shown};
use crate::Failure;
use crate::args::{PinsArgs, Subject};
use crate::output::{write_json, write_stdout};
use crate::signals::interruptible;
use crate::text::columns;
use dmafile::CancelToken;
use dmafile_pins::{CallSite, Watch, Watched, watch};
use std::fmt::Write;
use std::time::Duration;
use tabwriter::Alignment;

pub(super) fn run(args: &PinsArgs, seconds: Option<u32>) -> Result<u8, Failure> {
    let pid = match &args.subject {
        Some(Subject::Process(pid)) => Some(*pid),
        Some(Subject::File(_)) => {
            return Err(Failure::usage("--watch takes a process, not a file"));
        }
        None => None,
    };
    let what = Watch {
        time: seconds.map(|seconds| Duration::from_secs(seconds.into())),
        short: args.all,
        pid,
    };
    let stop = CancelToken::new();
    interruptible(&stop)?;
    let watched = watch(&what, &stop, || {
        say("watching pins; press Ctrl-C to stop\n");
    })?;
    if args.json {
        return write_json(&watched);
    }
    write_stdout(text(&watched).as_bytes())
}

fn text(watched: &Watched) -> String {
    let mut text = String::new();
    let pins = if watched.short {
        "all pins"
    } else {
        "long-term pins (FOLL_LONGTERM)"
    };
    // Writing to a String does not fail.
    let _ = writeln!(text, "watched for {:.1} s: {pins}", watched.seconds);
    if watched.requested {
        text.push_str(
            "PINNED is what was requested: this kernel's probes cannot tell how much was pinned\n",
        );
    }
    text.push('\n');
    if watched.rows.is_empty() {
        text.push_str("no process pinned or unpinned memory\n");
    } else {
        table(&mut text, watched);
    }
    if watched.missed > 0 {
        let calls = counted(watched.missed, "call");
        let _ = writeln!(text, "missed: {calls}, because probes were busy");
    }
    if watched.dropped > 0 {
        let calls = counted(watched.dropped, "call");
        let _ = writeln!(text, "left out: {calls}, because the histograms were full");
    }
    text
}

fn table(text: &mut String, watched: &Watched) {
    let head = format!("{:>7}\t{:>9}\t{:>9}", "PID", "PINNED", "UNPINNED");
    let mut table = format!("{head}\tBY\tNAME\tFROM\n");
    for row in &watched.rows {
        let pid = row
            .pid
            .map_or_else(|| "-".to_string(), |pid| pid.to_string());
        let functions: Vec<_> = row
            .places
            .iter()
            .map(|place: &CallSite| &*place.function)
            .collect();
        let _ = writeln!(
            table,
            "{pid:>7}\t{:>9}\t{:>9}\t{}\t{}\t{}",
            row.pinned,
            row.unpinned,
            row.by,
            shown(&row.name),
            functions.join(", ")
        );
    }
    *text += &columns(&table, Alignment::Left);
}
