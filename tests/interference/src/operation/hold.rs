//! `dmafile hold`, `take` and `release`

use super::{
    Fault, Got, Kind, Log, Operation, Peer, Run, Seen, Stage, Tools, Which, args, describe, fault,
    nobody, plants, reads,
};
use crate::action::{Action, Actor, Target, Verb};
use crate::trace::Exit;
use crate::world::{Content, GROUP, Trust, World};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::ChildStdout;

const ALL: &[Trust] = &[
    Trust::Own,
    Trust::Group,
    Trust::Parent,
    Trust::Sticky,
    Trust::Foreign,
];
const SOME: &[Trust] = &[Trust::Own, Trust::Group, Trust::Parent];

pub fn all() -> Vec<Operation> {
    let hold = |name, command| Operation {
        name,
        trusts: ALL,
        no_tmpfile: false,
        finals: &["m"],
        prepare: old_source,
        peers: nobody,
        command,
        script: serves,
        judge,
        again: Some(again),
        second_ends: false,
        fails: false,
        leads: false,
        follows: false,
        weaves: false,
    };
    vec![
        hold("hold", plain),
        Operation {
            finals: &["links", "links/model.bin", "links/.dmafile-hold"],
            again: Some(again_folder),
            ..hold("hold-folder", with_folder)
        },
        Operation {
            trusts: &[Trust::Own, Trust::Foreign],
            finals: &["model.bin", ".dmafile-hold"],
            again: None,
            ..hold("hold-folder-there", with_the_folder)
        },
        Operation {
            trusts: SOME,
            peers: one,
            ..hold("hold-replace", replace)
        },
        Operation {
            trusts: SOME,
            finals: &["m", "links"],
            peers: one_with_folder,
            again: Some(again_folder),
            ..hold("hold-replace-folder", replace_with_folder)
        },
        Operation {
            trusts: &[Trust::Own],
            prepare: full,
            peers: one,
            judge: judge_refused,
            again: None,
            fails: true,
            ..hold("hold-replace-refused", replace_refused)
        },
        Operation {
            trusts: &[Trust::Own],
            finals: &["m", "links"],
            script: replaced,
            judge: judge_replaced,
            again: None,
            ..hold("hold-replaced", old_with_folder)
        },
        Operation {
            trusts: SOME,
            peers: one_new,
            script: reads,
            judge: judge_take,
            again: None,
            second_ends: true,
            ..hold("take", take_fd)
        },
        Operation {
            trusts: SOME,
            peers: one_new,
            script: reads,
            judge: judge_take,
            again: None,
            second_ends: true,
            ..hold("take-path", take_path)
        },
        Operation {
            trusts: SOME,
            peers: one_new,
            script: reads,
            judge: judge_release,
            again: None,
            second_ends: true,
            ..hold("release", release)
        },
    ]
}

fn old_source(_: &Tools, world: &World) -> io::Result<()> {
    world.file("src/old.bin", Content::Old, 0o644)
}

/// A folder that a holder must refuse.
fn full(tools: &Tools, world: &World) -> io::Result<()> {
    old_source(tools, world)?;
    fs::create_dir(world.at("src/full"))?;
    world.file("src/full/keep", Content::Canary, 0o644)
}

fn socket(world: &World) -> PathBuf {
    world.dir().join("m")
}

fn links(world: &World) -> PathBuf {
    world.dir().join("links")
}

fn hold(world: &World, source: PathBuf) -> Run {
    Run::of(args![
        "hold",
        source,
        "--name",
        "m",
        "--socket",
        socket(world)
    ])
}

fn plain(_: &Tools, world: &World, which: Which) -> Run {
    let group = GROUP.to_string();
    hold(world, which.source(world)).and(args!["--group", group])
}

fn with_folder(_: &Tools, world: &World, which: Which) -> Run {
    // Where the folder may be, the socket may not: it has a place of its own.
    let at = world.at("run/m");
    let run = Run::of(args![
        "hold",
        which.source(world),
        "--name",
        "m",
        "--socket",
        at
    ]);
    run.and(args!["--folder", links(world)])
}

/// The folder exists, and may be another user's.
fn with_the_folder(_: &Tools, world: &World, which: Which) -> Run {
    let at = world.at("run/m");
    let run = Run::of(args![
        "hold",
        which.source(world),
        "--name",
        "m",
        "--socket",
        at
    ]);
    run.and(args!["--folder", world.work()])
}

fn replace(_: &Tools, world: &World, which: Which) -> Run {
    hold(world, which.source(world)).and(args!["--replace"])
}

fn replace_with_folder(tools: &Tools, world: &World, which: Which) -> Run {
    replace(tools, world, which).and(args!["--folder", links(world)])
}

