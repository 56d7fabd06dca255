//! Takes files that another process holds.

use super::holder::Holder;
use super::name;
use super::place;
use super::protocol::{Answer, HeldInfo, LONGEST_ANSWER, Op, PeerRequest};
use dmafile::internal::Verb;
use dmafile::{Buffer, CancelToken, Error, Result};
use dmafile_sys::socket::{self, Credentials};
use dmafile_sys::{Errno, file, sandbox};
use rustix::process::{Pid, PidfdFlags};
use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a holder may take to answer.
pub(super) const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to wait for an answer if the process that created the socket has ended: another process may have
/// inherited it and serve it.
pub(super) const ORPHAN_TIMEOUT: Duration = Duration::from_millis(500);
/// Interval at which the holder and the token are checked.
const STEP: Duration = Duration::from_millis(10);

/// A builder for a take: the name, the socket, and how long to wait.
#[must_use = "nothing is taken before `run`"]
pub struct Take {
    name: String,
    socket: Option<PathBuf>,
    wait: Duration,
    cancel: CancelToken,
}

/// Files in memory that another process loaded, taken from its holder.
///
/// The memory exists for as long as any process has it, even if the holder ends. Until this is dropped, or the
/// process ends, the holder counts it as a taker; there is no connection.
#[derive(Debug)]
pub struct Held {
    name: String,
    files: Vec<HeldFile>,
    from: From,
}

/// One of these files.
#[derive(Debug)]
#[non_exhaustive]
pub struct HeldFile {
    /// Its name, without a folder.
    pub name: String,
    /// The memory.
    pub buffer: Buffer,
    /// Its description by the holder.
    pub info: HeldInfo,
    /// True if this process maps its huge pages as such, if it has any: None if it has none, or if that cannot
    /// be found out.
    pub huge: Option<bool>,
    /// What is to be undone when the memory is no longer in use.
    _from: Arc<KeepAlive>,
}

/// The source of the memory.
#[derive(Clone, Debug)]
struct From {
    at: PathBuf,
    who: Credentials,
}

/// What must exist for as long as the memory is in use here.
#[derive(Debug)]
pub(super) enum KeepAlive {
    /// The holder counts this process.
    Taken(Taken),
    /// This process passes it on.
    Serving { _holder: Holder },
}

/// Tells the holder when it is dropped.
#[derive(Debug)]
pub(super) struct Taken {
    name: String,
    from: From,
    /// The process that took it; a forked child does not count.
    pid: u32,
    until_exit: AtomicBool,
}

impl Drop for Taken {
    fn drop(&mut self) {
        if *self.until_exit.get_mut() || std::process::id() != self.pid {
            return;
        }
        // If the holder does not hear it, it counts this process until that ends.
        let socket = place::connect(Verb::Take, &self.from.at);
        if let Some(socket) = socket.ok()
            && socket::credentials(socket.as_fd()) == Ok(self.from.who)
            && let Ok(request) = PeerRequest::new(Op::Return, Some(&self.name), 0).message()
        {
            let _ = socket::send(socket.as_fd(), &request, &[], false);
        }
    }
}

