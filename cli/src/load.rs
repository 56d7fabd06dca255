//! `dmafile load`

use crate::args::LoadArgs;
use crate::output::{Text, progress_bar, write_file, write_wanted_json};
use crate::signals::interruptible;
use crate::{Failure, snapshot, text};
use dmafile::{CancelToken, Loaded, Reason, Report};
use std::ffi::OsString;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::{Arc, Mutex};

/// How far a load is, while it lasts.
pub(crate) const PROGRESS: &str =
    "{wide_bar} {binary_bytes}/{binary_total_bytes}, {decimal_bytes_per_sec}, {eta}";

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

    if let Some(load) = args.knobs.snapshot(&args.tuning)? {
        return snapshot::load(args, load, out);
    }
    let load = args.knobs.load(&args.tuning)?;
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
    if let Some(bar) = progress_bar(args.quiet, PROGRESS) {
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
        true if token.is_set() => Err(interrupted()),
        true => Err(exec(args, buffer)?),
        false => Ok(0),
    }
}

fn write_files(args: &LoadArgs, report: &Report) -> Result<(), Failure> {
    if let (Some(path), Some(trace)) = (&args.trace, report.trace()) {
        write_file(path, trace)?;
    }
    write_wanted_json(&args.json, report)
}

pub(crate) fn interrupted() -> Failure {
    Failure {
        line: "interrupted before COMMAND could run".to_string(),
        status: crate::INTERRUPTED,
    }
}

/// Becomes COMMAND; what it returns says why not.
fn exec(args: &LoadArgs, buffer: dmafile::Buffer) -> Result<Failure, Failure> {
    let mut variables = vec![
        ("DMAFILE_BYTES", buffer.len().to_string()),
        ("DMAFILE_OFFSET", buffer.offset().to_string()),
    ];
    let fds = buffer.into_inherited_fds()?;
    let numbers: Vec<_> = fds.iter().map(|fd| fd.as_raw_fd().to_string()).collect();
    variables.push(("DMAFILE_FD", numbers.join(",")));
    Ok(become_command(&args.command, variables))
}

/// Becomes a command with these variables in its environment; what it returns says why not.
pub(crate) fn become_command(
    command: &[OsString],
    variables: Vec<(&'static str, String)>,
) -> Failure {
    let error = Command::new(&command[0])
        .args(&command[1..])
        .envs(variables)
        .exec();
    let name = command[0].to_string_lossy();
    let mut failure = Failure::os("cannot run", &name, &error, "");
    failure.status = match error.kind() {
        std::io::ErrorKind::NotFound => 127,
        _ => 126,
    };
    failure
}