fn replace_refused(tools: &Tools, world: &World, which: Which) -> Run {
    replace(tools, world, which).and(args!["--folder", world.at("src/full")])
}

fn old_with_folder(_: &Tools, world: &World, _: Which) -> Run {
    hold(world, world.at("src/model.bin")).and(args!["--folder", links(world)])
}

fn take(world: &World) -> Run {
    Run::of(args!["take", "m", "--socket", socket_of(world)])
}

/// Where the socket is: beside the folder if that could not have one.
fn socket_of(world: &World) -> PathBuf {
    if world.at("run/m").exists() {
        world.at("run/m")
    } else {
        socket(world)
    }
}

fn take_fd(_: &Tools, world: &World, _: Which) -> Run {
    take(world).and(args!["--", "/bin/sh", "-c", "exec cat <&$DMAFILE_FD"])
}

fn take_path(_: &Tools, world: &World, _: Which) -> Run {
    take(world).and(args!["--", "/bin/cat", "{}"])
}

pub fn release(_: &Tools, world: &World, _: Which) -> Run {
    Run::of(args!["release", "m", "--socket", socket_of(world)])
}

fn serving(tools: &Tools, world: &World, run: &Run) -> io::Result<Vec<Peer>> {
    let peer = tools.peer(world, run, Actor::Same)?;
    if peer.serves {
        Ok(vec![peer])
    } else {
        Err(io::Error::other(format!("no holder: {}", peer.why)))
    }
}

fn one(tools: &Tools, world: &World) -> io::Result<Vec<Peer>> {
    serving(tools, world, &hold(world, world.at("src/old.bin")))
}

fn one_with_folder(tools: &Tools, world: &World) -> io::Result<Vec<Peer>> {
    let run = hold(world, world.at("src/old.bin")).and(args!["--folder", links(world)]);
    serving(tools, world, &run)
}

fn one_new(tools: &Tools, world: &World) -> io::Result<Vec<Peer>> {
    serving(tools, world, &hold(world, world.at("src/model.bin")))
}

/// Takes as another process of root.
fn got(stage: &Stage) -> Got {
    let run = take(stage.world).and(args!["--", "/bin/sh", "-c", "exec cat <&$DMAFILE_FD"]);
    let result = match stage.tools.run(stage.world, &run) {
        Ok(output) if output.status.success() => Ok(output.stdout),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().to_string()),
        Err(error) => Err(error.to_string()),
    };
    Got { by: "take", result }
}

/// Reads the folder as a loader that knows nothing of it.
fn read(stage: &Stage) -> Option<Got> {
    let folder = if stage.world.at("run/m").exists() && !links(stage.world).exists() {
        stage.world.dir()
    } else {
        links(stage.world)
    };
    let path = folder.join("model.bin");
    if !folder.exists() {
        return None;
    }
    // A FIFO would keep us waiting.
    let is_file = fs::metadata(&path).is_ok_and(|found| found.is_file());
    let result = if is_file {
        fs::read(&path).map_err(|error| error.to_string())
    } else {
        Err("there is no file".to_string())
    };
    Some(Got {
        by: "a loader from the folder",
        result,
    })
}

fn line(out: &mut BufReader<ChildStdout>) -> bool {
    let mut line = String::new();
    out.read_line(&mut line).is_ok_and(|_| line.ends_with('\n'))
}

/// Takes from a holder as soon as it serves, twice, and releases it.
fn serves(stage: &mut Stage, mut out: BufReader<ChildStdout>) -> Log {
    let mut log = Log {
        serves: line(&mut out),
        ..Log::default()
    };
    if log.serves {
        log.got.push(got(stage));
        log.got.extend(read(stage));
        log.got.push(got(stage));
        let released = stage.tools.run(
            stage.world,
            &release(stage.tools, stage.world, Which::First),
        );
        let is_released = released.is_ok_and(|output| output.status.success());
        // It may have been another holder that was released. A second signal would change the status.
        let other =
            plants(stage.action) || stage.action.moves_folder() || stage.action == Action::Second;
        if !stage.action.ends_it() && (other || !is_released) {
            let _ = kill(Pid::from_raw(stage.pid), Signal::SIGTERM);
        }
    } else if !stage.peers.is_empty() {
        log.got.push(got(stage));
    }
    let _ = out.read_to_end(&mut log.out);
    log
}

