//! `dmafile save` as scripts see it: the text, the exit statuses, and a file that is always the old or
//! the new one, whatever happens during the save.

mod common;

use common::sandbox::{Call, any, no_nameless, open_direct, refuse, refuse_on};
use common::{
    Dir, KIB, MIB, NOBODY, Running, content, done, end, is_root, limit, memfd, own_mounts, run_as,
    sha256, skip, start,
};
use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// More than a window of registered memory, and not a multiple of the block size.
const SIZE: u64 = 66 * MIB + 77;

/// A memfd that commands inherit, with the content of [`Dir::file`].
fn memory(bytes: u64) -> File {
    let file = memfd(bytes);
    file.write_all_at(&content(0, bytes as usize), 0).unwrap();
    file
}

/// `dmafile save fd:N ARGS`.
fn save(dir: &Dir, memory: &File, args: &str) -> Command {
    dir.dmafile(&format!("save fd:{} {args}", memory.as_raw_fd()))
}

/// Writes and returns an old file of 5,000 bytes, which differ from those of any new file.
fn old(dir: &Dir, name: &str) -> Vec<u8> {
    let bytes = vec![0xff; 5000];
    fs::write(dir.path(name), &bytes).unwrap();
    bytes
}

#[test]
fn every_source_is_saved_and_reported() {
    let dir = Dir::new();
    let source = dir.file("source", SIZE);
    let digest = sha256(&source, 0, SIZE);
    let memory = memory(SIZE);
    let number = memory.as_raw_fd();
    for from in [
        format!("fd:{number}"),
        "source".to_string(),
        "-".to_string(),
    ] {
        let args = format!("save {from} to --json --verify sha256");
        let mut command = dir.dmafile(&args);
        // stdin is a regular file at offset 0.
        command.stdin(File::open(&source).unwrap());
        let ended = end(&mut command).ok();
        let report = ended.json();
        assert_eq!(common::cached(&dir.path("to")).unwrap_or(0), 0, "{from}");
        assert_eq!(sha256(&dir.path("to"), 0, SIZE), digest, "{from}");
        assert_eq!(report["bytes"], SIZE, "{from}");
        assert_eq!(report["verify"]["digest"], digest.as_str(), "{from}");
        assert_eq!(
            (&report["atomic"], &report["sync"]),
            (&true.into(), &true.into())
        );
        let moved = ["bytes_direct", "bytes_buffered", "bytes_hole"];
        let moved = moved.map(|key| report[key].as_u64().unwrap());
        assert_eq!(moved.iter().sum::<u64>(), SIZE, "{from}: {moved:?}");
        assert!(ended.stderr.contains("saved "), "{from}: {ended:?}");
        assert_eq!(dir.names(), ["source", "to"], "{from}");
    }
    // A part of memory, and a length for stdin.
    let args = "--length 1M --quiet to";
    let from = format!("save fd:{number}@4097 {args}");
    let ended = dir.run(&from).ok();
    assert_eq!((ended.stdout, ended.stderr), (String::new(), String::new()));
    assert_eq!(sha256(&dir.path("to"), 0, MIB), sha256(&source, 4097, MIB));
    assert_eq!(fs::metadata(dir.path("to")).unwrap().len(), MIB);
    let mut command = dir.dmafile("save - --length 1M --offset 1K to");
    command.stdin(Stdio::from(File::open(&source).unwrap()));
    assert!(end(&mut command).ok().stdout.contains("not atomic"));
    assert_eq!(sha256(&dir.path("to"), KIB, MIB), sha256(&source, 0, MIB));
    assert_eq!(sha256(&dir.path("to"), 0, KIB), sha256(&source, 4097, KIB));
}

