//! An object behind a URL.

use crate::OpenOptions;
use crate::answer::{Answered, KnownDigest, Version, busy, digest, judge};
use crate::http::{AnswerHead, Client, HttpAnswer, WaitCheck};
use crate::origin::ObjectOrigin;
use crate::retry::{Budget, Speeds, Trouble};
use dmafile::internal::Verb;
use dmafile::{CancelToken, Error, ObjectReader, ReadBuf, RemoteObject, Result, Traffic};
use rustix::io::Errno;
use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// How much the first request asks for, which also says how large the object is: most headers of models.
const FIRST: u64 = 256 << 10;

/// An object behind a URL.
pub(crate) struct HttpObject {
    client: Arc<Client>,
    name: String,
    origin: Box<dyn ObjectOrigin>,
    version: Version,
    /// Its first bytes.
    first: Vec<u8>,
    /// What its store said with them of all its bytes.
    digest: Option<KnownDigest>,
    budget: Budget,
    speeds: Speeds,
    cancel: CancelToken,
}

impl HttpObject {
    /// Asks for its first bytes, which says what it is.
    pub(crate) fn open(
        client: &Arc<Client>,
        name: String,
        origin: Box<dyn ObjectOrigin>,
        options: &OpenOptions,
    ) -> Result<Self> {
        let mut object = Self {
            client: Arc::clone(client),
            name,
            origin,
            version: Version::default(),
            first: Vec::new(),
            digest: None,
            budget: Budget::default(),
            speeds: Speeds::default(),
            cancel: options.cancel.clone(),
        };
        let check = || object.check();
        let mut first = Vec::new();
        let (version, digest) = object.tried(&check, || 0, || object.first(&mut first, &check))?;
        let covers = version.size <= first.len() as u64;
        if version.condition().is_none() && !covers && !options.unpinned {
            let why = "its server names no version of it (ETag or Last-Modified)";
            return Err(object
                .error(why, Errno::OPNOTSUPP)
                .with_remedy("a load could mix two versions; allow that, or copy it elsewhere"));
        }
        (object.version, object.first, object.digest) = (version, first, digest);
        Ok(object)
    }

    fn check(&self) -> io::Result<()> {
        if self.cancel.is_cancelled() {
            return Err(Error::cancelled(Verb::Load, &self.name).into());
        }
        Ok(())
    }

    fn error(&self, why: impl Into<String>, errno: Errno) -> Error {
        Error::new("cannot fetch", why.into())
            .with_errno(errno)
            .at(&self.name)
    }

    /// As [`Budget::tried`].
    fn tried<T>(
        &self,
        check: WaitCheck<'_>,
        reached: impl Fn() -> u64,
        once: impl FnMut() -> Result<T, Trouble>,
    ) -> Result<T> {
        self.budget.tried(&self.name, check, reached, once)
    }

    fn trouble(&self, error: io::Error) -> Trouble {
        Trouble::of(error, &self.name)
    }

    /// Asks for a range; returns the checked answer, the number of bytes and the version that it is of.
    fn ask(
        &self,
        (start, end): (u64, u64),
        known: Option<&Version>,
        check: WaitCheck<'_>,
    ) -> Result<(HttpAnswer, u64, Version), Trouble> {
        let condition = known.and_then(Version::condition);
        let answer = self
            .origin
            .ask(&self.client, (start, end), condition, check);
        let answer = answer.map_err(|error| self.trouble(error))?;
        self.budget.has_answered();
        match judge(&answer.head, (start, end), known) {
            Answered::Range(length, version) => Ok((answer, length, version)),
            Answered::Again(why, after) => Err(Trouble::busy(why, after)),
            // The place where it was found may have been for a short time.
            Answered::Denied(status) | Answered::Missing(status) if self.origin.renew() => {
                Err(Trouble::busy(format!("status {status}"), None))
            }
            Answered::Denied(status) => {
                let why = format!("the server does not allow it (status {status})");
                Err(self.error(why, Errno::ACCESS).into())
            }
            Answered::Missing(status) => {
                let why = format!("there is no such object (status {status})");
                Err(self.error(why, Errno::NOENT).into())
            }
            Answered::Changed(why) => Err(self.replaced(&why).into()),
            Answered::Empty => {
                let remedy = "a buffer needs at least one byte";
                Err(self
                    .error("is empty", Errno::NODATA)
                    .with_remedy(remedy)
                    .into())
            }
            Answered::Wrong(why) => Err(self.error(why, Errno::PROTO).into()),
        }
    }

