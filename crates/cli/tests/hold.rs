//! `dmafile hold`, `take`, `holds` and `release`: takers get the bytes of the file, whatever happens to its holder.

mod common;

use common::{Dir, MIB, NOBODY, Running, caught, done, end, is_root, own_mounts, own_user};
use common::{reads_directly, run_as, sha256, skip, start};
use rustix::net::sockopt::Timeout;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType};
use serde_json::Value;
use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const LEN: u64 = 3 * MIB + 77;
const SOCKET: &str = "run/socket";

/// A folder with a subfolder for sockets; only their owner can write to them.
fn new_dir() -> Dir {
    let dir = Dir::new();
    fs::create_dir(dir.path("run")).unwrap();
    for folder in [".", "run"] {
        fs::set_permissions(dir.path(folder), Permissions::from_mode(0o755)).unwrap();
    }
    dir
}

/// A holder that is ready, and the line that it printed.
struct Holder(Running, Value);

impl Holder {
    fn start(command: &mut Command) -> Self {
        let mut running = start(command);
        running.until_written("\n");
        let [stdout, stderr] = running.written();
        let line = serde_json::from_str(&stdout);
        Self(running, line.unwrap_or_else(|_| panic!("{stdout}{stderr}")))
    }

    /// Waits until it ends with status 0, having printed one line in all.
    fn ends(self) {
        let ended = self.0.end().ok();
        assert_eq!(ended.stdout.lines().count(), 1, "{ended:?}");
        assert_eq!(ended.stderr, "");
    }
}

fn hold(dir: &Dir, args: &str) -> Holder {
    Holder::start(&mut dir.dmafile(&format!("hold --socket {SOCKET} {args}")))
}

/// `dmafile take NAME -- COMMAND`
fn take(dir: &Dir, name: &str, command: &[&str]) -> Command {
    let mut take = dir.dmafile(&format!("take {name} --socket {SOCKET} --"));
    take.args(command);
    take
}

/// SHA-256 of the only file of a hold, computed by another program.
fn taken(dir: &Dir, name: &str) -> String {
    let ended = end(&mut take(dir, name, &["sha256sum", "{}"])).ok();
    ended.stdout.split(' ').next().unwrap().to_string()
}

/// A taker that has the file, and computes its checksum when [`Waiting::sum`] is called.
struct Waiting(Running, PathBuf);

impl Waiting {
    fn start(dir: &Dir, name: &str, number: usize) -> Self {
        let go = format!("go-{number}");
        let script =
            format!("echo ready; until [ -e {go} ]; do sleep 0.01; done; sha256sum <$DMAFILE_PATH");
        let mut running = start(&mut take(dir, name, &["sh", "-c", &script]));
        running.until_written("ready\n");
        Self(running, dir.path(&go))
    }

    fn sum(self) -> String {
        File::create(&self.1).unwrap();
        let ended = self.0.end().ok();
        let sum = ended.stdout.strip_prefix("ready\n").unwrap();
        sum.split(' ').next().unwrap().to_string()
    }
}

fn holds(dir: &Dir) -> Value {
    dir.run(&format!("holds --json --socket {SOCKET}"))
        .ok()
        .json()[0]
        .take()
}

