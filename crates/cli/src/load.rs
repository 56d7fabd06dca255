//! `dmafile load`

use crate::args::LoadArgs;
use crate::command::{self, Named, Shape, Variable, become_command, wants_path};
use crate::output::{Output, progress_bar, write_file, write_wanted_json};
use crate::remote::{self, Fetched};
use crate::signals::interruptible;
use crate::{Failure, Launcher, shards, snapshot, text};
use dmafile::{Buffer, CancelToken, Load, Loaded, Opt, Reason, Report};
use std::sync::{Arc, Mutex};

/// The progress bar of a load.
pub(crate) const PROGRESS: &str =
    "{wide_bar} {binary_bytes}/{binary_total_bytes}, {binary_bytes_per_sec}, {eta}";

pub(crate) fn run(args: &LoadArgs, launcher: &Launcher) -> Result<u8, Failure> {
    let deliver = !args.command.is_empty();
    if deliver && args.options.to() == "anon" {
        return Err(Failure::usage(
            "private memory (--to anon) cannot be inherited by COMMAND; use --to memfd",
        ));
    }
    if deliver && matches!(args.output.json, Some(None)) {
        return Err(Failure::usage(
            "--json needs a PATH with COMMAND, whose stdout it would mix with: --json=PATH",
        ));
    }
    let out = args.output.place(deliver);

    let by_path = wants_path(&args.command);
    if by_path && args.options.given.has(Opt::Tensors) {
        return Err(Failure::usage(
            "{} needs whole files; with --tensor, use DMAFILE_FD",
        ));
    }
    if by_path && args.options.exports() {
        return Err(Failure::usage(&format!(
            "--to {} has no path for {{}}, because a dma-buf has no path; use --to memfd, or the \
             descriptor in DMAFILE_FD",
            args.options.to()
        )));
    }

    if by_path {
        command::this_process()?;
    }
    let token = CancelToken::new();
    interruptible(&token)?;
    let slot = args.options.reserve(args.output.quiet)?;
    if let Some(found) = args.options.snapshot(&args.tuning, by_path)? {
        return snapshot::load(args, found, out, &token, launcher);
    }
    if by_path && args.options.is_collection() {
        return shards::load(args, slot, out, &token, launcher);
    }
    let mut load = args.options.load(&args.tuning)?;
    if let Some(verify) = remote::digest_for(&slot).filter(|_| !args.options.given.has(Opt::Verify))
    {
        load = load.verify(verify);
    }
    if by_path && (args.options.given.has(Opt::Offset) || args.options.to().starts_with("fd:")) {
        // Checked before a load that would be useless.
        let name = args.options.name();
        command::starts_at(&name, args.options.load(&args.tuning)?.plan()?.place.start)?;
    }
    let Loaded { buffer, report, .. } = one(args, load.exact_size(by_path), out, &token)?;
    write_files(args, &report)?;
    if let Some(slot) = slot {
        let mut files = fetched(&buffer, &report);
        let url = remote::url(&args.options.file).filter(|_| args.options.is_collection());
        // A model in the cache is one with its index and its configuration.
        match url
            .map(|url| remote::load_others(url, Some(&slot), &token))
            .transpose()
        {
            Ok(others) => {
                files.extend(others.into_iter().flatten().map(|other| other.2));
                remote::keep(&slot, files, deliver.then_some(launcher))?;
            }
            Err(error) => remote::not_kept(&error),
        }
    }
    match (deliver, by_path) {
        (true, _) if token.is_cancelled() => Err(interrupted()),
        (true, false) => Err(exec(args, buffer)?),
        (true, true) => {
            let name = args.options.name();
            let named = vec![Named { name, buffer }];
            let command = &args.command;
            Err(command::hand_over_by_path(
                launcher,
                command,
                named,
                Shape::File,
            )?)
        }
        (false, _) => Ok(0),
    }
}

/// What of a buffer was fetched, file by file.
fn fetched(buffer: &Buffer, report: &Report) -> Vec<Fetched> {
    let objects = remote::opened();
    let starts = report.shards.iter().map(|shard| shard.at);
    let starts: Vec<_> = match report.shards.len() {
        0 => vec![report.offset],
        _ => starts.collect(),
    };
    let files = objects.iter().zip(starts).enumerate();
    let file = |(number, (object, at))| Fetched::of(object, buffer, at, report.verify.get(number));
    files.map(file).collect()
}

/// Loads, and shows progress and report.
pub(crate) fn one(
    args: &LoadArgs,
    load: Load,
    out: Output,
    token: &CancelToken,
) -> Result<Loaded, Failure> {
    let planned: Arc<Mutex<(Vec<Reason>, Option<Failure>)>> = Arc::default();
    let shown = Arc::clone(&planned);
    let mut load = load
        .cancel(token.clone())
        .trace(args.output.trace.is_some());
    let stop = token.clone();
    load = load.on_plan(move |plan| {
        let printed = out.detail(|| text::plan(plan));
        if printed.is_err() {
            // The output cannot be shown any more.
            stop.cancel();
        }
        let mut shown = shown.lock().expect("no holder of this lock panics");
        *shown = (plan.reasons.clone(), printed.err());
    });
    if let Some(bar) = progress_bar(args.output.quiet, PROGRESS) {
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
    let loaded = loaded?;
    out.detail(|| text::found_out(&loaded.report.reasons, &planned.0))?;
    out.print(&text::report(&loaded.report, out.verbose))?;
    Ok(loaded)
}

fn write_files(args: &LoadArgs, report: &Report) -> Result<(), Failure> {
    if let (Some(path), Some(trace)) = (&args.output.trace, report.trace()) {
        write_file(path, trace)?;
    }
    write_wanted_json(&args.output.json, report)
}

pub(crate) fn interrupted() -> Failure {
    Failure {
        line: "interrupted before COMMAND could run".to_string(),
        status: crate::INTERRUPTED,
    }
}

/// Execs COMMAND; returns only on failure.
fn exec(args: &LoadArgs, buffer: dmafile::Buffer) -> Result<Failure, Failure> {
    let mut variables = command::ranges([&buffer].into_iter());
    let has_path = buffer.dma_bufs().is_empty() && buffer.offset() == 0;
    let fds = buffer.into_inherited_fds()?;
    variables.push((Variable::Fd, command::numbers(&fds)));
    variables.extend(command::path_variable(has_path, &fds));
    Ok(become_command(&args.command, variables))
}
