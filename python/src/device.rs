//! Memory of devices, and loads into it.

use crate::call;
use crate::dlpack;
use crate::error::raise;
use crate::job::{Job, POLL_INTERVAL, Work};
use crate::model::Model;
use crate::request::{self, MODEL};
use dmafile::{CancelToken, Error, Load, Progress, Report, Ring};
use dmafile_gpu::{Device, OtherStream, Place, ToDevice};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Memory of a device, allocated here or by another library.
#[pyclass(frozen, module = "dmafile._dmafile")]
pub(crate) struct DeviceMemory {
    memory: Arc<dmafile_gpu::DeviceMemory>,
    device: Device,
}

#[pymethods]
impl DeviceMemory {
    /// Allocates `nbytes` bytes.
    #[new]
    fn new(py: Python<'_>, device: &str, nbytes: u64) -> PyResult<Self> {
        let made = py.detach(|| {
            let device: Device = device.parse()?;
            Ok((device, device.allocate(nbytes)?))
        });
        let (device, memory) = made.map_err(|error: Error| raise(py, &error, None))?;
        Ok(Self {
            memory: Arc::new(memory),
            device,
        })
    }

    /// Memory that another library owns, and does not free while it is used here.
    #[staticmethod]
    fn borrowed(py: Python<'_>, device: &str, address: u64, nbytes: u64) -> PyResult<Self> {
        let device = device.parse();
        let device: Device = device.map_err(|error| raise(py, &error, None))?;
        // SAFETY: the package keeps the tensor that owns this memory alive until the load has ended.
        let memory = unsafe { dmafile_gpu::DeviceMemory::borrowed(address, nbytes) };
        Ok(Self {
            memory: Arc::new(memory),
            device,
        })
    }

    /// The device address of the first byte.
    #[getter]
    fn address(&self) -> u64 {
        self.memory.address()
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.memory.len()
    }

    /// `cuda:N` or `hip:N`.
    #[getter]
    fn device(&self) -> String {
        self.device.to_string()
    }

    /// Copies `nbytes` bytes to the host, starting at byte `at`.
    fn copy_back<'py>(
        &self,
        py: Python<'py>,
        at: u64,
        nbytes: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        PyBytes::new_with(py, nbytes, |into| {
            let copied = py.detach(|| self.device.copy_back(&self.memory, at, into));
            copied.map_err(|error| raise(py, &error, None))
        })
    }

    /// A DLPack capsule for the tensor that begins at byte `at`.
    fn dlpack<'py>(
        &self,
        py: Python<'py>,
        at: u64,
        dtype: &str,
        shape: Vec<i64>,
        versioned: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let memory = Arc::clone(&self.memory);
        dlpack::of_device(
            py,
            memory,
            self.dlpack_device(),
            at,
            (dtype, shape),
            versioned,
        )
    }

    /// The device of such a capsule: DLPack's type and number.
    fn dlpack_device(&self) -> (u32, i32) {
        dlpack::device(self.device)
    }
}

/// A load into the memory of a device.
struct ToPlaces {
    load: Load,
    ring: Ring,
    device: Device,
    places: Box<dyn FnMut(bool) -> Option<Place> + Send>,
    after: Option<usize>,
    copied: Arc<CopiedUpTo>,
}

/// How far the load has come: all bytes before the offset are in the device's memory. The flag is set when
/// it has ended.
#[derive(Default)]
struct CopiedUpTo {
    upto: Mutex<(u64, bool)>,
    more: Condvar,
}

impl CopiedUpTo {
    fn tell(&self, upto: u64, over: bool) {
        let mut state = lock(&self.upto);
        *state = (state.0.max(upto), state.1 || over);
        self.more.notify_all();
    }

