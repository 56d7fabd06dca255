//! Saved bytes are on the disk as sha256sum reads them, with every method, from every kind of source, at sizes
//! and offsets around blocks and windows. A file is replaced completely or not changed.

use dmafile::{CancelToken, ErrorKind, Io, Method, Origin, OriginPart, Save, SaveReport, Verify};
use dmafile_testkit::{bytes_digest, cached, cold, dir, file_digest, memfd, names, noise, sparse};
use rustix::fs::{MemfdFlags, SealFlags, XattrFlags};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Small, so that small files fill many blocks.
const BLOCK: u64 = 64 << 10;
const MIB: u64 = 1 << 20;
const METHODS: [Method; 4] = [Method::Auto, Method::Uring, Method::Threads, Method::Bounce];
const ORIGINS: [&str; 5] = ["memfd", "sealed", "file", "fd of a file", "pipe"];

/// A memfd with these bytes.
fn memory(bytes: &[u8]) -> OwnedFd {
    let fd = memfd(bytes.len() as u64);
    rustix::io::pwrite(&fd, bytes, 0).unwrap();
    fd
}

/// A thread that writes into the other end of a pipe.
struct Writer(Option<JoinHandle<()>>);

impl Drop for Writer {
    fn drop(&mut self) {
        self.0.take().unwrap().join().unwrap();
    }
}

/// These bytes as a source of this kind.
fn origin(kind: &str, dir: &Path, bytes: &[u8]) -> (Origin<'static>, Option<Writer>) {
    let file = || {
        let path = dir.join(format!("origin-{}", bytes.len()));
        if !path.exists() {
            fs::write(&path, bytes).unwrap();
            dmafile_testkit::evict(&path);
        }
        path
    };
    match kind {
        "memfd" => (Origin::fd(memory(bytes), 0), None),
        "sealed" => {
            let fd = memory(bytes);
            let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW;
            rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
            (Origin::fd(fd, 0), None)
        }
        "file" => (Origin::File(file()), None),
        "fd of a file" => (Origin::fd(File::open(file()).unwrap().into(), 0), None),
        _ => {
            let (read, mut write) = std::io::pipe().unwrap();
            let bytes = bytes.to_vec();
            let writer = std::thread::spawn(move || {
                // A failed save stops reading.
                let _ = write.write_all(&bytes);
            });
            (
                Origin::Stream(Arc::new(read.into())),
                Some(Writer(Some(writer))),
            )
        }
    }
}

/// Combinations that are not supported and must be refused.
fn impossible(kind: &str, method: Method, io: Io) -> bool {
    let passes = matches!(kind, "file" | "fd of a file" | "pipe");
    (passes && method == Method::Uring) || (passes && method == Method::Threads && io == Io::Direct)
}

fn run(save: Save<'_>, what: &str) -> SaveReport {
    save.run().unwrap_or_else(|error| panic!("{what}: {error}"))
}

fn reasons(report: &SaveReport) -> String {
    let lines = report.reasons.iter().map(|reason| format!("{reason}\n"));
    lines.collect()
}

#[test]
fn every_source_method_and_mode_saves_every_size() {
    let (dir, sources) = (dir(), dir());
    let sizes = [
        0,
        1,
        511,
        512,
        513,
        4095,
        4096,
        4097,
        BLOCK - 1,
        BLOCK,
        BLOCK + 1,
        MIB - 1,
        MIB,
        MIB + 1,
        3 * MIB + 777,
    ];
    let to = dir.path().join("to");
    let page = rustix::param::page_size() as u64;
    for size in sizes {
        let bytes = noise(size as usize, size);
        let digest = bytes_digest(&bytes);
        for kind in ORIGINS {
            for method in METHODS {
                for &io in Io::ALL {
                    let what = format!("{size} bytes of a {kind} by {method} {io}");
                    let (origin, _writer) = origin(kind, sources.path(), &bytes);
                    let save = Save::new(origin, &to).method(method).io(io).block(BLOCK);
                    if impossible(kind, method, io) && (size > 0 || kind == "pipe") {
                        let error = save.run().expect_err(&what);
                        assert_eq!(error.raw_os_error(), Some(95), "{what}: {error}");
                        continue;
                    }
                    let report = match save.run() {
                        // With no bytes, a method may be refused.
                        Err(error) if size == 0 && error.raw_os_error() == Some(95) => continue,
                        report => report.unwrap_or_else(|error| panic!("{what}: {error}")),
                    };
                    assert_eq!(report.bytes, size, "{what}");
                    assert!(report.atomic && report.sync, "{what}");
                    if io == Io::Direct && size > 0 {
                        // Checked before the comparison, which reads the file.
                        assert_eq!(cached(&to), 0, "{what}");
                        assert_eq!(report.bytes_direct, size - size % page, "{what}");
                    }
                    assert_eq!(file_digest(&to, 0, size), digest, "{what}");
                    assert_eq!(fs::metadata(&to).unwrap().len(), size, "{what}");
                    assert_eq!(names(dir.path()), ["to"], "{what}");
                }
            }
        }
    }
}