#[test]
fn a_file_is_held_taken_and_released() {
    let dir = new_dir();
    let want = sha256(&dir.file("model.gguf", LEN), 0, LEN);
    let holder = hold(&dir, "model.gguf --verify sha256");
    let line = &holder.1;
    assert_eq!(line["name"], "model");
    assert_eq!(line["socket"], SOCKET);
    assert_eq!(line["pid"], holder.0.pid());
    assert_eq!(line["bytes"], LEN);
    assert_eq!(
        (&line["sealed"], &line["stored"]),
        (&true.into(), &false.into())
    );
    assert_eq!(line["files"][0]["digest"]["digest"], want);
    let socket = fs::metadata(dir.path(SOCKET)).unwrap();
    assert!(socket.file_type().is_socket());
    assert_eq!(socket.permissions().mode() & 0o777, 0o600);

    assert_eq!(taken(&dir, "model"), want);
    let script = r#"
        [ "$DMAFILE_NAMES" = model.gguf ] || exit 3
        tail -c +$((DMAFILE_OFFSET + 1)) /proc/self/fd/$DMAFILE_FD | head -c $DMAFILE_BYTES | sha256sum
        sha256sum <$DMAFILE_PATH
        printf x 2>&- >>$DMAFILE_PATH || sha256sum <$DMAFILE_PATH"#;
    let ended = end(&mut take(&dir, "model", &["sh", "-c", script])).ok();
    assert_eq!(ended.stdout, format!("{want}  -\n").repeat(3));
    assert_eq!(
        end(&mut take(&dir, "model", &["sh", "-c", "exit 7"]))
            .status
            .code(),
        Some(7)
    );

    let text = dir
        .run(&format!("take model --socket {SOCKET}"))
        .ok()
        .stdout;
    assert!(text.contains("model.gguf  3.00 MiB  memfd"), "{text}");
    let json = dir
        .run(&format!("take model --socket {SOCKET} --json"))
        .ok()
        .json();
    assert_eq!(json["holder"]["pid"], holder.0.pid());
    assert_eq!(json["files"][0]["bytes"], LEN);

    let waiting = Waiting::start(&dir, "model", 0);
    let held = holds(&dir);
    assert_eq!(
        (&held["name"], &held["bytes"]),
        (&"model".into(), &LEN.into())
    );
    assert_eq!(held["takers"], 1);
    assert_eq!(held["some_takers"][0]["pid"], waiting.0.pid());
    let text = dir.run(&format!("holds --socket {SOCKET}")).ok().stdout;
    assert!(text.starts_with("NAME ") && text.contains(&format!("1 ({}/", waiting.0.pid())));
    dir.run(&format!("release model --socket {SOCKET}")).ok();
    holder.ends();
    assert_eq!(waiting.sum(), want);
    assert!(fs::read_dir(dir.path("run")).unwrap().next().is_none());
    for command in ["take", "release"] {
        let line = dir.refusal(
            &mut dir.dmafile(&format!("{command} model --socket {SOCKET}")),
            1,
        );
        assert!(
            line.ends_with("nothing is held there (ENOENT); start dmafile hold, or wait for it"),
            "{line}"
        );
    }
}

#[test]
fn several_files_are_taken_as_a_folder() {
    let dir = new_dir();
    let sums = ["a", "b"].map(|name| {
        let bytes = LEN + u64::from(name.as_bytes()[0]);
        sha256(&dir.file(name, bytes), 0, bytes)
    });
    let holder = hold(&dir, "a b --name two");
    let script = "cd {} && sha256sum a b; echo $DMAFILE_NAMES";
    let ended = end(&mut take(&dir, "two", &["sh", "-c", script])).ok();
    assert_eq!(
        ended.stdout,
        format!("{}  a\n{}  b\na,b\n", sums[0], sums[1])
    );
    drop(holder);

    // A model is held with the other files in its folder.
    let model = dir.path("model");
    fs::create_dir(&model).unwrap();
    dmafile_testkit::models::sharded(
        &model,
        &[
            dmafile_testkit::models::tensors("x", 3, 9000),
            dmafile_testkit::models::tensors("y", 2, 7000),
        ],
    );
    fs::write(model.join("config.json"), "{}").unwrap();
    let holder = hold(&dir, "model --folder links");
    assert_eq!(holder.1["name"], "model");
    let sums = |command: &mut Command| end(command).ok().stdout;
    let there = |folder| {
        let mut sh = Command::new("sh");
        sh.args(["-c", "sha256sum *"]).current_dir(dir.path(folder));
        sh
    };
    let want = sums(&mut there("model"));
    assert_eq!(want.lines().count(), 4, "{want}");
    assert_eq!(sums(&mut there("links")), want);
    // Hidden files are none of the model's.
    fs::write(model.join("._config.json"), "").unwrap();
    let script = "cd {} && sha256sum $(ls -A)";
    assert_eq!(sums(&mut take(&dir, "model", &["sh", "-c", script])), want);
    holder.0.signal(libc::SIGTERM);
    holder.ends();
    assert!(!dir.path("links").exists());
}

