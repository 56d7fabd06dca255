//! One connection to a holder, and what it may request.
//!
//! Until it has taken the files, a peer may have one answer in flight at a time, a limited number of requests,
//! and limited time. After that it may not request anything, and counts as a taker while it is connected.

use super::protocol::{Answer, LONGEST_ANSWER, LONGEST_REQUEST, Op, Request, VERSION};
use super::set::{Member, Set};
use crate::sys::socket::Credentials;
use crate::sys::{Errno, socket};
use rustix::event::PollFlags;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// How long a peer may be connected without having taken the files.
pub(super) const LIFE: Duration = Duration::from_secs(10);
/// Maximum number of requests, not counting those for further files.
const MOST_REQUESTS: u32 = 64;
/// How long to wait before retrying a send that the kernel refused because too many descriptors are in flight.
const PAUSE: Duration = Duration::from_millis(10);
/// Maximum number of files in an answer to `list`.
const MOST_LISTED: usize = 128;
/// Maximum number of takers in an answer.
const MOST_TAKERS: usize = 1000;

/// A connection.
pub(super) struct Peer {
    pub who: Credentials,
    socket: OwnedFd,
    /// When it is disconnected.
    pub deadline: Option<Instant>,
    requests: u32,
    /// Its last request, and the number of files that it has received for it.
    sent: Option<(Op, usize)>,
    /// It has received all files.
    pub took: bool,
    answer: Option<Pending>,
    /// Time before which nothing is sent.
    pause: Option<Instant>,
}

/// An answer that has not been sent yet.
struct Pending {
    bytes: Vec<u8>,
    /// The files whose descriptors are sent with it.
    members: Range<usize>,
    then: Step,
}

/// What happens to a peer next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// It stays.
    Stay,
    /// It has just received the last file.
    Took,
    /// It is disconnected.
    Drop,
    /// It is disconnected, and the hold ends.
    Release,
}

/// The state that an answer may need.
pub(super) struct Around<'a> {
    pub set: &'a Set,
    /// The user of the holder.
    pub owner: u32,
    /// The processes that have taken the files.
    pub takers: &'a [(u32, u32)],
}

impl Peer {
    pub(super) fn new(socket: OwnedFd, who: Credentials, now: Instant) -> Self {
        Self {
            who,
            socket,
            deadline: Some(now + LIFE),
            requests: 0,
            sent: None,
            took: false,
            answer: None,
            pause: None,
        }
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The events to poll its socket for: a request, or room for an answer.
    pub(super) fn waits_for(&self, now: Instant) -> PollFlags {
        match (&self.answer, self.pause) {
            (None, _) => PollFlags::IN,
            (Some(_), Some(until)) if now < until => PollFlags::empty(),
            (Some(_), _) => PollFlags::OUT,
        }
    }

    /// When it must be served even if its socket is not ready.
    pub(super) fn alarm(&self) -> Option<Instant> {
        self.pause.or(self.deadline)
    }

    /// Refuses it immediately.
    pub(super) fn refuse(socket: BorrowedFd<'_>, errno: Errno, why: &str) {
        if let Ok(bytes) = serde_json::to_vec(&Answer::refusal(errno, why)) {
            // It is disconnected whether or not this succeeds.
            let _ = socket::send(socket, &bytes, &[], false);
        }
    }

    /// Reads a request, or sends an answer.
    pub(super) fn step(&mut self, around: &Around<'_>, now: Instant) -> Step {
        if self.answer.is_none() {
            match self.hear(around) {
                Ok(Some(answer)) => self.answer = Some(answer),
                Ok(None) => return Step::Stay,
                Err(()) => return Step::Drop,
            }
        }
        self.say(around.set, now)
    }

    /// The answer to the next request; None if none has arrived.
    fn hear(&mut self, around: &Around<'_>) -> Result<Option<Pending>, ()> {
        let mut bytes = [0; LONGEST_REQUEST];
        let refuse =
            |errno, why: &str| Some(Pending::new(&Answer::refusal(errno, why), Step::Drop));
        let bytes = match socket::receive_bytes(self.socket.as_fd(), &mut bytes) {
            Ok(0) => return Err(()),
            // It has everything that can be requested.
            Ok(_) if self.took => return Err(()),
            Ok(got) => &bytes[..got],
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::MSGSIZE) => return Ok(refuse(Errno::MSGSIZE, "the request is too long")),
            Err(_) => return Err(()),
        };
        let Ok(request) = serde_json::from_slice::<Request>(bytes) else {
            return Ok(refuse(Errno::PROTO, "the request is unknown"));
        };
        if request.v != VERSION {
            return Ok(refuse(
                Errno::PROTO,
                "the version of the request is not supported",
            ));
        }
        let goes_on = request.from > 0 && self.sent == Some((request.op, request.from));
        if !goes_on {
            self.requests += 1;
        }
        if self.requests > MOST_REQUESTS {
            return Ok(refuse(Errno::TOOBIG, "too many requests"));
        }
        let name = &around.set.name;
        if request.name.as_ref().is_some_and(|wanted| wanted != name)
            || (request.op != Op::List && request.name.is_none())
        {
            let why = format!("the hold there is named {name}");
            return Ok(refuse(Errno::NOENT, &why));
        }
        Ok(match request.op {
            Op::Take | Op::List if request.from != 0 && !goes_on => {
                refuse(Errno::INVAL, "files must be requested in order")
            }
            Op::Take | Op::List => Some(self.files(around, request.op, request.from)),
            Op::Release if ![0, around.owner].contains(&self.who.uid) => {
                refuse(Errno::PERM, "only its owner and root may release it")
            }
            Op::Release => Some(Pending::new(&Answer::empty(), Step::Release)),
        })
    }

