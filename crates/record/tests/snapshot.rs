//! A loaded snapshot has the bytes that sha256sum reads. However a save ends, the previous snapshot stays whole
//! until the new one is valid. Everything in a manifest is checked.

use dmafile::{About, Algorithm, CancelToken, ErrorKind, Io, Kind, MemoryKind, Method, Origin};
use dmafile_record::{LoadedSnapshot, Snapshot, SnapshotLoad, SnapshotReport};
use dmafile_testkit::{Forked, buffer_digest, bytes_digest, dir, file_digest, memfd, names, noise};
use rustix::fs::{FlockOperation, SealFlags};
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

const MIB: u64 = 1 << 20;
const MANIFEST: &str = "dmafile-snapshot.json";
/// Exists while a snapshot is being saved.
const LOCK: &str = ".dmafile-snapshot.lock";

/// A memfd with these bytes.
fn memory(bytes: &[u8]) -> OwnedFd {
    let fd = memfd(bytes.len() as u64);
    rustix::io::pwrite(&fd, bytes, 0).unwrap();
    fd
}

fn origin(bytes: &[u8]) -> Origin<'static> {
    Origin::fd(memory(bytes), 0)
}

fn manifest(dir: &Path) -> Value {
    serde_json::from_slice(&fs::read(dir.join(MANIFEST)).unwrap()).unwrap()
}

/// Saves `a` and `b`, whose bytes depend on `seed`.
fn pair(dir: &Path, seed: u64) -> dmafile::Result<SnapshotReport> {
    Snapshot::new(dir)
        .add("a", origin(&noise(300_001, seed)))
        .add("b", origin(&noise(5000, seed + 1000)))
        .run()
}

fn digests(loaded: &LoadedSnapshot) -> Vec<(String, String)> {
    let sources = loaded.sources.iter();
    sources
        .map(|source| (source.name.clone(), buffer_digest(&source.buffer)))
        .collect()
}

/// The names and digests of the pair with this seed.
fn digests_of(seed: u64) -> Vec<(String, String)> {
    vec![
        ("a".to_string(), bytes_digest(&noise(300_001, seed))),
        ("b".to_string(), bytes_digest(&noise(5000, seed + 1000))),
    ]
}

fn load(dir: &Path) -> LoadedSnapshot {
    SnapshotLoad::new(dir).run().unwrap()
}

/// Asserts that the pair with this seed can be loaded.
fn check_loads(dir: &Path, seed: u64) {
    assert_eq!(digests(&load(dir)), digests_of(seed));
}

/// Asserts that the folder has exactly the pair with this seed.
fn check(dir: &Path, seed: u64) {
    check_loads(dir, seed);
    let generation = manifest(dir)["generation"].as_u64().unwrap();
    let files = ["a", "b"].map(|name| format!("{name}.{generation}.dmafile"));
    assert_eq!(names(dir), [&files[0], &files[1], MANIFEST]);
}

