//! Handling of SIGINT and SIGTERM.

use crate::{Failure, INTERRUPTED};
use dmafile::CancelToken;
use dmafile::internal::sync::lock;
use dmafile_freeze::Roots;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::{pipe, unregister};
use signal_hook::{SigId, flag};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::panic::resume_unwind;
use std::process::Command;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, OnceLock};

/// What SIGINT and SIGTERM set.
static TOKEN: OnceLock<CancelToken> = OnceLock::new();

/// The token that SIGINT and SIGTERM set, if they set one.
#[cfg_attr(not(feature = "remote"), allow(dead_code))]
pub(crate) fn token() -> CancelToken {
    TOKEN.get().cloned().unwrap_or_default()
}

/// SIGINT and SIGTERM set the token; a second one ends the process immediately. A signal that was
/// ignored when we were started (nohup, a background job of a script) stays ignored, for COMMAND
/// as well.
pub(crate) fn interruptible(token: &CancelToken) -> Result<Vec<SigId>, Failure> {
    let _ = TOKEN.set(token.clone());
    let mut registered = Vec::new();
    for signal in handled() {
        for id in [
            flag::register_conditional_shutdown(signal, INTERRUPTED.into(), token.flag()),
            flag::register(signal, token.flag()),
        ] {
            registered.push(id.map_err(cannot)?);
        }
    }
    Ok(registered)
}

/// A program that the first thread is to execute, and where it says why it could not.
type Exec = (Command, Sender<io::Error>);

/// Where the first thread waits for one, if another does the work.
static FIRST: Mutex<Option<Sender<Exec>>> = Mutex::new(None);

/// Does the work in another thread, so that the first one can always run the handlers: a thread that waits for a server
/// which does not answer (NFS) runs none, and the second signal would not end the process. For all of a command: it may
/// already wait to open a file.
pub(crate) fn aside<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let work = Mutex::new(Some(work));
    let take = || work.lock().ok().and_then(|mut work| work.take());
    let run = || {
        let _over = Over;
        take().map(|work| work())
    };
    let (ask, asked) = channel();
    *lock(&FIRST) = Some(ask);
    let done = std::thread::scope(|scope| {
        match std::thread::Builder::new().spawn_scoped(scope, run) {
            Ok(thread) => {
                for (mut program, failed) in asked {
                    let _ = failed.send(program.exec());
                }
                thread.join().unwrap_or_else(|panic| resume_unwind(panic))
            }
            // A limit on processes.
            Err(_) => {
                *lock(&FIRST) = None;
                run()
            }
        }
    });
    done.expect("it is done once")
}

/// Lets the first thread go on when the work is over, even by a panic.
struct Over;

impl Drop for Over {
    fn drop(&mut self) {
        *lock(&FIRST) = None;
    }
}

/// Executes a program; returns only on failure. In the first thread, because a program gets some attributes of the thread
/// that executes it: the signal for the death of its parent, the scheduling policy.
pub(crate) fn exec(mut program: Command) -> io::Error {
    let Some(first) = lock(&FIRST).clone() else {
        return program.exec();
    };
    let (failed, why) = channel();
    let asked = first.send((program, failed)).is_ok();
    let why = asked.then(|| why.recv().ok()).flatten();
    why.unwrap_or_else(|| io::Error::other("the first thread has ended"))
}

/// From now on SIGINT and SIGTERM go to these processes, instead of what `before` did, unless they are ignored.
pub(crate) fn pass_on(roots: Roots, before: Vec<SigId>) -> Result<(), Failure> {
    let mut signals = Signals::new(handled()).map_err(cannot)?;
    for id in before {
        unregister(id);
    }
    let thread = std::thread::Builder::new().name("signals".to_string());
    let pass = move || signals.forever().for_each(|signal| roots.signal(signal));
    thread.spawn(pass).map(drop).map_err(cannot)
}

/// From now on SIGINT and SIGTERM write to this descriptor, unless they are ignored.
pub(crate) fn wake(fd: &OwnedFd) -> Result<(), Failure> {
    for signal in handled() {
        fd.try_clone()
            .and_then(|fd| pipe::register(signal, fd))
            .map_err(cannot)?;
    }
    Ok(())
}

fn cannot(error: io::Error) -> Failure {
    Failure::os("cannot handle", "signals", &error, "")
}

/// SIGINT and SIGTERM, unless they are ignored.
fn handled() -> impl Iterator<Item = i32> {
    let ignored = ignored();
    let both = [SIGINT, SIGTERM].into_iter();
    both.filter(move |signal| ignored >> (signal - 1) & 1 == 0)
}

/// One bit per signal, from `/proc/self/status`; none if that cannot be read.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}