#[test]
fn windows_may_begin_and_end_at_any_byte() {
    let dir = dir();
    let to = dir.path().join("to");
    let window = 64 * MIB;
    let bytes = noise((2 * window + 5 * MIB + 1) as usize, 3);
    let fd = memory(&bytes);
    let sizes = [window - 1, window, window + 1, bytes.len() as u64];
    for (size, start) in sizes.into_iter().flat_map(|size| [(size, 0), (size, 4096)]) {
        let size = size.min(bytes.len() as u64 - start);
        let part = &bytes[start as usize..][..size as usize];
        let what = format!("{size} bytes from {start}");
        let save = Save::new(Origin::fd(fd.try_clone().unwrap(), start), &to).length(size);
        let report = run(save, &what);
        assert_eq!(cached(&to), 0, "{what}");
        assert_eq!(
            file_digest(&to, 0, size),
            bytes_digest(part),
            "{what}: {}",
            reasons(&report)
        );
    }
}

#[test]
fn saving_in_place_changes_only_the_given_range() {
    let (dir, sources) = (dir(), dir());
    let to = dir.path().join("to");
    let size = MIB + 4099;
    let bytes = noise(size as usize, 1);
    let around = noise(2 * MIB as usize, 2);
    let parts = [
        // From, to, how many.
        (0, 0, 1),
        (0, 1, size),
        (0, 4096, 8192),
        (777, 777, 5000),
        (511, 5000, 2 * BLOCK + 1),
        (512, 4096, BLOCK),
        (4096, 4096 + 512, 3 * BLOCK),
        (1, 2 * MIB - 1, 1),
        // Past the end of the file with a gap, and across its end.
        (5, 2 * MIB + 12345, 4097),
        (0, 2 * MIB - 7, 100_000),
    ];
    for (from, at, len) in parts {
        for kind in ["memfd", "sealed", "fd of a file", "pipe"] {
            for method in METHODS {
                for io in [Io::Auto, Io::Buffered] {
                    let part = &bytes[from as usize..][..len as usize];
                    let (origin, start, _writer) = match kind {
                        "pipe" => {
                            let (origin, writer) = origin(kind, sources.path(), part);
                            (origin, 0, writer)
                        }
                        _ => (origin(kind, sources.path(), &bytes).0, from, None),
                    };
                    let origin = match origin {
                        Origin::Fd { fd, number, .. } => Origin::Fd {
                            fd,
                            number,
                            at: start,
                        },
                        other => other,
                    };
                    let what =
                        format!("{len} bytes from {from} of a {kind} to {at}, {method} {io}");
                    fs::write(&to, &around).unwrap();
                    let save = Save::new(origin, &to).offset(at).method(method).io(io);
                    let save = save.length(len).block(BLOCK);
                    match save.run() {
                        Ok(report) => assert!(!report.atomic, "{what}"),
                        Err(error) => {
                            let memory = matches!(kind, "memfd" | "sealed");
                            let askew = from % 512 != at % 512 && method == Method::Uring;
                            assert!(
                                impossible(kind, method, io) || (memory && askew),
                                "{what}: {error}"
                            );
                            assert_eq!(error.raw_os_error(), Some(95), "{what}: {error}");
                            continue;
                        }
                    }
                    let mut want = around.clone();
                    want.resize(want.len().max((at + len) as usize), 0);
                    want[at as usize..][..len as usize].copy_from_slice(part);
                    assert_eq!(
                        fs::metadata(&to).unwrap().len(),
                        want.len() as u64,
                        "{what}"
                    );
                    assert_eq!(
                        file_digest(&to, 0, want.len() as u64),
                        bytes_digest(&want),
                        "{what}"
                    );
                }
            }
        }
    }
}

#[test]
fn holes_stay_holes_in_a_new_file_and_are_zeros_in_place() {
    let dir = dir();
    let to = dir.path().join("to");
    let len = 4 * MIB + 1000;
    let layouts: [&[(u64, u64)]; 6] = [
        &[],
        &[(0, 5000)],
        &[(len - 700, len)],
        &[(MIB, 2 * MIB)],
        &[(0, 4096), (2 * MIB, 2 * MIB + 4096), (len - 1, len)],
        &[(100 << 10, 300 << 10), (308 << 10, 312 << 10)],
    ];
    // Memory has holes of whole pages.
    let page = rustix::param::page_size() as u64;
    for (index, data) in layouts.iter().enumerate() {
        let sub = dir.path().join(index.to_string());
        fs::create_dir(&sub).unwrap();
        let path = sparse(&sub, len, data);
        let fd = memfd(len);
        for &(start, end) in *data {
            let mut bytes = vec![0; (end - start) as usize];
            File::open(&path)
                .unwrap()
                .read_exact_at(&mut bytes, start)
                .unwrap();
            rustix::io::pwrite(&fd, &bytes, start).unwrap();
        }
        let digest = file_digest(&path, 0, len);
        let taken = rustix::fs::fstat(&fd).unwrap().st_blocks;
        for from in [
            Origin::fd(fd.try_clone().unwrap(), 0),
            Origin::File(path.clone()),
        ] {
            for method in [Method::Auto, Method::Threads, Method::Bounce] {
                let what = format!("layout {index} of {from} by {method}");
                let save = Save::new(from.clone(), &to).method(method);
                let save = save.verify(Verify::compute(dmafile::Algorithm::Sha256));
                let report = run(save, &what);
                assert_eq!(file_digest(&to, 0, len), digest, "{what}");
                assert_eq!(report.verify.as_ref().unwrap().digest, digest, "{what}");
                let room: u64 = data
                    .iter()
                    .map(|run| run.1.next_multiple_of(page) - run.0 / page * page)
                    .sum();
                let blocks = fs::metadata(&to).unwrap().blocks() * 512;
                // An extent tree needs a block too.
                assert!(blocks <= room + 4096, "{what}: {blocks} for {room}");
                assert_eq!(
                    report.bytes_hole,
                    len - (report.bytes_direct + report.bytes_buffered)
                );

                // In place at byte 100, so that no page of the source is a page of the target.
                let around = vec![0xff; len as usize + 300];
                fs::write(&to, &around).unwrap();
                let save = Save::new(from.clone(), &to).offset(100).method(method);
                run(save, &what);
                assert_eq!(file_digest(&to, 100, len), digest, "{what}, in place");
                let bytes = fs::read(&to).unwrap();
                assert!(bytes[..100].iter().all(|&byte| byte == 0xff), "{what}");
                assert!(bytes[100 + len as usize..].iter().all(|&byte| byte == 0xff));
                fs::remove_file(&to).unwrap();
            }
        }
        // No save has filled the holes of the memory.
        assert_eq!(
            rustix::fs::fstat(&fd).unwrap().st_blocks,
            taken,
            "layout {index}"
        );
    }
}

