//! Looks at the held files on the disk, so that answers can say whether they have changed.
//!
//! A file system may not answer for minutes (a network, a FUSE server), and the holder must go on. So a thread of
//! its own looks, and an answer waits for it only for a moment. The kernel does not end a thread that waits for a
//! FUSE server, not even by SIGKILL, and a process ends with its last thread: so the thread may leave the system
//! calls to another process ([`Hold::looker`](super::Hold::looker)).

use super::identity::FileIdentity;
use super::set::Set;
use dmafile_sys::{Errno, socket};
use rustix::net::Shutdown;
use rustix::pipe::PipeFlags;
use std::collections::VecDeque;
use std::ffi::OsStr;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

/// How long an answer waits for a look.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);
/// The longest path that can be looked at elsewhere; the kernel's limit is 4096.
const LONGEST_PATH: usize = 8 << 10;

/// The thread, and what it has seen.
pub(super) struct FileWatch {
    /// The thread ends when this is dropped. Nothing waits for it: it may be waiting for a file system.
    wanted: Sender<Range<usize>>,
    news: Receiver<News>,
    /// Readable when there is news.
    notifier: OwnedFd,
    /// How many looks were wanted.
    asked: u64,
    /// When those that have not ended were.
    waiting: VecDeque<Instant>,
    /// The number of the last look at each file, and whether it had changed.
    seen: Vec<(u64, bool)>,
}

/// A look at some files.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    number: u64,
    /// When its result is no longer waited for.
    pub until: Instant,
}

enum News {
    Seen {
        look: u64,
        file: usize,
        changed: bool,
    },
    Ended,
}

impl FileWatch {
    /// Starts the thread.
    pub(super) fn start(set: &Set, looker: Option<Command>) -> Result<Self, Errno> {
        let members = set.members.iter();
        let files: Vec<_> = members
            .map(|member| (member.info.file.clone(), member.info.identity))
            .collect();
        let seen = vec![(0, false); files.len()];
        let (wanted, ranges) = mpsc::channel();
        let (teller, news) = mpsc::channel();
        let flags = PipeFlags::CLOEXEC | PipeFlags::NONBLOCK;
        let (notifier, ring) = rustix::pipe::pipe_with(flags)?;
        let looker = Looker::new(looker);
        let work = move || work(&files, looker, &ranges, &teller, &ring);
        let thread = std::thread::Builder::new().name("dmafile-look".to_string());
        thread.spawn(work).map_err(dmafile_sys::errno)?;
        Ok(Self {
            wanted,
            news,
            notifier,
            asked: 0,
            waiting: VecDeque::new(),
            seen,
        })
    }

    /// Readable when there is something to [`hear`](Self::hear).
    pub(super) fn notifier(&self) -> BorrowedFd<'_> {
        self.notifier.as_fd()
    }

    /// Notes what the thread has seen.
    pub(super) fn hear(&mut self) {
        let mut bytes = [0; 64];
        while rustix::io::read(&self.notifier, &mut bytes).is_ok_and(|got| got == bytes.len()) {}
        for news in self.news.try_iter() {
            match news {
                News::Seen {
                    look,
                    file,
                    changed,
                } => self.seen[file] = (look, changed),
                News::Ended => drop(self.waiting.pop_front()),
            }
        }
    }

    /// Has the thread look at files that are wanted now. While an earlier look takes too long, it is not waited
    /// for.
    pub(super) fn look(&mut self, files: Range<usize>, now: Instant) -> Look {
        let hangs = |asked: &Instant| now >= *asked + REPLY_TIMEOUT;
        if self.waiting.front().is_some_and(hangs) || self.wanted.send(files).is_err() {
            return Look {
                number: u64::MAX,
                until: now,
            };
        }
        self.asked += 1;
        self.waiting.push_back(now);
        Look {
            number: self.asked,
            until: now + REPLY_TIMEOUT,
        }
    }

    /// True if nothing more is to be expected of a look.
    pub(super) fn is_over(&self, look: Look, now: Instant) -> bool {
        now >= look.until || look.number <= self.asked - self.waiting.len() as u64
    }

    /// True if a file had changed at this look, or a later one. None if its file system did not answer.
    pub(super) fn changed(&self, file: usize, look: Look) -> Option<bool> {
        let (number, changed) = self.seen[file];
        (number >= look.number).then_some(changed)
    }
}

/// The thread.
fn work(
    files: &[(PathBuf, FileIdentity)],
    mut looker: Looker,
    wanted: &Receiver<Range<usize>>,
    teller: &Sender<News>,
    ring: &OwnedFd,
) {
    for (look, range) in (1..).zip(wanted) {
        for file in range {
            let (path, identity) = &files[file];
            let changed = !identity.is_of_object() && looker.at(path) != Some(*identity);
            let seen = News::Seen {
                look,
                file,
                changed,
            };
            if teller.send(seen).is_err() {
                return;
            }
        }
        if teller.send(News::Ended).is_err() {
            return;
        }
        // A full pipe is readable.
        let _ = rustix::io::write(ring, &[0]);
    }
}

/// Who makes the system calls.
enum Looker {
    /// This thread.
    Here,
    /// Another process, at the other end of the socket.
    There(Child, OwnedFd),
}

impl Looker {
    fn new(program: Option<Command>) -> Self {
        let start = |mut program: Command| {
            let (ours, theirs) = socket::pair().ok()?;
            // What reads this process's output must not wait for that one, and no file system be kept busy.
            let program = program
                .stdin(theirs)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .current_dir("/");
            Some(Self::There(program.spawn().ok()?, ours))
        };
        program.and_then(start).unwrap_or(Self::Here)
    }

    /// The identity of the file at a path; None if there is none.
    fn at(&mut self, path: &Path) -> Option<FileIdentity> {
        if let Self::There(_, socket) = self {
            match ask(socket.as_fd(), path) {
                Ok(found) => return found,
                // It has ended.
                Err(_) => *self = Self::Here,
            }
        }
        FileIdentity::at(path).ok()
    }
}

impl Drop for Looker {
    fn drop(&mut self) {
        if let Self::There(child, socket) = self {
            // It ends with the connection.
            let _ = rustix::net::shutdown(socket, Shutdown::Both);
            let _ = child.wait();
        }
    }
}

fn ask(socket: BorrowedFd<'_>, path: &Path) -> Result<Option<FileIdentity>, Errno> {
    socket::send(socket, path.as_os_str().as_bytes(), &[], true)?;
    let mut bytes = [0; 1 << 10];
    match socket::receive_up_to(socket, &mut bytes, true)? {
        (0, _) => Err(Errno::CONNRESET),
        (got, _) => serde_json::from_slice(&bytes[..got]).map_err(|_| Errno::PROTO),
    }
}

/// Looks at files for a holder in another process, until it ends. `socket` is the standard input of the program
/// that [`Hold::looker`](super::Hold::looker) names.
pub fn look_for_holder(socket: OwnedFd) {
    let mut bytes = [0; LONGEST_PATH];
    loop {
        let found = match socket::receive_up_to(socket.as_fd(), &mut bytes, true) {
            Ok((0, _)) => return,
            Ok((got, _)) => FileIdentity::at(Path::new(OsStr::from_bytes(&bytes[..got]))).ok(),
            // It is longer than a path can be.
            Err(Errno::MSGSIZE) => None,
            Err(_) => return,
        };
        let answer = serde_json::to_vec(&found).unwrap_or_default();
        if socket::send(socket.as_fd(), &answer, &[], true).is_err() {
            return;
        }
    }
}
