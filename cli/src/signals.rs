//! SIGINT and SIGTERM, while something is under way.

use crate::{Failure, INTERRUPTED};
use dmafile::CancelToken;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::low_level::pipe;
use std::os::fd::OwnedFd;

/// SIGINT and SIGTERM set the token; a second one ends the process at once. What was ignored when
/// we were started (nohup, a job in the background of a script) stays so, for COMMAND too.
pub(crate) fn interruptible(token: &CancelToken) -> Result<(), Failure> {
    let ignored = ignored();
    for signal in [SIGINT, SIGTERM] {
        if ignored >> (signal - 1) & 1 == 1 {
            continue;
        }
        flag::register_conditional_shutdown(signal, INTERRUPTED.into(), token.flag())
            .and_then(|_| flag::register(signal, token.flag()))
            .map_err(|error| Failure::os("cannot handle", "signals", &error, ""))?;
    }
    Ok(())
}

/// SIGINT and SIGTERM write to this descriptor from now on, but for what was ignored.
pub(crate) fn wake(fd: &OwnedFd) -> Result<(), Failure> {
    let ignored = ignored();
    for signal in [SIGINT, SIGTERM] {
        if ignored >> (signal - 1) & 1 == 1 {
            continue;
        }
        fd.try_clone()
            .and_then(|fd| pipe::register(signal, fd))
            .map_err(|error| Failure::os("cannot handle", "signals", &error, ""))?;
    }
    Ok(())
}

/// A bit a signal, from `/proc/self/status`; none where that cannot be read.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}
