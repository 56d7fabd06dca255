//! `{}`: COMMAND gets a path, in a private folder that a process removes after it.

use super::{
    Fault, Kind, Operation, Run, Seen, Tools, Which, args, describe, fault, nobody, nothing, reads,
};
use crate::action::Actor;
use crate::trace::Exit;
use crate::world::{Content, Trust, World};

pub fn all() -> Vec<Operation> {
    vec![Operation {
        name: "load-path",
        trusts: &[
            Trust::Own,
            Trust::Group,
            Trust::Parent,
            Trust::Sticky,
            Trust::Foreign,
        ],
        no_tmpfile: false,
        finals: &[],
        prepare: nothing,
        peers: nobody,
        command,
        script: reads,
        judge,
        again: None,
        second_ends: true,
        fails: false,
        leads: false,
        follows: false,
        weaves: false,
    }]
}

fn command(_: &Tools, world: &World, which: Which) -> Run {
    Run {
        env: vec![
            ("XDG_RUNTIME_DIR", world.dir()),
            ("TMPDIR", world.at("run")),
        ],
        ..Run::of(args![
            "load",
            "-q",
            which.source(world),
            "--",
            "/bin/cat",
            "{}"
        ])
    }
}

fn judge(seen: &mut Seen) -> Vec<Fault> {
    let mut faults = Vec::new();
    let out = &seen.log.out;
    if seen.exit == Exit::Status(0) && !seen.is_new(out) {
        let kind = match Content::of(out) {
            Some(Content::Evil | Content::Canary) => Kind::Foreign,
            _ => Kind::Incomplete,
        };
        if kind != Kind::Foreign || seen.actor == Actor::Other {
            faults.push(fault(kind, format!("COMMAND has read {}", describe(out))));
        }
    }
    // Killed before there is a process that removes the folder, it leaves one.
    if matches!(seen.exit, Exit::Status(_)) {
        faults.extend(seen.leftovers(|_| false));
    }
    faults
}
