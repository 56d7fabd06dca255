//! The exporters of dma-bufs on this machine, one file each: opens its node, or explains why it
//! cannot.

pub(crate) mod heap;
pub(crate) mod module;
pub(crate) mod udmabuf;

use crate::error::Error;
use crate::message::{Opt, message};
use crate::sys::Errno;

/// The error for an exporter that could not allocate a dma-buf.
pub(crate) fn cannot_allocate(errno: Errno) -> Error {
    let error = Error::os("cannot allocate the buffer", errno);
    match errno {
        Errno::NOMEM => error
            .with_why("there is not enough memory, or a cgroup's limit is too low")
            .with_remedy(message![
                "free memory, raise memory.max, or load a range (",
                Opt::Offset,
                ", ",
                Opt::Length,
                ")"
            ]),
        Errno::MFILE => error.with_remedy("raise the limit on open files: ulimit -n"),
        _ => error,
    }
}
