//! Files that are held in memory for other processes, and taken from them.

use crate::buffer::Buffer;
use crate::error::{Keywords, raise, usage};
use crate::job::{Job, Work, as_dict, work};
use crate::model::Model;
use crate::recorder::seconds;
use crate::remote;
use crate::request::{self, SOURCE};
use dmafile::{CancelToken, Error, Progress};
use dmafile_hold::{Found, HeldFile, Hold, Shared, Take};
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::json;
use std::ffi::OsString;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

impl Work for Hold {
    type Outcome = dmafile_hold::Holder;

    fn watched(self, token: CancelToken, tell: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        self.cancel(token).progress(tell)
    }

    fn run(self) -> Result<dmafile_hold::Holder, Error> {
        self.start()
    }
}

work!(Shared => dmafile_hold::Held);
work!(Take => dmafile_hold::Held, quiet);

/// Files that this process holds, and that a thread serves until `stop` or the deletion of this object.
///
/// As a context manager it stops at the end of the block. Processes that have taken the memory keep it. In a
/// forked child it does nothing.
#[pyclass(frozen, weakref, module = "dmafile")]
pub(crate) struct Holder {
    holder: Mutex<Option<dmafile_hold::Holder>>,
    /// The name of the hold.
    #[pyo3(get)]
    name: String,
    /// The path of its socket.
    #[pyo3(get)]
    socket: PathBuf,
    files: String,
}

impl Holder {
    fn lock(&self) -> MutexGuard<'_, Option<dmafile_hold::Holder>> {
        self.holder.lock().expect("no holder of this lock panics")
    }
}

#[pymethods]
impl Holder {
    /// The held files: a dict for each, as in the `files` of `dmafile.holds()`, as they were when the hold
    /// began.
    #[getter]
    fn files(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        as_dict(py, Ok(self.files.clone()))
    }

    /// True if it is serving: it has not been stopped, released, or idle for too long.
    #[getter]
    fn serving(&self) -> bool {
        self.lock()
            .as_ref()
            .is_some_and(dmafile_hold::Holder::is_serving)
    }

    /// Ends the hold. Calling it again does nothing.
    fn stop(&self, py: Python<'_>) {
        let holder = self.lock().take();
        py.detach(|| drop(holder));
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.stop(py);
    }

    fn __repr__(&self) -> String {
        let state = if self.serving() { "" } else { " stopped" };
        let (name, socket) = (&self.name, self.socket.display());
        format!("<dmafile.Holder name={name} socket={socket}{state}>")
    }
}

/// Loads `paths` and serves them. `how` has the options of the hold, `options` those of each load.
#[pyfunction]
pub(crate) fn hold(
    py: Python<'_>,
    paths: Vec<PathBuf>,
    how: &Bound<'_, PyDict>,
    options: &Bound<'_, PyDict>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<Holder> {
    let mut hold = Hold::of(&paths).names(&Keywords);
    for (path, objects) in remote::to_hold(py, &paths)? {
        hold = hold.objects(path, objects);
    }
    for (name, value) in how {
        let name = name.extract::<String>()?;
        if value.is_none() {
            continue;
        }
        hold = match name.as_str() {
            "name" => hold.name(value.extract::<String>()?),
            "socket" => hold.socket(value.extract::<PathBuf>()?),
            "to" => hold.to(request::kind(&value)?),
            "pages" => hold.pages(request::word(&value)?),
            "verify" => hold.verify(request::word(&value)?),
            "mode" => hold.mode(number(&name, &value)?),
            "group" => hold.group(number(&name, &value)?),
            "writable" => hold.writable(value.extract()?),
            "idle" => match seconds(&value)? {
                Some(most) => hold.idle(most),
                None => hold,
            },
            "folder" => hold.folder(value.extract::<PathBuf>()?),
            "replace" => hold.replace(value.extract()?),
            _ => return Err(unknown(&name)),
        };
    }
    let hold = hold.each(request::tuning(options, SOURCE)?);
    let holder = Job::start(py, hold, first(&paths), || ())?.attend(py, progress)?;
    Ok(Holder {
        name: holder.name().to_string(),
        socket: holder.socket().to_path_buf(),
        files: serde_json::to_string(holder.files()).expect("plain data"),
        holder: Mutex::new(Some(holder)),
    })
}

/// What was taken: name, socket, process and user of the holder, and the name, buffer and description of each
/// file.
type Taken = (
    String,
    PathBuf,
    (u32, u32),
    Vec<(OsString, Buffer, Py<PyAny>)>,
);

