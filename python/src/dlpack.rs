//! DLPack: passes memory to array libraries in a capsule
//! (<https://dmlc.github.io/dlpack/latest/>).

use crate::buffer::{Held, View};
use dlpark::allocation::fixed::Initialized;
use dlpark::ffi::{DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion};
use dlpark::metadata::Fixed;
use dlpark::{DlpackFlags, ManagedTensorBase};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use std::sync::Arc;

/// The CPU, as a device type and number.
pub(crate) const CPU: (i32, i32) = (1, 0);

/// The oldest version that supports read-only memory: every consumer with `max_version` accepts
/// it.
const VERSION: DLPackVersion = DLPackVersion { major: 1, minor: 0 };

enum Memory {
    Shared { _view: View },
    Copy { _bytes: Vec<u8> },
}

/// A capsule for all of `held`, or for a copy of it.
pub(crate) fn export(
    py: Python<'_>,
    held: Arc<Held>,
    versioned: bool,
    copy: bool,
) -> PyResult<Bound<'_, PyAny>> {
    let (memory, start, len, flags) = if copy {
        let mut bytes = held.copy(py)?;
        let (start, len) = (bytes.as_mut_ptr(), bytes.len());
        (
            Memory::Copy { _bytes: bytes },
            start,
            len,
            DlpackFlags::IS_COPIED,
        )
    } else {
        let mut flags = DlpackFlags::empty();
        flags.set(DlpackFlags::READ_ONLY, !held.is_writable());
        let (view, start, len) = View::of(py, held)?;
        (Memory::Shared { _view: view }, start, len, flags)
    };
    if versioned {
        let mut tensor = describe::<DLManagedTensorVersioned>(memory, start, len)?;
        let version = tensor.set_version(VERSION);
        version.expect("a version of the layout that is described");
        // SAFETY: `describe` has set what the memory says; the flags do, too.
        let tensor = unsafe {
            tensor.set_flags_unchecked(flags);
            tensor.finish()
        };
        return tensor.into_pyobject(py);
    }
    if flags.contains(DlpackFlags::READ_ONLY) {
        return Err(PyBufferError::new_err(
            "the memory is read-only, which needs DLPack 1.0: ask with max_version=(1, 0)",
        ));
    }
    let tensor = describe::<DLManagedTensor>(memory, start, len)?;
    // SAFETY: `describe` has set what the memory says.
    unsafe { tensor.finish() }.into_pyobject(py)
}

/// A tensor that owns the memory, whose `len` bytes stay at `start` for as long as it exists.
fn describe<T: ManagedTensorBase>(
    memory: Memory,
    start: *mut u8,
    len: usize,
) -> PyResult<Initialized<T, 1>> {
    let tensor = Fixed::new([len as i64], [1]).initialize_as::<T>(Box::new(memory));
    let mut tensor = tensor.map_err(|error| PyBufferError::new_err(error.to_string()))?;
    let described = tensor.set_dtype(DLDataType::U8).set_device(DLDevice::CPU);
    described.set_data(start.cast());
    Ok(tensor)
}
