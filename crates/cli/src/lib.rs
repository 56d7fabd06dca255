//! The `dmafile` command: a thin interface to the engine, in [`dmafile`].
//!
//! Also a library, so that the Python package can provide the same command.

mod args;
mod bench;
mod command;
mod doctor;
mod explain;
mod folder;
mod freeze;
mod given;
mod hold;
mod limits;
mod load;
mod output;
mod pins;
mod remote;
mod save;
mod shards;
mod show;
mod signals;
mod snapshot;
mod take;
mod text;

use args::{Cli, Command};
use clap::error::{ContextKind, ContextValue};
use clap::{CommandFactory, Parser};
use dmafile::internal::sandbox::{Call, refused};
use dmafile::{ErrorKind, Names, Opt};
use output::write_stdout;
use signals::aside;
use std::ffi::OsString;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::{fmt, process};

/// Exit status: invalid usage.
const USAGE: u8 = 2;
/// Exit status: stopped by SIGINT or SIGTERM.
const INTERRUPTED: u8 = 130;

/// Runs the command with these arguments, starting with the program's name; returns its exit
/// status.
///
/// With `load … -- COMMAND` it returns only if COMMAND could not be executed.
pub fn run(args: impl IntoIterator<Item = OsString>) -> u8 {
    // Not by its path, which may refer to another file by now or be unreachable.
    run_as(&["/proc/self/exe".into()], args)
}

/// As [`run`], for a program other than the command: `launcher` is how to start the command, a
/// program and its first arguments.
pub fn run_as(launcher: &[OsString], args: impl IntoIterator<Item = OsString>) -> u8 {
    let args: Vec<_> = args.into_iter().collect();
    limits::raise();
    match dispatch(&Launcher(launcher), &args) {
        Ok(status) => status,
        Err(failure) => {
            // If stderr is closed, the message cannot be shown.
            let _ = writeln!(std::io::stderr(), "dmafile: {}", failure.line);
            failure.status
        }
    }
}

/// How to start this command again.
struct Launcher<'a>(&'a [OsString]);

impl Launcher<'_> {
    fn command(&self) -> process::Command {
        let mut command = process::Command::new(&self.0[0]);
        command.args(&self.0[1..]);
        command
    }
}

impl fmt::Display for Launcher<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&dmafile::internal::one_line(&self.0[0].to_string_lossy()))
    }
}

fn dispatch(launcher: &Launcher, args: &[OsString]) -> Result<u8, Failure> {
    // Above the limit on file size (ulimit -f) a write must fail and not end us. A handler,
    // because COMMAND would inherit an ignored signal.
    signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default())
        .map_err(|error| Failure::os("cannot handle", "signals", &error, ""))?;
    if args.get(1).is_some_and(|word| word == bench::way::WORD) {
        return bench::way::run(args[1..].iter().cloned());
    }
    if args.get(1).is_some_and(|word| word == folder::WORD) {
        return folder::run(launcher, &args[2..]);
    }
    #[cfg(feature = "remote")]
    if args.get(1).is_some_and(|word| word == remote::KEEPER) {
        return remote::keep_here(launcher, args.len() > 2);
    }
    if args.get(1).is_some_and(|word| word == hold::LOOKER) {
        return hold::look();
    }
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => return usage(&error, args),
    };
    #[cfg(not(feature = "remote"))]
    if cli.command.has_url() {
        return Err(remote::become_program(args));
    }
    match &cli.command {
        Command::Load(args) => aside(|| load::run(args, launcher)),
        Command::Save(args) => aside(|| save::run(args)),
        Command::Hold(args) => aside(|| hold::run(args, launcher)),
        Command::Take(args) => take::run(args, launcher),
        Command::Holds(args) => hold::list(args),
        Command::Release(args) => hold::release(args),
        Command::Freeze(args) => freeze::freeze(args),
        Command::Thaw(args) => freeze::thaw(args),
        Command::Show(args) => show::run(args),
        Command::Explain(args) => explain::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Pins(args) => pins::run(args),
        Command::Bench(args) => aside(|| bench::run(args, launcher)),
        Command::Completions(args) => {
            let mut text = Vec::new();
            clap_complete::generate(args.shell, &mut Cli::command(), "dmafile", &mut text);
            write_stdout(&text)
        }
        Command::Man(args) => manual(args.dir.as_deref()),
    }
}

