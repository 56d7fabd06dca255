//! A file that is truncated or appended to while it is being loaded.

mod common;

use common::{Dir, METHODS, MIB, evict, sha256, start};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

const SIZE: u64 = 24 * MIB + 321;
const ROUNDS: u32 = 8;
/// Small reads, so that the change can come in the middle of the load.
const SMALL: &str = "--block 64K --queue-depth 4";

/// Loads while `disturb` runs, at a moment that differs from round to round.
fn disturbed(dir: &Dir, args: &str, round: u32, disturb: impl FnOnce()) -> common::Ended {
    let mut running = start(&mut dir.load(&format!("file -v {SMALL} {args}")));
    // Now the load knows the size, and has not read the bytes.
    running.until_written("plan\n");
    let moment = Duration::from_micros(u64::from(round * round) * 700);
    let begin = Instant::now();
    while begin.elapsed() < moment {
        std::hint::spin_loop();
    }
    disturb();
    running.end()
}

fn cut_short(path: &Path, to: u64) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(to).unwrap();
}

/// Asserts that each load delivers all bytes or fails with one line, never with a signal; returns the
/// number of failures.
fn cut_short_while_loaded(args: &str) -> usize {
    let dir = Dir::new();
    let mut refusals = 0;
    let digest = sha256(&dir.file("file", SIZE), 0, SIZE);
    for round in 0..ROUNDS {
        let file = dir.file("file", SIZE);
        // Near the start, in the middle, inside the last page, to zero bytes.
        let to = [4097, SIZE / 2 + 1, SIZE - 1, 0][round as usize % 4];
        let ended = disturbed(&dir, args, round, || cut_short(&file, to));
        if ended.status.success() {
            assert_eq!(dir.handed(&ended).digest, digest, "{args}, round {round}");
            continue;
        }
        refusals += 1;
        assert_eq!(
            ended.status.code(),
            Some(1),
            "{args}, round {round}: {ended:?}"
        );
        assert_eq!(ended.stdout, "", "{args}, round {round}");
        let (_, line) = ended.stderr.split_once("dmafile: ").unwrap();
        assert!(
            line.starts_with("cannot read: file"),
            "{args}, round {round}: {line}"
        );
        let why = format!(
            ": the file was truncated while it was being loaded, from {SIZE} bytes (ENODATA); load it \
             again when nothing writes to it\n"
        );
        assert!(line.ends_with(&why), "{args}, round {round}: {line}");
        assert_eq!(line.lines().count(), 1, "{args}, round {round}: {line}");
        assert_eq!(dir.names(), ["file"], "{args}, round {round}");
    }
    refusals
}

#[test]
fn truncation_loads_the_whole_file_or_is_an_error_with_every_method() {
    let refusals: usize = METHODS
        .iter()
        .map(|method| cut_short_while_loaded(&format!("--method {method}")))
        .sum();
    assert!(refusals > 0, "no truncation came during a load");
}

#[test]
fn truncation_loads_the_whole_file_or_is_an_error_in_every_mode() {
    for args in [
        "--method uring --io buffered",
        "--method threads --io buffered",
        "--method threads --io direct",
        "--method bounce --io direct",
        "--verify crc32c",
    ] {
        cut_short_while_loaded(args);
    }
}

#[test]
fn bytes_appended_during_a_load_are_not_loaded() {
    let dir = Dir::new();
    let digest = sha256(&dir.file("file", SIZE), 0, SIZE);
    for (round, method) in METHODS.iter().cycle().take(2 * METHODS.len()).enumerate() {
        let file = dir.file("file", SIZE);
        let append = || {
            let mut file = File::options().append(true).open(&file).unwrap();
            file.write_all(&vec![0xff; MIB as usize]).unwrap();
            evict(&file);
        };
        let args = format!("--method {method}");
        let ended = disturbed(&dir, &args, round as u32 % 5, append).ok();
        let loaded = dir.handed(&ended);
        assert_eq!(loaded.number("bytes"), SIZE, "{method}");
        assert_eq!(loaded.digest, digest, "{method}");
    }
}
