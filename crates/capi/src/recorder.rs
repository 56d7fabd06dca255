//! `struct dmafile_recorder`: appends buffers to a file as devices fill them.

use crate::border::{self, Failure, Result};
use crate::load::path;
use crate::options::{self, Versioned, check_flags, some, word};
use dmafile::Origin;
use dmafile_record::{self as record, Note, Ticket, WhenFull};
use libc::{c_char, c_int, c_void};
use std::mem::offset_of;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

/// For dmafile_recorder_options.flags: if `in_flight` buffers are already being written, an append drops
/// its buffer and counts it. Without this flag the append waits.
pub const DMAFILE_RECORD_DROP: u32 = 1;
/// For dmafile_recorder_options.flags: compute no checksums, so that the CPU does not read the records.
pub const DMAFILE_RECORD_NO_CHECKSUM: u32 = 2;
/// For dmafile_recorder_options.flags: do not sync after a time interval.
pub const DMAFILE_RECORD_NO_INTERVAL: u32 = 4;

/// Options of a recording. Zero selects the default, and `size` works as in struct dmafile_options.
#[repr(C)]
pub struct RecorderOptions {
    /// sizeof(struct dmafile_recorder_options), in bytes.
    pub size: usize,
    /// Method that moves the bytes: "auto" (default), "uring", "threads", "bounce", "module",
    /// "copy-file-range", "premap".
    pub method: *const c_char,
    /// Bypass or use the page cache: "auto" (default), "direct", "buffered".
    pub io: *const c_char,
    /// Maximum number of buffers in flight, 1 to 64; default 4.
    pub in_flight: u32,
    /// DMAFILE_RECORD_DROP, DMAFILE_RECORD_NO_CHECKSUM, DMAFILE_RECORD_NO_INTERVAL, or'ed.
    pub flags: u32,
    /// Sync, and so acknowledge what is written, after every so many records; default: only by time.
    pub sync_every: u64,
    /// Sync, and so acknowledge what is written, after so many milliseconds; default 1000.
    pub sync_interval_ms: u64,
    /// Start a new file before one exceeds this many bytes; default: never.
    pub rotate_bytes: u64,
    /// Start a new file when one is this many milliseconds old; default: never.
    pub rotate_after_ms: u64,
}

// SAFETY: as the trait requires.
unsafe impl Versioned for RecorderOptions {
    const NAME: &'static str = "dmafile_recorder_options";
    const SMALLEST: usize = offset_of!(Self, rotate_after_ms) + size_of::<u64>();
}

/// Counts of a recording.
#[repr(C)]
pub struct Recorded {
    /// Records appended.
    pub records: u64,
    /// Bytes of these records.
    pub bytes: u64,
    /// Records acknowledged: the first `durable` ones survive a crash.
    pub durable: u64,
    /// Buffers dropped.
    pub dropped: u64,
    /// Files of the recording.
    pub files: u64,
}

/// Appends buffers to a file as devices fill them. Opaque.
pub struct Recorder(dmafile_record::Recorder);

/// Memory to record from. Opaque.
pub struct RecorderBuffer(record::RecorderBuffer);

/// Starts a recording in a new file at `path`, as `options` say; NULL means all defaults. With rotation,
/// the second file is `path`.1, and so on. docs/recording.md describes the files.
///
/// Returns 0 and stores the recorder in `*recorder`; free it with dmafile_recorder_free. On failure stores
/// NULL and returns a negative errno: -EINVAL for NULL, an unknown word, or a number out of range; -E2BIG
/// if an option is set that this version does not have; -EEXIST if the file exists; -EBUSY if another
/// recorder is writing to it; -ENOENT, -EACCES, -EROFS, -ENOSPC, and any other error of the kernel.
///
/// Thread-safe. The recorder runs `in_flight` + 1 threads until dmafile_recorder_finish or
/// dmafile_recorder_free. A forked child cannot use it: there the functions return -EINVAL, and freeing it does
/// not finish the recording.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_recorder_new(
    path: *const c_char,
    options: *const RecorderOptions,
    recorder: *mut *mut Recorder,
) -> c_int {
    border::status(|| {
        // SAFETY: the header requires null or a place for a pointer.
        let made = unsafe { border::exclusive(recorder, "recorder")? };
        *made = std::ptr::null_mut();
        // SAFETY: the header requires null or a string.
        let to = record::RecorderOptions::new(unsafe { self::path(path)? });
        // SAFETY: the header requires null or options, with strings.
        let to = unsafe { apply(options, to)? };
        *made = Box::into_raw(Box::new(Recorder(to.start()?)));
        Ok(())
    })
}

