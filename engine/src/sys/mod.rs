//! The only part of the engine that speaks to the kernel, and the only one with `unsafe`.
//!
//! Built on rustix and io-uring; raw system calls only where they lack one. Nothing here knows
//! of plans, buffers or methods: descriptors, memory and numbers come in, an [`Errno`] comes out.
#![allow(unsafe_code)]

pub(crate) mod cache;
pub(crate) mod dmabuf;
pub(crate) mod dmafile;
pub(crate) mod file;
pub(crate) mod host;
pub(crate) mod map;
pub(crate) mod memfd;
pub(crate) mod numa;
pub(crate) mod pagemap;
pub(crate) mod pipe;
pub(crate) mod process;
pub(crate) mod socket;
pub(crate) mod uring;
pub(crate) mod usage;

pub(crate) use rustix::io::Errno;

/// The errno that a raw libc call left behind.
fn last_errno() -> Errno {
    let raw = std::io::Error::last_os_error().raw_os_error();
    Errno::from_raw_os_error(raw.unwrap_or(libc::EIO))
}
