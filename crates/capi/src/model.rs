//! `struct dmafile_model`: files that contain named tensors.

use crate::border::{self, Failure, Result, shared};
use crate::buffer::{c_string, empty};
use crate::{Buffer, Options, load, options};
use dmafile::Pattern;
use libc::{c_char, c_int};
use std::ffi::CString;
use std::sync::OnceLock;

/// The validated headers of a model. Its files stay open, so that later loads read the files that the
/// headers describe. Opaque.
///
/// Functions that take it `const` may be called by several threads at once. Any thread may use and free
/// it.
pub struct Model {
    inner: dmafile::Model,
    tensors: Vec<Tensor>,
    format: CString,
    json: OnceLock<CString>,
    /// The strings that `tensors` points to.
    _names: Vec<(CString, CString)>,
}

// SAFETY: the pointers in `tensors` lead to what the model and `_names` own, which do not change.
unsafe impl Send for Model {}
// SAFETY: as above.
unsafe impl Sync for Model {}

/// A tensor of a model. It and what it points to belong to the model. Later versions may append members,
/// so access it through the pointer that the library returns, and do not copy or index it.
#[repr(C)]
pub struct Tensor {
    /// Its name in UTF-8, unique in the model.
    pub name: *const c_char,
    /// Type of its elements, as the file format spells it: "F32", "BF16", "Q4_K".
    pub dtype: *const c_char,
    /// `ndim` sizes, the slowest-varying dimension first (C order).
    pub shape: *const u64,
    /// Number of dimensions; 0 for a scalar.
    pub ndim: usize,
    /// Offset of its first byte within the requested bytes of a buffer from dmafile_model_load.
    pub at: u64,
    /// Its size in bytes.
    pub bytes: u64,
}

impl Model {
    fn of(inner: dmafile::Model) -> Result<Self> {
        let names = |tensor: &dmafile::Tensor| {
            let name = CString::new(tensor.name.as_str()).map_err(|_| {
                let why = format!("the name of the tensor {:?} contains a NUL", tensor.name);
                Failure::new(libc::EBADMSG, "cannot describe the model", &why)
            })?;
            Ok((name, c_string(tensor.dtype.name())?))
        };
        let names: Vec<_> = inner.tensors().iter().map(names).collect::<Result<_>>()?;
        let told = inner.tensors().iter().zip(&names);
        let tensors = told.map(|(tensor, (name, dtype))| Tensor {
            name: name.as_ptr(),
            dtype: dtype.as_ptr(),
            shape: tensor.shape.as_ptr(),
            ndim: tensor.shape.len(),
            at: tensor.at,
            bytes: tensor.bytes,
        });
        Ok(Self {
            tensors: tensors.collect(),
            format: c_string(inner.format().to_string())?,
            json: OnceLock::new(),
            inner,
            _names: names,
        })
    }

    fn describe(&self) -> Result<CString> {
        let tensors: Vec<_> = self.inner.tensors().iter().collect();
        let json = serde_json::to_string(&self.inner.description(&tensors));
        // Its keys are strings, and JSON escapes NUL, so this cannot fail.
        c_string(json.unwrap_or_default())
    }
}

/// Opens a model: a safetensors or GGUF file, a `*.safetensors.index.json`, the first file of a split
/// GGUF (`...-00001-of-0000N.gguf`), or a folder with one of these, in which hidden files do not count.
/// Only headers are read. If several files have a tensor, the index says which one counts.
///
/// Returns 0 and stores the model in `*model`; free it with dmafile_model_free. On failure stores NULL
/// and returns -EBADMSG for files that are not a valid model or do not belong together, -EISDIR if the
/// folder contains no model, otherwise as dmafile_load.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_model_open(path: *const c_char, model: *mut *mut Model) -> c_int {
    border::status(|| {
        // SAFETY: the header requires null or a place for a pointer.
        unsafe { empty(model, "model")? };
        // SAFETY: the header requires null or a string.
        let opened = Model::of(dmafile::Model::open(unsafe { load::path(path)? })?)?;
        // SAFETY: it is not null, so it is a place for a pointer.
        unsafe { model.write(Box::into_raw(Box::new(opened))) };
        Ok(())
    })
}

/// The format of a model's files: "safetensors" or "gguf"; NULL with errno EINVAL for NULL. It
/// belongs to the model.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_model_format(model: *const Model) -> *const c_char {
    // SAFETY: the header requires null or a model that is alive.
    border::pointer(|| Ok(unsafe { shared(model, "model")? }.format.as_ptr()))
}