impl Held {
    /// Takes the files that are held under a name.
    ///
    /// ```no_run
    /// use dmafile_hold::Held;
    /// use std::time::Duration;
    ///
    /// let held = Held::take("llama").wait(Duration::from_secs(60)).run()?;
    /// for file in held.files() {
    ///     println!("{}: {} bytes", file.name, file.buffer.len());
    /// }
    /// # Ok::<(), dmafile::Error>(())
    /// ```
    pub fn take(name: impl Into<String>) -> Take {
        Take {
            name: name.into(),
            socket: None,
            wait: Duration::ZERO,
            cancel: CancelToken::new(),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its files, in the order in which the holder loaded them.
    pub fn files(&self) -> &[HeldFile] {
        &self.files
    }

    /// Only the files.
    pub fn into_files(self) -> Vec<HeldFile> {
        self.files
    }

    /// Lets the holder count this process until it ends, even after this has been dropped: for a program that it is
    /// about to execute.
    pub fn count_until_exit(&self) {
        if let Some(KeepAlive::Taken(taken)) = self.files.first().map(|file| &*file._from) {
            taken.until_exit.store(true, Ordering::Relaxed);
        }
    }

    /// The path of the socket that it was taken from.
    pub fn socket(&self) -> &Path {
        &self.from.at
    }

    /// The process that served it, and its user; process 0 means another PID namespace.
    pub fn holder(&self) -> (u32, u32) {
        (self.from.who.pid, self.from.who.uid)
    }

    /// Files that this process has loaded itself.
    pub(super) fn own(name: String, files: Vec<(Buffer, HeldInfo)>, holder: Holder) -> Self {
        let from = From {
            at: holder.socket().to_path_buf(),
            who: Credentials {
                pid: std::process::id(),
                uid: place::user(),
                gid: rustix::process::getegid().as_raw(),
            },
        };
        let kept = Arc::new(KeepAlive::Serving { _holder: holder });
        let files = files.into_iter();
        let files = files.map(|(buffer, info)| HeldFile::new(buffer, info, Arc::clone(&kept)));
        Self {
            name,
            files: files.collect(),
            from,
        }
    }

    /// The same, served by this process from now on.
    pub(super) fn passed_on(mut self, holder: Holder) -> Self {
        let kept = Arc::new(KeepAlive::Serving { _holder: holder });
        for file in &mut self.files {
            file._from = Arc::clone(&kept);
        }
        self
    }
}

impl HeldFile {
    fn new(buffer: Buffer, info: HeldInfo, from: Arc<KeepAlive>) -> Self {
        Self {
            name: info.name.clone(),
            huge: if info.pages.contains("thp") {
                buffer.has_huge_mapping()
            } else {
                None
            },
            buffer,
            info,
            _from: from,
        }
    }
}

impl Take {
    /// The path of the socket; default: the name's socket of this user, or else of root.
    pub fn socket(mut self, socket: impl Into<PathBuf>) -> Self {
        self.socket = Some(socket.into());
        self
    }

    /// How long to wait until something is held there; default: not at all.
    pub fn wait(mut self, most: Duration) -> Self {
        self.wait = most.min(super::LONGEST);
        self
    }

    /// Lets `token` end the wait, for a holder or for its answer.
    pub fn cancel(mut self, token: CancelToken) -> Self {
        self.cancel = token;
        self
    }

    /// Takes the files: maps their memory, and reads nothing.
    ///
    /// The holder is not trusted: its memory must be of the kind that it claims, must not be able to shrink,
    /// and must contain the bytes of each file.
    ///
    /// # Errors
    /// ENOENT or ECONNREFUSED if nothing is held under that name after `wait`; EACCES if this user may not use
    /// the socket; EPERM if another user could have put it there; EPROTO for an invalid answer; ETIMEDOUT for
    /// no answer within 10 seconds; EMFILE if this process has too many open descriptors.
    pub fn run(self) -> Result<Held> {
        name::check(&self.name)?;
        let places = match &self.socket {
            Some(at) => vec![at.clone()],
            None => {
                let folders = place::folders().into_iter();
                folders.map(|folder| folder.join(&self.name)).collect()
            }
        };
        let until = Instant::now() + self.wait;
        loop {
            let mut first = None;
            for (at, next) in places.iter().zip(1..) {
                match take(at, &self.name, until, &self.cancel) {
                    Ok(held) => return Ok(held),
                    Err(error)
                        if is_absent(&error) || (next < places.len() && is_barred(&error)) =>
                    {
                        first = first.or(Some(error));
                    }
                    Err(error) => return Err(error),
                }
            }
            let error = first.expect("there is a place to look at");
            if self.cancel.is_cancelled() {
                return Err(Error::cancelled(Verb::Take, &self.name));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(error);
            }
            std::thread::sleep(STEP.min(left));
        }
    }
}

/// True if nothing is held there, yet or any more.
fn is_absent(error: &Error) -> bool {
    [
        libc::ENOENT,
        libc::ECONNREFUSED,
        libc::ECONNRESET,
        libc::EPIPE,
        libc::EUSERS,
    ]
    .map(Some)
    .contains(&error.raw_os_error())
}

/// True if this user cannot use the folder, or what is in it. `$XDG_RUNTIME_DIR` may be that of another user
/// (su(1)); root's folder is looked at nevertheless.
pub(super) fn is_barred(error: &Error) -> bool {
    [libc::EACCES, libc::EPERM, libc::ENOTDIR, libc::ELOOP]
        .map(Some)
        .contains(&error.raw_os_error())
}

/// Makes one attempt.
fn take(at: &Path, name: &str, until: Instant, cancel: &CancelToken) -> Result<Held> {
    let talk = Talk::begin(Verb::Take, at, until, cancel)?;
    talk.request(Op::Take, Some(name), 0)?;
    receive(talk, name)
}

/// Takes the files from a holder that has been asked for the first ones.
pub(super) fn receive(talk: Talk, name: &str) -> Result<Held> {
    let at = talk.at.clone();
    let mut files: Vec<(Buffer, HeldInfo)> = Vec::new();
    loop {
        let (answer, fds) = talk.answer()?;
        let mut fds = fds.into_iter();
        let count = answer.files.len();
        for info in answer.files {
            let own: Vec<_> = fds.by_ref().take(info.descriptors).collect();
            if own.len() != info.descriptors {
                return Err(talk.unsound("the reply carries too few descriptors"));
            }
            let buffer = Buffer::of_peer(own, &info.kind, (info.offset, info.bytes), info.sealed)
                .map_err(|why| {
                talk.unsound(&why)
                    .at(format!("{}, {}", at.display(), info.name))
            })?;
            files.push((buffer, info));
        }
        if fds.next().is_some() {
            return Err(talk.unsound("the reply carries too many descriptors"));
        }
        if count == 0 || files.len() > answer.total {
            return Err(talk.unsound("it has no files, or not as many as it announces"));
        }
        if files.len() == answer.total {
            break;
        }
        talk.request(Op::Take, Some(name), files.len())?;
    }
    let mut names = BTreeSet::new();
    for (_, info) in &mut files {
        if !info.complete() || !names.insert(info.file_name()) {
            let why = format!("{:?} is not a valid file name, or appears twice", info.name);
            return Err(talk.unsound(&why));
        }
    }
    let at = std::path::absolute(&at).unwrap_or(at);
    let from = From { at, who: talk.who };
    let kept = Arc::new(KeepAlive::Taken(Taken {
        name: name.to_string(),
        from: from.clone(),
        pid: std::process::id(),
        until_exit: AtomicBool::new(false),
    }));
    let files = files.into_iter();
    let files = files.map(|(buffer, info)| HeldFile::new(buffer, info, Arc::clone(&kept)));
    Ok(Held {
        name: name.to_string(),
        files: files.collect(),
        from,
    })
}

/// True if a process has ended; false for one in another PID namespace (0).
pub(super) fn has_ended(pid: u32) -> bool {
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return false;
    };
    match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        // A pidfd is readable when its process has ended, even before it is reaped (pidfd_open(2)).
        Ok(process) => file::wait_readable(process.as_fd(), Duration::ZERO) == Ok(true),
        Err(errno) => errno == Errno::SRCH,
    }
}

