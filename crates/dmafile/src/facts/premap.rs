//! Probes whether memory can be DMA-mapped once for the disk that has a file.

use crate::error::errno_name;
use crate::source::Source;
use crate::sys::Errno;
use crate::sys::block::BlockDevice;
use crate::sys::map::{Mapping, page_size};
use crate::sys::uring::IoRing;
use std::os::fd::BorrowedFd;

/// The reason, on a kernel that cannot map buffers once.
const NOT_IN_KERNEL: &str = "this kernel's io_uring has no extended buffer update; the driver maps \
                             the buffer for each read";

/// Why memory cannot be mapped once for the files of a source, all of which can be read directly; None if
/// it can. Tried with a page.
pub(super) fn refused(source: &Source) -> Option<String> {
    if !IoRing::maps_once() {
        return Some(NOT_IN_KERNEL.to_string());
    }
    let tried = with_ring(source, |ring, file| {
        ring.fill_slot_mapped(0, 0, page_size(), file)
    });
    let (at, errno) = tried?;
    let device = source.device(at);
    Some(why(device.as_ref(), &source.file_system_at(at), errno))
}

/// The same for a dma-buf: tried with its first page. If no memory can be mapped at all, this fails, too,
/// but [`refused`] has the better explanation.
pub(super) fn dma_buf_refused(source: &Source, dma_buf: BorrowedFd<'_>) -> Option<String> {
    if let Some(why) = source.direct_refused() {
        return Some(why);
    }
    if !IoRing::maps_once() {
        return Some(NOT_IN_KERNEL.to_string());
    }
    let window = (0, page_size());
    let tried = with_ring(source, |ring, file| ring.map_slot(0, dma_buf, window, file));
    let (at, errno) = tried?;
    Some(why_not_dma_buf(source.device(at).as_ref(), errno))
}

/// As [`dma_buf_refused`], for direct writes to one file on a device.
pub(crate) fn dma_buf_refused_for(
    file: BorrowedFd<'_>,
    device: Option<&BlockDevice>,
    dma_buf: BorrowedFd<'_>,
) -> Option<String> {
    if !IoRing::maps_once() {
        return Some(NOT_IN_KERNEL.to_string());
    }
    let page = page_size();
    let memory = Mapping::anon(page as usize, page as usize);
    let tried = memory.and_then(|memory| {
        let mut ring = IoRing::new(vec![file], memory.region(), 1)?;
        ring.open_slots(1)?;
        ring.map_slot(0, dma_buf, (0, page), 0)
    });
    tried.err().map(|errno| why_not_dma_buf(device, errno))
}

fn why_not_dma_buf(device: Option<&BlockDevice>, errno: Errno) -> String {
    let device = device.map_or("the device", BlockDevice::name);
    match errno {
        Errno::OPNOTSUPP => {
            format!("the exporter of the dma-buf does not map it for {device} (EOPNOTSUPP)")
        }
        Errno::ACCESS => "the dma-buf is not open for writing (EACCES)".to_string(),
        errno => limits(device, errno),
    }
}

/// Calls a function for each file, with a ring that has registered all of them, and a page to read into.
/// Returns the offset in the source of the first file for which it fails, and the reason.
fn with_ring(
    source: &Source,
    mut attempt: impl FnMut(&mut IoRing<'_>, usize) -> Result<(), Errno>,
) -> Option<(u64, Errno)> {
    let starts: Vec<u64> = source.files().map(|(_, start, _)| start).collect();
    let files = starts.iter().map(|&at| source.direct(at));
    // The caller has checked that there are direct reads.
    let files: Vec<_> = files.filter_map(|file| Some(file.ok()?.0)).collect();
    let page = page_size() as usize;
    let made = Mapping::anon(page, page);
    let made = made.and_then(|memory| {
        let mut ring = IoRing::new(files, memory.region(), 1)?;
        ring.open_slots(1)?;
        let mut all = starts.iter().enumerate();
        Ok(all.find_map(|(number, &at)| Some((at, attempt(&mut ring, number).err()?))))
    });
    made.unwrap_or_else(|errno| Some((0, errno)))
}

/// Explains an errno for a file on a file system: if possible, by what /sys says about the device.
fn why(device: Option<&BlockDevice>, file_system: &str, errno: Errno) -> String {
    let Some(device) = device else {
        return format!(
            "{file_system} has no block device of its own ({})",
            name(errno)
        );
    };
    if errno != Errno::OPNOTSUPP {
        return limits(device.name(), errno);
    }
    if let Some(what) = device.not_one_nvme() {
        return format!("{what}, and not served by one NVMe controller (EOPNOTSUPP)");
    }
    if let Some(what) = device.namespace_refuses() {
        return format!("the NVMe driver refused (EOPNOTSUPP): {what}");
    }
    let driver = format!("the driver of {} refused", device.name());
    let bounces = "its DMA may go through bounce buffers";
    match file_system {
        Source::BLOCK_DEVICE => format!("{driver} (EOPNOTSUPP): {bounces}"),
        _ => format!("{file_system} does not map buffers, or {driver} (EOPNOTSUPP): {bounces}"),
    }
}

/// Explains an errno that means limits or permissions.
fn limits(device: &str, errno: Errno) -> String {
    let why = match errno {
        Errno::PERM => "the parameter nvme.premap requires CAP_SYS_RAWIO, or a sandbox refuses",
        Errno::NOSPC => "more would be mapped than the parameter nvme.premap_max_mb allows",
        Errno::NOMEM => "no memory, or more than RLIMIT_MEMLOCK allows",
        Errno::NODEV => "the device is going away",
        _ => return format!("mapping for {device} failed ({})", name(errno)),
    };
    format!("mapping for {device} failed ({}): {why}", name(errno))
}

fn name(errno: Errno) -> String {
    errno_name(errno.raw_os_error())
}
