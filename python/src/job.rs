//! A load on a thread of its own, so that the thread of the caller can look after signals,
//! progress and cancellation meanwhile.

use crate::buffer::Buffer;
use crate::error::raise;
use crate::request::{self, FILE};
use dmafile::{CancelToken, Error, Load, Loaded};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
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

/// Says that a load has ended, however it did.
struct Ending(Arc<Shared>);

impl Drop for Ending {
    fn drop(&mut self) {
        *self.0.ended.lock().expect("no holder of this lock panics") = true;
        self.0.end.notify_all();
    }
}

/// A load on its way. Dropping it asks it to stop.
pub(crate) struct Job {
    thread: JoinHandle<Result<Loaded, Error>>,
    shared: Arc<Shared>,
    token: CancelToken,
    path: PathBuf,
}

impl Job {
    /// Begins; `then` runs on the thread of the load, after it has ended.
    pub(crate) fn start(
        load: Load,
        path: &Path,
        then: impl FnOnce() + Send + 'static,
    ) -> PyResult<Self> {
        let shared = Arc::<Shared>::default();
        let token = CancelToken::new();
        let (seen, ending) = (Arc::clone(&shared), Ending(Arc::clone(&shared)));
        let load = load.cancel(token.clone()).progress(move |progress| {
            seen.total.store(progress.total, Ordering::Relaxed);
            seen.done.store(progress.done, Ordering::Relaxed);
        });
        let work = move || {
            let outcome = load.run();
            drop(ending);
            then();
            outcome
        };
        let thread = std::thread::Builder::new().name("dmafile".to_string());
        Ok(Self {
            thread: thread.spawn(work)?,
            shared,
            token,
            path: path.to_path_buf(),
        })
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
            if ended {
                return Ok(());
            }
        }
    }

    /// Waits for the end on the thread of the caller. An exception there, from a signal or from
    /// `progress`, stops the load.
    pub(crate) fn attend(
        self,
        py: Python<'_>,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Loaded> {
        if let Err(error) = self.watch(py, progress) {
            self.token.cancel();
            // Before the exception leaves, all that was made has been undone.
            py.detach(|| drop(self.thread.join()));
            return Err(error);
        }
        self.outcome(py)
    }

    fn outcome(self, py: Python<'_>) -> PyResult<Loaded> {
        match py.detach(|| self.thread.join()) {
            Ok(Ok(loaded)) => Ok(loaded),
            Ok(Err(error)) => Err(raise(py, &error, Some(&self.path))),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// A load in the background, for event loops.
#[pyclass(frozen, module = "dmafile._dmafile")]
pub(crate) struct Running {
    job: Mutex<Option<Job>>,
}

#[pymethods]
impl Running {
    /// Asks it to stop; returns at once.
    fn cancel(&self) {
        if let Some(job) = &*self.lock() {
            job.token.cancel();
        }
    }

    /// Bytes in place, and bytes in all.
    fn progress(&self) -> (u64, u64) {
        self.lock().as_ref().map_or((0, 0), Job::progress)
    }

    /// The buffer, or the exception that ended the load; waits for its end. Once only.
    fn result(&self, py: Python<'_>) -> PyResult<Buffer> {
        let job = self.lock().take();
        let job = job.ok_or_else(|| {
            pyo3::exceptions::PyRuntimeError::new_err("the result has been taken already")
        })?;
        job.outcome(py).map(Buffer::of)
    }
}

impl Running {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Job>> {
        self.job.lock().expect("no holder of this lock panics")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.cancel();
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
    let job = Job::start(load, &path, || ())?;
    job.attend(py, progress).map(Buffer::of)
}

/// Begins to load `path`, and calls `then` without arguments, from another thread, when it is
/// done.
#[pyfunction]
pub(crate) fn start(
    path: PathBuf,
    options: &Bound<'_, PyDict>,
    then: Py<PyAny>,
) -> PyResult<Running> {
    let load = request::apply(Load::new(&path), options, FILE)?;
    let then = move || {
        // An interpreter that shuts down waits for nobody.
        Python::try_attach(|py| {
            if let Err(error) = then.call0(py) {
                error.write_unraisable(py, Some(then.bind(py)));
            }
            drop(then);
        });
    };
    let job = Job::start(load, &path, then)?;
    Ok(Running {
        job: Mutex::new(Some(job)),
    })
}
