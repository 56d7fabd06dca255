//! The main loop of a holder: one thread serves all peers, and never blocks on one of them, nor on a file system.

use super::flight::InFlight;
use super::peer::{Around, NextStep, Peer};
use super::place::Bound;
use super::set::Set;
use super::takers::{Takers, oldest_of_most};
use super::watch::FileWatch;
use dmafile_sys::{Errno, host, socket};
use rustix::event::{PollFd, PollFlags};
use rustix::time::Timespec;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

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
    /// No process was connected, or known to have it, for the time set with [`Hold::idle`](super::Hold::idle).
    Idle,
}

/// The state of the loop.
pub(super) struct Server {
    set: Set,
    watch: FileWatch,
    bound: Bound,
    /// Becomes readable, or is closed at the other end, to stop the loop.
    stop: OwnedFd,
    idle: Option<Duration>,
    owner: u32,
    /// Maximum number of peers.
    most: usize,
    /// In the order in which they connected.
    peers: Vec<Peer>,
    takers: Takers,
    /// A peer waits until others have received their descriptors.
    is_full: bool,
    /// When a process last took or released the files.
    last: Instant,
    /// Time before which no connection is accepted.
    pause: Option<Instant>,
}

impl Server {
    pub(super) fn new(
        set: Set,
        watch: FileWatch,
        bound: Bound,
        stop: OwnedFd,
        idle: Option<Duration>,
    ) -> Self {
        let open = host::open_files().ok().and_then(|limits| limits.soft);
        let held = set.members.iter().map(|member| member.fds.len()).sum();
        let room = |open| {
            usize::try_from(open)
                .unwrap_or(usize::MAX)
                .saturating_sub(held)
        };
        // A third for connections, one for descriptors that are being sent, one for takers.
        let most = open.map_or(4096, |open| (room(open) / 3).clamp(16, 4096));
        Self {
            set,
            watch,
            bound,
            stop,
            idle,
            owner: super::place::user(),
            most,
            takers: Takers::new(most),
            peers: Vec::new(),
            is_full: false,
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
            if ready.notifier {
                self.watch.hear();
            }
            if self.takers.ended(&ready.takers) {
                self.last = now;
            }
            if self.serve(&ready.peers, now) {
                break Ended::Released;
            }
            if ready.listener {
                self.accept(now);
            }
            let idle = self.idle.is_some_and(|idle| now >= self.last + idle);
            if idle && self.is_unused() {
                break Ended::Idle;
            }
        };
        (end, self.set)
    }

    /// True if no process is connected, or known to have the files.
    fn is_unused(&self) -> bool {
        self.peers.is_empty() && self.takers.processes().next().is_none()
    }

    /// Waits until there is something to do.
    fn wait(&self) -> Ready {
        let now = Instant::now();
        let accepts = self.pause.is_none_or(|until| now >= until);
        let wanted = if accepts {
            PollFlags::IN
        } else {
            PollFlags::empty()
        };
        let poll = PollFd::from_borrowed_fd;
        let mut fds = vec![
            poll(self.stop.as_fd(), PollFlags::IN),
            poll(self.bound.listener().as_fd(), wanted),
            poll(self.watch.notifier(), PollFlags::IN),
        ];
        let first = fds.len();
        let takers = self.takers.processes();
        fds.extend(takers.map(|process| PollFd::from_borrowed_fd(process, PollFlags::IN)));
        let last = fds.len();
        let peers = self.peers.iter();
        let waited: Vec<_> = peers.map(|peer| peer.waits_for(now)).collect();
        let pairs = self.peers.iter().zip(&waited);
        fds.extend(pairs.filter_map(|(peer, events)| Some(poll(peer.socket(), (*events)?))));
        let alarms = self.peers.iter().filter_map(Peer::alarm);
        let idle = self
            .idle
            .filter(|_| self.is_unused())
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
        let takers = fds[first..last].iter().map(some).collect();
        let mut peers = fds[last..].iter().map(some);
        let next = |events: Option<_>| events.is_some() && peers.next() == Some(true);
        Ready {
            stop: some(&fds[0]),
            listener: accepts && some(&fds[1]),
            notifier: some(&fds[2]),
            takers,
            peers: waited.into_iter().map(next).collect(),
        }
    }

    /// Serves every peer that is ready, and disconnects those whose time is up. Returns whether it was
    /// released.
    fn serve(&mut self, ready: &[bool], now: Instant) -> bool {
        if self.is_full {
            for peer in &mut self.peers {
                peer.has_received();
            }
        }
        let known = self.takers.known();
        let mut around = Around {
            set: &self.set,
            watch: &mut self.watch,
            flight: InFlight::of(&self.peers, self.owner, self.most),
            owner: self.owner,
            takers: &known,
            unknown: self.takers.unknown(),
            returned: Vec::new(),
        };
        let mut released = false;
        let mut number = 0;
        self.peers.retain_mut(|peer| {
            let ready = ready[number];
            number += 1;
            let step = if ready || peer.is_due(around.watch, now) {
                peer.step(&mut around, ready, now)
            } else {
                NextStep::Stay
            };
            if step == NextStep::Took {
                self.takers
                    .add(peer.who, socket::peer_process(peer.socket()));
                self.last = now;
            }
            released |= step == NextStep::Release;
            matches!(step, NextStep::Stay | NextStep::Took)
        });
        self.is_full = around.flight.full;
        for who in around.returned {
            if self.takers.returned(who) {
                self.last = now;
            }
        }
        released
    }

    /// Accepts some of the waiting connections.
    fn accept(&mut self, now: Instant) {
        self.pause = None;
        if self.peers.len() >= self.most && !self.make_room() {
            self.pause = Some(now + PAUSE);
            return;
        }
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
            self.peers.push(Peer::new(socket, who, now));
        }
    }

    /// Disconnects a peer to make room for another one; returns whether that is possible. The user with the most
    /// connections loses the oldest, so that no user can keep others out.
    fn make_room(&mut self) -> bool {
        for peer in &mut self.peers {
            peer.has_received();
        }
        let peers = self.peers.iter().enumerate();
        let free = peers.filter(|(_, peer)| peer.is_free());
        let Some(number) = oldest_of_most(free.map(|(number, peer)| (number, peer.who.uid))) else {
            return false;
        };
        let peer = self.peers.remove(number);
        peer.refuse(Errno::USERS, "too many connections");
        true
    }
}

/// What can be done without blocking.
struct Ready {
    stop: bool,
    listener: bool,
    notifier: bool,
    /// Those that have ended.
    takers: Vec<bool>,
    peers: Vec<bool>,
}
