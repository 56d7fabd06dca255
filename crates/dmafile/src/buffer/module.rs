//! `module`: a dma-buf from dmafile.ko, which reads files into its pages by itself.

use super::dmabuf::{ToFill, cannot_map, name_after_file};
use crate::error::Result;
use crate::exporter::module;
use crate::plan::Plan;
use std::sync::Arc;

pub(super) fn make(plan: &Plan) -> Result<ToFill> {
    let fd = module::allocate(plan.place.writable_to)?.0;
    name_after_file(&fd, plan);
    ToFill::new(&Arc::new(fd), true).map_err(cannot_map)
}