#[test]
fn a_replaced_file_keeps_its_owner_mode_attributes_and_links() {
    let dir = dir();
    let at = |name: &str| dir.path().join(name);
    fs::create_dir(at("sub")).unwrap();
    fs::write(at("sub/real"), b"old").unwrap();
    fs::hard_link(at("sub/real"), at("other")).unwrap();
    std::os::unix::fs::symlink("sub/real", at("link")).unwrap();
    std::os::unix::fs::symlink("link", at("again")).unwrap();
    // The set-user-ID bit does not apply to the new bytes.
    fs::set_permissions(at("sub/real"), fs::Permissions::from_mode(0o4751)).unwrap();
    let attribute = "user.dmafile-test";
    rustix::fs::setxattr(at("sub/real"), attribute, b"kept", XattrFlags::empty()).unwrap();
    let before = fs::metadata(at("sub/real")).unwrap();

    let bytes = noise(100_000, 7);
    let save = Save::new(Origin::fd(memory(&bytes), 0), at("again"));
    let report = run(save, "through links");
    assert_eq!(fs::read(at("sub/real")).unwrap(), bytes);
    let after = fs::metadata(at("sub/real")).unwrap();
    assert_eq!(after.mode() & 0o7777, 0o751);
    assert_eq!((after.uid(), after.gid()), (before.uid(), before.gid()));
    assert_ne!(after.ino(), before.ino());
    let mut value = [0_u8; 10];
    let got = rustix::fs::getxattr(at("sub/real"), attribute, &mut value[..]).unwrap();
    assert_eq!(&value[..got], b"kept");
    assert_eq!(fs::read(at("other")).unwrap(), b"old");
    assert!(
        reasons(&report).contains("links 2: 1 other hard links"),
        "{report:?}"
    );
    assert_eq!(names(dir.path()), ["again", "link", "other", "sub"]);
    assert_eq!(names(&at("sub")), ["real"]);

    // A link whose target does not exist yet.
    std::os::unix::fs::symlink("sub/new", at("dangling")).unwrap();
    run(
        Save::new(Origin::fd(memory(&bytes), 0), at("dangling")),
        "a new file",
    );
    assert_eq!(fs::read(at("sub/new")).unwrap(), bytes);
    let mask = rustix::process::umask(rustix::fs::Mode::empty());
    rustix::process::umask(mask);
    let mode = fs::metadata(at("sub/new")).unwrap().mode() & 0o7777;
    assert_eq!(mode, 0o666 & !mask.bits());
}

/// Runs a save that must fail, and asserts that the file and its folder have not changed.
fn refused(save: Save<'_>, to: &Path) -> dmafile::Error {
    let folder = to.parent().unwrap();
    let (before, bytes) = (names(folder), fs::read(to).ok());
    let error = save.run().expect_err("a save that cannot be");
    assert_eq!(names(folder), before, "{error}");
    assert_eq!(fs::read(to).ok(), bytes, "{error}");
    error
}

