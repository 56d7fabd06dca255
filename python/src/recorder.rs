//! Recorders, and reading recordings.

use crate::call;
use crate::error::raise;
use crate::job::POLL_INTERVAL;
use crate::request::{size, word};
use dmafile::Origin;
use dmafile_record::{self as record, Note, WhenFull};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyBufferError, PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Appends buffers to a file; use `dmafile.Recorder`.
#[pyclass(frozen, module = "dmafile._dmafile")]
pub(crate) struct Recorder {
    /// None only during drop.
    engine: Option<Arc<dmafile_record::Recorder>>,
    path: PathBuf,
    released: Released,
    drops: bool,
    /// The process that has the threads; a forked child does not.
    process: u32,
}

/// Memory that was attached.
#[pyclass(frozen, module = "dmafile")]
pub(crate) struct RecorderBuffer(record::RecorderBuffer);

/// A record that was appended.
#[pyclass(frozen, module = "dmafile")]
pub(crate) struct Ticket {
    ticket: dmafile_record::Ticket,
    released: Released,
    /// Keeps track of the process that has the threads.
    process: u32,
}

/// A recording that is read; use `dmafile.read_recording`.
#[pyclass(frozen, module = "dmafile._dmafile")]
pub(crate) struct Recording(dmafile_record::Recording);

/// Exports that the threads of a recorder need no more. Those threads do not take the interpreter's lock: they would
/// wait for whatever else has it, and for ever when the interpreter shuts down. A caller's thread frees these.
#[derive(Clone, Default)]
struct Released(Arc<Mutex<Vec<PyBuffer<u8>>>>);

impl Released {
    fn lock(&self) -> MutexGuard<'_, Vec<PyBuffer<u8>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn free(&self, _attached: Python<'_>) {
        // Not under the lock: this may run a destructor in Python.
        let all = std::mem::take(&mut *self.lock());
        drop(all);
    }
}

/// Bytes of an object with the buffer protocol.
struct Held {
    /// None only during drop.
    export: Option<PyBuffer<u8>>,
    released: Released,
}

// SAFETY: the bytes are there, at one address, for as long as the export is held, and are only read.
unsafe impl Sync for Held {}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        match &self.export {
            // SAFETY: the export is contiguous, which has been checked, and has that many bytes. Concurrent
            // writes by other Python threads may or may not be in the record, as documented.
            Some(export) if export.len_bytes() > 0 => unsafe {
                std::slice::from_raw_parts(export.buf_ptr().cast(), export.len_bytes())
            },
            _ => &[],
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.released.lock().extend(self.export.take());
    }
}

#[pymethods]
impl Recorder {
    #[new]
    fn new(py: Python<'_>, path: PathBuf, options: &Bound<'_, PyDict>) -> PyResult<Self> {
        let mut to = record::RecorderOptions::new(&path);
        let mut drops = false;
        for (name, value) in options {
            let name = name.extract::<String>()?;
            // None is a value of this option.
            if name == "sync_interval" {
                to = to.sync_interval(seconds(&value)?);
                continue;
            }
            if value.is_none() {
                continue;
            }
            to = match name.as_str() {
                "in_flight" => {
                    to.in_flight(u32::try_from(size(&name, &value)?).unwrap_or(u32::MAX))
                }
                "drop" => {
                    drops = value.extract()?;
                    to.when_full(if drops {
                        WhenFull::Drop
                    } else {
                        WhenFull::Wait
                    })
                }
                "method" => to.method(word(&value)?),
                "io" => to.io(word(&value)?),
                "checksum" => to.checksum(value.extract()?),
                "sync_every" => to.sync_every(Some(size(&name, &value)?)),
                "rotate_bytes" => to.rotate_bytes(Some(size(&name, &value)?)),
                "rotate_after" => to.rotate_after(seconds(&value)?),
                _ => {
                    let text = format!("'{name}' is not an option of a recorder");
                    return Err(PyTypeError::new_err(text));
                }
            };
        }
        let started = py.detach(|| to.start());
        Ok(Self {
            engine: Some(Arc::new(
                started.map_err(|error| raise(py, &error, Some(&path)))?,
            )),
            path,
            released: Released::default(),
            drops,
            process: std::process::id(),
        })
    }

    /// Appends a part of attached memory.
    fn append(
        &self,
        py: Python<'_>,
        buffer: &RecorderBuffer,
        offset: u64,
        length: Option<u64>,
        timestamp: Option<i64>,
        tag: u64,
    ) -> PyResult<Option<Ticket>> {
        self.take(py, &buffer.0, offset, length, timestamp, tag)
    }

