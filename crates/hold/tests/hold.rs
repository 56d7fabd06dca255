//! One process holds files and others take them: takers get the same bytes, whatever other clients do.

use dmafile::{Algorithm, CancelToken, ErrorKind, Io, Kind, Load, Method, Verify};
use dmafile_hold::{Ended, Held, Hold, Shared, holds, release};
use dmafile_testkit::{bytes_digest, cold, descriptor_digest, dir, file_digest, memfd, noise};
use rustix::fs::{MemfdFlags, OFlags, SealFlags, SeekFrom};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Only a test that hangs takes this long.
const LONG: Duration = Duration::from_secs(60);

fn digest(file: &dmafile_hold::HeldFile) -> String {
    let fd = file.buffer.as_fd().unwrap().try_clone_to_owned().unwrap();
    descriptor_digest(fd, file.buffer.offset(), file.buffer.len())
}

/// A socket, made without dmafile.
fn seqpacket() -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

fn connect(at: &Path) -> OwnedFd {
    let socket = seqpacket();
    rustix::net::connect(&socket, &SocketAddrUnix::new(at).unwrap()).unwrap();
    socket
}

fn say(socket: &OwnedFd, text: &str) -> rustix::io::Result<()> {
    rustix::net::send(socket, text.as_bytes(), SendFlags::NOSIGNAL).map(drop)
}

/// The next message; empty at the end of the connection.
fn hear(socket: &OwnedFd) -> String {
    let mut bytes = vec![0; 1 << 20];
    match rustix::net::recv(socket, &mut bytes, RecvFlags::empty()) {
        Ok((got, _)) => String::from_utf8(bytes[..got].to_vec()).unwrap(),
        Err(rustix::io::Errno::CONNRESET) => String::new(),
        Err(errno) => panic!("{errno}"),
    }
}

fn send_with(socket: &OwnedFd, text: &str, fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let text = [IoSlice::new(text.as_bytes())];
    rustix::net::sendmsg(socket, &text, &mut control, SendFlags::NOSIGNAL).unwrap();
}

fn taken_is_equal(at: &Path, name: &str, files: &[PathBuf]) {
    let held = Held::take(name).socket(at).run().unwrap();
    assert_eq!(held.files().len(), files.len());
    for (file, path) in held.files().iter().zip(files) {
        assert_eq!(file.name, path.file_name().unwrap().to_str().unwrap());
        let bytes = fs::metadata(path).unwrap().len();
        assert_eq!(digest(file), file_digest(path, 0, bytes));
    }
}

#[test]
fn taken_memory_equals_the_file_and_is_sealed() {
    let dir = dir();
    let path = cold(dir.path(), (5 << 20) + 123);
    let at = dir.path().join("socket");
    let verify = Verify::compute(Algorithm::Sha256);
    let holder = Hold::of([&path])
        .name("a")
        .socket(&at)
        .verify(verify)
        .start()
        .unwrap();
    assert_eq!(
        fs::metadata(&at).unwrap().permissions().mode() & 0o777,
        0o600
    );
    let held = Held::take("a").socket(&at).run().unwrap();
    let file = &held.files()[0];
    let want = file_digest(&path, 0, (5 << 20) + 123);
    assert_eq!(digest(file), want);
    assert_eq!(file.info.digest.as_ref().unwrap().digest, want);
    assert_eq!(bytes_digest(file.buffer.as_slice().unwrap()), want);
    let fd = file.buffer.as_fd().unwrap();
    let all = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    assert!(rustix::fs::fcntl_get_seals(fd).unwrap().contains(all));
    // Neither through this descriptor nor through a new one for the same memory.
    let again = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
    let again = fs::File::options()
        .read(true)
        .write(true)
        .open(again)
        .unwrap();
    for fd in [fd, again.as_fd()] {
        rustix::io::pwrite(fd, b"x", 0).unwrap_err();
        rustix::fs::ftruncate(fd, 0).unwrap_err();
    }
    // The memory outlives its holder.
    holder.stop();
    assert!(!at.exists());
    assert_eq!(digest(file), want);
    let error = Held::take("a").socket(&at).run().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOENT), "{error}");
}

