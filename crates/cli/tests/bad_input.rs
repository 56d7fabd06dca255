//! Invalid files, ranges and target descriptors: each is refused with one clear line.

mod common;

use common::{Dir, KIB, MIB, NOBODY, content, end, is_root, run_as, sha256};
use std::fs::{self, File, Permissions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::process::Command;

const REGULAR: &str = "name a regular file or a block device";

#[test]
fn a_missing_file_is_an_error() {
    let dir = Dir::new();
    let line = "No such file or directory (ENOENT); check the path";
    for path in ["missing", "no/such/folder/file"] {
        assert_eq!(dir.refuses(path, 1), format!("cannot open: {path}: {line}"));
    }
    symlink("nowhere", dir.path("dangling")).unwrap();
    assert_eq!(
        dir.refuses("dangling", 1),
        format!("cannot open: dangling: {line}")
    );
}

#[test]
fn a_path_through_a_file_is_an_error() {
    let dir = Dir::new();
    dir.file("file", 10);
    assert_eq!(
        dir.refuses("file/below", 1),
        "cannot open: file/below: Not a directory (ENOTDIR)"
    );
}

#[test]
fn a_name_that_is_too_long_is_an_error() {
    let dir = Dir::new();
    let name = "x".repeat(256);
    assert_eq!(
        dir.refuses(&name, 1),
        format!("cannot open: {name}: File name too long (ENAMETOOLONG)")
    );
}

#[test]
fn a_folder_without_a_model_is_refused() {
    let dir = Dir::new();
    fs::create_dir(dir.path("folder")).unwrap();
    assert_eq!(
        dir.refuses("folder", 1),
        "cannot load: folder: is a directory without a model in it (EISDIR); name a file in it"
    );
}

#[test]
fn a_fifo_is_refused_without_waiting_for_a_writer() {
    let dir = Dir::new();
    end(Command::new("mkfifo").arg(dir.path("fifo"))).ok();
    assert_eq!(
        dir.refuses("fifo", 1),
        format!("cannot load: fifo: is a FIFO (ESPIPE); {REGULAR}")
    );
}

#[test]
fn a_socket_is_refused() {
    let dir = Dir::new();
    // The address of a socket holds 107 bytes; the path of the build folder may be longer.
    let folder = File::open(dir.path("")).unwrap();
    let address = format!("/proc/self/fd/{}/socket", folder.as_raw_fd());
    let _listener = UnixListener::bind(address).unwrap();
    assert_eq!(
        dir.refuses("socket", 1),
        format!("cannot load: socket: is a socket, or a device with no driver (ENXIO); {REGULAR}")
    );
}

#[test]
fn a_character_device_is_refused() {
    let dir = Dir::new();
    for device in ["/dev/zero", "/dev/null"] {
        assert_eq!(
            dir.refuses(device, 1),
            format!("cannot load: {device}: is not a regular file (EINVAL); {REGULAR}")
        );
    }
}

#[test]
fn files_that_proc_and_sysfs_generate_are_refused() {
    let dir = Dir::new();
    for (path, fs) in [
        ("/proc/self/status", "proc"),
        ("/sys/kernel/mm/transparent_hugepage/enabled", "sysfs"),
    ] {
        let why = format!("{fs} generates this file as it is read, and reports no size (EINVAL)");
        assert_eq!(
            dir.refuses(path, 1),
            format!("cannot load: {path}: {why}; copy it to a regular file first")
        );
    }
}

#[test]
fn a_loop_of_symbolic_links_is_an_error() {
    let dir = Dir::new();
    symlink("there", dir.path("here")).unwrap();
    symlink("here", dir.path("there")).unwrap();
    assert_eq!(
        dir.refuses("here", 1),
        "cannot open: here: Too many symbolic links encountered (ELOOP); fix the loop of \
         symbolic links"
    );
}

#[test]
fn an_empty_file_is_refused() {
    let dir = Dir::new();
    dir.file("empty", 0);
    assert_eq!(
        dir.refuses("empty", 1),
        "cannot load: empty: is empty (ENODATA); a buffer needs at least one byte"
    );
}

#[test]
fn a_file_without_read_permission_is_an_error() {
    let dir = Dir::new();
    let secret = dir.file("secret", 10);
    fs::set_permissions(secret, Permissions::from_mode(0o0)).unwrap();
    let mut command = dir.dmafile("load secret");
    assert_eq!(
        dir.refusal(run_as(&mut command, NOBODY), 1),
        "cannot open: secret: Permission denied (EACCES); ask for read permission on it, or run \
         as its owner"
    );
}

#[test]
fn a_folder_without_search_permission_is_an_error() {
    let dir = Dir::new();
    fs::create_dir(dir.path("closed")).unwrap();
    dir.file("closed/file", 10);
    fs::set_permissions(dir.path("closed"), Permissions::from_mode(0o0)).unwrap();
    let mut command = dir.dmafile("load closed/file");
    let line = dir.refusal(run_as(&mut command, NOBODY), 1);
    fs::set_permissions(dir.path("closed"), Permissions::from_mode(0o700)).unwrap();
    assert_eq!(
        line,
        "cannot open: closed/file: Permission denied (EACCES); ask for read permission on it, or \
         run as its owner"
    );
}

#[test]
fn a_range_past_the_end_of_the_file_is_refused() {
    let dir = Dir::new();
    dir.file("file", 5000);
    for (args, what) in [
        ("--offset 5000", "--offset 5000"),
        ("--offset 5001", "--offset 5001"),
        ("--offset 16E", "--offset 18446744073709551615"),
        ("--length 5001", "--length 5001 from byte 0 on"),
        ("--offset 4999 --length 2", "--length 2 from byte 4999 on"),
        (
            "--offset 1 --length 18446744073709551615",
            "--length 18446744073709551615 from byte 1 on",
        ),
        (
            "--offset 18446744073709551615 --length 1",
            "--offset 18446744073709551615",
        ),
    ] {
        let args = args.replace("16E", &u64::MAX.to_string());
        assert_eq!(
            dir.refuses(&format!("file {args}"), 1),
            format!(
                "cannot load: file: {what} is past the end at byte 5000 (EINVAL); choose a range \
                 inside the file"
            )
        );
    }
}

#[test]
fn a_closed_descriptor_is_refused() {
    let dir = Dir::new();
    dir.file("file", 5000);
    for fd in ["fd:99", "fd:2147483647", "fd:-1"] {
        assert_eq!(
            dir.refuses(&format!("file --to {fd}"), 1),
            format!(
                "cannot use the descriptor: {fd}: Bad file number (EBADF); pass an open memfd, \
                 for example from the shell with N<>/proc/PID/fd/M"
            )
        );
    }
    for fd in ["fd:", "fd:x", "fd:2147483648"] {
        assert_eq!(
            dir.refuses(&format!("file --to {fd}"), 2),
            format!("--to: '{fd}' is not a descriptor")
        );
    }
}

/// A memfd of `bytes` bytes, none of which is zero.
fn dirty_memfd(bytes: u64) -> File {
    let file = common::memfd(bytes);
    file.write_all_at(&vec![0xaa; bytes as usize], 0).unwrap();
    file
}

fn seal(file: &File, seals: i32) {
    // SAFETY: a call on an open descriptor.
    let answer = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) };
    common::done(answer).unwrap();
}

