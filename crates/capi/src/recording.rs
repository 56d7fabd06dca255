//! `struct dmafile_recording`: reads a recording.

use crate::border::{self, Failure, Result, shared};
use crate::buffer::{c_string, empty};
use crate::load::path;
use libc::{c_char, c_int, c_void};
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;

/// A recording that is being read: the records that were acknowledged when it was opened, in order. Opaque.
///
/// Functions that take it `const` may be called by several threads at once. Any thread may use and free it.
pub struct Recording {
    inner: dmafile_record::Recording,
    records: Vec<Record>,
    /// The strings that `records` points to.
    _paths: Vec<CString>,
}

// SAFETY: the pointers in `records` lead to what `_paths` owns, which does not change.
unsafe impl Send for Recording {}
// SAFETY: as above.
unsafe impl Sync for Recording {}

/// A record of a recording. It and what it points to belong to the recording. Later versions may append
/// members, so access it through the pointer that the library returns, and do not copy or index it.
#[repr(C)]
pub struct Record {
    /// Its number, from 0.
    pub number: u64,
    /// The file that contains it. dmafile_load with `offset` and `length` loads it into shareable memory.
    pub path: *const c_char,
    /// Offset of its first byte in that file: a multiple of the block size, which is at least 512 bytes.
    pub offset: u64,
    /// Its size in bytes.
    pub length: u64,
    /// When it was captured, in nanoseconds of the recorder's clock.
    pub timestamp: i64,
    /// The tag passed to the append.
    pub tag: u64,
    /// Total number of buffers dropped before it.
    pub dropped: u64,
    /// Its CRC-32C if `has_checksum` is 1, otherwise 0.
    pub checksum: u32,
    /// 1 if a checksum was computed, otherwise 0.
    pub has_checksum: u32,
}

impl Recording {
    fn of(inner: dmafile_record::Recording) -> Result<Self> {
        let paths = inner.files().iter();
        let paths: Vec<_> = paths
            .map(|path| c_string(path.as_os_str().as_bytes()))
            .collect::<Result<_>>()?;
        let records = inner.records().iter().map(|record| Record {
            number: record.number,
            path: paths[record.file].as_ptr(),
            offset: record.offset,
            length: record.length,
            timestamp: record.timestamp,
            tag: record.tag,
            dropped: record.dropped,
            checksum: record.checksum.unwrap_or(0),
            has_checksum: record.checksum.is_some().into(),
        });
        Ok(Self {
            records: records.collect(),
            inner,
            _paths: paths,
        })
    }
}

fn none(index: u64, count: usize) -> Failure {
    let why = format!("it has {count} records, but no record {index}");
    Failure::new(libc::ERANGE, "the recording", &why)
}

/// The item at an index that the caller passed.
fn at<T>(items: &[T], index: u64) -> Result<&T> {
    let item = usize::try_from(index).ok().and_then(|at| items.get(at));
    item.ok_or_else(|| none(index, items.len()))
}

/// Opens the recording that begins with the file at `path`, and reads its index. If `path` is a later file
/// of a recording, only that file is read. A recording that is still in progress can be read up to its
/// current end; after a crash, up to the last acknowledged record.
///
/// Returns 0 and stores the recording in `*recording`; free it with dmafile_recording_free. On failure
/// stores NULL and returns -EBADMSG for a file that is not a recording, -EINVAL for NULL, -ENOENT, -EACCES,
/// -EIO and similar.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_recording_open(
    path: *const c_char,
    recording: *mut *mut Recording,
) -> c_int {
    border::status(|| {
        // SAFETY: the header requires null or a place for a pointer.
        unsafe { empty(recording, "recording")? };
        // SAFETY: the header requires null or a string.
        let opened = dmafile_record::Recording::open(unsafe { self::path(path)? })?;
        let opened = Recording::of(opened)?;
        // SAFETY: it is not null, so it is a place for a pointer.
        unsafe { recording.write(Box::into_raw(Box::new(opened))) };
        Ok(())
    })
}

/// The number of records in a recording; 0 with errno EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_recording_count(recording: *const Recording) -> u64 {
    border::value(|| {
        // SAFETY: the header requires null or a recording that is alive.
        Ok(unsafe { shared(recording, "recording")? }.records.len() as u64)
    })
}

/// Returns 1 if a recording was finished and all of it is here, otherwise 0: a crash may have ended it, or it
/// is still in progress. -EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_recording_is_complete(recording: *const Recording) -> c_int {
    border::number(|| {
        // SAFETY: the header requires null or a recording that is alive.
        let recording = unsafe { shared(recording, "recording")? };
        Ok(c_int::from(recording.inner.is_complete()))
    })
}

/// The record at an index, from 0 to dmafile_recording_count - 1. It belongs to the recording. Its number
/// equals the index, except if a later file was opened by itself.
///
/// NULL with errno ERANGE for any other index, EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_recording_record(
    recording: *const Recording,
    index: u64,
) -> *const Record {
    border::pointer(|| {
        // SAFETY: the header requires null or a recording that is alive.
        let recording = unsafe { shared(recording, "recording")? };
        Ok(std::ptr::from_ref(at(&recording.records, index)?))
    })
}

/// Reads the record at an index into `memory`, which has room for `room` bytes, and compares it with its
/// checksum if it has one.
///
/// Returns the size of the record in bytes; or a negative errno: -ERANGE for an index without a record, or
/// if `room` is too small; -EBADMSG if the checksum differs, with the bytes in `memory`; -EINVAL for NULL;
/// -EIO if the disk fails.
///
/// Thread-safe; nothing else may use the memory during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_recording_read(
    recording: *const Recording,
    index: u64,
    memory: *mut c_void,
    room: usize,
) -> i64 {
    border::number(|| {
        // SAFETY: the header requires null or a recording that is alive.
        let recording = unsafe { shared(recording, "recording")? };
        let record = at(recording.inner.records(), index)?;
        if room as u64 >= record.length {
            let len = usize::try_from(record.length).unwrap_or(room);
            border::check(memory.cast(), len, "memory")?;
            let memory = match len {
                0 => &mut [],
                // SAFETY: not null; the header requires that many bytes that nothing else uses. They are C
                // memory, so every byte has some value.
                _ => unsafe { std::slice::from_raw_parts_mut(memory.cast::<u8>(), len) },
            };
            recording.inner.read_into(record, memory)?;
            return Ok(record.length.cast_signed());
        }
        let why = format!("the record has {} bytes", record.length);
        Err(Failure::new(libc::ERANGE, "room", &why))
    })
}

/// Closes the files of a recording and frees it; NULL is a no-op. No other thread may be using it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_recording_free(recording: *mut Recording) {
    // SAFETY: the header requires null or what `dmafile_recording_open` returned, freed once.
    unsafe { border::free(recording) };
}
