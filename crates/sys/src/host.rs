//! Limits and settings of this machine, from `/proc`, `/sys` and `getrlimit(2)`.
//!
//! `None` means that it cannot be read: a container may hide any of it.

use super::{Errno, last_errno, process};
use rustix::thread::capabilities;
use std::ffi::CStr;
use std::fs;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};

/// The first word of a file, as a number.
pub fn number(path: impl AsRef<Path>) -> Option<u64> {
    fs::read_to_string(path)
        .ok()?
        .split_whitespace()
        .next()?
        .parse()
        .ok()
}

/// A file's text, trimmed.
pub fn text(path: impl AsRef<Path>) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_string())
}

/// Unique random bytes (getrandom(2)).
pub fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    // So few bytes are returned completely, or not at all on kernels without the call: then use
    // the clock.
    if rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty()).is_err() {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
        let seed = (time.tv_sec as u64) << 30 | time.tv_nsec as u64;
        for (byte, of) in bytes.iter_mut().zip(seed.to_le_bytes()) {
            *byte = of;
        }
    }
    bytes
}

/// Seconds since the machine started, including suspend.
pub fn uptime() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Those of `/proc` and `/sys` that are not mounted.
pub fn missing() -> Vec<&'static str> {
    let shown = [("/proc", "/proc/self"), ("/sys", "/sys/kernel")];
    let missing = shown.iter().filter(|(_, in_it)| !Path::new(in_it).exists());
    missing.map(|(place, _)| *place).collect()
}

