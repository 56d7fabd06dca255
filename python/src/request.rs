//! The options of a load or a save, as keyword arguments: those of the engine's list.

use crate::error::{Keywords, raise, usage};
use dmafile::{Kind, Load, Operation, Opt, OptionInfo, OptionType, OptionValue, Origin, Save};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::str::FromStr;

/// Options that only the load of a file has, in addition to those of any load.
pub(crate) const FILE: &[Opt] = &[Opt::To, Opt::Offset, Opt::Length];
/// The same for a file that is one of several, each loaded completely.
pub(crate) const SOURCE: &[Opt] = &[Opt::To];
/// The same for a file that does not stay in memory.
pub(crate) const STREAM: &[Opt] = &[Opt::Offset, Opt::Length];
/// The same for a model, whose kind of memory is not an option.
pub(crate) const MODEL: &[Opt] = &[];

/// Applies options by their names in the package's functions. None leaves an option at its
/// default.
pub(crate) fn apply(load: Load, options: &Bound<'_, PyDict>, more: &[Opt]) -> PyResult<Load> {
    Ok(tuning(options, more)?(load))
}

/// As [`apply`], for a save.
pub(crate) fn apply_to_save<'m>(save: Save<'m>, options: &Bound<'_, PyDict>) -> PyResult<Save<'m>> {
    Ok(save_tuning(options)?(save))
}

/// The options of several loads. Errors in them are raised here.
pub(crate) fn tuning(
    options: &Bound<'_, PyDict>,
    more: &[Opt],
) -> PyResult<impl Fn(Load) -> Load + Send + Sync + 'static> {
    let has = |option| !FILE.contains(&option) || more.contains(&option);
    let all = values(Operation::Load, "this load", options, has)?;
    let tune = move |load: Load| {
        load.names(&Keywords)
            .kinds(dmafile_gpu::parse_kind)
            .set_all(&all)
    };
    let checked = tune(Load::new("")).check();
    checked.map_err(|error| raise(options.py(), &error, None))?;
    Ok(tune)
}

/// As [`tuning`], for saves.
pub(crate) fn save_tuning(
    options: &Bound<'_, PyDict>,
) -> PyResult<impl for<'m> Fn(Save<'m>) -> Save<'m> + Send + Sync + 'static> {
    let tune = saving(values(Operation::Save, "a save", options, |_| true)?);
    let checked = tune(Save::new(Origin::File("".into()), "")).check();
    checked.map_err(|error| raise(options.py(), &error, None))?;
    Ok(tune)
}

// A closure of this form gets its lifetime from the bound only where it is passed as an argument or returned.
fn saving(
    all: Vec<(Opt, OptionValue)>,
) -> impl for<'m> Fn(Save<'m>) -> Save<'m> + Send + Sync + 'static {
    move |save| save.names(&Keywords).set_all(&all)
}

/// The options that were given, with their values. They need no interpreter, so that any thread may set them.
fn values(
    of: Operation,
    what: &str,
    options: &Bound<'_, PyDict>,
    has: impl Fn(Opt) -> bool,
) -> PyResult<Vec<(Opt, OptionValue)>> {
    let mut all = Vec::new();
    for (name, value) in options {
        let name = name.extract::<String>()?;
        let info = OptionInfo::named(of, &name)
            .filter(|info| info.option != Opt::Tensors && has(info.option));
        let info = info
            .ok_or_else(|| PyTypeError::new_err(format!("'{name}' is not an option of {what}")))?;
        let value = match info.accepts {
            _ if value.is_none() => continue,
            OptionType::Flag(_) => value.extract::<bool>()?.into(),
            OptionType::Bytes(..) | OptionType::Count(..) => size(&name, &value)?.into(),
            _ => value.extract::<String>()?.as_str().into(),
        };
        all.push((info.option, value));
    }
    Ok(all)
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
            let text = format!("{name}: {value} is out of range: 0 to {}", u64::MAX);
            usage(py, &text)
        } else {
            error
        }
    })
}
