//! System calls that a sandbox refuses: the load falls back to another method and says why.

mod common;

use common::sandbox::{Call, any, open_direct, refuse};
use common::{Dir, Ended, MIB, NOBODY, Warm, cached, end, run_as, sha256, start};
use dmafile_testkit::models;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicUsize, Ordering};

const SIZE: u64 = 9 * MIB + 99;
/// cachestat(2) has this number on every architecture that shares asm-generic/unistd.h.
const CACHESTAT: i64 = 451;

/// Loads with system calls that fail with `errno`, checks the bytes, and returns report and reasons.
fn load(args: &str, calls: &[Call], errno: i32) -> (serde_json::Value, String) {
    let dir = Dir::new();
    let file = dir.file("file", SIZE);
    let command = dir.load(&format!("file {args}"));
    let loaded = dir.loaded(&mut refuse(command, calls, errno));
    assert_eq!(loaded.digest, sha256(&file, 0, SIZE));
    let reasons = loaded.reasons();
    (loaded.report, reasons)
}

#[test]
fn without_io_uring_threads_read_the_file() {
    for (errno, name) in [(libc::EPERM, "EPERM"), (libc::ENOSYS, "ENOSYS")] {
        let (report, reasons) = load("", &any(libc::SYS_io_uring_setup), errno);
        assert_eq!(report["method"], "threads");
        let why = format!("not uring direct: io_uring is refused ({name})\n");
        assert!(reasons.contains(&why), "{reasons}");
    }
}

/// In kernels 5.1 to 5.5, io_uring has no plain reads, and no probe for them.
#[test]
fn io_uring_without_plain_reads_falls_back_to_threads() {
    let (report, reasons) = load("", &any(libc::SYS_io_uring_register), libc::EINVAL);
    assert_eq!(
        (&report["method"], &report["io"]),
        (&"threads".into(), &"direct".into())
    );
    let why = "not uring direct: io_uring is refused (ENOSYS)\n";
    assert!(reasons.contains(why), "{reasons}");
}

#[test]
fn method_uring_is_refused_if_io_uring_is_not_available() {
    let dir = Dir::new();
    dir.file("file", SIZE);
    let ask = dir.dmafile("load file --method uring");
    let mut command = refuse(ask, &any(libc::SYS_io_uring_setup), libc::EPERM);
    let line = dir.refusal(&mut command, 1);
    assert!(
        line.starts_with("cannot load like this: uring direct"),
        "{line}"
    );
    let why = "io_uring is refused (EPERM) (EOPNOTSUPP); allow io_uring_setup, ";
    let end = ", or leave --method and --io to auto, or see `dmafile explain`";
    assert!(line.contains(why) && line.ends_with(end), "{line}");
}

#[test]
fn doctor_names_the_seccomp_filter() {
    let dir = Dir::new();
    dir.file("file", 5000);
    let ask = dir.dmafile("doctor file --json");
    let json = end(&mut refuse(
        ask,
        &any(libc::SYS_io_uring_setup),
        libc::EPERM,
    ))
    .ok()
    .json();
    let checks = json["checks"].as_array().unwrap();
    let check = |name: &str| checks.iter().find(|check| check["name"] == name).unwrap();
    assert_eq!(check("io_uring")["health"], "fair");
    assert_eq!(
        check("io_uring")["found"],
        "refused (EPERM); loads use a pool of threads"
    );
    let remedy = check("io_uring")["remedy"].as_str().unwrap();
    assert!(
        remedy.contains("seccomp") || remedy.contains("sysctl"),
        "{remedy}"
    );
    let verdict = json["verdict"].as_str().unwrap();
    assert!(verdict.contains("io_uring is refused"), "{verdict}");
    let found = check("container limits")["found"].as_str().unwrap();
    assert!(found.ends_with("a seccomp filter is on"), "{found}");
}

#[test]
fn a_refused_io_uring_enter_falls_back_to_threads() {
    let (report, reasons) = load("", &any(libc::SYS_io_uring_enter), libc::EPERM);
    assert_eq!(report["method"], "threads", "{reasons}");
    let why = "not uring direct: io_uring is refused (EPERM)\n";
    assert!(reasons.contains(why), "{reasons}");
}

