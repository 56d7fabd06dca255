//! `heap:NAME`: a dma-buf from `/dev/dma_heap/NAME`.

use super::dmabuf::{DmaBufs, cannot_allocate, cannot_map, name_after_file};
use crate::error::{Error, Result};
use crate::plan::{DmaBufFacts, Plan};
use crate::sys::map::{Mapping, page_size};
use crate::sys::{Errno, dmabuf};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

pub(super) fn make(name: &str, plan: &Plan) -> Result<DmaBufs> {
    let fd = allocate(&open(name)?, plan.capacity)?;
    name_after_file(&fd, plan);
    DmaBufs::to_fill(&Arc::new(fd), true).map_err(cannot_map)
}

/// What a heap's memory is like: tried with a page of it.
pub(crate) fn look_at_heap(name: &str) -> Result<DmaBufFacts> {
    let heap = open(name)?;
    let fd = allocate(&heap, page_size())?;
    let map = Mapping::chain(&[(fd.as_fd(), page_size())]).map_err(cannot_map)?;
    Ok(DmaBufFacts {
        unpinnable: map.region().can_be_pinned(0).err(),
        heap_reads: dmabuf::reads_files(heap.as_fd()),
        ..DmaBufFacts::default()
    })
}

fn open(name: &str) -> Result<OwnedFd> {
    dmabuf::open_heap(name).map_err(|errno| cannot_open(name, errno))
}

fn allocate(heap: &OwnedFd, bytes: u64) -> Result<OwnedFd> {
    dmabuf::allocate(heap.as_fd(), bytes).map_err(cannot_allocate)
}

fn cannot_open(name: &str, errno: Errno) -> Error {
    let node = format!("{}/{name}", dmabuf::HEAPS);
    let error = Error::os("cannot make the buffer", errno);
    let there: Vec<_> = dmabuf::heaps()
        .iter()
        .filter_map(|node| Some(node.file_name()?.to_string_lossy().into_owned()))
        .collect();
    match errno {
        Errno::NOENT | Errno::NXIO | Errno::NODEV if there.is_empty() => {
            error.why(format!("there is no {node}")).remedy(
                "a kernel with CONFIG_DMABUF_HEAPS_SYSTEM (in a container, its host's node), \
                 dmafile.ko, or --to udmabuf or memfd",
            )
        }
        Errno::NOENT | Errno::NXIO | Errno::NODEV => {
            error.why(format!("there is no {node}")).remedy(format!(
                "use one that is there: heap:{}",
                there.join(", heap:")
            ))
        }
        Errno::ACCESS | Errno::PERM => {
            error
                .why(format!("{node} cannot be opened"))
                .remedy(format!(
                    "chgrp video {node} && chmod g+r {node}, or a udev rule"
                ))
        }
        _ => error,
    }
}
