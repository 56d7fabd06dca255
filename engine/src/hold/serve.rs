//! The main loop of a holder: one thread serves all peers, and never blocks on one of them.

use super::peer::{Around, Peer, Step};
use super::place::Bound;
use super::set::Set;
use crate::sys::{Errno, host, socket};
use rustix::event::{PollFd, PollFlags};
use rustix::time::Timespec;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// Maximum number of connected peers per user that have not taken anything yet.
const MOST_ASKING: usize = 256;
/// Maximum number of connections accepted before other peers are served.
const MOST_AT_ONCE: usize = 16;
/// How long to wait before the next accept after one failed for lack of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Why a holder ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ended {
    /// It was stopped.
    Stopped,
    /// Its owner, or root, released what it held.
    Released,
    /// No process had it or took it for the time set with [`Hold::idle`](super::Hold::idle).
    Idle,
}

/// The state of the loop.
pub(super) struct Server {
    set: Set,
    bound: Bound,
    /// Becomes readable, or is closed at the other end, to stop the loop.
    stop: OwnedFd,
    idle: Option<Duration>,
    owner: u32,
    /// Maximum number of peers.
    most: usize,
    peers: Vec<Peer>,
    /// When a process last took or released the files.
    last: Instant,
    /// Time before which no connection is accepted.
    pause: Option<Instant>,
}

impl Server {
    pub(super) fn new(set: Set, bound: Bound, stop: OwnedFd, idle: Option<Duration>) -> Self {
        let open = host::open_files().ok().and_then(|limits| limits.soft);
        Self {
            set,
            bound,
            stop,
            idle,
            owner: super::place::user(),
            most: open.map_or(4096, |open| (open / 2).clamp(16, 4096) as usize),
            peers: Vec::new(),
            last: Instant::now(),
            pause: None,
        }
    }

    /// Serves until it is stopped, released or idle for long enough.
    pub(super) fn run(mut self) -> (Ended, Set) {
        let end = loop {
            let ready = self.wait();
            let now = Instant::now();
            if ready.stop {
                break Ended::Stopped;
            }
            if self.serve(&ready.peers, now) {
                break Ended::Released;
            }
            if ready.listener {
                self.accept(now);
            }
            let idle = self.idle.is_some_and(|idle| now >= self.last + idle);
            if idle && self.peers.is_empty() {
                break Ended::Idle;
            }
        };
        (end, self.set)
    }

    /// Waits until there is something to do.
    fn wait(&self) -> Ready {
        let now = Instant::now();
        let accepts = self.peers.len() < self.most && self.pause.is_none_or(|until| now >= until);
        let wanted = match accepts {
            true => PollFlags::IN,
            false => PollFlags::empty(),
        };
        let poll = PollFd::from_borrowed_fd;
        let mut fds = vec![
            poll(self.stop.as_fd(), PollFlags::IN),
            poll(self.bound.listener().as_fd(), wanted),
        ];
        let peers = self.peers.iter();
        fds.extend(peers.map(|peer| poll(peer.socket(), peer.waits_for(now))));
        let alarms = self.peers.iter().filter_map(Peer::alarm);
        let idle = self
            .idle
            .filter(|_| self.peers.is_empty())
            .map(|idle| self.last + idle);
        let next = alarms
            .chain(idle)
            .chain(self.pause.filter(|_| !accepts))
            .min();
        let most = next.map(|next| {
            let left = next.saturating_duration_since(now);
            Timespec::try_from(left).unwrap_or(Timespec {
                tv_sec: 3600,
                tv_nsec: 0,
            })
        });
        let count = match rustix::event::poll(&mut fds, most.as_ref()) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            // Out of memory, perhaps only for a moment.
            Err(_) => {
                std::thread::sleep(PAUSE);
                0
            }
        };
        let some = |fd: &PollFd<'_>| count > 0 && !fd.revents().is_empty();
        Ready {
            stop: some(&fds[0]),
            listener: accepts && some(&fds[1]),
            peers: fds[2..].iter().map(some).collect(),
        }
    }

    /// Serves every peer that is ready, and disconnects those whose time is up. Returns whether it was
    /// released.
    fn serve(&mut self, ready: &[bool], now: Instant) -> bool {
        let took = self.peers.iter().filter(|peer| peer.took);
        let takers: Vec<_> = took.map(|peer| (peer.who.pid, peer.who.uid)).collect();
        let around = Around {
            set: &self.set,
            owner: self.owner,
            takers: &takers,
        };
        let (mut released, mut last) = (false, None);
        let mut number = 0;
        self.peers.retain_mut(|peer| {
            let ready = ready[number];
            number += 1;
            let due = peer.alarm().is_some_and(|alarm| now >= alarm);
            let step = match ready || due {
                true if peer.deadline.is_some_and(|deadline| now >= deadline) => Step::Drop,
                true => peer.step(&around, now),
                false => Step::Stay,
            };
            if step == Step::Took || (step == Step::Drop && peer.took) {
                last = Some(now);
            }
            released |= step == Step::Release;
            matches!(step, Step::Stay | Step::Took)
        });
        self.last = last.unwrap_or(self.last);
        released
    }

    /// Accepts some of the waiting connections.
    fn accept(&mut self, now: Instant) {
        self.pause = None;
        for _ in 0..MOST_AT_ONCE.min(self.most - self.peers.len()) {
            let socket = match socket::accept(self.bound.listener().as_fd()) {
                Ok(socket) => socket,
                // It disconnected again.
                Err(Errno::CONNABORTED) => continue,
                Err(Errno::AGAIN) => return,
                Err(_) => {
                    self.pause = Some(now + PAUSE);
                    return;
                }
            };
            let Ok(who) = socket::credentials(socket.as_fd()) else {
                continue;
            };
            let same = self.peers.iter().filter(|peer| peer.who.uid == who.uid);
            let asking = same.clone().filter(|peer| !peer.took).count();
            // Half of the connections are reserved for other users, except from the owner, who could stop
            // the holder anyway.
            let others = who.uid != self.owner && who.uid != 0;
            if asking >= MOST_ASKING || (others && same.count() >= self.most / 2) {
                Peer::refuse(
                    socket.as_fd(),
                    Errno::USERS,
                    "too many connections of this user",
                );
                continue;
            }
            self.peers.push(Peer::new(socket, who, now));
        }
    }
}

/// What can be done without blocking.
struct Ready {
    stop: bool,
    listener: bool,
    peers: Vec<bool>,
}