#[test]
fn a_refused_buffer_registration_falls_back_to_plain_buffers() {
    let dir = Dir::new();
    let file = dir.file("file", SIZE);
    if !common::reads_directly(&dir) {
        return;
    }
    // So few bytes in flight that every limit on pinned memory allows them.
    let command = dir.load("file --method uring --block 4K --queue-depth 2");
    let mut command = refuse(command, &any(libc::SYS_io_uring_register), libc::EPERM);
    let loaded = dir.loaded(&mut command);
    assert_eq!(loaded.digest, sha256(&file, 0, SIZE));
    assert_eq!(loaded.report["method"], "uring");
    let why = "method uring direct: uring direct registered ended: buffers cannot be registered: \
               Operation not permitted (EPERM)";
    assert!(loaded.reasons().contains(why), "{}", loaded.reasons());
}

#[test]
fn a_refused_copy_file_range_is_an_error_with_a_remedy() {
    let dir = Dir::new();
    dir.file("file", SIZE);
    let copy = any(libc::SYS_copy_file_range);
    for (errno, name) in [
        // The errors of kernels without such copies, and of filters.
        (libc::EXDEV, "EXDEV"),
        (libc::EPERM, "EPERM"),
        (libc::ENOSYS, "ENOSYS"),
    ] {
        let command = dir.dmafile("load file --quiet --method copy-file-range");
        let line = dir.refusal(&mut refuse(command, &copy, errno), 1);
        assert!(line.contains("between disks and memory"), "{line}");
        assert!(line.contains(&format!("({name})")), "{line}");
        assert!(line.contains("kernel/linux-6.12"), "{line}");
    }
}

#[test]
fn o_direct_refused_at_open_falls_back_to_buffered() {
    for (errno, name) in [(libc::EINVAL, "EINVAL"), (libc::EPERM, "EPERM")] {
        let (report, reasons) = load("", &open_direct(), errno);
        assert_eq!(report["io"], "buffered");
        let why = format!("io buffered: O_DIRECT is refused at open ({name})\n");
        assert!(reasons.contains(&why), "{reasons}");
    }
    let dir = Dir::new();
    dir.file("file", SIZE);
    let mut command = refuse(
        dir.dmafile("load file --io direct"),
        &open_direct(),
        libc::EINVAL,
    );
    let line = dir.refusal(&mut command, 1);
    assert!(
        line.starts_with("cannot load like this: uring direct"),
        "{line}"
    );
    assert!(
        line.contains("O_DIRECT is refused at open (EINVAL) (EOPNOTSUPP); "),
        "{line}"
    );
}

#[test]
fn without_cachestat_sample_reads_show_residency() {
    let dir = Dir::new();
    let file = dir.file("file", SIZE);
    let digest = sha256(&file, 0, SIZE);
    for (errno, name) in [(libc::EPERM, "EPERM"), (libc::ENOSYS, "ENOSYS")] {
        common::evict(&fs::File::open(&file).unwrap());
        let run = || {
            let command = refuse(dir.load("file"), &any(CACHESTAT), errno);
            let loaded = dir.loaded(&mut { command });
            assert_eq!(loaded.digest, digest);
            loaded
        };
        // Sample reads leave no pages in the cache that would mislead the next load.
        for _ in 0..3 {
            let cold = run();
            let why = format!("RWF_NOWAIT (cachestat: {name}): no sample is cached\n");
            assert!(cold.reasons().contains(&why), "{}", cold.reasons());
            assert!(cached(&file).is_none_or(|bytes| bytes == 0));
        }
        let _warm = Warm::range(&fs::File::open(&file).unwrap(), 0..SIZE);
        let warm = run();
        let why = format!("RWF_NOWAIT, per MiB (cachestat: {name})\n");
        assert!(warm.reasons().contains(&why), "{}", warm.reasons());
        assert_eq!(warm.number("bytes_buffered"), SIZE);
    }
}

#[test]
fn sample_reads_show_residency_to_a_user_without_write_permission() {
    if !common::is_root() {
        return common::skip("needs root to become another user");
    }
    let dir = Dir::new();
    let file = dir.file("file", SIZE);
    let _warm = Warm::range(&fs::File::open(&file).unwrap(), 0..SIZE);
    let mut command = dir.load("file");
    let loaded = dir.loaded(run_as(&mut command, NOBODY));
    assert_eq!(loaded.digest, sha256(&file, 0, SIZE));
    let reasons = loaded.reasons();
    if reasons.contains("ENOSYS") {
        return common::skip("this kernel has no cachestat");
    }
    assert!(
        reasons.contains("RWF_NOWAIT, per MiB (cachestat: EPERM)\n"),
        "{reasons}"
    );
    assert_eq!(loaded.number("bytes_buffered"), SIZE);
}

