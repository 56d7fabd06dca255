//! Files that misbehave, on a file system of our own: what is loaded is right, or one line says
//! what went wrong and where.

mod common;
#[path = "common/faulty.rs"]
mod faulty;

use common::{Dir, KIB, METHODS, MIB, content, end, memfd, sha256, start};
use faulty::{Faults, GOOD, mount};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

const SIZE: u64 = 5 * MIB + 777;

/// A folder with a good copy beside the bad file, and the checksum of the copy.
fn good_copy(bytes: u64) -> (Dir, String) {
    let dir = Dir::new();
    let digest = sha256(&dir.file("good", bytes), 0, bytes);
    (dir, digest)
}

/// Loads `m/file` whole with these arguments; the reasons that were given.
fn loads(faults: Faults, args: &str) -> Option<String> {
    let (dir, digest) = good_copy(SIZE);
    let _mounted = mount(&dir, SIZE, faults)?;
    let loaded = dir.loaded(&mut dir.load(&format!("m/file {args}")));
    assert_eq!(loaded.digest, digest, "{faults:?} {args}");
    assert_eq!(loaded.number("bytes"), SIZE, "{faults:?} {args}");
    Some(loaded.reasons())
}

/// The line with which a load of `m/file` fails.
fn fails(faults: Faults, args: &str) -> Option<String> {
    let dir = Dir::new();
    let _mounted = mount(&dir, SIZE, faults)?;
    let mut command = dir.dmafile(&format!("load m/file --quiet {args}"));
    Some(dir.refusal(&mut command, 1))
}

/// Every method that serves such a file.
fn methods() -> impl Iterator<Item = &'static str> {
    METHODS.into_iter().filter(|method| *method != "uring")
}

/// io_uring goes on with a short read by itself, and reads the first bytes of a file without a
/// page cache of its own again (Linux 6.18).
#[test]
fn io_uring_is_kept_away() {
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
fn without_faults_every_method_loads_it() {
    for method in methods() {
        if loads(GOOD, &format!("--method {method}")).is_none() {
            return;
        }
    }
}

#[test]
fn nonsense_about_holes_means_that_all_is_data() {
    let faults = Faults {
        nonsense_holes: true,
        ..GOOD
    };
    loads(faults, "");
}

#[test]
fn direct_refused_at_open() {
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
fn direct_refused_at_the_first_read() {
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
fn direct_refused_at_a_later_read() {
    // The first read tries for the alignment.
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
            "direct read refused: m/file: Invalid argument (EINVAL); use --io buffered, or leave \
             it to --io auto"
        );
    }
}

#[test]
fn broken_in_the_middle_names_the_place() {
    let broken_at = 3 * MIB + 5 * 4 * KIB;
    let faults = Faults {
        broken_at: Some(broken_at),
        ..GOOD
    };
    for args in [
        "",
        "--method threads",
        "--method threads --io buffered",
        "--method read",
        "--method read --io direct",
        "--method mmap",
        "--method sendfile",
        "--method splice",
        "--verify sha256",
    ] {
        // Blocks of a page, so that a block is as small as a place can be.
        let Some(line) = fails(faults, &format!("{args} --block 4K --queue-depth 1")) else {
            return;
        };
        assert_eq!(
            line,
            format!(
                "cannot read: m/file at byte {broken_at}: I/O error (EIO); the device \
                 failed to read: see the kernel log"
            ),
            "{args}"
        );
    }
}

#[test]
fn broken_inside_a_block_names_the_page_where_pages_are_read() {
    let broken_at = 3 * MIB + 5 * 4 * KIB;
    let faults = Faults {
        broken_at: Some(broken_at),
        ..GOOD
    };
    for method in ["threads", "read", "mmap", "sendfile", "splice"] {
        let args = format!("--method {method} --io buffered --queue-depth 1");
        let Some(line) = fails(faults, &args) else {
            return;
        };
        let place = format!("cannot read: m/file at byte {broken_at}: ");
        assert!(line.starts_with(&place), "{method}: {line}");
    }
}

#[test]
fn broken_at_the_first_byte() {
    let faults = Faults {
        broken_at: Some(0),
        ..GOOD
    };
    for args in ["", "--method read", "--method mmap"] {
        let Some(line) = fails(faults, args) else {
            return;
        };
        let end = "m/file: I/O error (EIO); the device failed to read: see the kernel log";
        assert_eq!(line, format!("cannot read: {end}"), "{args}");
    }
}

#[test]
fn short_reads_are_gone_on_with() {
    // Whole pages, odd pieces, and pieces smaller than any alignment.
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
            "--method read",
            "--method read --io direct",
            "--verify blake3",
        ] {
            let loaded = dir.loaded(&mut load(args));
            assert_eq!(loaded.digest, digest, "at most {at_most}: {args}");
        }
        // Here the kernel may take a short answer for the end of the file.
        for method in ["sendfile", "splice"] {
            let ended = end(&mut load(&format!("--quiet --method {method}")));
            if ended.status.success() {
                assert_eq!(
                    dir.handed(&ended).digest,
                    digest,
                    "at most {at_most}: {method}"
                );
            } else {
                assert!(
                    ended.line(1).contains("(ENODATA)"),
                    "at most {at_most}: {ended:?}"
                );
            }
        }
        let mut command = dir.dmafile("load m/file --quiet --method mmap");
        assert_eq!(
            dir.refusal(&mut command, 1),
            "cannot map the file: m/file: No such device (ENODEV)"
        );
    }
}

