//! The modules of the engine (folders and top-level files of `src`) only use modules below them, and only
//! those listed here.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Each module and the modules that it may use, which all come before it in this list: so there is no
/// cycle.
const ROOMS: &[(&str, &[&str])] = &[
    // Texts, errors, what a caller holds of a load, the log of choices.
    ("message", &[]),
    ("error", &["message"]),
    ("control", &[]),
    ("open_files", &[]),
    ("sync", &[]),
    ("reasons", &["message", "sync"]),
    ("digest", &[]),
    ("folder", &["error"]),
    ("pin", &["error"]),
    // The request and its source.
    ("options", &["error", "message", "pin"]),
    ("source", &["digest", "error", "sync"]),
    ("format", &["error"]),
    ("exporter", &["error", "message", "options"]),
    ("verify", &["digest", "error", "message", "source"]),
    (
        "request",
        &["control", "error", "message", "options", "verify"],
    ),
    // Extents and timing of a transfer.
    ("flow", &["control", "error", "reasons", "request", "sync"]),
    // Look.
    (
        "facts",
        &[
            "error", "exporter", "message", "options", "reasons", "request", "source",
        ],
    ),
    // Decide.
    (
        "plan",
        &[
            "error", "exporter", "facts", "message", "options", "reasons", "request",
        ],
    ),
    // Move, in either direction.
    (
        "pump",
        &["error", "flow", "message", "plan", "reasons", "sync"],
    ),
    // Make and read: memory and methods do not use each other.
    (
        "buffer",
        &[
            "error", "exporter", "message", "options", "pin", "plan", "reasons", "sync",
        ],
    ),
    (
        "method",
        &[
            "error", "exporter", "flow", "message", "options", "plan", "pump", "source", "sync",
        ],
    ),
    // The destination of bytes that do not stay in memory.
    ("sink", &["error", "message", "pin", "sync"]),
    (
        "transfer",
        &[
            "buffer", "error", "facts", "flow", "message", "method", "options", "plan", "pump",
            "reasons", "sink", "source", "sync", "verify",
        ],
    ),
    // Complete operations.
    (
        "load",
        &[
            "buffer", "control", "error", "exporter", "facts", "flow", "message", "options", "pin",
            "plan", "reasons", "request", "sink", "source", "transfer", "verify",
        ],
    ),
    (
        "save",
        &[
            "control", "error", "exporter", "facts", "flow", "folder", "message", "options",
            "plan", "pump", "reasons", "request", "source", "sync", "verify",
        ],
    ),
    (
        "model",
        &[
            "buffer", "error", "format", "load", "message", "options", "request", "source", "sync",
            "verify",
        ],
    ),
    ("doctor", &["error", "exporter", "facts", "options", "plan"]),
];

/// The code of a file without comments and tests.
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
        if path.is_dir() {
            files.extend(files_below(&path))
        } else {
            files.push(path)
        }
    }
    files
}

/// The word after each `crate::`: a module, or a name that the root of the crate re-exports.
fn named_in(code: &str) -> BTreeSet<String> {
    let word = |text: &str| {
        let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
        text[..end.unwrap_or(text.len())].to_string()
    };
    code.match_indices("crate::")
        .map(|(at, found)| word(&code[at + found.len()..]))
        .collect()
}

/// Each module and the other modules that it uses.
fn arrows() -> BTreeMap<String, BTreeSet<String>> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut arrows = BTreeMap::<String, BTreeSet<String>>::new();
    for path in files_below(&src) {
        let inside = path.strip_prefix(&src).unwrap();
        let first = inside.iter().next().unwrap().to_str().unwrap();
        let room = first.trim_end_matches(".rs").to_string();
        let is_tests = path.file_name().is_some_and(|name| name == "tests.rs");
        if room == "lib" || room == "internal" || is_tests {
            continue;
        }
        let code = code_of(&path);
        // The `super` of a top-level file, or of a module's mod.rs, is the crate root.
        let is_top =
            inside.iter().count() == 1 || inside.ends_with(Path::new(&room).join("mod.rs"));
        let climbs = if is_top { "super::" } else { "super::super::" };
        assert!(!code.contains(climbs), "{} uses {climbs}", inside.display());
        let mut used = named_in(&code);
        used.remove(&room);
        // The crate below this one.
        used.remove("sys");
        // Macros name what the root re-exports.
        used.remove("Message");
        arrows.entry(room).or_default().extend(used);
    }
    arrows
}

