//! Saves to object stores: one request, or the parts of a multipart upload, which become the object all at once.

use crate::Remote;
use crate::bucket::{SaveCondition, StoreBucket};
use crate::place::UrlPlace;
use bytes::Bytes;
use dmafile::internal::{Hasher, OriginReader, Verb, sync, without_secrets};
use dmafile::{CancelToken, Error, Origin, Progress, Result, Verify};
use object_store::multipart::PartId;
use object_store::path::Path;
use rustix::io::Errno;
use serde::Serialize;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// How many parts are on their way at the same time, if nothing else is asked for.
const CONNECTIONS: u32 = 8;
/// The most, each with a part in memory.
const MOST_CONNECTIONS: u32 = 64;
/// The size of a part. Stores take at least 5 MiB, and at most 10,000 parts.
const PART: u64 = 8 << 20;
const MOST_PARTS: u64 = 9_500;
/// Every so many parts, those of a stream become larger by [`PART`], because nobody knows how many will come.
const STEP: u64 = 500;

/// How memory or a file is saved as an object.
#[derive(Default)]
pub struct SaveOptions {
    /// Number of bytes; default: all.
    pub length: Option<u64>,
    /// Computes a checksum of what is sent; if another one is expected, there is no new object.
    pub verify: Option<Verify>,
    /// How many parts are sent at the same time, 1 to 64; default: 8. Each is in memory meanwhile: 8 MiB, or more if the
    /// object has more than 74 GiB.
    pub connections: Option<u32>,
    /// Which object may be replaced; default: any.
    pub condition: Option<SaveCondition>,
    /// Called when a part has arrived.
    pub progress: Option<Box<dyn Fn(Progress) + Send + Sync>>,
    /// Cancels it.
    pub cancel: CancelToken,
}

/// An object that has been saved.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct SavedObject {
    /// Its URL.
    pub url: String,
    /// Its size.
    pub bytes: u64,
    /// How long it took.
    pub seconds: f64,
    /// How many parts it was sent in.
    pub parts: u64,
    /// Its version, as the store names it.
    pub version: Option<String>,
    /// The digest, as `ALGORITHM HEX`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

impl Remote {
    /// Saves memory, a file or a stream as an object. Until all of it has arrived, and if that fails, the store has the
    /// old object, or none.
    ///
    /// # Errors
    /// Kind `Usage` for a URL that is no object of a bucket; EEXIST or ESTALE if the condition does not hold; EBADMSG for
    /// another digest than the expected one; EACCES and others as the store answers.
    pub fn save(
        &self,
        origin: &Origin<'static>,
        url: &str,
        options: &SaveOptions,
    ) -> Result<SavedObject> {
        let UrlPlace::Bucket {
            dialect,
            bucket,
            key,
        } = UrlPlace::parse(url)?
        else {
            let why = "only objects of stores can be saved: s3://, gs:// or az://";
            return Err(Error::usage("URL", why));
        };
        if key.is_empty() || key.ends_with('/') {
            let why = format!("'{}' names a folder", without_secrets(url));
            return Err(Error::usage("URL", why).with_remedy("add the name of the object"));
        }
        let bucket = StoreBucket::open_to_save(
            self.client(dialect),
            dialect,
            &bucket,
            options.cancel.clone(),
        )?;
        let reader = OriginReader::open(origin, options.length)?;
        let saved = send(bucket, key, reader, options);
        // As after a load, no connection is left.
        self.client(dialect).close();
        saved
    }
}

/// Sends what is read, which becomes the object `key`.
pub(crate) fn send(
    bucket: StoreBucket,
    key: String,
    reader: OriginReader,
    options: &SaveOptions,
) -> Result<SavedObject> {
    let begin = Instant::now();
    let upload = Upload {
        path: bucket.path(&key)?,
        bucket,
        key,
        part: reader.bytes().map_or(PART, part_size),
        state: Mutex::new(State {
            index: 0,
            at: 0,
            ended: false,
            failed: None,
            hasher: hasher(options.verify.as_ref(), reader.bytes()),
            parts: Vec::new(),
            sent: 0,
        }),
        reader,
        options,
    };
    let (version, parts) = upload.run()?;
    let state = upload.state();
    Ok(SavedObject {
        url: upload.name(),
        bytes: state.at,
        seconds: begin.elapsed().as_secs_f64(),
        parts,
        version,
        digest: match (&options.verify, &state.hasher) {
            (Some(verify), Hashed::Done(hex)) => Some(format!("{} {hex}", verify.algorithm)),
            _ => None,
        },
    })
}

fn part_size(bytes: u64) -> u64 {
    bytes
        .div_ceil(MOST_PARTS)
        .next_multiple_of(1 << 20)
        .max(PART)
}

enum Hashed {
    Not,
    Yet(Box<Hasher>),
    Done(String),
}

fn hasher(verify: Option<&Verify>, bytes: Option<u64>) -> Hashed {
    match verify {
        Some(verify) => Hashed::Yet(Box::new(Hasher::new(
            verify.algorithm,
            bytes.unwrap_or_default(),
        ))),
        None => Hashed::Not,
    }
}

struct Upload<'a> {
    bucket: StoreBucket,
    key: String,
    path: Path,
    reader: OriginReader,
    part: u64,
    options: &'a SaveOptions,
    state: Mutex<State>,
}

