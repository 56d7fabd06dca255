//! `dmafile bench`: measured, drawn and told by Python, whose libraries are made for that.

use crate::Failure;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

const PYTHON: &str = "python3";
const MODULE: &str = "dmafile_bench";
const REMEDY: &str = "pip install 'dmafile[bench]', in the Python that `python3` is";

/// Becomes Python with that module; returns only where there is none.
pub fn run(args: &[OsString]) -> Result<u8, Failure> {
    let program = std::env::current_exe()
        .map_err(|error| Failure::os("cannot measure", "this command's path", &error, ""))?;
    let import = format!("import {MODULE}");
    let found = Command::new(PYTHON)
        .args(["-c", &import])
        .stderr(Stdio::null())
        .status()
        .map_err(|error| Failure::os("cannot measure", PYTHON, &error, REMEDY))?;
    if !found.success() {
        return Err(Failure {
            line: format!("cannot measure: {MODULE}: no such Python module; {REMEDY}"),
            status: 1,
        });
    }
    let error = Command::new(PYTHON)
        .args(["-m", MODULE])
        .args(args)
        .env("DMAFILE_PROGRAM", program)
        .exec();
    Err(Failure::os("cannot measure", PYTHON, &error, REMEDY))
}
