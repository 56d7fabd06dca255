//! Processes that stop at each of their system calls that names a file, a descriptor or a socket (ptrace(2), with a
//! seccomp(2) filter that selects the calls), together with the processes that they start.

use crate::calls::{self, Names};
use nix::errno::Errno;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Status(i32),
    Signal(i32),
    /// It had not ended when its time was up.
    Hangs,
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Status(status) => write!(f, "status {status}"),
            Self::Signal(signal) => write!(f, "signal {signal}"),
            Self::Hangs => f.write_str("no end"),
        }
    }
}

/// A call at which a process has stopped. It has not been executed yet.
#[derive(Clone, Debug)]
pub struct Call {
    /// Which of the commands, counted from 0.
    pub root: usize,
    /// Its name in all runs: the process, the call, what it names, and which of several of these it is.
    pub key: String,
    /// The paths that it names in the scratch folder.
    pub paths: Vec<PathBuf>,
    /// It changes a name or a lock.
    pub changes: bool,
}

pub enum Next {
    Call(Pid, Call),
    /// Nothing happened in the given time, or a command has ended.
    Quiet,
    /// All processes have ended.
    Over,
}

struct Task {
    process: Pid,
    root: usize,
    /// It has not stopped for the first time yet.
    is_new: bool,
    /// Its current call was repeated for the tracer, and has been reported already.
    is_repeated: bool,
}

struct Root {
    pid: Pid,
    exit: Option<Exit>,
    seen: BTreeMap<String, u32>,
    /// Its processes, in the order of their start.
    processes: Vec<Pid>,
}

/// What is traced by this thread.
pub struct Session {
    scratch: PathBuf,
    tasks: BTreeMap<Pid, Task>,
    roots: Vec<Root>,
    /// Copies of processes, which never run.
    frozen: Vec<Pid>,
    /// Threads of a process that was stopped by SIGSTOP.
    stopped: Vec<Pid>,
    is_stopping: bool,
}

impl Session {
    /// `scratch` is the folder whose files count.
    pub fn new(scratch: &Path) -> Self {
        Self {
            scratch: scratch.to_path_buf(),
            tasks: BTreeMap::new(),
            roots: Vec::new(),
            frozen: Vec::new(),
            stopped: Vec::new(),
            is_stopping: false,
        }
    }

    /// Traces a child of this thread that has asked for it (see `stage.rs`) and has stopped.
    pub fn add(&mut self, pid: Pid) -> io::Result<()> {
        match waitpid(pid, Some(WaitPidFlag::__WALL))? {
            WaitStatus::Stopped(_, Signal::SIGSTOP) => {}
            other => return Err(io::Error::other(format!("it has not stopped: {other:?}"))),
        }
        ptrace::setoptions(
            pid,
            Options::PTRACE_O_TRACESYSGOOD
                | Options::PTRACE_O_TRACEFORK
                | Options::PTRACE_O_TRACEVFORK
                | Options::PTRACE_O_TRACECLONE
                | Options::PTRACE_O_TRACEEXEC
                | Options::PTRACE_O_TRACESECCOMP
                | Options::PTRACE_O_EXITKILL,
        )?;
        let root = self.roots.len();
        self.roots.push(Root {
            pid,
            exit: None,
            seen: BTreeMap::new(),
            processes: vec![pid],
        });
        self.tasks.insert(
            pid,
            Task {
                process: pid,
                root,
                is_new: false,
                is_repeated: false,
            },
        );
        ptrace::cont(pid, None)?;
        Ok(())
    }

    pub fn exit(&self, root: usize) -> Option<Exit> {
        self.roots[root].exit
    }

    /// Lets a stopped task go on. It may have been killed.
    pub fn go(&self, task: Pid) {
        let _ = ptrace::cont(task, None);
    }