/// This kernel's version.
pub fn kernel() -> Option<String> {
    let mut name = MaybeUninit::<libc::utsname>::uninit();
    // Not rustix's, which panics if a sandbox refuses the call.
    // SAFETY: memory of the type that the call fills.
    if unsafe { libc::uname(name.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: the call has filled it.
    let name = unsafe { name.assume_init() };
    // SAFETY: the kernel ends it with NUL.
    let release = unsafe { CStr::from_ptr(name.release.as_ptr()) };
    Some(release.to_str().ok()?.to_string())
}

/// Its first two numbers.
pub fn release() -> Option<(u64, u64)> {
    let kernel = kernel()?;
    let mut numbers = kernel.split(|c: char| !c.is_ascii_digit());
    let mut number = || numbers.next()?.parse().ok();
    Some((number()?, number()?))
}

/// The choice in brackets of a file like `always [madvise] never`.
pub fn choice(path: impl AsRef<Path>) -> Option<String> {
    let text = text(path)?;
    let start = text.find('[')? + 1;
    let end = text[start..].find(']')? + start;
    Some(text[start..end].to_string())
}

/// A line `NAME: N kB` of a file like `/proc/meminfo`, in bytes.
pub fn kilobytes(path: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kb: u64 = line.split_whitespace().next()?.parse().ok()?;
    kb.checked_mul(1024)
}

/// A counter of `/proc/vmstat`.
pub fn vmstat(name: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/vmstat").ok()?;
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?
        .parse()
        .ok()
}

/// A limit of getrlimit(2); None means that there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub soft: Option<u64>,
    pub hard: Option<u64>,
}

/// A limit of this process, for a resource of getrlimit(2).
pub fn limits(resource: libc::__rlimit_resource_t) -> Result<Limits, Errno> {
    let mut told = MaybeUninit::<libc::rlimit64>::uninit();
    // Not rustix's, which panics if a sandbox refuses the call. That of the C library is prlimit64(2); older
    // profiles only know the older call.
    // SAFETY: both calls fill memory of this type; on 64-bit systems they have one layout.
    let failed = unsafe {
        libc::getrlimit64(resource, told.as_mut_ptr()) != 0
            && libc::syscall(libc::SYS_getrlimit, resource, told.as_mut_ptr()) != 0
    };
    if failed {
        return Err(last_errno());
    }
    // SAFETY: a call has filled it.
    let told = unsafe { told.assume_init() };
    let limit = |limit| (limit != libc::RLIM64_INFINITY).then_some(limit);
    Ok(Limits {
        soft: limit(told.rlim_cur),
        hard: limit(told.rlim_max),
    })
}

/// The soft limit on locked and pinned memory, in bytes; None if there is no limit, or if a sandbox hides it
/// (RLIMIT_MEMLOCK).
pub fn memlock() -> Option<u64> {
    limits(libc::RLIMIT_MEMLOCK).ok()?.soft
}

/// The limit on open files (RLIMIT_NOFILE).
pub fn open_files() -> Result<Limits, Errno> {
    limits(libc::RLIMIT_NOFILE)
}

/// Sets the soft limit on open files.
pub fn set_open_files(soft: Option<u64>) -> Result<(), Errno> {
    let number = |limit: Option<u64>| limit.unwrap_or(libc::RLIM64_INFINITY);
    let limits = libc::rlimit64 {
        rlim_cur: number(soft),
        rlim_max: number(open_files()?.hard),
    };
    // SAFETY: the call reads a value of this type.
    match unsafe { libc::setrlimit64(libc::RLIMIT_NOFILE, &raw const limits) } {
        0 => Ok(()),
        _ => Err(last_errno()),
    }
}

/// Makes room for `more` open files: raises the soft limit to the hard one, but only if it must, because programs
/// that use select(2) rely on a low one. Returns the limit if that is not enough.
pub fn room_for_files(more: u64) -> Result<(), u64> {
    /// Rings, pipes, memory, and what other threads open meanwhile.
    const OTHERS: u64 = 64;
    let Ok(limits) = open_files() else {
        return Ok(());
    };
    let open = fs::read_dir("/proc/self/fd").map_or(OTHERS, |list| list.count() as u64);
    let need = open.saturating_add(more).saturating_add(OTHERS);
    let is_enough = |limit: Option<u64>| limit.is_none_or(|limit| need <= limit);
    if is_enough(limits.soft) {
        return Ok(());
    }
    let raised = set_open_files(limits.hard).map_or(limits.soft, |()| limits.hard);
    match raised {
        Some(most) if need > most => Err(most),
        _ => Ok(()),
    }
}

/// The soft limit on address space, in bytes; None if there is no limit, or if a sandbox hides it (RLIMIT_AS).
pub fn address_space() -> Option<u64> {
    limits(libc::RLIMIT_AS).ok()?.soft
}

/// Returns true if RLIMIT_MEMLOCK does not apply to this process.
pub fn may_pin_freely() -> bool {
    let own = Path::new("/proc/self");
    capabilities(None).is_ok_and(|sets| process::pins_freely(own, sets.effective))
}

/// Number of CPUs that this process may run on.
pub fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Memory that cgroups still allow this process, in bytes, and the file with the limit.
pub fn cgroup_room() -> Option<(u64, PathBuf)> {
    room("memory", "memory")
}

/// Hugetlb pages of this size that cgroups still allow this process, in bytes.
pub fn cgroup_pool_room(page: u64) -> Option<u64> {
    let size = match page {
        0..0x10_0000 => format!("{}KB", page >> 10),
        0x10_0000..0x4000_0000 => format!("{}MB", page >> 20),
        _ => format!("{}GB", page >> 30),
    };
    room("hugetlb", &format!("hugetlb.{size}")).map(|(room, _)| room)
}

/// How much of a resource cgroups still allow this process, the minimum over all levels: limit
/// minus usage, with reclaimable page cache counted as free.
fn room(controller: &str, resource: &str) -> Option<(u64, PathBuf)> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    room_below(Path::new("/sys/fs/cgroup"), &own, controller, resource)
}