#[test]
fn without_madvise_the_reads_allocate_pages() {
    for (errno, name) in [
        (libc::EINVAL, "EINVAL"),
        (libc::ENOSYS, "ENOSYS"),
        (libc::EPERM, "EPERM"),
    ] {
        for args in [
            "",
            "--method threads",
            "--pages base",
            "--to memfd --io buffered",
        ] {
            let (_, reasons) = load(args, &any(libc::SYS_madvise), errno);
            let why = format!("MADV_POPULATE_WRITE is refused ({name})");
            assert!(reasons.contains(&why), "{args}: {reasons}");
        }
    }
}

#[test]
fn optional_system_calls_may_fail() {
    for number in [
        libc::SYS_fadvise64,
        libc::SYS_eventfd2,
        libc::SYS_preadv2,
        libc::SYS_getrusage,
        libc::SYS_sched_getaffinity,
    ] {
        load("", &any(number), libc::EPERM);
    }
    // The C library makes threads by it, and only uses the older call for ENOSYS.
    for args in ["", "--method threads", "--verify sha256"] {
        load(args, &any(libc::SYS_clone3), libc::EACCES);
    }
}

#[test]
fn a_refused_required_system_call_is_an_error() {
    let dir = Dir::new();
    dir.file("file", SIZE);
    let command = dir.dmafile("load file --quiet");
    let refused = any(libc::SYS_memfd_create);
    let line = dir.refusal(&mut refuse(command, &refused, libc::EPERM), 1);
    let part = "cannot create the buffer: memfd, ";
    assert!(line.starts_with(part), "{line}");
    let why = "a sandbox refuses the system call memfd_create (EPERM); allow memfd_create in ";
    assert!(line.contains(why), "{line}");
}

#[test]
fn a_refused_process_vm_readv_falls_back_to_buffered_reads() {
    let dir = Dir::new();
    let file = dir.file("file", SIZE);
    let digest = sha256(&file, 0, SIZE);
    common::evict(&fs::File::open(&file).unwrap());
    // Its owner may truncate it and the offset is unaligned, so direct reads use bounce buffers.
    let memory = common::memfd(SIZE + 1);
    let mut command = dir.dmafile("load file -v --to fd:0@1");
    command.stdin(memory.try_clone().unwrap());
    let ended = end(&mut refuse(
        command,
        &any(libc::SYS_process_vm_readv),
        libc::EPERM,
    ));
    assert!(ended.status.success(), "{}", ended.stderr);
    let why = "bounce direct registered ended: cannot copy to the buffer: a sandbox refuses the system call \
               process_vm_readv (EPERM)";
    assert!(ended.stdout.contains(why), "{}", ended.stdout);
    let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&memory));
    assert_eq!(sha256(link.as_ref(), 1, SIZE), digest);
}