/// Takes what is held under a name.
#[pyfunction]
pub(crate) fn take(
    py: Python<'_>,
    name: String,
    socket: Option<PathBuf>,
    wait: &Bound<'_, PyAny>,
) -> PyResult<Taken> {
    let mut take =
        dmafile_hold::Held::take(name).wait(seconds(wait)?.unwrap_or(std::time::Duration::MAX));
    if let Some(socket) = socket {
        take = take.socket(socket);
    }
    let held = Job::start(py, take, Path::new(""), || ())?.attend(py, None)?;
    taken(py, held)
}

/// What processes share: files, or all of a model that is open.
#[derive(FromPyObject)]
pub(crate) enum Wanted {
    Model(Py<Model>),
    Paths(Vec<PathBuf>),
}

impl Wanted {
    fn path(&self) -> &Path {
        match self {
            Self::Model(model) => model.get().path(),
            Self::Paths(paths) => first(paths),
        }
    }

    fn shared(&self, py: Python<'_>) -> PyResult<Shared> {
        let paths = match self {
            Self::Model(model) => return Ok(model.get().shared()),
            Self::Paths(paths) => paths,
        };
        let mut shared = Shared::of(paths);
        for (path, objects) in remote::to_hold(py, paths)? {
            shared = shared.objects(path, objects);
        }
        Ok(shared)
    }
}

/// Takes what is wanted from another process of this user that has it in memory, or loads it.
#[pyfunction]
pub(crate) fn shared(
    py: Python<'_>,
    wanted: Wanted,
    how: &Bound<'_, PyDict>,
    options: &Bound<'_, PyDict>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<Taken> {
    let shared = of_shared(&wanted, how, options)?;
    let held = Job::start(py, shared, wanted.path(), || ())?.attend(py, progress)?;
    taken(py, held)
}

/// Takes what is wanted from another process of this user that has it in memory. If there is none, returns a
/// `Vacant`, which keeps others from loading it.
#[pyfunction]
pub(crate) fn find_shared(
    py: Python<'_>,
    wanted: Wanted,
    how: &Bound<'_, PyDict>,
    options: &Bound<'_, PyDict>,
) -> PyResult<(Option<Taken>, Option<Vacant>)> {
    let find = Find(of_shared(&wanted, how, options)?);
    match Job::start(py, find, wanted.path(), || ())?.attend(py, None)? {
        Found::Held(held) => Ok((Some(taken(py, held)?), None)),
        Found::Vacant(vacant) => {
            let vacant = Mutex::new(Some(vacant));
            Ok((None, Some(Vacant { vacant })))
        }
    }
}

/// The folder of this user's sockets, created if necessary.
#[pyfunction]
pub(crate) fn place(py: Python<'_>) -> PyResult<PathBuf> {
    Shared::place().map_err(|error| raise(py, &error, None))
}

fn of_shared(
    wanted: &Wanted,
    how: &Bound<'_, PyDict>,
    options: &Bound<'_, PyDict>,
) -> PyResult<Shared> {
    let mut shared = wanted.shared(how.py())?.names(&Keywords);
    for (name, value) in how {
        let name = name.extract::<String>()?;
        if name == "wait" {
            shared = shared.wait(seconds(&value)?.unwrap_or(std::time::Duration::MAX));
            continue;
        }
        if value.is_none() {
            continue;
        }
        shared = match name.as_str() {
            "folder" => shared.folder(value.extract::<PathBuf>()?),
            "to" => shared.to(request::kind(&value)?),
            "pages" => shared.pages(request::word(&value)?),
            "verify" => shared.verify(request::word(&value)?),
            "writable" => shared.writable(value.extract()?),
            _ => return Err(unknown(&name)),
        };
    }
    Ok(shared.each(request::tuning(options, SOURCE)?))
}

/// Files that no process has in memory yet.
#[pyclass(frozen, module = "dmafile._dmafile")]
pub(crate) struct Vacant {
    vacant: Mutex<Option<dmafile_hold::Vacant>>,
}

impl Vacant {
    fn lock(&self) -> MutexGuard<'_, Option<dmafile_hold::Vacant>> {
        self.vacant.lock().expect("no holder of this lock panics")
    }
}

#[pymethods]
impl Vacant {
    /// The path and size of each file.
    fn files(&self) -> Vec<(PathBuf, u64)> {
        let vacant = self.lock();
        let files = vacant.iter().flat_map(dmafile_hold::Vacant::files);
        files
            .map(|(path, bytes)| (path.to_path_buf(), bytes))
            .collect()
    }