/// Options as the command line names them.
struct Options;

impl Names for Options {
    fn option(&self, option: Opt) -> String {
        match option {
            Opt::From => "SRC".to_string(),
            _ => format!("--{}", given::long(option)),
        }
    }

    fn set(&self, option: Opt, value: &str) -> String {
        match value {
            "false" => self.option(option),
            _ => format!("{} {value}", self.option(option)),
        }
    }
}

/// The end of the command: a message of one line, and an exit status.
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

    /// An error of the operating system outside of the engine.
    fn os(what: &str, place: &str, error: &std::io::Error, remedy: &str) -> Self {
        Self::of_calls(what, place, error, remedy, &[])
    }

    /// The same; if a sandbox refuses one of these calls, that is the cause.
    fn of_calls(
        what: &str,
        place: &str,
        error: &std::io::Error,
        remedy: &str,
        calls: &[Call],
    ) -> Self {
        // std's `{error}` ends in "(os error 2)"; our messages end in the name of the errno.
        let text = error.to_string();
        let mut why = text
            .split(" (os error")
            .next()
            .unwrap_or_default()
            .to_string();
        let mut remedy = remedy.to_string();
        let errno = rustix::io::Errno::from_io_error(error);
        if let Some(call) = errno.and_then(|errno| refused(errno, calls)) {
            (why, remedy) = (call.why(), call.remedy());
        }
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

/// Help and version go to stdout; an error is one line on stderr.
fn usage(error: &clap::Error, args: &[OsString]) -> Result<u8, Failure> {
    use clap::error::ErrorKind as Clap;
    let text = error.render().to_string();
    match error.kind() {
        Clap::DisplayHelp | Clap::DisplayVersion => write_stdout(text.as_bytes()),
        Clap::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = writeln!(std::io::stderr(), "{text}");
            Ok(USAGE)
        }
        _ => {
            let (head, rest) = text.split_once("\n\n").unwrap_or((&text, ""));
            let joined = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
            let mut line = joined(head.trim_start_matches("error: "));
            if let Some(now) = renamed(error, args) {
                line = format!("{line}; tip: {now}");
            }
            for tip in rest.lines().map(str::trim) {
                // Not the tip about `--`, after which COMMAND follows.
                if tip.starts_with("tip: ") && tip.contains("similar") {
                    line = format!("{line}; {}", joined(tip));
                }
            }
            Err(Failure::usage(&format!("{line}; see dmafile --help")))
        }
    }
}

/// How to write what was an option or a verb once, or is one of other commands.
fn renamed(error: &clap::Error, args: &[OsString]) -> Option<&'static str> {
    let word = |at: usize| args.get(at)?.to_str();
    let unknown = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(option)) => option.as_str(),
        _ => "",
    };
    match (word(1)?, unknown) {
        ("save", "") if error.kind() == clap::error::ErrorKind::MissingRequiredArgument => {
            Some("dmafile save SRC... DEST")
        }
        ("explain", _) if word(2) == Some("save") => {
            Some("the plan of a save is dmafile save --explain SRC... DEST")
        }
        ("save", "--from") => Some("sources come before DEST: dmafile save SRC... DEST"),
        ("save", other) if other.starts_with("-=") => {
            Some("write fd:0=NAME for standard input in a snapshot")
        }
        (_, "--gather") => Some("it is --chunk"),
        (_, "--no-memory-check") => Some("it is --no-check-memory"),
        (_, "--at") => Some("it is --socket"),
        _ => None,
    }
}

/// Writes all pages into a folder, or the command's own to stdout.
fn manual(dir: Option<&Path>) -> Result<u8, Failure> {
    let command = Cli::command().disable_help_subcommand(true);
    let Some(dir) = dir else {
        let mut text = Vec::new();
        clap_mangen::Man::new(command)
            .render(&mut text)
            .map_err(|error| Failure::os("cannot render", "the man page", &error, ""))?;
        return write_stdout(&text);
    };
    let place = dmafile::internal::one_line(&dir.to_string_lossy());
    clap_mangen::generate_to(command, dir)
        .map(|()| 0)
        .map_err(|error| Failure::os("cannot write the man pages", &place, &error, ""))
}
