//! The options of a load or a save, as keyword arguments.

use crate::error::{raise, usage};
use dmafile::{Load, Save};
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

/// Applies options by their names in the package's functions. None leaves an option at its
/// default.
pub(crate) fn apply(load: Load, options: &Bound<'_, PyDict>, more: &[&str]) -> PyResult<Load> {
    let mut load = load.names(&crate::error::Keywords);
    for (name, value) in options {
        let name = name.extract::<String>()?;
        if FILE.contains(&name.as_str()) && !more.contains(&name.as_str()) {
            let text = format!("'{name}' is not an option of this load");
            return Err(PyTypeError::new_err(text));
        }
        if value.is_none() {
            continue;
        }
        load = match name.as_str() {
            "to" => load.to(word(&value)?),
            "pages" => load.pages(word(&value)?),
            "method" => load.method(word(&value)?),
            "io" => load.io(word(&value)?),
            "allocation" => load.allocation(word(&value)?),
            "offset" => load.offset(size(&name, &value)?),
            "length" => load.length(size(&name, &value)?),
            "gather" => load.gather(size(&name, &value)?),
            "block" => load.block(size(&name, &value)?),
            // A number that does not fit is refused by the engine, which knows the range.
            "queue_depth" => {
                load.queue_depth(u32::try_from(size(&name, &value)?).unwrap_or(u32::MAX))
            }
            "verify" => load.verify(word(&value)?),
            "memory_check" => load.check_memory(value.extract()?),
            _ => {
                let text = format!("'{name}' is not an option of a load");
                return Err(PyTypeError::new_err(text));
            }
        };
    }
    Ok(load)
}

/// As [`apply`], for a save.
pub(crate) fn apply_to_save<'m>(save: Save<'m>, options: &Bound<'_, PyDict>) -> PyResult<Save<'m>> {
    let mut save = save.names(&crate::error::Keywords);
    for (name, value) in options {
        let name = name.extract::<String>()?;
        if value.is_none() {
            continue;
        }
        save = match name.as_str() {
            "offset" => save.in_place(size(&name, &value)?),
            "length" => save.length(size(&name, &value)?),
            "method" => save.method(word(&value)?),
            "io" => save.io(word(&value)?),
            "block" => save.block(size(&name, &value)?),
            "queue_depth" => {
                save.queue_depth(u32::try_from(size(&name, &value)?).unwrap_or(u32::MAX))
            }
            "verify" => save.verify(word(&value)?),
            "sync" => save.sync(value.extract()?),
            _ => {
                let text = format!("'{name}' is not an option of a save");
                return Err(PyTypeError::new_err(text));
            }
        };
    }
    Ok(save)
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