    /// The next call that names something in the scratch folder, memory or a socket.
    pub fn next(&mut self, most: Duration) -> io::Result<Next> {
        let until = Instant::now() + most;
        let mut pause = Duration::from_micros(20);
        loop {
            let flags = WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD | WaitPidFlag::WNOHANG;
            let status = match waitpid(Pid::from_raw(-1), Some(flags)) {
                Ok(WaitStatus::StillAlive) => {
                    if self.tasks.is_empty() {
                        return Ok(Next::Over);
                    }
                    if Instant::now() >= until {
                        return Ok(Next::Quiet);
                    }
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(Duration::from_millis(1));
                    continue;
                }
                Err(Errno::ECHILD) => return Ok(Next::Over),
                Err(Errno::EINTR) => continue,
                status => status?,
            };
            pause = Duration::from_micros(20);
            let running = self.running();
            if let Some(next) = self.handle(status)? {
                return Ok(next);
            }
            if self.running() < running {
                return Ok(Next::Quiet);
            }
        }
    }

    fn running(&self) -> usize {
        let running = self.roots.iter().filter(|root| root.exit.is_none());
        running.count()
    }

    fn handle(&mut self, status: WaitStatus) -> io::Result<Option<Next>> {
        match status {
            WaitStatus::Exited(pid, code) => self.ended(pid, Exit::Status(code)),
            WaitStatus::Signaled(pid, signal, _) => self.ended(pid, Exit::Signal(signal as i32)),
            WaitStatus::PtraceEvent(pid, _, event) => return self.event(pid, event),
            WaitStatus::Stopped(pid, signal) => self.signal(pid, signal),
            WaitStatus::PtraceSyscall(pid) => self.go(pid),
            _ => {}
        }
        Ok(None)
    }

    fn ended(&mut self, pid: Pid, exit: Exit) {
        self.tasks.remove(&pid);
        self.frozen.retain(|frozen| *frozen != pid);
        self.stopped.retain(|stopped| *stopped != pid);
        if let Some(root) = self.roots.iter_mut().find(|root| root.pid == pid) {
            root.exit = Some(exit);
        }
    }

    fn signal(&mut self, pid: Pid, signal: Signal) {
        if self.frozen.contains(&pid) {
            return;
        }
        self.know(pid);
        let Some(task) = self.tasks.get_mut(&pid) else {
            return self.go(pid);
        };
        if task.is_new && signal == Signal::SIGSTOP {
            task.is_new = false;
            return self.go(pid);
        }
        if signal == Signal::SIGSTOP && self.is_stopping && ptrace::getsiginfo(pid).is_err() {
            // It has stopped, and does not just receive the signal.
            return self.stopped.push(pid);
        }
        let _ = ptrace::cont(pid, signal);
    }

    /// Adds a task that stopped before its parent's stop for starting it.
    fn know(&mut self, pid: Pid) {
        if self.tasks.contains_key(&pid) || self.frozen.contains(&pid) {
            return;
        }
        let field = |name: &str| -> Option<Pid> {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            Some(Pid::from_raw(line.trim().parse().ok()?))
        };
        let Some(process) = field("Tgid:") else {
            return;
        };
        let relative = if process == pid {
            field("PPid:")
        } else {
            Some(process)
        };
        let parent = relative.and_then(|relative| {
            let mut tasks = self.tasks.values();
            tasks.find(|task| task.process == relative)
        });
        // A process whose parent has ended belongs to the only command, or to the first of two.
        let root = parent.map_or(0, |task| task.root);
        if !self.roots[root].processes.contains(&process) {
            self.roots[root].processes.push(process);
        }
        self.tasks.insert(
            pid,
            Task {
                process,
                root,
                is_new: true,
                is_repeated: false,
            },
        );
    }

