//! Memory that processes share without a holder: whichever process dies during the load, the others get the
//! same bytes, in one copy.

use dmafile::{Io, Load, Method, Verify};
use dmafile_hold::{Found, Shared, Vacant};
use dmafile_testkit::{Forked, cold, dir, file_digest};
use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Only a test that hangs takes this long.
const LONG: Duration = Duration::from_secs(120);
const LEN: u64 = 4 << 20;

fn env(name: &str) -> PathBuf {
    std::env::var_os(name).unwrap().into()
}

/// A process that the tests below start.
#[test]
#[ignore = "started by the other tests"]
fn member() {
    let (file, folder) = (env("MEMBER_FILE"), env("MEMBER_FOLDER"));
    let mark = folder.join(format!("loading-{}", std::process::id()));
    let slowly = |load: Load| {
        load.method(Method::Threads)
            .io(Io::Buffered)
            .block(64 << 10)
    };
    let shared = Shared::of([file])
        .folder(folder.join("shared"))
        .wait(LONG)
        .each(slowly)
        .progress(move |_| {
            // Leaves time to kill it during the load.
            if !mark.exists() {
                fs::write(&mark, "").unwrap();
                std::thread::sleep(Duration::from_millis(20));
            }
        });
    let held = shared.run().unwrap();
    fs::write(folder.join(format!("has-{}", std::process::id())), "").unwrap();
    let file = &held.files()[0];
    let number = file.buffer.as_fd().unwrap().as_raw_fd();
    let link = format!("/proc/self/fd/{number}");
    let sum = Command::new("sha256sum")
        .stdin(fs::File::open(&link).unwrap())
        .output()
        .unwrap();
    let sum = String::from_utf8(sum.stdout).unwrap();
    let inode = std::os::unix::fs::MetadataExt::ino(&fs::metadata(&link).unwrap());
    println!("member {} {inode}", sum.split(' ').next().unwrap());
    std::io::stdout().flush().unwrap();
    // It keeps the memory until stdin ends.
    let mut rest = String::new();
    std::io::stdin().read_to_string(&mut rest).unwrap();
}