#[test]
fn every_source_of_every_size_is_loaded_again() {
    let (dir, sources) = (dir(), dir());
    let sizes = [0, 1, 511, 4095, 4096, 4097, MIB - 1, MIB, 3 * MIB + 777];
    let mut all = Vec::new();
    let mut snapshot = Snapshot::new(dir.path());
    let mut writers = Vec::new();
    for size in sizes {
        for kind in ["memfd", "sealed", "file", "pipe"] {
            let name = format!("{kind} of {size}");
            let bytes = noise(size as usize, size + 1);
            all.push((name.clone(), size, bytes_digest(&bytes)));
            let from = match kind {
                "memfd" => origin(&bytes),
                "sealed" => {
                    let fd = memory(&bytes);
                    let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW;
                    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
                    Origin::fd(fd, 0)
                }
                "file" => {
                    let path = sources.path().join(&name);
                    fs::write(&path, &bytes).unwrap();
                    Origin::File(path)
                }
                _ => {
                    let (read, mut write) = std::io::pipe().unwrap();
                    writers.push(std::thread::spawn(move || write.write_all(&bytes)));
                    Origin::Stream(Arc::new(read.into()))
                }
            };
            snapshot = snapshot.add(name, from);
        }
    }
    let report = snapshot.verify(Algorithm::Sha256).run().unwrap();
    for writer in writers {
        writer.join().unwrap().unwrap();
    }
    let total: u64 = all.iter().map(|one| one.1).sum();
    assert_eq!(
        (report.bytes, report.generation, report.sync),
        (total, 1, true)
    );
    assert_eq!(report.bytes_direct + report.bytes_buffered, total);

    // The digests in the manifest are those of sha256sum.
    let manifest = manifest(dir.path());
    let entries = manifest["sources"].as_array().unwrap();
    let text = |entry: &Value, key: &str| entry[key].as_str().unwrap().to_string();
    let mut lines = String::new();
    for (entry, (name, size, digest)) in entries.iter().zip(&all) {
        let said = (text(entry, "name"), entry["bytes"].as_u64().unwrap());
        assert_eq!(said, (name.clone(), *size));
        assert_eq!(&text(entry, "digest"), digest, "{name}");
        lines += &format!("{digest}  {}\n", text(entry, "file"));
    }
    let mut sums = Command::new("sha256sum")
        .args(["--check", "--strict", "--quiet"])
        .current_dir(dir.path())
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    sums.stdin
        .take()
        .unwrap()
        .write_all(lines.as_bytes())
        .unwrap();
    assert!(sums.wait().unwrap().success());
    assert_eq!(entries.len(), all.len());
    assert_eq!(names(dir.path()).len(), all.len() + 1);

    for (kind, method) in [
        (Kind::Memfd, Method::Auto),
        (Kind::Anon, Method::Threads),
        (Kind::Udmabuf, Method::Auto),
    ] {
        let wanted = kind.clone();
        let load =
            SnapshotLoad::new(dir.path()).each(move |_, load| load.to(kind.clone()).method(method));
        let loaded = match load.run() {
            Ok(loaded) => loaded,
            Err(error) if matches!(wanted, Kind::Udmabuf) => {
                eprintln!("SKIP: {error}");
                continue;
            }
            Err(error) => panic!("{wanted}: {error}"),
        };
        assert_eq!(loaded.report.bytes, total);
        for (source, (name, size, digest)) in loaded.sources.iter().zip(&all) {
            assert_eq!((&source.name, source.buffer.len()), (name, *size));
            assert_eq!(source.buffer.is_empty(), *size == 0);
            assert_eq!(&buffer_digest(&source.buffer), digest, "{name} in {wanted}");
            let is = match size {
                0 => MemoryKind::Memfd,
                _ => wanted.memory(),
            };
            assert_eq!(*source.buffer.kind(), is, "{name}");
        }
        assert_eq!(loaded.sources.len(), all.len());
    }
}

#[test]
fn a_snapshot_may_consist_of_empty_sources() {
    let dir = dir();
    let told = Arc::<Mutex<Vec<u64>>>::default();
    let heard = Arc::clone(&told);
    Snapshot::new(dir.path())
        .add("nothing", origin(&[]))
        .progress(move |progress| heard.lock().unwrap().push(progress.total))
        .run()
        .unwrap();
    assert_eq!(told.lock().unwrap().last(), Some(&0));
    let mut loaded = load(dir.path());
    let buffer = &mut loaded.sources[0].buffer;
    assert_eq!(buffer.as_slice(), Some(&[][..]));
    buffer.access().unwrap().read_at(0, &mut []).unwrap();
    buffer.access().unwrap().read_at(0, &mut [0]).unwrap_err();
    buffer.seal().unwrap();
    let fd = loaded.sources.pop().unwrap().buffer.into_fd().unwrap();
    assert_eq!(rustix::fs::fstat(&fd).unwrap().st_size, 0);
    rustix::fs::ftruncate(&fd, 1).unwrap_err();
}

#[test]
fn holes_stay_holes() {
    let dir = dir();
    let fd = memfd(64 * MIB + 1);
    rustix::io::pwrite(&fd, &noise(5000, 1), 32 * MIB).unwrap();
    let report = Snapshot::new(dir.path())
        .add("sparse", Origin::fd(fd.try_clone().unwrap(), 0))
        .add("hole", Origin::fd(memfd(MIB), 0))
        .run()
        .unwrap();
    assert_eq!(report.bytes, 65 * MIB + 1);
    // Memory has holes of whole pages.
    let data = 5000_u64.next_multiple_of(rustix::param::page_size() as u64);
    assert_eq!(report.bytes_hole, report.bytes - data);
    let file = dir.path().join("sparse.1.dmafile");
    // The data, and one block for an extent tree.
    assert!(fs::metadata(&file).unwrap().blocks() * 512 <= data + 4096);
    let loaded = load(dir.path());
    let want = dmafile_testkit::descriptor_digest(fd, 0, 64 * MIB + 1);
    assert_eq!(file_digest(&file, 0, 64 * MIB + 1), want);
    assert_eq!(buffer_digest(&loaded.sources[0].buffer), want);
    let zeros = vec![0; MIB as usize];
    assert_eq!(
        buffer_digest(&loaded.sources[1].buffer),
        bytes_digest(&zeros)
    );
}

