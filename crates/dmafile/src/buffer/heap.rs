//! `heap:NAME`: a dma-buf from `/dev/dma_heap/NAME`.

use super::dmabuf::{ToFill, cannot_map, name_after_file};
use crate::error::Result;
use crate::exporter::heap;
use crate::plan::Plan;
use std::sync::Arc;

pub(super) fn make(name: &str, plan: &Plan) -> Result<ToFill> {
    let fd = heap::allocate(&heap::open(name)?, plan.place.writable_to)?;
    name_after_file(&fd, plan);
    ToFill::new(&Arc::new(fd), true).map_err(cannot_map)
}
