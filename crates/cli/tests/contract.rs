//! What scripts depend on: the text, the streams, the exit statuses, and how COMMAND gets the buffer.

mod common;

use common::{
    Dir, KIB, METHODS, MIB, Warm, cached, content, end, reads_directly, run_as, sha256, skip,
};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

const PHASES: [&str; 9] = [
    "open", "plan", "alloc", "submit", "wait", "copy", "verify", "export", "total",
];

#[test]
fn command_inherits_the_range_with_zeros_around_it() {
    let dir = Dir::new();
    let size = 9 * MIB + 1234;
    let file = dir.file("file", size);
    let facts = "stat -Lc %s /proc/self/fd/$DMAFILE_FD >facts
        echo $DMAFILE_FD $DMAFILE_BYTES $DMAFILE_OFFSET >>facts
        { head -c $DMAFILE_OFFSET /proc/self/fd/$DMAFILE_FD
          tail -c +$((DMAFILE_OFFSET + DMAFILE_BYTES + 1)) /proc/self/fd/$DMAFILE_FD
        } | tr -d '\\000' | wc -c >>facts";
    for (offset, length) in [
        (0, size),
        (1, size - 1),
        (0, 1),
        (size - 1, 1),
        (4095, 2),
        (4096, 4096),
        (12_345, 6_000_001),
        (3 * MIB + 511, 5 * MIB),
    ] {
        let args = format!("file --offset {offset} --length {length}");
        let loaded = dir.loaded(&mut dir.load_then(&args, facts));
        assert_eq!(loaded.digest, sha256(&file, offset, length), "{args}");
        let facts = fs::read_to_string(dir.path("facts")).unwrap();
        let facts: Vec<u64> = facts
            .split_whitespace()
            .map(|word| word.parse().unwrap())
            .collect();
        let [size, fd, bytes, start, dirty] = facts[..] else {
            panic!("{facts:?}");
        };
        assert!(fd > 2, "{args}: descriptor {fd}");
        assert_eq!(bytes, length, "{args}");
        assert_eq!(start, loaded.number("offset"), "{args}");
        assert!(start + bytes <= size, "{args}: {facts:?}");
        assert_eq!(dirty, 0, "{args}: bytes around the range");
    }
}

#[test]
fn every_method_and_mode_hands_over_the_same_bytes() {
    let dir = Dir::new();
    let size = 5 * MIB + 77;
    let file = dir.file("file", size);
    let digest = sha256(&file, 1001, size - 2002);
    for method in METHODS {
        let modes = match method {
            "auto" | "uring" | "threads" => &["auto", "buffered"][..],
            _ => &["auto"],
        };
        for io in modes {
            let length = size - 2002;
            let args = format!("file --method {method} --io {io} --offset 1001 --length {length}");
            let loaded = dir.loaded(&mut dir.load(&args));
            assert_eq!(loaded.digest, digest, "{args}");
            if method != "auto" {
                assert_eq!(loaded.report["method"], method, "{args}");
            }
        }
    }
}

#[test]
fn the_exit_status_of_command_is_passed_through() {
    let dir = Dir::new();
    dir.file("file", 5000);
    let run = |script: &str| {
        let mut command = dir.dmafile("load file --quiet -- sh -c");
        end(command.arg(script))
    };
    assert_eq!(run("exit 7").status.code(), Some(7));
    assert_eq!(run("exit 130").status.code(), Some(130));
    assert_eq!(run("kill -USR1 $$").status.signal(), Some(libc::SIGUSR1));
    assert_eq!(run("echo fine").ok().stdout, "fine\n");
}

#[test]
fn exit_status_is_127_if_command_is_missing_and_126_if_it_cannot_run() {
    let dir = Dir::new();
    dir.file("file", 5000);
    fs::create_dir(dir.path("folder")).unwrap();
    let line = |command: &str, status| {
        let mut command = dir.dmafile(&format!("load file --quiet -- {command}"));
        // A folder in PATH without search permission would cause EACCES.
        dir.refusal(command.env("PATH", "/usr/bin:/bin"), status)
    };
    assert_eq!(
        line("no-such-command", 127),
        "cannot run: no-such-command: No such file or directory (ENOENT)"
    );
    assert_eq!(
        line("./nothing", 127),
        "cannot run: ./nothing: No such file or directory (ENOENT)"
    );
    assert_eq!(
        line("./file", 126),
        "cannot run: ./file: Permission denied (EACCES)"
    );
    assert_eq!(
        line("./folder", 126),
        "cannot run: ./folder: Permission denied (EACCES)"
    );
}