#[test]
fn a_snapshot_replaces_the_previous_one() {
    let dir = dir();
    for seed in 1..=3 {
        let report = pair(dir.path(), seed).unwrap();
        assert_eq!(report.generation, seed);
        check(dir.path(), seed);
    }
    // With fewer and different sources.
    let report = Snapshot::new(dir.path())
        .add("c", origin(b"c"))
        .run()
        .unwrap();
    assert_eq!(report.sources.len(), 1);
    assert_eq!(names(dir.path()), ["c.4.dmafile", MANIFEST]);
    assert_eq!(manifest(dir.path())["algorithm"], "xxh3");
}

#[test]
fn each_source_has_its_own_options_and_progress_covers_all() {
    let dir = dir();
    let last = Arc::new(Mutex::new((0, 0)));
    let heard = Arc::clone(&last);
    let bytes = noise(3 * MIB as usize, 1);
    let report = Snapshot::new(dir.path())
        .add("part", origin(&bytes))
        .add("all", origin(&bytes))
        .each(|name, save| match name {
            // A snapshot ignores `offset`.
            "part" => save.length(MIB).offset(77),
            _ => save.io(Io::Buffered),
        })
        .progress(move |progress| *heard.lock().unwrap() = (progress.done, progress.total))
        .run()
        .unwrap();
    assert_eq!(*last.lock().unwrap(), (4 * MIB, 4 * MIB));
    assert_eq!(report.sources[0].report.bytes, MIB);
    assert_eq!(report.sources[1].report.bytes_direct, 0);

    let last = Arc::new(Mutex::new((0, 0)));
    let heard = Arc::clone(&last);
    let plans = Arc::new(AtomicU32::new(0));
    let shown = Arc::clone(&plans);
    let target = dmafile_testkit::dirty_memfd(4 * MIB);
    let fd = Kind::fd(target.try_clone().unwrap());
    let loaded = SnapshotLoad::new(dir.path())
        .each(move |name, load| match name {
            "all" => load.to(fd.clone()),
            _ => load.to(Kind::Anon),
        })
        .on_plan(move |_, _| {
            shown.fetch_add(1, Ordering::Relaxed);
        })
        .progress(move |progress| *heard.lock().unwrap() = (progress.done, progress.total))
        .run()
        .unwrap();
    assert_eq!(*last.lock().unwrap(), (4 * MIB, 4 * MIB));
    assert_eq!(plans.load(Ordering::Relaxed), 2);
    assert_eq!(
        loaded.sources[0].buffer.as_slice(),
        Some(&bytes[..MIB as usize])
    );
    assert_eq!(
        dmafile_testkit::descriptor_digest(target, 0, 3 * MIB),
        bytes_digest(&bytes)
    );

    // One memfd cannot be the target of two sources, and a source cannot be loaded in part.
    let fd = Kind::fd(memfd(4 * MIB));
    let load = SnapshotLoad::new(dir.path()).each(move |_, load| load.to(fd.clone()));
    assert_eq!(load.run().unwrap_err().kind(), ErrorKind::Usage);
    let load = SnapshotLoad::new(dir.path()).each(|_, load| load.length(1));
    assert_eq!(load.run().unwrap_err().kind(), ErrorKind::Usage);
}

#[test]
fn plans_write_nothing() {
    let dir = dir();
    let snapshot = || Snapshot::new(dir.path()).add("a", origin(&noise(5000, 1)));
    assert_eq!(snapshot().plan().unwrap().generation, 1);
    assert!(names(dir.path()).is_empty());
    pair(dir.path(), 7).unwrap();
    fs::write(dir.path().join("a.5.dmafile"), b"left").unwrap();
    let plan = snapshot().plan().unwrap();
    assert_eq!(plan.generation, 6);
    assert_eq!(plan.sources[0].plan.to, dir.path().join("a.6.dmafile"));
    assert_eq!(plan.sources[0].plan.to_write, Some(5000));
    assert!(dir.path().join("a.5.dmafile").exists());
    let plan = SnapshotLoad::new(dir.path()).plan().unwrap();
    assert_eq!((plan.generation, plan.sources.len()), (1, 2));
    assert_eq!(plan.sources[0].plan.as_ref().unwrap().bytes, 300_001);
    let shown = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&shown);
    snapshot()
        .on_plan(move |plan| seen.store(plan.generation == 2, Ordering::Relaxed))
        .run()
        .unwrap();
    assert!(shown.load(Ordering::Relaxed));
}