    fn event(&mut self, pid: Pid, event: i32) -> io::Result<Option<Next>> {
        match event {
            libc::PTRACE_EVENT_SECCOMP => {
                self.know(pid);
                match self.call(pid) {
                    Some(call) => return Ok(Some(Next::Call(pid, call))),
                    None => self.go(pid),
                }
            }
            libc::PTRACE_EVENT_FORK | libc::PTRACE_EVENT_VFORK | libc::PTRACE_EVENT_CLONE => {
                if let Ok(child) = ptrace::getevent(pid) {
                    self.know(Pid::from_raw(child as i32));
                }
                self.go(pid);
            }
            _ => self.go(pid),
        }
        Ok(None)
    }

    /// The call at which a task has stopped, if it names something that counts.
    fn call(&mut self, pid: Pid) -> Option<Call> {
        let task = self.tasks.get_mut(&pid)?;
        if std::mem::take(&mut task.is_repeated) {
            return None;
        }
        let (process, root) = (task.process, task.root);
        let text = fs::read_to_string(format!("/proc/{process}/task/{pid}/syscall")).ok()?;
        let mut words = text.split_whitespace();
        let known = calls::find(words.next()?.parse().ok()?)?;
        let args: Vec<u64> = words
            .filter_map(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok())
            .collect();
        let look = Look {
            process,
            scratch: &self.scratch,
        };
        let named: Vec<Named> = known
            .names
            .iter()
            .filter_map(|names| look.named(*names, &args))
            .collect();
        let counts = |named: &&Named| !matches!(named, Named::System);
        named.iter().find(counts)?;
        let labels: Vec<String> = named.iter().map(|named| look.label(named)).collect();
        let paths = named.into_iter().filter_map(|named| match named {
            Named::Inside(path) => Some(path),
            _ => None,
        });
        let paths = paths.collect();
        let root_of = &mut self.roots[root];
        let order = root_of.processes.iter().position(|known| *known == process);
        let label = format!(
            "{}:{} {}",
            order.unwrap_or(0),
            known.name,
            labels.join(" > ")
        );
        let count = root_of.seen.entry(label.clone()).or_default();
        *count += 1;
        Some(Call {
            root,
            key: format!("{label} #{count}"),
            paths,
            changes: CHANGES.iter().any(|begin| known.name.starts_with(begin)),
        })
    }

    pub fn send(&self, root: usize, signal: Signal) {
        let _ = kill(self.roots[root].pid, signal);
    }

    /// Stops all threads of a command (SIGSTOP) until [`Self::resume`].
    pub fn stop(&mut self, root: usize) {
        self.is_stopping = true;
        self.send(root, Signal::SIGSTOP);
    }

    pub fn resume(&mut self, root: usize) {
        self.is_stopping = false;
        self.send(root, Signal::SIGCONT);
        for task in std::mem::take(&mut self.stopped) {
            self.go(task);
        }
    }

    /// Copies the process of a task that has stopped at a call. The copy has all that fork(2) copies, and never runs.
    #[cfg(target_arch = "x86_64")]
    pub fn fork(&mut self, task: Pid) -> io::Result<()> {
        let before = ptrace::getregs(task)?;
        let mut regs = before;
        regs.orig_rax = libc::SYS_clone as u64;
        regs.rax = regs.orig_rax;
        regs.rdi = libc::SIGCHLD as u64;
        (regs.rsi, regs.rdx, regs.r10, regs.r8) = (0, 0, 0, 0);
        ptrace::setregs(task, regs)?;
        ptrace::syscall(task, None)?;
        loop {
            match waitpid(task, Some(WaitPidFlag::__WALL))? {
                WaitStatus::PtraceEvent(_, _, _) => {
                    let child = Pid::from_raw(ptrace::getevent(task)? as i32);
                    self.tasks.remove(&child);
                    self.frozen.push(child);
                    ptrace::syscall(task, None)?;
                }
                WaitStatus::PtraceSyscall(_) => break,
                WaitStatus::Stopped(_, signal) => ptrace::syscall(task, signal)?,
                other => return Err(io::Error::other(format!("no fork: {other:?}"))),
            }
        }
        if ptrace::getregs(task)?.rax as i64 <= 0 {
            return Err(io::Error::other("the fork failed"));
        }
        // The call itself is executed now, and stops again.
        let mut regs = before;
        regs.rax = before.orig_rax;
        regs.rip -= 2;
        ptrace::setregs(task, regs)?;
        if let Some(task) = self.tasks.get_mut(&task) {
            task.is_repeated = true;
        }
        Ok(())
    }