#[test]
fn command_keeps_arguments_environment_folder_and_stdin() {
    let dir = Dir::new();
    dir.file("file", 5000);
    let stdin = dir.path("stdin");
    fs::write(&stdin, "from stdin\n").unwrap();
    let mut command = dir.dmafile("load file --quiet -- sh -c");
    command
        .args([r#"echo "$1|$SHADE|$(ls)"; cat"#, "name", "two words"])
        .env("SHADE", "grey")
        .stdin(File::open(stdin).unwrap());
    let ended = end(&mut command).ok();
    assert_eq!(ended.stdout, "two words|grey|file\nstdin\nfrom stdin\n");
}

/// Those of an enclosing dmafile describe memory that COMMAND is not given.
#[test]
fn command_gets_only_the_variables_of_its_own_load() {
    let dir = Dir::new();
    dir.file("file", 5000);
    fs::create_dir(dir.path("snapshot")).unwrap();
    dir.run("save --quiet file=a file=b snapshot").ok();
    let names = |args: &str| {
        let mut command = dir.dmafile("load --quiet snapshot -- /proc/self/exe");
        command.args(args.split(' ')).args(["--", "env"]);
        let text = end(&mut command).ok().stdout;
        let names = text.lines().filter_map(|line| line.split_once('='));
        let names = names.filter(|(name, _)| name.starts_with("DMAFILE_"));
        let mut names: Vec<_> = names.map(|(name, _)| name.to_string()).collect();
        names.sort();
        names
    };
    let one = [
        "DMAFILE_BYTES",
        "DMAFILE_FD",
        "DMAFILE_OFFSET",
        "DMAFILE_PATH",
    ];
    assert_eq!(names("load --quiet file"), one);
    assert_eq!(names("load --quiet --offset 1 file"), one[..3]);
}

#[test]
fn command_starts_with_the_original_signal_mask_and_dispositions() {
    let dir = Dir::new();
    dir.file("file", 5000);
    let masks = |command: &mut Command| {
        let status = end(command.args(["cat", "/proc/self/status"])).ok().stdout;
        let mask = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let mask = u64::from_str_radix(line.unwrap().trim(), 16).unwrap();
            // The C library reserves signals 32 and 33.
            mask & 0x7fff_ffff
        };
        [mask("SigBlk:"), mask("SigIgn:")]
    };
    let ours = masks(&mut dir.dmafile("load file --quiet --"));
    assert_eq!(ours, masks(common::interruptible(&mut Command::new("env"))));
}

#[test]
fn command_inherits_only_the_descriptor_of_the_buffer() {
    let dir = Dir::new();
    dir.file("file", 5 * MIB);
    let list = |command: &mut Command| {
        let listing = end(command.args(["ls", "-l", "/proc/self/fd"])).ok().stdout;
        let targets = listing.lines().filter_map(|line| line.split_once(" -> "));
        let mut names: Vec<_> = targets.map(|(_, to)| to.to_string()).collect();
        names.retain(|name| !name.contains("/proc/") && !name.contains("(deleted)"));
        (names, listing.matches("/memfd:file (deleted)").count())
    };
    let (ours, memfds) = list(&mut dir.dmafile("load file --quiet --"));
    let (bare, none) = list(&mut Command::new("env"));
    assert_eq!(ours, bare);
    assert_eq!((memfds, none), (1, 0));
}

#[test]
fn usage_errors_are_one_line_and_exit_2() {
    let dir = Dir::new();
    dir.file("file", 5000);
    for (args, line) in [
        (
            "file --to anon -- true",
            "private memory (--to anon) cannot be inherited by COMMAND; use --to memfd",
        ),
        (
            "file --json -- true",
            "--json needs a PATH with COMMAND, whose stdout it would mix with: --json=PATH",
        ),
        (
            "file --block 0",
            "--block: 0 is out of range: 4096 to 67108864",
        ),
        (
            "file --block 4095",
            "--block: 4095 is out of range: 4096 to 67108864",
        ),
        (
            "file --block 65M",
            "--block: 68157440 is out of range: 4096 to 67108864",
        ),
        (
            "file --queue-depth 0",
            "--queue-depth: 0 is out of range: 1 to 4096",
        ),
        (
            "file --queue-depth 4097",
            "--queue-depth: 4097 is out of range: 1 to 4096",
        ),
        (
            "file --block 2M --chunk 1M",
            "--chunk: 1048576 is out of range: 2097152 to 9223372036854775807",
        ),
        (
            "file --chunk 4095",
            "--chunk: 4095 is out of range: 4096 to 9223372036854775807",
        ),
        (
            "file --length 0",
            "--length: 0 is out of range: 1 to 18446744073709551615",
        ),
        (
            "file --to floppy",
            "--to: 'floppy' is not one of anon, memfd, fd:N, udmabuf, heap:NAME, module, dma-buf, \
             cuda-host, hip-host",
        ),
    ] {
        let mut command = dir.dmafile(&format!("load {args}"));
        assert_eq!(dir.refusal(&mut command, 2), line, "{args}");
    }
}

#[test]
fn parse_errors_name_the_valid_values_and_exit_2() {
    let dir = Dir::new();
    dir.file("file", 5000);
    for (args, part) in [
        ("load", "<FILE>"),
        ("load file --colour red", "'--colour'"),
        (
            "load file --block 1.5M",
            "a size is a whole number of bytes",
        ),
        (
            "load file --block 4KK",
            "write sizes as 4096, 512K, 8M, 1GiB",
        ),
        (
            "load file --offset 18446744073709551616",
            "'--offset <BYTES>'",
        ),
        (
            "load file --queue-depth many",
            "'--queue-depth <OPERATIONS>'",
        ),
        (
            "load file --method slow",
            "auto, uring, threads, bounce, module, copy-file-range, heap-read, premap, fetch",
        ),
        ("load file --method cufile", "'cufile' is refused: "),
        ("save file to --method cufile", "'cufile' is refused: "),
        ("load file --gather 1M", "tip: it is --chunk"),
        ("take model --at run/socket", "tip: it is --socket"),
        (
            "load file --no-memory-check",
            "tip: it is --no-check-memory",
        ),
        ("load file --pages 4k", "auto, base, thp, huge"),
        ("load file --pages 1g", "auto, base, thp, huge"),
        ("load file --io twice", "auto, direct, buffered"),
        (
            "load file --verify md5",
            "crc32c, crc64nvme, xxh3, blake3, sha256",
        ),
        ("load file --verify sha256=12", "64 hexadecimal digits"),
        ("explain", "<FILE>"),
        ("explain file --trace out", "'--trace'"),
        ("doctor --fix", "'--fix'"),
        ("pins 99999999999", "'[PID|FILE]'"),
        ("pins --watch=0", "'0'"),
        ("pins --pages --watch", "'--watch[=<SECONDS>]'"),
        ("pins --all", "--watch"),
        ("pins --record --watch", "--watch"),
        ("pins --record --pages", "--pages"),
        ("pins --stop", "--record"),
        ("pins --record --stop --for 1m", "--for"),
        ("pins --record --for soon", "60s"),
        ("pins 1 2", "'2'"),
        ("completions tcsh", "tcsh"),
        ("lode file", "'lode'"),
    ] {
        let line = dir.refusal(&mut dir.dmafile(args), 2);
        assert!(line.contains(part), "{args}: {line}");
        assert!(line.ends_with("; see dmafile --help"), "{args}: {line}");
    }
    // The message names each value once, and keeps clap's suggestion.
    let methods = "auto, uring, threads, bounce, module, copy-file-range, heap-read, premap, fetch";
    for (args, line) in [
        (
            "load file --method thread",
            &format!(
                "invalid value 'thread' for '--method <METHOD>' [possible values: {methods}]; tip: \
                 a similar value exists: 'threads'"
            ),
        ),
        (
            "load file --metod threads",
            &"unexpected argument '--metod' found; tip: a similar argument exists: '--method'"
                .to_string(),
        ),
        (
            "save --from file to",
            &"unexpected argument '--from' found; tip: sources come before DEST: dmafile save SRC... \
              DEST"
                .to_string(),
        ),
        (
            "explain save file to",
            &"unexpected argument 'file' found; tip: the plan of a save is dmafile save --explain \
              SRC... DEST"
                .to_string(),
        ),
        (
            "load file --verify md5=12",
            &"invalid value 'md5=12' for '--verify <ALGO[=HEX]|store>': 'md5' is not one of crc32c, \
              crc64nvme, xxh3, blake3, sha256, store"
                .to_string(),
        ),
        (
            "load file --verify sha256=12",
            &"invalid value 'sha256=12' for '--verify <ALGO[=HEX]|store>': '12' is not a valid sha256 \
              digest, which has 64 hexadecimal digits"
                .to_string(),
        ),
    ] {
        let found = dir.refusal(&mut dir.dmafile(args), 2);
        assert_eq!(found, format!("{line}; see dmafile --help"));
    }
    assert!(
        dir.run("load file --quiet --verify xxh3-64")
            .status
            .success()
    );
    let bare = dir.run("");
    assert_eq!(bare.status.code(), Some(2), "{bare:?}");
    assert!(
        bare.stdout.is_empty() && bare.stderr.contains("Usage:"),
        "{bare:?}"
    );
}

#[test]
fn a_block_that_is_not_a_multiple_of_the_alignment_is_a_usage_error() {
    let dir = Dir::new();
    dir.file("file", 5000);
    if !reads_directly(&dir) {
        return;
    }
    let align = &dir.run("explain file --json").ok().json()["align"];
    assert_eq!(
        dir.refuses("file --block 5000", 2),
        format!("--block: 5000 is not a multiple of the file's direct alignment, {align}")
    );
}

/// With /dev/udmabuf, tests/vm/test_loads.py tests it.
#[test]
fn without_udmabuf_the_error_names_a_remedy() {
    let dir = Dir::new();
    dir.file("file", 5000);
    if std::path::Path::new("/dev/udmabuf").exists() {
        return;
    }
    assert_eq!(
        dir.refuses("file --to udmabuf", 1),
        "cannot create the buffer: udmabuf: there is no /dev/udmabuf (ENOENT); modprobe \
         udmabuf (CONFIG_UDMABUF; in a container, on its host), or --to memfd"
    );
}

#[test]
fn without_dmafile_ko_its_kind_and_its_method_are_refused_with_a_remedy() {
    if std::path::Path::new("/dev/dmafile").exists() {
        return skip("dmafile.ko is loaded");
    }
    let dir = Dir::new();
    dir.file("file", 5000);
    assert_eq!(
        dir.refuses("file --to module", 1),
        "cannot use dmafile.ko: module: there is no /dev/dmafile (ENOENT); modprobe dmafile, after \
         make -C kernel install (in a container, both on its host)"
    );
    let tail = "(EOPNOTSUPP); leave --method and --io to auto, or see `dmafile explain`";
    assert_eq!(
        dir.refuses("file --method module", 1),
        format!(
            "cannot load like this: module direct to memfd: dmafile.ko moves bytes into its own \
             dma-bufs only: --to module {tail}"
        )
    );
    let doctor = dir.run("doctor file --json").ok().json();
    let checks = doctor["checks"].as_array().unwrap();
    let check = checks.iter().find(|check| check["name"] == "dmafile.ko");
    let check = check.unwrap();
    assert_eq!(check["health"], "not present", "{check}");
    let found = check["found"].as_str().unwrap();
    assert!(
        found.contains("there is no /dev/dmafile (ENOENT)"),
        "{found}"
    );
    let remedy = check["remedy"].as_str().unwrap();
    assert!(remedy.starts_with("modprobe dmafile"), "{remedy}");
}

#[test]
fn dma_buf_selects_an_available_kind_or_says_why_there_is_none() {
    let dir = Dir::new();
    dir.file("file", 5000);
    let nodes = ["/dev/dmafile", "/dev/udmabuf", "/dev/dma_heap/system"];
    if nodes.iter().any(|node| std::path::Path::new(node).exists()) {
        let plan = dir.run("explain file --to dma-buf --json").ok().json();
        let kind = plan["kind"].as_str().unwrap();
        assert!(
            ["module", "udmabuf", "heap:system"].contains(&kind),
            "{plan}"
        );
        return;
    }
    let line = dir.refuses("file --to dma-buf", 1);
    for part in [
        "cannot create a dma-buf: dma-buf: module: ",
        "there is no /dev/dmafile (ENOENT)",
        "; and udmabuf: ",
        "there is no /dev/udmabuf (ENOENT)",
        "; and heap:system: ",
        "there is no /dev/dma_heap/system (ENOENT)",
        "or --to memfd",
    ] {
        assert!(line.contains(part), "no {part:?} in {line}");
    }
}

#[test]
fn a_missing_heap_is_refused_with_a_remedy() {
    let dir = Dir::new();
    dir.file("file", 5000);
    let line = dir.refuses("file --to heap:none", 1);
    let why = "cannot create the buffer: heap:none: there is no /dev/dma_heap/none (ENOENT); ";
    let remedy = if std::path::Path::new("/dev/dma_heap").exists() {
        "use an existing one: heap:"
    } else {
        "use a kernel with CONFIG_DMABUF_HEAPS_SYSTEM"
    };
    assert!(line.starts_with(&format!("{why}{remedy}")), "{line}");
}

#[test]
fn a_method_that_does_not_support_the_mode_or_kind_is_refused() {
    let dir = Dir::new();
    dir.file("file", 5000);
    let tail = "(EOPNOTSUPP); leave --method and --io to auto, or see `dmafile explain`";
    assert_eq!(
        dir.refuses("file --method bounce --io buffered", 1),
        format!(
            "cannot load like this: bounce buffered to memfd: reads through the page cache need no \
             bounce ring {tail}"
        )
    );
    assert_eq!(
        dir.refuses("file --method copy-file-range --io buffered --to anon", 1),
        format!(
            "cannot load like this: copy-file-range buffered to anon: there is no descriptor to copy \
             into {tail}"
        )
    );
}

#[test]
fn json_is_one_object_with_every_documented_key() {
    let dir = Dir::new();
    let size = 6 * MIB + 1;
    dir.file("file", size);
    let ended = dir.run("load file --json").ok();
    assert_eq!(ended.stdout.lines().count(), 1);
    assert!(
        ended.stderr.starts_with("loaded 6.00 MiB in "),
        "text does not go to stderr: {ended:?}"
    );
    let report = ended.json();
    assert_eq!(report["bytes"], size);
    assert_eq!(report["kind"], "memfd");
    assert!(
        METHODS[1..]
            .iter()
            .any(|method| report["method"] == *method),
        "{report}"
    );
    assert!(
        ["direct", "buffered", "auto"]
            .iter()
            .any(|io| report["io"] == *io),
        "{report}"
    );
    assert!(report["pages"].is_string(), "{report}");
    let phases: BTreeMap<String, f64> = serde_json::from_value(report["phases"].clone()).unwrap();
    let mut names = PHASES;
    names.sort_unstable();
    assert!(phases.keys().eq(names.iter()), "{phases:?}");
    assert!(phases.values().all(|seconds| *seconds >= 0.0), "{phases:?}");
    for number in ["/seconds", "/hidden", "/cpu/user", "/cpu/system"] {
        let number = report.pointer(number).and_then(Value::as_f64);
        assert!(number.is_some_and(|number| number >= 0.0), "{report}");
    }
    assert!(
        phases["total"] > 0.0 && report["seconds"].as_f64() > Some(0.0),
        "{report}"
    );
    assert!(common::reasons(&report).contains("method "), "{report}");
    assert!(
        report["verify"].is_null() && report.get("verify").is_some(),
        "{report}"
    );
}

#[test]
fn json_goes_to_a_path_and_text_still_goes_to_stdout() {
    let dir = Dir::new();
    dir.file("file", 5000);
    let ended = dir.run("load file --json=report.json").ok();
    assert!(ended.stdout.contains("loaded 4.88 KiB"), "{ended:?}");
    assert_eq!(ended.stderr, "");
    let report: Value =
        serde_json::from_slice(&fs::read(dir.path("report.json")).unwrap()).unwrap();
    assert_eq!(report["bytes"], 5000);
    assert_eq!(
        dir.refusal(
            &mut dir.dmafile("load file --quiet --json=no/report.json"),
            1
        ),
        "cannot write: no/report.json: No such file or directory (ENOENT)"
    );
    fs::remove_file(dir.path("report.json")).unwrap();
    dir.refusal(
        &mut dir.dmafile("load missing --json=report.json --trace trace.json"),
        1,
    );
}

#[test]
fn quiet_suppresses_text_but_not_errors_or_json() {
    let dir = Dir::new();
    dir.file("file", 5000);
    let ended = dir.run("load file --quiet").ok();
    assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("", ""));
    let ended = dir.run("load file --quiet --json").ok();
    assert_eq!(ended.json()["bytes"], 5000);
    assert_eq!(ended.stderr, "");
    let line = dir.refusal(&mut dir.dmafile("load missing -q"), 1);
    assert!(line.starts_with("cannot open: missing: "), "{line}");
}

