//! `dmafile save` of several sources, and `dmafile load` of them.

use super::{
    Fault, Kind, Operation, Run, Seen, There, Tools, Which, args, describe, fault, is_new, nobody,
    nothing, plants, reads, there,
};
use crate::action::{Action, Target};
use crate::trace::Exit;
use crate::world::{Content, Trust, World};
use std::collections::BTreeSet;
use std::io;
use std::path::Path;

const TRUSTS: &[Trust] = &[Trust::Own, Trust::Group, Trust::Parent, Trust::Foreign];
const MANIFEST: &str = "dmafile-snapshot.json";

pub fn all() -> Vec<Operation> {
    let snapshot = |name, no_tmpfile, prepare| Operation {
        name,
        trusts: TRUSTS,
        no_tmpfile,
        finals: &[MANIFEST, "one.2.dmafile"],
        prepare,
        peers: nobody,
        command,
        script: reads,
        judge,
        again: Some(again),
        second_ends: true,
        fails: false,
        leads: false,
        follows: false,
        weaves: true,
    };
    vec![
        snapshot("snapshot-new", false, more),
        snapshot("snapshot-over", false, old),
        snapshot("snapshot-named", true, old),
        Operation {
            prepare: old,
            command: load,
            judge: judge_load,
            again: None,
            weaves: false,
            ..snapshot("snapshot-load", false, nothing)
        },
    ]
}

fn more(_: &Tools, world: &World) -> io::Result<()> {
    world.file("src/more.bin", Content::NewMore, 0o644)
}

fn old(tools: &Tools, world: &World) -> io::Result<()> {
    more(tools, world)?;
    world.file("src/old.bin", Content::Old, 0o644)?;
    world.file("src/more-old.bin", Content::OldMore, 0o644)?;
    tools.done(
        world,
        &save(world, world.work().as_path(), ["old.bin", "more-old.bin"]),
    )
}

fn save(world: &World, to: &Path, sources: [&str; 2]) -> Run {
    let source =
        |name: &str, called: &str| format!("{}={called}", world.at("src").join(name).display());
    Run::of(args![
        "save",
        "-q",
        source(sources[0], "one"),
        source(sources[1], "two"),
        to
    ])
}

fn command(_: &Tools, world: &World, which: Which) -> Run {
    let one = match which {
        Which::First => "model.bin",
        Which::Second => "second.bin",
    };
    save(world, &world.dir(), [one, "more.bin"])
}

fn load(_: &Tools, world: &World, _: Which) -> Run {
    let script = "IFS=,; for fd in $DMAFILE_FD; do cat /proc/self/fd/$fd; done";
    Run::of(args![
        "load",
        "-q",
        world.dir(),
        "--",
        "/bin/sh",
        "-c",
        script
    ])
}

/// A folder's valid snapshot.
#[derive(PartialEq, Eq)]
enum Valid {
    None,
    Old,
    New,
    Second,
    /// It cannot be loaded, for this reason.
    Broken(String),
}

fn valid(action: Action, home: &Path, files: &mut BTreeSet<String>) -> Valid {
    let text = match there(&home.join(MANIFEST)) {
        There::Nothing => return Valid::None,
        There::Other(what) => return Valid::Broken(format!("the manifest is {what}")),
        There::File(text, _) => text,
    };
    let json: serde_json::Value = match serde_json::from_slice(&text) {
        Ok(json) => json,
        Err(error) => return Valid::Broken(format!("the manifest, {}: {error}", describe(&text))),
    };
    let mut contents = Vec::new();
    for source in json["sources"].as_array().into_iter().flatten() {
        let file = source["file"].as_str().unwrap_or_default();
        files.insert(file.to_string());
        match there(&home.join(file)) {
            There::File(bytes, _) => contents.push(bytes),
            There::Nothing => return Valid::Broken(format!("{file} is gone")),
            There::Other(what) => return Valid::Broken(format!("{file} is {what}")),
        }
    }
    let [one, two] = &contents[..] else {
        return Valid::Broken(format!("it has {} sources", contents.len()));
    };
    match (Content::of(one), Content::of(two)) {
        (Some(Content::Old), Some(Content::OldMore)) => Valid::Old,
        (Some(Content::Second), Some(Content::NewMore)) => Valid::Second,
        (_, Some(Content::NewMore)) if is_new(action, one) => Valid::New,
        _ => Valid::Broken(format!("it has {} and {}", describe(one), describe(two))),
    }
}

