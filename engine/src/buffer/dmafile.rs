//! `dmafile`: a dma-buf from dmafile.ko, which moves bytes of files into its pages by itself.

use super::dmabuf::{DmaBufs, cannot_map, name_after_file};
use crate::error::Result;
use crate::module::{self, Module};
use crate::plan::{DmaBufFacts, Plan};
use crate::sys::dmafile;
use crate::sys::map::{Mapping, page_size};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

pub(super) fn make(plan: &Plan) -> Result<DmaBufs> {
    let fd = allocate(plan.capacity)?.0;
    name_after_file(&fd, plan);
    DmaBufs::to_fill(&Arc::new(fd), true).map_err(cannot_map)
}

/// What dmafile.ko does here. With `try_pin`, also whether direct reads of others can land in the
/// mapping of such a buffer: tried with a page of it.
pub(crate) fn look_at_dmafile(try_pin: bool) -> Result<DmaBufFacts> {
    if !try_pin {
        return Ok(DmaBufFacts {
            module: Some(module::open()?.1),
            ..DmaBufFacts::default()
        });
    }
    let (fd, module) = allocate(page_size())?;
    let map = Mapping::chain(&[(fd.as_fd(), page_size())]).map_err(cannot_map)?;
    Ok(DmaBufFacts {
        unpinnable: map.region().can_be_pinned(0).err(),
        module: Some(module),
        ..DmaBufFacts::default()
    })
}

/// The module behind a dma-buf that exists; None for one of somebody else.
pub(super) fn module_behind(dma_buf: BorrowedFd<'_>) -> Option<Module> {
    let (node, module) = module::open().ok()?;
    dmafile::is_its_own(node.as_fd(), dma_buf).then_some(module)
}

fn allocate(bytes: u64) -> Result<(OwnedFd, Module)> {
    let (node, module) = module::open()?;
    let fd = dmafile::allocate(node.as_fd(), bytes);
    let fd = fd.map_err(|errno| module::cannot_allocate(errno, &module))?;
    Ok((fd, module))
}
