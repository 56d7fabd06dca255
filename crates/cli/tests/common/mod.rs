//! Shared by the tests of the command: a folder on a disk, the command, and its result.

#![allow(dead_code, reason = "each test file uses its own part")]

pub mod sandbox;

#[allow(unused_imports, reason = "each test file uses its own part")]
pub use dmafile_testkit::page_cache::{Warm, evict};
use serde_json::Value;
use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;
/// An ordinary user, for tests that run as root.
pub const NOBODY: u32 = 65534;
/// Every method that fills any kind of memory, as `--method` names them.
pub const METHODS: [&str; 4] = ["auto", "uring", "threads", "bounce"];

/// Even on a busy machine, only a command that hangs takes this long.
const HANGS_AFTER: Duration = Duration::from_secs(60);
/// On the disk of the build folder; /tmp may be memory.
const DISK: &str = env!("CARGO_TARGET_TMPDIR");
/// A COMMAND that prints the checksum of the bytes of the buffer.
const CHECKSUM: &str = "tail -c +$((DMAFILE_OFFSET + 1)) /proc/self/fd/$DMAFILE_FD \
                        | head -c $DMAFILE_BYTES | sha256sum";

/// Kept open, so that a user without permission to enter the build folder can execute it.
static BINARY: LazyLock<File> =
    LazyLock::new(|| File::open(env!("CARGO_BIN_EXE_dmafile")).unwrap());

/// The pool of huge pages, which all loads on this machine share.
pub const POOL: &str = "/proc/sys/vm/nr_hugepages";

/// A folder for one test; commands run in it and name its files without a path.
pub struct Dir(tempfile::TempDir, Option<File>);

impl Dir {
    pub fn new() -> Self {
        Self::with_pool(libc::LOCK_SH)
    }

    /// For a test that changes the pool of huge pages, or relies on its size. No other test with a folder
    /// runs at the same time, in any process, because its loads could take pages from the pool.
    pub fn alone_with_pool() -> Self {
        Self::with_pool(libc::LOCK_EX)
    }

    fn with_pool(lock: i32) -> Self {
        let pool = File::open(POOL).ok();
        if let Some(file) = &pool {
            // SAFETY: a lock on an open file, released when the file is closed.
            done(unsafe { libc::flock(file.as_raw_fd(), lock) }).unwrap();
        }
        let dir = tempfile::tempdir_in(DISK).unwrap();
        // The command writes its report here, also when it runs as another user.
        fs::set_permissions(dir.path(), Permissions::from_mode(0o777)).unwrap();
        Self(dir, pool)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The names in it, sorted.
    pub fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.0.path()).unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    /// A file of [`content`], on the disk and not in the page cache.
    pub fn file(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.path(name);
        let mut file = File::create(&path).unwrap();
        let mut at = 0;
        while at < bytes {
            let step = (bytes - at).min(MIB);
            file.write_all(&content(at, step as usize)).unwrap();
            at += step;
        }
        evict(&file);
        path
    }

    /// `dmafile ARGS`, the arguments separated by spaces.
    pub fn dmafile(&self, args: &str) -> Command {
        let mut command = Command::new(format!("/proc/self/fd/{}", BINARY.as_raw_fd()));
        command
            .arg0("dmafile")
            .args(args.split_whitespace())
            .current_dir(self.0.path())
            .stdin(Stdio::null());
        interruptible(&mut command);
        command
    }

    pub fn run(&self, args: &str) -> Ended {
        end(&mut self.dmafile(args))
    }

    /// `dmafile load ARGS` with a COMMAND that runs `prepare` and then prints a checksum.
    pub fn load_then(&self, args: &str, prepare: &str) -> Command {
        let mut command = self.dmafile(&format!("load {args} --json=report.json"));
        command.args(["--", "sh", "-c", &format!("{prepare}\n{CHECKSUM}")]);
        command
    }

    pub fn load(&self, args: &str) -> Command {
        self.load_then(args, "")
    }