struct State {
    /// The part that is read next, and its first byte.
    index: u64,
    at: u64,
    ended: bool,
    failed: Option<Error>,
    hasher: Hashed,
    parts: Vec<(u64, PartId)>,
    sent: u64,
}

impl Upload<'_> {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        sync::lock(&self.state)
    }

    fn name(&self) -> String {
        self.bucket.name_of(&self.key)
    }

    /// Returns the version of the new object, and the number of its parts.
    fn run(&self) -> Result<(Option<String>, u64)> {
        let first = self.next()?.map_or_else(Bytes::new, |part| part.1);
        let condition = self.options.condition.as_ref();
        if self.state().ended {
            self.finish()?;
            let bytes = first.len() as u64;
            let version = self.bucket.put(&self.path, first, condition)?;
            self.progress(bytes);
            return Ok((version, 1));
        }
        self.bucket
            .clear_leftovers(&self.key, |key| key == self.key);
        let id = self.bucket.begin(&self.path, condition)?;
        let sent = self.send_all(&id, first).and_then(|()| self.finish());
        let done = sent.and_then(|()| {
            let mut parts = std::mem::take(&mut self.state().parts);
            parts.sort_by_key(|part| part.0);
            let count = parts.len() as u64;
            let parts = parts.into_iter().map(|part| part.1).collect();
            let done = self.bucket.complete(&self.path, &id, parts, condition);
            Ok((done.map_err(unclear)?, count))
        });
        if done.is_err() {
            // What it leaves behind costs money until somebody removes it.
            self.bucket.abort(&self.path, &id);
        }
        done
    }

    /// Reads the next part, and returns its number; None if there is none.
    fn next(&self) -> Result<Option<(u64, Bytes)>> {
        let mut state = self.state();
        if state.ended || state.failed.is_some() {
            return Ok(None);
        }
        let cancel = &self.options.cancel;
        if cancel.is_cancelled() {
            return Err(Error::cancelled(Verb::Save, self.name()));
        }
        let known = self.reader.bytes();
        let size = match known {
            Some(bytes) => self.part.min(bytes - state.at),
            None => PART * (1 + state.index / STEP),
        };
        let mut part = vec![0; size as usize];
        let got = self.reader.read(state.at, &mut part, cancel)?;
        part.truncate(got);
        if let Hashed::Yet(hasher) = &mut state.hasher {
            hasher.update(&part);
        }
        let index = state.index;
        state.index += 1;
        state.at += got as u64;
        state.ended = (got as u64) < size || known.is_some_and(|bytes| bytes == state.at);
        // The end of a stream may come after a whole part.
        let is_part = got > 0;
        Ok(is_part.then(|| (index, Bytes::from(part))))
    }

    fn send_all(&self, id: &str, first: Bytes) -> Result<()> {
        let connections = self.options.connections.unwrap_or(CONNECTIONS);
        let connections = connections.clamp(1, MOST_CONNECTIONS);
        let first = Mutex::new(Some((0, first)));
        let work = || {
            let sent = self.send_some(id, &first);
            if let Err(error) = sent {
                // The first error counts.
                self.state().failed.get_or_insert(error);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..connections {
                // Without threads it only takes longer.
                let _ = std::thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        match self.state().failed.take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    fn send_some(&self, id: &str, first: &Mutex<Option<(u64, Bytes)>>) -> Result<()> {
        loop {
            let first = sync::lock(first).take();
            let next = match first {
                Some(first) => Some(first),
                None => self.next()?,
            };
            let Some((index, bytes)) = next else {
                return Ok(());
            };
            let length = bytes.len() as u64;
            let part = self
                .bucket
                .put_part(&self.path, id, index as usize, bytes)?;
            self.state().parts.push((index, part));
            self.progress(length);
        }
    }

    fn progress(&self, bytes: u64) {
        let mut state = self.state();
        state.sent += bytes;
        if let Some(tell) = &self.options.progress {
            let total = self.reader.bytes().unwrap_or(state.at);
            tell(Progress::new(state.sent, total));
        }
    }

    /// Checks what has been sent, before it becomes an object.
    fn finish(&self) -> Result<()> {
        self.reader.finish()?;
        let mut state = self.state();
        let Hashed::Yet(hasher) = std::mem::replace(&mut state.hasher, Hashed::Not) else {
            return Ok(());
        };
        let hex = hasher.hex();
        if let Some(verify) = &self.options.verify
            && let Some(expected) = verify
                .expected
                .as_ref()
                .filter(|expected| **expected != hex)
        {
            let algorithm = verify.algorithm;
            let why = format!("{algorithm} is {hex} and should be {expected}");
            return Err(Error::new("wrong digest", why)
                .with_errno(Errno::BADMSG)
                .at(self.reader.name())
                .with_remedy("what is saved is not what was expected"));
        }
        state.hasher = Hashed::Done(hex);
        Ok(())
    }
}

/// An error of the request that makes the parts an object: if only its answer was lost, they are one.
fn unclear(error: Error) -> Error {
    let clear = [Errno::EXIST, Errno::STALE, Errno::ACCESS, Errno::CANCELED];
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    if errno.is_some_and(|errno| clear.contains(&errno)) {
        return error;
    }
    error.with_remedy("the store may have the new object nevertheless: look, or save it again")
}

/// A store that multipart uploads are made with.
pub(crate) type MultipartStore = Arc<dyn object_store::multipart::MultipartStore>;
