//! Models: named tensors, loaded together or one by one.

use crate::buffer::Buffer;
use crate::error::{raise, unsound};
use crate::job::{Job, Running};
use crate::remote;
use crate::request::{self, MODEL, SOURCE};
use dmafile::format::{Dtype, Table, Value};
use dmafile::{Kind, Load, Pattern, SMALL_READ, Tensor};
use dmafile_hold::Shared;
use pyo3::exceptions::{PyKeyError, PyNotImplementedError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::{PyByteArray, PyBytes, PyDict, PyInt, PyList, PyString, PyTuple};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

/// The headers of a model; its files stay open.
#[pyclass(frozen, module = "dmafile._dmafile")]
pub(crate) struct Model {
    model: dmafile::Model,
    path: PathBuf,
}

#[pymethods]
impl Model {
    /// From a path, or from a list of files.
    #[new]
    fn new(py: Python<'_>, paths: Paths) -> PyResult<Self> {
        let opened = py.detach(|| match &paths {
            Paths::One(path) => remote::open_model(path),
            Paths::Several(files) => dmafile::Model::open_files(files),
        });
        let path = match paths {
            Paths::One(path) => path,
            Paths::Several(files) => files.into_iter().next().unwrap_or_default(),
        };
        match opened {
            Ok(model) => Ok(Self { model, path }),
            Err(error) => Err(unsound(py, &error, Some(&path))),
        }
    }

    /// The headers of a model in memory: its name, and for each file its name, its buffer, and its
    /// tensors that do not count.
    #[staticmethod]
    fn of_buffers(
        py: Python<'_>,
        name: PathBuf,
        files: Vec<(PathBuf, PyRef<'_, Buffer>, Vec<String>)>,
    ) -> PyResult<Self> {
        let shares = files
            .iter()
            .map(|(path, buffer, without)| Ok((path, buffer.share(py)?, without)));
        let shares = shares.collect::<PyResult<Vec<_>>>()?;
        let opened = py.detach(|| {
            let files = shares
                .iter()
                .map(|(path, held, without)| (path.as_path(), held.buffer(), &without[..]));
            dmafile::Model::of_buffers(&name, files)
        });
        match opened {
            Ok(model) => Ok(Self { model, path: name }),
            Err(error) => Err(unsound(py, &error, None)),
        }
    }

    /// Where it is, as messages say it.
    #[getter]
    fn name(&self) -> String {
        self.model.path().display().to_string()
    }

    /// The offset of a tensor, as in the rows of `table`.
    fn place(&self, name: &str) -> PyResult<u64> {
        Ok(self.tensor(name)?.at)
    }

    /// `safetensors` or `gguf`.
    #[getter]
    fn format(&self) -> String {
        self.model.format().to_string()
    }

    /// Everything in the headers besides the tensors; None if there is nothing.
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        if !self.model.has_metadata() {
            return Ok(None);
        }
        let all = PyDict::new(py);
        for (name, value) in self.model.metadata() {
            all.set_item(name, python(py, value)?)?;
        }
        Ok(Some(all))
    }

    /// The names of the tensors, in the order of their bytes.
    fn names(&self) -> Vec<&str> {
        let tensors = self.model.tensors().iter();
        tensors.map(|tensor| tensor.name.as_str()).collect()
    }

    /// A row `(name, dtype, shape, at, nbytes)` for each tensor, or for those that match `patterns`,
    /// in the order of their bytes. A dtype without an equivalent in Python becomes U8; F4 is given in
    /// bytes.
    #[pyo3(signature = (patterns=None))]
    fn table<'py>(
        &self,
        py: Python<'py>,
        patterns: Option<Vec<String>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let mut dtypes = BTreeMap::new();
        let chosen: Vec<&Tensor> = match patterns {
            None => self.model.tensors().iter().collect(),
            Some(patterns) => self
                .model
                .matching(&parsed(py, patterns)?)
                .map_err(|error| raise(py, &error, Some(&self.path)))?,
        };
        let rows = chosen.into_iter().map(|tensor| {
            let (dtype, shape) = view(tensor.dtype, &tensor.shape, tensor.bytes);
            let dtype = dtypes
                .entry(dtype.name())
                .or_insert_with_key(|name| PyString::intern(py, name));
            let shape = match shape {
                Some(shape) => PyTuple::new(py, shape)?,
                None => PyTuple::new(py, &tensor.shape)?,
            };
            (&tensor.name, &*dtype, shape, tensor.at, tensor.bytes).into_pyobject(py)
        });
        PyList::new(py, rows.collect::<PyResult<Vec<_>>>()?)
    }

    /// A tensor's dtype and shape, as in the header.
    fn described<'py>(
        &self,
        py: Python<'py>,
        name: &str,
    ) -> PyResult<(&'static str, Bound<'py, PyTuple>)> {
        let tensor = self.tensor(name)?;
        Ok((tensor.dtype.name(), PyTuple::new(py, &tensor.shape)?))
    }

    /// A tensor's dtype, shape and size in bytes, as it is viewed.
    fn viewed<'py>(
        &self,
        py: Python<'py>,
        name: &str,
    ) -> PyResult<(&'static str, Bound<'py, PyTuple>, u64)> {
        let tensor = self.tensor(name)?;
        let (dtype, shape) = view(tensor.dtype, &tensor.shape, tensor.bytes);
        let shape = PyTuple::new(py, shape.as_ref().unwrap_or(&tensor.shape))?;
        Ok((dtype.name(), shape, tensor.bytes))
    }

    /// Loads all files, or the tensors that match `patterns`, into one private buffer.
    fn load(
        &self,
        py: Python<'_>,
        patterns: Option<Vec<String>>,
        options: &Bound<'_, PyDict>,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Buffer> {
        let load = self.load_of(py, patterns)?;
        self.run(py, Ok(load), options, progress)
    }

    /// A tuple `(path, at, nbytes)` for each file: its offset, counted as in `table`, and its size.
    fn shards(&self) -> Vec<(PathBuf, u64, u64)> {
        let shards = self.model.shards().into_iter();
        shards
            .map(|shard| (shard.file, shard.at, shard.bytes))
            .collect()
    }

    /// For each object, its version, or None if it has none; None for files.
    fn versions(&self) -> Option<Vec<Option<String>>> {
        let objects = self.model.objects().into_iter();
        let versions: Vec<_> = objects.map(|(object, _)| object.version()).collect();
        (!versions.is_empty()).then_some(versions)
    }

    /// For each file, the tensors in it that do not count: the index names another file for them.
    fn superseded(&self) -> Vec<Vec<&str>> {
        let files = 0..self.model.shards().len();
        files
            .map(|number| self.model.superseded(number).collect())
            .collect()
    }

    /// The size of a load of all files in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        let shards = self.model.shards();
        shards.last().map_or(0, |last| last.at + last.bytes)
    }

    /// Starts to load `nbytes` bytes, at least one, from offset `at` on, counted as in `table`, into
    /// private memory, unless the options say where `to`; calls `then` without arguments, from another
    /// thread, when it is done.
    fn start(
        &self,
        py: Python<'_>,
        at: u64,
        nbytes: u64,
        options: &Bound<'_, PyDict>,
        then: Py<PyAny>,
    ) -> PyResult<Running> {
        let load = self.model.load().to(Kind::Anon).offset(at).length(nbytes);
        Running::start(py, request::apply(load, options, SOURCE)?, &self.path, then)
    }

    /// Starts the digests of all files, as `verify` says.
    fn digests(&self, py: Python<'_>, verify: &Bound<'_, PyAny>) -> PyResult<Digests> {
        let digests = self.model.digests(&request::word(verify)?);
        match digests {
            Ok(digests) => Ok(Digests {
                digests: Mutex::new(Some(digests)),
                path: self.path.clone(),
            }),
            Err(error) => Err(raise(py, &error, Some(&self.path))),
        }
    }

    /// Loads `nbytes` bytes of a tensor, at least one, from `offset` on, into private memory: a
    /// buffer, or a bytearray if it is small and no options are set.
    fn load_part<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        offset: u64,
        nbytes: u64,
        options: &Bound<'py, PyDict>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let tensor = self.tensor(name)?;
        if nbytes > SMALL_READ || !options.is_empty() {
            let load = self.model.load_part(tensor, offset, nbytes);
            let buffer = self.run(py, load, options, None)?;
            return Ok(Bound::new(py, buffer)?.into_any());
        }
        let read = |into: &mut [u8]| {
            let read = py.detach(|| self.model.read_part(tensor, offset, into));
            read.map_err(|error| raise(py, &error, Some(&self.path)))
        };
        Ok(PyByteArray::new_with(py, nbytes as usize, read)?.into_any())
    }
}