/// Prepares memory for recording, once, however often it is filled. `fd` is a memfd, a dma-buf or a
/// regular file. It is duplicated, so the caller may close it.
///
/// Returns 0 and stores the memory in `*buffer`; release it with dmafile_recorder_detach. All recorders
/// can use it. On failure stores NULL and returns a negative errno: -EINVAL for NULL or a pipe, -EBADF for
/// a descriptor that is not open for reading.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_recorder_attach(
    fd: c_int,
    buffer: *mut *mut RecorderBuffer,
) -> c_int {
    border::status(|| {
        // SAFETY: the header requires null or a place for a pointer.
        let made = unsafe { border::exclusive(buffer, "buffer")? };
        *made = std::ptr::null_mut();
        if fd < 0 {
            return Err(Failure::new(libc::EBADF, "fd", "it is not a descriptor"));
        }
        // SAFETY: not -1; one that is not open gives EBADF.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned();
        let fd = fd.map_err(|_| Failure::new(libc::EBADF, "fd", "it is not open"))?;
        let opened = record::RecorderBuffer::open(&Origin::fd(fd, 0))?;
        *made = Box::into_raw(Box::new(RecorderBuffer(opened)));
        Ok(())
    })
}

/// Releases what dmafile_recorder_attach returned; NULL is a no-op. Records that are still being written
/// from it continue. No other thread may be using it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_recorder_detach(buffer: *mut RecorderBuffer) {
    // SAFETY: the header requires null or what `dmafile_recorder_attach` returned, freed once.
    unsafe { border::free(buffer) };
}

/// Appends `length` bytes of a buffer, starting at byte `offset`. `timestamp` is in nanoseconds of a clock
/// of the caller's choice, `tag` is any number. Returns when the record has a place in the file. The bytes
/// must not change until dmafile_recorder_wait says that the record is written.
///
/// Returns the number of the record, from 0; or a negative errno: -EAGAIN if it was dropped; -EINVAL for
/// NULL, a range outside the buffer, or a finished recorder; -ENOSPC, -EDQUOT, -EFBIG if there is no room
/// for it, after which the recording continues as if the append had not been made; otherwise the error of
/// an earlier write.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_recorder_append(
    recorder: *const Recorder,
    buffer: *const RecorderBuffer,
    offset: u64,
    length: u64,
    timestamp: i64,
    tag: u64,
) -> i64 {
    border::number(|| {
        // SAFETY: the header requires null or a recorder that is alive.
        let recorder = unsafe { border::shared(recorder, "recorder")? };
        // SAFETY: the header requires null or a buffer that is alive.
        let buffer = unsafe { border::shared(buffer, "buffer")? };
        append(recorder, &buffer.0, (offset, length), timestamp, tag)
    })
}

/// As dmafile_recorder_append, for `length` bytes of the caller's memory at `memory`, which must stay
/// allocated and unchanged until the record is written.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_recorder_append_memory(
    recorder: *const Recorder,
    memory: *const c_void,
    length: usize,
    timestamp: i64,
    tag: u64,
) -> i64 {
    border::number(|| {
        // SAFETY: the header requires null or a recorder that is alive.
        let recorder = unsafe { border::shared(recorder, "recorder")? };
        border::check(memory.cast(), length, "memory")?;
        let memory = record::RecorderBuffer::of_memory(Arc::new(Memory(memory.cast(), length)));
        append(recorder, &memory, (0, length as u64), timestamp, tag)
    })
}

/// Waits until a record is written, at most `timeout_ms` milliseconds, without limit if that is negative.
/// Its buffer may then be reused. A crash may still lose the record.
///
/// Returns 1 if it is written, 0 on timeout; or a negative errno: -EINVAL for NULL or an unknown record
/// number; otherwise the error of its write, after which nothing reads the buffer any more.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_recorder_wait(
    recorder: *const Recorder,
    record: u64,
    timeout_ms: i64,
) -> c_int {
    border::number(|| {
        // SAFETY: the header requires null or a recorder that is alive.
        let ticket = unsafe { ticket(recorder, record)? };
        Ok(c_int::from(ticket.wait_for(timeout(timeout_ms))?))
    })
}

/// As dmafile_recorder_wait, until the record and all records before it are acknowledged: a system crash
/// does not lose them.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_recorder_wait_durable(
    recorder: *const Recorder,
    record: u64,
    timeout_ms: i64,
) -> c_int {
    border::number(|| {
        // SAFETY: the header requires null or a recorder that is alive.
        let ticket = unsafe { ticket(recorder, record)? };
        Ok(c_int::from(ticket.wait_durable(timeout(timeout_ms))?))
    })
}

/// Waits until all records appended before the call are acknowledged.
///
/// Returns 0; -EINVAL for NULL; otherwise the error of a write or the sync.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_recorder_sync(recorder: *const Recorder) -> c_int {
    border::status(|| {
        // SAFETY: the header requires null or a recorder that is alive.
        let recorder = unsafe { border::shared(recorder, "recorder")? };
        Ok(recorder.0.sync()?)
    })
}

/// Stores the counts of the recording so far in `*recorded`.
///
/// Returns 0, or -EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_recorder_recorded(
    recorder: *const Recorder,
    recorded: *mut Recorded,
) -> c_int {
    border::status(|| {
        // SAFETY: the header requires null or a recorder that is alive.
        let recorder = unsafe { border::shared(recorder, "recorder")? };
        if recorded.is_null() {
            return Err(Failure::new(libc::EINVAL, "recorded", "it is NULL"));
        }
        // SAFETY: not null; the header requires a place for it.
        unsafe { recorded.write(of(&recorder.0.recorded())) };
        Ok(())
    })
}