#[test]
fn each_file_of_a_model_has_its_own_memory() {
    let dir = dir();
    // More files than fit into one answer.
    let shards: Vec<_> = (0..40)
        .map(|no| dmafile_testkit::models::tensors(&format!("layer{no}"), 2, 5000 + no * 7))
        .collect();
    dmafile_testkit::models::sharded(dir.path(), &shards);
    let at = dir.path().join("socket");
    let holder = Hold::of([dir.path()])
        .name("model")
        .socket(&at)
        .start()
        .unwrap();
    let files: Vec<_> = (1..=40)
        .map(|no| {
            dir.path()
                .join(format!("model-{no:05}-of-00040.safetensors"))
        })
        .collect();
    taken_is_equal(&at, "model", &files);
    let all = holds(Some(&at), &CancelToken::new()).unwrap();
    assert_eq!((all.len(), all[0].files.len()), (1, 40));
    assert!(all[0].sealed);
    assert_eq!(all[0].changed, Some(false));
    drop(holder);
}

#[test]
fn a_writable_hold_shows_what_its_takers_write() {
    let dir = dir();
    let path = cold(dir.path(), 100_000);
    let at = dir.path().join("socket");
    let _holder = Hold::of([&path])
        .name("a")
        .socket(&at)
        .writable(true)
        .start()
        .unwrap();
    let take = || {
        Held::take("a")
            .socket(&at)
            .run()
            .unwrap()
            .into_files()
            .remove(0)
    };
    let (mut one, other) = (take(), take());
    assert!(!one.info.sealed && one.buffer.as_slice().is_none());
    one.buffer
        .access_mut()
        .unwrap()
        .write_at(7, b"written")
        .unwrap();
    let mut got = [0; 7];
    other.buffer.access().unwrap().read_at(7, &mut got).unwrap();
    assert_eq!(&got, b"written");
    // A taker can neither change the size nor add seals that stop others from writing.
    let fd = one.buffer.as_fd().unwrap();
    rustix::fs::ftruncate(fd, 0).unwrap_err();
    rustix::fs::fcntl_add_seals(fd, SealFlags::WRITE).unwrap_err();
}