/// What a profile may lack: calls that dmafile, the standard library and the C library make on the way. Not those
/// without which no program starts.
const CALLS: &[(&str, i64)] = &[
    ("bind", libc::SYS_bind),
    ("cachestat", CACHESTAT),
    ("capget", libc::SYS_capget),
    ("clone3", libc::SYS_clone3),
    ("close_range", libc::SYS_close_range),
    ("connect", libc::SYS_connect),
    ("copy_file_range", libc::SYS_copy_file_range),
    ("eventfd2", libc::SYS_eventfd2),
    ("faccessat2", libc::SYS_faccessat2),
    ("fadvise64", libc::SYS_fadvise64),
    ("fallocate", libc::SYS_fallocate),
    ("fchmod", libc::SYS_fchmod),
    ("fchown", libc::SYS_fchown),
    ("fdatasync", libc::SYS_fdatasync),
    ("fgetxattr", libc::SYS_fgetxattr),
    ("flistxattr", libc::SYS_flistxattr),
    ("flock", libc::SYS_flock),
    ("fstatfs", libc::SYS_fstatfs),
    ("fsync", libc::SYS_fsync),
    ("ftruncate", libc::SYS_ftruncate),
    ("get_mempolicy", libc::SYS_get_mempolicy),
    ("getdents64", libc::SYS_getdents64),
    ("getrandom", libc::SYS_getrandom),
    ("getrusage", libc::SYS_getrusage),
    ("getxattr", libc::SYS_getxattr),
    ("io_uring_enter", libc::SYS_io_uring_enter),
    ("io_uring_register", libc::SYS_io_uring_register),
    ("io_uring_setup", libc::SYS_io_uring_setup),
    ("ioctl", libc::SYS_ioctl),
    ("kcmp", libc::SYS_kcmp),
    ("linkat", libc::SYS_linkat),
    ("listen", libc::SYS_listen),
    ("listxattr", libc::SYS_listxattr),
    ("lseek", libc::SYS_lseek),
    ("madvise", libc::SYS_madvise),
    ("mbind", libc::SYS_mbind),
    ("membarrier", libc::SYS_membarrier),
    ("memfd_create", libc::SYS_memfd_create),
    ("mincore", libc::SYS_mincore),
    ("mlock", libc::SYS_mlock),
    ("mremap", libc::SYS_mremap),
    ("openat2", libc::SYS_openat2),
    ("pidfd_open", libc::SYS_pidfd_open),
    ("pipe2", libc::SYS_pipe2),
    ("prctl", libc::SYS_prctl),
    ("preadv2", libc::SYS_preadv2),
    ("prlimit64", libc::SYS_prlimit64),
    ("process_vm_readv", libc::SYS_process_vm_readv),
    ("pwritev2", libc::SYS_pwritev2),
    ("readlinkat", libc::SYS_readlinkat),
    ("recvmsg", libc::SYS_recvmsg),
    ("renameat", libc::SYS_renameat),
    ("renameat2", libc::SYS_renameat2),
    ("rseq", libc::SYS_rseq),
    ("sched_getaffinity", libc::SYS_sched_getaffinity),
    ("sched_setattr", libc::SYS_sched_setattr),
    ("sched_yield", libc::SYS_sched_yield),
    ("sendmsg", libc::SYS_sendmsg),
    ("set_mempolicy", libc::SYS_set_mempolicy),
    ("setsid", libc::SYS_setsid),
    ("socket", libc::SYS_socket),
    ("statfs", libc::SYS_statfs),
    ("statx", libc::SYS_statx),
    ("syncfs", libc::SYS_syncfs),
    ("sysinfo", libc::SYS_sysinfo),
    ("uname", libc::SYS_uname),
    ("unlinkat", libc::SYS_unlinkat),
    #[cfg(target_arch = "x86_64")]
    ("readlink", libc::SYS_readlink),
];

/// What must either work, or name the call.
const JOBS: &[&str] = &[
    "load",
    "load anon",
    "load model",
    "save",
    "explain",
    "doctor",
    "path",
    "hold and take",
];

/// Prints the digest of the memory.
const SUM: &[&str] = &["sh", "-c", "sha256sum <&$DMAFILE_FD"];

