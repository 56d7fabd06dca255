//! What is loaded but is not a file: an object in a store, or anything else that can be read by offset.

use super::place;
use crate::digest::Algorithm;
use crate::error::{Error, Result, Verb};
use crate::sys::map::Region;
use crate::sys::{Errno, sandbox, socket};
use serde::Serialize;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::Arc;

/// Bytes that are not in a file, and do not change: an object in a store, for example. A load opens several readers
/// of it ([`Load::queue_depth`](crate::Load::queue_depth)), each on a thread of its own, which receive parts of it
/// where they belong in the buffer.
///
/// ```
/// use dmafile::{Load, ObjectReader, ReadBuf, RemoteObject};
/// use std::io;
/// use std::sync::Arc;
///
/// struct Zeros(u64);
///
/// impl RemoteObject for Zeros {
///     fn name(&self) -> String {
///         "zeros".to_string()
///     }
///     fn size(&self) -> u64 {
///         self.0
///     }
///     fn reader(&self) -> io::Result<Box<dyn ObjectReader + '_>> {
///         Ok(Box::new(ZeroReader))
///     }
/// }
///
/// struct ZeroReader;
///
/// impl ObjectReader for ZeroReader {
///     fn read(&mut self, _offset: u64, into: &mut ReadBuf<'_>) -> io::Result<()> {
///         while into.remaining() > 0 {
///             into.fill(1 << 20, |memory| {
///                 memory.fill(0);
///                 Ok(memory.len())
///             })?;
///         }
///         Ok(())
///     }
/// }
///
/// let loaded = Load::of_object(Arc::new(Zeros(1 << 20))).run()?;
/// assert_eq!(loaded.buffer.len(), 1 << 20);
/// # Ok::<(), dmafile::Error>(())
/// ```
pub trait RemoteObject: Send + Sync {
    /// Its name in messages and reports: a URL without secrets, for example.
    fn name(&self) -> String;

    /// Its size in bytes.
    fn size(&self) -> u64;

    /// What it is stored in, in one word, where a file has its file system.
    fn store(&self) -> String {
        "object".to_string()
    }

    /// What distinguishes it from what has been, or will be, under the same name; None if that is not known.
    fn version(&self) -> Option<String> {
        None
    }

    /// The digest of all its bytes that its store keeps, in lower-case hexadecimal; None if there is none. Called if the
    /// load is verified ([`Verify::stored`](crate::Verify::stored)).
    ///
    /// # Errors
    /// They end the load.
    fn digest(&self) -> io::Result<Option<(Algorithm, String)>> {
        Ok(None)
    }

    /// What opening and reading it has taken until now, for the report; None if that is not known.
    fn traffic(&self) -> Option<Traffic> {
        None
    }

    /// Opens a reader. Called on the thread that will use it, before its first read.
    ///
    /// # Errors
    /// They end the load.
    fn reader(&self) -> io::Result<Box<dyn ObjectReader + '_>>;
}

/// What it takes to read objects.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// Requests.
    pub requests: u64,
    /// Those of them that were made because another one had failed.
    pub retries: u64,
    /// Why one of these had.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// The schemes of URLs that the crate `dmafile-remote` opens.
pub const URL_SCHEMES: [&str; 8] = ["https", "http", "hf", "s3", "s3a", "gs", "az", "abfss"];

/// Returns `true` for a URL with one of these.
pub fn is_url(text: &str) -> bool {
    let scheme = text.split_once("://").map(|parts| parts.0);
    scheme.is_some_and(|own| {
        URL_SCHEMES
            .iter()
            .any(|scheme| own.eq_ignore_ascii_case(scheme))
    })
}

/// A URL as it may be shown: without a user, a password, and the query, which may be a signature.
pub fn without_secrets(text: &str) -> String {
    let text = text.split(['?', '#']).next().unwrap_or_default();
    let Some((scheme, rest)) = text.split_once("://") else {
        return text.to_string();
    };
    if !scheme.to_ascii_lowercase().starts_with("http") {
        return text.to_string();
    }
    let host = rest.find('/').unwrap_or(rest.len());
    let begin = rest[..host].rfind('@').map_or(0, |at| at + 1);
    format!("{scheme}://{}", &rest[begin..])
}