/// Sends a request, and returns the descriptors of the answer, received without dmafile.
fn take_raw(at: &Path, name: &str) -> (OwnedFd, Vec<OwnedFd>) {
    let peer = connect(at);
    say(&peer, &format!(r#"{{"v":1,"op":"take","name":"{name}"}}"#)).unwrap();
    let fds = dmafile_testkit::receive_fds(peer.as_fd());
    assert!(!fds.is_empty());
    (peer, fds)
}

#[test]
fn every_taker_gets_an_open_file_of_its_own() {
    let dir = dir();
    let path = cold(dir.path(), 100_000);
    for writable in [false, true] {
        let at = dir.path().join(format!("socket-{writable}"));
        let hold = Hold::of([&path]).name("a").socket(&at).writable(writable);
        let holder = hold.start().unwrap();
        // One that uses dmafile, and one that does not.
        let held = Held::take("a").socket(&at).run().unwrap();
        let (_peer, raw) = take_raw(&at, "a");
        let again = Held::take("a").socket(&at).run().unwrap();
        let (_peer, raw_again) = take_raw(&at, "a");
        let fds = [
            held.files()[0].buffer.as_fd().unwrap(),
            raw[0].as_fd(),
            again.files()[0].buffer.as_fd().unwrap(),
            raw_again[0].as_fd(),
        ];
        dmafile_testkit::are_independent(&fds);
        let access = rustix::fs::fcntl_getfl(fds[3]).unwrap() & OFlags::ACCMODE;
        let want = if writable {
            OFlags::RDWR
        } else {
            OFlags::RDONLY
        };
        assert_eq!(access, want);
        drop(holder);
    }
}

#[test]
fn a_taker_does_not_share_its_open_file_with_the_holder() {
    let dir = dir();
    let at = dir.path().join("socket");
    let all = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let memory = memfd(10_000);
    rustix::fs::fcntl_add_seals(&memory, all).unwrap();
    let own = memory.try_clone().unwrap();
    let listener = seqpacket();
    rustix::net::bind(&listener, &SocketAddrUnix::new(&at).unwrap()).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    // A holder that sends its own descriptor, at its end.
    rustix::fs::seek(&own, SeekFrom::End(0)).unwrap();
    let fake = thread::spawn(move || {
        let peer = rustix::net::accept(&listener).unwrap();
        hear(&peer);
        send_with(&peer, &answer("v", "v"), &[memory.as_fd()]);
        peer
    });
    let held = Held::take("a").socket(&at).run().unwrap();
    let taken = held.files()[0].buffer.as_fd().unwrap();
    assert_eq!(rustix::fs::tell(taken).unwrap(), 0);
    dmafile_testkit::are_independent(&[taken, own.as_fd()]);
    drop(fake.join().unwrap());
}

/// A shared, writable mapping of a file, as a program has it that changes the file in place.
struct Mapped(fs::File, *mut u8, usize);

impl Mapped {
    fn new(path: &Path, len: usize) -> Self {
        let file = fs::File::options().read(true).write(true).open(path);
        let file = file.unwrap();
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping, removed with this value.
        let start = unsafe { mmap(std::ptr::null_mut(), len, prot, flags, &file, 0) };
        Self(file, start.unwrap().cast(), len)
    }

    /// Changes a byte.
    fn change(&self, at: usize) {
        assert!(at < self.2);
        // SAFETY: inside the mapping.
        unsafe {
            self.1
                .add(at)
                .write_volatile(!self.1.add(at).read_volatile())
        };
    }

    fn sync(&self) {
        self.0.sync_all().unwrap();
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping of this value.
        unsafe { munmap(self.1.cast(), self.2) }.unwrap();
    }
}

/// A tmpfs never updates the times of a file that is changed through a mapping.
fn is_tmpfs(path: &Path) -> bool {
    rustix::fs::statfs(path).unwrap().f_type as u64 == libc::TMPFS_MAGIC as u64
}

#[test]
fn a_store_to_a_page_that_was_dirty_during_the_load_is_noticed() {
    let dir = dir();
    if is_tmpfs(dir.path()) {
        return eprintln!("SKIP: the files of this test are on a tmpfs");
    }
    let path = cold(dir.path(), 100_000);
    let at = dir.path().join("socket");
    let shared = || {
        let shared = Shared::of([&path]).folder(dir.path().join("shared"));
        let buffered = |load: Load| load.method(Method::Threads).io(Io::Buffered);
        shared.each(buffered).wait(LONG).run().unwrap()
    };
    let mapped = Mapped::new(&path, 100_000);
    mapped.change(5000);
    let hold = Hold::of([&path]).name("a").socket(&at);
    // Direct reads would write the page back.
    let hold = hold.each(|load| load.method(Method::Threads).io(Io::Buffered));
    let _holder = hold.start().unwrap();
    let changed = || holds(Some(&at), &CancelToken::new()).unwrap()[0].changed;
    assert_eq!(changed(), Some(false));
    mapped.change(6000);
    mapped.sync();
    assert_eq!(changed(), Some(true));
    let info = &Held::take("a").socket(&at).run().unwrap().into_files()[0].info;
    assert_eq!(info.changed, Some(true));

    mapped.change(7000);
    let before = shared();
    mapped.change(7001);
    mapped.sync();
    let after = shared();
    let want = file_digest(&path, 0, 100_000);
    assert_ne!(digest(&before.files()[0]), want);
    assert_eq!(digest(&after.files()[0]), want);
}

#[test]
fn a_file_that_changes_during_the_load_is_refused() {
    let dir = dir();
    let path = cold(dir.path(), 300_000);
    let at = dir.path().join("socket");
    let write = |path: PathBuf| {
        move |_| {
            let file = fs::File::options().write(true).open(&path).unwrap();
            rustix::io::pwrite(&file, b"x", 200_000).unwrap();
        }
    };
    let hold = Hold::of([&path]).name("a").socket(&at);
    let error = hold.progress(write(path.clone())).start().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ESTALE), "{error}");
    assert!(!at.exists());
    let shared = || Shared::of([&path]).folder(dir.path().join("shared"));
    let error = shared().progress(write(path.clone())).run().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ESTALE), "{error}");
    let held = shared().run().unwrap();
    assert_eq!(digest(&held.files()[0]), file_digest(&path, 0, 300_000));
}

