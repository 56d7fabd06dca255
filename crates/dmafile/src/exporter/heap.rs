//! The dma-heaps of this machine: `/dev/dma_heap/NAME`.

use super::cannot_allocate;
use crate::error::{Error, Result};
use crate::message::{Opt, message};
use crate::options::Kind;
use crate::sys::{Errno, dmabuf};
use std::os::fd::{AsFd, OwnedFd};

/// Opens a heap's node.
pub(crate) fn open(name: &str) -> Result<OwnedFd> {
    dmabuf::open_heap(name).map_err(|errno| cannot_open(name, errno))
}

/// Allocates a dma-buf of `bytes`.
pub(crate) fn allocate(heap: &OwnedFd, bytes: u64) -> Result<OwnedFd> {
    dmabuf::allocate(heap.as_fd(), bytes).map_err(cannot_allocate)
}

fn cannot_open(name: &str, errno: Errno) -> Error {
    let node = format!("{}/{name}", dmabuf::HEAPS);
    let error = Error::os("cannot create the buffer", errno);
    let there: Vec<_> = dmabuf::heaps()
        .iter()
        .filter_map(|node| Some(node.file_name()?.to_string_lossy().into_owned()))
        .collect();
    match errno {
        Errno::NOENT | Errno::NXIO | Errno::NODEV if there.is_empty() => {
            error.with_why(format!("there is no {node}")).with_remedy(
                message!["use a kernel with CONFIG_DMABUF_HEAPS_SYSTEM (in a container, its host's node), dmafile.ko, or ", Opt::To.set(Kind::Udmabuf), " or memfd"]
            )
        }
        Errno::NOENT | Errno::NXIO | Errno::NODEV => error
            .with_why(format!("there is no {node}"))
            .with_remedy(format!(
                "use an existing one: heap:{}",
                there.join(", heap:")
            )),
        Errno::ACCESS | Errno::PERM => {
            error
                .with_why(format!("{node} cannot be opened"))
                .with_remedy(format!(
                    "chgrp video {node} && chmod g+r {node}, or a udev rule"
                ))
        }
        _ => error,
    }
}