/// An object that a load reads.
pub(crate) struct ObjectInput {
    pub(crate) object: Arc<dyn RemoteObject>,
    pub(crate) path: PathBuf,
    pub(crate) size: u64,
}

impl ObjectInput {
    /// # Errors
    /// ENODATA if it is empty.
    pub(crate) fn of(object: Arc<dyn RemoteObject>) -> Result<Self> {
        let (name, size) = (object.name(), object.size());
        if size == 0 {
            return Err(Error::new(Verb::Load, "is empty")
                .with_errno(Errno::NODATA)
                .at(name)
                .with_remedy("a buffer needs at least one byte"));
        }
        let path = PathBuf::from(name);
        Ok(Self { object, path, size })
    }

    /// Reads `into.len()` bytes from `at` on, with a reader of its own.
    pub(crate) fn read_at(&self, at: u64, into: &mut [u8]) -> Result<()> {
        let place = || place(&self.path, at);
        let mut buf = ReadBuf::new(into);
        let read = self
            .object
            .reader()
            .and_then(|mut reader| reader.read(at, &mut buf));
        read.map_err(|error| failed(error, place))?;
        match buf.remaining() {
            0 => Ok(()),
            bytes => Err(too_short(bytes, place())),
        }
    }
}

/// One of several readers of an object.
pub trait ObjectReader {
    /// Fills all of `into` with the object's bytes from `offset` on. What can be tried again is tried again in here.
    /// It should return soon after [`ReadBuf::check`] returns an error.
    ///
    /// # Errors
    /// They end the load, and so does returning before `into` is full.
    fn read(&mut self, offset: u64, into: &mut ReadBuf<'_>) -> io::Result<()>;
}

/// When an access by the CPU to the memory that is filled may raise a signal.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum MayFault {
    Never,
    /// Where no page is present yet: a cgroup may refuse huge pages.
    Absent,
    /// The owner of the memory may truncate it.
    Anytime,
}

/// Where bytes of an object belong. It is filled from its start.
pub struct ReadBuf<'a> {
    region: Region<'a>,
    filled: u64,
    /// Where it may, the kernel writes to the memory instead of this process, which a signal would end.
    may_fault: MayFault,
    /// Stands in for such memory.
    block: Vec<u8>,
    /// Called with the number of bytes that have been added.
    added: &'a dyn Fn(u64),
    stopped: &'a dyn Fn() -> io::Result<()>,
}

/// The largest part of memory that may fault which is filled at once.
const BLOCK: usize = 256 << 10;

impl<'a> ReadBuf<'a> {
    /// A buffer over a slice, for reading apart from a load.
    pub fn new(memory: &'a mut [u8]) -> Self {
        Self::of(Region::of_slice(memory), MayFault::Never, &|_| (), &|| {
            Ok(())
        })
    }

    /// As [`ReadBuf::new`]; `stopped` is what [`ReadBuf::check`] calls.
    pub fn checked(memory: &'a mut [u8], stopped: &'a dyn Fn() -> io::Result<()>) -> Self {
        Self::of(Region::of_slice(memory), MayFault::Never, &|_| (), stopped)
    }

    pub(crate) fn of(
        region: Region<'a>,
        may_fault: MayFault,
        added: &'a dyn Fn(u64),
        stopped: &'a dyn Fn() -> io::Result<()>,
    ) -> Self {
        Self {
            region,
            filled: 0,
            may_fault,
            block: Vec::new(),
            added,
            stopped,
        }
    }

    /// The number of bytes that it has received.
    pub fn filled(&self) -> u64 {
        self.filled
    }

    /// The number of bytes that it lacks.
    pub fn remaining(&self) -> u64 {
        self.region.len() - self.filled
    }

    /// Checks whether the load still needs these bytes. To be called at least ten times a second while waiting.
    ///
    /// # Errors
    /// The load has been cancelled, or another reader has failed.
    pub fn check(&self) -> io::Result<()> {
        (self.stopped)()
    }

