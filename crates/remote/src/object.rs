//! An object behind a URL.

use crate::answer::{Answered, Version, judge};
use crate::http::{Answer, Check, Client, Request, basic, is_gone};
use crate::retry::{self, Budget, Speeds, TRIES, TRIES_TO_REACH};
use dmafile::internal::Verb;
use dmafile::{CancelToken, Error, ObjectReader, ReadBuf, RemoteObject, Result};
use rustix::io::Errno;
use std::cell::RefCell;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use url::Url;

/// How much the first request asks for, which also says how large the object is: most headers of models.
const FIRST: u64 = 256 << 10;
/// The most bytes between two looks at the speed of a connection.
const PIECE: u64 = 256 << 10;
const MOST_REDIRECTS: usize = 5;

/// How URLs are opened.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// Loads an object that has neither an ETag nor a time of its last change, so that a load may mix two versions of
    /// it.
    pub unpinned: bool,
    /// A file with the certificates of authorities that count, in place of the system's.
    pub certificates: Option<PathBuf>,
    /// Cancels opening.
    pub cancel: CancelToken,
}

/// Opens the object behind a URL.
///
/// # Errors
/// Kind `Usage` for what is no URL; ENOENT if the object does not exist, EACCES if it may not be read, ENODATA if it is
/// empty, EPROTO for a server whose answers cannot be used, ETIMEDOUT and others if it cannot be reached.
pub fn open(url: &str, options: &OpenOptions) -> Result<Arc<dyn RemoteObject>> {
    let client = Arc::new(Client::from_env(options.certificates.clone()));
    Ok(Arc::new(HttpObject::open(client, url, options)?))
}

/// An object on a web server.
pub struct HttpObject {
    client: Arc<Client>,
    name: String,
    link: Link,
    /// Where it was found after redirections.
    found: Mutex<Option<Url>>,
    version: Version,
    /// Its first bytes.
    first: Vec<u8>,
    budget: Budget,
    speeds: Speeds,
    readers: AtomicUsize,
}

/// Where an object is, and what requests for it need.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    pub url: Url,
    /// The field `Authorization`, for the URL's own server only.
    pub authorization: Option<String>,
}

/// Why a request has to be made again, or must not.
enum Trouble {
    Again {
        why: io::Error,
        /// The server has answered, and may say when.
        answered: bool,
        after: Option<Duration>,
    },
    Final(Error),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Self::Final(error)
    }
}

impl HttpObject {
    fn open(client: Arc<Client>, text: &str, options: &OpenOptions) -> Result<Self> {
        let mut url = Url::parse(text).map_err(|error| {
            Error::usage(
                "URL",
                format!("'{}' is not valid: {error}", without_secrets(text)),
            )
        })?;
        url.set_fragment(None);
        let authorization = basic(&url);
        // They are sent in a field.
        let _ = url.set_username("").and_then(|()| url.set_password(None));
        let mut object = Self {
            client,
            name: without_secrets(url.as_str()),
            link: Link { url, authorization },
            found: Mutex::default(),
            version: Version::default(),
            first: Vec::new(),
            budget: Budget::default(),
            speeds: Speeds::default(),
            readers: AtomicUsize::new(0),
        };
        let check = || {
            if options.cancel.is_cancelled() {
                return Err(Error::cancelled(Verb::Load, &object.name).into());
            }
            Ok(())
        };
        let mut first = Vec::new();
        let version = object.tried(&check, || 0, || object.first(&mut first, &check))?;
        let covers = version.size <= first.len() as u64;
        if version.condition().is_none() && !covers && !options.unpinned {
            let why = "its server names no version of it (ETag or Last-Modified)";
            return Err(object
                .error(why, Errno::OPNOTSUPP)
                .with_remedy("a load could mix two versions; allow that, or copy it elsewhere"));
        }
        (object.version, object.first) = (version, first);
        Ok(object)
    }

    fn error(&self, why: impl Into<String>, errno: Errno) -> Error {
        Error::new("cannot fetch", why.into())
            .with_errno(errno)
            .at(&self.name)
    }

