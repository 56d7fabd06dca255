//! What the harness does in processes of its own: it starts a command so that it can be traced, acts as another
//! user, and uses parts of the engine that have no command.

use crate::calls::CALLS;
use dmafile_hold::Shared;
use dmafile_record::{Note, RecorderBuffer, RecorderOptions};
use nix::sys::ptrace;
use nix::sys::signal::{Signal, raise};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, apply_filter,
};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

/// Becomes a command that the parent traces, if `traced` is set.
///
/// With `no_tmpfile` no file can be created without a name, as on NFS, FUSE and vfat.
pub fn become_command(traced: bool, no_tmpfile: bool, command: &[OsString]) -> io::Error {
    let filter = || -> io::Result<()> {
        if traced {
            ptrace::traceme()?;
            raise(Signal::SIGSTOP)?;
        }
        if no_tmpfile {
            apply(
                vec![(libc::SYS_openat, vec![tmpfile()?])],
                SeccompAction::Errno(libc::EOPNOTSUPP as u32),
            )?;
        }
        if !traced {
            return Ok(());
        }
        let all = CALLS.iter().map(|known| (known.number, Vec::new()));
        apply(all.collect(), SeccompAction::Trace(0))
    };
    if let Err(error) = filter() {
        return error;
    }
    Command::new(&command[0]).args(&command[1..]).exec()
}

fn apply(rules: Vec<(i64, Vec<SeccompRule>)>, action: SeccompAction) -> io::Result<()> {
    let arch = std::env::consts::ARCH
        .try_into()
        .map_err(io::Error::other)?;
    let rules: BTreeMap<i64, Vec<SeccompRule>> = rules.into_iter().collect();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, action, arch);
    let program: BpfProgram = filter
        .and_then(TryInto::try_into)
        .map_err(io::Error::other)?;
    apply_filter(&program).map_err(io::Error::other)
}

fn tmpfile() -> io::Result<SeccompRule> {
    // O_TMPFILE contains O_DIRECTORY.
    let bit = (libc::O_TMPFILE & !libc::O_DIRECTORY) as u64;
    let is_set = SeccompCmpOp::MaskedEq(bit);
    SeccompCondition::new(2, SeccompCmpArgLen::Dword, is_set, bit)
        .and_then(|condition| SeccompRule::new(vec![condition]))
        .map_err(io::Error::other)
}

/// Whether tracing works here.
pub fn works() -> Result<(), String> {
    if !nix::unistd::geteuid().is_root() {
        return Err("the second actor needs other users: run as root".to_string());
    }
    let mut child = Command::new("/proc/self/exe")
        .args(["start", "traced", "/bin/true"])
        .spawn()
        .map_err(|error| error.to_string())?;
    let pid = nix::unistd::Pid::from_raw(child.id() as i32);
    let mut session = crate::trace::Session::new(std::path::Path::new("/nowhere"));
    let traced = session.add(pid).and_then(|()| {
        loop {
            match session.next(Duration::from_secs(60))? {
                crate::trace::Next::Call(task, _) => session.go(task),
                crate::trace::Next::Quiet if session.exit(0).is_none() => {
                    return Err(io::Error::other("it does not end"));
                }
                crate::trace::Next::Over | crate::trace::Next::Quiet => {
                    return Ok(session.exit(0));
                }
            }
        }
    });
    match traced {
        Ok(Some(crate::trace::Exit::Status(0))) => Ok(()),
        other => {
            let _ = child.kill();
            let _ = child.wait();
            Err(format!(
                "ptrace(2) or seccomp(2) do not work here: {other:?}"
            ))
        }
    }
}

/// Number of records.
pub const RECORDS: u64 = 12;

/// Records to a file, in three files, and prints how many records are acknowledged.
pub fn record(file: PathBuf) -> Result<(), dmafile::Error> {
    let recorder = RecorderOptions::new(file)
        .in_flight(2)
        .sync_interval(None)
        .rotate_bytes(Some(160_000))
        .start()?;
    say("begun");
    for number in 0..RECORDS {
        let buffer = RecorderBuffer::of_memory(Arc::new(crate::world::record(number)));
        let note = Note {
            tag: number,
            ..Note::default()
        };
        let length = buffer.bytes();
        let ticket = recorder.append(&buffer, 0, length, note)?;
        let ticket = ticket.expect("it waits for room");
        if number % 3 == 2 {
            ticket.wait_durable(None)?;
            say(&format!("durable {}", number + 1));
        }
    }
    let records = recorder.finish()?.records;
    say(&format!("finished {records}"));
    Ok(())
}

/// Shares a file with other processes, prints its bytes, and keeps it until stdin ends.
pub fn shared(folder: PathBuf, file: PathBuf) -> Result<(), dmafile::Error> {
    let held = Shared::of([file])
        .folder(folder)
        .wait(Duration::from_secs(40))
        .run()?;
    for file in held.files() {
        let mut bytes = vec![0; file.buffer.len() as usize];
        file.buffer.access()?.read_at(0, &mut bytes)?;
        let mut out = io::stdout().lock();
        let written = out.write_all(&(bytes.len() as u64).to_le_bytes());
        let _ = written
            .and_then(|()| out.write_all(&bytes))
            .and_then(|()| out.flush());
    }
    let _ = io::stdin().read_to_end(&mut Vec::new());
    Ok(())
}

fn say(line: &str) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
