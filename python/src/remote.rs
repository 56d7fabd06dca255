//! What is loaded but is no file: URLs, and objects of Python.

use crate::call;
use crate::error::raise;
use crate::job::{Job, Work, as_dict};
use dmafile::internal::is_url;
use dmafile::{
    CancelToken, Error, Load, Model, ModelObject, ObjectReader, Origin, Progress, ReadBuf,
    RemoteObject, Verify,
};
use dmafile_record::{LoadedSnapshot, Snapshot, SnapshotLoad, StoredSnapshot};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyDict, PyMemoryView, PyString};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The most bytes that are asked for in one call.
const MOST: u64 = 8 << 20;

/// The URL that was given in place of a path.
pub(crate) fn url(path: &Path) -> Option<&str> {
    path.to_str().filter(|text| is_url(text))
}

/// A load of a path or a URL, or of an object of Python.
pub(crate) fn load(path: &Path, source: Option<&Bound<'_, PyAny>>) -> PyResult<Load> {
    if let Some(source) = source {
        return Ok(Load::of_object(Arc::new(PythonObject::new(source)?)));
    }
    Ok(match url(path) {
        None => Load::new(path),
        Some(url) => {
            let url = url.to_string();
            Load::of_object_from(move |cancel| open(&url, cancel))
        }
    })
}

/// A model by its path or URL.
pub(crate) fn open_model(path: &Path) -> dmafile::Result<Model> {
    match url(path) {
        None => Model::open(path),
        Some(url) => open_model_of(url),
    }
}

/// What those of these paths stand for that are URLs.
pub(crate) fn to_hold(
    py: Python<'_>,
    paths: &[PathBuf],
) -> PyResult<Vec<(PathBuf, Vec<ModelObject>)>> {
    let urls = paths.iter().filter_map(|path| Some((path, url(path)?)));
    urls.map(|(path, url)| {
        let objects = py.detach(|| objects(url));
        Ok((
            path.clone(),
            objects.map_err(|error| raise(py, &error, Some(path)))?,
        ))
    })
    .collect()
}

/// Saves to a store; returns the report.
pub(crate) fn save(
    py: Python<'_>,
    origin: Origin<'static>,
    url: &str,
    options: &Bound<'_, PyDict>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<Py<PyAny>> {
    refuse_those_of_files(py, options)?;
    let option = |name: &str| Ok::<_, PyErr>(options.get_item(name)?.filter(|one| !one.is_none()));
    if option("sync")?.is_some_and(|sync| sync.is_truthy().is_ok_and(|sync| !sync)) {
        return Err(of_files(py, "sync"));
    }
    let number = |name| {
        option(name)?
            .map(|value| value.extract::<u64>())
            .transpose()
    };
    let verify = option("verify")?.map(|text| text.extract::<String>());
    let verify = verify.transpose()?.map(|text| text.parse::<Verify>());
    let verify = verify
        .transpose()
        .map_err(|error| raise(py, &error, None))?;
    let (length, depth) = (number("length")?, number("queue_depth")?);
    let url = url.to_string();
    let path = PathBuf::from(&url);
    let save = RemoteWork::new(move |cancel, tell| {
        save_object(&origin, &url, (length, depth), verify, cancel, tell)
    });
    let saved = Job::start(py, save, &path, || ())?.attend(py, progress)?;
    as_dict(py, Ok(saved))
}

/// Refuses options that are about files, but for `sync`.
pub(crate) fn refuse_those_of_files(py: Python<'_>, options: &Bound<'_, PyDict>) -> PyResult<()> {
    for (name, default) in [
        ("offset", None),
        ("method", Some("auto")),
        ("io", Some("auto")),
        ("block", None),
    ] {
        let given = options.get_item(name)?.filter(|one| !one.is_none());
        if given.map(|value| value.to_string()).as_deref() != default {
            return Err(of_files(py, name));
        }
    }
    Ok(())
}

pub(crate) fn of_files(py: Python<'_>, option: &'static str) -> PyErr {
    raise(py, &Error::usage(option, "it is for saves to files"), None)
}

/// To be called with the progress.
type Tell = Box<dyn Fn(Progress) + Send + Sync>;

/// Work that is no single load, save or hold of the engine, but is cancelled and watched like one.
pub(crate) struct RemoteWork<F> {
    run: F,
    cancel: CancelToken,
    tell: Tell,
}

