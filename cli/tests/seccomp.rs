//! System calls that a sandbox refuses: the load falls back to another method and says why.

mod common;

use common::sandbox::{Call, any, open_direct, refuse};
use common::{Dir, MIB, NOBODY, Warm, cached, end, run_as, sha256};
use std::fs;

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
            "--pages 4k",
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
}

#[test]
fn a_refused_required_system_call_is_an_error() {
    let dir = Dir::new();
    let file = dir.file("file", SIZE);
    for (number, args, part) in [
        (
            libc::SYS_memfd_create,
            "",
            "cannot make the buffer: memfd, ",
        ),
        (libc::SYS_ftruncate, "", "cannot make the buffer: memfd, "),
        (
            libc::SYS_process_vm_readv,
            "--method mmap",
            "cannot read: file: ",
        ),
        (
            libc::SYS_sendfile,
            "--method sendfile",
            "cannot read: file: ",
        ),
        (libc::SYS_splice, "--method splice", "cannot read: file: "),
        (libc::SYS_pipe2, "--method splice", "cannot make a pipe: "),
    ] {
        common::evict(&fs::File::open(&file).unwrap());
        let command = dir.dmafile(&format!("load file --quiet {args}"));
        let line = dir.refusal(&mut refuse(command, &any(number), libc::EPERM), 1);
        assert!(line.starts_with(part), "{args}: {line}");
        assert!(
            line.contains("Operation not permitted (EPERM)"),
            "{args}: {line}"
        );
    }
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
    let why = "bounce direct registered ended: cannot copy to the buffer (process_vm_readv)";
    assert!(ended.stdout.contains(why), "{}", ended.stdout);
    let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&memory));
    assert_eq!(sha256(link.as_ref(), 1, SIZE), digest);
}
