//! `dmafile pins --record`

use super::tracker::{self, age};
use super::{counted, say, show};
use crate::Failure;
use crate::args::PinsArgs;
use crate::output::write_stdout;
use crate::signals::interruptible;
use dmafile::CancelToken;
use dmafile_pins::{PinOwner, PinRecording, RecordPins, record, stop_recording};
use indicatif::BinaryBytes;
use std::fmt::Write;
use std::time::{Duration, Instant};

pub(super) fn run(args: &PinsArgs) -> Result<u8, Failure> {
    if args.stop {
        let text = if stop_recording(None)? {
            "pins are not recorded any more\n"
        } else {
            "no pins were recorded\n"
        };
        return write_stdout(text.as_bytes());
    }
    let stop = CancelToken::new();
    if args.record_for.is_some() {
        interruptible(&stop)?;
    }
    let id = record(&RecordPins {
        memory: args.memory,
        short: args.all,
    })?;
    let Some(time) = args.record_for else {
        return write_stdout(
            b"recording pins, until the machine ends or: dmafile pins --record --stop\n\
              show them: dmafile pins\n",
        );
    };
    say("recording pins; press Ctrl-C to stop\n");
    let end = Instant::now() + time;
    while !stop.is_cancelled() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(50).min(end - Instant::now()));
    }
    let shown = show(None, args.json);
    stop_recording(Some(id))?;
    shown
}

/// The owners of what was recorded, and how much it takes.
pub(super) fn section(text: &mut String, recording: &PinRecording, owners: &[PinOwner]) {
    // Writing to a String does not fail.
    let _ = writeln!(
        text,
        "long-term pins, as recorded for {}",
        age(recording.seconds)
    );
    if owners.is_empty() {
        text.push_str("none\n");
    } else {
        *text += &tracker::table(owners);
    }
    let _ = writeln!(
        text,
        "recorded: {} in {}, with {} of {} of kernel memory; older pins: dmafile pins --pages",
        BinaryBytes(recording.bytes),
        counted(recording.folios, "folio"),
        BinaryBytes(recording.used),
        BinaryBytes(recording.memory),
    );
    if recording.lost > 0 {
        let _ = writeln!(
            text,
            "not recorded: {}, because that memory was full; give it more: dmafile pins --record --stop, \
             then --record --memory SIZE",
            counted(recording.lost, "pin"),
        );
    }
    if recording.beyond > 0 {
        let _ = writeln!(
            text,
            "not recorded: {} of memory that was added later; begin again: dmafile pins --record --stop, then \
             --record",
            counted(recording.beyond, "pin"),
        );
    }
    if recording.missed > 0 {
        let _ = writeln!(
            text,
            "missed: {}, because programs were interrupted; some pins may be missing or have ended",
            counted(recording.missed, "call"),
        );
    }
    if recording.paused {
        text.push_str(
            "paused: kernel.ftrace_enabled is 0, so that pins are missing and some that are shown have ended; begin \
             again: sysctl kernel.ftrace_enabled=1, then dmafile pins --record --stop, then --record\n",
        );
    }
    if recording.disturbed > 0 {
        let _ = writeln!(
            text,
            "wrong: perhaps the pins of {}, which several processes changed at once",
            counted(recording.disturbed, "folio"),
        );
    }
}
