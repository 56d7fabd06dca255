//! A private folder that exists while COMMAND runs, and the process that removes it.

use crate::{Failure, Launcher};
use dmafile::one_line;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, getpid, pidfd_open, setsid};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

/// The word with which the command starts itself to remove the folder. Not a subcommand, so that help and
/// completions do not show it.
pub(crate) const WORD: &str = "remove-links";
/// Follows the folder in the arguments of the process that stays.
const STAYS: &str = "when-it-has-ended";

/// Creates a folder that only this user may enter. It is removed when this process, by then usually COMMAND,
/// has ended.
pub(crate) fn private(launcher: &Launcher) -> Result<PathBuf, Failure> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let places = runtime.into_iter().filter(|place| place.is_absolute());
    let places = places.chain([std::env::temp_dir(), "/dev/shm".into()]);
    let mut first = None;
    for place in places {
        let made = tempfile::Builder::new()
            .prefix("dmafile-")
            .permissions(Permissions::from_mode(0o700))
            .tempdir_in(&place);
        match made {
            Ok(made) => {
                watch(launcher, made.path())?;
                return Ok(made.keep());
            }
            Err(error) => first = first.or(Some((place, error))),
        }
    }
    let (place, error) = first.expect("there is at least one place");
    Err(Failure::os(
        "cannot make a folder for COMMAND's path",
        &one_line(&place.to_string_lossy()),
        &error,
        "set TMPDIR to a folder that can be written",
    ))
}

/// Starts the process that removes the folder. It must not be a child of COMMAND, which may wait for all of its
/// children: so the child starts another process, and ends.
fn watch(launcher: &Launcher, folder: &Path) -> Result<(), Failure> {
    let failed = |error: io::Error| {
        Failure::os(
            "cannot watch over",
            "the folder of COMMAND's path",
            &error,
            "",
        )
    };
    let this = pidfd_open(getpid(), PidfdFlags::empty()).map_err(|errno| failed(errno.into()))?;
    let ended = launcher
        .command()
        .arg(WORD)
        .arg(folder)
        .stdin(this)
        .stdout(Stdio::null())
        // A signal to the process group of COMMAND may come before the other process is ready for it.
        .process_group(0)
        .status();
    match ended.map_err(failed)?.success() {
        true => Ok(()),
        // It has printed the reason.
        false => Err(failed(io::Error::other("the process for it failed"))),
    }
}

/// `dmafile remove-links FOLDER`, which only [`watch`] calls: stdin is a pidfd (pidfd_open(2)).
pub(crate) fn run(launcher: &Launcher, args: &[OsString]) -> Result<u8, Failure> {
    match args {
        [folder] => {
            let child = launcher
                .command()
                .arg(WORD)
                .arg(folder)
                .arg(STAYS)
                .current_dir("/")
                .stderr(Stdio::null())
                .spawn();
            child
                .map(|_| 0)
                .map_err(|error| Failure::os("cannot start", &launcher.to_string(), &error, ""))
        }
        [folder, stays] if stays == STAYS => {
            stay(Path::new(folder)).map_err(|error| {
                Failure::os("cannot remove", &folder.to_string_lossy(), &error, "")
            })?;
            Ok(0)
        }
        _ => Err(Failure::usage("remove-links is an internal command")),
    }
}

/// Waits until the process has ended, and removes the folder.
fn stay(folder: &Path) -> io::Result<()> {
    // A signal that ends COMMAND may be sent to its whole terminal or service; this process must end after it.
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::default())?;
    }
    // Fails if this is already a session leader.
    let _ = setsid();
    let process = io::stdin();
    while let Err(errno) = poll(&mut [PollFd::new(&process, PollFlags::IN)], None) {
        if errno != Errno::INTR {
            return Err(errno.into());
        }
    }
    remove(folder)
}

/// Removes links and their folders; anything else stays.
fn remove(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_symlink() {
            fs::remove_file(entry.path())?;
        } else if kind.is_dir() {
            remove(&entry.path())?;
        }
    }
    fs::remove_dir(folder)
}