/// Where a model is.
#[derive(FromPyObject)]
pub(crate) enum Paths {
    One(PathBuf),
    Several(Vec<PathBuf>),
}

/// The digests of a model's files, computed over bytes that are loaded piece by piece.
#[pyclass(frozen, module = "dmafile._dmafile")]
pub(crate) struct Digests {
    digests: Mutex<Option<dmafile::Digests>>,
    path: PathBuf,
}

#[pymethods]
impl Digests {
    /// Adds the next bytes.
    fn update(&self, py: Python<'_>, buffer: &Buffer) -> PyResult<()> {
        let held = buffer.share(py)?;
        let mut digests = self.lock(py);
        let digests = digests.as_mut().ok_or_else(finished)?;
        py.detach(|| held.each(|bytes| digests.update(bytes)))
            .map_err(|error| raise(py, &error, Some(&self.path)))
    }

    /// Compares the digests with the expected ones, if there are any. Only once.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        let digests = self.lock(py).take().ok_or_else(finished)?;
        match digests.finish() {
            Ok(_) => Ok(()),
            Err(error) => Err(raise(py, &error, Some(&self.path))),
        }
    }
}

impl Digests {
    fn lock(&self, py: Python<'_>) -> MutexGuard<'_, Option<dmafile::Digests>> {
        let locked = self.digests.lock_py_attached(py);
        locked.expect("no holder of this lock panics")
    }
}

fn finished() -> PyErr {
    PyRuntimeError::new_err("the digests have been taken already")
}

impl Model {
    fn tensor(&self, name: &str) -> PyResult<&Tensor> {
        let tensor = self.model.tensor(name);
        tensor.ok_or_else(|| PyKeyError::new_err(name.to_string()))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// All of its files, to be shared: the objects that were opened, or files by their paths.
    pub(crate) fn shared(&self) -> Shared {
        let objects = self.model.objects();
        if objects.is_empty() {
            let shards = self.model.shards().into_iter();
            return Shared::of(shards.map(|shard| shard.file));
        }
        let path = self.model.path();
        Shared::of([path]).objects(path, objects)
    }

    /// The load of all files, or of the tensors that `patterns` name.
    pub(crate) fn load_of(&self, py: Python<'_>, patterns: Option<Vec<String>>) -> PyResult<Load> {
        match patterns {
            None => Ok(self.model.load()),
            Some(patterns) => {
                let load = self.model.load_tensors(&parsed(py, patterns)?);
                load.map_err(|error| raise(py, &error, Some(&self.path)))
            }
        }
    }

    fn run(
        &self,
        py: Python<'_>,
        load: dmafile::Result<Load>,
        options: &Bound<'_, PyDict>,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Buffer> {
        let load = load.map_err(|error| raise(py, &error, Some(&self.path)))?;
        let load = request::apply(load.to(Kind::Anon), options, MODEL)?;
        let job = Job::start(py, load, &self.path, || ())?;
        job.attend(py, progress).map(Buffer::of)
    }
}

fn parsed(py: Python<'_>, patterns: Vec<String>) -> PyResult<Vec<Pattern>> {
    let parsed = patterns.into_iter().map(|text| text.parse());
    let parsed = parsed.collect::<dmafile::Result<_>>();
    parsed.map_err(|error| raise(py, &error, None))
}

/// A row as in `Model::table` for each tensor of a file of `size` bytes. `head` is the start of the
/// file and includes all of its header. dtypes and shapes are as `viewed`, or as in the header.
#[pyfunction]
pub(crate) fn table<'py>(
    py: Python<'py>,
    mut head: &[u8],
    size: u64,
    viewed: bool,
) -> PyResult<Bound<'py, PyList>> {
    let table = Table::read(&mut head, size).map_err(|error| unsound(py, &error, None))?;
    let rows = table.tensors.iter().map(|tensor| {
        let (dtype, shape) = if viewed {
            view(tensor.dtype, &tensor.shape, tensor.bytes)
        } else {
            (tensor.dtype, None)
        };
        let shape = PyTuple::new(py, shape.as_ref().unwrap_or(&tensor.shape))?;
        (
            &tensor.name,
            dtype.name(),
            shape,
            tensor.offset,
            tensor.bytes,
        )
            .into_pyobject(py)
    });
    PyList::new(py, rows.collect::<PyResult<Vec<_>>>()?)
}