/// Lets another holder replace the one that is stopped at its calls.
fn replaced(stage: &mut Stage, mut out: BufReader<ChildStdout>) -> Log {
    let mut log = Log {
        serves: line(&mut out),
        ..Log::default()
    };
    if !log.serves {
        return log;
    }
    log.got.push(got(stage));
    let run = hold(stage.world, stage.world.at("src/model.bin"));
    let run = run.and(args!["--replace", "--folder", links(stage.world)]);
    match stage.tools.peer(stage.world, &run, Actor::Same) {
        Ok(peer) => {
            let serves = peer.serves;
            if !serves && stage.action.is_harmless() {
                log.notes.push(fault(
                    Kind::Failed,
                    format!("the replacement: {}", peer.why),
                ));
            }
            stage.peers.push(peer);
            if !serves || plants(stage.action) || stage.action.moves_folder() {
                // Perhaps it was not reached.
                let _ = kill(Pid::from_raw(stage.pid), Signal::SIGTERM);
            }
            // Until the first one has ended.
            let _ = out.read_to_end(&mut log.out);
            if serves {
                log.got.push(got(stage));
                match read(stage) {
                    Some(got) => log.got.push(got),
                    None if stage.action.is_harmless() => {
                        let what = "the folder of the replacement is gone";
                        log.notes.push(fault(Kind::Lost, what));
                    }
                    None => {}
                }
            }
        }
        Err(error) => log.notes.push(fault(Kind::Failed, error.to_string())),
    }
    let _ = kill(Pid::from_raw(stage.pid), Signal::SIGTERM);
    let _ = out.read_to_end(&mut log.out);
    log
}

/// Whether the actor, as root, or in a folder that root should not have used, changed what others get.
fn judge_got(seen: &Seen, faults: &mut Vec<Fault>, may_be_old: bool) {
    for got in &seen.log.got {
        match &got.result {
            Ok(bytes) if seen.is_new(bytes) => {}
            Ok(bytes) if may_be_old && Content::of(bytes) == Some(Content::Old) => {}
            Ok(bytes)
                if Content::of(bytes) == Some(Content::Second) && seen.action == Action::Second => {
            }
            Ok(bytes) => {
                let kind = match Content::of(bytes) {
                    Some(Content::Evil | Content::Canary) => Kind::Foreign,
                    _ => Kind::Incomplete,
                };
                // The same user may put its own holder or file there.
                if kind != Kind::Foreign || seen.actor == Actor::Other {
                    faults.push(fault(kind, format!("{} got {}", got.by, describe(bytes))));
                }
            }
            Err(why) if seen.refuses(why) => {}
            Err(why) if seen.action.is_harmless() || !seen.acted => {
                faults.push(fault(Kind::Failed, format!("{}: {why}", got.by)));
            }
            Err(_) => {}
        }
    }
}

fn judge(seen: &mut Seen) -> Vec<Fault> {
    let mut faults = Vec::new();
    let replaces = !seen.peers.is_empty();
    judge_got(seen, &mut faults, replaces && !seen.log.serves);
    faults.extend(seen.log.notes.iter().cloned());
    if seen.log.serves && matches!(seen.exit, Exit::Status(code) if code != 0) {
        let what = format!("{} after it served: {}", seen.exit, seen.errors.trim());
        faults.push(fault(Kind::Status, what));
    }
    if !seen.log.serves
        && seen.exit == Exit::Status(0)
        && !seen.action.ends_it()
        && seen.action != Action::Release
    {
        faults.push(fault(Kind::Status, "status 0, and it never served"));
    }
    let killed = matches!(seen.exit, Exit::Signal(_) | Exit::Hangs);
    if replaces && !killed {
        judge_peers(seen, &mut faults);
    }
    if !killed && seen.action != Action::Second {
        // That of the other holder.
        let stays = seen.peers.iter_mut().any(Peer::is_alive);
        let is_there = |name: &str| stays && (name == "m" || name == "links");
        faults.extend(seen.leftovers(is_there));
    }
    faults
}

/// The holder that should have been replaced, or should still serve.
fn judge_peers(seen: &mut Seen, faults: &mut Vec<Fault>) {
    let moved = seen.action.moves_folder() || plants(seen.action);
    let serves = seen.log.serves;
    let released = seen.action == Action::Release;
    let trust = seen.world.trust;
    let refused = |why: &str| trust != Trust::Own && why.contains("EPERM");
    let Some(peer) = seen.peers.first_mut() else {
        return;
    };
    if serves && !moved && !peer.ends() {
        faults.push(fault(
            Kind::Status,
            "it serves, and the other holder was not ended",
        ));
    }
    let last = seen.log.got.last().map(|got| &got.result);
    let taken = last.is_some_and(|got| got.as_ref().err().is_none_or(|why| refused(why)));
    if !serves && !moved && !released && peer.is_alive() && !taken {
        faults.push(fault(
            Kind::Lost,
            "the old holder runs, and nobody can take from it",
        ));
    }
    // With status 0 it has replaced the other one, and then got the signal.
    let signalled = seen.action.ends_it() && seen.exit == Exit::Status(0);
    if !serves && !moved && !released && !signalled && !taken && !peer.is_alive() {
        faults.push(fault(
            Kind::Lost,
            "neither the old nor the new holder serves",
        ));
    }
}

