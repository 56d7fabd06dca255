//! The operations, and how each is judged: old or new and whole, nothing outside touched, a status that is true.

mod hold;
mod load;
mod record;
mod save;
mod shared;
mod snapshot;

use crate::action::{ASIDE, Action, Actor, Target, Verb};
use crate::trace::Exit;
use crate::world::{Content, GROUP, Trust, World};
use std::ffi::OsString;
use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Something that must not happen.
#[derive(Clone, Debug)]
pub struct Fault {
    pub kind: Kind,
    pub what: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Kind {
    /// Something outside of the named folder has changed.
    Outside,
    /// Bytes that are neither all old nor all new.
    Incomplete,
    /// Neither the old nor the new is there.
    Lost,
    /// The exit status says something else than what happened.
    Status,
    /// Bytes of another user were accepted.
    Foreign,
    /// Another user has read what it may not read.
    Leak,
    /// Files that nothing removes.
    Leftover,
    /// Something failed that must not.
    Failed,
    Hang,
    Panic,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

/// Which of two instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    First,
    Second,
}

impl Which {
    fn source(self, world: &World) -> PathBuf {
        world.at(match self {
            Self::First => "src/model.bin",
            Self::Second => "src/second.bin",
        })
    }
}

/// A command line.
#[derive(Default)]
pub struct Run {
    /// Arguments of dmafile, or of this program.
    pub args: Vec<OsString>,
    pub is_own: bool,
    pub env: Vec<(&'static str, PathBuf)>,
    pub input: Option<PathBuf>,
    /// Stdin is a pipe that the script closes.
    pub waits: bool,
}

impl Run {
    fn of<A: Into<OsString>>(args: impl IntoIterator<Item = A>) -> Self {
        Self {
            args: args.into_iter().map(Into::into).collect(),
            ..Self::default()
        }
    }

    fn own<A: Into<OsString>>(args: impl IntoIterator<Item = A>) -> Self {
        Self {
            is_own: true,
            ..Self::of(args)
        }
    }

    fn and<A: Into<OsString>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }
}

/// Mixed arguments: text and paths.
macro_rules! args {
    ($($arg:expr),* $(,)?) => { [$(std::ffi::OsString::from($arg)),*] };
}
use args;

/// How to start things.
pub struct Tools {
    /// The command dmafile: a program and its first arguments.
    pub dmafile: Vec<OsString>,
    /// This program.
    pub own: OsString,
}

impl Tools {
    /// The program and the arguments of a command line.
    pub fn line(&self, run: &Run) -> Vec<OsString> {
        let own = std::slice::from_ref(&self.own);
        let first = if run.is_own { own } else { &self.dmafile };
        first.iter().chain(&run.args).cloned().collect()
    }