/// Starts this test as a process.
fn start(test: &str, file: &Path, folder: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", test, "--nocapture"])
        .env("MEMBER_FILE", file)
        .env("MEMBER_FOLDER", folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// The digest and the inode that a member reports; None if it was killed before.
fn told(child: &mut Child) -> Option<(String, String)> {
    let mut out = BufReader::new(child.stdout.as_mut().unwrap());
    let mut line = String::new();
    loop {
        line.clear();
        if out.read_line(&mut line).unwrap() == 0 {
            return None;
        }
        // The harness may print text before it.
        if let Some((_, told)) = line.trim().split_once("member ")
            && let Some((digest, inode)) = told.split_once(' ')
        {
            return Some((digest.to_string(), inode.to_string()));
        }
    }
}

/// The members that have left a mark.
fn marked(folder: &Path, mark: &str) -> BTreeSet<u32> {
    let names = dmafile_testkit::names(folder).into_iter();
    names
        .filter_map(|name| name.strip_prefix(mark)?.parse().ok())
        .collect()
}

/// A random number below `most`.
fn random(most: u64) -> u64 {
    dmafile::internal::folder::random() % most
}

#[test]
fn another_process_loads_if_a_loader_is_killed() {
    let rounds = std::env::var("DMAFILE_ROUNDS").map_or(3, |text| text.parse().unwrap());
    for round in 0..rounds {
        let dir = dir();
        let file = cold(dir.path(), LEN as usize);
        let want = file_digest(&file, 0, LEN);
        let mut members: Vec<_> = (0..20)
            .map(|_| start("member", &file, dir.path()))
            .collect();
        let mut killed = BTreeSet::new();
        let deaths = random(4) as usize;
        let begin = Instant::now();
        while killed.len() < deaths {
            assert!(begin.elapsed() < LONG, "no process loads");
            let next = marked(dir.path(), "loading-")
                .difference(&killed)
                .next()
                .copied();
            if let Some(pid) = next {
                // It may have finished its load by then.
                std::thread::sleep(Duration::from_micros(random(30_000)));
                let member = members.iter_mut().find(|member| member.id() == pid);
                member.unwrap().kill().unwrap();
                killed.insert(pid);
            } else if !marked(dir.path(), "has-").is_subset(&killed) {
                // A living process has the memory: no process will load again.
                break;
            } else {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let mut inodes = BTreeSet::new();
        for member in &mut members {
            match told(member) {
                Some((digest, inode)) => {
                    assert_eq!(digest, want, "round {round}");
                    if !killed.contains(&member.id()) {
                        inodes.insert(inode);
                    }
                }
                None => assert!(killed.contains(&member.id()), "round {round}: one failed"),
            }
        }
        assert_eq!(inodes.len(), 1, "round {round}: more than one copy");
        for member in &mut members {
            drop(member.stdin.take());
            let status = member.wait().unwrap();
            assert_eq!(
                status.success(),
                !killed.contains(&member.id()),
                "round {round}"
            );
        }
    }
}

#[test]
fn a_changed_file_or_other_options_are_loaded_separately() {
    let dir = dir();
    let file = cold(dir.path(), 100_000);
    let at = dir.path().join("shared");
    let take = |shared: Shared| {
        let held = shared.folder(&at).wait(LONG).run().unwrap();
        let fd = held.files()[0].buffer.as_fd().unwrap();
        let inode = rustix::fs::fstat(fd).unwrap().st_ino;
        (held, inode)
    };
    let plain = || Shared::of([&file]);
    let (first, inode) = take(plain());
    assert_eq!(take(plain()).1, inode);
    let (written, other) = take(plain().writable(true));
    assert_ne!(other, inode);
    fs::write(&file, dmafile_testkit::noise(100_000, 7)).unwrap();
    let (changed, third) = take(plain());
    assert!(third != inode && third != other);
    let fd = changed.files()[0]
        .buffer
        .as_fd()
        .unwrap()
        .try_clone_to_owned()
        .unwrap();
    assert_eq!(
        dmafile_testkit::descriptor_digest(fd, 0, 100_000),
        file_digest(&file, 0, 100_000)
    );
    drop((first, written, changed));
    let left: Vec<_> = fs::read_dir(&at).unwrap().flatten().collect();
    for folder in left {
        assert_eq!(
            dmafile_testkit::names(&folder.path()),
            ["lock"],
            "a socket is left"
        );
    }
}

#[test]
fn waiting_for_a_slow_loader_times_out() {
    let dir = dir();
    let file = cold(dir.path(), 100_000);
    let at = dir.path().join("shared");
    let (at_loader, of_loader) = (at.clone(), file.clone());
    let (begun, has_begun) = std::sync::mpsc::sync_channel(0);
    let (go_on, wait) = std::sync::mpsc::channel::<()>();
    let wait = std::sync::Mutex::new(wait);
    let loader = std::thread::spawn(move || {
        let shared = Shared::of([of_loader])
            .folder(at_loader)
            .progress(move |_| {
                let _ = begun.send(());
                let _ = wait.lock().unwrap().recv();
            });
        shared.run()
    });
    has_begun.recv().unwrap();
    drop(has_begun);
    let error = Shared::of([&file])
        .folder(&at)
        .wait(Duration::from_millis(30))
        .run()
        .unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ETIMEDOUT), "{error}");
    let token = dmafile::CancelToken::new();
    token.cancel();
    let error = Shared::of([&file])
        .folder(&at)
        .wait(LONG)
        .cancel(token)
        .run()
        .unwrap_err();
    assert_eq!(error.kind(), dmafile::ErrorKind::Cancelled, "{error}");
    drop(go_on);
    loader.join().unwrap().unwrap();
}

/// Memory with the bytes of a file, as the caller would fill it.
fn memory(file: &Path) -> Vec<OwnedFd> {
    let loaded = Load::new(file).exact_size(true).run().unwrap();
    vec![loaded.buffer.into_fd().unwrap()]
}

fn vacant(shared: Shared) -> Vacant {
    match shared.find().unwrap() {
        Found::Vacant(vacant) => vacant,
        Found::Held(_) => panic!("no process has loaded it"),
    }
}

#[test]
fn memory_that_the_caller_fills_is_shared() {
    let dir = dir();
    let file = cold(dir.path(), 100_000);
    let at = dir.path().join("shared");
    let shared = || Shared::of([&file]).folder(&at);
    let found = vacant(shared());
    let files: Vec<_> = found
        .files()
        .map(|(path, len)| (path.to_path_buf(), len))
        .collect();
    assert_eq!(files, [(file.clone(), 100_000)]);
    let error = shared().run().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ETIMEDOUT), "others wait");
    drop(found);
    let verify: Verify = "sha256".parse().unwrap();
    let held = vacant(shared().verify(verify.clone()))
        .fill(memory(&file))
        .unwrap();
    let info = &held.files()[0].info;
    let digest = info.digest.as_ref().unwrap();
    assert_eq!(digest.digest, file_digest(&file, 0, 100_000));
    assert!(info.sealed);
    let inode = |held: &dmafile_hold::Held| {
        let fd = held.files()[0].buffer.as_fd().unwrap();
        rustix::fs::fstat(fd).unwrap().st_ino
    };
    let taken = shared().verify(verify).run().unwrap();
    assert_eq!(inode(&taken), inode(&held));
}

