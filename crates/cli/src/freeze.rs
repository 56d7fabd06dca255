//! `dmafile freeze` and `dmafile thaw`

use crate::Failure;
use crate::args::{FreezeArgs, ThawArgs};
use crate::output::{write_json, write_stdout};
use crate::signals::{interruptible, pass_on};
use dmafile::CancelToken;
use dmafile::internal::one_line;
use dmafile_freeze::{Freeze, Frozen, Thaw};
use indicatif::BinaryBytes;
use std::fmt::Write;

pub(crate) fn freeze(args: &FreezeArgs) -> Result<u8, Failure> {
    let token = CancelToken::new();
    interruptible(&token)?;
    let (to, pids) = args.words.split_last().expect("there are two");
    let pid = |word: &std::ffi::OsString| {
        let text = word.to_string_lossy();
        let pid = text.parse::<u32>().ok().filter(|pid| *pid > 0);
        pid.ok_or_else(|| Failure::usage(&format!("'{}' is no process ID", one_line(&text))))
    };
    let pids = pids.iter().map(pid).collect::<Result<Vec<_>, _>>()?;
    let mut freeze = Freeze::of(pids).to(to).options(&args.options).cancel(token);
    for socket in &args.socket {
        freeze = freeze.socket(socket);
    }
    let frozen = freeze.leave_running(args.leave_running).run()?;
    if args.json {
        return write_json(&frozen);
    }
    write_stdout(text(&frozen).as_bytes())
}

/// What is in the images, and what is not.
fn text(frozen: &Frozen) -> String {
    let mut text = format!(
        "frozen to {}: {} of private memory and state, {} in {} shared objects",
        one_line(&frozen.to.to_string_lossy()),
        BinaryBytes(frozen.bytes_criu),
        BinaryBytes(frozen.bytes_memory),
        frozen.objects,
    );
    if frozen.bytes_held > 0 {
        let holds: Vec<_> = frozen.holds.iter().map(|name| one_line(name)).collect();
        // Writing to a String does not fail.
        let _ = write!(
            text,
            "; {} stay in {}",
            BinaryBytes(frozen.bytes_held),
            holds.join(", ")
        );
    }
    text.push('\n');
    text
}

pub(crate) fn thaw(args: &ThawArgs) -> Result<u8, Failure> {
    let token = CancelToken::new();
    let handled = interruptible(&token)?;
    let thaw = Thaw::of(&args.folder).options(&args.options).cancel(token);
    let thawed = thaw.run()?;
    if let Some(path) = &args.pidfile {
        let pids: String = thawed.pids().iter().map(|pid| format!("{pid}\n")).collect();
        let place = one_line(&path.to_string_lossy());
        std::fs::write(path, pids)
            .map_err(|error| Failure::os("cannot write", &place, &error, ""))?;
    }
    if args.detach {
        return Ok(0);
    }
    pass_on(thawed.roots(), handled)?;
    Ok(u8::try_from(thawed.wait()).unwrap_or(1))
}
