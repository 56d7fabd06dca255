//! The messages on the socket: one JSON object each (SOCK_SEQPACKET, unix(7)).
//!
//! Each request gets one answer, except that the files are returned. An answer to `take` carries the descriptors of the
//! files that it lists; if not all fit, the taker requests the remaining ones.

use super::identity::FileIdentity;
use super::name;
use dmafile::{MemoryKind, Verified};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// The version of these messages.
pub(super) const VERSION: u32 = 1;
/// The maximum length of a request in bytes.
pub(super) const LONGEST_REQUEST: usize = 4 << 10;
/// The maximum length of an answer in bytes.
pub(super) const LONGEST_ANSWER: usize = 64 << 10;
/// The maximum length of the names in [`HeldInfo::superseded`] together: they must fit into an answer, escaped.
pub(super) const LONGEST_NAMES: usize = 8 << 10;
/// The maximum number of files in a hold.
pub(super) const MOST_FILES: usize = 10_000;
/// The maximum number of descriptors in an answer with several files: descriptors that have been sent but not
/// received count against the holder's limit on open files.
pub(super) const MOST_DESCRIPTORS: usize = 16;

/// The type of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Op {
    /// Requests the descriptors, and where the bytes are in them.
    Take,
    /// Requests the list of files, and the processes that have taken them.
    List,
    /// Says that this process no longer has what it took. There is no answer.
    Return,
    /// Ends the hold.
    Release,
}

/// A request.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PeerRequest {
    pub v: u32,
    pub op: Op,
    /// The name of the hold; optional only for `list`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The first file to send; those before it have been received.
    #[serde(default)]
    pub from: usize,
}

impl PeerRequest {
    pub(super) fn new(op: Op, name: Option<&str>, from: usize) -> Self {
        Self {
            v: VERSION,
            op,
            name: name.map(str::to_string),
            from,
        }
    }

    pub(super) fn message(&self) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(self)
    }

    /// The request in a message; or why it is none.
    pub(super) fn parse(message: &[u8]) -> Result<Self, &'static str> {
        match serde_json::from_slice::<Self>(message) {
            Err(_) => Err("unknown request"),
            Ok(request) if request.v != VERSION => {
                Err("the version of the request is not supported")
            }
            Ok(request) => Ok(request),
        }
    }
}

/// An answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Answer {
    pub v: u32,
    /// The reason, if the request was refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Refusal>,
    #[serde(default)]
    pub name: String,
    /// When it was loaded, in seconds since 1970.
    #[serde(default)]
    pub since: u64,
    /// Total number of files.
    #[serde(default)]
    pub total: usize,
    /// How often processes that still run have taken it and not returned it.
    #[serde(default)]
    pub takers: usize,
    /// How often it was taken by processes whose end the holder does not see.
    #[serde(default)]
    pub unknown_takers: usize,
    /// Some of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub some_takers: Vec<(u32, u32)>,
    /// Files from [`PeerRequest::from`] on.
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
    /// The answer in a message; or why it is none.
    pub(super) fn parse(message: &[u8]) -> Result<Self, String> {
        let answer: Self = serde_json::from_slice(message).map_err(|error| error.to_string())?;
        let is_refusal = answer.error.is_some();
        if is_refusal || (answer.v == VERSION && answer.total <= MOST_FILES) {
            Ok(answer)
        } else {
            Err("its version is not supported, or it announces too many files".to_string())
        }
    }

    /// An answer without content.
    pub(super) fn empty() -> Self {
        Self {
            v: VERSION,
            error: None,
            name: String::new(),
            since: 0,
            total: 0,
            takers: 0,
            unknown_takers: 0,
            some_takers: Vec::new(),
            files: Vec::new(),
        }
    }

    /// A refusal.
    pub(super) fn refusal(errno: dmafile_sys::Errno, why: impl Into<String>) -> Self {
        let (errno, why) = (errno.raw_os_error(), why.into());
        Self {
            error: Some(Refusal { errno, why }),
            ..Self::empty()
        }
    }
}

/// A held file, as its holder describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HeldInfo {
    /// Its name, without a folder. Parts that are not UTF-8 are replaced; [`HeldInfo::file_name`] has them.
    pub name: String,
    /// The path it was loaded from; in JSON, parts that are not UTF-8 are replaced.
    #[serde(serialize_with = "dmafile::internal::lossy")]
    pub file: PathBuf,
    /// All bytes of that path, if it is not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_bytes: Option<Vec<u8>>,
    /// The kind of memory.
    pub kind: MemoryKind,
    /// Its page size, as in [`Report::pages`](dmafile::Report::pages).
    pub pages: String,
    /// The size of the file in bytes.
    pub bytes: u64,
    /// Where they start in the memory.
    pub offset: u64,
    /// True if no process can change them: the memory is sealed against writing.
    pub sealed: bool,
    /// The identity of the file when it was loaded.
    pub identity: FileIdentity,
    /// The digest computed during the load.
    pub digest: Option<Digest>,
    /// True if the file has changed since, or was replaced. None if that is unknown, because its file system does
    /// not answer.
    pub changed: Option<bool>,
    /// Number of descriptors of the memory: one, except for several dma-bufs.
    pub descriptors: usize,
    /// Tensors in it that do not count, because the model's index names another file for them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub superseded: Vec<String>,
}

impl HeldInfo {
    /// Its name as in the file system; unique in its hold.
    pub fn file_name(&self) -> OsString {
        let own = self.file.file_name();
        match own.filter(|own| own.to_string_lossy() == self.name) {
            Some(own) => own.into(),
            None => self.name.clone().into(),
        }
    }

    /// The bytes of a path, if it is not UTF-8.
    pub(super) fn bytes_of(path: &Path) -> Option<Vec<u8>> {
        let bytes = path.to_str().is_none().then_some(path.as_os_str());
        bytes.map(|bytes| bytes.as_bytes().to_vec())
    }

    /// Completes what a holder sent by the path that text could not carry; false if the name is not that of a file.
    pub(super) fn complete(&mut self) -> bool {
        if let Some(bytes) = &self.file_bytes {
            let path = PathBuf::from(OsString::from_vec(bytes.clone()));
            if path.to_string_lossy() != self.file.to_string_lossy() {
                return false;
            }
            self.file = path;
        }
        name::is_plain(&self.file_name())
    }
}

/// A digest of a file's bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Digest {
    /// The algorithm, as the command line names it.
    pub algorithm: String,
    /// The digest in lower-case hexadecimal.
    pub digest: String,
    /// True if it equals the expected digest; false if none was given.
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
