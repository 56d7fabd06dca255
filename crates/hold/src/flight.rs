//! Descriptors that were sent to peers, and that these may not have received yet.
//!
//! The kernel counts them for the user of the holder, all processes together, and refuses to send more than
//! RLIMIT_NOFILE (ETOOMANYREFS in unix(7)). It counts a descriptor until the peer receives it or closes its socket:
//! neither closing nor shutting down this end calls it back. So whoever does not receive keeps its share, and
//! shares are limited.

use super::peer::Peer;
use std::collections::BTreeMap;

/// What is on its way now.
pub(super) struct InFlight {
    /// The users that no limit applies to: they could stop the holder anyway.
    owners: [u32; 2],
    /// Maximum number of connections.
    most: usize,
    /// Descriptors by user, for other users than owners.
    users: BTreeMap<u32, usize>,
    all: usize,
    /// True if someone had to wait for others to receive.
    pub full: bool,
}

impl InFlight {
    pub(super) fn of(peers: &[Peer], owner: u32, most: usize) -> Self {
        let mut flight = Self {
            owners: [0, owner],
            most,
            users: BTreeMap::new(),
            all: 0,
            full: false,
        };
        for peer in peers {
            flight.add(peer.who.uid, peer.unreceived());
        }
        flight
    }

    pub(super) fn add(&mut self, user: u32, count: usize) {
        if count > 0 && !self.owners.contains(&user) {
            *self.users.entry(user).or_default() += count;
            self.all += count;
        }
    }

    /// True if `count` more may be sent to a user: one user gets an eighth of as many descriptors as there can be
    /// connections, which is at most half of what may be open, and all users get a half. A single answer may have
    /// more.
    pub(super) fn admits(&mut self, user: u32, count: usize) -> bool {
        let fits = |now: usize, most: usize| now == 0 || now + count <= most;
        let own = self.users.get(&user).copied().unwrap_or(0);
        let admitted = self.owners.contains(&user)
            || (fits(own, self.most / 8) && fits(self.all, self.most / 2));
        self.full |= !admitted;
        admitted
    }
}