#[test]
fn text_shows_the_plan_reasons_phases_and_rate() {
    let dir = Dir::new();
    dir.file("file", 5 * MIB);
    let ended = dir.run("load file --verbose").ok();
    assert_eq!(ended.stderr, "");
    let mut parts = vec![
        "plan\n",
        "method ",
        "loaded 5.00 MiB in ",
        "phases in ms: ",
        "T(alloc) ",
    ];
    parts.extend(PHASES);
    for part in parts {
        assert!(ended.stdout.contains(part), "{part:?}: {}", ended.stdout);
    }
    // With a COMMAND, stdout belongs to it.
    let ended = dir.run("load file -v -- echo mine").ok();
    assert_eq!(ended.stdout, "mine\n");
    assert!(ended.stderr.starts_with("plan\n"), "{ended:?}");
    dir.refusal(&mut dir.dmafile("load file -v -q"), 2);
}

#[test]
fn explain_shows_the_plan_for_the_memory_of_a_gpu() {
    let dir = Dir::new();
    dir.file("file", 5 * MIB);
    // The machine may have a GPU; then its model and driver are shown.
    let plan = dir
        .run("explain file --to hip:77 --io direct --json")
        .ok()
        .json();
    assert_eq!(plan["kind"], "hip:77");
    let reasons = common::reasons(&plan);
    assert!(reasons.contains("device missing: "), "{reasons}");
    assert!(
        reasons.contains("ring 5242880: 2 slots of at most 4194304 bytes, each filled once"),
        "{reasons}"
    );
    // The ring is registered with the device, not with io_uring.
    let methods = plan["methods"].as_array().unwrap();
    assert!(!methods.is_empty());
    assert!(
        methods.iter().all(|attempt| attempt["registered"] == false),
        "{plan}"
    );
    assert!(!reasons.contains("registered: "), "{reasons}");
    assert!(!reasons.contains("allocation "), "{reasons}");
    dir.refusal(&mut dir.dmafile("load file --to hip:77"), 2);
}

