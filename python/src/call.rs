//! All calls of Python code.
//!
//! The interpreter ends threads that want to continue in it while it shuts down. Up to Python 3.13 it does so by
//! pthread_exit(3), which unwinds their stacks, and ends the process when it comes to a frame of Rust. So whatever
//! may run Python code is called from here, where such a thread stops for good before that; the process ends with
//! its main thread. PyO3 does the same for a thread that takes the interpreter's lock itself.

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::ffi::{CStr, c_char, c_int};

// PyO3 declares these as functions that never unwind.
unsafe extern "C-unwind" {
    fn PyErr_CheckSignals() -> c_int;
    fn PyErr_WriteUnraisable(place: *mut ffi::PyObject);
    fn PyImport_ImportModule(name: *const c_char) -> *mut ffi::PyObject;
    fn PyObject_Call(
        callable: *mut ffi::PyObject,
        args: *mut ffi::PyObject,
        keywords: *mut ffi::PyObject,
    ) -> *mut ffi::PyObject;
}

/// Stops a thread that is being unwound.
struct Stop;

impl Drop for Stop {
    fn drop(&mut self) {
        loop {
            std::thread::park();
        }
    }
}

/// Runs `work`, and returns only if the interpreter does.
fn returning<T>(work: impl FnOnce() -> T) -> T {
    let stop = Stop;
    let done = work();
    std::mem::forget(stop);
    done
}

/// Calls `callable` with these arguments.
pub(crate) fn call<'py>(
    callable: &Bound<'py, PyAny>,
    args: impl IntoPyObject<'py, Target = PyTuple, Output = Bound<'py, PyTuple>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = callable.py();
    let args = args.into_pyobject(py).map_err(Into::into)?;
    // SAFETY: this thread is attached, and both are objects; keywords may be null. The result is a new reference,
    // or null with an exception.
    unsafe {
        let none = std::ptr::null_mut();
        let made = returning(|| PyObject_Call(callable.as_ptr(), args.as_ptr(), none));
        Bound::from_owned_ptr_or_err(py, made)
    }
}

/// Calls a method without arguments.
pub(crate) fn method<'py>(object: &Bound<'py, PyAny>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    call(&object.getattr(name)?, PyTuple::empty(object.py()))
}

/// Something that is defined in a module.
pub(crate) fn import<'py>(
    py: Python<'py>,
    module: &CStr,
    name: &str,
) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: as in `call`.
    let module = unsafe {
        let module = returning(|| PyImport_ImportModule(module.as_ptr()));
        Bound::from_owned_ptr_or_err(py, module)?
    };
    module.getattr(name)
}

/// Calls `callable` without arguments, on a thread that nothing waits for: it reports errors. Then releases it. Does
/// nothing if the interpreter shuts down.
pub(crate) fn call_from_thread(callable: Py<PyAny>) {
    Python::try_attach(|py| {
        let callable = callable.into_bound(py);
        if let Err(error) = call(&callable, PyTuple::empty(py)) {
            error.restore(py);
            // SAFETY: this thread is attached, an exception is set, and the place is an object.
            returning(|| unsafe { PyErr_WriteUnraisable(callable.as_ptr()) });
        }
        returning(|| drop(callable));
    });
}

/// Calls `work`, which runs Python code by [`call`] only, on a thread of the package; None if the interpreter shuts
/// down.
pub(crate) fn on_thread<T>(work: impl FnOnce(Python<'_>) -> T) -> Option<T> {
    Python::try_attach(work)
}

/// Runs the handlers of signals that have arrived.
pub(crate) fn handle_signals(py: Python<'_>) -> PyResult<()> {
    // SAFETY: this thread is attached.
    match returning(|| unsafe { PyErr_CheckSignals() }) {
        0 => Ok(()),
        _ => Err(PyErr::fetch(py)),
    }
}
