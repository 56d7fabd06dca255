//! One connection to a holder, and what it may ask for.
//!
//! A peer may have one answer under way at a time, a few requests, and little time, until it has taken what is
//! held. After that it may not ask for anything more, and counts as a taker for as long as it is connected.

use super::protocol::{Answer, LONGEST_ANSWER, LONGEST_REQUEST, Op, Request, VERSION};
use super::set::{Member, Set};
use crate::sys::socket::Credentials;
use crate::sys::{Errno, socket};
use rustix::event::PollFlags;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// How long a peer may be connected without having taken what is held.
pub(super) const LIFE: Duration = Duration::from_secs(10);
/// How often it may ask, requests for further files apart.
const MOST_REQUESTS: u32 = 64;
/// How long a send is put off that the kernel refused for too many descriptors under way.
const PAUSE: Duration = Duration::from_millis(10);
/// Most files that an answer to `list` has.
const MOST_LISTED: usize = 128;
/// Most takers that an answer lists.
const MOST_TAKERS: usize = 1000;

/// A connection.
pub(super) struct Peer {
    pub who: Credentials,
    socket: OwnedFd,
    /// When it is dropped.
    pub deadline: Option<Instant>,
    requests: u32,
    /// What it asked for last, and up to which file it has got that.
    sent: Option<(Op, usize)>,
    /// It has got all of them.
    pub took: bool,
    answer: Option<Pending>,
    /// No send before.
    pause: Option<Instant>,
}

/// An answer that is not sent yet.
struct Pending {
    bytes: Vec<u8>,
    /// The files whose descriptors go with it.
    members: Range<usize>,
    then: Step,
}

/// What becomes of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// It stays.
    Stay,
    /// It has got the last file just now.
    Took,
    /// It goes.
    Drop,
    /// It goes, and with it the hold.
    Release,
}

/// What an answer may need to know.
pub(super) struct Around<'a> {
    pub set: &'a Set,
    /// Who serves.
    pub owner: u32,
    /// Who has taken it.
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

    /// What to poll its socket for: a request, or room for an answer.
    pub(super) fn waits_for(&self, now: Instant) -> PollFlags {
        match (&self.answer, self.pause) {
            (None, _) => PollFlags::IN,
            (Some(_), Some(until)) if now < until => PollFlags::empty(),
            (Some(_), _) => PollFlags::OUT,
        }
    }

    /// When it has to be looked at even if its socket is not ready.
    pub(super) fn alarm(&self) -> Option<Instant> {
        self.pause.or(self.deadline)
    }

    /// Refuses it at once.
    pub(super) fn refuse(socket: BorrowedFd<'_>, errno: Errno, why: &str) {
        if let Ok(bytes) = serde_json::to_vec(&Answer::refusal(errno, why)) {
            // It is dropped either way.
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

    /// The answer to the next request; none where nothing has come.
    fn hear(&mut self, around: &Around<'_>) -> Result<Option<Pending>, ()> {
        let mut bytes = [0; LONGEST_REQUEST];
        let refuse =
            |errno, why: &str| Some(Pending::new(&Answer::refusal(errno, why), Step::Drop));
        let bytes = match socket::receive_bytes(self.socket.as_fd(), &mut bytes) {
            Ok(0) => return Err(()),
            // It has all that there is to ask for.
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
            return Ok(refuse(Errno::PROTO, "the request has another version"));
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
            let why = format!("it holds {name}");
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

    /// Sends the answer, if there is room for it.
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
            // What peers have not received yet counts, too, those of others (unix(7)).
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
