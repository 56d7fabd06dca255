//! The `dmafile` command: a thin face over the engine, in [`dmafile`].
//!
//! A library as well, so that the Python package can offer the same command.

mod args;
mod bench;
mod doctor;
mod explain;
mod load;
mod pins;
mod show;
mod text;

use args::{Cli, Command};
use clap::{CommandFactory, Parser};
use dmafile::{ErrorKind, Names, Opt};
use std::ffi::OsString;
use std::io::Write;
use std::sync::Arc;

/// Exit status: the command was used wrongly.
const USAGE: u8 = 2;
/// Exit status: stopped by SIGINT or SIGTERM.
const INTERRUPTED: u8 = 130;

/// Runs the command with these arguments, the program's name first; returns its exit status.
///
/// With `load … -- COMMAND` it returns only where COMMAND could not be executed.
pub fn run(args: impl IntoIterator<Item = OsString>) -> u8 {
    match dispatch(args) {
        Ok(status) => status,
        Err(failure) => {
            // The last word goes to stderr; where that is closed there is nobody left to tell.
            let _ = writeln!(std::io::stderr(), "dmafile: {}", failure.line);
            failure.status
        }
    }
}

fn dispatch(args: impl IntoIterator<Item = OsString>) -> Result<u8, Failure> {
    // Beyond the limit on file size (ulimit -f) a write shall fail, not end us. A handler, because
    // COMMAND would inherit a signal that is ignored.
    signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default())
        .map_err(|error| Failure::os("cannot handle", "signals", &error, ""))?;
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    match &cli.command {
        Command::Load(args) => load::run(args),
        Command::Show(args) => show::run(args),
        Command::Explain(args) => explain::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Pins(args) => pins::run(args),
        Command::Bench { args } => bench::run(args),
        Command::Completions { shell } => {
            let mut text = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "dmafile", &mut text);
            write_stdout(&text)
        }
        Command::Man => manual(),
    }
}

/// Options as the command line has them.
struct Options;

impl Names for Options {
    fn option(&self, option: Opt) -> String {
        let name = match option {
            Opt::Patterns => "tensor",
            Opt::CheckMemory => "no-memory-check",
            _ => option.name(),
        };
        format!("--{}", name.replace('_', "-"))
    }

    fn set(&self, option: Opt, value: &str) -> String {
        match option {
            Opt::CheckMemory => self.option(option),
            _ => format!("{} {value}", self.option(option)),
        }
    }
}

/// What ends the command: one line and an exit status.
struct Failure {
    line: String,
    status: u8,
}

impl From<dmafile::Error> for Failure {
    fn from(error: dmafile::Error) -> Self {
        let status = match error.kind() {
            ErrorKind::Usage => USAGE,
            ErrorKind::Cancelled => INTERRUPTED,
            _ => 1,
        };
        Self {
            line: error.render(&Options),
            status,
        }
    }
}

impl Failure {
    fn usage(line: &str) -> Self {
        Self {
            line: line.to_string(),
            status: USAGE,
        }
    }

    /// An error of the operating system outside the engine.
    fn os(what: &str, place: &str, error: &std::io::Error, remedy: &str) -> Self {
        // `{error}` of std ends in "(os error 2)"; the house names the errno.
        let text = error.to_string();
        let why = text.split(" (os error").next().unwrap_or_default();
        let errno = error.raw_os_error().map(dmafile::errno_name);
        let errno = errno.map(|name| format!(" ({name})")).unwrap_or_default();
        let remedy = if remedy.is_empty() {
            String::new()
        } else {
            format!("; {remedy}")
        };
        Self {
            line: format!("{what}: {place}: {why}{errno}{remedy}"),
            status: 1,
        }
    }
}

/// Help and versions go to stdout; a mistake is one line on stderr.
fn usage(error: &clap::Error) -> Result<u8, Failure> {
    use clap::error::ErrorKind as Clap;
    let text = error.render().to_string();
    match error.kind() {
        Clap::DisplayHelp | Clap::DisplayVersion => write_stdout(text.as_bytes()),
        Clap::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = writeln!(std::io::stderr(), "{text}");
            Ok(USAGE)
        }
        _ => {
            let head = text.split("\n\n").next().unwrap_or_default();
            let line = head.split_whitespace().collect::<Vec<_>>().join(" ");
            let line = line.trim_start_matches("error: ");
            Err(Failure::usage(&format!("{line}; see dmafile --help")))
        }
    }
}

fn manual() -> Result<u8, Failure> {
    let mut text = Vec::new();
    let failed = |error: std::io::Error| Failure::os("cannot render", "the manual", &error, "");
    let command = Cli::command();
    clap_mangen::Man::new(command.clone())
        .render(&mut text)
        .map_err(failed)?;
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        let name = format!("dmafile-{}", sub.get_name());
        clap_mangen::Man::new(sub.clone().name(name))
            .render(&mut text)
            .map_err(failed)?;
    }
    write_stdout(&text)
}

/// Writes to stdout, where a closed pipe or a full disk is an error and not a panic.
fn write_stdout(text: &[u8]) -> Result<u8, Failure> {
    let mut out = std::io::stdout().lock();
    out.write_all(text)
        .and_then(|()| out.flush())
        .map(|()| 0)
        .map_err(|error| Failure::os("cannot write", "stdout", &error, ""))
}

/// Writes one JSON object and a newline to stdout.
fn write_json(value: &impl serde::Serialize) -> Result<u8, Failure> {
    let mut text = serde_json::to_vec(value).map_err(|error| Failure {
        line: format!("cannot write JSON: {error}"),
        status: 1,
    })?;
    text.push(b'\n');
    write_stdout(&text)
}
