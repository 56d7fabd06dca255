//! What a second actor does while the operation has stopped.

use crate::trace::Call;
use crate::world::{GROUP, OTHER, Trust, World, is_socket};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Actor {
    /// The user who runs the operation.
    Same,
    /// Another one.
    Other,
}

/// What happens to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verb {
    Unlink,
    /// A link to a file takes its place.
    Link,
    /// A link to a folder.
    DirLink,
    /// A link to a name that does not exist.
    Dangling,
    /// Another name of a file.
    HardLink,
    Fifo,
    /// The other user's file, folder or socket takes its place.
    Evil,
    Truncate,
    Chmod,
    Chown,
}

/// Which file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// What the call names.
    Here,
    /// What the operation has made in its folder so far.
    Fresh,
    /// The name that it will have in the end.
    Final,
    /// The folder that it works in.
    Folder,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Action {
    /// Only the run itself.
    None,
    Name(Verb, Target),
    /// The folder is renamed, and an empty one takes its place.
    Rotate,
    /// The link that leads to the folder leads to another one.
    Flip,
    SourceReplaced,
    SourceModified,
    SourceTruncated,
    SourceUnlinked,
    Kill,
    Terminate,
    Interrupt,
    /// Stopped for a moment.
    Stop,
    Fork,
    /// A second instance, from its start to its end if nothing keeps it from ending.
    Second,
    /// The holder that the operation uses, or is, is released.
    Release,
    /// Opens everything that it may read, and reads it when the operation has ended.
    Spy,
    /// A second instance whose steps alternate with the operation's at random.
    Weave(u64),
}

const NAMED: [Action; 23] = {
    use Target::*;
    use Verb::*;
    [
        Action::Name(Unlink, Here),
        Action::Name(Link, Here),
        Action::Name(DirLink, Here),
        Action::Name(Dangling, Here),
        Action::Name(HardLink, Here),
        Action::Name(Fifo, Here),
        Action::Name(Evil, Here),
        Action::Name(Truncate, Here),
        Action::Name(Unlink, Fresh),
        Action::Name(Link, Fresh),
        Action::Name(DirLink, Fresh),
        Action::Name(HardLink, Fresh),
        Action::Name(Evil, Fresh),
        Action::Name(Truncate, Fresh),
        Action::Name(Unlink, Final),
        Action::Name(Link, Final),
        Action::Name(DirLink, Final),
        Action::Name(Dangling, Final),
        Action::Name(Fifo, Final),
        Action::Name(Evil, Final),
        Action::Name(DirLink, Folder),
        Action::Name(Evil, Folder),
        Action::Name(Unlink, Folder),
    ]
};

impl Action {
    /// Stands for any seed.
    pub const DRAWN: u64 = 0;

    /// All that this actor can try in such a folder.
    pub fn all(trust: Trust, actor: Actor) -> Vec<Self> {
        let mut all = Vec::new();
        if actor == Actor::Same {
            all.extend([
                Self::Rotate,
                Self::Flip,
                Self::Name(Verb::Chmod, Target::Folder),
                Self::Name(Verb::Chown, Target::Folder),
                Self::SourceReplaced,
                Self::SourceModified,
                Self::SourceTruncated,
                Self::SourceUnlinked,
                Self::Kill,
                Self::Terminate,
                Self::Interrupt,
                Self::Stop,
                Self::Fork,
                Self::Second,
                Self::Release,
            ]);
            // A user's processes do not protect themselves from each other's writes.
            let own = NAMED.into_iter().filter(|action| {
                !matches!(
                    action,
                    Self::Name(Verb::Truncate | Verb::Evil | Verb::HardLink, _)
                )
            });
            all.extend(own);
            return all;
        }
        let targets: &[Target] = match trust {
            Trust::Own => &[],
            Trust::Group => &[Target::Here, Target::Fresh, Target::Final],
            Trust::Sticky => &[Target::Here, Target::Final],
            Trust::Parent => &[Target::Folder],
            Trust::Foreign => &[Target::Here, Target::Fresh, Target::Final, Target::Folder],
        };
        let may =
            |action: &Self| matches!(action, Self::Name(_, target) if targets.contains(target));
        all.extend(NAMED.into_iter().filter(may));
        all.push(Self::Spy);
        all
    }

    /// Whether the operation must succeed as if nothing had happened.
    pub fn is_harmless(self) -> bool {
        matches!(self, Self::None | Self::Stop | Self::Fork | Self::Spy)
    }

    pub fn ends_it(self) -> bool {
        matches!(self, Self::Kill | Self::Terminate | Self::Interrupt)
    }

