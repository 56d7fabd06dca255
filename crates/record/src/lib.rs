//! Recordings and snapshots.
//!
//! A [`Recorder`] appends buffers to a file that is readable up to the last acknowledged record at any time
//! (docs/recording.md describes the file). A [`Snapshot`] saves several sources in one folder, which become valid
//! together or not at all.

#![forbid(unsafe_code)]

mod file;
mod format;
mod read;
mod run;
mod snapshot;

use dmafile::internal::{Host, part};
use dmafile::{Error, Io, Method, Origin, Result};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

pub use read::{Record, Recording};
pub use run::{Recorded, Recorder, Ticket};
#[cfg(fuzzing)]
#[doc(hidden)]
pub use snapshot::fuzz_manifest;
pub use snapshot::{
    LoadedSnapshot, LoadedSource, MOST_SOURCES, SavedSource, Snapshot, SnapshotLoad,
    SnapshotLoadPlan, SnapshotLoadReport, SnapshotPlan, SnapshotReport, SnapshotStore,
    SourceLoadPlan, SourceLoadReport, SourcePlan, SourceUpload, StoredSnapshot, StoredSource,
};

/// Range of the number of buffers in flight, queued ones included.
pub const IN_FLIGHT_RANGE: RangeInclusive<u32> = 1..=64;

/// What an append does if the maximum number of buffers is in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenFull {
    /// Waits until one is written.
    #[default]
    Wait,
    /// Drops the new one, and counts it.
    Drop,
}

/// A builder for a recording: where it goes, and how.
///
/// ```no_run
/// use dmafile_record::{RecorderOptions, Note, RecorderBuffer};
/// use dmafile::Origin;
/// use std::sync::Arc;
///
/// let recorder = RecorderOptions::new("camera.rec").in_flight(2).start()?;
/// let buffer = RecorderBuffer::open(&"fd:3".parse::<Origin>()?)?; // once, however often it is filled
/// let frame = recorder.append(&buffer, 0, 8_294_400, Note::default())?.expect("it waits");
/// frame.wait()?; // the buffer may be filled again
/// recorder.append(&RecorderBuffer::of_memory(Arc::new(vec![1, 2, 3])), 0, 3, Note::default())?;
/// recorder.sync()?; // all of it would survive a crash
/// println!("{} records", recorder.finish()?.records);
/// # Ok::<(), dmafile::Error>(())
/// ```
#[must_use = "nothing is recorded before `start`"]
#[derive(Clone, Debug)]
pub struct RecorderOptions {
    path: PathBuf,
    in_flight: u32,
    when_full: WhenFull,
    method: Method,
    io: Io,
    checksum: bool,
    sync_every: Option<u64>,
    sync_interval: Option<Duration>,
    rotate_bytes: Option<u64>,
    rotate_after: Option<Duration>,
}

