//! One connection to a holder, and what it may request.
//!
//! A peer may have one answer in flight at a time, a limited number of requests, and limited time. Once it has taken
//! the files, it may not request anything.
//!
//! A connection with descriptors that the peer does not receive stays open, so that they are known
//! ([`InFlight`]), but is not served any more.

use super::flight::InFlight;
use super::protocol::{Answer, LONGEST_ANSWER, LONGEST_REQUEST, Op, PeerRequest};
use super::set::{Member, Set};
use super::watch::{FileWatch, Look};
use dmafile_sys::socket::Credentials;
use dmafile_sys::{Errno, memfd, socket};
use rustix::event::PollFlags;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// How long a peer may be connected.
pub(super) const LIFE: Duration = Duration::from_secs(10);
/// Maximum number of requests, not counting those for further files.
const MOST_REQUESTS: u32 = 64;
/// How long to wait before the first retry of a send for which there are too many descriptors in flight.
const PAUSE: Duration = Duration::from_millis(10);
/// How long to wait before further retries, and between looks at a peer that does not receive.
const LONG_PAUSE: Duration = Duration::from_secs(1);
/// Maximum number of files in an answer to `list`.
const MOST_LISTED: usize = 128;
/// Maximum number of takers in an answer.
const MOST_TAKERS: usize = 1000;

/// A connection.
pub(super) struct Peer {
    pub who: Credentials,
    socket: OwnedFd,
    /// When it is disconnected.
    deadline: Instant,
    requests: u32,
    /// Its last request, and the number of files that have been sent for it.
    sent: Option<(Op, usize)>,
    /// Number of descriptors in the last answer; 0 once they are known to be received.
    unreceived: usize,
    /// The last file has been sent.
    has_all: bool,
    state: PeerState,
}

/// What happens to it next.
enum PeerState {
    /// It may send a request.
    Listens,
    /// Its request is answered when its files have been looked at.
    Looks(Op, Range<usize>, Look),
    /// An answer has not been sent yet. It is not tried again before this time, which is this long after the last
    /// attempt.
    Answers(Pending, Option<(Instant, Duration)>),
    /// It did not receive what was sent, and will not be served again. This is when to look at it again.
    Stuck(Instant),
}

struct Pending {
    bytes: Vec<u8>,
    /// The files whose descriptors are sent with it.
    members: Range<usize>,
    then: NextStep,
}

/// What happens to a peer next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NextStep {
    /// It stays.
    Stay,
    /// The last file has just been sent to it.
    Took,
    /// It is disconnected.
    Drop,
    /// It is disconnected, and the hold ends.
    Release,
}

/// The state that an answer may need.
pub(super) struct Around<'a> {
    pub set: &'a Set,
    pub watch: &'a mut FileWatch,
    pub flight: InFlight,
    /// The user of the holder.
    pub owner: u32,
    /// The processes that are known to have the files.
    pub takers: &'a [(u32, u32)],
    /// How often other processes have taken them.
    pub unknown: usize,
    /// Processes that have returned the files now.
    pub returned: Vec<Credentials>,
}

