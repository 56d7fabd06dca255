//! A real file that somebody cuts short, or appends to, while it is loaded.

mod common;

use common::{Dir, METHODS, MIB, evict, sha256, start};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

const SIZE: u64 = 24 * MIB + 321;
const ROUNDS: u32 = 8;
/// Small reads, so that there is a middle to meet.
const SMALL: &str = "--block 64K --queue-depth 4";

/// Loads while `disturb` runs at a moment that differs from round to round.
fn disturbed(dir: &Dir, args: &str, round: u32, disturb: impl FnOnce()) -> common::Ended {
    let mut running = start(&mut dir.load(&format!("file {SMALL} {args}")));
    // Now its size is known and its bytes are not.
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

/// Either all bytes, or one line that says what happened; never a signal.
fn cut_short_while_loaded(args: &str) -> usize {
    let dir = Dir::new();
    let mut refusals = 0;
    let digest = sha256(&dir.file("file", SIZE), 0, SIZE);
    for round in 0..ROUNDS {
        let file = dir.file("file", SIZE);
        // Near the start, in the middle, inside the last page, to nothing.
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
fn cut_short_is_whole_or_one_line_by_every_method() {
    let refusals: usize = METHODS
        .iter()
        .map(|method| cut_short_while_loaded(&format!("--method {method}")))
        .sum();
    assert!(refusals > 0, "no round has met the middle of a load");
}

#[test]
fn cut_short_is_whole_or_one_line_in_every_mode() {
    for args in [
        "--method uring --io buffered",
        "--method threads --io buffered",
        "--method read --io direct",
        "--method sendfile --io direct",
        "--method splice --io direct",
        "--verify crc32c",
    ] {
        cut_short_while_loaded(args);
    }
}

#[test]
fn what_is_appended_while_loading_is_not_loaded() {
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
