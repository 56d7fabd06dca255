//! The processes that have taken the files. A taker keeps no connection, so that it can be checkpointed: it is
//! counted until its process ends, or says that it has returned them.

use dmafile_sys::Errno;
use dmafile_sys::socket::Credentials;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

pub(super) struct Takers {
    /// In the order in which they took the files; a process appears as often as it did.
    known: Vec<TakerProcess>,
    /// Maximum number of these.
    most: usize,
    /// How often the files were taken by a process whose end is not seen.
    unknown: usize,
}

struct TakerProcess {
    who: Credentials,
    /// Readable once the process has ended (pidfd_open(2)).
    process: OwnedFd,
}

impl Takers {
    pub(super) fn new(most: usize) -> Self {
        Self {
            known: Vec::new(),
            most,
            unknown: 0,
        }
    }

    /// Counts a process that has just taken the files.
    pub(super) fn add(&mut self, who: Credentials, process: Result<OwnedFd, Errno>) {
        match process {
            Ok(process) => {
                if self.known.len() >= self.most {
                    self.make_room();
                }
                self.known.push(TakerProcess { who, process });
            }
            // It has ended.
            Err(Errno::SRCH) => {}
            // In another PID namespace, on Linux before 6.5; or there are too many open files.
            Err(_) => self.unknown += 1,
        }
    }

    /// A process has returned what it took once. Returns false if it is not known.
    pub(super) fn returned(&mut self, who: Credentials) -> bool {
        // Processes of other PID namespaces have no number here.
        let is_it =
            |one: &TakerProcess| one.who.pid == who.pid && (who.pid != 0 || one.who.uid == who.uid);
        let found = self.known.iter().position(is_it);
        found.map(|number| self.known.remove(number)).is_some()
    }

    /// Forgets those that have ended: for each in order, whether it has. Returns true if any has.
    pub(super) fn ended(&mut self, ended: &[bool]) -> bool {
        let before = self.known.len();
        let mut ended = ended.iter();
        self.known.retain(|_| ended.next() != Some(&true));
        self.known.len() < before
    }

    pub(super) fn processes(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.known.iter().map(|one| one.process.as_fd())
    }

    /// The process and user of each.
    pub(super) fn known(&self) -> Vec<(u32, u32)> {
        let known = self.known.iter();
        known.map(|one| (one.who.pid, one.who.uid)).collect()
    }

    pub(super) fn unknown(&self) -> usize {
        self.unknown
    }

    /// Stops following a process, so that one user does not keep out the processes of others.
    fn make_room(&mut self) {
        let users = self.known.iter().map(|one| one.who.uid);
        if let Some(oldest) = oldest_of_most(users.enumerate()) {
            self.known.remove(oldest);
            self.unknown += 1;
        }
    }
}

/// The user with the most entries has to give up one: returns the number of that user's first entry. Each entry is a
/// number and a user, in ascending order.
pub(super) fn oldest_of_most(entries: impl Iterator<Item = (usize, u32)> + Clone) -> Option<usize> {
    let mut users = BTreeMap::new();
    for (_, user) in entries.clone() {
        *users.entry(user).or_insert(0) += 1;
    }
    let oldest = entries.max_by_key(|(number, user)| (users[user], Reverse(*number)));
    oldest.map(|(number, _)| number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn who(pid: u32, uid: u32) -> Credentials {
        Credentials { pid, uid, gid: uid }
    }

    fn process() -> Result<OwnedFd, Errno> {
        let own = rustix::process::getpid();
        rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty())
    }

    #[test]
    fn the_user_with_the_most_makes_room() {
        let mut takers = Takers::new(4);
        for (pid, uid) in [(1, 7), (2, 8), (3, 8), (4, 9), (5, 9)] {
            takers.add(who(pid, uid), process());
        }
        assert_eq!(takers.known(), [(1, 7), (3, 8), (4, 9), (5, 9)]);
        assert_eq!(takers.unknown(), 1);
    }

    #[test]
    fn a_process_is_counted_as_often_as_it_took() {
        let mut takers = Takers::new(9);
        for pid in [5, 0, 5] {
            takers.add(who(pid, 7), process());
        }
        // A process may have changed its user, unless that is all that is known of it.
        assert!(takers.returned(who(5, 8)));
        assert!(!takers.returned(who(0, 8)));
        assert_eq!(takers.known(), [(0, 7), (5, 7)]);
        assert!(takers.returned(who(0, 7)) && takers.returned(who(5, 7)));
        assert!(!takers.returned(who(5, 7)));
    }

    #[test]
    fn a_process_that_cannot_be_followed_is_unknown() {
        let mut takers = Takers::new(9);
        takers.add(who(0, 7), Err(Errno::OPNOTSUPP));
        takers.add(who(5, 7), Err(Errno::SRCH));
        assert_eq!((takers.known(), takers.unknown()), (Vec::new(), 1));
    }
}