#[test]
fn a_held_name_is_refused_and_replaced_on_request() {
    let dir = dir();
    let path = dir.path().join("file");
    fs::write(&path, noise(300_000, 1)).unwrap();
    let old = file_digest(&path, 0, 300_000);
    let at = dir.path().join("socket");
    let hold = || Hold::of([&path]).name("a").socket(&at);
    let first = hold().start().unwrap();
    let error = hold().start().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EADDRINUSE), "{error}");
    let held = Held::take("a").socket(&at).run().unwrap();
    fs::write(&path, noise(200_000, 2)).unwrap();
    let changed = || holds(Some(&at), &CancelToken::new()).unwrap()[0].changed;
    assert_eq!(changed(), Some(true));
    let old_file = Held::take("a").socket(&at).run().unwrap();
    assert_eq!(old_file.files()[0].info.changed, Some(true));
    let second = hold().replace(true).start().unwrap();
    assert_eq!(first.wait(), Ended::Released);
    taken_is_equal(&at, "a", std::slice::from_ref(&path));
    assert_eq!(digest(&held.files()[0]), old);
    assert_eq!(changed(), Some(false));
    let others = dmafile_testkit::names(dir.path());
    assert_eq!(others, ["file", "socket"]);
    release("b", Some(&at), &CancelToken::new()).unwrap_err();
    release("a", Some(&at), &CancelToken::new()).unwrap();
    assert_eq!(second.wait(), Ended::Released);
    assert!(!at.exists());
}

#[test]
fn a_token_ends_the_wait_for_a_silent_holder() {
    let dir = dir();
    let at = dir.path().join("socket");
    let silent = seqpacket();
    rustix::net::bind(&silent, &SocketAddrUnix::new(&at).unwrap()).unwrap();
    rustix::net::listen(&silent, 8).unwrap();
    let token = CancelToken::new();
    token.cancel();
    // Without the token it would be ETIMEDOUT.
    let errors = [
        holds(Some(&at), &token).unwrap_err(),
        release("a", Some(&at), &token).unwrap_err(),
        Held::take("a").socket(&at).cancel(token).run().unwrap_err(),
    ];
    for (error, what) in errors.iter().zip(["list", "release", "take"]) {
        assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
        assert!(
            error.to_string().starts_with(&format!("{what}: ")),
            "{error}"
        );
    }
}

#[test]
fn the_socket_of_a_killed_holder_is_replaced() {
    let dir = dir();
    let path = cold(dir.path(), 10_000);
    let at = dir.path().join("socket");
    let left = seqpacket();
    rustix::net::bind(&left, &SocketAddrUnix::new(&at).unwrap()).unwrap();
    rustix::net::listen(&left, 1).unwrap();
    drop(left);
    let error = Held::take("a").socket(&at).run().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ECONNREFUSED), "{error}");
    let _holder = Hold::of([&path]).name("a").socket(&at).start().unwrap();
    taken_is_equal(&at, "a", &[path]);
    // A file that is not a socket is not replaced.
    let file = dir.path().join("precious");
    fs::write(&file, "x").unwrap();
    let path = cold(dir.path(), 10_001);
    let error = Hold::of([path])
        .name("a")
        .socket(&file)
        .start()
        .unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EEXIST), "{error}");
    assert_eq!(fs::read(&file).unwrap(), b"x");
}

/// A process for the test below: it holds a file, and has a child that does nothing.
#[test]
#[ignore = "started by another test"]
fn forking_holder() {
    let path = |name| PathBuf::from(std::env::var_os(name).unwrap());
    let hold = Hold::of([path("HOLDER_FILE")]).name("a");
    let _holder = hold.socket(path("HOLDER_SOCKET")).start().unwrap();
    // SAFETY: the child makes two system calls, and ends with its parent's stdin.
    unsafe {
        if libc::fork() == 0 {
            libc::read(0, [0u8; 1].as_mut_ptr().cast(), 1);
            libc::_exit(0);
        }
    }
    println!("holds");
    thread::sleep(LONG);
}

