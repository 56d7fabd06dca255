//! The rooms of the engine (folders and top files of `src`) use each other downwards only, and no
//! more than is written here.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Each room and the rooms it may use, which all stand above it in this list: so there is no circle.
const ROOMS: &[(&str, &[&str])] = &[
    // The ground: the kernel, texts, failures, what a caller holds of a load, why something was decided.
    ("sys", &[]),
    ("message", &[]),
    ("error", &["message"]),
    ("control", &[]),
    ("sync", &[]),
    ("reasons", &["message", "sync"]),
    ("device", &["error", "message", "sys"]),
    // What is asked for, and what it is asked of.
    ("options", &["device", "error", "message", "sys"]),
    ("request", &["error", "message", "options"]),
    ("source", &["error", "sync", "sys"]),
    ("format", &["error", "sys"]),
    ("exporter", &["error", "message", "options", "sys"]),
    ("verify", &["error", "message", "source", "sys"]),
    // What flows through a transfer.
    ("flow", &["control", "error", "sync", "sys"]),
    // Look.
    (
        "facts",
        &[
            "error", "exporter", "message", "options", "reasons", "request", "source", "sys",
        ],
    ),
    // Decide.
    (
        "plan",
        &[
            "error", "exporter", "facts", "message", "options", "reasons", "request",
        ],
    ),
    // Make and move: memory and methods know nothing of each other.
    (
        "buffer",
        &[
            "device", "error", "exporter", "message", "options", "plan", "reasons", "sync", "sys",
        ],
    ),
    (
        "method",
        &[
            "control", "error", "exporter", "flow", "message", "options", "plan", "source", "sync",
            "sys",
        ],
    ),
    // Where bytes go that do not stay in memory.
    ("sink", &["device", "error", "message", "sync", "sys"]),
    (
        "transfer",
        &[
            "buffer", "control", "error", "facts", "flow", "message", "method", "options", "plan",
            "reasons", "sink", "source", "sync", "sys", "verify",
        ],
    ),
    // All of it.
    (
        "load",
        &[
            "buffer", "control", "error", "exporter", "facts", "flow", "message", "options",
            "plan", "reasons", "request", "sink", "source", "transfer", "verify",
        ],
    ),
    (
        "save",
        &[
            "control", "error", "exporter", "facts", "flow", "message", "method", "options",
            "plan", "reasons", "request", "source", "sync", "sys", "verify",
        ],
    ),
    (
        "record",
        &["error", "facts", "options", "save", "sync", "sys"],
    ),
    (
        "model",
        &[
            "buffer", "error", "format", "load", "message", "options", "request", "source", "sys",
            "verify",
        ],
    ),
    (
        "snapshot",
        &[
            "buffer", "control", "error", "flow", "load", "message", "options", "plan", "reasons",
            "request", "save", "source", "sync", "sys", "verify",
        ],
    ),
    (
        "hold",
        &[
            "buffer", "control", "error", "load", "message", "model", "options", "request",
            "source", "sys", "verify",
        ],
    ),
    (
        "inspect",
        &[
            "control", "device", "error", "exporter", "facts", "options", "plan", "sys",
        ],
    ),
];

/// What a reader sees of a file: no comments, no tests.
fn code_of(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
    let lines = text.lines().map(str::trim_start);
    let code = lines.filter(|line| !line.starts_with("//"));
    code.collect::<Vec<_>>().join("\n")
}

fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => files.extend(files_below(&path)),
            false => files.push(path),
        }
    }
    files
}

/// What follows each `crate::`: the name of a room, or of what the crate's root shows.
fn named_in(code: &str) -> BTreeSet<String> {
    let word = |text: &str| {
        let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
        text[..end.unwrap_or(text.len())].to_string()
    };
    code.match_indices("crate::")
        .map(|(at, found)| word(&code[at + found.len()..]))
        .collect()
}

/// Each room and what it uses of others.
fn arrows() -> BTreeMap<String, BTreeSet<String>> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut arrows = BTreeMap::<String, BTreeSet<String>>::new();
    for path in files_below(&src) {
        let inside = path.strip_prefix(&src).unwrap();
        let first = inside.iter().next().unwrap().to_str().unwrap();
        let room = first.trim_end_matches(".rs").to_string();
        let is_tests = path.file_name().is_some_and(|name| name == "tests.rs");
        if room == "lib" || is_tests {
            continue;
        }
        let code = code_of(&path);
        // A file of the root or of a room's top: its `super` is the crate, which shows all rooms.
        let is_top =
            inside.iter().count() == 1 || inside.ends_with(Path::new(&room).join("mod.rs"));
        let climbs = if is_top { "super::" } else { "super::super::" };
        assert!(!code.contains(climbs), "{}: {climbs}", inside.display());
        let mut used = named_in(&code);
        used.remove(&room);
        arrows.entry(room).or_default().extend(used);
    }
    arrows
}

#[test]
fn rooms_use_only_what_the_list_allows() {
    let allowed: BTreeMap<_, _> = ROOMS.iter().copied().collect();
    for (room, used) in arrows() {
        let allowed = allowed.get(room.as_str());
        let allowed = allowed.unwrap_or_else(|| panic!("{room} is not in the list"));
        for other in used {
            assert!(
                allowed.contains(&other.as_str()),
                "engine/src/{room} uses crate::{other}, which the list does not allow"
            );
        }
    }
}

#[test]
fn the_list_has_no_circle_and_nothing_too_much() {
    let arrows = arrows();
    let mut above = BTreeSet::new();
    for (room, allowed) in ROOMS {
        let used = arrows.get(*room);
        let used = used.unwrap_or_else(|| panic!("there is no room {room}"));
        for other in *allowed {
            assert!(
                above.contains(other),
                "{room}: {other} does not stand above it"
            );
            assert!(used.contains(*other), "{room} no longer uses {other}");
        }
        assert!(above.insert(room), "{room} comes twice");
    }
}

#[test]
fn a_use_is_seen_in_every_form() {
    let code =
        "use crate::sys::{self, Errno};\nlet a = crate::flow::feed::Feed::new();\ncrate::Load";
    let want = ["Load", "flow", "sys"].map(str::to_string);
    assert_eq!(named_in(code), BTreeSet::from(want));
}
