//! A file whose bytes come through a ring of slots, one part after the other.

use crate::call;
use crate::error::raise;
use crate::job::{Job, POLL_INTERVAL, Work};
use crate::remote;
use crate::request::{self, STREAM};
use dmafile::{CancelToken, Delivered, Error, Load, Progress, Report, Ring, Sink, SlotReceiver};
use dmafile_gpu::Device;
use pyo3::exceptions::{PyBufferError, PyRuntimeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A load into a ring, whose bytes another thread takes.
struct Through {
    load: Load,
    ring: Ring,
    sink: Box<dyn Sink + Send>,
}

impl Work for Through {
    type Outcome = Report;

    fn watched(self, token: CancelToken, tell: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        let load = self.load.cancel(token).progress(tell);
        Self { load, ..self }
    }

    fn run(mut self) -> Result<Report, Error> {
        self.load.run_through(self.ring, &mut *self.sink)
    }
}

/// The receiver of the bytes, which keeps the ring until nothing uses them any more.
struct Receiver {
    slots: ManuallyDrop<SlotReceiver>,
    process: u32,
    /// Number of parts that something still uses.
    used: AtomicUsize,
}

impl Receiver {
    /// False in a forked child: the thread that fills the ring belongs to the parent.
    fn is_here(&self) -> bool {
        self.process == std::process::id()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        // In a forked child a thread that does not exist there may hold its lock.
        if self.is_here() {
            // SAFETY: it is dropped here only, and not used after it.
            unsafe { ManuallyDrop::drop(&mut self.slots) };
        }
    }
}

/// A file that is being read through a ring.
#[pyclass(frozen, module = "dmafile._dmafile")]
pub(crate) struct Stream {
    receiver: Arc<Receiver>,
    job: Mutex<Option<Job<Report>>>,
}

#[pymethods]
impl Stream {
    /// Starts to read. `ring` is its size in bytes, and its number of slots.
    #[new]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        ring: (Option<u64>, Option<u32>),
        device: Option<&str>,
        options: &Bound<'_, PyDict>,
    ) -> PyResult<Self> {
        let usual = Ring::default();
        let ring = Ring::new(ring.0.unwrap_or(usual.bytes), ring.1.unwrap_or(usual.slots));
        let load = request::apply(remote::load(&path, None)?, options, STREAM)?;
        let device = device.map(str::parse::<Device>).transpose();
        let device = load.check().and(ring.check()).and(device);
        let device = device.map_err(|error| raise(py, &error, Some(&path)))?;
        let (sink, slots) = dmafile::deliver(device.map(Into::into));
        let work = Through {
            load,
            ring,
            sink: Box::new(sink),
        };
        Ok(Self {
            job: Mutex::new(Some(Job::start(py, work, &path, || ())?)),
            receiver: Arc::new(Receiver {
                slots: ManuallyDrop::new(slots),
                process: std::process::id(),
                used: AtomicUsize::new(0),
            }),
        })
    }

    /// Waits for the next bytes; None after the last ones. BufferError if earlier ones are still in
    /// use: if all slots were, this would never return.
    fn next(&self, py: Python<'_>) -> PyResult<Option<StreamPart>> {
        let receiver = &self.receiver;
        if receiver.used.load(Ordering::Relaxed) > 0 {
            let text = "a view of earlier bytes is still in use: copy what you keep";
            return Err(PyBufferError::new_err(text));
        }
        loop {
            if !receiver.is_here() {
                let text = "this stream belongs to the process that forked this one";
                return Err(PyRuntimeError::new_err(text));
            }
            if py.detach(|| receiver.slots.wait(POLL_INTERVAL)) {
                break;
            }
            call::handle_signals(py)?;
        }
        Ok(receiver.slots.next().map(|delivered| {
            receiver.used.fetch_add(1, Ordering::Relaxed);
            StreamPart {
                delivered,
                receiver: Arc::clone(receiver),
            }
        }))
    }

    /// Waits for the end of the load, after the last bytes. Returns its report, or raises its error.
    fn finish(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let job = self.take();
        let job = job.ok_or_else(|| PyRuntimeError::new_err("the stream is closed"))?;
        let report = job.attend(py, None)?;
        crate::job::as_dict(py, serde_json::to_string(&report))
    }

    /// Cancels the load; returns immediately.
    fn close(&self) {
        if let Some(job) = self.take() {
            job.let_go();
        }
    }
}

impl Stream {
    fn take(&self) -> Option<Job<Report>> {
        let mut job = self.job.lock().unwrap_or_else(PoisonError::into_inner);
        job.take()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.close();
    }
}

/// Bytes of the file in a slot, which is filled again when this is deleted.
#[pyclass(frozen, module = "dmafile._dmafile")]
pub(crate) struct StreamPart {
    delivered: Delivered,
    receiver: Arc<Receiver>,
}

#[pymethods]
impl StreamPart {
    /// Offset of the first byte in the file.
    #[getter]
    fn at(&self) -> u64 {
        self.delivered.at
    }

    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let Delivered { address, bytes, .. } = slf.get().delivered;
        let start = std::ptr::with_exposed_provenance_mut::<c_void>(address);
        // SAFETY: the view is valid for writing. The slot is not filled again before this object is
        // deleted, of which the view keeps a reference; the ring stays as long as the receiver.
        let filled =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, bytes as isize, 1, flags) };
        match filled {
            0 => Ok(()),
            _ => Err(PyErr::fetch(slf.py())),
        }
    }
}

impl Drop for StreamPart {
    fn drop(&mut self) {
        self.receiver.used.fetch_sub(1, Ordering::Relaxed);
        if self.receiver.is_here() {
            self.receiver.slots.done(self.delivered.slot);
        }
    }
}