#[test]
fn a_child_of_a_killed_holder_does_not_count_as_the_holder() {
    let dir = dir();
    let path = cold(dir.path(), 10_000);
    let at = dir.path().join("socket");
    let mut holder = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "forking_holder", "--nocapture"])
        .env("HOLDER_FILE", &path)
        .env("HOLDER_SOCKET", &at)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let said = BufReader::new(holder.stdout.take().unwrap()).lines();
    assert!(
        said.map_while(Result::ok)
            .any(|line| line.contains("holds"))
    );
    let child_lives = holder.stdin.take();
    taken_is_equal(&at, "a", std::slice::from_ref(&path));
    holder.kill().unwrap();
    // Before and after the parent has waited for it.
    for _ in 0..2 {
        let error = Held::take("a").socket(&at).run().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ECONNREFUSED), "{error}");
        let _ = holder.wait();
    }
    let hold = Hold::of([&path]).name("a").socket(&at).replace(true);
    let _holder = hold.start().unwrap();
    taken_is_equal(&at, "a", &[path]);
    drop(child_lives);
}

#[test]
fn a_folder_that_all_users_can_write_to_is_refused() {
    let dir = dir();
    let path = cold(dir.path(), 10_000);
    let open = dir.path().join("open");
    fs::create_dir(&open).unwrap();
    let at = open.join("socket");
    let holder = Hold::of([&path]).name("a").socket(&at).start().unwrap();
    fs::set_permissions(&open, Permissions::from_mode(0o1777)).unwrap();
    let error = Held::take("a").socket(&at).run().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EPERM), "{error}");
    drop(holder);
    let error = Hold::of([&path]).name("a").socket(&at).start().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EPERM), "{error}");
}

#[test]
fn invalid_requests_are_usage_errors() {
    let dir = dir();
    let path = cold(dir.path(), 10_000);
    let at = dir.path().join("socket");
    let hold = || Hold::of([&path]).name("a").socket(&at);
    let none: [&Path; 0] = [];
    for (what, hold) in [
        ("no file", Hold::of(none).name("a")),
        ("two, no name", Hold::of([&path, &path])),
        ("a bad name", hold().name("a:b")),
        ("private memory", hold().to(Kind::Anon)),
        ("memory that exists", hold().to(Kind::fd(memfd(10_000)))),
        (
            "links to a dma-buf",
            hold().to(Kind::Udmabuf).folder(dir.path().join("links")),
        ),
    ] {
        let error = hold.start().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{what}: {error}");
    }
    let twice = Hold::of([&path, &path])
        .name("a")
        .socket(&at)
        .start()
        .unwrap_err();
    assert_eq!(twice.raw_os_error(), Some(libc::EEXIST), "{twice}");
    // In DMAFILE_NAMES, a comma is between two names.
    let comma = dir.path().join("a,b");
    fs::write(&comma, "x").unwrap();
    let listed = [
        Hold::of([&comma])
            .name("a")
            .socket(&at)
            .start()
            .unwrap_err(),
        Shared::of([&comma]).folder(dir.path()).run().unwrap_err(),
    ];
    for error in listed {
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{error}");
        assert!(error.to_string().contains("contains a comma"), "{error}");
    }
    fs::remove_file(&comma).unwrap();
    let gone = Hold::of([dir.path().join("missing")])
        .name("a")
        .socket(&at)
        .start()
        .unwrap_err();
    assert_eq!(gone.raw_os_error(), Some(libc::ENOENT), "{gone}");
    assert_eq!(dmafile_testkit::names(dir.path()), ["noise-10000"]);
}