#[test]
fn a_failed_save_leaves_the_old_file() {
    let dir = dir();
    let to = dir.path().join("to");
    fs::write(&to, b"old").unwrap();
    fs::create_dir(dir.path().join("folder")).unwrap();
    let bytes = noise(3 * MIB as usize, 5);
    let from = || Origin::fd(memory(&bytes), 0);
    let text = |save, to: &Path| refused(save, to).to_string();

    let save = Save::new(from(), dir.path().join("folder"));
    let line = text(save, &to);
    assert!(
        line.contains("it is a folder (EISDIR); name a file in it"),
        "{line}"
    );
    let save = Save::new(from(), dir.path().join("no/such/file"));
    let line = text(save, &to);
    assert!(
        line.contains("no such folder (ENOENT); create it first"),
        "{line}"
    );
    let save = Save::new(from(), dir.path().join("missing")).offset(0);
    let line = text(save, &to);
    assert!(line.contains("no such file (ENOENT)"), "{line}");
    let line = text(Save::new(from(), "/dev/null"), &to);
    assert!(line.contains("it is not a regular file (EINVAL)"), "{line}");

    let wrong = Verify::expect(dmafile::Algorithm::Crc32c, "00000000").unwrap();
    let error = refused(Save::new(from(), &to).verify(wrong.clone()), &to);
    assert_eq!(error.raw_os_error(), Some(libc::EBADMSG), "{error}");
    // The same with a stream.
    let (stream, _writer) = origin("pipe", dir.path(), &bytes);
    let error = refused(Save::new(stream, &to).verify(wrong), &to);
    assert_eq!(error.raw_os_error(), Some(libc::EBADMSG), "{error}");

    let token = CancelToken::new();
    token.cancel();
    let error = refused(Save::new(from(), &to).cancel(token.clone()), &to);
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    assert!(error.to_string().starts_with("save: "), "{error}");
    // A pipe without data.
    let (read, _write) = std::io::pipe().unwrap();
    let stream = Origin::Stream(Arc::new(read.into()));
    let error = refused(Save::new(stream, &to).cancel(token), &to);
    assert_eq!(error.kind(), ErrorKind::Cancelled);

    let error = refused(Save::new(from(), &to).length(3 * MIB + 1), &to);
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{error}");
    let (stream, _writer) = origin("pipe", dir.path(), &bytes);
    let error = refused(Save::new(stream, &to).length(3 * MIB + 1), &to);
    assert_eq!(error.raw_os_error(), Some(libc::ENODATA), "{error}");
    for (block, depth) in [(1000, 8), (128 * MIB, 8), (4096, 0), (4096, 5000)] {
        let save = Save::new(from(), &to).block(block).queue_depth(depth);
        assert_eq!(refused(save, &to).kind(), ErrorKind::Usage);
    }
    let error = refused(Save::new(from(), &to).method(Method::HeapRead), &to);
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    let closed = OwnedFd::from(File::create(dir.path().join("written")).unwrap());
    let line = text(Save::new(Origin::fd(closed, 0), &to), &to);
    assert!(line.contains("not open for reading (EBADF)"), "{line}");
}

#[test]
fn threads_write_as_many_blocks_at_once_as_requested() {
    let dir = dir();
    for (io, asked, threads) in [
        (Io::Buffered, 3, 3),
        (Io::Buffered, 100, 64),
        (Io::Direct, 3, 3),
    ] {
        let save = Save::new(Origin::fd(memfd(MIB), 0), dir.path().join("to"));
        let save = save.method(Method::Threads).io(io).queue_depth(asked);
        if let Ok(plan) = save.plan() {
            assert_eq!(plan.queue_depth, threads, "{io} {asked}");
        } else {
            assert_eq!(io, Io::Direct, "only direct I/O may be refused");
        }
    }
}

/// The owner truncates the memory after the plan.
#[test]
fn memory_that_is_truncated_during_a_save_is_an_error() {
    let dir = dir();
    let to = dir.path().join("to");
    fs::write(&to, b"old").unwrap();
    for method in METHODS {
        let fd = memory(&noise(8 * MIB as usize, 9));
        let kept = fd.try_clone().unwrap();
        let save = Save::new(Origin::fd(fd, 0), &to)
            .method(method)
            .block(BLOCK);
        let save = save.on_plan(move |_| rustix::fs::ftruncate(&kept, 5 * MIB + 1).unwrap());
        let error = refused(save, &to);
        let line = error.to_string();
        assert!(line.contains("has since truncated it"), "{method}: {line}");
        assert_eq!(error.raw_os_error(), Some(libc::ENODATA), "{method}");
    }
}

/// Progress is reported up to the last byte, and the report has every phase.
#[test]
fn progress_ends_with_the_size_and_the_trace_has_every_write() {
    let dir = dir();
    let to = dir.path().join("to");
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    let told = Arc::clone(&seen);
    let save = Save::new(Origin::fd(memory(&noise(5_000_000, 4)), 0), &to);
    let save = save.trace(true);
    let report = save
        .progress(move |progress| told.lock().unwrap().push((progress.done, progress.total)))
        .run()
        .unwrap();
    let seen = seen.lock().unwrap();
    assert_eq!(seen.last(), Some(&(5_000_000, 5_000_000)));
    let trace = report.trace().unwrap()["traceEvents"].as_array().unwrap();
    assert!(trace.iter().any(|event| event["name"] == "write"));
    let json = serde_json::to_value(&report).unwrap();
    for phase in [
        "open", "plan", "reserve", "submit", "wait", "copy", "verify", "sync", "total",
    ] {
        assert!(json["phases"][phase].is_number(), "{phase}: {json}");
    }
}

/// The saved length is not a multiple of the page size of the memory.
#[test]
fn hugetlb_memory_with_holes_is_saved() {
    let dir = dir();
    let to = dir.path().join("to");
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB;
    let Ok(fd) = rustix::fs::memfd_create("huge", flags) else {
        return eprintln!("SKIP: no hugetlb memfd");
    };
    if rustix::fs::ftruncate(&fd, 8 * MIB).is_err() {
        return eprintln!("SKIP: huge pages of more than 8 MiB");
    }
    let file = File::from(fd.try_clone().unwrap());
    let bytes = noise(2 * MIB as usize, 6);
    // hugetlb memory cannot be written through its descriptor.
    let filled = dmafile::Load::new(cold(dir.path(), 2 * MIB as usize))
        .to(dmafile::Kind::fd_at(fd.try_clone().unwrap(), 4 * MIB))
        .run();
    if let Err(error) = filled {
        return eprintln!("SKIP: the pool has no page ({error})");
    }
    drop((file, bytes));
    let len = 7 * MIB + 5;
    let save = Save::new(Origin::fd(fd, 0), &to).length(len);
    run(save, "huge pages");
    let mut want = vec![0; len as usize];
    want[4 * MIB as usize..6 * MIB as usize].copy_from_slice(&noise(2 * MIB as usize, 2 * MIB));
    assert_eq!(file_digest(&to, 0, len), bytes_digest(&want));
}

