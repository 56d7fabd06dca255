//! A load or a save on a thread of its own, so that the thread of the caller can look after signals,
//! progress and cancellation meanwhile.

use crate::buffer::Buffer;
use crate::error::{no_thread, panicked, raise};
use crate::request::{self, FILE, MODEL};
use dmafile::{CancelToken, Error, Load, Loaded, Origin, OriginPart, Progress, Save, SaveReport};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyBufferError, PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// How often a waiting thread looks after signals and progress.
const GLANCE: Duration = Duration::from_millis(50);

/// What the two threads tell each other.
#[derive(Default)]
struct Shared {
    ended: Mutex<bool>,
    end: Condvar,
    done: AtomicU64,
    total: AtomicU64,
}

/// What can be done on a thread of its own.
pub(crate) trait Work: Send + 'static {
    type Outcome: Send;

    /// The same, that can be stopped, and tells how far it is.
    fn watched(self, token: CancelToken, tell: impl Fn(Progress) + Send + Sync + 'static) -> Self;

    fn run(self) -> Result<Self::Outcome, Error>;
}

impl Work for Load {
    type Outcome = Loaded;

    fn watched(self, token: CancelToken, tell: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        self.cancel(token).progress(tell)
    }

    fn run(self) -> Result<Loaded, Error> {
        Self::run(self)
    }
}

impl Work for Save<'static> {
    type Outcome = SaveReport;

    fn watched(self, token: CancelToken, tell: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        self.cancel(token).progress(tell)
    }

    fn run(self) -> Result<SaveReport, Error> {
        Self::run(self)
    }
}

/// Says that it has ended, however it did, and calls `then`: also where it panicked, and where
/// its thread never began.
struct Ending<F: FnOnce()> {
    shared: Arc<Shared>,
    then: Option<F>,
}

impl<F: FnOnce()> Drop for Ending<F> {
    fn drop(&mut self) {
        let ended = self.shared.ended.lock();
        *ended.expect("no holder of this lock panics") = true;
        self.shared.end.notify_all();
        if let Some(then) = self.then.take() {
            then();
        }
    }
}

/// A load or a save on its way.
pub(crate) struct Job<T> {
    thread: JoinHandle<Result<T, Error>>,
    shared: Arc<Shared>,
    token: CancelToken,
    path: PathBuf,
    /// The process that has the thread: a fork of it has none.
    process: u32,
}

impl<T: Send + 'static> Job<T> {
    /// Begins; `then` runs on its thread, after it has ended.
    pub(crate) fn start(
        py: Python<'_>,
        work: impl Work<Outcome = T>,
        path: &Path,
        then: impl FnOnce() + Send + 'static,
    ) -> PyResult<Self> {
        let shared = Arc::<Shared>::default();
        let token = CancelToken::new();
        let seen = Arc::clone(&shared);
        let ending = Ending {
            shared: Arc::clone(&shared),
            then: Some(then),
        };
        let work = work.watched(token.clone(), move |progress| {
            seen.total.store(progress.total, Ordering::Relaxed);
            seen.done.store(progress.done, Ordering::Relaxed);
        });
        let begin = move || {
            let _ending = ending;
            work.run()
        };
        let thread = std::thread::Builder::new().name("dmafile".to_string());
        let thread = thread.spawn(begin);
        Ok(Self {
            thread: thread.map_err(|error| no_thread(py, &error, path))?,
            shared,
            token,
            path: path.to_path_buf(),
            process: std::process::id(),
        })
    }

    /// RuntimeError in a fork: the thread that it would wait for is another process's.
    fn check_process(&self) -> PyResult<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        let text = "this load belongs to the process that forked this one; it cannot go on here";
        Err(PyRuntimeError::new_err(text))
    }

    /// Lets go of it; of what a fork has of it nothing may be touched.
    fn forget_in_fork(self) {
        if self.check_process().is_err() {
            std::mem::forget(self);
        }
    }

    /// Bytes in place, and bytes in all; RuntimeError in a fork.
    pub(crate) fn progress_here(&self) -> PyResult<(u64, u64)> {
        self.check_process()?;
        Ok(self.progress())
    }

    /// Cancels it, and waits until all that was made has been undone.
    pub(crate) fn abandon(self, py: Python<'_>) {
        self.token.cancel();
        match self.check_process() {
            Ok(()) => py.detach(|| drop(self.thread.join())),
            Err(_) => std::mem::forget(self),
        }
    }

    /// Cancels it, and waits for nothing.
    pub(crate) fn let_go(self) {
        self.token.cancel();
        self.forget_in_fork();
    }

    /// Waits until it has ended, and at most so long; whether it has.
    fn wait(&self, at_most: Duration) -> bool {
        let ended = self.shared.ended.lock();
        let ended = ended.expect("no holder of this lock panics");
        let waited = self
            .shared
            .end
            .wait_timeout_while(ended, at_most, |ended| !*ended);
        *waited.expect("no holder of this lock panics").0
    }

    fn progress(&self) -> (u64, u64) {
        let shared = &self.shared;
        (
            shared.done.load(Ordering::Relaxed),
            shared.total.load(Ordering::Relaxed),
        )
    }

    /// Lets signals be handled and progress be told until it ends.
    fn watch(&self, py: Python<'_>, progress: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let mut told = (0, 0);
        loop {
            let ended = py.detach(|| self.wait(GLANCE));
            let now = self.progress();
            if let Some(tell) = progress
                && now != told
            {
                tell.call1(now)?;
                told = now;
            }
            py.check_signals()?;
            self.check_process()?;
            if ended {
                return Ok(());
            }
        }
    }

    /// Waits for the end on the thread of the caller. An exception there, from a signal or from
    /// `progress`, stops the load.
    pub(crate) fn attend(self, py: Python<'_>, progress: Option<&Bound<'_, PyAny>>) -> PyResult<T> {
        if let Err(error) = self.watch(py, progress) {
            if self.check_process().is_err() {
                self.forget_in_fork();
                return Err(error);
            }
            self.token.cancel();
            // Before the exception leaves, all that was made has been undone.
            py.detach(|| drop(self.thread.join()));
            return Err(error);
        }
        self.outcome(py)
    }

    fn outcome(self, py: Python<'_>) -> PyResult<T> {
        if let Err(error) = self.check_process() {
            self.forget_in_fork();
            return Err(error);
        }
        match py.detach(|| self.thread.join()) {
            Ok(Ok(outcome)) => Ok(outcome),
            Ok(Err(error)) => Err(raise(py, &error, Some(&self.path))),
            Err(cause) => Err(panicked(py, &*cause, &self.path)),
        }
    }
}

