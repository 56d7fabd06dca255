//! Stacked file systems, whose upper layer reports capabilities that the lower layer lacks: an overlay
//! over squashfs, as in containers, an overlay over a FUSE file system of the test, and a block device
//! on that file system.

mod common;
#[path = "common/faulty.rs"]
mod faulty;

use common::{Dir, KIB, MIB, end, sha256};
use faulty::{Faults, GOOD};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const SIZE: u64 = 9 * MIB + 123;

/// A folder in which this thread mounts, in its own mount namespace. Dropping it unmounts in
/// reverse order.
struct Mounts {
    dir: Dir,
    places: Vec<PathBuf>,
}

impl Drop for Mounts {
    fn drop(&mut self) {
        for place in self.places.iter().rev() {
            let place = std::ffi::CString::new(place.as_os_str().as_bytes()).unwrap();
            // SAFETY: unmounts a mount of this test, even a busy one.
            unsafe { libc::umount2(place.as_ptr(), libc::MNT_DETACH) };
        }
    }
}

impl Mounts {
    /// None, with a message, if nothing can be mounted.
    fn new() -> Option<Self> {
        if !common::is_root() {
            common::skip("only root can mount");
            return None;
        }
        if let Err(error) = common::own_mounts() {
            common::skip(&format!("no mount namespace: {error}"));
            return None;
        }
        Some(Self {
            dir: Dir::new(),
            places: Vec::new(),
        })
    }

    /// Runs `mount ARGS PLACE`.
    fn mount(&mut self, args: &[&str], place: &str) -> bool {
        let place = self.dir.path(place);
        fs::create_dir(&place).unwrap();
        let mut command = Command::new("mount");
        let ended = end(command
            .args(args)
            .arg(&place)
            .current_dir(self.dir.path("")));
        if !ended.status.success() {
            common::skip(&format!("mount {args:?}: {}", ended.stderr));
            return false;
        }
        self.places.push(place);
        true
    }

    /// An overlay of `lower` at `merged`.
    fn overlay(&mut self, lower: &str) -> bool {
        let [lower, upper, work] = [lower, "upper", "work"].map(|name| self.dir.path(name));
        for made in [&upper, &work] {
            fs::create_dir(made).unwrap();
        }
        let text = |path: &Path| path.to_str().unwrap().to_string();
        let options = format!(
            "lowerdir={},upperdir={},workdir={}",
            text(&lower),
            text(&upper),
            text(&work)
        );
        self.mount(&["-t", "overlay", "-o", &options, "overlay"], "merged")
    }
}

/// `merged/file` on an overlay over squashfs, and the checksum of what it holds.
fn over_squashfs() -> Option<(Mounts, String)> {
    let mut mounts = Mounts::new()?;
    fs::create_dir(mounts.dir.path("tree")).unwrap();
    let file = mounts.dir.file("tree/file", SIZE);
    let digest = sha256(&file, 0, SIZE);
    let mut squash = Command::new("mksquashfs");
    squash.args(["tree", "image", "-quiet", "-no-progress", "-noD", "-noF"]);
    match squash.current_dir(mounts.dir.path("")).output() {
        Ok(output) => assert!(output.status.success(), "{output:?}"),
        Err(_) => {
            common::skip("mksquashfs is missing (Debian: squashfs-tools)");
            return None;
        }
    }
    let mounted = mounts.mount(&["-t", "squashfs", "-o", "loop,ro", "image"], "squash")
        && mounts.overlay("squash");
    mounted.then_some((mounts, digest))
}

#[test]
fn an_overlay_over_squashfs_is_loaded_through_the_page_cache() {
    let Some((mounts, digest)) = over_squashfs() else {
        return;
    };
    for args in ["", "--method threads", "--verify sha256"] {
        let loaded = mounts
            .dir
            .loaded(&mut mounts.dir.load(&format!("merged/file {args}")));
        assert_eq!(loaded.digest, digest, "{args}");
        assert_eq!(loaded.report["io"], "buffered", "{args}");
    }
}

#[test]
fn direct_io_on_an_overlay_over_squashfs_is_refused_in_one_line() {
    let Some((mounts, _)) = over_squashfs() else {
        return;
    };
    for args in ["", "--method threads", "--method bounce"] {
        let mut command = mounts
            .dir
            .dmafile(&format!("load merged/file --io direct --quiet {args}"));
        let line = mounts.dir.refusal(&mut command, 1);
        assert!(line.contains("direct"), "{args}: {line}");
        assert!(line.contains("EINVAL"), "{args}: {line}");
        assert!(
            line.contains("; leave --method and --io to auto") || line.contains("; use --io"),
            "{line}"
        );
    }
}

