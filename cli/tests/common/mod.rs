//! What the tests of the command share: a folder on a disk, the command, and how it ended.

#![allow(dead_code, reason = "each test file uses its own part")]

#[path = "../../../engine/tests/common/page_cache.rs"]
mod page_cache;
pub mod sandbox;

#[allow(unused_imports, reason = "each test file uses its own part")]
pub use page_cache::{Warm, evict};
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
/// Every way of moving bytes into memory of any kind, as `--method` names them: all but `module`.
pub const METHODS: [&str; 8] = [
    "auto", "uring", "threads", "read", "mmap", "bounce", "sendfile", "splice",
];

/// Nothing here takes this long, even on a crowded machine, unless it hangs.
const HANGS_AFTER: Duration = Duration::from_secs(60);
/// On the disk that holds the build; /tmp may be memory.
const DISK: &str = env!("CARGO_TARGET_TMPDIR");
/// What a COMMAND does to give the checksum of the bytes that it was handed.
const CHECKSUM: &str = "tail -c +$((DMAFILE_OFFSET + 1)) /proc/self/fd/$DMAFILE_FD \
                        | head -c $DMAFILE_BYTES | sha256sum";

/// Held open, so that a user who may not enter the folder of the build can execute it.
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

    /// For a test that changes the pool of huge pages, or counts on what is in it: no other test
    /// with a folder runs meanwhile, in whatever process, as its loads might take pages from there.
    pub fn alone_with_pool() -> Self {
        Self::with_pool(libc::LOCK_EX)
    }

    fn with_pool(lock: i32) -> Self {
        let pool = File::open(POOL).ok();
        if let Some(file) = &pool {
            // SAFETY: a lock on an open file, given back when it is closed.
            done(unsafe { libc::flock(file.as_raw_fd(), lock) }).unwrap();
        }
        let dir = tempfile::tempdir_in(DISK).unwrap();
        // Whoever the command runs as writes its report here.
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
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
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

    /// `dmafile ARGS`, the arguments separated by blanks.
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

    /// `dmafile load ARGS`, handing over to a COMMAND that prints a checksum. `prepare` runs in
    /// front of it.
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

    /// What a command of [`Dir::load`] handed over and reported.
    pub fn handed(&self, ended: &Ended) -> Loaded {
        let report = self.path("report.json");
        let text = fs::read(&report).unwrap();
        fs::remove_file(report).unwrap();
        Loaded {
            digest: ended.stdout.split(' ').next().unwrap().to_string(),
            report: serde_json::from_slice(&text).unwrap(),
        }
    }

    /// The one line of a command that must fail, without a trace in this folder.
    pub fn refusal(&self, command: &mut Command, status: i32) -> String {
        let before = self.names();
        let line = end(command).line(status).to_string();
        assert_eq!(self.names(), before, "left behind by {command:?}");
        line
    }

    /// As [`Dir::refusal`], for `load ARGS`, with and without `--json`.
    pub fn refuses(&self, args: &str, status: i32) -> String {
        let line = self.refusal(&mut self.dmafile(&format!("load {args}")), status);
        let json = self.refusal(&mut self.dmafile(&format!("load --json {args}")), status);
        assert_eq!(json, line);
        line
    }
}

/// What came of a load that was handed over.
#[derive(Debug)]
pub struct Loaded {
    /// SHA-256 of the bytes, by the program of that name.
    pub digest: String,
    pub report: Value,
}

impl Loaded {
    /// A number of the report.
    pub fn number(&self, key: &str) -> u64 {
        self.report[key].as_u64().unwrap()
    }

    /// The reasons as one text, a line each.
    pub fn reasons(&self) -> String {
        reasons(&self.report)
    }
}

/// The reasons of a plan or a report as one text, a line `about choice: why` each.
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

    /// The line it failed with, less `dmafile: `: the only one on stderr, and stdout is empty.
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

/// A command under way, in a process group of its own. It does not outlive this.
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

/// Runs a command to its end, its stdout being the caller's choice.
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
        // SAFETY: the child has not been waited for, so that its number is its own.
        assert_eq!(unsafe { libc::kill(self.pid(), signal) }, 0);
    }

    /// What it has written so far, to stdout and stderr.
    pub fn written(&self) -> [String; 2] {
        self.output.each_ref().map(|file| {
            let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
            // Read at a place: the child shares the file's position.
            file.read_exact_at(&mut bytes, 0).unwrap();
            String::from_utf8(bytes).unwrap()
        })
    }

    /// Waits until `happened` says so, or the command has ended.
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
            // SAFETY: the child has not been waited for, so that its group is its own.
            unsafe { libc::kill(-self.pid(), libc::SIGKILL) };
            self.child.wait().unwrap();
        }
    }
}

/// Waits until `happened` says so.
pub fn eventually(what: &str, mut happened: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !happened() {
        assert!(begin.elapsed() < HANGS_AFTER, "still not: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether a process catches a signal.
pub fn caught(pid: i32, signal: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.unwrap_or(0) >> (signal - 1) & 1 == 1
}

/// What every file of these tests holds, from `offset`: no two blocks of it are alike.
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

/// SHA-256 of a range of a file, by the program of that name.
pub fn sha256(path: &Path, offset: u64, bytes: u64) -> String {
    let script = r#"tail -c "+$1" "$0" | head -c "$2" | sha256sum"#;
    let mut command = Command::new("sh");
    command.args(["-c", script]).arg(path);
    command.args([(offset + 1).to_string(), bytes.to_string()]);
    let ended = end(&mut command).ok();
    ended.stdout.split(' ').next().unwrap().to_string()
}

/// An empty memfd that can be sealed.
pub fn memfd(bytes: u64) -> File {
    memfd_with(libc::MFD_ALLOW_SEALING, bytes)
}

/// An empty memfd of pages from the hugetlb pool.
pub fn huge_memfd(bytes: u64) -> File {
    memfd_with(libc::MFD_HUGETLB, bytes)
}

fn memfd_with(flags: u32, bytes: u64) -> File {
    // SAFETY: a constant name; the descriptor that comes back is ours.
    let file = unsafe { File::from_raw_fd(libc::memfd_create(c"test".as_ptr(), flags)) };
    file.set_len(bytes).unwrap();
    file
}

/// Bytes of a file in the page cache, by the program `fincore`; None without it.
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

/// Says, past the test harness, that something went untested; under CI=true it may not.
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

/// Whether `file` of `dir` can be read past the page cache; tests that need it say where not.
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

/// From now on, what this thread and its children mount is theirs alone, and ends with them at
/// the latest. Root's only: whoever else may mount at all does so by way of fusermount3.
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

/// Has a command end at SIGINT and SIGQUIT, as in a terminal: in the background of a script they are
/// ignored, and stay so.
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

/// A user of this process's own, told apart by `number`: limits that count by user count what other
/// runs of these tests do, too.
pub fn own_user(number: u32) -> u32 {
    20_000 + (std::process::id() * 4 + number) % 40_000
}

/// Has a command run as user `uid` where the tests run as root.
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

/// Has a command run under a limit of setrlimit(2); only the soft one, so that what it executes
/// can raise it again.
pub fn limit(
    command: &mut Command,
    resource: libc::__rlimit_resource_t,
    most: u64,
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
            done(libc::setrlimit(resource, &raw const limits))
        })
    }
}

/// The answer of a system call as a result.
pub fn done(answer: i32) -> io::Result<()> {
    match answer {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