    /// Whether it changes the contents of the source.
    pub fn is_of_source(self) -> bool {
        matches!(
            self,
            Self::SourceReplaced
                | Self::SourceModified
                | Self::SourceTruncated
                | Self::SourceUnlinked
        )
    }

    /// Whether the path no longer leads to the folder.
    pub fn moves_folder(self) -> bool {
        matches!(
            self,
            Self::Rotate | Self::Flip | Self::Name(_, Target::Folder)
        )
    }
}

impl std::fmt::Display for Action {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Name(verb, target) => f.write_str(&format!("{verb:?}@{target:?}").to_lowercase()),
            Self::Weave(seed) => write!(f, "weave:{seed}"),
            other => f.write_str(&format!("{other:?}").to_lowercase()),
        }
    }
}

impl std::str::FromStr for Action {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "weave" {
            return Ok(Self::Weave(Self::DRAWN));
        }
        if let Some(seed) = text.strip_prefix("weave:") {
            return seed
                .parse()
                .map(Self::Weave)
                .map_err(|error| format!("{error}"));
        }
        let mut all = Self::all(Trust::Own, Actor::Same);
        all.extend(NAMED);
        all.extend([Self::None, Self::Spy]);
        let mut all = all.into_iter();
        all.find(|action| action.to_string() == text)
            .ok_or_else(|| format!("there is no action '{text}'"))
    }
}

/// What an action led to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acted {
    Done,
    /// The kernel does not let the actor do it.
    Refused,
    /// There is nothing that it could be done to.
    Nothing,
}

/// The files that an action on names is about.
pub fn targets(
    world: &World,
    call: &Call,
    target: Target,
    finals: &[&str],
    before: &Names,
) -> Vec<PathBuf> {
    let in_top = |path: &&PathBuf| path.starts_with(world.at("top"));
    match target {
        Target::Here => {
            let mut paths = call.paths.clone();
            paths.retain(|path| in_top(&path));
            // Not the folders themselves, nor what is in memory only.
            paths.retain(|path| {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                let folders = ["top", "work", "spare", "current"];
                !folders.contains(&&*name) && !name.starts_with('#')
            });
            paths.dedup();
            paths
        }
        Target::Fresh => Names::of(&world.work()).without(before),
        Target::Final => finals.iter().map(|name| world.work().join(name)).collect(),
        Target::Folder => vec![world.work()],
    }
}

/// The names in a folder, and one level below.
#[derive(Clone, Default)]
pub struct Names(BTreeSet<PathBuf>);

impl Names {
    pub fn of(folder: &Path) -> Self {
        let mut names = BTreeSet::new();
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            names.insert(entry.path());
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                let inner = fs::read_dir(entry.path());
                names.extend(
                    inner
                        .into_iter()
                        .flatten()
                        .flatten()
                        .map(|entry| entry.path()),
                );
            }
        }
        Self(names)
    }

    fn without(self, before: &Self) -> Vec<PathBuf> {
        self.0.difference(&before.0).cloned().collect()
    }
}

/// Lets the actor do it, as a process of its user.
pub fn act(world: &World, actor: Actor, verb: Verb, targets: &[PathBuf]) -> io::Result<Acted> {
    if targets.is_empty() {
        return Ok(Acted::Nothing);
    }
    let mut command = as_actor(actor)?;
    command
        .args(["act", &format!("{verb:?}")])
        .arg(world.root());
    let output = command.args(targets).stdin(Stdio::null()).output()?;
    match output.status.code() {
        Some(0) => Ok(Acted::Done),
        Some(3) => Ok(Acted::Refused),
        Some(4) => Ok(Acted::Nothing),
        _ => Err(io::Error::other(format!("the actor failed: {output:?}"))),
    }
}

/// This program, as the user of an actor.
pub fn as_actor(actor: Actor) -> io::Result<Command> {
    let mut command = Command::new("/proc/self/exe");
    if actor == Actor::Other {
        // Setting the user also removes all supplementary groups.
        command.uid(OTHER).gid(GROUP);
    }
    Ok(command)
}

/// In the actor's process. The exit status says what happened.
pub fn run(verb: &str, root: &Path, targets: &[PathBuf]) -> u8 {
    let verbs = [
        Verb::Unlink,
        Verb::Link,
        Verb::DirLink,
        Verb::Dangling,
        Verb::HardLink,
        Verb::Fifo,
        Verb::Evil,
        Verb::Truncate,
        Verb::Chmod,
        Verb::Chown,
    ];
    let Some(verb) = verbs.into_iter().find(|known| format!("{known:?}") == verb) else {
        return 1;
    };
    let mut status = 4;
    for (number, target) in targets.iter().enumerate() {
        match one(verb, root, target, number) {
            Ok(()) => status = 0,
            Err(error) if error.kind() == io::ErrorKind::NotFound && status != 0 => {}
            Err(_) if status == 0 => {}
            Err(_) => status = 3,
        }
    }
    status
}

