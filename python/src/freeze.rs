//! Processes whose memory comes from a hold, frozen to a folder and thawed from it.

use crate::job::{Job, as_dict, work};
use crate::recorder::seconds;
use dmafile_freeze::{Freeze, Frozen, Thaw};
use pyo3::prelude::*;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

work!(Freeze => Frozen, quiet);
work!(Thaw => dmafile_freeze::Thawed, quiet);

/// Freezes processes to the folder `to`; returns what is in it.
#[pyfunction]
pub(crate) fn freeze(
    py: Python<'_>,
    pids: Vec<u32>,
    to: PathBuf,
    sockets: Vec<PathBuf>,
    leave_running: bool,
    options: Vec<OsString>,
) -> PyResult<Py<PyAny>> {
    let freeze = Freeze::of(pids)
        .to(&to)
        .leave_running(leave_running)
        .options(options);
    let freeze = sockets.into_iter().fold(freeze, Freeze::socket);
    let frozen = Job::start(py, freeze, &to, || ())?.attend(py, None)?;
    as_dict(py, serde_json::to_string(&frozen))
}

/// Keeps this process counted as a taker of the memory that was taken from holds.
#[pyclass(frozen, module = "dmafile._dmafile")]
pub(crate) struct Kept {
    _thawed: Mutex<dmafile_freeze::Thawed>,
}

/// Thaws what is in a folder. Returns the process IDs, the numbers of holds that memory was taken from and of
/// files that were loaded, and what keeps the memory.
#[pyfunction]
pub(crate) fn thaw(
    py: Python<'_>,
    folder: PathBuf,
    wait: &Bound<'_, PyAny>,
    options: Vec<OsString>,
) -> PyResult<(Vec<u32>, usize, usize, Kept)> {
    let wait = seconds(wait)?.unwrap_or(Duration::MAX);
    let thaw = Thaw::of(&folder).wait(wait).options(options);
    let thawed = Job::start(py, thaw, &folder, || ())?.attend(py, None)?;
    let (pids, taken, loaded) = (thawed.pids().to_vec(), thawed.taken(), thawed.loaded());
    let kept = Kept {
        _thawed: Mutex::new(thawed),
    };
    Ok((pids, taken, loaded, kept))
}