    /// Appends a part of contiguous memory.
    fn append_memory(
        &self,
        py: Python<'_>,
        memory: &Bound<'_, PyAny>,
        offset: u64,
        length: Option<u64>,
        timestamp: Option<i64>,
        tag: u64,
    ) -> PyResult<Option<Ticket>> {
        let memory = PyBuffer::<u8>::get(memory)?;
        if !memory.is_c_contiguous() {
            return Err(PyBufferError::new_err("this memory is not contiguous"));
        }
        let memory = record::RecorderBuffer::of_memory(Arc::new(Held {
            export: Some(memory),
            released: self.released.clone(),
        }));
        let taken = self.take(py, &memory, offset, length, timestamp, tag);
        drop(memory);
        self.released.free(py);
        taken
    }

    /// Waits until everything appended before the call is acknowledged.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        let engine = self.engine()?;
        let settled = self.settle(py, engine);
        self.released.free(py);
        settled.map_err(|error| error.raised(py, Some(&self.path)))
    }

    /// Waits until everything is on the disk, and ends the recording.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        let engine = self.engine()?;
        // Signals can interrupt this wait; what follows is short.
        if let Err(error @ Failure::Python(_)) = self.settle(py, engine) {
            return Err(error.raised(py, None));
        }
        let done = py.detach(|| engine.finish());
        self.released.free(py);
        done.map(drop)
            .map_err(|error| raise(py, &error, Some(&self.path)))
    }

    /// Records, bytes, acknowledged records, dropped buffers, files.
    fn recorded(&self) -> PyResult<(u64, u64, u64, u64, u32)> {
        let counts = self.engine()?.recorded();
        Ok((
            counts.records,
            counts.bytes,
            counts.durable,
            counts.dropped,
            counts.files,
        ))
    }
}

impl Recorder {
    /// RuntimeError in a forked child: the threads that write belong to the parent.
    fn engine(&self) -> PyResult<&Arc<dmafile_record::Recorder>> {
        check_process(self.process)?;
        Ok(self
            .engine
            .as_ref()
            .expect("it is there until it is dropped"))
    }

    fn settle(&self, py: Python<'_>, engine: &dmafile_record::Recorder) -> Result<(), Failure> {
        let records = engine.recorded().records;
        match records.checked_sub(1).and_then(|last| engine.ticket(last)) {
            Some(last) => glancing(py, None, |most| last.wait_durable(most)).map(drop),
            None => Ok(()),
        }
    }

    fn take(
        &self,
        py: Python<'_>,
        buffer: &record::RecorderBuffer,
        offset: u64,
        length: Option<u64>,
        timestamp: Option<i64>,
        tag: u64,
    ) -> PyResult<Option<Ticket>> {
        let engine = self.engine()?;
        let length = length.unwrap_or(buffer.bytes().saturating_sub(offset));
        let mut note = Note::default();
        note.tag = tag;
        note.timestamp = timestamp.unwrap_or(note.timestamp);
        loop {
            let taken = py.detach(|| {
                if self.drops {
                    engine.append(buffer, offset, length, note)
                } else {
                    engine.try_append(buffer, offset, length, note)
                }
            });
            let taken = taken.map_err(|error| raise(py, &error, Some(&self.path)))?;
            if taken.is_some() || self.drops {
                let ticket = |ticket| Ticket {
                    ticket,
                    released: self.released.clone(),
                    process: self.process,
                };
                return Ok(taken.map(ticket));
            }
            let room = glancing(py, None, |most| {
                Ok(engine.wait_for_room(most.unwrap_or(POLL_INTERVAL)))
            });
            room.map_err(|error| error.raised(py, None))?;
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        let Some(engine) = self.engine.take() else {
            return;
        };
        if self.process != std::process::id() {
            // Its threads do not exist in this process.
            std::mem::forget(engine);
            return;
        }
        let mut engine = Some(engine);
        Python::try_attach(|py| {
            py.detach(|| drop(engine.take()));
            self.released.free(py);
        });
        std::mem::forget(engine);
    }
}

#[pymethods]
impl RecorderBuffer {
    /// Its size in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.bytes()
    }
}

#[pymethods]
impl Ticket {
    /// The number of the record, from 0.
    #[getter]
    fn number(&self) -> u64 {
        self.ticket.number()
    }

