//! Handling of SIGINT and SIGTERM.

use crate::{Failure, INTERRUPTED};
use dmafile::CancelToken;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::low_level::pipe;
use std::os::fd::OwnedFd;

/// SIGINT and SIGTERM set the token; a second one ends the process immediately. A signal that was
/// ignored when we were started (nohup, a background job of a script) stays ignored, for COMMAND
/// as well.
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

/// From now on SIGINT and SIGTERM write to this descriptor, unless they are ignored.
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

/// One bit per signal, from `/proc/self/status`; none if that cannot be read.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}