/// A connection to a holder.
pub(super) struct Talk {
    socket: OwnedFd,
    at: PathBuf,
    pub who: Credentials,
    until: Instant,
    cancel: CancelToken,
    what: Verb,
}

impl Talk {
    /// Connects. `what` names the operation in errors. The last answer must arrive by `until`, or in reasonable
    /// time, unless `cancel` ends the wait.
    pub(super) fn begin(
        what: Verb,
        at: &Path,
        until: Instant,
        cancel: &CancelToken,
    ) -> Result<Self> {
        let until = until.max(Instant::now() + REPLY_TIMEOUT);
        loop {
            match Self::at_once(what, at, until, cancel) {
                // The queue of connections is full.
                Err(error)
                    if error.raw_os_error() == Some(libc::EAGAIN)
                        && Instant::now() < until
                        && !cancel.is_cancelled() =>
                {
                    std::thread::sleep(STEP);
                }
                done => return done,
            }
        }
    }

    /// As [`Talk::begin`], but EAGAIN if too many others wait to be connected. Answers must arrive by `until`.
    pub(super) fn at_once(
        what: Verb,
        at: &Path,
        until: Instant,
        cancel: &CancelToken,
    ) -> Result<Self> {
        let socket = place::connect(what, at)?;
        let who = socket::credentials(socket.as_fd())
            .map_err(|errno| place::cannot_connect(what, errno, at))?;
        Ok(Self {
            socket,
            at: at.to_path_buf(),
            who,
            until,
            cancel: cancel.clone(),
            what,
        })
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Sends a request, and waits for the answer.
    pub(super) fn ask(
        &mut self,
        op: Op,
        name: Option<&str>,
        from: usize,
    ) -> Result<(Answer, Vec<OwnedFd>)> {
        self.request(op, name, from)?;
        self.answer()
    }

    /// Sends a request.
    pub(super) fn request(&self, op: Op, name: Option<&str>, from: usize) -> Result<()> {
        let bytes = PeerRequest::new(op, name, from)
            .message()
            .map_err(|error| self.unsound(&error.to_string()))?;
        let sent = socket::send(self.socket.as_fd(), &bytes, &[], false);
        sent.map_err(|errno| self.failed(errno))
    }

    fn failed(&self, errno: Errno) -> Error {
        let error = Error::os(self.what, errno).at(self.at.display().to_string());
        let error = error.of_calls(&[sandbox::SENDMSG, sandbox::RECVMSG]);
        match errno {
            Errno::MFILE => error.with_why("not all of its descriptors could be received"),
            Errno::CONNRESET | Errno::PIPE | Errno::CONNREFUSED => {
                error.with_why("its holder has ended")
            }
            Errno::TIMEDOUT => error
                .with_why("its holder does not answer")
                .with_remedy("check whether it is still running"),
            _ => error,
        }
    }

    /// Waits for the answer.
    fn answer(&self) -> Result<(Answer, Vec<OwnedFd>)> {
        let mut bytes = vec![0; LONGEST_ANSWER + 1];
        let asked = Instant::now();
        let failed = |errno| self.failed(errno);
        let (got, fds) = loop {
            match socket::receive_up_to(self.socket.as_fd(), &mut bytes, false) {
                Err(Errno::AGAIN) => {}
                Err(Errno::MSGSIZE) => return Err(self.unsound("it is too long")),
                done => break done.map_err(failed)?,
            }
            if self.cancel.is_cancelled() {
                return Err(Error::cancelled(self.what, self.at.display().to_string()));
            }
            let left = self.until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(failed(Errno::TIMEDOUT));
            }
            if !file::wait_readable(self.socket.as_fd(), left.min(STEP)).map_err(failed)?
                && asked.elapsed() >= ORPHAN_TIMEOUT
                && has_ended(self.who.pid)
            {
                // A process that the holder forked keeps the socket open, and never answers.
                return Err(failed(Errno::CONNREFUSED));
            }
        };
        if got == 0 {
            return Err(failed(Errno::CONNRESET));
        }
        let answer = Answer::parse(&bytes[..got]).map_err(|why| self.unsound(&why))?;
        if let Some(refusal) = answer.error {
            let errno = Errno::from_raw_os_error(refusal.errno.clamp(1, 4095));
            return Err(Error::new(self.what, refusal.why)
                .with_errno(errno)
                .at(self.at.display().to_string()));
        }
        Ok((answer, fds))
    }

    pub(super) fn unsound(&self, why: &str) -> Error {
        Error::new(
            self.what,
            format!("the holder's answer is not valid: {why}"),
        )
        .with_errno(Errno::PROTO)
        .at(self.at.display().to_string())
    }
}

#[cfg(fuzzing)]
#[path = "../../../fuzz/inside/taker.rs"]
pub(super) mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_without_files_is_refused() {
        let (ours, theirs) = socket::pair().unwrap();
        let answer = serde_json::to_vec(&Answer::empty()).unwrap();
        socket::send(theirs.as_fd(), &answer, &[], false).unwrap();
        let talk = Talk {
            who: socket::credentials(ours.as_fd()).unwrap(),
            socket: ours,
            at: PathBuf::from("/x"),
            until: Instant::now() + REPLY_TIMEOUT,
            cancel: CancelToken::new(),
            what: Verb::Take,
        };
        let error = receive(talk, "x").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPROTO));
    }
}
