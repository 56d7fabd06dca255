//! Runs a load or a save in a separate thread, so that the caller's thread can handle signals, progress
//! and cancellation during that time.

use crate::buffer::Buffer;
use crate::call;
use crate::error::{no_thread, panicked, raise};
use crate::remote;
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

/// Interval at which a waiting thread handles signals and progress.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(33);

/// State shared by the two threads.
#[derive(Default)]
struct Shared {
    ended: Mutex<bool>,
    end: Condvar,
    done: AtomicU64,
    total: AtomicU64,
}

/// Work that can run in a separate thread.
pub(crate) trait Work: Send + 'static {
    type Outcome: Send;

    /// Adds a token that cancels it, and a function that it reports its progress to.
    fn watched(self, token: CancelToken, tell: impl Fn(Progress) + Send + Sync + 'static) -> Self;

    fn run(self) -> Result<Self::Outcome, Error>;
}

/// Makes work of a builder with `run`, `cancel`, and, unless it is quiet, `progress`.
macro_rules! work {
    ($work:ty => $outcome:ty) => {
        $crate::job::work!($work => $outcome, |work, tell| work.progress(tell));
    };
    ($work:ty => $outcome:ty, quiet) => {
        $crate::job::work!($work => $outcome, |work, _| work);
    };
    ($work:ty => $outcome:ty, |$builder:ident, $tell:pat_param| $with:expr) => {
        impl $crate::job::Work for $work {
            type Outcome = $outcome;

            fn watched(
                self,
                token: dmafile::CancelToken,
                $tell: impl Fn(dmafile::Progress) + Send + Sync + 'static,
            ) -> Self {
                let $builder = self.cancel(token);
                $with
            }

            fn run(self) -> Result<$outcome, dmafile::Error> {
                Self::run(self)
            }
        }
    };
}
pub(crate) use work;

