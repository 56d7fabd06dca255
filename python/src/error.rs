//! Converts errors of the engine to exceptions of the package.

use crate::call;
use dmafile::internal::{is_url, without_secrets};
use dmafile::{Error, ErrorKind, Names, Opt};
use pyo3::prelude::*;
use rustix::io::Errno;
use std::any::Any;
use std::borrow::Cow;
use std::path::Path;

/// Names options as keyword arguments.
pub(crate) struct Keywords;

impl Names for Keywords {
    fn set(&self, option: Opt, value: &str) -> String {
        let name = self.option(option);
        match value {
            "false" => format!("{name}=False"),
            _ => format!("{name}=\"{value}\""),
        }
    }
}

/// The exception for an error; `dmafile._errors` picks its class by kind and errno.
pub(crate) fn raise(py: Python<'_>, error: &Error, path: Option<&Path>) -> PyErr {
    let kind = match error.kind() {
        ErrorKind::Usage => "usage",
        ErrorKind::Cancelled => "cancelled",
        _ => "failed",
    };
    of_kind(py, kind, error, path)
}

/// As [`raise`], for the headers of a model: an invalid or missing header is a
/// `SafetensorError`.
pub(crate) fn unsound(py: Python<'_>, error: &Error, path: Option<&Path>) -> PyErr {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::BADMSG | Errno::NODATA) => of_kind(py, "safetensors", error, path),
        _ => raise(py, error, path),
    }
}

fn of_kind(py: Python<'_>, kind: &str, error: &Error, path: Option<&Path>) -> PyErr {
    make(
        py,
        kind,
        error.raw_os_error(),
        &error.render(&Keywords),
        path.filter(|path| !path.as_os_str().is_empty()),
        &error.remedy().render(&Keywords),
    )
}

/// An invalid request that was detected before calling the engine.
pub(crate) fn usage(py: Python<'_>, text: &str) -> PyErr {
    make(py, "usage", None, text, None, "")
}

/// Private memory has no descriptor.
pub(crate) fn no_descriptor(py: Python<'_>) -> PyErr {
    let errno = Errno::OPNOTSUPP.raw_os_error();
    let remedy = "load it to=\"memfd\"";
    let text =
        format!("cannot return a descriptor: anon: private memory has none (EOPNOTSUPP); {remedy}");
    make(py, "failed", Some(errno), &text, None, remedy)
}

/// Several dma-bufs do not have a single descriptor.
pub(crate) fn several_descriptors(py: Python<'_>, kind: &str, count: usize) -> PyErr {
    let errno = Errno::FBIG.raw_os_error();
    let remedy = "use `dma_bufs`, or raise size_limit_mb of udmabuf";
    let text = format!(
        "cannot return a descriptor: {kind}: it consists of {count} dma-bufs (EFBIG); {remedy}"
    );
    make(py, "failed", Some(errno), &text, None, remedy)
}

/// The thread of a load could not be started.
pub(crate) fn no_thread(py: Python<'_>, error: &std::io::Error, path: &Path) -> PyErr {
    let text = format!("cannot start the thread of the load: {error}");
    let remedy = "raise the limit on threads: ulimit -u, pids.max of the cgroup";
    make(
        py,
        "failed",
        error.raw_os_error(),
        &text,
        Some(path),
        remedy,
    )
}

/// A load panicked.
pub(crate) fn panicked(py: Python<'_>, cause: &(dyn Any + Send), path: &Path) -> PyErr {
    let text = cause.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| cause.downcast_ref::<&str>().copied());
    let text = text.unwrap_or("panic without a message");
    let text =
        format!("dmafile: internal error in dmafile, please report it: {text} (ENOTRECOVERABLE)");
    let errno = Errno::NOTRECOVERABLE.raw_os_error();
    make(py, "failed", Some(errno), &text, Some(path), "")
}

fn make(
    py: Python<'_>,
    kind: &str,
    errno: Option<i32>,
    text: &str,
    path: Option<&Path>,
    remedy: &str,
) -> PyErr {
    let path = path.map(|path| match path.to_str() {
        Some(url) if is_url(url) => Cow::Owned(without_secrets(url).into()),
        _ => Cow::Borrowed(path.as_os_str()),
    });
    let args = (kind, errno, text, path.as_deref(), remedy);
    let make = call::import(py, c"dmafile._errors", "make");
    match make.and_then(|make| call::call(&make, args)) {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    }
}