/// The dtype and, if it differs, the shape of the array that shows a tensor. Blocks of several
/// elements, and elements narrower than a byte, are shown as the bytes of each row. For a byte of two
/// F4, PyTorch has a dtype.
fn view(dtype: Dtype, shape: &[u64], bytes: u64) -> (Dtype, Option<Vec<u64>>) {
    if dtype.block_elements() == 1 && dtype.block_bits().is_multiple_of(8) {
        return (dtype, None);
    }
    let rows = shape.split_last().and_then(|(&last, before)| {
        let mut shape = before.to_vec();
        shape.push(dtype.bytes(last)?);
        Some(shape)
    });
    match rows {
        Some(rows) if dtype == Dtype::F4 => (dtype, Some(rows)),
        Some(rows) => (Dtype::U8, Some(rows)),
        // A row ends inside a byte.
        None => (Dtype::U8, Some(vec![bytes])),
    }
}

/// A list in which equal numbers are one object, unless most differ: those of a byte or two in the file would
/// otherwise take 40 bytes each.
fn numbers<'py, T>(py: Python<'py>, values: &[T]) -> PyResult<Bound<'py, PyList>>
where
    T: Copy + Ord + IntoPyObject<'py, Target = PyInt, Output = Bound<'py, PyInt>>,
    PyErr: From<T::Error>,
{
    const MOST: usize = 1 << 16;
    let mut known = BTreeMap::new();
    let list = PyList::empty(py);
    for &value in values {
        let object = match known.get(&value) {
            Some(object) => Bound::clone(object),
            None => value.into_pyobject(py)?,
        };
        list.append(&object)?;
        if known.len() < MOST {
            known.insert(value, object);
        }
    }
    Ok(list)
}

fn python<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Bool(value) => value.into_pyobject(py)?.to_owned().into_any(),
        Value::Unsigned(value) => value.into_pyobject(py)?.into_any(),
        Value::Signed(value) => value.into_pyobject(py)?.into_any(),
        Value::Float(value) => value.into_pyobject(py)?.into_any(),
        Value::Text(value) => value.into_pyobject(py)?.into_any(),
        Value::Bools(values) => PyList::new(py, values)?.into_any(),
        Value::Bytes(values) => PyBytes::new(py, values).into_any(),
        Value::Unsigneds(values) => numbers(py, values)?.into_any(),
        Value::Signeds(values) => numbers(py, values)?.into_any(),
        Value::Floats(values) => PyList::new(py, values)?.into_any(),
        Value::Texts(values) => PyList::new(py, values)?.into_any(),
        Value::Lists(values) => {
            let values = values.iter().map(|value| python(py, value));
            PyList::new(py, values.collect::<PyResult<Vec<_>>>()?)?.into_any()
        }
        _ => return Err(PyNotImplementedError::new_err("a new type of metadata")),
    })
}