#[test]
fn an_overlay_over_fuse_is_loaded_without_io_uring() {
    // io_uring would repeat bytes here: see `uring_works` in crates/dmafile/src/plan/methods.rs.
    let faults = Faults {
        at_most: Some(64 * KIB),
        ..GOOD
    };
    let Some(mut mounts) = Mounts::new() else {
        return;
    };
    let Some(_faulty) = faulty::mount(&mounts.dir, SIZE, faults) else {
        return;
    };
    if !mounts.overlay("m") {
        return;
    }
    let digest = sha256(&mounts.dir.file("good", SIZE), 0, SIZE);
    for args in ["", "--method threads", "--io direct", "--method bounce"] {
        let args = format!("merged/file {args}");
        let loaded = mounts.dir.loaded(&mut mounts.dir.load(&args));
        assert_eq!(loaded.digest, digest, "{args}");
        assert_ne!(loaded.report["method"], "uring", "{args}");
    }
    let line = mounts.dir.refuses("merged/file --method uring", 1);
    assert!(line.contains("may be on FUSE"), "{line}");
}

/// A block device whose blocks come from the faulty file system: io_uring reads it directly, and it
/// fails like a disk.
struct Disk {
    device: String,
    mounts: Mounts,
    faulty: faulty::Mounted,
}

impl Disk {
    /// None, with a message, if there can be none.
    fn new(faults: Faults) -> Option<Self> {
        let mounts = Mounts::new()?;
        let faulty = faulty::mount(&mounts.dir, SIZE, faults)?;
        let mut command = Command::new("losetup");
        command.args(["--find", "--show", "--read-only"]);
        let ended = end(command.arg(mounts.dir.path("m/file")));
        if !ended.status.success() {
            common::skip(&format!("losetup: {}", ended.stderr));
            return None;
        }
        let device = ended.stdout.trim().to_string();
        Some(Self {
            device,
            mounts,
            faulty,
        })
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let ended = end(Command::new("losetup").arg("--detach").arg(&self.device));
        assert!(
            ended.status.success() || std::thread::panicking(),
            "{ended:?}"
        );
    }
}

#[test]
fn io_uring_loads_a_block_device() {
    let Some(disk) = Disk::new(GOOD) else {
        return;
    };
    // A disk is a whole number of sectors.
    let size = SIZE - SIZE % 512;
    let digest = sha256(&disk.mounts.dir.file("good", SIZE), 0, size);
    let command = &mut disk
        .mounts
        .dir
        .load(&format!("{} --io direct", disk.device));
    let loaded = disk.mounts.dir.loaded(command);
    assert_eq!(loaded.digest, digest);
    assert_eq!(loaded.report["method"], "uring");
    assert_eq!(loaded.number("bytes_direct"), size);
}

#[test]
fn an_io_uring_read_error_names_the_offset() {
    let broken_at = 3 * MIB + 5 * 4 * KIB;
    let faults = Faults {
        broken_at: Some(broken_at),
        ..GOOD
    };
    for args in ["--io direct", "--io buffered"] {
        let Some(disk) = Disk::new(faults) else {
            return;
        };
        let args = format!(
            "load {} --quiet --method uring --block 4K {args}",
            disk.device
        );
        let line = disk
            .mounts
            .dir
            .refusal(&mut disk.mounts.dir.dmafile(&args), 1);
        let place = format!("cannot read: {} at byte ", disk.device);
        let why = ": I/O error (EIO); the device failed to read: see the kernel log";
        let byte = line
            .strip_prefix(&place)
            .and_then(|rest| rest.strip_suffix(why));
        // The device may read a little more at once than was requested.
        let byte: u64 = byte.unwrap_or_else(|| panic!("{line}")).parse().unwrap();
        assert!(broken_at - byte < 128 * KIB && byte <= broken_at, "{line}");
    }
}

#[test]
fn an_interrupt_cancels_an_io_uring_load_from_a_slow_disk() {
    let faults = Faults {
        pause: std::time::Duration::from_millis(500),
        ..GOOD
    };
    let Some(disk) = Disk::new(faults) else {
        return;
    };
    let args = format!(
        "load {} --io direct --quiet --block 16K -- echo ran",
        disk.device
    );
    let mut running = common::start(&mut disk.mounts.dir.dmafile(&args));
    let before = disk.faulty.reads();
    running.until(|_| disk.faulty.reads() > before + 3);
    running.signal(libc::SIGINT);
    let ended = running.end();
    assert!(
        ended
            .line(130)
            .ends_with(": cancelled before it was complete (ECANCELED)"),
        "{ended:?}"
    );
}

#[test]
fn command_can_unmount_the_file_system_of_the_loaded_file() {
    let Some(mut mounts) = Mounts::new() else {
        return;
    };
    let image = fs::File::create(mounts.dir.path("image")).unwrap();
    image.set_len(32 * MIB).unwrap();
    end(Command::new("mkfs.ext4")
        .arg("-q")
        .arg(mounts.dir.path("image")))
    .ok();
    if !mounts.mount(&["-o", "loop", "image"], "disk") {
        return;
    }
    mounts.dir.file("disk/file", SIZE);
    for method in common::METHODS {
        // When COMMAND runs, only the buffer may still be open.
        let args = format!("load disk/file --quiet --method {method} -- umount disk");
        let ended = end(&mut mounts.dir.dmafile(&args));
        assert!(ended.status.success(), "{method}: {ended:?}");
        let mut again = Command::new("mount");
        let place = mounts.dir.path("disk");
        end(again
            .args(["-o", "loop"])
            .arg(mounts.dir.path("image"))
            .arg(place))
        .ok();
    }
}