fn judge(seen: &mut Seen) -> Vec<Fault> {
    let mut faults = Vec::new();
    let (mut has_old, mut has_new, mut has_second) = (false, false, false);
    let mut files = BTreeSet::from([MANIFEST.to_string()]);
    for home in seen.world.homes() {
        match valid(seen.action, &home, &mut files) {
            Valid::None => {}
            Valid::Old => has_old = true,
            Valid::New => has_new = true,
            Valid::Second => has_second = true,
            // The actor did that.
            Valid::Broken(_) if plants(seen.action) => {}
            Valid::Broken(why) => {
                let home = home.file_name().unwrap_or_default().to_string_lossy();
                let what = format!("the snapshot in {home}: {why}; {}", seen.exit);
                faults.push(fault(Kind::Lost, what));
            }
        }
    }
    let names = seen.touches_names() || seen.replaces_folder();
    let done = seen.exit == Exit::Status(0);
    let second = seen.second == Some(Exit::Status(0));
    if seen.world.at("src/old.bin").exists() && !names && !(has_old || has_new || has_second) {
        faults.push(fault(Kind::Lost, format!("both snapshots; {}", seen.exit)));
    }
    let is_there = has_new || second && has_second;
    if done && !names && !is_there {
        faults.push(fault(
            Kind::Status,
            "status 0, and the new snapshot is nowhere",
        ));
    }
    let killed = matches!(seen.exit, Exit::Signal(libc::SIGKILL) | Exit::Hangs);
    if !done && !killed && has_new {
        let what = format!(
            "{}, and the new snapshot is valid: {}",
            seen.exit,
            seen.errors.trim()
        );
        faults.push(fault(Kind::Status, what));
    }
    if !killed {
        faults.extend(seen.leftovers(|name| files.contains(name)));
    }
    faults
}

fn again(tools: &Tools, world: &World) -> Vec<Fault> {
    let run = save(world, &world.work(), ["model.bin", "more.bin"]);
    match tools.run(world, &run) {
        Ok(output) if output.status.success() => {}
        other => return vec![fault(Kind::Failed, format!("the next snapshot: {other:?}"))],
    }
    let mut files = BTreeSet::from([MANIFEST.to_string()]);
    let mut faults = Vec::new();
    if valid(Action::None, &world.work(), &mut files) != Valid::New {
        faults.push(fault(Kind::Lost, "the next snapshot is not there"));
    }
    for entry in std::fs::read_dir(world.work())
        .into_iter()
        .flatten()
        .flatten()
    {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !files.contains(&name) {
            faults.push(fault(
                Kind::Leftover,
                format!("{name}, after the next snapshot"),
            ));
        }
    }
    faults
}

fn judge_load(seen: &mut Seen) -> Vec<Fault> {
    let mut faults = Vec::new();
    let whole = [Content::Old.bytes(), Content::OldMore.bytes()].concat();
    let out = &seen.log.out;
    let other = matches!(
        seen.action,
        Action::Name(_, Target::Folder | Target::Final | Target::Here)
    );
    if seen.exit == Exit::Status(0) && *out != whole {
        let what = format!("COMMAND has read {}", describe(out));
        faults.push(fault(
            if other {
                Kind::Foreign
            } else {
                Kind::Incomplete
            },
            what,
        ));
    }
    faults
}