#[test]
fn a_name_is_only_a_name() {
    let dir = Dir::new();
    let bytes = old(&dir, "to");
    old(&dir, "to@10");
    fs::write(dir.path("source"), "new").unwrap();
    dir.run("save --quiet source to@10").ok();
    assert_eq!(fs::read(dir.path("to@10")).unwrap(), b"new");
    assert!(fs::read(dir.path("to")).unwrap() == bytes);
    dir.run("save --quiet source to@0").ok();
    assert_eq!(dir.names(), ["source", "to", "to@0", "to@10"]);

    // Nor need it be text.
    let place = |name: &[u8]| dir.path("").join(OsStr::from_bytes(name));
    let (from, to) = (b"from\xff", b"to=\xe9");
    fs::write(place(from), "bytes").unwrap();
    for explain in [&[][..], &["--explain"]] {
        let mut save = dir.dmafile("save --json");
        save.arg(OsStr::from_bytes(from)).args(explain);
        let json = end(save.arg(OsStr::from_bytes(to))).ok().json();
        assert_eq!(json["to"], "to=\u{fffd}");
    }
    assert_eq!(fs::read(place(to)).unwrap(), b"bytes");
    fs::create_dir(dir.path("snapshot")).unwrap();
    let snapshot = |part: &[u8]| {
        let mut save = dir.dmafile("save --quiet");
        save.arg(OsStr::from_bytes(part)).arg("snapshot");
        save
    };
    end(&mut snapshot(b"from\xff=part")).ok();
    let mut load = dir.dmafile("load --quiet snapshot -- sh -c");
    load.arg("cat <&$DMAFILE_FD; echo =$DMAFILE_NAMES");
    assert_eq!(end(&mut load).ok().stdout, "bytes=part\n");
    let line = dir.refusal(&mut snapshot(b"source=\xff"), 2);
    assert!(line.contains("has a name that is not UTF-8"), "{line}");
}

#[test]
fn the_trace_has_every_whole_block() {
    let dir = Dir::new();
    let size = 21 * MIB;
    dir.file("source", size);
    for io in ["direct", "buffered"] {
        let args = format!("save source --io {io} --quiet --trace trace.json to");
        let ended = end(&mut dir.dmafile(&args));
        if io == "direct" && ended.stderr.contains("(EOPNOTSUPP)") {
            continue;
        }
        ended.ok();
        let trace = fs::read(dir.path("trace.json")).unwrap();
        let trace: serde_json::Value = serde_json::from_slice(&trace).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let written = events
            .iter()
            .filter(|event| event["ph"] == "X" && event["name"] == "write")
            .map(|event| event["args"]["bytes"].as_u64().unwrap());
        assert_eq!(written.sum::<u64>(), size, "{io}");
    }
}

#[test]
fn explain_shows_the_plan_and_writes_nothing() {
    let dir = Dir::new();
    dir.file("source", 3 * MIB);
    let bytes = old(&dir, "to");
    for args in ["save --explain source to", "save source to --explain"] {
        let text = dir.run(args).ok().stdout;
        assert!(text.contains("\n  place       atomic "), "{text}");
        let plan = dir.run(&format!("{args} --json")).ok().json();
        assert_eq!(plan["bytes"], 3 * MIB);
        assert_eq!(plan["to"], "to");
        assert!(common::reasons(&plan).contains("sync yes: "), "{plan}");
    }
    assert_eq!(fs::read(dir.path("to")).unwrap(), bytes);
    assert_eq!(dir.names(), ["source", "to"]);
    // The load of a file that is named "save".
    dir.file("save", 5000);
    assert!(dir.run("explain save").ok().stdout.contains("4.88 KiB"));
}

#[test]
fn usage_errors_have_status_2() {
    let dir = Dir::new();
    dir.file("source", 5000);
    for args in [
        "save",
        "save source",
        "save fd:x to",
        "save source to --method heap-read",
        "save source to --block 5K",
        "save source to --queue-depth 0",
        "save source to --verify md5",
        "save source to --offset x",
    ] {
        dir.refusal(&mut dir.dmafile(args), 2);
    }
    let line = dir.refusal(&mut dir.dmafile("save fd:987 to"), 1);
    let says = "cannot use the descriptor: fd:987: Bad file number (EBADF); pass an open one";
    assert!(line.starts_with(says), "{line}");
}

