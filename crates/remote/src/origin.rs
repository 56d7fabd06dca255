//! Who is asked for the bytes of an object, and how.

use crate::answer::{KnownDigest, digest, digest_of_tag};
use crate::http::{AnswerHead, Client, ClientRequest, HttpAnswer, WaitCheck};
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use url::Url;

/// A field that makes a request fail if the object is another one by now.
pub(crate) type Condition = Option<(&'static str, String)>;

/// What knows how to ask for an object.
pub(crate) trait ObjectOrigin: Send + Sync {
    /// What it is stored in, in one word.
    fn store(&self) -> String;

    /// Asks for the bytes `[start, end)`; returns the answer that is no redirection.
    ///
    /// # Errors
    /// Those of the network; [`dmafile::Error`] inside for what is final.
    fn ask(
        &self,
        client: &Client,
        range: (u64, u64),
        condition: Condition,
        check: WaitCheck<'_>,
    ) -> io::Result<HttpAnswer>;

    /// The digest of the whole object that an answer names.
    fn digest(&self, answer: &HttpAnswer) -> Option<KnownDigest> {
        digest(&answer.head)
    }

    /// Asks for what the store says of the whole object, if that takes a request of its own.
    fn describe(
        &self,
        _client: &Client,
        _condition: Condition,
        _check: WaitCheck<'_>,
    ) -> io::Result<Option<AnswerHead>> {
        Ok(None)
    }

    /// Forgets what may have expired, after the credentials or the place were not accepted; true if there was such.
    fn renew(&self) -> bool;
}

/// A URL that is asked for directly.
pub(crate) struct Web {
    url: Url,
    /// The field `Authorization`, for the URL's own server only.
    authorization: Option<String>,
    store: String,
    /// Where it was found after redirections.
    found: Mutex<Option<Url>>,
    /// Its entity tag where it was asked for first.
    tag: Mutex<Option<String>>,
}

const MOST_REDIRECTS: usize = 5;

impl Web {
    pub(crate) fn new(url: Url, authorization: Option<String>, store: &str) -> Self {
        Self {
            url,
            authorization,
            store: store.to_string(),
            found: Mutex::default(),
            tag: Mutex::default(),
        }
    }

    fn found(&self) -> MutexGuard<'_, Option<Url>> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ObjectOrigin for Web {
    fn store(&self) -> String {
        self.store.clone()
    }

    fn ask(
        &self,
        client: &Client,
        (start, end): (u64, u64),
        condition: Condition,
        check: WaitCheck<'_>,
    ) -> io::Result<HttpAnswer> {
        let found = self.found().clone();
        let first = found.unwrap_or_else(|| self.url.clone());
        let range = ("Range", format!("bytes={start}-{}", end - 1));
        let fields = [Some(range), condition].into_iter().flatten();
        let authorization = self
            .authorization
            .as_deref()
            .map(|secret| (&self.url, secret));
        let (mut answer, url) = follow(client, &first, fields.collect(), authorization, check)?;
        let mut tag = self.tag.lock().unwrap_or_else(PoisonError::into_inner);
        if first == self.url {
            *tag = answer.first_tag.take();
        }
        // Elsewhere it has another one.
        answer.first_tag.clone_from(&tag);
        drop(tag);
        if answer.head.status == 206 {
            *self.found() = (url != self.url).then_some(url);
        }
        Ok(answer)
    }

    fn digest(&self, answer: &HttpAnswer) -> Option<KnownDigest> {
        match self.store.as_str() {
            "hf" => answer.first_tag.as_deref().and_then(digest_of_tag),
            _ => digest(&answer.head),
        }
    }

    fn renew(&self) -> bool {
        self.found().take().is_some()
    }
}

/// Sends a GET, and follows redirections. The secret is only sent to the server of its URL.
pub(crate) fn follow(
    client: &Client,
    first: &Url,
    fields: Vec<(&'static str, String)>,
    authorization: Option<(&Url, &str)>,
    check: WaitCheck<'_>,
) -> io::Result<(HttpAnswer, Url)> {
    let mut url = first.clone();
    let mut first_tag = None;
    for _ in 0..=MOST_REDIRECTS {
        let mut fields = fields.clone();
        if let Some((own, secret)) = authorization
            && same_server(&url, own)
        {
            fields.push(("Authorization", secret.to_string()));
        }
        let request = ClientRequest {
            method: "GET",
            url: &url,
            fields,
            body: &[],
        };
        let mut answer = client.send(&request, check)?;
        if same_server(&url, first) && first_tag.is_none() {
            let tag = |name| answer.head.field(name);
            first_tag = tag("x-linked-etag")
                .or_else(|| tag("etag"))
                .map(str::to_string);
        }
        let moved = matches!(answer.head.status, 301 | 302 | 303 | 307 | 308);
        let Some(place) = answer.head.field("location").filter(|_| moved) else {
            answer.first_tag = first_tag;
            return Ok((answer, url));
        };
        url = redirected(&url, place)?;
        // Most have a short body or none.
        if let Err(error) = answer.text(client, check) {
            check()?;
            drop(error);
        }
    }
    let why = format!("it was redirected more than {MOST_REDIRECTS} times");
    Err(io::Error::new(io::ErrorKind::InvalidData, why))
}

fn redirected(from: &Url, place: &str) -> io::Result<Url> {
    let refuse = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
    let to = from.join(place);
    let mut to = to.map_err(|error| refuse(format!("it is redirected to no URL: {error}")))?;
    to.set_fragment(None);
    match (from.scheme(), to.scheme()) {
        ("https", "https") | ("http", "http" | "https") => Ok(to),
        (own, other) => Err(refuse(format!("it is redirected from {own} to {other}"))),
    }
}

/// True if a secret for one URL may be sent to the other.
fn same_server(one: &Url, other: &Url) -> bool {
    let port = |url: &Url| url.port_or_known_default();
    (one.scheme(), one.host_str(), port(one)) == (other.scheme(), other.host_str(), port(other))
}