/// A descriptor is read from its beginning and keeps its position; only a stream is read from its position.
#[test]
fn a_save_does_not_move_the_position_of_a_descriptor() {
    let dir = dir();
    let to: PathBuf = dir.path().join("to");
    let path = cold(dir.path(), 100_000);
    let mut file = File::open(&path).unwrap();
    file.seek(SeekFrom::Start(1000)).unwrap();
    let from = Origin::fd(file.try_clone().unwrap().into(), 0);
    run(Save::new(from, &to), "a descriptor");
    assert_eq!(file_digest(&to, 0, 100_000), file_digest(&path, 0, 100_000));
    assert_eq!(file.stream_position().unwrap(), 1000);
    let from = Origin::Stream(Arc::new(file.try_clone().unwrap().into()));
    run(Save::new(from, &to).length(50_000), "a stream");
    assert_eq!(
        file_digest(&to, 0, 50_000),
        file_digest(&path, 1000, 50_000)
    );
    let mut rest = Vec::new();
    file.read_to_end(&mut rest).unwrap();
    assert_eq!(rest.len(), 49_000);
    assert!(file.as_fd().try_clone_to_owned().is_ok());
}

/// The same bytes, divided into parts in different ways, in memory with any alignment and in descriptors.
#[test]
fn parts_are_saved_in_order() {
    let (dir, sources) = (dir(), dir());
    let to = dir.path().join("to");
    let size = 3 * MIB as usize + 777;
    let bytes = noise(size, 9);
    let file = sources.path().join("origin");
    fs::write(&file, &bytes).unwrap();
    let fd = memory(&bytes);
    let cuts: [&[usize]; 6] = [
        &[],
        &[1],
        &[0, 0, 4095, 4096, 4097],
        &[100, 100 + MIB as usize, 2 * MIB as usize],
        &[(BLOCK - 1) as usize, BLOCK as usize, (BLOCK + 1) as usize],
        &[size - 1, size],
    ];
    // A copy of each part begins `shift` bytes after a page boundary.
    for (cuts, shift) in cuts
        .iter()
        .flat_map(|cuts| [0, 1, 8, 100, 512].map(|by| (cuts, by)))
    {
        let mut ends = cuts.to_vec();
        ends.push(size);
        let mut start = 0;
        let ranges: Vec<_> = ends
            .iter()
            .map(|end| (std::mem::replace(&mut start, *end), *end))
            .collect();
        let copies: Vec<Vec<u8>> = ranges
            .iter()
            .map(|(start, end)| {
                let mut room = vec![0; end - start + 8192];
                let at = room.as_ptr().align_offset(4096) + shift;
                room[at..at + end - start].copy_from_slice(&bytes[*start..*end]);
                room
            })
            .collect();
        for (method, at, mixed) in [
            (Method::Auto, None, false),
            (Method::Uring, None, true),
            (Method::Threads, Some(0), false),
            (Method::Bounce, Some(4096), true),
            (Method::Auto, Some(777), true),
        ] {
            let parts: Vec<_> = ranges
                .iter()
                .zip(&copies)
                .enumerate()
                .map(|(index, ((start, end), room))| {
                    let begin = room.as_ptr().align_offset(4096) + shift;
                    let (from, len) = (*start as u64, (end - start) as u64);
                    match (mixed, index % 3) {
                        (true, 1) => OriginPart::fd(fd.try_clone().unwrap(), from, len),
                        (true, 2) => OriginPart::fd(File::open(&file).unwrap().into(), from, len),
                        _ => OriginPart::from(&room[begin..begin + (end - start)]),
                    }
                })
                .collect();
            let what = format!("{cuts:?}, {shift} behind a page, by {method} at {at:?}, {mixed}");
            let mut save = Save::new(Origin::Parts(parts), &to)
                .method(method)
                .verify("sha256".parse::<Verify>().unwrap());
            if let Some(at) = at {
                fs::write(&to, vec![7; 5000]).unwrap();
                save = save.offset(at);
            }
            let report = run(save, &what);
            let digest = bytes_digest(&bytes);
            assert_eq!(report.bytes, size as u64, "{what}");
            assert_eq!(
                file_digest(&to, at.unwrap_or(0), size as u64),
                digest,
                "{what}"
            );
            assert_eq!(report.verify.unwrap().digest, digest, "{what}");
            let length = fs::metadata(&to).unwrap().len();
            assert_eq!(length, at.unwrap_or(0) + size as u64, "{what}");
            assert_eq!(names(dir.path()), ["to"], "{what}");
            fs::remove_file(&to).unwrap();
        }
    }
}