work!(Load => Loaded);
work!(Save<'static> => SaveReport);

/// Signals the end of the work when dropped, and calls `then`: also after a panic, and if its thread
/// could not be started.
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

/// A running load or save.
pub(crate) struct Job<T> {
    thread: JoinHandle<Result<T, Error>>,
    shared: Arc<Shared>,
    token: CancelToken,
    path: PathBuf,
    /// The process that has the thread; a forked child does not.
    process: u32,
}

impl<T: Send + 'static> Job<T> {
    /// Starts it; `then` runs on its thread after the end.
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

    /// RuntimeError in a forked child: the thread to wait for belongs to the parent.
    fn check_process(&self) -> PyResult<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        let text = "this load belongs to the process that forked this one; it cannot continue here";
        Err(PyRuntimeError::new_err(text))
    }

    /// Leaks the job; in a forked child nothing of it may be touched.
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

    /// Waits for the end, for a limited time; returns whether it has ended.
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

    /// Handles signals and reports progress until the end.
    fn watch(&self, py: Python<'_>, progress: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let mut told = (0, 0);
        loop {
            let ended = py.detach(|| self.wait(POLL_INTERVAL));
            let now = self.progress();
            if let Some(tell) = progress
                && now != told
            {
                call::call(tell, now)?;
                told = now;
            }
            call::handle_signals(py)?;
            self.check_process()?;
            if ended {
                return Ok(());
            }
        }
    }

    /// Waits for the end in the caller's thread. An exception there, from a signal or from `progress`,
    /// cancels the load.
    pub(crate) fn attend(self, py: Python<'_>, progress: Option<&Bound<'_, PyAny>>) -> PyResult<T> {
        if let Err(error) = self.watch(py, progress) {
            if self.check_process().is_err() {
                self.forget_in_fork();
                return Err(error);
            }
            self.token.cancel();
            // Everything must have been undone before the exception is raised.
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
    /// Cancels it; returns immediately.
    fn cancel(&self) -> PyResult<()> {
        if let Some(job) = &*self.lock() {
            job.check_process()?;
            job.token.cancel();
        }
        Ok(())
    }

    /// The bytes in place and the total.
    fn progress(&self) -> PyResult<(u64, u64)> {
        self.lock().as_ref().map_or(Ok((0, 0)), Job::progress_here)
    }

    /// Waits for the end; returns the buffer, or raises the exception that ended the load. Only once.
    fn result(&self, py: Python<'_>) -> PyResult<Buffer> {
        self.take()?.outcome(py).map(Buffer::of)
    }

    /// As `result`, for a blocking caller: handles signals and calls `progress` while waiting.
    fn attend(&self, py: Python<'_>, progress: Option<&Bound<'_, PyAny>>) -> PyResult<Buffer> {
        self.take()?.attend(py, progress).map(Buffer::of)
    }
}

impl Running {
    fn take(&self) -> PyResult<Job<Loaded>> {
        let job = self.lock().take();
        job.ok_or_else(|| PyRuntimeError::new_err("the result was already taken"))
    }

    /// Starts it; `then` is called without arguments, from another thread, when it is done.
    pub(crate) fn start(
        py: Python<'_>,
        load: Load,
        path: &Path,
        then: Py<PyAny>,
    ) -> PyResult<Self> {
        let job = Job::start(py, load, path, move || call::call_from_thread(then))?;
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

/// Loads `path`, or an object that is called so, with the given options.
#[pyfunction]
pub(crate) fn load(
    py: Python<'_>,
    path: PathBuf,
    options: &Bound<'_, PyDict>,
    progress: Option<&Bound<'_, PyAny>>,
    source: Option<&Bound<'_, PyAny>>,
) -> PyResult<Buffer> {
    let load = request::apply(remote::load(&path, source)?, options, FILE)?;
    let job = Job::start(py, load, &path, || ())?;
    job.attend(py, progress).map(Buffer::of)
}

/// Starts to load `path`, and calls `then` without arguments, from another thread, when it is done.
#[pyfunction]
pub(crate) fn start(
    py: Python<'_>,
    path: PathBuf,
    options: &Bound<'_, PyDict>,
    then: Py<PyAny>,
) -> PyResult<Running> {
    let load = request::apply(remote::load(&path, None)?, options, FILE)?;
    Running::start(py, load, &path, then)
}

/// What is saved: a descriptor and an offset in it, a file, or pieces back to back.
#[derive(FromPyObject)]
pub(crate) enum Source {
    Fd((i32, u64)),
    File(PathBuf),
    Parts(Vec<Piece>),
}

/// Bytes in memory; or a descriptor, an offset in it, and a size.
#[derive(FromPyObject)]
pub(crate) enum Piece {
    Fd((i32, u64, u64)),
    Memory(PyBuffer<u8>),
}

/// The bytes of a Python buffer.
///
/// # Safety
/// The buffer outlives the result.
unsafe fn shown(buffer: &PyBuffer<u8>) -> OriginPart<'static> {
    let (start, len) = (buffer.buf_ptr().cast::<AtomicU8>(), buffer.len_bytes());
    if len == 0 {
        return OriginPart::shared(&[]);
    }
    // SAFETY: a contiguous buffer has that many bytes there, and neither moves nor frees them while it is
    // held. They are only read, and others may write to them.
    OriginPart::shared(unsafe { std::slice::from_raw_parts(start, len) })
}

/// A range of what a descriptor refers to.
fn part_of(py: Python<'_>, (number, at, bytes): (i32, u64, u64)) -> PyResult<OriginPart<'static>> {
    match Source::Fd((number, at)).origin(py)? {
        Origin::Fd { fd, .. } => {
            let fd = Arc::into_inner(fd).expect("there is no other reference");
            Ok(OriginPart::fd(fd, at, bytes))
        }
        _ => unreachable!("a descriptor was named"),
    }
}

/// Saves `source` to `path` with the given options; returns the report.
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
                    let text = "the bytes of the source are not contiguous";
                    Err(PyBufferError::new_err(text))
                }
                // SAFETY: `source` lives until this function returns, and the save has ended by then:
                // `attend` always waits for it, except in a forked child, which has no thread that could
                // read.
                Piece::Memory(part) => Ok(unsafe { shown(part) }),
            };
            Origin::Parts(parts.iter().map(shown).collect::<PyResult<_>>()?)
        }
        _ => source.origin(py)?,
    };
    if let Some(url) = remote::url(&path) {
        return remote::save(py, origin, url, options, progress);
    }
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
                        "the caller's memory cannot be a source here",
                    )),
                });
                Ok(Origin::Parts(parts.collect::<PyResult<_>>()?))
            }
        }
    }
}

/// A report as a dictionary, converted through its JSON: pythonize does not support this version of pyo3 yet.
pub(crate) fn as_dict(
    py: Python<'_>,
    json: Result<String, serde_json::Error>,
) -> PyResult<Py<PyAny>> {
    let json = json.expect("a report is plain data");
    let loads = call::import(py, c"json", "loads")?;
    Ok(call::call(&loads, (json,))?.unbind())
}

/// Raises an error if options of a model are invalid, without a model.
#[pyfunction]
pub(crate) fn check(options: &Bound<'_, PyDict>) -> PyResult<()> {
    request::tuning(options, MODEL).map(drop)
}