#[test]
fn invalid_names_are_refused() {
    let dir = dir();
    let long = "x".repeat(65);
    for name in [
        "", ".a", "a/b", "..", "a,b", "a=b", "a\nb", "a\0b", MANIFEST, &long,
    ] {
        let snapshot = Snapshot::new(dir.path()).add(name, origin(b"x"));
        let error = snapshot.run().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{name}");
        assert_eq!(error.to_string().lines().count(), 1);
    }
    let twice = Snapshot::new(dir.path())
        .add("a", origin(b"1"))
        .add("a", origin(b"2"));
    assert!(
        twice
            .run()
            .unwrap_err()
            .to_string()
            .contains("'a' appears twice")
    );
    let none = Snapshot::new(dir.path()).run().unwrap_err();
    assert!(
        none.to_string().contains("0 sources; it can have 1 to 256"),
        "{none}"
    );
    let mut many = Snapshot::new(dir.path());
    for number in 0..=dmafile_record::MOST_SOURCES {
        many = many.add(number.to_string(), Origin::File("x".into()));
    }
    assert_eq!(many.run().unwrap_err().kind(), ErrorKind::Usage);
    assert!(names(dir.path()).is_empty());
    // Names of the maximum length, in any script.
    for name in ["ä".repeat(32), "x".repeat(64), "a b.c-1".to_string()] {
        Snapshot::new(dir.path())
            .add(&name, origin(b"x"))
            .run()
            .unwrap();
        assert_eq!(load(dir.path()).sources[0].name, name);
    }
}

/// Runs a save that must fail, and asserts that the pair with this seed is unchanged.
fn refused(dir: &Path, seed: u64, snapshot: Snapshot) -> dmafile::Error {
    let (before, text) = (names(dir), fs::read(dir.join(MANIFEST)).unwrap());
    let error = snapshot.run().unwrap_err();
    assert_eq!(names(dir), before, "{error}");
    assert_eq!(fs::read(dir.join(MANIFEST)).unwrap(), text, "{error}");
    check(dir, seed);
    error
}

#[test]
fn a_failed_save_leaves_the_previous_snapshot() {
    let dir = dir();
    let folder = dir.path();
    pair(folder, 1).unwrap();
    let big = noise(5 * MIB as usize, 9);
    let begun = || Snapshot::new(folder).add("a", origin(&big));

    // Found before anything is written.
    let missing = Origin::File(folder.join("missing"));
    let error = refused(folder, 1, begun().add("b", missing));
    assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
    let past = Origin::fd(memory(b"x"), 2);
    let error = refused(folder, 1, begun().add("b", past));
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    // When the first source has already been written.
    let (read, write) = std::io::pipe().unwrap();
    drop(write);
    let ends_early = begun().add("b", Origin::Stream(Arc::new(read.into())));
    let ends_early = ends_early.each(|name, save| match name {
        "b" => save.length(1),
        _ => save,
    });
    let error = refused(folder, 1, ends_early);
    assert_eq!(error.raw_os_error(), Some(libc::ENODATA));
    assert!(
        error.to_string().contains("it ended after 0 of 1 bytes"),
        "{error}"
    );
    // Cancelled before the save, at the plan, and after most bytes are written.
    let token = CancelToken::new();
    token.cancel();
    let error = refused(folder, 1, begun().cancel(token));
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    let token = CancelToken::new();
    let stop = token.clone();
    let error = refused(
        folder,
        1,
        begun().cancel(token).on_plan(move |_| stop.cancel()),
    );
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    let token = CancelToken::new();
    let stop = token.clone();
    let stopped = begun().add("b", origin(&big)).cancel(token);
    let stopped = stopped.progress(move |progress| {
        if progress.done > 5 * MIB {
            stop.cancel();
        }
    });
    let error = refused(folder, 1, stopped);
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    assert!(error.to_string().starts_with("save: "), "{error}");

    // Targets that are not a folder.
    let missing = Snapshot::new(folder.join("no")).add("a", origin(b"x"));
    let line = missing.run().unwrap_err().to_string();
    assert!(
        line.contains("no such folder (ENOENT); create it first"),
        "{line}"
    );
    let file = Snapshot::new(folder.join(MANIFEST)).add("a", origin(b"x"));
    let line = file.run().unwrap_err().to_string();
    assert!(line.contains("(ENOTDIR); name a folder"), "{line}");
}