    /// Receives bytes from a socket, at most `most`, in one call of recv(2) that copies them where they belong. Returns
    /// how many; 0 if the peer has closed the connection.
    ///
    /// # Errors
    /// Those of recv(2); EFAULT if the memory has been truncated.
    pub fn receive(&mut self, socket: BorrowedFd<'_>, most: u64) -> io::Result<u64> {
        let most = most.min(self.remaining());
        let got = socket::receive_at(socket, &self.region, self.filled, most);
        let got = got.map_err(|errno| match errno {
            Errno::FAULT => self.cannot_write(errno).into(),
            errno => io::Error::from(errno),
        })?;
        self.add(got);
        Ok(got)
    }

    /// Calls `fill` with memory for the next bytes, at most `most` and at least one if it is not full. `fill` returns
    /// how many it has written to the start. What the memory has before is undefined.
    ///
    /// # Errors
    /// Those of `fill`; EFAULT if the memory has been truncated.
    ///
    /// # Panics
    /// If `fill` returns more than it was given.
    pub fn fill(
        &mut self,
        most: usize,
        fill: impl FnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let most = most.min(usize::try_from(self.remaining()).unwrap_or(usize::MAX));
        let is_safe = match self.may_fault {
            MayFault::Never => true,
            MayFault::Absent => self.region.populate(self.filled, most as u64).is_ok(),
            MayFault::Anytime => false,
        };
        let got = if !is_safe {
            let most = most.min(BLOCK);
            if self.block.len() < most {
                self.block.resize(most, 0);
            }
            let got = fill(&mut self.block[..most])?;
            let copied = self.region.try_copy_in(self.filled, &self.block[..got]);
            copied.map_err(|errno| self.cannot_write(errno))?;
            got
        } else {
            let got = self.region.lend(self.filled, most as u64, fill)?;
            assert!(got <= most, "{got} bytes were written into {most}");
            got
        };
        self.add(got as u64);
        Ok(got)
    }

    /// Copies these bytes to it, as far as there is room.
    ///
    /// # Errors
    /// EFAULT if the memory has been truncated.
    pub fn copy(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() && self.remaining() > 0 {
            let done = self.fill(bytes.len(), |memory| {
                let length = memory.len();
                memory.copy_from_slice(&bytes[..length]);
                Ok(length)
            })?;
            bytes = &bytes[done..];
        }
        Ok(())
    }

    fn cannot_write(&self, errno: Errno) -> Error {
        let error = Error::os("cannot write to the buffer", errno);
        match (errno, self.may_fault) {
            (Errno::FAULT, MayFault::Absent) => error
                .with_why("a cgroup limits hugetlb pages to less")
                .with_remedy("raise its hugetlb limit"),
            (Errno::FAULT, MayFault::Anytime) => error
                .with_why("its owner truncated it while it was being filled")
                .with_remedy("seal it against that (F_SEAL_SHRINK)"),
            _ => error.of_calls(&[sandbox::PROCESS_VM_WRITEV]),
        }
    }

    fn add(&mut self, bytes: u64) {
        self.filled += bytes;
        if bytes > 0 {
            (self.added)(bytes);
        }
    }
}

/// An error of a reader; `place` names the object.
pub(crate) fn failed(error: io::Error, place: impl FnOnce() -> String) -> Error {
    if let Some(own) = error
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<Error>())
    {
        return own.clone();
    }
    let failed = match error.raw_os_error() {
        Some(errno) => Error::os("cannot read", Errno::from_raw_os_error(errno)).with_remedy(""),
        None => Error::new("cannot read", error.to_string()),
    };
    failed.at(place())
}

/// The error of a reader that returned before it had filled its buffer, which lacks `bytes`.
pub(crate) fn too_short(bytes: u64, place: String) -> Error {
    Error::new(
        Verb::Load,
        format!("its reader returned {bytes} bytes too few"),
    )
    .with_errno(Errno::NODATA)
    .at(place)
}