    /// True if it is written, or has failed: the memory can be reused.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        check_process(self.process)?;
        let done = self.ticket.is_written();
        self.released.free(py);
        Ok(done)
    }

    /// True if it survives a crash.
    fn durable(&self) -> PyResult<bool> {
        check_process(self.process)?;
        Ok(self.ticket.is_durable())
    }

    /// Waits until it is written: the memory can be reused. False after `timeout` seconds.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<&Bound<'_, PyAny>>) -> PyResult<bool> {
        check_process(self.process)?;
        let most = timeout.map(seconds).transpose()?.flatten();
        let done = glancing(py, most, |most| self.ticket.wait_for(most));
        self.released.free(py);
        done.map_err(|error| error.raised(py, None))
    }

    /// Acknowledges it and all records before it, and waits for that. False after `timeout` seconds.
    #[pyo3(signature = (timeout=None))]
    fn wait_durable(&self, py: Python<'_>, timeout: Option<&Bound<'_, PyAny>>) -> PyResult<bool> {
        check_process(self.process)?;
        let most = timeout.map(seconds).transpose()?.flatten();
        let done = glancing(py, most, |most| self.ticket.wait_durable(most));
        self.released.free(py);
        done.map_err(|error| error.raised(py, None))
    }
}

#[pymethods]
impl Recording {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let opened = py.detach(|| dmafile_record::Recording::open(&path));
        opened
            .map(Self)
            .map_err(|error| raise(py, &error, Some(&path)))
    }

    #[getter]
    fn files(&self) -> Vec<PathBuf> {
        self.0.files().to_vec()
    }

    #[getter]
    fn complete(&self) -> bool {
        self.0.is_complete()
    }

    fn __len__(&self) -> usize {
        self.0.records().len()
    }

    /// Number, file, offset, length, timestamp, tag, dropped, checksum.
    #[expect(clippy::type_complexity, reason = "it is unpacked at once")]
    fn record(&self, index: usize) -> Option<(u64, PathBuf, u64, u64, i64, u64, u64, Option<u32>)> {
        let record = self.0.records().get(index)?;
        Some((
            record.number,
            self.0.files()[record.file].clone(),
            record.offset,
            record.length,
            record.timestamp,
            record.tag,
            record.dropped,
            record.checksum,
        ))
    }

    /// The bytes of a record.
    fn read<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Bound<'py, PyBytes>> {
        let record = &self.0.records()[index];
        let path = &self.0.files()[record.file];
        let length = usize::try_from(record.length)?;
        PyBytes::new_with(py, length, |into| {
            let read = py.detach(|| self.0.read_into(record, into));
            read.map_err(|error| raise(py, &error, Some(path)))
        })
    }
}

/// Memory behind a descriptor, for recording.
#[pyfunction]
pub(crate) fn attach(py: Python<'_>, number: i32, at: u64) -> PyResult<RecorderBuffer> {
    let origin = format!("fd:{number}@{at}").parse::<Origin>();
    let opened = origin.and_then(|origin| py.detach(|| record::RecorderBuffer::open(&origin)));
    opened
        .map(RecorderBuffer)
        .map_err(|error| raise(py, &error, None))
}

/// Why a wait ended early.
enum Failure {
    Engine(dmafile::Error),
    /// A signal handler has raised an exception.
    Python(PyErr),
}

impl Failure {
    fn raised(self, py: Python<'_>, path: Option<&Path>) -> PyErr {
        match self {
            Self::Engine(error) => raise(py, &error, path),
            Self::Python(error) => error,
        }
    }
}

fn check_process(process: u32) -> PyResult<()> {
    if process == std::process::id() {
        return Ok(());
    }
    let text = "this recorder belongs to the process that forked this one; it cannot continue here";
    Err(PyRuntimeError::new_err(text))
}

/// Waits, for a limited time if that is not None, and handles signals while waiting.
fn glancing(
    py: Python<'_>,
    most: Option<Duration>,
    wait: impl Fn(Option<Duration>) -> Result<bool, dmafile::Error> + Sync,
) -> Result<bool, Failure> {
    let until = most.and_then(|most| Instant::now().checked_add(most));
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let step = left.map_or(POLL_INTERVAL, |left| left.min(POLL_INTERVAL));
        if py.detach(|| wait(Some(step))).map_err(Failure::Engine)? {
            return Ok(true);
        }
        call::handle_signals(py).map_err(Failure::Python)?;
        if left.is_some_and(|left| left <= step) {
            return Ok(false);
        }
    }
}

/// A non-negative number of seconds; None for None, and for more than a Duration can hold.
pub(crate) fn seconds(value: &Bound<'_, PyAny>) -> PyResult<Option<Duration>> {
    let Some(seconds) = value.extract::<Option<f64>>()? else {
        return Ok(None);
    };
    if seconds.is_nan() || seconds < 0.0 {
        let text = format!("{seconds} seconds are out of range, 0 or more");
        return Err(crate::error::usage(value.py(), &text));
    }
    Ok(Duration::try_from_secs_f64(seconds).ok())
}
