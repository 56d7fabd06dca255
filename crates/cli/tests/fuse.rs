//! Files with faults, on a FUSE file system of the test: the loaded bytes are correct, or one line
//! says what went wrong and where.

mod common;
#[path = "common/faulty.rs"]
mod faulty;

use common::{Dir, KIB, METHODS, MIB, content, end, memfd, sha256, start};
use faulty::{Faults, GOOD, mount};
use serde_json::Value;
use std::fs::{self, File, Permissions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::time::Duration;

const SIZE: u64 = 5 * MIB + 777;

/// A folder with a good copy beside the bad file, and the checksum of the copy.
fn good_copy(bytes: u64) -> (Dir, String) {
    let dir = Dir::new();
    let digest = sha256(&dir.file("good", bytes), 0, bytes);
    (dir, digest)
}

/// Loads `m/file` whole with these arguments; returns the reasons of the plan.
fn loads(faults: Faults, args: &str) -> Option<String> {
    let (dir, digest) = good_copy(SIZE);
    let _mounted = mount(&dir, SIZE, faults)?;
    let loaded = dir.loaded(&mut dir.load(&format!("m/file {args}")));
    assert_eq!(loaded.digest, digest, "{faults:?} {args}");
    assert_eq!(loaded.number("bytes"), SIZE, "{faults:?} {args}");
    Some(loaded.reasons())
}

/// The error line of a load of `m/file`, which must fail.
fn fails(faults: Faults, args: &str) -> Option<String> {
    let dir = Dir::new();
    let _mounted = mount(&dir, SIZE, faults)?;
    let mut command = dir.dmafile(&format!("load m/file --quiet {args}"));
    Some(dir.refusal(&mut command, 1))
}

/// Every method that can load a file on FUSE.
fn methods() -> impl Iterator<Item = &'static str> {
    METHODS.into_iter().filter(|method| *method != "uring")
}

/// io_uring continues a short read by itself and, if the file bypasses the page cache, reads its first
/// bytes again (Linux 6.18).
const SERVER_FAILED: &str = "I/O error (EIO); see the kernel log, here or on its server; if the file was replaced \
    there, load it again";

#[test]
fn io_uring_is_not_used_on_fuse() {
    let why = "io_uring may repeat bytes of a FUSE file after a short read";
    let Some(reasons) = loads(GOOD, "") else {
        return;
    };
    assert!(
        reasons.contains(&format!("not uring direct: {why}\n")),
        "{reasons}"
    );
    let line = fails(GOOD, "--method uring").unwrap();
    assert!(
        line.starts_with("cannot load like this: uring direct"),
        "{line}"
    );
    assert!(line.contains(why), "{line}");
}

#[test]
fn every_method_loads_a_file_without_faults() {
    for method in methods() {
        if loads(GOOD, &format!("--method {method}")).is_none() {
            return;
        }
    }
}

#[test]
fn a_file_with_nonsense_hole_data_is_loaded_whole() {
    let faults = Faults {
        nonsense_holes: true,
        ..GOOD
    };
    loads(faults, "");
}

#[test]
fn o_direct_refused_at_open_falls_back_to_buffered() {
    let faults = Faults {
        no_direct_open: true,
        ..GOOD
    };
    for args in ["", "--method threads"] {
        let Some(reasons) = loads(faults, args) else {
            return;
        };
        let why = "io buffered: O_DIRECT is refused at open (EINVAL)\n";
        assert!(reasons.contains(why), "{args}: {reasons}");
    }
    let line = fails(faults, "--io direct").unwrap();
    let end = "O_DIRECT is refused at open (EINVAL) (EOPNOTSUPP); leave --method and --io to auto, \
               or see `dmafile explain`";
    assert!(
        line.starts_with("cannot load like this: uring direct"),
        "{line}"
    );
    assert!(line.ends_with(end), "{line}");
}

