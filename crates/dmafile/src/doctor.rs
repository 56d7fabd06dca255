//! What this machine supports, what it does not, and how to change that.
//!
//! Everything is probed: opening a node, setting up a ring, collapsing a page.

use crate::error::{Result, errno_name};
use crate::exporter;
use crate::facts::{File, HeldBack, Host};
use crate::options::Pages;
use crate::plan::registered_need;
use crate::sys::{Errno, dmabuf, file, host, map::Mapping, memfd, module};
use serde::Serialize;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, strum::Display, strum::IntoStaticStr)]
#[serde(into = "&'static str")]
#[strum(serialize_all = "lowercase")]
#[non_exhaustive]
pub enum Health {
    /// As good as possible.
    Good,
    /// It works, but could work better.
    Fair,
    /// It is not there: hardware, a module, or a part of the kernel.
    #[strum(serialize = "not present")]
    Absent,
}

/// One check.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Check {
    /// What was checked.
    pub name: &'static str,
    /// The result.
    pub health: Health,
    /// What was found.
    pub found: String,
    /// The command or setting that would improve it.
    pub remedy: Option<String>,
    /// True if loads are as fast as they can be.
    #[serde(skip)]
    speed: Speed,
}

/// What a check means for the speed of loads into `memfd` and private memory.
#[derive(Clone, Debug)]
enum Speed {
    Full,
    /// Lower, for this reason.
    Lower(String),
    /// Not known, for this reason.
    Unknown(String),
}

impl Check {
    /// One that says nothing about the speed of loads.
    #[doc(hidden)]
    pub fn new(name: &'static str, health: Health, found: impl Into<String>) -> Self {
        Self {
            name,
            health,
            found: found.into(),
            remedy: None,
            speed: Speed::Full,
        }
    }

    fn slower(mut self, why: impl Into<String>) -> Self {
        self.speed = Speed::Lower(why.into());
        self
    }

    /// With what would improve it.
    #[doc(hidden)]
    pub fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into()).filter(|remedy| !remedy.is_empty());
        self
    }
}

/// Checks this machine, as this process sees it, and the file system of `path`.
///
/// # Errors
/// If `path` cannot be inspected.
pub fn doctor(path: &Path) -> Result<Vec<Check>> {
    let host = Host::probe();
    let mut checks = vec![
        kernel(&host),
        io_uring(&host),
        premap(&host),
        memlock(&host),
        thp(&host),
        memfd_thp(&host),
        hugetlb(&host),
        udmabuf(&host),
    ];
    checks.extend(heaps(&host));
    checks.push(dmafile_ko());
    checks.push(memory(&host));
    checks.push(container(&host));
    checks.extend(file_system(path, &host)?);
    Ok(checks)
}

/// What the checks mean for the usual loads, in one line.
pub fn verdict(checks: &[Check]) -> String {
    let (mut slower, mut unknown) = (Vec::new(), Vec::new());
    for check in checks {
        match &check.speed {
            Speed::Full => {}
            Speed::Lower(why) => slower.push(why.as_str()),
            Speed::Unknown(why) => unknown.push(why.as_str()),
        }
    }
    let speed = match (&slower[..], &unknown[..]) {
        ([], []) => "full speed".to_string(),
        ([], unknown) => format!("not known: {}", unknown.join("; ")),
        (slower, _) => format!("slower than possible: {}", slower.join("; ")),
    };
    format!("loads into memfd and private memory: {speed}")
}

fn kernel(host: &Host) -> Check {
    let release = host::kernel().unwrap_or_else(|| "of unknown version".to_string());
    let found = format!(
        "Linux {release}, {} processors, pages of {}",
        host.cpus, host.page
    );
    // MADV_POPULATE_WRITE exists from 5.14 on; it is tried, not derived from the version.
    let populates = Mapping::anon(host.page as usize, host.page as usize)
        .and_then(|map| map.region().populate(0, host.page));
    match populates {
        Ok(()) => Check::new("kernel", Health::Good, found),
        Err(_) => Check::new(
            "kernel",
            Health::Fair,
            format!("{found}; cannot allocate ahead"),
        )
        .remedy("Linux 5.14 or later, which has MADV_POPULATE_WRITE")
        .slower("memory cannot be allocated ahead of the reads"),
    }
}

fn io_uring(host: &Host) -> Check {
    let Some(errno) = &host.uring_refused else {
        return Check::new("io_uring", Health::Good, "a ring can be set up");
    };
    let found = format!("refused ({errno}); loads use a pool of threads");
    Check::new("io_uring", Health::Fair, found)
        .remedy(host.uring_remedy())
        .slower("threads read, because io_uring is refused")
}