/// Kills saves at many moments: the file is the old or the new one, and the next save removes what the
/// kill left behind.
fn killed(prepare: impl Fn(Command) -> Command, leaves_names: bool) {
    const KILLS: u64 = 50;
    let dir = Dir::new();
    let memory = memory(SIZE);
    let source = dir.file("source", SIZE);
    let new = sha256(&source, 0, SIZE);
    let before = old(&dir, "to");
    let begin = std::time::Instant::now();
    end(&mut prepare(save(&dir, &memory, "to --quiet"))).ok();
    let lasts = begin.elapsed();
    let mut seen_left = false;
    for kill in 0..KILLS {
        fs::write(dir.path("to"), &before).unwrap();
        let running = start(&mut prepare(save(&dir, &memory, "to --quiet")));
        // Moments that cover the whole save, however fast the machine is.
        std::thread::sleep(lasts.mul_f64(kill as f64 / KILLS as f64));
        running.signal(libc::SIGKILL);
        running.end();
        seen_left |= dir.names().len() > 2;
        let bytes = fs::metadata(dir.path("to")).unwrap().len();
        match bytes {
            5000 => assert_eq!(fs::read(dir.path("to")).unwrap(), before),
            _ => assert_eq!(sha256(&dir.path("to"), 0, bytes), new),
        }
    }
    if leaves_names && !seen_left {
        skip("no kill came while a temporary name existed");
    }
    end(&mut prepare(save(&dir, &memory, "to --quiet"))).ok();
    assert_eq!(sha256(&dir.path("to"), 0, SIZE), new);
    assert_eq!(dir.names(), ["source", "to"]);
}

#[test]
fn a_kill_leaves_the_old_file_or_the_new_one() {
    killed(|command| command, false);
}

#[test]
fn the_next_save_removes_what_a_kill_left() {
    killed(
        |command| refuse(command, &no_nameless(), libc::EOPNOTSUPP),
        true,
    );
}

#[test]
fn unused_temporary_names_are_removed() {
    let dir = Dir::new();
    let memory = memory(5000);
    for name in [".to.dmafile-0", ".to.dmafile-3", ".to.dmafile-15"] {
        fs::write(dir.path(name), b"left").unwrap();
    }
    // A locked file belongs to another save in progress. A folder is not removed either.
    let used = File::create(dir.path(".to.dmafile-1")).unwrap();
    // SAFETY: a lock on an open file, released when the file is closed.
    done(unsafe { libc::flock(used.as_raw_fd(), libc::LOCK_EX) }).unwrap();
    fs::create_dir(dir.path(".to.dmafile-2")).unwrap();
    fs::write(dir.path(".other.dmafile-0"), b"another place's").unwrap();
    old(&dir, "to");
    for calls in [vec![], no_nameless()] {
        let command = save(&dir, &memory, "to --json");
        let report = end(&mut refuse(command, &calls, libc::EOPNOTSUPP))
            .ok()
            .json();
        let reasons = common::reasons(&report);
        let named =
            reasons.contains("file .to.dmafile-0: the file system does not support unnamed files");
        assert_eq!(named, !calls.is_empty(), "{reasons}");
        assert_eq!(
            dir.names(),
            [".other.dmafile-0", ".to.dmafile-1", ".to.dmafile-2", "to"]
        );
    }
    // A name of the maximum length.
    let long = "n".repeat(255);
    end(&mut save(&dir, &memory, &long)).ok();
    end(&mut save(&dir, &memory, &long)).ok();
    assert_eq!(fs::read(dir.path(&long)).unwrap(), content(0, 5000));
}

/// Without O_TMPFILE, nobody else can read what a save has written so far, or write to it.
#[test]
fn a_named_temporary_file_is_private_until_it_is_complete() {
    let dir = Dir::new();
    let to = dir.path("to");
    for before in [None, Some(0o600), Some(0o644), Some(0o666)] {
        let _ = fs::remove_file(&to);
        if let Some(mode) = before {
            old(&dir, "to");
            fs::set_permissions(&to, Permissions::from_mode(mode)).unwrap();
        }
        let (read, mut write) = std::io::pipe().unwrap();
        let mut command = dir.dmafile("save -v - to");
        let mask = || {
            // SAFETY: a system call only, between fork and exec.
            unsafe { libc::umask(0o027) };
            Ok(())
        };
        // SAFETY: as above.
        unsafe { command.pre_exec(mask) };
        let mut command = refuse(command, &no_nameless(), libc::EOPNOTSUPP);
        let mut running = start(command.stdin(read));
        drop(command);
        write.write_all(&vec![7; 3 * MIB as usize]).unwrap();
        running.until_written("if refused");
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
        assert_eq!(mode(&dir.path(".to.dmafile-0")), 0o600, "{before:?}");
        drop(write);
        running.end().ok();
        assert_eq!(mode(&to), before.unwrap_or(0o640));
        assert_eq!(dir.names(), ["to"]);
    }
}