#[test]
fn direct_io_refused_at_the_first_read_falls_back_to_buffered() {
    let faults = Faults {
        no_direct_read_from: Some(1),
        ..GOOD
    };
    for args in ["", "--method threads"] {
        let Some(reasons) = loads(faults, args) else {
            return;
        };
        let why = "io buffered: direct reads are refused (EINVAL) at every alignment\n";
        assert!(reasons.contains(why), "{args}: {reasons}");
    }
}

#[test]
fn direct_io_refused_at_a_later_read_falls_back_to_buffered() {
    // The first read probes the alignment.
    for first in [2, 3, 7] {
        let faults = Faults {
            no_direct_read_from: Some(first),
            ..GOOD
        };
        for args in ["", "--method threads", "--verify xxh3"] {
            let args = format!("{args} --block 256K");
            let Some(reasons) = loads(faults, &args) else {
                return;
            };
            let why = "direct ended: direct read refused: m/file: Invalid argument (EINVAL)";
            assert!(reasons.contains(why), "{first} {args}: {reasons}");
            assert!(reasons.contains(" buffered: "), "{first} {args}: {reasons}");
        }
        let line = fails(faults, "--io direct --block 256K").unwrap();
        assert_eq!(
            line,
            "direct read refused: m/file: Invalid argument (EINVAL); use --io buffered or \
             --io auto"
        );
    }
}

#[test]
fn a_read_error_names_the_offset_of_the_block() {
    let broken_at = 3 * MIB + 5 * 4 * KIB;
    let faults = Faults {
        broken_at: Some(broken_at),
        ..GOOD
    };
    for args in [
        "",
        "--method threads",
        "--method threads --io buffered",
        "--method threads --io direct",
        "--method bounce",
        "--verify sha256",
    ] {
        // One page per block, so that the offset in the message is exact.
        let Some(line) = fails(faults, &format!("{args} --block 4K --queue-depth 1")) else {
            return;
        };
        assert_eq!(
            line,
            format!("cannot read: m/file at byte {broken_at}: {SERVER_FAILED}"),
            "{args}"
        );
    }
}

#[test]
fn a_buffered_read_error_inside_a_block_names_the_page() {
    let broken_at = 3 * MIB + 5 * 4 * KIB;
    let faults = Faults {
        broken_at: Some(broken_at),
        ..GOOD
    };
    let Some(line) = fails(faults, "--method threads --io buffered") else {
        return;
    };
    let place = format!("cannot read: m/file at byte {broken_at}: ");
    assert!(line.starts_with(&place), "{line}");
}

#[test]
fn a_read_error_at_the_first_byte_is_reported() {
    let faults = Faults {
        broken_at: Some(0),
        ..GOOD
    };
    for args in ["", "--method threads", "--io buffered"] {
        let Some(line) = fails(faults, args) else {
            return;
        };
        assert_eq!(
            line,
            format!("cannot read: m/file: {SERVER_FAILED}"),
            "{args}"
        );
    }
}

#[test]
fn short_reads_are_continued() {
    // Whole pages, unaligned pieces, and pieces smaller than any alignment.
    for (at_most, length) in [(12 * KIB, SIZE), (5001, SIZE), (100, 64 * KIB)] {
        let dir = Dir::new();
        let bytes = length - 7;
        let digest = sha256(&dir.file("good", SIZE), 7, bytes);
        let faults = Faults {
            at_most: Some(at_most),
            ..GOOD
        };
        let Some(_mounted) = mount(&dir, SIZE, faults) else {
            return;
        };
        let load = |args: &str| dir.load(&format!("m/file --offset 7 --length {bytes} {args}"));
        for args in [
            "",
            "--method threads --io direct",
            "--method threads --io buffered",
            "--method bounce",
            "--verify blake3",
        ] {
            let loaded = dir.loaded(&mut load(args));
            assert_eq!(loaded.digest, digest, "at most {at_most}: {args}");
        }
    }
}