fn premap(host: &Host) -> Check {
    let name = "pre-mapped buffers";
    if host.premaps {
        let found = "io_uring can map memory for a disk once, if the disk's driver can";
        return Check::new(name, Health::Good, found);
    }
    let found = "no: this kernel's io_uring has no extended buffer update";
    Check::new(name, Health::Absent, found)
        .remedy("a kernel with the series in kernel/linux-6.12, for dma-bufs without a copy")
}

fn memlock(host: &Host) -> Check {
    let need = registered_need(host.thp_size.max(host.page));
    let name = "memlock";
    match host.memlock {
        _ if host.pins_freely => Check::new(
            name,
            Health::Good,
            "CAP_IPC_LOCK: buffers can be registered",
        ),
        None => Check::new(name, Health::Good, "no limit: buffers can be registered"),
        Some(limit) if limit >= need => {
            Check::new(name, Health::Good, format!("{} MiB", limit >> 20))
        }
        Some(limit) => {
            let found = format!(
                "{} MiB; registered buffers need {} MiB, so loads will not register buffers",
                limit >> 20,
                need >> 20
            );
            Check::new(name, Health::Fair, found).remedy(format!(
                "ulimit -l {} (and a line 'USER - memlock {0}' in /etc/security/limits.conf)",
                need >> 10
            ))
        }
    }
}

fn thp(host: &Host) -> Check {
    let name = "transparent huge pages";
    match host.thp.as_deref() {
        Some(setting @ ("always" | "madvise")) => Check::new(
            name,
            Health::Good,
            format!("{setting}, {} KiB each", host.thp_size >> 10),
        ),
        Some(setting) => Check::new(name, Health::Fair, format!("disabled ({setting})"))
            .remedy("echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")
            .slower("private memory gets no huge pages"),
        None => Check::new(name, Health::Absent, "not in this kernel, or hidden")
            .slower("private memory gets no huge pages"),
    }
}

/// `shmem_enabled` hardly matters: a memfd is collapsed on request.
fn memfd_thp(host: &Host) -> Check {
    let name = "huge pages for memfd";
    let setting = host.shmem_thp.as_deref().unwrap_or("not present");
    let huge = host.thp_size;
    let try_one = || -> Result<(), Errno> {
        if huge == 0 {
            return Err(Errno::NOSYS);
        }
        let fd = memfd::create("dmafile-doctor", false)?;
        memfd::resize(fd.as_fd(), huge)?;
        let map = Mapping::shared(fd.as_fd(), huge as usize, huge as usize, true)?;
        map.region().collapse(0, huge, huge)
    };
    match try_one() {
        Ok(()) => Check::new(
            name,
            Health::Good,
            format!("MADV_COLLAPSE works (shmem_enabled: {setting})"),
        ),
        Err(errno) => {
            let errno = errno_name(errno.raw_os_error());
            let found = format!("MADV_COLLAPSE fails ({errno}; shmem_enabled: {setting})");
            Check::new(name, Health::Fair, found)
                .remedy(
                    "Linux 6.1 or later, which can collapse them; on older kernels: \
                     echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
                )
                .slower("a memfd gets no huge pages")
        }
    }
}

fn hugetlb(host: &Host) -> Check {
    let name = "hugetlb pool";
    let (page, free) = (host.pool_page, host.pool_free);
    if page == 0 {
        return Check::new(name, Health::Absent, "not in this kernel, or hidden");
    }
    let total = host::number("/proc/sys/vm/nr_hugepages").unwrap_or(0) * page;
    let found = format!(
        "{} of {} MiB free, pages of {} KiB",
        free >> 20,
        total >> 20,
        page >> 10
    );
    match free {
        0 => Check::new(
            name,
            Health::Fair,
            format!("{found}; no {} pages for loads", Pages::Huge),
        )
        .remedy(format!(
            "sysctl -w vm.nr_hugepages=N (N pages of {} KiB)",
            page >> 10
        )),
        _ => Check::new(name, Health::Good, found),
    }
}

fn udmabuf(host: &Host) -> Check {
    let name = "udmabuf";
    let parameter = |what: &str| host::number(format!("/sys/module/udmabuf/parameters/{what}"));
    match file::try_node(Path::new("/dev/udmabuf")) {
        Ok(()) => {
            let size = parameter("size_limit_mb").unwrap_or(64);
            let list = parameter("list_limit").unwrap_or(1024);
            udmabuf_that_opens(size, list, host.udmabuf_vmaps_wrong)
        }
        Err(Errno::NOENT | Errno::NXIO | Errno::NODEV) => {
            Check::new(name, Health::Absent, "no /dev/udmabuf").remedy(
                "modprobe udmabuf (CONFIG_UDMABUF; in a container, on its host); on kernels \
                     without it dmafile.ko makes dma-bufs",
            )
        }
        Err(errno) => {
            let errno = errno_name(errno.raw_os_error());
            Check::new(
                name,
                Health::Fair,
                format!("/dev/udmabuf cannot be opened ({errno})"),
            )
            .remedy("usermod -aG kvm USER, or a udev rule that gives its group access")
        }
    }
}