/// Each failing system call has its message, leaves the old file, and leaves nothing else behind, with
/// and without O_TMPFILE.
#[test]
fn a_failed_system_call_leaves_the_old_file() {
    let dir = Dir::new();
    let memory = memory(3 * MIB + 5);
    let bytes = old(&dir, "to");
    let calls = [
        (
            libc::SYS_fallocate,
            libc::ENOSPC,
            "cannot write: to: No space left on device (ENOSPC); free space",
        ),
        (
            libc::SYS_fallocate,
            libc::EDQUOT,
            "(EDQUOT); free space, or ask for a larger quota",
        ),
        (
            libc::SYS_pwrite64,
            libc::EIO,
            "(EIO); the device failed to write: see the kernel log",
        ),
        (libc::SYS_fsync, libc::EIO, "cannot sync: to: "),
        (libc::SYS_renameat, libc::EIO, "cannot write: to: "),
        (
            libc::SYS_ftruncate,
            libc::EFBIG,
            "(EFBIG); raise the limit on file size: ulimit -f",
        ),
        (
            libc::SYS_fchmod,
            libc::EIO,
            "cannot keep its owner and permissions: to: ",
        ),
    ];
    fs::set_permissions(dir.path("to"), Permissions::from_mode(0o640)).unwrap();
    for (number, errno, says) in calls {
        for nameless in [true, false] {
            let command = save(&dir, &memory, "to --quiet");
            let command = if nameless {
                command
            } else {
                refuse(command, &no_nameless(), libc::EOPNOTSUPP)
            };
            let line = dir.refusal(&mut refuse(command, &any(number), errno), 1);
            assert!(line.contains(says), "{number}: {line}");
            assert_eq!(fs::read(dir.path("to")).unwrap(), bytes, "{line}");
        }
    }
    // With --no-sync, fsync(2) is not called.
    let command = save(&dir, &memory, "to --no-sync --json");
    let ended = end(&mut refuse(command, &any(libc::SYS_fsync), libc::EIO)).ok();
    assert_eq!(ended.json()["sync"], false);
    // A write into a part of a file only syncs bytes: it changes neither an owner nor a name.
    let command = save(&dir, &memory, "--offset 0 to --quiet");
    let mut command = refuse(command, &any(libc::SYS_fdatasync), libc::EIO);
    assert!(end(&mut command).line(1).contains("cannot sync: to: "));
}

/// The file is synced before it is renamed, and its folder afterwards. If either sync fails, so does the
/// save.
#[test]
fn the_file_and_its_folder_are_synced() {
    let dir = Dir::new();
    dir.file("source", 3 * MIB + 5);
    let (mut file, mut folder) = (0, 0);
    // One of these descriptors is the file's, and one the folder's.
    for fd in 3..32 {
        let bytes = old(&dir, "to");
        let mut command = dir.dmafile("save source to --quiet");
        alone(&mut command);
        let ended = end(&mut refuse_on(command, libc::SYS_fsync, fd, libc::EIO));
        let now = fs::read(dir.path("to")).unwrap();
        if ended.status.success() {
            assert!(now == content(0, 3 * MIB as usize + 5), "{fd}");
        } else if ended
            .line(1)
            .contains("a crash may bring the old one back (EIO)")
        {
            assert!(now == content(0, 3 * MIB as usize + 5), "{fd}");
            folder += 1;
        } else {
            assert_eq!(now, bytes, "{ended:?}");
            file += 1;
        }
        assert_eq!(dir.names(), ["source", "to"]);
    }
    assert_eq!((file, folder), (1, 1));
}

/// Makes a command inherit none of the descriptors of other tests, so that its own have the same numbers
/// each time.
fn alone(command: &mut Command) {
    let close = || {
        for fd in 3..1024 {
            // SAFETY: makes exec close this descriptor, if it is open.
            unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
        }
        Ok(())
    };
    // SAFETY: system calls only, between fork and exec.
    unsafe { command.pre_exec(close) };
}