#[test]
fn a_file_that_shrinks_during_a_load_is_an_error() {
    for (at, to) in [
        (MIB, 2 * MIB),
        (2 * MIB, MIB + 1),
        (0, 0),
        (SIZE - 1, SIZE - 1),
    ] {
        for args in [
            "",
            "--method threads",
            "--method threads --io direct",
            "--method bounce",
            "--verify sha256",
        ] {
            let faults = Faults {
                resized: Some((at, to)),
                ..GOOD
            };
            let args = format!("{args} --block 64K");
            let Some(line) = fails(faults, &args) else {
                return;
            };
            assert!(
                line.starts_with("cannot read: m/file"),
                "{at} {to} {args}: {line}"
            );
            let end = format!(
                ": the file was truncated while it was being loaded, from {SIZE} bytes (ENODATA); load \
                 it again when nothing writes to it"
            );
            assert!(line.ends_with(&end), "{at} {to} {args}: {line}");
        }
    }
}

#[test]
fn growth_after_open_is_not_loaded() {
    let (dir, digest) = good_copy(SIZE);
    for method in methods() {
        for at in [0, 3 * MIB] {
            let faults = Faults {
                resized: Some((at, SIZE + MIB)),
                ..GOOD
            };
            let Some(mounted) = mount(&dir, SIZE, faults) else {
                return;
            };
            let args = format!("m/file --block 64K --method {method}");
            let loaded = dir.loaded(&mut dir.load(&args));
            assert_eq!(loaded.digest, digest, "{args}");
            assert_eq!(loaded.number("bytes"), SIZE, "{args}");
            drop(mounted);
            fs::remove_dir(dir.path("m")).unwrap();
        }
    }
}

/// The file grows at the first read.
const GROWING: Faults = Faults {
    resized: Some((0, SIZE + MIB)),
    ..GOOD
};

#[test]
fn growth_during_a_load_leaves_zeros_past_the_end_of_a_memfd() {
    for method in methods() {
        let dir = Dir::new();
        let Some(_mounted) = mount(&dir, SIZE, GROWING) else {
            return;
        };
        let args = format!("load m/file --quiet --pages base --method {method} -- sh -c");
        let mut command = dir.dmafile(&args);
        let mut running = start(command.arg("echo $DMAFILE_FD.; exec sleep 100"));
        running.until_written(".");
        let number = running.written()[0].split('.').next().unwrap().to_string();
        let buffer = File::open(format!("/proc/{}/fd/{number}", running.pid())).unwrap();
        let page = last_page(&buffer);
        let expected = content(SIZE - SIZE % 4096, (SIZE % 4096) as usize);
        let (data, rest) = page.split_at(expected.len());
        assert_eq!(data, expected, "{method}");
        assert!(
            rest.iter().all(|&byte| byte == 0),
            "{method}: bytes past the end are not zero"
        );
    }
}

#[test]
fn growth_during_a_load_leaves_zeros_in_the_rest_of_a_larger_memfd() {
    for method in methods() {
        let dir = Dir::new();
        let Some(_mounted) = mount(&dir, SIZE, GROWING) else {
            return;
        };
        let larger = memfd(SIZE + 2 * MIB);
        larger.write_all_at(&[0xaa; 8192], SIZE).unwrap();
        let args = format!("load m/file --quiet --method {method} --to fd:0");
        end(dir.dmafile(&args).stdin(larger.try_clone().unwrap())).ok();
        let mut bytes = vec![1; 2 * MIB as usize];
        larger.read_exact_at(&mut bytes, SIZE).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 0), "{method}: stale bytes");
        let mut bytes = vec![1; SIZE as usize];
        larger.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes == content(0, SIZE as usize), "{method}: wrong bytes");
    }
}

/// The last page of a file as it is in memory, including the bytes past its end.
fn last_page(file: &File) -> Vec<u8> {
    let size = file.metadata().unwrap().len();
    assert_eq!(size, SIZE);
    let at = (size - size % 4096) as libc::off_t;
    // SAFETY: a new mapping of one page, which is copied and unmapped here.
    unsafe {
        let (prot, flags) = (libc::PROT_READ, libc::MAP_SHARED);
        let page = libc::mmap(
            std::ptr::null_mut(),
            4096,
            prot,
            flags,
            file.as_raw_fd(),
            at,
        );
        assert_ne!(page, libc::MAP_FAILED);
        let bytes = std::slice::from_raw_parts(page.cast::<u8>(), 4096).to_vec();
        libc::munmap(page, 4096);
        bytes
    }
}