    /// An error of the network.
    fn unreachable(&self, error: &io::Error) -> Error {
        if let Some(own) = error
            .get_ref()
            .and_then(|inner| inner.downcast_ref::<Error>())
        {
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
        self.error(error.to_string(), errno)
    }

    /// Tries something until it is done, or there is no point any more; `reached` says how many bytes have arrived.
    fn tried<T>(
        &self,
        check: Check<'_>,
        reached: impl Fn() -> u64,
        mut once: impl FnMut() -> Result<T, Trouble>,
    ) -> Result<T> {
        self.budget.needs_one();
        let mut number = 1;
        loop {
            let before = reached();
            let (why, answered, after) = match once() {
                Ok(done) => return Ok(done),
                Err(Trouble::Final(error)) => return Err(error),
                Err(Trouble::Again {
                    why,
                    answered,
                    after,
                }) => (why, answered, after),
            };
            // A server that has never been reached may not exist.
            let known = answered || self.version.size > 0;
            let most = if known { TRIES } else { TRIES_TO_REACH };
            let failed = |remedy: String| self.unreachable(&why).with_remedy(remedy);
            if reached() - before >= PIECE {
                // Some servers close each connection after so many bytes.
                self.budget.needs_one();
                number = 0;
            } else if !self.budget.allows_extra() {
                return Err(failed(
                    "too many requests have failed: check the server".to_string(),
                ));
            }
            if number >= most {
                return Err(failed(format!(
                    "it was tried {number} times: check the server"
                )));
            }
            number += 1;
            let Some(pause) = retry::pause(number, after) else {
                let seconds = after.unwrap_or_default().as_secs();
                return Err(failed(format!("the server asks to wait {seconds} seconds")));
            };
            retry::sleep(pause, check).map_err(|error| self.unreachable(&error))?;
            self.client.counts.retries.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// What a failed call means: the network may work again.
    fn trouble(&self, error: io::Error) -> Trouble {
        let own = error.get_ref().is_some_and(|inner| inner.is::<Error>());
        let lasting = matches!(
            error.kind(),
            io::ErrorKind::InvalidData
                | io::ErrorKind::InvalidInput
                | io::ErrorKind::PermissionDenied
                | io::ErrorKind::Unsupported
        );
        if own || lasting || error.raw_os_error() == Some(Errno::FAULT.raw_os_error()) {
            return Trouble::Final(self.unreachable(&error));
        }
        Trouble::Again {
            why: error,
            answered: false,
            after: None,
        }
    }

    /// Asks for a range; returns the checked answer, the number of bytes and the version that it is of.
    fn ask(
        &self,
        (start, end): (u64, u64),
        known: Option<&Version>,
        check: Check<'_>,
    ) -> Result<(Answer, u64, Version), Trouble> {
        let again = |why: String, after| Trouble::Again {
            why: io::Error::other(why),
            answered: true,
            after,
        };
        let found = self
            .found
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let was_found = found.is_some();
        let mut url = found.unwrap_or_else(|| self.link.url.clone());
        for _ in 0..=MOST_REDIRECTS {
            let mut fields = vec![("Range", format!("bytes={start}-{}", end - 1))];
            if let Some(authorization) = &self.link.authorization
                && same_server(&url, &self.link.url)
            {
                fields.push(("Authorization", authorization.clone()));
            }
            fields.extend(known.and_then(Version::condition));
            let request = Request {
                method: "GET",
                url: &url,
                fields,
                body: &[],
            };
            let answer = self.client.send(&request, check);
            let answer = answer.map_err(|error| self.trouble(error))?;
            match judge(&answer.head, (start, end), known) {
                Answered::Range(length, version) => {
                    let moved = (url != self.link.url).then_some(url);
                    *self.found.lock().unwrap_or_else(PoisonError::into_inner) = moved;
                    return Ok((answer, length, version));
                }
                Answered::Moved(place) => {
                    url = self.redirected(&url, &place)?;
                }
                Answered::Again(why, after) => return Err(again(why, after)),
                // The place where it was found may have been for a short time.
                Answered::Denied(status) | Answered::Missing(status) if was_found => {
                    *self.found.lock().unwrap_or_else(PoisonError::into_inner) = None;
                    return Err(again(format!("status {status}"), None));
                }
                Answered::Denied(status) => {
                    let why = format!("the server does not allow it (status {status})");
                    return Err(self.error(why, Errno::ACCESS).into());
                }
                Answered::Missing(status) => {
                    let why = format!("there is no such object (status {status})");
                    return Err(self.error(why, Errno::NOENT).into());
                }
                Answered::Changed(why) => {
                    let why = format!("it was replaced during the load: {why}");
                    let remedy = "load it again when nothing writes to it";
                    return Err(self.error(why, Errno::STALE).with_remedy(remedy).into());
                }
                Answered::Empty => {
                    let remedy = "a buffer needs at least one byte";
                    return Err(self
                        .error("is empty", Errno::NODATA)
                        .with_remedy(remedy)
                        .into());
                }
                Answered::Wrong(why) => return Err(self.error(why, Errno::PROTO).into()),
            }
        }
        let why = format!("it was redirected more than {MOST_REDIRECTS} times");
        Err(self.error(why, Errno::LOOP).with_remedy("").into())
    }

    fn redirected(&self, from: &Url, place: &str) -> Result<Url> {
        let refuse = |why: String| self.error(why, Errno::PROTO);
        let to = from.join(place);
        let mut to = to.map_err(|error| refuse(format!("it is redirected to no URL: {error}")))?;
        to.set_fragment(None);
        match (from.scheme(), to.scheme()) {
            ("https", "https") | ("http", "http" | "https") => Ok(to),
            (_, other) => Err(refuse(format!(
                "it is redirected from {} to {other}",
                from.scheme()
            ))),
        }
    }

    /// Receives the first bytes, and returns the version.
    fn first(&self, first: &mut Vec<u8>, check: Check<'_>) -> Result<Version, Trouble> {
        let (mut answer, length, version) = self.ask((0, FIRST), None, check)?;
        *first = vec![0; length as usize];
        let received = {
            let mut buf = ReadBuf::checked(first, check);
            answer.connection.receive_into(&mut buf, length)
        };
        received.map_err(|error| self.trouble(error))?;
        answer.keep(&self.client);
        Ok(version)
    }

    /// Receives bytes until `into` is full, or something happens.
    fn rest(&self, offset: u64, into: &mut ReadBuf<'_>) -> Result<(), Trouble> {
        let (at, left) = (offset + into.filled(), into.remaining());
        let (mut answer, length, _) = {
            let check = || into.check();
            self.ask((at, at + left), Some(&self.version), &check)?
        };
        let mut speed = self.speeds.begin();
        let mut done = 0;
        while done < length {
            let piece = PIECE.min(length - done);
            let received = answer.connection.receive_into(into, piece);
            received.map_err(|error| self.trouble(error))?;
            done += piece;
            if speed.is_slow(piece) && done < length && self.budget.allows_extra() {
                return Err(Trouble::Again {
                    why: io::Error::other("the connection is much slower than the others"),
                    answered: true,
                    after: None,
                });
            }
        }
        speed.end();
        answer.keep(&self.client);
        Ok(())
    }
}

/// True if a secret for one URL may be sent to the other.
fn same_server(one: &Url, other: &Url) -> bool {
    let server = |url: &Url| {
        (
            url.scheme().to_string(),
            url.host_str().map(str::to_string),
            url.port_or_known_default(),
        )
    };
    server(one) == server(other)
}

/// A URL as it may be shown: without a user, a password, and the query, which may be a signature.
pub(crate) fn without_secrets(text: &str) -> String {
    let text = text.split(['?', '#']).next().unwrap_or_default();
    let Some((scheme, rest)) = text.split_once("://") else {
        return text.to_string();
    };
    let host = rest.find('/').unwrap_or(rest.len());
    let begin = rest[..host].rfind('@').map_or(0, |at| at + 1);
    format!("{scheme}://{}", &rest[begin..])
}

impl RemoteObject for HttpObject {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn size(&self) -> u64 {
        self.version.size
    }

    fn store(&self) -> String {
        self.link.url.scheme().to_string()
    }

    fn reader(&self) -> io::Result<Box<dyn ObjectReader + '_>> {
        self.readers.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(HttpReader(self)))
    }
}

struct HttpReader<'a>(&'a HttpObject);

impl ObjectReader for HttpReader<'_> {
    fn read(&mut self, offset: u64, into: &mut ReadBuf<'_>) -> io::Result<()> {
        let object = self.0;
        while into.remaining() > 0 {
            let at = offset + into.filled();
            let Some(rest) = object
                .first
                .get(at as usize..)
                .filter(|rest| !rest.is_empty())
            else {
                break;
            };
            into.fill(rest.len(), |memory| {
                let length = memory.len();
                memory.copy_from_slice(&rest[..length]);
                Ok(length)
            })?;
        }
        if into.remaining() == 0 {
            return Ok(());
        }
        let into = RefCell::new(into);
        object.tried(
            &|| into.borrow().check(),
            || into.borrow().filled(),
            || object.rest(offset, &mut into.borrow_mut()),
        )?;
        Ok(())
    }
}

impl Drop for HttpReader<'_> {
    fn drop(&mut self) {
        // A process that has loaded has no connection that it did not have before.
        if self.0.readers.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.0.client.close();
        }
    }
}