/// Everything in the headers of a model, metadata included, as one JSON object: the output of
/// `dmafile show --json`. Texts of a GGUF file that are not UTF-8 have `\xNN` in place of each other byte.
/// It belongs to the model; NULL with errno EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_model_json(model: *const Model) -> *const c_char {
    border::pointer(|| {
        // SAFETY: the header requires null or a model that is alive.
        let model = unsafe { shared(model, "model")? };
        if let Some(text) = model.json.get() {
            return Ok(text.as_ptr());
        }
        let text = model.describe()?;
        Ok(model.json.get_or_init(|| text).as_ptr())
    })
}

/// The number of tensors in a model; 0 with errno EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_model_tensor_count(model: *const Model) -> usize {
    // SAFETY: the header requires null or a model that is alive.
    border::value(|| Ok(unsafe { shared(model, "model")? }.tensors.len()))
}

/// The tensor with the given number, from 0 to dmafile_model_tensor_count - 1, in the order of their
/// bytes in a buffer. It belongs to the model.
///
/// NULL with errno ERANGE for any other number, EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_model_tensor(model: *const Model, index: usize) -> *const Tensor {
    border::pointer(|| {
        // SAFETY: the header requires null or a model that is alive.
        let tensors = &unsafe { shared(model, "model")? }.tensors;
        match tensors.get(index) {
            Some(tensor) => Ok(tensor),
            None => Err(Failure::new(
                libc::ERANGE,
                "no such tensor",
                &format!("number {index} of {}, counted from 0", tensors.len()),
            )),
        }
    })
}

/// The tensor with the given name. It belongs to the model.
///
/// NULL with errno ENOENT if there is no such tensor, EINVAL for NULL and for a name that is not UTF-8.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_model_find(
    model: *const Model,
    name: *const c_char,
) -> *const Tensor {
    border::pointer(|| {
        // SAFETY: the header requires null or a model that is alive.
        let model = unsafe { shared(model, "model")? };
        // SAFETY: the header requires null or a string.
        let name = unsafe { border::required(name, "name")? };
        // The engine finds the index by name; our tensors have the same order.
        let all = model.inner.tensors();
        let place = |tensor: &dmafile::Tensor| {
            let start = all.as_ptr().addr();
            ((&raw const *tensor).addr() - start) / size_of::<dmafile::Tensor>()
        };
        match model.inner.tensor(name).map(place) {
            Some(index) => Ok(&raw const model.tensors[index]),
            None => Err(Failure::new(
                libc::ENOENT,
                "no such tensor",
                &format!("nothing is called {name:?}"),
            )),
        }
    })
}

/// Loads all files of a model into one buffer, headers included; or, with `count` patterns, only the
/// tensors that match at least one of them. Either way a tensor starts at its `at`, counted from the
/// first requested byte. Anything else takes no memory, except for small gaps and in dma-bufs, and is
/// either zero or what the file has there.
///
/// A pattern is a name, a glob with `*`, `?`, `[...]` or `{...,...}`, or `re:` and a regular expression
/// for the whole name. `tensors` may be NULL if `count` is 0.
///
/// `options` are as in dmafile_load; `verify` computes one digest per file, and requires whole files.
///
/// Returns 0 and stores the buffer in `*buffer`; free it with dmafile_buffer_free. On failure stores
/// NULL and returns -ENOENT for a pattern that matches no tensor, -ENODATA if all matching tensors are
/// empty, -EINVAL for NULL and for an invalid pattern, otherwise as dmafile_load. The buffer outlives
/// the model.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_model_load(
    model: *const Model,
    options: *const Options,
    tensors: *const *const c_char,
    count: usize,
    buffer: *mut *mut Buffer,
) -> c_int {
    border::status(|| {
        // SAFETY: the header requires null or a place for a pointer.
        unsafe { empty(buffer, "buffer")? };
        // SAFETY: the header requires null or a model that is alive.
        let model = &unsafe { shared(model, "model")? }.inner;
        // SAFETY: the header requires null or options.
        let options = unsafe { options::copy(options)? };
        border::check(tensors.cast(), count, "tensors")?;
        let pattern = |index| {
            // SAFETY: not null; the header requires `count` pointers, each null or a string.
            let text = unsafe { border::required(*tensors.add(index), "a pattern")? };
            Ok(text.parse()?)
        };
        let tensors: Vec<Pattern> = (0..count).map(pattern).collect::<Result<_>>()?;
        let load = match &tensors[..] {
            [] => model.load(),
            chosen => model.load_tensors(chosen)?,
        };
        // SAFETY: the header requires strings, a token and a callback that stay valid until we return.
        let loaded = unsafe { options.apply(load)? }.run()?;
        // SAFETY: it is not null, so it is a place for a pointer.
        unsafe { Buffer::of(loaded)?.give(buffer) };
        Ok(())
    })
}

/// Frees a model and its tensors; NULL is a no-op. No other thread may be using it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_model_free(model: *mut Model) {
    // SAFETY: the header requires null or a model that is alive, freed once.
    unsafe { border::free(model) };
}