#[test]
fn an_interrupt_cancels_a_load_from_a_slow_disk() {
    // Four requests at a time, 250 ms each: the whole load would take more than a minute.
    let size = 80 * MIB;
    let faults = Faults {
        pause: Duration::from_millis(250),
        ..GOOD
    };
    for method in methods() {
        let dir = Dir::new();
        let Some(mounted) = mount(&dir, size, faults) else {
            return;
        };
        let args = format!("load m/file --quiet --block 64K --method {method} -- echo ran");
        let mut running = start(&mut dir.dmafile(&args));
        running.until(|_| mounted.reads() > 3);
        running.signal(libc::SIGINT);
        let ended = running.end();
        let line = ended.line(130);
        assert!(line.starts_with("load: m/file"), "{method}: {line}");
        let end = ": cancelled before it was complete (ECANCELED)";
        assert!(line.ends_with(end), "{method}: {line}");
    }
}

#[test]
fn a_file_larger_than_memory_is_refused_before_the_first_read() {
    let dir = Dir::new();
    let faults = Faults {
        broken_at: Some(0),
        ..GOOD
    };
    let size = 1 << 50;
    let Some(mounted) = mount(&dir, size, faults) else {
        return;
    };
    let line = dir.refusal(&mut dir.dmafile("load m/file"), 1);
    let start = format!("not enough memory: m/file: {size} bytes are needed and ");
    let end = " are available (MemAvailable) (ENOMEM); free memory, load a range (--offset, \
               --length), or try anyway with --no-check-memory";
    assert!(line.starts_with(&start) && line.ends_with(end), "{line}");
    let plan = dir.refusal(&mut dir.dmafile("explain m/file"), 1);
    assert!(plan.starts_with(&start), "{plan}");
    // Without the check, the load gets as far as the read error.
    let before = mounted.reads();
    let mut command = dir.dmafile("load m/file --quiet --no-check-memory --pages base");
    let line = dir.refusal(&mut command, 1);
    assert!(!line.contains("not enough memory"), "{line}");
    assert!(
        mounted.reads() > before || line.contains("(ENOMEM)"),
        "{line}"
    );
}

#[test]
fn a_holder_serves_and_ends_while_the_file_system_of_its_file_hangs() {
    for end_it in ["release", "SIGTERM"] {
        let (dir, digest) = good_copy(SIZE);
        fs::create_dir(dir.path("run")).unwrap();
        fs::set_permissions(dir.path("run"), Permissions::from_mode(0o755)).unwrap();
        let Some(mounted) = mount(&dir, SIZE, GOOD) else {
            return;
        };
        let mut holder = start(&mut dir.dmafile("hold m/file --socket run/socket"));
        holder.until_written("\n");
        let holds = || dir.run("holds --json --socket run/socket").ok().json()[0].take();
        assert_eq!(holds()["changed"], false);
        // Dropped before the holder, which could not be killed otherwise.
        let hung = mounted.hang();
        for _ in 0..3 {
            let mut take = dir.dmafile("take file --socket run/socket -- sh -c");
            let taken = end(take.arg("sha256sum <$DMAFILE_PATH")).ok();
            assert!(taken.stdout.starts_with(&digest), "{taken:?}");
            let note = "dmafile: note: file may have changed on the disk: its file system does not \
                        answer\n";
            assert_eq!(taken.stderr, note);
        }
        let held = holds();
        assert_eq!(held["changed"], Value::Null);
        assert_eq!(held["files"][0]["changed"], Value::Null);
        let text = dir.run("holds --socket run/socket").ok().stdout;
        assert!(text.contains("its file system does not answer"), "{text}");
        match end_it {
            "release" => drop(dir.run("release file --socket run/socket").ok()),
            _ => holder.signal(libc::SIGTERM),
        }
        assert_eq!(holder.end().ok().stderr, "", "{end_it}");
        assert!(!dir.path("run/socket").exists(), "{end_it}");
        drop(hung);
    }
}
