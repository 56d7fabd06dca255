//! The messages on the socket: one JSON object each (SOCK_SEQPACKET, unix(7)).
//!
//! Each request gets one answer. An answer to `take` has the descriptors of the files it lists attached; where
//! they are more than fit, the taker asks again for those behind.

use super::identity::FileIdentity;
use crate::verify::Verified;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The version of these messages.
pub(super) const VERSION: u32 = 1;
/// The longest request, in bytes.
pub(super) const LONGEST_REQUEST: usize = 4 << 10;
/// The longest answer, in bytes.
pub(super) const LONGEST_ANSWER: usize = 64 << 10;
/// Most files of a hold.
pub(super) const MOST_FILES: usize = 10_000;
/// Most descriptors of an answer with several files: descriptors that are sent and not received yet count
/// against the holder's limit on open files.
pub(super) const MOST_DESCRIPTORS: usize = 16;

/// What a peer may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Op {
    /// Descriptors and where the bytes lie in them.
    Take,
    /// The files, and the processes that have taken them.
    List,
    /// An end of the hold.
    Release,
}

/// A request.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Request {
    pub v: u32,
    pub op: Op,
    /// The name of the hold; only `list` works without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The first file that is wanted; those before it have come.
    #[serde(default)]
    pub from: usize,
}

/// An answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Answer {
    pub v: u32,
    /// Why there is no other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Refusal>,
    #[serde(default)]
    pub name: String,
    /// When it was loaded, in seconds since 1970.
    #[serde(default)]
    pub since: u64,
    /// How many files there are in all.
    #[serde(default)]
    pub total: usize,
    /// How many peers have taken it and are still connected.
    #[serde(default)]
    pub takers: usize,
    /// Some of those.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub some_takers: Vec<(u32, u32)>,
    /// Files from [`Request::from`] on.
    #[serde(default)]
    pub files: Vec<HeldInfo>,
}

/// Why a request was refused.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Refusal {
    pub errno: i32,
    pub why: String,
}

impl Answer {
    /// One that says nothing.
    pub(super) fn empty() -> Self {
        Self {
            v: VERSION,
            error: None,
            name: String::new(),
            since: 0,
            total: 0,
            takers: 0,
            some_takers: Vec::new(),
            files: Vec::new(),
        }
    }

    /// A refusal.
    pub(super) fn refusal(errno: crate::sys::Errno, why: impl Into<String>) -> Self {
        let (errno, why) = (errno.raw_os_error(), why.into());
        Self {
            error: Some(Refusal { errno, why }),
            ..Self::empty()
        }
    }
}

/// A file that is held, as its holder describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HeldInfo {
    /// Its name, without a folder; unique in its hold.
    pub name: String,
    /// Where it was loaded from; in JSON what of it is no UTF-8 is replaced.
    #[serde(serialize_with = "crate::error::lossy")]
    pub file: PathBuf,
    /// The kind of memory, as the command line names it.
    pub kind: String,
    /// The pages it got, as in [`Report::pages`](crate::Report::pages).
    pub pages: String,
    /// How many bytes the file has.
    pub bytes: u64,
    /// Where they start in the memory.
    pub offset: u64,
    /// Nobody can change them: the memory is sealed against writing.
    pub sealed: bool,
    /// Which file it was when it was loaded.
    pub identity: FileIdentity,
    /// The digest that was computed while it was loaded.
    pub digest: Option<Digest>,
    /// The file has changed since, or another one lies in its place.
    pub changed: bool,
    /// How many descriptors the memory has: one, but for several dma-bufs.
    pub descriptors: usize,
}

/// A digest of a file's bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Digest {
    /// The algorithm, as the command line names it.
    pub algorithm: String,
    /// The digest in lower-case hexadecimal.
    pub digest: String,
    /// It was compared with an expected one, and equal.
    pub matched: bool,
}

impl Digest {
    pub(super) fn of(verified: &Verified) -> Self {
        Self {
            algorithm: verified.algorithm.name().to_string(),
            digest: verified.digest.clone(),
            matched: verified.matched,
        }
    }
}