#[test]
fn missing_system_calls_have_a_fallback() {
    let dir = Dir::new();
    let memory = memory(3 * MIB + 5);
    let want = content(0, 3 * MIB as usize + 5);
    let saved = |calls: &[Call], errno, args: &str| {
        let command = save(&dir, &memory, &format!("{args} --json"));
        let report = end(&mut refuse(command, calls, errno)).ok().json();
        assert!(fs::read(dir.path("to")).unwrap() == want, "{report}");
        assert_eq!(dir.names(), ["to"]);
        (report.clone(), common::reasons(&report))
    };
    let (_, reasons) = saved(&any(libc::SYS_fallocate), libc::EOPNOTSUPP, "to");
    assert!(reasons.contains("space not reserved: "), "{reasons}");
    let (report, reasons) = saved(&any(libc::SYS_io_uring_setup), libc::EPERM, "to");
    assert_eq!(report["method"], "threads");
    assert!(reasons.contains("io_uring is refused (EPERM)"), "{reasons}");
    // Sources that need bounce buffers are written from them by threads, in order where that matters.
    for from in ["source", "-"] {
        let source = dir.file("source", 3 * MIB + 5);
        let digest = sha256(&source, 0, 3 * MIB + 5);
        let mut command = dir.dmafile(&format!("save {from} to --json --verify sha256"));
        command.stdin(File::open(&source).unwrap());
        let report = end(&mut refuse(
            command,
            &any(libc::SYS_io_uring_setup),
            libc::EPERM,
        ));
        let report = report.ok().json();
        assert_eq!(report["method"], "bounce", "{report}");
        assert_eq!(report["verify"]["digest"], digest.as_str(), "{from}");
        assert_eq!(sha256(&dir.path("to"), 0, 3 * MIB + 5), digest, "{from}");
        fs::remove_file(source).unwrap();
    }
    let direct = open_direct();
    let (report, reasons) = saved(&direct, libc::EINVAL, "to");
    assert_eq!(report["io"], "buffered");
    assert!(
        reasons.contains("O_DIRECT is refused at open (EINVAL)"),
        "{reasons}"
    );
    let command = save(&dir, &memory, "to --io direct");
    let line = dir.refusal(&mut refuse(command, &direct, libc::EINVAL), 1);
    assert!(line.contains("cannot save like this"), "{line}");
}

/// As in an initramfs: the old file's owner, permissions and attributes are then looked up by its name.
#[test]
fn a_file_is_replaced_without_proc() {
    if !is_root() {
        return skip("needs root to mount");
    }
    let dir = Dir::new();
    dir.file("source", 5000);
    old(&dir, "to");
    fs::set_permissions(dir.path("to"), Permissions::from_mode(0o640)).unwrap();
    let script = "mount --make-rprivate / && mount -t tmpfs none /proc || exit 9
        exec \"$0\" save source to --quiet";
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", script]);
    command.arg(env!("CARGO_BIN_EXE_dmafile"));
    let ended = end(command.current_dir(dir.path("")));
    if ended.status.code() == Some(9) {
        return skip("cannot mount a tmpfs");
    }
    ended.ok();
    assert_eq!(fs::read(dir.path("to")).unwrap(), content(0, 5000));
    assert_eq!(fs::metadata(dir.path("to")).unwrap().mode() & 0o7777, 0o640);
    assert_eq!(dir.names(), ["source", "to"]);
}

#[test]
fn a_signal_ends_a_save_with_status_130() {
    let dir = Dir::new();
    let bytes = old(&dir, "to");
    for calls in [vec![], no_nameless()] {
        for signal in [libc::SIGINT, libc::SIGTERM] {
            let (read, mut write) = std::io::pipe().unwrap();
            let mut command = refuse(dir.dmafile("save -v - to"), &calls, libc::EOPNOTSUPP);
            let mut running = start(command.stdin(read));
            write.write_all(&vec![7; 3 * MIB as usize]).unwrap();
            running.until_written("if refused");
            running.signal(signal);
            let ended = running.end();
            assert_eq!(ended.status.code(), Some(130), "{ended:?}");
            assert!(
                ended
                    .stderr
                    .contains(": cancelled before it was complete (ECANCELED)"),
                "{ended:?}"
            );
            assert_eq!(fs::read(dir.path("to")).unwrap(), bytes);
            assert_eq!(dir.names(), ["to"]);
        }
    }
}

#[test]
fn a_limit_on_file_size_is_an_error_without_a_signal() {
    let dir = Dir::new();
    let memory = memory(3 * MIB);
    let source = dir.file("source", 3 * MIB);
    let bytes = old(&dir, "to");
    let commands = [
        save(&dir, &memory, "to --quiet"),
        save(&dir, &memory, "--offset 4096 to --quiet"),
        dir.dmafile("save - to --quiet"),
    ];
    for mut command in commands {
        command.stdin(File::open(&source).unwrap());
        limit(&mut command, libc::RLIMIT_FSIZE, 2 * MIB);
        let line = dir.refusal(&mut command, 1);
        assert!(
            line.contains("(EFBIG); raise the limit on file size"),
            "{line}"
        );
        assert_eq!(fs::read(dir.path("to")).unwrap(), bytes, "{command:?}");
    }
}