/// Where an action moves what was there.
pub const ASIDE: &str = "aside.by.actor";

fn one(verb: Verb, root: &Path, target: &Path, number: usize) -> io::Result<()> {
    let there = fs::symlink_metadata(target).ok();
    let aside = || match &there {
        None => Ok(()),
        Some(_) => fs::rename(target, target.with_file_name(format!("{ASIDE}.{number}"))),
    };
    // Made first under another name, so that nothing has changed if it cannot be made.
    let own = target.with_file_name(format!("{ASIDE}.new.{number}"));
    let put = |made: io::Result<()>| {
        made?;
        aside()
            .and_then(|()| fs::rename(&own, target))
            .inspect_err(|_| {
                let _ = fs::remove_file(&own);
            })
    };
    let is_dir = there.as_ref().is_some_and(fs::Metadata::is_dir);
    match verb {
        Verb::Unlink if is_dir => aside(),
        Verb::Unlink => fs::remove_file(target),
        Verb::Link => put(symlink(root.join("outside/secret"), &own)),
        Verb::DirLink => put(symlink(root.join("outside/links"), &own)),
        Verb::Dangling => put(symlink(root.join("outside/absent"), &own)),
        Verb::HardLink => put(fs::hard_link(root.join("outside/secret"), &own)),
        Verb::Fifo => {
            let mode = nix::sys::stat::Mode::from_bits_truncate(0o666);
            put(nix::unistd::mkfifo(&own, mode).map_err(Into::into))
        }
        Verb::Evil if is_dir => {
            let inner: Vec<_> = fs::read_dir(target)?.flatten().collect();
            aside()?;
            fs::create_dir(target)?;
            fs::set_permissions(target, fs::Permissions::from_mode(0o755))?;
            for entry in inner {
                let name = entry.file_name();
                fs::copy(root.join("actor/evil.bin"), target.join(name))?;
            }
            Ok(())
        }
        Verb::Evil => {
            let socket = root.join("actor/socket");
            let evil = if is_socket(target) {
                socket
            } else {
                let own = root.join(format!("actor/evil.{number}"));
                fs::copy(root.join("actor/evil.bin"), &own)?;
                own
            };
            fs::rename(evil, target)
        }
        Verb::Truncate => {
            let file = fs::File::options().write(true).open(target)?;
            file.set_len(0)
        }
        Verb::Chmod => fs::set_permissions(target, fs::Permissions::from_mode(0o777)),
        Verb::Chown => std::os::unix::fs::chown(target, Some(OTHER), Some(GROUP)),
    }
}

/// A process of the other user that has opened all that it may read.
pub struct Spy(std::process::Child);

impl Spy {
    pub fn new(folder: &Path) -> io::Result<Self> {
        let mut child = as_actor(Actor::Other)?
            .arg("spy")
            .arg(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut ready = [0];
        child
            .stdout
            .as_mut()
            .expect("it is a pipe")
            .read_exact(&mut ready)?;
        Ok(Self(child))
    }

    /// The contents that it reads now.
    pub fn reads(mut self) -> io::Result<Vec<Vec<u8>>> {
        drop(self.0.stdin.take());
        let mut all = Vec::new();
        let mut out = self.0.stdout.take().expect("it is a pipe");
        out.read_to_end(&mut all)?;
        self.0.wait()?;
        let mut rest = &all[..];
        let mut files = Vec::new();
        while let Some((length, bytes)) = rest.split_first_chunk::<8>() {
            let (file, after) = bytes.split_at(u64::from_le_bytes(*length) as usize);
            files.push(file.to_vec());
            rest = after;
        }
        Ok(files)
    }
}

/// In the spy's process.
pub fn spy(folder: &OsString) -> io::Result<()> {
    let mut open = Vec::new();
    for entry in fs::read_dir(folder)?.flatten() {
        if entry.file_type()?.is_file() {
            open.extend(fs::File::open(entry.path()));
        }
    }
    let mut out = io::stdout();
    out.write_all(b"r")?;
    out.flush()?;
    io::stdin().read_to_end(&mut Vec::new())?;
    for mut file in open {
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        out.write_all(&(bytes.len() as u64).to_le_bytes())?;
        out.write_all(&bytes)?;
    }
    out.flush()
}