#[test]
fn an_idle_holder_ends_when_no_process_has_its_memory() {
    let dir = dir();
    let path = cold(dir.path(), 10_000);
    let at = dir.path().join("socket");
    let idle = Duration::from_millis(50);
    let holder = Hold::of([&path])
        .name("a")
        .socket(&at)
        .idle(Duration::from_secs(3600))
        .start()
        .unwrap();
    drop(holder);
    let holder = Hold::of([&path])
        .name("a")
        .socket(&at)
        .idle(idle)
        .start()
        .unwrap();
    // It may have ended before the take.
    if let Ok(held) = Held::take("a").socket(&at).run() {
        thread::sleep(idle * 4);
        assert!(holder.is_serving(), "it is connected");
        drop(held);
    }
    assert_eq!(holder.wait(), Ended::Idle);
    assert!(!at.exists());
}

#[test]
fn a_take_waits_until_something_is_held() {
    let dir = dir();
    let path = cold(dir.path(), 10_000);
    let at = dir.path().join("socket");
    let taker = {
        let at = at.clone();
        thread::spawn(move || Held::take("a").socket(at).wait(LONG).run())
    };
    thread::sleep(Duration::from_millis(30));
    let _holder = Hold::of([&path]).name("a").socket(&at).start().unwrap();
    let held = taker.join().unwrap().unwrap();
    assert_eq!(digest(&held.files()[0]), file_digest(&path, 0, 10_000));
    let error = Held::take("b")
        .socket(&at)
        .wait(Duration::from_millis(30))
        .run()
        .unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOENT), "{error}");
}