#[test]
fn missing_permissions_are_errors_and_a_kept_owner_is_kept() {
    if !is_root() {
        return skip("needs root to become another user");
    }
    let dir = Dir::new();
    let memory = memory(5000);
    fs::create_dir(dir.path("closed")).unwrap();
    let line = dir.refusal(
        run_as(&mut save(&dir, &memory, "closed/to --quiet"), NOBODY),
        1,
    );
    assert!(
        line.contains("(EACCES); ask for write permission in its folder"),
        "{line}"
    );
    // A file of another user that everyone may write to: its owner could not be kept.
    let bytes = old(&dir, "to");
    fs::set_permissions(dir.path("to"), Permissions::from_mode(0o666)).unwrap();
    let line = dir.refusal(run_as(&mut save(&dir, &memory, "to --quiet"), NOBODY), 1);
    assert!(
        line.contains("cannot keep its owner and permissions"),
        "{line}"
    );
    // One without write permission.
    fs::set_permissions(dir.path("to"), Permissions::from_mode(0o644)).unwrap();
    let line = dir.refusal(run_as(&mut save(&dir, &memory, "to --quiet"), NOBODY), 1);
    assert!(
        line.contains("(EACCES); ask for write permission on it"),
        "{line}"
    );
    assert_eq!(fs::read(dir.path("to")).unwrap(), bytes);
    // Root keeps the owner of the file.
    std::os::unix::fs::chown(dir.path("to"), Some(NOBODY), Some(NOBODY)).unwrap();
    end(&mut save(&dir, &memory, "to --quiet")).ok();
    let now = fs::metadata(dir.path("to")).unwrap();
    assert_eq!(
        (now.uid(), now.gid(), now.mode() & 0o777),
        (NOBODY, NOBODY, 0o644)
    );
    assert_eq!(fs::read(dir.path("to")).unwrap(), content(0, 5000));

    let flag = |flag: &str| {
        Command::new("chattr")
            .arg(flag)
            .arg(dir.path("to"))
            .status()
    };
    if !flag("+i").is_ok_and(|status| status.success()) {
        return skip("chattr +i does not work here");
    }
    let refused = dir.dmafile(&format!("save fd:{} to", memory.as_raw_fd()));
    let ended = end(&mut { refused });
    flag("-i").unwrap();
    let line = ended.line(1);
    assert!(
        line.contains("immutable or append-only (EPERM); remove its flag"),
        "{line}"
    );
}

#[test]
fn a_full_file_system_is_found_before_the_first_write() {
    if !is_root() || own_mounts().is_err() {
        return skip("needs root to mount");
    }
    let dir = Dir::new();
    fs::create_dir(dir.path("small")).unwrap();
    let mount = |options: &str| {
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", options, "none"]);
        command.arg(dir.path("small")).status().unwrap().success()
    };
    if !mount("size=4m") {
        return skip("cannot mount a tmpfs");
    }
    let to = dir.path("small/to");
    fs::write(&to, b"old").unwrap();
    let (small, large) = (memory(2 * MIB), memory(5 * MIB));
    let names = |path: &Path| fs::read_dir(path).unwrap().count();
    let line = dir.refusal(&mut save(&dir, &large, "small/to --quiet"), 1);
    assert!(
        line.contains("small/to: No space left on device (ENOSPC); free space"),
        "{line}"
    );
    // A stream that is too long.
    let mut command = dir.dmafile("save - small/to --quiet");
    command.stdin(File::open(format!("/proc/self/fd/{}", large.as_raw_fd())).unwrap());
    let line = dir.refusal(&mut command, 1);
    assert!(line.contains("(ENOSPC)"), "{line}");
    assert_eq!(fs::read(&to).unwrap(), b"old");
    assert_eq!(names(&dir.path("small")), 1);
    // A source that fits is saved, and the report says that tmpfs is memory.
    let report = end(&mut save(&dir, &small, "small/to --json")).ok().json();
    assert!(fs::read(&to).unwrap() == content(0, 2 * MIB as usize));
    assert_eq!(report["io"], "buffered");
    assert!(common::reasons(&report).contains("tmpfs files are in memory"));
    // As a source, a file on tmpfs is memory too, and is not copied first.
    let report = dir.run("save small/to copy --json").ok().json();
    assert_eq!(report["method"], "uring", "{report}");
    assert!(fs::read(dir.path("copy")).unwrap() == content(0, 2 * MIB as usize));

    assert!(mount("remount,ro"));
    let line = dir.refusal(&mut save(&dir, &small, "small/to --quiet"), 1);
    assert!(
        line.contains("(EROFS); save elsewhere, or mount it for writing"),
        "{line}"
    );
    let line = dir.refusal(&mut save(&dir, &small, "small/new --quiet"), 1);
    assert!(line.contains("(EROFS)"), "{line}");
}

