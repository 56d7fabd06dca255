//! The options of a load or a save, as keyword arguments.

use crate::error::{raise, usage};
use dmafile::{Allocation, Io, Kind, Load, Method, Pages, Save, Verify};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::str::FromStr;

/// Options that only the load of a file has, in addition to those of any load.
pub(crate) const FILE: &[&str] = &["to", "offset", "length"];
/// The same for a file that is one of several, each loaded completely.
pub(crate) const SOURCE: &[&str] = &["to"];
/// The same for a file that does not stay in memory.
pub(crate) const STREAM: &[&str] = &["offset", "length"];
/// The same for a model, whose kind of memory is not an option.
pub(crate) const MODEL: &[&str] = &[];

/// What an option changes in a load. It needs no interpreter, so that any thread may apply it.
type OfLoad = Box<dyn Fn(Load) -> Load + Send + Sync>;
/// The same for a save.
type OfSave = Box<dyn for<'m> Fn(Save<'m>) -> Save<'m> + Send + Sync>;

/// Applies options by their names in the package's functions. None leaves an option at its
/// default.
pub(crate) fn apply(load: Load, options: &Bound<'_, PyDict>, more: &[&str]) -> PyResult<Load> {
    Ok(tuning(options, more)?(load))
}

/// As [`apply`], for a save.
pub(crate) fn apply_to_save<'m>(save: Save<'m>, options: &Bound<'_, PyDict>) -> PyResult<Save<'m>> {
    Ok(save_tuning(options)?(save))
}

/// The options of several loads, after checking them.
pub(crate) fn tuning(
    options: &Bound<'_, PyDict>,
    more: &[&str],
) -> PyResult<impl Fn(Load) -> Load + Send + Sync + 'static> {
    let mut all: Vec<OfLoad> = Vec::new();
    for (name, value) in options {
        let name = name.extract::<String>()?;
        if FILE.contains(&name.as_str()) && !more.contains(&name.as_str()) {
            let text = format!("'{name}' is not an option of this load");
            return Err(PyTypeError::new_err(text));
        }
        if value.is_none() {
            continue;
        }
        all.push(of_load(&name, &value)?);
    }
    Ok(move |load: Load| {
        let load = load.names(&crate::error::Keywords);
        all.iter().fold(load, |load, set| set(load))
    })
}

fn of_load(name: &str, value: &Bound<'_, PyAny>) -> PyResult<OfLoad> {
    macro_rules! set {
        ($option:ident, $value:expr) => {{
            let value = $value;
            Box::new(move |load: Load| load.$option(value.clone()))
        }};
    }
    Ok(match name {
        "to" => set!(to, kind(value)?),
        "pages" => set!(pages, word::<Pages>(value)?),
        "method" => set!(method, word::<Method>(value)?),
        "io" => set!(io, word::<Io>(value)?),
        "allocation" => set!(allocation, word::<Allocation>(value)?),
        "offset" => set!(offset, size(name, value)?),
        "length" => set!(length, size(name, value)?),
        "chunk" => set!(chunk, size(name, value)?),
        "block" => set!(block, size(name, value)?),
        "queue_depth" => set!(queue_depth, depth(name, value)?),
        "verify" => set!(verify, word::<Verify>(value)?),
        "check_memory" => set!(check_memory, value.extract::<bool>()?),
        _ => {
            let text = format!("'{name}' is not an option of a load");
            return Err(PyTypeError::new_err(text));
        }
    })
}

/// As [`tuning`], for saves.
pub(crate) fn save_tuning(
    options: &Bound<'_, PyDict>,
) -> PyResult<impl for<'m> Fn(Save<'m>) -> Save<'m> + Send + Sync + 'static> {
    let mut all: Vec<OfSave> = Vec::new();
    for (name, value) in options {
        if !value.is_none() {
            all.push(of_save(&name.extract::<String>()?, &value)?);
        }
    }
    Ok(with_all(all))
}

// A closure of this form gets its lifetime from the bound only where it is passed as an argument or returned.
fn with_all(all: Vec<OfSave>) -> impl for<'m> Fn(Save<'m>) -> Save<'m> + Send + Sync + 'static {
    move |save| {
        let save = save.names(&crate::error::Keywords);
        all.iter().fold(save, |save, set| set(save))
    }
}

fn of_save(name: &str, value: &Bound<'_, PyAny>) -> PyResult<OfSave> {
    macro_rules! set {
        ($option:ident, $value:expr) => {{
            let value = $value;
            Box::new(move |save| save.$option(value.clone()))
        }};
    }
    Ok(match name {
        "offset" => set!(offset, size(name, value)?),
        "length" => set!(length, size(name, value)?),
        "method" => set!(method, word::<Method>(value)?),
        "io" => set!(io, word::<Io>(value)?),
        "block" => set!(block, size(name, value)?),
        "queue_depth" => set!(queue_depth, depth(name, value)?),
        "verify" => set!(verify, word::<Verify>(value)?),
        "sync" => set!(sync, value.extract::<bool>()?),
        _ => {
            let text = format!("'{name}' is not an option of a save");
            return Err(PyTypeError::new_err(text));
        }
    })
}

/// A number that does not fit is refused by the engine, which knows the range.
fn depth(name: &str, value: &Bound<'_, PyAny>) -> PyResult<u32> {
    Ok(u32::try_from(size(name, value)?).unwrap_or(u32::MAX))
}

pub(crate) fn kind(value: &Bound<'_, PyAny>) -> PyResult<Kind> {
    let text = value.extract::<String>()?;
    dmafile_gpu::parse_kind(&text).map_err(|error| raise(value.py(), &error, None))
}

pub(crate) fn word<T: FromStr<Err = dmafile::Error>>(value: &Bound<'_, PyAny>) -> PyResult<T> {
    let text = value.extract::<String>()?;
    text.parse()
        .map_err(|error| raise(value.py(), &error, None))
}

pub(crate) fn size(name: &str, value: &Bound<'_, PyAny>) -> PyResult<u64> {
    value.extract().map_err(|error: PyErr| {
        let py = value.py();
        if error.is_instance_of::<PyOverflowError>(py) {
            // An integer may be too long for the interpreter to convert it to text.
            let value = value
                .str()
                .map_or("it".to_string(), |text| text.to_string());
            let text = format!("{name}: {value} is out of range, 0 to {}", u64::MAX);
            usage(py, &text)
        } else {
            error
        }
    })
}