#[test]
fn misbehaving_clients_are_dropped_and_do_not_block_others() {
    let dir = dir();
    let path = cold(dir.path(), 10_000);
    let at = dir.path().join("socket");
    let _holder = Hold::of([&path]).name("a").socket(&at).start().unwrap();
    let served = || taken_is_equal(&at, "a", std::slice::from_ref(&path));
    let take = r#"{"v":1,"op":"take","name":"a"}"#;

    // Silent clients, and one that sends requests but reads no answers.
    let silent: Vec<_> = (0..50).map(|_| connect(&at)).collect();
    let deaf = connect(&at);
    for _ in 0..10 {
        if say(&deaf, take).is_err() {
            break;
        }
    }
    served();

    // An invalid request is refused with a reason, and the connection ends.
    let long = format!(r#"{{"v":1,"op":"take","name":"{}"}}"#, "a".repeat(8000));
    for (text, errno) in [
        ("{", libc::EPROTO),
        ("half a li", libc::EPROTO),
        ("[]", libc::EPROTO),
        ("\u{0}", libc::EPROTO),
        (r#"{"v":1,"op":"steal","name":"a"}"#, libc::EPROTO),
        (r#"{"v":1,"op":"take","name":"a","more":1}"#, libc::EPROTO),
        (r#"{"v":1,"op":"take","name":"a","from":-1}"#, libc::EPROTO),
        (r#"{"v":2,"op":"take","name":"a"}"#, libc::EPROTO),
        (r#"{"v":1,"op":"take"}"#, libc::ENOENT),
        (r#"{"v":1,"op":"take","name":"b"}"#, libc::ENOENT),
        (r#"{"v":1,"op":"take","name":"a","from":1}"#, libc::EINVAL),
        (
            r#"{"v":1,"op":"list","from":18446744073709551615}"#,
            libc::EINVAL,
        ),
        (&long, libc::EMSGSIZE),
        (&"[".repeat(4000), libc::EPROTO),
    ] {
        let peer = connect(&at);
        say(&peer, text).unwrap();
        let answer = hear(&peer);
        assert!(
            answer.contains(&format!(r#""errno":{errno},"#)),
            "{text}: {answer}"
        );
        assert_eq!(hear(&peer), "", "{text}");
        served();
    }

    // With the maximum number of descriptors in a message.
    let peer = connect(&at);
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    let many: Vec<_> = (0..253).map(|_| pipe.as_fd()).collect();
    send_with(&peer, r#"{"v":1,"op":"list"}"#, &many);
    assert!(hear(&peer).contains(r#""total":1"#));
    served();

    // A client with too many requests is refused, even if it reads the answers.
    let flood = connect(&at);
    let begin = Instant::now();
    let mut asked = 0;
    while say(&flood, r#"{"v":1,"op":"list"}"#).is_ok() && hear(&flood).contains(r#""total":1"#) {
        asked += 1;
        assert!(asked < 1000 && begin.elapsed() < LONG, "{asked} requests");
    }
    served();

    // Nor may it go on behind the last file of a list.
    let list = |from| format!(r#"{{"v":1,"op":"list","from":{from}}}"#);
    let flood = connect(&at);
    say(&flood, &list(0)).unwrap();
    let mut answer = hear(&flood);
    let mut asked = 0;
    while answer.contains(r#""total":1"#) {
        asked += 1;
        assert!(asked < 1000, "{asked} requests");
        say(&flood, &list(1)).unwrap();
        answer = hear(&flood);
    }
    assert!(
        answer.contains(&format!(r#""errno":{},"#, libc::E2BIG)),
        "{answer}"
    );
    served();

    // After a take, a client may send no further request.
    let taker = connect(&at);
    say(&taker, take).unwrap();
    assert!(hear(&taker).contains(r#""total":1"#));
    say(&taker, take).unwrap();
    assert_eq!(hear(&taker), "");
    served();

    // The silent clients are told why they are disconnected.
    let late = format!(r#""errno":{},"#, libc::ETIMEDOUT);
    for peer in silent {
        let answer = hear(&peer);
        assert!(answer.contains(&late), "{answer}");
        assert_eq!(hear(&peer), "");
    }
    served();
}

/// An answer about one file of 10,000 bytes, with `from` replaced by `to`.
fn answer(from: &str, to: &str) -> String {
    let good = r#"{"v":1,"name":"a","since":1,"total":1,"takers":0,"files":[{"name":"f","file":"/f",
        "kind":"memfd","pages":"base","bytes":10000,"offset":0,"sealed":true,"identity":{"device":[0,1],
        "inode":1,"size":10000,"mtime_ns":0,"ctime_ns":0},"digest":null,"changed":false,"descriptors":1}]}"#;
    assert!(good.contains(from), "{from}");
    good.replace(from, to)
}

#[test]
fn invalid_answers_of_a_holder_are_refused() {
    let dir = dir();
    let all = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let sealed = |len, seals| {
        let fd = memfd(len);
        rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        fd
    };
    let good = || vec![sealed(10_000, all)];
    let pipe = || vec![rustix::pipe::pipe().unwrap().0];
    let unsealable = || {
        let fd = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 10_000).unwrap();
        vec![fd]
    };
    let file = || vec![OwnedFd::from(fs::File::open("/proc/self/exe").unwrap())];
    type Case<'a> = (&'a str, String, Vec<OwnedFd>);
    let same = || answer("v", "v");
    let cases: Vec<Case<'_>> = vec![
        ("sound", same(), good()),
        ("no descriptor", same(), vec![]),
        ("two descriptors", same(), [good(), good()].concat_owned()),
        ("a pipe", same(), pipe()),
        ("a file", same(), file()),
        ("a memfd without seals", same(), unsealable()),
        (
            "a memfd that shrinks",
            same(),
            vec![sealed(10_000, SealFlags::GROW)],
        ),
        (
            "a memfd that can be written",
            same(),
            vec![sealed(10_000, SealFlags::SHRINK)],
        ),
        ("too short", same(), vec![sealed(9_999, all)]),
        (
            "an offset",
            answer(r#""offset":0"#, r#""offset":1"#),
            good(),
        ),
        (
            "an overflow",
            answer(r#""offset":0"#, r#""offset":18446744073709551615"#),
            good(),
        ),
        ("no bytes", answer("\"bytes\":10000", "\"bytes\":0"), good()),
        (
            "a memfd that claims to be a dma-buf",
            answer("\"kind\":\"memfd\"", "\"kind\":\"udmabuf\""),
            good(),
        ),
        (
            "more files claimed than sent",
            answer("\"total\":1", "\"total\":2"),
            good(),
        ),
        (
            "fewer files claimed than sent",
            answer("\"total\":1", "\"total\":0"),
            good(),
        ),
        (
            "very many files",
            answer("\"total\":1", "\"total\":1000000000"),
            good(),
        ),
        (
            "very many descriptors",
            answer("\"descriptors\":1", "\"descriptors\":1000000"),
            good(),
        ),
        (
            "a path for a name",
            answer("\"name\":\"f\"", "\"name\":\"../f\""),
            good(),
        ),
        (
            "two names in one",
            answer("\"name\":\"f\"", "\"name\":\"f,g\""),
            good(),
        ),
        ("half an answer", same()[..200].to_string(), good()),
        ("nothing", String::new(), vec![]),
        ("too much", "x".repeat(100_000), vec![]),
        ("another version", answer("\"v\":1", "\"v\":9"), good()),
        (
            "an error with an odd number",
            r#"{"v":1,"error":{"errno":-7,"why":"\u001b[2J"}}"#.into(),
            vec![],
        ),
    ];
    for (number, (what, text, fds)) in cases.into_iter().enumerate() {
        let at = dir.path().join(format!("socket-{number}"));
        let listener = seqpacket();
        rustix::net::bind(&listener, &SocketAddrUnix::new(&at).unwrap()).unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        let fake = thread::spawn(move || {
            let peer = rustix::net::accept(&listener).unwrap();
            hear(&peer);
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            send_with(&peer, &text, &fds);
            // A further request gets no answer.
            if what == "more files claimed than sent" {
                hear(&peer);
            }
        });
        let taken = Held::take("a").socket(&at).run();
        fake.join().unwrap();
        match (what, taken) {
            ("sound", taken) => assert_eq!(taken.unwrap().files()[0].buffer.len(), 10_000),
            (_, Ok(_)) => panic!("{what} was taken"),
            (_, Err(error)) => {
                let line = error.to_string();
                assert!(
                    line.starts_with("cannot take: ") && !line.contains('\u{1b}'),
                    "{what}: {line}"
                );
            }
        }
    }
}

/// `concat` for values that cannot be cloned.
trait ConcatOwned {
    fn concat_owned(self) -> Vec<OwnedFd>;
}

impl<const N: usize> ConcatOwned for [Vec<OwnedFd>; N] {
    fn concat_owned(self) -> Vec<OwnedFd> {
        self.into_iter().flatten().collect()
    }
}

#[test]
fn a_folder_of_links_has_the_bytes_of_the_model() {
    let dir = dir();
    let model = dir.path().join("model");
    fs::create_dir(&model).unwrap();
    let shards: Vec<_> = (0..2)
        .map(|no| dmafile_testkit::models::tensors(&format!("l{no}"), 3, 9000))
        .collect();
    dmafile_testkit::models::sharded(&model, &shards);
    for name in [
        "config.json",
        "._config.json",
        "._model.safetensors",
        ".gitattributes",
    ] {
        fs::write(model.join(name), "{}").unwrap();
    }
    let links = dir.path().join("links");
    let at = dir.path().join("socket");
    let hold = || Hold::of([&model]).name("m").socket(&at).folder(&links);
    let holder = hold().start().unwrap();
    assert_eq!(
        dmafile_testkit::names(&links),
        [
            ".dmafile-hold",
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
        ]
    );
    let visible = |name: &String| !name.starts_with('.');
    for name in dmafile_testkit::names(&model).into_iter().filter(visible) {
        let (link, original) = (links.join(&name), model.join(&name));
        assert_eq!(
            fs::read(&link).unwrap(),
            fs::read(&original).unwrap(),
            "{name}"
        );
        let held = fs::canonicalize(&link).is_err();
        let weights = name.ends_with(".safetensors");
        assert_eq!(
            held || fs::canonicalize(&link).unwrap() != original,
            weights,
            "{name}"
        );
    }
    drop(holder);
    assert!(!links.exists());
    // An empty folder is used, any other is not, also with a mark that does not list what is in it.
    fs::create_dir(&links).unwrap();
    drop(hold().start().unwrap());
    fs::create_dir(&links).unwrap();
    for left in [vec!["mine"], vec![".dmafile-hold", "mine"]] {
        fs::write(links.join(left[0]), "").unwrap();
        let error = hold().start().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EEXIST), "{error}");
        assert_eq!(dmafile_testkit::names(&links), left);
        assert!(!at.exists());
    }
}