/// Runs a job in a folder with a file and its digest, without a call. None if it did the right thing, otherwise what
/// it did.
fn trouble(
    (dir, digest): (&Dir, &str),
    job: &str,
    (name, number): (&str, i64),
    errno: i32,
) -> Option<String> {
    let refused = |command| refuse(command, &any(number), errno);
    let run = |args: &str, command: &[&str]| {
        let mut ask = dir.dmafile(args);
        ask.args(command);
        end(&mut refused(ask))
    };
    let verify = format!("--quiet --verify sha256={digest}");
    let named = |ended: Ended| {
        let one = ended.stderr.lines().count() == 1 && ended.stderr.starts_with("dmafile: ");
        let by_itself = ended.status.code() == Some(1) && one;
        (!by_itself || !ended.stderr.contains(&format!(" {name} (")))
            .then(|| format!("{:?}: {}{}", ended.status, ended.stdout, ended.stderr))
    };
    let right = |ended: Ended, right: bool| {
        if ended.status.success() {
            (!right).then(|| format!("other bytes: {}{}", ended.stdout, ended.stderr))
        } else {
            named(ended)
        }
    };
    match job {
        "load" => right(run(&format!("load file {verify}"), &[]), true),
        "load anon" => right(run(&format!("load file --to anon {verify}"), &[]), true),
        "load model" => {
            let ended = run(
                "load run/model.safetensors --quiet --tensor x.0.w --tensor x.1.w --",
                SUM,
            );
            let whole = fs::metadata(dir.path("run/model.safetensors"))
                .unwrap()
                .len();
            let same = ended
                .stdout
                .starts_with(&sha256(&dir.path("run/tensors"), 0, whole));
            right(ended, same)
        }
        "explain" => right(run("explain file", &[]), true),
        "doctor" => right(run("doctor .", &[]), true),
        "save" => {
            fs::write(dir.path("old"), b"old").unwrap();
            let ended = run("save --quiet file old", &[]);
            let old = fs::read(dir.path("old")).unwrap();
            let whole = if ended.status.success() {
                old == fs::read(dir.path("file")).unwrap()
            } else {
                old == b"old"
            };
            assert!(whole, "{name}: {ended:?}");
            right(ended, dir.names() == ["file", "old", "run"])
        }
        "path" => {
            let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let mut ask = dir.dmafile("load file --quiet -- sha256sum {}");
            ask.env("TMPDIR", place.path())
                .env_remove("XDG_RUNTIME_DIR");
            let ended = end(&mut refused(ask));
            // After success, another process removes its folder.
            let clean = ended.status.success() || fs::read_dir(&place).unwrap().next().is_none();
            let same = ended.stdout.starts_with(digest);
            right(ended, same).or_else(|| (!clean).then(|| "a folder is left".to_string()))
        }
        "hold and take" => {
            let hold = dir.dmafile("hold file --name m --socket run/socket");
            let mut holder = start(&mut refused(hold));
            holder.until_written("\n");
            if holder.written()[0].is_empty() {
                return named(holder.end());
            }
            let ended = run("take m --socket run/socket --", SUM);
            let same = ended.stdout.starts_with(digest);
            let taken = right(ended, same);
            holder.signal(libc::SIGTERM);
            taken.or_else(|| right(holder.end(), true))
        }
        _ => unreachable!(),
    }
}

/// Libraries of stores, certificates and patterns use hash tables, whose seed panics then.
#[cfg(feature = "remote")]
#[test]
fn a_refused_getrandom_is_named() {
    let dir = Dir::new();
    let refused = |args: &str| refuse(dir.dmafile(args), &any(libc::SYS_getrandom), libc::EACCES);
    for url in ["https://127.0.0.1:9/file", "s3://bucket/file"] {
        let line = dir.refusal(&mut refused(&format!("load {url}")), 1);
        assert!(line.contains("system call getrandom (EACCES)"), "{line}");
        assert!(line.contains("allow getrandom in the seccomp"), "{line}");
    }
    let line = dir.refusal(&mut refused("load file --tensor *.w"), 2);
    assert!(line.contains("system call getrandom"), "{line}");
    let doctor = end(&mut refused("doctor .")).ok().stdout;
    assert!(doctor.contains("getrandom"), "{doctor}");
}

#[test]
fn a_refused_call_has_a_substitute_or_is_named() {
    let errnos = [
        (libc::EPERM, "EPERM"),
        (libc::ENOSYS, "ENOSYS"),
        (libc::EACCES, "EACCES"),
    ];
    let mut all = Vec::new();
    for call in CALLS {
        for errno in errnos {
            all.extend(JOBS.iter().map(|job| (call, errno, job)));
        }
    }
    let next = AtomicUsize::new(0);
    let work = || {
        const LEN: u64 = MIB + 13;
        let dir = Dir::new();
        let digest = sha256(&dir.file("file", LEN), 0, LEN);
        // Others can write to the folder of a test.
        fs::create_dir(dir.path("run")).unwrap();
        fs::set_permissions(dir.path("run"), Permissions::from_mode(0o755)).unwrap();
        let tensors = models::tensors("x", 2, 8192);
        models::safetensors(&dir.path("run/model.safetensors"), &tensors);
        // What is loaded of it: the header is not.
        let mut bytes = fs::read(dir.path("run/model.safetensors")).unwrap();
        let sizes: usize = tensors.iter().map(|tensor| tensor.3.len()).sum();
        let header = bytes.len() - sizes;
        bytes[..header].fill(0);
        fs::write(dir.path("run/tensors"), bytes).unwrap();
        let mut found = Vec::new();
        while let Some((call, (errno, told), job)) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
            let (name, trouble) = (call.0, trouble((&dir, &digest), job, **call, *errno));
            found.extend(trouble.map(|what| format!("{name} {told}: {job}: {what}")));
        }
        found
    };
    let found: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
        let threads = threads.into_iter();
        threads.flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert!(found.is_empty(), "{}", found.join("\n"));
}