    /// The command, with the environment that it always has here.
    pub fn start(&self, world: &World, run: &Run, line: &[OsString]) -> Command {
        let mut command = Command::new(&line[0]);
        command.args(&line[1..]).current_dir(world.root());
        command.env_clear().env("PATH", "/usr/bin:/bin");
        command.env("XDG_RUNTIME_DIR", world.at("run"));
        command.env("RUST_BACKTRACE", "0");
        command.envs(run.env.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Runs a command that nobody stops, to its end.
    pub fn run(&self, world: &World, run: &Run) -> io::Result<std::process::Output> {
        // A holder that does not answer must not keep the harness.
        let mut line: Vec<OsString> =
            vec!["/usr/bin/timeout".into(), "-sKILL".into(), "100".into()];
        line.extend(self.line(run));
        let mut command = self.start(world, run, &line);
        match &run.input {
            Some(path) => command.stdin(fs::File::open(path)?),
            None => command.stdin(Stdio::null()),
        };
        command.output()
    }

    /// As [`Self::run`], with the result that it must have.
    fn done(&self, world: &World, run: &Run) -> io::Result<()> {
        let output = self.run(world, run)?;
        if output.status.success() {
            Ok(())
        } else {
            Err(io::Error::other(format!("{:?}: {output:?}", run.args)))
        }
    }

    /// Starts a command, and waits for its first line.
    pub fn peer(&self, world: &World, run: &Run, actor: Actor) -> io::Result<Peer> {
        let line = self.line(run);
        let mut command = self.start(world, run, &line);
        if actor == Actor::Other {
            use std::os::unix::process::CommandExt;
            command.uid(crate::world::OTHER).gid(GROUP);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.stderr(Stdio::piped()).spawn()?;
        let mut out = BufReader::new(child.stdout.take().expect("it is a pipe"));
        let mut first = String::new();
        out.read_line(&mut first)?;
        let input = child.stdin.take();
        let mut peer = Peer {
            child,
            input,
            _out: out,
            serves: !first.is_empty(),
            why: String::new(),
        };
        if !peer.serves {
            let mut why = String::new();
            peer.child
                .stderr
                .take()
                .expect("it is a pipe")
                .read_to_string(&mut why)?;
            peer.why = why.trim().to_string();
        }
        Ok(peer)
    }
}

/// A process beside the operation; ends when dropped.
pub struct Peer {
    child: Child,
    input: Option<ChildStdin>,
    _out: BufReader<ChildStdout>,
    pub serves: bool,
    /// The error if it does not serve.
    pub why: String,
}

impl Peer {
    /// Whether it ends within a while.
    pub fn ends(&mut self) -> bool {
        for _ in 0..6000 {
            match self.child.try_wait() {
                Ok(None) => std::thread::sleep(std::time::Duration::from_millis(5)),
                _ => return true,
            }
        }
        false
    }

    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What other processes got from the operation while it ran.
#[derive(Default)]
pub struct Log {
    pub out: Vec<u8>,
    /// It has said that it is ready.
    pub serves: bool,
    pub got: Vec<Got>,
    pub notes: Vec<Fault>,
}

pub struct Got {
    pub by: &'static str,
    pub result: Result<Vec<u8>, String>,
}

/// What the script of a run can use.
pub struct Stage<'a> {
    pub tools: &'a Tools,
    pub world: &'a World,
    pub action: Action,
    pub pid: i32,
    pub input: Option<ChildStdin>,
    pub peers: &'a mut Vec<Peer>,
}

/// A run that has ended.
pub struct Seen<'a> {
    pub world: &'a World,
    pub action: Action,
    pub actor: Actor,
    /// The action took place.
    pub acted: bool,
    pub exit: Exit,
    /// Of a second instance that has ended.
    pub second: Option<Exit>,
    pub log: &'a Log,
    pub errors: &'a str,
    pub peers: &'a mut Vec<Peer>,
    /// It must fail.
    pub fails: bool,
}

pub struct Operation {
    pub name: &'static str,
    /// Where it runs; a second user acts everywhere but in the first.
    pub trusts: &'static [Trust],
    /// Without O_TMPFILE.
    pub no_tmpfile: bool,
    /// The names that it has in the end.
    pub finals: &'static [&'static str],
    pub prepare: fn(&Tools, &World) -> io::Result<()>,
    pub peers: fn(&Tools, &World) -> io::Result<Vec<Peer>>,
    pub command: fn(&Tools, &World, Which) -> Run,
    pub script: fn(&mut Stage, BufReader<ChildStdout>) -> Log,
    pub judge: fn(&mut Seen) -> Vec<Fault>,
    /// Runs it again after it was killed: that must remove what was left.
    pub again: Option<fn(&Tools, &World) -> Vec<Fault>>,
    /// A second instance ends by itself.
    pub second_ends: bool,
    /// It must fail.
    pub fails: bool,
    /// Its final name is the folder that it works in, to which a link may lead.
    pub leads: bool,
    /// A link at its final name is followed.
    pub follows: bool,
    /// Two instances can take turns.
    pub weaves: bool,
}

pub fn all() -> Vec<Operation> {
    let mut all = save::all();
    all.extend(snapshot::all());
    all.extend(record::all());
    all.extend(hold::all());
    all.extend(shared::all());
    all.extend(load::all());
    all
}

fn nothing(_: &Tools, _: &World) -> io::Result<()> {
    Ok(())
}

fn nobody(_: &Tools, _: &World) -> io::Result<Vec<Peer>> {
    Ok(Vec::new())
}

/// Only reads what it prints.
fn reads(_: &mut Stage, mut out: BufReader<ChildStdout>) -> Log {
    let mut log = Log::default();
    // A broken pipe ends as one that is closed.
    let _ = out.read_to_end(&mut log.out);
    log
}

fn fault(kind: Kind, what: impl Into<String>) -> Fault {
    Fault {
        kind,
        what: what.into(),
    }
}

impl Seen<'_> {
    /// Checks that hold for every operation.
    pub fn judge_all(&self) -> Vec<Fault> {
        let mut faults = Vec::new();
        if self.exit == Exit::Hangs {
            faults.push(fault(Kind::Hang, "it does not end"));
        }
        let crashed = [libc::SIGSEGV, libc::SIGBUS, libc::SIGABRT, libc::SIGILL];
        let crashed = crashed.map(Exit::Signal).contains(&self.exit);
        if crashed || self.errors.contains("panicked") || self.exit == Exit::Status(101) {
            faults.push(fault(
                Kind::Panic,
                format!("{}: {}", self.exit, self.errors),
            ));
        }
        let good = Exit::Status(self.fails.into());
        if self.action.is_harmless() && self.exit != good && !self.may_refuse() {
            faults.push(fault(
                Kind::Failed,
                format!("{}: {}", self.exit, self.errors.trim()),
            ));
        }
        faults
    }

