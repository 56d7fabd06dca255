//! Signals during a load, and output streams that are closed or full.

mod common;

use common::{
    Dir, KIB, METHODS, MIB, Running, caught, end, end_with_stdout, ignoring, sha256, start,
};
use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

const SIZE: u64 = 256 * MIB;
/// Reads that take seconds in all: a page each, one after the other.
const SLOWLY: &str = "--io direct --block 4K --queue-depth 1 --pages base";

/// Starts a slow load; returns when it has begun.
fn begin(dir: &Dir, args: &str) -> Running {
    let mut running = start(&mut dir.dmafile(&format!("load file -v {SLOWLY} {args}")));
    running.until_written("plan\n");
    running
}

/// A file that is slow to load; None without direct I/O, which makes it slow.
fn slow_file() -> Option<Dir> {
    let dir = Dir::new();
    dir.file("file", SIZE);
    common::reads_directly(&dir).then_some(dir)
}

#[test]
fn an_interrupted_load_exits_130_with_one_line() {
    let Some(dir) = slow_file() else { return };
    for (signal, method) in [
        (libc::SIGINT, "uring"),
        (libc::SIGINT, "bounce"),
        (libc::SIGTERM, "threads"),
        (libc::SIGTERM, "auto"),
    ] {
        let running = begin(
            &dir,
            &format!("--method {method} --json=report.json --trace trace.json -- echo ran"),
        );
        running.signal(signal);
        let ended = running.end();
        assert_eq!(ended.status.code(), Some(130), "{method}: {ended:?}");
        assert_eq!(ended.stdout, "", "{method}");
        let (plan, line) = ended.stderr.split_once("dmafile: ").unwrap();
        assert!(plan.starts_with("plan\n"), "{method}: {plan}");
        assert!(line.starts_with("load: file"), "{method}: {line}");
        assert!(
            line.ends_with(": cancelled before it was complete (ECANCELED)\n"),
            "{method}: {line}"
        );
        assert_eq!(line.lines().count(), 1, "{method}: {line}");
        assert_eq!(dir.names(), ["file"], "{method}");
    }
}

/// As a shell does for a background job of a script, and nohup for SIGHUP.
#[test]
fn an_ignored_signal_stays_ignored() {
    let Some(dir) = slow_file() else { return };
    let args = format!("load file {SLOWLY} --quiet --length 1M -- sh -c");
    let mut command = dir.dmafile(&args);
    let ended = end(ignoring(&mut command, libc::SIGINT).arg("kill -INT $$; echo goes on"));
    assert_eq!(ended.ok().stdout, "goes on\n");

    let mut command = dir.dmafile(&format!("load file -v {SLOWLY} --length 32M"));
    let mut running = start(ignoring(&mut command, libc::SIGINT));
    running.until_written("plan\n");
    running.signal(libc::SIGINT);
    assert_eq!(running.end().status.code(), Some(0));
}

/// Bytes of shared memory that a process has in use.
fn shared(pid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssShmem:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * KIB
}

/// Bytes of shared memory in use on this machine.
fn shared_by_all() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("Shmem:"))
        .unwrap();
    line.split_whitespace()
        .next()
        .unwrap()
        .parse::<u64>()
        .unwrap()
        * KIB
}

fn files_in_shm() -> Vec<String> {
    let names = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.collect()
}

#[test]
fn a_killed_load_leaves_no_files_or_memory() {
    let Some(dir) = slow_file() else { return };
    let before = shared_by_all();
    let files_before = files_in_shm();
    let rounds = 6;
    for method in ["uring", "threads"] {
        for _ in 0..rounds {
            let mut running = begin(&dir, &format!("--method {method} --json=report.json"));
            running.until(|running| shared(running.pid()) >= 128 * MIB);
            running.signal(libc::SIGKILL);
            let ended = running.end();
            assert_eq!(
                ended.status.signal(),
                Some(libc::SIGKILL),
                "{method}: {ended:?}"
            );
            assert_eq!(dir.names(), ["file"], "{method}");
        }
    }
    // Other programs may have files there.
    let mut left = files_in_shm();
    left.retain(|name| name.contains("dmafile") && !files_before.contains(name));
    assert!(left.is_empty(), "left in /dev/shm: {left:?}");
    // Each round held at least 128 MiB. Other programs use memory too, and the kernel frees it with a
    // delay.
    common::eventually("the memory is freed", || {
        shared_by_all() < before + rounds * 128 * MIB
    });
}

#[test]
fn a_load_survives_repeated_stop_continue_and_other_signals() {
    let dir = Dir::new();
    // A checksum of so many bytes takes longer than sending a signal.
    let size = 64 * MIB + 17;
    let file = dir.file("file", size);
    let digest = sha256(&file, 0, size);
    for method in METHODS {
        common::evict(&File::open(&file).unwrap());
        let args = format!("--method {method} --block 64K --queue-depth 4 --verify sha256");
        let mut running = start(&mut dir.dmafile(&format!("load file --quiet --json {args}")));
        running.until(|running| caught(running.pid(), libc::SIGXFSZ));
        let mut storms = 0;
        running.until(|running| {
            for signal in [libc::SIGSTOP, libc::SIGCONT, libc::SIGXFSZ] {
                running.signal(signal);
            }
            storms += 1;
            false
        });
        let report = running.end().ok().json();
        assert_eq!(report["verify"]["digest"], digest, "{method}");
        assert!(storms > 0, "{method}");
    }
}

