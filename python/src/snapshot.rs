//! Snapshots: several sources, saved and loaded together.

use crate::buffer::Buffer;
use crate::error::{Keywords, raise, usage};
use crate::job::{Job, Source, as_dict, work};
use crate::remote::{self, RemoteWork};
use crate::request::{self, SOURCE};
use dmafile::Verify;
use dmafile_record::{LoadedSnapshot, Snapshot, SnapshotLoad, SnapshotReport};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::BTreeMap;
use std::path::PathBuf;

work!(Snapshot => SnapshotReport);
work!(SnapshotLoad => LoadedSnapshot);

/// Saves sources to the folder `path`: the name of each, what it is, and its number of bytes. `options`
/// apply to each source.
#[pyfunction]
pub(crate) fn save_snapshot(
    py: Python<'_>,
    sources: Vec<(String, Source, Option<u64>)>,
    path: PathBuf,
    verify: String,
    sync: bool,
    options: &Bound<'_, PyDict>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<Py<PyAny>> {
    let verify: Verify = verify.parse().map_err(|error| raise(py, &error, None))?;
    if verify.expected.is_some() || verify.stored {
        return Err(usage(
            py,
            "verify: a snapshot has a digest for each source: name an algorithm without =HEX",
        ));
    }
    if remote::url(&path).is_some() {
        remote::refuse_those_of_files(py, options)?;
        if !sync {
            return Err(remote::of_files(py, "sync"));
        }
    }
    let tune = request::save_tuning(options)?;
    let mut snapshot = Snapshot::new(&path)
        .names(&Keywords)
        .verify(verify.algorithm)
        .sync(sync);
    let mut lengths = BTreeMap::new();
    for (name, source, length) in sources {
        if let Some(length) = length {
            lengths.insert(name.clone(), length);
        }
        snapshot = snapshot.add(name, source.origin(py)?);
    }
    let snapshot = snapshot.each(move |name, save| match lengths.get(name) {
        Some(length) => tune(save).length(*length),
        None => tune(save),
    });
    let report = match remote::url(&path) {
        None => {
            let saved = Job::start(py, snapshot, &path, || ())?.attend(py, progress)?;
            serde_json::to_string(&saved)
        }
        Some(url) => {
            let url = url.to_string();
            let save = RemoteWork::new(move |cancel, tell| {
                remote::save_snapshot(snapshot.progress(tell), &url, &cancel)
            });
            let saved = Job::start(py, save, &path, || ())?.attend(py, progress)?;
            serde_json::to_string(&saved)
        }
    };
    as_dict(py, report)
}

/// Loads the snapshot in the folder `path`, each source with the given options; returns names and buffers.
#[pyfunction]
pub(crate) fn load_snapshot(
    py: Python<'_>,
    path: PathBuf,
    options: &Bound<'_, PyDict>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<Vec<(String, Buffer)>> {
    let tune = request::tuning(options, SOURCE)?;
    let load = SnapshotLoad::new(&path).names(&Keywords);
    let load = load.each(move |_, load| tune(load));
    let loaded = match remote::url(&path) {
        None => Job::start(py, load, &path, || ())?.attend(py, progress)?,
        Some(url) => {
            let url = url.to_string();
            let load = RemoteWork::new(move |cancel, tell| {
                remote::load_snapshot(load.progress(tell), &url, &cancel)
            });
            Job::start(py, load, &path, || ())?.attend(py, progress)?
        }
    };
    let sources = loaded.sources.into_iter().zip(&loaded.report.sources);
    let sources = sources.map(|(source, report)| {
        let buffer = Buffer::of_source(source.buffer, report.report.as_ref());
        (source.name, buffer)
    });
    Ok(sources.collect())
}