#[test]
fn names_of_files_are_bytes() {
    let dir = new_dir();
    let names = [b"\xe9", b"\xff"].map(|name| OsStr::from_bytes(name));
    for (name, byte) in names.iter().zip(["a", "b"]) {
        fs::write(dir.path("").join(name), byte).unwrap();
    }
    let mut command = dir.dmafile(&format!("hold --socket {SOCKET} --name two --folder links"));
    let holder = Holder::start(command.args(names));
    // Text shows them as well as it can.
    assert_eq!(holder.1["files"][0]["name"], "\u{fffd}");
    let script =
        r#"cat {}/$(printf '\351') {}/$(printf '\377'); printf %s "=$DMAFILE_NAMES" | od -An -c"#;
    let ended = end(&mut take(&dir, "two", &["sh", "-c", script])).ok();
    assert_eq!(ended.stdout, "ab   = 351   , 377\n");
    for (name, byte) in names.iter().zip(["a", "b"]) {
        let linked = fs::read_to_string(dir.path("links").join(name)).unwrap();
        assert_eq!(linked, byte);
    }
    drop(holder);
    // Except those that would make two names of one in the list.
    for name in ["a,b", "a\nb"] {
        fs::write(dir.path(name), name).unwrap();
        let mut command = dir.dmafile(&format!("hold --socket {SOCKET} --name list"));
        let line = dir.refusal(command.arg(name), 1);
        assert!(line.starts_with("cannot hold: "), "{line}");
    }
}

#[test]
fn a_signal_ends_a_holder_and_removes_its_socket() {
    let dir = new_dir();
    let want = sha256(&dir.file("file", LEN), 0, LEN);
    for (number, signal) in [libc::SIGTERM, libc::SIGINT].into_iter().enumerate() {
        let holder = hold(&dir, "file --folder links");
        let waiting = Waiting::start(&dir, "file", number);
        holder.0.signal(signal);
        holder.ends();
        assert!(!dir.path(SOCKET).exists() && !dir.path("links").exists());
        assert_eq!(waiting.sum(), want);
    }
}

#[test]
fn a_signal_ends_a_holder_during_its_load() {
    let dir = new_dir();
    let file = dir.file("file", 256 * MIB);
    if !reads_directly(&dir) {
        return;
    }
    let slowly = "--io direct --method threads --block 4K --queue-depth 1 --pages base";
    let interrupted = || {
        let mut hold = dir.dmafile(&format!(
            "hold --socket {SOCKET} {} {slowly}",
            file.display()
        ));
        let mut running = start(&mut hold);
        // Before that, it only reads its own program file.
        running.until(|running| {
            let io = fs::read_to_string(format!("/proc/{}/io", running.pid())).unwrap_or_default();
            let read = io.lines().find_map(|line| line.strip_prefix("rchar: "));
            read.is_some_and(|read| read.parse::<u64>().unwrap() > MIB)
        });
        running.signal(libc::SIGTERM);
        running.end()
    };
    // It may have loaded all of it before the signal came.
    let ended = (0..100)
        .map(|_| interrupted())
        .find(|ended| ended.stdout.is_empty());
    assert!(ended.unwrap().line(130).ends_with("(ECANCELED)"));
    // Which is no failure of the service.
    let unit = include_str!("../systemd/dmafile-hold@.service.in");
    assert!(unit.contains("\nSuccessExitStatus=130\n"));
    assert!(fs::read_dir(dir.path("run")).unwrap().next().is_none());
}

#[test]
fn takers_keep_the_memory_of_a_killed_holder() {
    let dir = new_dir();
    let want = sha256(&dir.file("file", LEN), 0, LEN);
    let holder = hold(&dir, "file --folder links");
    let mut takers: Vec<_> = (0..3)
        .map(|number| Waiting::start(&dir, "file", number))
        .collect();
    assert_eq!(takers.pop().unwrap().sum(), want);
    holder.0.signal(libc::SIGKILL);
    holder.0.end();
    assert_eq!(takers.pop().unwrap().sum(), want);
    // The socket and the links of the killed holder remain.
    assert!(dir.path(SOCKET).exists() && dir.path("links").exists());
    let line = dir.refusal(&mut take(&dir, "file", &["true"]), 1);
    assert!(line.contains("its holder has ended"), "{line}");
    let holder = hold(&dir, "file --folder links");
    assert_eq!(taken(&dir, "file"), want);
    assert_eq!(sha256(&dir.path("links/file"), 0, LEN), want);
    assert_eq!(takers.pop().unwrap().sum(), want);
    drop(holder);
}

