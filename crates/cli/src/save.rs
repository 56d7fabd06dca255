//! `dmafile save`

use crate::args::SaveArgs;
use crate::output::{progress_bar, write_file, write_wanted_json};
use crate::signals::interruptible;
use crate::{Failure, remote, snapshot, text};
use dmafile::{CancelToken, Reason};
use std::sync::{Arc, Mutex};

/// The progress bar of a save.
pub(crate) const PROGRESS: &str =
    "{wide_bar} {binary_bytes}/{binary_total_bytes}, {binary_bytes_per_sec}";

pub(crate) fn run(args: &SaveArgs) -> Result<u8, Failure> {
    let out = args.output.place(false);
    let (from, to) = args.parts().ok_or_else(|| {
        Failure::usage("save needs a source and a destination: dmafile save SRC... DEST")
    })?;
    let url = args.url()?;
    match (args.snapshot(from, to)?, url) {
        (Some(several), Some(url)) => return snapshot::save_to_store(args, several, url, out),
        (Some(several), None) => return snapshot::save(args, several, out),
        (None, Some(url)) => return remote::save(args, &from[0], url, out),
        (None, None) => {}
    }
    if args.explain {
        let plan = args.save(&from[0], to)?.plan()?;
        if args.output.json.is_none() {
            out.print(&text::save_plan(&plan))?;
        }
        return write_wanted_json(&args.output.json, &plan).map(|()| 0);
    }
    let token = CancelToken::new();
    interruptible(&token)?;
    let planned: Arc<Mutex<(Vec<Reason>, Option<Failure>)>> = Arc::default();
    let shown = Arc::clone(&planned);
    let stop = token.clone();
    let mut save = args
        .save(&from[0], to)?
        .cancel(token)
        .trace(args.output.trace.is_some());
    save = save.on_plan(move |plan| {
        let printed = out.detail(|| text::save_plan(plan));
        if printed.is_err() {
            // The output cannot be shown any more.
            stop.cancel();
        }
        let mut shown = shown.lock().expect("no holder of this lock panics");
        *shown = (plan.reasons.clone(), printed.err());
    });
    let bar = progress_bar(args.output.quiet, PROGRESS);
    if let Some(bar) = bar.clone() {
        save = save.progress(move |progress| {
            bar.set_length(progress.total);
            bar.set_position(progress.done);
        });
    }
    let saved = save.run();
    if let Some(bar) = bar {
        // The end of a stream is not known in advance.
        bar.abandon();
    }
    let mut planned = planned.lock().expect("no holder of this lock panics");
    if let Some(failure) = planned.1.take() {
        return Err(failure);
    }
    let report = saved?;
    out.detail(|| text::found_out(&report.reasons, &planned.0))?;
    out.print(&text::save_report(&report, out.verbose))?;
    if let (Some(path), Some(trace)) = (&args.output.trace, report.trace()) {
        write_file(path, trace)?;
    }
    write_wanted_json(&args.output.json, &report).map(|()| 0)
}