#[test]
fn the_next_save_removes_leftovers_and_nothing_else() {
    let dir = dir();
    let at = |name: &str| dir.path().join(name);
    pair(dir.path(), 1).unwrap();
    let ours = [
        "a.2.dmafile",
        "z.9.dmafile",
        ".a.2.dmafile.dmafile-0",
        ".dmafile-snapshot.json.dmafile-3",
    ];
    let others = [
        "a.2",
        "a.dmafile",
        "a.02.dmafile",
        ".a.2.dmafile",
        ".x.dmafile-0",
        "README",
    ];
    for name in ours.iter().chain(&others) {
        fs::write(at(name), b"left").unwrap();
    }
    symlink(at("README"), at("link.3.dmafile")).unwrap();
    // A folder is not removed; its number is skipped.
    fs::create_dir(at("a.7.dmafile")).unwrap();
    let report = pair(dir.path(), 2).unwrap();
    assert_eq!(report.generation, 8);
    let removed = report
        .reasons
        .iter()
        .find(|reason| reason.about == About::Removed);
    assert_eq!(removed.unwrap().choice, "5 files");
    assert_eq!(digests(&load(dir.path())), digests_of(2));
    let mut want: Vec<_> = others.map(str::to_string).to_vec();
    want.extend(["a.7.dmafile", "a.8.dmafile", "b.8.dmafile", MANIFEST].map(str::to_string));
    want.sort();
    assert_eq!(names(dir.path()), want);
    assert_eq!(fs::read(at("README")).unwrap(), b"left");
}

#[test]
fn the_name_of_a_folder_is_bytes() {
    let dir = dir();
    let folder = dir.path().join(OsStr::from_bytes(b"\xff\xc3"));
    fs::create_dir(&folder).unwrap();
    for seed in 1..=2 {
        pair(&folder, seed).unwrap();
        check(&folder, seed);
    }
}

#[test]
fn a_second_saver_is_refused() {
    let dir = dir();
    pair(dir.path(), 1).unwrap();
    let folder = dir.path().to_path_buf();
    let save = Snapshot::new(dir.path()).add("a", origin(&noise(300_001, 2)));
    let save = save.add("b", origin(&noise(5000, 1002)));
    let save = save.on_plan(move |_| {
        let error = pair(&folder, 3).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBUSY));
        let says = "another snapshot is being saved there (EBUSY); wait until that has ended";
        assert!(error.to_string().contains(says), "{error}");
        check_loads(&folder, 1);
        let mode = fs::metadata(folder.join(LOCK)).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600);
    });
    save.run().unwrap();
    check(dir.path(), 2);
}

/// Whoever may read the folder and its files, and locks them, keeps nobody from saving.
#[test]
fn locks_of_readers_do_not_count() {
    let dir = dir();
    pair(dir.path(), 1).unwrap();
    fs::write(dir.path().join(LOCK), b"").unwrap();
    let mut locked = vec![File::open(dir.path()).unwrap()];
    for name in names(dir.path()).iter().filter(|name| *name != LOCK) {
        locked.push(File::open(dir.path().join(name)).unwrap());
    }
    for file in &locked {
        rustix::fs::flock(file, FlockOperation::LockShared).unwrap();
    }
    pair(dir.path(), 2).unwrap();
    check(dir.path(), 2);
}

