//! `dmafile`: a dma-buf from dmafile.ko, which moves bytes of files into its pages by itself.

use super::Memory;
use super::dmabuf::DmaBufs;
use crate::error::{Error, Result};
use crate::module::{self, Module};
use crate::plan::{DmaBufFacts, Plan};
use crate::sys::map::{Mapping, page_size};
use crate::sys::{Errno, dmabuf, dmafile};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

pub(super) fn make(plan: &Plan) -> Result<DmaBufs> {
    let fd = allocate(plan.capacity)?.0;
    name(&fd, plan);
    DmaBufs::to_fill(&Arc::new(fd), true).map_err(cannot_map)
}

/// One that was made and filled in one step.
pub(crate) fn born(fd: OwnedFd, plan: &Plan) -> Result<Box<dyn Memory>> {
    name(&fd, plan);
    let memory = DmaBufs::whole(vec![Arc::new(fd)]).map_err(cannot_map)?;
    Ok(Box::new(memory))
}

/// What dmafile.ko does here. With `try_pin`, also whether direct reads of others can land in the
/// mapping of such a buffer: tried with a page of it.
pub(crate) fn look_at_dmafile(try_pin: bool) -> Result<DmaBufFacts> {
    if !try_pin {
        let module = Some(module::open()?.1);
        return Ok(DmaBufFacts {
            unpinnable: None,
            module,
        });
    }
    let (fd, module) = allocate(page_size())?;
    let map = Mapping::chain(&[(fd.as_fd(), page_size())]).map_err(cannot_map)?;
    Ok(DmaBufFacts {
        unpinnable: map.region().can_be_pinned(0).err(),
        module: Some(module),
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

fn cannot_map(errno: Errno) -> Error {
    Error::os("cannot map the dma-buf", errno)
}

fn name(fd: &OwnedFd, plan: &Plan) {
    if let Some(file) = plan.file.file_name() {
        dmabuf::name(fd.as_fd(), &file.to_string_lossy());
    }
}