    /// Takes a memfd with the bytes of each file, as descriptors that the caller keeps. Only once.
    fn fill(&self, py: Python<'_>, fds: Vec<i32>) -> PyResult<Taken> {
        let dup = |number| {
            // SAFETY: it is borrowed for the time of this copy, which fails for one that is not open.
            unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned()
        };
        let memory = fds.into_iter().map(dup).collect::<Result<Vec<_>, _>>()?;
        let vacant = self
            .lock()
            .take()
            .ok_or_else(|| PyRuntimeError::new_err("it was already filled or closed"))?;
        let first = vacant.files().next();
        let first = first.map_or(PathBuf::new(), |(path, _)| path.to_path_buf());
        let held = Job::start(py, Fill(vacant, memory), &first, || ())?.attend(py, None)?;
        taken(py, held)
    }

    /// Lets other processes load them. Calling it again does nothing.
    fn close(&self) {
        drop(self.lock().take());
    }
}

/// A search for existing memory.
struct Find(Shared);

impl Work for Find {
    type Outcome = Found;

    fn watched(self, token: CancelToken, _: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        Self(self.0.cancel(token))
    }

    fn run(self) -> Result<Found, Error> {
        self.0.find()
    }
}

/// Files, and memory that contains their bytes.
struct Fill(dmafile_hold::Vacant, Vec<OwnedFd>);

impl Work for Fill {
    type Outcome = dmafile_hold::Held;

    fn watched(self, token: CancelToken, _: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        Self(self.0.cancel(token), self.1)
    }

    fn run(self) -> Result<dmafile_hold::Held, Error> {
        self.0.fill(self.1)
    }
}

/// The sockets to list.
struct List {
    socket: Option<PathBuf>,
    token: CancelToken,
}

impl Work for List {
    type Outcome = Vec<dmafile_hold::Holding>;

    fn watched(self, token: CancelToken, _: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        Self { token, ..self }
    }

    fn run(self) -> Result<Vec<dmafile_hold::Holding>, Error> {
        dmafile_hold::holds(self.socket.as_deref(), &self.token)
    }
}

/// Lists what is held at one socket, or at all of them, as a list of dicts.
#[pyfunction]
pub(crate) fn holds(py: Python<'_>, socket: Option<PathBuf>) -> PyResult<Py<PyAny>> {
    let path = socket.clone().unwrap_or_default();
    let token = CancelToken::new();
    let all = Job::start(py, List { socket, token }, &path, || ())?.attend(py, None)?;
    as_dict(py, serde_json::to_string(&all))
}

/// The hold to end.
struct Release {
    name: String,
    socket: Option<PathBuf>,
    token: CancelToken,
}

impl Work for Release {
    type Outcome = ();

    fn watched(self, token: CancelToken, _: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        Self { token, ..self }
    }

    fn run(self) -> Result<(), Error> {
        dmafile_hold::release(&self.name, self.socket.as_deref(), &self.token)
    }
}

/// Ends a hold.
#[pyfunction]
pub(crate) fn release(py: Python<'_>, name: String, socket: Option<PathBuf>) -> PyResult<()> {
    let path = socket.clone().unwrap_or_default();
    let token = CancelToken::new();
    Job::start(
        py,
        Release {
            name,
            socket,
            token,
        },
        &path,
        || (),
    )?
    .attend(py, None)
}

fn taken(py: Python<'_>, held: dmafile_hold::Held) -> PyResult<Taken> {
    let (name, socket, holder) = (
        held.name().to_string(),
        held.socket().to_path_buf(),
        held.holder(),
    );
    let files = held.into_files().into_iter().map(|file: HeldFile| {
        let mut info = json!(file.info);
        info["huge"] = json!(file.huge);
        let info = as_dict(py, serde_json::to_string(&info))?;
        Ok((file.info.file_name(), Buffer::taken(file), info))
    });
    Ok((name, socket, holder, files.collect::<PyResult<_>>()?))
}

fn first(paths: &[PathBuf]) -> &Path {
    paths.first().map_or(Path::new(""), PathBuf::as_path)
}

fn number(name: &str, value: &Bound<'_, PyAny>) -> PyResult<u32> {
    let size = request::size(name, value)?;
    u32::try_from(size).map_err(|_| {
        let text = format!("{name}: {size} is out of range: 0 to {}", u32::MAX);
        usage(value.py(), &text)
    })
}

fn unknown(name: &str) -> PyErr {
    PyTypeError::new_err(format!("'{name}' is not an option here"))
}
