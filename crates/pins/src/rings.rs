//! Buffers registered with io_uring: `UserBufs` in the `fdinfo` of each ring.

use super::ended;
use dmafile_sys::{Errno, process};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// An io_uring ring that a process has created, inherited or received. It appears twice if its
/// descriptor has been duplicated.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct ProcessRing {
    /// Its descriptor in that process.
    pub fd: u32,
    /// Number of registered buffers.
    pub count: u64,
    /// Their size in bytes.
    pub bytes: u64,
    /// The buffers; None, with `count` and `bytes` 0, if the kernel does not list them: before
    /// Linux 5.6, or because the ring was busy at every attempt.
    pub buffers: Option<Vec<RegisteredBuffer>>,
}

/// Memory that a ring keeps pinned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct RegisteredBuffer {
    /// Its address in the process that registered it.
    pub address: u64,
    /// Its size in bytes.
    pub bytes: u64,
}

/// The rings among these descriptors of a process.
pub(super) fn of(folder: &Path, links: &[(u32, PathBuf)]) -> Result<Vec<ProcessRing>, Errno> {
    let mut rings = Vec::new();
    for (fd, link) in links {
        if link.as_os_str() != "anon_inode:[io_uring]" {
            continue;
        }
        match process::registered(folder, *fd) {
            Ok(buffers) => rings.push(ProcessRing::new(*fd, buffers)),
            // Closed since.
            Err(errno) if ended(errno) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(rings)
}

impl ProcessRing {
    fn new(fd: u32, buffers: Option<Vec<(u64, u64)>>) -> Self {
        let buffers: Option<Vec<_>> = buffers.map(|buffers| {
            let buffers = buffers.into_iter();
            buffers
                .map(|(address, bytes)| RegisteredBuffer { address, bytes })
                .collect()
        });
        let listed = buffers.as_deref().unwrap_or_default();
        Self {
            fd,
            count: listed.len() as u64,
            bytes: listed.iter().map(|buffer| buffer.bytes).sum(),
            buffers,
        }
    }
}