impl Peer {
    pub(super) fn new(socket: OwnedFd, who: Credentials, now: Instant) -> Self {
        Self {
            who,
            socket,
            deadline: now + LIFE,
            requests: 0,
            sent: None,
            unreceived: 0,
            has_all: false,
            state: PeerState::Listens,
        }
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The events to poll its socket for: a request, or room for an answer. None if not even the end of the
    /// connection is of interest: a peer can shut it down, and keep what it has not received.
    pub(super) fn waits_for(&self, now: Instant) -> Option<PollFlags> {
        match &self.state {
            PeerState::Listens => Some(PollFlags::IN),
            PeerState::Answers(_, Some((until, _))) if now < *until => Some(PollFlags::empty()),
            PeerState::Answers(..) => Some(PollFlags::OUT),
            PeerState::Looks(..) => Some(PollFlags::empty()),
            PeerState::Stuck(_) => None,
        }
    }

    /// When it must be served even if its socket is not ready.
    pub(super) fn alarm(&self) -> Option<Instant> {
        let own = match &self.state {
            PeerState::Listens | PeerState::Answers(_, None) => None,
            PeerState::Answers(_, Some((until, _))) => Some(*until),
            PeerState::Looks(_, _, look) => Some(look.until),
            PeerState::Stuck(until) => return Some(*until),
        };
        Some(own.map_or(self.deadline, |own| own.min(self.deadline)))
    }

    /// True if it must be served now although its socket is not ready.
    pub(super) fn is_due(&self, watch: &FileWatch, now: Instant) -> bool {
        let seen = matches!(self.state, PeerState::Looks(_, _, look) if watch.is_over(look, now));
        seen || self.alarm().is_some_and(|alarm| now >= alarm)
    }

    /// Number of descriptors that it may not have received yet.
    pub(super) fn unreceived(&self) -> usize {
        self.unreceived
    }

    /// True if it has received all descriptors that were sent to it.
    pub(super) fn has_received(&mut self) -> bool {
        // Where the number is not available, it counts as 0.
        if self.unreceived > 0 && socket::unreceived(self.socket()).unwrap_or(0) == 0 {
            self.unreceived = 0;
        }
        self.unreceived == 0
    }

    /// True if closing the connection loses nothing that has to be known.
    pub(super) fn is_free(&self) -> bool {
        self.unreceived == 0
    }

    /// Refuses it immediately.
    pub(super) fn refuse(&self, errno: Errno, why: &str) {
        if let Ok(bytes) = serde_json::to_vec(&Answer::refusal(errno, why)) {
            // It is disconnected whether or not this succeeds.
            let _ = socket::send(self.socket(), &bytes, &[], false);
            // If the connection ended before this is read, it would get ECONNRESET, and not the refusal.
            let _ = socket::receive_bytes(self.socket(), &mut [0; LONGEST_REQUEST]);
        }
    }

    /// Reads a request, or sends an answer. `ready` if its socket is.
    pub(super) fn step(&mut self, around: &mut Around<'_>, ready: bool, now: Instant) -> NextStep {
        if let PeerState::Stuck(_) = self.state {
            return self.end(now);
        }
        if now >= self.deadline {
            match self.state {
                PeerState::Answers(_, Some(_)) => {
                    let why = "too many descriptors have been sent and not been received";
                    self.refuse(Errno::USERS, why);
                }
                PeerState::Listens if self.sent.is_none() => {
                    let why = format!("it sent no request for {} seconds", LIFE.as_secs());
                    self.refuse(Errno::TIMEDOUT, &why);
                }
                _ => {}
            }
            return self.end(now);
        }
        let next = match &self.state {
            PeerState::Listens => self.hear(around, now),
            PeerState::Looks(op, files, look) if around.watch.is_over(*look, now) => {
                let (op, files, look) = (*op, files.clone(), *look);
                Ok(Some(self.files(around, op, files, look)))
            }
            // It has disconnected.
            PeerState::Looks(..) if ready => Err(()),
            _ => Ok(None),
        };
        match next {
            Ok(Some(state)) => self.state = state,
            Ok(None) => {}
            Err(()) => return self.end(now),
        }
        match self.say(around, now) {
            NextStep::Drop => self.end(now),
            step => step,
        }
    }

    /// Disconnects it, unless it has not received everything.
    fn end(&mut self, now: Instant) -> NextStep {
        if self.has_received() {
            NextStep::Drop
        } else {
            self.stick(now)
        }
    }

    fn stick(&mut self, now: Instant) -> NextStep {
        self.state = PeerState::Stuck(now + LONG_PAUSE);
        NextStep::Stay
    }

    /// What to do about the next request; None if none has arrived.
    fn hear(&mut self, around: &mut Around<'_>, now: Instant) -> Result<Option<PeerState>, ()> {
        if !self.has_received() {
            // Only one answer may be in flight.
            return Err(());
        }
        let mut bytes = [0; LONGEST_REQUEST];
        let refuse = |errno, why: &str| {
            let refusal = Pending::new(&Answer::refusal(errno, why), NextStep::Drop);
            Ok(Some(PeerState::Answers(refusal, None)))
        };
        let bytes = match socket::receive_bytes(self.socket.as_fd(), &mut bytes) {
            Ok(0) => return Err(()),
            // It has everything that can be requested.
            Ok(_) if self.has_all => return Err(()),
            Ok(got) => &bytes[..got],
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::MSGSIZE) => return refuse(Errno::MSGSIZE, "the request is too long"),
            Err(_) => return Err(()),
        };
        let request = match PeerRequest::parse(bytes) {
            Ok(request) => request,
            Err(why) => return refuse(Errno::PROTO, why),
        };
        let total = around.set.members.len();
        let goes_on = request.from > 0
            && request.from < total
            && self.sent == Some((request.op, request.from));
        if !goes_on {
            self.requests += 1;
        }
        if self.requests > MOST_REQUESTS {
            return refuse(Errno::TOOBIG, "too many requests");
        }
        let name = &around.set.name;
        if request.name.as_ref().is_some_and(|wanted| wanted != name)
            || (request.op != Op::List && request.name.is_none())
        {
            let why = format!("the hold there is named {name}");
            return refuse(Errno::NOENT, &why);
        }
        let from = request.from;
        let files = match request.op {
            Op::Take | Op::List if from != 0 && self.sent != Some((request.op, from)) => {
                return refuse(Errno::INVAL, "files must be requested in order");
            }
            Op::Take => from..from + around.set.batch(from).len(),
            Op::List => from..total.min(from + MOST_LISTED),
            Op::Return => {
                around.returned.push(self.who);
                return Err(());
            }
            Op::Release if ![0, around.owner].contains(&self.who.uid) => {
                return refuse(Errno::PERM, "only its owner and root may release it");
            }
            Op::Release => {
                let pending = Pending::new(&Answer::empty(), NextStep::Release);
                return Ok(Some(PeerState::Answers(pending, None)));
            }
        };
        let look = around.watch.look(files.clone(), now);
        Ok(Some(if around.watch.is_over(look, now) {
            self.files(around, request.op, files, look)
        } else {
            PeerState::Looks(request.op, files, look)
        }))
    }