/// Concurrent saves to the same file: each is whole, and the last one remains.
#[test]
fn concurrent_saves_to_one_file_do_not_mix() {
    let dir = Dir::new();
    let sizes = [3 * MIB + 1, 5 * MIB + 2, 7 * MIB + 3];
    let memories = sizes.map(memory);
    for calls in [vec![], no_nameless()] {
        let start = |memory| {
            let command = save(&dir, memory, "to --quiet");
            start(&mut refuse(command, &calls, libc::EOPNOTSUPP))
        };
        for running in memories.each_ref().map(start) {
            running.end().ok();
        }
        let bytes = fs::read(dir.path("to")).unwrap();
        assert!(sizes.contains(&(bytes.len() as u64)));
        assert!(bytes == content(0, bytes.len()));
        assert_eq!(dir.names(), ["to"]);
    }
}

/// ext4 on FUSE at `m`, served by a program that ends when it is unmounted.
fn fuse(dir: &Dir) -> Option<Running> {
    if !is_root() {
        skip("only root mounts");
        return None;
    }
    if Command::new("fuse2fs").arg("-V").output().is_err() {
        skip("fuse2fs is missing (Debian: fuse2fs)");
        return None;
    }
    own_mounts().unwrap();
    File::create(dir.path("image"))
        .unwrap()
        .set_len(64 * MIB)
        .unwrap();
    end(Command::new("mkfs.ext4")
        .args(["-q", "-F"])
        .arg(dir.path("image")))
    .ok();
    let place = dir.path("m");
    fs::create_dir(&place).unwrap();
    let device = || fs::metadata(&place).unwrap().dev();
    let before = device();
    let mut command = Command::new("fuse2fs");
    let mut running = start(command.arg("-f").arg(dir.path("image")).arg(&place));
    running.until(|_| device() != before);
    assert_ne!(device(), before, "{:?}", running.written());
    Some(running)
}

#[test]
fn a_fuse_file_system_takes_every_source_whole() {
    let dir = Dir::new();
    let Some(mounted) = fuse(&dir) else { return };
    let memory = memory(5 * MIB);
    for size in [0, 1, 4095, 4097, MIB, 5 * MIB - 77] {
        let source = dir.file("source", size);
        let digest = sha256(&source, 0, size);
        for args in ["", "--io direct", "--io buffered", "--method threads"] {
            let part = format!("fd:{} --length {size}", memory.as_raw_fd());
            for from in [&part[..], "source", "-"] {
                // This method does not use bounce buffers, which sources other than memory need.
                if from != part && args == "--method threads" {
                    continue;
                }
                let what = format!("{from} {args} {size}");
                let mut command = dir.dmafile(&format!("save {from} m/to --quiet {args}"));
                let mut cat = Command::new("cat");
                let mut cat = cat.arg(&source).stdout(Stdio::piped()).spawn().unwrap();
                command.stdin(cat.stdout.take().unwrap());
                let ended = end(&mut command).ok();
                assert_eq!(ended.stderr, "", "{what}");
                // Closes the last reader of the pipe.
                drop(command);
                cat.wait().unwrap();
                let to = dir.path("m/to");
                assert_eq!(fs::metadata(&to).unwrap().len(), size, "{what}");
                assert_eq!(sha256(&to, 0, size), digest, "{what}");
                let names = fs::read_dir(dir.path("m")).unwrap();
                let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
                names.sort();
                assert_eq!(names, ["lost+found", "to"], "{what}");
            }
        }
    }
    end(Command::new("umount").arg(dir.path("m"))).ok();
    mounted.end().ok();
}