impl<F> RemoteWork<F> {
    pub(crate) fn new<O>(run: F) -> Self
    where
        F: FnOnce(CancelToken, Tell) -> dmafile::Result<O>,
    {
        Self {
            run,
            cancel: CancelToken::new(),
            tell: Box::new(|_| ()),
        }
    }
}

impl<F, O> Work for RemoteWork<F>
where
    F: FnOnce(CancelToken, Tell) -> dmafile::Result<O> + Send + 'static,
    O: Send + 'static,
{
    type Outcome = O;

    fn watched(self, cancel: CancelToken, tell: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        Self {
            cancel,
            tell: Box::new(tell),
            ..self
        }
    }

    fn run(self) -> dmafile::Result<O> {
        (self.run)(self.cancel, self.tell)
    }
}

/// Saves an object, of so many bytes and with so many parts at a time; returns the report in JSON.
#[cfg(feature = "remote")]
fn save_object(
    origin: &Origin<'static>,
    url: &str,
    (length, depth): (Option<u64>, Option<u64>),
    verify: Option<Verify>,
    cancel: CancelToken,
    tell: Tell,
) -> dmafile::Result<String> {
    let options = dmafile_remote::SaveOptions {
        length,
        verify,
        connections: depth.map(|depth| depth.try_into().unwrap_or(u32::MAX)),
        progress: Some(tell),
        cancel,
        ..dmafile_remote::SaveOptions::default()
    };
    let saved = dmafile_remote::Remote::default().save(origin, url, &options)?;
    Ok(serde_json::to_string(&saved).expect("a report is plain data"))
}

#[cfg(not(feature = "remote"))]
fn save_object(
    _: &Origin<'static>,
    _: &str,
    _: (Option<u64>, Option<u64>),
    _: Option<Verify>,
    _: CancelToken,
    _: Tell,
) -> dmafile::Result<String> {
    Err(unavailable())
}

/// Saves a snapshot to a store.
#[cfg(feature = "remote")]
pub(crate) fn save_snapshot(
    snapshot: Snapshot,
    url: &str,
    cancel: &CancelToken,
) -> dmafile::Result<StoredSnapshot> {
    dmafile_remote::Remote::default().save_snapshot(snapshot, url, cancel)
}

/// Loads a snapshot from a store.
#[cfg(feature = "remote")]
pub(crate) fn load_snapshot(
    load: SnapshotLoad,
    url: &str,
    cancel: &CancelToken,
) -> dmafile::Result<LoadedSnapshot> {
    let options = dmafile_remote::OpenOptions {
        cancel: cancel.clone(),
        ..dmafile_remote::OpenOptions::default()
    };
    let folder = dmafile_remote::Remote::new(options).open_folder(url)?;
    let folder = folder.ok_or_else(|| {
        Error::usage("path", "it names no folder").with_remedy("end the URL with a slash")
    })?;
    load.cancel(cancel.clone()).run_from(&folder)
}

#[cfg(not(feature = "remote"))]
pub(crate) fn save_snapshot(
    _: Snapshot,
    _: &str,
    _: &CancelToken,
) -> dmafile::Result<StoredSnapshot> {
    Err(unavailable())
}

#[cfg(not(feature = "remote"))]
pub(crate) fn load_snapshot(
    _: SnapshotLoad,
    _: &str,
    _: &CancelToken,
) -> dmafile::Result<LoadedSnapshot> {
    Err(unavailable())
}

