//! `dmafile bench`: its output, what it leaves behind, and what it must not run. No test asserts
//! a time.

mod common;

use common::{Dir, Ended, MIB, NOBODY, Running, end, eventually, limit, run_as, start};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};

const SIZE: u64 = 5 * MIB;
const WAYS: [&str; 3] = ["dmafile", "memfd", "private"];

/// A folder of downloaded models may contain anything, and Python imports from the current folder first.
#[test]
fn python_of_the_current_folder_is_never_run() {
    let dir = Dir::new();
    for name in ["dmafile_bench.py", "jinja2.py"] {
        fs::write(dir.path(name), "open('ran', 'w').write('Python')\n").unwrap();
    }
    let before = dir.names();
    let ended = dir.run("bench --size 1M").ok();
    assert_eq!(dir.names(), before, "{ended:?}");
}

/// The states that can be measured on the disk of the build folder.
fn states(json: &Value) -> &'static [&'static str] {
    if json["direct_refused"].is_null() {
        &["cold", "warm"]
    } else {
        &["warm"]
    }
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    let last = numbers.len() - 1;
    f64::midpoint(numbers[last / 2], numbers[last.div_ceil(2)])
}

#[test]
fn json_has_every_sample_and_a_table_computed_from_them() {
    let dir = Dir::new();
    let ended = dir.run("bench --size 5M --json --quiet").ok();
    assert_eq!((ended.stderr.as_str(), dir.names().len()), ("", 0));
    let json = ended.json();
    assert_eq!(json["bytes"], SIZE);
    assert_eq!(json["file"], Value::Null);
    for key in ["version", "file_system", "machine", "seconds", "notes"] {
        assert!(!json[key].is_null(), "{key}: {json}");
    }
    for key in ["kernel", "architecture", "host"] {
        assert!(!json["machine"][key].is_null(), "{key}: {json}");
    }
    let rounds = json["rounds"].as_u64().unwrap() as usize;
    assert!(rounds >= 5, "{rounds} rounds");
    let samples = json["samples"].as_array().unwrap();
    let states = states(&json);
    // Other processes may prevent a state from being reached; a note says so.
    let whole = json["notes"] == json!([]);
    if whole {
        assert_eq!(samples.len(), rounds * states.len() * WAYS.len());
    }
    let mut orders = BTreeSet::new();
    for of_one in samples.chunks(WAYS.len()).filter(|_| whole) {
        let ways: Vec<_> = of_one
            .iter()
            .map(|one| one["way"].as_str().unwrap())
            .collect();
        assert_eq!(BTreeSet::from_iter(&ways), BTreeSet::from_iter(&WAYS));
        orders.insert(ways);
    }
    // Ten or more draws from six possible orders.
    assert!(orders.len() > 1 || !whole, "{orders:?}");
    for sample in samples {
        let number = |key: &str| sample[key].as_f64().unwrap();
        assert!(
            number("seconds") > 0.0 && number("cpu_seconds") > 0.0,
            "{sample}"
        );
        assert!(number("peak_bytes") >= SIZE as f64, "{sample}");
        if states.len() == 2 {
            let before = if sample["state"] == "cold" { 0 } else { SIZE };
            assert_eq!(sample["cached_before"], before, "{sample}");
        }
        assert_eq!(sample["method"].is_string(), sample["way"] == "dmafile");
    }
    let table = json["table"].as_array().unwrap();
    assert!(table.len() == states.len() * WAYS.len() || !whole, "{json}");
    for line in table {
        let of_line = |key: &'static str| {
            let same =
                |sample: &&Value| sample["way"] == line["way"] && sample["state"] == line["state"];
            let samples = samples.iter().filter(same);
            samples
                .map(|sample| sample[key].as_f64().unwrap())
                .collect::<Vec<_>>()
        };
        for key in ["seconds", "cpu_seconds"] {
            let numbers = of_line(key);
            let min = numbers.iter().copied().fold(f64::MAX, f64::min);
            let max = numbers.iter().copied().fold(0.0, f64::max);
            let wanted = json!({ "median": median(numbers), "min": min, "max": max });
            assert_eq!(line[key], wanted, "{key}: {line}");
        }
        let ratio = &line["ratio"];
        assert_eq!(ratio.is_null(), line["way"] == "dmafile", "{line}");
        let spans_one = ratio["min"].as_f64() <= Some(1.0) && ratio["max"].as_f64() >= Some(1.0);
        assert_eq!(line["undecided"], !ratio.is_null() && spans_one, "{line}");
    }
}