/// What a killed save has left is used again. Anything else with the name of the lock is refused.
#[test]
fn only_a_file_of_ones_own_is_taken_for_the_lock() {
    let dir = dir();
    let lock = dir.path().join(LOCK);
    pair(dir.path(), 1).unwrap();
    let busy = File::create(&lock).unwrap();
    rustix::fs::flock(&busy, FlockOperation::LockExclusive).unwrap();
    let error = pair(dir.path(), 2).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EBUSY), "{error}");
    // Closing it is not enough: a child that another test has just forked may have it too.
    rustix::fs::flock(&busy, FlockOperation::Unlock).unwrap();
    pair(dir.path(), 2).unwrap();
    check(dir.path(), 2);
    let refused = || {
        let error = pair(dir.path(), 3).unwrap_err();
        assert!(error.to_string().contains(LOCK), "{error}");
        check_loads(dir.path(), 2);
    };
    symlink("elsewhere", &lock).unwrap();
    refused();
    assert!(!dir.path().join("elsewhere").exists());
    fs::remove_file(&lock).unwrap();
    fs::create_dir(&lock).unwrap();
    refused();
    fs::remove_dir(&lock).unwrap();
    if rustix::process::geteuid().is_root() {
        fs::write(&lock, b"").unwrap();
        std::os::unix::fs::chown(&lock, Some(65534), None).unwrap();
        refused();
        fs::remove_file(&lock).unwrap();
    }
    pair(dir.path(), 3).unwrap();
    check(dir.path(), 3);
}

/// The path may lead to another folder at any time during a save: the snapshot is then in the folder that was
/// opened, and the other one is not touched.
#[test]
fn a_snapshot_stays_in_the_folder_that_was_opened() {
    fn flip(dir: &Path) {
        fs::remove_file(dir.join("current")).unwrap();
        symlink("other", dir.join("current")).unwrap();
    }
    fn rotate(dir: &Path) {
        fs::rename(dir.join("current"), dir.join("moved")).unwrap();
        fs::rename(dir.join("other"), dir.join("current")).unwrap();
    }
    let swaps = [
        ("a flipped link", true, flip as fn(&Path)),
        ("a rotation", false, rotate),
    ];
    for ((how, link, swap), old) in swaps
        .into_iter()
        .flat_map(|swap| [(swap, true), (swap, false)])
    {
        for step in ["each source", "the plan", "progress", "the end"] {
            let what = format!("{how} at {step}; an old snapshot: {old}");
            let dir = dir();
            let current = dir.path().join("current");
            let opened = if link {
                symlink("opened", &current).unwrap();
                "opened"
            } else {
                "current"
            };
            fs::create_dir(dir.path().join(opened)).unwrap();
            fs::create_dir(dir.path().join("other")).unwrap();
            if old {
                pair(&current, 1).unwrap();
                pair(&dir.path().join("other"), 7).unwrap();
            }
            let once = Arc::new(OnceLock::new());
            let root = dir.path().to_path_buf();
            let swap_at = |now: &'static str| {
                let (once, root) = (Arc::clone(&once), root.clone());
                move || {
                    if now == step {
                        once.get_or_init(|| swap(&root));
                    }
                }
            };
            let (each, plan) = (swap_at("each source"), swap_at("the plan"));
            let (begun, ended) = (swap_at("progress"), swap_at("the end"));
            let report = Snapshot::new(&current)
                .add("a", origin(&noise(300_001, 2)))
                .add("b", origin(&noise(5000, 1002)))
                .each(move |_, save| {
                    each();
                    save
                })
                .on_plan(move |_| plan())
                .progress(move |progress| {
                    if progress.done < progress.total {
                        begun()
                    } else {
                        begun();
                        ended();
                    }
                })
                .run()
                .unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(once.get().is_some(), "{what}");
            let (saved, other) = if link {
                ("opened", "other")
            } else {
                ("moved", "current")
            };
            check(&dir.path().join(saved), 2);
            if old {
                check(&dir.path().join(other), 7)
            } else {
                assert!(names(&dir.path().join(other)).is_empty(), "{what}")
            }
            let mut reasons = report.reasons.iter();
            let told =
                reasons.any(|reason| reason.about == About::Folder && reason.choice == "moved");
            assert!(told, "{what}: {report:?}");
        }
    }
}

#[test]
fn a_child_forked_during_the_save_does_not_keep_the_lock() {
    let dir = dir();
    let child = Arc::new(OnceLock::new());
    let forked = Arc::clone(&child);
    let save = Snapshot::new(dir.path()).add("a", origin(&noise(300_001, 1)));
    let save = save.progress(move |_| {
        forked.get_or_init(Forked::start);
    });
    save.run().unwrap();
    assert!(child.get().is_some());
    pair(dir.path(), 2).unwrap();
    check(dir.path(), 2);
}

