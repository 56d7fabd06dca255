//! Writes text, JSON and progress to their destinations.

use crate::Failure;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::fs::{self, File};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};

/// `--json` and `--json=PATH`, as clap parses them.
pub(crate) type JsonOption = Option<Option<PathBuf>>;

/// Where text for people goes.
#[derive(Clone, Copy)]
pub(crate) enum Text {
    Stdout,
    /// stdout is used by COMMAND or for the JSON object.
    Stderr,
    Nowhere,
}

impl Text {
    pub(crate) fn print(self, text: &str) -> Result<(), Failure> {
        match self {
            Self::Stdout => write_stdout(text.as_bytes()).map(drop),
            Self::Stderr => io::stderr()
                .write_all(text.as_bytes())
                .map_err(|error| Failure::os("cannot write", "stderr", &error, "")),
            Self::Nowhere => Ok(()),
        }
    }
}

/// Where the text of a load or save goes, and how much of it.
#[derive(Clone, Copy)]
pub(crate) struct Output {
    pub(crate) text: Text,
    /// Also the plan, the reasons and the phases.
    pub(crate) verbose: bool,
}

impl Output {
    pub(crate) fn print(self, text: &str) -> Result<(), Failure> {
        self.text.print(text)
    }

    /// Prints what `--verbose` adds.
    pub(crate) fn detail(self, text: impl FnOnce() -> String) -> Result<(), Failure> {
        if self.verbose {
            self.print(&text())
        } else {
            Ok(())
        }
    }
}

/// Writes to stdout, piece by piece; a closed pipe or a full disk is an error, not a panic.
pub(crate) fn to_stdout(
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<u8, Failure> {
    let mut out = BufWriter::new(io::stdout().lock());
    write(&mut out)
        .and_then(|()| out.flush())
        .map(|()| 0)
        .map_err(|error| Failure::os("cannot write", "stdout", &error, ""))
}

/// Writes a text to stdout.
pub(crate) fn write_stdout(text: &[u8]) -> Result<u8, Failure> {
    to_stdout(|out| out.write_all(text))
}

/// Writes one JSON object and a newline to stdout.
pub(crate) fn write_json(value: &impl serde::Serialize) -> Result<u8, Failure> {
    to_stdout(|out| {
        serde_json::to_writer(&mut *out, value)?;
        out.write_all(b"\n")
    })
}

/// Writes one JSON object to where `--json` says.
pub(crate) fn write_wanted_json(
    wanted: &JsonOption,
    value: &impl serde::Serialize,
) -> Result<(), Failure> {
    match wanted {
        Some(Some(path)) => write_file(path, value),
        Some(None) => write_json(value).map(drop),
        None => Ok(()),
    }
}

/// Writes one JSON object and a newline to a file.
pub(crate) fn write_file(path: &Path, value: &impl serde::Serialize) -> Result<(), Failure> {
    let failed =
        |error: io::Error| Failure::os("cannot write", &path.display().to_string(), &error, "");
    let text = serde_json::to_string(value).map_err(|error| failed(error.into()))? + "\n";
    let mut file = File::create(path).map_err(failed)?;
    file.write_all(text.as_bytes()).map_err(|error| {
        // Half an object is useless; a device or a FIFO stays.
        if file.metadata().is_ok_and(|data| data.is_file()) {
            let _ = fs::remove_file(path);
        }
        failed(error)
    })
}

/// Only on a terminal, to keep escape codes out of logs.
pub(crate) fn progress_bar(quiet: bool, template: &str) -> Option<ProgressBar> {
    if quiet || !io::stderr().is_terminal() {
        return None;
    }
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    bar.set_style(ProgressStyle::with_template(template).expect("the template is a constant"));
    Some(bar)
}