#[test]
fn invalid_parts_leave_the_old_file() {
    let dir = dir();
    let to = dir.path().join("to");
    fs::write(&to, "old").unwrap();
    let (read, _write) = std::io::pipe().unwrap();
    let short = memory(&[1; 100]);
    for (part, errno) in [
        (OriginPart::fd(read.into(), 0, 10), 29),
        (OriginPart::fd(short, 90, 11), 22),
    ] {
        let origin = Origin::Parts(vec![OriginPart::from(&b"abc"[..]), part]);
        let error = Save::new(origin, &to).run().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(errno), "{error}");
    }
    let save = Save::new(Origin::memory(b"abc"), &to).length(4);
    assert_eq!(save.run().unwrap_err().raw_os_error(), Some(22));
    assert_eq!(fs::read(&to).unwrap(), b"old");
    let nothing = run(Save::new(Origin::Parts(Vec::new()), &to), "nothing");
    assert_eq!((nothing.bytes, fs::metadata(&to).unwrap().len()), (0, 0));
    assert_eq!(names(dir.path()), ["to"]);
}

#[test]
fn sources_that_need_bounce_buffers_may_have_larger_blocks() {
    let dir = dir();
    let bytes = noise(9 * MIB as usize + 7, 3);
    let from = dir.path().join("from");
    fs::write(&from, &bytes).unwrap();
    let to = dir.path().join("to");
    for (method, io) in [
        (Method::Bounce, Io::Direct),
        (Method::Bounce, Io::Buffered),
        (Method::Threads, Io::Buffered),
    ] {
        let save = Save::new(Origin::File(from.clone()), &to);
        let save = save.method(method).io(io).block(4 * MIB);
        run(save, &format!("{method} {io}"));
        assert_eq!(
            file_digest(&to, 0, bytes.len() as u64),
            bytes_digest(&bytes),
            "{method} {io}"
        );
    }
}

/// Ways to name a file as a source, so that its first `len` bytes from `from` on are saved.
type Named<'a> = (&'a str, &'a dyn Fn(u64, u64) -> Origin<'static>);

