//! The hold request, as a builder, and the holder that it starts.

use super::folder::{LinkFolder, Spot};
use super::load::{HoldOptions, hold_setters};
use super::place::{self, Bound, SocketAccess};
use super::protocol::HeldInfo;
use super::serve::{Ended, Server};
use super::set::Set;
use super::store;
use super::systemd::{self, Manager};
use super::watch::FileWatch;
use super::{list, name};
use dmafile::{CancelToken, Error, Kind, Load, Names, Opt, Pages, Progress, Result, Verify};
use dmafile_sys::{Errno, errno, file, sandbox, socket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// A builder for a hold: the files, how to load them, and where and to which users to serve them.
///
/// ```no_run
/// use dmafile_hold::Hold;
///
/// let holder = Hold::of(["model/"]).name("llama").start()?;
/// // Other processes can now take it: Held::take("llama"), or the command `dmafile take llama`.
/// holder.wait();
/// # Ok::<(), dmafile::Error>(())
/// ```
#[must_use = "nothing is held before `start`"]
pub struct Hold {
    wanted: HoldOptions,
    name: Option<String>,
    socket: Option<PathBuf>,
    mode: Option<u32>,
    group: Option<u32>,
    idle: Option<Duration>,
    folder: Option<PathBuf>,
    notify: bool,
    inherit: bool,
    replace: bool,
    looker: Option<Command>,
    on_loaded: Option<OnLoaded>,
}

type OnLoaded = Box<dyn FnMut(&HeldInfo, BorrowedFd<'_>) + Send>;

impl Hold {
    /// Holds files and models; a model's folder or index stands for all of its files. Each file is loaded
    /// completely into separate memory.
    pub fn of<P: Into<PathBuf>>(paths: impl IntoIterator<Item = P>) -> Self {
        Self {
            wanted: HoldOptions::new(paths.into_iter().map(Into::into).collect()),
            name: None,
            socket: None,
            mode: None,
            group: None,
            idle: None,
            folder: None,
            notify: false,
            inherit: false,
            replace: false,
            looker: None,
            on_loaded: None,
        }
    }

    /// The name: 1 to 64 letters, digits, `.`, `_` and `-`, starting with a letter or digit. Default: the name
    /// of the folder, or of the file without its extension, if there is only one.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// The path of the socket; default: the name's socket in [`Shared::place`](super::Shared::place). Only this
    /// user and root may be able to write to its folder.
    pub fn socket(mut self, socket: impl Into<PathBuf>) -> Self {
        self.socket = Some(socket.into());
        self
    }

    hold_setters!();

    /// The permissions of the socket: users that may write to it may take the files. Default 0600, or 0660
    /// with a [`Hold::group`].
    pub fn mode(mut self, mode: u32) -> Self {
        self.mode = Some(mode);
        self
    }

    /// The group ID of the socket.
    pub fn group(mut self, gid: u32) -> Self {
        self.group = Some(gid);
        self
    }

    /// Ends when no process has taken it or been connected for this long; default: never.
    pub fn idle(mut self, most: Duration) -> Self {
        self.idle = Some(most.min(super::LONGEST));
        self
    }

    /// Creates a folder that any loader of this user can read as the model while the holder runs: held files
    /// are links to their memory (`/proc/PID/fd/N`), others are links to the originals. The folder must be
    /// empty or not exist, or be that of the holder that this one [replaces](Hold::replace).
    pub fn folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.folder = Some(folder.into());
        self
    }

    /// Notifies the service manager when it serves, and has it keep the descriptors for the next start
    /// (sd_notify(3)); default false.
    pub fn notify(mut self, notify: bool) -> Self {
        self.notify = notify;
        self
    }

    /// Takes over the descriptors that the process was started with (sd_listen_fds(3)): a socket to serve on,
    /// and memory that the service manager has kept from an earlier start. If none of the files has changed on
    /// the disk, nothing is read again. Default false.
    pub fn inherit(mut self, inherit: bool) -> Self {
        self.inherit = inherit;
        self
    }

    /// Replaces another holder at the same socket, which ends. Processes that have taken its memory keep it.
    /// Default false.
    pub fn replace(mut self, replace: bool) -> Self {
        self.replace = replace;
        self
    }

    /// A program that looks at the files for the holder, and says whether they have changed: it must call
    /// [`look_for_holder`](super::look_for_holder) with its standard input. Default: none, a thread of the holder
    /// looks. A thread that waits for a FUSE server which does not answer keeps its process from ending.
    pub fn looker(mut self, program: Command) -> Self {
        self.looker = Some(program);
        self
    }

    /// Calls `with` with each file that was loaded and its memory, before it is served: not for what the service
    /// manager had kept, and not for memory of several descriptors.
    pub fn on_loaded(
        mut self,
        with: impl FnMut(&HeldInfo, BorrowedFd<'_>) + Send + 'static,
    ) -> Self {
        self.on_loaded = Some(Box::new(with));
        self
    }

    /// Loads the files, and serves them from a thread.
    ///
    /// # Errors
    /// As [`Load::run`], for each file; EADDRINUSE if another holder serves there; EPERM for a folder that other
    /// users can write to; EEXIST for two files with the same name, and for a folder of links that is not
    /// empty; EBUSY if another holder has that folder; ENOENT for [`Hold::notify`] without a service manager.
    pub fn start(mut self) -> Result<Holder> {
        self.wanted.check()?;
        let name = self.chosen_name()?;
        self.check_folder()?;
        let manager = self.notify.then(Manager::of_environment).transpose()?;
        let mut inherited = if self.inherit {
            systemd::inherited()?
        } else {
            Vec::new()
        };
        let stored = store::own(&name, &mut inherited);
        let listener = self.listener(inherited)?;
        let at = match (&listener, &self.socket) {
            (Some(_), _) => None,
            (None, Some(at)) => Some(at.clone()),
            (None, None) => Some(place::own_folder()?.place(&name)),
        };
        // Checked before a load that may take minutes.
        if let Some(at) = &at {
            place::check(at, self.replace)?;
        }
        let at_socket = at.as_deref().unwrap_or(Path::new(""));
        let folder = self.folder.as_ref();
        let spot = folder.map(|path| Spot::check(path, at_socket, self.replace));
        let spot = spot.transpose()?;
        let mut old: Vec<_> = stored.iter().map(|(name, _)| name.clone()).collect();
        let found = store::find(&name, stored, &self.wanted);
        let is_stored = found.is_some();
        // What another kernel has handed over is kept as memory of this one.
        let is_kept = found.as_ref().is_some_and(|found| !found.is_handed_over);
        let roots = store::roots(&self.wanted.paths);
        let set = match (found, &manager) {
            (Some(found), _) => found.set,
            (None, None) => self.wanted.set(&name)?,
            (None, Some(manager)) => self.new_set(&name, manager, &mut old)?,
        };
        if let Some(with) = self.on_loaded.as_mut().filter(|_| !is_stored) {
            for member in &set.members {
                if let [fd] = &member.fds[..] {
                    with(&member.info, fd.as_fd());
                }
            }
        }
        let access = SocketAccess {
            mode: self
                .mode
                .unwrap_or(if self.group.is_some() { 0o660 } else { 0o600 }),
            group: self.group,
        };
        // Everything that can fail comes before the first change that others see; each change is undone if a later one
        // fails.
        let waiting = Waiting::start(&set, self.looker.take())?;
        let mut bound = match (listener, at) {
            (Some(listener), _) => Bound::inherited(listener)?,
            (None, Some(at)) => Bound::beside(&at, access)?,
            (None, None) => unreachable!("without a socket there is a path"),
        };
        let asked = &self.wanted.paths;
        let folder = spot.map(|spot| LinkFolder::make(spot, &set, asked, self.replace));
        let mut folder = folder.transpose()?;
        if let Some(manager) = manager.as_ref().filter(|_| !is_kept) {
            manager.forget_all(&old)?;
            store::keep(manager, &set, &self.wanted, roots)?;
        }
        if let Some(folder) = &mut folder {
            folder.put()?;
        }
        bound.put(self.replace)?;
        if let Some(manager) = &manager {
            manager.tell("READY=1\n", &[])?;
        }
        let replaced = bound.stay()?;
        if let Some(folder) = &mut folder {
            folder.stay();
        }
        let mut holder = waiting.serve(set, bound, self.idle, folder, manager);
        holder.stored = is_stored;
        if let Some(other) = replaced {
            // Its socket has no path any more, so it does not matter if it does not answer.
            let _ = list::end(&other.path(), &name, &CancelToken::new());
        }
        Ok(holder)
    }

    /// Loads the files, although the manager still keeps what they were. If memory is too small for both, it gives that
    /// up first; otherwise it keeps that until nothing can fail any more, because a model that is just being copied
    /// fails to load.
    fn new_set(&mut self, name: &str, manager: &Manager, old: &mut Vec<String>) -> Result<Set> {
        match self.wanted.set(name) {
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) && !old.is_empty() => {
                manager.forget_all(old)?;
                manager.wait()?;
                old.clear();
                self.wanted.set(name)
            }
            loaded => loaded,
        }
    }

    fn chosen_name(&self) -> Result<String> {
        let name = match (&self.name, &self.wanted.paths[..]) {
            (Some(name), _) => name.clone(),
            (None, [path]) => {
                let real = path.canonicalize().map_err(|error| {
                    Error::os("cannot open", errno(error)).at(path.display().to_string())
                })?;
                name::of(&real).ok_or_else(|| {
                    let why = format!(
                        "'{}' does not yield a valid name: choose one",
                        path.display()
                    );
                    Error::usage("name", why)
                })?
            }
            (None, _) => return Err(Error::usage("name", "several paths need one")),
        };
        name::check(&name)?;
        Ok(name)
    }

    /// Files behind links must be identical to those on the disk.
    fn check_folder(&self) -> Result<()> {
        let whole = matches!(self.wanted.kind, Kind::Memfd) && self.wanted.pages != Pages::Huge;
        if self.folder.is_some() && !whole {
            let why = "readers of files need a memfd without hugetlb pages";
            return Err(Error::usage(Opt::To, why));
        }
        Ok(())
    }

    /// The socket among the inherited descriptors, if there is one.
    fn listener(&self, inherited: Vec<(String, OwnedFd)>) -> Result<Option<OwnedFd>> {
        for (name, fd) in inherited {
            match socket::is_listener(fd.as_fd()) {
                Ok(true) => return Ok(Some(fd)),
                // Memory that was kept for a hold with another name: not usable here.
                Ok(false) | Err(Errno::NOTSOCK) if name.starts_with("dmafile-") => {}
                _ => {
                    return Err(Error::new(
                        "cannot use an inherited descriptor",
                        "it is not a listening socket of type SOCK_SEQPACKET",
                    )
                    .with_errno(Errno::PROTOTYPE)
                    .at(format!("LISTEN_FDS, {name}"))
                    .with_remedy("use ListenSequentialPacket= in its unit"));
                }
            }
        }
        Ok(None)
    }
}

/// Files that are held, and served by a thread until this is dropped.
///
/// Processes that have taken the memory keep it.
#[must_use = "it ends where it is dropped"]
#[derive(Debug)]
pub struct Holder {
    name: String,
    at: PathBuf,
    files: Vec<HeldInfo>,
    stored: bool,
    thread: Option<JoinHandle<Ended>>,
    stop: OwnedFd,
    /// The process that has the thread; a forked child does not.
    pid: u32,
}

/// A thread that does not serve anything yet, so that serving cannot fail.
struct Waiting {
    thread: JoinHandle<Ended>,
    begin: Sender<Box<dyn FnOnce() -> Ended + Send>>,
    watch: FileWatch,
    stopped: OwnedFd,
    stop: OwnedFd,
}

impl Waiting {
    fn start(set: &Set, looker: Option<Command>) -> Result<Self> {
        let calls = [sandbox::PIPE2, sandbox::CLONE3];
        let failed = |errno| Error::os("cannot serve", errno).of_calls(&calls);
        let flags = rustix::pipe::PipeFlags::CLOEXEC;
        let (stopped, stop) = rustix::pipe::pipe_with(flags).map_err(failed)?;
        let watch = FileWatch::start(set, looker).map_err(failed)?;
        let (begin, begun) = channel::<Box<dyn FnOnce() -> Ended + Send>>();
        let serve = move || begun.recv().map_or(Ended::Stopped, |serve| serve());
        let thread = std::thread::Builder::new().name("dmafile-hold".to_string());
        let thread = thread.spawn(serve).map_err(|error| failed(errno(error)))?;
        Ok(Self {
            thread,
            begin,
            watch,
            stopped,
            stop,
        })
    }

    fn serve(
        self,
        set: Set,
        bound: Bound,
        idle: Option<Duration>,
        folder: Option<LinkFolder>,
        manager: Option<Manager>,
    ) -> Holder {
        let (name, at) = (set.name.clone(), bound.path.clone());
        let files = set
            .members
            .iter()
            .map(|member| member.info.clone())
            .collect();
        let server = Server::new(set, self.watch, bound, self.stopped, idle);
        let serve = move || {
            let (ended, set) = server.run();
            drop(folder);
            if let (Ended::Released, Some(manager)) = (ended, manager) {
                // The service manager drops it at the latest when the service ends.
                let _ = store::forget(&manager, &set);
            }
            ended
        };
        // The thread waits for nothing else.
        let _ = self.begin.send(Box::new(serve));
        Holder {
            name,
            at,
            files,
            stored: false,
            thread: Some(self.thread),
            stop: self.stop,
            pid: std::process::id(),
        }
    }
}

impl Holder {
    /// Serves what this process has at a socket of its own.
    pub(super) fn serve(set: Set, bound: Bound) -> Result<Self> {
        Ok(Waiting::start(&set, None)?.serve(set, bound, None, None, None))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The path of the socket; empty for an inherited one without a path.
    pub fn socket(&self) -> &Path {
        &self.at
    }

    /// The files, as they were when serving began.
    pub fn files(&self) -> &[HeldInfo] {
        &self.files
    }

    /// Returns `true` if the service manager had kept the memory, so nothing was read.
    pub fn is_stored(&self) -> bool {
        self.stored
    }

    /// Returns `true` if it is still serving: it has neither been released nor been idle for too long.
    pub fn is_serving(&self) -> bool {
        self.thread
            .as_ref()
            .is_some_and(|thread| !thread.is_finished())
    }

    /// A descriptor that stops it when a byte is written to it: for signal handlers.
    ///
    /// # Errors
    /// EMFILE.
    pub fn stopper(&self) -> Result<OwnedFd> {
        file::dup(self.stop.as_fd()).map_err(|errno| Error::os("cannot serve", errno))
    }

    /// Waits until it ends, and returns why.
    pub fn wait(mut self) -> Ended {
        self.join()
    }

    /// Stops serving.
    pub fn stop(self) {}

    fn join(&mut self) -> Ended {
        match self.thread.take() {
            Some(thread) if std::process::id() == self.pid => {
                thread.join().unwrap_or(Ended::Stopped)
            }
            // In a forked child: the thread belongs to the parent.
            other => {
                std::mem::forget(other);
                Ended::Stopped
            }
        }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        if std::process::id() == self.pid {
            let _ = rustix::io::write(&self.stop, &[0]);
        }
        self.join();
    }
}
