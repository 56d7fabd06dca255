//! `dmafile hold --notify` as a service: the test plays the service manager, as sd_notify(3) and
//! sd_listen_fds(3) describe it.

mod common;

use common::{Dir, MIB, Running, cached, end, evict, memfd, sha256, skip, start};
use rustix::fs::SealFlags;
use rustix::io::FdFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix, SocketType,
};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::{ErrorKind, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

const LEN: u64 = 8 * MIB + 77;
const SOCKET: &str = "run/socket";

/// A service manager with one service.
struct Manager {
    dir: Dir,
    socket: UnixDatagram,
    /// The descriptors that it keeps, by name (FileDescriptorStoreMax=).
    store: Vec<(String, OwnedFd)>,
    /// The limit on the service's address space.
    room: Option<u64>,
}

/// The service after a start.
struct Service {
    running: Running,
    /// The line that it printed when it was ready.
    line: Value,
}

impl Manager {
    fn new() -> Self {
        let dir = Dir::new();
        fs::create_dir(dir.path("run")).unwrap();
        fs::set_permissions(dir.path("run"), Permissions::from_mode(0o755)).unwrap();
        let socket = UnixDatagram::bind(dir.path("notify")).unwrap();
        socket.set_nonblocking(true).unwrap();
        Self {
            dir,
            socket,
            store: Vec::new(),
            room: None,
        }
    }

    /// Starts `dmafile hold ARGS` with the stored descriptors and, if given, a socket; returns when it has
    /// sent READY=1.
    fn start(&mut self, args: &str, listener: Option<OwnedFd>) -> Service {
        let running = self.begin(args, listener);
        self.until_ready(running)
    }

    /// Starts it.
    fn begin(&self, args: &str, listener: Option<OwnedFd>) -> Running {
        let mut command = Command::new("sh");
        command
            .args(["-c", r#"export LISTEN_PID=$$; exec "$@""#, "sh"])
            .arg(env!("CARGO_BIN_EXE_dmafile"))
            .args(format!("hold --notify {args}").split(' '))
            .current_dir(self.dir.path("."))
            .stdin(Stdio::null())
            .env("NOTIFY_SOCKET", self.dir.path("notify"));
        // systemd keeps the descriptors that it passes.
        let stored = self.store.iter().map(|(name, fd)| (&name[..], fd));
        let listener = listener.as_ref().map(|fd| ("hold.socket", fd));
        let given: Vec<_> = listener.into_iter().chain(stored).collect();
        let names: Vec<_> = given.iter().map(|(name, _)| *name).collect();
        command.env("LISTEN_FDS", given.len().to_string());
        command.env("LISTEN_FDNAMES", names.join(":"));
        let mut fds: Vec<_> = given.iter().map(|(_, fd)| fd.as_raw_fd()).collect();
        let place = move || {
            // First move them away, so that none is overwritten.
            for fd in &mut fds {
                // SAFETY: copies a descriptor that this process has.
                *fd = unsafe { libc::fcntl(*fd, libc::F_DUPFD_CLOEXEC, 500) };
                common::done((*fd).min(0))?;
            }
            for (fd, number) in fds.iter().zip(3..) {
                // SAFETY: another descriptor with this number would close at the exec that follows.
                common::done(unsafe { libc::dup2(*fd, number) }.min(0))?;
            }
            Ok(())
        };
        // SAFETY: system calls only, between fork and exec.
        unsafe { command.pre_exec(place) };
        if let Some(room) = self.room {
            common::limit(&mut command, libc::RLIMIT_AS, room);
        }
        start(&mut command)
    }

    /// Starts `dmafile hold ARGS`, which must fail; returns its message.
    fn fails(&mut self, args: &str) -> String {
        let mut running = self.begin(args, None);
        running.until(|_| {
            self.obey_all();
            false
        });
        self.obey_all();
        running.end().line(1).to_string()
    }

    /// Returns when it has sent READY=1.
    fn until_ready(&mut self, mut running: Running) -> Service {
        let mut ready = false;
        running.until(|_| {
            while let Some((said, fds)) = self.hear() {
                assert!(!ready, "{said:?} after READY");
                ready |= self.obey(said, fds);
            }
            ready
        });
        running.until_written("\n");
        let [stdout, stderr] = running.written();
        let line = serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{stdout}{stderr}"));
        Service { running, line }
    }

    /// The next message, if there is one: variables and descriptors.
    fn hear(&self) -> Option<(BTreeMap<String, String>, Vec<OwnedFd>)> {
        let mut bytes = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let into = &mut [IoSliceMut::new(&mut bytes)];
        let got = match rustix::net::recvmsg(&self.socket, into, &mut control, RecvFlags::empty()) {
            Ok(message) => message.bytes,
            Err(errno) if errno.kind() == ErrorKind::WouldBlock => return None,
            Err(errno) => panic!("{errno}"),
        };
        let mut fds = Vec::new();
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = part {
                fds.extend(received);
            }
        }
        let text = std::str::from_utf8(&bytes[..got]).unwrap();
        let lines = text.lines().map(|line| line.split_once('=').unwrap());
        let said = lines.map(|(name, value)| (name.to_string(), value.to_string()));
        Some((said.collect(), fds))
    }

    /// Does what a message asks for; returns whether the service is ready.
    fn obey(&mut self, said: BTreeMap<String, String>, fds: Vec<OwnedFd>) -> bool {
        let get = |name: &str| said.get(name).map(String::as_str);
        if let Some(name) = get("FDNAME") {
            // fdname_is_valid(): otherwise, systemd replaces the name with "stored".
            let valid = |byte: u8| (b' '..127).contains(&byte) && byte != b':';
            assert!(name.len() <= 255 && name.bytes().all(valid), "{name}");
        }
        if get("BARRIER") == Some("1") {
            // That the descriptor is closed says that all before it is done.
            assert_eq!((said.len(), fds.len()), (1, 1), "{said:?}");
            return false;
        }
        match (get("FDSTORE"), get("FDSTOREREMOVE"), get("READY")) {
            (Some("1"), None, None) => {
                // Without FDPOLL=0, systemd drops a descriptor when its other end is closed.
                assert_eq!((get("FDPOLL"), fds.len()), (Some("0"), 1), "{said:?}");
                let name = get("FDNAME").unwrap();
                self.store
                    .extend(fds.into_iter().map(|fd| (name.to_string(), fd)));
                false
            }
            (None, Some("1"), None) => {
                self.store
                    .retain(|(name, _)| Some(&name[..]) != get("FDNAME"));
                false
            }
            (None, None, Some("1")) => true,
            _ => panic!("{said:?}"),
        }
    }

    /// Does what all pending messages ask for.
    fn obey_all(&mut self) {
        while let Some((said, fds)) = self.hear() {
            self.obey(said, fds);
        }
    }

    fn names(&self) -> Vec<&str> {
        self.store.iter().map(|(name, _)| &name[..]).collect()
    }

    /// The stored descriptor of this name.
    fn stored(&mut self, name: &str) -> &mut OwnedFd {
        let found = self.store.iter_mut().find(|(stored, _)| stored == name);
        &mut found.unwrap().1
    }

    /// The digests and inodes of the taken files, computed by another program.
    fn taken(&self) -> Vec<(String, u64)> {
        let script = "for fd in $(echo $DMAFILE_FD | tr , ' '); do \
                      sha256sum </proc/self/fd/$fd; stat -Lc %i /proc/self/fd/$fd; done";
        let mut take = self.dir.dmafile(&format!("take m --socket {SOCKET} --"));
        let text = end(take.args(["bash", "-c", script])).ok().stdout;
        let lines: Vec<_> = text.lines().collect();
        let pair = |two: &[&str]| (two[0][..64].to_string(), two[1].parse().unwrap());
        lines.chunks(2).map(pair).collect()
    }
}

impl Service {
    fn is_stored(&self) -> bool {
        self.line["stored"].as_bool().unwrap()
    }

    /// Bytes that it has read, from any descriptor.
    fn read(&self) -> u64 {
        let io = fs::read_to_string(format!("/proc/{}/io", self.running.pid())).unwrap();
        let read = io.lines().find_map(|line| line.strip_prefix("rchar: "));
        read.unwrap().parse().unwrap()
    }

    fn kill(self) {
        self.running.signal(libc::SIGKILL);
        self.running.end();
    }
}

fn forget(path: &Path) {
    evict(&File::open(path).unwrap());
}

#[test]
fn a_restarted_holder_serves_stored_memory_without_reading_files() {
    let mut manager = Manager::new();
    let files = ["a", "b"].map(|name| manager.dir.file(name, LEN + u64::from(name.as_bytes()[0])));
    let sums = files.each_ref().map(|file| sha256(file, 0, 2 * LEN));
    // Reads of io_uring are not counted in /proc/PID/io.
    let args = format!("a b --name m --socket {SOCKET} --verify blake3 --method threads");
    files.iter().for_each(|file| forget(file));
    let service = manager.start(&args, None);
    assert!(!service.is_stored());
    assert!(service.read() > 2 * LEN, "{}", service.read());
    assert_eq!(
        manager.names(),
        ["dmafile-m-0", "dmafile-m-1", "dmafile-m-table"]
    );
    let first = manager.taken();
    assert_eq!(
        first.iter().map(|one| &one.0).collect::<Vec<_>>(),
        [&sums[0], &sums[1]]
    );
    let digests = |service: &Service| service.line["files"].clone();
    let described = digests(&service);
    service.kill();

    // systemd does not keep the order of the descriptors.
    for _ in 0..2 {
        manager.store.rotate_left(1);
        files.iter().for_each(|file| forget(file));
        let service = manager.start(&args, None);
        assert!(service.is_stored());
        assert_eq!(manager.taken(), first);
        assert_eq!(digests(&service), described);
        // Far less than one file, and nothing went through the page cache.
        assert!(service.read() < MIB, "{} bytes", service.read());
        for file in &files {
            assert!(
                cached(file).is_none_or(|bytes| bytes == 0),
                "{}",
                file.display()
            );
        }
        assert_eq!(manager.names().len(), 3);
        service.kill();
    }

    // A released hold is removed from the store.
    let service = manager.start(&args, None);
    assert!(service.is_stored());
    manager
        .dir
        .run(&format!("release m --socket {SOCKET}"))
        .ok();
    service.running.end().ok();
    manager.obey_all();
    assert!(manager.store.is_empty());
}

#[test]
fn more_files_than_fit_into_the_notify_queue_are_stored() {
    let mut manager = Manager::new();
    fs::create_dir(manager.dir.path("m")).unwrap();
    // The kernel queues 10 datagrams (net.unix.max_dgram_qlen).
    let files: Vec<_> = (0..40).map(|number| format!("m/{number}")).collect();
    for name in &files {
        manager.dir.file(name, 5000);
    }
    let args = format!("{} --name m --socket {SOCKET}", files.join(" "));
    for stored in [false, true] {
        let service = manager.start(&args, None);
        assert_eq!((service.is_stored(), manager.store.len()), (stored, 41));
        let taken = manager.taken();
        let sums = taken.iter().map(|(sum, _)| sum.clone());
        let want = files
            .iter()
            .map(|name| sha256(&manager.dir.path(name), 0, 5000));
        assert!(sums.eq(want));
        service.kill();
    }
}

#[test]
fn stored_memory_that_does_not_match_the_file_is_loaded_again() {
    let mut manager = Manager::new();
    let file = manager.dir.file("a", LEN);
    manager.dir.file("b", LEN);
    let args = format!("a b --name m --socket {SOCKET}");
    manager.start(&args, None).kill();
    let sealed = |bytes, seals| {
        let fd = OwnedFd::from(memfd(bytes));
        rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        fd
    };
    let all = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    type Damage<'a> = (&'a str, &'a dyn Fn(&mut Manager));
    let damages: [Damage<'_>; 9] = [
        ("another file", &|manager| {
            let changed = manager.dir.path("changed");
            fs::write(&changed, common::content(1, LEN as usize)).unwrap();
            fs::rename(changed, manager.dir.path("a")).unwrap();
        }),
        ("another content", &|manager| {
            fs::write(manager.dir.path("a"), common::content(2, LEN as usize)).unwrap();
        }),
        ("a pipe", &|manager| {
            *manager.stored("dmafile-m-0") = rustix::pipe::pipe().unwrap().0;
        }),
        ("a short memfd", &|manager| {
            *manager.stored("dmafile-m-1") = sealed(LEN - 1, all);
        }),
        ("a memfd that can be written", &|manager| {
            *manager.stored("dmafile-m-1") = sealed(LEN, SealFlags::SHRINK | SealFlags::GROW);
        }),
        ("one too few", &|manager| {
            manager.store.retain(|(name, _)| name != "dmafile-m-1");
        }),
        ("one too many", &|manager| {
            manager
                .store
                .push(("dmafile-m-2".to_string(), sealed(LEN, all)));
        }),
        ("an odd table", &|manager| {
            let table = memfd(0);
            std::io::Write::write_all(&mut &table, b"{\"v\":1}").unwrap();
            rustix::fs::fcntl_add_seals(&table, all).unwrap();
            *manager.stored("dmafile-m-table") = table.into();
        }),
        ("a table that could change", &|manager| {
            let old = format!(
                "/proc/self/fd/{}",
                manager.stored("dmafile-m-table").as_raw_fd()
            );
            let table = memfd(0);
            std::io::Write::write_all(&mut &table, &fs::read(old).unwrap()).unwrap();
            *manager.stored("dmafile-m-table") = table.into();
        }),
    ];
    for (what, damage) in damages {
        damage(&mut manager);
        let service = manager.start(&args, None);
        assert!(!service.is_stored(), "{what}");
        let want = ["a", "b"].map(|name| sha256(&manager.dir.path(name), 0, LEN));
        let got: Vec<_> = manager.taken().into_iter().map(|(sum, _)| sum).collect();
        assert_eq!(got, want, "{what}");
        assert_eq!(
            manager.names(),
            ["dmafile-m-0", "dmafile-m-1", "dmafile-m-table"],
            "{what}"
        );
        service.kill();
    }
    // With other options, or another list of files, the stored memory is not used.
    for (options, stored) in [
        (&args[..], true),
        (&format!("{args} --verify sha256"), false),
        (&format!("{args} --verify sha256"), true),
        (&format!("{args} --writable"), false),
        (&format!("a --name m --socket {SOCKET}"), false),
    ] {
        let service = manager.start(options, None);
        assert_eq!(service.is_stored(), stored, "{options}");
        service.kill();
    }
    fs::remove_file(file).unwrap();
    let mut gone = manager.dir.dmafile(&format!("hold {args}"));
    let line = manager.dir.refusal(&mut gone, 1);
    assert!(line.contains("(ENOENT)"), "{line}");
}

/// A copy of a stored memfd without its seals, with a change. The kernel hands memory over to another one so.
fn without_seals(manager: &mut Manager, name: &str, change: &dyn Fn(&mut Vec<u8>)) {
    let fd = manager.stored(name);
    let mut bytes = fs::read(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap();
    change(&mut bytes);
    let copy = memfd(0);
    std::io::Write::write_all(&mut &copy, &bytes).unwrap();
    *fd = copy.into();
}

#[test]
fn memory_of_another_boot_is_compared_with_its_digest_and_sealed_again() {
    let mut manager = Manager::new();
    let file = manager.dir.file("a", LEN);
    let want = [sha256(&file, 0, LEN)];
    let args = format!("a --name m --socket {SOCKET} --method threads");
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let boot = boot.trim();
    let of_another_boot = |table: &mut Vec<u8>| {
        let text = String::from_utf8(std::mem::take(table)).unwrap();
        assert!(text.contains(boot));
        *table = text.replace(boot, &"0".repeat(boot.len())).into_bytes();
    };
    for (verify, flips, stored) in [
        (" --verify xxh3", false, true),
        (" --verify xxh3", true, false),
        // Nobody can tell whether it is intact.
        ("", false, false),
    ] {
        let args = format!("{args}{verify}");
        let service = manager.start(&args, None);
        service.kill();
        without_seals(&mut manager, "dmafile-m-table", &of_another_boot);
        without_seals(&mut manager, "dmafile-m-0", &|bytes| {
            bytes[12_345] ^= u8::from(flips);
        });
        forget(&file);
        let service = manager.start(&args, None);
        assert_eq!(service.is_stored(), stored, "{args}, {flips}");
        assert!(!stored || service.read() < MIB);
        let got: Vec<_> = manager.taken().into_iter().map(|(sum, _)| sum).collect();
        assert_eq!(got, want, "{args}, {flips}");
        // What was stored is kept for the next start, and its seals are there.
        let seals = rustix::fs::fcntl_get_seals(manager.stored("dmafile-m-0")).unwrap();
        assert!(seals.contains(SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW));
        service.kill();
        // Now it is of this boot.
        forget(&file);
        let service = manager.start(&args, None);
        assert!(service.is_stored() && manager.taken()[0].0 == want[0]);
        assert_eq!(manager.store.len(), 2);
        let table = manager.stored("dmafile-m-table").as_raw_fd();
        let table = fs::read_to_string(format!("/proc/self/fd/{table}")).unwrap();
        assert!(table.contains(boot), "{table}");
        service.kill();
        manager.store.clear();
    }
}

#[test]
fn an_index_that_is_replaced_during_the_load_is_not_stored_with_the_old_files() {
    let mut manager = Manager::new();
    let dir = manager.dir.path("m");
    fs::create_dir(&dir).unwrap();
    let indexes = ["old", "new"].map(|name| {
        let (file, tensors) = (
            format!("{name}.safetensors"),
            dmafile_testkit::models::tensors(name, 4, 8 << 20),
        );
        dmafile_testkit::models::safetensors(&dir.join(&file), &tensors);
        let places = tensors
            .iter()
            .map(|tensor| (tensor.0.clone(), file.clone().into()));
        let map: serde_json::Map<String, Value> = places.collect();
        serde_json::json!({"weight_map": map}).to_string()
    });
    let prepared = manager.dir.path("index");
    let put = |index: &str| {
        fs::write(&prepared, index).unwrap();
        fs::rename(&prepared, dir.join("model.safetensors.index.json")).unwrap();
    };
    let slowly = "--io buffered --method threads --block 4K --queue-depth 1 --pages base";
    let args = format!("m --name m --socket {SOCKET} {slowly}");
    let replaced_during_load = |manager: &mut Manager| {
        put(&indexes[0]);
        let mut running = manager.begin(&args, None);
        // Before that, it only reads its own program file.
        running.until(|running| {
            let io = fs::read_to_string(format!("/proc/{}/io", running.pid())).unwrap_or_default();
            let read = io.lines().find_map(|line| line.strip_prefix("rchar: "));
            read.is_some_and(|read| read.parse::<u64>().unwrap() > MIB)
        });
        put(&indexes[1]);
        let service = manager.until_ready(running);
        let stored = manager.names().len();
        let held = service.line["files"][0]["name"].clone();
        service.kill();
        (held, stored)
    };
    // It may have loaded all of it, and stored it, before the index was replaced.
    let mut tries = (0..100).map(|_| replaced_during_load(&mut manager));
    let (held, _) = tries.find(|(_, stored)| *stored == 0).unwrap();
    drop(tries);
    assert_eq!(held, "old.safetensors");
    let service = manager.start(&args, None);
    assert!(!service.is_stored());
    assert_eq!(service.line["files"][0]["name"], "new.safetensors");
    assert_eq!(manager.names(), ["dmafile-m-0", "dmafile-m-table"]);
    service.kill();
}

#[test]
fn stored_memory_is_kept_until_the_new_files_are_loaded() {
    let mut manager = Manager::new();
    manager.dir.file("a", LEN);
    manager.dir.file("b", LEN);
    let args = format!("a b --name m --socket {SOCKET}");
    manager.start(&args, None).kill();
    let stored = ["dmafile-m-0", "dmafile-m-1", "dmafile-m-table"];
    assert_eq!(manager.names(), stored);

    // A model of which only a part has been copied yet.
    fs::rename(manager.dir.path("b"), manager.dir.path("away")).unwrap();
    fs::create_dir(manager.dir.path("b")).unwrap();
    assert!(manager.fails(&args).contains("b"));
    assert_eq!(manager.names(), stored);
    fs::remove_dir(manager.dir.path("b")).unwrap();
    manager.dir.file("b", LEN - 1);
    let service = manager.start(&args, None);
    assert!(!service.is_stored());
    assert_eq!(manager.names(), stored);
    service.kill();

    // If memory is too small for both, the old files are given up, and the load is tried again.
    let large = File::options().write(true).open(manager.dir.path("b"));
    large.unwrap().set_len(8 << 40).unwrap();
    manager.room = Some(4 << 30);
    let line = manager.fails(&args);
    assert!(line.contains("(ENOMEM)"), "{line}");
    assert!(manager.names().is_empty());
}

#[test]
fn a_socket_of_the_manager_is_served_and_not_removed() {
    let mut manager = Manager::new();
    let file = manager.dir.file("a", LEN);
    let want = sha256(&file, 0, LEN);
    let listener = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    rustix::io::fcntl_setfd(&listener, FdFlags::CLOEXEC).unwrap();
    let path = manager.dir.path(SOCKET);
    rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&listener, 10).unwrap();
    let inode = fs::metadata(&path).unwrap().ino();
    for stored in [false, true] {
        // It waits before the holder is started.
        let waiting = format!("take m --socket {SOCKET} --wait 60s -- sha256sum {{}}");
        let waiting = start(&mut manager.dir.dmafile(&waiting));
        let dup = listener.as_fd().try_clone_to_owned().unwrap();
        let service = manager.start("a --name m", Some(dup));
        assert_eq!(service.is_stored(), stored);
        assert_eq!(service.line["socket"], path.to_str().unwrap());
        assert!(waiting.end().ok().stdout.starts_with(&want));
        service.running.signal(libc::SIGTERM);
        service.running.end().ok();
        manager.obey_all();
        assert_eq!(fs::metadata(&path).unwrap().ino(), inode);
    }
    assert_eq!(manager.names(), ["dmafile-m-0", "dmafile-m-table"]);
}

#[test]
fn systemd_socket_activate_starts_a_holder() {
    if Command::new("systemd-socket-activate")
        .arg("--version")
        .output()
        .is_err()
    {
        return skip("systemd-socket-activate is missing (Debian: systemd)");
    }
    let manager = Manager::new();
    let want = sha256(&manager.dir.file("m", LEN), 0, LEN);
    let mut activate = Command::new("systemd-socket-activate");
    activate
        .arg("--seqpacket")
        .arg("--listen")
        .arg(manager.dir.path(SOCKET));
    activate
        .arg(env!("CARGO_BIN_EXE_dmafile"))
        .args(["hold", "m"]);
    let mut running = start(
        activate
            .current_dir(manager.dir.path("."))
            .stdin(Stdio::null()),
    );
    running.until_written("Listening on");
    // The first connection starts the holder; the others use it.
    for _ in 0..3 {
        let mut take = manager
            .dir
            .dmafile(&format!("take m --socket {SOCKET} --wait 60s --"));
        let ended = end(take.args(["sha256sum", "{}"])).ok();
        assert!(ended.stdout.starts_with(&want), "{ended:?}");
    }
    manager
        .dir
        .run(&format!("release m --socket {SOCKET}"))
        .ok();
    running.end().ok();
}

#[test]
fn a_wrong_inherited_descriptor_is_refused() {
    let manager = Manager::new();
    manager.dir.file("a", LEN);
    let script =
        r#"LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=x exec "$0" hold a --socket "$1" 3</dev/null"#;
    let mut hold = Command::new("sh");
    hold.args(["-c", script, env!("CARGO_BIN_EXE_dmafile"), SOCKET]);
    let line = manager
        .dir
        .refusal(hold.current_dir(manager.dir.path(".")), 1);
    assert!(
        line.contains("cannot use an inherited descriptor: LISTEN_FDS, x"),
        "{line}"
    );
    assert!(
        line.ends_with("(EPROTOTYPE); use ListenSequentialPacket= in its unit"),
        "{line}"
    );
    // Descriptors for another process (LISTEN_PID) are ignored.
    let script = script.replace("$$", "1");
    let mut hold = Command::new("sh");
    hold.args(["-c", &script, env!("CARGO_BIN_EXE_dmafile"), SOCKET]);
    let mut running = start(hold.current_dir(manager.dir.path(".")).stdin(Stdio::null()));
    running.until_written("\n");
    assert!(running.written()[0].contains("\"stored\":false"));
}