/// A load in the background, for event loops.
#[pyclass(frozen, module = "dmafile._dmafile")]
pub(crate) struct Running {
    job: Mutex<Option<Job<Loaded>>>,
}

#[pymethods]
impl Running {
    /// Asks it to stop; returns at once.
    fn cancel(&self) -> PyResult<()> {
        if let Some(job) = &*self.lock() {
            job.check_process()?;
            job.token.cancel();
        }
        Ok(())
    }

    /// Bytes in place, and bytes in all.
    fn progress(&self) -> PyResult<(u64, u64)> {
        self.lock().as_ref().map_or(Ok((0, 0)), Job::progress_here)
    }

    /// The buffer, or the exception that ended the load; waits for its end. Once only.
    fn result(&self, py: Python<'_>) -> PyResult<Buffer> {
        self.take()?.outcome(py).map(Buffer::of)
    }

    /// As `result`, for a thread that waits: looks after signals, and calls `progress` meanwhile.
    fn attend(&self, py: Python<'_>, progress: Option<&Bound<'_, PyAny>>) -> PyResult<Buffer> {
        self.take()?.attend(py, progress).map(Buffer::of)
    }
}

impl Running {
    fn take(&self) -> PyResult<Job<Loaded>> {
        let job = self.lock().take();
        job.ok_or_else(|| PyRuntimeError::new_err("the result has been taken already"))
    }

