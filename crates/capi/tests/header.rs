//! The header and the list of exported symbols match the source.

use std::collections::BTreeSet;
use std::path::Path;

const HERE: &str = env!("CARGO_MANIFEST_DIR");

fn read(name: &str) -> String {
    std::fs::read_to_string(Path::new(HERE).join(name)).unwrap()
}

/// With BLESS=1, it writes the header instead of comparing it.
#[test]
fn the_header_is_generated_from_the_source() {
    let mut made = Vec::new();
    let config = cbindgen::Config::from_file(Path::new(HERE).join("cbindgen.toml")).unwrap();
    cbindgen::generate_with_config(HERE, config)
        .unwrap()
        .write(&mut made);
    let made = String::from_utf8(made).unwrap();
    if std::env::var_os("BLESS").is_some() {
        std::fs::create_dir_all(Path::new(HERE).join("include")).unwrap();
        std::fs::write(Path::new(HERE).join("include/dmafile.h"), &made).unwrap();
    }
    assert!(
        read("include/dmafile.h") == made,
        "include/dmafile.h does not match src/: \
         BLESS=1 cargo test -p dmafile-capi --test header"
    );
}

/// Words of a text that begin with `dmafile_` and are followed by `after`.
fn words(text: &str, after: char) -> BTreeSet<&str> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let starts = text.match_indices("dmafile_").filter_map(|(at, _)| {
        let before = text[..at].chars().next_back();
        (!before.is_some_and(is_part)).then_some(&text[at..])
    });
    starts
        .filter_map(|rest| {
            let end = rest.find(|c| !is_part(c))?;
            rest[end..].starts_with(after).then_some(&rest[..end])
        })
        .collect()
}

#[test]
fn every_declared_function_is_exported() {
    let header = read("include/dmafile.h");
    // Comments also contain calls of functions.
    let code: String = header
        .lines()
        .filter(|line| !line.trim_start().starts_with(['*', '/']))
        .flat_map(|line| [line, "\n"])
        .collect();
    let declared = words(&code, '(');
    assert!(declared.len() > 15, "{declared:?}");
    let map = read("dmafile.map");
    assert_eq!(words(&map, ';'), declared);
}

#[test]
fn every_function_documents_thread_safety() {
    let header = read("include/dmafile.h");
    for block in header.split("/**").skip(1) {
        let (comment, code) = block.split_once("*/").unwrap();
        let Some(name) = words(code, '(').first().copied() else {
            continue;
        };
        let says = comment.replace("\n * ", " ").to_lowercase();
        assert!(
            ["thread-safe", "thread may be using", "no load may be using"]
                .iter()
                .any(|words| says.contains(words)),
            "{name} does not document thread safety"
        );
    }
}