    /// Runs a command of [`Dir::load`].
    pub fn loaded(&self, command: &mut Command) -> Loaded {
        self.handed(&end(command).ok())
    }

    /// The buffer and the report of a command of [`Dir::load`] that has ended.
    pub fn handed(&self, ended: &Ended) -> Loaded {
        let report = self.path("report.json");
        let text = fs::read(&report).unwrap();
        fs::remove_file(report).unwrap();
        Loaded {
            digest: ended.stdout.split(' ').next().unwrap().to_string(),
            report: serde_json::from_slice(&text).unwrap(),
        }
    }

    /// The one line of a command that must fail, and must leave nothing in this folder.
    pub fn refusal(&self, command: &mut Command, status: i32) -> String {
        let before = self.names();
        let line = end(command).line(status).to_string();
        assert_eq!(self.names(), before, "left behind by {command:?}");
        line
    }

    /// Like [`Dir::refusal`], for `load ARGS`, with and without `--json`.
    pub fn refuses(&self, args: &str, status: i32) -> String {
        let line = self.refusal(&mut self.dmafile(&format!("load {args}")), status);
        let json = self.refusal(&mut self.dmafile(&format!("load --json {args}")), status);
        assert_eq!(json, line);
        line
    }
}

/// What a COMMAND got from a load, and the report.
#[derive(Debug)]
pub struct Loaded {
    /// SHA-256 of the bytes, computed by `sha256sum`.
    pub digest: String,
    pub report: Value,
}

impl Loaded {
    /// A number of the report.
    pub fn number(&self, key: &str) -> u64 {
        self.report[key].as_u64().unwrap()
    }

    /// The reasons as one text, one per line.
    pub fn reasons(&self) -> String {
        reasons(&self.report)
    }
}

/// The reasons of a plan or a report as one text with lines `about choice: why`.
pub fn reasons(json: &Value) -> String {
    let line = |reason: &Value| {
        let [about, choice, why] =
            ["about", "choice", "why"].map(|key| reason[key].as_str().unwrap());
        format!("{about} {choice}: {why}\n")
    };
    json["reasons"]
        .as_array()
        .unwrap()
        .iter()
        .map(line)
        .collect()
}

