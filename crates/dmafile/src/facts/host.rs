//! Properties of this machine.

use crate::error::errno_name;
use crate::sys::{self, host};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// What this machine offers to this process now. Sizes are in bytes.
///
/// Every feature is probed, not derived from a version number. `None` means unknown: a container may
/// hide it.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Host {
    /// Base page size.
    pub page: u64,
    /// Size of a transparent huge page; 0 if the kernel has none.
    pub thp_size: u64,
    /// `/sys/kernel/mm/transparent_hugepage/enabled`.
    pub thp: Option<String>,
    /// `/sys/kernel/mm/transparent_hugepage/shmem_enabled`.
    pub shmem_thp: Option<String>,
    /// Default size of a hugetlb page; 0 if the kernel has none.
    pub pool_page: u64,
    /// Bytes of the hugetlb pool that are neither in use nor reserved, as far as cgroups allow them.
    pub pool_free: u64,
    /// Memory that the kernel could allocate without swapping (`MemAvailable`).
    pub available: Option<u64>,
    /// Memory that the tightest cgroup still allows, and the file with that limit.
    pub cgroup: Option<(u64, PathBuf)>,
    /// True if memory of dma-heaps counts against that limit (`mem_accounting`, since 2026).
    pub heaps_are_charged: bool,
    /// RLIMIT_MEMLOCK; `None` if there is no limit.
    pub memlock: Option<u64>,
    /// True if CAP_IPC_LOCK is effective: RLIMIT_MEMLOCK does not apply.
    pub pins_freely: bool,
    /// Number of CPUs that this process may run on.
    pub cpus: usize,
    /// The NUMA node from which this thread's memory is allocated; `None` if there is only one, or if a
    /// policy decides (numactl(8)).
    pub node: Option<u32>,
    /// Why io_uring cannot be used, as the name of an errno; `None` if it can.
    pub uring_refused: Option<String>,
    /// True if io_uring supports buffers that are DMA-mapped once for a file
    /// (`IORING_RSRC_UPDATE_EXTENDED`).
    pub premaps: bool,
    /// True if a sysctl disables it (`kernel.io_uring_disabled`).
    pub uring_disabled: bool,
    /// True if a driver that maps a udmabuf for the CPU (`dma_buf_vmap`) sees the first page of a huge
    /// page in place of all its pages, as in Linux 6.11 and 6.12. User space cannot try that, so this
    /// depends on the version.
    pub udmabuf_vmaps_wrong: bool,
}

impl Host {
    /// Inspects this machine, as this process sees it.
    pub fn probe() -> Self {
        let thp_dir = Path::new("/sys/kernel/mm/transparent_hugepage");
        let pool_page = host::kilobytes("/proc/meminfo", "Hugepagesize").unwrap_or(0);
        let pool = |name: &str| {
            let kb = pool_page >> 10;
            host::number(format!("/sys/kernel/mm/hugepages/hugepages-{kb}kB/{name}")).unwrap_or(0)
        };
        let free = pool("free_hugepages").saturating_sub(pool("resv_hugepages"));
        let uring_refused = sys::uring::IoRing::probe()
            .err()
            .map(|errno| errno_name(errno.raw_os_error()));
        // Needed only for the remedy.
        let uring_disabled = uring_refused.is_some()
            && host::number("/proc/sys/kernel/io_uring_disabled").unwrap_or(0) > 0;
        Self {
            page: sys::map::page_size(),
            thp_size: host::number(thp_dir.join("hpage_pmd_size")).unwrap_or(0),
            thp: host::choice(thp_dir.join("enabled")),
            shmem_thp: host::choice(thp_dir.join("shmem_enabled")),
            pool_page,
            pool_free: (free * pool_page)
                .min(host::cgroup_pool_room(pool_page).unwrap_or(u64::MAX)),
            available: host::kilobytes("/proc/meminfo", "MemAvailable"),
            cgroup: host::cgroup_room(),
            heaps_are_charged: host::text("/sys/module/dma_heap/parameters/mem_accounting")
                .is_some_and(|text| text == "Y"),
            memlock: host::memlock(),
            pins_freely: host::may_pin_freely(),
            cpus: host::cpus(),
            node: sys::numa::node(),
            uring_refused,
            premaps: sys::uring::IoRing::maps_once(),
            uring_disabled,
            udmabuf_vmaps_wrong: host::release()
                .is_some_and(|release| ((6, 11)..(6, 13)).contains(&release)),
        }
    }

    /// What would make io_uring usable here.
    pub(crate) fn uring_remedy(&self) -> &'static str {
        match self.uring_refused.as_deref() {
            Some("EPERM") if self.uring_disabled => "sysctl -w kernel.io_uring_disabled=0",
            Some("EPERM") => {
                "allow io_uring_setup, io_uring_enter and io_uring_register in the seccomp profile \
                 of this container"
            }
            Some("ENOMEM") => "ulimit -l unlimited",
            _ => "Linux 5.6 or later, which can read by io_uring",
        }
    }

    /// Bytes that may be pinned at once, according to the limits; the kernel may still refuse.
    pub(crate) fn pin_limit(&self) -> u64 {
        match self.memlock {
            Some(limit) if !self.pins_freely => limit,
            _ => u64::MAX,
        }
    }
}