#[test]
fn a_child_forked_during_the_load_does_not_keep_the_lock() {
    let dir = dir();
    let file = cold(dir.path(), 100_000);
    let shared = || Shared::of([&file]).folder(dir.path().join("shared"));
    let found = vacant(shared());
    let _child = Forked::start();
    drop(found);
    shared().run().unwrap();
}

/// A process for the test below: it keeps others from loading, and has a child that does nothing.
#[test]
#[ignore = "started by another test"]
fn forking_loader() {
    let shared = Shared::of([env("MEMBER_FILE")]).folder(env("MEMBER_FOLDER").join("shared"));
    let _loading = vacant(shared);
    // SAFETY: the child makes two system calls, and ends with its parent's stdin.
    unsafe {
        if libc::fork() == 0 {
            libc::read(0, [0u8; 1].as_mut_ptr().cast(), 1);
            libc::_exit(0);
        }
    }
    println!("member loads -");
    std::thread::sleep(LONG);
}

#[test]
fn a_child_of_a_killed_loader_does_not_keep_the_lock() {
    let dir = dir();
    let file = cold(dir.path(), 100_000);
    let mut loader = start("forking_loader", &file, dir.path());
    assert!(told(&mut loader).is_some());
    let child_lives = loader.stdin.take();
    let shared = || Shared::of([&file]).folder(dir.path().join("shared"));
    let error = shared().run().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ETIMEDOUT), "{error}");
    loader.kill().unwrap();
    shared().wait(Duration::from_secs(20)).run().unwrap();
    drop(child_lives);
    loader.wait().unwrap();
}

#[test]
fn a_stopped_process_does_not_keep_others_waiting() {
    let dir = dir();
    let file = cold(dir.path(), LEN as usize);
    let mut stopped = start("member", &file, dir.path());
    assert!(told(&mut stopped).is_some());
    let pid = stopped.id().try_into().unwrap();
    // SAFETY: sends a signal to a child that has not been waited for.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGSTOP) }, 0);
    // Less than the time that a process has for its answer, during which the first one keeps the lock.
    let wait = Duration::from_secs(9);
    let shared = || {
        Shared::of([&file])
            .folder(dir.path().join("shared"))
            .wait(wait)
    };
    let inodes = std::thread::scope(|scope| {
        let one = || {
            let held = shared().run().unwrap();
            // So that the others can take it from here.
            let fd = held.files()[0].buffer.as_fd().unwrap();
            (rustix::fs::fstat(fd).unwrap().st_ino, held)
        };
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(one)).collect();
        let all = threads.into_iter().map(|thread| thread.join().unwrap());
        all.collect::<Vec<_>>()
    });
    assert!(inodes.iter().all(|(inode, _)| *inode == inodes[0].0));
    stopped.kill().unwrap();
    stopped.wait().unwrap();
}

#[test]
fn memory_that_does_not_match_the_files_is_refused() {
    let dir = dir();
    let file = cold(dir.path(), 100_000);
    let short = dir.path().join("short");
    fs::write(&short, dmafile_testkit::noise(99_999, 3)).unwrap();
    let at = dir.path().join("shared");
    let shared = || Shared::of([&file]).folder(&at);
    let refused = |error: dmafile::Error, errno| {
        assert_eq!(error.raw_os_error(), Some(errno), "{error}");
        assert_eq!(
            dmafile::internal::one_line(&error.to_string()),
            error.to_string()
        );
    };
    for wrong in [
        Vec::new(),
        memory(&short),
        vec![fs::File::open(&file).unwrap().into()],
    ] {
        refused(vacant(shared()).fill(wrong).unwrap_err(), libc::EPROTO);
    }
    let wrong = Verify::expect(dmafile::Algorithm::Crc32c, "00000000").unwrap();
    let error = vacant(shared().verify(wrong)).fill(memory(&file));
    refused(error.unwrap_err(), libc::EBADMSG);
    let (found, before) = (vacant(shared()), memory(&file));
    fs::write(&file, dmafile_testkit::noise(100_000, 5)).unwrap();
    refused(found.fill(before).unwrap_err(), libc::ESTALE);
    // No refused memory can be taken.
    drop(vacant(shared()));
}