#[test]
fn a_load_and_a_save_print_one_line_each() {
    let dir = Dir::new();
    dir.file("file", 5 * MIB);
    let line = |args: &str| {
        let text = dir.run(args).ok().stdout;
        assert_eq!(text.lines().count(), 1, "{text}");
        text
    };
    let text = line("load file --io direct --pages base");
    assert!(text.starts_with("loaded 5.00 MiB in "), "{text}");
    assert!(text.ends_with(" direct; memfd on base pages\n"), "{text}");
    let text = line("save file copy");
    assert!(text.starts_with("saved 5.00 MiB in "), "{text}");
    assert!(text.ends_with("; on the disk\n"), "{text}");
    // A digest is a result.
    let text = dir.run("load file --verify crc32c").ok().stdout;
    let digest = text.lines().nth(1).unwrap();
    assert!(
        digest.starts_with("  crc32c ") && digest.ends_with(" (computed)"),
        "{text}"
    );
    // Bytes that went different ways are counted.
    let sparse = dir.file("sparse", MIB);
    File::options()
        .append(true)
        .open(&sparse)
        .unwrap()
        .set_len(4 * MIB)
        .unwrap();
    let text = line("load sparse --io direct");
    assert!(
        text.contains("1.00 MiB direct, 3.00 MiB of holes; memfd "),
        "{text}"
    );
}