#[test]
fn a_changed_file_is_reported_and_can_be_replaced() {
    let dir = new_dir();
    let old = sha256(&dir.file("file", LEN), 0, LEN);
    let first = hold(&dir, "file");
    let waiting = Waiting::start(&dir, "file", 0);
    let again = format!("hold --socket {SOCKET} file");
    let line = dir.refusal(&mut dir.dmafile(&again), 1);
    assert!(
        line.contains("another holder serves there") && line.contains("(EADDRINUSE)"),
        "{line}"
    );
    assert_eq!(holds(&dir)["changed"], false);

    let new = sha256(&dir.file("file", LEN - 5), 0, LEN - 5);
    assert_eq!(holds(&dir)["changed"], true);
    let text = dir.run(&format!("holds --socket {SOCKET}")).ok().stdout;
    assert!(
        text.contains("has changed on the disk since it was loaded"),
        "{text}"
    );
    let ended = end(&mut take(&dir, "file", &["sha256sum", "{}"])).ok();
    assert!(ended.stdout.starts_with(&old));
    assert!(
        ended.stderr.contains("note: file has changed on the disk"),
        "{ended:?}"
    );

    let second = hold(&dir, "file --replace");
    first.ends();
    assert_eq!(taken(&dir, "file"), new);
    assert_eq!(waiting.sum(), old);
    assert_eq!(holds(&dir)["changed"], false);
    drop(second);
}

#[test]
fn an_idle_holder_ends() {
    let dir = new_dir();
    dir.file("file", LEN);
    hold(&dir, "file --idle 50ms").ends();
    assert!(!dir.path(SOCKET).exists());
}

#[test]
fn a_taker_waits_for_its_holder() {
    let dir = new_dir();
    let want = sha256(&dir.file("file", LEN), 0, LEN);
    let waiting = format!("take file --socket {SOCKET} --wait 10m -- sha256sum {{}}");
    let waiting = start(&mut dir.dmafile(&waiting));
    let holder = hold(&dir, "file");
    assert!(waiting.end().ok().stdout.starts_with(&want));
    let line = dir.refusal(
        &mut dir.dmafile(&format!("take other --socket {SOCKET} --wait 20ms")),
        1,
    );
    assert!(
        line.ends_with(&format!("{SOCKET}: the hold there is named file (ENOENT)")),
        "{line}"
    );
    drop(holder);
}

/// The socket of a holder that never answers a request.
struct Silent(OwnedFd);

impl Silent {
    fn listen(dir: &Dir) -> Self {
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        let at = SocketAddrUnix::new(dir.path(SOCKET)).unwrap();
        rustix::net::bind(&socket, &at).unwrap();
        rustix::net::listen(&socket, 1).unwrap();
        Self(socket)
    }

    /// Waits for a request, and keeps the connection.
    fn asked(&self) -> OwnedFd {
        let peer = rustix::net::accept(&self.0).unwrap();
        let (got, _) = rustix::net::recv(&peer, &mut [0; 4096], RecvFlags::empty()).unwrap();
        assert!(got > 0);
        peer
    }
}

#[test]
fn a_signal_ends_a_take() {
    let dir = new_dir();
    let take = |command: &str| {
        start(&mut dir.dmafile(&format!("take file --socket {SOCKET} --wait 1h {command}")))
    };
    let ends = |running: Running, signal| {
        running.signal(signal);
        let ended = running.end();
        assert!(ended.line(130).ends_with("(ECANCELED)"), "{ended:?}");
    };
    // Nothing is held there. SIGTERM is the last signal whose handler it installs.
    let mut running = take("-- echo ran");
    running.until(|running| caught(running.pid(), libc::SIGTERM));
    ends(running, libc::SIGINT);
    // The holder does not answer.
    let holder = Silent::listen(&dir);
    for (signal, command) in [(libc::SIGINT, "-- echo ran"), (libc::SIGTERM, "")] {
        let running = take(command);
        let _peer = holder.asked();
        ends(running, signal);
    }
}

#[test]
fn sockets_are_found_by_their_names() {
    let dir = Dir::new();
    // Another user may lack permission to enter the build folder.
    let home = tempfile::tempdir().unwrap();
    fs::write(home.path().join("file"), common::content(0, LEN as usize)).unwrap();
    let want = sha256(&home.path().join("file"), 0, LEN);
    // Sockets of root are in /run, which the whole machine shares.
    let user = own_user(0);
    if is_root() {
        std::os::unix::fs::chown(home.path(), Some(user), Some(user)).unwrap();
    }
    let command = |args: &str| {
        let mut command = dir.dmafile(args);
        run_as(&mut command, user).current_dir(home.path());
        command.env("XDG_RUNTIME_DIR", home.path());
        command
    };
    let holder = Holder::start(&mut command("hold file"));
    let folder = home.path().join("dmafile");
    assert_eq!(
        fs::metadata(&folder).unwrap().permissions().mode() & 0o777,
        0o700
    );
    let ended = end(&mut command("take file -- sha256sum {}")).ok();
    assert!(ended.stdout.starts_with(&want), "{ended:?}");
    let all = end(&mut command("holds --json")).ok().json();
    let all = all.as_array().unwrap();
    assert!(all.iter().any(|held| held["pid"] == holder.0.pid()));
    end(&mut command("release file")).ok();
    holder.ends();
}

