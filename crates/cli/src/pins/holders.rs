//! The table of which process holds what.

use super::{counted, shown};
use crate::text::columns;
use dmafile_pins::{Maker, PinHolder, Process};
use indicatif::BinaryBytes;
use std::fmt::Write;
use tabwriter::Alignment;

/// One line per holder and kind of pin; limits are those of the processes.
pub(super) fn table(holders: &[PinHolder], processes: &[Process]) -> String {
    let mut table = format!("{:>7}\tUSER\t{:>10}\tBY\tNAME\tWHAT\n", "PID", "BYTES");
    // Already sorted by process and kind; what the same processes hold is one line.
    for group in holders.chunk_by(|one, next| {
        one.pid == next.pid
            && one.by == next.by
            && one.also == next.also
            && one.device == next.device
    }) {
        let first = &group[0];
        let process = processes.iter().find(|one| Some(one.pid) == first.pid);
        let dash = || "-".to_string();
        let bytes = group.iter().map(|one| one.bytes).sum::<Option<u64>>();
        let _ = writeln!(
            table,
            "{:>7}\t{}\t{:>10}\t{}\t{}\t{}",
            first.pid.map_or_else(dash, |pid| pid.to_string()),
            first.uid.map_or_else(dash, |uid| uid.to_string()),
            bytes.map_or_else(|| "?".to_string(), |bytes| BinaryBytes(bytes).to_string()),
            first.by,
            first.name.as_deref().map_or_else(dash, shown),
            what(group, process),
        );
    }
    columns(&table, Alignment::Left)
}

fn what(group: &[PinHolder], process: Option<&Process>) -> String {
    let first = &group[0];
    let count: u64 = group.iter().map(|one| one.count).sum();
    let device = first.device.as_deref().unwrap_or_default();
    let mut text = match first.by {
        Maker::IoUring => counted(count, "buffer"),
        Maker::Udmabuf => counted(count, "dma-buf"),
        Maker::Vfio => format!("{}, with mlock()", shown(device)),
        Maker::Rdma => format!("{} of {}", counted(count, "region"), shown(device)),
        Maker::AfXdp => counted(count, "umem"),
        Maker::Pinned => "buffers and RDMA, as charged".to_string(),
        Maker::Locked => "mlock()".to_string(),
        _ => String::new(),
    };
    let inodes: Vec<_> = group.iter().filter_map(|one| one.inode).collect();
    if !inodes.is_empty() {
        // Only the first few; JSON has all of them.
        let listed: Vec<_> = inodes.iter().take(3).map(u64::to_string).collect();
        let more = if inodes.len() > 3 { ", ..." } else { "" };
        let _ = write!(text, ", inode {}{more}", listed.join(", "));
    }
    if first.pid.is_none() {
        text += ", in no process that can be seen";
    }
    if !first.also.is_empty() {
        let also: Vec<_> = first.also.iter().map(u32::to_string).collect();
        let _ = write!(text, ", also held by {}", also.join(", "));
    }
    let limited = matches!(first.by, Maker::Pinned | Maker::Locked | Maker::Vfio);
    if let (true, Some(process)) = (limited, process) {
        let limit = match process.limit {
            _ if process.cap_ipc_lock => "no limit (CAP_IPC_LOCK)".to_string(),
            Some(limit) => format!("limit {}", BinaryBytes(limit)),
            None => "no limit".to_string(),
        };
        let _ = write!(text, ", {limit}");
    }
    text
}