#[test]
fn the_trace_is_valid_and_accounts_for_every_byte() {
    let dir = Dir::new();
    let size = 21 * MIB + 5;
    dir.file("file", size);
    dir.run("load file --quiet --verify crc32c --trace trace.json")
        .ok();
    let trace: Value = serde_json::from_slice(&fs::read(dir.path("trace.json")).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let of = |phase: &str| {
        let phase = phase.to_string();
        events.iter().filter(move |event| event["ph"] == *phase)
    };
    let rows: Vec<&Value> = of("M")
        .inspect(|event| assert_eq!(event["name"], "thread_name"))
        .inspect(|event| assert!(event["args"]["name"].is_string(), "{event}"))
        .map(|event| &event["tid"])
        .collect();
    let mut moved = 0;
    for event in of("X") {
        for time in ["ts", "dur"] {
            assert!(event[time].as_f64().is_some_and(|us| us >= 0.0), "{event}");
        }
        assert!(
            event["pid"].is_u64() && rows.contains(&&event["tid"]),
            "{event}"
        );
        if event["name"] == "read" || event["name"] == "copy" {
            moved += event["args"]["bytes"].as_u64().unwrap();
        }
    }
    assert_eq!(moved, size);
    assert_eq!(rows.len() + of("X").count(), events.len());
    for name in ["alloc", "verify"] {
        assert!(of("X").any(|event| event["name"] == name), "no {name}");
    }
}

#[test]
fn digests_equal_those_of_other_programs() {
    let dir = Dir::new();
    // Several extents with a hole between them, and an unaligned end.
    let file = dir.file("file", 9 * MIB);
    let size = 14 * MIB + 3;
    let handle = File::options().write(true).open(&file).unwrap();
    handle.write_all_at(b"end", size - 3).unwrap();
    let digest = |algorithm: &str, name: &str| {
        let args = format!("load {name} --quiet --json --verify {algorithm}");
        let verify = dir.run(&args).ok().json()["verify"].clone();
        assert_eq!(verify["algorithm"], algorithm);
        assert_eq!(verify["matched"], false);
        verify["digest"].as_str().unwrap().to_string()
    };
    assert_eq!(digest("sha256", "file"), sha256(&file, 0, size));
    for (algorithm, program) in [("blake3", "b3sum file"), ("xxh3", "xxhsum -H3 file")] {
        let mut words = program.split(' ');
        let mut other = Command::new(words.next().unwrap());
        if let Ok(output) = other.args(words).current_dir(dir.path("")).output() {
            let text = String::from_utf8(output.stdout).unwrap();
            let ours = digest(algorithm, "file");
            assert!(text.contains(&ours), "{ours} is not in {text}");
        }
    }
    // Check values from the specifications of the algorithms.
    fs::write(dir.path("digits"), "123456789").unwrap();
    fs::write(dir.path("abc"), "abc").unwrap();
    assert_eq!(digest("crc32c", "digits"), "e3069283");
    assert_eq!(digest("xxh3", "abc"), "78af5f94892f3950");
    assert_eq!(
        digest("blake3", "abc"),
        "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
    );
}

#[test]
fn a_wrong_digest_is_an_error_and_command_does_not_run() {
    let dir = Dir::new();
    dir.file("file", 5 * MIB + 9);
    for algorithm in ["crc32c", "xxh3", "blake3", "sha256"] {
        let args = format!("load file --quiet --json --verify {algorithm}");
        let report = dir.run(&args).ok().json();
        let digest = report["verify"]["digest"].as_str().unwrap();
        let expect = |hex: &str| {
            dir.dmafile(&format!(
                "load file --quiet --verify {algorithm}={hex} -- echo ran"
            ))
        };
        for right in [digest.to_string(), digest.to_uppercase()] {
            assert_eq!(end(&mut expect(&right)).ok().stdout, "ran\n");
        }
        let last = if digest.ends_with('0') { "1" } else { "0" };
        let wrong = digest[..digest.len() - 1].to_string() + last;
        assert_eq!(
            dir.refusal(&mut expect(&wrong), 1),
            format!(
                "wrong digest: file: {algorithm} is {digest} and should be {wrong} (EBADMSG); \
                 the file is damaged, or is not the expected one: download it again"
            )
        );
    }
}

#[test]
fn explain_reads_nothing_into_the_page_cache() {
    let dir = Dir::new();
    let file = dir.file("file", 8 * MIB);
    let before = cached(&file);
    let ended = dir.run("explain file").ok();
    assert!(ended.stdout.starts_with("plan\n"), "{ended:?}");
    assert_eq!(ended.stderr, "");
    let plan = dir
        .run("explain file --offset 1M --length 2M --block 64K --json")
        .ok()
        .json();
    assert_eq!(plan["offset"], MIB);
    assert_eq!(plan["bytes"], 2 * MIB);
    assert_eq!(plan["block"], 64 * KIB);
    assert!(
        plan["methods"]
            .as_array()
            .is_some_and(|methods| !methods.is_empty()),
        "{plan}"
    );
    assert!(common::reasons(&plan).contains("pages "), "{plan}");
    assert_eq!(cached(&file), before);
    assert_eq!(
        before.unwrap_or(0),
        0,
        "the page cache of this disk cannot be dropped"
    );
    // `explain` refuses what `load` refuses.
    let line = dir.refusal(&mut dir.dmafile("explain missing"), 1);
    assert!(line.starts_with("cannot open: missing: "), "{line}");
    dir.refusal(&mut dir.dmafile("explain file --block 0"), 2);
}

#[test]
fn explain_prints_only_the_settings_that_the_load_uses() {
    let dir = Dir::new();
    dir.file("file", 8 * MIB);
    let lines = |args: &str| {
        let text = dir.run(&format!("explain file {args}")).ok().stdout;
        let kept = text.lines().map(str::trim_start).filter(|line| {
            let name = line.split(' ').next();
            matches!(name, Some("block" | "chunk"))
        });
        kept.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect::<Vec<_>>()
    };
    let [line] = &lines("--method threads --io direct --allocation in-read --queue-depth 1")[..]
    else {
        panic!("one block, and no chunk");
    };
    let start = "block 4.00 MiB one at a time, aligned to ";
    assert!(line.starts_with(start), "{line}");
    assert_eq!(
        lines("--method copy-file-range --io buffered --allocation ahead --block 64K"),
        [
            "block 64.00 KiB one at a time",
            "chunk 128.00 MiB allocated before its reads begin (--chunk)",
        ]
    );
    let [line] = &lines("--method uring --io direct --allocation in-read --queue-depth 7")[..]
    else {
        panic!("one block, and no chunk");
    };
    let start = "block 4.00 MiB x 7 in flight, aligned to ";
    assert!(line.starts_with(start), "{line}");
    let plan = dir
        .run("explain file --method threads --io buffered --block 8M --allocation in-read --json");
    let plan = plan.ok().json();
    assert_eq!(plan["queue_depth"], 1);
    for key in ["chunk", "align", "allocators"] {
        assert_eq!(plan.get(key), Some(&serde_json::Value::Null), "{key}");
    }
}

#[test]
fn a_direct_load_leaves_nothing_in_the_page_cache() {
    let dir = Dir::new();
    let file = dir.file("file", 8 * MIB + 100);
    if !reads_directly(&dir) {
        return;
    }
    dir.run("load file --quiet").ok();
    dir.run("load file --quiet --io direct --method threads")
        .ok();
    assert_eq!(cached(&file).unwrap_or(0), 0);
}

#[test]
fn a_cached_file_is_copied_from_the_page_cache() {
    let dir = Dir::new();
    let file = dir.file("file", 12 * MIB);
    let _warm = Warm::range(&File::open(&file).unwrap(), 0..12 * MIB);
    let warm = dir.loaded(&mut dir.load("file"));
    assert_eq!(warm.digest, sha256(&file, 0, 12 * MIB));
    if warm.reasons().contains("cachestat: all of it is cached") {
        assert_eq!(warm.report["io"], "buffered");
        assert_eq!(warm.number("bytes_buffered"), 12 * MIB);
    } else {
        skip("this kernel has no cachestat");
    }
}

/// A check of the doctor has everything that it must have.
fn is_complete(check: &Value) {
    assert!(!check["name"].as_str().unwrap().is_empty(), "{check}");
    assert!(!check["found"].as_str().unwrap().is_empty(), "{check}");
    let health = check["health"].as_str().unwrap();
    assert!(["good", "fair", "not present"].contains(&health), "{check}");
    assert!(health != "fair" || check["remedy"].is_string(), "{check}");
}

/// With a double of the driver, or with a library that is not one.
#[test]
fn doctor_and_explain_say_whether_a_gpu_can_be_used() {
    let dir = Dir::new();
    dir.file("file", 5000);
    let driver = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/double/driver.c");
    fs::create_dir(dir.path("double")).unwrap();
    fs::create_dir(dir.path("broken")).unwrap();
    fs::write(dir.path("broken/libcuda.so.1"), "").unwrap();
    let mut build = Command::new("cc");
    build.args([
        "-shared",
        "-fPIC",
        "-pthread",
        "-Wl,-soname,libcuda.so.1",
        driver,
        "-o",
    ]);
    end(build.arg(dir.path("double/libcuda.so.1"))).ok();
    let run = |library: &str, args: &str| {
        let mut command = dir.dmafile(args);
        command.env("LD_LIBRARY_PATH", dir.path(library));
        end(&mut command).ok()
    };
    let gpus = |library| {
        let mut checks = run(library, "doctor file --json").json()["checks"].clone();
        let checks = checks.as_array_mut().unwrap();
        checks.retain(|check| check["name"] == "cuda");
        checks.iter().for_each(is_complete);
        std::mem::take(checks)
    };
    let found = gpus("double");
    assert_eq!(found.len(), 2);
    for (number, check) in found.iter().enumerate() {
        let start = format!("cuda:{number}, double {number}, driver 13.5; can pin sealed memory; ");
        assert!(
            check["found"].as_str().unwrap().starts_with(&start),
            "{check}"
        );
    }
    let [broken] = &gpus("broken")[..] else {
        panic!("one check");
    };
    assert_eq!(broken["health"], "not present");
    assert!(
        run("double", "doctor file")
            .stdout
            .contains("cuda:1, double 1")
    );
    for to in ["cuda:1", "cuda-host:1"] {
        for (library, choice, why) in [
            ("double", "found", "double 1, driver 13.5"),
            ("broken", "missing", "libcuda.so.1: "),
        ] {
            let args = format!("explain file --to {to}");
            let plan = run(library, &format!("{args} --json")).json();
            assert_eq!(plan["kind"], to);
            let reasons = plan["reasons"].as_array().unwrap();
            let device = reasons.iter().find(|reason| reason["about"] == "device");
            let device = device.unwrap_or_else(|| panic!("{plan}"));
            assert_eq!(device["choice"], choice, "{to}");
            assert!(device["why"].as_str().unwrap().contains(why), "{device}");
            let text = run(library, &args).stdout;
            assert!(text.contains(&format!("  device      {choice} ")), "{text}");
        }
    }
    let mut wide = run("double", "explain file --to cuda:0").stdout;
    let ring = |text: &str| {
        let line = text.lines().find(|line| line.starts_with("  ring "));
        line.unwrap_or_else(|| panic!("{text}")).to_string()
    };
    assert!(ring(&wide).ends_with("1 slot, filled once"), "{wide}");
    for (len, words) in [
        (
            20 << 20,
            "5 slots of at most 4194304 bytes, each filled once",
        ),
        (300 << 20, "16 slots of 4194304 bytes, reused"),
    ] {
        // A hole takes no space.
        fs::File::create(dir.path("large"))
            .unwrap()
            .set_len(len)
            .unwrap();
        wide = run("double", "explain large --to cuda:0").stdout;
        assert!(ring(&wide).ends_with(words), "{wide}");
    }
    let mut load = dir.dmafile("load file --to cuda-host --quiet");
    load.env("LD_LIBRARY_PATH", dir.path("broken"));
    let line = dir.refusal(&mut load, 1);
    assert!(
        line.starts_with("cannot use the device: cuda:0: "),
        "{line}"
    );
    assert!(line.contains("(ENODEV)"), "{line}");
}

#[test]
fn doctor_reports_the_result_of_every_check() {
    let dir = Dir::new();
    dir.file("file", 5000);
    let checks = dir.run("doctor file --json").ok().json()["checks"].clone();
    let checks = checks.as_array().unwrap();
    checks.iter().for_each(is_complete);
    let text = dir.run("doctor file").ok();
    assert_eq!(text.stderr, "");
    let verdict = text.stdout.lines().last().unwrap();
    assert!(
        verdict.starts_with("loads into memfd and private memory: "),
        "{verdict}"
    );
    for name in [
        "kernel",
        "io_uring",
        "memlock",
        "transparent huge pages",
        "huge pages for memfd",
        "hugetlb pool",
        "udmabuf",
        "dma-heap",
        "dmafile.ko",
        "memory",
        "container limits",
        "file system",
    ] {
        assert!(
            checks.iter().any(|check| check["name"] == name),
            "no {name}"
        );
        assert!(
            text.stdout.contains(&format!("  {name}")),
            "no {name} in {text:?}"
        );
    }
    let line = dir.refusal(&mut dir.dmafile("doctor missing"), 1);
    assert!(line.starts_with("cannot open: missing: "), "{line}");
}

#[test]
fn doctor_shows_an_ordinary_user_the_memlock_limit() {
    let dir = Dir::new();
    dir.file("file", 5000);
    let mut command = dir.dmafile("doctor file --json");
    common::limit(&mut command, libc::RLIMIT_MEMLOCK, 64 * KIB);
    let json = end(run_as(&mut command, common::NOBODY)).ok().json();
    let checks = json["checks"].as_array().unwrap();
    let memlock = checks
        .iter()
        .find(|check| check["name"] == "memlock")
        .unwrap();
    assert_eq!(memlock["health"], "fair");
    assert!(
        memlock["remedy"]
            .as_str()
            .unwrap()
            .starts_with("ulimit -l "),
        "{memlock}"
    );
}

#[test]
fn completions_have_every_subcommand_option_and_value() {
    let dir = Dir::new();
    for shell in ["bash", "zsh", "fish"] {
        let ended = dir.run(&format!("completions {shell}")).ok();
        assert_eq!(ended.stderr, "", "{shell}");
        for word in ["explain", "doctor", "pins", "queue", "depth", "chunk"] {
            assert!(ended.stdout.contains(word), "no {word} for {shell}");
        }
        // The values of options.
        for word in ["copy-file-range", "base", "buffered", "in-read", "sha256"] {
            assert!(ended.stdout.contains(word), "no {word} for {shell}");
        }
        // Those of --to, which also takes others.
        for word in ["anon", "udmabuf", "dma-buf", "cuda-host"] {
            assert!(ended.stdout.contains(word), "no {word} for {shell}");
        }
        assert!(!ended.stdout.contains("bench-run"), "{shell}");
    }
}

#[test]
fn the_manual_has_one_page_per_subcommand() {
    let dir = Dir::new();
    fs::create_dir(dir.path("man")).unwrap();
    let ended = dir.run("man man").ok();
    assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("", ""));
    let page = |name: &str| fs::read_to_string(dir.path("man").join(name)).unwrap();
    for sub in [
        "load",
        "show",
        "explain",
        "doctor",
        "pins",
        "bench",
        "completions",
        "man",
    ] {
        let text = page(&format!("dmafile-{sub}.1"));
        assert_eq!(text.matches("\n.TH ").count(), 1, "{sub}");
        assert!(
            text.contains(&format!(".TH dmafile-{sub} 1")),
            "{sub}: {text}"
        );
        let synopsis = text.split_once(".SH SYNOPSIS\n").unwrap().1;
        assert!(
            synopsis.starts_with(&format!("\\fBdmafile {sub}\\fR")),
            "{text}"
        );
    }
    // Every page that the main page refers to exists.
    let main = page("dmafile.1");
    let names = fs::read_dir(dir.path("man")).unwrap().count();
    assert_eq!(main.matches("(1)\n").count() + 1, names, "{main}");
    // Without a folder, one page is printed.
    let ended = dir.run("man").ok();
    assert_eq!(
        (ended.stdout.as_str(), ended.stderr.as_str()),
        (main.as_str(), "")
    );
    let line = dir.refusal(&mut dir.dmafile("man missing"), 1);
    let wanted = "cannot write the man pages: missing: No such file or directory (ENOENT)";
    assert_eq!(line, wanted);
}

