//! When something is tried again, and when not any more.

use crate::http::{WaitCheck, is_gone};
use dmafile::internal::folder;
use dmafile::{Error, Traffic};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// How often one part is tried.
const TRIES: u32 = 10;
/// How often a server is tried that has never answered.
const TRIES_TO_REACH: u32 = 4;
/// The first pause is up to this long, each later one up to twice as long, up to the last one.
const FIRST: Duration = Duration::from_millis(100);
const LAST: Duration = Duration::from_secs(20);
/// The longest time that a server may ask to wait for.
const LONGEST: Duration = Duration::from_secs(300);
/// Requests beyond those that are needed: a share of them, and some.
const EXTRA_SHARE: u64 = 5;
const EXTRA: u64 = 10;

/// So many bytes are progress: what fails after them has not failed in vain.
pub(crate) const PIECE: u64 = 256 << 10;

/// Why a request has to be made again, or must not.
pub(crate) enum Trouble {
    Again {
        why: io::Error,
        /// The server has answered.
        answered: bool,
        /// It says when.
        after: Option<Duration>,
    },
    Final(Error),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Self::Final(error)
    }
}

impl Trouble {
    /// An answer that there will be a better one later.
    pub(crate) fn busy(why: impl Into<String>, after: Option<Duration>) -> Self {
        Self::Again {
            why: io::Error::other(why.into()),
            answered: true,
            after,
        }
    }

    /// What a failed call means: the network may work again. `name` is what was asked for.
    pub(crate) fn of(error: io::Error, name: &str) -> Self {
        if !may_pass(&error) {
            return Self::Final(unreachable(name, &error));
        }
        Self::Again {
            why: error,
            answered: false,
            after: None,
        }
    }
}

/// What an object's requests may cost in total, so that a store that is too busy is not asked more and more.
#[derive(Debug, Default)]
pub(crate) struct Budget {
    needed: AtomicU64,
    extra: AtomicU64,
    /// The server has answered before: it exists.
    answered: AtomicBool,
    traffic: Mutex<Traffic>,
}

impl Budget {
    /// Tries something until it is done, or there is no point any more; `reached` says how many bytes have arrived, and
    /// `name` what is asked for.
    pub(crate) fn tried<T>(
        &self,
        name: &str,
        check: WaitCheck<'_>,
        reached: impl Fn() -> u64,
        mut once: impl FnMut() -> Result<T, Trouble>,
    ) -> Result<T, Error> {
        self.needs_one();
        let mut number = 1;
        loop {
            let before = reached();
            self.traffic().requests += 1;
            let (why, answered, after) = match once() {
                Ok(done) => {
                    self.has_answered();
                    return Ok(done);
                }
                Err(Trouble::Final(error)) => return Err(error),
                Err(Trouble::Again {
                    why,
                    answered,
                    after,
                }) => (why, answered, after),
            };
            let known = self.answered.fetch_or(answered, Ordering::Relaxed) || answered;
            let most = if known { TRIES } else { TRIES_TO_REACH };
            let failed = |remedy: String| Err(unreachable(name, &why).with_remedy(remedy));
            // Lost connections are not counted: when a server restarts, all are lost, and more than once.
            if reached() - before >= PIECE {
                // Some servers close each connection after so many bytes.
                self.needs_one();
                number = 0;
            } else if answered && !self.allows_extra() {
                return failed("too many requests have failed: check the server".to_string());
            }
            if number >= most {
                return failed(format!("it was tried {number} times: check the server"));
            }
            number += 1;
            let Some(pause) = pause(number, after) else {
                let seconds = after.unwrap_or_default().as_secs();
                return failed(format!("the server asks to wait {seconds} seconds"));
            };
            {
                let mut traffic = self.traffic();
                traffic.retries += 1;
                traffic.why = Some(why.to_string());
            }
            sleep(pause, check).map_err(|error| unreachable(name, &error))?;
        }
    }

    /// What it has taken until now.
    pub(crate) fn traffic(&self) -> MutexGuard<'_, Traffic> {
        self.traffic.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The server has answered, even if that is all: from now on it may be away for longer.
    pub(crate) fn has_answered(&self) {
        self.answered.store(true, Ordering::Relaxed);
    }

    fn needs_one(&self) {
        self.needed.fetch_add(1, Ordering::Relaxed);
    }

    /// True if one more may be made.
    pub(crate) fn allows_extra(&self) -> bool {
        let most = EXTRA + self.needed.load(Ordering::Relaxed) / EXTRA_SHARE;
        self.extra.fetch_add(1, Ordering::Relaxed) < most
    }
}

/// An error of the network, or of what is asked.
fn unreachable(name: &str, error: &io::Error) -> Error {
    if let Some(own) = own(error) {
        return own.clone();
    }
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    let errno = errno.unwrap_or(match error.kind() {
        io::ErrorKind::ConnectionRefused => Errno::CONNREFUSED,
        io::ErrorKind::TimedOut => Errno::TIMEDOUT,
        io::ErrorKind::InvalidData | io::ErrorKind::PermissionDenied => Errno::PROTO,
        io::ErrorKind::HostUnreachable => Errno::HOSTUNREACH,
        io::ErrorKind::NetworkUnreachable => Errno::NETUNREACH,
        _ if is_gone(error) => Errno::CONNRESET,
        _ => Errno::IO,
    });
    Error::new("cannot fetch", error.to_string())
        .with_errno(errno)
        .at(name)
}