    /// Whether the folder itself is a reason to refuse.
    fn may_refuse(&self) -> bool {
        self.exit == Exit::Status(1) && self.refuses(self.errors)
    }

    /// Whether a message says that others may do too much in the folder.
    fn refuses(&self, message: &str) -> bool {
        self.world.trust != Trust::Own && (message.contains("EPERM") || message.contains("EACCES"))
    }

    /// Whether bytes are what the operation should have brought, as the source then was.
    fn is_new(&self, bytes: &[u8]) -> bool {
        is_new(self.action, bytes)
    }

    /// Whether the actor touches names that the operation uses.
    fn touches_names(&self) -> bool {
        matches!(
            self.action,
            Action::Name(_, Target::Here | Target::Fresh | Target::Final)
        )
    }

    /// Whether nothing can be said about names, because the folder itself was replaced by the actor.
    fn replaces_folder(&self) -> bool {
        matches!(self.action, Action::Name(_, Target::Folder))
    }

    /// The entries of all folders that should not be there.
    fn leftovers(&self, expected: impl Fn(&str) -> bool) -> Vec<Fault> {
        if self.touches_names() || self.replaces_folder() && self.actor == Actor::Other {
            // What the actor moved, and what it put there, stays.
            return Vec::new();
        }
        let mut faults = Vec::new();
        for home in self.world.homes() {
            for entry in fs::read_dir(&home).into_iter().flatten().flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                if !expected(&name) && !name.starts_with(ASIDE) {
                    let home = home.file_name().unwrap_or_default().to_string_lossy();
                    faults.push(fault(Kind::Leftover, format!("{home}/{name}")));
                }
            }
        }
        faults
    }
}

fn is_new(action: Action, bytes: &[u8]) -> bool {
    let (new, changed) = (Content::New.bytes(), Content::Changed.bytes());
    bytes == new
        || match action {
            Action::SourceReplaced => bytes == changed,
            // What another process writes during the operation may be in it or not, byte by byte.
            Action::SourceModified => {
                bytes.len() == new.len()
                    && (0..bytes.len()).all(|at| [new[at], changed[at]].contains(&bytes[at]))
            }
            Action::SourceTruncated => bytes == &new[..new.len() / 2],
            _ => false,
        }
}

/// What is at a path, without following a link there.
enum There {
    Nothing,
    File(Vec<u8>, u32),
    Other(&'static str),
}

fn there(path: &Path) -> There {
    let Ok(found) = fs::symlink_metadata(path) else {
        return There::Nothing;
    };
    let kind = found.file_type();
    match () {
        () if kind.is_file() => {
            There::File(fs::read(path).unwrap_or_default(), found.mode() & 0o7777)
        }
        () if kind.is_symlink() => There::Other("a link"),
        () if kind.is_dir() => There::Other("a folder"),
        () if kind.is_fifo() => There::Other("a FIFO"),
        () if kind.is_socket() => There::Other("a socket"),
        () => There::Other("a device"),
    }
}

fn describe(bytes: &[u8]) -> String {
    match Content::of(bytes) {
        Some(content) => format!("{content:?}"),
        None => {
            let zeros = bytes.iter().filter(|byte| **byte == 0).count();
            format!("{} bytes, {zeros} of them zero", bytes.len())
        }
    }
}

/// Whether an actor put its own thing under a name of the operation.
fn plants(action: Action) -> bool {
    matches!(action, Action::Name(verb, _) if !matches!(verb, Verb::Chmod | Verb::Chown))
}

pub use hold::evil;

/// Ends the holder of an operation.
pub fn release(tools: &Tools, world: &World) -> Run {
    hold::release(tools, world, Which::First)
}