/// How a command ended.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    pub fn ok(self) -> Self {
        assert!(self.status.success(), "{self:?}");
        self
    }

    /// The line it failed with, without `dmafile: `: the only one on stderr; stdout is empty.
    pub fn line(&self, status: i32) -> &str {
        assert_eq!(self.status.code(), Some(status), "{self:?}");
        assert_eq!(self.stdout, "", "{self:?}");
        let line = self.stderr.strip_suffix('\n').unwrap_or_default();
        assert_eq!(line.lines().count(), 1, "{self:?}");
        line.strip_prefix("dmafile: ").expect(line)
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// A running command in its own process group. Dropping this kills it.
pub struct Running {
    child: Child,
    output: [File; 2],
    what: String,
}

/// Starts a command.
pub fn start(command: &mut Command) -> Running {
    let output = [(); 2].map(|()| tempfile::tempfile_in(DISK).unwrap());
    command.stdout(output[0].try_clone().unwrap());
    launch(command, output)
}

/// Runs a command to its end.
pub fn end(command: &mut Command) -> Ended {
    start(command).end()
}

/// Runs a command to its end, with this stdout.
pub fn end_with_stdout(command: &mut Command, stdout: impl Into<Stdio>) -> Ended {
    let output = [(); 2].map(|()| tempfile::tempfile_in(DISK).unwrap());
    command.stdout(stdout);
    launch(command, output).end()
}

fn launch(command: &mut Command, output: [File; 2]) -> Running {
    command
        .stderr(output[1].try_clone().unwrap())
        .process_group(0);
    Running {
        child: command.spawn().unwrap(),
        output,
        what: format!("{command:?}"),
    }
}

impl Running {
    pub fn pid(&self) -> i32 {
        self.child.id().try_into().unwrap()
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: the child has not been waited for, so its PID has not been reused.
        assert_eq!(unsafe { libc::kill(self.pid(), signal) }, 0);
    }

    /// What it has written so far, to stdout and stderr.
    pub fn written(&self) -> [String; 2] {
        self.output.each_ref().map(|file| {
            let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
            // Reads at an offset, because the child shares the position of the file.
            file.read_exact_at(&mut bytes, 0).unwrap();
            String::from_utf8(bytes).unwrap()
        })
    }

    /// Waits until `happened` returns true, or the command has ended.
    pub fn until(&mut self, mut happened: impl FnMut(&mut Self) -> bool) {
        let what = self.what.clone();
        eventually(&what, || {
            self.child.try_wait().unwrap().is_some() || happened(self)
        });
    }

    /// Waits until it has written `text`.
    pub fn until_written(&mut self, text: &str) {
        self.until(|running| running.written().iter().any(|out| out.contains(text)));
    }

    pub fn end(mut self) -> Ended {
        self.until(|_| false);
        let status = self.child.wait().unwrap();
        let [stdout, stderr] = self.written();
        Ended {
            status,
            stdout,
            stderr,
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.child.try_wait().unwrap().is_none() {
            // SAFETY: the child has not been waited for, so its group has not been reused.
            unsafe { libc::kill(-self.pid(), libc::SIGKILL) };
            self.child.wait().unwrap();
        }
    }
}

/// Waits until `happened` returns true.
pub fn eventually(what: &str, mut happened: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !happened() {
        assert!(begin.elapsed() < HANGS_AFTER, "still not: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns `true` if a process catches a signal.
pub fn caught(pid: i32, signal: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.unwrap_or(0) >> (signal - 1) & 1 == 1
}

/// The content of every file of these tests, from `offset`; no two blocks of it are alike.
pub fn content(offset: u64, len: usize) -> Vec<u8> {
    // splitmix64 of the number of each word
    let word = |index: u64| {
        let mut x = index.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)).to_ne_bytes()
    };
    let words = offset / 8..(offset + len as u64).div_ceil(8);
    let mut bytes: Vec<u8> = words.flat_map(word).collect();
    bytes.drain(..(offset % 8) as usize);
    bytes.truncate(len);
    bytes
}

/// SHA-256 of a range of a file, computed by `sha256sum`.
pub fn sha256(path: &Path, offset: u64, bytes: u64) -> String {
    let script = r#"tail -c "+$1" "$0" | head -c "$2" | sha256sum"#;
    let mut command = Command::new("sh");
    command.args(["-c", script]).arg(path);
    command.args([(offset + 1).to_string(), bytes.to_string()]);
    let ended = end(&mut command).ok();
    ended.stdout.split(' ').next().unwrap().to_string()
}

/// A memfd of zeros that can be sealed.
pub fn memfd(bytes: u64) -> File {
    memfd_with(libc::MFD_ALLOW_SEALING, bytes)
}

/// A memfd of zeros with pages from the hugetlb pool.
pub fn huge_memfd(bytes: u64) -> File {
    memfd_with(libc::MFD_HUGETLB, bytes)
}

fn memfd_with(flags: u32, bytes: u64) -> File {
    // SAFETY: a constant name; the returned descriptor is new.
    let file = unsafe { File::from_raw_fd(libc::memfd_create(c"test".as_ptr(), flags)) };
    file.set_len(bytes).unwrap();
    file
}

/// Bytes of a file in the page cache, from `fincore`; None if that program is missing.
pub fn cached(path: &Path) -> Option<u64> {
    let mut command = Command::new("fincore");
    command.args(["--bytes", "--noheadings", "--output", "RES"]);
    match command.arg(path).output() {
        Ok(output) => Some(
            String::from_utf8(output.stdout)
                .unwrap()
                .trim()
                .parse()
                .unwrap(),
        ),
        Err(_) => {
            skip("fincore is missing (Debian: util-linux-extra)");
            None
        }
    }
}

/// Prints, past the test harness, what was not tested; with CI=true this is an error.
pub fn skip(why: &str) {
    let line = format!(
        "SKIPPED: {}: {why}\n",
        std::thread::current().name().unwrap_or_default()
    );
    assert!(
        std::env::var_os("CI").is_none_or(|ci| ci != "true"),
        "{line}"
    );
    io::stderr().write_all(line.as_bytes()).unwrap();
}

/// Returns `true` if `file` in `dir` can be read with direct I/O; if not, this prints why.
pub fn reads_directly(dir: &Dir) -> bool {
    let plan = dir.run("explain file --io direct");
    if !plan.status.success() {
        skip(&format!(
            "no direct I/O on the disk of the build: {}",
            plan.stderr
        ));
    }
    plan.status.success()
}

/// Gives this thread and its children a mount namespace, which ends with them. Only for root: other
/// users mount with fusermount3.
pub fn own_mounts() -> io::Result<()> {
    let flags = libc::MS_REC | libc::MS_PRIVATE;
    let none = std::ptr::null();
    // SAFETY: changes the mounts of this thread; all strings are constants.
    unsafe {
        done(libc::unshare(libc::CLONE_NEWNS))?;
        done(libc::mount(none, c"/".as_ptr(), none, flags, none.cast()))
    }
}

pub fn is_root() -> bool {
    // SAFETY: asks for a number.
    unsafe { libc::geteuid() == 0 }
}

/// Makes SIGINT and SIGQUIT end a command, as in a terminal: a background job of a script inherits them
/// ignored.
pub fn interruptible(command: &mut Command) -> &mut Command {
    // SAFETY: signal(2) may be called between fork and exec.
    unsafe {
        command.pre_exec(|| {
            for signal in [libc::SIGINT, libc::SIGQUIT] {
                libc::signal(signal, libc::SIG_DFL);
            }
            Ok(())
        })
    }
}

/// Makes a command start with a signal ignored.
pub fn ignoring(command: &mut Command, signal: i32) -> &mut Command {
    // SAFETY: signal(2) may be called between fork and exec.
    unsafe {
        command.pre_exec(move || {
            libc::signal(signal, libc::SIG_IGN);
            Ok(())
        })
    }
}

/// A user ID for this process and `number` only: limits per user would also count other runs of these
/// tests.
pub fn own_user(number: u32) -> u32 {
    20_000 + (std::process::id() * 4 + number) % 40_000
}

/// Makes a command run as user `uid`, if the tests run as root.
pub fn run_as(command: &mut Command, uid: u32) -> &mut Command {
    if !is_root() {
        return command;
    }
    // SAFETY: system calls only, between fork and exec.
    unsafe {
        command.pre_exec(move || {
            let failed =
                libc::setgroups(0, std::ptr::null()) | libc::setgid(uid) | libc::setuid(uid);
            done(failed)
        })
    }
}

/// Makes a command run under a limit of setrlimit(2); only the soft limit, so that the program it executes
/// can raise it again.
pub fn limit(
    command: &mut Command,
    resource: libc::__rlimit_resource_t,
    most: u64,
) -> &mut Command {
    limit_both(command, resource, most, false)
}

/// As [`limit`], for good.
pub fn hard_limit(
    command: &mut Command,
    resource: libc::__rlimit_resource_t,
    most: u64,
) -> &mut Command {
    limit_both(command, resource, most, true)
}

fn limit_both(
    command: &mut Command,
    resource: libc::__rlimit_resource_t,
    most: u64,
    hard: bool,
) -> &mut Command {
    // SAFETY: system calls only, between fork and exec.
    unsafe {
        command.pre_exec(move || {
            let mut limits = libc::rlimit {
                rlim_cur: 0,
                rlim_max: 0,
            };
            done(libc::getrlimit(resource, &raw mut limits))?;
            limits.rlim_cur = most.min(limits.rlim_max);
            if hard {
                limits.rlim_max = limits.rlim_cur;
            }
            done(libc::setrlimit(resource, &raw const limits))
        })
    }
}

/// Turns the return value of a system call into a result.
pub fn done(answer: i32) -> io::Result<()> {
    match answer {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
