//! `dmafile bench` is Python's, and becomes it.

mod common;

use common::Dir;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

/// A folder whose `python3` is this script.
fn with_python(script: &str) -> Dir {
    let dir = Dir::new();
    let path = dir.path("python3");
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    dir
}

#[test]
fn arguments_go_to_the_module_as_they_are() {
    let dir = with_python(r#"[ "$1" = -c ] || echo "$@" "${DMAFILE_PROGRAM##*/}""#);
    let mut command = dir.dmafile("bench --table limit --help");
    let output = command.env("PATH", dir.path("")).output().unwrap();
    assert!(output.status.success());
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(said, "-m dmafile_bench --table limit --help dmafile\n");
}

#[test]
fn where_the_module_is_missing_the_line_says_how_to_get_it() {
    let dir = with_python("exit 1");
    let mut command = dir.dmafile("bench");
    let line = dir.refusal(command.env("PATH", dir.path("")), 1);
    assert!(
        line.contains("dmafile_bench: no such Python module"),
        "{line}"
    );
    assert!(line.contains("pip install 'dmafile[bench]'"), "{line}");
}

#[test]
fn where_python_is_missing_the_line_says_so() {
    let dir = Dir::new();
    let mut command = dir.dmafile("bench");
    let line = dir.refusal(command.env("PATH", dir.path("")), 1);
    assert!(
        line.contains("python3: No such file or directory (ENOENT)"),
        "{line}"
    );
}
