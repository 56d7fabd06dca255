//! Options of mounts that hold loads back.

use crate::source::Source;
use crate::sys::mount;
use serde::Serialize;

/// How the options of a mount hold loads back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct HeldBack {
    /// What the mount allows.
    pub why: String,
    /// What to mount it with instead.
    pub remedy: String,
}

/// An option of which less than enough holds loads back.
struct Limit {
    /// As the list of mounts has it, up to a dot. (9p reports its server's file system to statfs(2).)
    kinds: &'static [&'static str],
    option: &'static str,
    /// What it is if the kernel does not show it.
    unshown: u64,
    enough: u64,
    better: u64,
}

/// Larger requests cost fewer round trips, and several connections use several CPUs and routes.
const LIMITS: [Limit; 4] = [
    Limit {
        kinds: &["nfs", "nfs4"],
        option: "rsize",
        unshown: u64::MAX,
        enough: 1 << 20,
        better: 1 << 20,
    },
    Limit {
        kinds: &["nfs", "nfs4"],
        option: CONNECTIONS,
        unshown: 1,
        enough: 2,
        better: 8,
    },
    // The most that servers without FUSE_MAX_PAGES get; others get as much as they ask for.
    Limit {
        kinds: &["fuse"],
        option: "max_read",
        unshown: u64::MAX,
        enough: 128 << 10,
        better: 1 << 20,
    },
    // The default since Linux 5.15, and the most that virtio can transfer.
    Limit {
        kinds: &["9p"],
        option: "msize",
        unshown: 128 << 10,
        enough: 512_000,
        better: 512_000,
    },
];

/// Not a number of bytes, unlike the others.
const CONNECTIONS: &str = "nconnect";

/// How the mount of a file holds loads back; None if it does not.
pub(super) fn of(source: &Source) -> Option<HeldBack> {
    let (kind, options) = mount::of(source.without_device()?)?;
    held_back(&kind, &options)
}

fn held_back(kind: &str, options: &str) -> Option<HeldBack> {
    let kind = kind.split('.').next().unwrap_or(kind);
    let (mut allows, mut remedies) = (Vec::new(), Vec::new());
    for limit in LIMITS.iter().filter(|one| one.kinds.contains(&kind)) {
        let Limit { option, better, .. } = *limit;
        let shown = mount::option(options, option).and_then(|value| value.parse().ok());
        let value = shown.unwrap_or(limit.unshown);
        // RDMA has no use for more connections.
        let tcp = mount::option(options, "proto").is_some_and(|proto| proto.starts_with("tcp"));
        if value >= limit.enough || (option == CONNECTIONS && !tcp) {
            continue;
        }
        allows.push(match option {
            CONNECTIONS => "one TCP connection".to_string(),
            _ => format!("requests of {value} bytes"),
        });
        remedies.push(format!("{option}={better}"));
    }
    (!allows.is_empty()).then(|| HeldBack {
        why: format!("the mount allows only {}", allows.join(" and ")),
        remedy: format!("mount it with {}", remedies.join(",")),
    })
}

#[cfg(test)]
mod tests {
    use super::held_back;

    #[test]
    fn a_mount_that_holds_loads_back_is_named_with_its_remedy() {
        let one = "one TCP connection";
        for (kind, options, why, remedy) in [
            (
                "nfs4",
                "rw,vers=4.2,rsize=65536,wsize=1048576,hard,proto=tcp",
                &*format!("requests of 65536 bytes and {one}"),
                "rsize=1048576,nconnect=8",
            ),
            ("nfs", "rsize=1048576,proto=tcp6", one, "nconnect=8"),
            (
                "nfs",
                "rsize=524288,proto=tcp,nconnect=4",
                "requests of 524288 bytes",
                "rsize=1048576",
            ),
            (
                "nfs",
                "rsize=524288,proto=rdma",
                "requests of 524288 bytes",
                "rsize=1048576",
            ),
            (
                "fuse.bindfs",
                "rw,user_id=0,max_read=4096",
                "requests of 4096 bytes",
                "max_read=1048576",
            ),
            (
                "9p",
                "rw,trans=virtio",
                "requests of 131072 bytes",
                "msize=512000",
            ),
            (
                "9p",
                "rw,msize=8192",
                "requests of 8192 bytes",
                "msize=512000",
            ),
        ] {
            let held = held_back(kind, options).unwrap();
            assert_eq!(held.why, format!("the mount allows only {why}"));
            assert_eq!(held.remedy, format!("mount it with {remedy}"));
        }
    }

    #[test]
    fn other_mounts_are_not_named() {
        for (kind, options) in [
            ("nfs4", "rsize=1048576,proto=tcp,nconnect=2"),
            ("nfs", "rsize=1048576,proto=rdma"),
            ("fuse", "rw,user_id=0"),
            ("fuse", "max_read=131072"),
            ("9p", "msize=512000"),
            ("ext4", "rw,rsize=1"),
            ("virtiofs", "rw"),
        ] {
            assert_eq!(held_back(kind, options), None);
        }
    }
}