#[test]
fn modules_use_only_what_the_list_allows() {
    let allowed: BTreeMap<_, _> = ROOMS.iter().copied().collect();
    for (room, used) in arrows() {
        let allowed = allowed.get(room.as_str());
        let allowed = allowed.unwrap_or_else(|| panic!("{room} is not in the list"));
        for other in used {
            assert!(
                allowed.contains(&other.as_str()),
                "crates/dmafile/src/{room} uses crate::{other}, which the list does not allow"
            );
        }
    }
}

#[test]
fn the_list_has_no_cycle_and_no_unused_entry() {
    let arrows = arrows();
    let mut above = BTreeSet::new();
    for (room, allowed) in ROOMS {
        let used = arrows.get(*room);
        let used = used.unwrap_or_else(|| panic!("there is no module {room}"));
        for other in *allowed {
            assert!(
                above.contains(other),
                "{room}: {other} does not come before it"
            );
            assert!(used.contains(*other), "{room} no longer uses {other}");
        }
        assert!(above.insert(room), "{room} is listed twice");
    }
}

#[test]
fn every_form_of_use_is_found() {
    let code =
        "use crate::error::{self, Error};\nlet a = crate::flow::feed::Feed::new();\ncrate::Load";
    let want = ["Load", "error", "flow"].map(str::to_string);
    assert_eq!(named_in(code), BTreeSet::from(want));
}

/// A program that only uses the core has no driver of a GPU in it.
#[test]
fn no_module_knows_a_gpu() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for path in files_below(&src) {
        let text = fs::read_to_string(&path).unwrap().to_lowercase();
        for word in ["sys::driver", "cuda", "hip-", "hip:"] {
            assert!(!text.contains(word), "{} has {word}", path.display());
        }
    }
}

/// The names of the types that code defines outside of functions.
fn types_in(code: &str) -> impl Iterator<Item = &str> {
    code.lines().filter_map(|line| {
        let line = match line.strip_prefix("pub") {
            Some(rest) if rest.starts_with('(') => rest.split_once(") ")?.1,
            Some(rest) => rest.trim_start(),
            None => line,
        };
        let (word, rest) = line.split_once(' ')?;
        let is_type = ["struct", "enum", "trait", "union", "type"].contains(&word);
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
        is_type.then(|| &rest[..end.unwrap_or(rest.len())])
    })
}

#[test]
fn every_type_has_a_name_of_its_own() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut seen = BTreeMap::new();
    for one in ["sys", "dmafile", "gpu", "hold", "record", "pins", "remote"] {
        for path in files_below(&crates.join(one).join("src")) {
            let text = fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
            if path.file_name().is_some_and(|name| name == "tests.rs") {
                continue;
            }
            for name in types_in(code) {
                let other = seen.insert(name.to_string(), path.clone());
                assert!(
                    other.is_none(),
                    "{name} is in {} and {}",
                    path.display(),
                    other.unwrap().display()
                );
            }
        }
    }
    assert!(seen.len() > 300, "{}", seen.len());
}

#[test]
fn every_form_of_a_type_is_found() {
    let code = "pub struct A;\nenum B {\n    type C = u8;\npub(crate) trait D<T> {\npub(in crate::x) type E = u8;\nfn f() {}";
    assert_eq!(types_in(code).collect::<Vec<_>>(), ["A", "B", "D", "E"]);
}