#[test]
fn readers_get_a_whole_snapshot_while_savers_replace_it() {
    const SAVES: u64 = 15;
    let dir = dir();
    pair(dir.path(), 0).unwrap();
    let all: Vec<_> = (0..2 * SAVES + 1).map(digests_of).collect();
    let (saving, read) = (AtomicU32::new(2), AtomicU32::new(0));
    std::thread::scope(|scope| {
        for saver in 0..2 {
            let (saving, dir) = (&saving, dir.path());
            scope.spawn(move || {
                for save in 0..SAVES {
                    let seed = 1 + saver * SAVES + save;
                    while let Err(error) = pair(dir, seed) {
                        assert_eq!(error.raw_os_error(), Some(libc::EBUSY), "{error}");
                        std::thread::yield_now();
                    }
                }
                saving.fetch_sub(1, Ordering::Relaxed);
            });
        }
        for _ in 0..2 {
            scope.spawn(|| {
                // Once more after the last save.
                let mut last = false;
                while !last {
                    last = saving.load(Ordering::Relaxed) == 0;
                    let loaded = load(dir.path());
                    let got = digests(&loaded);
                    assert!(all.contains(&got), "{got:?}");
                    read.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert!(read.load(Ordering::Relaxed) >= 2);
    assert_eq!(manifest(dir.path())["generation"], 2 * SAVES + 1);
    assert_eq!(names(dir.path()).len(), 3);
}

#[test]
fn changed_files_are_refused() {
    let dir = dir();
    let file = dir.path().join("a.1.dmafile");
    let fail = |errno, says: &str| {
        let error = SnapshotLoad::new(dir.path()).run().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(errno), "{error}");
        assert!(error.place().contains("a.1.dmafile"), "{error}");
        assert!(error.to_string().contains(says), "{error}");
    };
    for algorithm in Algorithm::ALL {
        let bytes = noise(3 * MIB as usize, 4);
        fs::remove_dir_all(dir.path()).unwrap();
        fs::create_dir(dir.path()).unwrap();
        Snapshot::new(dir.path())
            .add("other", origin(b"x"))
            .add("a", origin(&bytes))
            .verify(*algorithm)
            .run()
            .unwrap();
        load(dir.path());
        for at in [0, MIB + 5, 3 * MIB - 1] {
            let open = File::options().write(true).open(&file).unwrap();
            open.write_all_at(&[bytes[at as usize] ^ 1], at).unwrap();
            fail(
                libc::EBADMSG,
                "(EBADMSG); it is damaged: use another snapshot",
            );
            open.write_all_at(&[bytes[at as usize]], at).unwrap();
        }
        load(dir.path());
    }
    let open = File::options().write(true).open(&file).unwrap();
    for size in [0, 3 * MIB - 1, 3 * MIB + 1] {
        open.set_len(size).unwrap();
        fail(
            libc::EBADMSG,
            &format!("it has {size} bytes and should have 3145728"),
        );
    }
    fs::remove_file(&file).unwrap();
    fail(libc::ENOENT, "(ENOENT)");
    let outside = tempfile::NamedTempFile::new().unwrap();
    fs::write(&outside, noise(3 * MIB as usize, 4)).unwrap();
    symlink(outside.path(), &file).unwrap();
    fail(libc::EBADMSG, "it is a symbolic link");
    fs::remove_file(&file).unwrap();
    let made = Command::new("mkfifo").arg(&file).status().unwrap();
    assert!(made.success());
    fail(libc::EBADMSG, "it is not a regular file");
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    fail(libc::EBADMSG, "it is not a regular file");
}

/// Writes a valid manifest with one change.
fn changed(dir: &Path, valid: &Value, change: impl FnOnce(&mut Value)) {
    let mut manifest = valid.clone();
    change(&mut manifest);
    fs::write(dir.join(MANIFEST), manifest.to_string()).unwrap();
}

#[test]
fn invalid_manifests_are_refused() {
    let dir = dir();
    pair(dir.path(), 1).unwrap();
    let valid = manifest(dir.path());
    fs::write(dir.path().join("outside"), noise(5000, 1001)).unwrap();
    let refuse = |errno, says: &str| {
        let error = SnapshotLoad::new(dir.path()).run().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(errno), "{says}: {error}");
        assert!(error.to_string().contains(says), "{error}");
        assert_eq!(error.to_string().lines().count(), 1, "{error}");
        // A save refuses it too, and removes no files.
        let before = names(dir.path());
        pair(dir.path(), 2).unwrap_err();
        assert_eq!(names(dir.path()), before);
    };
    type Change = fn(&mut Value);
    let changes: &[(i32, &str, Change)] = &[
        (95, "it has version 2, and this is 1", |m| {
            m["version"] = json!(2)
        }),
        (74, "missing field `version`", |m| {
            m.as_object_mut().unwrap().remove("version");
        }),
        (74, "invalid type", |m| m["version"] = json!("1")),
        (74, "unknown field", |m| m["more"] = json!(1)),
        (74, "unknown field", |m| m["sources"][0]["more"] = json!(1)),
        (74, "generation 0", |m| m["generation"] = json!(0)),
        (74, "generation", |m| m["generation"] = json!(u64::MAX)),
        (74, "0 sources", |m| m["sources"] = json!([])),
        (74, "257 sources", |m| {
            m["sources"] = Value::Array(vec![m["sources"][0].clone(); 257]);
        }),
        (74, "appears twice", |m| {
            m["sources"][1] = m["sources"][0].clone()
        }),
        (74, "has a slash", |m| {
            m["sources"][0]["name"] = json!("x/../../outside");
            m["sources"][0]["file"] = json!("x/../../outside.1.dmafile");
        }),
        (74, "begins with a dot", |m| {
            m["sources"][0]["name"] = json!("..")
        }),
        (74, "is not the file", |m| {
            m["sources"][0]["file"] = json!("/etc/passwd")
        }),
        (74, "is not the file", |m| {
            m["sources"][0]["file"] = json!("../a.1.dmafile")
        }),
        (74, "is not the file", |m| {
            m["sources"][0]["file"] = json!("outside")
        }),
        (74, "is not the file", |m| {
            m["sources"][0]["file"] = json!("b.1.dmafile")
        }),
        (74, "not one of crc32c", |m| m["algorithm"] = json!("md5")),
        (74, ".json: '0' is not a valid xxh3 digest", |m| {
            m["sources"][0]["digest"] = json!("0")
        }),
        (74, "16 hexadecimal digits", |m| {
            m["sources"][0]["digest"] = json!("\u{1b}[2J")
        }),
        (74, "too many bytes", |m| {
            m["sources"][0]["bytes"] = json!(u64::MAX)
        }),
        (74, "too many bytes", |m| {
            m["sources"][0]["bytes"] = json!(i64::MAX)
        }),
        (74, "invalid", |m| m["sources"][0]["bytes"] = json!(-1)),
        (74, "unknown kind", |m| {
            m["sources"][0]["kind"] = json!("x".repeat(65))
        }),
        (74, "invalid manifest", |m| *m = json!([])),
        (74, "invalid manifest", |m| *m = json!(null)),
    ];
    for (errno, says, change) in changes {
        changed(dir.path(), &valid, change);
        refuse(*errno, says);
    }
    for (text, says) in [
        (String::new(), "invalid manifest"),
        ("\0".repeat(5000), "invalid manifest"),
        ("[".repeat(100_000), "invalid manifest"),
        (
            valid
                .to_string()
                .replace("\"version\"", "\"version\":1,\"version\""),
            "duplicate",
        ),
        (valid.to_string() + "x", "trailing"),
        (
            valid.to_string() + &" ".repeat(1 << 20),
            "more than 1048576 bytes",
        ),
    ] {
        fs::write(dir.path().join(MANIFEST), text).unwrap();
        refuse(libc::EBADMSG, says);
    }
    // A wrong size of an existing file.
    changed(dir.path(), &valid, |m| {
        m["sources"][1]["bytes"] = json!(1_u64 << 40)
    });
    let error = SnapshotLoad::new(dir.path()).run().unwrap_err();
    assert!(
        error.to_string().contains("should have 1099511627776"),
        "{error}"
    );

    // Symbolic links are refused.
    let path = dir.path().join(MANIFEST);
    let outside = dir.path().join("outside");
    fs::write(&outside, valid.to_string()).unwrap();
    fs::remove_file(&path).unwrap();
    symlink("outside", &path).unwrap();
    refuse(libc::EBADMSG, "it is a symbolic link");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    refuse(libc::EBADMSG, "it is not a regular file");
    fs::remove_dir(&path).unwrap();
    let error = SnapshotLoad::new(dir.path()).run().unwrap_err();
    assert!(
        error
            .to_string()
            .contains("has no dmafile-snapshot.json (ENOENT)"),
        "{error}"
    );
    // The original manifest is accepted.
    fs::write(&path, valid.to_string()).unwrap();
    assert_eq!(digests(&load(dir.path())), digests_of(1));
    assert!(SnapshotLoad::is_snapshot(dir.path()) && !SnapshotLoad::is_snapshot(&path));
}
