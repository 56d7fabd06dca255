//! The criu that is installed: its version, and what it says when it fails.

use dmafile::internal::Verb;
use dmafile::{Error, Result};
use dmafile_sys::{Errno, errno};
use std::fmt::Display;
use std::path::Path;
use std::process::{Command, Stdio};

/// The oldest version that takes the descriptors of memfd mappings (`--inherit-fd`).
const OLDEST: (u32, u32) = (3, 19);
/// The name of its log, in its working folder.
const LOG: &str = "criu.log";
/// The number of its lines that an error quotes.
const MOST_LINES: usize = 3;

/// A version of criu that can be used, such as "4.1.1".
///
/// # Errors
/// ENOENT if there is none, EOPNOTSUPP if it is too old.
pub(crate) fn version(what: Verb) -> Result<String> {
    let install = "install criu 3.19 or later (Debian 13 has one)";
    let done = Command::new("criu")
        .arg("--version")
        .stdin(Stdio::null())
        .output();
    let done = done.map_err(|error| {
        let error = Error::os(what, errno(error)).at("criu");
        error.with_why("cannot run it").with_remedy(install)
    })?;
    let text = String::from_utf8_lossy(&done.stdout);
    let version = text.lines().find_map(|line| line.strip_prefix("Version:"));
    let version = version.unwrap_or_default().trim().to_string();
    let mut parts = version
        .split('.')
        .map(|part| part.parse::<u32>().unwrap_or(0));
    if (parts.next().unwrap_or(0), parts.next().unwrap_or(0)) < OLDEST {
        let error = Error::os(what, Errno::OPNOTSUPP).at("criu");
        return Err(error
            .with_why(format!(
                "version {version:?} cannot take memory from others"
            ))
            .with_remedy(install));
    }
    Ok(version)
}

/// The command to dump or restore, without what only one of them needs.
pub(crate) fn command(action: &str, images: &Path, work: &Path) -> Command {
    let mut command = Command::new("criu");
    command.arg(action).arg("--images-dir").arg(images);
    command.arg("--work-dir").arg(work);
    command.args(["--log-file", LOG, "-v3", "--shell-job", "--file-locks"]);
    command.stdin(Stdio::null());
    command
}

/// Why criu failed, in its own words: the last errors in its log.
pub(crate) fn failed(what: Verb, work: &Path, status: impl Display) -> Error {
    let log = work.join(LOG);
    let text = std::fs::read(&log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines = text
        .lines()
        .filter_map(|line| line.split_once("Error ").map(|(_, why)| why));
    // It goes on with the limit that it has.
    let lines = lines.filter(|line| !line.contains("rlimit:"));
    // What follows from the first ones says less.
    let lines: Vec<_> = lines.take(MOST_LINES).collect();
    let why = if lines.is_empty() {
        format!("criu ended with {status}")
    } else {
        format!("criu says: {}", lines.join("; "))
    };
    let error = Error::new(what, why).at(log.display().to_string());
    // SO_PASSCRED, which TCP sockets do not have any more.
    if lines.iter().any(|line| line.contains("Can't get 1:16 opt")) {
        return error.with_remedy("Linux 6.16 and later need criu 4.2 for TCP sockets");
    }
    error
}