    /// Changing the number of a call needs a set of registers that nix does not know.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn fork(&mut self, _: Pid) -> io::Result<()> {
        Err(io::Error::other("only on x86-64"))
    }

    /// Ends the copies that [`Self::fork`] has made.
    pub fn end_copies(&self) {
        for pid in &self.frozen {
            let _ = kill(*pid, Signal::SIGKILL);
        }
    }

    /// Ends everything.
    pub fn kill(&mut self) -> io::Result<()> {
        for _ in 0..1000 {
            for pid in self.tasks.keys().chain(&self.frozen) {
                let _ = kill(*pid, Signal::SIGKILL);
            }
            let flags = WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD | WaitPidFlag::WNOHANG;
            match waitpid(Pid::from_raw(-1), Some(flags)) {
                Err(Errno::ECHILD) => return Ok(()),
                Ok(WaitStatus::StillAlive) => std::thread::sleep(Duration::from_millis(1)),
                Ok(WaitStatus::Exited(pid, code)) => self.ended(pid, Exit::Status(code)),
                Ok(WaitStatus::Signaled(pid, signal, _)) => {
                    self.ended(pid, Exit::Signal(signal as i32));
                }
                Ok(status) => {
                    if let Some(pid) = status.pid() {
                        self.know(pid);
                        self.go(pid);
                    }
                }
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            if self.tasks.is_empty() && self.frozen.is_empty() {
                return Ok(());
            }
        }
        Err(io::Error::other("processes do not end"))
    }
}

/// How the names of calls begin that change names or locks.
const CHANGES: [&str; 7] = [
    "flock", "unlink", "rename", "link", "rmdir", "symlink", "bind",
];

/// What an argument names.
enum Named {
    Inside(PathBuf),
    /// Neither a file in the scratch folder nor of the system: memory, a socket, a ring.
    Other(String),
    /// A file of the system, which no action touches.
    System,
}

struct Look<'a> {
    process: Pid,
    scratch: &'a Path,
}