    /// Begins; `then` is called without arguments, from another thread, when it is done.
    pub(crate) fn start(
        py: Python<'_>,
        load: Load,
        path: &Path,
        then: Py<PyAny>,
    ) -> PyResult<Self> {
        let then = move || {
            // An interpreter that shuts down waits for nobody.
            Python::try_attach(|py| {
                if let Err(error) = then.call0(py) {
                    error.write_unraisable(py, Some(then.bind(py)));
                }
                drop(then);
            });
        };
        let job = Job::start(py, load, path, then)?;
        Ok(Self {
            job: Mutex::new(Some(job)),
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Job<Loaded>>> {
        self.job.lock().expect("no holder of this lock panics")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(job) = self.lock().take() {
            job.let_go();
        }
    }
}

/// Loads `path` with the given options.
#[pyfunction]
pub(crate) fn load(
    py: Python<'_>,
    path: PathBuf,
    options: &Bound<'_, PyDict>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<Buffer> {
    let load = request::apply(Load::new(&path), options, FILE)?;
    let job = Job::start(py, load, &path, || ())?;
    job.attend(py, progress).map(Buffer::of)
}

/// Begins to load `path`, and calls `then` without arguments, from another thread, when it is
/// done.
#[pyfunction]
pub(crate) fn start(
    py: Python<'_>,
    path: PathBuf,
    options: &Bound<'_, PyDict>,
    then: Py<PyAny>,
) -> PyResult<Running> {
    let load = request::apply(Load::new(&path), options, FILE)?;
    Running::start(py, load, &path, then)
}

/// What is saved: a descriptor and the first byte of it that is, a file, or pieces one behind the other.
#[derive(FromPyObject)]
pub(crate) enum Source {
    Fd((i32, u64)),
    File(PathBuf),
    Parts(Vec<Piece>),
}

/// Bytes in memory, or a descriptor, the first byte of it that is saved, and how many are.
#[derive(FromPyObject)]
pub(crate) enum Piece {
    Fd((i32, u64, u64)),
    Memory(PyBuffer<u8>),
}

/// The bytes of a buffer of Python's, for as long as somebody holds it.
///
/// # Safety
/// The buffer outlives what comes back.
unsafe fn shown(buffer: &PyBuffer<u8>) -> OriginPart<'static> {
    let (start, len) = (buffer.buf_ptr().cast::<AtomicU8>(), buffer.len_bytes());
    if len == 0 {
        return OriginPart::shared(&[]);
    }
    // SAFETY: a contiguous buffer has so many bytes there, and neither moves nor frees them while it is
    // held. They are only read, and others may write to them.
    OriginPart::shared(unsafe { std::slice::from_raw_parts(start, len) })
}

/// A range of what a descriptor stands for.
fn part_of(py: Python<'_>, (number, at, bytes): (i32, u64, u64)) -> PyResult<OriginPart<'static>> {
    match Source::Fd((number, at)).origin(py)? {
        Origin::Fd { fd, .. } => {
            let fd = Arc::into_inner(fd).expect("nobody else has it");
            Ok(OriginPart::fd(fd, at, bytes))
        }
        _ => unreachable!("a descriptor was named"),
    }
}

/// Saves `source` to `path` with the given options; the report.
#[pyfunction]
pub(crate) fn save(
    py: Python<'_>,
    source: Source,
    path: PathBuf,
    options: &Bound<'_, PyDict>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<Py<PyAny>> {
    let origin = match source {
        Source::Parts(ref parts) => {
            let shown = |part: &Piece| match part {
                Piece::Fd(part) => part_of(py, *part),
                Piece::Memory(part) if !part.is_c_contiguous() => {
                    let text = "the bytes of the source do not lie one behind the other";
                    Err(PyBufferError::new_err(text))
                }
                // SAFETY: `source` lives until this function returns, and the save has ended by then:
                // `attend` waits for it in each case, but in a fork, which has no thread that would read.
                Piece::Memory(part) => Ok(unsafe { shown(part) }),
            };
            Origin::Parts(parts.iter().map(shown).collect::<PyResult<_>>()?)
        }
        _ => source.origin(py)?,
    };
    let save = request::apply_to_save(Save::new(origin, &path), options)?;
    let report = Job::start(py, save, &path, || ())?.attend(py, progress)?;
    as_dict(py, serde_json::to_string(&report))
}

impl Source {
    pub(crate) fn origin(self, py: Python<'_>) -> PyResult<Origin<'static>> {
        match self {
            Self::Fd((number, at)) => {
                let origin = format!("fd:{number}@{at}").parse();
                origin.map_err(|error| raise(py, &error, None))
            }
            Self::File(path) => Ok(Origin::File(path)),
            Self::Parts(parts) => {
                let parts = parts.into_iter().map(|part| match part {
                    Piece::Fd(part) => part_of(py, part),
                    Piece::Memory(_) => Err(PyTypeError::new_err(
                        "memory of the caller is no source here",
                    )),
                });
                Ok(Origin::Parts(parts.collect::<PyResult<_>>()?))
            }
        }
    }
}

/// A report, as the dictionary that its JSON stands for.
pub(crate) fn as_dict(
    py: Python<'_>,
    json: Result<String, serde_json::Error>,
) -> PyResult<Py<PyAny>> {
    let json = json.expect("a report is plain data");
    Ok(py.import("json")?.call_method1("loads", (json,))?.unbind())
}

/// Raises where the options of a model are invalid, whatever the model.
#[pyfunction]
pub(crate) fn check(py: Python<'_>, options: &Bound<'_, PyDict>) -> PyResult<()> {
    let load = request::apply(Load::new(""), options, MODEL)?;
    load.check().map_err(|error| raise(py, &error, None))
}
