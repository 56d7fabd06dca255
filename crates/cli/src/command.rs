//! COMMAND: what it inherits, and a path with which it can open that.

use crate::folder::Private;
use crate::{Failure, Launcher, limits, signals};
use dmafile::Buffer;
use dmafile::internal::{one_line, unlisted};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Replaced by the path in the arguments of COMMAND, as in find(1).
const PLACE: &[u8] = b"{}";

/// A buffer, and the name of its file or of its source in a snapshot.
pub(crate) struct Named {
    pub name: OsString,
    pub buffer: Buffer,
}

/// What is next to the files of the buffers.
#[derive(Default)]
pub(crate) struct Others {
    /// Links to these.
    pub links: Vec<PathBuf>,
    /// Files with these bytes.
    pub files: Vec<Named>,
}

/// What the path refers to, in a private folder.
pub(crate) enum Shape {
    /// The file with the bytes of the buffer.
    File,
    /// A folder with this name, with a file for each buffer and links to `others`.
    Folder { name: OsString, others: Others },
    /// This file, in a folder with a file for each buffer and links to `others`.
    Within { name: OsString, others: Others },
}

/// A variable of COMMAND's environment. All but the path are lists if there are several files or sources.
#[derive(Clone, Copy)]
pub(crate) enum Variable {
    Fd,
    Bytes,
    Offset,
    Names,
    Path,
}

impl Variable {
    const ALL: [Self; 5] = [Self::Fd, Self::Bytes, Self::Offset, Self::Names, Self::Path];

    fn name(self) -> &'static str {
        match self {
            Self::Fd => "DMAFILE_FD",
            Self::Bytes => "DMAFILE_BYTES",
            Self::Offset => "DMAFILE_OFFSET",
            Self::Names => "DMAFILE_NAMES",
            Self::Path => "DMAFILE_PATH",
        }
    }
}

/// The variables that are set, and their values.
pub(crate) type Variables = Vec<(Variable, OsString)>;

/// The name of a file or folder.
pub(crate) fn name_of(path: &Path) -> OsString {
    let own = path.file_name().map(OsStr::to_os_string);
    // `.` and `..` are not names.
    let real = || Some(path.canonicalize().ok()?.file_name()?.to_os_string());
    own.or_else(real).unwrap_or_else(|| "model".into())
}

/// True if an argument contains the placeholder for the path.
pub(crate) fn wants_path(command: &[OsString]) -> bool {
    command.iter().any(|word| find(word.as_bytes()).is_some())
}

/// Execs COMMAND, with each buffer as a file at its path or in the folder there; returns only on
/// failure.
pub(crate) fn hand_over_by_path(
    launcher: &Launcher,
    command: &[OsString],
    named: Vec<Named>,
    shape: Shape,
) -> Result<Failure, Failure> {
    named.iter().try_for_each(check)?;
    let mut variables = Variables::new();
    if matches!(shape, Shape::Folder { .. }) || named.len() > 1 {
        variables.push(names(named.iter().map(|one| one.name.as_os_str()))?);
    }
    let inner = match &shape {
        Shape::Folder { name, .. } => Some(name.as_os_str()),
        Shape::File | Shape::Within { .. } => None,
    };
    // Before any descriptor can be inherited: the process that removes it would keep the memory alive.
    let folder = Private::new(launcher, inner)?;
    let (path, others) = match shape {
        Shape::File => (folder.path().join(&named[0].name), Others::default()),
        Shape::Folder { others, .. } => (folder.path().to_path_buf(), others),
        Shape::Within { name, others } => (folder.path().join(name), others),
    };
    for other in &others.links {
        link(&folder, other, other.file_name().unwrap_or_default())?;
    }
    // They stay open for COMMAND.
    let mut kept = Vec::new();
    for Named { name, buffer } in others.files {
        for fd in buffer.into_inherited_fds()? {
            link(&folder, &opened_again(&fd)?, &name)?;
            kept.push(fd);
        }
    }
    variables.extend(ranges(named.iter().map(|one| &one.buffer)));
    let mut fds = Vec::new();
    for Named { name, buffer } in named {
        // A memfd has one descriptor.
        for fd in buffer.into_inherited_fds()? {
            link(&folder, &opened_again(&fd)?, &name)?;
            fds.push(fd);
        }
    }
    folder
        .inherit()
        .map_err(|error| cannot_link(&path, &error))?;
    variables.push((Variable::Fd, numbers(&fds)));
    let words: Vec<_> = command.iter().map(|word| with_path(word, &path)).collect();
    variables.push((Variable::Path, path.into()));
    Ok(become_command(&words, variables))
}

/// The variable with the names of files or sources, in the order of their descriptors.
pub(crate) fn names<'n>(
    names: impl Iterator<Item = &'n OsStr>,
) -> Result<(Variable, OsString), Failure> {
    let names: Vec<_> = names.collect();
    for name in &names {
        let name = name.to_string_lossy();
        if let Some(why) = unlisted(&name) {
            let (name, list) = (one_line(&name), Variable::Names.name());
            return Err(Failure {
                line: format!(
                    "cannot list the files for COMMAND: {name}: the name {why}, and {list} is a list with commas \
                     (EINVAL); rename the file"
                ),
                status: 1,
            });
        }
    }
    Ok((Variable::Names, names.join(OsStr::new(","))))
}