/// Starts a load whose trace goes to a FIFO without a reader; returns when the bytes are in memory.
fn begin_held_up(dir: &Dir, args: &str) -> Running {
    end(Command::new("mkfifo").arg(dir.path("fifo"))).ok();
    let mut running = start(&mut dir.dmafile(&format!("load file --trace fifo {args}")));
    running.until_written("loaded ");
    running
}

#[test]
fn a_second_interrupt_ends_the_process_at_once() {
    let dir = Dir::new();
    dir.file("file", 5000);
    let mut running = begin_held_up(&dir, "");
    // Signals of one kind that are pending together count once.
    running.until(|running| {
        running.signal(libc::SIGINT);
        false
    });
    assert_eq!(running.end().status.code(), Some(130));
}

#[test]
fn command_does_not_run_after_an_interrupt() {
    let dir = Dir::new();
    dir.file("file", 5000);
    let running = begin_held_up(&dir, "-- echo ran");
    running.signal(libc::SIGINT);
    let trace = fs::read_to_string(dir.path("fifo")).unwrap();
    assert!(trace.contains("traceEvents"));
    let ended = running.end();
    assert_eq!(ended.status.code(), Some(130), "{ended:?}");
    assert_eq!(ended.stdout, "");
    let line = "\ndmafile: interrupted before COMMAND could run\n";
    assert!(ended.stderr.ends_with(line), "{ended:?}");
}

/// Commands that write to stdout.
const TALKERS: [&str; 11] = [
    "load file",
    "load file --json",
    "load file --quiet --json",
    "explain file",
    "explain file --json",
    "doctor file",
    "pins",
    "pins --json",
    "completions bash",
    "man",
    "--help",
];

#[test]
fn an_unwritable_stdout_is_one_line_and_exit_1() {
    let dir = Dir::new();
    dir.file("file", 5000);
    for args in TALKERS {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let full = File::options().write(true).open("/dev/full").unwrap();
        for (stdout, why) in [
            (Stdio::from(writer), "Broken pipe (EPIPE)"),
            (Stdio::from(full), "No space left on device (ENOSPC)"),
        ] {
            let ended = end_with_stdout(&mut dir.dmafile(args), stdout);
            assert_eq!(ended.status.code(), Some(1), "{args}: {ended:?}");
            let line = format!("dmafile: cannot write: stdout: {why}\n");
            assert!(ended.stderr.ends_with(&line), "{args}: {ended:?}");
            let text = args == "load file --json";
            assert!(text || ended.stderr == line, "{args}: {ended:?}");
        }
    }
}

#[test]
fn a_closed_stderr_pipe_does_not_change_the_exit_status() {
    let dir = Dir::new();
    dir.file("file", 5000);
    let status = |args: &str| {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = dir.dmafile(args);
        command.stdout(Stdio::null()).stderr(writer);
        command.status().unwrap().code()
    };
    assert_eq!(status("load missing"), Some(1));
    assert_eq!(status("load file --block 0"), Some(2));
    assert_eq!(status("load file"), Some(0));
    assert_eq!(status("load file --quiet -- true"), Some(0));
}

/// Runs a script that closes descriptors; `$0` is the command.
fn closed(dir: &Dir, script: &str) -> common::Ended {
    let mut command = Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_dmafile")]);
    command.current_dir(dir.path(""));
    end(&mut command)
}

#[test]
fn the_buffer_does_not_reuse_a_closed_standard_descriptor() {
    let dir = Dir::new();
    let file = dir.file("file", 5 * MIB);
    let script = r#"
        "$0" load file --pages base -- sh -c 'echo $DMAFILE_FD >fd
            sha256sum /proc/self/fd/$DMAFILE_FD >sum' <&- >&- 2>&-"#;
    closed(&dir, script).ok();
    let text = |name: &str| fs::read_to_string(dir.path(name)).unwrap();
    assert!(
        text("fd").trim().parse::<i32>().unwrap() > 2,
        "{}",
        text("fd")
    );
    assert!(text("sum").starts_with(&sha256(&file, 0, 5 * MIB)));
}

#[test]
fn errors_are_printed_with_stdout_closed() {
    let dir = Dir::new();
    let ended = closed(&dir, r#""$0" load missing --json >&-"#);
    assert!(ended.line(1).starts_with("cannot open: missing: "));
}

/// It belongs to the thread that executes a program, and a new thread has none.
#[test]
fn the_command_keeps_the_signal_for_the_death_of_its_parent() {
    let dir = Dir::new();
    dir.file("file", 5000);
    for args in ["load file --quiet --", "load file --quiet -- env FILE={}"] {
        let inner = dir.dmafile(args);
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "TERM"]);
        command.arg(env!("CARGO_BIN_EXE_dmafile"));
        command.args(inner.get_args()).args(["setpriv", "--dump"]);
        command.current_dir(inner.get_current_dir().unwrap());
        let ended = end(&mut command).ok();
        let line = "Parent death signal: TERM";
        assert!(ended.stdout.contains(line), "{args}: {ended:?}");
    }
}
