//! `dmafile load`

use crate::args::LoadArgs;
use crate::{Failure, text, write_json, write_stdout};
use dmafile::{CancelToken, Loaded, Reason, Report};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::fs::{self, File};
use std::io::{IsTerminal, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

/// Where text for people goes.
#[derive(Clone, Copy)]
enum Text {
    Stdout,
    /// stdout belongs to COMMAND or to the JSON object.
    Stderr,
    Nowhere,
}

impl Text {
    fn print(self, text: &str) -> Result<(), Failure> {
        match self {
            Self::Stdout => write_stdout(text.as_bytes()).map(drop),
            Self::Stderr => std::io::stderr()
                .write_all(text.as_bytes())
                .map_err(|error| Failure::os("cannot write", "stderr", &error, "")),
            Self::Nowhere => Ok(()),
        }
    }
}

pub(crate) fn run(args: &LoadArgs) -> Result<u8, Failure> {
    let hand_over = !args.command.is_empty();
    if hand_over && args.knobs.to == "anon" {
        return Err(Failure::usage(
            "--to anon leaves COMMAND nothing to inherit; use --to memfd",
        ));
    }
    if hand_over && matches!(args.json, Some(None)) {
        return Err(Failure::usage(
            "--json needs a PATH with COMMAND, whose stdout it would mix with: --json=PATH",
        ));
    }
    let out = match (args.quiet, hand_over || matches!(args.json, Some(None))) {
        (true, _) => Text::Nowhere,
        (false, true) => Text::Stderr,
        (false, false) => Text::Stdout,
    };

    let load = args.knobs.load()?;
    let token = CancelToken::new();
    interruptible(&token)?;
    let planned: Arc<Mutex<(Vec<Reason>, Option<Failure>)>> = Arc::default();
    let shown = Arc::clone(&planned);
    let mut load = load.cancel(token.clone()).trace(args.trace.is_some());
    let stop = token.clone();
    load = load.on_plan(move |plan| {
        let printed = out.print(&text::plan(plan));
        if printed.is_err() {
            // Nobody will see what comes of it.
            stop.cancel();
        }
        let mut shown = shown.lock().expect("no holder of this lock panics");
        *shown = (plan.reasons.clone(), printed.err());
    });
    if let Some(bar) = progress_bar(args.quiet) {
        load = load.progress(move |progress| {
            bar.set_length(progress.total);
            bar.set_position(progress.done);
            if progress.done == progress.total {
                bar.finish();
            }
        });
    }
    let loaded = load.run();
    let mut planned = planned.lock().expect("no holder of this lock panics");
    if let Some(failure) = planned.1.take() {
        return Err(failure);
    }
    let Loaded { buffer, report, .. } = loaded?;
    out.print(&text::report(&report, &planned.0))?;
    write_files(args, &report)?;
    match hand_over {
        true if token.is_set() => Err(Failure {
            line: "interrupted before COMMAND could run".to_string(),
            status: crate::INTERRUPTED,
        }),
        true => Err(exec(args, buffer)?),
        false => Ok(0),
    }
}

/// SIGINT and SIGTERM set the token; a second one ends the process at once. What was ignored when
/// we were started (nohup, a job in the background of a script) stays so, for COMMAND too.
fn interruptible(token: &CancelToken) -> Result<(), Failure> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    use signal_hook::flag;
    let ignored = ignored_signals();
    for signal in [SIGINT, SIGTERM] {
        if ignored >> (signal - 1) & 1 == 1 {
            continue;
        }
        flag::register_conditional_shutdown(signal, crate::INTERRUPTED.into(), token.flag())
            .and_then(|_| flag::register(signal, token.flag()))
            .map_err(|error| Failure::os("cannot handle", "signals", &error, ""))?;
    }
    Ok(())
}

/// A bit a signal, from `/proc/self/status`; none where that cannot be read.
fn ignored_signals() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

/// On a terminal only: nobody wants escape codes in a log.
fn progress_bar(quiet: bool) -> Option<ProgressBar> {
    if quiet || !std::io::stderr().is_terminal() {
        return None;
    }
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    let style = "{wide_bar} {binary_bytes}/{binary_total_bytes}, {decimal_bytes_per_sec}, {eta}";
    bar.set_style(ProgressStyle::with_template(style).expect("the template is a constant"));
    Some(bar)
}

fn write_files(args: &LoadArgs, report: &Report) -> Result<(), Failure> {
    if let (Some(path), Some(trace)) = (&args.trace, report.trace()) {
        write_file(path, trace)?;
    }
    match &args.json {
        Some(Some(path)) => write_file(path, report),
        Some(None) => write_json(report).map(drop),
        None => Ok(()),
    }
}

fn write_file(path: &Path, value: &impl serde::Serialize) -> Result<(), Failure> {
    let failed = |error: std::io::Error| {
        Failure::os("cannot write", &path.display().to_string(), &error, "")
    };
    let text = serde_json::to_string(value).map_err(|error| failed(error.into()))? + "\n";
    let mut file = File::create(path).map_err(failed)?;
    file.write_all(text.as_bytes()).map_err(|error| {
        // Half an object helps nobody; a device or a FIFO stays.
        if file.metadata().is_ok_and(|data| data.is_file()) {
            let _ = fs::remove_file(path);
        }
        failed(error)
    })
}

/// Becomes COMMAND; what it returns says why not.
fn exec(args: &LoadArgs, buffer: dmafile::Buffer) -> Result<Failure, Failure> {
    let (offset, bytes) = (buffer.offset(), buffer.len());
    let fds = buffer.into_inherited_fds()?;
    let numbers: Vec<_> = fds.iter().map(|fd| fd.as_raw_fd().to_string()).collect();
    let error = Command::new(&args.command[0])
        .args(&args.command[1..])
        .env("DMAFILE_FD", numbers.join(","))
        .env("DMAFILE_BYTES", bytes.to_string())
        .env("DMAFILE_OFFSET", offset.to_string())
        .exec();
    let name = args.command[0].to_string_lossy();
    let mut failure = Failure::os("cannot run", &name, &error, "");
    failure.status = match error.kind() {
        std::io::ErrorKind::NotFound => 127,
        _ => 126,
    };
    Ok(failure)
}
