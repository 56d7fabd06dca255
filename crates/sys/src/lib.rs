//! The system calls of dmafile, and all of its `unsafe` but that of the bindings.
//!
//! Built on rustix and io-uring, with raw system calls only where these lack one. Nothing here depends
//! on plans, buffers or methods: the input is descriptors, memory and numbers, the output an [`Errno`].
//!
//! It is for dmafile's own crates: anything may change between two versions.

// Many fields and constants need no more words than their names.
#![allow(missing_docs)]
// A mapping is never empty.
#![allow(clippy::len_without_is_empty)]

pub mod block;
pub mod cache;
pub mod dmabuf;
pub mod dmabuf_sync;
pub mod driver;
pub mod file;
mod fork;
pub mod host;
mod ioctl;
pub mod map;
pub mod memfd;
pub mod module;
pub mod mount;
pub mod notifier;
pub mod numa;
pub mod pagemap;
pub mod place;
pub mod process;
pub mod sandbox;
pub mod socket;
pub mod stat;

pub mod uring;
pub mod usage;

use std::borrow::Borrow;

pub use rustix::io::Errno;

/// The errno of a failed raw libc call.
fn last_errno() -> Errno {
    errno(std::io::Error::last_os_error())
}

/// The errno of an error of the standard library or of the io-uring crate; EIO if it has none.
pub fn errno(error: impl Borrow<std::io::Error>) -> Errno {
    Errno::from_io_error(error.borrow()).unwrap_or(Errno::IO)
}

/// Repeats a call for as long as signals interrupt it.
pub fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => continue,
            done => return done,
        }
    }
}