    /// The answer to `take` or `list` about these files, or about as many of them as fit into it.
    fn files(&mut self, around: &Around<'_>, op: Op, files: Range<usize>, look: Look) -> PeerState {
        let (set, watch) = (around.set, &*around.watch);
        let take = op == Op::Take;
        let (from, mut end) = (files.start, files.end);
        loop {
            let takers = around.takers;
            let now = |file: usize| set.members[file].now(watch.changed(file, look));
            let answer = Answer {
                name: set.name.clone(),
                since: set.since,
                total: set.members.len(),
                takers: takers.len(),
                unknown_takers: around.unknown,
                some_takers: if take {
                    Vec::new()
                } else {
                    takers[..takers.len().min(MOST_TAKERS)].to_vec()
                },
                files: (from..end).map(now).collect(),
                ..Answer::empty()
            };
            let then = if take && end == set.members.len() {
                NextStep::Took
            } else {
                NextStep::Stay
            };
            let mut pending = Pending::new(&answer, then);
            if pending.bytes.len() > LONGEST_ANSWER && end - from > 1 {
                end = from + (end - from) / 2;
                continue;
            }
            if take {
                pending.members = from..end;
            }
            self.sent = Some((op, end));
            return PeerState::Answers(pending, None);
        }
    }

    /// Sends the answer, if the socket has room for it.
    fn say(&mut self, around: &mut Around<'_>, now: Instant) -> NextStep {
        let PeerState::Answers(pending, pause) = &mut self.state else {
            return NextStep::Stay;
        };
        let members = &around.set.members[pending.members.clone()];
        let count = members.iter().map(|member| member.fds.len()).sum();
        let sent = if count == 0 || around.flight.admits(self.who.uid, count) {
            send(self.socket.as_fd(), &pending.bytes, members)
        } else {
            Err(Errno::TOOMANYREFS)
        };
        match sent {
            Ok(()) => {}
            Err(Errno::AGAIN) => {
                *pause = None;
                return NextStep::Stay;
            }
            // Descriptors that other peers have not received yet count, too, even other users' (unix(7)).
            Err(
                Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM | Errno::MFILE | Errno::NFILE,
            ) => {
                let longer = pause.map_or(PAUSE, |(_, before)| LONG_PAUSE.min(before * 2));
                *pause = Some((now + longer, longer));
                return NextStep::Stay;
            }
            Err(_) => return NextStep::Drop,
        }
        let then = pending.then;
        around.flight.add(self.who.uid, count);
        self.unreceived = count;
        self.has_all |= then == NextStep::Took;
        self.state = PeerState::Listens;
        then
    }
}

/// Sends an answer with descriptors of these files. Each one is of its own, with an offset, flags and locks that no
/// other process shares, if that is possible: dma-bufs cannot be reopened.
fn send(socket: BorrowedFd<'_>, bytes: &[u8], members: &[Member]) -> Result<(), Errno> {
    let fds = members.iter().flat_map(|member| &member.fds);
    let own: Result<Vec<_>, Errno> = fds.clone().map(|fd| memfd::again(fd.as_fd())).collect();
    let own = own?;
    let pairs = own.iter().zip(fds);
    let fds: Vec<_> = pairs
        .map(|(own, shared)| own.as_ref().unwrap_or(shared).as_fd())
        .collect();
    socket::send(socket, bytes, &fds, false)
}

impl Pending {
    fn new(answer: &Answer, then: NextStep) -> Self {
        Self {
            bytes: serde_json::to_vec(answer).unwrap_or_default(),
            members: 0..0,
            then,
        }
    }
}

#[cfg(fuzzing)]
#[path = "../../../fuzz/inside/holder.rs"]
pub(super) mod fuzz;