/// The lines of the table: after the headings, up to the blank line.
fn table(text: &str) -> Vec<&str> {
    let lines = text.lines().skip_while(|line| !line.starts_with("CACHE"));
    lines.skip(1).take_while(|line| !line.is_empty()).collect()
}

#[test]
fn text_is_one_table_for_the_given_file() {
    let dir = Dir::new();
    let path = dir.file("a model", SIZE);
    let before = fs::read(&path).unwrap();
    let mut command = dir.dmafile("bench --json=out.json");
    let Ended { stdout, stderr, .. } = end(command.arg("a model")).ok();
    assert_eq!(stderr, "");
    assert!(stdout.starts_with("a model: 5.00 MiB on "), "{stdout}");
    assert!(!stdout.contains(['\x1b', '\r', '\t']), "{stdout}");
    let json: Value = serde_json::from_slice(&fs::read(dir.path("out.json")).unwrap()).unwrap();
    assert_eq!(json["file"], "a model");
    let lines = table(&stdout);
    assert_eq!(
        lines.len(),
        json["table"].as_array().unwrap().len(),
        "{stdout}"
    );
    for (line, facts) in lines.iter().zip(json["table"].as_array().unwrap()) {
        assert!(line.starts_with(facts["state"].as_str().unwrap()), "{line}");
        assert!(line.contains(facts["what"].as_str().unwrap()), "{line}");
        let seconds = facts["seconds"]["median"].as_f64().unwrap();
        assert!(line.contains(&format!(" {seconds:.3} (")), "{line}");
        let undecided = facts["undecided"].as_bool().unwrap();
        assert_eq!(line.ends_with("undecided"), undecided, "{line}");
    }
    assert_eq!(dir.names(), ["a model", "out.json"]);
    assert!(fs::read(&path).unwrap() == before, "the file has changed");
}

/// cachestat(2) is refused to users without write permission on the file.
#[test]
fn a_file_of_another_user_is_measured() {
    let dir = Dir::new();
    let path = dir.file("file", SIZE);
    fs::set_permissions(path, fs::Permissions::from_mode(0o444)).unwrap();
    let mut command = dir.dmafile("bench file --json");
    let json = end(run_as(&mut command, NOBODY)).ok().json();
    // A state that cannot be verified may be left out; a note says so.
    let (table, notes) = (&json["table"], &json["notes"]);
    for state in states(&json) {
        let lines = table.as_array().unwrap().iter();
        let lines = lines.filter(|line| line["state"] == *state).count();
        let left_out = notes.to_string().contains(&format!("{state} left out"));
        assert!(left_out || lines == WAYS.len(), "{json}");
    }
}

#[test]
fn a_file_in_tmpfs_is_measured_warm_only_and_the_output_says_so() {
    let memory = Path::new("/dev/shm");
    let file = tempfile::NamedTempFile::new_in(memory).unwrap();
    fs::write(file.path(), common::content(0, SIZE as usize)).unwrap();
    let dir = Dir::new();
    let mut command = dir.dmafile("bench --json");
    let ended = end(command.arg(file.path())).ok();
    assert!(ended.stderr.contains("\ncold left out: ") || ended.stderr.contains("\nwarm only: "));
    let json = ended.json();
    assert_eq!(json["notes"].as_array().unwrap().len(), 1);
    let table = json["table"].as_array().unwrap();
    assert_eq!(table.len(), WAYS.len(), "{json}");
    assert!(table.iter().all(|line| line["state"] == "warm"), "{json}");
}

