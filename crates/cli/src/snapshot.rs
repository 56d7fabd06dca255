//! `dmafile save` of several sources, and `dmafile load` of what it has saved.

use crate::args::{FoundSnapshot, LoadArgs, SaveArgs};
use crate::command::{self, Named, Others, Shape, Variable, become_command, wants_path};
use crate::load::interrupted;
use crate::output::{Output, progress_bar, write_wanted_json};
use crate::signals::interruptible;
use crate::{Failure, Launcher, remote, save, text};
use dmafile::{Buffer, CancelToken, Reason};
use dmafile_record::{LoadedSource, Snapshot};
use indicatif::ProgressBar;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::sync::{Arc, Mutex, MutexGuard};

/// Reasons shown with the plans, by source, and why a plan could not be shown.
type Shown = (BTreeMap<String, Vec<Reason>>, Option<Failure>);

fn lock(shown: &Mutex<Shown>) -> MutexGuard<'_, Shown> {
    shown.lock().expect("no holder of this lock panics")
}

pub(crate) fn save(args: &SaveArgs, snapshot: Snapshot, out: Output) -> Result<u8, Failure> {
    if args.explain {
        let plan = snapshot.plan()?;
        if args.output.json.is_none() {
            out.print(&text::snapshot_plan(&plan))?;
        }
        return write_wanted_json(&args.output.json, &plan).map(|()| 0);
    }
    refuse_trace(args.output.trace.is_some())?;
    let token = CancelToken::new();
    interruptible(&token)?;
    let planned: Arc<Mutex<Shown>> = Arc::default();
    let (shown, stop) = (Arc::clone(&planned), token.clone());
    let snapshot = snapshot.cancel(token).on_plan(move |plan| {
        let printed = out.detail(|| text::snapshot_plan(plan));
        if printed.is_err() {
            // The output cannot be shown any more.
            stop.cancel();
        }
        let sources = plan.sources.iter();
        let reasons = sources.map(|source| (source.name.clone(), source.plan.reasons.clone()));
        *lock(&shown) = (reasons.collect(), printed.err());
    });
    let (snapshot, bar) = with_bar(snapshot, args.output.quiet);
    let saved = snapshot.run();
    if let Some(bar) = bar {
        bar.abandon();
    }
    let mut planned = lock(&planned);
    if let Some(failure) = planned.1.take() {
        return Err(failure);
    }
    let report = saved?;
    out.detail(|| text::snapshot_sources(&report, &planned.0))?;
    out.print(&text::snapshot_report(&report))?;
    write_wanted_json(&args.output.json, &report).map(|()| 0)
}

fn with_bar(snapshot: Snapshot, quiet: bool) -> (Snapshot, Option<ProgressBar>) {
    let Some(bar) = progress_bar(quiet, save::PROGRESS) else {
        return (snapshot, None);
    };
    let shown = bar.clone();
    let snapshot = snapshot.progress(move |progress| {
        shown.set_length(progress.total);
        shown.set_position(progress.done);
    });
    (snapshot, Some(bar))
}

/// Saves to a folder of a store.
pub(crate) fn save_to_store(
    args: &SaveArgs,
    snapshot: Snapshot,
    url: &str,
    out: Output,
) -> Result<u8, Failure> {
    let token = CancelToken::new();
    interruptible(&token)?;
    let (snapshot, bar) = with_bar(snapshot, args.output.quiet);
    let saved = remote::save_snapshot(snapshot, url, &token);
    if let Some(bar) = bar {
        bar.abandon();
    }
    let report = saved?;
    out.detail(|| text::stored_sources(&report))?;
    out.print(&text::stored_snapshot(&report))?;
    write_wanted_json(&args.output.json, &report).map(|()| 0)
}

pub(crate) fn load(
    args: &LoadArgs,
    (load, folder): FoundSnapshot,
    out: Output,
    token: &CancelToken,
    launcher: &Launcher,
) -> Result<u8, Failure> {
    refuse_trace(args.output.trace.is_some())?;
    let planned: Arc<Mutex<Shown>> = Arc::default();
    let (shown, stop) = (Arc::clone(&planned), token.clone());
    let mut load = load.cancel(token.clone()).on_plan(move |name, plan| {
        let printed = out.detail(|| text::source_plan(name, plan));
        let mut shown = lock(&shown);
        shown.0.insert(name.to_string(), plan.reasons.clone());
        if let Err(failure) = printed {
            stop.cancel();
            shown.1 = Some(failure);
        }
    });
    if let Some(bar) = progress_bar(args.output.quiet, crate::load::PROGRESS) {
        load = load.progress(move |progress| {
            bar.set_length(progress.total);
            bar.set_position(progress.done);
            if progress.done == progress.total {
                bar.finish();
            }
        });
    }
    let loaded = match folder {
        Some(folder) => load.run_from(&*folder),
        None => load.run(),
    };
    let mut planned = lock(&planned);
    if let Some(failure) = planned.1.take() {
        return Err(failure);
    }
    let loaded = loaded?;
    out.detail(|| text::snapshot_loads(&loaded.report, &planned.0))?;
    out.print(&text::snapshot_load_report(&loaded.report))?;
    write_wanted_json(&args.output.json, &loaded.report)?;
    match args.command.is_empty() {
        true => Ok(0),
        false if token.is_cancelled() => Err(interrupted()),
        false => Err(deliver(args, loaded.sources, launcher)?),
    }
}

/// Execs COMMAND, which inherits a descriptor per source; returns only on failure.
fn deliver(
    args: &LoadArgs,
    sources: Vec<LoadedSource>,
    launcher: &Launcher,
) -> Result<Failure, Failure> {
    if wants_path(&args.command) {
        let named = sources
            .into_iter()
            .map(|LoadedSource { name, buffer, .. }| Named {
                name: name.into(),
                buffer,
            });
        let shape = Shape::Folder {
            name: command::name_of(&args.options.file),
            others: Others::default(),
        };
        return command::hand_over_by_path(launcher, &args.command, named.collect(), shape);
    }
    let mut variables = command::ranges(sources.iter().map(|source| &source.buffer));
    let names = sources.iter().map(|source| OsStr::new(&source.name));
    variables.push(command::names(names)?);
    let mut fds = Vec::new();
    for LoadedSource { name, buffer, .. } in sources {
        fds.push(inherited(&name, buffer)?);
    }
    variables.push((Variable::Fd, command::numbers(&fds)));
    Ok(become_command(&args.command, variables))
}

/// The only descriptor of a buffer.
pub(crate) fn inherited(name: &str, buffer: Buffer) -> Result<std::os::fd::OwnedFd, Failure> {
    let several = buffer.dma_bufs().len();
    let mut fds = buffer.into_inherited_fds()?;
    match (fds.pop(), fds.is_empty()) {
        (Some(one), true) => Ok(one),
        _ => Err(Failure {
            line: format!(
                "cannot pass the buffer on: {}: it consists of {several} dma-bufs, and COMMAND gets one \
                 descriptor for each (EFBIG); raise size_limit_mb of udmabuf",
                dmafile::internal::one_line(name),
            ),
            status: 1,
        }),
    }
}

fn refuse_trace(wanted: bool) -> Result<(), Failure> {
    if wanted {
        Err(Failure::usage(
            "--trace works for one file only; leave it out for a snapshot",
        ))
    } else {
        Ok(())
    }
}
