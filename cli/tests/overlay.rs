//! Stacked file systems, whose upper half promises what the lower half does not keep: an overlay
//! over squashfs, as containers have it, and one over a FUSE file system of our own.

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

/// A folder in which this thread may mount, for itself alone; what it has mounted is unmounted
/// when dropped, the last first.
struct Mounts {
    dir: Dir,
    places: Vec<PathBuf>,
}

impl Drop for Mounts {
    fn drop(&mut self) {
        for place in self.places.iter().rev() {
            let place = std::ffi::CString::new(place.as_os_str().as_bytes()).unwrap();
            // SAFETY: unmounts a place that was mounted here; busy or not, it vanishes.
            unsafe { libc::umount2(place.as_ptr(), libc::MNT_DETACH) };
        }
    }
}

impl Mounts {
    /// None, and said aloud, where nothing can be mounted.
    fn new() -> Option<Self> {
        if !common::is_root() {
            common::skip("only root can mount");
            return None;
        }
        if let Err(error) = common::own_mounts() {
            common::skip(&format!("no mounts of our own: {error}"));
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
fn overlay_over_squashfs_is_loaded_through_the_page_cache() {
    let Some((mounts, digest)) = over_squashfs() else {
        return;
    };
    for args in [
        "",
        "--method threads",
        "--method uring",
        "--method mmap",
        "--verify sha256",
    ] {
        let loaded = mounts
            .dir
            .loaded(&mut mounts.dir.load(&format!("merged/file {args}")));
        assert_eq!(loaded.digest, digest, "{args}");
        assert_eq!(loaded.report["io"], "buffered", "{args}");
    }
}

#[test]
fn overlay_over_squashfs_refuses_direct_reads_in_one_line() {
    let Some((mounts, _)) = over_squashfs() else {
        return;
    };
    for args in ["", "--method threads", "--method read"] {
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

/// An overlay at `merged` over the faulty file system, which io_uring reads like any other.
fn over_faulty(faults: Faults) -> Option<(Mounts, faulty::Mounted)> {
    let mut mounts = Mounts::new()?;
    let faulty = faulty::mount(&mounts.dir, SIZE, faults)?;
    mounts.overlay("m").then_some((mounts, faulty))
}

#[test]
fn ring_meets_a_direct_read_that_is_refused() {
    // The first read tries for the alignment; those after it are in flight together.
    for first in [1, 2, 3, 9, 20] {
        let faults = Faults {
            no_direct_read_from: Some(first),
            ..GOOD
        };
        for args in ["", "--method uring", "--verify crc32c"] {
            let Some((mounts, _faulty)) = over_faulty(faults) else {
                return;
            };
            let digest = sha256(&mounts.dir.file("good", SIZE), 0, SIZE);
            let command = &mut mounts.dir.load(&format!("merged/file --block 256K {args}"));
            let loaded = mounts.dir.loaded(command);
            assert_eq!(loaded.digest, digest, "{first} {args}");
            let reasons = loaded.reasons();
            assert!(reasons.contains("EINVAL"), "{first} {args}: {reasons}");
            if first > 1 {
                let why = "uring direct registered ended: direct read refused: merged/file: ";
                assert!(reasons.contains(why), "{first} {args}: {reasons}");
            }
        }
    }
}

#[test]
fn ring_meets_a_broken_block() {
    let broken_at = 3 * MIB + 5 * 4 * KIB;
    let faults = Faults {
        broken_at: Some(broken_at),
        ..GOOD
    };
    for args in ["", "--io buffered"] {
        let Some((mounts, _faulty)) = over_faulty(faults) else {
            return;
        };
        let args = format!("load merged/file --quiet --method uring --block 4K {args}");
        assert_eq!(
            mounts.dir.refusal(&mut mounts.dir.dmafile(&args), 1),
            format!(
                "cannot read: merged/file at byte {broken_at}: I/O error (EIO); the device failed \
                 to read: see the kernel log"
            ),
            "{args}"
        );
    }
}

#[test]
fn ring_is_interrupted_while_the_disk_is_slow() {
    let faults = Faults {
        pause: std::time::Duration::from_millis(500),
        ..GOOD
    };
    let Some((mounts, faulty)) = over_faulty(faults) else {
        return;
    };
    let args = "load merged/file --quiet --method uring --block 16K -- echo ran";
    let mut running = common::start(&mut mounts.dir.dmafile(args));
    running.until(|_| faulty.reads() > 3);
    running.signal(libc::SIGINT);
    let ended = running.end();
    assert!(
        ended
            .line(130)
            .ends_with(": cancelled before it was whole (ECANCELED)"),
        "{ended:?}"
    );
}

#[test]
fn file_system_can_be_unmounted_as_soon_as_its_file_is_loaded() {
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
        // COMMAND runs while the buffer is in its hands: by then nothing else is held.
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