#[test]
fn permissions_of_the_socket_decide_which_users_may_take() {
    if !is_root() {
        return skip("only root runs commands as other users");
    }
    let dir = new_dir();
    let want = sha256(&dir.file("file", LEN), 0, LEN);
    let (member, stranger) = (own_user(1), own_user(2));
    let of = |uid, args: &str| {
        let mut command = dir.dmafile(&format!("{args} --socket {SOCKET}"));
        run_as(&mut command, uid);
        command
    };
    let take = |uid| {
        let mut command = of(uid, "take file");
        command.args(["--", "sh", "-c", "sha256sum <$DMAFILE_PATH"]);
        command
    };
    let gets_it = |uid| {
        let ended = end(&mut take(uid)).ok();
        assert!(ended.stdout.starts_with(&want), "{ended:?}");
    };
    let is_refused = |uid| {
        let line = dir.refusal(&mut take(uid), 1);
        assert!(line.contains("this user may not use the socket"), "{line}");
        assert!(line.contains("(EACCES)"), "{line}");
    };
    let mode = || fs::metadata(dir.path(SOCKET)).unwrap().permissions().mode() & 0o777;

    let holder = hold(&dir, "file");
    is_refused(member);
    gets_it(0);
    drop(holder);
    fs::remove_file(dir.path(SOCKET)).unwrap();

    // In this test, the group of a user has the number of the user.
    let holder = hold(&dir, &format!("file --group {member}"));
    assert_eq!(mode(), 0o660);
    gets_it(member);
    is_refused(stranger);
    let mut sleeping = of(member, "take file");
    sleeping.args(["--", "sh", "-c", "echo ready; sleep 100"]);
    let mut sleeping = start(&mut sleeping);
    sleeping.until_written("ready\n");
    let taker = &holds(&dir)["some_takers"][0];
    assert_eq!(
        (&taker["pid"], &taker["uid"]),
        (&sleeping.pid().into(), &member.into())
    );
    let line = dir.refusal(&mut of(member, "release file"), 1);
    assert!(
        line.contains("only its owner and root may release it"),
        "{line}"
    );
    assert!(line.ends_with("(EPERM)"), "{line}");
    gets_it(member);
    drop((holder, sleeping));
    fs::remove_file(dir.path(SOCKET)).unwrap();

    let holder = hold(&dir, "file --mode 0666");
    assert_eq!(mode(), 0o666);
    for uid in [member, stranger, NOBODY] {
        gets_it(uid);
    }
    let line = dir.refusal(&mut of(stranger, "release file"), 1);
    assert!(line.ends_with("(EPERM)"), "{line}");
    dir.run(&format!("release file --socket {SOCKET}")).ok();
    holder.ends();
}

/// COMMAND can be checkpointed: it has the memory, and nothing else that it did not have before.
#[test]
fn command_gets_nothing_but_the_memory() {
    let dir = new_dir();
    dir.file("model", LEN);
    let _holder = hold(&dir, "model");
    let script = "for fd in /proc/$$/fd/*; do [ ${fd##*/} -le 2 ] || readlink $fd; done; ls /proc/$$/task | wc -l";
    let seen = |command: &mut Command| {
        let ended = end(command).ok();
        ended.stdout.lines().map(str::to_string).collect()
    };
    let before: Vec<_> = seen(Command::new("sh").args(["-c", script]));
    let with: Vec<_> = seen(&mut take(&dir, "model", &["sh", "-c", script]));
    let (memory, rest): (Vec<_>, Vec<_>) =
        with.into_iter().partition(|line| line.contains("memfd:"));
    assert_eq!(memory, ["/memfd:model (deleted)"]);
    assert_eq!(rest, before);
}

