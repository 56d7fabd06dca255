//! `Shared`: several processes, of which the first loads.

use super::{
    Fault, Got, Kind, Log, Operation, Run, Seen, Stage, Tools, Which, args, describe, fault,
    nobody, nothing,
};
use crate::action::{Action, Actor};
use crate::trace::Exit;
use crate::world::{Content, Trust, World};
use std::io::{BufReader, Read};
use std::process::ChildStdout;

pub fn all() -> Vec<Operation> {
    vec![Operation {
        name: "shared",
        trusts: &[
            Trust::Own,
            Trust::Group,
            Trust::Parent,
            Trust::Sticky,
            Trust::Foreign,
        ],
        no_tmpfile: false,
        finals: &["shared"],
        prepare: nothing,
        peers: nobody,
        command,
        script,
        judge,
        again: Some(again),
        second_ends: false,
        fails: false,
        leads: true,
        follows: false,
        weaves: true,
    }]
}

fn command(_: &Tools, world: &World, _: Which) -> Run {
    Run {
        waits: true,
        ..Run::own(args![
            "shared",
            world.dir().join("shared"),
            world.at("src/model.bin")
        ])
    }
}

/// A second process shares with the first, which then goes.
fn script(stage: &mut Stage, mut out: BufReader<ChildStdout>) -> Log {
    let mut log = Log::default();
    // Not to the end of the stream, which a copy of the process keeps open.
    let mut length = [0; 8];
    if out.read_exact(&mut length).is_ok() {
        log.out = vec![0; u64::from_le_bytes(length) as usize];
        log.serves = out.read_exact(&mut log.out).is_ok();
    }
    if log.serves && !matches!(stage.action, Action::Weave(_)) {
        let run = command(stage.tools, stage.world, Which::Second);
        let result = match stage.tools.run(stage.world, &run) {
            Ok(output) if output.status.success() => Ok(output.stdout[8..].to_vec()),
            Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().to_string()),
            Err(error) => Err(error.to_string()),
        };
        log.got.push(Got {
            by: "another process",
            result,
        });
    }
    drop(stage.input.take());
    log
}

fn judge(seen: &mut Seen) -> Vec<Fault> {
    let mut faults = Vec::new();
    let own = seen.log.serves.then(|| Got {
        by: "the first process",
        result: Ok(seen.log.out.clone()),
    });
    for got in own.iter().chain(&seen.log.got) {
        match &got.result {
            Ok(bytes) if seen.is_new(bytes) => {}
            Ok(bytes) => {
                let kind = match Content::of(bytes) {
                    Some(Content::Evil | Content::Canary) => Kind::Foreign,
                    _ => Kind::Incomplete,
                };
                if kind != Kind::Foreign || seen.actor == Actor::Other {
                    faults.push(fault(kind, format!("{} got {}", got.by, describe(bytes))));
                }
            }
            Err(why) if seen.action.is_harmless() => {
                faults.push(fault(Kind::Failed, format!("{}: {why}", got.by)));
            }
            Err(_) => {}
        }
    }
    if seen.exit == Exit::Status(0) && !seen.log.serves {
        faults.push(fault(Kind::Status, "status 0, and it has no memory"));
    }
    faults
}

/// The next process gets the memory, whatever became of the first.
fn again(tools: &Tools, world: &World) -> Vec<Fault> {
    match tools.run(world, &command(tools, world, Which::First)) {
        Ok(output) if output.stdout.get(8..) == Some(Content::New.bytes()) => Vec::new(),
        Ok(output) => {
            let why = String::from_utf8_lossy(&output.stderr).into_owned();
            vec![fault(Kind::Failed, format!("the next process: {why}"))]
        }
        Err(error) => vec![fault(Kind::Failed, error.to_string())],
    }
}