/// The same for a process with these cgroups, the text of `/proc/PID/cgroup`, which are below `root`.
fn room_below(root: &Path, own: &str, controller: &str, resource: &str) -> Option<(u64, PathBuf)> {
    let mut tightest: Option<(u64, PathBuf)> = None;
    for line in own.lines() {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next(), parts.next()?, parts.next()?);
        let (root, limit, usage) = if controllers.is_empty() {
            // In a hybrid setup, version 2 is mounted separately from version 1.
            let beside = Some(root.join("unified")).filter(|path| path.is_dir());
            (
                beside.unwrap_or_else(|| root.to_path_buf()),
                "max",
                "current",
            )
        } else if controllers == controller {
            (root.join(controller), "limit_in_bytes", "usage_in_bytes")
        } else {
            continue;
        };
        let (limit, usage) = (format!("{resource}.{limit}"), format!("{resource}.{usage}"));
        let own = root.join(path.trim_start_matches('/'));
        for level in own.ancestors().take_while(|level| level.starts_with(&root)) {
            let file = level.join(&limit);
            // "max" is not a number, and means no limit; version 1 has a huge number instead.
            let Some(limit) = number(&file).filter(|&limit| limit < 1 << 60) else {
                continue;
            };
            let used = number(level.join(&usage)).unwrap_or(0);
            // Other resources have no such file, because nothing can be reclaimed.
            let stat =
                fs::read_to_string(level.join(format!("{resource}.stat"))).unwrap_or_default();
            let count = |name: &str| -> Option<u64> {
                let mut lines = stat.lines().filter_map(|line| line.split_once(' '));
                lines.find(|line| line.0 == name)?.1.parse().ok()
            };
            // Usage includes the levels below. So do the counters of version 2; those of version 1 are called
            // differently then.
            let cache = |name: &str| count(&format!("total_{name}")).or_else(|| count(name));
            let cache = ["inactive_file", "active_file"].map(|name| cache(name).unwrap_or(0));
            let cache: u64 = cache.iter().sum();
            let room = limit.saturating_sub(used.saturating_sub(cache));
            if tightest.as_ref().is_none_or(|(least, _)| room < *least) {
                tightest = Some((room, file));
            }
        }
    }
    tightest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_choice_is_the_word_in_brackets() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("enabled");
        fs::write(&file, "always [madvise] never\n").unwrap();
        assert_eq!(choice(&file).as_deref(), Some("madvise"));
        fs::write(&file, "madvise\n").unwrap();
        assert_eq!(choice(&file), None);
    }

    /// A folder of cgroups like those that the kernel shows: files with their contents.
    fn cgroups(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    #[test]
    fn page_cache_of_cgroups_below_counts_as_free_with_version_1() {
        let text = "cache 0\ninactive_file 1000\nactive_file 2000\nunevictable 0\n\
                    hierarchical_memory_limit 100000\ntotal_cache 60000\n\
                    total_inactive_file 40000\ntotal_active_file 20000\n";
        let dir = cgroups(&[
            ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory/memory.usage_in_bytes", "5000000\n"),
            ("memory/a/memory.limit_in_bytes", "100000\n"),
            ("memory/a/memory.usage_in_bytes", "99000\n"),
            ("memory/a/memory.stat", text),
            ("memory/a/b/memory.limit_in_bytes", "9223372036854771712\n"),
        ]);
        let own = "4:memory:/a/b\n2:cpuset:/\n0::/\n";
        let room = room_below(dir.path(), own, "memory", "memory");
        let file = dir.path().join("memory/a/memory.limit_in_bytes");
        assert_eq!(room, Some((61_000, file)));
    }

    #[test]
    fn page_cache_counts_as_free_with_version_2() {
        let dir = cgroups(&[
            ("a/memory.max", "100000\n"),
            ("a/memory.current", "99000\n"),
            // With those below.
            (
                "a/memory.stat",
                "anon 5\ninactive_file 40000\nactive_file 20000\n",
            ),
            ("a/b/memory.max", "max\n"),
        ]);
        let room = room_below(dir.path(), "0::/a/b\n", "memory", "memory");
        assert_eq!(room, Some((61_000, dir.path().join("a/memory.max"))));
        assert_eq!(
            room_below(dir.path(), "0::/none\n", "memory", "memory"),
            None
        );
    }

    #[test]
    fn the_limit_on_open_files_is_raised_only_if_it_must_be() {
        let before = open_files().unwrap();
        room_for_files(1).unwrap();
        assert_eq!(open_files().unwrap(), before);
        if let Some(most) = before.hard {
            assert_eq!(room_for_files(most), Err(most));
            assert_eq!(open_files().unwrap().soft, before.hard);
            set_open_files(before.soft).unwrap();
        }
    }

    #[test]
    fn the_release_of_this_kernel_is_read() {
        assert!(release().unwrap() > (4, 0));
    }

    #[test]
    fn meminfo_is_converted_to_bytes() {
        let total = kilobytes("/proc/meminfo", "MemTotal").unwrap();
        assert!(total > 1 << 20 && total.is_multiple_of(1024));
        assert_eq!(kilobytes("/proc/meminfo", "MemTotalling"), None);
    }
}