#[test]
fn load_help_groups_options_with_the_most_needed_first() {
    let help = Dir::new().run("load --help").ok().stdout;
    let headings = [
        "What to load:",
        "Where to:",
        "Output:",
        "Tuning, rarely needed:",
    ];
    let found = headings.map(|heading| help.find(&format!("\n{heading}\n")));
    assert!(
        found.iter().all(Option::is_some) && found.is_sorted(),
        "{help}"
    );
    let short = Dir::new().run("load -h").ok().stdout;
    assert!(short.lines().count() < 32, "{short}");
    for (option, is_tuning) in [
        ("--pages <PAGES>", false),
        ("--method <METHOD>", true),
        ("--block <BYTES>", true),
        ("--offset <BYTES>", false),
    ] {
        assert!(help.contains(option), "no {option} in {help}");
        assert_ne!(short.contains(option), is_tuning, "{option}: {short}");
    }
}

#[test]
fn help_and_version_go_to_stdout_with_status_0() {
    let dir = Dir::new();
    for what in ["--help", "load --help", "--version"] {
        let ended = dir.run(what).ok();
        assert_eq!(ended.stderr, "", "{what}");
        assert!(!ended.stdout.is_empty(), "{what}");
    }
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(dir.run("--version").stdout, format!("dmafile {version}\n"));
}