/// It was replaced by another one, which serves now.
fn judge_replaced(seen: &mut Seen) -> Vec<Fault> {
    let mut faults = Vec::new();
    judge_got(seen, &mut faults, false);
    faults.extend(seen.log.notes.iter().cloned());
    if seen.log.serves && matches!(seen.exit, Exit::Status(code) if code != 0) {
        let what = format!("{} after it served: {}", seen.exit, seen.errors.trim());
        faults.push(fault(Kind::Status, what));
    }
    let serves = seen.peers.iter_mut().any(Peer::is_alive);
    if serves && matches!(seen.exit, Exit::Status(_)) {
        faults.extend(seen.leftovers(|name| name == "m" || name == "links"));
    }
    faults
}

/// It must fail, and the old one must serve on.
fn judge_refused(seen: &mut Seen) -> Vec<Fault> {
    let mut faults = Vec::new();
    judge_got(seen, &mut faults, true);
    if seen.log.serves {
        faults.push(fault(Kind::Status, "it serves with a folder of another"));
    } else if !matches!(seen.exit, Exit::Signal(_)) {
        judge_peers(seen, &mut faults);
    }
    faults
}

fn judge_take(seen: &mut Seen) -> Vec<Fault> {
    let mut faults = Vec::new();
    let out = &seen.log.out;
    // COMMAND has read from what the same user has changed.
    if seen.exit == Exit::Status(0) && !seen.is_new(out) {
        let kind = match Content::of(out) {
            Some(Content::Evil | Content::Canary) => Kind::Foreign,
            _ => Kind::Incomplete,
        };
        if kind != Kind::Foreign || seen.actor == Actor::Other {
            faults.push(fault(kind, format!("COMMAND has read {}", describe(out))));
        }
    }
    faults
}

fn judge_release(seen: &mut Seen) -> Vec<Fault> {
    let moved = seen.action.moves_folder() || plants(seen.action);
    let mut faults = Vec::new();
    if let Some(peer) = seen.peers.first_mut()
        && seen.exit == Exit::Status(0)
        && !moved
        && !peer.ends()
    {
        faults.push(fault(
            Kind::Status,
            "status 0, and the holder has not ended",
        ));
    }
    faults
}

/// The next holder with the same place.
fn again(tools: &Tools, world: &World) -> Vec<Fault> {
    start_again(tools, world, &hold(world, world.at("src/model.bin")))
}

fn again_folder(tools: &Tools, world: &World) -> Vec<Fault> {
    let run = if world.at("run/m").exists() {
        with_folder(tools, world, Which::First)
    } else {
        old_with_folder(tools, world, Which::First)
    };
    start_again(tools, world, &run)
}

fn start_again(tools: &Tools, world: &World, run: &Run) -> Vec<Fault> {
    // One that was to be replaced may still serve.
    let _ = tools.run(world, &release(tools, world, Which::First));
    let mut faults = Vec::new();
    match tools.peer(world, run, Actor::Same) {
        Ok(mut peer) if peer.serves => {
            let released = tools.run(world, &release(tools, world, Which::First));
            if !released.is_ok_and(|output| output.status.success()) || !peer.ends() {
                faults.push(fault(Kind::Failed, "the next holder cannot be released"));
            }
        }
        Ok(peer) => faults.push(fault(
            Kind::Failed,
            format!("the next holder: {}", peer.why),
        )),
        Err(error) => faults.push(fault(Kind::Failed, error.to_string())),
    }
    for name in ["m", "links"] {
        if fs::symlink_metadata(world.work().join(name)).is_ok() {
            faults.push(fault(
                Kind::Leftover,
                format!("{name}, after the next holder"),
            ));
        }
    }
    faults
}

/// A holder of the other user, whose socket an action can put in place of another.
pub fn evil(
    tools: &Tools,
    world: &World,
    action: Action,
    actor: Actor,
) -> io::Result<Option<Peer>> {
    let evil = matches!(
        action,
        Action::Name(Verb::Evil, Target::Here | Target::Final | Target::Fresh)
    );
    if !evil || actor != Actor::Other {
        return Ok(None);
    }
    let run = Run::of(args![
        "hold",
        world.at("actor/evil.bin"),
        "--name",
        "m",
        "--socket",
        world.at("actor/socket"),
        "--mode",
        "666"
    ]);
    tools.peer(world, &run, Actor::Other).map(Some)
}