/// The error of this crate that is inside.
pub(crate) fn own(error: &io::Error) -> Option<&Error> {
    error.get_ref()?.downcast_ref()
}

/// The pause before try `number`, from 1: random, so that clients do not come back together; at least as long as the
/// server says. None if that is too long.
fn pause(number: u32, after: Option<Duration>) -> Option<Duration> {
    let most = FIRST.saturating_mul(1 << number.min(16)).min(LAST);
    let own = most.mul_f64((folder::random() >> 11) as f64 / (1_u64 << 53) as f64);
    let pause = after.unwrap_or_default().max(own);
    (pause <= LONGEST).then_some(pause)
}

/// True if a failed call may succeed later: it is the network's fault.
fn may_pass(error: &io::Error) -> bool {
    let lasting = matches!(
        error.kind(),
        io::ErrorKind::InvalidData
            | io::ErrorKind::InvalidInput
            | io::ErrorKind::PermissionDenied
            | io::ErrorKind::Unsupported
    );
    own(error).is_none() && !lasting && error.raw_os_error() != Some(Errno::FAULT.raw_os_error())
}

/// Sleeps, for as long as `check` agrees.
fn sleep(time: Duration, check: WaitCheck<'_>) -> io::Result<()> {
    let end = Instant::now() + time;
    loop {
        check()?;
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(Duration::from_millis(50)));
    }
}

/// The value of `Retry-After`: seconds, or a date.
pub(crate) fn after(text: &str) -> Option<Duration> {
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let then = httpdate::parse_http_date(text).ok()?;
    Some(then.duration_since(SystemTime::now()).unwrap_or_default())
}

/// How fast connections are, to find one that is much slower than the others: stores have servers that are.
#[derive(Debug, Default)]
pub(crate) struct Speeds(Mutex<VecDeque<f64>>);

/// So long a connection is slow before it is replaced.
const PATIENCE: Duration = Duration::from_secs(10);
/// It is slow if it has this share of the median speed.
const SLOW: f64 = 1.0 / 8.0;
/// The number of measurements that count, and how many are needed.
const MOST: usize = 64;
const LEAST: usize = 8;

/// One connection's speed.
pub(crate) struct ConnectionSpeed<'a> {
    all: &'a Speeds,
    since: Instant,
    bytes: u64,
}

impl Speeds {
    pub(crate) fn begin(&self) -> ConnectionSpeed<'_> {
        ConnectionSpeed {
            all: self,
            since: Instant::now(),
            bytes: 0,
        }
    }

    fn add(&self, speed: f64) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() == MOST {
            all.pop_front();
        }
        all.push_back(speed);
    }

    fn median(&self) -> Option<f64> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sorted: Vec<f64> = all.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        (sorted.len() >= LEAST).then(|| sorted[sorted.len() / 2])
    }
}

impl ConnectionSpeed<'_> {
    /// Counts bytes that have arrived; true if the connection has been slow for so long that another one is worth it.
    pub(crate) fn is_slow(&mut self, bytes: u64) -> bool {
        self.bytes += bytes;
        let time = self.since.elapsed();
        if time < PATIENCE {
            return false;
        }
        let own = self.bytes as f64 / time.as_secs_f64();
        let is_slow = self.all.median().is_some_and(|median| own < median * SLOW);
        if !is_slow {
            self.all.add(own);
            (self.since, self.bytes) = (Instant::now(), 0);
        }
        is_slow
    }

    /// The connection has delivered all that it was asked for.
    pub(crate) fn end(self) {
        let time = self.since.elapsed().as_secs_f64();
        if self.bytes > 0 && time > 0.0 {
            self.all.add(self.bytes as f64 / time);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_obey_the_server() {
        let long = |number| (0..200).filter_map(|_| pause(number, None)).max().unwrap();
        assert!(long(1) <= Duration::from_millis(200));
        assert!(long(30) <= LAST && long(30) > Duration::from_secs(10));
        let asked = pause(1, Some(Duration::from_secs(60))).unwrap();
        assert_eq!(asked, Duration::from_secs(60));
        assert_eq!(pause(1, Some(Duration::from_secs(86_400))), None);
    }

    #[test]
    fn a_time_to_wait_is_seconds_or_a_date() {
        assert_eq!(after("7"), Some(Duration::from_secs(7)));
        assert_eq!(after("Wed, 21 Oct 2015 07:28:00 GMT"), Some(Duration::ZERO));
        let date = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(100));
        assert!((90..=100).contains(&after(&date).unwrap().as_secs()));
        assert_eq!(after("soon"), None);
    }

    #[test]
    fn a_budget_ends() {
        let budget = Budget::default();
        (0..100).for_each(|_| budget.needs_one());
        let extra = (0..1000).filter(|_| budget.allows_extra()).count();
        assert_eq!(extra, 30);
    }

    #[test]
    fn only_a_connection_that_is_much_slower_than_others_is_slow() {
        let speeds = Speeds::default();
        let old = |bytes| ConnectionSpeed {
            all: &speeds,
            since: Instant::now() - PATIENCE,
            bytes,
        };
        assert!(!old(1).is_slow(1), "nothing is known of the others");
        (0..20).for_each(|_| speeds.add(1e6));
        assert!(old(1_000_000).is_slow(0));
        assert!(!old(2_000_000).is_slow(0));
        assert!(!speeds.begin().is_slow(1), "it has just begun");
    }
}