/// Ends the recording: accepts no more records, waits until everything is on the disk, and marks the
/// recording as complete. Later appends fail. If `recorded` is not NULL, it gets the counts.
///
/// Returns 0, or a negative errno as dmafile_recorder_sync; then the recording is not complete, and ends
/// with the last acknowledged record.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_recorder_finish(
    recorder: *const Recorder,
    recorded: *mut Recorded,
) -> c_int {
    border::status(|| {
        // SAFETY: the header requires null or a recorder that is alive.
        let recorder = unsafe { border::shared(recorder, "recorder")? };
        let done = recorder.0.finish();
        if !recorded.is_null() {
            // SAFETY: not null; the header requires a place for it.
            unsafe { recorded.write(of(&recorder.0.recorded())) };
        }
        done?;
        Ok(())
    })
}

/// Frees a recorder, and finishes the recording if dmafile_recorder_finish has not; NULL is a no-op. No
/// other thread may be using it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_recorder_free(recorder: *mut Recorder) {
    // SAFETY: the header requires null or what `dmafile_recorder_new` returned, freed once.
    unsafe { border::free(recorder) };
}

/// Memory of the caller, which stays valid until its record is written.
struct Memory(*const u8, usize);

// SAFETY: the header says that threads of the recorder read it.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl AsRef<[u8]> for Memory {
    fn as_ref(&self) -> &[u8] {
        match self.1 {
            0 => &[],
            // SAFETY: it was not null where it has bytes; the header requires as many that stay.
            len => unsafe { std::slice::from_raw_parts(self.0, len) },
        }
    }
}

fn append(
    recorder: &Recorder,
    buffer: &record::RecorderBuffer,
    (at, length): (u64, u64),
    timestamp: i64,
    tag: u64,
) -> Result<i64> {
    let mut note = Note::default();
    (note.timestamp, note.tag) = (timestamp, tag);
    match recorder.0.append(buffer, at, length, note)? {
        Some(ticket) => Ok(ticket.number().cast_signed()),
        None => {
            let why = "`in_flight` buffers are already being written, so this record was dropped";
            Err(Failure::new(libc::EAGAIN, "cannot record", why))
        }
    }
}

/// The ticket of a record.
///
/// # Safety
/// `recorder` is null or alive.
unsafe fn ticket(recorder: *const Recorder, record: u64) -> Result<Ticket> {
    // SAFETY: as this function requires.
    let recorder = unsafe { border::shared(recorder, "recorder")? };
    let ticket = recorder.0.ticket(record);
    ticket.ok_or_else(|| Failure::new(libc::EINVAL, "record", "no record has this number"))
}

fn timeout(ms: i64) -> Option<Duration> {
    u64::try_from(ms).ok().map(Duration::from_millis)
}

fn of(recorded: &dmafile_record::Recorded) -> Recorded {
    Recorded {
        records: recorded.records,
        bytes: recorded.bytes,
        durable: recorded.durable,
        dropped: recorded.dropped,
        files: recorded.files.into(),
    }
}

/// Applies options of the caller.
///
/// # Safety
/// `theirs` is null, or valid for reads of as many bytes as its `size` says, with valid strings.
unsafe fn apply(
    theirs: *const RecorderOptions,
    mut to: record::RecorderOptions,
) -> Result<record::RecorderOptions> {
    // SAFETY: as this function requires.
    let ours = unsafe { options::copy(theirs)? };
    // SAFETY: as this function requires.
    if let Some(method) = unsafe { word(ours.method, "options.method")? } {
        to = to.method(method);
    }
    // SAFETY: as this function requires.
    if let Some(io) = unsafe { word(ours.io, "options.io")? } {
        to = to.io(io);
    }
    let known = DMAFILE_RECORD_DROP | DMAFILE_RECORD_NO_CHECKSUM | DMAFILE_RECORD_NO_INTERVAL;
    check_flags(ours.flags, known)?;
    if ours.flags & DMAFILE_RECORD_DROP != 0 {
        to = to.when_full(WhenFull::Drop);
    }
    if let Some(buffers) = some(ours.in_flight) {
        to = to.in_flight(buffers);
    }
    let ms = |ms: u64| some(ms).map(Duration::from_millis);
    if let Some(interval) = ms(ours.sync_interval_ms) {
        to = to.sync_interval(Some(interval));
    }
    if ours.flags & DMAFILE_RECORD_NO_INTERVAL != 0 {
        to = to.sync_interval(None);
    }
    Ok(to
        .checksum(ours.flags & DMAFILE_RECORD_NO_CHECKSUM == 0)
        .sync_every(some(ours.sync_every))
        .rotate_bytes(some(ours.rotate_bytes))
        .rotate_after(ms(ours.rotate_after_ms)))
}
