//! Whether held memory can outlive the kernel.

use crate::protocol::HeldInfo;
use dmafile::{Check, Health, MemoryKind};
use std::path::Path;

/// The first systemd that carries its descriptor store through kexec.
const OLDEST: u32 = 261;
/// Folders with systemd's library, whose name has the version.
const PLACES: [&str; 4] = [
    "/usr/lib/systemd",
    "/usr/lib64/systemd",
    "/usr/lib/x86_64-linux-gnu/systemd",
    "/usr/lib/aarch64-linux-gnu/systemd",
];

/// The node by which Linux hands memory over.
const NODE: &str = "/dev/liveupdate";

/// Why a held file is loaded again by the holder of the next kernel, on a machine whose kernel hands memory over to
/// the next one; None if it is not.
pub fn not_handed_over(info: &HeldInfo) -> Option<&'static str> {
    if !Path::new(NODE).exists() {
        return None;
    }
    if info.kind != MemoryKind::Memfd || info.pages.starts_with("huge") {
        return Some("Linux hands over memfds, but not hugetlb pages and dma-bufs");
    }
    if !info.sealed {
        return Some("it can be changed");
    }
    let why = "without --verify nobody could tell whether it is intact";
    info.digest.is_none().then_some(why)
}

/// Checks of this machine about holds.
pub fn doctor() -> Vec<Check> {
    vec![kexec(
        Path::new(NODE).exists(),
        PLACES.iter().find_map(|place| systemd(Path::new(place))),
    )]
}

fn kexec(hands_over: bool, systemd: Option<u32>) -> Check {
    let name = "kexec";
    if !hands_over {
        return Check::new(
            name,
            Health::Absent,
            "no /dev/liveupdate: held memory ends with this kernel",
        )
        .remedy("Linux 6.19 or later with CONFIG_LIVEUPDATE, started with kho=on liveupdate=on");
    }
    let (health, found) = match systemd {
        Some(version) if version >= OLDEST => (
            Health::Good,
            format!("systemd {version} can keep held memory through kexec"),
        ),
        Some(version) => (
            Health::Fair,
            format!("Linux can hand memory over, but systemd {version} does not"),
        ),
        None => (
            Health::Fair,
            "Linux can hand memory over, but there is no systemd".to_string(),
        ),
    };
    let check = Check::new(name, health, found);
    if health == Health::Good {
        check
    } else {
        check.remedy("systemd 261 or later")
    }
}

/// The version of systemd, by the name of its library in this folder: `libsystemd-shared-262.so`, or with what a
/// distribution appends to the number.
fn systemd(place: &Path) -> Option<u32> {
    let names = std::fs::read_dir(place).ok()?.flatten();
    let versions = names.filter_map(|entry| {
        let name = entry.file_name();
        let rest = name.to_str()?.strip_prefix("libsystemd-shared-")?;
        let digits = rest.find(|letter: char| !letter.is_ascii_digit());
        rest[..digits?].parse().ok()
    });
    versions.max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kexec_needs_the_kernel_and_systemd() {
        let health = |hands_over, systemd| kexec(hands_over, systemd).health;
        assert_eq!(health(false, Some(262)), Health::Absent);
        assert_eq!(health(true, None), Health::Fair);
        assert_eq!(health(true, Some(257)), Health::Fair);
        assert_eq!(health(true, Some(261)), Health::Good);
    }

    #[test]
    fn the_name_of_its_library_has_the_version_of_systemd() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(systemd(folder.path()), None);
        for name in [
            "libsystemd-core-999.so",
            "libsystemd-shared-257.8-1.fc42.so",
            "libsystemd-shared-262.so",
            "libsystemd-shared-x.so",
        ] {
            std::fs::write(folder.path().join(name), b"").unwrap();
        }
        assert_eq!(systemd(folder.path()), Some(262));
        assert_eq!(systemd(&folder.path().join("none")), None);
    }
}