/// The holder sees its end even in another PID namespace, on this kernel.
#[test]
fn a_taker_in_another_pid_namespace_is_counted_until_it_ends() {
    if !is_root() {
        eprintln!("skipped: only root makes PID namespaces");
        return;
    }
    let dir = new_dir();
    dir.file("model", LEN);
    let holder = hold(&dir, "model --idle 2s");
    let mut outer = Command::new("unshare");
    outer.args(["--pid", "--fork", env!("CARGO_BIN_EXE_dmafile")]);
    outer.args(["take", "model", "--socket", SOCKET, "--", "sh", "-c"]);
    outer.arg("echo ready; sleep 4").current_dir(dir.path("."));
    let mut taker = start(&mut outer);
    taker.until_written("ready\n");
    let held = holds(&dir);
    let known = (&held["takers"], &held["unknown_takers"]);
    assert_eq!(known, (&1.into(), &0.into()), "{held}");
    taker.end().ok();
    // It stayed for longer than an unused holder.
    assert_eq!(holds(&dir)["takers"], 0);
    holder.ends();
}

/// Sets soft and hard limit on open files, so that the command cannot raise it.
fn open_files(command: &mut Command, most: u64) -> &mut Command {
    let limits = libc::rlimit {
        rlim_cur: most,
        rlim_max: most,
    };
    // SAFETY: a system call between fork and exec, with a structure of the closure.
    unsafe {
        command.pre_exec(move || done(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limits)))
    }
}

fn connect(at: &Path) -> OwnedFd {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(at).unwrap()).unwrap();
    // Only a test that hangs takes this long.
    let most = Some(Duration::from_secs(60));
    rustix::net::sockopt::set_socket_timeout(&socket, Timeout::Recv, most).unwrap();
    socket
}