/// Brings what a URL stands for into a cache; returns where it is there.
#[pyfunction]
pub(crate) fn fetch(
    py: Python<'_>,
    url: PathBuf,
    cache: PathBuf,
    limit: Option<u64>,
    offline: bool,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<PathBuf> {
    let wanted = url.clone();
    let fetch = RemoteWork::new(move |cancel, tell| {
        fetch_into(
            &wanted.to_string_lossy(),
            cache,
            limit,
            offline,
            cancel,
            &tell,
        )
    });
    Job::start(py, fetch, &url, || ())?.attend(py, progress)
}

#[cfg(feature = "remote")]
fn fetch_into(
    url: &str,
    folder: PathBuf,
    limit: Option<u64>,
    offline: bool,
    cancel: CancelToken,
    tell: &Tell,
) -> dmafile::Result<PathBuf> {
    let options = dmafile_remote::OpenOptions {
        cache: Some(dmafile_remote::CacheOptions { folder, limit }),
        offline,
        cancel,
        ..dmafile_remote::OpenOptions::default()
    };
    dmafile_remote::Remote::new(options).fetch(url, tell)
}

#[cfg(not(feature = "remote"))]
fn fetch_into(
    _: &str,
    _: PathBuf,
    _: Option<u64>,
    _: bool,
    _: CancelToken,
    _: &Tell,
) -> dmafile::Result<PathBuf> {
    Err(unavailable())
}

#[cfg(feature = "remote")]
fn objects(url: &str) -> dmafile::Result<Vec<ModelObject>> {
    dmafile_remote::Remote::default().open_all(url)
}

#[cfg(feature = "remote")]
fn open(url: &str, cancel: &CancelToken) -> dmafile::Result<Arc<dyn RemoteObject>> {
    let options = dmafile_remote::OpenOptions {
        cancel: cancel.clone(),
        ..dmafile_remote::OpenOptions::default()
    };
    dmafile_remote::Remote::new(options).open(url)
}

#[cfg(feature = "remote")]
fn open_model_of(url: &str) -> dmafile::Result<Model> {
    dmafile_remote::Remote::default().open_model(url)
}

#[cfg(not(feature = "remote"))]
fn unavailable() -> dmafile::Error {
    let why = "a part of dmafile does that which is not installed";
    dmafile::Error::new("cannot open URLs", why).with_remedy("pip install 'dmafile[remote]'")
}

#[cfg(not(feature = "remote"))]
fn open(_: &str, _: &CancelToken) -> dmafile::Result<Arc<dyn RemoteObject>> {
    Err(unavailable())
}

#[cfg(not(feature = "remote"))]
fn objects(_: &str) -> dmafile::Result<Vec<ModelObject>> {
    Err(unavailable())
}

#[cfg(not(feature = "remote"))]
fn open_model_of(_: &str) -> dmafile::Result<Model> {
    Err(unavailable())
}

/// An object with `size` and `read_into(offset, memory)`.
struct PythonObject {
    read_into: Py<PyAny>,
    name: String,
    size: u64,
}

impl PythonObject {
    fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let size: u64 = object.getattr("size")?.extract()?;
        let read_into = object.getattr("read_into")?.unbind();
        let name = match object.getattr("name") {
            Ok(name) if name.is_instance_of::<PyString>() => name.extract()?,
            _ => object.get_type().name()?.extract()?,
        };
        if i64::try_from(size).is_err() {
            return Err(PyValueError::new_err("the size of the source is too large"));
        }
        Ok(Self {
            read_into,
            name,
            size,
        })
    }
}

impl RemoteObject for PythonObject {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn reader(&self) -> io::Result<Box<dyn ObjectReader + '_>> {
        Ok(Box::new(PythonReader(self)))
    }
}

struct PythonReader<'a>(&'a PythonObject);

impl ObjectReader for PythonReader<'_> {
    fn read(&mut self, offset: u64, into: &mut ReadBuf<'_>) -> io::Result<()> {
        while into.remaining() > 0 {
            into.check()?;
            let length = into.remaining().min(MOST) as usize;
            let at = offset + into.filled();
            let read = call::on_thread(|py| {
                let part = || {
                    // Memory of Python's own: the object may keep a view of it for longer than the buffer exists.
                    let block = PyByteArray::new_with(py, length, |_| Ok(()))?;
                    let view = PyMemoryView::from(&block)?;
                    let got = call::call(self.0.read_into.bind(py), (at, view))?;
                    let got = if got.is_none() {
                        length
                    } else {
                        got.extract()?
                    };
                    if got == 0 || got > length {
                        let why = format!("read_into returned {got} for {length} bytes");
                        return Err(PyValueError::new_err(why));
                    }
                    Ok((block, got))
                };
                let (block, got) = part().map_err(|error| failed(py, &error))?;
                // SAFETY: no Python code runs meanwhile, which could change the block or its length.
                let bytes = unsafe { block.as_bytes() };
                into.copy(bytes.get(..got).unwrap_or_default())
            });
            read.unwrap_or_else(|| Err(io::Error::other("the interpreter shuts down")))?;
        }
        Ok(())
    }
}

/// An exception as an error of a reader.
fn failed(py: Python<'_>, error: &PyErr) -> io::Error {
    let value = error.value(py);
    if error.is_instance_of::<PyOSError>(py)
        && let Ok(errno) = value.getattr("errno").and_then(|errno| errno.extract())
    {
        return io::Error::from_raw_os_error(errno);
    }
    io::Error::other(format!("{}: {value}", error.get_type(py)))
}