impl Look<'_> {
    fn named(&self, names: Names, args: &[u64]) -> Option<Named> {
        let arg = |at: usize| args.get(at).copied();
        Some(match names {
            Names::Made => Named::Other("new".to_string()),
            Names::Fd(at) => self.of_fd(arg(at)? as i32)?,
            Names::Path(at) => self.of_path(None, arg(at)?)?,
            Names::At(folder, at) => self.of_path(Some(arg(folder)? as i32), arg(at)?)?,
            Names::Address(at, len) => {
                let bytes = self.memory(arg(at)?, (arg(len)? as usize).min(128));
                let path = bytes.get(2..).unwrap_or_default();
                let end = path.iter().position(|byte| *byte == 0);
                let path = &path[..end.unwrap_or(path.len())];
                if path.is_empty() {
                    return None;
                } else {
                    self.place(None, Path::new(std::ffi::OsStr::from_bytes(path)))
                }
            }
        })
    }

    fn memory(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let mem = File::open(format!("/proc/{}/mem", self.process));
        let got = mem.and_then(|mem| mem.read_at(&mut bytes, at));
        bytes.truncate(got.unwrap_or(0));
        bytes
    }

    fn text(&self, at: u64) -> Vec<u8> {
        const PAGE: u64 = 4096;
        let mut bytes = Vec::new();
        while bytes.len() < PAGE as usize {
            let from = at + bytes.len() as u64;
            let part = self.memory(from, (PAGE - from % PAGE) as usize);
            if let Some(end) = part.iter().position(|byte| *byte == 0) {
                bytes.extend(&part[..end]);
                return bytes;
            }
            if part.is_empty() {
                break;
            }
            bytes.extend(part);
        }
        bytes
    }

    fn of_fd(&self, fd: i32) -> Option<Named> {
        if fd < 0 {
            return None;
        }
        let link = fs::read_link(format!("/proc/{}/fd/{fd}", self.process)).ok()?;
        let text = link.to_string_lossy();
        let text = text.trim_end_matches(" (deleted)");
        if text.starts_with(&*self.scratch.to_string_lossy()) {
            return Some(Named::Inside(text.into()));
        }
        if text.starts_with("/memfd:") {
            return Some(Named::Other("memory".to_string()));
        }
        if text.starts_with('/') {
            return Some(Named::System);
        }
        // socket:[NUMBER], pipe:[NUMBER], anon_inode:[io_uring]
        let kind = text.trim_start_matches("anon_inode:");
        let kind = if kind.starts_with('[') {
            kind.trim_matches(|c| c == '[' || c == ']')
        } else {
            kind.split(':').next().unwrap_or(kind)
        };
        match kind {
            // The streams of the command itself, which no action touches.
            "pipe" if fd <= 2 => Some(Named::System),
            kind => Some(Named::Other(kind.to_string())),
        }
    }

    fn of_path(&self, folder: Option<i32>, at: u64) -> Option<Named> {
        let path = match at {
            0 => Vec::new(),
            at => self.text(at),
        };
        if path.is_empty() {
            return self.of_fd(folder?);
        }
        Some(self.place(folder, Path::new(std::ffi::OsStr::from_bytes(&path))))
    }

    fn place(&self, folder: Option<i32>, path: &Path) -> Named {
        let own = path
            .strip_prefix("/proc/self/fd")
            .ok()
            .or_else(|| path.strip_prefix(format!("/proc/{}/fd", self.process)).ok());
        if let Some(fd) = own.and_then(|fd| fd.components().next()) {
            let fd = fd.as_os_str().to_string_lossy().parse();
            return fd
                .ok()
                .and_then(|fd| self.of_fd(fd))
                .unwrap_or(Named::System);
        }
        let base = match folder {
            _ if path.is_absolute() => PathBuf::new(),
            Some(fd) if fd >= 0 => {
                let link = fs::read_link(format!("/proc/{}/fd/{fd}", self.process));
                link.unwrap_or_default()
            }
            _ => fs::read_link(format!("/proc/{}/cwd", self.process)).unwrap_or_default(),
        };
        let whole = plain(&base.join(path));
        if whole.starts_with(self.scratch) {
            Named::Inside(whole)
        } else {
            Named::System
        }
    }

    /// The same in all runs.
    fn label(&self, named: &Named) -> String {
        match named {
            Named::Other(kind) => kind.clone(),
            Named::System => "system".to_string(),
            Named::Inside(path) => {
                let inside = path.strip_prefix(self.scratch).unwrap_or(path);
                steady(&inside.to_string_lossy())
            }
        }
    }
}

/// Without `.` in it.
fn plain(path: &Path) -> PathBuf {
    path.components()
        .filter(|part| *part != Component::CurDir)
        .collect()
}

/// A name without what differs between two runs: long numbers, and random letters after `dmafile-`.
pub fn steady(name: &str) -> String {
    let mut out = String::new();
    for (at, part) in name.split('/').enumerate() {
        if at > 0 {
            out.push('/');
        }
        if part
            .strip_prefix("dmafile-")
            .is_some_and(|rest| rest.len() == 6)
        {
            out.push_str("dmafile-*");
            continue;
        }
        for word in part.split_inclusive(['.', '-', '#']) {
            let letters = word.trim_end_matches(['.', '-', '#']);
            let long = letters.len() >= 3 && letters.bytes().all(|byte| byte.is_ascii_hexdigit());
            out.push_str(if long { "*" } else { letters });
            out.push_str(&word[letters.len()..]);
        }
    }
    out
}