/// A file that is mapped for reading, until it is dropped.
struct Mapped(&'static [u8]);

impl Mapped {
    fn new(path: &Path) -> Self {
        let file = File::open(path).unwrap();
        let len = file.metadata().unwrap().len() as usize;
        let (prot, flags) = (ProtFlags::READ, MapFlags::SHARED);
        // SAFETY: a new mapping; the tests read it only through saves.
        let start = unsafe { mmap(std::ptr::null_mut(), len, prot, flags, &file, 0) }.unwrap();
        // SAFETY: it is mapped until the drop.
        Self(unsafe { std::slice::from_raw_parts(start.cast(), len) })
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let start = self.0.as_ptr().cast_mut().cast();
        // SAFETY: the mapping of `new`.
        unsafe { munmap(start, self.0.len()) }.unwrap();
    }
}

/// A save within one file must not read what it has already written, in whatever way the file is named.
#[test]
fn a_save_onto_its_own_source_is_refused_before_the_first_write() {
    const LEN: u64 = 2 * MIB + 99;
    let (dir, elsewhere) = (dir(), dir());
    let at = |name: &str| dir.path().join(name);
    let bytes = noise(5 * MIB as usize, 21);
    fs::write(at("f"), &bytes).unwrap();
    fs::hard_link(at("f"), at("other")).unwrap();
    std::os::unix::fs::symlink(at("f"), elsewhere.path().join("link")).unwrap();
    let open = || OwnedFd::from(File::open(at("f")).unwrap());
    let mapped = Mapped::new(&at("f"));
    let passed = open();
    let part = |from, len| OriginPart::fd(open(), from, len);
    let ways: [Named<'_>; 8] = [
        ("its path", &|_, _| Origin::File(at("f"))),
        ("a hard link", &|_, _| Origin::File(at("other"))),
        ("a link", &|_, _| {
            Origin::File(elsewhere.path().join("link"))
        }),
        ("a descriptor", &|from, _| Origin::fd(open(), from)),
        ("a descriptor's path", &|_, _| {
            Origin::File(format!("/proc/self/fd/{}", passed.as_raw_fd()).into())
        }),
        ("a stream", &|from, _| {
            let mut file = File::open(at("f")).unwrap();
            file.seek(SeekFrom::Start(from)).unwrap();
            Origin::Stream(Arc::new(file.into()))
        }),
        ("several parts", &|from, len| {
            Origin::Parts(vec![
                OriginPart::from(&b"head"[..]),
                part(from, len - 4 - 100),
                OriginPart::from(&[7; 100][..]),
            ])
        }),
        ("its mapping", &|from, len| {
            Origin::memory(&mapped.0[from as usize..][..len as usize])
        }),
    ];
    for (way, origin) in ways {
        let whole = ["path", "link"].iter().any(|end| way.ends_with(end));
        for (from, to) in [
            (0, 777),
            (0, 4096),
            (0, MIB),
            (512, 0),
            (1, LEN),
            (LEN - 1, 0),
        ] {
            // The file's part of several does not reach either end.
            if (whole && from > 0) || (way == "several parts" && LEN - 1 <= from.max(to)) {
                continue;
            }
            for method in [Method::Auto, Method::Threads, Method::Bounce] {
                let what = format!("{way}, from {from} to {to}, {method}");
                let len = LEN.min(bytes.len() as u64 - from);
                let save = Save::new(origin(from, len), at("other")).length(len);
                let error = save.offset(to).method(method).run().expect_err(&what);
                assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{what}: {error}");
                let text = error.to_string();
                assert!(text.contains("of the same file"), "{what}: {text}");
                assert!(
                    fs::read(at("f")).unwrap() == bytes,
                    "{what}: it was written to"
                );
            }
        }
    }
    let save = Save::new(Origin::fd(open(), 5), at("f"))
        .length(100)
        .offset(50);
    let text = save.run().unwrap_err().to_string();
    let says = "bytes 5 to 105 would be written to bytes 50 to 150 of the same file";
    assert!(text.contains(says), "{text}");
    // A stream reads what is appended to its file, without end.
    let save = Save::new(Origin::Stream(Arc::new(open())), at("f"));
    save.offset(bytes.len() as u64).run().unwrap_err();
    assert!(fs::read(at("f")).unwrap() == bytes);
    // A memfd by its path.
    let memory = memory(&bytes);
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    let save = Save::new(Origin::fd(memory.try_clone().unwrap(), 0), path);
    save.length(MIB).offset(4096).run().unwrap_err();
    assert_eq!(
        dmafile_testkit::descriptor_digest(memory, 0, bytes.len() as u64),
        bytes_digest(&bytes)
    );
}

#[test]
fn ranges_of_one_file_that_do_not_overlap_are_copied() {
    let dir = dir();
    let path = dir.path().join("f");
    let bytes = noise(3 * MIB as usize, 22);
    let mapped = |from: u64, len: u64| (from as usize, len as usize);
    let ranges = [
        (0, 777, 777),
        (777, 0, 777),
        (0, MIB, MIB),
        (MIB + 5, 5, MIB),
        (MIB, 3 * MIB, 100_001),
        // Onto itself.
        (4095, 4095, 70_000),
    ];
    for (from, to, len) in ranges {
        for (way, method) in ["descriptor", "stream", "parts", "mapping"]
            .into_iter()
            .flat_map(|way| [Method::Auto, Method::Threads, Method::Bounce].map(|m| (way, m)))
        {
            let what = format!("{len} bytes of a {way} from {from} to {to} by {method}");
            if way == "stream" && from == to {
                continue;
            }
            fs::write(&path, &bytes).unwrap();
            let mut file = File::open(&path).unwrap();
            let map = Mapped::new(&path);
            let origin = match way {
                "descriptor" => Origin::fd(file.into(), from),
                "stream" => {
                    file.seek(SeekFrom::Start(from)).unwrap();
                    Origin::Stream(Arc::new(file.into()))
                }
                "parts" => Origin::Parts(vec![OriginPart::fd(file.into(), from, len)]),
                _ => {
                    let (from, len) = mapped(from, len);
                    Origin::memory(&map.0[from..][..len])
                }
            };
            let save = Save::new(origin, &path).length(len).offset(to);
            run(save.method(method), &what);
            let mut want = bytes.clone();
            want.resize(want.len().max((to + len) as usize), 0);
            want.copy_within(from as usize..(from + len) as usize, to as usize);
            assert!(fs::read(&path).unwrap() == want, "{what}");
        }
    }
}

/// A loop device, its partitions and the file behind it are the same bytes.
#[test]
fn a_loop_device_is_not_saved_onto_its_own_file() {
    let dir = dir();
    let path = dir.path().join("image");
    let bytes = noise(4 * MIB as usize, 23);
    fs::write(&path, &bytes).unwrap();
    let losetup = |args: &[&str]| Command::new("losetup").args(args).arg(&path).output();
    let made = losetup(&["--find", "--show", "--offset", "4096"]);
    let Some(device) = made.ok().filter(|made| made.status.success()) else {
        eprintln!("SKIP: losetup does not work here");
        return;
    };
    let device = PathBuf::from(String::from_utf8(device.stdout).unwrap().trim());
    let try_both = || {
        let onto = |from: &Path, to: &Path, at| {
            Save::new(Origin::File(from.into()), to)
                .length(MIB)
                .offset(at)
                .run()
        };
        // Byte 0 of the device is byte 4096 of the file.
        for (from, to, at) in [
            (&device, &path, 4096 + 777),
            (&device, &path, 0),
            (&path, &device, 0),
            (&device, &device, 512),
        ] {
            let error = onto(from, to, at).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{error}");
        }
        assert!(fs::read(&path).unwrap() == bytes);
        onto(&device, &path, 4096 + MIB).unwrap();
        assert!(
            fs::read(&path).unwrap()[4096 + MIB as usize..][..MIB as usize]
                == bytes[4096..][..MIB as usize]
        );
    };
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(try_both));
    let ended = Command::new("losetup")
        .arg("--detach")
        .arg(&device)
        .status();
    if let Err(panic) = done {
        std::panic::resume_unwind(panic);
    }
    assert!(ended.unwrap().success());
}