/// `load file --to fd:0 ARGS`, with `target` as stdin.
fn into(dir: &Dir, args: &str, target: &File) -> Command {
    let mut command = dir.dmafile(&format!("load file --to fd:0 {args}"));
    command.stdin(target.try_clone().unwrap());
    command
}

#[test]
fn a_descriptor_of_a_regular_file_or_device_is_refused() {
    let dir = Dir::new();
    let file = dir.file("file", 5000);
    let regular = File::options().read(true).write(true).open(&file).unwrap();
    for target in [regular, File::open("/dev/null").unwrap()] {
        assert_eq!(
            dir.refusal(&mut into(&dir, "", &target), 1),
            "cannot fill the descriptor: fd:0: it is neither a memfd nor a dma-buf (EINVAL); create one with \
             memfd_create(2)"
        );
    }
    assert_eq!(fs::read(file).unwrap(), content(0, 5000), "untouched");
}

#[test]
fn a_memfd_that_is_too_small_is_refused_and_unchanged() {
    let dir = Dir::new();
    dir.file("file", 5000);
    let small = dirty_memfd(4999);
    assert_eq!(
        dir.refusal(&mut into(&dir, "", &small), 1),
        "cannot load: fd:0: 5000 bytes do not fit into 4999 (EINVAL); enlarge the memory \
         (ftruncate(2) for a memfd), or load a range"
    );
    let mut bytes = vec![0; 4999];
    small.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 0xaa));
}