impl RecorderOptions {
    /// Records to a new file at `path`; with rotation, the second file is `path.1`, and so on.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            in_flight: 4,
            when_full: WhenFull::Wait,
            method: Method::Auto,
            io: Io::Auto,
            checksum: true,
            sync_every: None,
            sync_interval: Some(Duration::from_secs(1)),
            rotate_bytes: None,
            rotate_after: None,
        }
    }

    /// Maximum number of buffers in flight, within [`IN_FLIGHT_RANGE`]; default 4.
    pub fn in_flight(mut self, buffers: u32) -> Self {
        self.in_flight = buffers;
        self
    }

    /// What an append does when that many are in flight; default [`WhenFull::Wait`].
    pub fn when_full(mut self, when_full: WhenFull) -> Self {
        self.when_full = when_full;
        self
    }

    /// The method that moves the bytes, as in [`Save::method`](dmafile::Save::method).
    pub fn method(mut self, method: Method) -> Self {
        self.method = method;
        self
    }

    /// Bypass or use the page cache; default [`Io::Auto`]: bypass it if possible.
    pub fn io(mut self, io: Io) -> Self {
        self.io = io;
        self
    }

    /// Sets whether to compute a CRC-32C of each record, for which the CPU reads it once; default true.
    pub fn checksum(mut self, checksum: bool) -> Self {
        self.checksum = checksum;
        self
    }

    /// Syncs, and so acknowledges records, as soon as this many (at least 1) are written but not
    /// acknowledged; default `None`.
    pub fn sync_every(mut self, records: Option<u64>) -> Self {
        self.sync_every = records;
        self
    }

    /// Syncs, and so acknowledges what is written, after this much time (more than 0) since the last sync;
    /// default one second. With `None` only [`Recorder::sync`] and every 4096th record do.
    pub fn sync_interval(mut self, interval: Option<Duration>) -> Self {
        self.sync_interval = interval;
        self
    }

    /// Starts a new file before one exceeds this many bytes, unless it has no record yet; default `None`.
    pub fn rotate_bytes(mut self, bytes: Option<u64>) -> Self {
        self.rotate_bytes = bytes;
        self
    }

    /// Starts a new file with the first record that arrives this long after the file was created; default
    /// `None`.
    pub fn rotate_after(mut self, time: Option<Duration>) -> Self {
        self.rotate_after = time;
        self
    }

    /// Creates the first file, whose name is on the disk when this returns, and starts the threads that
    /// write.
    ///
    /// # Errors
    /// Kind [`Usage`](dmafile::ErrorKind::Usage) for values out of range; EEXIST if the file exists, or one
    /// with the name of the second file; EBUSY if another recorder is writing to it; ENOENT, EACCES, EROFS
    /// and ENOSPC as for open(2) and fallocate(2).
    pub fn start(self) -> Result<Recorder> {
        self.check()?;
        Recorder::start(self)
    }

    fn check(&self) -> Result<()> {
        let refuse = |what: &str, why: String| Err(Error::usage(what, why));
        let (first, last) = (IN_FLIGHT_RANGE.start(), IN_FLIGHT_RANGE.end());
        if !IN_FLIGHT_RANGE.contains(&self.in_flight) {
            let why = format!("{} is out of range, {first} to {last}", self.in_flight);
            return refuse("in_flight", why);
        }
        for (what, value) in [
            ("sync_every", self.sync_every),
            ("rotate_bytes", self.rotate_bytes),
        ] {
            if value == Some(0) {
                return refuse(what, "it must be at least 1".to_string());
            }
        }
        for (what, value) in [
            ("sync_interval", self.sync_interval),
            ("rotate_after", self.rotate_after),
        ] {
            if value == Some(Duration::ZERO) {
                return refuse(what, "it must be more than 0".to_string());
            }
        }
        Ok(())
    }

    fn how(&self) -> part::PartOptions {
        part::PartOptions {
            method: self.method,
            io: self.io,
            checksum: self.checksum,
            host: Host::probe(),
        }
    }

    /// The name of a file of the recording.
    fn name_of(&self, file: u32) -> PathBuf {
        name_of(&self.path, file)
    }
}

fn name_of(first: &std::path::Path, file: u32) -> PathBuf {
    let mut name = first.as_os_str().to_os_string();
    if file > 0 {
        name.push(format!(".{file}"));
    }
    name.into()
}

/// Memory to record from. It is mapped and inspected once, and can be appended often; clones share it.
#[derive(Clone)]
pub struct RecorderBuffer(Arc<part::PartMemory>);

impl RecorderBuffer {
    /// Memory behind a descriptor (a memfd, a dma-buf), or a file. Offsets count from the start of the
    /// origin.
    ///
    /// # Errors
    /// EINVAL for a pipe or a folder, EBADF for a descriptor that is not open for reading, and any error
    /// of opening the file.
    pub fn open(origin: &Origin<'static>) -> Result<Self> {
        part::PartMemory::open(origin).map(Arc::new).map(Self)
    }

    /// Memory of this process. The owner is kept alive until the last record from it is written. The bytes
    /// of a record should not change before then.
    pub fn of_memory(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Self {
        Self(Arc::new(part::PartMemory::of_caller(owner)))
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.0.bytes()
    }
}

impl std::fmt::Debug for RecorderBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "RecorderBuffer({}, {} bytes)",
            self.0.name(),
            self.bytes()
        )
    }
}

/// What is stored with a record besides its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Note {
    /// When it was captured, in nanoseconds of a clock of the caller's choice.
    pub timestamp: i64,
    /// Any number.
    pub tag: u64,
}

impl Default for Note {
    /// Now, in nanoseconds since 1970, and tag 0.
    fn default() -> Self {
        Self {
            timestamp: now(),
            tag: 0,
        }
    }
}

/// Nanoseconds since 1970.
fn now() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| {
        i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
    })
}