#[test]
fn an_error_is_one_line() {
    let dir = Dir::new();
    dir.file("file", 5000);
    dir.file("empty", 0);
    fs::create_dir(dir.path("folder")).unwrap();
    for (args, status, part) in [
        (
            "missing",
            1,
            "cannot open: missing: No such file or directory (ENOENT)",
        ),
        ("folder", 1, "(EISDIR)"),
        ("empty", 1, "is empty (ENODATA)"),
        (
            "--dir missing",
            1,
            "No such file or directory (ENOENT); choose another folder (--dir)",
        ),
        ("--size 0", 2, "--size: 0 is out of range"),
        (
            "--size 8000T",
            1,
            "are available (ENOMEM); measure a smaller file",
        ),
        ("file --size 1M", 2, "cannot be used with"),
        ("file --dir folder", 2, "cannot be used with"),
        ("file --table peers", 2, "'--table'"),
    ] {
        let line = dir.refusal(&mut dir.dmafile(&format!("bench {args}")), status);
        assert!(line.contains(part), "{args}: {line}");
    }
    let mut command = dir.dmafile("bench --size 5M");
    let line = dir.refusal(limit(&mut command, libc::RLIMIT_FSIZE, MIB), 1);
    assert!(
        line.starts_with("cannot write: a file of 5.00 MiB in .: "),
        "{line}"
    );
    assert!(line.contains("(EFBIG)"), "{line}");
}

/// Starts a measurement that takes seconds; returns it with the first process that it started.
fn begin(dir: &Dir) -> (Running, PathBuf) {
    let mut running = start(&mut dir.dmafile("bench --size 64M"));
    let tasks = format!("/proc/{}/task", running.pid());
    let mut child = None;
    running.until(|_| {
        // Any of its threads may have started it.
        let tasks = fs::read_dir(&tasks).into_iter().flatten().flatten();
        let pids = tasks.map(|task| fs::read_to_string(task.path().join("children")));
        let pids: String = pids.map(Result::unwrap_or_default).collect();
        child = pids
            .split_whitespace()
            .next()
            .map(|pid| Path::new("/proc").join(pid));
        child.is_some()
    });
    (running, child.expect("a run of one way"))
}

/// Then no status of a child can be read.
#[test]
fn an_ignored_sigchld_does_no_harm() {
    let dir = Dir::new();
    let mut command = dir.dmafile("bench --size 1M --quiet");
    end(common::ignoring(&mut command, libc::SIGCHLD)).ok();
}

#[test]
fn an_interrupt_leaves_no_file_and_no_process() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGKILL] {
        let dir = Dir::new();
        let (running, child) = begin(&dir);
        running.signal(signal);
        let ended = running.end();
        if signal == libc::SIGKILL {
            assert_eq!(ended.status.signal(), Some(signal), "{ended:?}");
        } else {
            let line = ended.line(130);
            assert!(
                line.ends_with(": cancelled before it was done (ECANCELED)"),
                "{line}"
            );
        }
        assert_eq!(dir.names(), [""; 0], "{signal}");
        eventually("the process of the run has ended", || {
            // A process that has ended, but has not been waited for, has no descriptors.
            fs::read_link(child.join("fd/0")).is_err()
        });
    }
}

/// A terminal sends the signal to the whole process group.
#[test]
fn an_interrupt_of_the_process_group_prints_one_line() {
    let dir = Dir::new();
    let (running, _) = begin(&dir);
    // SAFETY: it leads its own process group, and has not been waited for.
    assert_eq!(unsafe { libc::kill(-running.pid(), libc::SIGINT) }, 0);
    let ended = running.end();
    assert!(ended.line(130).ends_with("(ECANCELED)"), "{ended:?}");
    assert_eq!(dir.names(), [""; 0]);
}