#[test]
fn a_memfd_sealed_against_writing_is_refused() {
    let dir = Dir::new();
    dir.file("file", 5000);
    for seals in [libc::F_SEAL_WRITE, libc::F_SEAL_FUTURE_WRITE] {
        let sealed = dirty_memfd(8192);
        seal(&sealed, seals);
        assert_eq!(
            dir.refusal(&mut into(&dir, "", &sealed), 1),
            "cannot fill the descriptor: fd:0: it is sealed against writing (EPERM); fill it \
             before sealing"
        );
    }
}

#[test]
fn a_read_only_descriptor_is_refused() {
    let dir = Dir::new();
    dir.file("file", 5000);
    let writable = dirty_memfd(8192);
    let path = format!("/proc/self/fd/{}", writable.as_raw_fd());
    let line = dir.refusal(&mut into(&dir, "", &File::open(path).unwrap()), 1);
    assert_eq!(
        line,
        "cannot fill the descriptor: fd:0: it is not open for writing (EACCES); open it for \
         reading and writing"
    );
}

#[test]
fn a_memfd_is_filled_and_the_rest_of_it_is_zeroed() {
    let dir = Dir::new();
    let size = 5 * MIB + 123;
    let file = dir.file("file", size);
    for (args, offset, bytes) in [
        (String::new(), 0, size),
        (
            format!("--method threads --offset {}", 64 * KIB),
            64 * KIB,
            size - 64 * KIB,
        ),
        (
            "--method bounce --offset 77 --length 1M".to_string(),
            77,
            MIB,
        ),
    ] {
        let target = dirty_memfd(6 * MIB);
        end(&mut into(&dir, &format!("--quiet {args}"), &target)).ok();
        let path = format!("/proc/self/fd/{}", target.as_raw_fd());
        // In a child, /proc/self would be that of the child.
        let copy = dir.path("copy");
        fs::copy(path, &copy).unwrap();
        assert_eq!(
            sha256(&copy, 0, bytes),
            sha256(&file, offset, bytes),
            "{args}"
        );
        let mut rest = vec![1; (6 * MIB - bytes) as usize];
        target.read_exact_at(&mut rest, bytes).unwrap();
        assert!(rest.iter().all(|&byte| byte == 0), "{args}: stale bytes");
    }
}

#[test]
fn an_output_file_that_cannot_be_written_is_an_error() {
    let dir = Dir::new();
    dir.file("file", 5000);
    fs::create_dir(dir.path("folder")).unwrap();
    for option in ["--json", "--trace"] {
        let mut command = dir.dmafile(&format!("load file --quiet {option}=folder -- echo ran"));
        assert_eq!(
            dir.refusal(&mut command, 1),
            "cannot write: folder: Is a directory (EISDIR)"
        );
    }
    if is_root() {
        fs::set_permissions(dir.path("folder"), Permissions::from_mode(0o755)).unwrap();
    } else {
        fs::set_permissions(dir.path("folder"), Permissions::from_mode(0o555)).unwrap();
    }
    let mut command = dir.dmafile("load file --quiet --json=folder/report.json");
    assert_eq!(
        dir.refusal(run_as(&mut command, NOBODY), 1),
        "cannot write: folder/report.json: Permission denied (EACCES)"
    );
}