    /// Waits, at most for the given time, until everything before `upto` is there or the load has ended.
    /// Returns false if the time is over.
    fn wait(&self, upto: u64, at_most: Duration) -> bool {
        let state = lock(&self.upto);
        let waiting = |state: &mut (u64, bool)| state.0 < upto && !state.1;
        let waited = self.more.wait_timeout_while(state, at_most, waiting);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

impl Work for ToPlaces {
    type Outcome = Report;

    fn watched(self, token: CancelToken, tell: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        let load = self.load.cancel(token).progress(tell);
        Self { load, ..self }
    }

    fn run(self) -> Result<Report, Error> {
        let mut sink = ToDevice::from_fn(self.device, self.places)?;
        if let Some(handle) = self.after {
            // SAFETY: the package passes a stream of PyTorch, which does not destroy its streams.
            sink = sink.after(unsafe { OtherStream::new(handle) });
        }
        let copied = self.copied;
        let mut sink = sink.on_copied(move |upto| copied.tell(upto, false));
        self.load.run_through(self.ring, &mut sink)
    }
}

/// A place: offset in the files (counted as in the rows of the table), number of bytes, and offset in the
/// memory.
type Row = (u64, u64, u64);

/// How to load to a device: its name; a stream of another library whose queued work must complete first;
/// the size of the ring in bytes, and its number of slots.
#[derive(FromPyObject)]
pub(crate) struct How(String, Option<usize>, Option<(u64, u32)>);

impl How {
    fn ring(&self) -> Ring {
        let ring = self.2.map(|(bytes, slots)| Ring::new(bytes, slots));
        ring.unwrap_or_default()
    }

    fn device(&self, py: Python<'_>) -> PyResult<Device> {
        let device = self.0.parse();
        device.map_err(|error| raise(py, &error, None))
    }
}

/// Raises an error if a device cannot be used.
#[pyfunction]
pub(crate) fn check_device(py: Python<'_>, device: &str) -> PyResult<()> {
    let checked = py.detach(|| device.parse::<Device>()?.check());
    checked.map_err(|error| raise(py, &error, None))
}

/// Loads the tensors that match `patterns`, or whole files if it is None, into places in a device's memory.
/// Returns the report.
#[pyfunction]
pub(crate) fn load_to_device(
    py: Python<'_>,
    model: &Model,
    patterns: Option<Vec<String>>,
    into: (PyRef<'_, DeviceMemory>, Vec<Row>),
    how: How,
    options: &Bound<'_, PyDict>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<Py<PyAny>> {
    let load = model.load_of(py, patterns)?;
    let (memory, places) = into;
    let memory = Arc::clone(&memory.memory);
    let mut places = places
        .into_iter()
        .map(move |(at, bytes, to)| Place::new(at, bytes, &memory, to));
    let work = ToPlaces {
        load: request::apply(load, options, MODEL)?,
        ring: how.ring(),
        device: how.device(py)?,
        places: Box::new(move |_| places.next()),
        after: how.1,
        copied: Arc::default(),
    };
    let report = Job::start(py, work, model.path(), || ())?.attend(py, progress)?;
    crate::job::as_dict(py, serde_json::to_string(&report))
}

/// A load into a device's memory whose places are given one by one, while earlier ones are being filled.
#[pyclass(frozen, module = "dmafile._dmafile")]
pub(crate) struct DeviceStream {
    job: Mutex<Option<Job<Report>>>,
    places: Mutex<Option<Sender<Place>>>,
    copied: Arc<CopiedUpTo>,
}

#[pymethods]
impl DeviceStream {
    #[new]
    fn new(
        py: Python<'_>,
        model: &Model,
        patterns: Option<Vec<String>>,
        how: How,
        options: &Bound<'_, PyDict>,
    ) -> PyResult<Self> {
        let load = model.load_of(py, patterns)?;
        let (sender, places): (_, Receiver<Place>) = channel();
        let copied = Arc::<CopiedUpTo>::default();
        let work = ToPlaces {
            load: request::apply(load, options, MODEL)?,
            ring: how.ring(),
            device: how.device(py)?,
            places: Box::new(move |wait| {
                if wait {
                    places.recv().ok()
                } else {
                    places.try_recv().ok()
                }
            }),
            after: how.1,
            copied: Arc::clone(&copied),
        };
        let over = Arc::clone(&copied);
        let job = Job::start(py, work, model.path(), move || over.tell(0, true))?;
        Ok(Self {
            job: Mutex::new(Some(job)),
            places: Mutex::new(Some(sender)),
            copied,
        })
    }

    /// Gives the load its next place: `memory`, from its start, for the `nbytes` bytes at offset `at`.
    fn give(&self, memory: &DeviceMemory, at: u64, nbytes: u64) -> PyResult<()> {
        // In a forked child, a thread that does not exist there may hold the locks below.
        self.progress()?;
        if let Some(places) = &*lock(&self.places) {
            // If the load has failed, no thread receives it; `wait` raises the error.
            let _ = places.send(Place::new(at, nbytes, &memory.memory, 0));
        }
        Ok(())
    }

    /// Waits until the bytes of all given places before `upto` are there. Raises the error that ended the
    /// load, if any.
    fn wait(&self, py: Python<'_>, upto: u64, progress: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        // As in `give`.
        self.progress()?;
        let mut before = (0, 0);
        loop {
            let there = py.detach(|| self.copied.wait(upto, POLL_INTERVAL));
            let now = self.progress()?;
            if let Some(tell) = progress
                && now != before
            {
                call::call(tell, now)?;
                before = now;
            }
            call::handle_signals(py)?;
            if there {
                break;
            }
        }
        let over = lock(&self.copied.upto).0 < upto;
        if over { self.finish(py, None) } else { Ok(()) }
    }

    /// Waits for the end of the load, after all places have been given. Raises its error, if any.
    fn finish(&self, py: Python<'_>, progress: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        match self.take() {
            Some(job) => job.attend(py, progress).map(drop),
            None => Err(PyRuntimeError::new_err("the load has ended already")),
        }
    }

    /// Cancels the load, and waits until it has ended.
    fn close(&self, py: Python<'_>) {
        if let Some(job) = self.take() {
            job.abandon(py);
        }
    }
}

impl DeviceStream {
    /// Takes the job, if it has not been taken yet, and ends the list of places.
    fn take(&self) -> Option<Job<Report>> {
        let (job, places) = (lock(&self.job).take(), lock(&self.places).take());
        if job.as_ref().is_some_and(|job| job.progress_here().is_err()) {
            // As in `give`: to drop the sender takes a lock.
            std::mem::forget(places);
        }
        job
    }

    fn progress(&self) -> PyResult<(u64, u64)> {
        match &*lock(&self.job) {
            Some(job) => job.progress_here(),
            None => Err(PyValueError::new_err("the stream is closed")),
        }
    }
}

impl Drop for DeviceStream {
    fn drop(&mut self) {
        if let Some(job) = self.take() {
            job.let_go();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