    /// Asks for what the store says of the whole object.
    fn describe(&self, check: WaitCheck<'_>) -> Result<Option<AnswerHead>, Trouble> {
        let condition = self.version.condition();
        let head = self.origin.describe(&self.client, condition, check);
        let Some(head) = head.map_err(|error| self.trouble(error))? else {
            return Ok(None);
        };
        if let Some((why, after)) = busy(&head) {
            return Err(Trouble::busy(why, after));
        }
        match head.status {
            200 => Ok(Some(head)),
            412 => Err(self.replaced("the server says so (status 412)").into()),
            status => {
                let why = format!("its store does not say what its digest is (status {status})");
                Err(self.error(why, Errno::ACCESS).into())
            }
        }
    }

    fn replaced(&self, why: &str) -> Error {
        let why = format!("it was replaced during the load: {why}");
        let remedy = "load it again when nothing writes to it";
        self.error(why, Errno::STALE).with_remedy(remedy)
    }

    /// Receives the first bytes, and returns the version, and the digest if the answer has it.
    fn first(
        &self,
        first: &mut Vec<u8>,
        check: WaitCheck<'_>,
    ) -> Result<(Version, Option<KnownDigest>), Trouble> {
        let (mut answer, length, version) = self.ask((0, FIRST), None, check)?;
        *first = vec![0; length as usize];
        let received = {
            let mut buf = ReadBuf::checked(first, check);
            answer.connection.receive_into(&mut buf, length)
        };
        received.map_err(|error| self.trouble(error))?;
        let digest = self.origin.digest(&answer);
        answer.keep(&self.client);
        Ok((version, digest))
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
            let received = answer.connection.receive_some(into, length - done);
            let got = received.map_err(|error| self.trouble(error))?;
            done += got;
            if speed.is_slow(got) && done < length && self.budget.allows_extra() {
                let why = "the connection is much slower than the others";
                return Err(Trouble::busy(why, None));
            }
        }
        speed.end();
        answer.keep(&self.client);
        Ok(())
    }
}

impl RemoteObject for HttpObject {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn size(&self) -> u64 {
        self.version.size
    }

    fn store(&self) -> String {
        self.origin.store()
    }

    fn version(&self) -> Option<String> {
        self.version.condition().map(|(_, version)| version)
    }

    fn digest(&self) -> io::Result<Option<KnownDigest>> {
        if self.digest.is_some() {
            return Ok(self.digest.clone());
        }
        let check = || self.check();
        let described = self.tried(&check, || 0, || self.describe(&check))?;
        Ok(described.as_ref().and_then(digest))
    }

    fn traffic(&self) -> Option<Traffic> {
        Some(self.budget.traffic().clone())
    }

    fn reader(&self) -> io::Result<Box<dyn ObjectReader + '_>> {
        self.client.readers.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(HttpReader(self)))
    }
}

struct HttpReader<'a>(&'a HttpObject);

impl ObjectReader for HttpReader<'_> {
    fn read(&mut self, offset: u64, into: &mut ReadBuf<'_>) -> io::Result<()> {
        let object = self.0;
        let first = object.first.get(offset as usize..).unwrap_or_default();
        into.copy(first)?;
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
        if self.0.client.readers.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.0.client.close();
        }
    }
}