/// Where the bytes are in their descriptors.
pub(crate) fn ranges<'b>(buffers: impl Iterator<Item = &'b Buffer> + Clone) -> Variables {
    let list = |of: fn(&Buffer) -> u64| {
        let all: Vec<_> = buffers.clone().map(|one| of(one).to_string()).collect();
        all.join(",").into()
    };
    vec![
        (Variable::Bytes, list(Buffer::len)),
        (Variable::Offset, list(Buffer::offset)),
    ]
}

/// The numbers of descriptors, separated by commas.
pub(crate) fn numbers(fds: &[OwnedFd]) -> OsString {
    let numbers: Vec<_> = fds.iter().map(|fd| fd.as_raw_fd().to_string()).collect();
    numbers.join(",").into()
}

/// The variable with a path to the only buffer, if it has one.
pub(crate) fn path_variable(has_path: bool, fds: &[OwnedFd]) -> Option<(Variable, OsString)> {
    let path = fds.first().filter(|_| has_path).map(opened_again);
    Some((Variable::Path, path?.ok()?.into()))
}

/// Refuses a buffer that cannot be opened by a path as its file.
fn check(named: &Named) -> Result<(), Failure> {
    if named.buffer.dma_bufs().is_empty() {
        starts_at(&named.name, named.buffer.offset())
    } else {
        Err(no_path(
            &named.name,
            "a dma-buf has no path (ENXIO); use --to memfd, or DMAFILE_FD",
        ))
    }
}

/// Refuses a buffer that has other bytes before those of the file.
pub(crate) fn starts_at(name: &OsStr, offset: u64) -> Result<(), Failure> {
    match offset {
        0 => Ok(()),
        _ => Err(no_path(
            name,
            &format!(
                "its bytes begin at byte {offset} of the buffer (EINVAL); choose an --offset that is \
                 a multiple of a page, or use DMAFILE_FD"
            ),
        )),
    }
}

fn no_path(name: &OsStr, why: &str) -> Failure {
    let name = one_line(&name.to_string_lossy());
    Failure {
        line: format!("cannot give COMMAND a path: {name}: {why}"),
        status: 1,
    }
}

/// A path that opens the memory behind a descriptor in any process that may inspect this one: COMMAND
/// will have its process ID.
fn opened_again(fd: &OwnedFd) -> Result<PathBuf, Failure> {
    Ok(this_process()?.join(format!("fd/{}", fd.as_raw_fd())))
}

/// This process in the proc file system, without which nothing opens the memory by a path.
pub(crate) fn this_process() -> Result<PathBuf, Failure> {
    // Not by the link, because some sandboxes refuse readlink(2).
    let own = "/proc/self/stat";
    let remedy = "the proc file system is missing there: mount it, or use DMAFILE_FD";
    fs::read_to_string(own)
        .map(|text| Path::new("/proc").join(text.split(' ').next().unwrap_or_default()))
        .map_err(|error| Failure::os("cannot give COMMAND a path", own, &error, remedy))
}

fn link(folder: &Private, target: &Path, name: &OsStr) -> Result<(), Failure> {
    let made = folder.link(target, name);
    made.map_err(|error| cannot_link(&folder.path().join(name), &error))
}

fn cannot_link(path: &Path, error: &io::Error) -> Failure {
    Failure::os(
        "cannot give COMMAND a path",
        &one_line(&path.to_string_lossy()),
        error,
        "",
    )
}

fn find(word: &[u8]) -> Option<usize> {
    word.windows(PLACE.len()).position(|part| part == PLACE)
}

/// Replaces the placeholder in a word by the path.
fn with_path(word: &OsStr, path: &Path) -> OsString {
    let (mut rest, mut all) = (word.as_bytes(), Vec::new());
    while let Some(at) = find(rest) {
        all.extend_from_slice(&rest[..at]);
        all.extend_from_slice(path.as_os_str().as_bytes());
        rest = &rest[at + PLACE.len()..];
    }
    all.extend_from_slice(rest);
    OsString::from_vec(all)
}

/// Execs a command with these variables in its environment; returns only on failure.
pub(crate) fn become_command(command: &[OsString], variables: Variables) -> Failure {
    let fds = variables.iter().filter(|one| matches!(one.0, Variable::Fd));
    limits::restore(fds.filter_map(|(_, numbers)| numbers.to_str()));
    let mut program = Command::new(&command[0]);
    // Those of an enclosing dmafile describe memory that this COMMAND is not given.
    for variable in Variable::ALL {
        program.env_remove(variable.name());
    }
    program.args(&command[1..]).envs(
        variables
            .into_iter()
            .map(|(variable, value)| (variable.name(), value)),
    );
    let error = signals::exec(program);
    let name = command[0].to_string_lossy();
    let mut failure = Failure::os("cannot run", &name, &error, "");
    failure.status = match error.kind() {
        io::ErrorKind::NotFound => 127,
        _ => 126,
    };
    failure
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_placeholder_is_replaced_by_the_path() {
        let path = Path::new("/run/a b/{}");
        for (word, want) in [
            ("{}", "/run/a b/{}"),
            ("-m{}", "-m/run/a b/{}"),
            ("{}:{}", "/run/a b/{}:/run/a b/{}"),
            ("{{}}", "{/run/a b/{}}"),
            ("{ }", "{ }"),
            ("", ""),
        ] {
            assert_eq!(with_path(OsStr::new(word), path), want, "{word}");
            assert_eq!(wants_path(&[word.into()]), word != want, "{word}");
        }
    }
}
