//! `dmafile take`

use crate::args::TakeArgs;
use crate::command::{self, Named, Others, Shape, Variable, become_command, wants_path};
use crate::hold::change;
use crate::load::interrupted;
use crate::output::{Text, write_wanted_json};
use crate::signals::interruptible;
use crate::snapshot::inherited;
use crate::text::columns;
use crate::{Failure, Launcher};
use dmafile::CancelToken;
use dmafile::internal::{is_hidden, one_line};
use dmafile_hold::{Held, HeldFile};
use indicatif::BinaryBytes;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::fmt::Write;
use std::path::PathBuf;
use tabwriter::Alignment;

pub(crate) fn run(args: &TakeArgs, launcher: &Launcher) -> Result<u8, Failure> {
    let deliver = !args.command.is_empty();
    if deliver && matches!(args.json, Some(None)) {
        return Err(Failure::usage(
            "--json needs a PATH with COMMAND, whose stdout it would mix with: --json=PATH",
        ));
    }
    if wants_path(&args.command) {
        command::this_process()?;
    }
    let token = CancelToken::new();
    interruptible(&token)?;
    let mut take = Held::take(&args.name).cancel(token.clone());
    if let Some(socket) = &args.socket {
        take = take.socket(socket);
    }
    if let Some(wait) = args.wait {
        take = take.wait(wait);
    }
    let held = take.run()?;
    let notes = if args.quiet {
        Text::Nowhere
    } else {
        Text::Stderr
    };
    notes.print(&remarks(&held))?;
    write_wanted_json(&args.json, &object(&held))?;
    if deliver && token.is_cancelled() {
        return Err(interrupted());
    }
    if deliver {
        return Err(exec(args, held, launcher)?);
    }
    if args.quiet || args.json.is_some() {
        Ok(0)
    } else {
        Text::Stdout.print(&text(&held)).map(|()| 0)
    }
}

/// Remarks for the user.
fn remarks(held: &Held) -> String {
    let mut text = String::new();
    for HeldFile { info, huge, .. } in held.files() {
        let name = one_line(&info.name);
        // Writing to a String does not fail.
        if let Some(note) = change(info, &name) {
            let _ = writeln!(text, "dmafile: note: {note}");
        }
        if *huge == Some(false) {
            let _ = writeln!(
                text,
                "dmafile: note: the huge pages of {name} are mapped as small ones here"
            );
        }
    }
    text
}

fn object(held: &Held) -> Value {
    let (pid, uid) = held.holder();
    let files = held.files().iter();
    let file = |file: &HeldFile| {
        let mut object = json!(file.info);
        object["huge"] = json!(file.huge);
        object
    };
    json!({
        "name": held.name(),
        "socket": held.socket().to_string_lossy(),
        "holder": {"pid": pid, "uid": uid},
        "files": files.map(file).collect::<Vec<_>>(),
    })
}

fn text(held: &Held) -> String {
    let mut table = String::from("NAME\tBYTES\tMEMORY\tPAGES\tSEALED\tFROM\n");
    for HeldFile { info, .. } in held.files() {
        let _ = writeln!(
            table,
            "{}\t{}\t{}\t{}\t{}\t{}",
            one_line(&info.name),
            BinaryBytes(info.bytes),
            one_line(&info.kind.to_string()),
            one_line(&info.pages),
            if info.sealed { "yes" } else { "no" },
            one_line(&info.file.to_string_lossy()),
        );
    }
    columns(&table, Alignment::Left)
}

/// Execs COMMAND, which inherits the memory; returns only on failure.
fn exec(args: &TakeArgs, held: Held, launcher: &Launcher) -> Result<Failure, Failure> {
    // COMMAND is the same process.
    held.count_until_exit();
    let command = &args.command;
    // Only for a path: the folder of the originals may be on a file system that does not answer.
    let shape = wants_path(command).then(|| shape(&held));
    let named = held.into_files().into_iter().map(|file| Named {
        name: file.info.file_name(),
        buffer: file.buffer,
    });
    let named: Vec<_> = named.collect();
    if let Some(shape) = shape {
        return command::hand_over_by_path(launcher, command, named, shape);
    }
    let mut variables = vec![command::names(
        named.iter().map(|one| one.name.as_os_str()),
    )?];
    variables.extend(command::ranges(named.iter().map(|one| &one.buffer)));
    let single = named.len() == 1 && named[0].buffer.dma_bufs().is_empty();
    let mut fds = Vec::new();
    for one in named {
        fds.push(inherited(&one.name.to_string_lossy(), one.buffer)?);
    }
    variables.push((Variable::Fd, command::numbers(&fds)));
    variables.extend(command::path_variable(single, &fds));
    Ok(become_command(command, variables))
}

/// What a path refers to: the file, or a folder with all of them and links to what is next to the originals.
/// The links are made only if the holder runs as this user or root.
fn shape(held: &Held) -> Shape {
    let files = held.files();
    if files.len() == 1 {
        return Shape::File;
    }
    let own = rustix::process::geteuid().as_raw();
    let trusted = [0, own].contains(&held.holder().1);
    let mut folders: Vec<_> = files.iter().map(|file| file.info.file.parent()).collect();
    folders.dedup();
    let others = match &folders[..] {
        [Some(folder)] if trusted => {
            let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
            let is_other = |path: &PathBuf| {
                !path.file_name().is_some_and(is_hidden)
                    && files
                        .iter()
                        .all(|file| path.file_name() != Some(&*file.info.file_name()))
            };
            entries.map(|entry| entry.path()).filter(is_other).collect()
        }
        _ => Vec::new(),
    };
    Shape::Folder {
        name: OsString::from(held.name()),
        others: Others {
            links: others,
            files: Vec::new(),
        },
    }
}
