//! Whether there is enough memory for a load.

use crate::error::{Error, Result};
use crate::facts::target::MemoryTarget;
use crate::facts::{File, Host};
use crate::message::{Opt, message};
use crate::options::{Kind, Pages};

/// Refuses early what cannot fit. `footprint` returns how many bytes of memory the data needs on
/// pages of a size (holes need none), `ring` is what is needed in addition to the buffer.
pub(super) fn check_memory(
    file: &File,
    host: &Host,
    target: &MemoryTarget,
    pages: Pages,
    capacity: u64,
    footprint: impl Fn(u64) -> u64,
    ring: u64,
) -> Result<()> {
    let page = match pages {
        Pages::Thp => host.thp_size.max(host.page),
        _ => host.page,
    };
    let need = match target.kind {
        // Their pages are allocated all at once, including those of holes.
        Kind::Heap(_) | Kind::Udmabuf | Kind::Module => capacity,
        _ => footprint(page),
    };
    let need = target
        .existing
        .map_or(need, |existing| need.min(existing.lacking));
    // The kernel checks a hugetlb pool when it is mapped, and existing memory is already allocated.
    if need == 0 || pages == Pages::Huge {
        return Ok(());
    }
    let need = need + ring.min(need);
    let refuse = |room: u64, limit: String| {
        Err(Error::new(
            "not enough memory",
            format!("{need} bytes are needed and {room} are available ({limit})"),
        )
        .at(file.path.display().to_string())
        .with_errno(rustix::io::Errno::NOMEM)
        .with_remedy(message![
            "free memory, load a range (",
            Opt::Offset,
            ", ",
            Opt::Length,
            "), or try anyway with ",
            Opt::CheckMemory.set(false),
        ]))
    };
    if let Some(room) = host.available.filter(|room| *room < need) {
        return refuse(room, "MemAvailable".to_string());
    }
    if matches!(target.kind, Kind::Heap(_)) && !host.heaps_are_charged {
        return Ok(());
    }
    if let Some((room, file)) = &host.cgroup {
        let room = room.saturating_sub(beside(need));
        if room < need {
            return refuse(room, file.display().to_string());
        }
    }
    Ok(())
}

/// What a cgroup is charged in addition to a buffer; if that does not fit, the kernel would kill
/// rather than refuse: page tables and the index of the pages (16 bytes per page), threads, rings,
/// and what each CPU has charged ahead. Linux 6.1 killed a load of 46 MiB in a cgroup with 47 MiB.
fn beside(need: u64) -> u64 {
    const MOST: u64 = 2 << 20;
    need / 128 + (need / 16).min(MOST)
}
