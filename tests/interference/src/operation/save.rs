//! `dmafile save`

use super::{
    Fault, Kind, Operation, Run, Seen, There, Tools, Which, args, describe, fault, nobody, nothing,
    plants, reads, there,
};
use crate::action::{Action, Actor, Target, Verb};
use crate::trace::Exit;
use crate::world::{Content, Trust, World};
use std::fs;
use std::io;

const TRUSTS: &[Trust] = &[
    Trust::Own,
    Trust::Group,
    Trust::Parent,
    Trust::Sticky,
    Trust::Foreign,
];

pub fn all() -> Vec<Operation> {
    let save = |name, no_tmpfile, prepare, command| Operation {
        name,
        trusts: TRUSTS,
        no_tmpfile,
        finals: &["out"],
        prepare,
        peers: nobody,
        command,
        script: reads,
        judge,
        again: Some(again),
        second_ends: true,
        fails: false,
        leads: false,
        follows: true,
        weaves: true,
    };
    vec![
        save("save-new", false, nothing, command),
        save("save-over", false, old, command),
        save("save-new-named", true, nothing, command),
        save("save-over-named", true, old, command),
        save("save-pipe", false, old, from_pipe),
        Operation {
            trusts: &[Trust::Own],
            judge: judge_inside,
            again: None,
            weaves: false,
            ..save("save-inside", false, old, inside)
        },
    ]
}

/// A secret file, which the save replaces.
fn old(_: &Tools, world: &World) -> io::Result<()> {
    world.file("src/old.bin", Content::Old, 0o644)?;
    world.file("top/work/out", Content::Old, 0o600)
}

fn command(_: &Tools, world: &World, which: Which) -> Run {
    Run::of(args![
        "save",
        "-q",
        which.source(world),
        world.dir().join("out")
    ])
}

fn from_pipe(_: &Tools, world: &World, which: Which) -> Run {
    Run {
        input: Some(which.source(world)),
        ..Run::of(args!["save", "-q", "-", world.dir().join("out")])
    }
}

fn inside(_: &Tools, world: &World, which: Which) -> Run {
    let out = world.dir().join("out");
    Run::of(args![
        "save",
        "-q",
        which.source(world),
        "--offset",
        "0",
        out
    ])
}

fn judge(seen: &mut Seen) -> Vec<Fault> {
    let mut faults = Vec::new();
    let two = seen.second.is_some();
    let names = seen.touches_names() || seen.replaces_folder();
    let (mut has_new, mut has_old, mut has_second, mut had_old) = (false, false, false, false);
    for home in seen.world.homes() {
        let path = home.join("out");
        match there(&path) {
            There::Nothing => {}
            There::Other(_) if plants(seen.action) => {}
            There::Other(what) => faults.push(fault(Kind::Incomplete, format!("out is {what}"))),
            There::File(bytes, mode) => {
                let content = Content::of(&bytes);
                let planted =
                    plants(seen.action) && matches!(content, Some(Content::Evil | Content::Canary));
                if seen.is_new(&bytes) {
                    has_new = true;
                } else if content == Some(Content::Old) {
                    has_old = true;
                } else if content == Some(Content::Second) && two {
                    has_second = true;
                } else if truncated(seen, &bytes) || planted {
                    continue;
                } else {
                    let what = format!("out has {}, after {}", describe(&bytes), seen.exit);
                    faults.push(fault(Kind::Incomplete, what));
                    continue;
                }
                if is_over(seen) && !names && !seen.action.moves_folder() && mode != 0o600 {
                    had_old = true;
                    let what = format!("out has mode {mode:o}, the old file had 600");
                    faults.push(fault(Kind::Leak, what));
                }
            }
        }
    }
    had_old |= is_over(seen);
    let done = seen.exit == Exit::Status(0);
    let second_done = seen.second == Some(Exit::Status(0));
    let is_there = has_new || second_done && has_second;
    if done && !is_there && !names {
        faults.push(fault(Kind::Status, "status 0, and the new file is nowhere"));
    }
    if second_done && !has_second && !(done && has_new) {
        faults.push(fault(
            Kind::Status,
            "status 0 of the second save, and its file is nowhere",
        ));
    }
    let ended = seen.exit == Exit::Signal(libc::SIGKILL) || seen.exit == Exit::Hangs;
    if !done && !ended && has_new {
        let what = format!(
            "{}, and the new file is in place: {}",
            seen.exit,
            seen.errors.trim()
        );
        faults.push(fault(Kind::Status, what));
    }
    if had_old && !(has_new || has_old || has_second) && !names {
        faults.push(fault(
            Kind::Lost,
            "neither the old nor the new file is there",
        ));
    }
    let killed = seen.exit == Exit::Signal(libc::SIGKILL);
    faults.extend(
        seen.leftovers(|name| name == "out" || (killed && name.starts_with(".out.dmafile-"))),
    );
    faults
}

fn is_over(seen: &Seen) -> bool {
    seen.world.at("src/old.bin").exists()
}

/// Whether the actor has truncated it.
fn truncated(seen: &Seen, bytes: &[u8]) -> bool {
    matches!(seen.action, Action::Name(Verb::Truncate, _)) && bytes.is_empty()
}

fn again(tools: &Tools, world: &World) -> Vec<Fault> {
    // The folder may have been renamed.
    let output = match tools.run(world, &command(tools, world, Which::First)) {
        Ok(output) => output,
        Err(error) => return vec![fault(Kind::Failed, error.to_string())],
    };
    let mut faults = Vec::new();
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr).into_owned();
        faults.push(fault(Kind::Failed, format!("the next save: {why}")));
    }
    for entry in fs::read_dir(world.work()).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name != "out" {
            faults.push(fault(
                Kind::Leftover,
                format!("{name}, after the next save"),
            ));
        }
    }
    faults
}

/// In place it is not atomic, but touches nothing else.
fn judge_inside(seen: &mut Seen) -> Vec<Fault> {
    let mut faults = Vec::new();
    let (old, new) = (Content::Old.bytes(), Content::New.bytes());
    let cut = seen.action == Action::SourceTruncated;
    let mut has_new = false;
    for home in seen.world.homes() {
        if let There::File(bytes, _) = there(&home.join("out")) {
            has_new |= seen.is_new(&bytes);
            let second = Content::Second.bytes();
            let known = (0..bytes.len()).all(|at| {
                [old, new, second, Content::Changed.bytes()]
                    .iter()
                    .any(|content| content.get(at) == Some(&bytes[at]))
                    // Reserved and not written yet, or a hole where the source ends now.
                    || (at >= old.len() || cut) && bytes[at] == 0
            });
            if !known && seen.actor == Actor::Same {
                faults.push(fault(
                    Kind::Incomplete,
                    format!("out has {}", describe(&bytes)),
                ));
            }
        }
    }
    let names = seen.touches_names() || seen.replaces_folder();
    let two = seen.second.is_some();
    if seen.exit == Exit::Status(0) && !has_new && !names && !two && !cut {
        faults.push(fault(Kind::Status, "status 0, and the bytes are nowhere"));
    }
    if matches!(seen.action, Action::Name(_, Target::Here | Target::Final)) {
        return faults;
    }
    faults.extend(seen.leftovers(|name| name == "out"));
    faults
}