/// With this limit, in MiB, or above, a udmabuf can hold most models.
const UDMABUF_ENOUGH: u64 = 65536;

fn udmabuf_that_opens(size: u64, list: u64, vmaps_wrong: bool) -> Check {
    let mut found =
        format!("can be opened; dma-bufs of up to {size} MiB, in up to {list} ranges of memory");
    let mut health = Health::Good;
    let mut remedies = Vec::new();
    if size < UDMABUF_ENOUGH {
        remedies.push(format!(
            "echo {UDMABUF_ENOUGH} > /sys/module/udmabuf/parameters/size_limit_mb"
        ));
    }
    if vmaps_wrong {
        found += "; drivers that vmap one see wrong bytes if it is on huge pages";
        health = Health::Fair;
        let remedy = "Linux 6.17 or later, or thp pages for importers without vmap";
        remedies.push(remedy.to_string());
    }
    let check = Check::new("udmabuf", health, found);
    if remedies.is_empty() {
        check
    } else {
        check.remedy(remedies.join("; "))
    }
}

fn heaps(host: &Host) -> Vec<Check> {
    let name = "dma-heap";
    let nodes = dmabuf::heaps();
    if nodes.is_empty() {
        let found = format!("no {}", dmabuf::HEAPS);
        return vec![Check::new(name, Health::Absent, found).remedy(
            "a kernel with CONFIG_DMABUF_HEAPS_SYSTEM (such as Debian's 6.12; in a container, its \
             host's nodes); on other kernels dmafile.ko makes dma-bufs",
        )];
    }
    let check = |node: PathBuf| match dmabuf::open_node(&node) {
        Ok(heap) => {
            let mut found = format!("{} can be opened", node.display());
            if dmabuf::reads_files(heap.as_fd()) {
                found += ", and reads files while it allocates";
            }
            if host.heaps_are_charged {
                found += "; its memory counts against the cgroup";
            }
            Check::new(name, Health::Good, found)
        }
        Err(errno) => {
            let errno = errno_name(errno.raw_os_error());
            let found = format!("{} cannot be opened ({errno})", node.display());
            Check::new(name, Health::Fair, found).remedy(format!(
                "chgrp video {0} && chmod g+r {0}, or a udev rule",
                node.display()
            ))
        }
    };
    nodes.into_iter().map(check).collect()
}

fn dmafile_ko() -> Check {
    let name = "dmafile.ko";
    let error = match exporter::module::open() {
        Ok((_, found)) => {
            let text = format!(
                "{}; dma-bufs of up to {} MiB; chunks of {} MiB, {} in flight",
                found.abilities(),
                found.max_buffer >> 20,
                found.chunk >> 20,
                found.depth
            );
            return Check::new(name, Health::Good, text);
        }
        Err(error) => error,
    };
    let remedy = error.remedy().to_string();
    let mut found = error.with_remedy("").to_string();
    let is_there = Path::new(module::NODE).exists();
    if !is_there && !Path::new("/dev/udmabuf").exists() && dmabuf::heaps().is_empty() {
        found += "; without heaps and udmabuf this is the only way to get a dma-buf here";
    }
    let health = if is_there {
        Health::Fair
    } else {
        Health::Absent
    };
    Check::new(name, health, found).remedy(remedy)
}

fn memory(host: &Host) -> Check {
    let name = "memory";
    match host.available {
        Some(bytes) => Check::new(name, Health::Good, format!("{} MiB available", bytes >> 20)),
        None => Check::new(
            name,
            Health::Fair,
            "/proc/meminfo cannot be read: loads are not checked",
        ),
    }
}