    /// The answer to `take` or `list`, from file number `from` on.
    fn files(&mut self, around: &Around<'_>, op: Op, from: usize) -> Pending {
        let set = around.set;
        let take = op == Op::Take;
        let mut batch = match take {
            true => set.batch(from),
            false => {
                let rest = &set.members[from..];
                &rest[..rest.len().min(MOST_LISTED)]
            }
        };
        loop {
            let takers = around.takers;
            let answer = Answer {
                name: set.name.clone(),
                since: set.since,
                total: set.members.len(),
                takers: takers.len(),
                some_takers: match take {
                    true => Vec::new(),
                    false => takers[..takers.len().min(MOST_TAKERS)].to_vec(),
                },
                files: batch.iter().map(Member::now).collect(),
                ..Answer::empty()
            };
            let end = from + batch.len();
            let then = match take && end == set.members.len() {
                true => Step::Took,
                false => Step::Stay,
            };
            let mut pending = Pending::new(&answer, then);
            if pending.bytes.len() > LONGEST_ANSWER && batch.len() > 1 {
                batch = &batch[..batch.len() / 2];
                continue;
            }
            if take {
                pending.members = from..end;
            }
            self.sent = Some((op, end));
            return pending;
        }
    }

    /// Sends the answer, if the socket has room for it.
    fn say(&mut self, set: &Set, now: Instant) -> Step {
        let Some(pending) = &self.answer else {
            return Step::Stay;
        };
        let members = set.members[pending.members.clone()].iter();
        let fds: Vec<_> = members.flat_map(Member::borrowed).collect();
        self.pause = None;
        match socket::send(self.socket.as_fd(), &pending.bytes, &fds, false) {
            Ok(()) => {}
            Err(Errno::AGAIN) => return Step::Stay,
            // Descriptors that other peers have not received yet count, too, even other users' (unix(7)).
            Err(Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM) => {
                self.pause = Some(now + PAUSE);
                return Step::Stay;
            }
            Err(_) => return Step::Drop,
        }
        let then = pending.then;
        self.answer = None;
        if then == Step::Took {
            self.took = true;
            self.deadline = None;
        }
        then
    }
}

impl Pending {
    fn new(answer: &Answer, then: Step) -> Self {
        Self {
            bytes: serde_json::to_vec(answer).unwrap_or_default(),
            members: 0..0,
            then,
        }
    }
}