/// Sends a request for the files.
fn ask(socket: &OwnedFd, name: &str) {
    let request = format!(r#"{{"v":1,"op":"take","name":"{name}"}}"#);
    rustix::net::send(socket, request.as_bytes(), SendFlags::NOSIGNAL).unwrap();
}

/// A process for the test below: it takes the files 300 times, and receives nothing.
#[test]
#[ignore = "started by another test"]
fn deaf_takers() {
    let _deaf: Vec<_> = (0..300)
        .map(|_| {
            let socket = connect(Path::new(SOCKET));
            ask(&socket, "m");
            socket
        })
        .collect();
    println!("all have asked");
    let _ = std::io::stdin().read(&mut [0]);
}

/// Descriptors that were sent and not received count against the limit of the holder's user on open files.
#[test]
fn a_user_who_receives_nothing_does_not_keep_others_from_taking() {
    if !is_root() {
        return skip("only root runs commands as other users");
    }
    let dir = new_dir();
    let (owner, deaf, other) = (own_user(0), own_user(1), own_user(2));
    chown(dir.path("run"), Some(owner), Some(owner)).unwrap();
    let names: Vec<_> = (0..16).map(|number| format!("file{number}")).collect();
    for name in &names {
        dir.file(name, 5000);
    }
    let want = sha256(&dir.path("file15"), 0, 5000);
    let args = format!(
        "hold --socket {SOCKET} --name m --mode 0666 {}",
        names.join(" ")
    );
    let holder = Holder::start(run_as(open_files(&mut dir.dmafile(&args), 1024), owner));
    let mut takers = Command::new(std::env::current_exe().unwrap());
    takers
        .args(["--ignored", "--exact", "deaf_takers", "--nocapture"])
        .current_dir(dir.path("."))
        .stdin(Stdio::piped());
    let mut takers = start(run_as(&mut takers, deaf));
    takers.until_written("all have asked");
    // While they still may ask, and when the first ones would have been disconnected.
    for _ in 0..2 {
        for user in [owner, other, 0] {
            let script = "sha256sum </proc/self/fd/${DMAFILE_FD##*,}";
            let mut taker = take(&dir, "m", &["sh", "-c", script]);
            let ended = end(run_as(&mut taker, user)).ok();
            assert!(ended.stdout.starts_with(&want), "{user}: {ended:?}");
        }
        std::thread::sleep(Duration::from_secs(11));
    }
    drop((takers, holder));
}

#[test]
fn a_user_with_many_connections_makes_room_for_others() {
    let dir = new_dir();
    let want = sha256(&dir.file("file", LEN), 0, LEN);
    // Half of them are for connections.
    let args = format!("hold --socket {SOCKET} file");
    let _holder = Holder::start(open_files(&mut dir.dmafile(&args), 64));
    for takes in [true, false] {
        let one = |_| {
            let socket = connect(&dir.path(SOCKET));
            if takes {
                ask(&socket, "file");
                let received = rustix::net::recv(&socket, &mut [0; 4096], RecvFlags::empty());
                assert!(received.unwrap().0 > 0);
            }
            socket
        };
        let _many: Vec<_> = (0..100).map(one).collect();
        assert_eq!(taken(&dir, "file"), want);
    }
}

#[test]
fn the_runtime_folder_of_another_user_does_not_hide_the_holds_of_root() {
    if !is_root() {
        return skip("only root mounts");
    }
    let (what, at, mode) = (c"tmpfs".as_ptr(), c"/run".as_ptr(), c"mode=755".as_ptr());
    // SAFETY: mounts a file system for this thread and its children.
    let mounted =
        own_mounts().and_then(|()| unsafe { done(libc::mount(what, at, what, 0, mode.cast())) });
    if let Err(error) = mounted {
        return skip(&format!("/run cannot be mounted: {error}"));
    }
    let dir = new_dir();
    let want = sha256(&dir.file("file", LEN), 0, LEN);
    let holder = Holder::start(&mut dir.dmafile("hold file --mode 0666"));
    let home = tempfile::tempdir().unwrap();
    let (one, other) = (own_user(0), own_user(1));
    chown(home.path(), Some(one), Some(one)).unwrap();
    // Other users may not enter it, or may.
    for mode in [0o700, 0o755] {
        fs::set_permissions(home.path(), Permissions::from_mode(mode)).unwrap();
        let run = |args: &str| {
            let mut command = dir.dmafile(args);
            run_as(&mut command, other).env("XDG_RUNTIME_DIR", home.path());
            end(&mut command)
        };
        let ended = run("take file -- sh -c sha256sum<$DMAFILE_PATH").ok();
        assert!(ended.stdout.starts_with(&want), "{ended:?}");
        let all = run("holds --json").ok().json();
        assert_eq!(all[0]["pid"], holder.0.pid());
        let refused = run("take nothing");
        assert!(refused.line(1).starts_with("cannot take: "), "{refused:?}");
    }
}

#[test]
fn invalid_requests_are_refused_in_one_line() {
    let dir = new_dir();
    dir.file("file", LEN);
    dir.file("run/file", LEN);
    for (args, status, want) in [
        ("hold", 2, "MODEL"),
        ("hold file --to anon", 2, "--to"),
        ("hold file --mode 999", 2, "--mode"),
        (
            "hold file --group no-such-group",
            2,
            "there is no group 'no-such-group'",
        ),
        ("hold file --name a:b", 2, "'a:b' is not a valid name"),
        ("hold file --idle soon", 2, "--idle"),
        ("hold file run/file", 2, "name"),
        (
            "hold file run/file --name two",
            1,
            "it has the same name as",
        ),
        ("hold nothing", 1, "(ENOENT)"),
        ("hold file --folder run", 1, "(EEXIST)"),
        ("take a:b", 2, "'a:b' is not a valid name"),
        ("take file --json -- true", 2, "--json=PATH"),
        ("take file --wait long", 2, "--wait"),
        ("release a/b", 2, "'a/b' is not a valid name"),
    ] {
        let (command, rest) = args.split_once(' ').unwrap_or((args, ""));
        let mut refused = dir.dmafile(&format!("{command} --socket {SOCKET} {rest}"));
        let line = dir.refusal(&mut refused, status);
        assert!(line.contains(want), "{args}: {line} should say {want}");
        assert!(!dir.path(SOCKET).exists(), "{args}");
    }
    let open = dir.path("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, Permissions::from_mode(0o1777)).unwrap();
    let line = dir.refusal(&mut dir.dmafile("hold file --socket open/socket"), 1);
    assert!(line.contains("every user may write to it"), "{line}");
    let mut notify = dir.dmafile(&format!("hold file --notify --socket {SOCKET}"));
    let line = dir.refusal(notify.env_remove("NOTIFY_SOCKET"), 1);
    assert!(
        line.ends_with("(ENOENT); start it as a service with Type=notify"),
        "{line}"
    );
    let mut notify = dir.dmafile(&format!("hold file --notify --socket {SOCKET}"));
    let line = dir.refusal(notify.env("NOTIFY_SOCKET", dir.path("nothing")), 1);
    assert!(line.contains("cannot notify"), "{line}");
}
