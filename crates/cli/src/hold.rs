//! `dmafile hold`, `dmafile holds` and `dmafile release`

use crate::args::{HeldUrl, HoldArgs, HoldsArgs, ReleaseArgs};
use crate::load::PROGRESS;
use crate::output::{Text, progress_bar, write_json, write_stdout};
use crate::remote::{self, Fetched};
use crate::signals::{interruptible, wake};
use crate::text::columns;
use crate::{Failure, Launcher};
use dmafile::internal::one_line;
use dmafile::{CancelToken, ModelObject};
use dmafile_hold::{HeldInfo, Holding, not_handed_over};
use indicatif::{BinaryBytes, HumanDuration};
use serde_json::json;
use std::fmt::Write;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, UNIX_EPOCH};
use tabwriter::Alignment;

pub(crate) fn run(args: &HoldArgs, launcher: &Launcher) -> Result<u8, Failure> {
    let token = CancelToken::new();
    interruptible(&token)?;
    let begin = Instant::now();
    let mut looker = launcher.command();
    looker.arg(LOOKER);
    let (hold, absent) = args.hold()?;
    let mut hold = hold.cancel(token.clone()).looker(looker);
    let fetched: Arc<Mutex<Vec<Fetched>>> = Arc::default();
    let objects: Vec<_> = absent.iter().flat_map(|one| one.objects.clone()).collect();
    if !absent.is_empty() {
        let fetched = Arc::clone(&fetched);
        hold = hold.on_loaded(move |info, fd| {
            let is_it = |one: &&ModelObject| Path::new(&one.0.name()) == info.file;
            if let Some((object, _)) = objects.iter().find(is_it) {
                let digest = info.digest.as_ref();
                let digest =
                    digest.and_then(|own| Some((own.algorithm.parse().ok()?, own.digest.clone())));
                let file = Fetched::in_memory(object, Some(fd), info.offset, digest);
                fetched
                    .lock()
                    .expect("no holder of this lock panics")
                    .push(file);
            }
        });
    }
    if let Some(bar) = progress_bar(false, PROGRESS) {
        hold = hold.progress(move |progress| {
            bar.set_length(progress.total);
            bar.set_position(progress.done);
            if progress.done == progress.total {
                bar.finish();
            }
        });
    }
    let holder = hold.start()?;
    wake(&holder.stopper()?)?;
    if token.is_cancelled() {
        // The signal arrived before `wake`.
        return Ok(0);
    }
    let files = holder.files();
    write_json(&json!({
        "name": holder.name(),
        "socket": holder.socket().to_string_lossy(),
        "pid": std::process::id(),
        "bytes": files.iter().map(|file| file.bytes).sum::<u64>(),
        "sealed": files.iter().all(|file| file.sealed),
        "stored": holder.is_stored(),
        "seconds": begin.elapsed().as_secs_f64(),
        "files": files,
    }))?;
    for one in absent {
        keep(&one, &fetched, &token, launcher)?;
    }
    if args.notify {
        for file in files {
            if let Some(why) = not_handed_over(file) {
                let path = one_line(&file.file.to_string_lossy());
                let note = format!("dmafile: note: {path} is loaded again after a kexec: {why}\n");
                Text::Stderr.print(&note)?;
            }
        }
    }
    holder.wait();
    Ok(0)
}

/// Has what was fetched of a URL written into the cache, beside the holder.
fn keep(
    one: &HeldUrl,
    fetched: &Mutex<Vec<Fetched>>,
    token: &CancelToken,
    launcher: &Launcher,
) -> Result<(), Failure> {
    let mut fetched = fetched.lock().expect("no holder of this lock panics");
    let own = |file: &mut Fetched| one.objects.iter().any(|object| file.is(&object.0));
    let mut files: Vec<_> = fetched.extract_if(.., own).collect();
    if remote::is_collection(&one.url) {
        match remote::load_others(&one.url, Some(&one.slot), token) {
            Ok(others) => files.extend(others.into_iter().map(|other| other.2)),
            Err(error) => {
                remote::not_kept(&error);
                return Ok(());
            }
        }
    }
    // Memory of several descriptors is not here.
    if files.len() < one.objects.len() {
        return Ok(());
    }
    remote::keep(&one.slot, files, Some(launcher))
}