#[test]
fn cut_short_while_it_is_loaded() {
    for (at, to) in [
        (MIB, 2 * MIB),
        (2 * MIB, MIB + 1),
        (0, 0),
        (SIZE - 1, SIZE - 1),
    ] {
        for args in [
            "",
            "--method threads",
            "--method read",
            "--method read --io direct",
            "--method mmap",
            "--method sendfile",
            "--method splice",
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
fn grown_while_it_is_loaded_counts_as_it_was_when_opened() {
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

/// It is larger from its first read on.
const GROWING: Faults = Faults {
    resized: Some((0, SIZE + MIB)),
    ..GOOD
};

#[test]
fn what_grew_lies_not_behind_the_end_of_a_memfd() {
    for method in methods() {
        let dir = Dir::new();
        let Some(_mounted) = mount(&dir, SIZE, GROWING) else {
            return;
        };
        let args = format!("load m/file --quiet --pages 4k --method {method} -- sh -c");
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
            "{method}: bytes behind the end"
        );
    }
}

#[test]
fn what_grew_lies_not_behind_the_bytes_in_a_larger_memfd() {
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

/// The last page of a file as it is in memory, behind its end too.
fn last_page(file: &File) -> Vec<u8> {
    let size = file.metadata().unwrap().len();
    assert_eq!(size, SIZE);
    let at = (size - size % 4096) as libc::off_t;
    // SAFETY: a fresh mapping of one page, copied and unmapped before anybody else knows of it.
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
fn interrupted_while_the_disk_is_slow() {
    // Four requests at a time, a quarter of a second each: longer in all than any patience.
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
fn larger_than_memory_is_refused_early() {
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
               --length), or try anyway with --no-memory-check";
    assert!(line.starts_with(&start) && line.ends_with(end), "{line}");
    let plan = dir.refusal(&mut dir.dmafile("explain m/file"), 1);
    assert!(plan.starts_with(&start), "{plan}");
    // Tried all the same, it meets the disk's error.
    let before = mounted.reads();
    let mut command = dir.dmafile("load m/file --quiet --no-memory-check --pages 4k");
    let line = dir.refusal(&mut command, 1);
    assert!(!line.contains("not enough memory"), "{line}");
    assert!(
        mounted.reads() > before || line.contains("(ENOMEM)"),
        "{line}"
    );
}
