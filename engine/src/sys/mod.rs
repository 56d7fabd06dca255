//! The only part of the engine that makes system calls, and the only one with `unsafe`.
//!
//! Built on rustix and io-uring, with raw system calls only where these lack one. Nothing here depends
//! on plans, buffers or methods: the input is descriptors, memory and numbers, the output an [`Errno`].
#![allow(unsafe_code)]

pub(crate) mod block;
pub(crate) mod cache;
pub(crate) mod dmabuf;
pub(crate) mod driver;
pub(crate) mod file;
mod fork;
pub(crate) mod frames;
pub(crate) mod host;
mod ioctl;
pub(crate) mod kcore;
pub(crate) mod ko;
pub(crate) mod map;
pub(crate) mod memfd;
pub(crate) mod netlink;
pub(crate) mod numa;
pub(crate) mod pagemap;
pub(crate) mod place;
pub(crate) mod process;
pub(crate) mod sandbox;
pub(crate) mod socket;
pub(crate) mod stat;
pub(crate) mod tracefs;
pub(crate) mod turn;
pub(crate) mod uring;
pub(crate) mod usage;

use std::borrow::Borrow;

pub(crate) use rustix::io::Errno;

/// The errno of a failed raw libc call.
fn last_errno() -> Errno {
    errno(std::io::Error::last_os_error())
}

/// The errno of an error of the standard library or of the io-uring crate; EIO if it has none.
pub(crate) fn errno(error: impl Borrow<std::io::Error>) -> Errno {
    Errno::from_io_error(error.borrow()).unwrap_or(Errno::IO)
}

/// Repeats a call for as long as signals interrupt it.
pub(crate) fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => continue,
            done => return done,
        }
    }
}