pub(crate) fn list(args: &HoldsArgs) -> Result<u8, Failure> {
    let all = dmafile_hold::holds(args.socket.as_deref(), &CancelToken::new())?;
    if args.json {
        return write_json(&all);
    }
    write_stdout(text(&all).as_bytes())
}

pub(crate) fn release(args: &ReleaseArgs) -> Result<u8, Failure> {
    dmafile_hold::release(&args.name, args.socket.as_deref(), &CancelToken::new())?;
    Ok(0)
}

/// One line per hold; below it the processes that took it, and its files that have changed on the disk.
fn text(all: &[Holding]) -> String {
    let mut table = String::from("NAME\tFILES\tBYTES\tPAGES\tSEALED\tPID\tUSER\tAGE\tTAKERS\tAT\n");
    for held in all {
        let mut pages: Vec<_> = held.files.iter().map(|file| file.pages.as_str()).collect();
        pages.sort_unstable();
        pages.dedup();
        let since = UNIX_EPOCH + Duration::from_secs(held.since);
        // Writing to a String does not fail.
        let _ = writeln!(
            table,
            "{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}",
            one_line(&held.name),
            held.files.len(),
            BinaryBytes(held.bytes),
            one_line(&pages.join(",")),
            if held.sealed { "yes" } else { "no" },
            held.pid,
            held.uid,
            HumanDuration(since.elapsed().unwrap_or_default()),
            takers(held),
            one_line(&held.socket.to_string_lossy()),
        );
    }
    let mut text = columns(&table, Alignment::Left);
    for held in all {
        for file in &held.files {
            let path = file.file.to_string_lossy();
            let remedy = match file.changed {
                Some(true) => "; run: dmafile hold --replace",
                _ => "",
            };
            if let Some(note) = change(file, &one_line(&path)) {
                let _ = writeln!(text, "{}: {note}{remedy}", one_line(&held.name));
            }
        }
    }
    text
}

/// What is to be said about a file that may have changed on the disk; `name` is its name or path.
pub(crate) fn change(file: &HeldInfo, name: &str) -> Option<String> {
    match file.changed {
        Some(false) => None,
        Some(true) => Some(format!(
            "{name} has changed on the disk since it was loaded"
        )),
        None => Some(format!(
            "{name} may have changed on the disk: its file system does not answer"
        )),
    }
}

/// The first argument of the process that looks at the files for a holder.
pub(crate) const LOOKER: &str = "look-at-files";

/// `dmafile look-at-files`, which only [`run`] calls: stdin is a socket.
pub(crate) fn look() -> Result<u8, Failure> {
    let socket = std::io::stdin().as_fd().try_clone_to_owned();
    let socket = socket.map_err(|error| Failure::os("cannot read", "stdin", &error, ""))?;
    dmafile_hold::look_for_holder(socket);
    Ok(0)
}

/// The number of takers, the first of them as PID/USER, and the number of those that are not known.
fn takers(held: &Holding) -> String {
    const MOST: usize = 4;
    let some = held.some_takers.iter().take(MOST);
    let mut some: Vec<_> = some
        .map(|taker| format!("{}/{}", taker.pid, taker.uid))
        .collect();
    if held.takers > some.len() {
        some.push("...".to_string());
    }
    let mut text = match held.takers {
        0 => "0".to_string(),
        count => format!("{count} ({})", some.join(" ")),
    };
    if held.unknown_takers > 0 {
        // Writing to a String does not fail.
        let _ = write!(text, " + {} unknown", held.unknown_takers);
    }
    text
}