/// As the kernel with fs.protected_symlinks: in a folder like /tmp, where everybody may create links, only
/// one's own are followed, and those of the folder's owner.
#[test]
fn links_of_other_users_in_sticky_folders_are_not_followed() {
    const OTHER: u32 = 65534;
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP: only root can give a link to another user");
        return;
    }
    let dir = dir();
    let at = |name: &str| dir.path().join(name);
    let shared = |name: &str| at("shared").join(name);
    fs::create_dir(at("shared")).unwrap();
    fs::write(at("target"), b"old").unwrap();
    let link = |to: &Path, name: &str, owner| {
        std::os::unix::fs::symlink(to, shared(name)).unwrap();
        std::os::unix::fs::lchown(shared(name), Some(owner), Some(owner)).unwrap();
    };
    link(&at("target"), "theirs", OTHER);
    link(&at("absent"), "dangling", OTHER);
    link(&at("target"), "own", 0);
    link(Path::new("theirs"), "chain", 0);
    fs::write(shared("file"), b"old").unwrap();
    std::os::unix::fs::chown(shared("file"), Some(OTHER), Some(OTHER)).unwrap();
    let mode = |mode, owner| {
        fs::set_permissions(at("shared"), fs::Permissions::from_mode(mode)).unwrap();
        std::os::unix::fs::chown(at("shared"), Some(owner), None).unwrap();
    };
    let save = |name: &str, at: Option<u64>| {
        let save = Save::new(Origin::fd(memory(b"new"), 0), shared(name));
        match at {
            Some(at) => save.offset(at).run(),
            None => save.run(),
        }
    };
    mode(0o1777, 0);
    for (name, place) in [
        ("theirs", None),
        ("theirs", Some(0)),
        ("dangling", None),
        ("chain", None),
        ("chain", Some(0)),
        ("file", None),
    ] {
        let error = save(name, place).expect_err(name);
        assert_eq!(error.raw_os_error(), Some(libc::EACCES), "{name}: {error}");
        let text = error.to_string();
        assert!(text.contains("another user (65534)"), "{text}");
        assert_eq!(fs::read(at("target")).unwrap(), b"old", "{name}");
        assert_eq!(names(dir.path()), ["shared", "target"], "{name}");
        let all = ["chain", "dangling", "file", "own", "theirs"];
        assert_eq!(names(&at("shared")), all, "{name}");
    }
    let follows = |name: &str, place| {
        fs::write(at("target"), b"old").unwrap();
        save(name, place).unwrap();
        assert_eq!(fs::read(at("target")).unwrap(), b"new", "{name}");
    };
    follows("own", None);
    follows("own", Some(0));
    // The folder's owner.
    mode(0o1777, OTHER);
    follows("theirs", None);
    follows("chain", Some(0));
    // Not sticky, or not for everybody.
    for bits in [0o777, 0o1775, 0o755] {
        mode(bits, 0);
        follows("chain", None);
        follows("theirs", Some(0));
    }
}

/// The access control list of a folder applies to new files in it, and not to those that replace others.
#[test]
fn a_default_access_control_list_applies_to_new_files() {
    let dir = dir();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("old"), b"old").unwrap();
    fs::set_permissions(at("old"), fs::Permissions::from_mode(0o660)).unwrap();
    // Version 2; owner rwx, user 12345 rw-, group r-x, mask rw-, others ---.
    let mut acl = 2_u32.to_le_bytes().to_vec();
    for (tag, bits, id) in [
        (0x01_u16, 7_u16, u32::MAX),
        (0x02, 6, 12345),
        (0x04, 5, u32::MAX),
        (0x10, 6, u32::MAX),
        (0x20, 0, u32::MAX),
    ] {
        acl.extend(tag.to_le_bytes());
        acl.extend(bits.to_le_bytes());
        acl.extend(id.to_le_bytes());
    }
    let (default, own) = ("system.posix_acl_default", "system.posix_acl_access");
    if rustix::fs::setxattr(dir.path(), default, &acl, XattrFlags::empty()).is_err() {
        eprintln!("SKIP: no access control lists here");
        return;
    }
    let list = |name: &str| {
        let mut value = vec![0; 1000];
        let got = rustix::fs::getxattr(at(name), own, &mut value[..]);
        got.map(|len| value[..len].to_vec())
    };
    let mode = |name: &str| fs::metadata(at(name)).unwrap().mode() & 0o7777;
    File::create(at("usual")).unwrap();
    for name in ["new", "old"] {
        let save = Save::new(Origin::fd(memory(b"new"), 0), at(name));
        run(save, name);
    }
    assert_eq!((list("new"), mode("new")), (list("usual"), mode("usual")));
    assert_eq!(list("old"), Err(rustix::io::Errno::NODATA));
    assert_eq!(mode("old"), 0o660);
}

#[test]
fn names_are_bytes() {
    let dir = dir();
    let name = |text: &[u8]| dir.path().join(OsStr::from_bytes(text));
    for text in [&b"\xff"[..], b"a\xc3", b"\xe2\x82 b"] {
        let (to, link) = (name(text), name(&[text, b"\xfe"].concat()));
        std::os::unix::fs::symlink(OsStr::from_bytes(text), &link).unwrap();
        for path in [&to, &link] {
            let save = || Save::new(Origin::fd(memory(b"new"), 0), path);
            run(save(), "a new file");
            run(save().offset(3), "in place");
            assert_eq!(fs::read(&to).unwrap(), b"newnew");
            run(save(), "an old file");
            run(Save::new(Origin::File(path.clone()), path), "onto itself");
            assert_eq!(fs::read(&to).unwrap(), b"new");
        }
        fs::remove_file(link).unwrap();
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
}