fn container(host: &Host) -> Check {
    let name = "container limits";
    let missing = host::missing();
    if !missing.is_empty() {
        let are = if missing.len() == 1 { "is" } else { "are" };
        let missing = missing.join(" and ");
        let found = format!("unknown: {missing} {are} not mounted, which also hides huge pages");
        return Check::new(name, Health::Fair, found)
            .remedy("mount -t proc proc /proc; mount -t sysfs sysfs /sys");
    }
    let seccomp = host::text("/proc/self/status")
        .and_then(|text| {
            let mode = text
                .lines()
                .find_map(|line| line.strip_prefix("Seccomp:"))?;
            Some(mode.trim() != "0")
        })
        .unwrap_or(false);
    let filter = if seccomp {
        "a seccomp filter is on"
    } else {
        "no seccomp filter"
    };
    match &host.cgroup {
        Some((room, file)) => {
            let found = format!("{} MiB left by {}; {filter}", room >> 20, file.display());
            let health = match host.available {
                Some(available) if *room < available => Health::Fair,
                _ => Health::Good,
            };
            let check = Check::new(name, health, found);
            match health {
                Health::Good => check,
                _ => check.remedy("raise the memory limit of this container or slice"),
            }
        }
        None => Check::new(name, Health::Good, format!("no memory limit; {filter}")),
    }
}

/// A file says most. For a directory, its largest file is used.
fn file_system(path: &Path, host: &Host) -> Result<Vec<Check>> {
    const MOST: usize = 4096;
    let name = "file system";
    let mut file = path.to_path_buf();
    if path.is_dir() {
        let largest = std::fs::read_dir(path)
            .into_iter()
            .flatten()
            .flatten()
            .take(MOST)
            .filter_map(|entry| {
                let data = entry
                    .metadata()
                    .ok()
                    .filter(|data| data.is_file() && data.len() > 0)?;
                Some((data.len(), entry.path()))
            })
            .max();
        let Some((_, largest)) = largest else {
            let found = format!("{}: there is no file to test with", path.display());
            let mut check = Check::new(name, Health::Fair, found).remedy("dmafile doctor FILE");
            let why = "there is no file to test the file system with";
            check.speed = Speed::Unknown(why.to_string());
            return Ok(vec![check]);
        };
        file = largest;
    }
    let facts = File::probe(&file)?;
    let (at, fs) = (file.display(), &facts.file_system);
    let check = match &facts.direct_refused {
        None => {
            let source = if facts.align_told { "statx" } else { "tried" };
            let mut found = format!(
                "{at}: {fs}, direct I/O in multiples of {} ({source})",
                facts.align
            );
            // A kernel that cannot map buffers once has a separate line.
            match &facts.premap_refused {
                _ if !host.premaps => {}
                None => found += "; memory can be mapped once for its disk",
                Some(why) => found += &format!("; memory cannot be mapped once: {why}"),
            }
            Check::new(name, Health::Good, found)
        }
        Some(why) => {
            let rest = match (facts.in_memory, facts.drops_behind) {
                (true, _) => "",
                (_, true) => "; reads can drop their pages from the page cache (RWF_DONTCACHE)",
                (_, false) => "; reads fill the page cache",
            };
            let found = format!("{at}: {fs}, no direct I/O: {why}{rest}");
            Check::new(name, Health::Fair, found)
                .remedy(
                    "keep large files on ext4, xfs, f2fs or another file system with direct I/O",
                )
                .slower(format!("files on {fs} are copied, without direct I/O"))
        }
    };
    let mount = facts.held_back.map(|HeldBack { why, remedy }| {
        let check = Check::new("mount", Health::Fair, &why);
        check.remedy(remedy).slower(why)
    });
    Ok([Some(check), mount].into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verdict_names_what_makes_loads_slower() {
        let check = |speed| Check {
            speed,
            ..Check::new("a", Health::Good, "b")
        };
        let lower = |why: &str| check(Speed::Lower(why.to_string()));
        let unknown = check(Speed::Unknown("no file".to_string()));
        let full = check(Speed::Full);
        for (checks, end) in [
            (vec![full.clone()], "full speed"),
            (vec![full.clone(), unknown.clone()], "not known: no file"),
            (
                vec![lower("one"), full, unknown, lower("two")],
                "slower than possible: one; two",
            ),
        ] {
            let line = format!("loads into memfd and private memory: {end}");
            assert_eq!(verdict(&checks), line);
        }
    }

    #[test]
    fn raising_the_udmabuf_limit_is_advised_only_if_it_is_low() {
        let raise = "echo 65536 > /sys/module/udmabuf/parameters/size_limit_mb";
        let low = udmabuf_that_opens(64, 1024, false);
        assert_eq!(
            (low.health, low.remedy.as_deref()),
            (Health::Good, Some(raise))
        );
        let high = udmabuf_that_opens(65536, 1024, false);
        assert_eq!((high.health, high.remedy), (Health::Good, None));
        let remedy = udmabuf_that_opens(65536, 1024, true).remedy.unwrap();
        assert!(remedy.starts_with("Linux 6.17"), "{remedy}");
        let remedy = udmabuf_that_opens(64, 1024, true).remedy.unwrap();
        assert!(
            remedy.starts_with(raise) && remedy.contains("; Linux 6.17"),
            "{remedy}"
        );
    }
}