#[test]
fn escape_codes_are_written_only_to_terminals() {
    let dir = Dir::new();
    dir.file("file", 5 * MIB);
    for args in [
        "load file",
        "explain file",
        "doctor file",
        "pins",
        "--help",
        "load --nonsense",
        "load missing",
    ] {
        let ended = end(dir
            .dmafile(args)
            .env("TERM", "xterm-256color")
            .env("CLICOLOR_FORCE", "1"));
        let text = ended.stdout + &ended.stderr;
        assert!(
            !text.contains('\x1b') && !text.contains('\r'),
            "{args}: {text:?}"
        );
    }
}

#[test]
fn progress_is_shown_on_a_terminal_unless_quiet() {
    let dir = Dir::new();
    dir.file("file", 5 * MIB);
    // `script` gives its child a terminal.
    let on_terminal = |args: &str| {
        let mut command = Command::new("script");
        let line = format!(
            "{} load file {args} >/dev/null",
            env!("CARGO_BIN_EXE_dmafile")
        );
        command.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
        command
            .current_dir(dir.path(""))
            .stdin(Stdio::null())
            .env("TERM", "xterm");
        end(&mut command).ok().stdout
    };
    assert!(on_terminal("").contains("5.00 MiB/5.00 MiB"));
    assert_eq!(on_terminal("--quiet"), "");
}

#[test]
fn every_block_of_the_test_content_is_different() {
    let whole = content(0, 64 << 10);
    let mut blocks: Vec<_> = whole.chunks(512).collect();
    blocks.sort_unstable();
    blocks.dedup();
    assert_eq!(blocks.len(), 128);
    assert_eq!(content(1001, 777), whole[1001..1778]);
}
